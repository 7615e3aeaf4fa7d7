"""A whole run: what is trained, what is measured, what is left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch.nn import functional

from surgeon.models.edit import edit, program_of
from surgeon.models.weights import ModuleStore
from surgeon.models.weights.quantised import PackedTensor
from surgeon.opened import open_edited
from surgeon.quality.data import Windows, digest_of
from surgeon.quality.head import HeldOutQuality, logits_of, text_quality
from surgeon.training import run as run_module
from surgeon.training.model import student_of
from surgeon.training.run import Trained, train
from surgeon.training.settings import Distillation, TrainSettings
from surgeon.training.texts import RunOrder, TrainingText, TrainTexts
from tests.checkpoint.helpers import save_source
from tests.quantised import quantise_folder
from tests.tiny_models import tiny_model

PAIRED = "A0 F0 [A1 A2] [F1 F2]"


def windows(count: int, seed: int, tokens: int = 12) -> Windows:
    ids = torch.randint(3, 60, (count, tokens), generator=torch.Generator().manual_seed(seed))
    return Windows(ids, "random", digest_of(ids))


TEXTS = TrainTexts(TrainingText.of(windows(10, 1)), windows(3, 2))


def healed(folder: Path, settings: TrainSettings, texts: TrainTexts = TEXTS, **options: Any) -> Trained:
    student = edit(tiny_model("llama", 3, **options), PAIRED)
    found = train(student, texts, settings, folder, lambda: tiny_model("llama", 3, **options))
    assert found is not None
    return found


@pytest.mark.filterwarnings("ignore:the weights of")
def test_adapters_over_packed_weights_are_those_over_their_numbers(tmp_path: Path) -> None:
    """Step by step and merged, bit for bit; of layers that are averaged, too."""
    save_source(tmp_path / "model", num_layers=4)
    folder, settings = (
        quantise_folder(tmp_path / "model", "gptq"),
        TrainSettings(scope="all", lora=2, steps=2, batch=2),
    )

    def trained(packed: bool) -> dict[str, torch.Tensor]:
        student = student_of(open_edited(folder, "A0 F0 >A1 >F1 A2~A3 F3", tokenizer=False), packed)
        assert sum(isinstance(one, PackedTensor) for one in student.parameters()) == (
            28 if packed else 0
        )
        found = train(student, TEXTS, settings, tmp_path / str(packed))
        assert found is not None
        store = ModuleStore(found.merge())
        return {name: store.tensor(name) for name in store.names()}

    ours, expected = trained(packed=True), trained(packed=False)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_training_is_plain_adamw(tmp_path: Path) -> None:
    """Against a loop of one's own: same windows, same loss, same optimiser, same schedule."""
    epsilon = 1e-4  # where a gradient is almost 0, Adam would make a step of how it was rounded
    settings = TrainSettings(
        steps=4,
        batch=4,
        micro_batch=2,
        learning_rate=1e-2,
        evaluate_every=2,
        save_every=3,
        arguments={"adam_epsilon": epsilon},
    )
    found = healed(tmp_path, settings, dropout=0.0)
    other = edit(tiny_model("llama", 3, dropout=0.0), PAIRED)
    trained = [p for name, p in other.named_parameters() if ".1." in name or ".2." in name]
    optimiser = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0, eps=epsilon)
    order = list(RunOrder(10, 4, 4, 0))
    other.train()
    for step in range(4):
        optimiser.param_groups[0]["lr"] = 1e-2 * (1 - step / 4)
        ids = TEXTS.training.ids[order[4 * step : 4 * step + 4]]
        optimiser.zero_grad()
        for part in ids.split(2):
            logits = other(input_ids=part).logits[:, :-1].flatten(0, 1)
            (functional.cross_entropy(logits, part[:, 1:].flatten()) / 2).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
    for (name, mine), theirs in zip(found.model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6), name


