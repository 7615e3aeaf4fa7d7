"""GPUs that are not there: tensors that say they lie on one, hold their numbers in main memory, and refuse to mix.

What a GPU would be asked for is noted: launches, waits of this process, transfers. A recording (`torch.cuda.graph`)
keeps the operations that it saw, and computes them again in the same memory, without any Python of whoever recorded
them; what a CUDA graph cannot hold is an error there. It needs no PyTorch for GPUs. scripts/gpu/rehearse and the tests
go by it.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from surgeon.runtime.kernels import build
from surgeon.runtime.kernels.triton.functions import TritonKernels

PACKAGE = Path(__file__).parents[1] / "surgeon"
MOVES = ("_to_copy", "copy_")
INDEXING = ("index", "index_put_", "_index_put_impl_", "index_put")
INDICES = (torch.int64, torch.int32, torch.bool, torch.uint8)
ATTENTION = functional.scaled_dot_product_attention
# Which change the shapes of tensors inside, in place.
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
ITEMS = (Tensor.__getitem__, Tensor.__setitem__)
FUSED = (ATTENTION, functional.rms_norm, torch.rms_norm)
# What PyTorch says where it turns to a GPU: built for CPUs, and built for GPUs.
NO_GPU = (
    "not linked with support for",
    "CUDA driver version is insufficient",
    "No CUDA GPUs",
    "no NVIDIA driver",
)
# What gives the host numbers, or tensors whose size depends on numbers; linalg's checks of errors do, too.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "bincount",
}
WAITS |= {"_linalg_svd", "linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_cholesky_ex", "linalg_qr"}
ALLOCATIONS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_")
FROM_HOST = ("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "scalar_tensor")


@dataclass
class Noted:
    """What GPUs have been asked for.

    Attributes:
        launches: of kernels, by the operation's name.
        devices: that were asked for them.
        waits: of this process for a GPU: what for, and where.
        transfers: from main memory, likewise.
        attention: shapes of queries and keys, and whether there was a mask.
        recording: what a graph that is being recorded has to do again; None outside.
    """

    launches: Counter[str] = field(default_factory=Counter)
    devices: set[str] = field(default_factory=set)
    waits: list[str] = field(default_factory=list)
    transfers: list[str] = field(default_factory=list)
    attention: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = field(default_factory=list)
    recording: list[Callable[[], Any]] | None = None

    def clear(self) -> None:
        for each in (self.launches, self.devices, self.waits, self.transfers, self.attention):
            each.clear()

    def host(self, notes: list[str], what: str) -> None:
        """Note what this process has to do with a GPU, which no graph can hold."""
        notes.append(f"{what} at {_place()}")
        if self.recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {notes[-1]}")

    def launched(self, name: str, device: torch.device, again: Callable[[], Any]) -> None:
        """Note a kernel, and how a graph computes it again."""
        self.launches[name] += 1
        self.devices.add(str(device))
        if self.recording is not None:
            self.recording.append(again)


_noted = Noted()
_inside: list[torch.device] = []  # of a function that is computed on what tensors hold


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
            device=torch.device("cuda", device.index or 0),
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def tolist(self) -> Any:
        _noted.host(_noted.waits, "tolist")
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.held}, {self.device})"


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What a PyTorch for CPUs refuses before any operation is seen, as it has no GPU to turn to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return _numbered(args[0]) if isinstance(args[0], int) else func(*args, **(kwargs or {}))
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = _numbered(kwargs["device"])
        elif func is Tensor.to:
            args = (args[0], *map(_numbered, args[1:]))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if func in FUSED and isinstance(args[0], OnGpu):
            return _fused(func, given, args, kwargs)
        if func in PRODUCTS and isinstance(args[0], OnGpu):
            return _by_its_operations(func, args, kwargs, given, args[0].device)
        device = torch.device(kwargs.get("device") or "cpu")
        if (
            device.type == "cuda"
            and not any(isinstance(one, OnGpu) for one in given)
            and func is not Tensor.to
        ):
            return _made(func, args, kwargs, device)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            on_gpu = next((one for one in given if isinstance(one, OnGpu)), None)
            if on_gpu is None or not any(said in str(error) for said in NO_GPU):
                raise
        return _by_its_operations(func, args, kwargs, given, on_gpu.device)


def _numbered(value: Any) -> Any:
    """A device that says which GPU it is, as the current one need not be asked for."""
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cuda", value)
    is_gpu = isinstance(value, str | torch.device) and str(value) == "cuda"
    return torch.device("cuda", 0) if is_gpu else value


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnGpu) else value


def _on(device: torch.device, value: Any, given: list[Tensor]) -> Any:
    """What an operation gave, as it lies on a GPU; what it was given and has changed is the same tensor still."""
    known = {id(one.held): one for one in given if isinstance(one, OnGpu)}

    def one_of(value: Any) -> Any:
        if type(value) is not Tensor:
            return value
        return known[id(value)] if id(value) in known else OnGpu(value, device)

    return tree_map(one_of, value)


def _require_one_device(func: Any, given: list[Tensor]) -> None:
    devices = {one.device for one in given if one.dim()}
    if len(devices) > 1 and any(device.type == "cuda" for device in devices):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {devices} in {func}"
        )


def _fused(func: Any, given: list[Tensor], args: Any, kwargs: Any) -> Tensor:
    """One launch, where PyTorch for CPUs would go through many operations."""
    _require_one_device(func, given)
    args, kwargs, device = tree_map(_held, args), tree_map(_held, kwargs), given[0].device
    with _disable_current_modes():
        found = func(*args, **kwargs)
    if func is ATTENTION:
        _noted.attention.append(
            (tuple(args[0].shape), tuple(args[1].shape), kwargs.get("attn_mask") is not None)
        )
    _noted.launched(func.__name__, device, lambda: found.copy_(func(*args, **kwargs)))
    return OnGpu(found, device)


def _of_host(index: Any) -> bool:
    """Whether an index has to be sent to a GPU first."""
    return isinstance(index, list) or (
        isinstance(index, Tensor) and index.dim() > 0 and not isinstance(index, OnGpu)
    )


def _by_its_operations(
    func: Any, args: Any, kwargs: Any, given: list[Tensor], device: torch.device
) -> Any:
    """What a function gives that asks for a GPU at once: its operations on what its tensors hold are seen instead."""
    if func in ITEMS and any(
        _of_host(one) for one in (args[1] if isinstance(args[1], tuple) else args[1:2])
    ):
        _noted.host(_noted.transfers, "an index")
    if func is Tensor.copy_ and not all(isinstance(one, OnGpu) for one in given):
        _noted.host(_noted.transfers if isinstance(given[0], OnGpu) else _noted.waits, "copy_")
    else:
        _require_one_device(
            func, [one for one in given if one.dtype not in INDICES or isinstance(one, OnGpu)]
        )
    _inside.append(device)
    try:
        found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    finally:
        _inside.pop()
    return _on(device, found, given)


def _made(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """A new tensor on a GPU."""
    name, kwargs = func.__name__, kwargs | {"device": "cpu"}
    with _disable_current_modes():
        found = func(*args, **kwargs)
    if not isinstance(found, Tensor):
        return found
    if name in FROM_HOST:
        _noted.host(_noted.transfers, name)
    elif name not in ALLOCATIONS:
        values = found.clone()
        _noted.launched(name, device, lambda: found.copy_(values))
    return OnGpu(found, device)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives, on the device that it is asked for or that its tensors are on."""
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    name, asked = func.overloadpacket.__name__, kwargs.get("device")
    there = next(
        (one.device for one in given if isinstance(one, OnGpu)), _inside[-1] if _inside else None
    )
    device = torch.device(there or "cpu") if asked is None else torch.device(asked)
    if there is not None or device.type == "cuda":
        _note_host(func, name, given, args, device)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if asked is not None:
        kwargs["device"] = "cpu"
    args, kwargs = tree_map(_held, args), tree_map(_held, kwargs)
    compute = _as_on_cpu(func, name)
    found = compute(*args, **kwargs)
    if device.type != "cuda":
        return found
    if not _is_view(func, name, found, [_held(one) for one in given]):
        _noted.launched(name, device, _again(compute, func, args, kwargs, found))
    return found if _inside else _on(device, found, given)


