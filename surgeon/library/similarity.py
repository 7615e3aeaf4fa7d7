"""`surgeon.similarity`: what a layer's output owes to the layer before it, and how well that predicts damage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from surgeon.analysis.proxies import correlate, damages, read_scan
from surgeon.analysis.similarity import similarity as measure_similarity
from surgeon.analysis.subject import open_subject
from surgeon.findings.scan import Scan
from surgeon.findings.sensitivity import Sensitivity
from surgeon.findings.similarity import Similarity
from surgeon.library.opening import as_folder
from surgeon.opened import Model
from surgeon.quality.data import DEFAULT_TOKENS


def similarity(
    model: str | Path | Model,
    data: str | Path | None = None,
    output: str | Path = "runs/similarity",
    *,
    scan: str | Path | Scan | None = None,
    sensitivity: str | Path | Sensitivity | None = None,
    tokens: int = DEFAULT_TOKENS,
    window: int | None = None,
    separator: str | None = None,
    memory: int | str | None = None,
) -> Similarity:
    """Measure how much each layer depends on the one before it, by CKA, block influence and angular distance.

    Args:
        model: a folder, a hub name, "demo", or a model that is open.
        data: a text file, a table or a dataset (docs/texts.md), or "demo"; by default that, with a warning.
        output: folder for similarity.csv, distances.csv, similarity.json and pictures.
        scan: a finished scan of this model, or its folder: every measure is correlated with its heatmaps (proxies.csv).
        sensitivity: with `scan`: a finished sensitivity of this model, or its folder, whose bounds are correlated too.
        tokens: of the text, in windows of `window`; documents are apart at `separator`.
        memory: the most that the process may take, in bytes or as text ("2GB").

    Raises:
        FileNotFoundError, ValueError: if the model, the text or a folder cannot be used.
        OSError: if the output cannot be written.
    """
    if sensitivity is not None and scan is None:
        raise ValueError("sensitivity is used with scan only; give scan, too, a folder made by surgeon scan")
    folder = Path(output)
    subject = open_subject(model, data, tokens=tokens, window=window, separator=separator, memory=memory)
    # What is wrong with the folders is said before any work begins.
    inputs: dict[str, Any] = {}
    measured = pairs = None
    if sensitivity is not None:
        inputs["sensitivity"] = str(as_folder(sensitivity))
        pairs = Sensitivity.read(as_folder(sensitivity), subject.opened.hash).pairs
    if scan is not None:
        measured = read_scan(as_folder(scan), subject.opened.hash)
        text = {name: measured.record.get(name) for name in ("data", "data_hash", "window", "tokens")}
        inputs["scan"] = {"folder": str(as_folder(scan))} | text
    found = measure_similarity(subject, folder, inputs)
    if measured is not None:
        found = replace(found, proxies=correlate(damages(measured), found, pairs))
    return replace(found, files=(*found.write(folder), *found.draw(folder)))
