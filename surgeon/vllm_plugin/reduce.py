"""Sums of what the ranks of vLLM's tensor-parallel group computed.

A ladder's reductions have to travel while the next step computes, and vLLM's own all-reduce waits for the result. So
programs with late steps reduce on GPUs by vLLM's own on a stream beside the one that computes, on CPUs through memory
that the processes of one machine share, or by gloo between machines. Other programs take vLLM's own, but shared memory
where vLLM's CPU ranks have none (they need AVX-512).

Two busy CPU ranks took, for 2 KB to 256 KB: vLLM's 5 to 55 microseconds, shared memory 20 to 90, of which 10 to 35 to
start one, gloo 250 to 1,300, of which 50.

`reduce` "torch" has all go by an asynchronous all-reduce of `torch.distributed`: gloo, or NCCL, which no recorded pass
may hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.parallel_state import get_tp_group, in_the_same_node_as

from surgeon.language.program import Program, steps_of
from surgeon.runtime.comm.collectives import (
    Alone,
    Around,
    Collectives,
    TorchCollectives,
    Unconnected,
    Wait,
)
from surgeon.runtime.comm.shared_memory import SharedMemoryCollectives, create_memory
from surgeon.runtime.plan.placement import Group


def connect(way: str, program: Program) -> Collectives:
    """Connect this rank to the others of its tensor-parallel group; all of them call this at the same time."""
    ranks = get_tp_group()
    if ranks.world_size == 1:
        return Alone()
    if way == "torch":
        return GroupCollectives(ranks)
    members = tuple(range(ranks.world_size))
    late = any(step.late for step in steps_of(program.nodes))
    if ranks.device.type != "cpu":
        side = torch.cuda.Stream(ranks.device, priority=-1) if late else None  # ahead of what computes
        return GpuCollectives(
            ranks, members, ranks.all_reduce, ranks.device_communicator.pynccl_comm, side
        )
    asynchronous: Collectives
    if all(in_the_same_node_as(ranks.cpu_group)):
        # Rank 0 makes the memory, the others open it while rank 0 still waits for them.
        own = None
        if ranks.rank_in_group == 0:
            own = create_memory(ranks.world_size)
        name = ranks.broadcast_object(None if own is None else f"/proc/{os.getpid()}/fd/{own}")
        if own is None:
            own = os.open(name, os.O_RDWR)
        ranks.barrier()
        asynchronous = SharedMemoryCollectives(ranks.rank_in_group, members, own, ranks.world_size)
        # Without tensor dictionaries vLLM's ranks share no memory.
        late = late or not ranks.device_communicator.supports_tensor_dict
    else:
        asynchronous = GroupCollectives(ranks)
    if late:
        return asynchronous
    return VllmCollectives(ranks, asynchronous)


class GroupCollectives(TorchCollectives):
    """Asynchronous collectives of vLLM's process group, whose members are counted from 0 here."""

    def __init__(self, ranks: Any) -> None:
        super().__init__(ranks.rank_in_group, tuple(range(ranks.world_size)), ranks.device_group)
        self.ranks = ranks

    def _connect(self, group: Group) -> Collectives:
        if self.rank not in group:
            return TorchCollectives(self.rank, group)  # never used
        # Other pipeline stages and replicas have other groups, and are not asked.
        members = [self.ranks.ranks[member] for member in group]
        return TorchCollectives(
            self.rank, group, dist.new_group(members, use_local_synchronization=True)
        )


class VllmCollectives(Around):
    """vLLM's own all-reduce over all ranks, which is done when it returns; groups of some ranks use another one."""

    def __init__(self, ranks: Any, other: Collectives) -> None:
        super().__init__(other)
        self.ranks = ranks

    def _connect(self, group: Group) -> Collectives:
        return self.inner.subgroup(group)

    def _all_reduce(self, tensor: Tensor, _: bool) -> Wait:
        total: Tensor = self.ranks.all_reduce(tensor)
        return lambda: total


class GpuCollectives(Collectives):
    """vLLM's own between GPUs, which its recorded passes can hold.

    On a side stream a reduction travels while the next step is computed. All that a rank sends then goes by that one
    stream: a communicator is never used by two at once.
    """

    def __init__(
        self,
        ranks: Any,
        group: Group,
        all_reduce: Callable[[Tensor], Tensor],
        nccl: Any,
        side: torch.cuda.Stream | None,
    ) -> None:
        super().__init__(ranks.rank_in_group, group)
        self.ranks = ranks
        self.sum = all_reduce
        self.nccl = nccl
        self.side = side

    def _connect(self, group: Group) -> Collectives:
        if self.rank not in group or len(group) == 1:
            return Unconnected(self.rank, group)  # never used, or nothing is sent
        members = [self.ranks.ranks[member] for member in group]
        meeting = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        nccl = PyNcclCommunicator(meeting, self.ranks.device)
        if nccl.disabled:
            raise ValueError("branches on some of the ranks need vLLM's NCCL; unset VLLM_DISABLE_PYNCCL")
        return GpuCollectives(self.ranks, group, nccl.all_reduce, nccl, self.side)

    def _all_reduce(self, tensor: Tensor, _: bool) -> Wait:
        return self._send(tensor, self.sum)

    def _all_gather(self, tensor: Tensor, _: bool) -> Wait:
        return self._send(tensor.contiguous(), self._gather)

    def _gather(self, tensor: Tensor) -> Tensor:
        every = tensor.new_empty(len(self.group), *tensor.shape)
        self.nccl.all_gather(every, tensor)
        return every

    def _send(self, tensor: Tensor, send: Callable[[Tensor], Tensor]) -> Wait:
        if self.side is None:
            result = send(tensor)
            return lambda: result
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            # In memory of the side's, which is used again by the side only: by then it has waited for the readers.
            result = send(tensor)
            done = self.side.record_event()
        return partial(_arrive, result, done, tensor)


def _arrive(result: Tensor, done: torch.cuda.Event, operand: Tensor) -> Tensor:  # noqa: ARG001 - kept until then
    torch.cuda.current_stream().wait_event(done)
    return result
