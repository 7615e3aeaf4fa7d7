"""The original's predictions: any range of windows of them."""

from __future__ import annotations

import pytest
import torch

from surgeon.quality.head import OutputHead, TextReferences
from tests.tiny_models import HIDDEN, VOCABULARY, tiny_model

IDS = torch.randint(VOCABULARY, (5, 9), generator=torch.Generator().manual_seed(2))
STREAM = torch.randn(5, 9, HIDDEN, generator=torch.Generator().manual_seed(3))
CHANGED = torch.randn(5, 9, HIDDEN, generator=torch.Generator().manual_seed(4))


def filled(head: OutputHead) -> TextReferences:
    references = TextReferences(IDS)
    for windows in (range(2), range(2, 5)):
        references[windows] = head.reference(
            STREAM[windows.start : windows.stop], IDS[windows.start : windows.stop]
        )
    return references


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_any_range_of_known_windows_is_known(family: str) -> None:
    head = OutputHead(tiny_model(family, num_layers=1))
    references = filled(head)
    for windows in (range(5), range(1, 4), range(4, 5)):
        chosen = slice(windows.start, windows.stop)
        plain = head.compare(CHANGED[chosen], head.reference(STREAM[chosen], IDS[chosen]))
        found = head.compare(CHANGED[chosen], references[windows])
        torch.testing.assert_close(found["divergence"], plain["divergence"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found["nll"], plain["nll"])
        torch.testing.assert_close(found["greedy_acceptance"], plain["greedy_acceptance"])


def test_windows_that_are_not_known_are_said() -> None:
    head = OutputHead(tiny_model("llama", num_layers=1))
    references = TextReferences(IDS)
    references[range(2)] = head.reference(STREAM[:2], IDS[:2])
    assert range(2) in references
    assert range(1, 3) not in references
    with pytest.raises(KeyError):
        references[range(3)]


def test_predictions_for_sampled_acceptance() -> None:
    head = OutputHead(tiny_model("llama", num_layers=1))
    references = TextReferences(IDS, sampled=True)
    references[range(5)] = head.reference(STREAM, IDS, sampled=True)
    found, plain = (head.compare(CHANGED[2:4], kept[range(2, 4)]) for kept in (references, filled(head)))
    wanted = head.compare(CHANGED, head.reference(STREAM, IDS, sampled=True))
    torch.testing.assert_close(found["sampled_acceptance"], wanted["sampled_acceptance"][2:4])
    assert "sampled_acceptance" not in plain
