// Attention of many tokens of one text, such as a prompt, over its keys and values in a paged cache.
//
// Rows are tokens and heads that share a head of keys. They go through in blocks of up to 64, over 64 keys at a time: the
// scores, (keys, rows), are a product of keys where they lie with the block's queries as its panel, and what is attended
// is one of those with the values, both with the tiles of product.h. So rows lie side by side in vectors when weights are
// made of their scores, relative to the highest so far; when a higher one comes, what has been summed is scaled down (as
// FlashAttention does).
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "attention.h"
#include "product.h"

constexpr float kUnseen = -FLT_MAX;  // in place of the score of a key that a row does not look at

// What one text's tokens look at.
struct Prompt {
    const float *queries;  // (tokens, heads, dim), `stride` numbers apart
    int64_t stride, tokens, heads, kv_heads, dim;
    const float *cache;  // (2 * kv_heads, places, dim), `plane` numbers a head
    int64_t plane;
    const int64_t *places;     // of keys in it, from position `first_key` on
    int64_t first_key, start;  // the latter the first query's position
    int64_t window;            // keys that a token looks at, itself the last; 0 for all up to itself
    float scale, softcap;
    const float *sinks;  // of heads, (heads): scores of keys that have no values; or null
    float *y;  // (tokens, heads, dim)
};

// Room for one block's work: what belongs to its rows, and to 64 keys.
struct BlockRoom {
    std::vector<float> queries, values, scores, sums, highest, factors, total;

    // Panels of values, (64, 64) each, have `dim` columns together.
    void reserve(int64_t dim, int64_t panels) {
        queries.assign(dim * kPanel, 0.0f);
        values.resize(panels * kPanel * kPanel);
        scores.resize(kPanel * kPanel);
        sums.assign(panels * kPanel * kPanel, 0.0f);
        highest.assign(kPanel, kUnseen);
        factors.resize(kPanel);
        total.assign(kPanel, 0.0f);
    }
};

class PromptBlock {
public:
    // Some rows of a text, of one head of keys.
    PromptBlock(const Prompt &prompt, int64_t head, int64_t first, int64_t rows, BlockRoom &room)
        : prompt_(prompt), head_(head), first_(first), rows_(rows), group_(prompt.heads / prompt.kv_heads),
          panels_((prompt.dim + kPanel - 1) / kPanel), tiles_(rows), room_(room) {}

    void attend() {
        room_.reserve(prompt_.dim, panels_);
        for (int64_t row = 0; prompt_.sinks && row < rows_; ++row) {
            room_.highest[row] = prompt_.sinks[head_ * group_ + (first_ + row) % group_];
            room_.total[row] = 1.0f;
        }
        pack_queries();
        const int64_t last = position(rows_ - 1);
        const int64_t from = prompt_.window ? position(0) + 1 - prompt_.window : 0;
        for (int64_t key = std::max(from, prompt_.first_key); key <= last; key += kPanel) {
            const int64_t keys = std::min(kPanel, last + 1 - key);
            score(key, keys);
            if (prompt_.softcap > 0) cap(room_.scores.data(), prompt_.softcap, keys * kPanel);
            const bool seen = key + keys - 1 <= position(0) && (!prompt_.window || key > last - prompt_.window);
            if (!seen)
                for (int64_t at = 0; at < keys; ++at) hide(key + at, room_.scores.data() + at * kPanel);
            for (int64_t row = 0; row < rows_; row += kLanes) seen ? soften<true>(row, keys) : soften<false>(row, keys);
            scale_down();
            find_values(key, keys);
            for (int64_t panel = 0; panel < panels_; ++panel) weigh(panel, keys);
        }
        write();
    }

private:
    int64_t position(int64_t row) const { return prompt_.start + (first_ + row) / group_; }

    // Where a row is in queries, `stride` numbers a token, or in what is written.
    int64_t offset(int64_t row, int64_t stride) const {
        return (first_ + row) / group_ * stride + (head_ * group_ + (first_ + row) % group_) * prompt_.dim;
    }

    // As (dim, 64).
    void pack_queries() {
        for (int64_t row = 0; row < rows_; ++row)
            fetch(prompt_.queries + offset(row, prompt_.stride), prompt_.dim * sizeof(float));
        for (int64_t row = 0; row < rows_; ++row) {
            const float *from = prompt_.queries + offset(row, prompt_.stride);
            for (int64_t at = 0; at < prompt_.dim; ++at) room_.queries[at * kPanel + row] = from[at] * prompt_.scale;
        }
    }

    const float *key(int64_t position) const {
        return prompt_.cache + head_ * prompt_.plane + prompt_.places[position - prompt_.first_key] * prompt_.dim;
    }

    const float *value(int64_t position) const { return key(position) + prompt_.kv_heads * prompt_.plane; }

