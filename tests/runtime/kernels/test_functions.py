"""The kernels against PyTorch in float64, of drawn sizes, each on one thread and on several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from surgeon.models.routing import Routed, Routing, route
from surgeon.runtime.kernels.functions import (
    Kernels,
    PackedExperts,
    Runs,
    TextKeys,
    Weighting,
    kernels,
    kernels_for,
)
from surgeon.runtime.model.attending import rotate_

DRAWS = 25


@pytest.fixture(params=[1, 3])
def own(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    found = kernels()
    if found is None:
        pytest.skip("there are no kernels here: no C++ compiler")
    found.use_threads(request.param)
    yield found
    found.use_threads(torch.get_num_threads())


def drawn(seed: int) -> Callable[..., int]:
    """Integers from a first to a last, a new one at each call."""
    generator = torch.Generator().manual_seed(seed)
    return lambda first, last: int(torch.randint(first, last + 1, (), generator=generator))


def close(found: Tensor, expected: Tensor, relative: float = 1e-6) -> bool:
    """Whether numbers differ by no more than float32 sums of their size do."""
    assert found.shape == expected.shape
    return bool(
        (found.double() - expected.double()).norm() <= relative * expected.double().norm() + 1e-30
    )


def in_panels(weight: Tensor) -> Tensor:
    """As the kernels read a weight, (outputs, inputs); what fills up the last panel is drawn: nobody may read it."""
    panels = []
    for part in weight.split(64):
        width = -(-len(part) // 16) * 16
        panels.append(torch.cat([part, torch.randn(width - len(part), part.shape[1])]).t().reshape(-1))
    return torch.cat(panels)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_product(own: Kernels, seed: int) -> None:
    """Of every number of tokens and columns, from rows of a wider tensor or one for all, with a bias or without."""
    draw = drawn(seed)
    tokens, inputs, outputs = draw(1, 40) if draw(0, 3) else draw(40, 400), draw(1, 600), draw(1, 300)
    weight, wide = torch.randn(outputs, inputs), torch.randn(tokens, inputs + draw(0, 9))
    bias = torch.randn(outputs) if draw(0, 1) else None
    panels = in_panels(weight)
    x = wide[:, :inputs] if draw(0, 5) else wide[:1, :inputs].expand(tokens, inputs)
    found = own.product(x, panels, outputs, bias)
    assert close(found, x.double() @ weight.double().t() + (0 if bias is None else bias.double()))


@pytest.mark.parametrize("seed", range(DRAWS))
def test_rms_norm(own: Kernels, seed: int) -> None:
    draw = drawn(seed)
    x, epsilon = torch.randn(draw(0, 40), draw(1, 700)), 10.0 ** -draw(3, 8)
    gain = torch.randn(x.shape[1])
    expected = F.rms_norm(x.double(), gain.shape, gain.double(), epsilon)
    assert close(own.rms_norm(x, gain, epsilon), expected)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_place(own: Kernels, seed: int) -> None:
    """Heads among others of a token are normed and turned, as far as wanted; what lies beside them stays."""
    draw = drawn(seed)
    tokens, heads, dim = draw(1, 20), draw(1, 5), 2 * draw(2, 40)
    width = 2 * draw(1, dim // 2)
    wide = torch.randn(tokens, heads + draw(0, 3), dim)
    x, before = wide[:, :heads], wide.clone()
    gain = torch.randn(heads, dim) if draw(0, 1) else None
    queries = draw(0, heads)
    squares = torch.rand(tokens, 2) if draw(0, 1) else None
    angles = (torch.randn(tokens, 1, width), torch.randn(tokens, 1, width)) if draw(0, 3) else None
    expected = x.double()
    if gain is not None:
        means = expected.square().mean(-1)
        if squares is not None:
            means[:, :queries], means[:, queries:] = squares.double().split(1, 1)
        expected = expected / (means[..., None] + 1e-6).sqrt() * gain.double()
    if angles is not None:
        rotate_(expected, angles[0].double(), angles[1].double())
    own.place_(x, gain, 1e-6, angles, squares, queries)
    assert close(x, expected)
    assert torch.equal(wide[:, heads:], before[:, heads:])


@pytest.mark.parametrize("seed", range(DRAWS))
def test_mean_squares(own: Kernels, seed: int) -> None:
    draw = drawn(seed)
    tokens, first, second = draw(1, 20), draw(1, 90), draw(1, 90)
    x = torch.randn(tokens, first + second + draw(0, 9))
    parts = x.double().split([first, second, x.shape[1] - first - second], 1)
    assert close(
        own.mean_squares(x, first, second), torch.stack([part.square().mean(1) for part in parts[:2]], 1)
    )


@pytest.mark.parametrize("name", ["silu", "swish", "gelu_new", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_gate(own: Kernels, name: str, scale: float) -> None:
    """Far from 0 too, where exp would be infinite or nothing."""
    wide = torch.cat([torch.randn(9, 77) * scale, torch.randn(9, 77)], 1)
    expected = ACT2FN[name](wide[:, :77].double()) * wide[:, 77:].double()
    gate = own.gate_of(name)
    assert gate is not None
    assert close(gate(wide), expected)


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of keys, of scores (..., keys) and one more score of each row, (...), that takes its share of them."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks.double().expand(scores.shape[:-1])[..., None]], -1).softmax(-1)[
        ..., :-1
    ]


@pytest.mark.parametrize("seed", range(DRAWS))
def test_attend(own: Kernels, seed: int) -> None:
    """Texts of any lengths in any runs of a cache, grouped heads, scales and bounds of scores."""
    draw = drawn(seed)
    texts, kv_heads, group, dim = draw(1, 6), draw(1, 3), draw(1, 4), draw(1, 80)
    pair, wide = torch.randn(2 * kv_heads, 400, dim), torch.randn(texts, kv_heads * group + 2, dim)
    scale, softcap = (None, 0.3)[draw(0, 1)], (None, 2.0)[draw(0, 1)]
    sinks = torch.randn(kv_heads * group) if draw(0, 2) == 0 else None
    runs = [
        [(first := draw(0, 300), draw(1, 400 - first)) for _ in range(draw(1, 4))] for _ in range(texts)
    ]
    read = Runs(
        torch.tensor([run for one in runs for run in one]),
        torch.tensor([len(one) for one in runs]).cumsum(0),
    )
    queries = wide[:, : kv_heads * group]
    found = own.attend(queries, pair, read, Weighting(scale, None, softcap, sinks)).view(
        texts, kv_heads, group, dim
    )
    for text, own_runs in enumerate(runs):
        places = torch.cat([torch.arange(first, first + count) for first, count in own_runs])
        keys, values = pair.double()[:, places].chunk(2)
        scores = (
            queries[text].double().view(kv_heads, group, dim)
            @ keys.mT
            * (dim**-0.5 if scale is None else scale)
        )
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        by_key = with_sinks(scores, None if sinks is None else sinks.view(kv_heads, group))
        assert close(found[text], by_key @ values)


@pytest.mark.parametrize("seed", range(2 * DRAWS))
def test_attend_text(own: Kernels, seed: int) -> None:
    """Any number of tokens behind any number of others, in any runs, with windows, scales and bounds of scores."""
    draw = drawn(seed)
    tokens, kv_heads, group = draw(1, 150), draw(1, 3), draw(1, 160 if seed < 2 else 6)
    # Of such, values are read where they lie side by side.
    dim = draw(1, 150) if draw(0, 1) else 64 * draw(1, 2)
    start = draw(0, 200) * draw(0, 1)
    window = draw(1, 200) if draw(0, 1) else None
    first_key = 0 if window is None else max(0, start + 1 - window)
    scale, softcap = (None, 0.3)[draw(0, 1)], (None, 2.0)[draw(0, 1)]
    sinks = torch.randn(kv_heads * group) if draw(0, 2) == 0 else None
    pair, wide = torch.randn(2 * kv_heads, 500, dim), torch.randn(tokens, kv_heads * group + 1, dim)
    ends = sorted({start + tokens, *(draw(first_key + 1, start + tokens) for _ in range(3))})
    counts = [end - begin for begin, end in zip([first_key, *ends[:-1]], ends, strict=True)]
    firsts = torch.randperm(500)[: len(counts)].clamp(max=500 - max(counts)).tolist()  # they may overlap
    text = TextKeys(torch.tensor(list(zip(firsts, counts, strict=True))), first_key, start, window)
    queries = wide[:, : kv_heads * group]
    found = own.attend_text(queries, pair, text, Weighting(scale, None, softcap, sinks)).view(
        tokens, kv_heads, group, dim
    )
    places = torch.cat(
        [torch.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    )
    keys, values = pair.double()[:, places].chunk(2)
    by_head = queries.double().view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
    scores = by_head @ keys[:, None].mT * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    ago = torch.arange(start, start + tokens)[:, None] - torch.arange(first_key, start + tokens)
    seen = (ago >= 0) & (ago < (window or 1000))
    by_head = None if sinks is None else sinks.view(kv_heads, group, 1)
    expected = with_sinks(scores.masked_fill(~seen, -torch.inf), by_head) @ values[:, None]
    assert close(found, expected.permute(2, 0, 1, 3))


def test_attend_to_scores_far_apart(own: Kernels) -> None:
    """One key takes all the weight where its score is a thousand more than the others'."""
    pair, queries = torch.randn(2, 37, 16), torch.ones(1, 1, 16)
    pair[0] = -100.0
    pair[0, 5] = 100.0
    read = Runs(torch.tensor([[0, 37]]), torch.tensor([1]))
    assert torch.allclose(own.attend(queries, pair, read, Weighting())[0], pair[1, 5])


