"""Numbers of every kind of program on 1 to 8 ranks against one process of `transformers`.

Three, five, six and seven ranks divide neither heads nor neurons of most of these models, and of eight some have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.exports.in_memory import edit
from surgeon.language.execute import Branch
from surgeon.language.operations import desync, fuse_attention_mlp, pair, repeat, tracks
from surgeon.language.program import Fork, Node, Program, Step
from surgeon.models.families import FAMILIES
from surgeon.runtime.batching.blocks import blocks_for
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import Progress, complete, load, unload
from tests.runtime.on_ranks import logits_in_chunks
from tests.selection import NORMED_BEHIND, RANKED, case
from tests.tiny_models import VOCABULARY, tiny_model

TOLERANCE = 1e-4
# Mistral, Phi3, and some layers of Qwen2, Gemma2, GPT-Neo and SmolLM3 have windows of 5 tokens.
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {"attention_bias": True},
    "gemma2": {},
    "gemma3_text": {"attention_bias": True},
    "olmo2": {},
    "exaone4": {},
    "seed_oss": {},
    "starcoder2": {},
    "olmo3": {"attention_bias": True},
    "opt": {},
    "gpt_neox": {"tie_word_embeddings": False},
    "phi": {},
    "stablelm": {},
    "gptj": {},
    "falcon": {},
    "phi3": {},
    "gpt2": {},
    "gpt_neo": {},
    "smollm3": {},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "glm": {},
    "glm4": {},
    "cohere": {"attention_bias": True},
    "cohere2": {},
    "ministral": {},
    "ministral3": {},
    "mixtral": {},
    "qwen3_moe": {},  # whose layer 2 is dense
    "qwen3_next": {},  # the same; its MLPs run on ranks, and its attentions do not
    "olmoe": {},
    "gpt_oss": {},
    "deepseek_v2": {},
    "deepseek_v3": {"attention_bias": True},
    "llama4_text": {},
    "olmo": {},
    "qwen2_moe": {},
    "glm4_moe": {"first_k_dense_replace": 0},
    "minimax_m2": {},
}
DENSE = Program.dense(4)
PROGRAMS = {
    "dense": "A0 F0 A1 F1 A2 F2 A3 F3",
    "shuffle and prune": "A0 F0 A3 F3 A1 F1",
    "a layer twice": "A0 F0 A1 F1 A1 F1",
    "repeated pairs": str(repeat(pair(DENSE, range(0, 2)), range(0, 3))),
    "repeated in tracks": str(repeat(tracks(DENSE, range(0, 3), count=2, depth=3), range(1, 3))),
    "merge": "A0 F0 A1~A2 F1~F2 A3 F3",
    "LP": "A0 F0 [A1 A2] [F1 F2] A3 F3",
    "three in a step": "A0 F0 [A1 A2 A3] [F1 F2 F3]",
    "the same one twice in a step": "A0 F0 [A1 A1] [F1 F1 F2]",
    "four in a step": "[A0 A1 A2 A3] [F0 F1 F2 F3]",
    "attention || MLP": "[A0 F0] [A1 F1] [A2 F2] [A3 F3]",
    "ladder": "A0 F0 >A1 >F1 >A2 >F2 A3 F3",
    "ladder to the end": "A0 >F0 >A1 >F1 >A2 >F2 >A3 >F3",
    "ladder over LP": "A0 F0 >[A1 A2] >[F1 F2] >A3 >F3",
    "PAR": "A0 F0 {A1 F1 | A2 F2} A3 F3",
    "a fork read late": "A0 F0 {A1 F1 | A2 F2} >A3 >F3",
    "ladders in a fork": "{A0 >F0 >A1 >F1 | >A2 >F2 A3}",
    "a fork in a fork": "A0 {A1 {F1 | F2} | F0 A2} F3",
    "a branch that is a fork": "{{A0 F0 | A1 F1} | A2 F2}",
    "tracks": "A0 F0 {A1/2:0 F1/2:0 A2/2:0 F2/2:0 | A1/2:1 F1/2:1 A2/2:1 F2/2:1} A3 F3",
    "sync-point drop": "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} {A1/2:0 F1/2:0 | A1/2:1 F1/2:1}",
    "four branches": "{A0 F0 | A1 F1 | A2 F2 | A3 F3}",
    "averaged slices": "{A0~A1/2:0 | A0~A1/2:1} [F0~F1/2:0 F0~F1/2:1]",
    "tracks that meet twice": str(tracks(DENSE, range(0, 4), count=2, depth=2)),
    "a shorter last track": str(tracks(DENSE, range(1, 4), count=2, depth=2)),
    "tracks of one-step layers": str(tracks(Program.dense(4, 1), range(1, 4), count=2, depth=3)),
    "desync": str(desync(DENSE, range(1, 4), count=2)),
    "fused attention and MLP": str(fuse_attention_mlp(DENSE, range(1, 3))),
    "narrow": "A0 F0#20 [A1#2 A2#2] [F1#12 F2] >A3 >F3#4",
    "some experts": "A0 F0!e0,e3 A1 >F1!e1,e2,e3 [A2 A3] [F2 F3!e2,e3]",
    "some experts behind": "A0 F0 A1 F1!e0,e3 >A2 >F2!e1,e2,e3 A3 F3@gate5,up6,down3",
    "some experts alone": "F0!e0,e3 F1 >F2 [F3@gate3,down4 F0]",
    "factors of experts": "A0 F0@gate5,up6 [A1 A3] [F1@down4 F3@gate3,up3,down3] >A2",
    "one KV group of two": "[A0#1 A1#1] [F0#20 F1#8] {A2#1 F2 | A3 F3#28}",
}
GROUPED = ("llama", "qwen3", "gemma2")
# Families that compute what another one does, or that differ from one in how weights are stored only.
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "qwen2_moe", "glm4_moe")
# Whose attentions have no slices in programs.
KEPT = ("olmoe", "minimax_m2", "deepseek_v2", "deepseek_v3")
ALIKE = ("qwen2_moe", "glm4_moe", "minimax_m2")  # whose mechanisms others have, too
MIXED = (
    "dense",
    "LP",
    "ladder over LP",
    "PAR",
    "tracks that meet twice",
    "some experts",
    "factors of experts",
)
SHORT = (
    "mistral",
    "qwen2",
    "phi3",
    "gpt2",
    "gpt_neo",
    "smollm3",
    "granite",
    "glm",
    "glm4",
    "gemma3_text",
)
SHORT += (
    "cohere",
    "cohere2",
    "ministral",
    "ministral3",
    "olmo2",
    "olmo3",
    "exaone4",
    "seed_oss",
    "starcoder2",
)
SHORT += ("gemma", "phi", "stablelm", "gptj", "falcon", "olmo")
SHORT_LIST = ("dense", "merge", "LP", "attention || MLP", "ladder", "tracks that meet twice", "desync")


def programs_of(family: str) -> list[str]:
    if family not in RANKED:
        return ["some experts alone"]
    if family in KEPT:
        return ["dense", "LP", "ladder over LP", "PAR", "some experts behind"]
    if family in MIXTURES:
        return list(MIXED)
    return list(SHORT_LIST) if family in SHORT else [name for name in PROGRAMS if "experts" not in name]


CASES = [
    (family, name)
    for family in OVERRIDES
    for name in programs_of(family)
    if family not in NORMED_BEHIND or "/" not in PROGRAMS[name]  # their sublayers cannot be sliced
    if family in GROUPED or name != "one KV group of two"  # whose heads are two, for two ranks
]
MANY = [
    (6, "shm"),
    (7, "shm"),
    (8, "shm"),
]  # which two cores take long to start: tried with --thorough only
WAYS = [(1, "shm"), (2, "shm"), (4, "shm"), (2, "gloo"), (4, "gloo"), (3, "shm"), (5, "shm"), *MANY]


def is_default(way: tuple[int, str], family: str, name: str, at: int) -> bool:
    """Whether a case is tried without --thorough, too: every program by llama on two ranks and on four.

    What is a family's own is how its sublayers compute and are cut: it runs its own layers and some other programs,
    others in each way, so that a few families run each of them; what computes as another one does is not cut in four
    for its own layers, too. Gemma2, whose norms lie behind its sublayers and keep
    sums apart, runs every program. What a rank computes does not depend on how it is connected: few go through gloo.
    """
    if way in MANY:
        return False
    if way[1] == "gloo":
        return family == "llama" and (name == "dense" or (way[0] + at) % 6 == 0)
    if way[0] in (2, 4) and (family == "llama" or name == "dense"):
        return way[0] == 2 or family not in (*SHORT, *ALIKE)
    if way[0] in (3, 5) and name == "dense":
        return (way[0] == 3) == bool(at % 2)
    return (WAYS.index(way) + at) % (3 if family == "gemma2" else 9) == 0


ON_WAYS = [
    case(
        way,
        family,
        name,
        default=is_default(way, family, name, at),
        id=f"{way[1]}{way[0]}-{family}-{name}",
    )
    for way in WAYS
    for at, (family, name) in enumerate(CASES)
    # Their weights, cut in four.
    if way[0] < 4 or family not in SHORT or name in ("dense", "merge", "LP")
    # How ranks are connected is the same for all.
    if way[1] != "gloo" or family not in SHORT + KEPT or name == "dense"
]
IDS = torch.randint(2, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))
CHUNKS = [IDS[:, :6], IDS[:, 6:10], IDS[:, 10:]]  # prefill, several tokens after others, decode

Checkpoints = Callable[[str], Path]
Expected = Callable[[str, str], Tensor]


@pytest.fixture(scope="module", params=WAYS, ids=lambda pair: f"{pair[1]}{pair[0]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    number, collectives = request.param
    with Ranks(RankOptions(number, collectives=collectives)) as started:
        yield started


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The folder of a family's model, written when it is first asked for."""
    folder = tmp_path_factory.mktemp("parity")

    @cache
    def saved(family: str) -> Path:
        tiny_model(family, **OVERRIDES[family]).save_pretrained(folder / family)
        return folder / family

    return saved


