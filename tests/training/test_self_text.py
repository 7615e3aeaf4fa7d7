"""Text that a model writes itself: what it would write, and the same whatever stops it on the way."""

from __future__ import annotations

import json
import resource
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surgeon.opened import EditedModel, open_edited, open_model
from surgeon.processes import torchrun
from surgeon.training import self_text
from surgeon.training.self_text import TEXTS_FILE, SelfText
from surgeon.training.texts import load_texts
from tests.tiny_models import save_checkpoint, tiny_tokenizer

TEMPLATE = (
    "{% for each in messages %}<{{ each.role[0] }}>{{ each.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
WINDOW = 24
END = 1  # of the tiny Llama's texts, by its configuration
BEFORE, BEHIND = (
    tiny_tokenizer()(text, add_special_tokens=False).input_ids for text in ("<u>", "\n<a>")
)
TURN_ENDS = (END, BEHIND[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template that likes to end turns and texts."""
    folder = save_checkpoint(tmp_path_factory.mktemp("writes") / "tiny-llama")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][list(TURN_ENDS)] *= 3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def writer(folder: Path, kept: Path, **options: Any) -> SelfText:
    model = open_model(folder)
    return SelfText(EditedModel(model.name, model), model.tokenizer, WINDOW, kept, **options)


def texts_in(kept: Path) -> list[list[int]]:
    return [json.loads(line)["tokens"] for line in (kept / TEXTS_FILE).read_text().splitlines()[1:]]


def windows(written: SelfText, count: int) -> list[list[int]]:
    found: list[list[int]] = written.windows(count)[0].with_format("numpy")[:]["input_ids"].tolist()
    return found


def turn_of(chat: list[int]) -> list[int]:
    """What stands between a template's two parts, in front of the second one."""
    assert chat[: len(BEFORE)] == BEFORE
    place = next(end for end in range(len(chat)) if chat[end : end + len(BEHIND)] == BEHIND)
    assert place > len(BEFORE)
    return chat[len(BEFORE) : place]


def greedy(model: Any, prompt: list[int], new: int, never_first: tuple[int, ...] = (END,)) -> list[int]:
    """A prompt and what transformers writes behind it."""
    found: list[int] = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=END,
        begin_suppress_tokens=list(never_first),
    )[0].tolist()
    return found


def test_next_to_temperature_0_it_is_what_transformers_writes(folder: Path, tmp_path: Path) -> None:
    written = writer(folder, tmp_path, temperature=1e-6)
    rows = windows(written, 3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    room = WINDOW - len(BEFORE) - len(BEHIND)
    turn = greedy(model, BEFORE, room // 2, TURN_ENDS)[len(BEFORE) :]
    asked = [*BEFORE, *takewhile(lambda token: token not in TURN_ENDS, turn), *BEHIND]
    wanted = greedy(model, [0], WINDOW - 1), greedy(model, asked, WINDOW - len(asked))
    texts = texts_in(tmp_path)
    assert texts == [wanted[number % 2] for number in range(len(texts))]
    assert [*chain(*rows)] == [*chain(*texts)][: 3 * WINDOW]
    text = json.loads((tmp_path / TEXTS_FILE).read_text().splitlines()[2])["text"]
    assert text == written.tokenizer.decode(wanted[1])
    assert text.startswith("<u>")


def test_killed_it_goes_on_with_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in torchrun.VARIABLES:  # as in a process of torchrun's that trains
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    whole = writer(folder, tmp_path / "whole", seed=5)
    found = load_texts(whole.tokenizer, "self", WINDOW, 20 * WINDOW, own=whole)
    rows = [*found.training.ids.tolist(), *found.held_out.ids.tolist()]
    assert (len(found.training), found.behind) == (20, 2)  # no more is written to measure on
    assert ["the original wrote itself" in note for note in found.notes] == [True]
    kept = (tmp_path / "whole" / TEXTS_FILE).read_bytes()
    texts = texts_in(tmp_path / "whole")
    chats = texts[1::2]
    assert whole.written == {
        "texts": len(texts),
        "conversations": len(chats),
        "tokens": sum(map(len, texts)),
    }
    assert 22 * WINDOW <= whole.written["tokens"] < 23 * WINDOW
    assert f"{len(texts) - len(chats)} texts from <s> and {len(chats)} conversations" in whole.line()
    assert "tokens/s" in whole.line()
    assert len({*map(tuple, texts)}) == len(texts)
    assert max(map(len, texts)) <= WINDOW
    assert {text[0] for text in texts[::2]} == {0}
    assert any(text[-1] == END for text in texts)
    turns = [turn_of(text) for text in chats]
    assert not any({*turn} & {*TURN_ENDS} for turn in turns)
    assert len({*map(len, turns)}) > 1

    torn = tmp_path / "torn" / TEXTS_FILE
    torn.parent.mkdir()
    torn.write_bytes(kept[: kept.index(b"\n", len(kept) // 2) + 7])
    monkeypatch.setitem(self_text._SIDE_BY_SIDE, "cpu", 3)
    assert windows(writer(folder, torn.parent, seed=5), 22) == rows
    assert torn.read_bytes() == kept

    again = writer(folder, tmp_path / "whole", seed=5)
    monkeypatch.delattr(self_text, "Service")  # nothing is written again
    assert windows(again, 22) == rows
    assert (again.record(), "tokens/s" in again.line()) == (whole.record(), False)
    with pytest.raises(
        ValueError, match=r"whole holds a self-text of another seed: 5, now 6; use another output"
    ):
        writer(folder, tmp_path / "whole", seed=6).windows(23)
    with pytest.raises(ValueError, match=r"self-text of another temperature: 1.0, now 0.5"):
        writer(folder, tmp_path / "whole", seed=5, temperature=0.5).windows(23)


def test_a_full_disk_is_said_and_what_was_kept_stays(folder: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match=TEXTS_FILE):
            writer(folder, tmp_path).windows(100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert windows(writer(folder, tmp_path), 20)


def test_what_cannot_write_is_refused(folder: Path, tmp_path: Path) -> None:
    for temperature in (0, -1, float("nan")):
        with pytest.raises(
            ValueError, match="the temperature of text that the original writes must be above 0"
        ):
            writer(folder, tmp_path, temperature=temperature)
    opened = open_edited(folder)
    tokenizer = opened.model.tokenizer
    with pytest.raises(
        ValueError, match="a window of 6 tokens has no room for a turn in the chat template"
    ):
        SelfText(opened, tokenizer, 6, tmp_path)
    for template, said in (
        (
            "{{ raise_exception('no') }}",
            r"the model that writes text.s chat template does not take these messages: no",
        ),
        ("{{ messages[0].content }}", "does not put something before a user's turn and behind it"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=said):
            SelfText(opened, tokenizer, WINDOW, tmp_path)
    tokenizer.chat_template = None
    for start, given in (
        (0, {}),
        (7, {"bos_token": None}),
        (1, {"bos_token": None, "bos_token_id": None}),
    ):
        tokenizer.bos_token = given.get("bos_token", "<s>")
        opened.model.config.bos_token_id = given.get("bos_token_id", 7)
        assert SelfText(opened, tokenizer, WINDOW, tmp_path).follows()["start"] == start
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has neither BOS nor EOS, from which it could write"):
        SelfText(opened, tokenizer, WINDOW, tmp_path)
    with pytest.raises(
        ValueError, match=r"self is text that the original of an edited model writes.*\./self"
    ):
        load_texts(tiny_tokenizer(), "self", 8, 80)
