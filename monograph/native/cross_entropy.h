// Cross-entropy of rows of float32 with the class that each should have, and its gradient, in one go through memory.
//
// A row is read three times while it is near: its largest number; powers of e below that, and their sum; the gradient.
// The gradient may be written over the logits. While powers are computed, the next row is on its way.

namespace monograph {

// ROWS rows of C numbers, STEP from one to the next. A row has no class where its target is IGNORED or out of range.
// With SUMS also the logarithms of the softmax are summed up, and each of them has the gradient `uniform` besides.
template <int ROWS, int C, long STEP, long IGNORED, bool SUMS, int THREADS>
struct CrossEntropy {
  static constexpr int TOGETHER = 4, WHOLE = C / WIDTH, REST = C % WIDTH, APART = WHOLE / TOGETHER * TOGETHER;
  static constexpr int PART = 256, NEAR = C <= 8192 ? 3 : 2;  // rows that a thread takes at once; the cache for the next row

  static Row joined(const Row* some, Row (*join)(Row, Row)) { return join(join(some[0], some[1]), join(some[2], some[3])); }

  // The loss of a row, and its gradient where that of the loss is `scale`.
  static float row(const float* x, long target, float scale, float uniform, float* sums, float* made) {
    const bool has = target >= 0 && target < C && target != IGNORED;
    const float wanted = has ? x[target] : 0;
    alignas(64) float rest[WIDTH];  // what is left after whole registers
    if constexpr (REST > 0)
      for (int i = 0; i < WIDTH; i++) rest[i] = i < REST ? x[WHOLE * WIDTH + i] : -INFINITY;

    Row most[TOGETHER], sum[TOGETHER], below[TOGETHER];
    for (int i = 0; i < TOGETHER; i++) most[i] = all(-INFINITY), sum[i] = below[i] = zero();
    const auto look = [&](int v, int i) {
      most[i] = larger(most[i], get<WIDTH>(x + v * WIDTH));
      __builtin_prefetch(made + v * WIDTH, 1);
    };
    for (int v = 0; v < APART; v += TOGETHER)
#pragma GCC unroll 4
      for (int i = 0; i < TOGETHER; i++) look(v + i, i);
    for (int v = APART; v < WHOLE; v++) look(v, v - APART);
    if constexpr (REST > 0) most[3] = larger(most[3], get<WIDTH>(rest));
    const float largest = largest_of(joined(most, larger));

    float distances = 0;  // of all numbers from the largest
    if constexpr (SUMS)
      for (int i = 0; i < REST; i++) distances += rest[i] - largest;
    const auto power = [&](const float* from, float* to, int i) {
      const Row distance = minus(get<WIDTH>(from), all(largest)), y = exponential(distance);
      if (SUMS && from != rest) below[i] = plus(below[i], distance);
      put<WIDTH>(to, y);
      sum[i] = plus(sum[i], y);
    };
    const auto powers = [&](int v, int i) {
      __builtin_prefetch(x + STEP + v * WIDTH, 0, NEAR);
      power(x + v * WIDTH, made + v * WIDTH, i);
    };
    for (int v = 0; v < APART; v += TOGETHER)
#pragma GCC unroll 4
      for (int i = 0; i < TOGETHER; i++) powers(v + i, i);
    for (int v = APART; v < WHOLE; v++) powers(v, v - APART);
    if constexpr (REST > 0) power(rest, rest, 3);
    const float total = sum_of(joined(sum, plus));

    const Row factor = all((SUMS ? scale - C * uniform : scale) / total);
    const auto part = [&](const float* from) {
      return SUMS ? fused(get<WIDTH>(from), factor, all(uniform)) : times(get<WIDTH>(from), factor);
    };
    for (int v = 0; v < WHOLE; v++) put<WIDTH>(made + v * WIDTH, part(made + v * WIDTH));
    if constexpr (REST > 0) put<REST>(made + WHOLE * WIDTH, part(rest));
    const float logarithm = std::log(total);
    if constexpr (SUMS) *sums = distances + sum_of(joined(below, plus)) - C * logarithm;
    if (!has) return 0;
    made[target] -= scale;
    return logarithm - (wanted - largest);
  }

  static void of(const float* x, const long* target, const float* scale, const float* uniform, float* losses, float* sums,
                 float* made) {
    share<THREADS>((ROWS + PART - 1) / PART, [=](int part) {
      for (long i = (long)part * PART; i < ROWS && i < (part + 1L) * PART; i++)
        losses[i] = row(x + i * STEP, target[i], scale[i], SUMS ? uniform[i] : 0, SUMS ? sums + i : nullptr, made + i * C);
    });
  }
};
}  // namespace monograph
