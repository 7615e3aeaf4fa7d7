"""How ranks share mixtures: who has which experts, what they hold, and what is refused before any rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.comm.collectives import Alone, Collectives, Unconnected
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.mixture import Experts, MixtureOfExperts
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.specification import Mixtures, MixtureSize, WholeExperts
from tests.tiny_models import VOCABULARY, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four experts of 12 neurons, two of them for a token; layer 2 is dense."""
    found: Path = tmp_path_factory.mktemp("mixtures")
    tiny_model("qwen3_moe").save_pretrained(found)
    return found


def parsed(text: str) -> Sublayer:
    return next(Program.parse(text).sublayers())


@pytest.mark.parametrize(
    ("part", "members", "neurons", "expected"),
    [
        ("F0", 1, 191, None),
        ("F0/2:1", 2, 191, ("F0", range(3, 7))),  # the neurons do not come out even
        ("F0/2:1", 2, 192, None),
        ("F0/4:2", 4, 191, ("F0", range(3, 5))),
        ("F0/4:2", 2, 190, ("F0/2:1", range(3))),  # a slice that two ranks share
        ("F0/2:0", 1, 191, None),  # one that a rank has by itself
        ("F0!e1,e4,e5/2:1", 2, 191, ("F0!e1,e4,e5", range(1, 3))),
        ("F0!e1/2:1", 2, 191, None),  # a rank would have none
        ("F0/2:0@down8", 2, 192, ("F0@down8", range(3))),  # a slice would have half a factor
        ("F1/2:1", 2, 191, None),  # no mixture
        ("A0/2:1", 2, 191, None),
    ],
)
def test_whole_experts(
    part: str, members: int, neurons: int, expected: tuple[str, range] | None
) -> None:
    mixtures = Mixtures.of(lambda layer: None if layer else MixtureSize(7, neurons), 2)
    wanted = None if expected is None else WholeExperts(parsed(expected[0]), expected[1])
    assert mixtures.whole_experts(parsed(part), members) == wanted


@pytest.mark.parametrize("neurons", [12, 13])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("program", ["A0 F0 F1!e0,e2,e3 F2", "[A0 A1] [F0 F1] F3@up3,down2"])
def test_what_ranks_hold(
    tmp_path: Path, program: str, ranks: int, neurons: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the feed-forwards, by the runtime's own count and by that of a configuration alone."""
    # Which fills up rows.
    monkeypatch.setattr("surgeon.runtime.model.mixture.pack_experts", lambda *_: None)
    model = tiny_model("qwen3_moe", moe_intermediate_size=neurons)
    model.save_pretrained(tmp_path)
    plan = make_plan(tmp_path, ranks, 32, program)
    without = make_plan(
        tmp_path, ranks, 32, " ".join(step for step in ("A0", "[A0 A1]") if program.startswith(step))
    )
    foretold, rest = footprint(plan), footprint(without)
    shapes = ModelShapes.of("tiny", model.config)
    assert footprint(plan, shapes).weights == foretold.weights
    for rank in range(ranks):
        collectives: Collectives = Alone() if ranks == 1 else Unconnected(rank, (0, 1))
        engine, numbers = RankEngine(plan, collectives, torch.device("cpu")), 0
        for key, made in engine.model.program.sublayers.items():
            if isinstance(made, MixtureOfExperts):
                assert isinstance(made.experts, Experts)
                maps = made.experts.gate, made.experts.up, made.experts.down
                numbers += sum(matrix.numel() for one in maps for matrix in one.matrices)
                numbers += plan.hidden * (3 if key[0].experts else 4)  # the router
            elif key[0].kind == "F":
                numbers += 3 * plan.hidden * 48 // (key[0].piece or (0, 1))[1]
        assert foretold.weights[rank] - rest.weights[rank] == 4 * numbers


def test_ranks_that_neither_experts_nor_neurons_divide_among(tmp_path: Path) -> None:
    """Twelve neurons and four experts: three ranks have equal slices, eight unequal ones."""
    tiny_model(
        "mixtral", num_attention_heads=24, num_key_value_heads=24, head_dim=2, intermediate_size=12
    ).save_pretrained(tmp_path)
    found = [footprint(make_plan(tmp_path, ranks, 8, "F0")).weights for ranks in (1, 3, 8)]
    ends = [4 * 2 * -(-VOCABULARY // ranks) * 32 for ranks in (1, 3, 8)]
    experts = 4 * 4 * 3 * 32  # bytes of a neuron of each
    router = 4 * 4 * 32
    own = [[each - end - router for each in weights] for weights, end in zip(found, ends, strict=True)]
    assert own == [[12 * experts], [4 * experts] * 3, [experts, 2 * experts] * 4]


def test_weights_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    """A router or an expert that is missing, or of another width than the stream, is told before ranks start."""
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    names = {
        "model.layers.1.mlp.gate.weight": r"mlp.gate.weight has the shape \(4, 20\)",
        "model.layers.1.mlp.experts.3.up_proj.weight": r"up of F1!e3 is a matrix of 12 x 20, and the stream is 32 wide",
    }
    for name, message in names.items():
        save_file(tensors | {name: tensors[name][:, :20].contiguous()}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            make_plan(tmp_path, 1, 8)


def test_a_plan_says_what_routes(folder: Path) -> None:
    plan = make_plan(folder, 2, 8)
    assert plan.mixtures.sizes == (MixtureSize(4, 12), MixtureSize(4, 12), None, MixtureSize(4, 12))
    assert plan.arithmetic.routing is not None
    assert (plan.arithmetic.routing.top_k, plan.arithmetic.routing.normalise) == (2, False)
    assert plan.family.spec("F", 2).mixture is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_ranks_hold_of_latent_attentions(ranks: int, tmp_path: Path) -> None:
    """Values are as wide as keys in the cache; heads are shared, latents are not."""
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    found = footprint(make_plan(tmp_path, ranks, 32, "A0 A1"))
    rest = footprint(make_plan(tmp_path, ranks, 32, "F0"))
    heads, width, turned, value, rank, through, hidden = 4 // ranks, 12, 4, 12, 16, 12, 32
    queries = through * hidden + heads * width * through
    latents = (rank + turned) * hidden + heads * (width - turned + value) * rank
    ends = rest.weights[0] - 4 * 3 * 48 * hidden // ranks
    assert found.weights[0] - ends == 2 * 4 * (queries + latents + heads * width * hidden)
    assert found.kept[0] == (2 * heads * width * 16 * 4,) * 2
    with pytest.raises(ValueError, match="5 ranks cannot share this model.* 4 heads and 0 neurons"):
        make_plan(tmp_path, 5, 8, "A0")


def test_latent_attentions_that_do_not_fit(tmp_path: Path) -> None:
    tiny_model("deepseek_v2").save_pretrained(tmp_path)
    tensors, path = (
        load_file(tmp_path / "model.safetensors"),
        "model.layers.1.self_attn.kv_b_proj.weight",
    )
    save_file(
        tensors | {path: tensors[path][:-1].contiguous()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        ValueError, match=r"kv_b_proj.weight has the shape \(79, 16\), where the configuration asks for"
    ):
        make_plan(tmp_path, 1, 8)
