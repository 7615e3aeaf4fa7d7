// The functions that Python calls (functions.py). Sizes count float32 numbers unless something else is said.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.h"
#include "exchange.h"
#include "mixture.h"
#include "pointwise.h"
#include "pool.h"
#include "product.h"
#include "prompt.h"
#include "replay.h"
#include "vector.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))
// What a recording calls in place of the function.
#define RECORDABLE(name) \
    EXPORTED void recorded_##name(const int64_t *words) { apply(name, words); }

// How many threads share work from now on, the calling one included.
EXPORTED void set_threads(int64_t threads) { pool().set_threads(threads); }

// Tokens, (tokens, inputs) and `stride` numbers apart, times a weight in panels (product.h): to (tokens, outputs). Bias
// may be null.
EXPORTED void product(
    const float *x, int64_t tokens, int64_t stride, const float *weight, const float *bias, int64_t inputs,
    int64_t outputs, float *y) {
    multiply(x, tokens, stride, Weight{weight, bias, inputs, outputs}, y);
}

// RMS norms of tokens, (tokens, width).
EXPORTED void rms_norm(const float *x, const float *gain, float epsilon, int64_t tokens, int64_t width, float *y) {
    pool().share_rows(tokens, width, [&](int64_t token) {
        const float *own = x + token * width;
        norm(own, gain, mean_square(own, width) + epsilon, width, y + token * width);
    });
}

// Norms heads of (tokens, heads, dim) and turns their first `width` features, in place. Gain, (heads, dim), and angles,
// (tokens, width), may be null; tokens are `stride` numbers apart. Heads are normed by themselves, or by mean squares,
// (tokens, 2), of all queries, which are the first heads, and of all keys.
EXPORTED void place(
    float *x, int64_t tokens, int64_t stride, int64_t heads, int64_t dim, const float *gain, float epsilon,
    const float *cosine, const float *sine, int64_t width, const float *squares, int64_t queries) {
    pool().share_rows(tokens, heads * dim, [&](int64_t token) {
        for (int64_t head = 0; head < heads; ++head) {
            float *own = x + token * stride + head * dim;
            const float square = !gain ? 0 : squares ? squares[2 * token + (head >= queries)] : mean_square(own, dim);
            if (gain) norm(own, gain + head * dim, square + epsilon, dim, own);
            if (cosine) turn(own, cosine + token * width, sine + token * width, width);
        }
    });
}

// Mean squares of so many numbers of tokens `stride` apart, and of the ones behind them: to (tokens, 2).
EXPORTED void mean_squares(const float *x, int64_t tokens, int64_t stride, int64_t first, int64_t second, float *y) {
    pool().share_rows(tokens, first + second, [&](int64_t token) {
        const float *own = x + token * stride;
        y[2 * token] = mean_square(own, first);
        y[2 * token + 1] = mean_square(own + first, second);
    });
}

// Activated gates times values, (tokens, width), of both side by side, (tokens, 2, width).
EXPORTED void gated_silu(const float *wide, int64_t tokens, int64_t width, float *y) {
    gate(wide, tokens, width, y, Gated<Silu>{});
}

EXPORTED void gated_tanh_gelu(const float *wide, int64_t tokens, int64_t width, float *y) {
    gate(wide, tokens, width, y, Gated<TanhGelu>{});
}

// Which of `experts` tokens are sent to, (tokens, chosen), and the weights of what those make of them, by the router's
// logits, (tokens, experts); correction, (experts), may be null.
EXPORTED void route(
    const float *logits, int64_t tokens, int64_t experts, const float *correction, int64_t chosen, int64_t sigmoid,
    int64_t normalise, float scale, int64_t groups, int64_t top_groups, int64_t group_best, int32_t *numbers,
    float *weights) {
    const Routing routing{experts, chosen, sigmoid != 0, normalise != 0, scale, groups, top_groups, group_best};
    pool().share_rows(tokens, experts * chosen, [&](int64_t token) {
        const int64_t own = token * chosen;
        route_token(routing, logits + token * experts, correction, numbers + own, weights + own);
    });
}

// What experts with numbers from `first` on make of tokens, (tokens, hidden), each weighted and all added. Gates are
// activated by silu (0) or by the other function (1), or clamped with `alpha` up to `limit` (2).
EXPORTED void mixture(
    const float *x, int64_t tokens, int64_t stride, const int32_t *chosen, const float *weights, int64_t places,
    int64_t first, int64_t count, const Expert *experts, int64_t hidden, int64_t neurons, int64_t activation,
    float alpha, float limit, float *y) {
    const Mixture own{x, tokens, stride, chosen, weights, places, first, count, experts, hidden, neurons};
    if (activation == 2) mix(own, Clamped{alpha, limit}, y);
    else if (activation == 1) mix(own, Gated<TanhGelu>{}, y);
    else mix(own, Gated<Silu>{}, y);
}

