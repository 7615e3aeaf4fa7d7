"""The arithmetic of a mixture of experts, or of a rank's part of one.

Every token goes to few of the experts. Where the host may wait for the router's choice, and on CPUs, only experts that
some token goes to are read, each once for all of its tokens. In passes that wait for nothing, as those that GPUs repeat
from recordings, the computation may not depend on that choice: few tokens take copies of their own experts, more tokens
go through all experts, with weights that are mostly 0.

Shapes: T tokens of a pass, h the stream's width, E experts that are here, k experts of a token, N neurons of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.models.families import SublayerSpec
from surgeon.models.routing import Routed, Routing, route
from surgeon.models.weights import Tensors
from surgeon.runtime.kernels.functions import GATED, Kernels, PackedExperts
from surgeon.runtime.model.layers import FeedForward, Unnormed, activation, norm_before, plan_kernels
from surgeon.runtime.model.linear import Maps, Panels, is_factored, whole_map
from surgeon.runtime.plan.specification import Plan

AT_ONCE = 512  # tokens that the kernel takes: it has room for what all of their experts make of them
Combine = Callable[[Tensor, Tensor], Tensor]  # gates and values, (..., N) each, to (..., N)
Which = slice | Tensor  # of the experts, to be indexed with


class MixtureOfExperts:
    """A mixture of experts, its norm inside, or some of its experts or neurons; the output is their part of the sum.

    The router is whole, and shared experts, which every token goes through, are a feed-forward.

    Args:
        tensors: matrices and biases of experts are stacked.
        first: the router's number of the first of the experts that are here.

    Attributes:
        router: gives logits of all experts, (T, all).
        route: chooses experts by logits.
        experts: make (T, h) of tokens and of where they go.
        shared: of normed tokens, if there are any.
    """

    def __init__(self, tensors: Tensors, spec: SublayerSpec, plan: Plan, first: int = 0) -> None:
        assert plan.arithmetic.routing is not None
        assert spec.mixture is not None
        self.norm = norm_before(tensors, spec, plan)
        self.router = whole_map(tensors, ["router"])
        self.routing = plan.arithmetic.routing
        self.correction = tensors.get("router.correction")
        self.weighs_inputs = spec.mixture.weighs_inputs
        self.kernels = plan_kernels(plan, tensors["router.weight"])
        self.scale = plan.arithmetic.output_scale
        packed = None if self.kernels is None else pack_experts(tensors, first, plan, self.kernels)
        self.experts: Callable[[Tensor, Routed, bool], Tensor]
        self.route: Callable[[Tensor, Routing, Tensor | None], Routed]
        if self.kernels is not None and packed is not None:
            self.experts = partial(compute_packed, self.kernels, packed)
            self.route = self.kernels.route
        else:
            if plan.arithmetic.clamped_gate is not None:
                combine: Combine = partial(combine_clamped, *plan.arithmetic.clamped_gate)
            else:
                act = activation(plan.arithmetic.activation)
                combine = lambda gates, values: act(gates) * values  # noqa: E731
            self.experts = Experts(tensors, first, combine)
            self.route = route
        beside = {
            name.removeprefix("shared_"): one
            for name, one in tensors.items()
            if name.startswith("shared_")
        }
        own_router = beside.pop("router.weight", None)
        self.shared: FeedForward | None = None
        if beside:
            self.shared = FeedForward(beside, Maps(beside, None), plan, Unnormed())
        self.shared_router = None if own_router is None else own_router.t()
        alike = self.shared is None or (self.shared.by_kernels and self.shared_router is None)
        own = self.route is not route and self.router.by_kernels and self.norm.by_kernels
        self.by_kernels = own and alike and not self.weighs_inputs

    def __call__(self, stream: Tensor, waits: bool = True) -> Tensor:
        """(T, h) to (T, h).

        Args:
            waits: whether the host may wait for the device.
        """
        x = self.norm(stream)
        routed = self.route(self.router(x), self.routing, self.correction)
        if self.weighs_inputs:  # before experts read them: a copy for each expert that a token goes to
            tokens, chosen = routed.experts.shape
            copies = (x[:, None] * routed.weights[..., None].to(x.dtype)).flatten(0, 1)
            alone = Routed(routed.experts.view(-1, 1), torch.ones_like(routed.weights).view(-1, 1))
            output = self.experts(copies, alone, waits)
            if chosen > 1:
                output = output.view(tokens, chosen, -1).sum(1)
        else:
            output = self.experts(x, routed, waits)
        if self.shared is not None:
            beside = self.shared.of_normed(x)
            output = output + (
                beside if self.shared_router is None else beside * (x @ self.shared_router).sigmoid()
            )
        if self.scale is None:
            return output
        return output.mul_(self.scale)


class Experts:
    """Some experts, on any device, whole matrices or two factors each.

    Args:
        first: the number of the first one.
    """

    def __init__(self, tensors: Tensors, first: int, combine: Combine) -> None:
        self.gate, self.up, self.down = (Stacked(tensors, role) for role in ("gate", "up", "down"))
        self.combine = combine
        self.first = first
        self.count = len(self.gate.matrices[0])
        self.groups = all(map(can_group, (self.gate, self.up, self.down)))

    def __call__(self, x: Tensor, routed: Routed, waits: bool) -> Tensor:
        """Compute the weighted sum of their outputs, (T, h); 0 of tokens that none of them gets."""
        own = routed.experts - self.first
        here = (own >= 0) & (own < self.count)
        if waits and self.groups:  # tokens sorted by expert, those that go elsewhere behind all others
            own, order = own.where(here, self.count).flatten().sort(stable=True)
            ends = torch.searchsorted(
                own, torch.arange(self.count, device=own.device), right=True, out_int32=True
            )
            tokens = order // routed.experts.shape[1]
            of = own.clamp(max=self.count - 1)
            sent = x[tokens]
            gates = self.gate.apply_grouped(sent, ends, of)
            values = self.up.apply_grouped(sent, ends, of)
            made = self.down.apply_grouped(self.combine(gates, values), ends, of)
            made = made * routed.weights.flatten()[order][:, None].to(made.dtype)
            elsewhere = (own == self.count)[:, None]  # of which there may be anything
            return torch.zeros_like(x).index_add_(0, tokens, made.masked_fill(elsewhere, 0.0))
        if waits:  # one expert after the other
            output = torch.zeros_like(x)
            for expert in own[here].unique().tolist():
                tokens, places = (own == expert).nonzero(as_tuple=True)
                made = self._compute_experts(x[tokens][None], slice(expert, expert + 1))[0]
                output.index_add_(0, tokens, made * routed.weights[tokens, places, None].to(made.dtype))
            return output
        if own.numel() < self.count:  # copies of each token's own
            chosen = own.shape[1]
            weights = routed.weights.masked_fill(~here, 0.0).view(-1, 1)
            copies = x[:, None].expand(-1, chosen, -1).reshape(own.numel(), 1, -1)
            made = self._compute_experts(copies, own.flatten().clamp(0, self.count - 1))[:, 0]
            return (made * weights.to(made.dtype)).view(len(x), chosen, -1).sum(1)
        # All of them; the last column of weights is of experts elsewhere.
        weights = routed.weights.new_zeros(len(x), self.count + 1)
        weights.scatter_(1, own.where(here, self.count), routed.weights)
        made = self._compute_experts(x.expand(self.count, -1, -1), slice(None))
        return torch.einsum("eth,te->th", made, weights[:, :-1].to(made.dtype))

    def _compute_experts(self, x: Tensor, which: Which) -> Tensor:
        """Apply some experts to tokens of their own, (E, tokens, h)."""
        return self.down(self.combine(self.gate(x, which), self.up(x, which)), which)


class Stacked:
    """A linear map for each of some experts, by a matrix or by two factors.

    Attributes:
        matrices: (E, out, in) each, one after the other.
        bias: (E, out), if there is one.
    """

    def __init__(self, tensors: Tensors, role: str) -> None:
        names = ("first.weight", "second.weight") if is_factored(role, tensors) else ("weight",)
        self.matrices = [tensors[f"{role}.{name}"] for name in names]
        self.bias = tensors.get(f"{role}.bias")

    def __call__(self, x: Tensor, which: Which) -> Tensor:
        """(E, tokens, in) to (E, tokens, out), of these experts."""
        for matrix in self.matrices:
            x = x @ matrix[which].mT
        if self.bias is None:
            return x
        return x + self.bias[which][:, None]

    def apply_grouped(self, x: Tensor, ends: Tensor, of: Tensor) -> Tensor:
        """Apply maps to tokens of one expert after the other, (all tokens, in) to (all tokens, out).

        Args:
            ends: of each expert's tokens, (E,), int32.
            of: each token's expert, (all tokens,).
        """
        for matrix in self.matrices:
            x = F.grouped_mm(x, matrix.mT, offs=ends)
        if self.bias is None:
            return x
        return x + self.bias[of]


def can_group(maps: Stacked) -> bool:
    """Tell whether PyTorch, 2.10 or later, multiplies all experts' tokens at once: rows must be of whole 16 bytes."""
    sides = {side * matrix.element_size() for matrix in maps.matrices for side in matrix.shape[1:]}
    return hasattr(F, "grouped_mm") and not any(side % 16 for side in sides)


