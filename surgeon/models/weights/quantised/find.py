"""Quantised matrices of a checkpoint, by its config.json and by its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from surgeon.models.weights.quantised.bitsandbytes import FourBits, Int8
from surgeon.models.weights.quantised.matrix import FLOATS, Quantised, Scheme
from surgeon.models.weights.quantised.methods import rules_of
from surgeon.models.weights.quantised.packed import Awq, Gptq
from surgeon.models.weights.quantised.scaled import ACTIVATIONS, FLOAT8, WEIGHT, Fp8, Grouped, Mxfp4
from surgeon.models.weights.store import Store

# Types that numbers are stored in which mean nothing without scales.
STORAGE = (*FLOAT8, torch.float8_e8m0fnu, torch.uint8, torch.int8, torch.int32)
# One of each scheme, for what their tensors are called.
_EVERY: tuple[Scheme, ...] = (
    *(
        Fp8((0, 0)),
        Grouped(8, (0, 0), packed=False),
        Grouped(4, (0, 0), packed=True),
        Gptq(4, -1),
        Awq(-1),
    ),
    *(FourBits("nf4"), FourBits("fp4"), Int8(), Mxfp4()),
)
# By which tensors are called that hold quantised matrices.
_ENDINGS = tuple(
    {end for one in _EVERY for end in (*one.needed, *one.optional)} - {WEIGHT, *ACTIVATIONS}
)


def quantised_matrices(store: Store, config: Any) -> dict[str, Quantised]:
    """Find the quantised matrices of a store, by the names that they have for their architecture.

    Tensors are checked when one first asks for their arrangement.

    Args:
        config: quantization_config of config.json; None where there is none.

    Raises:
        ValueError: as `rules_of`; if there is no such matrix, or a tensor looks like a part of one and is none.
    """
    found: dict[str, Quantised] = {}
    rules = rules_of(config) if config else []
    schemes = dict.fromkeys(rule.scheme for rule in rules)
    # Of modules that no rule names: that of the first rule for whole classes, or the only one.
    of_classes = (
        rule.scheme
        for rule in rules
        if not rule.targets or any("." not in one and not one.startswith("re:") for one in rule.targets)
    )
    other = next(of_classes, None)
    if other is None and len(schemes) == 1:
        (other,) = schemes
    for scheme in schemes:
        # The longest first, so that ".weight.absmax" is not taken for ".absmax".
        endings = sorted((*scheme.needed, *scheme.optional), key=len, reverse=True)
        by_module: dict[str, dict[str, str]] = {}
        for name in store.names():
            ending = next((one for one in endings if name.endswith(one)), None)
            if ending is not None:
                by_module.setdefault(name.removesuffix(ending), {})[ending] = name
        own = set(scheme.needed) - {WEIGHT}
        for module, parts in by_module.items():
            # It has one of the scheme's tensors, or a weight of a type that needs others.
            is_held = own & parts.keys() or (WEIGHT in parts and store.dtype(parts[WEIGHT]) in STORAGE)
            if is_held and scheme == next((one.scheme for one in rules if one.names(module)), other):
                name = f"{module}{scheme.stands_for}"
                found[name] = Quantised(store, name, scheme, parts)
    if config and not found:
        raise ValueError(
            f"{store.where} has a config.json that says its weights are quantised by {config['quant_method']}, and "
            "none of its tensors is; remove quantization_config from it, or fetch the weights that it belongs to"
        )
    _refuse_the_rest(
        store, found, "none that quantization_config speaks of" if config else "no quantization_config"
    )
    return found


def _refuse_the_rest(store: Store, found: Mapping[str, Quantised], why: str) -> None:
    """Refuse a tensor that is no part of a quantised matrix and is stored or called as one, or lies beside one."""
    owned = {part for matrix in found.values() for part in matrix.parts.values()}
    modules = {name.removesuffix(WEIGHT) for name, matrix in found.items() if matrix.scheme.stands_for}
    stacks = tuple(f"{name}_" for name, matrix in found.items() if not matrix.scheme.stands_for)
    for name in store.names():
        if name in owned or name.endswith(ACTIVATIONS):
            continue
        # Old checkpoints store attention masks under this name.
        is_mask = name.endswith(".bias") and len(store.shape(name)) == 4
        steps = name.split(".")
        inside = any(
            ".".join(steps[:count]) in modules for count in range(1, len(steps))
        ) or name.startswith(stacks)
        dtype = store.dtype(name)
        if (dtype in STORAGE and not is_mask) or (name.endswith(WEIGHT) and dtype not in FLOATS):
            what = f"holds {str(dtype).removeprefix('torch.')}, which stands for other numbers"
        elif name.endswith(_ENDINGS) or (inside and not name.endswith("bias")):
            what = "looks like a part of a quantised matrix"
        else:
            continue
        raise ValueError(
            f"{store.where}: tensor {name} {what}, and belongs to {why}; are config.json and the weights of one model?"
        )
