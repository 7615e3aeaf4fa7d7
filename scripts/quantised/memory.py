"""Adapters over a quantised base, with the base as it is stored and with its numbers: the peak of memory, the time.

    python scripts/quantised/memory.py --layers 16 --hidden 2048

A random Llama in GPTQ of 4 bits is written, loaded, edited (a pair of layers), given adapters of rank 16 on all layers,
and trained for some steps, each way in a process of its own. Memory is what such a process takes above what it takes
once surgeon is imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from surgeon.opened import open_edited
from surgeon.training.heal import student_of
from surgeon.training.scope import add_adapters

GROUP, CODES = 128, 8  # inputs with one scale; codes in a word
QUANTISED = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}


def write(folder: Path, layers: int, hidden: int) -> None:
    """A checkpoint of random codes and scales."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4 // GROUP * GROUP,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 256,
    )
    with torch.device("meta"):
        names = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).named_parameters()}
    tensors: dict[str, Tensor] = {}
    for name, shape in names.items():
        if not name.endswith("proj.weight"):
            tensors[name] = (torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)).half()
            continue
        (outputs, inputs), module = shape, name.removesuffix(".weight")
        words = {".qweight": (inputs // CODES, outputs), ".qzeros": (inputs // GROUP, outputs // CODES)}
        tensors |= {f"{module}{end}": torch.randint(-(2**31), 2**31, size).int() for end, size in words.items()}
        tensors[f"{module}.scales"] = torch.full((inputs // GROUP, outputs), 0.005).half()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    entries = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": QUANTISED}
    (folder / "config.json").write_text(json.dumps(entries))


def peak_kilobytes() -> int:
    """The most that this process has taken."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def train(folder: Path, packed: bool, steps: int, tokens: int) -> dict[str, float]:
    """Load and train in this process; megabytes at its peak, and seconds a step."""
    before = peak_kilobytes()
    dense = str(open_edited(folder, tokenizer=False).program)
    edited = open_edited(folder, dense.replace("A1 F1 A2 F2", "[A1 A2] [F1 F2]"), tokenizer=False)
    model = add_adapters(student_of(edited, packed), "all", edited.program, 16).train()
    loaded = peak_kilobytes()
    optimiser = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    ids, began = torch.randint(0, 32000, (1, tokens)), time.perf_counter()
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    seconds = (time.perf_counter() - began) / steps
    peak = peak_kilobytes()
    return {"loaded": (loaded - before) / 1024, "peak": (peak - before) / 1024, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process that measures
    parser.add_argument("--packed", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        print(json.dumps(train(given.folder, given.packed, given.steps, given.tokens)))
        return
    with TemporaryDirectory() as folder:
        write(Path(folder) / "model", given.layers, given.hidden)
        size = (Path(folder) / "model" / "model.safetensors").stat().st_size
        print(f"{given.layers} layers {given.hidden} wide, {size / 2**20:,.0f} MB stored\n")
        print("| base | MB once loaded | MB at the peak | s a step |\n|---|--:|--:|--:|")
        for how, flags in (("its numbers", []), ("as it is stored", ["--packed"])):
            again = [sys.executable, __file__, "--folder", f"{folder}/model", *flags]
            again += ["--steps", str(given.steps), "--tokens", str(given.tokens)]
            lines = subprocess.run(again, check=True, capture_output=True, text=True).stdout.splitlines()
            found = json.loads(lines[-1])
            print(f"| {how} | {found['loaded']:,.0f} | {found['peak']:,.0f} | {found['seconds']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
