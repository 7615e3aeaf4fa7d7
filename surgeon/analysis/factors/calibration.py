"""Text to calibrate on, apart from the text that is measured on, and sums over it of gradients by matrices."""

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
from surgeon.language.operations.lowrank import Calibration
from surgeon.models.weights import NamedTensors
from surgeon.opened import Model, open_model
from surgeon.processes.files import whole_file
from surgeon.quality.data import Windows, digest_of, load_windows, window_for
from surgeon.quality.sources import file_and_column

CALIBRATION_TOKENS = 32768


def load_calibration(
    model: str | Model,
    data: str,
    tokens: int,
    wanted: int,
    window: int | None = None,
    separator: str | None = None,
    other: str | None = None,
) -> Windows:
    """Windows to calibrate on: what follows the measured ones in their text, or the beginning of another text.

    Args:
        model: a checkpoint folder, a hub name, "demo", or a model that is open.
        data: the text measured on, as `load_windows` takes it.
        tokens: measured on, from the start of the data.
        wanted: tokens to calibrate on; fewer if the text has no more, which a note says.
        window, separator: as for the text measured on.
        other: text to calibrate on instead of what follows.

    Raises:
        FileNotFoundError: if the model, a file of it, or the data is missing.
        ValueError: if one of them cannot be used, or nothing follows the measured text.
    """
    opened = open_model(model)
    size = window_for(opened.config, window)
    if wanted < size:
        raise ValueError(f"calibration tokens must be at least one window of {size}, not {wanted}")
    if other is not None:
        return load_windows(opened.tokenizer, other, size, wanted, separator)
    found, whole = _behind(opened, data, tokens // size * size, wanted, size, separator)
    left = found.ids.numel()
    if not left:
        raise ValueError(
            f"{data} has {whole} tokens in whole windows, and all of them are measured: none are left to "
            "calibrate on; measure fewer tokens, or give other text as calibration"
        )
    fewer = f"{left} tokens are left to calibrate on, fewer than the {wanted} asked for: all are used"
    return replace(found, notes=(fewer,) if left < wanted // size * size else ())


def _behind(
    model: Model, data: str, before: int, wanted: int, window: int, separator: str | None
) -> tuple[Windows, int]:
    """The windows of a text behind its first tokens, which are whole windows, and how many tokens were read in all."""
    both = load_windows(model.tokenizer, data, window, before + wanted, separator)
    ids = both.ids[before // window :]
    return replace(both, ids=ids, digest=digest_of(ids)), both.ids.numel()


def recorded(windows: Windows, after: int = 0) -> Calibration:
    """How a recipe names the text that was calibrated on, wherever it is used from: a file by its whole path.

    Args:
        after: how many tokens come before it in its data.
    """
    path, column = file_and_column(windows.source)
    whole = windows.source if path is None else str(path.resolve())
    named: Calibration = {
        "data": whole if column is None else f"{whole}:{column}",
        "tokens": windows.ids.numel(),
        "window": windows.ids.shape[1],
        "hash": f"sha256:{windows.digest}",
    }
    if after:
        named["after"] = after
    if windows.separator is not None:
        named["separator"] = windows.separator
    return named


def load_recorded(model: Model, calibration: Calibration) -> Windows:
    """The text that a recipe names.

    Args:
        model: whose tokenizer reads it.

    Raises:
        FileNotFoundError: if the text is gone.
        ValueError: if it is not named, has changed since the recipe was made, or cannot be used.
    """
    if "data" not in calibration:
        raise ValueError("calibration has no text; add data, as in calibration: {data: text.txt, tokens: 32768}")
    data = calibration["data"]
    after = calibration.get("after", 0)
    size = window_for(model.config, calibration.get("window"))
    wanted = calibration.get("tokens", CALIBRATION_TOKENS)
    if after < 0 or after % size:
        raise ValueError(f"calibration: after must be whole windows of {size} tokens, not {after}")
    if wanted < size:
        raise ValueError(f"calibration: tokens must be at least one window of {size}, not {wanted}")
    try:
        found, whole = _behind(model, data, after, wanted, size, calibration.get("separator"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"the calibration text is gone: {error}") from error
    if not len(found.ids):
        raise ValueError(f"calibration: {data} has no more than {whole} tokens, of which {after} are left out")
    known = calibration.get("hash")
    if known is not None and known != f"sha256:{found.digest}":
        raise ValueError(
            f"the calibration text {data} is not what the recipe was made with: its tokens have "
            f"sha256:{found.digest}, and the recipe says {known}; bring the text back, or remove the hash to calibrate "
            "on what there is now"
        )
    return found


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
