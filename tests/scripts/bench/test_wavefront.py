"""Racks that decode one text as a wavefront, each on a thread of its own here: the tokens of the whole model."""

from __future__ import annotations

import queue
import socket
import threading
from pathlib import Path

import pytest
import torch

from scripts.bench.wavefront import FirstRack, Message, Stretch, Wire, deeper, even_racks, folder_plan
from surgeon.runtime.comm.link import Link
from surgeon.runtime.plan.specification import Plan
from tests.codas import save_codas
from tests.tiny_models import VOCABULARY, tiny_model

NEW = 20


@pytest.mark.parametrize("racks", [2, 3])
def test_tokens_in_flight_become_the_models(racks: int, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    save_codas(tmp_path, model, cut=2, depth=2, noise=0.4)
    plan = folder_plan(tmp_path, 64)
    nodes = even_racks(plan, racks, 4)
    assert nodes[0] == 4
    assert nodes[-1] == 8
    first = started(plan, nodes)
    for seed in range(2):
        prompt = torch.randint(2, VOCABULARY, (7 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        expected = whole[0, len(prompt) :].tolist()
        for window in (1, 2, 5, NEW):
            found = first.decode(prompt, NEW, window)
            assert found.tokens == expected
            assert found.sent > 0
            if window > 1:
                assert 0 < found.accepted < found.drafts
            else:
                assert (found.drafts, found.fed) == (0, len(prompt) + NEW - 1)


def started(plan: Plan, nodes: tuple[int, ...]) -> FirstRack:
    """Rack 0, and threads that are the others."""
    pairs = [socket.socketpair() for _ in nodes]  # from each rack to the next one
    onward = [Wire(ours) for ours, _ in pairs]
    inboxes = [queue.SimpleQueue[Message]() for _ in nodes]
    for rack, wire in enumerate(onward):
        wire.line.link = Link(0.002)
        wire_in = Wire(pairs[rack - 1][1])
        wire_in.listen(inboxes[rack])
    for rack in range(1, len(nodes)):
        stretch = Stretch(plan, nodes[rack - 1], nodes[rack])
        role = stretch, rack == len(nodes) - 1, inboxes[rack], onward[rack]
        threading.Thread(target=deeper, args=role, daemon=True).start()
    return FirstRack(Stretch(plan, 0, nodes[0]), onward[0], inboxes[0])
