"""Quantised matrices against what their formats are defined to be: whole, in part, and damaged."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.models.weights import NamedTensors
from surgeon.models.weights.quantised import quantised_matrices, rules_of
from tests.quantised import SCHEMES, fp8, gptq, mxfp4, packed


def named(stored: dict[str, Any], module: str = "m") -> NamedTensors:
    return NamedTensors({f"{module}{ending}": tensor for ending, tensor in stored.items()})


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(48, 32), (32, 64)])
def test_numbers(scheme: str, shape: tuple[int, int]) -> None:
    quantise, config = SCHEMES[scheme]
    stored, numbers = quantise(torch.randn(shape))
    (found,) = quantised_matrices(named(stored), config).values()
    assert (found.name, found.shape, found.dtype) == ("m.weight", shape, torch.float32)
    torch.testing.assert_close(found.whole(), numbers, rtol=1e-6, atol=1e-7)
    assert found.whole(torch.bfloat16).dtype == torch.bfloat16
    for dim, first, end in ((0, 0, 5), (0, 3, 21), (0, 17, 32), (1, 0, 16), (1, 7, 30), (1, 31, 32)):
        assert torch.equal(found.part(dim, first, end), found.whole().narrow(dim, first, end - first))
    assert torch.equal(found.rows(3, 9), found.whole()[3:9])


def test_blocks_that_are_cut_off() -> None:
    stored, numbers = fp8(torch.randn(40, 24))
    (found,) = quantised_matrices(named(stored), SCHEMES["fp8"][1]).values()
    torch.testing.assert_close(found.whole(), numbers, rtol=1e-6, atol=0)
    assert torch.equal(found.part(1, 17, 24), found.whole()[:, 17:])


def test_one_scale() -> None:
    stored = {".weight": torch.randn(4, 6).to(torch.float8_e4m3fn), ".weight_scale_inv": torch.tensor(0.25)}
    (found,) = quantised_matrices(named(stored), {"quant_method": "fp8", "weight_block_size": None}).values()
    assert torch.equal(found.part(0, 1, 3), stored[".weight"].float()[1:3] * 0.25)


def test_stacked_experts() -> None:
    stored, numbers = mxfp4(torch.randn(3, 64, 10))
    (found,) = quantised_matrices(named(stored, "experts.down"), {"quant_method": "mxfp4"}).values()
    assert (found.name, found.shape) == ("experts.down", (3, 64, 10))
    assert torch.equal(found.whole(), numbers)
    for dim, first, end in ((0, 1, 3), (1, 5, 40), (2, 3, 8)):
        assert torch.equal(found.part(dim, first, end), numbers.narrow(dim, first, end - first))


def test_modules_by_their_groups() -> None:
    """compressed-tensors may store some modules in one way and others in another."""
    four, eight = (packed(torch.randn(16, 32))[0] for _ in range(2))
    args = {"strategy": "group", "group_size": 16}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": False, **args}},
        "group_1": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, **args}},
    }
    eight[".weight_packed"] = torch.randint(-(2**31), 2**31 - 1, (16, 8), dtype=torch.int32)
    del eight[".weight_zero_point"]
    tensors = named(four, "a.up_proj").tensors | named(eight, "a.down_proj").tensors
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    found = quantised_matrices(NamedTensors(tensors), config)
    assert {name: one.scheme.bits for name, one in found.items()} == {"a.up_proj.weight": 4, "a.down_proj.weight": 8}  # type: ignore[attr-defined]
    bytes_ = eight[".weight_packed"].view(torch.uint8).float() - 128
    expected = bytes_ * eight[".weight_scale"].float().repeat_interleave(16, 1)
    assert torch.equal(found["a.down_proj.weight"].whole(), expected)


def test_a_module_of_no_group_is_refused() -> None:
    """Where groups name modules and differ, which of them another module is in cannot be known."""
    said = {"strategy": "channel", "type": "int", "num_bits": 8}
    groups = {
        "one": {"targets": ["re:.*up_proj"], "weights": said},
        "other": {"targets": ["re:.*down_proj"], "weights": {**said, "strategy": "tensor"}},
    }
    stored, _ = SCHEMES["int8 rows"][0](torch.randn(16, 32))
    tensors = named(stored, "a.up_proj").tensors | named(stored, "a.gate_proj").tensors
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    with pytest.raises(ValueError, match=r"tensor a.gate_proj.weight holds int8, .* none that quantization_config"):
        quantised_matrices(NamedTensors(tensors), config)


def test_what_is_not_quantised_is_left_alone() -> None:
    stored, _ = fp8(torch.randn(32, 32))
    dense = {"n.weight": torch.randn(4), "h.weight": torch.randn(4, 4), "m.bias": torch.randn(32)}
    dense |= {"a.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "m.input_scale": torch.ones(())}
    tensors = named(stored).tensors | dense
    assert list(quantised_matrices(NamedTensors(tensors), SCHEMES["fp8"][1])) == ["m.weight"]
    assert quantised_matrices(NamedTensors(dense), None) == {}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_in_storage_types_without_a_scheme_are_refused(scheme: str) -> None:
    stored, _ = SCHEMES[scheme][0](torch.randn(32, 32))
    with pytest.raises(ValueError, match=r"tensor m\..* belongs to no quantization_config"):
        quantised_matrices(named(stored), None)


GROUPED = {"quant_method": "compressed-tensors", "format": "int-quantized"}


def grouped(**weights: Any) -> dict[str, Any]:
    return {**GROUPED, "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, **weights}}}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "quip"}, "quantised by 'quip' are not supported .known: fp8, compressed-tensors, gptq"),
        ("fp8", "must be an object"),
        ({"quant_method": "gptq"}, "has bits None, and it has to be a whole number above 0"),
        ({"quant_method": "gptq", "bits": 3}, r"gptq with bits 3 is not supported .known: 2, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0, .* above 0, or -1 for all in one"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "gptq with format 'marlin' is not supported"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "pack_dtype 'int64' is not supported"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "has rotation 'hadamard', which is not known"),
        ({"quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq_v2"}, "both formats of GPTQ"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {"+:.*up": {"bits": 8}}},
            r"in some modules .dynamic '\+:.\*up'",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "awq with version 'gemv' is not supported"),
        ({"quant_method": "awq", "bits": 4, "group_size": 8, "backend": "llm-awq"}, "as llm-awq packs it"),
        ({"quant_method": "fp8", "weight_block_size": [0, 16]}, r"weight_block_size \[0, 16\], and blocks have at"),
        ({"quant_method": "fp8", "weight_block_size": [16]}, r"weight_block_size \[16\], and it has to be two whole"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt 'e5m2' is not supported"),
        ({"quant_method": "bitsandbytes"}, "should have either load_in_4bit or load_in_8bit true"),
        ({**GROUPED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask' is not supported"),
        ({**GROUPED, "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "with transform_config {'con"),
        ({**GROUPED, "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' is not supported .known: float-quant"),
        (grouped(strategy="group", group_size=0), "group_size 0, and it has to be a whole number above 0"),
        (grouped(strategy="tensor_group", group_size=16), "strategy 'tensor_group' is not supported .known: tensor"),
        (grouped(strategy="channel", scale_bits=8), "has scale_bits 8, which is not known for int-quantized"),
        (grouped(strategy="channel", actorder="group"), "actorder 'group', which is of groups"),
        (grouped(strategy="channel", dynamic=True), "with dynamic True is not supported"),
        ({**GROUPED, "config_groups": {"W8A8": ["Linear"]}}, "W8A8 of config_groups of .* must be an object"),
    ],
)
def test_what_is_not_known_is_named(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quantised_matrices(NamedTensors({}), config)


LLM_COMPRESSOR: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "version": "0.12.2",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "sparsity_config": {},
    "transform_config": {},
}
ACTIVATIONS = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
ARGS = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "observer_kwargs": {}}
ARGS |= {"observer": "minmax", "symmetric": True}


def compressed(form: str, inputs: Any = None, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": ARGS | weights, "input_activations": inputs, "output_activations": None}
    return LLM_COMPRESSOR | {"format": form, "config_groups": {"group_0": group | {"format": form}}}


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128], "modules_to_not_convert": ["x"]},
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False},
        compressed("float-quantized", ACTIVATIONS, num_bits=8, type="float", strategy="channel"),
        compressed("float-quantized", ACTIVATIONS, num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        compressed("int-quantized", ACTIVATIONS, num_bits=8, type="int", strategy="channel", observer="mse"),
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128, actorder="weight"),
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, zp_dtype="torch.int8"),
        compressed("naive-quantized", num_bits=8, type="int", strategy=None, group_size=-1),
        {
            **{"quant_method": "gptq", "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": True, "sym": True},
            **{"true_sequential": True, "static_groups": False, "model_name_or_path": None, "batch_size": 1},
            **{"model_file_base_name": "model", "model_seqlen": 4096, "tokenizer": None, "dataset": None},
        },
        {
            **{"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False},
            **{"checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": {"-:.*gate.*": {}}, "method": "gptq"},
            "meta": {"damp_percent": 0.05, "mse": 0.0, "quantizer": ["gptqmodel:4.0.0"], "uri": "https://..."},
        },
        {
            **{"quant_method": "gptq", "amp": True, "autoround_version": "0.4.3", "batch_size": 4, "bits": 4, "lr": 0.001},
            **{"damp_percent": 0.01, "data_type": "int", "desc_act": False, "group_size": 128, "iters": 1000},
            **{"minmax_lr": 0.001, "nsamples": 512, "scale_dtype": "torch.float16", "seqlen": 2048, "sym": True},
            **{"enable_minmax_tuning": True, "enable_quanted_input": True, "low_gpu_mem_usage": False},
        },
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True, "backend": "autoawq"},
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM", "modules_to_not_convert": None},
        {
            **{"quant_method": "awq", "bits": 4, "group_size": 128, "do_fuse": False, "modules_to_fuse": None},
            **{"exllama_config": {"max_input_len": 2048, "max_batch_size": 8}, "fuse_max_seq_len": None, "version": "gemm"},
        },
        {
            **{"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True},
            **{"_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8"},
            **{"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_threshold": 6.0},
            **{"llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False},
            "llm_int8_skip_modules": ["lm_head"],
        },
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    ],
)
def test_configurations_as_they_are_written_are_known(config: dict[str, Any]) -> None:
    assert len(rules_of(config)) == 1


EVERY = SCHEMES | {"mxfp4": (mxfp4, {"quant_method": "mxfp4"})}
EVERY["packed by index"] = (
    lambda matrix: by_index(matrix),
    grouped(strategy="group", group_size=16, actorder="group") | {"format": "pack-quantized"},
)
EVERY["packed by index"][1]["config_groups"]["g"]["weights"] |= {"num_bits": 4, "symmetric": False}


def by_index(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same codes, of which every column belongs to the group that it does in order."""
    stored, numbers = packed(matrix)
    stored[".weight_g_idx"] = torch.arange(matrix.shape[1], dtype=torch.int32) // 16
    return stored, numbers


