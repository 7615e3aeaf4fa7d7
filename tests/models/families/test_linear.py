"""Linear attention: which edits leave it as it is, which are refused and in what words, and what counts tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.checkpoint.forms.program import PROGRAM
from surgeon.cost.deployment import plan_on_paper
from surgeon.exports.export import plan_export, write_export
from surgeon.language.operations.lowrank import lowrank
from surgeon.language.operations.width import width
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import edit
from surgeon.models.shapes import ModelShapes
from surgeon.opened import open_model
from surgeon.runtime.plan.checks import make_plan
from surgeon.searches.spaces import SPACES
from surgeon.training.scratch.tracks import narrow
from tests.reference import Reference
from tests.tiny_models import tiny_model

LINEAR, FULL = "linear_attention", "full_attention"
KINDS = [LINEAR, LINEAR, FULL, LINEAR]
IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
WHICH = "attentions of Qwen3-Next in layers 0, 1 and 3"
STATE = "they are linear attention, whose state no rank keeps"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("linear") / "model"
    tiny_model("qwen3_next", layer_types=KINDS).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("A0/2:0 F0", f"{WHICH} cannot be sliced: they are linear attention, which stays as it is"),
        ("A3#1 F0", f"A3#1: {WHICH} cannot be narrowed: they are linear"),
        ("A1@o8 F0", f"A1@o8: {WHICH} cannot be factorised: they are linear"),
        ("A1~A2 F0", "A1~A2 cannot be averaged: its layers have attentions of different kinds"),
    ],
)
def test_parts_of_it_are_refused(program: str, reason: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        edit(tiny_model("qwen3_next", layer_types=KINDS), program)
    with pytest.raises(ValueError, match=reason):
        write_export(plan_export(open_model(source), Program.parse(program)), tmp_path / "out")


def plain(model: Any, program: str) -> Tensor:
    """Logits of steps of single sublayers, late ones among them, in plain PyTorch."""
    reference, stream = Reference(model), torch.empty(0)
    before = stream = reference.embed(IDS)
    for step in program.split():
        late, (kind, layer) = step.startswith(">"), step.lstrip(">")
        read = before if late else stream
        compute = reference.attention if kind == "A" else reference.feed_forward
        before, stream = stream, stream + compute(int(layer), read)
    return reference.logits(stream)


@pytest.mark.parametrize("program", ["A0 F2 A1 F1", "A0 >A1 >F1 A3", "F0 F3", "A3 F0 >A3 >A2 F1"])
def test_a_cache_counts_tokens_with_and_without_full_attention(
    program: str, source: Path, tmp_path: Path
) -> None:
    """In memory and in the modeling file, each attention with a state of its own, also one that runs twice."""
    model = tiny_model("qwen3_next", layer_types=KINDS)
    expected = plain(model, program)
    write_export(plan_export(open_model(source), Program.parse(program), "program"), tmp_path / "out")
    shipped = (
        PROGRAM.shipped.model_class("qwen3_next", tmp_path / "out")
        .from_pretrained(tmp_path / "out")
        .eval()
    )
    for running in (edit(model, program), shipped):
        cache, steps = None, []
        for ids in IDS.split([4, 1, 1, 3], 1):
            with torch.no_grad():
                out = running(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, steps = out.past_key_values, [*steps, out.logits]
        assert cache.get_seq_length() == IDS.shape[1]
        torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-5)


def test_what_runs_elsewhere_says_which_layers_have_it(source: Path, tmp_path: Path) -> None:
    model, program = open_model(source), Program.parse("A0 F0 >A2 >F2")
    with pytest.raises(ValueError, match=f"ranks do not run {WHICH}: {STATE}; transformers does"):
        make_plan(source, 2, 16)
    with pytest.raises(ValueError, match=f"{WHICH}: {STATE}"):
        plan_on_paper(model.shapes, program, 2, 16, "float32", "auto", "auto")
    with pytest.raises(
        ValueError, match="attentions of Qwen3-Next: what their heads give is multiplied by a gate"
    ):
        make_plan(source, 1, 16, "A2 F0")
    assert make_plan(source, 2, 16, "F0 F1").ranks == 2
    plan = plan_export(model, program, "program")
    assert f"vLLM runs no program of {WHICH}: {STATE}" in plan.layout.reason
    write_export(plan, tmp_path / "out")
    assert (
        "transformers serve "
        in plan.layout.form.serving(open_model(tmp_path / "out"), "vllm serve DIR")[1]
    )


def test_operations_leave_it_whole(source: Path) -> None:
    shapes, dense = open_model(source).shapes.layer_shapes, Program.dense(4)
    with pytest.warns(UserWarning, match="the KV groups of layers 0, 1 and 3 cannot be told apart"):
        assert str(width(dense, range(4), shapes, heads=1)) == "A0 F0 A1 F1 A2#1 F2 A3 F3"
    assert str(lowrank(dense, range(4), shapes, ["g", "o"], 0.5)) == "A0 F0 A1 F1 A2@g10,o10 F2 A3 F3"
    assert str(lowrank(dense, range(4), shapes, ranks={"g": 7})) == "A0 F0 A1 F1 A2@g7 F2 A3 F3"
    with pytest.raises(ValueError, match="layer 0 has no matrix 'g'; give null in its place"):
        lowrank(dense, range(4), shapes, ranks={"g": [7, None, 7, None]})


def test_native_tracks_are_refused() -> None:
    with pytest.raises(ValueError, match=f"tracks have no narrower {WHICH}: they are linear attention"):
        narrow(tiny_model("qwen3_next", layer_types=KINDS).config, 2, 2)


def test_its_parameters_are_counted() -> None:
    model = tiny_model("qwen3_next", layer_types=KINDS)
    shapes = ModelShapes.of("tiny", model.config).layer_shapes
    linear = model.model.layers[0].linear_attn
    assert Sublayer("A", (0,)).parameters(shapes) == sum(
        parameter.numel() for parameter in linear.parameters()
    )


def test_spaces_have_the_layers_whose_heads_stand_for_themselves(source: Path) -> None:
    model = open_model(source)
    assert [edit.layers for edit in SPACES["tracks"](ranks=2).edits(model)] == [range(2, 3)]
    assert [edit.layers for edit in SPACES["desync"](ranks=2).edits(model)] == [range(2, 3)]
    narrowed = [
        str(edit) for edit in SPACES["width"](ranks=1).edits(model) if "attention" in edit.option
    ]
    assert narrowed == ["width 2:3 attention:0.5"]
    assert {edit.layers for edits in SPACES["tracks"](ranks=2).stretches(model) for edit in edits} <= {
        range(2, 3)
    }
