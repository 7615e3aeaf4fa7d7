// Attention of single tokens, each over the keys and values of its own text, which lie in runs of a paged cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "pointwise.h"
#include "vector.h"

constexpr int64_t kTogether = 64;  // tokens whose values stay in the nearest cache while all heads of a group use them
constexpr int kWide = 4;           // vectors of an output that are summed at once

struct Heads {
    const float *query;  // (group, dim)
    int64_t group, dim;
    const float *sinks;  // (group), or null
};

// Scores of four keys that lie one behind the other, (4, dim), for one head.
static inline void score_four(const float *query, const float *keys, int64_t dim, float scale, float *scores) {
    const float *key[4] = {keys, keys + dim, keys + 2 * dim, keys + 3 * dim};
    Vector a{}, b{}, c{}, d{};
    int64_t at = 0;
    for (; at + kLanes <= dim; at += kLanes) {
        const Vector own = load(query + at);
        a += own * load(key[0] + at);
        b += own * load(key[1] + at);
        c += own * load(key[2] + at);
        d += own * load(key[3] + at);
    }
    Four products = sums(a, b, c, d);
    for (; at < dim; ++at) products += query[at] * Four{key[0][at], key[1][at], key[2][at], key[3][at]};
    products *= scale;
    __builtin_memcpy(scores, &products, sizeof products);
}

static inline float score_one(const float *query, const float *key, int64_t dim, float scale) {
    Vector products{};
    int64_t at = 0;
    for (; at + kLanes <= dim; at += kLanes) products += load(query + at) * load(key + at);
    float product = sum(products);
    for (; at < dim; ++at) product += query[at] * key[at];
    return product * scale;
}

// Scores of a run's keys, (tokens, dim), to (group, stride) from a place on.
//
// Keys and values of a text lie in several stretches, each too short for the processor to see one coming: while one is
// worked with, the next one is fetched, here the run's values.
static inline void score(
    const Heads &heads, const float *keys, const float *values, int64_t tokens, float scale, float *scores,
    int64_t stride) {
    const int64_t dim = heads.dim, fours = tokens / 4 * 4;
    for (int64_t token = 0; token < fours; token += 4) {
        fetch(values + token * dim, 4 * dim * sizeof(float));
        for (int64_t head = 0; head < heads.group; ++head)
            score_four(heads.query + head * dim, keys + token * dim, dim, scale, scores + head * stride + token);
    }
    for (int64_t token = fours; token < tokens; ++token) {
        fetch(values + token * dim, dim * sizeof(float));
        for (int64_t head = 0; head < heads.group; ++head)
            scores[head * stride + token] = score_one(heads.query + head * dim, keys + token * dim, dim, scale);
    }
}

// Scores, a whole number of vectors, to weights whose sum is 1; those from `count` on become 0. A sink, if not null, is one
// more score, whose weight nobody has.
static inline void soften(float *scores, int64_t count, int64_t filled, float softcap, const float *sink) {
    if (softcap > 0) cap(scores, softcap, count);
    const float highest = greatest(scores, count), most = sink ? std::max(highest, *sink) : highest;
    for (int64_t at = count; at < filled; ++at) scores[at] = most;
    Vector total{};
    for (int64_t at = 0; at < filled; at += kLanes) {
        const Vector weight = exponential(load(scores + at) - most);
        store(scores + at, weight);
        total += weight;
    }
    float rest = 0;
    for (int64_t at = count; at < filled; ++at) rest += scores[at];
    const float inverse = 1.0f / (sum(total) - rest + (sink ? std::exp(*sink - most) : 0.0f));
    for (int64_t at = 0; at < filled; at += kLanes) store(scores + at, load(scores + at) * inverse);
}

