// Attention of single tokens, each over the keys and values of its own text, which lie in runs of a paged cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "pointwise.h"
#include "vector.h"

constexpr int64_t kTogether = 64;  // tokens whose values stay in the nearest cache while all heads of a group use them
constexpr int64_t kWide = 4;       // vectors of an output that are summed at once

struct Heads {
    const float *query;  // (group, dim)
    int64_t group, dim;
};

// Scores of a run's keys, (tokens, dim), to (group, stride) from a place on.
//
// Keys and values of a text lie in several stretches, each too short for the processor to see one coming: while one is
// worked with, the next one is fetched, here the run's values.
static inline void score(
    const Heads &heads, const float *keys, const float *values, int64_t tokens, float scale, float *scores,
    int64_t stride) {
    const int64_t dim = heads.dim, whole = dim / (2 * kLanes) * (2 * kLanes);
    for (int64_t token = 0; token < tokens; ++token) {
        const float *key = keys + token * dim;
        fetch(values + token * dim, dim * sizeof(float));
        for (int64_t head = 0; head < heads.group; ++head) {
            const float *query = heads.query + head * dim;
            Vector even{}, odd{};
            for (int64_t at = 0; at < whole; at += 2 * kLanes) {
                even += load(query + at) * load(key + at);
                odd += load(query + at + kLanes) * load(key + at + kLanes);
            }
            float product = sum(even + odd);
            for (int64_t at = whole; at < dim; ++at) product += query[at] * key[at];
            scores[head * stride + token] = product * scale;
        }
    }
}

// Scores, a whole number of vectors, to weights whose sum is 1; those from `count` on become 0.
static inline void soften(float *scores, int64_t count, int64_t filled, float softcap) {
    if (softcap > 0) cap(scores, softcap, count);
    const float most = greatest(scores, count);
    for (int64_t at = count; at < filled; ++at) scores[at] = most;
    Vector total{};
    for (int64_t at = 0; at < filled; at += kLanes) {
        const Vector weight = exponential(load(scores + at) - most);
        store(scores + at, weight);
        total += weight;
    }
    float rest = 0;
    for (int64_t at = count; at < filled; ++at) rest += scores[at];
    const float inverse = 1.0f / (sum(total) - rest);
    for (int64_t at = 0; at < filled; at += kLanes) store(scores + at, load(scores + at) * inverse);
}

// Adds weighted values, (tokens, dim), to one head's output.
static inline void weigh(const float *weights, const float *values, int64_t tokens, int64_t dim, float *output) {
    int64_t at = 0;
    for (; at + kWide * kLanes <= dim; at += kWide * kLanes) {
        Vector sums[kWide];
        for (int64_t part = 0; part < kWide; ++part) sums[part] = load(output + at + part * kLanes);
        for (int64_t token = 0; token < tokens; ++token) {
            const Vector weight = spread(weights[token]);
            for (int64_t part = 0; part < kWide; ++part)
                sums[part] += weight * load(values + token * dim + at + part * kLanes);
        }
        for (int64_t part = 0; part < kWide; ++part) store(output + at + part * kLanes, sums[part]);
    }
    for (; at < dim; ++at)
        for (int64_t token = 0; token < tokens; ++token) output[at] += weights[token] * values[token * dim + at];
}

struct Run {
    int64_t first, tokens;  // places in the cache
};

// One text and one head of keys and values.
//
// `following`: keys that this thread will probably read next, (tokens, dim), perhaps none.
static inline void attend_one(
    const Heads &heads, const float *keys, const float *values, const Run *runs, int64_t count_runs, float scale,
    float softcap, float *output, const float *following, int64_t following_tokens) {
    static thread_local std::vector<float> room;
    int64_t count = 0;
    for (int64_t run = 0; run < count_runs; ++run) count += runs[run].tokens;
    const int64_t filled = (count + kLanes - 1) / kLanes * kLanes;
    if (static_cast<int64_t>(room.size()) < heads.group * filled) room.resize(heads.group * filled);
    float *scores = room.data();
    for (int64_t run = 0, at = 0; run < count_runs; at += runs[run++].tokens)
        score(
            heads, keys + runs[run].first * heads.dim, values + runs[run].first * heads.dim, runs[run].tokens, scale,
            scores + at, filled);
    for (int64_t head = 0; head < heads.group; ++head) soften(scores + head * filled, count, filled, softcap);
    std::fill(output, output + heads.group * heads.dim, 0.0f);
    for (int64_t run = 0, at = 0; run < count_runs; at += runs[run++].tokens)
        for (int64_t begin = 0; begin < runs[run].tokens; begin += kTogether) {
            const int64_t tokens = std::min(kTogether, runs[run].tokens - begin);
            const float *own = values + (runs[run].first + begin) * heads.dim;
            const int64_t next = std::min(at + begin + tokens, following_tokens) - (at + begin);
            if (next > 0) fetch(following + (at + begin) * heads.dim, next * heads.dim * sizeof(float));
            for (int64_t head = 0; head < heads.group; ++head)
                weigh(scores + head * filled + at + begin, own, tokens, heads.dim, output + head * heads.dim);
        }
}
