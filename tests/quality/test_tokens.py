"""Texts as tokens, in blocks: the same as at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from surgeon.demo import demo_data
from surgeon.quality import data as tokens
from surgeon.quality.data import TextTokens
from tests.selection import case
from tests.tiny_models import tiny_tokenizer

WORDS = " ".join(str(number) for number in range(3000))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_FIRST", 300)
    monkeypatch.setattr(tokens, "_BLOCK", 600)
    monkeypatch.setattr(tokens, "_OVERLAP", 200)
    monkeypatch.setattr(tokens, "_AT_ONCE", 2000)


@cache
def trained(kind: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2 has it, BPE over whole lines as Llama 2 has it, Unigram as T5 has it."""
    text = "\n".join(demo_data())[:10000]
    model, trainer = {
        "bytes": (models.BPE(), trainers.BpeTrainer(vocab_size=500, show_progress=False)),
        "lines": (
            models.BPE(byte_fallback=True, unk_token="<unk>"),
            trainers.BpeTrainer(
                vocab_size=500, show_progress=False, special_tokens=["<unk>"], max_token_length=12
            ),
        ),
        "unigram": (
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", show_progress=False),
        ),
    }[kind]
    made: Any = Tokenizer(model)
    if kind == "bytes":
        made.pre_tokenizer, made.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(split=kind == "unigram")
    made.train_from_iterator(text.splitlines(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=None, eos_token=None)


def in_pieces(text: str, seed: int = 0) -> Iterator[str]:
    """A text in pieces of every length."""
    rng, start = random.Random(seed), 0
    while start < len(text):
        end = start + rng.randint(1, 900)
        yield text[start:end]
        start = end


def read(tokenizer: Any, *texts: str, apart: bool = False) -> list[list[int]]:
    """The documents' tokens."""
    found: list[list[int]] = [[]]
    for some in TextTokens(tokenizer, apart).read([in_pieces(text) for text in texts]):
        for each in some:
            found[-1] += each.ids.tolist()
            found += [[]] if each.ends else []
    assert not found[-1]
    return found[:-1]


@pytest.mark.parametrize(
    "kind", [case("bytes", default=True), *(case(kind, default=False) for kind in ("lines", "unigram"))]
)
def test_blocks_come_to_the_same_as_the_whole_text(kind: str) -> None:
    tokenizer = trained(kind)
    for text in (
        demo_data()[0][:9000],
        WORDS,
        "né à Zürich: 漢字かな交じり文 🙂 " * 120,
        "a  \n\n " * 700,
    ):
        assert read(tokenizer, text) == [tokenizer(text, add_special_tokens=False)["input_ids"]], text[
            :20
        ]


@pytest.mark.parametrize("period", ["ab", "abc", "self"])
def test_a_text_without_a_seam_is_cut(period: str) -> None:
    tokenizer = trained("bytes")
    (found,) = read(tokenizer, period * 700 + "es")
    assert tokenizer.decode(found) == period * 700 + "es"


def test_documents_have_their_marks() -> None:
    tokenizer = tiny_tokenizer()
    texts = [WORDS[:50], WORDS[50:3000], WORDS[3000:3010]]
    wanted = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    marked = [[begin, *ids] if begin is not None else [*ids, end] for ids in wanted]
    assert read(tokenizer, *texts, apart=True) == marked
    assert read(tokenizer, texts[1]) == [tokenizer(texts[1])["input_ids"]]


def test_little_is_read_for_little_text() -> None:
    taken = 0

    def pieces() -> Iterator[str]:
        nonlocal taken
        for _ in range(1000):
            taken += 100
            yield WORDS[:100]

    next(TextTokens(tiny_tokenizer(), apart=False).read([pieces()]))
    assert taken <= 1200
