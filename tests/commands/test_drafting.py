"""`surgeon generate --draft coda`: the same texts, and what the drafts were worth."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.commands.app import main
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.service import Service, ServiceOptions
from surgeon.runtime.worker.rank import RankOptions
from surgeon.server.state import Meters
from tests.codas import save_codas
from tests.tiny_models import save_checkpoint

PROMPTS = ["The quick brown fox", "went on sleeping:", "the lazy dog, and the dog (who had"]


@pytest.fixture(scope="module")
def with_codas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose texts do not end, and a coda that is often right."""
    folder = save_checkpoint(tmp_path_factory.mktemp("drafting") / "tiny-llama")
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None}))
    save_codas(folder, AutoModelForCausalLM.from_pretrained(folder), depth=2, noise=0.3)
    return folder


def lines(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[dict[str, object]], str]:
    """The JSON that is written, and what stands on stderr."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    assert main(["generate", *arguments, *prompts, "--max-new-tokens", "12", "--json"]) == 0
    out, err = capfd.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def test_the_same_texts_on_any_ranks(with_codas: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain, _ = lines(capfd, str(with_codas))
    one, _ = lines(capfd, str(with_codas), "--draft", "coda", "--draft-tokens", "2")
    two_ranks = "--draft-tokens", "1", "--tp", "2", "--max-batch", "2", "--decoding", "static"
    two, err = lines(capfd, str(with_codas), "--draft", "coda", *two_ranks)
    assert [line["tokens"] for line in one] == [line["tokens"] for line in plain]
    assert [line["tokens"] for line in two] == [line["tokens"] for line in plain]
    assert "drafted" not in plain[0]
    for line in (*one, *two):
        assert 0 < int(str(line["accepted"])) < int(str(line["drafted"]))
        assert float(str(line["tokens_per_second"])) > 0
    # Every round adds a token that was not drafted, so that one draft at a time is fewer drafts than tokens.
    assert all(int(str(line["drafted"])) < 12 for line in two)
    drafted, accepted = (sum(int(str(line[name])) for line in two) for name in ("drafted", "accepted"))
    assert f"drafts   {accepted} of {drafted} tokens accepted ({accepted / drafted:.0%})" in err
    assert re.search(r"decode   36 tokens of 3 texts at [\d.]+ tokens/s", err)
    assert re.search(r"sync     [\d.]+ collectives per token", err)


def test_drawn_texts_are_the_same_on_any_ranks_and_beside_any_prompts(
    with_codas: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drawing = (
        str(with_codas),
        "--draft",
        "coda",
        "--temperature",
        "0.8",
        "--top-p",
        "0.9",
        "--seed",
        "5",
    )
    together, _ = lines(capfd, *drawing)
    apart, _ = lines(capfd, *drawing, "--tp", "2", "--max-batch", "1")
    assert [line["tokens"] for line in together] == [line["tokens"] for line in apart]


PAIRS = "A0 F0 [A1 A2] [F1 F2] A3 F3"


def test_a_program_over_the_same_weights(
    with_codas: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also that of a recipe, on any ranks; as many tokens as are asked for, or as pay."""
    recipe = tmp_path / "pairs.yaml"
    recipe.write_text(f"surgeon: 1\nmodel: {with_codas}\noperations:\n  - pair: {{layers: '1:3'}}\n")
    plain, _ = lines(capfd, str(with_codas))
    one, err = lines(capfd, str(with_codas), "--draft", str(recipe), "--draft-tokens", "2")
    two, _ = lines(capfd, str(with_codas), "--draft", PAIRS, "--tp", "2", "--max-batch", "2")
    for found in (one, two):
        assert [line["tokens"] for line in found] == [line["tokens"] for line in plain]
    edited = surgeon.edit(surgeon.open(with_codas), PAIRS)
    three = surgeon.generate(with_codas, PROMPTS, max_new_tokens=12, draft=edited, draft_tokens=2)
    assert [text.tokens for text in three.texts] == [line["tokens"] for line in plain]
    drafted, accepted = (sum(int(str(line[name])) for line in one) for name in ("drafted", "accepted"))
    assert 0 < accepted <= drafted
    assert all(
        line["tokens_per_pass"] == round(12 / (12 - int(str(line["accepted"]))), 2) for line in one
    )
    assert re.search(
        rf"drafts {accepted} of {drafted} tokens accepted .* passes of the draft beside \d+ of the model",
        " ".join(err.split()),
    )


