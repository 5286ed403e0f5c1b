// Attention of float32, head by head: softmax(scale q k^T) v with the logarithms of the sums, and its gradients.
//
// Where it is CAUSAL a query sees the keys up to its own position. Keys and values of a head are copied next to each
// other first; then GROUP queries meet all the keys that one of them sees. QS, KS and so on are steps from one image of
// the batch to the next, from one head to the next, and from one position to the next.

namespace monograph {

constexpr int MOST_GROUP = 12;  // queries, or keys: as many rows of sums as registers hold
constexpr int wide(int size, int unit) { return (size + unit - 1) / unit * unit; }
constexpr int less(int a, int b) { return a < b ? a : b; }

struct Steps {
  int image, head, position;
  int at(int image_, int head_) const { return image_ * image + head_ * head; }
};

// ROWS rows of V registers of c: what `count` columns of a and rows of b give, added to what is there if MORE.
template <bool MORE, int ROWS, int V, int AM, int AK, int BK, int CM>
inline void sums(const float* a, const float* b, float* c, int count, const float* factors) {
  Row sum[ROWS][V];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sum[r][v] = MORE ? get<WIDTH>(c + r * CM + v * WIDTH) : zero();
  for (int k = 0; k < count; k++) {
    Row x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) x[v] = get<WIDTH>(b + k * BK + v * WIDTH);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const Row y = all(a[r * AM + k * AK]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sum[r][v] = fused(y, x[v], sum[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) put<WIDTH>(c + r * CM + v * WIDTH, MORE ? sum[r][v] : times(sum[r][v], all(factors[r])));
}

// The same for GROUP rows of `columns` numbers, a multiple of WIDTH.
template <int GROUP, bool MORE, int AM, int AK, int BK, int CM>
inline void group(const float* a, const float* b, float* c, int columns, int count, const float* factors) {
  constexpr int V = WIDEST / WIDTH, R = GROUP * V <= HELD ? GROUP : (GROUP + 1) / 2;
  int n = 0;
  for (; n + WIDEST <= columns; n += WIDEST) {
    sums<MORE, R, V, AM, AK, BK, CM>(a, b + n, c + n, count, factors);
    if constexpr (R < GROUP) sums<MORE, GROUP - R, V, AM, AK, BK, CM>(a + R * AM, b + n, c + R * CM + n, count, factors + R);
  }
  if constexpr (V > 2)
    for (; n + 2 * WIDTH <= columns; n += 2 * WIDTH) sums<MORE, GROUP, 2, AM, AK, BK, CM>(a, b + n, c + n, count, factors);
  for (; n < columns; n += WIDTH) sums<MORE, GROUP, 1, AM, AK, BK, CM>(a, b + n, c + n, count, factors);
}

template <int B, int H, int QUERIES, int KEYS, int D, bool CAUSAL, int THREADS>
struct Attention {
  static constexpr int GROUPS = (QUERIES + MOST_GROUP - 1) / MOST_GROUP, GROUP = (QUERIES + GROUPS - 1) / GROUPS;
  static constexpr int COLUMNS = wide(KEYS, WIDTH), ROWS = wide(KEYS, GROUP), DEEP = wide(D, WIDTH);
  static constexpr int STEP = (COLUMNS > ROWS ? COLUMNS : ROWS) + WIDTH;  // of scores; behind them there is room
  static constexpr int BLOCK = less(4 * GROUP, wide(QUERIES, GROUP));  // queries whose gradients of keys are added at once
  static constexpr int SUMS = B * QUERIES * H * D;                     // where they begin in the result
  static constexpr Steps MADE_K{KEYS * H * D, D, H * D};

  static int seen(int query) { return CAUSAL ? less(query + 1, KEYS) : KEYS; }

  // `rows` rows of D numbers, zeros behind each and below.
  static void rows(const float* from, int step, int count, float* to, int all_rows) {
    for (int i = 0; i < all_rows; i++)
      for (int v = 0; v < DEEP / WIDTH; v++)
        put<WIDTH>(to + i * DEEP + v * WIDTH, i < count ? get_nth<D>(from + i * step, v) : zero());
  }

  static void give(const float* from, int count, float* to, int step) {
    for (int i = 0; i < count; i++)
      for (int v = 0; v < DEEP / WIDTH; v++) put_nth<D>(to + i * step, v, get<WIDTH>(from + i * DEEP + v * WIDTH));
  }

  // KEYS rows as D rows of COLUMNS numbers.
  static void columns(const float* from, int step, float* to) {
    for (int d = 0; d < D; d++)
      for (int k = KEYS; k < COLUMNS; k++) to[d * COLUMNS + k] = 0;
    int k = 0;
    for (; k + SQUARE <= KEYS; k += SQUARE) {
      int d = 0;
      for (; d + SQUARE <= D; d += SQUARE) square(from + k * step + d, step, to + d * COLUMNS + k, COLUMNS);
      for (; d < D; d++)
        for (int i = k; i < k + SQUARE; i++) to[d * COLUMNS + i] = from[i * step + d];
    }
    for (; k < KEYS; k++)
      for (int d = 0; d < D; d++) to[d * COLUMNS + k] = from[k * step + d];
  }

  static void fill(float* row, int from, int to, float number) {
    for (; from < to; from += WIDTH) put<WIDTH>(row + from, all(number));
  }

  // The scores of a query, of which it sees `count`, as powers of e below their largest.
  static void powers(float* row, int count, int width, float& largest, float& total) {
    fill(row, count, width, -INFINITY);
    Row most = get<WIDTH>(row);
    for (int k = WIDTH; k < width; k += WIDTH) most = larger(most, get<WIDTH>(row + k));
    largest = largest_of(most);
    if (largest == -INFINITY && sees_nothing(row, count)) {
      fill(row, 0, width, 0);
      largest = 0, total = 1;
      return;
    }
    Row sum = zero();
    for (int k = 0; k < width; k += WIDTH) {
      const Row x = exponential(minus(get<WIDTH>(row + k), all(largest)));
      put<WIDTH>(row + k, x);
      sum = plus(sum, x);
    }
    total = sum_of(sum);
  }

  // True if all scores are -infinity, none NaN.
  static bool sees_nothing(const float* row, int count) {
    for (int k = 0; k < count; k++)
      if (row[k] != -INFINITY) return false;
    return true;
  }

  static void forward_head(const float* q, int qs, const float* k, int ks, const float* v, int vs, float scale, float* made,
                           int step, float* logarithms) {
    alignas(64) float keys[D * COLUMNS], values[KEYS * DEEP];
    alignas(64) float some[GROUP * DEEP], scores[GROUP * STEP], result[GROUP * DEEP];
    float largest[GROUP], totals[GROUP], factors[GROUP], scales[GROUP];
    for (float& item : scales) item = scale;
    columns(k, ks, keys), rows(v, vs, KEYS, values, KEYS);
    for (int first = 0; first < QUERIES; first += GROUP) {
      const int count = less(GROUP, QUERIES - first), needed = seen(first + GROUP - 1), width = wide(needed, WIDTH);
      rows(q + first * qs, qs, count, some, GROUP);
      group<GROUP, false, DEEP, 1, COLUMNS, STEP>(some, keys, scores, width, D, scales);
      for (int i = 0; i < GROUP; i++) powers(scores + i * STEP, seen(first + i), width, largest[i], totals[i]);
      for (int i = 0; i < GROUP; i++) factors[i] = 1 / totals[i];
      for (int i = 0; i < count; i++) logarithms[(first + i) * H] = largest[i] + std::log(totals[i]);
      group<GROUP, false, STEP, 1, DEEP, DEEP>(scores, values, result, DEEP, needed, factors);
      give(result, count, made + first * step, step);
    }
  }

  // made = the result, in steps of its own, and behind it the logarithms of the sums, by images, positions, heads.
  static void forward(const float* q, Steps qs, const float* k, Steps ks, const float* v, Steps vs, float scale, float* made,
                      Steps ms) {
    share<THREADS>(B * H, [=](int i) {
      const int b = i / H, h = i % H;
      forward_head(q + qs.at(b, h), qs.position, k + ks.at(b, h), ks.position, v + vs.at(b, h), vs.position, scale,
                   made + ms.at(b, h), ms.position, made + SUMS + b * QUERIES * H + h);
    });
  }

  // What a row of scores and one of the gradients of the weights become: weights, and gradients of scores.
  static void weights(float* row, float* grad, int count, int width, float logarithm, float inner, float scale) {
    for (int k = 0; k < width; k += WIDTH) {
      const Row x = exponential(minus(get<WIDTH>(row + k), all(logarithm)));
      put<WIDTH>(row + k, x);
      put<WIDTH>(grad + k, times(times(x, minus(get<WIDTH>(grad + k), all(inner))), all(scale)));
    }
    fill(row, count, width, 0), fill(grad, count, width, 0);
  }

  static float inner(const float* a, const float* b) {
    Row sum = zero();
    for (int v = 0; v < DEEP / WIDTH; v++) sum = fused(get_nth<D>(a, v), get_nth<D>(b, v), sum);
    return sum_of(sum);
  }

  // What all queries of a head share.
  struct Head {
    alignas(64) float key_columns[D * COLUMNS], value_columns[D * COLUMNS], key_rows[KEYS * DEEP];
    alignas(64) float of_keys[ROWS * DEEP] = {}, of_values[ROWS * DEEP] = {};
    alignas(64) float queries[BLOCK * DEEP], grads[BLOCK * DEEP];
    alignas(64) float scores[BLOCK * STEP] = {}, of_scores[BLOCK * STEP] = {};
    float ones[GROUP], scales[GROUP];
  };

  // The gradients of keys and values from BLOCK queries.
  static void add_of_keys(Head& head, int start, int count) {
    for (int k = 0; k < (CAUSAL ? less(start + count, KEYS) : KEYS); k += GROUP) {
      const int skipped = CAUSAL && k > start ? k - start : 0;
      const float *scores = head.scores + skipped * STEP + k, *of_scores = head.of_scores + skipped * STEP + k;
      group<GROUP, true, 1, STEP, DEEP, DEEP>(scores, head.grads + skipped * DEEP, head.of_values + k * DEEP, DEEP, count - skipped,
                                       nullptr);
      group<GROUP, true, 1, STEP, DEEP, DEEP>(of_scores, head.queries + skipped * DEEP, head.of_keys + k * DEEP, DEEP,
                                       count - skipped, nullptr);
    }
  }

  static void backward_head(const float* grad, int gs, const float* q, int qs, const float* k, int ks, const float* v, int vs,
                            const float* out, int os, const float* logarithms, int ls, float scale, float* of_q, int step,
                            float* of_k, float* of_v) {
    Head head;
    for (int i = 0; i < GROUP; i++) head.ones[i] = 1, head.scales[i] = scale;
    columns(k, ks, head.key_columns), columns(v, vs, head.value_columns), rows(k, ks, KEYS, head.key_rows, KEYS);
    for (int start = 0; start < QUERIES; start += BLOCK) {
      const int count = less(BLOCK, QUERIES - start);
      rows(q + start * qs, qs, count, head.queries, BLOCK), rows(grad + start * gs, gs, count, head.grads, BLOCK);
      for (int first = 0; first < count; first += GROUP) {
        const int needed = seen(start + first + GROUP - 1), width = wide(needed, WIDTH);
        float *scores = head.scores + first * STEP, *of_scores = head.of_scores + first * STEP;
        group<GROUP, false, DEEP, 1, COLUMNS, STEP>(head.queries + first * DEEP, head.key_columns, scores, width, D, head.scales);
        group<GROUP, false, DEEP, 1, COLUMNS, STEP>(head.grads + first * DEEP, head.value_columns, of_scores, width, D, head.ones);
        const int last = less(count, first + GROUP);
        for (int i = first; i < last; i++) {
          const int at = start + i;
          weights(head.scores + i * STEP, head.of_scores + i * STEP, seen(at), width, logarithms[at * ls],
                  inner(grad + at * gs, out + at * os), scale);
        }
        alignas(64) float made[GROUP * DEEP];
        group<GROUP, false, STEP, 1, DEEP, DEEP>(of_scores, head.key_rows, made, DEEP, needed, head.ones);
        give(made, last - first, of_q + (start + first) * step, step);
      }
      add_of_keys(head, start, count);
    }
    give(head.of_keys, KEYS, of_k, MADE_K.position), give(head.of_values, KEYS, of_v, MADE_K.position);
  }

  // made = the gradients of queries, keys and values, one behind the other, each by images, positions, heads.
  static void backward(const float* grad, Steps gs, const float* q, Steps qs, const float* k, Steps ks, const float* v,
                       Steps vs, const float* out, Steps os, const float* logarithms, Steps ls, float scale, float* made,
                       Steps ms) {
    share<THREADS>(B * H, [=](int i) {
      const int b = i / H, h = i % H;
      float* of_k = made + B * QUERIES * H * D + MADE_K.at(b, h);
      backward_head(grad + gs.at(b, h), gs.position, q + qs.at(b, h), qs.position, k + ks.at(b, h), ks.position,
                    v + vs.at(b, h), vs.position, out + os.at(b, h), os.position, logarithms + ls.at(b, h), ls.position, scale,
                    made + ms.at(b, h), ms.position, of_k, of_k + B * KEYS * H * D);
    });
  }
};
}  // namespace monograph
