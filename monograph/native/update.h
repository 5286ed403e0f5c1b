// What functions that update parameters use: products and sums that are rounded once where the processor can.
#include <math.h>

// Inductor writes vectors itself, and has compilers not look for them.
#if defined(__GNUC__) && !defined(__clang__)
#define WITH_VECTORS __attribute__((optimize("tree-loop-vectorize")))
#else
#define WITH_VECTORS
#endif

// Roots set no errno here, without which loops can take them for whole vectors.
extern "C" float sqrtf(float) noexcept __attribute__((const));
extern "C" double sqrt(double) noexcept __attribute__((const));

namespace monograph {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
static inline float merged(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double merged(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
static inline float merged(float a, float b, float c) { return a * b + c; }
static inline double merged(double a, double b, double c) { return a * b + c; }
#endif
static inline float absolute(float a) { return __builtin_fabsf(a); }
static inline double absolute(double a) { return __builtin_fabs(a); }
static inline float root(float a) { return ::sqrtf(a); }
static inline double root(double a) { return ::sqrt(a); }
static inline double power(double a, double b) { return ::pow(a, b); }
}  // namespace monograph
