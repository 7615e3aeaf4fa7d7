"""How little a layer's work depends on the layer before it: counterfactual CKA, block influence, angular distance.

The CKA compares what a sublayer adds in the unedited model with what it adds when the contribution of the layer before
is taken out of the stream (Layer Parallelism, section 3, figure 5). With h_k the stream after layer k and x the one
before it, the counterfactual stream h_k - A_k - F_k is x itself: the next layer is run on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.cka import LEAST_SAMPLES, LinearCKA
from surgeon.analysis.measure import windows_in_a_walk
from surgeon.analysis.streams import Streams, compare_streams
from surgeon.analysis.walk import walks
from surgeon.model import require_unedited
from surgeon.progress import progress
from surgeon.provenance import write_json, write_table
from surgeon.quality.data import Windows

LAYERS_TABLE = "similarity.csv"
DISTANCES_TABLE = "distances.csv"
RECORD = "similarity.json"
CKA_COLUMNS = ("cka_attention", "cka_attention_debiased", "cka_mlp", "cka_mlp_debiased")
_STREAMS_COMPARED = 16  # two passes over a layer, and two outputs in float64 as they are and around their mean


@dataclass(frozen=True)
class Similarity:
    """The result of `similarity`; layers count from 0.

    Attributes:
        layers: one row per layer, as in `similarity.csv`: `layer`; `cka_attention`, `cka_attention_debiased`,
            `cka_mlp`, `cka_mlp_debiased` (NaN for layer 0, which has no layer before it); `block_influence`;
            `attention_size` and `mlp_size`, the mean norm of a sublayer's output relative to the stream it reads.
        distances: one row per stretch of layers, as in `distances.csv`: `first` and `last`, both included;
            `angular_distance` between the streams before and after it, averaged over all tokens, and
            `angular_distance_last_token`, over the last token of each window; `cosine_distance`, 1 - the mean cosine
            between them.
        record: provenance and settings, as in `similarity.json`.
    """

    layers: pd.DataFrame
    distances: pd.DataFrame
    record: dict[str, Any]


def similarity(
    model: PreTrainedModel,
    windows: Windows,
    folder: Path,
    record: dict[str, Any] | None = None,
    memory: int | None = None,
) -> Similarity:
    """Measure CKA, block influence and angular distances, and write `similarity.csv`, `distances.csv` and the record.

    Runs the model's layers three times over: once for the distances between all depths, then, layer by layer, as they
    are and on the counterfactual stream. Besides the model it holds two streams of all tokens, and the features' 6
    covariance matrices of one layer.

    Args:
        record: provenance to begin `similarity.json` with.
        memory: a limit in bytes on the memory of the whole process.

    Raises:
        ValueError: if the model is an edited one, its streams are not finite (naming the sublayer), there are fewer
            than 4 tokens, or the memory limit is too small.
        OSError: if the folder cannot be written to.
    """
    require_unedited(model)
    ids = windows.ids
    if ids.numel() < LEAST_SAMPLES:
        raise ValueError(f"CKA needs at least {LEAST_SAMPLES} tokens, not {ids.numel()}; raise --tokens")
    folder.mkdir(parents=True, exist_ok=True)
    num_layers = model.config.num_hidden_layers
    with progress("similarity", (6 * num_layers - 2) * len(ids), "sublayers x windows") as ran:
        streams = compare_streams(model, ids, ran, memory)
        cka = counterfactual_cka(model, ids, ran, memory)
    layers, distances = _layers_table(cka, streams), _distances_table(streams)
    record = (record or {}) | {"samples": ids.numel(), "features": model.config.hidden_size}
    for name, table in ((LAYERS_TABLE, layers), (DISTANCES_TABLE, distances)):
        write_table(folder / name, table)
    write_json(folder / RECORD, record)
    return Similarity(layers, distances, record)


@torch.inference_mode()
def counterfactual_cka(
    model: PreTrainedModel, ids: Tensor, ran: Callable[[float], Any] = lambda _: None, memory: int | None = None
) -> list[dict[str, float]]:
    """For each layer, what its sublayers add compared with what they add without the layer before.

    Args:
        ids: (windows, tokens); every token is a sample.
        ran: called with the number of sublayers run, times the windows they ran on.
        memory: a limit in bytes on the memory of the whole process.

    Returns:
        By layer, the CKA columns of `similarity.csv`; NaN for layer 0, and where features do not vary or, without the
        layer before, are not finite.

    Raises:
        ValueError: naming the sublayer where numbers stop being finite in the unedited model; if the limit is too
            small.
    """
    hidden, itemsize = model.config.hidden_size, model.dtype.itemsize
    held = 4 * ids.numel() * hidden * itemsize + 6 * 8 * hidden**2  # streams of all tokens, and sums over features
    parts = list(walks(model, ids, windows_in_a_walk(model, ids, _STREAMS_COMPARED, held, memory)))
    compared = []
    before: list[Tensor] = []
    now = [walk.start for walk in parts]
    for layer in range(model.config.num_hidden_layers):
        attention, mlp = LinearCKA(), LinearCKA()
        after = []
        for number, walk in enumerate(parts):
            passed = walk.dense_layer(layer, now[number])
            after.append(passed.after)
            if before:
                without = walk.layer(layer, before[number])
                attention.add(passed.attention.flatten(0, 1), without.attention.flatten(0, 1))
                mlp.add(passed.mlp.flatten(0, 1), without.mlp.flatten(0, 1))
            ran((4 if before else 2) * len(now[number]))
        values = [x for cka in (attention, mlp) for x in (cka.biased(), cka.debiased())] if before else [math.nan] * 4
        compared.append(dict(zip(CKA_COLUMNS, values, strict=True)))
        before, now = now, after
    return compared


def _layers_table(compared: list[dict[str, float]], streams: Streams) -> pd.DataFrame:
    rows = [
        {
            "layer": layer,
            **cka,
            "block_influence": 1 - float(streams.cosine[layer, layer + 1]),
            "attention_size": float(streams.attention[layer]),
            "mlp_size": float(streams.mlp[layer]),
        }
        for layer, cka in enumerate(compared)
    ]
    return pd.DataFrame(rows)


def _distances_table(streams: Streams) -> pd.DataFrame:
    num_layers = len(streams.attention)
    rows = [
        (
            first,
            last,
            float(streams.angle[first, last + 1]),
            float(streams.last_angle[first, last + 1]),
            1 - float(streams.cosine[first, last + 1]),
        )
        for first in range(num_layers)
        for last in range(first, num_layers)
    ]
    columns = ["first", "last", "angular_distance", "angular_distance_last_token", "cosine_distance"]
    return pd.DataFrame(rows, columns=columns)