@pytest.fixture(scope="module")
def expected() -> Expected:
    """Logits of one process, by family and name of the program."""

    @cache
    def model(family: str) -> Any:
        return tiny_model(family, **OVERRIDES[family])

    @cache
    def logits(family: str, name: str) -> Tensor:
        with torch.no_grad():
            found: Tensor = edit(model(family), PROGRAMS[name])(input_ids=IDS, use_cache=False).logits
        return found

    return logits


def test_every_supported_family_is_compared() -> None:
    # Whose MLPs are those of the others that ranks have a part of.
    assert set(OVERRIDES) == {*RANKED, "qwen3_next"}


def branches_of(fork: Fork, ranks: int) -> list[tuple[Branch, int]]:
    """A fork's branches, and how many ranks share each."""
    count = len(fork.branches)
    shares = [(place + 1) * ranks // count - place * ranks // count for place in range(count)]
    return [(branch, max(1, share)) for branch, share in zip(fork.branches, shares, strict=True)]


def outputs_reduced(nodes: tuple[Node, ...], ranks: int, norms_behind: bool) -> int:
    """How many streams' worth of outputs are reduced: one per step and fork.

    Sublayers with norms behind them are reduced side by side where they are sliced, because each is normed by itself.
    """
    if ranks == 1:
        return 0
    count = 0
    for node in nodes:
        if isinstance(node, Step):
            whole = (
                len({sublayer.kind for sublayer in node.sublayers}) == 1
                and len(node.sublayers) % ranks == 0
            )
            count += len(node.sublayers) if norms_behind and not whole else 1
        else:
            count += 1 + max(
                outputs_reduced(branch, each, norms_behind) for branch, each in branches_of(node, ranks)
            )
    return count


def squares_exchanged(nodes: tuple[Node, ...], ranks: int) -> int:
    """How often the ranks that share an attention's heads tell each other how large their queries and keys are."""
    count = 0
    for node in nodes:
        if isinstance(node, Step):
            attentions = sum(sublayer.kind == "A" for sublayer in node.sublayers)
            alike, sublayers = attentions in (0, len(node.sublayers)), len(node.sublayers)
            if alike and ranks % sublayers == 0:
                count += attentions > 0 and ranks > sublayers
            elif not alike or sublayers % ranks:
                count += attentions
        else:
            count += max(squares_exchanged(branch, each) for branch, each in branches_of(node, ranks))
    return count if ranks > 1 else 0


@pytest.mark.sampled
@pytest.mark.parametrize(("ranks", "family", "name"), ON_WAYS, indirect=["ranks"])
def test_logits_and_counts(
    family: str, name: str, ranks: Ranks, checkpoints: Checkpoints, expected: Expected
) -> None:
    number, program = len(ranks.pids), Program.parse(PROGRAMS[name])
    plan = make_plan(checkpoints(family), number, IDS.shape[1], str(program))
    answers = ranks.call(logits_in_chunks, plan, CHUNKS)
    reference = expected(family, name)
    for logits, _, vocabulary in answers:
        error = (logits - reference).abs().max() / reference.abs().max()
        assert error < TOLERANCE
        assert vocabulary.all_reduces == vocabulary.all_gathers == (len(CHUNKS) if number > 1 else 0)
    # The rank whose branches have the most steps is the one that the others wait for.
    squares = squares_exchanged(program.nodes, number) if FAMILIES[family].attention.joins_heads else 0
    for chunk, counts in zip(
        CHUNKS, zip(*(counts for _, counts, _ in answers), strict=True), strict=True
    ):
        assert max(count.all_reduces for count in counts) == program.sync_points(number) + squares
        outputs = outputs_reduced(program.nodes, number, norms_behind=family in NORMED_BEHIND)
        assert (
            max(count.bytes for count in counts)
            == (outputs * plan.hidden + 2 * squares) * chunk.numel() * 4
        )
        assert all(count.all_gathers == 0 for count in counts)


ALL_FORMS = "A0 F0 [A1 A2] {F1 F2 | A3} [A3 F3] >A0@q5,k4,v3,o6 >F0@gate5,up6,down4"
SIZES = [(9, 3, 41), (10, 5, 24), (3, 3, 50), (12, 2, 7), (14, 2, 33), (15, 5, 40), (5, 1, 19)]


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        case(
            way,
            sizes,
            default=way not in MANY and (WAYS.index(way) + at) % 2 == 0,
            id=f"{way[0]}-{'-'.join(map(str, sizes))}",
        )
        for way in WAYS
        if way[1] == "shm" and way[0] > 1
        for at, sizes in enumerate(SIZES)
    ],
    indirect=["ranks"],
)
def test_numbers_without_a_common_divisor(
    sizes: tuple[int, int, int], ranks: Ranks, tmp_path: Path
) -> None:
    heads, kv_heads, neurons = sizes
    config = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 4 * heads}
    model = tiny_model("llama", head_dim=8, intermediate_size=neurons, vocab_size=31, **config)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = edit(model, ALL_FORMS)(input_ids=IDS % 31, use_cache=False).logits
    plan = make_plan(tmp_path, len(ranks.pids), IDS.shape[1], ALL_FORMS)
    for logits, *_ in ranks.call(logits_in_chunks, plan, [chunk % 31 for chunk in CHUNKS]):
        assert (logits - wanted).abs().max() < TOLERANCE * wanted.abs().max()