def _note_host(func: Any, name: str, given: list[Tensor], args: Any, device: torch.device) -> None:
    """Refuse devices that do not mix, and note what this process waits for or sends."""
    on_gpu = [isinstance(one, OnGpu) or bool(_inside) for one in given]
    if name == "_to_copy" and on_gpu[0] != (device.type == "cuda"):
        _noted.host(_noted.waits if on_gpu[0] else _noted.transfers, name)
    elif name == "copy_" and not _inside and on_gpu[0] != on_gpu[1]:
        _noted.host(_noted.transfers if on_gpu[0] else _noted.waits, name)
    elif name in INDEXING:
        indices = [one for one in args[1] if one is not None]
        if not _inside and any(map(_of_host, indices)):
            _noted.host(_noted.transfers, "an index")
        if any(one.dtype in (torch.bool, torch.uint8) for one in indices) and not (
            name != "index" and args[2].numel() == 1
        ):
            _noted.host(_noted.waits, f"{name} by a mask")
        if not _inside:
            _require_one_device(
                func, [one for one in given if not any(one is index for index in indices)]
            )
    elif name not in MOVES and not _inside:
        _require_one_device(func, given)
    if name in WAITS:
        _noted.host(_noted.waits, name)


def _as_on_cpu(func: Any, name: str) -> Callable[..., Any]:
    """What computes an operation that only GPUs have."""
    if name == "_fused_rms_norm":

        def rms_norm(*args: Any) -> tuple[Tensor, Tensor]:
            with _disable_current_modes():
                return functional.rms_norm(*args), torch.empty(0)

        return rms_norm
    return func  # type: ignore[no-any-return]


