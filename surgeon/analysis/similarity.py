"""How little a layer's work depends on the layer before it: counterfactual CKA, block influence, angular distance.

The CKA compares what a sublayer adds in the unedited model with what it adds when the contribution of the layer before
is taken out of the stream (Layer Parallelism, section 3, figure 5). With h_k the stream after layer k and x the one
before it, the counterfactual stream h_k - A_k - F_k is x itself: the next layer is run on it.

Native tracks are compared each with itself: streams and stretches are those of one track between two meetings, and
what is taken out of the stream at a meeting is the last layer of the track's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.cka import LEAST_SAMPLES, LinearCKA
from surgeon.analysis.engine.memory import windows_in_a_walk
from surgeon.analysis.engine.streams import Streams, compare_streams
from surgeon.analysis.engine.walk import layers_run, runs_of, walks
from surgeon.language.program import Fork, Program
from surgeon.models.edit import as_stored, program_of
from surgeon.models.families import family_of
from surgeon.progress import progress
from surgeon.quality.data import Windows
from surgeon.results.similarity import Similarity

CKA_COLUMNS = ("cka_attention", "cka_attention_debiased", "cka_mlp", "cka_mlp_debiased")
_STREAMS_COMPARED = 16  # two passes over a layer, and two outputs in float64 as they are and around their mean


def similarity(
    model: PreTrainedModel,
    windows: Windows,
    folder: Path,
    record: dict[str, Any] | None = None,
    memory: int | None = None,
) -> Similarity:
    """Measure CKA, block influence and angular distances, and write `similarity.csv`, `distances.csv` and the record.

    A model that runs a program of its own (native tracks, say) has rows for the layers that it runs whole, and for
    stretches of them that one track runs in order.

    Runs the model's layers three times over: once for the distances between all depths, then, layer by layer, as they
    are and on the counterfactual stream. Besides the model it holds two streams of all tokens, and the features' 6
    covariance matrices of one layer.

    Args:
        record: provenance to begin `similarity.json` with.
        memory: a limit in bytes on the memory of the whole process.

    Raises:
        ValueError: if the model runs no layer whole, or weights that are those of no layer, its streams are not finite
            (naming the sublayer), there are fewer than 4 tokens, or the memory limit is too small.
        OSError: if the folder cannot be written to.
    """
    ids, record = windows.ids, record or {}
    if ids.numel() < LEAST_SAMPLES:
        raise ValueError(f"CKA needs at least {LEAST_SAMPLES} tokens, not {ids.numel()}; raise --tokens")
    with as_stored(model) as program:
        if program != program_of(model):
            record = record | {"program": str(program)}
        whole = sum(map(len, runs_of(program, family_of(model.config).steps_per_layer)))
        folder.mkdir(parents=True, exist_ok=True)
        with progress("similarity", 6 * whole * len(ids), "sublayers x windows") as ran:
            streams = compare_streams(model, program, ids, ran, memory)
            cka = counterfactual_cka(model, program, ids, ran, memory)
    layers, distances = _layers_table(cka, streams), _distances_table(streams)
    record = record | {"samples": ids.numel(), "features": model.config.hidden_size}
    found = Similarity(layers, distances, record=record)
    found.write(folder)
    return found


@torch.inference_mode()
def counterfactual_cka(
    model: PreTrainedModel,
    program: Program,
    ids: Tensor,
    ran: Callable[[float], Any] = lambda _: None,
    memory: int | None = None,
) -> list[dict[str, float]]:
    """For each whole layer, in the order of `runs_of`: what its sublayers add, and what without the layer before.

    Args:
        model: the layers that it is stored as.
        program: over these.
        ids: (windows, tokens); every token is a sample.
        ran: called with the number of sublayers run, times the windows they ran on; a layer without one before it
            counts like the others.
        memory: a limit in bytes on the memory of the whole process.

    Returns:
        The CKA columns of `similarity.csv`; NaN where there is no layer before, where features do not vary or, without
        the layer before, are not finite.

    Raises:
        ValueError: naming the sublayer where numbers stop being finite in the model as it is; if the limit is too
            small.
    """
    hidden, itemsize = model.config.hidden_size, model.dtype.itemsize
    most = max((len(node.branches) for node in program.nodes if isinstance(node, Fork)), default=0)
    held = (4 + 2 * most) * ids.numel() * hidden * itemsize + 6 * 8 * hidden**2  # streams of all, sums over features
    parts = list(walks(model, ids, windows_in_a_walk(model, ids, _STREAMS_COMPARED, held, memory)))
    ways, compared = [layers_run(walk, program) for walk in parts], []
    # All windows go through the program together, so that there are sums for one layer at a time.
    for _ in range(sum(map(len, runs_of(program, family_of(model.config).steps_per_layer)))):
        attention, mlp = LinearCKA(), LinearCKA()
        for walk, way in zip(parts, ways, strict=True):
            one = next(way)
            if one.without is not None:
                without = walk.layer(one.layer, one.without)
                attention.add(one.passed.attention.flatten(0, 1), without.attention.flatten(0, 1))
                mlp.add(one.passed.mlp.flatten(0, 1), without.mlp.flatten(0, 1))
            known = one.without is not None
            del one
            ran(4 * len(walk.ids))
        values = [x for cka in (attention, mlp) for x in (cka.biased(), cka.debiased())] if known else [math.nan] * 4
        compared.append(dict(zip(CKA_COLUMNS, values, strict=True)))
    return compared


def _layers_table(compared: list[dict[str, float]], streams: list[Streams]) -> pd.DataFrame:
    places = [(found, place) for found in streams for place in range(len(found.run))]
    rows = [
        {
            "layer": found.run[place],
            **cka,
            "block_influence": 1 - float(found.cosine[place, place + 1]),
            "attention_size": float(found.sizes[place, 0]),
            "mlp_size": float(found.sizes[place, 1]),
        }
        for (found, place), cka in zip(places, compared, strict=True)
    ]
    return pd.DataFrame(rows).sort_values("layer", kind="stable", ignore_index=True)


def _distances_table(streams: list[Streams]) -> pd.DataFrame:
    rows = [
        (
            found.run[first],
            found.run[last],
            float(found.angle[first, last + 1]),
            float(found.last_angle[first, last + 1]),
            1 - float(found.cosine[first, last + 1]),
        )
        for found in streams
        for first in range(len(found.run))
        for last in range(first, len(found.run))
    ]
    columns = ["first", "last", "angular_distance", "angular_distance_last_token", "cosine_distance"]
    return pd.DataFrame(sorted(rows), columns=columns)
