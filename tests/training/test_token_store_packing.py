"""Documents in windows: what is cut where, and that models keep them apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from surgeon.models.edit import edit
from surgeon.models.families import FAMILIES
from surgeon.quality.data import Tokens
from surgeon.training.head_loss import text_loss
from surgeon.training.run import train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts
from surgeon.training.token_store import (
    IGNORED,
    Documents,
    Packer,
    Row,
    as_table,
    attends_across,
    columns,
)
from tests.selection import case
from tests.tiny_models import tiny_model
from tests.training.runs import TEXTS, student

LENGTHS = (3, 5, 12, 1, 4, 7, 2)


def documents_of(lengths: Sequence[int]) -> list[Tokens]:
    """Documents whose tokens are 10, 11, ..., 20, 21, ..., every second of them an answer."""
    return [
        Tokens(np.arange(count, dtype=np.int32) % 9 + 10 * number, np.arange(count) % 2 == 1)
        for number, count in enumerate(lengths, 1)
    ]


def packed(documents: Iterable[Tokens], how: Documents, window: int = 8) -> list[Row]:
    packer = Packer(window, how, pad=5)
    return [row for tokens in documents for row in packer.add(tokens)] + list(packer.rest())


def test_joined_documents_are_one_text() -> None:
    ids = np.concatenate([each.ids for each in documents_of(LENGTHS)])
    rows = packed(documents_of(LENGTHS), "joined")
    assert [list(row) for row in rows] == [["input_ids"]] * (34 // 8)
    assert np.array_equal(np.concatenate([row["input_ids"] for row in rows]), ids[:32])


def test_documents_apart_begin_anew() -> None:
    rows = packed(documents_of((3, 6, 12)), "apart")
    assert [row["input_ids"].tolist() for row in rows] == [
        [10, 11, 12, 20, 21, 22, 23, 24],
        [25, 30, 31, 32, 33, 34, 35, 36],
    ]
    assert [row["position_ids"].tolist() for row in rows] == [
        [0, 1, 2, 0, 1, 2, 3, 4],
        [0, 0, 1, 2, 3, 4, 5, 6],
    ]
    assert rows[0]["labels"].tolist() == [-100, 11, -100, -100, 21, -100, 23, -100]
    assert rows[1]["labels"].tolist() == [25, -100, 31, -100, 33, -100, 35, -100]
    everything = packed([Tokens(each.ids) for each in documents_of((3, 6, 12))], "apart")
    assert everything[0]["labels"].tolist() == [-100, 11, 12, -100, 21, 22, 23, 24]


def test_whole_documents_are_not_cut() -> None:
    documents = documents_of(LENGTHS)
    rows = packed(documents, "whole")
    found = [
        part
        for row in rows
        for part in np.split(row["input_ids"], np.flatnonzero(row["position_ids"] == 0)[1:])
    ]
    wanted = [part for each in documents for part in np.split(each.ids, range(8, len(each.ids), 8))]
    assert sorted(part.tolist() for part in found if part[0] != 5) == sorted(
        part.tolist() for part in wanted
    )
    assert len(rows) == 5  # 34 tokens: as few as there can be
    assert sum((row["input_ids"] == 5).sum() for row in rows) == 40 - 34
    assert all((row["labels"][row["input_ids"] == 5] == IGNORED).all() for row in rows)


def test_a_window_is_done_where_too_many_are_open() -> None:
    rows = packed(documents_of([5] * 70), "whole")
    assert len(rows) == 70
    assert [row["input_ids"][0] for row in rows[:6]] == [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("how", ["joined", "apart", "whole"])
def test_stretches_change_nothing(how: Documents) -> None:
    wanted, found = packed(documents_of(LENGTHS), how), []
    packer = Packer(8, how, pad=5)
    for each in documents_of(LENGTHS):
        for start in range(0, len(each.ids), 3):
            part = slice(start, start + 3)
            assert each.answer is not None
            found += packer.add(
                Tokens(each.ids[part], each.answer[part], ends=start + 3 >= len(each.ids))
            )
    found += packer.rest()
    assert len(found) == len(wanted)
    assert all(
        np.array_equal(one[name], other[name])
        for one, other in zip(found, wanted, strict=True)
        for name in one
    )


def cut(lengths: Sequence[int], how: Documents, window: int) -> list[list[tuple[int, bool]]]:
    """The pieces of documents as they must stand in windows, as (token, whether it is predicted), by a plain loop."""
    found, place = list[list[tuple[int, bool]]](), 0
    for each in documents_of(lengths):
        piece = list[tuple[int, bool]]()
        for number, (token, answer) in enumerate(
            zip(each.ids.tolist(), each.answer.tolist(), strict=True)
        ):
            if piece and (place if how == "apart" else number) % window == 0:
                found.append(piece)
                piece = []
            piece.append((token, bool(piece) and answer))
            place += 1
        found.append(piece)
    return found


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    window=st.integers(2, 11),
    how=st.sampled_from(["apart", "whole"]),
    step=st.integers(0, 13),
)
def test_every_piece_begins_anew(lengths: list[int], window: int, how: Documents, step: int) -> None:
    """Documents of all lengths, as they come in stretches, of which some are empty, against a plain loop."""
    packer, rows = Packer(window, how, pad=5), list[Row]()
    for each in documents_of(lengths):
        assert each.answer is not None
        rows += packer.add(Tokens(each.ids[:0], each.answer[:0], ends=False))
        for start in range(0, len(each.ids), step or len(each.ids)):
            part = slice(start, start + (step or len(each.ids)))
            rows += packer.add(
                Tokens(each.ids[part], each.answer[part], ends=part.stop >= len(each.ids))
            )
    rows += packer.rest()
    found = list[list[tuple[int, bool]]]()
    for row in rows:
        piece = list[tuple[int, bool]]()
        for token, position, label in zip(*(row[name].tolist() for name in row), strict=True):
            if position == 0:
                piece = []
                found.append(piece)
            assert position == len(piece)
            assert label in (IGNORED, token)
            piece.append((token, bool(piece) and label != IGNORED))
    wanted = cut(lengths, how, window)
    if how == "apart":  # what does not fill a window is left out
        total = sum(lengths) // window * window
        kept = list[list[tuple[int, bool]]]()
        for piece in wanted:
            if (room := total - sum(map(len, kept))) > 0:
                kept.append(piece[:room])
        assert found == kept
    else:
        assert sorted(piece for piece in found if piece[0][0] != 5) == sorted(wanted)
        padding = [piece for piece in found if piece[0][0] == 5]
        assert not any(predicted for piece in padding for _, predicted in piece)


@pytest.mark.parametrize("how", ["apart", "whole"])
def test_the_loss_is_that_of_each_document_by_itself(how: Documents) -> None:
    """Of documents that are shorter and much longer than a window, in every order that they can share one."""
    window, lengths = 16, (5, 27, 1, 40, 16, 3, 33, 17, 2)
    dice = np.random.default_rng(0)
    documents = [dice.integers(6, 90, count).astype(np.int32) for count in lengths]
    rows = packed([Tokens(each) for each in documents], how, window)
    model = tiny_model("llama", 3).eval()
    inputs = {name: torch.tensor(np.stack([row[name] for row in rows])).long() for name in rows[0]}
    total, count, place = 0.0, 0, 0
    for each in documents:
        start = 0
        while start < len(each):
            end = min(len(each), start + window - (place % window if how == "apart" else 0))
            piece = torch.tensor(each[start:end]).long()[None]
            place, start = place + end - start, end
            if place > len(rows) * window or piece.shape[1] < 2:
                continue
            with torch.no_grad():
                logits = model(piece).logits[0, :-1]
            total += float(functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
            count += piece.shape[1] - 1
    with torch.no_grad():
        loss = float(text_loss(model, inputs))
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_unknown_ways() -> None:
    with pytest.raises(ValueError, match="documents cannot be 'part' in a window; did you mean 'apart'"):
        Packer(8, "part")  # type: ignore[arg-type]


def row_of(lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    ids = np.random.default_rng(0).integers(3, 90, sum(lengths)).astype(np.int32)
    parts = [Tokens(part) for part in np.split(ids, np.cumsum(lengths)[:-1])]
    (row,) = packed(parts, "apart", len(ids))
    return {name: torch.tensor(each).long()[None] for name, each in row.items()}


@pytest.mark.parametrize("program", [None, case("[A0 F0 A1 F1] >[A2 F2] [A3 F3]", default=False)])
@pytest.mark.parametrize("family", [case(name, default=name in ("llama", "opt")) for name in FAMILIES])
@torch.no_grad()
def test_a_document_sees_no_other(family: str, program: str | None) -> None:
    """The logits are those that each document has by itself, whatever the program, but for models that are known."""
    model = tiny_model(family, 4, dropout=0.0).eval()
    if program is not None:
        edit(model, program)
    row = row_of((7, 11, 2))
    logits = model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits
    alone = [
        model(input_ids=part, use_cache=False).logits
        for part in row["input_ids"].split((7, 11, 2), dim=1)
    ]
    assert torch.allclose(logits, torch.cat(alone, dim=1), atol=5e-5) != attends_across(model.config)


def test_every_answer_of_a_step_counts_alike(tmp_path: Path) -> None:
    """The step is the gradient of the mean over all that is predicted, however it is divided into micro-batches."""
    rows = packed(documents_of(LENGTHS), "apart")[:2] + packed(documents_of((2, 3)), "whole")
    rows.append({**rows[0], "labels": np.full(8, IGNORED, np.int32)})  # nothing is learned of it
    text = TrainingText(datasets.Dataset(as_table(rows, columns("apart"), 8)), "rows", "0")
    settings = TrainSettings(
        scope="all", steps=1, batch=4, learning_rate=1e-2, arguments={"optim": "sgd"}
    )
    found = [
        train(student(), TrainTexts(text, TEXTS.held_out), one, tmp_path / str(number))
        for number, one in enumerate([settings, TrainSettings(**{**vars(settings), "micro_batch": 1})])
    ]
    plain = student()
    inputs = {name: torch.tensor(np.stack([row[name] for row in rows])).long() for name in rows[0]}
    positions = inputs["position_ids"]
    logits = (
        plain(input_ids=inputs["input_ids"], position_ids=positions, use_cache=False)
        .logits[:, :-1]
        .flatten(0, 1)
    )
    functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for name, parameter in plain.named_parameters():
        wanted = parameter.detach() - 1e-2 * parameter.grad
        for one in found:
            assert one is not None
            assert torch.allclose(one.model.get_parameter(name), wanted, atol=1e-6), name
