"""Folders as they are found: whatever `transformers` computes with, everything else computes with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.analysis.engine.measure import MeasureOptions, measure
from surgeon.analysis.engine.sharing import share
from surgeon.checkpoint.stored import Checkpoint
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.commands.app import main
from surgeon.exports.export import check_exportable
from surgeon.exports.prove import reference_of
from surgeon.language.program import Program, layer_nodes
from surgeon.models.families import family_of
from surgeon.opened import load_streamed, open_model
from surgeon.quality.data import load_windows
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from tests.checkpoint.helpers import load_shipped, logits_of, relative_error, run_export
from tests.runtime.on_ranks import chunked_logits
from tests.selection import case
from tests.stored import (
    configure,
    end_names,
    family_in,
    store,
    tensors_of,
    with_buffers,
    with_copied_head,
    with_generation_config,
    with_head_only,
    with_index,
    with_own_head,
)
from tests.tiny_models import DENSE_FAMILIES, VOCABULARY, tiny_model

IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
STORED: dict[str, Callable[[Path], Path]] = {
    "a head of its own beside tied embeddings": with_own_head,
    "tied embeddings twice": with_copied_head,
    "tied embeddings as the head": with_head_only,
    "old buffers": with_buffers,
    "an index beside the file": with_index,
    "a generation config": with_generation_config,
}
# Families that differ in names and flags, and the ways of storing in which neither plays a part.
DIFFERENT = ("llama", "gemma2", "gpt2", "gpt_neox")
OF_ANY_FAMILY = ("an index beside the file", "a generation config")
CASES = pytest.mark.parametrize(
    ("family", "how"),
    [
        case(family, how, default=how in OF_ANY_FAMILY or (place + at) % 8 == 0)
        for place, how in enumerate(STORED)
        for at, family in enumerate(DIFFERENT[::3] if how in OF_ANY_FAMILY else DENSE_FAMILIES)
    ],
)


def found(folder: Path, family: str, how: str) -> Path:
    """A folder of two layers, stored in this way."""
    tied = {"tie_word_embeddings": True} if "tied" in how else {}
    tiny_model(family, 2, **tied).save_pretrained(folder)
    return STORED[how](folder)


def stock_logits(folder: Path) -> Tensor:
    """What `transformers` computes, in float32."""
    return logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), IDS)


def losses(model: Any) -> Tensor:
    """What a scan measures on the unedited model, by token."""
    dense = Program.dense(2, family_of(model.config).steps_per_layer)
    return torch.cat(
        [part.quality["nll"] for part in measure(model, IDS, share([dense]), MeasureOptions(2))]
    )


@pytest.mark.sampled
@CASES
def test_whatever_transformers_computes_with_everything_computes_with(
    family: str, how: str, tmp_path: Path
) -> None:
    expected = stock_logits(found(tmp_path, family, how))
    loaded = surgeon.load(tmp_path)
    assert torch.equal(logits_of(loaded, IDS), expected)
    torch.testing.assert_close(losses(load_streamed(tmp_path)), losses(loaded), rtol=1e-6, atol=1e-7)

    engine = RankEngine(make_plan(tmp_path, 1, 16), Alone(), torch.device("cpu"))
    assert relative_error(torch.cat(list(chunked_logits(engine, [IDS])), 1), expected) < 1e-4

    original = open_model(tmp_path)
    dense = Program.dense(2, original.family.steps_per_layer)
    proven = reference_of(original, dense)
    assert relative_error(proven.logits, logits_of(loaded, proven.tokens)) < 1e-5


def parallel(steps_per_layer: int) -> str:
    """Both layers side by side, as the fused form stores them."""
    return "[A0 A1] [F0 F1]" if steps_per_layer == 2 else "[A0 F0 A1 F1]"


# Every form with every way of storing and with every family it can have, and every family with every way of storing.
EXPORTED = [
    case(form, how, family, default=half == 0 and form != "plain")
    for place, how in enumerate(STORED)
    for turn, form in enumerate(("plain", "fused", "program"))
    for half in (0, 2)
    # Which is never fused.
    if (form, family := DIFFERENT[(place + turn + half) % 4]) != ("fused", "gemma2")
]


@pytest.mark.sampled
@pytest.mark.parametrize(("form", "how", "family"), EXPORTED)
def test_exports_compute_what_the_edited_model_does(
    form: str, how: str, family: str, tmp_path: Path
) -> None:
    found(tmp_path / "source", family, how)
    model = surgeon.load(tmp_path / "source")
    steps = family_of(model.config).steps_per_layer
    layers = [str(Program(layer_nodes(k, steps))) for k in range(2)]
    programs = {
        "plain": layers[1],
        "fused": parallel(steps),
        "program": f"{{{layers[0]} | {layers[1]}}}",
    }
    run_export(tmp_path / "source", tmp_path / "target", programs[form])
    expected = logits_of(surgeon.edit(model, programs[form]), IDS)
    again = (
        stock_logits(tmp_path / "target")
        if form == "plain"
        else logits_of(load_shipped(tmp_path / "target"), IDS)
    )
    assert relative_error(again, expected) < 1e-4
    loaded = surgeon.load(tmp_path / "target")
    assert relative_error(logits_of(loaded, IDS), expected) < 1e-4
    engine = RankEngine(make_plan(tmp_path / "target", 1, 16), Alone(), torch.device("cpu"))
    assert relative_error(torch.cat(list(chunked_logits(engine, [IDS])), 1), expected) < 1e-4
    # Software that takes config.json at its word finds what it needs.
    written = Checkpoint(tmp_path / "target")
    assert f"{family_of(loaded.config).embedding}.weight" in written
    if "tied" in how:
        assert (
            loaded.config.tie_word_embeddings
            == written.config["tie_word_embeddings"]
            == (how != "a head of its own beside tied embeddings")
        )


def exportable(folder: Path) -> None:
    check_exportable(open_model(folder))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("lacking", [0, 1], ids=["embedding", "head"])
def test_a_missing_end_is_refused_everywhere(family: str, lacking: int, tmp_path: Path) -> None:
    tiny_model(family, 2, tie_word_embeddings=False).save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    name, family_here = end_names(tmp_path)[lacking], family_in(tmp_path)
    path = (family_here.embedding, family_here.head)[lacking]
    store(tmp_path, {key: tensor for key, tensor in tensors.items() if key != name})
    opening: list[Callable[[Path], Any]] = [
        surgeon.load,
        load_streamed,
        exportable,
        lambda f: make_plan(f, 1, 16),
    ]
    for one in opening:
        with pytest.raises(ValueError, match=f"(lacks a|has no) tensor .*{path}"):
            one(tmp_path)
    configure(tmp_path, tie_word_embeddings=True)
    for one in opening:
        one(tmp_path)
    store(tmp_path, {key: tensor for key, tensor in tensors.items() if key not in end_names(tmp_path)})
    for one in opening:
        with pytest.raises(ValueError, match="(lacks a|has no) tensor "):
            one(tmp_path)


@pytest.mark.parametrize("how", STORED)
def test_evaluations_are_of_what_transformers_computes(
    how: str, tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    STORED[how](tiny_checkpoint)
    options = ["--tokens", "128", "--window", "32"]
    assert (
        main(
            [
                "eval",
                str(tiny_checkpoint),
                "--data",
                str(tiny_text),
                "-o",
                str(tmp_path / "out"),
                *options,
            ]
        )
        == 0
    )
    windows = load_windows(open_tokenizer(tiny_checkpoint), str(tiny_text), 32, 128).ids
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(input_ids=windows, labels=windows).loss.exp().item()
    assert json.loads((tmp_path / "out" / "text.json").read_text())["perplexity"] == pytest.approx(
        expected, rel=1e-4
    )