SLICED = [(way, family, name) for way in WAYS[1:3] for family in MIXTURES for name in MIXED]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("ranks", "family", "name"),
    [
        case(*one, default=at % 7 == 0, id=f"{one[0][1]}{one[0][0]}-{one[1]}-{one[2]}")
        for at, one in enumerate(SLICED)
    ],
    indirect=["ranks"],
)
def test_experts_are_sliced(
    family: str, name: str, ranks: Ranks, checkpoints: Checkpoints, expected: Expected
) -> None:
    """Every rank some neurons of each, where above ranks divide the experts, which have few neurons here."""
    number, reference = len(ranks.pids), expected(family, name)
    plan = make_plan(checkpoints(family), number, IDS.shape[1], PROGRAMS[name])
    for logits, sent, _ in ranks.call(logits_in_chunks, plan, CHUNKS):
        assert (logits - reference).abs().max() < TOLERANCE * reference.abs().max()
        assert sent[0].all_reduces <= Program.parse(PROGRAMS[name]).sync_points(number)


@pytest.mark.parametrize(
    ("ranks", "vocabulary"),
    [
        case(way, size, default=way not in MANY and (way[0] == 4) == (size == 5))
        for size in (5, VOCABULARY)
        for way in WAYS
    ],
    indirect=["ranks"],
)
def test_greedy_tokens(vocabulary: int, ranks: Ranks, tmp_path: Path) -> None:
    """Of five rows of an embedding on four ranks, the last one has none."""
    model = tiny_model("llama", vocab_size=vocabulary)
    model.save_pretrained(tmp_path)
    prompts = IDS % vocabulary
    wanted = model.generate(prompts, max_new_tokens=16, do_sample=False, eos_token_id=None)[
        :, prompts.shape[1] :
    ]
    plan = make_plan(tmp_path, len(ranks.pids), prompts.shape[1] + 16)
    ranks.call(load, plan)
    sampling = Sampling(max_new_tokens=16, ignore_end=True)
    requests = [
        Request(number, tuple(prompt), sampling) for number, prompt in enumerate(prompts.tolist())
    ]
    limits, blocks = Limits(len(prompts), plan.max_tokens), len(prompts) * blocks_for(plan.max_tokens)
    heard: list[Progress] = []
    answers = ranks.call(complete, requests, blocks, limits, notify=heard.append)
    by_text = zip(*(progress.outputs for progress in heard), strict=True)
    assert [[output.token for output in text] for text in by_text] == wanted.tolist()
    assert answers[0][0] == [output for progress in heard for output in progress.outputs]
    decode = [figures.decode for _, figures in answers]
    assert {phase.passes for phase in decode} == {15}
    assert max(phase.layers.all_reduces for phase in decode) == 15 * DENSE.sync_points(len(ranks.pids))
    ranks.call(unload)
