"""Checkpoints as quantisers write them, packed here by each format's definition, and the numbers they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgeon.models.weights import NamedTensors

Stored = dict[str, Tensor]
GROUP = 16
# Values of the table that QLoRA calls NF4 are the format's own, stored with each matrix; any sixteen will do here.
TABLE = torch.tensor([(i - 7.5) ** 3 / 420 for i in range(16)])


def words(codes: Tensor, dim: int, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes in int32 words along a dimension; `order` says which code of its word comes first, second, ..."""
    count = 32 // bits
    by_word = codes.long().movedim(dim, -1).unflatten(-1, (-1, count))
    found = torch.zeros(by_word.shape[:-1], dtype=torch.long)
    for place, own in enumerate(order or range(count)):
        found |= by_word[..., own] << (bits * place)
    return (found - ((found >> 31) << 32)).to(torch.int32).movedim(-1, dim).contiguous()


def codes_ingroups(matrix: Tensor, bits: int = 4, group: int = GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..2^bits-1, (out, in), with scales and zero points (out, groups) of float16's digits."""
    grouped = matrix.unflatten(1, (-1, group))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(1), scales, zeros


def _numbers(codes: Tensor, scales: Tensor, zeros: Tensor, of: Tensor | None = None) -> Tensor:
    """What codes stand for; `of` says which group each input is of."""
    groups = torch.arange(codes.shape[1]) // GROUP if of is None else of.long()
    return (codes - zeros[:, groups]) * scales[:, groups]


def named(stored: Stored, module: str = "m") -> NamedTensors:
    """A module's tensors by their names."""
    return NamedTensors({f"{module}{ending}": tensor for ending, tensor in stored.items()})


def fp8(matrix: Tensor) -> tuple[Stored, Tensor]:
    """Blocks of 16 x 16, of which the last ones may be cut off."""
    rows, columns = (-(-size // GROUP) for size in matrix.shape)
    scales, values = torch.zeros(rows, columns), torch.zeros(matrix.shape, dtype=torch.float8_e4m3fn)
    numbers = torch.zeros(matrix.shape)
    for i in range(rows):
        for j in range(columns):
            at = slice(GROUP * i, GROUP * (i + 1)), slice(GROUP * j, GROUP * (j + 1))
            scales[i, j] = matrix[at].abs().max() / 448
            values[at] = (matrix[at] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[at] = values[at].float() * scales[i, j]
    return {".weight": values, ".weight_scale_inv": scales}, numbers


def fp8_rows(matrix: Tensor) -> tuple[Stored, Tensor]:
    scales = matrix.abs().amax(1, keepdim=True) / 448
    values = (matrix / scales).to(torch.float8_e4m3fn)
    return {".weight": values, ".weight_scale": scales}, values.float() * scales


def int8_rows(matrix: Tensor) -> tuple[Stored, Tensor]:
    scales = matrix.abs().amax(1, keepdim=True) / 127
    values = (matrix / scales).round().to(torch.int8)
    return {".weight": values, ".weight_scale": scales}, values.float() * scales


def packed(matrix: Tensor) -> tuple[Stored, Tensor]:
    """compressed-tensors' W4A16, asymmetric: signed values and zero points are stored with 8 added."""
    codes, scales, zeros = codes_ingroups(matrix)
    tensors = {
        ".weight_packed": words(codes, 1),
        ".weight_scale": scales.bfloat16(),
        ".weight_zero_point": words(zeros, 0),
        ".weight_shape": torch.tensor(matrix.shape),
    }
    return tensors, _numbers(codes, scales.bfloat16().float(), zeros)


def gptq(matrix: Tensor, order: Tensor | None = None) -> tuple[Stored, Tensor]:
    """Everything transposed, and zero points stored as one less."""
    codes, scales, zeros = codes_ingroups(matrix)
    groups = (
        torch.arange(matrix.shape[1]) // GROUP
        if order is None
        else (torch.arange(matrix.shape[1]) // GROUP)[order]
    )
    tensors = {
        ".qweight": words(codes.T, 0),
        ".qzeros": words((zeros.T - 1) % 16, 1),
        ".scales": scales.T.half().contiguous(),
        ".g_idx": groups.to(torch.int32),
    }
    return tensors, _numbers(codes, scales, zeros, groups)


def gptq_act_order(matrix: Tensor) -> tuple[Stored, Tensor]:
    return gptq(matrix, torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(1)))


def awq(matrix: Tensor) -> tuple[Stored, Tensor]:
    codes, scales, zeros = codes_ingroups(matrix)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        ".qweight": words(codes.T, 1, order=order),
        ".qzeros": words(zeros.T, 1, order=order),
        ".scales": scales.T.half().contiguous(),
    }
    return tensors, _numbers(codes, scales, zeros)


def nf4(matrix: Tensor, block: int = 2 * GROUP) -> tuple[Stored, Tensor]:
    """Blocks of the flattened matrix, the first of two codes in a byte's high bits."""
    flat = matrix.flatten().unflatten(0, (-1, block))
    sizes = flat.abs().amax(1)
    codes = ((flat / sizes[:, None])[..., None] - TABLE).abs().argmin(2)
    pairs = codes.flatten().unflatten(0, (-1, 2))
    said = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(matrix.shape)}
    tensors = {
        ".weight": (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8)[:, None],
        ".weight.absmax": sizes,
        ".weight.quant_map": TABLE,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(said).encode()), dtype=torch.uint8
        ),
    }
    return tensors, (TABLE[codes] * sizes[:, None]).view(matrix.shape)