def test_what_a_run_says_of_itself(tmp_path: Path) -> None:
    found = healed(
        tmp_path, TrainSettings(steps=5, batch=4, learning_rate=1e-2, evaluate_every=2, save_every=2)
    )
    ids, original = TEXTS.held_out.ids, logits_of(tiny_model("llama", 3))
    assert found.original == text_quality(original, ids)
    assert found.model.config.to_dict() == edit(tiny_model("llama", 3), PAIRED).config.to_dict()
    assert found.before == text_quality(logits_of(edit(tiny_model("llama", 3), PAIRED)), ids, original)
    after = text_quality(logits_of(found.model.eval()), ids, original)
    assert found.after.divergence == pytest.approx(after.divergence, rel=1e-6)
    assert (found.steps, found.tokens) == (5, 5 * 4 * 12)
    training, held_out = (pd.read_csv(tmp_path / name) for name in ("training.csv", "held_out.csv"))
    assert training["step"].tolist() == [2, 4, 5]
    assert training["tokens"].tolist() == [96, 192, 240]
    assert held_out["step"].tolist() == [0, 2, 4, 5]
    assert held_out["divergence"].iloc[0] == pytest.approx(found.before.divergence)
    assert held_out["perplexity"].iloc[-1] == pytest.approx(found.after.perplexity)
    assert json.loads((tmp_path / "run.json").read_text())["identity"]["data"] == TEXTS.training.digest
    assert list((tmp_path / "tensorboard").iterdir())


def test_it_learns_the_text_by_heart(tmp_path: Path) -> None:
    settings = TrainSettings(
        scope="all", steps=30, batch=5, learning_rate=2e-2, evaluate_every=30, save_every=30
    )
    healed(tmp_path, settings, dropout=0.0)
    losses = pd.read_csv(tmp_path / "training.csv")["loss"]
    assert losses.iloc[-1] < 0.7 * losses.iloc[0]


def test_adapters_are_merged(tmp_path: Path) -> None:
    settings = TrainSettings(
        lora=2, steps=3, batch=4, learning_rate=5e-2, evaluate_every=3, save_every=3
    )
    found = healed(tmp_path, settings, dropout=0.0)
    ids = TEXTS.held_out.ids
    adapted = found.model.eval()(input_ids=ids).logits
    merged = found.merge()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert torch.allclose(merged(input_ids=ids).logits, adapted, atol=1e-5)
    assert not torch.allclose(
        adapted, edit(tiny_model("llama", 3, dropout=0.0), PAIRED)(input_ids=ids).logits, atol=1e-3
    )


def test_patience_ends_a_run_with_the_best_weights(tmp_path: Path) -> None:
    settings = TrainSettings(
        scope="all",
        steps=40,
        batch=4,
        learning_rate=0.3,
        schedule="constant",
        evaluate_every=2,
        patience=2,
    )
    found = healed(tmp_path, settings, dropout=0.0)
    assert found.steps < 40
    table = pd.read_csv(tmp_path / "held_out.csv")
    assert found.after.perplexity == pytest.approx(table["perplexity"].iloc[1:].min(), rel=1e-5)


def test_another_run_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrainSettings(steps=1, batch=4)
    healed(tmp_path, settings)
    with pytest.raises(ValueError, match="of another run: its steps was 1, and now it is 2; choose"):
        healed(tmp_path, TrainSettings(steps=2, batch=4))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as accelerate launch says it
    with pytest.raises(ValueError, match="its mixed precision was 'no', and now it is 'bf16'; choose"):
        healed(tmp_path, settings)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="fp16 does nothing on a CPU"):
        healed(tmp_path, settings)