def test_a_stop_text_among_drafts_ends_the_text(
    with_codas: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, _ = lines(capfd, str(with_codas))
    stop = str(plain[0]["text"])[5:8]
    expected, _ = lines(capfd, str(with_codas), "--stop", stop)
    found, _ = lines(capfd, str(with_codas), "--stop", stop, "--draft", PAIRS, "--draft-tokens", "4")
    assert expected[0]["finish_reason"] == "stop"
    for one, other in zip(expected, found, strict=True):
        assert [one[name] for name in ("text", "tokens", "finish_reason")] == [
            other[name] for name in ("text", "tokens", "finish_reason")
        ]


@pytest.mark.thorough
def test_a_seed_draws_the_same_whatever_else_is_drawn(
    with_codas: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drawing = (str(with_codas), "--draft", PAIRS, "--temperature", "0.8", "--seed", "5")
    plain, _ = lines(capfd, str(with_codas), *drawing[3:])
    for ways in (["--draft-tokens", "2"], ["--draft-tokens", "3", "--max-batch", "1"], []):
        found, _ = lines(capfd, *drawing, *ways)
        assert [line["tokens"] for line in found] == [line["tokens"] for line in plain]
        assert not ways or all(int(str(line["drafted"])) > 0 for line in found)


def test_drafts_of_other_weights_are_refused(
    with_codas: Path, tiny_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "of-another.yaml"
    recipe.write_text(
        f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  - pair: {{layers: '1:3'}}\n"
    )
    assert main(["generate", str(with_codas), "--prompt", "a", "--draft", str(recipe)]) == 1
    assert (
        f"and a draft is a program over the weights of the model that verifies, {with_codas};"
        in capfd.readouterr().err
    )
    lowrank = "{layers: '0:4', weights: [up], keep: 0.5, method: whitened}"
    recipe.write_text(f"surgeon: 1\nmodel: {with_codas}\noperations:\n  - lowrank: {lowrank}\n")
    assert main(["generate", str(with_codas), "--prompt", "a", "--draft", str(recipe)]) == 1
    assert "draft without them, or with low ranks that go by no text" in capfd.readouterr().err
    assert main(["generate", str(with_codas), "--prompt", "a", "--draft", str(tiny_checkpoint)]) == 1
    assert (
        "is a folder, and a draft is a program over the weights of the model that verifies"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--draft", "codas"],
            "error: there are no drafts 'codas'; give .* variant of the model .lp, .*; where it runs, lookup .*",
        ),
        (["--draft", "upper-bound"], "error: there are no drafts 'upper-bound'; .*"),
        (["--draft", "A0 F0 A9 F9"], "error: the draft cannot run beside its model: .*A9.*"),
        (["--draft", "A0 F0 >"], "error: the draft cannot run beside its model: .*"),
        (["--draft", "A0 F0", "--draft-tokens", "90"], "error: --draft-tokens 90 .*"),
        (
            ["--draft-tokens", "3"],
            "error: --draft-tokens says how many tokens to draft; say with what, too: a program, or coda",
        ),
        (
            ["--draft", "coda", "--program", "A0 F0"],
            "error: codas draft for the checkpoint's own program; leave the .*",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_together(
    options: list[str], message: str, with_codas: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(with_codas), "--prompt", "a", *options]) == 1
    assert re.fullmatch(message + "\n", capfd.readouterr().err)


def test_a_checkpoint_without_codas(tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tiny_checkpoint), "--prompt", "a", "--draft", "coda"]) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"error: {tiny_checkpoint} has no codas")
    assert "surgeon heal --racks" in err


def test_a_service_counts_what_it_drafts(with_codas: Path) -> None:
    """On two ranks, with memory for the coda, too; as /metrics shows it."""
    counted = counts_of(
        with_codas, ServiceOptions(RankOptions(2), max_batch=2, draft="coda", draft_tokens=4)
    )
    assert counted["drafting_passes"] > 4
    assert counted["accepted"] < counted["drafted"]
    # Without a number the clock decides how many there are.
    found = counts_of(with_codas, ServiceOptions(max_batch=2, draft=PAIRS))
    assert found["drafted"] >= found["drafting_passes"]


def counts_of(folder: Path, options: ServiceOptions) -> dict[str, float]:
    """What /metrics shows of drafts when a text has been written."""
    with Service(folder, options) as service:
        last = list(service.submit([5, 6, 7], Sampling(max_new_tokens=20, ignore_end=True)))[-1]
        found = text_string_to_metric_families(generate_latest(Meters(service).registry).decode())
        samples = {sample.name: sample.value for family in found for sample in family.samples}
    assert last.usage.accepted <= last.usage.drafted
    assert samples["surgeon_drafted_total"] == last.usage.drafted
    assert samples["surgeon_accepted_total"] == last.usage.accepted
    assert samples["surgeon_new_tokens_total"] == 20
    return {
        name: samples[f"surgeon_{name}_total"] for name in ("drafted", "accepted", "drafting_passes")
    }
