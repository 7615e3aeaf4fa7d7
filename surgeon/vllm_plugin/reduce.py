"""How the ranks of vLLM's tensor-parallel group add up what they computed.

A ladder's reductions have to travel while the next step computes, and vLLM's own all-reduce waits for the result:

    shm     this package's memory that the processes of one machine share: CPU ranks on one machine
    torch   an asynchronous all-reduce of `torch.distributed`: NCCL on GPUs, gloo between machines without them
    vllm    vLLM's own, which nothing overlaps
    auto    for programs with late steps shm where that can be, else torch; for other programs vllm, but shm where
            vLLM's CPU ranks have no shared memory (they need AVX-512)

Two CPU ranks with other work beside them took, for 2 KB to 256 KB: vllm 5 to 55 microseconds, shm 20 to 90, of which
10 to 35 to start one, torch (gloo) 250 to 1,300, of which 50. So something is to be won by the first only where nobody
can use the time.

The choice is made by `--additional-config '{"surgeon": {"reduce": "torch"}}'`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group, in_the_same_node_as

from surgeon.language.program import Program, steps_of
from surgeon.runtime.comm.collectives import Alone, Collectives, TorchCollectives
from surgeon.runtime.comm.shared_memory import SharedMemoryCollectives, create_memory
from surgeon.runtime.plan.placement import Group


def connect(way: str, program: Program) -> Collectives:
    """This rank's connection to the others of its tensor-parallel group; all of them call this at the same time.

    Args:
        way: one of `requirements.REDUCE`.
        program: what the ranks are to run.

    Raises:
        ValueError: if it needs what the ranks do not have.
    """
    ranks = get_tp_group()
    if ranks.world_size == 1:
        return Alone()
    on_one_machine = ranks.device.type == "cpu" and all(in_the_same_node_as(ranks.cpu_group))
    if way == "shm" and not on_one_machine:
        raise ValueError("reduce shm in --additional-config needs CPU ranks on one machine; use torch or auto")
    asynchronous = _shared_memory(ranks) if on_one_machine and way != "torch" else GroupCollectives(ranks)
    if way == "auto":
        late = any(step.late for step in steps_of(program.nodes))
        # On CPUs this attribute says whether vLLM's ranks share memory.
        way = "shm" if late or (on_one_machine and not ranks.device_communicator.supports_tensor_dict) else "vllm"
    return VllmCollectives(ranks, asynchronous) if way == "vllm" else asynchronous


def _shared_memory(ranks: Any) -> Collectives:
    """Rank 0 makes the memory, the others open it while rank 0 still waits for them."""
    own = create_memory(ranks.world_size) if ranks.rank_in_group == 0 else None
    name = ranks.broadcast_object(None if own is None else f"/proc/{os.getpid()}/fd/{own}")
    descriptor = os.open(name, os.O_RDWR) if own is None else own
    ranks.barrier()
    return SharedMemoryCollectives(ranks.rank_in_group, _members(ranks), descriptor, ranks.world_size)


def _members(ranks: Any) -> Group:
    return tuple(range(ranks.world_size))


class GroupCollectives(TorchCollectives):
    """Asynchronous collectives of vLLM's process group, whose members are counted from 0 here."""

    def __init__(self, ranks: Any) -> None:
        super().__init__(ranks.rank_in_group, _members(ranks), ranks.device_group)
        self.ranks = ranks

    def _connect(self, group: Group) -> Collectives:
        if self.rank not in group:
            return TorchCollectives(self.rank, group)  # never used
        # Other pipeline stages and replicas have other groups, and are not asked.
        members = [self.ranks.ranks[member] for member in group]
        return TorchCollectives(self.rank, group, dist.new_group(members, use_local_synchronization=True))


class VllmCollectives(Collectives):
    """vLLM's own all-reduce over all ranks, which is done when it returns; groups of some ranks use another one."""

    def __init__(self, ranks: Any, other: Collectives) -> None:
        super().__init__(other.rank, other.group)
        self.ranks = ranks
        self.other = other

    def _connect(self, group: Group) -> Collectives:
        return self.other.subgroup(group)

    def _all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        total: Tensor = self.ranks.all_reduce(tensor)
        return lambda: total

    def _all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self.other._all_gather(tensor)
