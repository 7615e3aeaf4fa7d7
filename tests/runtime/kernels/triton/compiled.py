"""Compiles the kernels for a GPU that need not be there, as `test_source.py` has it done in a process of its own.

For each kernel it prints a line: its name, its bytes of shared memory, whether it fetches ahead of use, and whether
there is machine code, which waits for the kernel before where the GPU lets it start sooner.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from surgeon.runtime.kernels.triton import source
from surgeon.runtime.kernels.triton.functions import LEAST, MOST_TOKENS, OVERLAPS_FROM, TILE_BYTES

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
DIM = 128


def compiled(kernel: object, capability: int, tensors: dict[str, str], **constants: object) -> None:
    """Compile a kernel, given the dtypes of its tensors and what is known then, and print its line."""
    constants["OVERLAPS"] = capability >= 10 * OVERLAPS_FROM
    names = kernel.arg_names
    scalars = {"scale": "fp32", "softcap": "fp32", "epsilon": "fp32"}
    types = {
        name: "constexpr"
        if name in constants
        else f"*{tensors[name]}"
        if name in tensors
        else scalars.get(name, "i32")
        for name in names
    }
    # As they are for the shapes that models have: addresses and most strides are multiples of 16.
    aligned = [
        at for at, name in enumerate(names) if name in tensors or name.endswith(("stride", "width"))
    ]
    made = triton.compile(
        ASTSource(
            kernel,
            types,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
    )
    waits = made.asm["ptx"].count("griddepcontrol.wait") == constants["OVERLAPS"]
    print(
        kernel.__name__,
        made.metadata.shared,
        "cp.async" in made.asm["ptx"],
        len(made.asm["cubin"]) > 0 and waits,
    )


def main(capability: int, dtype: str) -> None:
    cache = {"queries": dtype, "pair": dtype}
    compiled(
        source.attend,
        capability,
        {
            **cache,
            "tables": "i64",
            "newest": "i64",
            "arrived": "i32",
            "out": dtype,
            "sums": "fp32",
            "totals": "fp32",
            "sinks": "fp32",
        },
        KV_HEADS=8,
        GROUP=4,
        HEADS_PADDED=LEAST,
        DIM=DIM,
        DIM_PADDED=DIM,
        BLOCK=16,
        TOKENS=min(MOST_TOKENS, TILE_BYTES // (DIM * BYTES[dtype])),
        PARTS=33,
        WINDOWED=True,
        CHUNKED=False,
        CAPPED=True,
        SUNK=True,
        IN_FLOAT32=dtype == "fp32",
    )
    placed = {**cache, "qkv": dtype, "gain": dtype, "cosine": dtype, "sine": dtype, "squares": "fp32"}
    # Where nothing is cached there are no places, but another tensor.
    for cached, places in ((8, "i64"), (0, dtype)):
        compiled(
            source.place,
            capability,
            {**placed, "places": places},
            HEADS=32,
            KV_HEADS=cached,
            DIM=DIM,
            DIM_PADDED=DIM,
            TURNED=DIM,
            NORMED=True,
            TOGETHER=True,
            OF_QUERIES=32,
            TILE=16,
        )
    squares = {"qkv": dtype, "squares": "fp32"}
    compiled(source.mean_squares, capability, squares, QUERIES=4096, KEYS=1024, PADDED=4096)
    streams = dict.fromkeys(("x", "added", "total", "normed", "gain", "shift"), dtype)
    compiled(
        source.norm,
        capability,
        streams,
        WIDTH=5120,
        WIDTH_PADDED=8192,
        ADDS=True,
        CENTRED=True,
        SHIFTED=True,
    )
    for activation in ("silu", "gelu", "tanh_gelu", "relu"):
        compiled(
            source.gate, capability, {"wide": dtype, "out": dtype}, ACTIVATION=activation, COLUMNS=1024
        )
    given = dict.fromkeys(("x", "weight", "bias", "y"), dtype)
    compiled(source.product_of_few, capability, given, TOKENS=2, ROWS=2, COLUMNS=1024, BIASED=True)
    parts = {"values": "fp32", "at": "i32"}
    compiled(source.highest_of_parts, capability, {"x": dtype, **parts}, PARTS=63, COLUMNS=2048)
    compiled(
        source.highest_part,
        capability,
        {"best": dtype, "places": "i64", **parts},
        PARTS=63,
        PARTS_PADDED=64,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