    // Scores of some keys from a position on: (keys, 64).
    void score(int64_t first, int64_t keys) {
        const Tiles tiles(keys);
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
            const int64_t begin = tiles.first(tile);
            with_rows(tiles.first(tile + 1) - begin, [&](auto constant) {
                constexpr int kRows = constant();
                const float *from[kRows];
                for (int row = 0; row < kRows; ++row) from[row] = key(first + begin + row);
                const auto number = [&from](int64_t input, int row) { return from[row][input]; };
                for (int64_t column = 0; column < rows_; column += kColumns * kLanes) {
                    const float *queries = room_.queries.data() + column;
                    const Chunk chunk{queries, kPanel, nullptr, kPanel, prompt_.dim, true, false};
                    float *to = room_.scores.data() + begin * kPanel + column;
                    add_tile<kRows, kColumns>(chunk, number, to, to, Near{});
                }
            });
        }
    }

    // Overwrites the scores of one key for the rows that do not look at it, which come before others or after them.
    void hide(int64_t key, float *scores) const {
        const int64_t before = (key - prompt_.start) * group_ - first_;
        std::fill_n(scores, std::clamp<int64_t>(before, 0, rows_), kUnseen);
        if (!prompt_.window) return;
        const int64_t end = std::clamp<int64_t>(before + prompt_.window * group_, 0, rows_);
        std::fill(scores + end, scores + rows_, kUnseen);
    }

    // Scores of a vector of rows to weights relative to the highest score so far. kSeen: all rows look at all keys.
    template <bool kSeen>
    void soften(int64_t row, int64_t keys) {
        float *scores = room_.scores.data() + row;
        const Vector before = load(room_.highest.data() + row), unseen = spread(kUnseen);
        Vector highest = before;
        for (int64_t at = 0; at < keys; ++at) {
            const Vector own = load(scores + at * kPanel);
            highest = own > highest ? own : highest;
        }
        Vector total{};
        for (int64_t at = 0; at < keys; ++at) {
            const Vector own = load(scores + at * kPanel);
            Vector weight = exponential(own - highest);
            if (!kSeen) weight = own == unseen ? Vector{} : weight;
            store(scores + at * kPanel, weight);
            total += weight;
        }
        const Vector factor = exponential(before - highest);
        store(room_.highest.data() + row, highest);
        store(room_.factors.data() + row, factor);
        store(room_.total.data() + row, load(room_.total.data() + row) * factor + total);
    }

    // What has been summed of rows, to their new highest scores.
    void scale_down() {
        for (int64_t row = 0; row < rows_; ++row) {
            const float factor = room_.factors[row];
            if (factor == 1.0f) continue;
            for (int64_t panel = 0; panel < panels_; ++panel) {
                float *sums = room_.sums.data() + (panel * kPanel + row) * kPanel;
                for (int64_t at = 0; at < kPanel; at += kLanes) store(sums + at, load(sums + at) * factor);
            }
        }
    }

    // Values of some keys from a position on: where they lie if that is side by side, else as (keys, 64) for each panel.
    void find_values(int64_t first, int64_t keys) {
        const int64_t dim = prompt_.dim, place = prompt_.places[first - prompt_.first_key];
        bool together = dim % kPanel == 0;
        for (int64_t at = 0; at < keys; ++at)
            together &= prompt_.places[first + at - prompt_.first_key] == place + at;
        values_ = together ? value(first) : room_.values.data();
        width_ = together ? dim : kPanel;
        apart_ = together ? kPanel : kPanel * kPanel;
        if (together) return;
        for (int64_t at = 0; at < keys; ++at)
            for (int64_t column = 0; column < dim; column += kPanel)
                std::copy_n(
                    value(first + at) + column, std::min(kPanel, dim - column),
                    room_.values.data() + (column + at) * kPanel);
    }

    // Adds values of some keys, times their weights, to sums of one panel, (64, 64).
    void weigh(int64_t panel, int64_t keys) {
        const float *values = values_ + panel * apart_;
        const int64_t columns = std::min(kPanel, prompt_.dim - panel * kPanel);
        for (int64_t column = 0; column < columns; column += kColumns * kLanes) {
            const Chunk chunk{values + column, width_, nullptr, kPanel, keys, false, false};
            for (int64_t tile = 0; tile < tiles_.count; ++tile) {
                const int64_t begin = tiles_.first(tile);
                const float *weights = room_.scores.data() + begin;
                float *sums = room_.sums.data() + (panel * kPanel + begin) * kPanel + column;
                const auto number = [weights](int64_t at, int row) { return weights[at * kPanel + row]; };
                with_rows(tiles_.first(tile + 1) - begin, [&](auto constant) {
                    add_tile<constant(), kColumns>(chunk, number, sums, sums, Near{});
                });
            }
        }
    }

    void write() {
        for (int64_t row = 0; row < rows_; ++row) {
            float *to = prompt_.y + offset(row, prompt_.heads * prompt_.dim);
            // The highest score, or sink, has the weight 1; without one none was a number, or all were -inf.
            const float inverse = room_.total[row] >= 0.5f ? 1.0f / room_.total[row] : NAN;
            for (int64_t column = 0; column < prompt_.dim; column += kPanel) {
                const float *sums = room_.sums.data() + (column + row) * kPanel;
                for (int64_t at = 0; at < std::min(kPanel, prompt_.dim - column); ++at) to[column + at] = sums[at] * inverse;
            }
        }
    }

    const Prompt &prompt_;
    const int64_t head_, first_, rows_, group_, panels_;
    const Tiles tiles_;  // of rows
    BlockRoom &room_;
    const float *values_ = nullptr;  // of the keys that are looked at: of one panel, (keys, 64), tokens `width_` apart
    int64_t width_ = 0, apart_ = 0;  // the latter between panels
};

static void attend_prompt(const Prompt &prompt) {
    if (!prompt.kv_heads) return;
    const int64_t rows = prompt.tokens * (prompt.heads / prompt.kv_heads), blocks = (rows + kPanel - 1) / kPanel;
    pool().share(blocks * prompt.kv_heads, [&](int64_t task) {
        static thread_local BlockRoom room;
        const int64_t block = blocks - 1 - task / prompt.kv_heads;  // those with most keys first
        const int64_t first = rows * block / blocks, end = rows * (block + 1) / blocks;
        PromptBlock(prompt, task % prompt.kv_heads, first, end - first, room).attend();
    });
}
