"""Codas for the demo model, trained as heads only: the path stays as it is, and a coda learns to say what it says.

`surgeon heal --racks` trains racks with their codas. Here the coda of rack 0 alone is trained, towards the predictions
of the whole model, which is what a draft is verified by; so one checkpoint serves any cut, and greedy texts stay those
of the demo model.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from surgeon.checkpoint.codas import Coda, read_codas, write_codas
from surgeon.checkpoint.read import locate
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.language.program import Program
from surgeon.quality.data import load_windows
from surgeon.quality.sources import DEMO_TRAINING

WINDOW, BATCH, RATE, WARMUP = 128, 8, 1e-3, 20
TOKENS = 2_000_000  # of training text, at most


def demo_with_coda(folder: Path, cut: int, depth: int, seconds: float) -> Path:
    """The demo model with a coda of `depth` layers behind layer `cut`, trained for so long; kept if it is there."""
    if folder.is_dir() and read_codas(folder) is not None:
        return folder
    source = locate("demo")
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    path = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    coda = coda_of(path, depth)
    steps = train_coda(path, coda, cut, seconds)
    print(f"coda of {depth} layers behind layer {cut}: {steps} steps of {BATCH} windows of {WINDOW} tokens", flush=True)
    save_coda(folder, coda, cut, int(path.config.num_hidden_layers), depth)
    return folder


def coda_of(path: PreTrainedModel, depth: int) -> PreTrainedModel:
    """A model of the path's last layers, its norm and a head of its own."""
    layers = int(path.config.num_hidden_layers)
    settings = path.config.to_dict() | {"num_hidden_layers": depth, "tie_word_embeddings": False}
    coda: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    for number, layer in enumerate(coda.model.layers):
        layer.load_state_dict(path.model.layers[layers - depth + number].state_dict())
    coda.model.norm.load_state_dict(path.model.norm.state_dict())
    coda.lm_head.load_state_dict(path.lm_head.state_dict())
    return coda


def train_coda(path: PreTrainedModel, coda: PreTrainedModel, cut: int, seconds: float) -> int:
    """Train on the divergence from the path's predictions; returns how many steps there was time for."""
    torch.manual_seed(0)
    windows = load_windows(open_tokenizer("demo"), DEMO_TRAINING, WINDOW, TOKENS, at_most=True).ids
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    trained = [parameter for name, parameter in coda.named_parameters() if "embed_tokens" not in name]
    optimiser = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    kept: list[Tensor] = []
    path.model.layers[cut].register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    began, step = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        rows = [int(order[(step * BATCH + row) % len(order)]) for row in range(BATCH)]
        with torch.no_grad():
            wanted = path(input_ids=windows[rows], use_cache=False).logits.log_softmax(-1)
        found = coda(inputs_embeds=kept.pop(), use_cache=False).logits.log_softmax(-1)
        loss = F.kl_div(found.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP) * max(0.02, 1 - spent / seconds)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0:
            print(f"step {step}: divergence {float(loss):.3f}, {seconds - spent:.0f} s left", flush=True)
        step += 1
    return step


def save_coda(folder: Path, coda: PreTrainedModel, cut: int, layers: int, depth: int) -> None:
    """Write it beside the checkpoint."""
    tensors = {name: tensor for name, tensor in coda.state_dict().items() if "embed_tokens" not in name}
    stored = Coda(coda.config, Program.dense(depth), tensors)
    write_codas(folder, [f"0:{cut}", f"{cut}:{layers}"], [2 * cut, 2 * layers], depth, [stored])