def _is_view(func: Any, name: str, found: Any, given: list[Tensor]) -> bool:
    """Whether nothing was computed: the result is memory that there was, or memory that nobody has written to."""
    if func._schema.is_mutable or func.namespace == "c10d":
        return name in ALLOCATIONS
    memory = {one.untyped_storage().data_ptr() for one in given}
    tensors = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
    return name in ALLOCATIONS or all(
        one.numel() and one.untyped_storage().data_ptr() in memory for one in tensors
    )


def _again(
    compute: Callable[..., Any], func: Any, args: Any, kwargs: Any, found: Any
) -> Callable[[], Any]:
    """Computes an operation again, into the same memory."""
    if func.namespace == "c10d":  # it has ended when the next operation begins, as on a stream

        def send() -> None:
            for one in tree_leaves(compute(*args, **kwargs)):
                if isinstance(one, torch.ScriptObject):
                    one.wait()

        return send
    if func._schema.is_mutable:
        return lambda: compute(*args, **kwargs)

    def again() -> None:
        for old, new in zip(tree_leaves(found), tree_leaves(compute(*args, **kwargs)), strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)

    return again


def _place() -> str:
    """The line of surgeon's that is being computed."""
    frames = [
        frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE)
    ]
    return f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno}" if frames else "?"


_launch = TritonKernels.launch


def _kernel(
    self: TritonKernels, name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any
) -> None:
    """One launch, which is interpreted on what the tensors hold."""
    given = [one for one in arguments if isinstance(one, Tensor)]
    _require_one_device(name, given)
    held = tree_map(_held, arguments)

    def again() -> None:
        with _disable_current_modes():
            _launch(self, name, grid, held, **constants)

    if 0 not in grid:
        again()
        _noted.launched(name, given[0].device, again)


