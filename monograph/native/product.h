// A product of two matrices of float32, c = a b + bias: all sizes and steps are known when it is compiled.
//
// The sums of a tile of c stay in registers while k runs through a piece; pieces are added in c. A piece of up to
// 4 * WIDTH columns of b stays in the nearest cache while tiles go down the rows. Where there are many rows, chunks of
// them are taken one after the other, so that what is read of a stays in the next cache.

namespace monograph {

constexpr int PIECE = 128, MANY_ROWS = 12, ROWS_OF_A_PART = 96, MOST_ROWS_OF_A_CHUNK = 384;
constexpr int WIDEST = (WIDTH == 16 ? 4 : 2) * WIDTH;  // columns of a tile

// to = the transpose of SQUARE rows of from
#if defined(__AVX512F__)
constexpr int SQUARE = 16;
inline void square(const float* from, int step, float* to, int width) {
  __m512 r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(from + i * step);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = (__m512)_mm512_unpacklo_pd((__m512d)t[i], (__m512d)t[i + 2]);
    r[i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)t[i], (__m512d)t[i + 2]);
    r[i + 2] = (__m512)_mm512_unpacklo_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
    r[i + 3] = (__m512)_mm512_unpackhi_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    _mm512_storeu_ps(to + i * width, _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_ps(to + (i + 4) * width, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_ps(to + (i + 8) * width, _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_ps(to + (i + 12) * width, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd));
  }
}
#elif defined(__x86_64__) || defined(_M_X64)
constexpr int SQUARE = 4;
inline void square(const float* from, int step, float* to, int width) {
  __m128 row0 = _mm_loadu_ps(from), row1 = _mm_loadu_ps(from + step);
  __m128 row2 = _mm_loadu_ps(from + 2 * step), row3 = _mm_loadu_ps(from + 3 * step);
  _MM_TRANSPOSE4_PS(row0, row1, row2, row3);
  _mm_storeu_ps(to, row0), _mm_storeu_ps(to + width, row1);
  _mm_storeu_ps(to + 2 * width, row2), _mm_storeu_ps(to + 3 * width, row3);
}
#else
constexpr int SQUARE = 1;
inline void square(const float* from, int, float* to, int) { *to = *from; }
#endif

// K rows of N columns of b, which lie column by column, row by row.
template <int K, int N, int STEP>
inline void transpose(const float* b, float* rows) {
  constexpr int N0 = N / SQUARE * SQUARE, K0 = K / SQUARE * SQUARE;
  for (int n = 0; n < N0; n += SQUARE)
    for (int k = 0; k < K0; k += SQUARE) square(b + n * STEP + k, STEP, rows + k * N + n, N);
  if constexpr (K0 < K)
    for (int k = K0; k < K; k++)
      for (int n = 0; n < N0; n++) rows[k * N + n] = b[n * STEP + k];
  if constexpr (N0 < N)
    for (int n = N0; n < N; n++)
      for (int k = 0; k < K; k++) rows[k * N + n] = b[n * STEP + k];
}

// K rows of N columns of b, which lie row by row, without gaps.
template <int K, int N, int STEP>
inline void copy(const float* b, float* rows) {
  for (int k = 0; k < K; k++)
#pragma GCC unroll 4
    for (int v = 0; v < REGISTERS<N>; v++) put_nth<N>(rows + k * N, v, get_nth<N>(b + k * STEP, v));
}

// ROWS rows and N columns of c, or what K more add to them if MORE. SUMS partial sums go over every SUMS-th k: where
// the tile is small, they wait less for each other.
template <bool MORE, int ROWS, int K, int N, int AM, int AK, int BK, int CM>
inline void tile(const float* a, const float* b, const float* bias, float* c) {
  constexpr int V = REGISTERS<N>;
  constexpr int SUMS = ROWS * V <= HELD / 4 ? 4 : ROWS * V <= HELD / 2 ? 2 : 1;
  Row sum[SUMS][ROWS][V];
#pragma GCC unroll 4
  for (int s = 0; s < SUMS; s++)
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sum[s][r][v] = zero();
  for (int k0 = 0; k0 < K; k0 += SUMS)
#pragma GCC unroll 4
    for (int s = 0; s < SUMS; s++) {
      const int k = k0 + s;
      if (K % SUMS > 0 && k >= K) break;
      Row x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) x[v] = get_nth<N>(b + k * BK, v);
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
      const float* before = MORE ? c + r * CM : bias;
      if (MORE || bias != nullptr) total = plus(total, get_nth<N>(before, v));
      put_nth<N>(c + r * CM, v, total);
    }
}