@pytest.mark.parametrize("step", [30.0, -30.0])
def test_tokens_of_a_text_to_scores_far_apart(own: Kernels, step: float) -> None:
    """Scores that rise or fall by thousands over the keys; what has been summed is made smaller or stays."""
    pair, queries = torch.randn(2, 200, 8), torch.rand(200, 1, 8) + 0.1
    pair[0] = torch.arange(200)[:, None] * step
    found = own.attend_text(queries, pair, TextKeys(torch.tensor([[0, 200]]), 0, 0, None), Weighting())
    scores = queries.double()[:, 0] @ pair[0].double().t() * 8**-0.5
    seen = torch.ones(200, 200, dtype=torch.bool).tril()
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ pair[1].double()
    assert close(found, expected)


def test_what_is_no_number_stays_none(own: Kernels) -> None:
    """NaN and infinity are seen in what comes out: an engine tells the user of them."""
    nan, infinite = float("nan"), float("inf")
    for wrong in (nan, infinite, -infinite):
        x = torch.ones(2, 64)
        x[0, 3] = wrong
        assert not own.rms_norm(x, torch.ones(64), 1e-6)[0].isfinite().all()
        panels = torch.ones(1, 64, 64)
        assert not own.product(x, panels, 64, None)[0].isfinite().any()
        wide = torch.ones(1, 64)
        wide[0, 40] = wrong
        gate = own.gate_of("silu")
        assert gate is not None
        assert not gate(wide).isfinite().all()
        queries = torch.full((1, 1, 16), wrong)
        pair, runs = torch.ones(2, 8, 16), torch.tensor([[0, 8]])
        assert not own.attend(queries, pair, Runs(runs, torch.tensor([1])), Weighting()).isfinite().any()
        assert (
            not own.attend_text(queries, pair, TextKeys(runs, 0, 7, None), Weighting()).isfinite().any()
        )
    wide = torch.ones(1, 64)
    wide[0, 3] = nan
    gate = own.gate_of("gelu_new")
    assert gate is not None
    assert gate(wide).isnan().sum() == 1
    assert own.gate_of("relu") is None


