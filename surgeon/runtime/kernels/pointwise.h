// What lies between products: norms, rotary positions, activations; each reads and writes a token once.
#pragma once

#include <algorithm>
#include <cmath>

#include "pool.h"
#include "vector.h"

// Calls `vectors` for whole vectors of `count` numbers, then `one` for each that is left.
template <typename Vectors, typename One>
static inline void each(int64_t count, Vectors vectors, One one) {
    int64_t at = 0;
    for (; at + kLanes <= count; at += kLanes) vectors(at);
    for (; at < count; ++at) one(at);
}

static inline float sum_of_squares(const float *x, int64_t count) {
    Vector squares{};
    float rest = 0;
    each(count, [&](int64_t at) { squares += load(x + at) * load(x + at); }, [&](int64_t at) { rest += x[at] * x[at]; });
    return sum(squares) + rest;
}

// The highest of `count` numbers, one at least; comparisons with NaN are false, which is passed over unless it comes first.
static inline float greatest(const float *x, int64_t count) {
    float most = x[0];
    Vector mosts = spread(most);
    each(
        count,
        [&](int64_t at) {
            const Vector own = load(x + at);
            mosts = own > mosts ? own : mosts;
        },
        [&](int64_t at) { most = std::max(most, x[at]); });
    for (int lane = 0; lane < kLanes; ++lane) most = std::max(most, mosts[lane]);
    return most;
}

static inline float mean_square(const float *x, int64_t count) {
    return sum_of_squares(x, count) / static_cast<float>(count);
}

// y = x / sqrt(square) * gain, of `count` numbers.
static inline void norm(const float *x, const float *gain, float square, int64_t count, float *y) {
    const float factor = 1.0f / std::sqrt(square);
    each(
        count, [&](int64_t at) { store(y + at, load(x + at) * factor * load(gain + at)); },
        [&](int64_t at) { y[at] = x[at] * factor * gain[at]; });
}

// Turns pairs (i, i + width / 2) of x; the sine's first half is negated beforehand.
static inline void turn(float *x, const float *cosine, const float *sine, int64_t width) {
    const int64_t half = width / 2;
    each(
        half,
        [&](int64_t at) {
            const Vector low = load(x + at), high = load(x + half + at);
            store(x + at, low * load(cosine + at) + high * load(sine + at));
            store(x + half + at, high * load(cosine + half + at) + low * load(sine + half + at));
        },
        [&](int64_t at) {
            const float low = x[at], high = x[half + at];
            x[at] = low * cosine[at] + high * sine[at];
            x[half + at] = high * cosine[half + at] + low * sine[half + at];
        });
}

// Numbers between -bound and bound, in place: bound * tanh(x / bound).
static inline void cap(float *x, float bound, int64_t count) {
    each(
        count, [&](int64_t at) { store(x + at, hyperbolic_tangent(load(x + at) / bound) * bound); },
        [&](int64_t at) { x[at] = bound * std::tanh(x[at] / bound); });
}

struct Silu {
    static Vector of(Vector x) { return x / (exponential(-x) + 1.0f); }
    static float of(float x) { return x / (1.0f + std::exp(-x)); }
};

struct TanhGelu {  // x * (1 + tanh(u)) / 2 = x / (1 + exp(-2 u))
    static constexpr float kOuter = -1.5957691216f, kInner = 0.044715f;  // -2 sqrt(2 / pi)
    static Vector of(Vector x) { return x / (exponential(x * (x * x * kInner + 1.0f) * kOuter) + 1.0f); }
    static float of(float x) { return x / (1.0f + std::exp(x * (x * x * kInner + 1.0f) * kOuter)); }
};

// Gates up to a limit, values between -limit and limit and 1 more: x * sigmoid(alpha * x) * (value + 1) (gpt-oss).
struct Clamped {
    float alpha, limit;
    float operator()(float gate, float value) const {
        gate = std::min(gate, limit);
        return gate / (1.0f + std::exp(-alpha * gate)) * (std::clamp(value, -limit, limit) + 1.0f);
    }
    Vector operator()(Vector gate, Vector value) const {
        const Vector most = spread(limit), least = spread(-limit);
        gate = gate > most ? most : gate;
        value = value > most ? most : value < least ? least : value;
        return gate / (exponential(gate * -alpha) + 1.0f) * (value + 1.0f);
    }
};

// Activated gates times values.
template <typename Activation>
struct Gated {
    template <typename Number>
    Number operator()(Number gate, Number value) const { return Activation::of(gate) * value; }
};

// Of tokens, (tokens, 2, width), to (tokens, width).
template <typename Combined>
static void gate(const float *wide, int64_t tokens, int64_t width, float *y, const Combined &combined) {
    pool().share_rows(tokens, width, [&](int64_t token) {
        const float *gates = wide + token * 2 * width, *values = gates + width;
        float *to = y + token * width;
        each(
            width, [&](int64_t at) { store(to + at, combined(load(gates + at), load(values + at))); },
            [&](int64_t at) { to[at] = combined(gates[at], values[at]); });
    });
}
