// Products of few tokens with weights as oneDNN packs them: panels of 64 columns, of one input after the other.
//
// A panel is read from memory once, in chunks of inputs that stay in the nearest cache while all tokens are multiplied
// with them, some tokens and columns at a time, whose sums stay in registers. Meanwhile the next chunk is fetched, evenly
// spread over the work on this one: what few tokens have to wait for is memory, and many requests at once would stop
// the work. Tokens are packed, too, so that what a tile reads of them lies side by side.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "vector.h"

constexpr int64_t kPanel = 64;
constexpr int64_t kChunk = 64;  // inputs: 16 KiB of a panel
constexpr int kVectors = kPanel / kLanes;
constexpr int64_t kTokens = 6;  // of a tile at most

struct Chunk {
    const float *weight;  // (inputs, 64)
    const float *bias;    // (64), or null
    float *y;             // where sums go after the last chunk: (all tokens, stride)
    int64_t stride, inputs;
    bool first, last;     // of the panel
};

struct Fetch {
    const char *next;
    int64_t step;  // bytes
};

// x: (inputs, kRows) of the chunk; sums: (kRows, 64), of the chunks before.
template <int kRows, int kColumns>  // the latter in vectors
static void add_tile(const Chunk &chunk, const float *x, int64_t column, float *sums, float *y, Fetch fetch) {
    Vector totals[kRows][kColumns];
    for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < kColumns; ++part) {
            const int64_t at = column + part * kLanes;
            if (!chunk.first) totals[row][part] = load(sums + row * kPanel + at);
            else totals[row][part] = chunk.bias ? load(chunk.bias + at) : Vector{};
        }
    const float *weight = chunk.weight + column;
    for (int64_t input = 0; input < chunk.inputs; ++input, fetch.next += fetch.step) {
        __builtin_prefetch(fetch.next);
        Vector weights[kColumns];
        for (int part = 0; part < kColumns; ++part) weights[part] = load(weight + input * kPanel + part * kLanes);
        for (int row = 0; row < kRows; ++row) {
            const Vector number = spread(x[input * kRows + row]);
            for (int part = 0; part < kColumns; ++part) totals[row][part] += number * weights[part];
        }
    }
    float *to = chunk.last ? y : sums;
    const int64_t stride = chunk.last ? chunk.stride : kPanel;
    for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < kColumns; ++part)
            store(to + row * stride + column + part * kLanes, totals[row][part]);
}

template <int kColumns, typename... Arguments>
static void add_rows(int64_t rows, const Arguments &...arguments) {
    switch (rows) {
        case 1: return add_tile<1, kColumns>(arguments...);
        case 2: return add_tile<2, kColumns>(arguments...);
        case 3: return add_tile<3, kColumns>(arguments...);
        case 4: return add_tile<4, kColumns>(arguments...);
        case 5: return add_tile<5, kColumns>(arguments...);
        default: return add_tile<6, kColumns>(arguments...);
    }
}

// The tokens of each tile: as equal parts as can be.
struct Tiles {
    int64_t tokens, count;
    explicit Tiles(int64_t tokens) : tokens(tokens), count((tokens + kTokens - 1) / kTokens) {}
    int64_t first(int64_t tile) const { return tokens * tile / count; }
};

// Tokens, (tokens, inputs) and `stride` numbers apart, to (inputs, tokens) for each tile, one tile after the other.
static void pack_tokens(const float *x, const Tiles &tiles, int64_t stride, int64_t inputs, float *packed) {
    pool().share_rows(tiles.count, kTokens * inputs, [&](int64_t tile) {
        const int64_t first = tiles.first(tile), rows = tiles.first(tile + 1) - first;
        float *to = packed + first * inputs;
        for (int64_t input = 0; input < inputs; ++input)
            for (int64_t row = 0; row < rows; ++row) to[input * rows + row] = x[(first + row) * stride + input];
    });
}

// All tokens times one panel, whose columns from `columns` on are none.
template <int kColumns>
static void multiply_panel(
    const float *packed, const Tiles &tiles, const float *panel, const float *bias, int64_t inputs, int64_t columns,
    float *y, int64_t stride) {
    static thread_local std::vector<float> room;
    if (static_cast<int64_t>(room.size()) < tiles.tokens * kPanel) room.resize(tiles.tokens * kPanel);
    float whole[kPanel] = {};
    if (bias && columns < kPanel) bias = std::copy_n(bias, columns, whole) - columns;
    const int64_t work = (kVectors / kColumns) * tiles.count, bytes = kPanel * sizeof(float);
    for (int64_t begin = 0; begin < inputs; begin += kChunk) {
        const bool last = begin + kChunk >= inputs && columns == kPanel;
        const Chunk chunk{panel + begin * kPanel, bias, y, stride, std::min(kChunk, inputs - begin), begin == 0, last};
        const char *next = reinterpret_cast<const char *>(chunk.weight + kChunk * kPanel);
        for (int64_t column = 0; column < kPanel; column += kColumns * kLanes)
            for (int64_t tile = 0; tile < tiles.count; ++tile, next += kChunk * bytes / work) {
                const int64_t first = tiles.first(tile), rows = tiles.first(tile + 1) - first;
                add_rows<kColumns>(
                    rows, chunk, packed + first * inputs + begin * rows, column, room.data() + first * kPanel,
                    y + first * stride, Fetch{next, bytes / work});
            }
    }
    if (columns < kPanel)
        for (int64_t token = 0; token < tiles.tokens; ++token)
            std::copy_n(room.data() + token * kPanel, columns, y + token * stride);
}
