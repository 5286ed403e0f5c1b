// Recurrent layers of float32: the loop over the steps of a sequence, forward and backward.
//
// What a step takes from its input is computed before, for all steps at once, and so are the gradients of input and
// weights afterwards. Columns of the weight are packed into panels, in each the gates of WIDTH units. A panel meets the
// rows of the batch, and the functions of its gates follow at once; threads share panels. Rows of states are copied
// next to each other with gaps, so that they do not meet in the same lines of a cache.

#include <algorithm>
#include <memory>
#include <type_traits>

namespace monograph {

constexpr int LONGEST = 256;  // numbers of a sum, before it is added to others

// exp(x) - 1 for x from -40 to 40, also near 0 within some ulps.
inline Row exponential_less_one(Row x) {
  const Exponential made = parts_of_exponential(limited(x, -40.0f, 40.0f));
  const Row power = doubled(all(1), made.n);
  return fused(power, made.more, minus(power, all(1)));
}

inline Row sigmoid(Row x) { return divided(all(1), plus(all(1), exponential(minus(zero(), x)))); }
inline Row tangent(Row x) {  // hyperbolic
  const Row y = exponential_less_one(plus(x, x));
  return divided(y, plus(y, all(2)));
}

// The slopes of these functions by their values.
inline Row slope_of_sigmoid(Row y) { return times(y, minus(all(1), y)); }
inline Row slope_of_tangent(Row y) { return fused(minus(zero(), y), y, all(1)); }

enum Kind { LSTM, GRU, TANH, RELU };

// T steps of B rows and H units.
template <Kind KIND, int T, int B, int H, bool REVERSE, int THREADS>
struct Recurrence {
  static constexpr int GATES = KIND == LSTM ? 4 : KIND == GRU ? 3 : 1, WIDE = GATES * H, ALL = T * B * H;
  static constexpr int PANELS = (H + WIDTH - 1) / WIDTH, LAST = H - (PANELS - 1) * WIDTH;
  static constexpr int TILES = (B + HELD - 1) / HELD, ROWS = (B + TILES - 1) / TILES, REST = B % ROWS;
  static constexpr int STEP = H + WIDTH, WIDE_STEP = WIDE + WIDTH, PACKED = PANELS * WIDE * WIDTH;

  // The first row of the i-th step that is taken.
  static int row_of(int i) { return (REVERSE ? T - 1 - i : i) * B; }

  // take(panel, row, the units of the panel, the rows from that row on)
  template <class Do>
  static void each(const Do& take) {
    const auto tiles = [&](int p, auto units) {
      for (int r = 0; r + ROWS <= B; r += ROWS) take(p, r, units, std::integral_constant<int, ROWS>());
      if constexpr (REST > 0) take(p, B - REST, units, std::integral_constant<int, REST>());
    };
    share<THREADS>(PANELS, [&](int p) {
      if (p < PANELS - 1) tiles(p, std::integral_constant<int, WIDTH>());
      else tiles(p, std::integral_constant<int, LAST>());
    });
  }

  // c = what R rows of a, K columns each, and a panel give, added to what is there if MORE.
  template <bool MORE, int R, int K, int AM, int CM>
  static void sums(const float* a, const float* panel, float* c) {
    constexpr int PIECES = (K + LONGEST - 1) / LONGEST, LONG = (K + PIECES - 1) / PIECES, END = K % LONG;
    tile<MORE, R, LONG, WIDTH, AM, 1, WIDTH, CM>(a, panel, nullptr, c);
    for (int k = LONG; k + LONG <= K; k += LONG)
      tile<true, R, LONG, WIDTH, AM, 1, WIDTH, CM>(a + k, panel + k * WIDTH, nullptr, c);
    if constexpr (END > 0) tile<true, R, END, WIDTH, AM, 1, WIDTH, CM>(a + K - END, panel + (K - END) * WIDTH, nullptr, c);
  }

