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
    int64_t stride;       // of where sums go after the last chunk
    int64_t inputs;
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

struct Panel {
    const float *weight, *bias;  // (filled, 64), and (columns) or null
    int64_t inputs, columns;     // of the 64, fewer in a weight's last panel
    int64_t stride;              // of what is written
};

// All tokens times one panel.
template <int kColumns>
static void multiply_panel(const float *packed, const Tiles &tiles, const Panel &panel, float *y) {
    static thread_local std::vector<float> room;
    if (static_cast<int64_t>(room.size()) < tiles.tokens * kPanel) room.resize(tiles.tokens * kPanel);
    float padded[kPanel] = {};
    const float *bias = panel.bias;
    if (bias && panel.columns < kPanel) bias = std::copy_n(bias, panel.columns, padded) - panel.columns;
    const int64_t work = (kVectors / kColumns) * tiles.count, bytes = kPanel * sizeof(float);
    for (int64_t begin = 0; begin < panel.inputs; begin += kChunk) {
        const bool last = begin + kChunk >= panel.inputs && panel.columns == kPanel;
        const int64_t inputs = std::min(kChunk, panel.inputs - begin);
        const Chunk chunk{panel.weight + begin * kPanel, bias, panel.stride, inputs, begin == 0, last};
        const char *next = reinterpret_cast<const char *>(chunk.weight + kChunk * kPanel);
        for (int64_t column = 0; column < kPanel; column += kColumns * kLanes)
            for (int64_t tile = 0; tile < tiles.count; ++tile, next += kChunk * bytes / work) {
                const int64_t first = tiles.first(tile), rows = tiles.first(tile + 1) - first;
                add_rows<kColumns>(
                    rows, chunk, packed + first * panel.inputs + begin * rows, column, room.data() + first * kPanel,
                    y + first * panel.stride, Fetch{next, bytes / work});
            }
    }
    if (panel.columns < kPanel)
        for (int64_t token = 0; token < tiles.tokens; ++token)
            std::copy_n(room.data() + token * kPanel, panel.columns, y + token * panel.stride);
}

struct Weight {
    const float *panels, *bias;  // (panels, filled, 64), and (outputs) or null
    int64_t inputs, filled, outputs;
};

// Tokens, (tokens, inputs) and `stride` numbers apart, times a weight: to (tokens, outputs).
static void multiply(const float *x, int64_t tokens, int64_t stride, const Weight &weight, float *y) {
    static thread_local std::vector<float> room;
    const Tiles tiles(tokens);
    if (tokens > 1) {
        if (static_cast<int64_t>(room.size()) < tokens * weight.inputs) room.resize(tokens * weight.inputs);
        pack_tokens(x, tiles, stride, weight.inputs, room.data());
        x = room.data();
    }
    pool().share((weight.outputs + kPanel - 1) / kPanel, [&](int64_t number) {
        const int64_t first = number * kPanel, columns = std::min(kPanel, weight.outputs - first);
        const Panel panel{
            weight.panels + first * weight.filled, weight.bias ? weight.bias + first : nullptr, weight.inputs, columns,
            weight.outputs};
        // As many sums as registers hold beside what they are made of: 16 of 8 numbers, or 32 of 16.
        if constexpr (kVectors <= 4) multiply_panel<4>(x, tiles, panel, y + first);
        else if (tokens > 3) multiply_panel<2>(x, tiles, panel, y + first);
        else if (tokens > 1) multiply_panel<4>(x, tiles, panel, y + first);
        else multiply_panel<8>(x, tiles, panel, y + first);
    });
}
