// Products with weights in panels of 64 columns, of one input after the other; the last panel has as many as a weight
// still has, up to a multiple of 16.
//
// A panel is read from memory in chunks of inputs that stay in the nearest cache while tokens are multiplied with them,
// some tokens and columns at a time, whose sums stay in registers. Meanwhile the next chunk is fetched, evenly spread
// over the work on this one: what few tokens have to wait for is memory, and many requests at once would stop the work.
// Few tokens are packed, too, so that what a tile reads of them lies side by side. Many are read where they lie: packing them
// takes longer than it saves. What counts then is computing, and chunks have more inputs, perhaps of fewer columns: sums are
// put away and taken up again less often.
#pragma once

#include <algorithm>
#include <iterator>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "vector.h"

constexpr int64_t kPanel = 64, kLeast = 16;  // columns
constexpr int64_t kNear = 4096;  // numbers of a chunk that are worked with at a time: 16 KiB, half of the nearest cache
constexpr int64_t kFar = 8 * kNear;  // of a deep one in the cache behind that, where tiles have all columns of a panel
constexpr int kVectors = kPanel / kLanes;
// As many sums as registers hold beside what they are made of: 16 of 8 numbers, or 32 of 16.
constexpr int64_t kTokens = 6;                  // of a tile at most
constexpr int kColumns = kVectors <= 4 ? 4 : 2; // of a tile with so many, in vectors
constexpr bool kSplit = kColumns < kVectors;    // chunks for many tokens are of a tile's columns
constexpr int kFewColumns = kSplit ? kColumns : 1;  // of a tile for few tokens: narrow ones fetch more evenly
constexpr int64_t kMany = kSplit ? 96 : 48;     // tokens
constexpr int64_t kBlock = 32;                  // tiles that go through all panels while they stay in a cache

struct Chunk {
    const float *weight;  // (inputs, columns of a tile), `width` numbers apart
    int64_t width;
    const float *bias;  // of these columns, or null
    int64_t stride;     // of where sums go after the last chunk
    int64_t inputs;
    bool first, last;   // of the columns
};

// What is read next, fetched evenly with each input that is worked with; `weight` is that input's.
struct Ahead {
    const char *next;
    int64_t step;  // bytes
    void fetch(const float *) {
        constexpr uintptr_t kLine = 64;
        const char *const end = next + step;
        const char *line = next + (-reinterpret_cast<uintptr_t>(next) & (kLine - 1));
        for (; line < end; line += kLine) __builtin_prefetch(line);
        next = end;
    }
};

// As before, where the chunk itself lies in a cache that is not the nearest.
struct FarAhead : Ahead {
    static constexpr int64_t kInputs = 4;
    void fetch(const float *weight) {
        Ahead::fetch(weight);
        ::fetch(weight + kInputs * kPanel, kPanel * sizeof(float));
    }
};

// Nothing: all that is read is near, or the processor fetches it in time by itself.
struct Near : Ahead {
    void fetch(const float *) {}
};

// sums: (kRows, kWide), 64 numbers apart, of the chunks before. number(input, row): what the weights are multiplied by.
//
// It is always inlined: as a function of its own it was seen to have its sums in memory before the first input.
template <int kRows, int kWide, typename Number, typename Next>  // kWide in vectors
__attribute__((always_inline)) static inline void add_tile(
    const Chunk &chunk, const Number &number, float *sums, float *y, Next ahead) {
    Vector totals[kRows][kWide];
    for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < kWide; ++part) {
            if (!chunk.first) totals[row][part] = load(sums + row * kPanel + part * kLanes);
            else totals[row][part] = chunk.bias ? load(chunk.bias + part * kLanes) : Vector{};
        }
    const float *weight = chunk.weight;
    for (int64_t input = 0; input < chunk.inputs; ++input, weight += chunk.width) {
        ahead.fetch(weight);
        Vector weights[kWide];
        for (int part = 0; part < kWide; ++part) weights[part] = load(weight + part * kLanes);
        for (int row = 0; row < kRows; ++row) {
            const Vector many = spread(number(input, row));
            for (int part = 0; part < kWide; ++part) totals[row][part] += many * weights[part];
        }
    }
    float *to = chunk.last ? y : sums;
    const int64_t stride = chunk.last ? chunk.stride : kPanel;
    for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < kWide; ++part) store(to + row * stride + part * kLanes, totals[row][part]);
}

// Calls body with `rows`, from 1 to kTokens, as a constant.
template <typename Body>
static void with_rows(int64_t rows, const Body &body) {
    switch (rows) {
        case 1: return body(std::integral_constant<int, 1>{});
        case 2: return body(std::integral_constant<int, 2>{});
        case 3: return body(std::integral_constant<int, 3>{});
        case 4: return body(std::integral_constant<int, 4>{});
        case 5: return body(std::integral_constant<int, 5>{});
        default: return body(std::integral_constant<int, 6>{});
    }
}

