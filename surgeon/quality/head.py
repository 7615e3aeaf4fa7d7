"""Quality of a program on a text: from its stream by the output head, and of a whole model by its full logits.

Logits are linear in the normed stream h, so a changed program's cross term with the original's probabilities p is a dot
product: sum_v p_v (h . W_v) = h . E with E = sum_v p_v W_v. E is computed once for the original; after that each
program costs one matrix product with the head and one log-sum-exp, and no vocabulary-sized tensor outlives a block of
tokens. Capped logits (Gemma2) are not linear, and sampled acceptance takes all probabilities of both: there the
original's logits are computed again for every program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from surgeon.models.edit import input_device
from surgeon.models.families import family_of
from surgeon.models.verified import DraftOnText
from surgeon.models.weights import Tensors
from surgeon.progress import progress
from surgeon.quality.data import Windows
from surgeon.quality.summary import ACCEPTANCES, METRICS, Quality, pool_windows, quality_of

# A block of logits stays in a CPU's cache: computing 4,096 tokens at once took 1.7 times as long.
BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
LEAST_ROWS = 128
_VOCABULARY_PART = 16384
GREEDY, SAMPLED = ACCEPTANCES


# A program's quality window by window: by name, means over each one's predicted tokens, float64, (windows,).
#   nll: negative log-likelihood of the text, nats.
#   divergence: KL(original || changed) over the full vocabulary, nats.
#   greedy_acceptance: the share of tokens at which the original's likeliest one is it here, too.
#   sampled_acceptance, where it was asked for: sum_v min(p_v, q_v), the chance that a token which is drawn here is
#     accepted as one of the original's (Leviathan et al. 2023, corollary 3.6).
#   blocks, where some were asked for: the divergence of parts of each window in order, (windows, parts).
ByWindow = dict[str, Tensor]


def quality_of_original(nll: Tensor, sampled: bool = False) -> ByWindow:
    """The original's own quality, which differs from itself in nothing.

    Args:
        sampled: add sampled acceptance.
    """
    ones = torch.ones_like(nll)
    found = {"nll": nll, "divergence": torch.zeros_like(nll), GREEDY: ones}
    if sampled:
        found[SAMPLED] = ones
    return found


def join_measures(parts: Sequence[ByWindow]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Join negative log-likelihood and divergence of parts of the windows, (windows,) each."""
    nll, divergence = (torch.cat([part[name] for part in parts]) for name in ("nll", "divergence"))
    return nll.cpu().numpy(), divergence.cpu().numpy()


def concatenate_windows(parts: Sequence[ByWindow]) -> ByWindow:
    """Join parts of the windows in order, with the numbers that all parts have."""
    there = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: torch.cat([part[name] for part in parts]) for name in there}


@dataclass(frozen=True)
class ReferencePredictions:
    """The original program's predictions on some windows.

    Attributes:
        input_ids: (windows, tokens); every token but a window's first is predicted.
        kept: (predicted tokens, hidden), the head's rows averaged by the original's probabilities; for capped logits
            the original's normed stream.
        constant: (predicted tokens,), the part of the divergence that depends on the original only.
        likeliest: (predicted tokens,), ids of the original's likeliest tokens.
        quality: of the original itself.
        normed: (predicted tokens, hidden), the original's normed stream; None without sampled acceptance.
    """

    input_ids: Tensor
    kept: Tensor
    constant: Tensor
    likeliest: Tensor
    quality: ByWindow
    normed: Tensor | None = None


