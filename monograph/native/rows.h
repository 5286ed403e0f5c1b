// Registers of WIDTH numbers of float32, of which HELD can take sums without any going back to memory; and threads.

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
inline Row fused(Row a, Row b, Row c) { return _mm512_fmadd_ps(a, b, c); }
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
inline Row fused(Row a, Row b, Row c) { return _mm256_fmadd_ps(a, b, c); }
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
inline Row fused(Row a, Row b, Row c) {
  for (int i = 0; i < 4; i++) c.at[i] += a.at[i] * b.at[i];
  return c;
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
