"""The number of ranks, their device and connection; chosen and checked before any of them starts."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import torch

from surgeon.errors import did_you_mean
from surgeon.processes.torchrun import ranks_of_this_machine, read_environment
from surgeon.runtime.comm.link import Link
from surgeon.runtime.comm.wires import WIRES


@dataclass(frozen=True)
class RankOptions:
    """The number of ranks, their device and their connection; validated when made.

    Attributes:
        ranks: how many.
        device: "cpu", or "cuda" for one GPU per rank; "auto" becomes the one that `choose_device` says.
        collectives: as `choose_collectives` takes it, and then what it has chosen.
        link: emulate one of this delay and bandwidth between the ranks.
        compression: send the reductions of the program's steps by this one of WIRES.

    Raises:
        ValueError: if there is no rank, the collectives do not fit the device, or the link or compression do not fit
            them.
    """

    ranks: int = 1
    device: str = "cpu"
    collectives: str = "auto"
    link: Link | None = None
    compression: str | None = None

    @classmethod
    def of(cls, ranks: int | RankOptions) -> RankOptions:
        """Take options as given; of a number alone, on GPUs where there is one for each."""
        if isinstance(ranks, RankOptions):
            return ranks
        return cls(ranks, "auto")

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, int):
            raise ValueError(f"ranks must be a number, or RankOptions, not {self.ranks!r}")
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {self.ranks}")
        if self.device == "auto":
            object.__setattr__(self, "device", choose_device("auto", self.ranks))
        object.__setattr__(self, "collectives", choose_collectives(self.collectives, self.device))
        check_sending(self.collectives, self.device, self.link, self.compression)
        if self.ranks == 1 and (self.link is not None or self.compression is not None):
            warnings.warn(
                "one rank sends nothing: the link and the compression change nothing", stacklevel=3
            )

    def __str__(self) -> str:
        parts = self.device, self.collectives, self.link, self.compression
        return ", ".join(str(part) for part in parts if part is not None)


def choose_device(wanted: str, ranks: int) -> str:
    """Say "cpu" or "cuda" for "cpu", "cuda" or "auto" (cuda if there is a GPU for every rank of this machine)."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"there is no device {wanted!r}; {did_you_mean(wanted, ('auto', 'cpu', 'cuda'))}"
        )
    gpus = torch.cuda.device_count()
    ranks = ranks_of_this_machine(ranks)
    enough = gpus >= ranks or sees_its_own_gpu()
    if wanted == "cuda" and not enough:
        raise ValueError(
            f"{ranks} ranks need a GPU each, and there are {gpus}; use the CPU or fewer ranks"
        )
    if wanted == "cuda" or (wanted == "auto" and enough):
        return "cuda"
    return "cpu"


def sees_its_own_gpu() -> bool:
    """Tell whether this is one of several processes that see one GPU each, which to them is number 0.

    Batch systems start them so (`srun --gpus-per-task 1`), and say so by CUDA_VISIBLE_DEVICES.
    """
    alone = torch.cuda.device_count() == 1 and bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return alone and read_environment() is not None


def choose_collectives(wanted: str, device: str) -> str:
    """Choose "shm" (CPU ranks of one machine), "gloo" or "nccl" (GPUs); for "auto" the fastest that fits.

    With "none" ranks do not talk: their results are wrong, and their speed tells the cost of communication. Ranks of
    torchrun's have no memory in common, also where they are on one machine: they inherit nothing from each other.
    """
    fitting: tuple[str, ...] = {"cpu": ("shm", "gloo"), "cuda": ("nccl", "gloo")}[device]
    if read_environment() is not None:
        if wanted == "shm":
            raise ValueError(
                "shm connects only ranks that surgeon starts itself; under torchrun use gloo or auto"
            )
        fitting = tuple(way for way in fitting if way != "shm")
    if wanted == "auto":
        return fitting[0]
    if wanted in (*fitting, "none"):
        return wanted
    known = ("auto", "shm", "gloo", "nccl", "none")
    if wanted in known:
        raise ValueError(
            f"{wanted} does not connect ranks on a {device} device; use {' or '.join(fitting)}"
        )
    raise ValueError(f"there are no collectives {wanted!r}; {did_you_mean(wanted, known)}")


def check_sending(collectives: str, device: str, link: Link | None, compression: str | None) -> None:
    """Refuse an emulated link or a compression that cannot be had."""
    if compression is not None and compression not in WIRES:
        raise ValueError(f"there is no compression {compression!r}; {did_you_mean(compression, WIRES)}")
    if collectives == "none" and (link is not None or compression is not None):
        raise ValueError("collectives none send nothing; give no link and no compression with them")
    if device == "cuda" and link is not None:
        raise ValueError(
            "a link can be emulated between CPU ranks only (GPUs go on while a process waits); use cpu"
        )
