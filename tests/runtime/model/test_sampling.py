"""Sampling against plain computations with lists, and how often each token comes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from surgeon.runtime.batching.request import Choice, Request, Sampling
from surgeon.runtime.model import sampling as filters
from surgeon.runtime.model import sampling as module
from surgeon.runtime.model.sampling import Look, Sampler, column, filter_probabilities, penalise, pick

CPU = torch.device("cpu")


class OneText:
    """A sampler that has one text."""

    def __init__(self, sampling: Sampling, prompt: tuple[int, ...], vocabulary: int) -> None:
        self.sampling = sampling
        self.sampler = Sampler(vocabulary, CPU)
        self.sampler.add(Request(0, prompt, sampling))

    def choose(self, logits: torch.Tensor) -> Choice:
        return self.sampler.choose([0], logits[None])[0]

    def draft(self, logits: torch.Tensor) -> int:
        return self.sampler.draft([0], logits[None])[0]

    def judge(self, logits: list[torch.Tensor]) -> list[Choice]:
        return self.sampler.judge([0], torch.stack(logits))[0]


def sampler(prompt: tuple[int, ...] = (0,), vocabulary: int = 50, **options: Any) -> OneText:
    return OneText(Sampling(**({"seed": 1} | options)), prompt, vocabulary)


def draw(scores: torch.Tensor, sampling: Sampling, *numbers: float) -> list[int]:
    """The token for each number."""
    if not sampling.draws:
        return [int(scores.argmax())] * len(numbers)
    look, rows = Look.of(sampling, len(scores)), scores.expand(len(numbers), -1)
    weights, among, enough = filter_probabilities(rows, [sampling] * len(numbers), look)
    if enough is not None and not enough.all():
        look = look._replace(tokens=len(scores))
        weights, among, _ = filter_probabilities(rows, [sampling] * len(numbers), look)
    tokens = pick(weights, column(numbers, weights))
    if among is not None:
        tokens = among.gather(-1, tokens)
    found: list[int] = tokens[:, 0].tolist()
    return found


def kept_by_lists(scores: list[float], sampling: Sampling) -> dict[int, float]:
    """The probability of every token that the filters leave, from their definitions."""
    kept = sorted(range(len(scores)), key=lambda token: -scores[token])
    kept = kept[: sampling.top_k or len(kept)]
    weights = {token: math.exp((scores[token] - max(scores)) / sampling.temperature) for token in kept}
    total = sum(weights.values())
    chances = {token: weight / total for token, weight in weights.items()}
    if sampling.top_p < 1:
        needed, before = [], 0.0
        for token in kept:
            if before < sampling.top_p:
                needed.append(token)
            before += chances[token]
        chances = {token: chances[token] for token in needed}
    chances = {
        token: chance
        for token, chance in chances.items()
        if chance >= sampling.min_p * max(chances.values())
    }
    return {token: chance / sum(chances.values()) for token, chance in chances.items()}


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 7, 900]),
    st.sampled_from([1.0, 0.9, 0.35]),
    st.sampled_from([0.0, 0.05, 1.0]),
)
def test_every_kept_token_has_its_share_of_the_numbers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Numbers spread evenly over [0, 1) give each token as often as its probability says, and no other one."""
    scores = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 2
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = kept_by_lists(scores.double().tolist(), sampling)
    number = 200
    found = Counter(draw(scores, sampling, *((i + 0.5) / number for i in range(number))))
    assert set(found) <= set(expected)
    for token, chance in expected.items():
        assert abs(found[token] - chance * number) <= 1


