// Attention of many tokens of one text, such as a prompt, over its keys and values in a paged cache.
//
// Tokens go through in blocks, with all heads that share a head of keys, over 64 keys at a time: scores are a product
// with the transposed keys as its panel, and what is attended one with the values, both with the tiles of product.h.
// Weights are made relative to the highest score so far; when a higher one comes, what has been summed is scaled down
// (as FlashAttention does).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "product.h"

constexpr int64_t kBlockRows = 48;  // of a token and a head each, about, that share what is read of keys and values

// What one text's tokens look at.
struct Prompt {
    const float *queries;  // (tokens, heads, dim), `stride` numbers apart
    int64_t stride, tokens, heads, kv_heads, dim;
    const float *cache;  // (2 * kv_heads, places, dim), `plane` numbers a head
    int64_t plane;
    const Run *runs;  // of keys, from position `first_key` on
    int64_t count_runs, first_key, start;  // of the first query's position
    int64_t window;                        // keys that a token looks at, itself the last; 0 for all up to itself
    float scale, softcap;
    float *y;  // (tokens, heads, dim)
};

// Room for one block's work: what belongs to its rows, and to 64 keys.
struct BlockRoom {
    std::vector<float> queries, keys, values, scores, weights, sums, highest, total;
    std::vector<int64_t> places;

    // Panels of values, (64, 64) each, have `dim` columns together.
    void reserve(int64_t rows, int64_t dim, int64_t panels) {
        queries.resize(rows * dim);
        keys.resize(dim * kPanel);
        values.resize(panels * kPanel * kPanel);
        scores.resize(rows * kPanel);
        weights.resize(rows * kPanel);
        sums.assign(panels * rows * kPanel, 0.0f);
        highest.assign(rows, -INFINITY);
        total.assign(rows, 0.0f);
    }
};

class PromptBlock {
public:
    // Some tokens of a text, from `token` on, with the heads of one head of keys.
    PromptBlock(const Prompt &prompt, int64_t head, int64_t token, int64_t tokens, BlockRoom &room)
        : prompt_(prompt), head_(head), token_(token), group_(prompt.heads / prompt.kv_heads), tiles_(tokens * group_),
          panels_((prompt.dim + kPanel - 1) / kPanel), room_(room) {}

    void attend() {
        room_.reserve(tiles_.tokens, prompt_.dim, panels_);
        find_places();
        pack_queries();
        const int64_t last = position(tiles_.tokens - 1);
        for (int64_t key = seen_from(position(0)); key <= last; key += kPanel) {
            const int64_t keys = std::min(kPanel, last + 1 - key);
            pack_keys(key, keys);
            multiply(room_.queries.data(), room_.keys.data(), prompt_.dim, true, room_.scores.data());
            for (int64_t row = 0; row < tiles_.tokens; ++row) soften_row(row, key);
            pack_rows(room_.scores.data(), kPanel, room_.weights.data());
            for (int64_t panel = 0; panel < panels_; ++panel)
                multiply(
                    room_.weights.data(), room_.values.data() + panel * kPanel * kPanel, keys, false,
                    room_.sums.data() + panel * tiles_.tokens * kPanel);
        }
        write();
    }

private:
    int64_t position(int64_t row) const { return prompt_.start + token_ + row / group_; }

    // The first position that a token at this one looks at.
    int64_t seen_from(int64_t position) const {
        const int64_t first = prompt_.window ? position + 1 - prompt_.window : 0;
        return std::max(first, prompt_.first_key);
    }

    void find_places() {
        room_.places.clear();
        for (int64_t run = 0; run < prompt_.count_runs; ++run)
            for (int64_t at = 0; at < prompt_.runs[run].tokens; ++at)
                room_.places.push_back(prompt_.runs[run].first + at);
    }

    const float *query(int64_t row) const {
        const int64_t head = head_ * group_ + row % group_;
        return prompt_.queries + (token_ + row / group_) * prompt_.stride + head * prompt_.dim;
    }

    void pack_queries() {
        for (int64_t tile = 0; tile < tiles_.count; ++tile) {
            const int64_t first = tiles_.first(tile), rows = tiles_.first(tile + 1) - first;
            for (int64_t row = 0; row < rows; ++row) {
                const float *from = query(first + row);
                float *to = room_.queries.data() + first * prompt_.dim + row;
                for (int64_t at = 0; at < prompt_.dim; ++at) to[at * rows] = from[at] * prompt_.scale;
            }
        }
    }

    // Rows, (rows, 64), to (64, rows of the tile) for each tile.
    void pack_rows(const float *from, int64_t columns, float *packed) {
        for (int64_t tile = 0; tile < tiles_.count; ++tile) {
            const int64_t first = tiles_.first(tile), rows = tiles_.first(tile + 1) - first;
            float *to = packed + first * columns;
            for (int64_t row = 0; row < rows; ++row)
                for (int64_t at = 0; at < columns; ++at) to[at * rows + row] = from[(first + row) * kPanel + at];
        }
    }

