"""quantization_config of a config.json: the schemes of each `quant_method`, and every entry that it may have.

An entry is read here, or has the only values that are supported, or changes no numbers: how they were found, and how
others run them. Any other is refused: it may say that they stand for others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from surgeon.models.weights.quantised.bitsandbytes import FourBits, Int8
from surgeon.models.weights.quantised.matrix import Scheme
from surgeon.models.weights.quantised.packed import Awq, Gptq
from surgeon.models.weights.quantised.scaled import FLOAT8, Block, Fp8, Grouped, Mxfp4
from surgeon.words import show_value

Entries = Mapping[str, Any]
EITHER = (True, False)
WHERE = "quantization_config in config.json"


class Rule(NamedTuple):
    """A scheme, and patterns of compressed-tensors for its modules, nothing for all."""

    scheme: Scheme
    targets: tuple[str, ...] = ()

    def names(self, module: str) -> bool:
        """Tell whether one of the patterns names this module."""
        return any(
            re.match(target.removeprefix("re:"), module) is not None
            if target.startswith("re:")
            else target == module
            for target in self.targets
        )


class Method(NamedTuple):
    """A `quant_method`.

    Attributes:
        rules: reads its schemes.
        only: entries of which some values are supported.
        others: entries that are read by `rules`, and those that change no numbers.
    """

    rules: Callable[[Entries], Iterator[Rule]]
    only: Mapping[str, Collection[Any]]
    others: Collection[str]


def rules_of(config: Any) -> list[Rule]:
    """Read the schemes of a quantization_config.

    Raises:
        ValueError: naming what is not known in it, or not supported, or damaged.
    """
    said = _object(config, WHERE)
    name = said.get("quant_method")
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise ValueError(
            f"weights quantised by {show_value(name)} are not supported (known: {', '.join(METHODS)}); use the model "
            "that it was made of"
        )
    _check(said, method.only, ("quant_method", *method.others), str(name))
    return list(method.rules(said))


def _check(
    said: Entries, only: Mapping[str, Collection[Any]], others: Collection[str], what: str
) -> None:
    """Refuse an entry that is not known, and a value that is not supported; what is empty says nothing."""
    for key, value in said.items():
        if _is_empty(value):
            continue
        if key not in only and key not in others:
            raise ValueError(
                f"{WHERE} has {key} {show_value(value)}, which is not known for {what}: it may say that the stored "
                "numbers stand for others; if it does not, remove it, else use the model that it was made of"
            )
        if key in only and (value.lower() if isinstance(value, str) else value) not in only[key]:
            choices = f" (known: {', '.join(map(str, only[key]))})" if only[key] else ""
            raise ValueError(
                f"{what} with {key} {show_value(value)} is not supported{choices}; use the model that it was made of"
            )


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return value is None or value in ("", [])


def _object(value: Any, what: str) -> Entries:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, not {show_value(value)}")
    return value


def _number(said: Entries, *names: str, all_in_one: bool = False) -> int:
    """Read a whole number above 0, or -1 for all in one, by the first of some names that is there."""
    name = next((one for one in names if said.get(one) is not None), names[0])
    value = said.get(name)
    if type(value) is not int or (value < 1 and not (all_in_one and value == -1)):
        also = ", or -1 for all in one" if all_in_one else ""
        raise ValueError(
            f"{WHERE} has {name} {show_value(value)}, and it has to be a whole number above 0{also}"
        )
    return value


def _block(said: Entries, name: str) -> Block:
    """Read rows and columns with one scale."""
    value = said.get(name)
    sizes = re.findall(r"\d+", value) if isinstance(value, str) else value
    if (
        not isinstance(sizes, list | tuple)
        or len(sizes) != 2
        or not all(str(one).isdecimal() for one in sizes)
    ):
        raise ValueError(
            f"{WHERE} has {name} {show_value(value)}, and it has to be two whole numbers: rows and columns"
        )
    rows, columns = map(int, sizes)
    if not rows or not columns:
        raise ValueError(
            f"{WHERE} has {name} {show_value(value)}, and blocks have at least one row and one column"
        )
    return rows, columns


def _fp8(said: Entries) -> Iterator[Rule]:
    in_blocks = "weight_block_size" not in said or said["weight_block_size"] is not None
    yield Rule(
        Fp8(
            _block({"weight_block_size": (128, 128), **said}, "weight_block_size")
            if in_blocks
            else (0, 0)
        )
    )


def _compressed_tensors(said: Entries) -> Iterator[Rule]:
    sparse = _object(said.get("sparsity_config") or {}, f"sparsity_config of {WHERE}")
    _check(sparse, {"format": ("dense",)}, _SPARSITY, "sparse compressed-tensors")
    for name, group in _object(said.get("config_groups") or {}, f"config_groups of {WHERE}").items():
        where = f"{name} of config_groups of {WHERE}"
        _check(
            _object(group, where),
            {},
            ("targets", "format", "weights", *_ACTIVATIONS),
            "compressed-tensors",
        )
        if group.get("weights") is None:  # only what modules put out is quantised
            continue
        targets = group.get("targets") or []
        if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
            raise ValueError(
                f"{where} has targets {show_value(targets)}, and they have to be names of modules"
            )
        weights = _object(group["weights"], f"weights of {where}")
        form = group.get("format") or said.get("format")
        _check({"format": str(form)}, {"format": _FORMATS}, (), "compressed-tensors")
        packed = form == "pack-quantized"
        only: dict[str, Collection[Any]] = {**_WEIGHTS, "num_bits": (2, 4, 8) if packed else (8,)}
        if packed:
            only["type"] = ("int",)
        _check(
            weights,
            only,
            ("group_size", "block_structure", *_QUANTISING),
            f"{form} of compressed-tensors",
        )
        strategy = weights.get("strategy")
        size = weights.get("group_size")
        if strategy is None:
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        by_index = weights.get("actorder") in ("group", "dynamic", True)
        if by_index and strategy != "group":
            raise ValueError(
                f"{WHERE} has actorder {weights['actorder']!r}, which is of groups, not of a {strategy}"
            )
        block = _STRATEGIES[strategy.lower()](weights)
        types = {"int": (torch.int8,), "float": FLOAT8}.get(
            str(weights.get("type")).lower(), (torch.int8, *FLOAT8)
        )
        symmetric = weights.get("symmetric") is not False
        bits = _number(weights, "num_bits")
        yield Rule(Grouped(bits, block, packed, types, symmetric, by_index), tuple(targets))


def _gptq(said: Entries) -> Iterator[Rule]:
    _check_dynamic(said)
    forms = {str(one).lower() for key in _GPTQ_FORMATS if (one := said.get(key))}
    if len(forms) > 1:
        raise ValueError(
            f"{WHERE} has both formats of GPTQ, {' and '.join(sorted(forms))}; which is it?"
        )
    offset = 0 if forms == {"gptq_v2"} else 1
    bits = _number(said, "bits")
    group = _number(said, "group_size", all_in_one=True)
    order = said.get("desc_act")
    yield Rule(Gptq(bits, group, offset, in_order=None if order is None else not order))


def _awq(said: Entries) -> Iterator[Rule]:
    _check_dynamic(said)
    if str(said.get("backend")).lower() == "llm-awq":
        raise ValueError("AWQ as llm-awq packs it is not supported; use the model that it was made of")
    _number(said, "bits", "w_bit")
    yield Rule(Awq(_number(said, "group_size", "q_group_size", all_in_one=True)))


def _check_dynamic(said: Entries) -> None:
    """Refuse modules that are quantised in another way than the others; "-:" says which are left alone."""
    for pattern, own in _object(said.get("dynamic") or {}, f"dynamic of {WHERE}").items():
        if own and not pattern.startswith("-:"):
            raise ValueError(
                f"{said['quant_method']} in another way in some modules (dynamic {pattern!r}: {show_value(own)}) is "
                "not supported; use the model that it was made of"
            )


def _bitsandbytes(said: Entries) -> Iterator[Rule]:
    bits = {size for size in (4, 8) if said.get(f"load_in_{size}bit") or said.get(f"_load_in_{size}bit")}
    if len(bits) != 1:
        raise ValueError(f"{WHERE} of bitsandbytes should have either load_in_4bit or load_in_8bit true")
    yield Rule(
        Int8() if bits == {8} else FourBits(str(said.get("bnb_4bit_quant_type") or "fp4").lower())
    )


_ACTIVATIONS = ("input_activations", "output_activations")
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_STRATEGIES: dict[str, Callable[[Entries], Block]] = {
    "tensor": lambda _: (0, 0),
    "channel": lambda _: (1, 0),
    "group": lambda weights: (1, _number(weights, "group_size")),
    "block": lambda weights: _block(weights, "block_structure"),
}
_SPARSITY = ("global_sparsity", "sparsity_structure", "ignore", "targets", "registry_requires_subclass")
_WEIGHTS: Mapping[str, Collection[Any]] = {
    "type": ("int", "float"),
    "symmetric": EITHER,
    "dynamic": (False,),
    "strategy": tuple(_STRATEGIES),
    "actorder": ("group", "dynamic", "weight", "static", *EITHER),
}
_QUANTISING = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_GPTQ_FORMATS = ("checkpoint_format", "format")
# What GPTQ's and AWQ's own software, and AutoRound's, say of the way to the numbers and of kernels.
_WAY_TO_CODES = (
    "group_size",
    "sym",
    "lm_head",
    "meta",
    "backend",
    "dynamic",
    "modules_in_block_to_quantize",
    "provider",
    "damp_percent",
    "damp_auto_increment",
    "static_groups",
    "true_sequential",
    "act_group_aware",
    "mse",
    "quantizer",
    "tokenizer",
    "dataset",
    "model_seqlen",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    "batch_size",
    "pad_token_id",
    "max_input_length",
    "cache_block_outputs",
    "model_name_or_path",
    "model_file_base_name",
    "use_cuda_fp16",
    "use_exllama",
    "disable_exllama",
    "exllama_config",
    "v2",
    "v2_alpha",
    "v2_memory_device",
    "hyb_act",
    "parallel_packing",
    "device",
    "uri",
    "pack_impl",
    "amp",
    "autoround_version",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "gradient_accumulate_steps",
    "iters",
    "lr",
    "minmax_lr",
    "low_gpu_mem_usage",
    "nsamples",
    "seqlen",
    "scale_dtype",
    "act_bits",
    "act_data_type",
    "act_dynamic",
    "act_group_size",
    "act_sym",
    "to_quant_block_names",
    "not_use_best_mse",
    "quant_block_list",
    "supported_types",
    "static_kv_dtype",
    "static_attention_dtype",
    "dynamic_max_gap",
    "nblocks",
    "static_kv_granularity",
    "static_attention_granularity",
    "quant_lm_head",
    "sampler",
)
METHODS: Mapping[str, Method] = {
    "fp8": Method(
        _fp8,
        {
            "fmt": ("e4m3", "float8_e4m3fn"),
            "activation_scheme": ("dynamic", "static"),
            "scale_fmt": ("float", "ue8m0"),
            "expert_dtype": ("fp8",),
        },
        (
            "weight_block_size",
            "dequantize",
            "modules_to_not_convert",
            "modules_to_convert",
            "ignored_layers",
        ),
    ),
    "compressed-tensors": Method(
        _compressed_tensors,
        {"format": (*_FORMATS, "mixed-precision"), "transform_config": (), "moe_sparsity_config": ()},
        (
            *(
                "config_groups",
                "sparsity_config",
                "ignore",
                "kv_cache_scheme",
                "quantization_status",
                "version",
            ),
            *("global_compression_ratio", "run_compressed", "dequantize", "use_optimized_inference"),
        ),
    ),
    "gptq": Method(
        _gptq,
        {
            **dict.fromkeys(_GPTQ_FORMATS, ("gptq", "gptq_v2")),
            "bits": (2, 4, 8),
            "desc_act": EITHER,
            "method": ("gptq",),
            "pack_dtype": ("int32", "torch.int32"),
            "data_type": ("int", "int_sym", "int_asym"),
            "is_marlin_format": (False,),
        },
        _WAY_TO_CODES,
    ),
    "awq": Method(
        _awq,
        {
            **dict.fromkeys(("version", *_GPTQ_FORMATS), ("gemm",)),
            **dict.fromkeys(("bits", "w_bit"), (4,)),
            "desc_act": (False,),
            "method": ("awq",),
            "pack_dtype": ("int32", "torch.int32"),
            "data_type": ("int", "int_sym", "int_asym"),
        },
        (
            *("q_group_size", "zero_point", "modules_to_not_convert", "do_fuse", "modules_to_fuse"),
            *("fuse_max_seq_len", *_WAY_TO_CODES),
        ),
    ),
    "bitsandbytes": Method(
        _bitsandbytes,
        {
            **dict.fromkeys(("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"), EITHER),
            "bnb_4bit_quant_type": ("fp4", "nf4"),
        },
        (
            *("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload"),
            *("llm_int8_has_fp16_weight", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant"),
            "bnb_4bit_quant_storage",
        ),
    ),
    "mxfp4": Method(lambda _: iter([Rule(Mxfp4())]), {}, ("modules_to_not_convert", "dequantize")),
}