def compute_packed(
    kernels: Kernels,
    packed: PackedExperts,
    x: Tensor,
    routed: Routed,
    waits: bool,  # noqa: ARG001 - there is nobody to wait for
) -> Tensor:
    """Compute the weighted sum of some experts' outputs, (T, h), by the kernels for CPUs."""
    if len(x) <= AT_ONCE:
        return kernels.mixture(x, routed, packed)
    parts = zip(
        x.split(AT_ONCE), routed.experts.split(AT_ONCE), routed.weights.split(AT_ONCE), strict=True
    )
    return torch.cat([kernels.mixture(own, Routed(*where), packed) for own, *where in parts])


def pack_experts(tensors: Tensors, first: int, plan: Plan, kernels: Kernels) -> PackedExperts | None:
    """Pack experts for the kernels; None where these do not compute such ones."""
    factored = any(is_factored(role, tensors) for role in ("gate", "up", "down"))
    if factored or not (plan.arithmetic.clamped_gate or plan.arithmetic.activation in GATED):
        return None
    reading = torch.cat([tensors["gate.weight"], tensors["up.weight"]], 1)
    biases = [tensors.get(f"{role}.bias") for role in ("gate", "up")]
    reading_bias = (
        None if biases[0] is None or biases[1] is None else torch.cat([biases[0], biases[1]], 1)
    )
    writing_bias = tensors.get("down.bias")
    kept = list[Tensor]()
    lines = list[list[int]]()
    for expert, weights in enumerate(zip(reading, tensors["down.weight"], strict=True)):
        line = list[int]()
        for weight, bias in zip(weights, (reading_bias, writing_bias), strict=True):
            panels = Panels(weight, kernels).weight
            own = None if bias is None else bias[expert].clone()
            kept += [panels] if own is None else [panels, own]
            line += [panels.data_ptr(), 0 if own is None else own.data_ptr()]
        lines.append(line)
    neurons = reading.shape[1] // 2
    return PackedExperts(
        first,
        torch.tensor(lines),
        tuple(kept),
        neurons,
        plan.arithmetic.activation,
        plan.arithmetic.clamped_gate,
    )


def combine_clamped(alpha: float, limit: float, gates: Tensor, values: Tensor) -> Tensor:
    """Multiply gates, up to a limit, by a sigmoid of alpha times them, and by bounded values and 1 more (gpt-oss)."""
    gates = gates.clamp(max=limit)
    return gates * (alpha * gates).sigmoid() * (values.clamp(-limit, limit) + 1)
