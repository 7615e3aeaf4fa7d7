"""Unpacking held against the software that writes each format, where that is installed.

    python -m venv --system-site-packages env && env/bin/pip install bitsandbytes compressed-tensors gptqmodel autoawq
    env/bin/python scripts/quantised/compare.py

Each line says how far the numbers of a random matrix of 96 x 256 are apart; it ends with 1 if some are by more than
rounding. Of autoawq one function is taken from its file: its package asks for software of other versions.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # surgeon need not be installed

from surgeon.models.weights import NamedTensors
from surgeon.models.weights.quantised import quantised_matrices

ROWS = 96
COLUMNS = 256
GROUP = 64
TOLERANCE = 1e-6  # of the largest number
Comparison = tuple[str, Tensor, Tensor]


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """What surgeon makes of one matrix, whole; its parts have to be the same."""
    (found,) = quantised_matrices(NamedTensors(tensors), config).values()
    whole = found.whole()
    for dim, size in enumerate(found.shape):
        assert torch.equal(found.part(dim, 3, size - 5), whole.narrow(dim, 3, size - 8)), found.name
    return whole


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def bitsandbytes(matrix: Tensor) -> Iterator[Comparison]:
    functional: Any = import_module("bitsandbytes.functional")
    for table in ("nf4", "fp4"):
        for nested in (False, True):
            packed, state = functional.quantize_4bit(
                matrix, blocksize=64, compress_statistics=nested, quant_type=table
            )
            tensors = {"m.weight": packed} | {
                f"m.weight.{k}": v for k, v in state.as_dict(packed=True).items()
            }
            config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": table}
            yield (
                f"{table}, nested: {nested}",
                read(config, tensors),
                functional.dequantize_4bit(packed, state),
            )
    codes, scales, _ = functional.int8_vectorwise_quant(matrix.half())
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    theirs = functional.int8_vectorwise_dequant(codes, scales)
    yield "int8", read(config, {"m.weight": codes, "m.SCB": scales}), theirs


def compressed_tensors(matrix: Tensor) -> Iterator[Comparison]:
    quantization: Any = import_module("compressed_tensors.quantization")
    compressors: Any = import_module("compressed_tensors.compressors")
    utils: Any = import_module("compressed_tensors.quantization.utils")
    grouped = {"strategy": "group", "group_size": GROUP}
    for form, said in (
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, GROUP]},
        ),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "symmetric": False, **grouped}),
        ("pack-quantized", {"num_bits": 4, **grouped}),
        ("pack-quantized", {"num_bits": 4, "symmetric": False, **grouped}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    ):
        arguments = quantization.QuantizationArgs(**said)
        low, high = _bounds(matrix, said)
        scales, zeros = utils.calculate_qparams(low, high, arguments)
        tensors = {"weight": matrix, "weight_scale": scales}
        if said.get("symmetric") is False:
            tensors["weight_zero_point"] = zeros
        scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
        compressor = compressors.BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(dict(tensors), scheme)
        groups = {"group_0": {"targets": ["Linear"], "weights": arguments.model_dump()}}
        config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
        theirs = compressor.decompress(dict(stored), scheme)["weight"]
        ours = read(config, {f"m.{name}": tensor for name, tensor in stored.items()})
        yield f"{form}, {said['num_bits']} bits by {said['strategy']}", ours, theirs


def _bounds(matrix: Tensor, said: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The least and the largest number that each scale is of."""
    rows, columns = said.get("block_structure", (1, said.get("group_size", COLUMNS)))
    if said["strategy"] == "tensor":
        return matrix.min().reshape(1), matrix.max().reshape(1)
    blocks = matrix.view(ROWS // rows, rows, COLUMNS // columns, columns)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def gptqmodel(_: Tensor) -> Iterator[Comparison]:
    linear: Any = import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    sizes = {"in_features": COLUMNS, "out_features": ROWS, "bias": False, "group_size": GROUP}
    for bits in (2, 4, 8):
        for act_order in (False, True):
            module = linear(
                bits=bits,
                sym=False,
                desc_act=act_order,
                pack_dtype=torch.int32,
                register_buffers=True,
                **sizes,
            )
            module.qweight.copy_(words(*module.qweight.shape))
            module.qzeros.copy_(words(*module.qzeros.shape))
            order = torch.randperm(COLUMNS) if act_order else torch.arange(COLUMNS)
            module.g_idx.copy_((torch.arange(COLUMNS) // GROUP)[order])
            module.scales = torch.rand(module.scales.shape)
            module.dequant_dtype = torch.int16
            names = ("qweight", "qzeros", "scales", "g_idx")
            config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order}
            ours = read(
                config | {"checkpoint_format": "gptq_v2"},
                {f"m.{name}": getattr(module, name) for name in names},
            )
            yield f"{bits} bits, act-order: {act_order}", ours, module.dequantize_weight().T


def awq(_: Tensor) -> Iterator[Comparison]:
    spec = find_spec("awq")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "utils" / "packing_utils.py"
    own: dict[str, Any] = {"torch": torch}
    kept = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.Assign)
    ]
    exec(compile(ast.Module(kept, []), str(path), "exec"), own)
    codes = words(COLUMNS, ROWS // 8)
    zeros = words(COLUMNS // GROUP, ROWS // 8)
    scales = torch.rand(COLUMNS // GROUP, ROWS)
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    ours = read(config, {"m.qweight": codes, "m.qzeros": zeros, "m.scales": scales})
    yield "gemm", ours, own["dequantize_gemm"](codes, zeros, scales, 4, GROUP).T


def transformers(_: Tensor) -> Iterator[Comparison]:
    fp8: Any = import_module("transformers.integrations.finegrained_fp8")
    experts: Any = import_module("transformers.integrations.mxfp4")
    values = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    scales = torch.rand(ROWS // 32, COLUMNS // GROUP)
    config = {"quant_method": "fp8", "weight_block_size": [32, GROUP]}
    ours = read(config, {"m.weight": values, "m.weight_scale_inv": scales})
    yield "FP8 in blocks", ours, fp8.Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    blocks = torch.randint(0, 256, (24, ROWS, COLUMNS // 32, 16), dtype=torch.uint8)
    exponents = torch.randint(110, 140, (24, ROWS, COLUMNS // 32), dtype=torch.uint8)
    ours = read({"quant_method": "mxfp4"}, {"m_blocks": blocks, "m_scales": exponents})
    yield "MXFP4", ours, experts.convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)


WRITERS: dict[str, Callable[[Tensor], Iterator[Comparison]]] = {
    "bitsandbytes": bitsandbytes,
    "compressed_tensors": compressed_tensors,
    "gptqmodel": gptqmodel,
    "awq": awq,
    "transformers": transformers,
}


def main() -> int:
    torch.manual_seed(0)
    matrix = torch.randn(ROWS, COLUMNS)
    wrong = 0
    for name, compare in WRITERS.items():
        if find_spec(name) is None:
            print(f"{name:20}not installed, not compared")
            continue
        for what, ours, theirs in compare(matrix):
            apart = ((ours - theirs.float()).abs().max() / theirs.float().abs().max()).item()
            wrong += not apart <= TOLERANCE
            print(f"{name:20}{what:40}{apart:.1e} of the largest number apart")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
