"""Sums over windows of text of what there is to know of the loss's gradients by a model's matrices.

They need the whole model, and its gradients, in memory.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.analysis.factors.matrices import Matrices, Matrix
from surgeon.checkpoint.streamed import streamed_layers
from surgeon.errors import first_line
from surgeon.models.weights import NamedTensors
from surgeon.processes.files import whole_file

_WINDOWS = "windows"  # how many are summed up
_IDENTITY = "identity"  # in the file's metadata
_KEPT_EVERY = 16  # windows


def summed_gradients(
    model: PreTrainedModel,
    ids: Tensor,
    matrices: Collection[Matrix],
    of: Callable[[Tensor], Tensor],
    kept: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    ran: Callable[[float], Any] = lambda _: None,
) -> dict[Matrix, Tensor]:
    """By matrix: something of the gradient of each window's loss, summed over windows.

    Args:
        model: unedited; its parameters are left as they are.
        ids: (windows, tokens); the loss is the mean negative log-likelihood of the tokens of a window.
        of: what is summed up, of a gradient, (out, in).
        kept: a file with what was summed up so far, to go on with; a damaged one, or one of another identity, is not.
        identity: what the sums depend on, as JSON values.
        ran: called with the number of windows done.

    Raises:
        ValueError: if the model's weights are read layer by layer, or a gradient is not finite, naming the matrix.
    """
    if streamed_layers(model) is not None:
        raise ValueError(
            "gradients go through the whole model, which has to fit into memory; choose what does without them "
            "(whitened factors, importance by activation), or a machine with more memory"
        )
    reader = Matrices(model)
    done = 0
    reader.check(list(matrices))
    sums: dict[Matrix, Tensor] = {}
    about = {_IDENTITY: json.dumps(identity, sort_keys=True)}
    if kept is not None and kept.exists():
        try:
            with safe_open(kept, framework="pt") as file:
                if file.metadata() != about:
                    raise ValueError("it is of another model, text or program")
                done = int(file.get_tensor(_WINDOWS))
                sums = {one: file.get_tensor(str(one)) for one in matrices}
        except (OSError, SafetensorError, ValueError) as error:
            reason = first_line(error)
            warnings.warn(f"{kept} cannot be gone on with ({reason}); gradients are summed again", stacklevel=2)
            done = 0
            sums = {}
    for window in range(done, len(ids)):
        for matrix, gradient in _gradients(model, ids[window : window + 1].to(model.device), reader, matrices):
            if not gradient.isfinite().all():
                raise ValueError(f"the loss's gradient by {matrix} holds NaN or infinity; check the model's weights")
            found = of(gradient)
            sums[matrix] = sums[matrix].add_(found) if matrix in sums else found
        ran(1)
        if kept is not None and ((window + 1) % _KEPT_EVERY == 0 or window + 1 == len(ids)):
            with whole_file(kept) as beside:
                tensors = {_WINDOWS: torch.tensor(window + 1)} | {str(one): sums[one] for one in matrices}
                save_file(tensors, beside, metadata=about)
    return sums


def _gradients(
    model: PreTrainedModel, ids: Tensor, reader: Matrices, matrices: Collection[Matrix]
) -> list[tuple[Matrix, Tensor]]:
    modules = {matrix: reader.module(matrix) for matrix in matrices}
    weights = list(dict.fromkeys(_weight(module) for module in modules.values()))  # several may be packed into one
    asked = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in asked:
            parameter.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        with torch.enable_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            found = dict(zip(weights, torch.autograd.grad(loss, weights), strict=True))
    finally:
        for parameter, before in asked:
            parameter.requires_grad_(before)
    parts = []
    for matrix, module in modules.items():
        place = reader.stored(matrix)
        store = NamedTensors({place.name: found[_weight(module)]})
        parts.append((matrix, replace(place, store=store).whole()))
    return parts


def _weight(module: nn.Module) -> nn.Parameter:
    return module.get_parameter("weight")
