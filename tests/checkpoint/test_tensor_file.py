"""One file of tensors, read by the same rules as a checkpoint's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from surgeon.checkpoint.tensor_file import TensorFiles


def test_whole_tensors_and_parts(tmp_path: Path) -> None:
    file, tensor = tmp_path / "some.safetensors", torch.arange(12.0).view(3, 4)
    save_file({"a": tensor, "b": torch.ones(2, dtype=torch.bfloat16)}, file)
    found = TensorFiles(file)
    assert sorted(found.names()) == ["a", "b"]
    assert "a" in found
    assert "c" not in found
    assert (found.shape("a"), found.dtype("b"), found.where) == ((3, 4), torch.bfloat16, str(file))
    assert torch.equal(found.tensor("a"), tensor)
    assert torch.equal(found.part("a", 0, 1, 3), tensor[1:3])
    assert torch.equal(found.part("a", 1, 1, 3), tensor[:, 1:3])
    with pytest.raises(ValueError, match="has no tensor 'c'"):
        found.tensor("c")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="some.safetensors"):
        TensorFiles(file)