def test_keep(own: Kernels) -> None:
    pair, kept, places = torch.zeros(4, 10, 6), torch.randn(3, 4, 6), torch.tensor([7, 0, 4])
    own.keep(kept, places, pair)
    expected = torch.zeros(4, 10, 6)
    expected[:, places] = kept.transpose(0, 1)
    assert torch.equal(pair, expected)
    own.keep(-kept, torch.tensor([-1, 0, -1]), pair)  # of the others nothing is kept
    expected[:, 0] *= -1
    assert torch.equal(pair, expected)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_sums_and_multiples(own: Kernels, seed: int) -> None:
    draw = drawn(seed)
    x, y = torch.randn(2, draw(1, 9), draw(1, 300)).unbind()
    total, half = torch.empty_like(x), torch.empty_like(x)
    own.call("add", x, y, x.numel(), total)
    own.call("scale", x, 0.3, x.numel(), half)
    assert torch.equal(total, x + y)
    assert torch.equal(half, x * 0.3)
    own.call("scale", x, -2.0, x.numel(), x)
    assert torch.equal(half, x / -2 * 0.3)


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0, 1e4])
def test_softcap(own: Kernels, spread: float) -> None:
    x = torch.randn(7, 333) * spread
    expected = 15 * (x.double() / 15).tanh()
    own.softcap_(x, 15.0)
    assert close(x, expected)
    assert ((x - expected).abs() <= 1e-6 * expected.abs()).all()


