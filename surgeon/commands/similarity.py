"""`surgeon similarity`, `surgeon.similarity`: dependence of each layer's output on the layer before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from surgeon.commands.command import command, option
from surgeon.commands.options import DefaultData, MeasuringFlags, ModelName, Output

if TYPE_CHECKING:
    from surgeon.findings.scan import Scan
    from surgeon.findings.sensitivity import Sensitivity
    from surgeon.findings.similarity import Similarity


@command()
def similarity(
    model: ModelName,
    data: DefaultData = None,
    output: Output = "runs/similarity",
    *,
    scan: Annotated[
        str | Path | Scan | None,
        option(
            "Folder of a finished surgeon scan of this model: also correlate every measure with its heatmaps, and "
            "write proxies.csv.",
            kind=Path,
        ),
    ] = None,
    sensitivity: Annotated[
        str | Path | Sensitivity | None,
        option(
            "With --scan: folder of a finished surgeon sensitivity of this model; its error bounds are correlated too.",
            kind=Path,
        ),
    ] = None,
    **text: Unpack[MeasuringFlags],
) -> Similarity:
    """Measure how much each layer depends on the one before it, by CKA, block influence and angular distance.

    CKA compares what attention and MLP of a layer add with what they add when the contribution of the layer before is
    taken out of the stream: near 1, the layer hardly needs it. Layer 0 has no layer before it (nan). Biased CKA looks
    too high unless there are many more tokens than features; the debiased one does not.

    Writes similarity.csv (by layer), distances.csv (by stretch; first and last are both included, layers count from
    0), similarity.json, similarity.png and distances.png. Angular distance is the mean over all tokens; the column
    angular_distance_last_token takes the last token of each window only, as it was first defined.

    Raises:
        FileNotFoundError, ValueError: if model, text or a folder cannot be used.
        OSError: if the output cannot be written.
    """
    from surgeon.analysis.similarity import correlate, damages, read_scan
    from surgeon.analysis.similarity import similarity as measure
    from surgeon.analysis.subject import open_subject
    from surgeon.commands.opening import as_folder
    from surgeon.findings.sensitivity import Sensitivity

    if sensitivity is not None and scan is None:
        raise ValueError(
            "sensitivity is used with scan only; give scan, too, a folder made by surgeon scan"
        )
    folder = Path(output)
    subject = open_subject(model, data, **text)
    # What is wrong with the folders is said before any work begins.
    inputs: dict[str, Any] = {}
    measured = None
    pairs = None
    if sensitivity is not None:
        inputs["sensitivity"] = str(as_folder(sensitivity))
        pairs = Sensitivity.read(as_folder(sensitivity), subject.opened.hash).pairs
    if scan is not None:
        measured = read_scan(as_folder(scan), subject.opened.hash)
        of_text = {name: measured.record.get(name) for name in ("data", "data_hash", "window", "tokens")}
        inputs["scan"] = {"folder": str(as_folder(scan))} | of_text
    found = measure(subject, folder, inputs)
    if measured is not None:
        found = replace(found, proxies=correlate(damages(measured), found, pairs))
    return replace(found, files=(*found.write(folder), *found.draw(folder)))
