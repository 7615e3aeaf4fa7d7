"""A model in memory as a checkpoint with codas beside it, which appear together or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from surgeon.checkpoint.codas import Coda, read_codas, write_codas
from surgeon.checkpoint.load import open_stored
from surgeon.errors import NotProven
from surgeon.exports.export import DTYPES
from surgeon.exports.in_memory import export
from surgeon.exports.prove import Proof


def export_with_codas(
    model: PreTrainedModel,
    folder: str | Path,
    racks: Sequence[str],
    nodes: Sequence[int],
    depth: int,
    codas: Sequence[Coda],
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Proof:
    """Write a model as `surgeon.export` does, and the codas of its racks; both are proven before they get their name.

    Args:
        racks, nodes, depth, codas: as `write_codas` takes them.
        dtype, overwrite, options: as `surgeon.export` takes them; codas are written in the same dtype.

    Returns:
        The proof of the model.

    Raises:
        NotProven: if what was written is not the model, or not the codas.
        FileExistsError, OSError, ValueError: as `surgeon.export`.
    """

    def add_codas(written: Path) -> None:
        if codas:
            write_codas(written, racks, nodes, depth, codas, None if dtype is None else DTYPES[dtype])
            _prove(written, nodes, codas)

    return export(model, folder, dtype=dtype, overwrite=overwrite, complete=add_codas, **options)


def _prove(folder: Path, nodes: Sequence[int], codas: Sequence[Coda]) -> None:
    """Read what was written, and compare it with what it should be, bit for bit."""
    program, found = open_stored(folder).program, read_codas(folder)
    assert found is not None
    if len(program) != nodes[-1]:
        raise NotProven(f"the checkpoint runs {len(program)} steps or forks, and the racks have {nodes[-1]}")
    for rack, coda in enumerate(codas):
        written = found.coda(rack)
        if written.tensors.keys() != coda.tensors.keys() or str(found.program) != str(coda.program):
            raise NotProven(f"the coda of rack {rack} is not what was written")
        for name, tensor in written.tensors.items():
            if not torch.equal(tensor, coda.tensors[name].detach().cpu().to(tensor.dtype)):
                raise NotProven(f"{name} of the coda of rack {rack} is not what was written")
