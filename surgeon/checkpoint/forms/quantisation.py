"""What config.json of a new checkpoint says of quantised weights: which modules still are, and which no longer."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from surgeon.checkpoint.forms.base import Layout
from surgeon.checkpoint.forms.planning import PlannedTensor
from surgeon.checkpoint.read import QUANTIZATION
from surgeon.checkpoint.stored import StoredModel

# Where each method lists the modules that it leaves alone, by name: the first of these that is there is read.
_LEFT_ALONE = {
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "awq": ("modules_to_not_convert",),
    "mxfp4": ("modules_to_not_convert",),
    "compressed-tensors": ("ignore",),
    "bitsandbytes": ("llm_int8_skip_modules",),
}
_BY_PATTERN = "dynamic"  # of GPTQ: patterns of modules, of which "-:" leaves those that match alone


def quantisation(original: StoredModel, layout: Layout, tensors: Sequence[PlannedTensor]) -> dict[str, Any] | None:
    """The quantization_config of a checkpoint; None where nothing in it is quantised any more.

    Entries that name layers (of the text decoder, where there is more around it) follow them to the numbers that they
    have there; what was dequantised is named among the modules that are left alone.

    Args:
        tensors: to be written.
    """
    checkpoint = original.checkpoint
    if not any(tensor.part_of is not None for tensor in tensors):
        return None
    wrapped = original.wrapped
    layers = original.family.layers
    stored = str if wrapped is None else wrapped.stored_name
    if wrapped is None:
        before = ""
    else:
        before = re.escape(stored(f"{layers}.").removesuffix(f"{layers.rpartition('.')[2]}."))
    followed: dict[str, Any] = _following(
        copy.deepcopy(checkpoint.entries.get(QUANTIZATION) or checkpoint.config[QUANTIZATION]),
        re.compile(rf"{before}(?<![^.\\^*(:]){layers.rpartition('.')[2]}(\\?\.)(\d+)(?!\d)"),
        [layer.sources for layer in layout.layers],
    )
    dense = list(dict.fromkeys(stored(one.name).rpartition(".")[0] for one in tensors if one.dequantised))
    method = followed["quant_method"]
    head = stored(f"{original.family.head}.weight").removesuffix(".weight")
    if method == "gptq":
        patterns: dict[str, Any] = {rf"-:^{re.escape(module)}$": {} for module in dense}
        return followed | ({_BY_PATTERN: (followed.get(_BY_PATTERN) or {}) | patterns} if dense else {})
    keys = _LEFT_ALONE[method]
    key = next((one for one in keys if followed.get(one) is not None), keys[0])
    if dense:  # a list that is not there stands for the head alone
        followed[key] = [*(followed.get(key) or [head]), *dense]
    return followed


def _following(said: Any, layer: re.Pattern[str], sources: Sequence[Sequence[int]]) -> Any:
    """The same with names of modules, in lists or as keys, once for each layer that holds what they name."""
    if isinstance(said, dict):
        return {
            new: _following(value, layer, sources) for key, value in said.items() for new in _new(key, layer, sources)
        }
    if isinstance(said, list):
        names = (
            _new(one, layer, sources) if isinstance(one, str) else [_following(one, layer, sources)] for one in said
        )
        return [new for one in names for new in one]
    return said


def _new(name: str, layer: re.Pattern[str], sources: Sequence[Sequence[int]]) -> list[str]:
    """What a name of the original's is called in the new checkpoint, where one layer may lie in several, or in none."""
    match = layer.search(name)
    if match is None:
        return [name]
    number = int(match[2])
    return [f"{name[: match.start(2)]}{new}{name[match.end(2) :]}" for new, old in enumerate(sources) if number in old]