def exponential(key: int, token: int) -> float:
    """The random number of a token: SplitMix64 of its key, as published, in Python's integers."""
    bits = (key + token * 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return -math.log(((bits ^ bits >> 31) // 2**12 + 0.5) / 2**52)


def key_of(sampling: Sampling, place: int) -> int:
    """The random number of a place of a text."""
    seed, (prompt, answer) = sampling.seed, sampling.place
    return (
        int.from_bytes(blake2b(f"{seed} {prompt} {answer} {place}".encode(), digest_size=8).digest())
        // 2
    )


def plain_token(logits: list[float], seen: set[int], sampling: Sampling, first: bool, key: int) -> int:
    """The next token, from the definitions of the filters."""
    penalty = sampling.repetition_penalty
    scores = [
        x if at not in seen else x / penalty if x > 0 else x * penalty for at, x in enumerate(logits)
    ]
    for token in (*sampling.suppress_tokens, *(sampling.begin_suppress_tokens if first else ())):
        scores[token] = -math.inf
    if not sampling.draws:
        return scores.index(max(scores))
    kept = kept_by_lists(scores, sampling)
    return max(kept, key=lambda token: kept[token] / exponential(key, token))


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 17, 90]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 0.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.7]),
    logprobs=st.sampled_from([None, 0, 3]),
    suppress_tokens=st.sampled_from([(), (3, 4)]),
    begin_suppress_tokens=st.sampled_from([(), (7,)]),
    seed=st.integers(0, 3),
)


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.lists(SAMPLINGS, min_size=1, max_size=7),
    st.sampled_from([1, 120, 1 << 17]),
)
def test_texts_of_a_pass_get_what_each_gets_by_the_definitions(
    seed: int, texts: list[Sampling], at_once: int
) -> None:
    """Tokens of several passes, with nuclei wider than those looked at first, and however many are taken at a time."""
    vocabulary, passes = 40, 4
    steps = 2 * torch.randn(
        passes, len(texts), vocabulary, generator=torch.Generator().manual_seed(seed)
    )
    own = Sampler(vocabulary, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "NUCLEUS", 6)
        patch.setattr(module, "CACHED_NUMBERS", at_once)
        for number, sampling in enumerate(texts):
            own.add(Request(number, (1, 2, number), sampling))
        found = [own.choose(range(len(texts)), logits) for logits in steps]
    for number, sampling in enumerate(texts):
        seen = {1, 2, number}
        for step, logits in enumerate(steps[:, number].double()):
            token = plain_token(logits.tolist(), seen, sampling, not step, key_of(sampling, step))
            seen.add(token)
            chosen, told = found[step][number]
            assert chosen == token
            assert (told is None) == (sampling.logprobs is None)
            if told is not None:
                logprobs = logits.log_softmax(-1)
                assert told.logprob == pytest.approx(float(logprobs[token]), abs=1e-5)
                best = logprobs.topk(sampling.logprobs or 0)
                assert [one for one, _ in told.top] == best.indices.tolist()
                assert [one for _, one in told.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_texts_that_come_and_go_have_their_own_tokens_penalised() -> None:
    """More texts, and longer ones, than there is room for at first; lines are used again."""
    vocabulary, own = 200, Sampler(200, CPU)
    random, seen = Random(5), dict[int, set[int]]()
    for number in range(40):
        if number > 4:
            own.remove(gone := random.choice(list(seen)))
            del seen[gone]
        prompt = tuple(random.choices(range(vocabulary), k=random.choice([1, 50, 300])))
        own.add(Request(number, prompt, Sampling(repetition_penalty=1.5)))
        seen[number] = set(prompt)
        logits = torch.randn(len(seen), vocabulary, generator=torch.Generator().manual_seed(number))
        for text, row, (token, _) in zip(seen, logits, own.choose(list(seen), logits), strict=True):
            assert token == plain_token(
                row.double().tolist(), seen[text], Sampling(repetition_penalty=1.5), False, 0
            )
            seen[text].add(token)


class Launches(TorchDispatchMode):
    """Counts what PyTorch is asked to do, and refuses what waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch imports a compiler

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        ), func
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05, "logprobs": 5},
        {"repetition_penalty": 1.1},
        {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    ],
    ids=str,
)
def test_many_texts_take_as_many_launches_as_two_and_are_read_at_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or tolist(tensor)
    )
    counted = []
    for number in (2, 32):
        own, reads[:] = Sampler(600, CPU), []
        for text in range(number):
            own.add(Request(text, (1, 2, 3), Sampling(place=(text, 0), **options)))
        logits = 4 * torch.randn(number, 600, generator=torch.Generator().manual_seed(0))
        own.choose(range(number), logits)  # which notes the prompts
        reads.clear()
        with Launches() as launches:
            own.choose(range(number), logits)
        assert len(reads) == 1
        counted.append(launches.number)
    assert counted[0] == counted[1] < (50 if "seed" in options else 30)


def test_nuclei_wider_than_those_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "NUCLEUS", 4)
    scores = torch.randn(40, generator=torch.Generator().manual_seed(3))
    sampling = Sampling(temperature=1.5, top_p=0.8)
    expected = kept_by_lists(scores.double().tolist(), sampling)
    assert len(expected) > 4
    assert set(draw(scores, sampling, *((i + 0.5) / 2000 for i in range(2000)))) == set(expected)
    chooser = sampler(vocabulary=40, temperature=1.5, top_p=0.8)
    assert {chooser.choose(scores)[0] for _ in range(500)} == set(expected)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    scores = torch.tensor([1.0, 5.0, -torch.inf, 4.999])
    found = draw(scores, Sampling(temperature=temperature), *(i / 100 for i in range(100)))
    assert set(found) == ({1} if temperature < 1 else {0, 1, 3})


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_the_ends_of_the_range(options: dict[str, Any]) -> None:
    scores = torch.tensor([0.0, 0.1, -torch.inf, 0.3])
    found = draw(scores, Sampling(temperature=1.0, **options), 0.0, math.nextafter(1.0, 0.0))
    assert set(found) <= {0, 1, 3}


def test_greedy_with_a_penalty() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0, -1.5])
    assert penalise(logits[None], torch.tensor([[0, 2, 0]]), 2.0).tolist() == [[1.0, 1.5, -2.0, -1.5]]
    chooser = sampler((3,), 4, repetition_penalty=2.0)
    assert [chooser.choose(logits)[0] for _ in range(4)] == [0, 1, 0, 0]
    without = sampler((3,), 4)
    assert [without.choose(logits)[0] for _ in range(2)] == [0, 0]
    assert sampler((0,), 4, repetition_penalty=2.0).choose(logits)[0] == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_tokens_are_never_chosen(temperature: float) -> None:
    logits = torch.tensor([2.0, 9.0, 8.0, -1.0])
    options = {
        "suppress_tokens": (1, 99, -1),
        "begin_suppress_tokens": (2,),
        "temperature": temperature,
        "top_k": 1,
    }
    chooser = sampler((3,), 4, **options)
    assert [chooser.choose(logits)[0] for _ in range(3)] == [0, 2, 2]
    assert logits.tolist() == [2.0, 9.0, 8.0, -1.0]
    assert not Sampling(suppress_tokens=(1,)).greedy
    assert not Sampling(begin_suppress_tokens=(1,)).greedy


def test_the_same_seed_gives_the_same_tokens_and_another_one_others() -> None:
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))

    def chosen(**options: Any) -> list[int]:
        own = sampler(temperature=1.0, **options)
        return [own.choose(row)[0] for row in logits]

    assert chosen(seed=5) == chosen(seed=5)
    assert chosen(seed=5) != chosen(seed=6)
    assert chosen(seed=-5) != chosen(seed=5)


@pytest.mark.parametrize("moved", [(0, 1, 0), (0, 0, 1), (1, 0, 0), (1, -1, 0), (1, 0, -1)], ids=str)
def test_texts_of_one_seed_are_independent(moved: tuple[int, int, int]) -> None:
    """So are neighbours by seed, prompt or answer: by a chi-square test of how often each pair of tokens comes."""
    chances, pairs = [0.2, 0.3, 0.5], 1500
    logits = torch.tensor(chances).log()

    def first(seed: int, prompt: int, answer: int) -> int:
        return sampler(vocabulary=3, temperature=1.0, seed=seed, place=(prompt, answer)).choose(logits)[
            0
        ]

    origins = [(seed, prompt, 1) for seed in range(0, 100, 2) for prompt in range(1, 2 * pairs // 50, 2)]
    found = Counter(
        (first(*origin), first(*map(sum, zip(origin, moved, strict=True)))) for origin in origins
    )
    expected = {(one, other): chances[one] * chances[other] for one in range(3) for other in range(3)}
    assert deviation(found, expected) < 3
    # As it is of equal ones.
    assert deviation(Counter({(one, one): pairs // 3 for one in range(3)}), expected) > 100


def test_the_first_of_many_texts_is_the_only_one_of_a_seed() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    alone, first = sampler(temperature=1.0), sampler(temperature=1.0, place=(0, 0))
    assert [alone.choose(logits) for _ in range(9)] == [first.choose(logits) for _ in range(9)]


@pytest.mark.parametrize("seed", [1, None])
def test_frequencies_of_a_request(seed: int | None) -> None:
    own = sampler(vocabulary=3, temperature=1.0, seed=seed)
    logits = torch.tensor([0.2, 0.3, 0.5]).log()
    found = Counter(own.choose(logits)[0] for _ in range(3000))
    for token, chance in enumerate([0.2, 0.3, 0.5]):
        assert abs(found[token] / 3000 - chance) < 5 * (chance * (1 - chance) / 3000) ** 0.5


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(2))
    reference = [float(x) - math.log(sum(math.exp(y) for y in logits.tolist())) for x in logits]
    own = sampler((4,), temperature=0.2, top_k=2, repetition_penalty=3.0, logprobs=3)
    token, reported = own.choose(logits)
    assert reported is not None
    assert reported.token == token
    assert reported.logprob == pytest.approx(reference[token], abs=1e-5)
    order = sorted(range(50), key=lambda other: -reference[other])
    assert [other for other, _ in reported.top] == order[:3]
    assert [value for _, value in reported.top] == pytest.approx(
        [reference[other] for other in order[:3]], abs=1e-5
    )
    assert [one.top for _, one in [sampler(logprobs=0).choose(logits)] if one] == [()]
    assert [
        len(one.top) for _, one in [sampler(vocabulary=8, logprobs=20).choose(logits[:8])] if one
    ] == [8]
    assert sampler().choose(logits)[1] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "temperature must be at least 0, not -0.5"),
        ({"temperature": math.nan}, "temperature must be at least 0, not nan"),
        ({"temperature": math.inf}, "temperature .* not inf"),
        ({"top_p": -0.1}, r"top_p must be in 0..1, not -0.1"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"min_p": 2}, r"min_p must be in 0..1, not 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"seed": 1 << 64}, "seed must be within 64 bits"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, not -1"),
        ({"logprobs": 65}, r"logprobs must be in 0..64, not 65"),
        ({"stop": ("a", "")}, "stop must be up to 64 texts, none of them empty"),
        ({"stop": "abc"}, "stop must be"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_what_is_greedy() -> None:
    plain = Sampling()
    assert plain.greedy
    # Nothing of this changes the likeliest.
    assert replace(plain, top_p=0.5, top_k=3, min_p=0.1, seed=4).greedy
    for change in ({"temperature": 0.1}, {"repetition_penalty": 1.1}, {"logprobs": 0}):
        assert not replace(plain, **change).greedy
    hot = replace(plain, temperature=9.0, top_p=0.9, top_k=2)
    assert replace(hot, top_p=0).greedy
    assert replace(hot, top_k=1).greedy
    assert not replace(hot, top_p=0, logprobs=0).greedy


@pytest.mark.parametrize("filters", [{"top_p": 0}, {"top_k": 1}], ids=str)
def test_a_filter_that_leaves_one_token_takes_the_first_of_equal_ones_as_greedy_does(
    filters: dict[str, Any],
) -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0])
    hot = sampler(vocabulary=5, temperature=9.0, **filters)
    assert hot.choose(logits)[0] == sampler(vocabulary=5).choose(logits)[0]
    token = hot.draft(logits)
    assert [hot.judge([logits, logits])[0][0], token] == [1, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "min_p": 0.05, "top_p": 0.85},
        {"temperature": 1.6, "top_k": 4, "repetition_penalty": 1.4},
        {"temperature": 0.0, "repetition_penalty": 1.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [None, 1])
def test_judged_drafts_have_the_models_distribution(options: dict[str, Any], seed: int | None) -> None:
    """Whatever is drafted, and from whatever distribution: by chi-square tests of each place, given what comes before.

    Leviathan et al. 2023, algorithm 1 and appendix A.1.
    """
    words, number = 7, 1500
    generator = torch.Generator().manual_seed(5)
    drafts, model = (1.5 * torch.randn(3, words, generator=generator) for _ in range(2))
    first: Counter[int] = Counter()
    second: dict[int, Counter[int]] = {}
    own, sampling = Sampler(words, CPU, Random(1)), Sampling(**options, seed=seed)
    for text in range(number):
        own.add(Request(text, (2,), replace(sampling, place=(text, 0))))
    texts = range(number)
    proposed = [own.draft(texts, logits.expand(number, -1)) for logits in drafts[:2]]
    for text, choices in enumerate(own.judge(texts, model.repeat(number, 1))):
        tokens = [token for token, _ in choices]
        assert tokens[:-1] == [each[text] for each in proposed[: len(tokens) - 1]]
        first[tokens[0]] += 1
        if len(tokens) > 1:
            second.setdefault(tokens[0], Counter())[tokens[1]] += 1
    expected = shares(model[0], {2}, sampling)
    assert deviation(first, expected) < 3.5
    assert options["temperature"] == 0 or deviation(first, shares(drafts[0], {2}, sampling)) > 10
    for token, found in second.items():
        assert deviation(found, shares(model[1], {2, token}, sampling)) < 3.5


def test_what_is_drafted_does_not_change_what_a_seed_draws() -> None:
    """However many are drafted, from whatever distribution, a draft is accepted if the model has drawn it."""
    words, generator = 30, torch.Generator().manual_seed(2)
    model = 1.5 * torch.randn(40, words, generator=generator)
    offered = model + 0.5 * torch.randn(model.shape, generator=generator)
    options = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7}
    plain = sampler(vocabulary=words, **options)
    expected, accepted, tried = [plain.choose(logits)[0] for logits in model], 0, 0
    for most in (1, 3, 8):
        drafted, tokens = sampler(vocabulary=words, **options), list[int]()
        while len(tokens) + most < len(model):
            for logits in offered[len(tokens) : len(tokens) + most]:
                drafted.draft(logits)
            found = drafted.judge([*model[len(tokens) : len(tokens) + most + 1]])
            accepted, tried = accepted + len(found) - 1, tried + min(most, len(found))
            tokens += [token for token, _ in found]
        assert tokens == expected[: len(tokens)]
    p, q = ((logits / 0.9).softmax(-1) for logits in (model, offered))
    distance = float((p - q).abs().sum(-1).mean() / 2)
    assert accepted / tried > (1 - distance) / (1 + distance)


def shares(logits: torch.Tensor, seen: set[int], sampling: Sampling) -> dict[int, float]:
    """The probability of every token that the filters leave, by lists."""
    penalty = sampling.repetition_penalty
    scores = [
        score if token not in seen else score / penalty if score > 0 else score * penalty
        for token, score in enumerate(logits.double().tolist())
    ]
    if sampling.temperature == 0:
        return {scores.index(max(scores)): 1.0}
    return kept_by_lists(scores, sampling)


def deviation(found: Counter[int], expected: dict[int, float]) -> float:
    """By how many standard deviations the chi-square statistic is above its mean; infinite for what cannot come."""
    number = found.total()
    if not set(found) <= {token for token, chance in expected.items() if chance}:
        return math.inf
    freedom = max(1, len(expected) - 1)
    statistic = sum(
        (found[token] - chance * number) ** 2 / (chance * number) for token, chance in expected.items()
    )
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_what_no_number_follows_is_not_judged() -> None:
    chooser, good = sampler((0,), 5, temperature=1.0), torch.tensor([0.0, 1.0, 2.0, 1.0, 0.0])
    bad = torch.full((5,), torch.nan)
    assert chooser.draft(bad) == 0
    assert chooser.judge([bad, good]) == [(-1, None)]
    chooser.draft(good)
    choices = chooser.judge([good, bad])
    assert choices[-1] == (-1, None)
    assert len(choices) == 2  # the same logits accept what they proposed
