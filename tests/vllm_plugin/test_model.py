"""The model that vLLM builds, with stand-ins for vLLM's own layers, against a plain computation of the program."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import surgeon
from surgeon.language.sublayer import FEED_FORWARD
from surgeon.models.families import FAMILIES
from surgeon.runtime.kernels import functions
from surgeon.training.scratch.tracks import track_program
from tests.checkpoint.helpers import plain_logits, relative_error, run_export
from tests.selection import NORMED_BEHIND, RANKED
from tests.stored import configure, with_head_only, with_own_head
from tests.tiny_models import VOCABULARY, tiny_model
from tests.vllm_plugin import fake_vllm

OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True},
}
# Of whose layers one is no mixture.
SOME_DENSE = ("qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3")
CHUNKED = [name for name in RANKED if FAMILIES[name].off_vllm is not None]
RUN = [name for name in RANKED if name not in CHUNKED]
MIXED = [name for name, family in FAMILIES.items() if family.mixture]
WHOLE = "A0 >F0 {A1 F1 | A2 >F2} >[A3 F3]"
SLICED = "A0 >F0 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} >A2~A3 >F3"
IDS = torch.randint(2, VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(3))

Build = Callable[..., Any]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    yield fake_vllm.install(monkeypatch)
    fake_vllm.forget(monkeypatch)


@pytest.fixture
def build(stages: SimpleNamespace) -> Build:
    """Makes the model of a pipeline stage, with its weights."""
    from surgeon.vllm_plugin.model import ProgramForCausalLM

    def build(
        folder: Path, stage: int = 0, number: int = 1, dtype: Any = torch.float32, **settings: Any
    ) -> Any:
        first, last = stage == 0, stage == number - 1
        vars(stages).update(
            rank_in_group=stage, world_size=number, is_first_rank=first, is_last_rank=last
        )
        configuration = fake_vllm.configuration(folder, **settings)
        configuration.model_config.dtype = dtype
        torch.set_default_dtype(dtype)  # as vLLM does
        model = ProgramForCausalLM(vllm_config=configuration)
        torch.set_default_dtype(torch.float32)
        assert model.load_weights(iter(())) == {name for name, _ in model.named_parameters()}
        model.stages = SimpleNamespace(**vars(stages))
        return model

    return build


def save(folder: Path, family: str, program: str) -> Any:
    """Write a tiny model as a checkpoint of the program form; returns the model."""
    model = tiny_model(family, **OVERRIDES.get(family, {}))
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": f"surgeon_{family}", "surgeon_program": program}))
    return model


@torch.no_grad()
def logits(stages: list[Any]) -> Tensor:
    """Logits (1, tokens, vocabulary) of all the pipeline's stages one after the other."""
    passed = None
    for model in stages:
        passed = model(IDS[0] if passed is None else None, torch.arange(IDS.shape[1]), passed)
    found: Tensor = stages[-1].compute_logits(passed)
    return found[None]


@pytest.mark.sampled
@pytest.mark.parametrize("family", RUN)
def test_logits(family: str, build: Build, tmp_path: Path) -> None:
    program = WHOLE if family in (*NORMED_BEHIND, *MIXED) else SLICED
    expected = plain_logits(save(tmp_path, family, program), program, IDS)
    assert relative_error(logits([build(tmp_path)]), expected) < 1e-4


@pytest.mark.sampled
@pytest.mark.parametrize("family", RUN)
def test_vllm_s_own_operations(
    family: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute what this package's kernels do not; here there are none."""
    monkeypatch.setattr(functions, "kernels", lambda: None)
    program = WHOLE if family in (*NORMED_BEHIND, *MIXED) else SLICED
    expected = plain_logits(save(tmp_path, family, program), program, IDS)
    assert relative_error(logits([build(tmp_path)]), expected) < 1e-4
    known = FAMILIES[family]
    roles = {projection.role for projection in known.spec(FEED_FORWARD).projections}
    gated = "gate" in roles and (known.mixture is None or family in SOME_DENSE)
    gate = "gelu_tanh_and_mul" if family.startswith("gemma") else "silu_and_mul"
    wanted = {
        "rms_norm": known.norms.kind == "rms",
        "rotary_embedding": known.positions.rotary,
        gate: gated,
    }
    assert torch.ops._C.called == {name for name, used in wanted.items() if used}


@pytest.mark.parametrize("family", CHUNKED)
def test_attentions_that_are_vllm_s_own(family: str, build: Build, tmp_path: Path) -> None:
    """Over chunks of a text: said before anything is read."""
    save(tmp_path, family, WHOLE)
    with pytest.raises(ValueError, match="cannot run this: vLLM runs no program of these attentions: "):
        build(tmp_path)


@pytest.mark.parametrize(("family", "normed"), [("llama", True), ("gemma2", False)])
def test_gains_wider_than_the_stream_are_not_rounded(
    family: str, normed: bool, build: Build, tmp_path: Path
) -> None:
    expected = plain_logits(save(tmp_path, family, WHOLE), WHOLE, IDS)
    found = logits([build(tmp_path, dtype=torch.bfloat16)])
    assert relative_error(found.float(), expected) < 0.1
    assert ("rms_norm" in torch.ops._C.called) == normed


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_narrow_layers(family: str, build: Build, tmp_path: Path) -> None:
    program = "A0 F0#20 >A1#1 >F1 A2 F2 A3#1 F3#5"
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "narrow", program)
    built = build(tmp_path / "narrow")
    assert relative_error(logits([built]), plain_logits(model, program, IDS)) < 1e-4
    assert [slot.kv_heads for slot in built.slots] == [2, 1, 2, 1]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("number", [1, 2])
