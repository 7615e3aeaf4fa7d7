"""What of generation_config.json is followed, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surgeon.checkpoint.generation_defaults import Defaults, read_defaults


def write(folder: Path, **settings: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_what_applies(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == Defaults()
    assert read_defaults(write(tmp_path, eos_token_id=1, temperature=0.6, top_k=50, num_beams=1)) == Defaults()
    found = read_defaults(write(tmp_path, repetition_penalty=1.2, suppress_tokens=[3, 4], begin_suppress_tokens=[5]))
    assert found == Defaults(1.2, (3, 4), (5,))
    assert found.complaint() is None


def test_checkpoints_from_before_there_was_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"repetition_penalty": 1.5, "num_beams": 4}))
    found = read_defaults(tmp_path)
    assert found.repetition_penalty == 1.5
    assert found.complaint() == "config.json sets num_beams (4), which is not applied"
    assert read_defaults(write(tmp_path)) == Defaults()


def test_what_does_not_apply_is_named_with_its_value(tmp_path: Path) -> None:
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "no_repeat_ngram_size": 3, "max_length": 20}
    found = read_defaults(write(tmp_path, **settings))
    words = "generation_config.json sets no_repeat_ngram_size (3), do_sample (true), temperature (0.6), top_p (0.9)"
    assert found.complaint() == f"{words}, which is not applied"
    assert found.complaint({"do_sample", "temperature", "top_p"}) == (
        "generation_config.json sets no_repeat_ngram_size (3), which is not applied"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0, not 0; correct it there"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty must be a number above 0, not '1.1'"),
        ({"suppress_tokens": 5}, "suppress_tokens must be a list of token ids, not 5"),
        ({"begin_suppress_tokens": ["a"]}, "begin_suppress_tokens must be a list of token ids"),
    ],
    ids=str,
)
def test_what_cannot_be_followed(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_defaults(write(tmp_path, **settings))
