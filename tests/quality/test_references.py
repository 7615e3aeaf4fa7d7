"""The original's predictions: any range of windows of them, and the same numbers from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surgeon.quality import identified
from surgeon.quality.head import OutputHead
from surgeon.quality.references import TextReferences
from tests.tiny_models import HIDDEN, VOCABULARY, tiny_model

IDS = torch.randint(VOCABULARY, (5, 9), generator=torch.Generator().manual_seed(2))
STREAM = torch.randn(5, 9, HIDDEN, generator=torch.Generator().manual_seed(3))
CHANGED = torch.randn(5, 9, HIDDEN, generator=torch.Generator().manual_seed(4))
IDENTITY = {"model_hash": "abc", "data": "def", "dtype": "torch.float32"}


def filled(head: OutputHead) -> TextReferences:
    references = TextReferences(IDS)
    for windows in (range(2), range(2, 5)):
        references[windows] = head.reference(STREAM[windows.start : windows.stop], IDS[windows.start : windows.stop])
    return references


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_any_range_of_known_windows_is_known(family: str) -> None:
    head = OutputHead(tiny_model(family, num_layers=1))
    references = filled(head)
    for windows in (range(5), range(1, 4), range(4, 5)):
        chosen = slice(windows.start, windows.stop)
        plain = head.compare(CHANGED[chosen], head.reference(STREAM[chosen], IDS[chosen]))
        found = head.compare(CHANGED[chosen], references[windows])
        torch.testing.assert_close(found["divergence"], plain["divergence"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found["nll"], plain["nll"])
        torch.testing.assert_close(found["greedy_acceptance"], plain["greedy_acceptance"])
    assert references.whole


def test_windows_that_are_not_known_are_said() -> None:
    head = OutputHead(tiny_model("llama", num_layers=1))
    references = TextReferences(IDS)
    references[range(2)] = head.reference(STREAM[:2], IDS[:2])
    assert range(2) in references
    assert range(1, 3) not in references
    assert not references.whole
    with pytest.raises(KeyError):
        references[range(3)]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_file_gives_the_same_numbers_bit_for_bit(family: str, tmp_path: Path) -> None:
    head = OutputHead(tiny_model(family, num_layers=1))
    references, again = filled(head), TextReferences(IDS)
    path = tmp_path / "new" / "reference.safetensors"
    assert not again.load(path, IDENTITY)
    assert references.save(path, IDENTITY)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert again.load(path, IDENTITY)
    one, other = (head.compare(CHANGED, kept[range(5)]) for kept in (references, again))
    assert torch.equal(one["divergence"], other["divergence"])
    assert torch.equal(one["nll"], other["nll"])
    assert torch.equal(again[range(5)].quality["nll"], references[range(5)].quality["nll"])


@pytest.mark.parametrize(
    ("name", "message"),
    [("model_hash", "of another model .model_hash abc, not other"), ("data", "another text"), ("dtype", "dtype")],
)
def test_anothers_file_is_refused(name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    filled(OutputHead(tiny_model("llama", num_layers=1))).save(path, IDENTITY)
    with pytest.raises(ValueError, match=message):
        TextReferences(IDS).load(path, IDENTITY | {name: "other"})


def test_a_damaged_file_is_left_aside(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    filled(OutputHead(tiny_model("llama", num_layers=1))).save(path, IDENTITY)
    path.write_bytes(path.read_bytes()[:100])
    references = TextReferences(IDS)
    with pytest.warns(UserWarning, match="is damaged .* the original is run again"):
        assert not references.load(path, IDENTITY)
    assert not references.known[0]


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(identified, "save_file", full)
    with pytest.warns(UserWarning, match="could not be kept .*No space left"):
        assert not filled(OutputHead(tiny_model("llama", num_layers=1))).save(tmp_path / "r.safetensors", IDENTITY)
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_the_likeliest_tokens_is_made_again(tmp_path: Path) -> None:
    references, path = filled(OutputHead(tiny_model("llama", num_layers=1))), tmp_path / "reference.safetensors"
    older = {name: tensor for name, tensor in references.tensors.items() if name != "likeliest"}
    identified.write_identified(path, older, IDENTITY)
    again = TextReferences(IDS)
    assert not again.load(path, IDENTITY)
    assert references.save(path, IDENTITY)
    assert again.load(path, IDENTITY)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_file_that_is_not_for_sampled_acceptance_is_made_again(family: str, tmp_path: Path) -> None:
    head, path = OutputHead(tiny_model(family, num_layers=1)), tmp_path / "reference.safetensors"
    filled(head).save(path, IDENTITY)
    references = TextReferences(IDS, sampled=True)
    assert not references.load(path, IDENTITY)
    references[range(5)] = head.reference(STREAM, IDS, sampled=True)
    assert references.save(path, IDENTITY)
    again, without = TextReferences(IDS, sampled=True), TextReferences(IDS)
    assert again.load(path, IDENTITY)
    assert without.load(path, IDENTITY)
    found, plain = (head.compare(CHANGED[2:4], kept[range(2, 4)]) for kept in (again, without))
    wanted = head.compare(CHANGED, head.reference(STREAM, IDS, sampled=True))
    torch.testing.assert_close(found["sampled_acceptance"], wanted["sampled_acceptance"][2:4])
    assert "sampled_acceptance" not in plain
