"""Which matrices of a checkpoint are quantised, by its config.json and by what tensors there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from surgeon.errors import shown
from surgeon.models.weights.quantised.bitsandbytes import FourBits, Int8
from surgeon.models.weights.quantised.matrix import Quantised, Scheme
from surgeon.models.weights.quantised.mxfp4 import Mxfp4
from surgeon.models.weights.quantised.packed import Awq, Gptq
from surgeon.models.weights.quantised.scaled import Fp8, Grouped
from surgeon.models.weights.store import Store

Entries = dict[str, Any]


class Rule(NamedTuple):
    """A scheme, and which modules are in it: patterns of compressed-tensors, nothing for all."""

    scheme: Scheme
    targets: tuple[str, ...] = ()

    def names(self, module: str) -> bool:
        """Whether one of the patterns is of this module by name; names of classes have no dot."""
        return any(
            re.match(target.removeprefix("re:"), module) is not None if target.startswith("re:") else target == module
            for target in self.targets
        )


def rules_of(config: Any) -> list[Rule]:
    """The schemes that the quantization_config of a config.json speaks of.

    Raises:
        ValueError: if there is one among them that is not known, or it is damaged.
    """
    if not isinstance(config, dict):
        raise ValueError(f"quantization_config in config.json must be an object, not {shown(config)}")
    method = str(config.get("quant_method"))
    if method not in _READERS:
        raise ValueError(
            f"weights quantised by {shown(config.get('quant_method'))} are not supported (known: "
            f"{', '.join(_READERS)}); use the model that it was made of"
        )
    try:
        return list(_READERS[method](config))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"quantization_config in config.json is not what {method} writes ({type(error).__name__}: {error})"
        ) from error


def quantised_matrices(store: Store, config: Any) -> dict[str, Quantised]:
    """The quantised matrices of a store by the names that they have for their architecture.

    Args:
        config: quantization_config of config.json; None where there is none.

    Raises:
        ValueError: as `rules_of`; if a tensor of a matrix is missing, or there is no such matrix.
    """
    if not config:
        return {}
    found: dict[str, Quantised] = {}
    rules = rules_of(config)
    for scheme in dict.fromkeys(rule.scheme for rule in rules):
        for module, parts in _by_module(store, scheme).items():
            if _rule_of(module, rules).scheme == scheme and scheme.holds(parts, store):
                name = f"{module}{scheme.stands_for}"
                for ending in scheme.needed:
                    if ending not in parts:
                        raise ValueError(
                            f"{store.where} has no tensor {module}{ending}, which {scheme.description} needs beside "
                            f"{next(iter(parts.values()))}"
                        )
                found[name] = Quantised(store, name, scheme, parts)
    if not found:
        raise ValueError(
            f"{store.where} has a config.json that says its weights are quantised by {config['quant_method']}, and "
            "none of its tensors is; remove quantization_config from it, or fetch the weights that it belongs to"
        )
    return found


def _rule_of(module: str, rules: list[Rule]) -> Rule:
    """The rule that names a module, or the first one for whole classes."""
    named = (rule for rule in rules if rule.names(module))
    return next(named, rules[0])


def _by_module(store: Store, scheme: Scheme) -> dict[str, dict[str, str]]:
    """What modules have of a scheme's tensors: names by ending."""
    endings = sorted((*scheme.needed, *scheme.optional), key=len, reverse=True)  # of ".weight.absmax" not ".absmax"
    found: dict[str, dict[str, str]] = {}
    for name in store.names():
        ending = next((one for one in endings if name.endswith(one)), None)
        if ending is not None:
            found.setdefault(name.removesuffix(ending), {})[ending] = name
    return found


def _fp8(config: Entries) -> Iterator[Rule]:
    block = config.get("weight_block_size", (128, 128))
    yield Rule(Fp8((0, 0) if block is None else (int(block[0]), int(block[1]))))


def _compressed_tensors(config: Entries) -> Iterator[Rule]:
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    _require(str(sparse), ("dense",), "sparse compressed-tensors as {}")
    for group in config["config_groups"].values():
        weights, form = group.get("weights"), str(group.get("format") or config.get("format"))
        if weights is None:  # only what modules put out is quantised
            continue
        bits, strategy = int(weights["num_bits"]), weights.get("strategy")
        _require(form, _FORMATS, "compressed-tensors as {}")
        _require(strategy, _STRATEGIES, "compressed-tensors with scales by {}")
        scheme = Grouped(bits, _STRATEGIES[strategy](weights), form == "pack-quantized")
        _require(bits, (2, 4, 8) if scheme.packed else (8,), f"{form} of compressed-tensors of {{}} bits")
        yield Rule(scheme, tuple(group.get("targets") or ()))


_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_STRATEGIES: dict[str, Callable[[Entries], tuple[int, int]]] = {
    "tensor": lambda _: (0, 0),
    "channel": lambda _: (1, 0),
    "group": lambda weights: (1, int(weights["group_size"])),
    "block": lambda weights: (int(weights["block_structure"][0]), int(weights["block_structure"][1])),
}


def _gptq(config: Entries) -> Iterator[Rule]:
    bits, form = int(config["bits"]), str(config.get("checkpoint_format") or config.get("format") or "gptq")
    _require(bits, (2, 4, 8), "GPTQ of {} bits")
    _require(form, ("gptq", "gptq_v2"), "GPTQ as {}")
    for pattern, own in (config.get("dynamic") or {}).items():  # "-:" says which modules are left alone
        _require(
            pattern[:2] if own else "-:", ("-:",), f"GPTQ in another way in some modules (dynamic: {pattern!r}), {{}}"
        )
    offset = 0 if form == "gptq_v2" else 1
    yield Rule(Gptq(bits, int(config["group_size"]), offset, in_order=config.get("desc_act") is False))


def _awq(config: Entries) -> Iterator[Rule]:
    said = (config.get(name) for name in ("version", "checkpoint_format", "format"))
    _require(str(next(filter(None, said), "gemm")).lower(), ("gemm",), "AWQ as {}")
    _require(int(config["bits" if "bits" in config else "w_bit"]), (4,), "AWQ of {} bits")
    yield Rule(Awq(int(config["group_size" if "group_size" in config else "q_group_size"])))


def _bitsandbytes(config: Entries) -> Iterator[Rule]:
    yield Rule(FourBits(str(config.get("bnb_4bit_quant_type", "fp4"))) if config.get("load_in_4bit") else Int8())


def _require(found: Any, known: Collection[Any], what: str) -> None:
    """Refuse what is not known; `what` says what it is."""
    if found not in known:
        raise ValueError(
            f"{what.format(found)} is not supported (known: {', '.join(map(str, known))}); use the model that it was "
            "made of"
        )


_READERS: dict[str, Callable[[Entries], Iterator[Rule]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": lambda _: iter([Rule(Mxfp4())]),
}