def nf4_nested(matrix: Tensor) -> tuple[Stored, Tensor]:
    """The same with scales that are codes, too: a table's values times those of blocks of four, and an offset."""
    tensors, _ = nf4(matrix)
    sizes, offset = tensors[".weight.absmax"], tensors[".weight.absmax"].mean().item()
    table = torch.linspace(-1, 1, 256)
    blocks = (sizes - offset).unflatten(0, (-1, 4))
    largest = blocks.abs().amax(1)
    codes = ((blocks / largest[:, None])[..., None] - table).abs().argmin(2)
    own = (table[codes] * largest[:, None]).flatten() + offset
    state = ".weight.quant_state.bitsandbytes__nf4"
    said = json.loads(bytes(tensors[state].tolist())) | {"nested_blocksize": 4, "nested_offset": offset}
    numbers = [
        value * own[i // (2 * GROUP)] for i, value in enumerate(_table_values(tensors[".weight"]))
    ]
    changed = {
        ".weight.absmax": codes.flatten().to(torch.uint8),
        ".weight.nested_absmax": largest,
        ".weight.nested_quant_map": table,
        state: torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
    }
    return tensors | changed, torch.stack(numbers).view(matrix.shape)


def _table_values(stored: Tensor) -> list[Tensor]:
    return [TABLE[code] for byte in stored.flatten().tolist() for code in divmod(byte, 16)]


def int8(matrix: Tensor) -> tuple[Stored, Tensor]:
    sizes = matrix.abs().amax(1)
    values = (matrix / sizes[:, None] * 127).round().to(torch.int8)
    tensors = {".weight": values, ".SCB": sizes, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values.float() * sizes[:, None] / 127


def mxfp4(stacked: Tensor) -> tuple[Stored, Tensor]:
    """Of experts (experts, in, out): blocks of 32 inputs, the first of two codes in a byte's low bits."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([sizes, -sizes])
    blocks = stacked.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    codes = ((blocks / torch.exp2(exponents)[..., None])[..., None] - table).abs().argmin(-1)
    pairs = codes.unflatten(-1, (-1, 2))
    tensors = {
        "_blocks": (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8),
        "_scales": (exponents + 127).to(torch.uint8),
    }
    return tensors, (table[codes] * torch.exp2(exponents)[..., None]).flatten(-2).transpose(
        1, 2
    ).contiguous()


def groups(form: str, **weights: Any) -> dict[str, Any]:
    whole = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    whole["quantization_status"] = "compressed"
    return whole | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


IN_GROUPS = {"strategy": "group", "group_size": GROUP}
BITS = {"bits": 4, "group_size": GROUP}
# What stores a matrix, and the quantization_config that goes with it.
SCHEMES: dict[str, tuple[Callable[[Tensor], tuple[Stored, Tensor]], dict[str, Any]]] = {
    "fp8": (
        fp8,
        {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "activation_scheme": "dynamic"},
    ),
    "fp8 rows": (fp8_rows, groups("float-quantized", num_bits=8, type="float", strategy="channel")),
    "int8 rows": (int8_rows, groups("int-quantized", num_bits=8, type="int", strategy="channel")),
    "packed": (packed, groups("pack-quantized", num_bits=4, type="int", symmetric=False, **IN_GROUPS)),
    "gptq": (gptq, {"quant_method": "gptq", "desc_act": False, "sym": False, **BITS}),
    "gptq act order": (gptq_act_order, {"quant_method": "gptq", "desc_act": True, "sym": False, **BITS}),
    "awq": (awq, {"quant_method": "awq", "version": "gemm", "zero_point": True, **BITS}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "nf4 nested": (
        nf4_nested,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def quantise_folder(folder: Path, scheme: str, dense: Path | None = None) -> Path:
    """Quantise the matrices of a saved model's layers where it lies; a dense folder gets the numbers they are now."""
    quantise, config = SCHEMES[scheme]
    tensors, numbers = load_file(folder / "model.safetensors"), {}
    around = ("vision", "visual", "projector")
    for name in [
        name
        for name in tensors
        if name.endswith("proj.weight") and not any(one in name for one in around)
    ]:
        stored, numbers[name] = quantise(tensors.pop(name).float())
        tensors |= {name.removesuffix(".weight") + ending: tensor for ending, tensor in stored.items()}
    entries = json.loads((folder / "config.json").read_text())
    if dense is not None:
        dense.mkdir()
        for file in folder.iterdir():
            (dense / file.name).write_bytes(file.read_bytes())
        own = load_file(folder / "model.safetensors") | {
            name: one.contiguous() for name, one in numbers.items()
        }
        save_file(own, dense / "model.safetensors", {"format": "pt"})
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(entries | {"quantization_config": config}))
    return folder