class Graph:
    """What torch.cuda.CUDAGraph is here."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], Any]] = []

    def replay(self) -> None:
        assert self.operations, "nothing was recorded"
        _noted.launches["graph"] += 1
        with _disable_current_modes(), torch.no_grad():
            for again in self.operations:
                again()


_handles = itertools.count()
_pools: dict[object, WeakSet[Graph]] = {}  # the graphs of each pool of memory


@contextmanager
def _graph(
    graph: Graph,
    pool: object = None,
    stream: object = None,  # noqa: ARG001 - all are one
    capture_error_mode: str = "global",
) -> Iterator[None]:
    assert _noted.recording is None, "graphs are recorded one after the other"
    assert capture_error_mode in ("global", "thread_local", "relaxed"), capture_error_mode
    if pool is not None:
        # Where all graphs of a pool have gone and other memory in it has not, this is all that PyTorch says. Memory
        # that cuBLAS works in is such: PyTorch keeps it for each stream, from the first product there on.
        if pool in _pools and not _pools[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        _pools.setdefault(pool, WeakSet()).add(graph)
    _noted.recording = graph.operations
    try:
        yield
    finally:
        _noted.recording = None


class _NoGradient:
    """In place of inference mode, whose tensors and those here do not mix."""

    def __init__(self, mode: bool = True) -> None:
        self._mode = mode
        self._before = True

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._before and not self._mode)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


class _Event(SimpleNamespace):
    def __init__(self, **_: Any) -> None:
        super().__init__(record=lambda *_: None, synchronize=lambda: None, elapsed_time=lambda _: 1.0)


@contextmanager
def _stream(_: Any) -> Iterator[None]:
    yield


def _answers(count: int, free: int) -> dict[str, Any]:
    """What torch.cuda has and says."""
    stream = SimpleNamespace(
        wait_stream=lambda _: None,
        synchronize=lambda: None,
        record_event=_Event,
        wait_event=lambda _: None,
    )
    said: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": count,
        "can_device_access_peer": True,
        "current_device": 0,
        "mem_get_info": (free, 80 << 30),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "get_device_name": "a pretended GPU",
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(
            total_memory=80 << 30, name="a pretended GPU", major=9, minor=0
        ),
        "current_stream": stream,
        **dict.fromkeys(
            ("_lazy_init", "set_device", "empty_cache", "set_rng_state", "manual_seed_all"), None
        ),
    }
    answers: dict[str, Any] = {
        name: lambda *_, answer=answer, **__: answer for name, answer in said.items()
    }
    return answers | {
        "synchronize": lambda *_: _noted.host(_noted.waits, "synchronize"),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "Stream": lambda *_, **__: stream,
        "stream": _stream,
        "Event": _Event,
        "graph_pool_handle": lambda: (0, next(_handles)),
        "CUDAGraph": Graph,
        "graph": _graph,
    }


@contextmanager
def pretended_gpus(count: int, free: int = 70 << 30, kernels: bool = False) -> Iterator[Noted]:
    """While inside, this machine has so many GPUs with so many bytes free; what they are asked for is noted.

    Args:
        kernels: whether the ones in Triton compute, interpreted (TRITON_INTERPRET=1), which takes its time.
    """
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    _noted.clear()
    with ExitStack() as stack:
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        # Their numbers are of another class.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        for name, answer in _answers(count, free).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch._C, "_InferenceMode", _NoGradient))
        unused = None if kernels else "PyTorch's operations are rehearsed"
        stack.enter_context(mock.patch.object(build, "reason_without", return_value=unused))
        stack.enter_context(mock.patch.object(TritonKernels, "launch", _kernel))
        # What is seen here is seen in this thread only.
        stack.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        if torch.version.cuda is not None:  # it would ask the driver for the devices of new tensors
            lifted = torch._C._only_lift_cpu_tensors()
            stack.callback(torch._C._set_only_lift_cpu_tensors, lifted)
            torch._C._set_only_lift_cpu_tensors(True)
            torch._C._ensureCUDADeviceGuardSet()
        stack.enter_context(torch.no_grad())
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())
        yield _noted