  // Panels of the transposed weight: [panel][gate][k][unit].
  static void pack_transposed(const float* weight, float* packed) {
    for (int p = 0; p < PANELS; p++)
      for (int g = 0; g < GATES; g++, packed += H * WIDTH) {
        const float* from = weight + (g * H + p * WIDTH) * H;
        const int units = p < PANELS - 1 ? WIDTH : LAST;
        for (int k = 0; k < H; k += SQUARE)
          for (int i = 0; i < WIDTH; i += SQUARE)
            if (k + SQUARE <= H && i + SQUARE <= units) square(from + i * H + k, H, packed + k * WIDTH + i, WIDTH);
            else
              for (int m = k; m < k + SQUARE && m < H; m++)
                for (int n = i; n < i + SQUARE; n++) packed[m * WIDTH + n] = n < units ? from[n * H + m] : 0;
      }
  }

  // Panels of the weight as it is: [panel][row][unit].
  static void pack(const float* weight, float* packed) {
    for (int p = 0; p < PANELS; p++)
      for (int k = 0; k < WIDE; k++, packed += WIDTH) {
        const float* from = weight + k * H + p * WIDTH;
        put<WIDTH>(packed, p < PANELS - 1 ? get<WIDTH>(from) : get<LAST>(from));
      }
  }

  static void rows(const float* from, int step, float* to, int to_step) {
    for (int b = 0; b < B; b++) std::copy(from + b * step, from + b * step + H, to + b * to_step);
  }

  // made = the states of all steps; of an LSTM the cells, and the gates; of a GRU what the state gives to the new gate, and
  // the gates. `other` is the first cells of an LSTM, and the biases of what the state gives in a GRU.
  static void forward(const float* given, const float* weight, const float* first, const float* other, float* made) {
    std::unique_ptr<float[]> memory(new float[PACKED + 2 * B * STEP]);
    float *packed = memory.get(), *old = packed + PACKED, *next = old + B * STEP;
    pack_transposed(weight, packed);
    rows(first, H, old, STEP);
    for (int i = 0; i < T; i++, std::swap(old, next)) {
      const int here = row_of(i);
      const float* cells = i ? made + ALL + row_of(i - 1) * H : other;
      each([=](int p, int row, auto units, auto count) {
        constexpr int N = decltype(units)::value, R = decltype(count)::value;
        const int j = p * WIDTH;
        alignas(64) float products[GATES][R][WIDTH];
        for (int g = 0; g < GATES; g++)
          sums<false, R, H, STEP, WIDTH>(old + row * STEP, packed + (p * GATES + g) * H * WIDTH, products[g][0]);
        for (int r = 0; r < R; r++) {
          const int b = row + r, at = (here + b) * H + j;
          const float* input = given + (here + b) * WIDE + j;
          float* gates = made + 2 * ALL + (here + b) * WIDE + j;
          const auto sum = [&](int g) { return plus(get<N>(input + g * H), get<WIDTH>(products[g][r])); };
          Row state;
          if constexpr (KIND == LSTM) {
            const Row in = sigmoid(sum(0)), forget = sigmoid(sum(1)), fresh = tangent(sum(2)), out = sigmoid(sum(3));
            const Row cell = fused(forget, get<N>(cells + b * H + j), times(in, fresh));
            put<N>(gates, in), put<N>(gates + H, forget), put<N>(gates + 2 * H, fresh), put<N>(gates + 3 * H, out);
            put<N>(made + ALL + at, cell);
            state = times(out, tangent(cell));
          } else if constexpr (KIND == GRU) {
            const Row reset = sigmoid(plus(sum(0), get<N>(other + j))), update = sigmoid(plus(sum(1), get<N>(other + H + j)));
            const Row of_state = plus(get<WIDTH>(products[2][r]), get<N>(other + 2 * H + j));
            const Row fresh = tangent(fused(reset, of_state, get<N>(input + 2 * H)));
            put<N>(gates, reset), put<N>(gates + H, update), put<N>(gates + 2 * H, fresh);
            put<N>(made + ALL + at, of_state);
            state = fused(update, minus(get<N>(old + b * STEP + j), fresh), fresh);
          } else
            state = KIND == TANH ? tangent(sum(0)) : larger(zero(), sum(0));
          put<N>(made + at, state), put<N>(next + b * STEP + j, state);
        }
      });
    }
  }

