"""GPUs: their attention kernels, their free memory, their names in messages."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from surgeon.memory import gpu_free_bytes

if TYPE_CHECKING:  # takes seconds, and the command line only wants to set the environment
    import torch

# PyTorch's own word for it: 1 puts cuDNN behind its other kernels.
CUDNN_LAST = "TORCH_CUDNN_SDPA_DEPRIORITIZED"


def avoid_cudnn_attention() -> None:
    """Compute attention without cuDNN, PyTorch's first choice on new GPUs, here and in child processes.

    On a B200 it gave wrong tokens with fewer than 8 KV heads (pytorch#193893), on an H100 NaN gradients behind a mask
    (pytorch#196678), and it builds a plan for every new shape, such as each length of a prompt. This sets the
    environment and, once torch is imported, its own switch; TORCH_CUDNN_SDPA_DEPRIORITIZED=0 in the user's environment
    leaves both.
    """
    os.environ.setdefault(CUDNN_LAST, "1")
    if "torch" in sys.modules and os.environ[CUDNN_LAST] != "0":
        sys.modules["torch"].backends.cuda.enable_cudnn_sdp(False)


def gpu_with_room(size: int) -> torch.device | None:
    """Return the first GPU with room for so many bytes of what surgeon takes of its free memory; None without."""
    import torch

    # Asking opens a context on a GPU, which takes memory there: no more of them are asked than need be.
    numbers = range(torch.cuda.device_count())
    return next(
        (torch.device("cuda", number) for number in numbers if size <= gpu_free_bytes(number)), None
    )


def gpus_in_turn(index: int, each: int = 1) -> dict[str, str]:
    """Return the environment of a child process that is to see GPUs of its own; empty with fewer than two GPUs.

    Args:
        index: of the child among its like.
        each: GPUs of a child; at most as many as there are.
    """
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = given if len(given) == count else list(map(str, range(count)))
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(
            names[number % count] for number in range(index * each, (index + 1) * each)
        )
    }


def describe_gpu(device: torch.device) -> str:
    """Describe a GPU and those beside it: "cuda:0 (NVIDIA H100), one of 4 GPUs"."""
    import torch

    count = torch.cuda.device_count()
    beside = f", one of {count} GPUs" if count > 1 else ""
    return f"{device} ({torch.cuda.get_device_name(device)}){beside}"