// What is multiplied: packed, (inputs, tokens) for each tile, or one token after the other.
struct Tokens {
    const float *numbers;
    bool packed;
    int64_t stride;  // between tokens; of packed ones how many inputs there are

    // Of a tile that has `rows` tokens from `first` on, what comes from an input on.
    Tokens from(int64_t first, int64_t input, int64_t rows) const {
        return {numbers + first * stride + input * (packed ? rows : 1), packed, stride};
    }
};

// The first `rows` tokens.
template <int kWide, typename Next>
static void add_rows(int64_t rows, const Chunk &chunk, const Tokens &x, float *sums, float *y, Next ahead) {
    with_rows(rows, [&](auto constant) {
        constexpr int kRows = constant();
        if (x.packed) {
            const auto number = [&x](int64_t input, int row) { return x.numbers[input * kRows + row]; };
            using Needed = std::conditional_t<kRows == 1, Near, Next>;  // one row's weights come in time by themselves
            return add_tile<kRows, kWide>(chunk, number, sums, y, Needed{ahead});
        }
        const float *from[kRows];
        for (int row = 0; row < kRows; ++row) from[row] = x.numbers + row * x.stride;
        const auto number = [&from](int64_t input, int row) { return from[row][input]; };
        add_tile<kRows, kWide>(chunk, number, sums, y, ahead);
    });
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
        const int64_t first = tiles.first(tile);
        const float *from = x + first * stride;
        float *to = packed + first * inputs;
        with_rows(tiles.first(tile + 1) - first, [&](auto constant) {
            constexpr int kRows = constant();
            for (int64_t input = 0; input < inputs; ++input)
                for (int row = 0; row < kRows; ++row) to[input * kRows + row] = from[row * stride + input];
        });
    });
}

// Columns that a panel lies in memory with, of `columns` that are left of a weight.
static inline int64_t width_of(int64_t columns) { return std::min(kPanel, (columns + kLeast - 1) / kLeast * kLeast); }

struct Panel {
    const float *weight, *bias;      // (inputs, width), and (columns) or null
    const float *following;          // the panel that this thread will probably have next
    int64_t inputs, width, columns;  // the latter fewer where a weight's last panel is filled up
    int64_t stride;                  // of what is written
};

// Parts of a chunk, (inputs, 64), side by side: (64 / width, inputs, width).
template <int64_t kWidth>
static void split_columns(const float *weight, int64_t inputs, float *parts) {
    for (int64_t input = 0; input < inputs; ++input, weight += kPanel)
        for (int64_t column = 0; column < kPanel; column += kLanes)  // a call of memmove for each would cost more
            store(parts + column / kWidth * kWidth * inputs + input * kWidth + column % kWidth, load(weight + column));
}

// The tokens of some tiles times one panel, so many columns at a time (in vectors). Chunks are as deep as fits the nearest
// cache. So are deep ones, for many tokens, because they have a tile's columns only, which are brought side by side for
// that; where a tile has all columns they lie in the cache behind it.
template <int kWide, bool kDeep>
static void multiply_panel(
    const Tokens &x, const Tiles &tiles, int64_t begin_tile, int64_t end_tile, const Panel &panel, float *y) {
    constexpr bool kApart = kDeep && kSplit;
    using Next = std::conditional_t<kDeep && !kSplit, FarAhead, Ahead>;
    constexpr int64_t kWidth = kWide * kLanes, kDepth = (kSplit ? kNear : kFar) / kWidth;
    static thread_local std::vector<float> room, parts(kApart ? kDepth * kPanel : 0);
    const int64_t from = tiles.first(begin_tile), end = tiles.first(end_tile), width = panel.width;
    if (static_cast<int64_t>(room.size()) < (end - from) * kPanel) room.resize((end - from) * kPanel);
    const bool filled = panel.columns < width;
    float padded[kPanel] = {};
    const float *bias = panel.bias;
    if (bias && filled) bias = std::copy_n(bias, panel.columns, padded) - panel.columns;
    const int64_t depth = kDeep ? kDepth : kNear / width;
    const int64_t work = (width / kWidth) * (end_tile - begin_tile), bytes = width * sizeof(float);
    for (int64_t begin = 0; !begin || begin < panel.inputs; begin += depth) {  // once of no inputs, too
        const bool ends = begin + depth >= panel.inputs, last = ends && !filled;
        const int64_t inputs = std::min(depth, panel.inputs - begin);
        const float *weight = panel.weight + begin * width;
        const char *next = reinterpret_cast<const char *>(ends ? panel.following : weight + depth * width);
        if (kApart) split_columns<kWidth>(weight, inputs, parts.data());
        for (int64_t column = 0; column < width; column += kWidth) {
            const float *own = kApart ? parts.data() + column * inputs : weight + column;
            const Chunk chunk{
                own, kApart ? kWidth : width, bias ? bias + column : nullptr, panel.stride, inputs, begin == 0, last};
            for (int64_t tile = begin_tile; tile < end_tile; ++tile, next += depth * bytes / work) {
                const int64_t first = tiles.first(tile), rows = tiles.first(tile + 1) - first;
                Next ahead{next, bytes / work};
                add_rows<kWide>(
                    rows, chunk, x.from(first, begin, rows), room.data() + (first - from) * kPanel + column,
                    y + first * panel.stride + column, ahead);
            }
        }
    }
    if (filled)
        for (int64_t token = from; token < end; ++token)
            std::copy_n(room.data() + (token - from) * kPanel, panel.columns, y + token * panel.stride);
}

