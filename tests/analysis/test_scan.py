"""A scan's numbers against a plain loop, and that it ends the same whatever happens on the way."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.nn import functional

import surgeon
from surgeon.analysis.scan import COLUMNS, PERMUTATION_COLUMNS, SCANNED, permutation_seeds
from surgeon.analysis.subject import most_important
from surgeon.language.operations.base import HEATMAPS
from surgeon.language.operations.shuffle import permutation
from surgeon.language.program import Program
from surgeon.models.edit import program_of
from surgeon.models.families import family_of
from surgeon.quality.data import Windows
from surgeon.training.scratch.tracks import track_program
from tests.analysis.scanning import LAYERS, plain_nll, run, scan_cells
from tests.reference import Reference
from tests.selection import one_in
from tests.tiny_models import tiny_model

WINDOWS, TOKENS = 5, 12


def plain_loop(
    model: Any, ids: torch.Tensor, program: Program, units: Any = None
) -> tuple[float, float]:
    """Perplexity and divergence from the full logits of an edited model."""
    with torch.no_grad():
        original = model(input_ids=ids, use_cache=False).logits[:, :-1]
        if program.nodes:
            surgeon.edit(model, program, factors=units)
            changed = model(input_ids=ids, use_cache=False).logits[:, :-1]
            surgeon.restore(model)
        else:
            reference = Reference(model)
            changed = reference.logits(reference.embed(ids))[:, :-1]
    nll = functional.cross_entropy(changed.flatten(0, 1), ids[:, 1:].flatten())
    q, p = (logits.flatten(0, 1).log_softmax(-1) for logits in (changed, original))
    kl = functional.kl_div(q, p, reduction="batchmean", log_target=True)
    return math.exp(float(nll)), float(kl)


def nll_of(program: Program | None, ids: torch.Tensor) -> list[float]:
    """Mean negative log-likelihood of each window under a program, or the unedited one."""
    return plain_nll(tiny_model("llama", LAYERS), ids, program or Program.dense(LAYERS))


def t_interval(nll: list[float]) -> list[float]:
    """The 95% interval of exp of a mean, by the textbook."""
    mean, error = statistics.fmean(nll), statistics.stdev(nll) / len(nll) ** 0.5
    factor = {5: 2.776445}[len(nll)]
    return [math.exp(mean - factor * error), math.exp(mean + factor * error)]


@pytest.mark.parametrize("family", one_in(2, ["llama", "qwen3", "opt", "gpt_neox"], 1))
def test_a_scan_equals_a_plain_loop(family: str, windows: Windows, tmp_path: Path) -> None:
    model = tiny_model(family, LAYERS)
    result = run(tmp_path, windows, model, list(HEATMAPS), seed=3)
    steps = family_of(model.config).steps_per_layer
    cells = scan_cells(
        list(HEATMAPS), LAYERS, 3, steps, family_of(model.config).layer_shapes(model.config)
    )
    # Others come to all.
    shares = 2 + 4 if family_of(model.config).units(model.config)["kv_heads"] == 2 else 3 + 4
    assert len(result.cells) == len(cells) == 11 * 10 + LAYERS * (5 + shares)
    units = most_important(model, [cell.program for cell in cells], windows)
    for row, cell in zip(result.cells.itertuples(index=False), cells, strict=True):
        assert (row.operation, row.first, row.last) == (cell.operation, cell.first, cell.last)
        given = [value for value in (row.keep, row.heads, row.neurons) if not math.isnan(value)]
        assert given == ([] if cell.value is None else [cell.value])
        perplexity, divergence = plain_loop(model, windows.ids, cell.program, units)
        assert row.perplexity == pytest.approx(perplexity, rel=1e-5), cell
        assert row.divergence == pytest.approx(divergence, rel=1e-5, abs=2e-6), cell
    dense = Program.dense(LAYERS, steps)
    assert result.base_perplexity == pytest.approx(plain_loop(model, windows.ids, dense)[0], rel=1e-5)
    assert isinstance(surgeon.models.edit.decoder_layers(model), torch.nn.ModuleList), (
        "the model is left as it was"
    )


def test_what_is_written(windows: Windows, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    result = run(folder, windows, seed=7)
    table = pd.read_csv(folder / "cells.csv")
    header = (folder / "cells.csv").read_text().splitlines()[0]
    assert header == (
        "operation,first,last,perplexity,perplexity_low,perplexity_high,divergence,divergence_low,divergence_high,"
        "greedy_acceptance,tokens,sublayers_run"
    )
    assert header == ",".join(column for column in COLUMNS if column != "sampled_acceptance"), (
        "which was not asked for"
    )
    assert (table["tokens"] == WINDOWS * (TOKENS - 1)).all()
    record = json.loads((folder / "scan.json").read_text())
    assert record["model"] == "tiny"
    assert record["base_perplexity"] == result.base_perplexity
    ran, loop = record["sublayers_run"], record["sublayers_of_a_loop"]
    assert ran["base"] + table["sublayers_run"].sum() == ran["total"] < loop["total"]
    assert loop["prune"] == sum(
        2 * (LAYERS - (row.last - row.first + 1)) for row in table.itertuples()
    ) / len(SCANNED)
    expected = {
        "operations": list(SCANNED),
        "layers": "0:4",
        "every": 1,
        "max_length": 4,
        "permutations": 1,
    }
    assert expected.items() <= record.items()
    assert record["screen"] is None
    assert "earlier" not in record
    assert record["base_interval"] == pytest.approx(t_interval(nll_of(None, windows.ids)), rel=1e-5)
    orders = pd.read_csv(folder / "permutations.csv")
    assert orders.columns.tolist() == PERMUTATION_COLUMNS
    assert set(orders["operation"]) == {"shuffle"}
    assert set(orders["seed"]) == {7}
    whole = orders.set_index(["first", "last"]).loc[(0, 3)]
    assert whole["order"] == " ".join(map(str, permutation(range(4), 7)))
    row = table[(table["operation"] == "shuffle") & (table["last"] == 3)].iloc[0]
    assert (whole["perplexity"], whole["divergence"]) == (row["perplexity"], row["divergence"])
    assert not list(folder.glob(".*")), "nothing half-written is left"


def test_intervals_are_students_over_windows(windows: Windows, tmp_path: Path) -> None:
    table = run(tmp_path, windows, operations=["prune-mlp"]).cells.set_index(["first", "last"])
    row = table.loc[(1, 2)]
    expected = t_interval(nll_of(Program.parse("A0 F0 A1 A2 A3 F3"), windows.ids))
    assert [row["perplexity_low"], row["perplexity_high"]] == pytest.approx(expected, rel=1e-5)
    assert row["divergence_low"] < row["divergence"] < row["divergence_high"]


def test_one_window_has_no_interval(windows: Windows, tmp_path: Path) -> None:
    one = Windows(windows.ids[:1], "random", "digest")
    result = run(tmp_path, one, operations=["prune"])
    lines = (tmp_path / "cells.csv").read_text().splitlines()
    assert all(line.split(",")[4:6] == ["", ""] == line.split(",")[7:9] for line in lines[1:])
    assert result.record["base_interval"] is None


def test_a_cell_of_shuffle_is_the_mean_over_its_permutations(windows: Windows, tmp_path: Path) -> None:
    table = run(tmp_path, windows, operations=["shuffle"], permutations=3, seed=5).cells.set_index(
        ["first", "last"]
    )
    orders = pd.read_csv(tmp_path / "permutations.csv").set_index(["first", "last", "seed"])
    assert len(orders) == 3 * 10
    seeds = permutation_seeds(5, 3)
    nll = []
    for seed in seeds:
        order = permutation(range(0, 4), seed)
        nll.append(nll_of(Program.parse(" ".join(f"A{k} F{k}" for k in order)), windows.ids))
        here = orders.loc[(0, 3, seed)]
        assert here["order"] == " ".join(map(str, order))
        assert here["perplexity"] == pytest.approx(math.exp(statistics.fmean(nll[-1])), rel=1e-5)
        assert here["tokens"] == WINDOWS * (TOKENS - 1)
    per_window = [statistics.fmean(values) for values in zip(*nll, strict=True)]
    row = table.loc[(0, 3)]
    assert len(set(orders.loc[(0, 3), "order"])) > 1
    assert row["perplexity"] == pytest.approx(math.exp(statistics.fmean(per_window)), rel=1e-5)
    assert [row["perplexity_low"], row["perplexity_high"]] == pytest.approx(
        t_interval(per_window), rel=1e-5
    )
    assert row["divergence"] == pytest.approx(orders.loc[(0, 3), "divergence"].mean(), rel=1e-6)


def test_the_count_of_sublayers_is_what_ran(windows: Windows, tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    calls = []
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            module.register_forward_hook(lambda *_: calls.append(1))
    operations = [
        "prune",
        "shuffle",
        "parallel",
        "2-parallel",
        "lp",
        "ladder",
        "prune-attention",
        "prune-mlp",
    ]
    result = run(tmp_path, windows, model, operations)
    assert len(calls) == result.record["sublayers_run"]["total"]


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_windows_in_parts_give_the_same_numbers(batch: int, windows: Windows, tmp_path: Path) -> None:
    whole, parts = (
        run(tmp_path / "whole", windows).cells,
        run(tmp_path / "parts", windows, batch=batch).cells,
    )
    pd.testing.assert_frame_equal(whole, parts, rtol=1e-6, atol=1e-6)


def test_a_model_that_is_no_good_itself_is_refused(windows: Windows, tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    model.model.layers[2].mlp.down_proj.weight.data[3, 4] = math.nan
    with pytest.raises(
        ValueError, match="NaN or infinity appears first in F2; check that layer's weights"
    ):
        run(tmp_path, windows, model)
    model.model.embed_tokens.weight.data.fill_(math.inf)
    with pytest.raises(ValueError, match="embedding's weights"):
        run(tmp_path, windows, model)


def test_a_cell_that_overflows_is_infinite(windows: Windows, tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)

    def explode(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        # Anything that is not layer 3 on the unedited stream gives infinity, as a 16-bit overflow does.
        stream = inputs[0]
        expected.append(stream.clone()) if not expected else None
        return output if torch.equal(stream, expected[0]) else output * math.inf

    expected: list[torch.Tensor] = []
    model.model.layers[3].mlp.register_forward_hook(explode)
    result = run(tmp_path, windows, model, ["prune"])
    table = result.cells.set_index(["first", "last"])
    assert math.isfinite(result.base_perplexity)
    assert table.loc[(1, 1), "perplexity"] == math.inf == table.loc[(1, 1), "divergence"]
    assert math.isfinite(table.loc[(3, 3), "perplexity"])
    assert (
        pd.read_csv(tmp_path / "cells.csv").set_index(["first", "last"]).loc[(1, 1), "perplexity"]
        == math.inf
    )
    run(tmp_path, windows, model, ["prune"])  # and is not measured again for being no number


def test_weights_of_no_layer_are_refused(windows: Windows, tmp_path: Path) -> None:
    model = surgeon.edit(tiny_model("llama", LAYERS), "A0 F0 A1~A2 F1~F2 A3 F3")
    with pytest.raises(ValueError, match="runs A1~A2, whose weights are those of no layer"):
        run(tmp_path, windows, model)
    model = surgeon.edit(tiny_model("llama", LAYERS), "A0 >F0 A1 >F1 A2 >F2 A3 >F3")
    with pytest.raises(ValueError, match="none of these layers whole and in order"):
        run(tmp_path, windows, model)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_native_tracks_are_scanned_from_their_own_program(
    family: str, windows: Windows, tmp_path: Path
) -> None:
    """Each stretch of layers within a track of a block, against full logits of edited models."""
    model = tiny_model(family, LAYERS)
    own, _ = track_program(2, count=2, depth=2, steps_per_layer=family_of(model.config).steps_per_layer)
    surgeon.edit(model, own)
    result = run(tmp_path, windows, model, ["shuffle", "prune", "2-parallel"])
    assert program_of(model) == own
    assert result.record["program"] == str(own)
    base = surgeon.restore(model)
    expected, _ = plain_loop(base, windows.ids, own)
    assert result.base_perplexity == pytest.approx(expected, rel=1e-5)
    changed = {
        "llama": {
            (0, 0): "{A1 F1 | A2 F2 A3 F3}",
            (0, 1): "{A2 F2 A3 F3}",
            (1, 1): "{A0 F0 | A2 F2 A3 F3}",
            (2, 2): "{A0 F0 A1 F1 | A3 F3}",
            (2, 3): "{A0 F0 A1 F1}",
            (3, 3): "{A0 F0 A1 F1 | A2 F2}",
        },
        "gpt_neox": {(0, 0): "{[A1 F1] | [A2 F2] [A3 F3]}", (2, 3): "{[A0 F0] [A1 F1]}"},
    }[family]
    table = result.cells.set_index(["operation", "first", "last"])
    assert len(table.loc["prune"]) == len(table.loc["shuffle"]) == 6
    with torch.no_grad():
        reference = (
            surgeon.edit(base, own)(input_ids=windows.ids, use_cache=False)
            .logits[:, :-1]
            .log_softmax(-1)
        )
    for (first, last), program in changed.items():
        with torch.no_grad():
            logits = surgeon.edit(base, program)(input_ids=windows.ids, use_cache=False).logits[:, :-1]
        nll = functional.cross_entropy(logits.flatten(0, 1), windows.ids[:, 1:].flatten())
        kl = functional.kl_div(
            logits.flatten(0, 1).log_softmax(-1),
            reference.flatten(0, 1),
            reduction="batchmean",
            log_target=True,
        )
        assert table.loc[("prune", first, last), "perplexity"] == pytest.approx(
            math.exp(float(nll)), rel=1e-5
        )
        assert table.loc[("prune", first, last), "divergence"] == pytest.approx(
            float(kl), rel=1e-5, abs=2e-6
        )
