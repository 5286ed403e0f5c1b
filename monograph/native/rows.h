// Registers of WIDTH numbers of float32, of which HELD can take sums without any going back to memory; and threads.

#include <cmath>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace monograph {

#if defined(__AVX512F__)
using Row = __m512;
constexpr int WIDTH = 16, HELD = 24;
inline Row zero() { return _mm512_setzero_ps(); }
inline Row all(float x) { return _mm512_set1_ps(x); }
inline Row plus(Row a, Row b) { return _mm512_add_ps(a, b); }
inline Row minus(Row a, Row b) { return _mm512_sub_ps(a, b); }
inline Row times(Row a, Row b) { return _mm512_mul_ps(a, b); }
inline Row divided(Row a, Row b) { return _mm512_div_ps(a, b); }
inline Row larger(Row a, Row b) { return _mm512_max_ps(a, b); }
inline Row unless_below(Row x, Row y) {  // 0 where x is 0 or less
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, zero(), _CMP_NLE_UQ), y);
}
inline Row fused(Row a, Row b, Row c) { return _mm512_fmadd_ps(a, b, c); }
inline Row nearest(Row x) { return _mm512_roundscale_ps(x, 8); }
inline Row limited(Row x, float low, float high) {  // NaN stays
  return _mm512_min_ps(all(high), _mm512_max_ps(all(low), x));
}
inline Row doubled(Row x, Row n) { return _mm512_scalef_ps(x, n); }
inline float sum_of(Row x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Row x) { return _mm512_reduce_max_ps(x); }
template <int N> inline Row get(const float* p) {
  if constexpr (N >= 16) return _mm512_loadu_ps(p);
  else return _mm512_maskz_loadu_ps((__mmask16)((1u << N) - 1), p);
}
template <int N> inline void put(float* p, Row x) {
  if constexpr (N >= 16) _mm512_storeu_ps(p, x);
  else _mm512_mask_storeu_ps(p, (__mmask16)((1u << N) - 1), x);
}
#elif defined(__AVX2__) && defined(__FMA__)
using Row = __m256;
constexpr int WIDTH = 8, HELD = 12;
inline Row zero() { return _mm256_setzero_ps(); }
inline Row all(float x) { return _mm256_set1_ps(x); }
inline Row plus(Row a, Row b) { return _mm256_add_ps(a, b); }
inline Row minus(Row a, Row b) { return _mm256_sub_ps(a, b); }
inline Row times(Row a, Row b) { return _mm256_mul_ps(a, b); }
inline Row divided(Row a, Row b) { return _mm256_div_ps(a, b); }
inline Row larger(Row a, Row b) { return _mm256_max_ps(a, b); }
inline Row unless_below(Row x, Row y) {  // 0 where x is 0 or less
  return _mm256_and_ps(_mm256_cmp_ps(x, zero(), _CMP_NLE_UQ), y);
}
inline Row fused(Row a, Row b, Row c) { return _mm256_fmadd_ps(a, b, c); }
inline Row nearest(Row x) { return _mm256_round_ps(x, 8); }
inline Row limited(Row x, float low, float high) {  // NaN stays
  return _mm256_min_ps(all(high), _mm256_max_ps(all(low), x));
}
inline Row doubled(Row x, Row n) {  // in two steps: the whole power may be no float
  const __m256i times = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(times, 1), bias = _mm256_set1_epi32(127);
  const __m256i one = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i other = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(times, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(one)), _mm256_castsi256_ps(other));
}
inline float sum_of(Row x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest_of(Row x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
template <int N> inline __m256i mask() {
  return _mm256_setr_epi32(-(N > 0), -(N > 1), -(N > 2), -(N > 3), -(N > 4), -(N > 5), -(N > 6), 0);
}
template <int N> inline Row get(const float* p) {
  if constexpr (N >= 8) return _mm256_loadu_ps(p);
  else return _mm256_maskload_ps(p, mask<N>());
}
template <int N> inline void put(float* p, Row x) {
  if constexpr (N >= 8) _mm256_storeu_ps(p, x);
  else _mm256_maskstore_ps(p, mask<N>(), x);
}
#else
struct Row { float at[4]; };
constexpr int WIDTH = 4, HELD = 12;
inline Row zero() { return {}; }
inline Row all(float x) { return {{x, x, x, x}}; }
inline Row plus(Row a, Row b) {
  for (int i = 0; i < 4; i++) a.at[i] += b.at[i];
  return a;
}
inline Row minus(Row a, Row b) {
  for (int i = 0; i < 4; i++) a.at[i] -= b.at[i];
  return a;
}
inline Row times(Row a, Row b) {
  for (int i = 0; i < 4; i++) a.at[i] *= b.at[i];
  return a;
}
inline Row divided(Row a, Row b) {
  for (int i = 0; i < 4; i++) a.at[i] /= b.at[i];
  return a;
}
inline Row larger(Row a, Row b) {
  for (int i = 0; i < 4; i++) a.at[i] = a.at[i] > b.at[i] ? a.at[i] : b.at[i];
  return a;
}
inline Row unless_below(Row x, Row y) {  // 0 where x is 0 or less
  for (int i = 0; i < 4; i++) y.at[i] = x.at[i] <= 0 ? 0 : y.at[i];
  return y;
}
inline Row fused(Row a, Row b, Row c) {
  for (int i = 0; i < 4; i++) c.at[i] += a.at[i] * b.at[i];
  return c;
}
inline Row nearest(Row x) {
  for (int i = 0; i < 4; i++) x.at[i] = std::nearbyint(x.at[i]);
  return x;
}
inline Row limited(Row x, float low, float high) {  // NaN stays
  for (int i = 0; i < 4; i++) x.at[i] = x.at[i] < low ? low : x.at[i] > high ? high : x.at[i];
  return x;
}
inline Row doubled(Row x, Row n) {
  for (int i = 0; i < 4; i++) x.at[i] = n.at[i] == n.at[i] ? std::ldexp(x.at[i], (int)n.at[i]) : n.at[i];
  return x;
}
inline float sum_of(Row x) { return x.at[0] + x.at[1] + (x.at[2] + x.at[3]); }
inline float largest_of(Row x) {
  const float a = x.at[0] > x.at[1] ? x.at[0] : x.at[1], b = x.at[2] > x.at[3] ? x.at[2] : x.at[3];
  return a > b ? a : b;
}
template <int N> inline Row get(const float* p) {
  Row x = {};
  for (int i = 0; i < (N < 4 ? N : 4); i++) x.at[i] = p[i];
  return x;
}
template <int N> inline void put(float* p, Row x) {
  for (int i = 0; i < (N < 4 ? N : 4); i++) p[i] = x.at[i];
}
#endif

// The v-th of the registers that N numbers fill; the last may be filled in part.
template <int N> constexpr int REGISTERS = (N + WIDTH - 1) / WIDTH;
template <int N> inline Row get_nth(const float* p, int v) {
  return v < REGISTERS<N> - 1 ? get<WIDTH>(p + v * WIDTH) : get<N - (REGISTERS<N> - 1) * WIDTH>(p + v * WIDTH);
}
template <int N> inline void put_nth(float* p, int v, Row x) {
  if (v < REGISTERS<N> - 1) put<WIDTH>(p + v * WIDTH, x);
  else put<N - (REGISTERS<N> - 1) * WIDTH>(p + v * WIDTH, x);
}

// exp(x) is 2^n (1 + more), where `more` is a polynomial of what is left of x, at most ln(2) / 2.
struct Exponential { Row n, more; };
inline Exponential parts_of_exponential(Row x) {
  const Row n = nearest(times(x, all(1.44269504088896341f)));
  const Row r = fused(n, all(-1.42860682030941723e-6f), fused(n, all(-0.693145751953125f), x));
  Row y = all(1.9875691500e-4f);
  y = fused(y, r, all(1.3981999507e-3f));
  y = fused(y, r, all(8.3334519073e-3f));
  y = fused(y, r, all(4.1665795894e-2f));
  y = fused(y, r, all(1.6666665459e-1f));
  y = fused(y, r, all(5.0000001201e-1f));
  return {n, fused(times(r, r), y, r)};
}

// exp(x) within an ulp or so.
inline Row exponential(Row x) {
  const Exponential made = parts_of_exponential(limited(x, -104.0f, 89.0f));  // beyond, it is 0 and infinite
  return doubled(plus(made.more, all(1.0f)), made.n);
}

// Do `count` things, shared among threads; a team of one would cost as much as a small product.
template <int THREADS, class Do>
inline void share(int count, const Do& take) {
  if constexpr (THREADS > 1) {
#pragma omp parallel for num_threads(THREADS)
    for (int i = 0; i < count; i++) take(i);
  } else
    for (int i = 0; i < count; i++) take(i);
}
}  // namespace monograph
