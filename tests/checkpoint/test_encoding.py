"""Token ids, for several threads at a time."""

from __future__ import annotations

import threading
import time
import unicodedata

from tokenizers import normalizers

from surgeon.checkpoint.texts import LONG_CHARACTERS, Encoder
from tests.tiny_models import tiny_tokenizer
from tests.waiting import wait_until


def test_no_text_that_fits_is_too_long() -> None:
    """Also of the longest token alone, or of characters that are composed as it is normalised."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    encoder = Encoder(tokenizer)
    longest = max(tokenizer.get_vocab(), key=len).replace("Ġ", " ")
    for text in ("the dog", longest * 50, "\u1f82" * 50, unicodedata.normalize("NFD", "\u1f82") * 50):
        assert len(text) <= encoder.most_characters(len(encoder(text, special=False)))
    assert len("abc d" * 100_000) > encoder.most_characters(100)


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
