// Convolutions of images with one filter for each channel, and their gradients. Images lie pixel by pixel, the channels
// of a pixel side by side; filters lie channel by channel.
//
// N images of C channels, H x W pixels, give OH x OW; filters are KH x KW, and go in steps of SH x SW over images with
// PH x PW zeros on each side.

namespace monograph {

template <int N, int C, int H, int W, int OH, int OW, int KH, int KW, int SH, int SW, int PH, int PW, int THREADS>
struct Depthwise {
  static constexpr int TAPS = KH * KW, WIDEST = 4 * WIDTH, FEW_PIXELS = 64;

  // The taps of a side of a filter that meet something, and where.
  template <int K>
  struct Meetings {
    int count = 0, tap[K], at[K];
    void add(int k, int position) { tap[count] = k, at[count++] = position; }
  };

  // What the taps see of an image of SIZE for the result at `position`.
  template <int K, int S, int P, int SIZE>
  static Meetings<K> seen(int position) {
    Meetings<K> made;
    for (int k = 0; k < K; k++)
      if (int i = position * S - P + k; i >= 0 && i < SIZE) made.add(k, i);
    return made;
  }

  // Which of SIZE results see an image at `position`, by which tap.
  template <int K, int S, int P, int SIZE>
  static Meetings<K> seeing(int position) {
    Meetings<K> made;
    for (int k = 0; k < K; k++)
      if (int i = position + P - k; i >= 0 && i % S == 0 && i / S < SIZE) made.add(k, i / S);
    return made;
  }

  // COUNT channels of a pixel: sums over the taps that meet something.
  template <int COUNT>
  static void pixel(const Meetings<KH>& high, const Meetings<KW>& wide, int width, const float* image, const float* rows,
                    float* made) {
    constexpr int V = REGISTERS<COUNT>;
    Row sum[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sum[v] = zero();
    for (int i = 0; i < high.count; i++)
      for (int j = 0; j < wide.count; j++) {
        const float* x = image + (high.at[i] * width + wide.at[j]) * C;
        const float* y = rows + (high.tap[i] * KW + wide.tap[j]) * C;
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sum[v] = fused(get_nth<COUNT>(x, v), get_nth<COUNT>(y, v), sum[v]);
      }
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) put_nth<COUNT>(made, v, sum[v]);
  }

  // Images of TH x TW pixels from images of FH x FW: forward, or backward.
  template <bool FORWARD, int FH, int FW, int TH, int TW>
  static void images(const float* from, const float* weight, float* to) {
    alignas(64) float rows[TAPS * C];  // tap by tap
    for (int c = 0; c < C; c++)
#pragma GCC unroll 25
      for (int t = 0; t < TAPS; t++) rows[t * C + c] = weight[c * TAPS + t];
    share<THREADS>(N, [=, &rows](int n) {
      for (int i = 0; i < TH; i++) {
        const auto high = FORWARD ? seen<KH, SH, PH, FH>(i) : seeing<KH, SH, PH, FH>(i);
        for (int j = 0; j < TW; j++) {
          const auto wide = FORWARD ? seen<KW, SW, PW, FW>(j) : seeing<KW, SW, PW, FW>(j);
          const float* image = from + n * FH * FW * C;
          float* made = to + ((n * TH + i) * TW + j) * C;
          int c = 0;
          for (; c + WIDEST <= C; c += WIDEST) pixel<WIDEST>(high, wide, FW, image + c, rows + c, made + c);
          if constexpr (C % WIDEST > 0) pixel<C % WIDEST>(high, wide, FW, image + c, rows + c, made + c);
        }
      }
    });
  }

  // The gradient of the filters of COUNT channels, at most WIDTH: sums over some pixels first, then over all.
  template <int COUNT>
  static void filters(const float* grad, const float* x, float* weight) {
    constexpr int TOGETHER = OH * OW >= FEW_PIXELS ? 1 : FEW_PIXELS / (OH * OW);
    Row total[TAPS];
    for (int t = 0; t < TAPS; t++) total[t] = zero();
    for (int first = 0; first < N; first += TOGETHER) {
      Row sum[TAPS];
#pragma GCC unroll 25
      for (int t = 0; t < TAPS; t++) sum[t] = zero();
      for (int n = first; n < N && n < first + TOGETHER; n++)
        for (int i = 0; i < OH; i++)
          for (int j = 0; j < OW; j++) {
            const Row y = get<COUNT>(grad + ((n * OH + i) * OW + j) * C);
#pragma GCC unroll 25
            for (int p = 0; p < KH; p++) {
              const int row = i * SH - PH + p;
              if (row < 0 || row >= H) continue;
#pragma GCC unroll 25
              for (int q = 0; q < KW; q++) {
                const int column = j * SW - PW + q;
                if (column < 0 || column >= W) continue;
                sum[p * KW + q] = fused(y, get<COUNT>(x + ((n * H + row) * W + column) * C), sum[p * KW + q]);
              }
            }
          }
#pragma GCC unroll 25
      for (int t = 0; t < TAPS; t++) total[t] = plus(total[t], sum[t]);
    }
    for (int t = 0; t < TAPS; t++) {
      float made[WIDTH];
      put<WIDTH>(made, total[t]);
      for (int c = 0; c < COUNT; c++) weight[c * TAPS + t] = made[c];
    }
  }

  static void forward(const float* x, const float* weight, float* y) { images<true, H, W, OH, OW>(x, weight, y); }

  static void of_image(const float* grad, const float* weight, float* x) {
    images<false, OH, OW, H, W>(grad, weight, x);
  }

  static void of_weight(const float* grad, const float* x, float* weight) {
    share<THREADS>((C + WIDTH - 1) / WIDTH, [=](int i) {
      const int c = i * WIDTH;
      if (c + WIDTH <= C) filters<WIDTH>(grad + c, x + c, weight + c * TAPS);
      else if constexpr (C % WIDTH > 0) filters<C % WIDTH>(grad + c, x + c, weight + c * TAPS);
    });
  }
};
}  // namespace monograph