// Puts keys and values of tokens, (tokens, heads, dim), into their places of a cache, (heads, places, dim), but for
// places below 0.
EXPORTED void keep(
    const float *x, int64_t tokens, int64_t stride, int64_t heads, int64_t dim, const int64_t *places, float *cache,
    int64_t plane) {
    pool().share_rows(heads, tokens * dim, [&](int64_t head) {
        for (int64_t token = 0; token < tokens; ++token)
            if (places[token] >= 0) std::memcpy(
                cache + head * plane + places[token] * dim, x + token * stride + head * dim, sizeof(float) * dim);
    });
}

// Attended values, (texts, heads, dim), of one token of each text. Queries are `stride` numbers apart; keys and behind
// them values are (2 * kv_heads, places, dim), `plane` numbers a head; text t reads runs[ends[t - 1]] to runs[ends[t]]. Sinks,
// (heads), may be null.
EXPORTED void attend(
    const float *queries, int64_t stride, int64_t texts, int64_t heads, int64_t kv_heads, int64_t dim,
    const float *cache, int64_t plane, const Run *runs, const int64_t *ends, float scale, float softcap,
    const float *sinks, float *y) {
    const int64_t group = kv_heads ? heads / kv_heads : 0, tasks = texts * kv_heads;
    const auto text = [&](int64_t task) {
        const int64_t own = task / kv_heads, head = task % kv_heads, first = own ? ends[own - 1] : 0;
        return Text{cache + head * plane, cache + (kv_heads + head) * plane, runs + first, ends[own] - first};
    };
    pool().share(tasks, [&](int64_t task) {
        const int64_t head = task % kv_heads, next = task + pool().threads();
        const float *query = queries + task / kv_heads * stride + head * group * dim;
        const Heads own{query, group, dim, sinks ? sinks + head * group : nullptr};
        attend_one(own, text(task), next < tasks ? text(next) : Text{}, scale, softcap, y + task * group * dim);
    });
}

// Attended values, (tokens, heads, dim), of consecutive tokens of one text, the first at position `start`. Runs are of
// keys from position `first_key` on; a token looks at `window` keys up to itself, or at all for 0.
EXPORTED void attend_text(
    const float *queries, int64_t stride, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
    const float *cache, int64_t plane, const Run *runs, int64_t count_runs, int64_t first_key, int64_t start,
    int64_t window, float scale, float softcap, const float *sinks, float *y) {
    static thread_local std::vector<int64_t> places;
    places.clear();
    for (int64_t run = 0; run < count_runs; ++run)
        for (int64_t at = 0; at < runs[run].tokens; ++at) places.push_back(runs[run].first + at);
    attend_prompt(Prompt{
        queries, stride, tokens, heads, kv_heads, dim, cache, plane, places.data(), first_key, start, window, scale,
        softcap, sinks, y});
}

// x + y, of `count` numbers.
EXPORTED void add(const float *x, const float *y, int64_t count, float *total) {
    each(
        count, [&](int64_t at) { store(total + at, load(x + at) + load(y + at)); },
        [&](int64_t at) { total[at] = x[at] + y[at]; });
}

// `count` numbers times a factor.
EXPORTED void scale(const float *x, float factor, int64_t count, float *y) {
    each(count, [&](int64_t at) { store(y + at, load(x + at) * factor); }, [&](int64_t at) { y[at] = x[at] * factor; });
}

// Copies rows of `width` numbers that are `stride` apart to where they are `to_stride` apart.
EXPORTED void copy_rows(const float *x, int64_t rows, int64_t stride, int64_t width, float *to, int64_t to_stride) {
    for (int64_t row = 0; row < rows; ++row)
        std::memcpy(to + row * to_stride, x + row * stride, sizeof(float) * width);
}

// Numbers of tokens, (tokens, width), between -bound and bound, in place.
EXPORTED void softcap(float *x, float bound, int64_t tokens, int64_t width) {
    pool().share_rows(tokens, width, [&](int64_t token) { cap(x + token * width, bound, width); });
}