    // Keys as (dim, 64) and values as (keys, 64) for each panel.
    void pack_keys(int64_t first, int64_t keys) {
        const int64_t dim = prompt_.dim;
        const float *head_keys = prompt_.cache + head_ * prompt_.plane;
        const float *head_values = head_keys + prompt_.kv_heads * prompt_.plane;
        for (int64_t key = 0; key < keys; ++key) {
            const int64_t place = room_.places[first - prompt_.first_key + key];
            const float *from = head_keys + place * dim, *value = head_values + place * dim;
            for (int64_t at = 0; at < dim; ++at) room_.keys[at * kPanel + key] = from[at];
            for (int64_t panel = 0; panel < panels_; ++panel)
                std::copy_n(
                    value + panel * kPanel, std::min(kPanel, dim - panel * kPanel),
                    room_.values.data() + (panel * kPanel + key) * kPanel);
        }
        for (int64_t key = keys; key < kPanel; ++key)
            for (int64_t at = 0; at < dim; ++at) room_.keys[at * kPanel + key] = 0;
    }

    // Packed rows times a panel: written to sums, (rows, 64), or added to them.
    void multiply(const float *packed, const float *panel, int64_t inputs, bool first, float *sums) {
        const int64_t width = first ? inputs : kPanel;  // of what is packed
        for (int64_t column = 0; column < kPanel; column += kColumns * kLanes) {
            const Chunk chunk{panel + column, kPanel, nullptr, kPanel, inputs, first, false};
            for (int64_t tile = 0; tile < tiles_.count; ++tile) {
                const int64_t at = tiles_.first(tile), rows = tiles_.first(tile + 1) - at;
                float *own = sums + at * kPanel + column;
                add_rows<kColumns>(
                    rows, chunk, packed + at * width, own, own, Fetch{reinterpret_cast<const char *>(panel), 0});
            }
        }
    }

    // One row's scores of 64 keys to weights relative to the highest score so far.
    void soften_row(int64_t row, int64_t key) {
        float *scores = room_.scores.data() + row * kPanel;
        const int64_t own = position(row);
        const int64_t from = std::max<int64_t>(0, seen_from(own) - key), end = std::min(kPanel, own + 1 - key);
        if (from >= end) {
            std::fill_n(scores, kPanel, 0.0f);
            return;
        }
        if (prompt_.softcap > 0) cap(scores + from, prompt_.softcap, end - from);
        float highest = room_.highest[row];
        for (int64_t at = from; at < end; ++at) highest = std::max(highest, scores[at]);
        if (highest > room_.highest[row]) lower(row, highest);
        for (int64_t at = 0; at < kPanel; at += kLanes)
            store(scores + at, exponential(load(scores + at) - room_.highest[row]));
        std::fill(scores, scores + from, 0.0f);
        std::fill(scores + end, scores + kPanel, 0.0f);
        Vector total{};
        for (int64_t at = 0; at < kPanel; at += kLanes) total += load(scores + at);
        room_.total[row] += sum(total);
    }

    // Scale what has been summed of a row down to a new highest score.
    void lower(int64_t row, float highest) {
        const float factor = std::exp(room_.highest[row] - highest);  // 0 at first
        room_.highest[row] = highest;
        room_.total[row] *= factor;
        for (int64_t panel = 0; panel < panels_; ++panel) {
            float *sums = room_.sums.data() + (panel * tiles_.tokens + row) * kPanel;
            for (int64_t at = 0; at < kPanel; at += kLanes) store(sums + at, load(sums + at) * factor);
        }
    }

    void write() {
        for (int64_t row = 0; row < tiles_.tokens; ++row) {
            const int64_t head = head_ * group_ + row % group_;
            float *to = prompt_.y + ((token_ + row / group_) * prompt_.heads + head) * prompt_.dim;
            const float inverse = 1.0f / room_.total[row];
            for (int64_t at = 0; at < prompt_.dim; ++at)
                to[at] = room_.sums[(at / kPanel * tiles_.tokens + row) * kPanel + at % kPanel] * inverse;
        }
    }

    const Prompt &prompt_;
    const int64_t head_, token_, group_;
    const Tiles tiles_;  // of rows
    const int64_t panels_;
    BlockRoom &room_;
};

static void attend_prompt(const Prompt &prompt) {
    if (!prompt.kv_heads) return;
    const int64_t group = prompt.heads / prompt.kv_heads;
    const int64_t together = std::max<int64_t>(1, kBlockRows / group), blocks = (prompt.tokens + together - 1) / together;
    pool().share(blocks * prompt.kv_heads, [&](int64_t task) {
        static thread_local BlockRoom room;
        const int64_t token = (blocks - 1 - task / prompt.kv_heads) * together;  // those with most keys first
        const int64_t tokens = std::min(together, prompt.tokens - token);
        PromptBlock(prompt, task % prompt.kv_heads, token, tokens, room).attend();
    });
}
