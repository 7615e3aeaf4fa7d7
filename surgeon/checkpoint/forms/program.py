"""The program form: the layers that a program uses, as they are, with its text in config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from surgeon.checkpoint import remote_code
from surgeon.checkpoint.forms.base import Form, Layout, StoredModel, config_beside
from surgeon.checkpoint.forms.planning import PlannedTensor
from surgeon.checkpoint.forms.stored_layers import Inexpressible, StoredLayer, require_divisible
from surgeon.checkpoint.read import Checkpoint
from surgeon.families import Family
from surgeon.model import PROGRAM_KEY
from surgeon.program import ATTENTION, FEED_FORWARD, Program, Sublayer


class ProgramForm(Form):
    """What any program can be stored in."""

    name = "program"
    shipped = remote_code.PROGRAM
    why_code = "its layers do not simply run one after the other, as in every class of transformers"
    on_vllm = (
        "With surgeon installed beside vLLM (from a clone or a wheel), which finds surgeon's plugin by itself and "
        "then knows this model; the modeling file in this folder is not used:"
    )

    def lay_out(self, program: Program, family: Family, config: Any) -> Layout:
        if family.model_type not in remote_code.PROGRAM.names:
            raise Inexpressible(
                f"the modeling file that travels inside has no classes for {family.name} "
                '(CONTRIBUTING.md, "Adding a family", says how it gets them)'
            )
        keys = _used(program)
        layers = tuple(StoredLayer((Sublayer(ATTENTION, key),), (Sublayer(FEED_FORWARD, key),)) for key in keys)
        require_divisible(program.sublayers(), family, config)
        place = {key: index for index, key in enumerate(keys)}
        renumbered = program.renamed(lambda sublayer: replace(sublayer, layers=(place[sublayer.layers],)))
        reason = "transformers loads it with the modeling file inside (trust_remote_code=True), which runs the program"
        return Layout(self, reason, layers, renumbered)

    def sources(self, program: Program, steps_per_layer: int) -> list[tuple[int, ...]]:  # noqa: ARG002
        return _used(program)

    def tensors(self, original: StoredModel, layout: Layout, dtype: torch.dtype | None) -> list[PlannedTensor]:
        planned = super().tensors(original, layout, dtype)
        return [_under_its_own_name(tensor, original.family) for tensor in planned]

    def class_entries(self, family: Family, layout: Layout) -> dict[str, Any]:
        return self.shipped.entries(family.model_type) | {PROGRAM_KEY: str(layout.program)}

    def marks(self, config: dict[str, Any]) -> bool:
        return PROGRAM_KEY in config

    def stock_config(self, checkpoint: Checkpoint, family: Family) -> Any:
        return config_beside(checkpoint, CONFIG_MAPPING[family.model_type])

    def vllm_command(self, serve: str) -> str:
        return f"pip install --no-deps PATH_OF_SURGEON\n{serve} --enforce-eager"


PROGRAM = ProgramForm()


def _used(program: Program) -> list[tuple[int, ...]]:
    """The layers that the program's sublayers have the weights of, an average counting as one."""
    return sorted({sublayer.layers for sublayer in program.sublayers()})


def _under_its_own_name(tensor: PlannedTensor, family: Family) -> PlannedTensor:
    """The output head as the model itself calls it: `transformers` renames it for stock classes only."""
    stored = f"{family.stored_head}."
    if family.stored_head is None or not tensor.name.startswith(stored):
        return tensor
    return replace(tensor, name=f"{family.head}.{tensor.name.removeprefix(stored)}")