// Rows of a table, (rows, width), of which the first has the number `first`; zeros for numbers that none has.
EXPORTED void take_rows(
    const float *table, int64_t first, int64_t rows, int64_t width, const int64_t *numbers, int64_t count, float *y) {
    for (int64_t at = 0; at < count; ++at) {
        const int64_t row = numbers[at] - first;
        if (row < 0 || row >= rows) std::memset(y + at * width, 0, sizeof(float) * width);
        else std::memcpy(y + at * width, table + row * width, sizeof(float) * width);
    }
}

// The same of a table that lies in panels, as a weight with `rows` outputs and `width` inputs does.
EXPORTED void take_packed_rows(
    const float *panels, int64_t first, int64_t rows, int64_t width, const int64_t *numbers, int64_t count, float *y) {
    pool().share_rows(count, kPanel * width, [&](int64_t at) {  // each number is in a line of the cache of its own
        const int64_t row = numbers[at] - first;
        const bool known = row >= 0 && row < rows;
        const int64_t begin = row / kPanel * kPanel, columns = width_of(rows - begin);
        const float *from = panels + begin * width + row % kPanel;
        for (int64_t number = 0; number < width; ++number) y[at * width + number] = known ? from[number * columns] : 0.0f;
    });
}

// The highest of the numbers of each token, (tokens, width), and the first place where it is; NaN, if there is one.
EXPORTED void highest(const float *x, int64_t tokens, int64_t width, float *best, int64_t *places) {
    pool().share_rows(tokens, width, [&](int64_t token) {
        const float *own = x + token * width, *end = own + width;
        float most = -std::numeric_limits<float>::infinity();
        Vector mosts = spread(most), odd{};
        each(
            width,
            [&](int64_t at) {
                const Vector numbers = load(own + at);
                mosts = numbers > mosts ? numbers : mosts;
                odd += numbers - numbers;  // NaN from the first number on that is not finite
            },
            [&](int64_t at) {
                most = std::max(most, own[at]);
                odd[0] += own[at] - own[at];
            });
        for (int64_t lane = 0; lane < kLanes; ++lane) most = std::max(most, mosts[lane]);
        const float *found = end;
        if (sum(odd) != 0) found = std::find_if(own, end, [](float number) { return number != number; });  // NaN is not 0
        if (found == end) found = std::find(own, end, most);
        best[token] = *found;
        places[token] = found - own;
    });
}

EXPORTED void start_exchange(Exchanges *own, const float *part, int64_t count) { start(*own, part, count); }

EXPORTED void finish_sum(Exchanges *own, int64_t back, int64_t count, float *y) {
    finish(*own, back, [&](int64_t slot) { sum_parts(*own, slot, count, y); });
}

EXPORTED void finish_gather(Exchanges *own, int64_t back, int64_t count, float *y) {
    finish(*own, back, [&](int64_t slot) { gather_parts(*own, slot, count, y); });
}

RECORDABLE(product)
RECORDABLE(rms_norm)
RECORDABLE(place)
RECORDABLE(mean_squares)
RECORDABLE(gated_silu)
RECORDABLE(gated_tanh_gelu)
RECORDABLE(route)
RECORDABLE(mixture)
RECORDABLE(keep)
RECORDABLE(attend)
RECORDABLE(add)
RECORDABLE(scale)
RECORDABLE(copy_rows)
RECORDABLE(softcap)
RECORDABLE(take_rows)
RECORDABLE(take_packed_rows)
RECORDABLE(start_exchange)
RECORDABLE(finish_sum)
RECORDABLE(finish_gather)

// What the first product among some calls reads first.
static ReadNext first_weight(const Call *call, const Call *end) {
    call = std::find_if(call, end, [](const Call &one) { return one.apply == recorded_product; });
    if (call == end) return {};
    const auto *words = call->arguments;  // as `product` has them
    return {argument<const float *>(words[3]), words[5] * words[6]};
}

// Makes the calls; `times`, if not null, is told when the first one began and when each had ended, (count + 1), in
// nanoseconds of the monotonic clock.
EXPORTED void replay(const Call *calls, int64_t count, int64_t *times) {
    const auto tell = [&](int64_t at) {
        if (!times) return;
        const auto now = std::chrono::steady_clock::now().time_since_epoch();
        times[at] = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    };
    tell(0);
    for (int64_t at = 0; at < count; ++at) {
        const bool waits = calls[at].apply == recorded_finish_sum;
        read_next = waits ? first_weight(calls + at + 1, calls + count) : ReadNext{};
        calls[at].apply(calls[at].arguments);
        tell(at + 1);
    }
}
