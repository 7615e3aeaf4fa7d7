"""What surgeon asks of GPUs, on machines that have none: cuDNN's attention is off, and a GPU with room is found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import surgeon
from surgeon.machine import (
    CUDNN_LAST,
    FREE_SHARE,
    available_bytes,
    avoid_cudnn_attention,
    describe_gpu,
    gpu_free_bytes,
    gpu_with_room,
    gpus_in_turn,
)
from surgeon.opened import load_streamed
from surgeon.training.settings import join_processes
from tests.training.runs import run

GIGABYTE = 1 << 30


@pytest.fixture(autouse=True)
def cudnn_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(CUDNN_LAST, raising=False)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    ("given", "left", "enabled"), [(None, "1", False), ("1", "1", False), ("0", "0", True)]
)
def test_cudnn_attention_is_off_unless_the_user_wants_it(
    given: str | None, left: str, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        monkeypatch.setenv(CUDNN_LAST, given)
    avoid_cudnn_attention()
    assert os.environ[CUDNN_LAST] == left
    assert torch.backends.cuda.cudnn_sdp_enabled() is enabled


@pytest.mark.parametrize("start", ["load", "streamed", "processes", "training"])
def test_it_is_off_where_models_are_loaded_and_trained(
    start: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    if start == "load":
        surgeon.load(tiny_checkpoint)
    elif start == "streamed":
        load_streamed(tiny_checkpoint)
    elif start == "processes":
        join_processes("cpu")
    else:
        run(tmp_path, steps=1)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_the_first_gpu_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    free, asked = [10, 30, 40], []

    def mem_get_info(number: int) -> tuple[int, int]:
        asked.append(number)
        return free[number] * GIGABYTE, 80 * GIGABYTE

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    assert gpu_with_room(8 * GIGABYTE) == torch.device("cuda", 0)
    assert asked == [0]  # the others have no context of this process
    assert gpu_with_room(24 * GIGABYTE) == torch.device("cuda", 1)
    assert gpu_with_room(25 * GIGABYTE) == torch.device("cuda", 2)
    assert gpu_with_room(33 * GIGABYTE) is None  # the whole of the largest one is not taken


def test_gpus_are_given_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpus_in_turn(3) == {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [gpus_in_turn(index)["CUDA_VISIBLE_DEVICES"] for index in (1, 2, 3)] == ["1", "2", "0"]
    assert [gpus_in_turn(index, 2)["CUDA_VISIBLE_DEVICES"] for index in (0, 1)] == ["0,1", "2,0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert [gpus_in_turn(index)["CUDA_VISIBLE_DEVICES"] for index in (1, 2, 3)] == ["6", "7", "4"]


def test_what_pytorch_keeps_of_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("memory_reserved", 30), ("memory_allocated", 10)):
        monkeypatch.setattr(torch.cuda, name, lambda _, size=size: size * GIGABYTE)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda number: ((20 + number) * GIGABYTE, 80 * GIGABYTE)
    )
    assert gpu_free_bytes(1) == int(FREE_SHARE * 41 * GIGABYTE)
    # The limit is of main memory.
    assert available_bytes(torch.device("cuda"), 7) == int(FREE_SHARE * 40 * GIGABYTE)


def test_what_messages_call_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert describe_gpu(torch.device("cuda", 0)) == "cuda:0 (NVIDIA H100)"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert describe_gpu(torch.device("cuda", 0)) == "cuda:0 (NVIDIA H100), one of 4 GPUs"
