"""One mixture of experts on one rank of several: experts sliced and divided, and PyTorch's own operations.

The times are those of the processor on one thread, of the busiest rank where experts are divided; tokens differ from
call to call, so that experts do not stay in a cache that would not hold all of them.

    python scripts/bench/mixture.py --experts 64 --chosen 8 --hidden 1024 --neurons 256
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from surgeon.cost.work import divided_load, sliced_load
from surgeon.models.routing import Routing
from surgeon.models.weights import Tensors
from surgeon.runtime.model import mixture
from surgeon.runtime.model.mixture import MixtureOfExperts
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan

SECONDS, DIFFERENT = 0.3, 64  # that each is measured for, and calls with tokens of their own


def some_plan(options: argparse.Namespace) -> Plan:
    """A plan of the sizes that are asked for; a mixture needs nothing else of a model."""
    with TemporaryDirectory() as folder:
        sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 1}
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, max_position_embeddings=64)).save_pretrained(
            folder
        )
        plan = make_plan(Path(folder), 1, 8)
    return replace(plan, hidden=options.hidden, routing=Routing(options.chosen, normalise=True))


def drawn(options: argparse.Namespace) -> Tensors:
    """A mixture's tensors by role."""
    experts, hidden, neurons = options.experts, options.hidden, options.neurons
    reads = {role: torch.randn(experts, neurons, hidden) / hidden**0.5 for role in ("gate.weight", "up.weight")}
    writes = {"down.weight": torch.randn(experts, hidden, neurons) / neurons**0.5}
    return {"norm.weight": torch.ones(hidden), "router.weight": torch.randn(experts, hidden)} | reads | writes


def own(tensors: Tensors, rank: int, ranks: int, divided: bool) -> Tensors:
    """A rank's: some whole experts, or some neurons of each."""
    found = dict(tensors)
    for role, dim in (("gate", 1), ("up", 1), ("down", 2)):
        whole = tensors[f"{role}.weight"]
        found[f"{role}.weight"] = whole.chunk(ranks, 0 if divided else dim)[rank].contiguous()
    return found


def microseconds(compute: Callable[[Tensor], Tensor], tokens: int, hidden: int) -> float:
    """Of the processor, the mean of calls with different tokens."""
    given = cycle(torch.randn(DIFFERENT, tokens, hidden))
    calls, began = 0, time.process_time()
    while time.process_time() - began < SECONDS:
        compute(next(given))
        calls += 1
    return (time.process_time() - began) / calls * 1e6


def main() -> None:
    """Print a line for every number of ranks and tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 64), ("chosen", 8), ("hidden", 1024), ("neurons", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan, tensors = some_plan(options), drawn(options)
    with patch.object(mixture, "plan_kernels", lambda *_: None):
        plain = MixtureOfExperts(tensors, plan)
    print("ranks tokens  experts hit  sliced us  divided us  PyTorch us (one rank)")
    for ranks in options.ranks:
        each = options.experts // ranks
        sliced = MixtureOfExperts(own(tensors, 0, ranks, divided=False), plan)
        divided = [MixtureOfExperts(own(tensors, rank, ranks, True), plan, rank * each) for rank in range(ranks)]
        for tokens in options.tokens:
            with torch.inference_mode():
                evenly = microseconds(sliced, tokens, options.hidden)
                busiest = busiest_of(divided, tokens, options.hidden)
                usual = microseconds(plain, tokens, options.hidden) if ranks == 1 else float("nan")
            hit = sliced_load(options.experts, options.chosen, tokens).hit
            most = divided_load(options.experts, options.chosen, tokens, ranks).hit
            print(
                f"{ranks:5d} {tokens:6d} {hit:6.1f}/{most:5.1f} {evenly:10.0f} {busiest:11.0f} {usual:11.0f}",
                flush=True,
            )


def busiest_of(ranks: list[MixtureOfExperts], tokens: int, hidden: int) -> float:
    """The mean over tokens of the time of the rank that takes longest."""
    given, total = torch.randn(DIFFERENT, tokens, hidden), 0.0
    for x in given:
        times = []
        for rank in ranks:
            began = time.process_time()
            rank(x)
            times.append(time.process_time() - began)
        total += max(times)
    return total / DIFFERENT * 1e6


if __name__ == "__main__":
    main()
