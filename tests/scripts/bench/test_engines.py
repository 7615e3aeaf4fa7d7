"""scripts/bench/engines.py: its own engine's figures, its table, and the rooflines' sizes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from scripts.bench import engines, rooflines
from scripts.bench.decoding import SIZES
from scripts.bench.engines import Cell, Measured, Row

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_the_cells() -> None:
    options = argparse.Namespace(
        prompt=[64], batch=[1, 8], new=5, prefill=[512], prefill_batch=[2], neighbour=True
    )
    found = engines.cells(2, options)
    assert [(cell.prompt, cell.batch, cell.new) for cell in found[::2]] == [
        (64, 1, 5),
        (64, 8, 5),
        (512, 2, 1),
    ]
    assert [cell.busy for cell in found] == [False, True] * 3


def test_all_texts_go_on_together_for_some_passes() -> None:
    """32 prompts of 1,024 tokens take 64 passes, and the first text gets a token in nearly all of them."""
    options = argparse.Namespace(
        prompt=[1024], batch=[1, 32], new=24, prefill=[], prefill_batch=[], neighbour=False
    )
    assert [cell.new for cell in engines.cells(1, options)] == [24, 71]


def test_the_table() -> None:
    """Ratios are medians of the rounds' own: 2, 1 and 4 here, not that of the medians."""
    own, vllm = Measured(), Measured()
    for seconds, others in ((0.5, 1.0), (1.0, 1.0), (0.25, 1.0)):
        own.add(8, 3 * seconds, [seconds] * 3)
        vllm.add(8, 3 * others, [others, 9.0, others])
    most = [rooflines.Rates(one, 2 * one) for one in (32.0, 16.0, 64.0)]
    names, rule, line = engines.lines([Row(Cell(1, 1024, 8, 4, True), own, vllm, most)])
    assert names.count("|") == rule.count("|") == line.count("|")
    assert [text.strip() for text in line.strip("| ").split("|")] == [
        "1",
        "a busy process",
        "1,024",
        "8",
        "1.50 (0.75 to 3.00)",
        "3.00 (3.00 to 3.00)",
        "2.00",
        "16.0 (8.0 to 32.0)",
        "8.0 (8.0 to 8.0)",
        "2.00",
        "32.0 (16.0 to 64.0)",
        "0.50",
        "64.0 (32.0 to 128.0)",
        "0.25",
    ]


def test_prompts_alone_have_no_rate() -> None:
    own = Measured()
    own.add(1, 0.5, [])
    assert engines.lines([Row(Cell(1, 8, 1, 1, False), own, own)])[2].endswith(
        "| 1.00 |  |  |  |  |  |  |  |"
    )


@pytest.mark.parametrize("size", [TINY, SIZES["75M"]])
def test_weights_are_those_of_the_model(size: dict[str, int]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**size))
    matrices = [one for name, one in model.named_parameters() if one.dim() == 2 and "embed" not in name]
    assert rooflines.weight_numbers(size) == sum(matrix.numel() for matrix in matrices)


def test_rooflines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the layers that fit, in proportion to all; by oneDNN, and by what is faster."""
    layer = 4 * sum(outputs * inputs for outputs, inputs in rooflines.layer_shapes(TINY))
    monkeypatch.setattr(rooflines, "WEIGHT_BYTES", 2 * layer)
    monkeypatch.setattr(rooflines, "READ_BYTES", 1 << 16)
    found = rooflines.Rooflines(TINY)
    for own, onednn in ((0.5, 0.25), (0.25, 0.5)):
        monkeypatch.setattr(
            found, "products", lambda _, by_onednn=False, both=(own, onednn): both[by_onednn]
        )
        share = 2 * layer / (4 * rooflines.weight_numbers(TINY))
        assert found.rate(8) == pytest.approx((8 / onednn * share, 8 / 0.25 * share))
    monkeypatch.setattr(rooflines, "_seconds", lambda _: 0.5)
    assert found.rate(1) == pytest.approx(
        [(1 << 16) / 64 / 0.5 / (4 * rooflines.weight_numbers(TINY))] * 2
    )


def test_a_neighbour_ends() -> None:
    with engines.neighbour(True):
        busy = [child for child in children() if "nice" in child[1]]
        assert [os.getpriority(os.PRIO_PROCESS, number) for number, _ in busy] == [19]
    assert not [child for child in children() if "nice" in child[1]]


def children() -> list[tuple[int, str]]:
    """Processes that this one has started, and their command lines."""
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [(int(number), Path(f"/proc/{number}/cmdline").read_text()) for number in own]


def test_the_runtimes_own_figures(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    """Every text's first token, and one pass for each further one."""
    tiny_model("llama").save_pretrained(tmp_path)
    own = engines.Surgeon(tmp_path, 1, 40)
    try:
        first, passes = own.measure(3, 20, 6)
        assert first > 0
        assert len(passes) == 5
        assert own.measure(2, 20, 1)[1] == []
    finally:
        own.close()
