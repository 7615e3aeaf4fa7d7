"""A spectrum's numbers against plain computations, and that it ends the same whatever happens on the way."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import surgeon
from surgeon.analysis import dense_run, measure
from surgeon.analysis.matrices import parse_ranks
from surgeon.analysis.spectrum import Spectrum, request, spectrum
from surgeon.analysis.spectrum_journal import JOURNAL
from surgeon.quality.data import Windows
from surgeon.quality.head import OutputHead
from tests.models import HEADS, HIDDEN, KV_HEADS, VOCABULARY, tiny_model

FAMILIES = ["llama", "gpt2", "phi3", "gpt_neox", "gemma2"]
LAYERS = 3
Array = NDArray[np.float64]


def text(windows: int, tokens: int, seed: int) -> Windows:
    ids = torch.randint(VOCABULARY, (windows, tokens), generator=torch.Generator().manual_seed(seed))
    return Windows(ids, "random", f"digest {windows} x {tokens}, {seed}")


MEASURED, CALIBRATION = text(5, 12, 5), text(9, 12, 6)


def run(
    folder: Path,
    model: Any,
    *,
    ranks: str = "1/4,1/2",
    measured: Windows = MEASURED,
    calibration: Windows = CALIBRATION,
    weights_hash: str = "weights",
    record: dict[str, Any] | None = None,
    **wanted: Any,
) -> Spectrum:
    asked = request(model.config, ranks=parse_ranks(ranks) if ranks else (), **wanted)
    return spectrum(model, measured, calibration, folder, asked, weights_hash=weights_hash, record=record)


def rows_of(place: int, counts: list[int]) -> list[int]:
    start = sum(counts[:place])
    return list(range(start, start + counts[place]))


def places(family: str, model: Any, layer: int) -> dict[str, tuple[nn.Module, list[int] | None, bool]]:
    """By role, found by hand: the module, the output features of it that are this role's, whether it is transposed."""
    if family == "gpt2":
        block = model.transformer.h[layer]
        packed = {role: (block.attn.c_attn, rows_of(i, [HIDDEN] * 3), True) for i, role in enumerate("qkv")}
        others = {"o": block.attn.c_proj, "up": block.mlp.c_fc, "down": block.mlp.c_proj}
        return packed | {role: (module, None, True) for role, module in others.items()}
    if family == "gpt_neox":
        block, width = model.gpt_neox.layers[layer], HIDDEN // HEADS
        heads = {
            role: [3 * width * head + width * i + j for head in range(HEADS) for j in range(width)]
            for i, role in enumerate("qkv")
        }
        packed = {role: (block.attention.query_key_value, rows, False) for role, rows in heads.items()}
        others = {"o": block.attention.dense, "up": block.mlp.dense_h_to_4h, "down": block.mlp.dense_4h_to_h}
        return packed | {role: (module, None, False) for role, module in others.items()}
    block = model.model.layers[layer]
    found: dict[str, tuple[nn.Module, list[int] | None, bool]] = {}
    if family == "phi3":
        key = HIDDEN * KV_HEADS // HEADS
        for i, role in enumerate("qkv"):
            found[role] = (block.self_attn.qkv_proj, rows_of(i, [HIDDEN, key, key]), False)
        found["o"] = (block.self_attn.o_proj, None, False)
        for i, role in enumerate(("gate", "up")):
            found[role] = (block.mlp.gate_up_proj, rows_of(i, [48, 48]), False)
        return found | {"down": (block.mlp.down_proj, None, False)}
    found = {role: (getattr(block.self_attn, f"{role}_proj"), None, False) for role in "qkvo"}
    return found | {role: (getattr(block.mlp, f"{role}_proj"), None, False) for role in ("gate", "up", "down")}


def matrix_of(place: tuple[nn.Module, list[int] | None, bool]) -> Array:
    module, rows, transposed = place
    whole = module.weight.detach().double().numpy()
    whole = whole.T if transposed else whole
    return whole if rows is None else whole[rows]


