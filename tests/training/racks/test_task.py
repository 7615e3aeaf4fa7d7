"""Racks that learn from the same stretch of the original, against its hidden states as transformers gives them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from surgeon.models.edit import edit, program_of
from surgeon.training.head_loss import LossParts
from surgeon.training.racks.model import RackModel, rack_of
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.process import train_in_processes
from surgeon.training.racks.run import RacksToTrain, distilled_rack_loss, teacher_of, train_in_turn
from surgeon.training.racks.streams import ItemKey, RackStreams
from surgeon.training.settings import Distillation
from tests.tiny_models import tiny_model
from tests.training.racks.local_run import SETTINGS, TEXTS, rack_options, weights
from tests.training.racks.reference import forward

BOTH = Distillation(logits=0.5, hidden=3.0, text=0.25, temperature=2.0)
PROGRAM = "A0 F0 [A1 A2] [F1 F2] A3 F3"
PLACES = {2: 1, 4: 3, 6: 4}  # nodes of the program, layers of the original


def original() -> Any:
    return tiny_model("llama", 4, dropout=0.0)


def cut() -> tuple[Any, Racks]:
    model = edit(tiny_model("llama", 4, dropout=0.0), PROGRAM)
    return model, Racks.parse("0:3,3:4", program_of(model), 1)


class Streams:
    """What one rack hands on, the other takes."""

    def __init__(self) -> None:
        self.items: dict[ItemKey, Tensor] = {}

    def offer(self, *items: tuple[ItemKey, Tensor]) -> None:
        self.items |= dict(items)

    def ask(self, key: ItemKey) -> Tensor:
        return self.items[key]


def stream_of_original(ids: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """After so many layers, before the final norm; and its logits."""
    model, found = original().eval(), list[Tensor]()
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    hook.remove()
    return dict(enumerate([*output.hidden_states[:-1], found[0]])), output.logits


def relative(mine: Tensor, theirs: Tensor) -> Tensor:
    """The mean over predicted tokens of |s - t|^2 / |t|^2."""
    return ((mine - theirs)[:, :-1].norm(dim=-1) ** 2 / theirs[:, :-1].norm(dim=-1) ** 2).mean()


def gradients(rack: RackModel) -> dict[str, Tensor]:
    found = {
        name: one.grad.clone() for name, one in rack.model.named_parameters() if one.grad is not None
    }
    rack.model.zero_grad()
    return found


@pytest.fixture
def made() -> tuple[list[RackModel], list[LossParts], dict[str, Tensor], Streams]:
    model, racks = cut()
    found, between = [rack_of(model, racks, index) for index in range(2)], Streams()
    for rack in found:
        rack.model.eval()
        with torch.no_grad():  # as after some training: the stretches are not the original's any more
            for parameter in rack.model.parameters():
                parameter.mul_(1.03)
    teachers = [teacher_of(original(), racks, index) for index in range(2)]
    losses = [
        distilled_rack_loss(found[0], teachers[0], BOTH, RackStreams(4, sink=between)),
        distilled_rack_loss(found[1], teachers[1], BOTH, RackStreams(4, source=between)),
    ]
    ids = TEXTS.training.ids[:2]
    return found, losses, {"input_ids": ids, "labels": ids, "place": torch.arange(4, 6)}, between


def test_the_first_rack_learns_the_original_s_streams(made: Any) -> None:
    """Its coda learns the text, and keeps that to itself."""
    (rack, _), (distilled, _), inputs, _ = made
    ids = inputs["input_ids"]
    parts = distilled(rack.model, inputs)
    parts["loss"].backward()
    found = gradients(rack)
    streams, _ = stream_of_original(ids)
    # The rack by itself, its own layers cut off after nodes 2 and 4.
    embedded = rack.model.model.embed_tokens(ids)
    nodes = rack.layers.program.nodes
    own: dict[int, Tensor] = {}
    run = rack.layers.through

    def watched(through: Any, stream: Tensor, machine: Any) -> Tensor:
        if own:
            return run(through, stream, machine)
        own[2] = run(nodes[:2], stream, machine)
        own[4] = run(nodes[2:4], own[2], machine)
        return own[4]

    rack.layers.through = watched
    rack.layers.apart = False
    logits = rack.model(input_ids=ids, use_cache=False).logits
    assert torch.equal(embedded, streams[0] * 1.03)
    hidden = torch.stack([relative(own[node], streams[PLACES[node]]) for node in (2, 4)]).mean()
    text = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(parts["hidden"]) == pytest.approx(float(hidden.detach()), rel=1e-5)
    assert float(parts["text"]) == pytest.approx(float(text.detach()), rel=1e-5)
    assert float(parts["loss"].detach()) == pytest.approx(float((3 * hidden + text).detach()), rel=1e-5)
    assert "logits" not in parts
    (3 * hidden).backward(retain_graph=True)
    by_streams = gradients(rack)
    text.backward()
    by_text = gradients(rack)
    for name, gradient in found.items():
        of_coda = name.startswith(("model.layers.3.", "model.norm.", "lm_head."))
        wanted = by_text[name] if of_coda else by_streams[name]
        assert torch.allclose(gradient, wanted, rtol=1e-3, atol=1e-6), name
    assert found.keys() == by_text.keys()


def test_the_last_rack_learns_the_original_s_predictions_too(made: Any) -> None:
    (first, rack), (before, distilled), inputs, between = made
    before(first.model, inputs)
    ids = inputs["input_ids"]
    parts = distilled(rack.model, inputs)
    streams, wanted = stream_of_original(ids)
    taking = RackStreams(4, source=between)
    handed_on, original_stream = taking.take(*taking.keys(torch.arange(4, 6))).chunk(2, dim=-1)
    assert torch.allclose(original_stream, streams[3], atol=1e-5)
    ends = list[Tensor]()
    rack.model.model.norm.register_forward_pre_hook(lambda _, given: ends.append(given[0]))
    _, logits = forward(rack, ids, handed_on)
    hidden = relative(ends[0], streams[4])
    mine, theirs = (
        one[:, :-1].flatten(0, 1).double().log_softmax(-1) for one in (logits / 2, wanted / 2)
    )
    divergence = 4 * functional.kl_div(mine, theirs, log_target=True, reduction="batchmean")
    text = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected = {"hidden": hidden, "logits": divergence, "text": text}
    expected["loss"] = 3 * hidden + 0.5 * divergence + 0.25 * text
    assert parts.keys() == expected.keys()
    for name, value in expected.items():
        assert float(parts[name].detach()) == pytest.approx(float(value.detach()), rel=1e-4), name


def test_processes_come_to_the_same_bits(tmp_path: Path) -> None:
    """As racks in turn do."""
    model, racks = cut()
    settings = replace(SETTINGS, steps=2, distillation=Distillation(hidden=10.0))
    asked = RacksToTrain(model, racks, TEXTS, settings, tmp_path / "turn", original)
    found = train_in_turn(asked)
    options = rack_options(threads=1, away=60.0)
    others = train_in_processes(replace(asked, folder=tmp_path / "once"), options)
    for mine, theirs in zip(*(weights(tmp_path / name, 2) for name in ("turn", "once")), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert others.results[1].after.divergence == pytest.approx(
        found.results[1].after.divergence, rel=1e-5
    )
    shared = replace(options, replicas=2)  # two processes for each rack: the same up to rounding
    train_in_processes(replace(asked, folder=tmp_path / "shared"), shared)
    for mine, theirs in zip(*(weights(tmp_path / name, 2) for name in ("turn", "shared")), strict=True):
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-5) for name in theirs)
    with pytest.raises(ValueError, match="of another run: its distillation was"):
        train_in_turn(replace(asked, settings=replace(settings, distillation=None)))


def test_a_teacher_that_is_edited_is_refused() -> None:
    model, racks = cut()
    with pytest.raises(ValueError, match="the teacher runs an edited program"):
        teacher_of(model, racks, 0)