def test_held_out_quality_is_that_of_the_whole_model() -> None:
    """The original's head on its kept stream, against both models' own logits; a trained head, too."""
    original, other = tiny_model("gemma2", 3), tiny_model("gemma2", 3, seed=5)
    held_out = HeldOutQuality(TEXTS.held_out, original)
    expected = text_quality(logits_of(other), TEXTS.held_out.ids, logits_of(original))
    found = held_out.measure(other.train())
    assert found.divergence == pytest.approx(expected.divergence, rel=1e-5)
    assert found.perplexity == pytest.approx(expected.perplexity)
    assert other.training
    assert not HeldOutQuality(TEXTS.held_out, None).measure(other).knows("divergence")
    # Another count, and another end, in each window.
    answers = torch.ones_like(TEXTS.held_out.ids).tril(5)
    expected = text_quality(
        logits_of(other.eval()), TEXTS.held_out.ids, logits_of(original), answers=answers
    )
    found = HeldOutQuality(replace(TEXTS.held_out, answers=answers), original).measure(other)
    assert found.divergence == pytest.approx(expected.divergence, rel=1e-5)
    assert found.tokens == int(answers[:, 1:].sum())


@pytest.mark.parametrize(
    "distillation", [Distillation(), Distillation(kept=20), Distillation(hidden=0.5, text=0.1)]
)
def test_distillation_brings_the_original_back(distillation: Distillation, tmp_path: Path) -> None:
    settings = TrainSettings(
        scope="all",
        distillation=distillation,
        steps=30,
        batch=8,
        learning_rate=5e-3,
        evaluate_every=30,
        save_every=30,
    )
    found = healed(
        tmp_path, settings, TrainTexts(TrainingText.of(windows(64, 1)), TEXTS.held_out), dropout=0.0
    )
    assert found.after.divergence is not None
    assert found.before.divergence is not None
    assert found.after.divergence < 0.8 * found.before.divergence
    table = pd.read_csv(tmp_path / "training.csv")
    parts = [part for part in ("logits", "hidden", "text") if part in distillation.parts]
    weighed = sum(getattr(distillation, part) * table[part] for part in parts)
    assert table["loss"].tolist() == pytest.approx(weighed.tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("distillation", "room", "moves"),
    [
        (None, 10**9, ["cuda", "cpu"]),
        (Distillation(kept=4), 10**9, ["cuda", "cpu"]),
        (Distillation(), 10**9, ["cuda"]),  # it stays, and is asked in every step
        (None, 100, ["cpu"]),
    ],
)
def test_the_original_is_measured_on_the_gpu_that_trains(
    distillation: Distillation | None,
    room: int,
    moves: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = tiny_model("llama", 3)
    moved: list[str] = []
    monkeypatch.setattr(original, "to", lambda device: moved.append(torch.device(device).type))
    monkeypatch.setattr(run_module, "available_bytes", lambda _: room)
    arguments: Any = SimpleNamespace(
        device=torch.device("cuda"), torch_compile=True, neftune_noise_alpha=None
    )
    settings = TrainSettings(steps=1, batch=2, distillation=distillation)
    student = edit(tiny_model("llama", 3), PAIRED)
    program = program_of(student)
    run_module._make_task(lambda: original, program, TEXTS, settings, tmp_path, student, arguments)
    assert moved == moves


def test_there_must_be_somebody_to_learn_from(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no original to distil from"):
        train(
            edit(tiny_model("llama", 3), PAIRED),
            TEXTS,
            TrainSettings(distillation=Distillation()),
            tmp_path,
        )


def test_mixed_precision_ends_with_the_training(tmp_path: Path) -> None:
    settings = TrainSettings(steps=2, batch=4, evaluate_every=2, save_every=2, arguments={"bf16": True})
    found = healed(tmp_path, settings, dropout=0.0)
    other = edit(tiny_model("llama", 3, dropout=0.0), PAIRED)
    other.load_state_dict(found.model.state_dict())
    ids = TEXTS.held_out.ids
    assert torch.equal(found.model.eval()(input_ids=ids).logits, other(input_ids=ids).logits)
    assert found.model.dtype == torch.float32