// a is M x K, b is K x N, c lies row by row. AM and BK are the steps from one row to the next, AK and BN from one column
// to the next; BK or BN is 1. Threads share the rows of c where there are many, else the columns.
template <int M, int K, int N, int AM, int AK, int BK, int BN, int THREADS>
struct Product {
  static constexpr int BLOCKS = N / WIDEST, NARROW = N % WIDEST, ALL_BLOCKS = BLOCKS + (NARROW > 0);
  static constexpr int MOST = HELD / REGISTERS<(N < WIDEST ? N : WIDEST)>;
  static constexpr int ROWS = (M + (M + MOST - 1) / MOST - 1) / ((M + MOST - 1) / MOST), REST = M % ROWS;
  static constexpr int WHOLE = M / ROWS, TILES = WHOLE + (REST > 0);
  static constexpr int PIECES = (K + PIECE - 1) / PIECE, LONG = (K + PIECES - 1) / PIECES, LAST = K % LONG;
  static constexpr bool BY_ROWS = M >= ROWS_OF_A_PART * THREADS && M >= N;
  static constexpr int MOST_TOGETHER = MOST_ROWS_OF_A_CHUNK * THREADS;
  static constexpr int CHUNKS = BY_ROWS ? THREADS * ((M + MOST_TOGETHER - 1) / MOST_TOGETHER) : 1;
  static constexpr int CHUNK = (TILES + CHUNKS - 1) / CHUNKS;
  static constexpr bool PACKED = BY_ROWS && AK != 1 && ALL_BLOCKS > 1, COPIED = BN != 1 || M > MANY_ROWS;

  // K0 columns of `tiles` tiles of a, each tile without gaps, column by column.
  template <int K0>
  static void pack(const float* a, int tiles, bool rest, float* packed) {
    constexpr int TOGETHER = 8;
    for (int first = 0; first < tiles; first += TOGETHER)
      for (int k = 0; k < K0; k++)
        for (int t = first; t < tiles && t < first + TOGETHER; t++)
#pragma GCC unroll 24
          for (int r = 0; r < ROWS; r++) packed[(t * K0 + k) * ROWS + r] = a[(t * ROWS + r) * AM + k * AK];
    if (rest)
      for (int k = 0; k < K0; k++)
        for (int r = 0; r < REST; r++)
          packed[(tiles * K0 + k) * ROWS + r] = a[(tiles * ROWS + r) * AM + k * AK];
  }

  // `tiles` tiles of c, one below the other, and what is left of one below them.
  template <bool MORE, int K0, int N0>
  static void down(const float* a, int tiles, bool rest, const float* b, const float* bias, float* c) {
    alignas(64) float copied[COPIED ? K0 * N0 : 1];
    if constexpr (BN != 1) transpose<K0, N0, BN>(b, copied);
    else if constexpr (COPIED) copy<K0, N0, BK>(b, copied);
    const float* rows = COPIED ? copied : b;
    constexpr int STEP = COPIED ? N0 : BK, AM0 = PACKED ? 1 : AM, AK0 = PACKED ? ROWS : AK;
    constexpr int FOR_A_TILE = PACKED ? ROWS * K0 : ROWS * AM;
    for (int t = 0; t < tiles; t++)
      tile<MORE, ROWS, K0, N0, AM0, AK0, STEP, N>(a + t * FOR_A_TILE, rows, bias, c + t * ROWS * N);
    if constexpr (REST > 0)
      if (rest) tile<MORE, REST, K0, N0, AM0, AK0, STEP, N>(a + tiles * FOR_A_TILE, rows, bias, c + tiles * ROWS * N);
  }

  template <bool MORE, int K0>
  static void piece(int chunk, int block, int end, const float* a, const float* b, const float* bias, float* c) {
    const int first = chunk * CHUNK, behind = first + CHUNK < TILES ? first + CHUNK : TILES;
    if (first >= TILES) return;
    const int tiles = (behind < WHOLE ? behind : WHOLE) - first;
    const bool rest = behind > WHOLE;
    a += first * ROWS * AM, c += first * ROWS * N;
    alignas(64) float packed[PACKED ? (CHUNK + 1) * ROWS * K0 : 1];
    if constexpr (PACKED) pack<K0>(a, tiles, rest, packed), a = packed;
    for (; block < end; block++) {
      const int n = block * WIDEST;
      const float* some = MORE || bias == nullptr ? nullptr : bias + n;
      if constexpr (BLOCKS > 0)
        if (block < BLOCKS) down<MORE, K0, WIDEST>(a, tiles, rest, b + n * BN, some, c + n);
      if constexpr (NARROW > 0)
        if (block == BLOCKS) down<MORE, K0, NARROW>(a, tiles, rest, b + n * BN, some, c + n);
    }
  }

  // A chunk of the rows of c, in columns from one block up to another.
  static void part(int chunk, int block, int end, const float* a, const float* b, const float* bias, float* c) {
    piece<false, LONG>(chunk, block, end, a, b, bias, c);
    int k = LONG;
    for (; k + LONG <= K; k += LONG) piece<true, LONG>(chunk, block, end, a + k * AK, b + k * BK, nullptr, c);
    if constexpr (LAST > 0) piece<true, LAST>(chunk, block, end, a + k * AK, b + k * BK, nullptr, c);
  }

  // c = a b + bias, or without `bias` if it is null.
  static void of(const float* a, const float* b, const float* bias, float* c) {
    constexpr int PARTS = BY_ROWS ? CHUNKS : ALL_BLOCKS;
    const auto take = [=](int i) {
      if (BY_ROWS) part(i, 0, ALL_BLOCKS, a, b, bias, c);
      else part(0, i, i + 1, a, b, bias, c);
    };
    share<THREADS>(PARTS, take);
  }
};
}  // namespace monograph