def overwrite(place: tuple[nn.Module, list[int] | None, bool], values: Array) -> Callable[[], None]:
    """Put another matrix there; the function given back undoes it."""
    module, rows, transposed = place
    before = module.weight.detach().clone()
    whole = before.T.clone() if transposed else before.clone()
    whole[slice(None) if rows is None else rows] = torch.from_numpy(values).float()
    module.weight.data.copy_(whole.T if transposed else whole)
    return lambda: module.weight.data.copy_(before)


def inputs_of(model: Any, modules: list[nn.Module], ids: Tensor) -> list[Array]:
    """What modules get while the model runs on its own, (tokens, in)."""
    seen: dict[nn.Module, Array] = {}

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen[module] = given[0].double().flatten(0, 1).numpy()

    hooks = [module.register_forward_pre_hook(keep) for module in set(modules)]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [seen[module] for module in modules]


def written_out(matrix: Array, inputs: Array, rank: int) -> Array:
    """U_r diag(s_r) V_r' inv(S)."""
    factor = np.linalg.cholesky(inputs.T @ inputs)
    left, values, right = np.linalg.svd(matrix @ factor, full_matrices=False)
    truncated: Array = left[:, :rank] * values[:rank] @ right[:rank] @ np.linalg.inv(factor)
    return truncated


