"""Codas beside a checkpoint: written and read, and what they predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.checkpoint.codas import StoredCodas, read_codas, write_codas
from surgeon.checkpoint.describe import describe
from surgeon.exports.export import why_kept
from surgeon.language.program import Program
from surgeon.models.edit import edit, program_of
from surgeon.training.racks.model import RackModel, assemble, rack_of
from surgeon.training.racks.partition import Racks
from tests.codas import coda_logits
from tests.tiny_models import save_checkpoint, tiny_model
from tests.training.racks.reference import forward

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(3))
PAIRS = "A0 F0 A1 F1 [A2 A3] [F2 F3]"


def written(
    folder: Path, whole: Any, depth: int = 1, dtype: torch.dtype | None = None
) -> list[RackModel]:
    """A checkpoint with codas of changed numbers; returns the racks."""
    racks = Racks.parse("0:2,2:4", program_of(whole), depth)
    cut = [rack_of(whole, racks, index) for index in range(2)]
    for parameter in cut[0].coda_parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    surgeon.export(assemble(whole, racks, cut), folder)
    ends = [rack.nodes.stop for rack in racks.ranges]
    write_codas(folder, racks.texts, ends, depth, [cut[0].coda()], dtype)
    return cut


def read(folder: Path) -> StoredCodas:
    found = read_codas(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("family", "program", "depth"),
    [
        ("llama", PAIRS, 2),
        ("gpt2", "A0 F0 A1 F1 A2 F2 A3 F3", 1),
        ("gemma2", "A0 F0 A1 F1 A2 F2 A3 F3", 0),
        ("gpt_neox", "[A0 F0] [A1 F1] [A2 F2] [A3 F3]", 2),
        ("qwen2", "A0 F0 A1 F1 A2 F2 {A3/2:0 F3/2:0 | A3/2:1 F3/2:1}", 1),
        ("llama", "A0 F0 A1 F1 A2 F2 A3@q4 F3", 1),
    ],
)
def test_written_codas_predict_what_the_rack_does(
    family: str, program: str, depth: int, tmp_path: Path
) -> None:
    cut = written(tmp_path / "made", edit(tiny_model(family, 4), program), depth)
    stream, expected = forward(cut[0], IDS)
    found = read(tmp_path / "made")
    assert (found.racks, found.depth) == (("0:2", "2:4"), depth)
    assert torch.allclose(coda_logits(found.coda(0), IDS, stream), expected.float(), atol=1e-5)
    # The stream after so many nodes of the checkpoint is what the coda was made for.
    path = surgeon.load(tmp_path / "made")
    runs = program_of(path)
    assert torch.allclose(path(input_ids=IDS).logits, forward(cut[1], IDS, stream)[1], atol=1e-4)
    assert len(runs) == found.nodes[-1]
    if family == "gpt2":
        beginning = Program(runs.nodes[: found.nodes[0]])
        heard: list[torch.Tensor] = []
        edited = edit(path, beginning)
        edited.get_submodule("transformer.ln_f").register_forward_pre_hook(
            lambda _, given: heard.append(given[0])
        )
        edited(input_ids=IDS)
        assert torch.allclose(heard[0], stream, atol=1e-5)


def test_names_are_those_of_a_model_of_the_codas_layers(tmp_path: Path) -> None:
    written(tmp_path / "made", tiny_model("llama", 4), 2, torch.bfloat16)
    coda = read(tmp_path / "made").coda(0)
    small = tiny_model("llama", 2).state_dict()
    assert {name: one.shape for name, one in coda.tensors.items()} == {
        name: one.shape for name, one in small.items() if "embed_tokens" not in name
    }
    assert {one.dtype for one in coda.tensors.values()} == {torch.bfloat16}
    assert {one.dtype for one in read(tmp_path / "made").coda(0, torch.float32).tensors.values()} == {
        torch.float32
    }
    assert coda.config.num_hidden_layers == 2
    assert str(coda.program) == "A0 F0 A1 F1"


def test_a_checkpoint_with_codas_is_an_ordinary_one(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert read_codas(save_checkpoint(tmp_path / "other")) is None
    written(folder, tiny_model("llama", 4))
    assert read_codas(folder) is not None
    described = describe(folder).codas
    assert described is not None
    assert (described.racks, described.depth) == (("0:2", "2:4"), 1)
    assert why_kept(folder) is None
    surgeon.export(surgeon.load(folder), tmp_path / "again")
    assert read_codas(tmp_path / "again") is None  # whoever changes the model changes what its codas see
    (folder / "codas" / "mine.txt").write_text("notes")
    assert "codas" in str(why_kept(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "has the format 2, and 1 is known"),
        ({"racks": "0:4"}, "has racks: '0:4'"),
        ({"racks": [0, 4]}, r"has racks: \[0, 4\]"),
        ({"nodes": [8]}, r"has nodes: \[8\]"),
        ({"nodes": [8, 4]}, r"has nodes: \[8, 4\]"),
        ({"depth": "1"}, "has depth: '1'"),
        ({"program": "A0 G0"}, "describes no coda"),
        ({"config": {"model_type": "no"}}, "describes no coda"),
        ({"weights": "0"}, "are of other weights than those in"),
    ],
)
def test_a_damaged_index_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "made")
    racks = Racks.parse("0:2,2:4", Program.dense(4))
    write_codas(folder, racks.texts, [4, 8], 1, [rack_of(tiny_model("llama", 4), racks, 0).coda()])
    index = folder / "codas" / "codas.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    with pytest.raises(ValueError, match=said):
        read_codas(folder)


def test_a_damaged_coda_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "made")
    racks = Racks.parse("0:2,2:4", Program.dense(4))
    write_codas(folder, racks.texts, [4, 8], 1, [rack_of(tiny_model("llama", 4), racks, 0).coda()])
    file = folder / "codas" / "rack-0.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"rack-0\.safetensors is"):
        read(folder).coda(0)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="is missing"):
        read_codas(folder)
