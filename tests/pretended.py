"""GPUs that are not there: tensors that say they lie on one, hold their numbers in main memory, and refuse to mix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MOVES = ("_to_copy", "copy_")
GUARDED = (functional.scaled_dot_product_attention, Tensor.__getitem__)


class OnGpu(Tensor):
    """A tensor on a GPU that is not there; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What a PyTorch for CPUs refuses before any operation is seen, as it has no GPU to turn to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if func in GUARDED and isinstance(args[0], OnGpu):
            _require_one_device(func, given)
            found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
            return OnGpu(found, args[0].device) if isinstance(found, Tensor) else found
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type == "cuda" and not given:
            return OnGpu(func(*args, **(kwargs | {"device": "cpu"})), device)
        return func(*args, **kwargs)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnGpu) else value


def _require_one_device(func: Any, given: list[Tensor]) -> None:
    devices = {one.device for one in given if one.dim()}
    if len(devices) > 1 and any(device.type == "cuda" for device in devices):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices} in {func}")


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives, on the device that it is asked for or that its tensors are on."""
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    name, asked = func.overloadpacket.__name__, kwargs.get("device")
    if name not in MOVES:
        _require_one_device(func, given)
    there = next((one.device for one in given if isinstance(one, OnGpu)), torch.device("cpu"))
    device = there if asked is None else torch.device(asked)
    if device.type == "cuda" and asked is not None:
        kwargs = kwargs | {"device": "cpu"}
    found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if name.endswith("_"):
        return args[0]
    if device.type != "cuda":
        return found
    return tree_map(lambda one: OnGpu(one, device) if type(one) is Tensor else one, found)


@contextmanager
def pretended_gpus(count: int) -> Iterator[None]:
    """While inside, this machine has so many GPUs of 80 GB."""
    answers = {"is_available": True, "device_count": count, "mem_get_info": (70 << 30, 80 << 30), "_lazy_init": None}
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as stack:
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # their numbers are of another class
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())
        yield