  // made = the gradients of what was given; of a GRU those of what the state gives to the gates; those of the first state,
  // and of an LSTM those of the first cells. `grad`, `last` and `last_cells` are those of all states, of the last one and of
  // the last cells; `first` are the first cells of an LSTM, and the first state of a GRU.
  static void backward(const float* grad, const float* last, const float* last_cells, const float* weight, const float* first,
                       const float* block, float* made) {
    std::unique_ptr<float[]> memory(new float[PACKED + B * WIDE_STEP + 2 * B * STEP]);
    float *packed = memory.get(), *wide = packed + PACKED, *states = wide + B * WIDE_STEP, *cells = states + B * STEP;
    float *of_state = made + GATES * ALL, *of_first = of_state + (KIND == GRU ? GATES * ALL : 0);
    pack(weight, packed);
    rows(last, H, states, STEP);
    if (KIND == LSTM) rows(last_cells, H, cells, STEP);
    for (int i = T - 1; i >= 0; i--) {
      const int here = row_of(i);
      const float* before = i ? block + (KIND == LSTM ? ALL : 0) + row_of(i - 1) * H : first;
      each([=](int p, int row, auto units, auto count) {
        constexpr int N = decltype(units)::value, R = decltype(count)::value;
        for (int b = row; b < row + R; b++) {
          const int j = p * WIDTH, at = (here + b) * H + j, wide_at = (here + b) * WIDE + j;
          float *state = states + b * STEP + j, *cell = cells + b * STEP + j, *of_gates = wide + b * WIDE_STEP + j;
          const auto gate = [&](int g) { return get<N>(block + 2 * ALL + wide_at + g * H); };
          const auto give = [&](int g, Row of_input, Row of_product) {
            put<N>(made + wide_at + g * H, of_input);
            put<N>(of_gates + g * H, of_product);
            if (KIND == GRU) put<N>(of_state + wide_at + g * H, of_product);
          };
          const Row of_this = plus(get<N>(grad + at), get<N>(state));
          if constexpr (KIND == LSTM) {
            const Row in = gate(0), forget = gate(1), fresh = gate(2), out = gate(3), bent = tangent(get<N>(block + ALL + at));
            const Row of_cell = fused(times(of_this, out), slope_of_tangent(bent), get<N>(cell));
            const Row of_in = times(times(of_cell, fresh), slope_of_sigmoid(in));
            const Row of_forget = times(times(of_cell, get<N>(before + b * H + j)), slope_of_sigmoid(forget));
            const Row of_fresh = times(times(of_cell, in), slope_of_tangent(fresh));
            const Row of_out = times(times(of_this, bent), slope_of_sigmoid(out));
            give(0, of_in, of_in), give(1, of_forget, of_forget), give(2, of_fresh, of_fresh), give(3, of_out, of_out);
            put<N>(cell, times(of_cell, forget));
          } else if constexpr (KIND == GRU) {
            const Row reset = gate(0), update = gate(1), fresh = gate(2);
            const Row of_fresh = times(times(of_this, minus(all(1), update)), slope_of_tangent(fresh));
            const Row of_reset = times(times(of_fresh, get<N>(block + ALL + at)), slope_of_sigmoid(reset));
            const Row moved = minus(get<N>(before + b * H + j), fresh);
            const Row of_update = times(times(of_this, moved), slope_of_sigmoid(update));
            give(0, of_reset, of_reset), give(1, of_update, of_update), give(2, of_fresh, times(of_fresh, reset));
            put<N>(state, times(of_this, update));
          } else {
            const Row value = get<N>(block + at);
            const Row of_sum = KIND == TANH ? times(of_this, slope_of_tangent(value)) : unless_below(value, of_this);
            give(0, of_sum, of_sum);
          }
        }
      });
      each([=](int p, int row, auto, auto count) {
        constexpr int R = decltype(count)::value;
        sums<KIND == GRU, R, WIDE, WIDE_STEP, STEP>(wide + row * WIDE_STEP, packed + p * WIDE * WIDTH,
                                                    states + row * STEP + p * WIDTH);
      });
    }
    rows(states, STEP, of_first, H);
    if (KIND == LSTM) rows(cells, STEP, of_first + B * H, H);
  }
};
}  // namespace monograph
