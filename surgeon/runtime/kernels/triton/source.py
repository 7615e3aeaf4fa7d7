"""The kernels' source. Everything is computed in float32, whatever the tensors hold.

A parameter in capitals is known when a kernel is compiled. Shapes: T tokens of a pass, B texts, H heads and K KV heads
of a slice, G = H / K heads of a KV group, D head_dim.

Where OVERLAPS, a kernel starts while the one before it ends (programmatic dependent launch, compute capability 9.0):
it says at once that the next one may do so, and reads what others write, or writes anything, only when it has waited
for the one before, which has waited in its turn.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """Let the next kernel start, and wait for the one before."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def product(a, b, IN_FLOAT32: tl.constexpr):
    """A matrix product, summed in float32; float32 itself is not rounded to TF32."""
    if IN_FLOAT32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def attend(
    queries,  # (B, H, D), a text every `query_stride`
    pair,  # (2 * K, places, D), a head every `head_stride`
    tables,  # numbers of blocks, a text every `table_stride`
    newest,  # position of each text's newest token, every `newest_stride`
    arrived,  # (B, K): how many parts have been computed; zeros before and after
    out,  # (B, H, D)
    sums,  # (B, K, PARTS, GROUP, D): weighted values of a part
    totals,  # (B, K, PARTS, 2, GROUP): the highest score of a part, and the sum of its weights
    sinks,  # (H,): one more score of each head, if there are any
    scale,
    softcap,
    window,
    query_stride,
    head_stride,
    table_stride,
    newest_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    SUNK: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attention of one token of each text over its keys in the cache (Flash-Decoding): a text, a KV head, a part.

    The part of a text and head that is computed last puts all of them together.
    """
    wait(OVERLAPS)
    text = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    last = (tl.load(newest + text * newest_stride) + 1).to(tl.int32)
    begin = 0
    if WINDOWED:
        begin = (last - 1) // window * window if CHUNKED else tl.maximum(last - window, 0)
    share = tl.cdiv(tl.cdiv(last - begin, PARTS), TOKENS) * TOKENS
    parts = tl.cdiv(last - begin, share)  # that have any keys
    if part < parts:
        first = begin + part * share
        end = tl.minimum(first + share, last)
        g = tl.arange(0, HEADS_PADDED)
        d = tl.arange(0, DIM_PADDED)
        inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
        own = (head * GROUP + g)[:, None] * DIM + d[None, :]
        query = tl.load(queries + text.to(tl.int64) * query_stride + own, mask=inside, other=0.0)
        keys = pair + head * head_stride
        values = pair + (KV_HEADS + head) * head_stride
        best = tl.full([HEADS_PADDED], -float("inf"), tl.float32)
        total = tl.zeros([HEADS_PADDED], tl.float32)
        if SUNK:
            sink = tl.load(sinks + head * GROUP + g, mask=g < GROUP, other=0.0)
            best = tl.where(part == 0, sink, best)
            total = tl.where(part == 0, 1.0, total)
        attended = tl.zeros([HEADS_PADDED, DIM_PADDED], tl.float32)
        for start in range(first, end, TOKENS):
            at = start + tl.arange(0, TOKENS)
            seen = at < end
            block = tl.load(tables + text.to(tl.int64) * table_stride + at // BLOCK, mask=seen, other=0)
            place = (block * BLOCK + at % BLOCK) * DIM
            read = seen[:, None] & (d < DIM)[None, :]
            key = tl.load(keys + place[:, None] + d[None, :], mask=read, other=0.0)
            scores = product(query, tl.trans(key), IN_FLOAT32) * scale
            if CAPPED:
                # Softcap * tanh(scores / softcap).
                scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
            scores = tl.where(seen[None, :], scores, -float("inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            kept = tl.exp(best - higher)
            value = tl.load(values + place[:, None] + d[None, :], mask=read, other=0.0)
            total = total * kept + tl.sum(weights, 1)
            attended = attended * kept[:, None] + product(weights.to(value.dtype), value, IN_FLOAT32)
            best = higher
        row = text.to(tl.int64) * KV_HEADS + head
        to = out + row * GROUP * DIM + g[:, None] * DIM + d[None, :]
        if parts == 1:
            tl.store(to, attended / total[:, None], mask=inside)
        else:
            mine = row * PARTS + part
            tl.store(sums + mine * GROUP * DIM + g[:, None] * DIM + d[None, :], attended, mask=inside)
            tl.store(totals + mine * 2 * GROUP + g, best, mask=g < GROUP)
            tl.store(totals + (mine * 2 + 1) * GROUP + g, total, mask=g < GROUP)
            tl.debug_barrier()  # all threads have stored before one of them says so
            if tl.atomic_add(arrived + row, 1) == parts - 1:
                tl.debug_barrier()
                best = tl.full([HEADS_PADDED], -float("inf"), tl.float32)
                total = tl.zeros([HEADS_PADDED], tl.float32)
                attended = tl.zeros([HEADS_PADDED, DIM_PADDED], tl.float32)
                for other in range(parts):
                    theirs = row * PARTS + other
                    found = tl.load(
                        sums + theirs * GROUP * DIM + g[:, None] * DIM + d[None, :],
                        mask=inside,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    high = tl.load(
                        totals + theirs * 2 * GROUP + g, mask=g < GROUP, other=0.0, cache_modifier=".cg"
                    )
                    weight = tl.load(
                        totals + (theirs * 2 + 1) * GROUP + g,
                        mask=g < GROUP,
                        other=1.0,
                        cache_modifier=".cg",
                    )
                    higher = tl.maximum(best, high)
                    kept = tl.exp(best - higher)
                    gained = tl.exp(high - higher)
                    total = total * kept + weight * gained
                    attended = attended * kept[:, None] + found * gained[:, None]
                    best = higher
                tl.store(to, attended / total[:, None], mask=inside)
                tl.store(arrived + row, 0)


@triton.jit
def place(
    qkv,  # (T, H + 2 * K, D), a token every `row_stride`
    queries,  # (T, H, D), a token every `query_stride`; perhaps those of qkv itself
    pair,  # (2 * K, places, D), a head every `head_stride`
    places,  # (T,)
    gain,  # (H + K, D)
    cosine,  # (T, TURNED)
    sine,
    squares,  # (T, 2): of all queries and of all keys, where these are normed TOGETHER
    epsilon,
    row_stride,
    query_stride,
    head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TURNED: tl.constexpr,
    NORMED: tl.constexpr,
    TOGETHER: tl.constexpr,
    OF_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Queries and keys normed, by head or all together, and turned to their positions; keys and values are cached.

    A program has TILE heads. Those that are not cached are all HEADS here, of which OF_QUERIES are those of queries.
    """
    wait(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, DIM_PADDED)
    own = head[:, None] * DIM + d[None, :]
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < DIM)[None, :]
    compared = (head < HEADS + KV_HEADS)[:, None]
    source = qkv + token * row_stride
    x = tl.load(source + own, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        square = tl.sum(x * x, 1)[:, None] / DIM
        if TOGETHER:
            square = tl.load(squares + token * 2 + (head >= OF_QUERIES).to(tl.int32))[:, None]
        root = tl.where(compared, tl.rsqrt(square + epsilon), 1.0)
        x = x * root * tl.load(gain + own, mask=inside & compared, other=1.0).to(tl.float32)
    if TURNED:
        partner = head[:, None] * DIM + ((d + TURNED // 2) % TURNED)[None, :]
        turns = (d < TURNED)[None, :]
        y = tl.load(source + partner, mask=inside & compared & turns, other=0.0).to(tl.float32)
        if NORMED:
            y = (
                y
                * root
                * tl.load(gain + partner, mask=inside & compared & turns, other=0.0).to(tl.float32)
            )
        cosines = tl.load(cosine + token * TURNED + d, mask=d < TURNED, other=1.0).to(tl.float32)
        sines = tl.load(sine + token * TURNED + d, mask=d < TURNED, other=0.0).to(tl.float32)
        x = tl.where(compared, x * cosines[None, :] + y * sines[None, :], x)
    tl.debug_barrier()  # all threads have read, since queries may go to where they read
    tl.store(queries + token * query_stride + own, x, mask=inside & (head < HEADS)[:, None])
    if KV_HEADS:
        to = (head - HEADS).to(tl.int64) * head_stride + tl.load(places + token) * DIM
        tl.store(pair + to[:, None] + d[None, :], x, mask=inside & (head >= HEADS)[:, None])


@triton.jit
def mean_squares(
    qkv,
    squares,
    row_stride,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Mean squares over the features of queries, and of the keys behind them, (T, 2)."""
    wait(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    of_keys = tl.program_id(1)
    at = tl.arange(0, PADDED)
    first = of_keys * QUERIES
    width = QUERIES + of_keys * (KEYS - QUERIES)
    x = tl.load(qkv + token * row_stride + first + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(squares + token * 2 + of_keys, tl.sum(x * x) / width)


@triton.jit
def norm(
    x,  # (T, WIDTH), a token every `x_stride`
    added,  # (T, WIDTH), a token every `added_stride`
    total,  # (T, WIDTH)
    normed,  # (T, WIDTH)
    gain,  # (WIDTH,)
    shift,
    epsilon,
    x_stride,
    added_stride,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    ADDS: tl.constexpr,
    CENTRED: tl.constexpr,
    SHIFTED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """RMS norm, or layer norm where it is centred, of a stream or of the sum of two, which is kept as well."""
    wait(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH_PADDED)
    inside = at < WIDTH
    given = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    if ADDS:
        more = tl.load(added + row * added_stride + at, mask=inside, other=0.0)
        given = (given.to(tl.float32) + more.to(tl.float32)).to(given.dtype)
        tl.store(total + row * WIDTH + at, given, mask=inside)
    value = given.to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value) / WIDTH, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value) / WIDTH + epsilon)
    value = value * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        value += tl.load(shift + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * WIDTH + at, value, mask=inside)


@triton.jit
def gate(
    wide, out, row_stride, width, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Activated gates times values, (T, width), of both side by side, (T, 2 * width)."""
    wait(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    x = tl.load(wide + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(wide + row * row_stride + width + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "tanh_gelu":  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        x = tl.maximum(x, 0.0)
    tl.store(out + row * width + at, x * up, mask=inside)


@triton.jit
def product_of_few(
    x,  # (TOKENS, inputs), a token every `x_stride`
    weight,  # (outputs, inputs)
    bias,  # (outputs,)
    y,  # (TOKENS, outputs), a token every `y_stride`
    outputs,
    inputs,
    x_stride,
    y_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A matrix times one token or two: some rows of the matrix, which are read once.

    Weights are nobody's results, so that the first of them are on their way before the kernel before has ended.
    """
    if OVERLAPS:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    rows = weight + row.to(tl.int64)[:, None] * inputs
    inside = (row < outputs)[:, None]
    read = (column < inputs)[None, :]
    tile = tl.load(rows + column[None, :], mask=inside & read, other=0.0, eviction_policy="evict_first")
    if OVERLAPS:
        gdc_wait()
    given = tl.load(x + token[:, None] * x_stride + column[None, :], mask=read, other=0.0)
    sums = tile.to(tl.float32)[None, :, :] * given.to(tl.float32)[:, None, :]
    for start in range(COLUMNS, inputs, COLUMNS):
        at = start + column
        read = (at < inputs)[None, :]
        tile = tl.load(rows + at[None, :], mask=inside & read, other=0.0, eviction_policy="evict_first")
        given = tl.load(x + token[:, None] * x_stride + at[None, :], mask=read, other=0.0)
        sums += tile.to(tl.float32)[None, :, :] * given.to(tl.float32)[:, None, :]
    total = tl.sum(sums, 2)
    if BIASED:
        total += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(y + token[:, None] * y_stride + row[None, :], total, mask=(row < outputs)[None, :])


@triton.jit
def highest_of_parts(
    x,  # (T, WIDTH), a row every `row_stride`
    values,  # (T, PARTS)
    at,  # (T, PARTS)
    row_stride,
    width,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The highest number of each part of a row, infinite where one is none, and its place in the row."""
    wait(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.load(x + row * row_stride + column, mask=column < width, other=-float("inf")).to(
        tl.float32
    )
    number = tl.where(number != number, float("inf"), number)
    high = tl.max(number, 0)
    tl.store(values + row * PARTS + part, high)
    tl.store(
        at + row * PARTS + part, tl.min(tl.where((number == high) & (column < width), column, width), 0)
    )


@triton.jit
def highest_part(
    values,  # (T, PARTS)
    at,  # (T, PARTS)
    best,  # (T,)
    places,  # (T,)
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The highest number of each row's parts, and its place in the row, the first of equal ones."""
    wait(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PADDED)
    number = tl.load(values + row * PARTS + part, mask=part < PARTS, other=-float("inf"))
    place = tl.load(at + row * PARTS + part, mask=part < PARTS, other=2147483647)
    high = tl.max(number, 0)
    tl.store(best + row, high)
    tl.store(places + row, tl.min(tl.where(number == high, place, 2147483647), 0).to(tl.int64))
