"""Spectra of tiny models, and the matrices in these found by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from surgeon.analysis.spectrum import request, spectrum
from surgeon.findings.spectrum import Spectrum, parse_ranks
from surgeon.quality.data import Windows
from tests.analysis.subjects import subject_of
from tests.analysis.texts import random_windows
from tests.tiny_models import HEADS, HIDDEN, KV_HEADS

LAYERS = 3
# The module, which of its output features, whether it is transposed.
Place = tuple[nn.Module, list[int] | None, bool]
Array = NDArray[np.float64]


def text(windows: int, tokens: int, seed: int) -> Windows:
    return random_windows(windows, tokens, seed, f"digest {windows} x {tokens}, {seed}")


MEASURED, CALIBRATION = text(5, 12, 5), text(9, 12, 6)


def run(
    folder: Path,
    model: Any,
    *,
    ranks: str = "1/4,1/2",
    measured: Windows = MEASURED,
    calibration: Windows = CALIBRATION,
    model_hash: str = "weights",
    **wanted: Any,
) -> Spectrum:
    asked = request(model.config, ranks=parse_ranks(ranks) if ranks else (), **wanted)
    return spectrum(subject_of(model, measured, model_hash), calibration, folder, asked)


def rows_of(place: int, counts: list[int]) -> list[int]:
    start = sum(counts[:place])
    return list(range(start, start + counts[place]))


def places(family: str, model: Any, layer: int) -> dict[str, Place]:
    """By role, found by hand: the module, the output features of it that are this role's, whether it is transposed."""
    if family == "gpt2":
        block = model.transformer.h[layer]
        packed = {
            role: (block.attn.c_attn, rows_of(i, [HIDDEN] * 3), True) for i, role in enumerate("qkv")
        }
        others = {"o": block.attn.c_proj, "up": block.mlp.c_fc, "down": block.mlp.c_proj}
        return packed | {role: (module, None, True) for role, module in others.items()}
    if family == "gpt_neox":
        block, width = model.gpt_neox.layers[layer], HIDDEN // HEADS
        heads = {
            role: [3 * width * head + width * i + j for head in range(HEADS) for j in range(width)]
            for i, role in enumerate("qkv")
        }
        packed = {role: (block.attention.query_key_value, rows, False) for role, rows in heads.items()}
        others = {
            "o": block.attention.dense,
            "up": block.mlp.dense_h_to_4h,
            "down": block.mlp.dense_4h_to_h,
        }
        return packed | {role: (module, None, False) for role, module in others.items()}
    block = model.model.layers[layer]
    found: dict[str, Place] = {}
    if family == "phi3":
        key = HIDDEN * KV_HEADS // HEADS
        for i, role in enumerate("qkv"):
            found[role] = (block.self_attn.qkv_proj, rows_of(i, [HIDDEN, key, key]), False)
        found["o"] = (block.self_attn.o_proj, None, False)
        for i, role in enumerate(("gate", "up")):
            found[role] = (block.mlp.gate_up_proj, rows_of(i, [48, 48]), False)
        return found | {"down": (block.mlp.down_proj, None, False)}
    found = {role: (getattr(block.self_attn, f"{role}_proj"), None, False) for role in "qkvo"}
    return found | {
        role: (getattr(block.mlp, f"{role}_proj"), None, False) for role in ("gate", "up", "down")
    }


def matrix_of(place: Place) -> Array:
    module, rows, transposed = place
    whole = module.weight.detach().double().numpy()
    whole = whole.T if transposed else whole
    return whole if rows is None else whole[rows]


def overwrite(place: Place, values: Array) -> Callable[[], None]:
    """Put another matrix there; the function given back undoes it."""
    module, rows, transposed = place
    before = module.weight.detach().clone()
    whole = before.T.clone() if transposed else before.clone()
    whole[slice(None) if rows is None else rows] = torch.from_numpy(values).float()
    module.weight.data.copy_(whole.T if transposed else whole)
    return lambda: module.weight.data.copy_(before)


def inputs_of(model: Any, modules: list[nn.Module], ids: Tensor) -> list[Array]:
    """What modules get while the model runs on its own, (tokens, in)."""
    seen: dict[nn.Module, Array] = {}

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen[module] = given[0].double().flatten(0, 1).numpy()

    hooks = [module.register_forward_pre_hook(keep) for module in set(modules)]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [seen[module] for module in modules]


def written_out(matrix: Array, inputs: Array, rank: int) -> Array:
    """U_r diag(s_r) V_r' inv(S)."""
    factor = np.linalg.cholesky(inputs.T @ inputs)
    left, values, right = np.linalg.svd(matrix @ factor, full_matrices=False)
    truncated: Array = left[:, :rank] * values[:rank] @ right[:rank] @ np.linalg.inv(factor)
    return truncated


def logits_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[:, :-1].double()
    return logits.flatten(0, 1).log_softmax(-1)