struct Weight {
    const float *panels, *bias;  // of (inputs, 64) each, and (outputs) or null
    int64_t inputs, outputs;
};

// Tokens, (tokens, inputs) and `stride` numbers apart, times a weight: to (tokens, outputs).
struct Product {
    const float *x;
    int64_t tokens, stride;
    Weight weight;
    float *y;
};

// A product as pieces of work: its panels, of many tokens for some tiles at a time.
struct Pieces {
    Product product;
    Tiles tiles;
    Tokens own;
    bool packed;
    int64_t panels, blocks, first;  // the latter the number of the first piece among those of all products

    Pieces(const Product &of, int64_t first, const float *room)
        : product(of), tiles(of.tokens), packed(of.tokens < kMany), first(first) {
        own = {room ? room : of.x, packed, packed ? of.weight.inputs : of.stride};
        panels = (of.weight.outputs + kPanel - 1) / kPanel;
        blocks = packed ? 1 : (tiles.count + kBlock - 1) / kBlock;
    }

    int64_t end() const { return first + blocks * panels; }

    const float *weights_of(int64_t piece) const {
        return product.weight.panels + (piece - first) % panels * kPanel * product.weight.inputs;
    }

    // `following`: what the thread that computes the piece will probably read next.
    void multiply(int64_t piece, const float *following) const {
        const Weight &weight = product.weight;
        const int64_t block = (piece - first) / panels, column = (piece - first) % panels * kPanel, tokens = product.tokens;
        const int64_t begin = tiles.count * block / blocks, end = tiles.count * (block + 1) / blocks;
        const int64_t columns = std::min(kPanel, weight.outputs - column), width = width_of(columns);
        const Panel panel{
            weights_of(piece), weight.bias ? weight.bias + column : nullptr, following, weight.inputs, width, columns,
            weight.outputs};
        float *y = product.y + column;
        if (width < kPanel) multiply_panel<kLeast / kLanes, false>(own, tiles, begin, end, panel, y);
        else if (!packed) multiply_panel<kColumns, true>(own, tiles, begin, end, panel, y);
        else if (tokens == 1) multiply_panel<kVectors, false>(own, tiles, begin, end, panel, y);
        else if (kSplit ? tokens <= 3 : tokens > 16) multiply_panel<4, false>(own, tiles, begin, end, panel, y);
        else multiply_panel<kFewColumns, false>(own, tiles, begin, end, panel, y);
    }
};

// Several products at once: threads share the pieces of all of them. None is of no tokens.
static void multiply(const Product *products, int64_t count) {
    static thread_local std::vector<float> room;
    static thread_local std::vector<Pieces> all;
    const auto fills = [](const Product &one) { return one.tokens > 1 && one.tokens < kMany; };
    int64_t filled = 0, at = 0;
    for (int64_t one = 0; one < count; ++one)
        if (fills(products[one])) filled += products[one].tokens * products[one].weight.inputs;
    if (static_cast<int64_t>(room.size()) < filled) room.resize(filled);
    all.clear();
    for (int64_t one = 0; one < count; ++one) {
        const Product &own = products[one];
        float *packed = fills(own) ? room.data() + at : nullptr;
        all.emplace_back(own, all.empty() ? 0 : all.back().end(), packed);
        if (!packed) continue;
        pack_tokens(own.x, all.back().tiles, own.stride, own.weight.inputs, packed);
        at += own.tokens * own.weight.inputs;
    }
    const int64_t pieces = all.empty() ? 0 : all.back().end();
    const auto owner = [begin = all.begin(), end = all.end()](int64_t piece) -> const Pieces & {
        return *std::prev(std::upper_bound(
            begin, end, piece, [](int64_t number, const Pieces &one) { return number < one.first; }));
    };
    pool().share(pieces, [&](int64_t piece) {
        const int64_t following = (piece + pool().threads()) % pieces;
        owner(piece).multiply(piece, owner(following).weights_of(following));
    });
}

static void multiply(const float *x, int64_t tokens, int64_t stride, const Weight &weight, float *y) {
    const Product product{x, tokens, stride, weight, y};
    if (tokens && weight.outputs) multiply(&product, 1);
}
