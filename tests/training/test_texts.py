"""Training text and held-out text, and the order of a run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import surgeon.training.texts as texts_module
from surgeon.models.edit import edit
from surgeon.quality.data import Windows, digest_of, load_windows
from surgeon.quality.head import HeldOutQuality
from surgeon.training.racks.run import read_texts, write_texts
from surgeon.training.run import Trained, train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import (
    RunOrder,
    TrainingText,
    TrainingWindows,
    TrainTexts,
    load_texts,
    pad_pieces,
    parse_texts,
)
from surgeon.training.token_store import IGNORED, Documents, TextSource
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.training.runs import in_training, same, weights


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(str(number) for number in range(400)))
    return str(path)


def test_the_end_is_held_out(text: str) -> None:
    found = load_texts(tiny_tokenizer(), text, 8, 1 << 20, held_out_tokens=30)
    whole = load_texts(tiny_tokenizer(), text, 8, 1 << 20, held_out_tokens=8)
    assert len(found.held_out.ids) == 3
    joined = torch.cat([found.training.ids, found.held_out.ids])
    assert torch.equal(joined, torch.cat([whole.training.ids, whole.held_out.ids]))
    assert found.training.digest != whole.training.digest
    assert found.notes == ()
    few = load_texts(tiny_tokenizer(), text, 8, 40, held_out_tokens=30)
    assert torch.equal(few.training.ids, found.training.ids[:5])
    assert torch.equal(few.held_out.ids, found.training.ids[5:8])


def test_by_default_a_tenth_is_held_out(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = load_windows(tiny_tokenizer(), text, 8, 1 << 20).ids
    found = load_texts(tiny_tokenizer(), text, 8, 1 << 20)
    tenth = len(every) // 10
    assert torch.equal(found.training.ids, every[:-tenth])
    assert torch.equal(found.held_out.ids, every[-tenth:])
    assert (
        f"measured on {tenth * 8:,} tokens of {text} (held out: {tenth} windows behind them)"
        in found.line()
    )
    # What is held out does not follow from what is trained on.
    few = load_texts(tiny_tokenizer(), text, 8, 40)
    assert torch.equal(few.training.ids, every[:5])
    assert torch.equal(few.held_out.ids, every[5 : 5 + tenth])
    one = load_texts(tiny_tokenizer(), text, len(every.flatten()) // 3, 1 << 20)
    assert (len(one.training), len(one.held_out.ids)) == (2, 1)
    monkeypatch.setattr(texts_module, "HELD_OUT_TOKENS", 24)
    most = load_texts(tiny_tokenizer(), text, 8, 40)
    assert torch.equal(most.held_out.ids, every[5:8])
    with pytest.raises(
        ValueError, match="has 1 window of .*, and 1 of the last ones are held out .* nothing is left"
    ):
        load_texts(tiny_tokenizer(), text, len(every.flatten()), 1 << 20)


@pytest.mark.parametrize("documents", ["apart", "whole"])
def test_held_out_documents_are_measured_each_by_itself(tmp_path: Path, documents: Documents) -> None:
    """Padding and marks that fill windows are no text, and windows that are not full take nothing from training."""
    path, tokenizer, window = tmp_path / "rows.jsonl", tiny_tokenizer(), 24
    rows = [
        " ".join(str(number * 7 + each) for each in range(1 + number * 5 % 13)) for number in range(120)
    ]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    found = load_texts(
        tokenizer,
        str(path),
        window,
        30 * window,
        held_out_tokens=9 * window,
        documents=documents,
    )
    assert len(found.training) == 30
    stored, _ = TextSource(tokenizer, str(path), window, documents).windows(39)
    model = tiny_model("llama", 2, vocab_size=300).eval()
    values = list[torch.Tensor]()
    for row in stored.select(range(30, 39)).with_format("torch"):
        starts = [place for place in range(window) if row["position_ids"][place] == 0]
        for start, end in pairwise([*starts, window]):
            ids = row["input_ids"][start:end]
            assert (
                (ids[0] == tokenizer.bos_token_id)
                or start == 0
                or (ids == 1).all()
                or documents == "whole"
            )
            if len(ids) < 2 or (ids == tokenizer.eos_token_id).all():  # the latter is padding
                continue
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1]
            values.append(functional.cross_entropy(logits, ids[1:], reduction="none"))
    wanted = torch.cat(values)
    measured = HeldOutQuality(found.held_out, None).measure(model)
    assert measured.tokens == len(wanted) == found.held_out.predicted_tokens
    assert measured.perplexity == pytest.approx(float(wanted.mean().exp()), rel=1e-5)
    again = tmp_path / "racks"
    again.mkdir()
    write_texts(again, found)
    assert HeldOutQuality(read_texts(again).held_out, None).measure(model) == measured
    assert (
        f"measured on {len(wanted)} predicted tokens of {path} (held out: 9 windows behind them)"
        in found.line()
    )


def test_of_several_texts_each_holds_out_its_share(tmp_path: Path) -> None:
    several = dict[str, float]()
    for name, weight, rows in (("long", 3.0, 300), ("short", 1.0, 8)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f'{{"text": "{name} {number} and so on"}}\n' for number in range(rows)))
        several[str(path)] = weight
    found = load_texts(tiny_tokenizer(), several, 24, 40 * 24, documents="whole")
    alone = [load_texts(tiny_tokenizer(), one, 24, 1 << 20, documents="whole") for one in several]
    assert [windows for windows, _ in found.training.parts] == [31, len(alone[1].training)]
    assert found.behind == sum(each.behind for each in alone)
    assert alone[1].behind == max(1, (alone[1].behind + len(alone[1].training)) // 10)
    assert len(found.held_out.ids) == sum(len(each.held_out.ids) for each in alone)


def test_nothing_to_predict_is_not_measured() -> None:
    with pytest.raises(ValueError, match="nothing is predicted in what is held out of rows"):
        pad_pieces([], "rows")


def test_too_little_text(text: str) -> None:
    with pytest.raises(ValueError, match="nothing is left to train on; give more text"):
        load_texts(tiny_tokenizer(), text, 8, 1 << 20, held_out_tokens=1 << 20)
    with pytest.raises(
        ValueError, match="window must be at least 2 tokens, so that one is predicted, not 1"
    ):
        load_texts(tiny_tokenizer(), text, 1, 1 << 20)


def test_nobody_is_judged_by_what_was_trained_on(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in the training text .*, too"):
        load_texts(tiny_tokenizer(), text, 8, 1 << 20, text, 16)
    other = tmp_path / "other.txt"
    other.write_text(" ".join(str(number) for number in range(5000, 5100)))
    found = load_texts(tiny_tokenizer(), text, 8, 1 << 20, str(other), 16)
    assert found.held_out.ids.shape == (2, 8)


def test_every_epoch_has_an_order_of_its_own() -> None:
    order = list(RunOrder(10, 6, 4, seed=3))
    assert len(order) == 24
    first, second = order[:10], order[10:20]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert order == list(RunOrder(10, 6, 4, seed=3)) != list(RunOrder(10, 6, 4, seed=4))
    assert list(RunOrder(10, 3, 4, seed=3)) == order[:12]


def test_several_texts_have_their_turns_by_weight() -> None:
    parts = ((5, 0.7), (3, 0.2), (4, 0.1))
    order = RunOrder(12, 25, 4, 3, parts)
    found = list(order)
    texts = [0 if index < 5 else 1 if index < 8 else 2 for index in found]
    for place in range(1, 101):
        for text, (_, weight) in enumerate(parts):
            assert abs(texts[:place].count(text) - weight * place) <= 1.5
    for text, first, windows in ((0, 0, 5), (1, 5, 3), (2, 8, 4)):
        own = [index for index, one in zip(found, texts, strict=True) if one == text]
        epochs = [own[start : start + windows] for start in range(0, len(own) - windows, windows)]
        assert all(sorted(epoch) == list(range(first, first + windows)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [RunOrder(12, 25, 4, 3, parts)[place] for place in (99, 3, 50)] == [
        found[99],
        found[3],
        found[50],
    ]
    assert list(RunOrder(12, 5, 4, 3, parts)) == found[:20]


def test_windows_of_several_texts(text: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(" ".join(str(number) for number in range(5000, 5400)))
    several = parse_texts([f"{text}=3", f"{other}=1"])
    found = load_texts(tiny_tokenizer(), several, 8, 80, held_out_tokens=32)
    assert [windows for windows, _ in found.training.parts] == [9, 4]
    assert found.held_out.ids.shape == (4, 8)
    one = load_texts(tiny_tokenizer(), text, 8, 72, held_out_tokens=24)
    assert torch.equal(found.training.ids[:9], one.training.ids)
    assert torch.equal(found.held_out.ids[:3], one.held_out.ids)
    assert found.training.source == f"{text}=3, {other}=1"
    swapped = {text: 1.0, str(other): 3.0}
    other_way = load_texts(tiny_tokenizer(), swapped, 8, 80, held_out_tokens=32)
    assert other_way.training.digest != found.training.digest
    with pytest.raises(
        ValueError, match="has no weight, as each of several texts needs one; write .*=0.5, say"
    ):
        parse_texts([text, f"{other}=1"])
    with pytest.raises(ValueError, match="is given twice"):
        parse_texts([f"{text}=1", f"{text}=2"])
    with pytest.raises(ValueError, match=r"weight of .*text.txt must be a number above 0, not 0"):
        load_texts(tiny_tokenizer(), {text: 0.0}, 8, 80)


def test_windows_are_those_of_the_text_in_memory(text: str) -> None:
    """The same tokens and the same hash as `load_windows` has, so that runs of earlier versions go on."""
    read = load_windows(tiny_tokenizer(), text, 8, 1 << 20)
    found = load_texts(tiny_tokenizer(), text, 8, 1 << 20, held_out_tokens=16)
    assert torch.equal(found.training.ids, read.ids[:-2])
    assert torch.equal(found.held_out.ids, read.ids[-2:])
    assert found.training.digest == digest_of(read.ids[:-2])
    assert (found.training.source, found.training.notes) == (text, read.notes[1:])


def test_documents_apart(tmp_path: Path) -> None:
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(f'{{"text": "{number} and {number + 1}"}}\n' for number in range(100)))
    tokenizer = tiny_tokenizer()
    found = load_texts(tokenizer, str(table), 16, 320, held_out_tokens=32, documents="apart")
    rows = found.training.rows.with_format("numpy")[:]
    begins = rows["input_ids"] == tokenizer.bos_token_id
    assert begins.any(1).all()
    assert (rows["position_ids"][begins] == 0).all()
    assert (rows["labels"][begins] == IGNORED).all()
    assert (rows["labels"][~begins & (rows["position_ids"] > 0)] != IGNORED).all()
    plain = tmp_path / "plain.txt"
    plain.write_text("one text")
    with pytest.raises(
        ValueError, match="is one text, whose documents cannot be told apart; give the separator"
    ):
        load_texts(tokenizer, str(plain), 16, 320, documents="apart")


@pytest.mark.thorough
def test_a_run_on_several_texts_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """To the same weights bit for bit; on another text it is refused."""
    for name in "ab":
        lines = (f'{{"text": "{number} {name} and {number * 7 % 31} dogs"}}\n' for number in range(40))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    several = {str(tmp_path / "a.jsonl"): 2.0, str(tmp_path / "b.jsonl"): 1.0}
    texts = load_texts(tiny_tokenizer(), several, 16, 400, held_out_tokens=32, documents="apart")
    settings = TrainSettings(
        scope="all", steps=5, batch=4, learning_rate=1e-2, save_every=1, evaluate_every=5
    )

    def trained(folder: Path, text: TrainTexts, fatal: int | None = None) -> Trained | None:
        model = edit(tiny_model("llama", 2, dropout=0.1, vocab_size=300), "[A0 A1] [F0 F1]")
        if fatal is not None:
            in_training(model, lambda step, *_: _killed() if step == fatal else None)
        return train(model, text, settings, folder)

    def _killed() -> None:
        raise KeyboardInterrupt

    whole = trained(tmp_path / "whole", texts)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "killed", texts, fatal=4)
    again = load_texts(tiny_tokenizer(), several, 16, 400, held_out_tokens=32, documents="apart")
    found = trained(tmp_path / "killed", again)
    assert whole is not None
    assert found is not None
    assert same(weights(whole), weights(found))
    other = load_texts(tiny_tokenizer(), dict.fromkeys(several, 1.0), 16, 400, held_out_tokens=32)
    with pytest.raises(ValueError, match="is of another run: its data was"):
        trained(tmp_path / "killed", other)


def test_windows_say_which_they_are() -> None:
    ids = torch.arange(12).view(3, 4)
    order = RunOrder(3, 2, 3, seed=0)
    text = TrainingText.of(Windows(ids, "numbers", digest_of(ids)))
    items = list(map(TrainingWindows(text, order).__getitem__, range(6)))
    assert [int(item["place"]) for item in items] == list(range(6))
    assert [int(item["index"]) for item in items] == list(order)
    for item in items:
        assert torch.equal(item["input_ids"], ids[item["index"]])
        assert torch.equal(item["labels"], item["input_ids"])
