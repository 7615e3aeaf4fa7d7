"""`surgeon.check`: what would work with a model, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surgeon.checkpoint.config import CONFIG, find_config
from surgeon.checkpoint.random_weights import RandomCheckpoint
from surgeon.checkpoint.read import DEMO, QUANTIZATION, read_json
from surgeon.errors import did_you_mean
from surgeon.findings.check import Check
from surgeon.findings.outline import outline_text
from surgeon.library.capabilities import Capabilities
from surgeon.library.opening import check_counts
from surgeon.memory import show_size
from surgeon.models.families import Unsupported
from surgeon.models.unknown import mechanisms
from surgeon.models.weights.quantised import rules_of
from surgeon.named import model_name, on_disk
from surgeon.opened import Model, open_model
from surgeon.processes.files import make_folder
from surgeon.runtime.plan.checks import DTYPES
from surgeon.words import plural

RANKS = (1, 2, 4, 8)


def check(
    model: str | Path | Model,
    *,
    ranks: Sequence[int] = RANKS,
    dtype: str | None = None,
    draft: str | Path | None = None,
    output: str | Path | None = None,
) -> Check:
    """Say what would work with a model, what not and why, and how much memory each would take.

    Nothing is loaded: programs of every operation are tried on the shapes of its tensors, by the code that would refuse
    them later. Of a folder with weights the headers of its files are read, of a name on the hub its configuration.

    Args:
        model: a folder, a config.json, a name on the hub, "demo", or a model that is open.
        ranks: numbers of tensor-parallel ranks to be looked at.
        dtype: to compute in on ranks, "float32", "bfloat16" or "float16"; by default as the weights are stored.
        draft: a program, a recipe or a variant by name: whether it can draft for the model,
            and on which ranks.
        output: folder for check.csv and check.json.

    Returns:
        The answers; `refused` says why, and what surgeon would have to learn, where the architecture is not supported.

    Raises:
        FileNotFoundError: if there is no such model, or a file of it is missing.
        ValueError: if a file of it is damaged, it has no architecture, or there is no such dtype.
    """
    check_counts(**{"the number of ranks": min(ranks, default=1)})
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"there is no dtype {dtype!r} to compute in; {did_you_mean(dtype, DTYPES)}")
    name = model.name if isinstance(model, Model) else model_name(model)
    try:
        opened = _with_shapes(model)
        able = Capabilities(opened, tuple(ranks), dtype or str(opened.dtype).removeprefix("torch."), draft)
        found = Check.of(able.verdicts(), model=name, facts=_facts(opened))
    except Unsupported as refusal:
        found = Check.of([], model=name, refused=str(refusal), facts=mechanisms(read_json(find_config(name))))
    if output is None:
        return found
    make_folder(Path(output))
    return found.save(Path(output))


def _with_shapes(model: str | Path | Model) -> Model:
    """A model with the shapes of its tensors, by the headers of its files, or without these by its class."""
    if isinstance(model, Model) and model.files is not None:
        return model
    name = model.name if isinstance(model, Model) else str(model)
    folder = on_disk(name)
    if not isinstance(model, Model) and (name == DEMO or (folder is not None and any(folder.glob("*.safetensors*")))):
        return open_model(name)
    if isinstance(model, Model) and (folder is None or folder.is_dir()):
        return Model(name, RandomCheckpoint(Path(name), config=model.config), model.config, model.own)
    path = find_config(name)
    if "model_type" not in read_json(path):
        raise ValueError(f"{path} has no model_type, so that it says of no architecture; give the {CONFIG} of a model")
    known = model if isinstance(model, Model) else open_model(name, weights=False)
    return Model(name, RandomCheckpoint(path), known.config, known.own)


def _facts(model: Model) -> dict[str, str]:
    """What the model is, by label."""
    shapes = model.shapes
    stored = str(model.dtype).removeprefix("torch.")
    rope = model.family.rope(model.config) if model.family.rotary else None
    digits = 1 if model.parameters < 1e7 else 0
    facts = {
        "model": f"{model.label}: {shapes.family.name}, {plural(shapes.layers, 'layer')} {shapes.hidden} wide, "
        f"{plural(shapes.heads, 'head')} of {shapes.head_dim} over {plural(shapes.kv_heads, 'KV head')}, "
        f"{shapes.neurons} neurons, vocabulary {shapes.vocabulary}, {'tied to' if shapes.tied else 'with'} the head",
        "weights": f"{model.parameters / 1e6:,.{digits}f}M parameters, {show_size(model.size)}, {stored}",
        "positions": f"{model.positions:,}, {_listed(rope) if rope else 'learned'}",
    }
    if windows := [window for window in shapes.windows if window is not None]:
        facts["windows"] = f"of {max(windows):,} tokens in {len(windows)} of {plural(shapes.layers, 'layer')}"
    if (mixture := shapes.family.mixture) is not None:
        of = f"{getattr(model.config, mixture.count)} in a layer"
        facts["experts"] = f"{of}, {mixture.routing(model.config).top_k} of them for each token"
    if model.wrapped is not None:
        facts["inside"] = f"{model.wrapped.wrapper.name}, of which the rest stays as it is"
    if quantised := model.checkpoint.config.get(QUANTIZATION):
        facts["quantised"] = _quantised(quantised)
    if model.own is not None:
        facts["program"] = outline_text(model.own, shapes.layers, shapes.family.steps_per_layer)
    return facts


def _quantised(said: Any) -> str:
    """How weights are stored, and what becomes of them."""
    try:
        schemes = dict.fromkeys(rule.scheme.description for rule in rules_of(said))
    except ValueError as refusal:
        return f"not supported: {refusal}"
    return f"{', '.join(schemes)}; dequantised as they are read, which takes the memory said here"


def _listed(entries: Mapping[str, Any]) -> str:
    """Entries of a configuration, lists of numbers by their length."""
    said = []
    for name, value in entries.items():
        if isinstance(value, Mapping):
            said.append(f"{name}: {_listed(value)}")
        else:
            said.append(f"{name} {f'{len(value)} numbers' if isinstance(value, list) else value}")
    return ", ".join(said)