class OutputHead:
    """A model's final norm and output projection.

    Raises:
        ValueError: if the output projection is no plain linear map.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        family = family_of(model.config)
        self.norm = model.get_submodule(family.final_norm)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"the output head is a {type(head).__name__}; only a plain linear head can be measured"
            )
        self.weight = head.weight
        self.bias = head.bias
        self.scale = family.scales.logits(model.config)
        cap = family.scales.logit_cap
        self.softcap: float | None = getattr(model.config, cap) if cap else None

    def rows(self, tokens: int) -> int:
        """Number of tokens whose logits are computed at a time."""
        limit = BLOCK_BYTES.get(self.weight.device.type, BLOCK_BYTES["cpu"])
        return min(tokens, max(LEAST_ROWS, limit // (4 * len(self.weight))))

    def working_bytes(self, tokens: int) -> int:
        """Most memory for measuring this many tokens, beside the stream and the `ReferencePredictions`."""
        # Logits, log-probabilities, probabilities, their product.
        blocks = 4 * self.rows(tokens) * len(self.weight) * 4
        normed = 3 * tokens * self.weight.shape[1] * max(4, self.weight.element_size())
        return blocks + normed

    @torch.inference_mode()
    def reference(
        self, stream: Tensor, input_ids: Tensor, sampled: bool = False
    ) -> ReferencePredictions:
        """Predict by the original program.

        Args:
            stream: (windows, tokens, hidden) after the whole program, before the final norm.
            input_ids: (windows, tokens).
            sampled: keep what sampled acceptance needs.
        """
        hidden = self.norm_predicting(stream)
        targets = _targets(input_ids)
        nll = hidden.new_empty(len(hidden), dtype=torch.float32)
        constant = []
        kept = hidden
        if not self.softcap:
            kept = torch.empty_like(hidden, dtype=torch.float32)
        likeliest = torch.empty_like(targets)
        for rows in self._blocks(len(hidden)):
            logits = self.logits(hidden[rows])
            likeliest[rows] = _likeliest(logits)
            log_p = functional.log_softmax(logits, dim=-1)
            nll[rows] = -log_p.gather(-1, targets[rows, None])[:, 0]
            p = log_p.exp()
            # The sum is off by 1e-7 on average, which times the logits biases the divergence.
            p /= p.sum(-1, keepdim=True)
            entropy = -(p * log_p).sum(-1)
            if self.softcap is None:
                kept[rows] = self._expected_rows(p)
            # The cross term of a capped head has the bias in its logits.
            own = self.bias is not None and not self.softcap
            constant.append(-entropy - self._scale(p @ self.bias.float()) if own else -entropy)
        mean = _window_means(nll, len(input_ids))
        own_quality = quality_of_original(mean, sampled)
        normed = None
        if sampled:
            normed = hidden
        return ReferencePredictions(input_ids, kept, torch.cat(constant), likeliest, own_quality, normed)

    @torch.inference_mode()
    def compare(self, stream: Tensor, reference: ReferencePredictions, blocks: int = 0) -> ByWindow:
        """Measure a changed program on the reference's windows.

        Args:
            stream: as in `reference`.
            blocks: parts of each window for its `blocks`; at most one for each predicted token.
        """
        hidden = self.norm_predicting(stream)
        targets = _targets(reference.input_ids)
        nll = hidden.new_empty(len(hidden), dtype=torch.float32)
        target_logit, cross, same, shared = (torch.empty_like(nll) for _ in range(4))
        for rows in self._blocks(len(hidden)):
            logits = self.logits(hidden[rows])
            # The fused kernel reads the block once; a log-sum-exp of its own is a third slower.
            nll[rows] = functional.cross_entropy(logits, targets[rows], reduction="none")
            target_logit[rows] = logits.gather(-1, targets[rows, None])[:, 0]
            same[rows] = (_likeliest(logits) == reference.likeliest[rows]).float()
            if self.softcap:
                original = functional.softmax(self.logits(reference.kept[rows]), dim=-1)
                cross[rows] = (original * logits).sum(-1)
            if reference.normed is not None:
                normaliser = nll[rows] + target_logit[rows]
                shared[rows] = _overlap(
                    self.logits(reference.normed[rows]), logits - normaliser[:, None]
                )
        if self.softcap is None:
            cross = self._scale((hidden.float() * reference.kept).sum(-1))
        log_normaliser = nll + target_logit
        divergence = reference.constant - cross + log_normaliser
        windows = len(reference.input_ids)
        found = {
            "nll": _window_means(nll, windows),
            "divergence": _window_means(divergence, windows),
            GREEDY: _window_means(same, windows),
        }
        if reference.normed is not None:
            found[SAMPLED] = _window_means(shared, windows)
        if blocks:
            cut = divergence.view(windows, -1).double().tensor_split(blocks, dim=-1)
            found["blocks"] = torch.stack([part.mean(-1) for part in cut], dim=-1)
        return found

    def norm_predicting(self, stream: Tensor) -> Tensor:
        """Norm the stream of the tokens that predict one, (predicted tokens, hidden)."""
        hidden: Tensor = self.norm(stream)[:, :-1].flatten(0, 1)
        return hidden.to(self.weight.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, (tokens, vocabulary), float32, of normed streams, (tokens, hidden)."""
        return self.finish(functional.linear(hidden, self.weight, self.bias).float())

    def finish(self, product: Tensor) -> Tensor:
        """Scale and cap the matrix product of normed streams."""
        logits = self._scale(product)
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)

    def unfinish(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient for the logits, in place, into that for the matrix product."""
        if self.softcap is not None:
            gradient = gradient * (1 - (logits / self.softcap).square_())
        return self._scale(gradient)

    def _scale(self, logits: Tensor) -> Tensor:
        if self.scale is None:
            return logits
        return logits * self.scale

    def _expected_rows(self, p: Tensor) -> Tensor:
        """Average the head's rows by probabilities, in float32; other weights are converted a part at a time."""
        if self.weight.dtype == torch.float32:
            return p @ self.weight
        parts = zip(p.split(_VOCABULARY_PART, dim=-1), self.weight.split(_VOCABULARY_PART), strict=True)
        return torch.stack([part @ weight.float() for part, weight in parts]).sum(0)

    def _blocks(self, tokens: int) -> Iterator[slice]:
        rows = self.rows(tokens)
        return (slice(start, start + rows) for start in range(0, tokens, rows))


def _likeliest(logits: Tensor) -> Tensor:
    """Ids of the greatest logits; on a CPU numpy finds them in a tenth of torch's time."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _overlap(logits: Tensor, log_q: Tensor) -> Tensor:
    """(tokens,), sum_v min(p_v, q_v); exp is taken once, of the lesser logarithm. Rounding can make it more than 1.

    Args:
        logits: (tokens, vocabulary), of p.
        log_q: (tokens, vocabulary), overwritten.
    """
    log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
    return torch.minimum(log_p, log_q, out=log_q).exp_().sum(-1).clamp_(max=1)


def _targets(input_ids: Tensor) -> Tensor:
    return input_ids[:, 1:].flatten()


def _window_means(per_token: Tensor, windows: int) -> Tensor:
    return per_token.view(windows, -1).double().mean(-1)


_NAMES = ("kept", "constant", "likeliest", "nll")
_NORMED = "normed"


class TextReferences:
    """An original's predictions on some text, by ranges of windows.

    Args:
        ids: (windows, tokens) of the text.
        sampled: for sampled acceptance, too.
    """

    def __init__(self, ids: Tensor, sampled: bool = False) -> None:
        self.ids = ids
        self.sampled = sampled
        self.names = (*_NAMES, _NORMED) if sampled else _NAMES
        self.known = [False] * len(ids)
        # Tensors of all windows in one piece each, so that neighbouring windows need no copy.
        self.tensors: Tensors = {}

    def __getitem__(self, windows: range) -> ReferencePredictions:
        if not all(self.known[windows.start : windows.stop]):
            raise KeyError(windows)
        kept, constant, likeliest, nll, *more = (
            self.tensors[name][windows.start : windows.stop] for name in self.names
        )
        ids = self.ids[windows.start : windows.stop].to(kept.device)
        by_token = kept.flatten(0, 1), constant.flatten(), likeliest.flatten()
        normed = (one.flatten(0, 1) for one in more)
        return ReferencePredictions(ids, *by_token, quality_of_original(nll, self.sampled), *normed)

    def __setitem__(self, windows: range, reference: ReferencePredictions) -> None:
        given = [reference.kept, reference.constant, reference.likeliest, reference.quality["nll"]]
        if self.sampled and reference.normed is not None:
            given += [reference.normed]
        for name, tensor in zip(self.names, given, strict=True):
            shaped = tensor
            if name != "nll":
                shaped = tensor.unflatten(0, (len(windows), -1))
            if name not in self.tensors:
                self.tensors[name] = shaped.new_empty((len(self.ids), *shaped.shape[1:]))
            self.tensors[name][windows.start : windows.stop] = shaped
        self.known[windows.start : windows.stop] = [True] * len(windows)

    def __contains__(self, windows: object) -> bool:
        return isinstance(windows, range) and all(self.known[windows.start : windows.stop])


# Keys and values that acceptance is judged by.
VERIFIED = "verified"
OWN = "own"
# Token ids, (windows, tokens), to logits, (windows, tokens, vocabulary).
Logits = Callable[[Tensor], Tensor]


def logits_of(model: nn.Module) -> Logits:
    """Make a model's forward pass, without a cache, a function of token ids."""

    def logits(ids: Tensor) -> Tensor:
        if isinstance(model, PreTrainedModel):
            device = input_device(model)
        else:
            device = next(model.parameters()).device
        found: Tensor = model(input_ids=ids.to(device), use_cache=False).logits
        return found

    return logits


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside; afterwards each module is back in its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.inference_mode()
def text_quality(
    model: Logits,
    ids: Tensor,
    original: Logits | None = None,
    bar: bool = True,
    answers: Tensor | None = None,
    draft: DraftOnText | None = None,
) -> Quality:
    """Measure a model on windows of text, one at a time.

    Where windows have different counts, their values are weighted (`surgeon.quality.summary.pool_windows`).

    Args:
        ids: (windows, tokens); every token but a window's first is predicted.
        original: the model to compare with, of the same vocabulary.
        bar: show a progress bar.
        answers: (windows, tokens), tokens that count; None for all. Models do not run behind the last.
        draft: the original with the model as its draft, for acceptance; takes the place of `original`.

    Raises:
        ValueError: if the vocabularies differ, or the model's predictions are not finite.
    """
    parts = []
    with progress("text", len(ids), "windows") if bar else nullcontext(lambda _: None) as advance:
        for window, counted in split_windows(ids, answers):
            logits = _predicting(model(window), counted)
            following = window[0, 1:][counted].to(logits.device)
            row = [float(functional.cross_entropy(logits, following))]
            if draft is not None:
                row += _compare(logits, *(_predicting(each, counted) for each in draft(window)))
            elif original is not None:
                row += _compare(logits, _predicting(original(window), counted), logits)
            parts.append(row)
            advance(1)
    columns = list(np.array(parts).T)
    if not np.isfinite(columns[0]).all():
        where = int(np.flatnonzero(~np.isfinite(columns[0]))[0])
        raise ValueError(
            f"the model's predictions are not finite in window {where}; are its weights damaged?"
        )
    tokens = ids.shape[0] * (ids.shape[1] - 1)
    if answers is not None:
        counts = answers[:, 1:].sum(1)
        tokens = int(counts.sum())
        columns = [pool_windows(column, counts.double().numpy()) for column in columns]
    found = quality_of(dict(zip(("nll", *METRICS[1:]), columns, strict=False)), tokens)
    return replace(found, acceptance_keys=None if draft is None else VERIFIED)


def _predicting(logits: Tensor, counted: Tensor | slice) -> Tensor:
    return logits[0, :-1][counted].float()


def _compare(logits: Tensor, wanted: Tensor, drafted: Tensor) -> list[float]:
    """Average divergence and acceptances over tokens, of logits of each, (tokens, vocabulary).

    Args:
        wanted: of the original.
        drafted: of the model as its draft.
    """
    wanted, drafted = (each.to(logits.device) for each in (wanted, drafted))
    require_one_vocabulary(wanted.shape[-1], logits.shape[-1])
    log_p = wanted.log_softmax(-1).double()
    log_q = logits.log_softmax(-1).double()
    q = log_q.exp() if drafted is logits else drafted.softmax(-1).double()
    p = log_p.exp()
    by_token = (
        (p * (log_p - log_q)).sum(-1),
        (wanted.argmax(-1) == drafted.argmax(-1)).double(),
        torch.minimum(p, q).sum(-1).clamp(max=1),  # rounding can make it more
    )
    return [float(values.mean()) for values in by_token]


def require_one_vocabulary(original: int, other: int) -> None:
    """Refuse to compare models whose vocabularies have different sizes."""
    if original != other:
        raise ValueError(
            f"the models have vocabularies of {original:,} and {other:,} tokens; "
            "divergence is told between models of one vocabulary"
        )


def split_windows(ids: Tensor, answers: Tensor | None) -> Iterator[tuple[Tensor, Tensor | slice]]:
    """Yield windows, (1, tokens), up to the last answer, and the places, (tokens - 1,), whose next token counts."""
    for window, marks in zip(
        ids.split(1), [None] * len(ids) if answers is None else answers, strict=True
    ):
        if marks is None:
            yield window, slice(None)
        else:
            last = int(marks.nonzero().max())
            yield window[:, : last + 1], marks[1 : last + 1].bool()


class HeldOutQuality:
    """Windows of text with the original's predictions, kept as its normed stream and output head.

    The original itself need not stay in memory: its logits are the head on the stream.

    Attributes:
        original: the original's own quality; None without one.
    """

    def __init__(self, windows: Windows, original: PreTrainedModel | None) -> None:
        self.ids = windows.ids
        self.answers = windows.answers
        self.original: Quality | None = None
        self._reference: Logits | None = None
        if original is None:
            return
        streams: dict[bytes, Tensor] = {}
        with torch.inference_mode():
            head = OutputHead(original)
            for window, _ in split_windows(self.ids, self.answers):
                output = original.base_model(input_ids=window.to(original.device), use_cache=False)
                streams[window.numpy().tobytes()] = output.last_hidden_state.cpu()

        def logits(window: Tensor) -> Tensor:
            stream = streams[window.numpy().tobytes()].to(head.weight.device)
            return head.logits(stream[0])[None]

        self._reference = logits
        self.original = text_quality(logits, self.ids, bar=False, answers=self.answers)

    def measure(self, model: nn.Module, step: int = 0) -> Quality:  # noqa: ARG002 - parts of models need it
        return self.quality(model, logits_of(model))

    def quality(self, model: nn.Module, logits: Logits) -> Quality:
        """Measure by a function of windows that calls the model, in the order of the windows."""
        with in_evaluation_mode(model):
            return text_quality(logits, self.ids, self._reference, bar=False, answers=self.answers)
