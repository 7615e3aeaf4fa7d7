"""A model that computes no numbers for some texts: these are errors, and all others are answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.servers import Server

GOOD, BAD = [5, 6, 7], [5, 99, 7]
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.server.servers import serving
    from tests.tiny_models import damage, save_checkpoint

    folder: Path = save_checkpoint(tmp_path_factory.mktemp("damaged") / "tiny")
    damage(folder, BAD[1])
    with serving(str(folder)) as started:
        yield started


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"logprobs": 2},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"n": 2},
        {"stream": True},
    ],
    ids=str,
)
def test_no_numbers_are_an_error_of_their_own_request(damaged: Server, fields: dict[str, Any]) -> None:
    answer = damaged.post(COMPLETIONS, prompt=BAD, **fields)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "undefined_logits")
    assert "the model's logits are not finite" in error["message"]
    # The likeliest tokens: a drawn one could be the damaged one.
    assert damaged.post(COMPLETIONS, prompt=GOOD, max_tokens=3, temperature=0).status_code == 200
    assert damaged.ask("GET", "/health").status_code == 200


def test_a_stream_that_has_begun_ends_with_the_error(damaged: Server) -> None:
    """One of two prompts has an answer, which may come first."""
    answer = damaged.post(
        COMPLETIONS, prompt=[GOOD, [5, 6, 7] * 30 + BAD], stream=True, ignore_eos=True, max_tokens=30
    )
    last = answer.text.strip().split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "undefined_logits"
    damaged.wait_for(lambda found: found["surgeon_running"] == found["surgeon_waiting"] == 0)
