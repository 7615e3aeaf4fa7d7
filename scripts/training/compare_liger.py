"""Liger-Kernel's loss at the output head, which is taken on GPUs where it is installed, held against surgeon's own.

    python -m venv --system-site-packages env && env/bin/pip install --no-deps liger-kernel
    TRITON_INTERPRET=1 env/bin/python scripts/training/compare_liger.py       # on a CPU, by Triton's interpreter
    env/bin/python scripts/training/compare_liger.py --device cuda

Losses and gradients of stream, matrix and bias must be alike, with and without a bias, a scale, a cap (which the
interpreter cannot do) and tokens that are not predicted; it ends with 1 otherwise. On a GPU it also prints the time and
the peak of memory of both with a vocabulary of 128,000.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.commands import make_parser
from surgeon.quality.head import OutputHead
from surgeon.training.head_loss import HeadLoss, LogitsTask, _KnownGradient, by_liger
from surgeon.training.token_store import IGNORED

Loss = Callable[[Tensor, OutputHead, LogitsTask], HeadLoss]


def by_surgeon(stream: Tensor, head: OutputHead, task: LogitsTask) -> HeadLoss:
    """In chunks of PyTorch's operations."""
    return HeadLoss(*_KnownGradient.apply(stream, head.weight, head.bias, head, task))  # type: ignore[no-untyped-call]


def head_of(vocabulary: int, hidden: int, device: str) -> OutputHead:
    """A random one."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    head = OutputHead(LlamaForCausalLM(config))
    head.weight = (torch.randn(vocabulary, hidden, device=device) / hidden**0.5).requires_grad_()
    return head


def gradients(loss: Loss, stream: Tensor, head: OutputHead, task: LogitsTask) -> list[Tensor]:
    """The loss, times 2, and its gradients."""
    found = 2 * loss(stream, head, task).loss
    inputs = [stream, head.weight, *([] if head.bias is None else [head.bias])]
    return [found.detach(), *torch.autograd.grad(found, inputs)]


def differences(device: str) -> float:
    """The largest relative difference of all cases, which are printed."""
    worst = 0.0
    caps = (None,) if device == "cpu" else (None, 1.5)
    for has_bias, scale, cap, share in product((False, True), (None, 0.7), caps, (0.0, 0.4)):
        head = head_of(53, 24, device)
        head.scale = scale
        head.softcap = cap
        head.bias = torch.randn(53, device=device, requires_grad=True) if has_bias else None
        stream = torch.randn(19, 24, device=device, requires_grad=True)
        labels = torch.randint(53, (19,), device=device)
        task = LogitsTask(
            None,
            labels.masked_fill(torch.rand(19, device=device) < share, IGNORED),
            text=1.0,
            logits=0.0,
        )
        pairs = zip(
            gradients(by_liger, stream, head, task),
            gradients(by_surgeon, stream, head, task),
            strict=True,
        )
        found = max(float((one - other).norm() / other.norm()) for one, other in pairs)
        worst = max(worst, found)
        print(f"bias {has_bias}, scale {scale}, cap {cap}, {share:.0%} not predicted: {found:.1e}")
    return worst


def costs(loss: Loss) -> str:
    """Time and memory of 16,384 tokens of 2,048 features, products in bfloat16."""
    head = head_of(128_000, 2048, "cuda")
    stream = torch.randn(16_384, 2048, device="cuda", requires_grad=True)
    task = LogitsTask(None, torch.randint(128_000, (16_384,), device="cuda"), text=1.0, logits=0.0)
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begun = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            found = loss(stream, head, task).loss
        torch.autograd.grad(found, [stream, head.weight])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() - before
    return f"{1000 * min(seconds):.0f} ms, {peak / 1e9:.2f} GB"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)
    worst = differences(device)
    if device == "cuda":
        print(f"Liger-Kernel: {costs(by_liger)}\nsurgeon: {costs(by_surgeon)}")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
