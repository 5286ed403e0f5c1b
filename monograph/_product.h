// A product of two small matrices of float32, c = a b + bias: all sizes and steps are known when it is compiled.
//
// The sums of a block of c stay in registers while k runs. `Row` is a register of WIDTH numbers, HELD of them take sums.
// Where the columns of b lie whole, a block of columns is first written row by row.

#pragma once
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

// Write N columns of b, which lie whole, row by row; on x86 in squares of four by four.
template <int K, int N, int STEP>
inline void transpose(const float* b, float* rows) {
#if defined(__x86_64__) || defined(_M_X64)
  constexpr int FOURS = N / 4 * 4;
  for (int n = 0; n < FOURS; n += 4) {
    const float* from = b + n * STEP;
    float* to = rows + n;
    int k = 0;
    for (; k + 4 <= K; k += 4) {
      __m128 row0 = _mm_loadu_ps(from + k), row1 = _mm_loadu_ps(from + STEP + k);
      __m128 row2 = _mm_loadu_ps(from + 2 * STEP + k), row3 = _mm_loadu_ps(from + 3 * STEP + k);
      _MM_TRANSPOSE4_PS(row0, row1, row2, row3);
      _mm_storeu_ps(to + k * N, row0), _mm_storeu_ps(to + (k + 1) * N, row1);
      _mm_storeu_ps(to + (k + 2) * N, row2), _mm_storeu_ps(to + (k + 3) * N, row3);
    }
    for (; k < K; k++)
      for (int i = 0; i < 4; i++) to[k * N + i] = from[i * STEP + k];
  }
#else
  constexpr int FOURS = 0;
#endif
  if constexpr (FOURS < N)
    for (int n = FOURS; n < N; n++)
      for (int k = 0; k < K; k++) rows[k * N + n] = b[n * STEP + k];
}

// ROWS rows and N columns of c; N is at most 4 * WIDTH. SUMS partial sums go over every SUMS-th k: they wait less for
// each other, and round less.
template <int SUMS, int ROWS, int K, int N, int AM, int AK, int BK, int CM>
inline void tile(const float* a, const float* b, const float* bias, float* c) {
  constexpr int V = (N + WIDTH - 1) / WIDTH, LAST = N - (V - 1) * WIDTH;
  Row sum[SUMS][ROWS][V];
#pragma GCC unroll 4
  for (int v = 0; v < V; v++)
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
      for (int s = 1; s < SUMS; s++) sum[s][r][v] = zero();
      sum[0][r][v] = bias == nullptr ? zero() : v < V - 1 ? get<WIDTH>(bias + v * WIDTH) : get<LAST>(bias + v * WIDTH);
    }
  for (int k0 = 0; k0 < K; k0 += SUMS)
#pragma GCC unroll 4
    for (int s = 0; s < SUMS; s++) {
      const int k = k0 + s;
      if (K % SUMS > 0 && k >= K) break;
      Row x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        x[v] = v < V - 1 ? get<WIDTH>(b + k * BK + v * WIDTH) : get<LAST>(b + k * BK + v * WIDTH);
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++) {
        Row y = all(a[r * AM + k * AK]);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sum[s][r][v] = fused(y, x[v], sum[s][r][v]);
      }
    }
#pragma GCC unroll 24
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      Row total = sum[0][r][v];
#pragma GCC unroll 4
      for (int s = 1; s < SUMS; s++) total = plus(total, sum[s][r][v]);
      if (v < V - 1) put<WIDTH>(c + r * CM + v * WIDTH, total);
      else put<LAST>(c + r * CM + v * WIDTH, total);
    }
}

template <int M, int K, int N, int AM, int AK, int BK, int CM>
inline void columns(const float* a, const float* b, const float* bias, float* c) {
  constexpr int V = (N + WIDTH - 1) / WIDTH, MOST = HELD / V / 2, BLOCKS = (M + MOST - 1) / MOST;
  constexpr int ROWS = (M + BLOCKS - 1) / BLOCKS, REST = M % ROWS;
  constexpr int SUMS = ROWS * V <= HELD / 4 ? 4 : 2;
  int m = 0;
  for (; m + ROWS <= M; m += ROWS) tile<SUMS, ROWS, K, N, AM, AK, BK, CM>(a + m * AM, b, bias, c + m * CM);
  if constexpr (REST > 0) tile<SUMS, REST, K, N, AM, AK, BK, CM>(a + m * AM, b, bias, c + m * CM);
}

// COUNT columns of c, from the n-th on; COUNT is at most 4 * WIDTH.
template <int COUNT, int M, int K, int N, int AM, int AK, int BK, int BN>
inline void block(int n, const float* a, const float* b, const float* bias, float* c) {
  const float* some = bias == nullptr ? nullptr : bias + n;
  if constexpr (BN == 1) columns<M, K, COUNT, AM, AK, BK, N>(a, b + n, some, c + n);
  else {
    alignas(64) float rows[K * COUNT];
    transpose<K, COUNT, BN>(b + n * BN, rows);
    columns<M, K, COUNT, AM, AK, COUNT, N>(a, rows, some, c + n);
  }
}

// c = a b + bias, or without `bias` if it is null; a is M x K, b is K x N, c lies row by row.
// AM and BK are the steps from one row to the next, AK and BN from one column to the next; BK or BN is 1.
template <int M, int K, int N, int AM, int AK, int BK, int BN, int THREADS>
inline void product(const float* a, const float* b, const float* bias, float* c) {
  constexpr int MOST = 4 * WIDTH, BLOCKS = N / MOST, REST = N % MOST;
  if constexpr (THREADS > 1) {
#pragma omp parallel for num_threads(THREADS)
    for (int i = 0; i < BLOCKS + (REST > 0); i++)
      if (i < BLOCKS) block<MOST, M, K, N, AM, AK, BK, BN>(i * MOST, a, b, bias, c);
      else if constexpr (REST > 0) block<REST, M, K, N, AM, AK, BK, BN>(BLOCKS * MOST, a, b, bias, c);
  } else {
    if constexpr (BLOCKS > 0)
      for (int i = 0; i < BLOCKS; i++) block<MOST, M, K, N, AM, AK, BK, BN>(i * MOST, a, b, bias, c);
    if constexpr (REST > 0) block<REST, M, K, N, AM, AK, BK, BN>(BLOCKS * MOST, a, b, bias, c);
  }
}
}  // namespace monograph
