"""Racks one after the other come to what all of them in step come to; killed, they go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import surgeon
from surgeon.models.edit import edit, program_of
from surgeon.quality.head import logits_of, text_quality
from surgeon.training.racks import run
from surgeon.training.racks.model import open_rack, rack_of, save_rack
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.run import RacksToTrain, rack_folder, train_in_turn
from surgeon.training.racks.streams import ItemKey, ItemKind, KeptStreams, RackStreams
from surgeon.training.run import TrainedModel, train
from surgeon.training.settings import Distillation, TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts
from tests.tiny_models import tiny_model
from tests.training.racks.reference import forward, train_together
from tests.training.runs import windows

TEXTS = TrainTexts(TrainingText.of(windows(10, 1)), windows(3, 2))
SETTINGS: dict[str, Any] = {
    "scope": "all",
    "steps": 3,
    "batch": 4,
    "micro_batch": 2,
    "learning_rate": 1e-2,
    "evaluate_every": 2,
    "save_every": 3,
}
PROGRAM = "A0 F0 [A1 A2] [F1 F2] A3 F3"


def whole(family: str = "llama", program: str = PROGRAM, dropout: float = 0.0) -> Any:
    return edit(tiny_model(family, 4, dropout=dropout), program)


def cut(model: Any, texts: str = "0:1,1:3,3:4", depth: int = 1) -> Racks:
    return Racks.parse(texts, program_of(model), depth)


def trained(folder: Path, model: Any, racks: Racks, **options: Any) -> TrainedModel:
    return train_in_turn(RacksToTrain(model, racks, TEXTS, TrainSettings(**SETTINGS | options), folder))


def test_racks_in_turn_are_racks_in_step(tmp_path: Path) -> None:
    """Bit for bit: the same weights and codas, and the losses that the tables have."""
    model = whole()
    racks = cut(model)
    found = trained(tmp_path, model, racks, arguments={"logging_steps": 1})
    together = [rack_of(model, racks, index) for index in range(3)]
    losses = train_together(together, TEXTS.training.ids, TrainSettings(**SETTINGS))
    for index in range(3):
        table = pd.read_csv(rack_folder(tmp_path, index) / "training.csv")
        assert table["loss"].tolist() == pytest.approx([step[index] for step in losses], rel=1e-6)
    for coda, rack in zip(found.codas, together, strict=False):
        assert all(
            torch.equal(tensor, rack.coda().tensors[name]) for name, tensor in coda.tensors.items()
        )
    expected = [rack.tensors() for rack in together]
    own = found.whole.model.state_dict()
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        assert torch.equal(own[name], expected[0].by_name()[name])
    for name in ("model.layers.0.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(own[name.replace("layers.0", "layers.3")], expected[2].by_name()[name])
    assert torch.equal(
        own["model.layers.2.mlp.up_proj.weight"], expected[1].layers[1]["mlp.up_proj.weight"]
    )
    assert not torch.equal(
        own["model.layers.2.mlp.up_proj.weight"],
        whole().state_dict()["model.layers.2.mlp.up_proj.weight"],
    )


@pytest.mark.parametrize(
    "program", ["A0 F0!e0,e3 A1 F1 A2 F2 A3 F3!e0,e1", "A0 F0 A1 F1@up4 A2 F2 A3 F3@gate4"]
)
def test_racks_of_mixtures(program: str, tmp_path: Path) -> None:
    """Each rack balances the experts of its own stretch and of its coda; the file of a rack keeps what it is."""
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = edit(tiny_model("mixtral", 4, dropout=0.0, **asked), program)
    racks = cut(model)
    for index in range(3):
        rack = rack_of(model, racks, index)
        save_rack(rack, tmp_path / "rack")
        stream = None if index == 0 else torch.randn(2, 8, model.config.hidden_size)
        ids = TEXTS.training.ids[:2]
        again = forward(open_rack(tmp_path / "rack"), ids, stream)
        for one, other in zip(again, forward(rack, ids, stream), strict=True):
            assert torch.equal(one, other)
    found = trained(tmp_path / "run", model, racks, steps=1)
    for index in range(3):
        assert (
            pd.read_csv(rack_folder(tmp_path / "run", index) / "training.csv")["balance"].iloc[0] > 1.5
        )
    assert found.results[-1].after.perplexity < found.results[-1].before.perplexity


def test_recomputed_activations_change_nothing(tmp_path: Path) -> None:
    """The stream that comes in needs no gradient, and the layers behind it get theirs all the same."""
    model = whole()
    racks = cut(model, "0:3,3:4", 0)
    plain, again = (
        trained(
            tmp_path / str(checkpointed),
            model,
            racks,
            steps=1,
            arguments={"gradient_checkpointing": checkpointed},
        )
        for checkpointed in (False, True)
    )
    for name, value in plain.whole.model.state_dict().items():
        assert torch.equal(value, again.whole.model.state_dict()[name]), name
    changed = "model.layers.3.mlp.up_proj.weight"
    assert not torch.equal(plain.whole.model.state_dict()[changed], model.state_dict()[changed])


def test_what_is_measured_is_the_model(tmp_path: Path) -> None:
    """The last rack's figures are the whole model's, before and after; divergence is from the original."""
    model, ids = whole("gpt2", "A0 F0 A1 F1 A2 F2 A3 F3", 0.2), TEXTS.held_out.ids
    original = tiny_model("gpt2", 4, seed=5)
    settings = TrainSettings(**SETTINGS)
    asked = RacksToTrain(model, cut(model, "0:2,2:4", 2), TEXTS, settings, tmp_path, lambda: original)
    found = train_in_turn(asked)
    first, last = found.results
    for result, expected in ((last.before, model), (last.after, found.whole.model)):
        wanted = text_quality(logits_of(expected), ids, logits_of(original))
        assert result.perplexity == pytest.approx(wanted.perplexity, rel=1e-5)
        assert result.divergence == pytest.approx(wanted.divergence, rel=1e-4)
    assert last.original == first.original == text_quality(logits_of(original), ids)
    shallow = edit(tiny_model("gpt2", 4), "A0 F0 A1 F1 A2 F2 A3 F3")
    assert first.before.perplexity == pytest.approx(
        text_quality(logits_of(shallow), ids).perplexity, rel=1e-5
    )
    assert (last.steps, last.tokens) == (3, 3 * 4 * 8)
    held_out = pd.read_csv(rack_folder(tmp_path, 1) / "held_out.csv")
    assert held_out["step"].tolist() == [0, 2, 3]
    assert not list(tmp_path.rglob("streams/*"))
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_killed_it_goes_on_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout and all; killed in every rack, in the middle of a step."""
    model = whole("gpt2", PROGRAM, 0.3)
    racks = cut(model, "0:3,3:4")
    expected = trained(tmp_path / "whole", model, racks, save_every=1)
    calls, loss = 0, run.rack_loss

    def killed(streams: RackStreams, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        if calls in (4, 9):
            raise KeyboardInterrupt
        return loss(streams, model, inputs)

    monkeypatch.setattr(run, "rack_loss", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "killed", model, racks, save_every=1)
    found = trained(tmp_path / "killed", model, racks, save_every=1)
    again = trained(tmp_path / "killed", model, racks, save_every=1)
    # Six micro-batches for each rack, two that were cut off, one made again.
    assert calls == 2 * 6 + 2 + 1
    for other in (found, again):
        state = other.whole.model.state_dict()
        assert all(
            torch.equal(value, state[name]) for name, value in expected.whole.model.state_dict().items()
        )
        assert all(
            torch.equal(value, other.codas[0].tensors[name])
            for name, value in expected.codas[0].tensors.items()
        )
        assert other.results[1].after == expected.results[1].after


def test_a_tied_model_is_untied(tmp_path: Path) -> None:
    """Its embedding is the first rack's and its head the last one's; as a checkpoint, too."""
    model = tiny_model("llama", 4, dropout=0.0, tie_word_embeddings=True)
    found = trained(tmp_path / "run", model, cut(model, "0:2,2:4"))
    assert not found.whole.model.config.tie_word_embeddings
    assert not torch.equal(found.whole.model.lm_head.weight, found.whole.model.model.embed_tokens.weight)
    surgeon.export(found.whole.model, tmp_path / "made")
    ids = TEXTS.held_out.ids
    loaded = surgeon.load(tmp_path / "made")
    assert torch.equal(loaded(input_ids=ids).logits, found.whole.model(input_ids=ids).logits)
    alone = trained(tmp_path / "one", model, cut(model, "0:4")).whole.model
    assert alone.config.tie_word_embeddings
    assert alone.lm_head.weight is alone.model.embed_tokens.weight


def test_one_rack_is_ordinary_training(tmp_path: Path) -> None:
    model = whole()
    found = trained(tmp_path / "racks", model, cut(model, "0:4"))
    plain = train(whole(), TEXTS, TrainSettings(**SETTINGS), tmp_path / "plain")
    assert plain is not None
    assert all(
        torch.equal(value, found.whole.model.state_dict()[name])
        for name, value in plain.model.state_dict().items()
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scope": "edited"}, "train all weights"),
        ({"lora": 2}, "without adapters"),
        ({"patience": 2}, "none of them ends before the others"),
        ({"distillation": Distillation()}, "distil both, or hidden"),
        ({"distillation": Distillation(hidden=1.0)}, "no original to distil from"),
    ],
)
def test_settings_that_are_not_for_racks(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = whole()
    with pytest.raises(ValueError, match=said):
        trained(tmp_path, model, cut(model), **options)


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    model = whole()
    trained(tmp_path, model, cut(model, "0:3,3:4"), steps=1)
    with pytest.raises(ValueError, match="of another run: its coda was 1, and now it is 0"):
        trained(tmp_path, model, cut(model, "0:3,3:4", 0), steps=1)


def test_what_a_rack_left_is_missed(tmp_path: Path) -> None:
    model = whole()
    racks = cut(model, "0:3,3:4")
    trained(tmp_path, model, racks, steps=1)
    file = rack_folder(tmp_path, 1) / "rack.safetensors"
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"rack-1/rack\.safetensors is gone; put it back, or remove"
    ):
        trained(tmp_path, model, racks, steps=1)
    file.write_bytes(content[:-7])
    with pytest.raises(ValueError, match=r"rack-1/rack\.safetensors is truncated"):
        trained(tmp_path, model, racks, steps=1)
    (rack_folder(tmp_path, 0) / "run.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"rack-0 has no run\.json, which says of what run it is; remove"
    ):
        trained(tmp_path, model, racks, steps=1)


