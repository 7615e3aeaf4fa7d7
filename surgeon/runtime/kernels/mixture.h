// Mixtures of experts: which experts tokens are sent to, and what those make of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "pointwise.h"
#include "pool.h"
#include "product.h"

// How experts are chosen (surgeon/models/routing.py).
struct Routing {
    int64_t experts, chosen;
    bool sigmoid, normalise;
    float scale;
    int64_t groups, top_groups, group_best;
};

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Takes the place of the highest number left, `count` times, by calling taken(place). Numbers that are taken are lost.
template <typename Taken>
static inline void take_highest(float *numbers, int64_t size, int64_t count, const Taken &taken) {
    std::vector<char> gone(size, 0);
    for (int64_t turn = 0; turn < count; ++turn) {
        int64_t best = -1;
        for (int64_t at = 0; at < size; ++at)
            if (!gone[at] && (best < 0 || numbers[at] > numbers[best])) best = at;
        gone[best] = 1;
        taken(best);
    }
}

// Leaves out, as kNothing, scores of groups that are not chosen from.
static void keep_groups(const Routing &routing, float *scores) {
    const int64_t each = routing.experts / routing.groups;
    std::vector<float> best(routing.groups, 0.0f), left(routing.experts, kNothing);
    for (int64_t group = 0; group < routing.groups; ++group) {
        const float *own = scores + group * each;
        take_highest(scores + group * each, each, routing.group_best, [&](int64_t at) { best[group] += own[at]; });
    }
    take_highest(best.data(), routing.groups, routing.top_groups, [&](int64_t group) {
        std::copy_n(scores + group * each, each, left.data() + group * each);
    });
    std::copy(left.begin(), left.end(), scores);
}

// One token's experts, (chosen), and the weights of what they make of it, by the router's logits; correction may be null.
static void route_token(
    const Routing &routing, const float *logits, const float *correction, int32_t *experts, float *weights) {
    std::vector<float> scores(logits, logits + routing.experts);
    const float most = routing.sigmoid ? 0.0f : greatest(logits, routing.experts);
    float total = 0;
    for (float &score : scores) {
        score = routing.sigmoid ? 1.0f / (1.0f + std::exp(-score)) : std::exp(score - most);
        total += score;
    }
    if (!routing.sigmoid)
        for (float &score : scores) score /= total;
    std::vector<float> compared(scores);
    for (int64_t at = 0; correction && at < routing.experts; ++at) compared[at] += correction[at];
    if (routing.groups > 1) keep_groups(routing, compared.data());
    int64_t found = 0;
    float sum = 0;
    take_highest(compared.data(), routing.experts, routing.chosen, [&](int64_t expert) {
        experts[found] = static_cast<int32_t>(expert);
        sum += weights[found++] = scores[expert];
    });
    const float factor = routing.scale / (routing.normalise ? sum + 1e-20f : 1.0f);
    for (int64_t at = 0; at < routing.chosen; ++at) weights[at] *= factor;
}

// What one expert has: gates and values side by side (2 * neurons, hidden) in panels, (2 * neurons), what writes
// (hidden, neurons) in panels, (hidden); biases may be null.
struct Expert {
    const float *reading, *reading_bias, *writing, *writing_bias;
};

// Some experts of a mixture, those with numbers from `first` on, and where tokens go.
struct Mixture {
    const float *x;  // (tokens, hidden), `stride` numbers apart
    int64_t tokens, stride;
    const int32_t *chosen;  // (tokens, places)
    const float *weights;   // (tokens, places)
    int64_t places, first, count;
    const Expert *experts;
    int64_t hidden, neurons;
};

// The weighted sum of what its experts make of each token, (tokens, hidden); 0 for tokens that none of them gets.
//
// Experts are read once each, and only those that some token is sent to. Tokens of one expert lie side by side; threads
// share the panels of all experts, so that few tokens, of many small experts, take three rounds.
template <typename Combined>
static void mix(const Mixture &mixture, const Combined &combined, float *y) {
    static thread_local std::vector<float> gathered, wide, narrow, made;
    static thread_local std::vector<int64_t> begins, places;
    static thread_local std::vector<Product> reading, writing;
    const int64_t pairs = mixture.tokens * mixture.places, hidden = mixture.hidden, neurons = mixture.neurons;
    const auto own = [&](int64_t pair) { return mixture.chosen[pair] - mixture.first; };
    const auto is_own = [&](int64_t pair) { return own(pair) >= 0 && own(pair) < mixture.count; };
    begins.assign(mixture.count + 1, 0);  // where an expert's tokens begin
    for (int64_t pair = 0; pair < pairs; ++pair)
        if (is_own(pair)) ++begins[own(pair) + 1];
    for (int64_t expert = 0; expert < mixture.count; ++expert) begins[expert + 1] += begins[expert];
    const int64_t all = begins[mixture.count];
    places.assign(pairs, -1);  // of a pair's token among those of all experts
    for (int64_t pair = 0; pair < pairs; ++pair)
        if (is_own(pair)) places[pair] = begins[own(pair)]++;
    const auto room = [&](std::vector<float> &of, int64_t width) {
        if (static_cast<int64_t>(of.size()) < all * width) of.resize(all * width);
        return of.data();
    };
    float *const tokens = room(gathered, hidden), *const both = room(wide, 2 * neurons);
    float *const gated = room(narrow, neurons), *const outputs = room(made, hidden);
    for (int64_t pair = 0; pair < pairs; ++pair)
        if (places[pair] >= 0)
            std::copy_n(mixture.x + pair / mixture.places * mixture.stride, hidden, tokens + places[pair] * hidden);
    reading.clear(), writing.clear();
    for (int64_t expert = 0, begin = 0; expert < mixture.count; begin = begins[expert++]) {  // which are ends by now
        const int64_t count = begins[expert] - begin;
        if (!count) continue;
        const Expert &of = mixture.experts[expert];
        reading.push_back(
            {tokens + begin * hidden, count, hidden, Weight{of.reading, of.reading_bias, hidden, 2 * neurons},
             both + begin * 2 * neurons});
        writing.push_back(
            {gated + begin * neurons, count, neurons, Weight{of.writing, of.writing_bias, neurons, hidden},
             outputs + begin * hidden});
    }
    multiply(reading.data(), static_cast<int64_t>(reading.size()));
    gate(both, all, neurons, gated, combined);
    multiply(writing.data(), static_cast<int64_t>(writing.size()));
    const int64_t *const at = places.data();
    pool().share_rows(mixture.tokens, mixture.places * hidden, [&, at](int64_t token) {
        float *to = y + token * hidden;
        std::fill_n(to, hidden, 0.0f);
        for (int64_t pair = token * mixture.places; pair < (token + 1) * mixture.places; ++pair) {
            if (at[pair] < 0) continue;
            const float *from = outputs + at[pair] * hidden, weight = mixture.weights[pair];
            each(
                hidden, [&](int64_t one) { store(to + one, load(to + one) + load(from + one) * weight); },
                [&](int64_t one) { to[one] += from[one] * weight; });
        }
    });
}
