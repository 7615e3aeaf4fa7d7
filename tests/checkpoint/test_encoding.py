"""How many tokens a text has at least: known without tokenizing, and never more than it has."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surgeon.checkpoint.encoding import LONG_CHARACTERS, Encoder
from tests.tiny_models import tiny_tokenizer
from tests.waiting import wait_until


def sentencepiece_like(normalizer: Any) -> PreTrainedTokenizerFast:
    """BPE with bytes for what it does not know, as Llama 2's and Gemma's."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "aa", "▁a", "aaa", "é", "▁▁"]
    merges = [("a", "a"), ("▁", "a"), ("aa", "a"), ("▁", "▁")]
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def with_stripping(normalized: bool) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", lstrip=True, rstrip=True, special=True, normalized=normalized)])
    return tokenizer


def composing() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


PARTS = [*"aab  \n.eé\u0301\u0345\u0308\u1f82🦊\u1100\u1161\u11a8", "<|end|>", "</s>", "the "]
METASPACE = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KNOWN = {
    "bytes": Encoder(tiny_tokenizer()),
    "composing": Encoder(composing()),
    "stripping": Encoder(with_stripping(False)),
    "stripping, normalised": Encoder(with_stripping(True)),
    "sentencepiece": Encoder(sentencepiece_like(METASPACE)),
}


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=40)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=30))
def test_no_text_has_fewer(name: str, parts: list[str]) -> None:
    encoder, text = KNOWN[name], "".join(parts)
    for one in (text, text * 20, " " * 300 + text, text + "\u0301" * 50):
        assert encoder.fewest(one) <= len(encoder(one, special=False))


@pytest.mark.parametrize("name", KNOWN)
def test_long_texts_are_known_to_be_long(name: str) -> None:
    assert KNOWN[name].fewest("abc d" * 100_000) >= 8_000


@pytest.mark.parametrize(
    "normalizer",
    [normalizers.Strip(), normalizers.Lowercase(), normalizers.Replace("ab", ""), normalizers.NFKC()],
    ids=lambda value: type(value).__name__,
)
def test_nothing_is_known_where_characters_may_vanish(normalizer: Any) -> None:
    assert Encoder(sentencepiece_like(normalizer)).fewest("ab" * 1000) == 0
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Encoder(PreTrainedTokenizerFast(tokenizer_object=words)).fewest(" " * 1000) == 0


def test_the_ids_are_the_tokenizers() -> None:
    tokenizer = tiny_tokenizer()
    encoder = Encoder(tokenizer)
    text = "The naïve 🦊</s> dog"
    assert encoder(text) == tokenizer(text).input_ids
    assert encoder(text, special=False) == tokenizer(text, add_special_tokens=False).input_ids


def test_short_texts_do_not_wait_for_long_ones() -> None:
    """Some are done before a long one that has begun earlier, unless the machine has no time for them just then."""
    encoder = Encoder(tiny_tokenizer())
    text = "The quick brown fox jumps. " * (4 * LONG_CHARACTERS // 27)

    def come_between() -> bool:
        begun, ended = threading.Event(), threading.Event()

        def encode_long_one() -> None:
            begun.set()
            encoder(text)
            ended.set()

        thread = threading.Thread(target=encode_long_one)
        thread.start()
        begun.wait()
        time.sleep(0.05)  # and encodes by now
        for _ in range(3):
            encoder("The dog")
            time.sleep(0.002)  # in which the other thread says so if it has ended
        between = not ended.is_set()
        thread.join()
        return between

    wait_until(come_between, seconds=60)