def test_native_tracks(family: str, number: int, build: Build, tmp_path: Path) -> None:
    """Forks over whole layers; a pipeline stage runs whole blocks, and has caches for their attentions only."""
    steps = FAMILIES[family].steps_per_layer
    program = str(track_program(2, count=2, depth=1, steps_per_layer=steps)[0])
    expected = plain_logits(save(tmp_path, family, program), program, IDS)
    stages = [build(tmp_path, stage, number) for stage in range(number)]
    assert relative_error(logits(stages), expected) < 1e-4
    assert [len(stage.slots) for stage in stages] == [4 // number] * number


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("store", [with_own_head, with_head_only])
def test_embeddings_that_are_said_to_be_tied(
    store: Callable[[Path], Path], family: str, build: Build, tmp_path: Path
) -> None:
    program = "A0 F0 {A1 F1 | A2 F2} >A3"
    tiny_model(family, tie_word_embeddings=True).save_pretrained(tmp_path)
    store(tmp_path)
    expected = plain_logits(surgeon.load(tmp_path), program, IDS)
    configure(tmp_path, model_type=f"surgeon_{family}", surgeon_program=program)
    assert relative_error(logits([build(tmp_path)]), expected) < 1e-4
    assert relative_error(logits([build(tmp_path, stage, 2) for stage in range(2)]), expected) < 1e-4


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_pipeline_stages(family: str, number: int, build: Build, tmp_path: Path) -> None:
    """The last stage begins with a late step, whose predecessor's output arrives beside the stream."""
    program = "A0 F0 >A1 >F1 {A2 | F2} >A3"
    expected = plain_logits(save(tmp_path, family, program), program, IDS)
    stages = [build(tmp_path, stage, number) for stage in range(number)]
    assert [len(stage.rank_program.nodes) for stage in stages] == [6 // number] * number
    assert relative_error(logits(stages), expected) < 1e-4
    names = [slot.name for stage in stages for slot in stage.slots]
    assert len(set(names)) == len(names) == 4
    # VLLM counts slots by it.
    assert all(sum(part.isdecimal() for part in name.split(".")) == 1 for name in names)


def test_an_empty_pass_has_the_shape_of_what_a_stage_hands_on(build: Build, tmp_path: Path) -> None:
    save(tmp_path, "llama", WHOLE)
    first = build(tmp_path, 0, 2)
    handed_on = first(IDS[0], torch.arange(IDS.shape[1])).tensors
    empty = first.make_empty_intermediate_tensors(
        IDS.shape[1], torch.float32, torch.device("cpu")
    ).tensors
    assert {name: one.shape for name, one in empty.items()} == {
        name: one.shape for name, one in handed_on.items()
    }


def test_what_is_refused(build: Build, tmp_path: Path) -> None:
    save(tmp_path, "llama", WHOLE)
    with pytest.raises(
        ValueError, match="no reduce 'torhc' in --additional-config; did you mean 'torch'"
    ):
        build(tmp_path, reduce="torhc")
    with pytest.raises(ValueError, match="no setting 'redcue' .* did you mean 'reduce'"):
        build(tmp_path, redcue="torch")
    with pytest.raises(ValueError, match="weights from the checkpoint once"):
        build(tmp_path).load_weights(iter(()))
    with pytest.raises(ValueError, match="cannot be cut into 9 pipeline stages"):
        build(tmp_path, 0, 9)


def test_positions_that_go_by_the_length_of_a_text_are_refused(build: Build, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    tiny_model("llama", rope_parameters=rope, max_position_embeddings=16).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="texts of more than 16 tokens, which surgeon's plugin cannot run; set --max-"
    ):
        build(tmp_path)
