"""Exports of quantised checkpoints read by `transformers` with the quantisers of others, where these are installed.

    python -m venv --system-site-packages env && env/bin/pip install bitsandbytes compressed-tensors
    PYTHONPATH=. env/bin/python scripts/quantised/stock.py

A line for each way to store weights and each program says how far the logits are from those that surgeon computes of
the same folder. FP8 and compressed-tensors are dequantised there, too; bitsandbytes computes with its own kernels, and
with activations in int8 where weights are.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from transformers.utils import logging

from surgeon.opened import load
from tests import quantised
from tests.checkpoint.helpers import logits_of, relative_error, run_export, save_source

PROGRAMS = {
    "left out": "A0 F0 A3 F3",
    "averaged": "A0 F0 A1~A2 F1~F2 A3 F3",
    "fused": "A0 F0 [A1 A2] [F1 F2] A3 F3",
    "ladder, factors": "A0 F0 >A1 >F1 A2 F2@up8",
}
# Each scheme is read by a package, whose numbers may be so far from ours.
READ_BY = {
    "fp8": ("transformers", 1e-5),
    "fp8 rows": ("compressed_tensors", 1e-5),
    "int8 rows": ("compressed_tensors", 1e-5),
    "packed": ("compressed_tensors", 1e-2),  # multiplied in the dtype of its scales, bfloat16
    "nf4": ("bitsandbytes", 2e-2),
    "int8": ("bitsandbytes", 5e-2),
}


def read(folder: Path, package: str) -> Any:
    """The model by the quantiser of a package."""
    config = (
        {"quantization_config": CompressedTensorsConfig(dequantize=True)}
        if package.startswith("compressed")
        else {}
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=True, **config
    ).eval()


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    wrong = 0
    for scheme, (package, tolerance) in READ_BY.items():
        if find_spec(package) is None:
            print(f"{scheme:12}{package} is not installed")
            continue
        if scheme == "nf4":  # its kernels know the table by heart
            functional: Any = import_module("bitsandbytes.functional")
            quantised.TABLE = functional.get_4bit_type("nf4", device="cpu")
            quantised.SCHEMES[scheme] = partial(quantised.nf4, block=64), quantised.SCHEMES[scheme][1]
        with TemporaryDirectory() as name:
            source = Path(name) / "source"
            save_source(source, num_layers=4, hidden_size=64, intermediate_size=128)
            quantised.quantise_folder(source, scheme)
            for what, program in PROGRAMS.items():
                run_export(source, Path(name) / what, program)
                apart = relative_error(
                    logits_of(read(Path(name) / what, package)), logits_of(load(Path(name) / what))
                )
                wrong += not apart <= tolerance
                print(f"{scheme:12}{what:20}{apart:.1e} of the largest logit apart")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