// Adds some vectors of weighted values, (tokens, dim), to the outputs of some heads, (heads, dim); weights are (heads,
// stride).
template <int heads, int parts>
static inline void weigh_vectors(
    const float *weights, int64_t stride, const float *values, int64_t tokens, int64_t dim, float *outputs) {
    Vector sums[heads][parts];
    for (int head = 0; head < heads; ++head)
        for (int part = 0; part < parts; ++part) sums[head][part] = load(outputs + head * dim + part * kLanes);
    for (int64_t token = 0; token < tokens; ++token)
        for (int head = 0; head < heads; ++head) {
            const Vector weight = spread(weights[head * stride + token]);
            for (int part = 0; part < parts; ++part) sums[head][part] += weight * load(values + token * dim + part * kLanes);
        }
    for (int head = 0; head < heads; ++head)
        for (int part = 0; part < parts; ++part) store(outputs + head * dim + part * kLanes, sums[head][part]);
}

// All vectors of the values, and the numbers that are left.
template <int heads>
static inline void weigh(
    const float *weights, int64_t stride, const float *values, int64_t tokens, int64_t dim, float *outputs) {
    int64_t at = 0;
    for (; at + kWide * kLanes <= dim; at += kWide * kLanes)
        weigh_vectors<heads, kWide>(weights, stride, values + at, tokens, dim, outputs + at);
    for (; at + kLanes <= dim; at += kLanes)
        weigh_vectors<heads, 1>(weights, stride, values + at, tokens, dim, outputs + at);
    for (; at < dim; ++at)
        for (int head = 0; head < heads; ++head)
            for (int64_t token = 0; token < tokens; ++token)
                outputs[head * dim + at] += weights[head * stride + token] * values[token * dim + at];
}

struct Run {
    int64_t first, tokens;  // places in the cache
};

// The runs of a text, and what lies in them of one head.
struct Text {
    const float *keys, *values;  // (places, dim)
    const Run *runs;
    int64_t count_runs;

    int64_t tokens() const {
        int64_t count = 0;
        for (int64_t run = 0; run < count_runs; ++run) count += runs[run].tokens;
        return count;
    }

    // Has keys on their way that lie where some tokens of another text lie in theirs.
    void fetch_keys(int64_t run, int64_t begin, int64_t tokens, int64_t dim) const {
        if (run >= count_runs) return;
        const int64_t own = std::min(tokens, runs[run].tokens - begin);
        if (own > 0) fetch(keys + (runs[run].first + begin) * dim, own * dim * sizeof(float));
    }
};

// One text and one head of keys and values. `next`: what this thread will probably read next, perhaps of no runs.
static inline void attend_one(
    const Heads &heads, const Text &text, const Text &next, float scale, float softcap, float *output) {
    static thread_local std::vector<float> room;
    const int64_t dim = heads.dim, count = text.tokens(), filled = (count + kLanes - 1) / kLanes * kLanes;
    if (static_cast<int64_t>(room.size()) < heads.group * filled) room.resize(heads.group * filled);
    float *scores = room.data();
    for (int64_t run = 0, at = 0; run < text.count_runs; at += text.runs[run++].tokens) {
        const int64_t first = text.runs[run].first * dim;
        score(heads, text.keys + first, text.values + first, text.runs[run].tokens, scale, scores + at, filled);
    }
    for (int64_t head = 0; head < heads.group; ++head)
        soften(scores + head * filled, count, filled, softcap, heads.sinks ? heads.sinks + head : nullptr);
    std::fill(output, output + heads.group * dim, 0.0f);
    for (int64_t run = 0, at = 0; run < text.count_runs; at += text.runs[run++].tokens)
        for (int64_t begin = 0; begin < text.runs[run].tokens; begin += kTogether) {
            const int64_t tokens = std::min(kTogether, text.runs[run].tokens - begin);
            const float *values = text.values + (text.runs[run].first + begin) * dim, *weights = scores + at + begin;
            next.fetch_keys(run, begin, tokens, dim);
            int64_t head = 0;
            for (; head + 2 <= heads.group; head += 2)
                weigh<2>(weights + head * filled, filled, values, tokens, dim, output + head * dim);
            if (head < heads.group) weigh<1>(weights + head * filled, filled, values, tokens, dim, output + head * dim);
        }
}
