"""Safetensors files written tensor by tensor."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Timer

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from surgeon.checkpoint import tensor_file
from surgeon.checkpoint.stored import Checkpoint
from surgeon.checkpoint.tensor_file import (
    FileRecord,
    PlannedTensor,
    Writing,
    holds,
    shard_limit,
    split_into_shards,
)
from surgeon.machine import Background, Stopped
from surgeon.progress import Advance
from tests.checkpoint.helpers import save_source


def planned(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> PlannedTensor:
    return PlannedTensor(name, tuple(tensor.shape), dtype or tensor.dtype, False, lambda: iter([tensor]))


def write_weights(
    folder: Path, shards: dict[str, list[PlannedTensor]], advance: Advance = lambda _: None
) -> None:
    with Writing(folder, shards, advance) as writing:
        writing.finish()


def test_files_hold_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 5).half(),
        "brain": torch.randn(7).bfloat16(),
        "flag": torch.tensor([True, False, True]),
        "byte": torch.randint(0, 255, (5,), dtype=torch.uint8),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(4, 6).t(),
        "long": torch.arange(3),
    }
    write_weights(tmp_path, {"model.safetensors": [planned(n, t) for n, t in tensors.items()]})
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_tensors_are_rounded_to_the_planned_dtype(tmp_path: Path) -> None:
    tensor = torch.randn(50)
    write_weights(tmp_path, {"model.safetensors": [planned("x", tensor, torch.bfloat16)]})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], tensor.bfloat16())


def test_one_tensor_is_alive_at_a_time(tmp_path: Path) -> None:
    alive: list[int] = [0]

    class Counted:
        def __call__(self) -> Iterator[Tensor]:
            tensor = torch.ones(1000)
            alive[0] += 1
            most.append(alive[0])
            weakref.finalize(tensor, lambda: alive.__setitem__(0, alive[0] - 1))
            yield tensor

    most: list[int] = []
    plan = [PlannedTensor(f"t{i}", (1000,), torch.float32, False, Counted()) for i in range(20)]
    write_weights(tmp_path, {"model.safetensors": plan})
    assert max(most) <= 2  # the next one is built while the last one's name is still bound


def test_progress_adds_up_to_all_bytes(tmp_path: Path) -> None:
    told: list[float] = []
    plan = [planned(f"t{i}", torch.randn(10, i)) for i in range(1, 5)]
    write_weights(tmp_path, split_into_shards(plan, 120), told.append)
    assert sum(told) == sum(tensor.num_bytes for tensor in plan) == 400


def test_shards_follow_the_limit_and_the_index_is_right(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(10, i) for i in range(1, 7)}
    shards = split_into_shards([planned(n, t) for n, t in tensors.items()], 250)
    assert [[tensor.name for tensor in shard] for shard in shards.values()] == [
        ["t1", "t2", "t3"],
        ["t4"],
        ["t5"],
        ["t6"],
    ]
    write_weights(tmp_path, shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 40 * 21
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)


def test_the_limit_is_the_sources_largest_shard(tmp_path: Path) -> None:
    save_source(tmp_path / "sharded", shards="40KB")
    save_source(tmp_path / "single")
    sharded = Checkpoint(tmp_path / "sharded")
    assert shard_limit(sharded.weight_files) == max(
        path.stat().st_size for path in (tmp_path / "sharded").glob("*.safetensors")
    )
    assert shard_limit(Checkpoint(tmp_path / "single").weight_files) is None


def test_a_tensor_of_another_shape_than_planned_is_never_written_as_if_it_were_right(
    tmp_path: Path,
) -> None:
    plan = [PlannedTensor("t", (3,), torch.float32, False, lambda: iter([torch.zeros(4)]))]
    with pytest.raises(AssertionError, match="planned as"):
        write_weights(tmp_path, {"model.safetensors": plan})


def test_a_folder_can_be_opened_before_its_tensors_are_there(tmp_path: Path) -> None:
    save_source(tmp_path / "new")
    (tmp_path / "new" / "model.safetensors").unlink()
    tensors = {f"t{i}": torch.randn(10, i) for i in range(1, 7)}
    shards = split_into_shards([planned(n, t) for n, t in tensors.items()], 250)
    writing = Writing(tmp_path / "new", shards)
    checkpoint = Checkpoint(tmp_path / "new")
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("new/*.safetensors")}
    assert {name: checkpoint.shape(name) for name in checkpoint.names()} == {
        n: t.shape for n, t in tensors.items()
    }
    with writing:
        writing.finish()
    assert {path.name: path.stat().st_size for path in tmp_path.glob("new/*.safetensors")} == sizes
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())


class Held:
    """A tensor of ones in a file that is not whole until it is let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.error = Event(), error

    def rows(self) -> Iterator[Tensor]:
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        yield torch.ones(3, 4)

    def writing(self, folder: Path, advance: Advance = lambda _: None) -> Writing:
        """A file that is whole at once, and this one."""
        plan = [
            planned("first", torch.zeros(2)),
            PlannedTensor("held", (3, 4), torch.float32, False, self.rows),
        ]
        save_source(folder)
        (folder / "model.safetensors").unlink()
        return Writing(folder, split_into_shards(plan, 10), advance)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_what_is_read_too_early_is_waited_for(tmp_path: Path) -> None:
    held = Held()
    with held.writing(tmp_path) as writing:
        writing.wait(FIRST)
        checkpoint, asked = Checkpoint(tmp_path), Event()

        def read() -> Tensor:
            asked.set()
            writing.wait(SECOND)
            return checkpoint.tensor("held")

        reading = Background(read)
        assert asked.wait(10)
        held.go.set()
        assert torch.equal(reading.result(), torch.ones(3, 4))
        records = writing.finish()
    assert records == {name: FileRecord.of(tmp_path / name) for name in (FIRST, SECOND)}


def test_what_will_never_be_whole_is_not_waited_for_and_the_reason_is_raised(tmp_path: Path) -> None:
    held = Held(RuntimeError("no such factors"))

    def read_both() -> None:
        with held.writing(tmp_path) as writing:
            held.go.set()
            with pytest.raises(Stopped):
                writing.wait(SECOND)
            writing.wait(FIRST)
            writing.wait(SECOND)

    with pytest.raises(RuntimeError, match="no such factors"):
        read_both()


def test_what_is_no_longer_wanted_is_not_written_to_the_end(tmp_path: Path) -> None:
    told: list[float] = []

    def stop() -> None:
        held = Held()
        writing = held.writing(tmp_path, told.append)
        with writing:
            writing.wait(FIRST)
            Timer(0.2, held.go.set).start()  # when the block is being left
            raise ValueError("somebody else's")

    with pytest.raises(ValueError, match="somebody else's"):
        stop()
    assert sum(told) == 8


@pytest.mark.parametrize("content", [b"abd", b"ab", b"abcd", b""])
def test_a_file_holds_what_was_written_and_no_more(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "good").write_bytes(b"abc")
    (tmp_path / "bad").write_bytes(content)
    assert holds(tmp_path / "good", [b"a", 1, memoryview(b"c")])
    assert not holds(tmp_path / "bad", [b"ab", b"c"])


def test_files_are_read_back_once_they_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rots(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1] + b"x")

    monkeypatch.setattr(tensor_file, "sync", rots)
    with (
        pytest.raises(OSError, match="model.safetensors does not read back as it was written"),
        Writing(tmp_path, {"model.safetensors": [planned("t", torch.ones(3))]}) as writing,
    ):
        writing.finish()
