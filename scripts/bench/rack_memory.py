"""What backward passes still need: bytes that autograd holds, and the most that a process had resident."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class HeldBytes(saved_tensors_hooks):
    """While it is entered, counts the bytes of tensors that autograd keeps for backward passes; parameters are not.

    Tensors that share their numbers count once. It costs time: what is timed is measured without.

    Attributes:
        most: bytes that were held at once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(self._keep, lambda saved: saved.tensor if isinstance(saved, _Saved) else saved)
        self.excluded = {one.untyped_storage().data_ptr() for one in parameters}
        self.references: Counter[int] = Counter()
        self.now = self.most = 0

    def __enter__(self) -> HeldBytes:
        super().__enter__()
        return self

    def _keep(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in self.excluded:
            return tensor
        return _Saved(tensor, self)

    def count(self, tensor: Tensor, times: int) -> None:
        """Note that a tensor is held once more, or once less."""
        storage = tensor.untyped_storage()
        before = self.references[storage.data_ptr()]
        self.references[storage.data_ptr()] += times
        if (before == 0) != (before + times == 0):
            self.now += times * storage.nbytes()
            self.most = max(self.most, self.now)


class _Saved:
    """A tensor for as long as autograd needs it."""

    def __init__(self, tensor: Tensor, held: HeldBytes) -> None:
        self.tensor, self.held = tensor, held
        held.count(tensor, 1)

    def __del__(self) -> None:
        self.held.count(self.tensor, -1)


def peak_resident() -> int:
    """The most bytes that this process had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
