"""GPUs that are not there: what they refuse, note and record. Other tests rest on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pretended import pretended_gpus


def test_devices_do_not_mix() -> None:
    with pretended_gpus(2):
        here, first, second = torch.ones(3), torch.ones(3, device="cuda"), torch.ones(3, device="cuda:1")
        for other in (here, second):
            with pytest.raises(RuntimeError, match="on the same device"):
                first + other
            with pytest.raises(RuntimeError, match="on the same device"):
                torch.cat([first, other])
        assert (first + first.to("cuda:0")).device == torch.device("cuda", 0)
        assert torch.equal((second.cpu() + here), torch.full((3,), 2.0))
        # A number is anywhere.
        assert torch.equal((first[:2] + torch.tensor(1.0)).cpu(), torch.tensor([2.0, 2.0]))
        with pytest.raises(TypeError, match="numpy"):
            first.numpy()


def test_launches_waits_and_transfers_are_noted() -> None:
    with pretended_gpus(1) as noted:
        x = torch.tensor([[1.0, -2.0]], device="cuda")
        assert (len(noted.transfers), noted.launches.total()) == (1, 0)
        y = (x.t().reshape(2) * 3).relu_()
        assert noted.launches == {"mul": 1, "relu_": 1}
        assert (y.tolist(), float(y.sum()), y[y > 0].cpu().tolist()) == ([3.0, 0.0], 3.0, [3.0])
        assert len(noted.waits) == 4  # the index's size among them
        torch.nn.functional.rms_norm(x, (2,))
        torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])
        assert noted.launches["rms_norm"] == noted.launches["scaled_dot_product_attention"] == 1
        assert noted.devices == {"cuda:0"}


def test_a_graph_computes_again_in_the_same_memory() -> None:
    with pretended_gpus(1) as noted:
        x, kept, graph = (
            torch.ones(2, device="cuda"),
            torch.zeros(2, device="cuda"),
            torch.cuda.CUDAGraph(),
        )
        with torch.cuda.graph(graph):
            y = (x + 1)[1:] * 2
            kept[0] = y[0]
            spent = torch.zeros(1, device="cuda").add_(y)
        x.copy_(torch.tensor([0.0, 4.0]))
        for _ in range(2):
            graph.replay()
            assert (y.tolist(), kept.tolist(), spent.tolist()) == ([10.0], [10.0, 0.0], [10.0])
        assert noted.launches["graph"] == 2


@pytest.mark.parametrize(
    "what",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1.0, 2.0], device="cuda"),
        lambda x: x[[1, 0]],
        lambda _: torch.cuda.synchronize(),
    ],
)
def test_what_no_graph_can_hold(what: Any) -> None:
    with pretended_gpus(1):
        x = torch.ones(2, device="cuda")
        what(x)
        with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            what(x)