@pytest.mark.parametrize("seed", range(DRAWS))
def test_rows(own: Kernels, seed: int) -> None:
    """Those of a part of a table, in any order, some more than once; zeros for what is in another part."""
    draw = drawn(seed)
    rows, width, first = draw(1, 300), draw(1, 90), draw(0, 20)
    table = torch.randn(rows, width)
    numbers = torch.tensor([draw(0, rows + 40) for _ in range(draw(0, 50))], dtype=torch.int64)
    whole = torch.cat([torch.zeros(first, width), table, torch.zeros(41, width)])
    assert torch.equal(own.rows(table, numbers, first), whole[numbers])
    twice = torch.stack([numbers, numbers], 1)
    assert torch.equal(own.rows(table, twice[:, 0], first), whole[numbers])
    assert torch.equal(own.packed_rows(in_panels(table), (rows, width), numbers, first), whole[numbers])


@pytest.mark.parametrize("seed", range(4 * DRAWS))
def test_highest(own: Kernels, seed: int) -> None:
    """The first of several that are alike; NaN and infinities, wherever they are."""
    draw = drawn(seed)
    tokens, width = draw(1, 9), draw(1, 700) if draw(0, 1) else draw(1, 9)
    x = torch.randint(-5, 6, (tokens, width)).float() if draw(0, 1) else torch.randn(tokens, width)
    for odd in [torch.nan, torch.inf, -torch.inf][: draw(0, 3)]:
        x[draw(0, tokens - 1), draw(0, width - 1)] = odd
    best, places = own.highest(x)
    expected = x.amax(1)  # NaN where there is one
    assert torch.equal(best.nan_to_num(777), expected.nan_to_num(777))
    for own_places, row, highest in zip(places.tolist(), x, expected, strict=True):
        alike = row.isnan() if highest.isnan() else row == highest
        assert own_places == alike.nonzero()[0].item()


def test_threads_change_no_bit(own: Kernels) -> None:
    """Work is cut into the same pieces for every number of threads."""
    x, gain, panels = torch.randn(50, 512), torch.randn(512), torch.randn(20, 512, 64)
    found = []
    for threads in (1, 2, 5):
        own.use_threads(threads)
        found.append((own.rms_norm(x, gain, 1e-6), own.product(x, panels, 1280, None)))
    assert all(
        torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True)
    )


