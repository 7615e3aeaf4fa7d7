"""What quantization_config may say: as software writes it, and what of it is refused, by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from surgeon.models.weights import NamedTensors
from surgeon.models.weights.quantised import quantised_matrices, rules_of
from tests.quantised import SCHEMES, named

GROUPED = {"quant_method": "compressed-tensors", "format": "int-quantized"}


def grouped(**weights: Any) -> dict[str, Any]:
    return {
        **GROUPED,
        "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, **weights}}},
    }


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quant_method": "quip"},
            "quantised by 'quip' are not supported .known: fp8, compressed-tensors, gptq",
        ),
        ("fp8", "must be an object"),
        ({"quant_method": "gptq"}, "has bits None, and it has to be a whole number above 0"),
        ({"quant_method": "gptq", "bits": 3}, r"gptq with bits 3 is not supported .known: 2, 4, 8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 0},
            "group_size 0, .* above 0, or -1 for all in one",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "format": "marlin"},
            "gptq with format 'marlin' is not supported",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"},
            "pack_dtype 'int64' is not supported",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "rotation": "hadamard"},
            "has rotation 'hadamard', which is not known",
        ),
        (
            {"quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq_v2"},
            "both formats of GPTQ",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {"+:.*up": {"bits": 8}}},
            r"in some modules .dynamic '\+:.\*up'",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "awq with version 'gemv' is not supported"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 8, "backend": "llm-awq"},
            "as llm-awq packs it",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 16]},
            r"weight_block_size \[0, 16\], and blocks have at",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [16]},
            r"weight_block_size \[16\], and it has to be two whole",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt 'e5m2' is not supported"),
        ({"quant_method": "bitsandbytes"}, "should have either load_in_4bit or load_in_8bit true"),
        (
            {**GROUPED, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "format 'sparse-24-bitmask' is not supported",
        ),
        (
            {**GROUPED, "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            "with transform_config {'con",
        ),
        (
            {**GROUPED, "format": "nvfp4-pack-quantized"},
            "'nvfp4-pack-quantized' is not supported .known: float-quant",
        ),
        (
            grouped(strategy="group", group_size=0),
            "group_size 0, and it has to be a whole number above 0",
        ),
        (
            grouped(strategy="tensor_group", group_size=16),
            "strategy 'tensor_group' is not supported .known: tensor",
        ),
        (
            grouped(strategy="channel", scale_bits=8),
            "has scale_bits 8, which is not known for int-quantized",
        ),
        (grouped(strategy="channel", actorder="group"), "actorder 'group', which is of groups"),
        (grouped(strategy="channel", dynamic=True), "with dynamic True is not supported"),
        (
            {**GROUPED, "config_groups": {"W8A8": ["Linear"]}},
            "W8A8 of config_groups of .* must be an object",
        ),
    ],
)
def test_what_is_not_known_is_named(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quantised_matrices(NamedTensors({}), config)


@pytest.mark.parametrize("value", [True, "hadamard", [1], {"a": 1}, 0])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_entry_that_is_not_known_is_named(scheme: str, value: Any) -> None:
    stored, _ = SCHEMES[scheme][0](torch.randn(48, 32))
    config = SCHEMES[scheme][1]
    with pytest.raises(
        ValueError, match="has turned_by .*, which is not known for .* remove it, else use the model"
    ):
        quantised_matrices(named(stored), config | {"turned_by": value})
    assert rules_of(config | {"turned_by": None}) == rules_of(config)  # says nothing


LLM_COMPRESSOR = """{"quant_method": "compressed-tensors", "version": "0.12.2", "quantization_status": "compressed",
    "global_compression_ratio": null, "kv_cache_scheme": null, "ignore": ["lm_head"], "sparsity_config": {},
    "transform_config": {}}"""
ARGUMENTS = """{"actorder": null, "block_structure": null, "dynamic": false, "group_size": null, "observer_kwargs": {},
    "observer": "minmax", "symmetric": true}"""


def compressed(form: str, said: str) -> dict[str, Any]:
    """As llm-compressor writes it."""
    inputs = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
    weights = json.loads(ARGUMENTS) | json.loads(f"{{{said}}}")
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return json.loads(LLM_COMPRESSOR) | {
        "format": form,
        "config_groups": {"group_0": group | {"format": form}},
    }


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("float-quantized", '"num_bits": 8, "type": "float", "strategy": "channel"'),
        (
            "float-quantized",
            '"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]',
        ),
        ("int-quantized", '"num_bits": 8, "type": "int", "strategy": "channel", "observer": "mse"'),
        (
            "pack-quantized",
            '"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "actorder": "weight"',
        ),
        (
            "pack-quantized",
            '"num_bits": 4, "strategy": "group", "group_size": 32, "zp_dtype": "torch.int8"',
        ),
        ("naive-quantized", '"num_bits": 8, "type": "int", "strategy": null, "group_size": -1'),
    ],
)
def test_groups_as_they_are_written_are_known(form: str, said: str) -> None:
    assert len(rules_of(compressed(form, said))) == 1


@pytest.mark.parametrize(
    "written",
    [
        """"fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]""",
        """"fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]""",
        """"fp8", "activation_scheme": "static", "weight_block_size": null, "dequantize": false""",
        """"gptq", "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": true, "sym": true, "tokenizer": null,
        "true_sequential": true, "static_groups": false, "model_name_or_path": null, "batch_size": 1, "dataset": null,
        "model_file_base_name": "model", "model_seqlen": 4096""",
        """"gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true, "lm_head": false, "method": "gptq",
        "checkpoint_format": "gptq", "format": "gptq", "pack_dtype": "int32", "dynamic": {"-:.*gate.*": {}},
        "meta": {"damp_percent": 0.05, "mse": 0.0, "quantizer": ["gptqmodel:4.0.0"]}""",
        """"gptq", "amp": true, "autoround_version": "0.4.3", "batch_size": 4, "bits": 4, "lr": 0.001, "iters": 1000,
        "damp_percent": 0.01, "data_type": "int", "desc_act": false, "group_size": 128, "low_gpu_mem_usage": false,
        "minmax_lr": 0.001, "nsamples": 512, "scale_dtype": "torch.float16", "seqlen": 2048, "sym": true,
        "enable_minmax_tuning": true, "enable_quanted_input": true, "true_sequential": false""",
        """"awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": true, "backend": "autoawq" """,
        """"awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM", "modules_to_not_convert": null""",
        """"awq", "bits": 4, "group_size": 128, "do_fuse": false, "modules_to_fuse": null, "version": "gemm",
        "exllama_config": {"max_input_len": 2048, "max_batch_size": 8}, "fuse_max_seq_len": null""",
        """"bitsandbytes", "load_in_4bit": true, "load_in_8bit": false, "_load_in_4bit": true, "_load_in_8bit": false,
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": true, "llm_int8_enable_fp32_cpu_offload": false, "llm_int8_threshold": 6.0,
        "llm_int8_has_fp16_weight": false, "llm_int8_skip_modules": ["lm_head"]""",
        """"bitsandbytes", "load_in_8bit": true, "load_in_4bit": false, "llm_int8_threshold": 6.0""",
        """"mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]""",
    ],
)
def test_configurations_as_they_are_written_are_known(written: str) -> None:
    assert len(rules_of(json.loads(f'{{"quant_method": {written}}}'))) == 1
