// Vectors of float32 as wide as the processor's, by the vector types of GCC and clang; loads need no alignment.
#pragma once

#include <cstdint>
#include <utility>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

static inline Vector load(const float *from) { return *reinterpret_cast<const Vector *>(from); }

static inline void store(float *to, Vector numbers) { *reinterpret_cast<Vector *>(to) = numbers; }

// All lanes the same. Not `Vector{} + number`: -0 would become 0, so that compilers really add.
static inline Vector spread(float number) {
#if defined(__AVX512F__)
    return Vector{number, number, number, number, number, number, number, number,
                  number, number, number, number, number, number, number, number};
#elif defined(__AVX__)
    return Vector{number, number, number, number, number, number, number, number};
#else
    return Vector{number, number, number, number};
#endif
}

// Has what lies there on its way to a cache, line by line.
static inline void fetch(const void *from, int64_t bytes) {
    constexpr int64_t kLine = 64;
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(static_cast<const char *>(from) + at);
}

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

// Sums over every fourth lane, from the first four on.
static inline Four fold(Vector x) {
    Four total{x[0], x[1], x[2], x[3]};
    for (int at = 4; at < kLanes; at += 4) total += Four{x[at], x[at + 1], x[at + 2], x[at + 3]};
    return total;
}

static inline float sum(Vector numbers) {
    const Four folded = fold(numbers);
    return (folded[0] + folded[2]) + (folded[1] + folded[3]);
}

// Of every four lanes of both, (a0 + a2, b0 + b2, a1 + a3, b1 + b3). What compilers make of such lists are shuffles.
template <int... lane> static inline Vector add_halves(Vector a, Vector b, std::integer_sequence<int, lane...>) {
    return Vector{(lane % 2 ? b : a)[lane / 4 * 4 + lane % 4 / 2]...} +
           Vector{(lane % 2 ? b : a)[lane / 4 * 4 + lane % 4 / 2 + 2]...};
}

// Of every four lanes of both, (a0 + a2, a1 + a3, b0 + b2, b1 + b3).
template <int... lane> static inline Vector join_halves(Vector a, Vector b, std::integer_sequence<int, lane...>) {
    return Vector{(lane % 4 / 2 ? b : a)[lane / 4 * 4 + lane % 2]...} +
           Vector{(lane % 4 / 2 ? b : a)[lane / 4 * 4 + lane % 2 + 2]...};
}

// The sums of four vectors, for little more than one takes.
static inline Four sums(Vector a, Vector b, Vector c, Vector d) {
    constexpr std::make_integer_sequence<int, kLanes> lanes{};
    return fold(join_halves(add_halves(a, b, lanes), add_halves(c, d, lanes), lanes));
}

// exp to about one unit in the last place; below -87 as there, above 88 likewise. NaN stays NaN: comparisons with it
// are false, which is why the bounds are asked for this way round.
static inline Vector exponential(Vector x) {
    x = x < spread(-87.0f) ? spread(-87.0f) : x;
    x = x > spread(88.0f) ? spread(88.0f) : x;
    // The last digits of a number this large are whole ones: so it is rounded, and they are the exponent.
    const Vector large = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23
    const Vector power = large - 12582912.0f;
    const Vector rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;  // ln 2 in two parts
    // 1 + r + r^2 (1/2 + r/6 + ...), coefficients fitted for |r| <= ln(2) / 2 (Cephes)
    Vector series = spread(1.9875691500e-4f);
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    const Vector mantissa = series * (rest * rest) + rest + 1.0f;
    Integers exponent;
    __builtin_memcpy(&exponent, &large, sizeof exponent);
    exponent = (exponent + 127) << 23;  // what made the number large is shifted out
    Vector factor;
    __builtin_memcpy(&factor, &exponent, sizeof factor);
    return mantissa * factor;
}

// tanh to about two units in the last place: 1 - 2 / (exp(2 x) + 1), or for small numbers, of which that would lose
// digits, x + x^3 (...), coefficients fitted for |x| < 0.625 (Cephes).
static inline Vector hyperbolic_tangent(Vector x) {
    const Vector square = x * x;
    Vector series = spread(-5.70498872745e-3f);
    series = series * square + 2.06390887954e-2f;
    series = series * square - 5.37397155531e-2f;
    series = series * square + 1.33314422036e-1f;
    series = series * square - 3.33332819422e-1f;
    const Vector near = series * square * x + x, far = 1.0f - 2.0f / (exponential(x + x) + 1.0f);
    return square < spread(0.625f * 0.625f) ? near : far;
}