def made(scheme: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    quantise, config = EVERY[scheme]
    torch.manual_seed(0)
    return *quantise(torch.randn((2, 64, 16) if scheme == "mxfp4" else (48, 32))), config


def read(stored: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    (found,) = quantised_matrices(named(stored), config).values()
    return found.whole()


def damaged(ending: str, tensor: Tensor) -> dict[str, dict[str, Tensor]]:
    """What may have become of one tensor: in place of it."""
    found: dict[str, dict[str, Tensor]] = {
        "dropped": {},
        "of another type": {ending: tensor.float() if not tensor.is_floating_point() else tensor.int()},
        "of another width": {ending: tensor.long() if tensor.dtype == torch.int32 else tensor.to(torch.complex64)},
        "one dimension more": {ending: torch.stack([tensor, tensor])},
        "renamed": {f"{ending}_old": tensor},
        "empty": {ending: tensor.new_empty((0, *tensor.shape[1:]))},
    }
    for dim, size in enumerate(tensor.shape):
        found |= {
            f"dimension {dim} shorter": {ending: tensor.narrow(dim, 0, size - 1)},
            f"dimension {dim} twice": {ending: torch.cat([tensor, tensor], dim)},
            f"without dimension {dim}": {ending: tensor.select(dim, 0)},
        }
    return found


@pytest.mark.parametrize("scheme", EVERY)
def test_damage_is_refused(scheme: str) -> None:
    """Every tensor that a scheme implies, missing, of another shape or type: refused by its name, or the same numbers.

    A weight with other dimensions that its scales still fit is a matrix of another shape, which no architecture takes.
    """
    whole, numbers, config = made(scheme)
    torch.testing.assert_close(read(whole, config), numbers)
    tried = 0
    for ending, tensor in whole.items():
        for how, instead in damaged(ending, tensor).items():
            stored = {end: one for end, one in whole.items() if end != ending} | instead
            try:
                found = read(stored, config)
            except ValueError as error:
                assert f"m{ending}" in str(error), (scheme, ending, how, str(error))
                tried += 1
                continue
            same = found.shape == numbers.shape and torch.allclose(found, numbers)
            assert same or (found.shape != numbers.shape and how.startswith("dimension")), (scheme, ending, how)
    assert tried >= 6 * len(whole)


@pytest.mark.parametrize("scheme", EVERY)
def test_what_nobody_knows_is_refused(scheme: str) -> None:
    """An entry of the configuration, a tensor beside a matrix."""
    stored, _, config = made(scheme)
    for value in (True, "hadamard", [1], {"a": 1}, 0):
        with pytest.raises(ValueError, match="has turned_by .*, which is not known for"):
            read(stored, config | {"turned_by": value})
    read(stored, config | {"turned_by": None})
    beside = "_turn" if scheme == "mxfp4" else ".turn"
    for tensor in (torch.randn(4), torch.ones(2, 2, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=rf"tensor m\{beside} " if beside[0] == "." else f"tensor m{beside} "):
            read(stored | {beside: tensor}, config)
    other = "_scales" if scheme == "mxfp4" else next(end for end in stored if end != ".weight")
    tensors = named(stored).tensors | {f"n{other}": stored[other]}
    with pytest.raises(ValueError, match="tensor n|beside n"):
        (_, found) = quantised_matrices(NamedTensors(tensors), config).values()
        found.whole()


@pytest.mark.parametrize(
    ("scheme", "ending", "value", "said"),
    [
        ("gptq act order", ".g_idx", -1, "holds -1, and should hold the group of each input, 0 to 1"),
        ("gptq act order", ".g_idx", 2, "holds 2, and should hold the group of each input, 0 to 1"),
        ("gptq", ".g_idx", 1, "should hold inputs in order, as desc_act is false"),
        ("packed by index", ".weight_g_idx", -1, "holds -1, and should hold the group of each column, 0 to 1"),
        ("packed", ".weight_shape", -48, "holds .*, and should hold the numbers of rows and columns"),
        ("int8", ".weight_format", 2, "holds 2, and should hold 0 for a layout in rows"),
    ],
)
def test_values_that_stand_for_nothing_are_refused(scheme: str, ending: str, value: int, said: str) -> None:
    stored, _, config = made(scheme)
    stored[ending] = stored[ending].clone()
    stored[ending].view(-1)[0] = value
    with pytest.raises(ValueError, match=f"tensor m{ending} {said}"):
        read(stored, config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quant_type": "fp4"}, "says 'fp4' of what is nf4 by its name"),
        ({"blocksize": 0}, "is no quant_state as bitsandbytes writes it, but"),
        ({"shape": [48]}, "is no quant_state as bitsandbytes writes it, but"),
        ({"shape": None}, "is no quant_state as bitsandbytes writes it .TypeError"),
        ({"nested_offset": 0.5}, "has nested_offset alone of nested_blocksize and nested_offset"),
        ({"rotation": "hadamard"}, "has rotation 'hadamard', which is not known in a quant_state"),
    ],
)
def test_what_a_quant_state_says_is_known(change: dict[str, Any], said: str) -> None:
    stored, _, config = made("nf4")
    state = ".weight.quant_state.bitsandbytes__nf4"
    changed = json.loads(bytes(stored[state].tolist())) | change
    stored[state] = torch.tensor(list(json.dumps(changed).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"tensor m{state} {said}"):
        read(stored, config)


def test_zero_points_of_a_symmetric_matrix_are_zero() -> None:
    """Early compressed-tensors stored them."""
    stored, numbers, config = made("int8 rows")
    stored[".weight_zero_point"] = torch.zeros(48, 1, dtype=torch.int8)
    torch.testing.assert_close(read(stored, config), numbers)
    stored[".weight_zero_point"][3] = 1
    with pytest.raises(ValueError, match="m.weight_zero_point holds 1, and should hold zeros, as symmetric is true"):
        read(stored, config)


def test_one_scale_that_are_two_is_refused() -> None:
    stored = {".weight": torch.randn(4, 6).to(torch.float8_e4m3fn), ".weight_scale_inv": torch.ones(2)}
    with pytest.raises(ValueError, match=r"tensor m.weight_scale_inv has the shape \(2,\), and FP8 .* needs \(\) for"):
        read(stored, {"quant_method": "fp8", "weight_block_size": None})


def test_a_zero_point_of_zero_is_the_largest_code() -> None:
    stored, numbers = gptq(torch.rand(16, 32) + 0.1)  # all above zero
    assert (stored[".qzeros"] == -1).all()
    (found,) = quantised_matrices(named(stored), SCHEMES["gptq"][1]).values()
    torch.testing.assert_close(found.whole(), numbers)
    assert (found.whole() >= 0).all()