def test_several_threads_at_the_same_time(own: Kernels) -> None:
    """Threads of Python that call at once get their own results, thousands of times."""
    panels, inputs = torch.randn(8, 64, 64), [torch.randn(3, 64) for _ in range(4)]
    expected = [own.product(x, panels, 512, None) for x in inputs]
    wrong: list[int] = []

    def call(number: int) -> None:
        found = (own.product(inputs[number], panels, 512, None) for _ in range(2000))
        wrong.extend(number for one in found if not torch.equal(one, expected[number]))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_which_tensors_they_compute_with() -> None:
    assert kernels_for(torch.zeros(1)) is kernels()
    assert kernels_for(torch.zeros(1, dtype=torch.bfloat16)) is None
    assert kernels_for(torch.zeros(1, device="meta")) is None


@pytest.mark.parametrize("seed", range(DRAWS))
def test_route(own: Kernels, seed: int) -> None:
    """Every kind of scores, groups, corrections, and fewer experts than a token is sent to."""
    draw = drawn(seed)
    groups = 2 ** draw(0, 2)
    tokens, experts = draw(0, 40), groups * draw(2, 20)
    routing = Routing(
        draw(1, experts // groups + 2 * (groups == 1)),
        ("softmax", "softmax of chosen", "sigmoid")[draw(0, 2)],
        bool(draw(0, 1)),
        (1.0, 2.5)[draw(0, 1)],
        groups,
        draw(1, groups),
        draw(1, 2),
    )
    logits, correction = torch.randn(tokens, experts), torch.randn(experts) if draw(0, 1) else None
    found, expected = own.route(logits, routing, correction), route(logits, routing, correction)
    nothing = torch.zeros(tokens, experts)
    assert close(
        nothing.scatter(1, found.experts.long(), found.weights), nothing.scatter(1, *expected), 1e-5
    )


@pytest.mark.parametrize("seed", range(DRAWS))
def test_mixture(own: Kernels, seed: int) -> None:
    """Some of a mixture's experts, of few tokens or many, with biases or without, by every activation."""
    draw = drawn(seed)
    tokens, hidden, neurons = draw(0, 9) if draw(0, 2) else draw(100, 300), draw(1, 90), draw(1, 90)
    experts, chosen = draw(1, 7), draw(1, 3)
    first, count = draw(0, 2), experts
    x = torch.randn(tokens, hidden + draw(0, 5))[:, :hidden]
    reading, writing = torch.randn(count, 2 * neurons, hidden), torch.randn(count, hidden, neurons)
    biased = draw(0, 1)
    biases = torch.randn(count, 2 * neurons), torch.randn(count, hidden)
    routed = Routed(
        torch.randint(0, experts + 3, (tokens, chosen), dtype=torch.int32), torch.rand(tokens, chosen)
    )
    kept = [(in_panels(one), in_panels(other)) for one, other in zip(reading, writing, strict=True)]
    table = torch.tensor(
        [
            [one.data_ptr(), bias.data_ptr() * biased, other.data_ptr(), out.data_ptr() * biased]
            for (one, other), bias, out in zip(kept, *biases, strict=True)
        ]
    )
    clamped = (1.7, 0.9) if draw(0, 2) == 0 else None
    activation = ("silu", "gelu_new")[draw(0, 1)]
    packed = PackedExperts(
        first, table, tuple(one for pair in kept for one in pair), neurons, activation, clamped
    )
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for expert, weight in zip(
            routed.experts[token].tolist(), routed.weights[token].tolist(), strict=True
        ):
            if not first <= expert < first + count:
                continue
            at = expert - first
            wide = reading[at].double() @ x[token].double() + biased * biases[0][at].double()
            gate, up = wide.chunk(2)
            if clamped:
                gate, up = gate.clamp(max=0.9), up.clamp(-0.9, 0.9) + 1
                gate = gate * (1.7 * gate).sigmoid()
            else:
                gate = ACT2FN[activation](gate)
            expected[token] += weight * (
                writing[at].double() @ (gate * up) + biased * biases[1][at].double()
            )
    assert close(own.mixture(x, routed, packed), expected, 1e-5)