def logits_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[:, :-1].double()
    return logits.flatten(0, 1).log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_damage_is_that_of_a_copy_changed_by_hand(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, LAYERS)
    model.save_pretrained(tmp_path / "model")
    copy = surgeon.load(tmp_path / "model")
    result = run(tmp_path / "out", model)
    original, targets = logits_of(copy, MEASURED.ids), MEASURED.ids[:, 1:].flatten()
    table = result.damage.set_index(["layer", "weight", "rank"])
    spectra = result.matrices.set_index(["layer", "weight"])
    checked = 0
    for layer in range(LAYERS):
        found = places(family, copy, layer)
        inputs = inputs_of(copy, [module for module, _, _ in found.values()], CALIBRATION.ids)
        for (role, place), samples in zip(found.items(), inputs, strict=True):
            matrix = matrix_of(place)
            assert (spectra.loc[(layer, role), ["out_features", "in_features"]] == matrix.shape).all()
            for rank in (min(matrix.shape) // 4, min(matrix.shape) // 2):
                undo = overwrite(place, written_out(matrix, samples, rank))
                changed = logits_of(copy, MEASURED.ids)
                undo()
                row = table.loc[(layer, role, rank)]
                nll = functional.nll_loss(changed, targets)
                divergence = functional.kl_div(changed, original, reduction="batchmean", log_target=True)
                assert row["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5), (layer, role, rank)
                assert row["divergence"] == pytest.approx(float(divergence), rel=1e-4, abs=2e-6), (layer, role, rank)
                assert row["kept"] == pytest.approx(sum(matrix.shape) * rank / matrix.size)
                checked += 1
    assert checked == len(table) == LAYERS * len(found) * 2
    nll = functional.nll_loss(original, targets)
    assert result.record["base_perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)
    assert (result.damage["tokens"] == 5 * 11).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_singular_values_are_those_of_numpy(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, LAYERS)
    result = run(tmp_path, model, ranks="")
    values = result.values.set_index(["layer", "weight", "method"])["value"]
    spectra = result.matrices.set_index(["layer", "weight"])
    for layer in range(LAYERS):
        found = places(family, model, layer)
        inputs = inputs_of(model, [module for module, _, _ in found.values()], CALIBRATION.ids)
        for (role, place), samples in zip(found.items(), inputs, strict=True):
            matrix, row = matrix_of(place), spectra.loc[(layer, role)]
            factor = np.linalg.cholesky(samples.T @ samples)
            assert row["factor"] == "cholesky"
            for method, weighed, ending in (("plain", matrix, ""), ("whitened", matrix @ factor, "_whitened")):
                expected = np.linalg.svd(weighed, compute_uv=False)
                np.testing.assert_allclose(values[layer, role, method], expected, rtol=1e-5)
                energy = np.cumsum(expected**2) / (expected**2).sum()
                for percent in (90, 95, 99):
                    rank = int((energy < percent / 100).sum()) + 1
                    assert row[f"rank{percent}{ending}"] == rank
                    assert row[f"kept{percent}{ending}"] == pytest.approx(sum(matrix.shape) * rank / matrix.size)
            # The loss of the outputs on the calibration text is what the values that were left out say.
            for rank in (1, min(matrix.shape) // 2):
                lost = samples @ (matrix - written_out(matrix, samples, rank)).T
                dropped = values[layer, role, "whitened"].to_numpy()[rank:]
                assert np.linalg.norm(lost) == pytest.approx(np.sqrt((dropped**2).sum()), rel=1e-5)
    assert len(result.damage) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "journal.jsonl", "spectrum.csv", "singular_values.csv", "spectrum.json"
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("calibration", [CALIBRATION, text(1, 7, 6)], ids=["enough", "too little"])
def test_full_rank_is_the_original(family: str, calibration: Windows, tmp_path: Path) -> None:
    model = tiny_model(family, LAYERS)
    result = run(tmp_path, model, ranks="1/1", calibration=calibration)
    assert (result.damage["rank"] == result.damage["full_rank"]).all()
    assert result.damage["divergence"].max() < 2e-6
    base = result.record["base_perplexity"]
    assert np.abs(result.damage["perplexity"] / base - 1).max() < 2e-6
    expected = {"cholesky"} if calibration is CALIBRATION else {"eigenvalues"}
    assert set(result.matrices["factor"]) == expected
    assert (result.matrices["input_rank"] <= calibration.ids.numel()).all()


def test_plain_truncation(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    damage = run(tmp_path, model, method="plain", ranks="8").damage.set_index(["layer", "weight"])
    assert set(damage["method"]) == {"plain"}
    place = places("llama", model, 1)["up"]
    left, values, right = np.linalg.svd(matrix_of(place), full_matrices=False)
    original = logits_of(model, MEASURED.ids)
    overwrite(place, left[:, :8] * values[:8] @ right[:8])
    divergence = functional.kl_div(logits_of(model, MEASURED.ids), original, reduction="batchmean", log_target=True)
    assert damage.loc[(1, "up"), "divergence"] == pytest.approx(float(divergence), rel=1e-4)


def test_intervals_and_the_record(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    result = run(tmp_path, model, layers=range(1, 3), weights=["up", "q"], ranks="0.5,4", record={"model": "tiny"})
    row = result.damage.iloc[0]
    lines = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()]
    measured = next(line for line in lines if "rank" in line)
    assert (row["layer"], row["weight"], row["rank"]) == (1, "q", 16) == (
        measured["layer"], measured["weight"], measured["rank"]
    )  # fmt: skip
    for name, convert in (("nll", math.exp), ("divergence", float)):
        per_window = np.array(measured[name])
        half = 2.7764451 * per_window.std(ddof=1) / 5**0.5  # Student's t, 4 degrees of freedom, 97.5%
        column = "perplexity" if name == "nll" else name
        found = [row[column], row[f"{column}_low"], row[f"{column}_high"]]
        ends = per_window.mean(), per_window.mean() - half, per_window.mean() + half
        assert found == pytest.approx([max(0.0, convert(end)) for end in ends], rel=1e-6)
    record = json.loads((tmp_path / "spectrum.json").read_text())
    assert record["model"] == "tiny"
    assert (record["layers"], record["weights"], record["ranks"]) == ("1:3", ["q", "up"], ["1/2", "4"])
    low, high = record["base_interval"]
    assert low < record["base_perplexity"] < high
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "damage.csv"), result.damage, check_dtype=False, rtol=1e-8)
    assert result.damage["rank"].tolist() == [16, 4] * 4


def test_layers_before_the_changed_one_run_once(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    calls = []
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            module.register_forward_hook(lambda *_: calls.append(1))
    run(tmp_path, model)
    nodes = 2 * LAYERS
    truncations = sum(2 * (4 * (nodes - 2 * layer) + 3 * (nodes - 2 * layer - 1)) for layer in range(LAYERS))
    passes = 3 * nodes  # what is predicted, the walk on the same text, and that on the calibration text
    assert len(calls) == truncations + passes


def test_windows_in_parts_give_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma2", LAYERS)
    whole = run(tmp_path / "whole", model)
    monkeypatch.setattr(measure, "TOKENS_AT_ONCE", {"cpu": 24})
    parts = run(tmp_path / "parts", model)
    assert len(dense_run.DenseRun(model, MEASURED.ids)._parts) == 3
    pd.testing.assert_frame_equal(whole.matrices, parts.matrices, rtol=1e-5)
    pd.testing.assert_frame_equal(whole.damage, parts.damage, rtol=1e-4, atol=2e-6)


def contents(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in ("spectrum.csv", "singular_values.csv", "damage.csv")}


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 1.0])
def test_a_killed_spectrum_goes_on(share: float, tmp_path: Path) -> None:
    model = tiny_model("phi3", LAYERS)
    run(tmp_path / "whole", model)
    whole = (tmp_path / "whole" / JOURNAL).read_bytes()
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / JOURNAL).write_bytes(whole[: int(share * len(whole))])
    run(cut, model)
    assert contents(cut) == contents(tmp_path / "whole")
    assert (cut / JOURNAL).read_bytes() == whole


def test_what_is_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", LAYERS)
    run(tmp_path, model, ranks="", layers=range(2))
    run(tmp_path, model, ranks="1/4", layers=range(2))
    run(tmp_path, model, ranks="1/4,1/2", layers=range(2))
    run(tmp_path, model, ranks="1/4", method="plain")
    lines = (tmp_path / JOURNAL).read_text().splitlines()
    assert len(lines) == len(set(lines)) == 2 + 7 * 3 + 7 * 2 * 2 + 7 * 3
    assert pd.read_csv(tmp_path / "damage.csv")["method"].unique().tolist() == ["plain"]
    monkeypatch.setattr(OutputHead, "reference", None)
    monkeypatch.setattr(OutputHead, "compare", None)
    again = run(tmp_path, model, ranks="1/2,1/4", layers=range(1))
    assert (tmp_path / JOURNAL).read_text().splitlines() == lines
    assert again.damage["rank"].tolist()[:2] == [16, 8]


def state(model: Any) -> dict[str, tuple[int, Tensor]]:
    return {name: (id(parameter), parameter.detach().clone()) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fails_after", [None, 0, 9])
def test_the_model_is_left_as_it_was(
    family: str, fails_after: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, LAYERS)
    before = state(model)
    count = 0
    compare = OutputHead.compare

    def stop(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if fails_after is not None and count > fails_after:
            raise KeyboardInterrupt
        return compare(*arguments)

    monkeypatch.setattr(OutputHead, "compare", stop)
    if fails_after is None:
        run(tmp_path, model)
    else:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, model)
        done = [line for line in (tmp_path / JOURNAL).read_text().splitlines() if "divergence" in line]
        assert len(done) == fails_after, "what was measured before is kept"
    after = state(model)
    assert list(before) == list(after)
    for name, (identity, values) in before.items():
        assert after[name][0] == identity
        assert torch.equal(after[name][1], values)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights_hash": "other"}, "another model (hash of its weights): weights, now other"),
        ({"measured": text(5, 12, 8)}, "another text (hash of its tokens): digest 5 x"),
        ({"calibration": text(8, 12, 6)}, "another calibration text (hash of its tokens): digest 9 x"),
        ({"measured": text(5, 11, 5)}, "another text"),
    ],
)
def test_a_folder_of_something_else(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    run(tmp_path, model, ranks="")
    before = contents_of(tmp_path)
    with pytest.raises(ValueError, match=f"holds a spectrum of {re.escape(message)}.*; use another output folder"):
        run(tmp_path, model, ranks="", **changed)
    assert contents_of(tmp_path) == before


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_of_another_precision_or_of_a_scan(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    run(tmp_path, model, ranks="")
    with pytest.raises(ValueError, match="another dtype to compute in: float32, now float64"):
        run(tmp_path, model.double(), ranks="")
    (tmp_path / JOURNAL).write_text('{"scan":{"window":12}}\n')
    with pytest.raises(ValueError, match="was not written by surgeon spectrum"):
        run(tmp_path, model, ranks="")


def test_a_damaged_journal(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    run(tmp_path, model, ranks="")
    path = tmp_path / JOURNAL
    lines = path.read_text().splitlines()
    for damage in ('{"layer":0,"weight":"q"}', "{"):
        path.write_text("\n".join([*lines[:3], damage, *lines[4:], ""]))
        with pytest.raises(ValueError, match="damaged in line 4; delete the file"):
            run(tmp_path, model, ranks="")


def llama_with(change: Callable[[Any], None]) -> Any:
    model = tiny_model("llama", LAYERS)
    with torch.no_grad():
        change(model)
    return model


def nan_in_a_weight(model: Any) -> None:
    model.model.layers[2].mlp.up_proj.weight[3, 4] = math.nan


def infinity_in_a_norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.weight[3] = math.inf


def overflow_of_an_output(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.fill_(3e38)


def nan_in_the_embedding(model: Any) -> None:
    model.model.embed_tokens.weight[:] = math.nan


def nan_in_the_head(model: Any) -> None:
    model.lm_head.weight[5, 5] = math.nan


class Wrapped(nn.Linear):
    """As libraries wrap or quantise a linear module."""


def a_wrapped_module(model: Any) -> None:
    model.model.layers[2].self_attn.k_proj = Wrapped(HIDDEN, HIDDEN // 2)


def an_offloaded_module(model: Any) -> None:
    model.model.layers[2].self_attn.k_proj.to("meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nan_in_a_weight, "up of layer 2 holds NaN or infinity"),
        (infinity_in_a_norm, "the inputs of gate of layer 1 hold NaN or infinity"),
        (overflow_of_an_output, "appears first in F1; check that layer's weights"),
        (nan_in_the_embedding, "embedded tokens are not finite"),
        (nan_in_the_head, "check the final norm and the output head"),
        (a_wrapped_module, "k of layer 2 is a Wrapped, not a plain linear module"),
        (an_offloaded_module, "k of layer 2 is not in memory"),
    ],
)
def test_models_that_cannot_be_measured(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(tmp_path, llama_with(change))


def test_bad_requests(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    with pytest.raises(ValueError, match="layers 1:4 are out of range: the model's layers are 0:3"):
        run(tmp_path, model, layers=range(1, 4))
    with pytest.raises(ValueError, match="Llama has no weight 'gat'; did you mean 'gate'?"):
        run(tmp_path, model, weights=["q", "gat"])
    with pytest.raises(ValueError, match="no weight is named"):
        run(tmp_path, model, weights=[])
    with pytest.raises(ValueError, match="GPT-2 has no weight 'gate'; known: q, k, v, o, up, down"):
        run(tmp_path, tiny_model("gpt2", LAYERS), weights=["gate"])
    with pytest.raises(ValueError, match="rank 17 is above the full rank 16 of k of layer 0"):
        run(tmp_path, model, ranks="17")
    with pytest.raises(ValueError, match="no method 'svd'; use whitened or plain"):
        run(tmp_path, model, method="svd")
    with pytest.raises(ValueError, match="runs an edited program"):
        run(tmp_path, surgeon.edit(tiny_model("llama", LAYERS), "A0 F0 A1 F1"))
    assert not (tmp_path / "spectrum.csv").exists()