def test_kept_streams(tmp_path: Path) -> None:
    """Batches of four windows, which are taken in other micro-batches than they were given in."""
    kept, numbers, places = (
        KeptStreams(tmp_path / "kept"),
        torch.randn(8, 3, 2, dtype=torch.float64),
        torch.arange(8),
    )
    giving = RackStreams(4, sink=kept)
    giving.give(numbers[:2], *giving.keys(places[:2]))
    giving.give(numbers[2:4], *giving.keys(places[2:4]))
    giving.give(numbers[5:6], ItemKey(1, ItemKind.HELD_OUT, 1))
    giving.give(numbers[4:6], *giving.keys(places[4:6]))
    giving.give(numbers[4:8], *giving.keys(places[4:8]))  # again, by a rack that came back
    taking = RackStreams(4, source=KeptStreams(tmp_path / "kept"))
    for each in places.split(3):
        assert torch.equal(taking.take(*taking.keys(each)), numbers[each])  # type: ignore[arg-type]
    assert torch.equal(taking.take(ItemKey(1, ItemKind.HELD_OUT, 1)), numbers[5:6])  # type: ignore[arg-type]
    with pytest.raises(
        OSError, match=r"kept does not have window 0 of step 3; remove .* to begin the run again"
    ):
        taking.take(*taking.keys(torch.arange(8, 9)))
    with pytest.raises(OSError, match=r"kept does not have held-out window 0 after step 3"):
        taking.take(ItemKey(3, ItemKind.HELD_OUT))
    with pytest.raises(OSError, match="needed"):
        kept.require_room(1 << 60)
    for path in (tmp_path / "kept").glob("000000002-*"):
        path.unlink()
    lost = KeptStreams(tmp_path / "kept")
    with pytest.raises(
        OSError, match=r"kept has nothing of step 2: what was handed on earlier is gone; remove .*"
    ):
        lost.offer((ItemKey(3, ItemKind.TRAINING), numbers[0]))
