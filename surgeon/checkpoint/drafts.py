"""A healed draft in a folder of its own: what it changes of its model's weights, and nothing else.

    draft.json                   its program, the model that it drafts for, by name and hash, and how it was healed
    norms.safetensors            gains and shifts of norms, by the names that `transformers` has for them in the model
    adapter_model.safetensors    LoRA adapters on the model's own modules, as peft writes them, with their settings in
    adapter_config.json          the other file

Norms and adapters need not both be there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgeon.checkpoint.read import read_json
from surgeon.checkpoint.tensor_file import TensorFile
from surgeon.errors import shown
from surgeon.language.program import Program
from surgeon.language.sublayer import KINDS, Sublayer
from surgeon.models.families import Projection
from surgeon.models.weights import Factors, ModelWeights, Replaced, Tensors

DRAFT_FILE = "draft.json"
NORMS_FILE = "norms.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
WRAPPED = "base_model.model."  # what peft puts before the names of the model's own modules
FORMAT = 1
_ENTRIES = {"program": str, "model": str, "model_hash": str}
_OTHERS = ("use_dora", "use_rslora", "modules_to_save", "target_parameters", "lora_bias", "trainable_token_indices")


@dataclass(frozen=True)
class HealedDraft:
    """What draft.json says.

    Attributes:
        model: the name of the model that it drafts for, without the place where that lies.
        model_hash: which one it is (`Checkpoint.model_hash`).
        record: of its training, as `surgeon heal` has it of a run.
    """

    folder: Path
    program: Program
    model: str
    model_hash: str
    record: dict[str, Any] = field(default_factory=dict, compare=False)

    @staticmethod
    def is_at(folder: Path) -> bool:
        """Whether a folder holds one."""
        return (folder / DRAFT_FILE).is_file()

    @classmethod
    def read(cls, folder: Path) -> HealedDraft:
        """The draft in a folder.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if its file is damaged, or of a later version.
        """
        path = folder / DRAFT_FILE
        entries = read_json(path)
        if entries.get("surgeon") != FORMAT:
            raise ValueError(f"{path}: surgeon is {shown(entries.get('surgeon'))}, and this version reads {FORMAT}")
        for name, kind in _ENTRIES.items():
            if not isinstance(entries.get(name), kind):
                raise ValueError(f"{path}: {name} must be text, not {shown(entries.get(name))}")
        program = Program.parse(entries["program"])
        return cls(folder, program, entries["model"], entries["model_hash"], entries.get("trained") or {})

    def to_json(self) -> dict[str, Any]:
        own = {"program": str(self.program), "model": self.model, "model_hash": self.model_hash}
        return {"surgeon": FORMAT, **own, "trained": self.record}

    def require_model(self, name: str, model_hash: str) -> None:
        """Refuse to draft for another model than it was healed for.

        Raises:
            ValueError: saying for which one.
        """
        if model_hash != self.model_hash:
            raise ValueError(
                f"{self.folder} was healed to draft for {self.model} (sha256:{self.model_hash[:12]}), and {name} has "
                f"other weights or another configuration (sha256:{model_hash[:12]}); use that model, or heal a draft "
                "for this one"
            )


@dataclass(frozen=True)
class DraftChanges:
    """The tensors of a healed draft.

    Attributes:
        norms: by their paths from the causal language model.
        adapters: by the paths of modules: what is added to their matrices, scaled.
    """

    norms: Tensors
    adapters: dict[str, Factors]

    @classmethod
    def read(cls, folder: Path) -> DraftChanges:
        """Those of a folder.

        Raises:
            ValueError: if a file is damaged, or the adapter is more than LoRA on matrices.
        """
        norms: Tensors = {}
        if (path := folder / NORMS_FILE).is_file():
            file = TensorFile(path)
            norms = {name: file.tensor(name) for name in file.names()}
        return cls(norms, dict(_adapters(folder)) if (folder / ADAPTER_FILE).is_file() else {})

    @property
    def nbytes(self) -> int:
        factors = (factor for one in self.adapters.values() for factor in one)
        return sum(tensor.nbytes for tensor in (*self.norms.values(), *factors))

    def over(self, weights: ModelWeights) -> ModelWeights:
        """A model's weights with these norms in place of its own; matrices are as they were."""
        store = Replaced(weights.store, {weights.names.of(path): norm for path, norm in self.norms.items()})
        return ModelWeights(store, weights.family, weights.head_dim, weights.factors)

    def touches(self, sublayer: Sublayer, weights: ModelWeights) -> bool:
        """Whether something of a sublayer, or of what its slice is of, is changed."""
        spec = weights.spec(sublayer)
        prefix = weights.prefix(sublayer.layers[0])
        paths = [f"{prefix}{path}." for path in (spec.norm, spec.post_norm, *spec.head_norms) if path is not None]
        modules = {f"{prefix}{projection.path}" for projection in spec.projections}
        return bool(modules & self.adapters.keys()) or any(name.startswith(tuple(paths)) for name in self.norms)

    def factors(self, sublayer: Sublayer, weights: ModelWeights) -> dict[str, Factors]:
        """What is added to a sublayer's matrices, or a slice's, by role; without columns that add nothing."""
        found = {}
        for projection in weights.spec(sublayer).projections:
            own = self.adapters.get(f"{weights.prefix(sublayer.layers[0])}{projection.path}")
            if own is None:
                continue
            (first, second), at = own, weights.features(sublayer, projection.role)
            first, second = (first, second[at]) if projection.reads_stream else (first[:, at], second)
            used = first.any(1) & second.any(0)  # of slices that were healed each by itself, others are zero
            if used.any():
                found[projection.role] = Factors(first[used], second[:, used])
        return found

    def check(self, weights: ModelWeights) -> None:
        """Refuse what does not fit a model, by the shapes of its tensors.

        Raises:
            ValueError: naming the first tensor.
        """
        for path, norm in self.norms.items():
            there = weights.shape(path) if path in weights else None
            if there != tuple(norm.shape):
                raise ValueError(f"the draft's norm {path} has the shape {tuple(norm.shape)}, and the model's {there}")
        for path, (first, second) in self.adapters.items():
            projection = _projection_at(path, weights)
            if projection is None:
                raise ValueError(f"the draft has an adapter on {path}, which is no matrix of the model's layers")
            stored = weights.shape(f"{path}.weight")
            wanted = tuple(reversed(stored)) if projection.transposed else stored
            if (len(second), first.shape[1]) != wanted or len(first) != second.shape[1]:
                raise ValueError(
                    f"the draft's adapter on {path} is of {tuple(first.shape)} and {tuple(second.shape)}, which does "
                    f"not fit a matrix of {wanted}"
                )


def _projection_at(path: str, weights: ModelWeights) -> Projection | None:
    """The first projection in a module of a layer that is stored as a matrix."""
    match = re.fullmatch(rf"{re.escape(weights.family.layers)}\.(\d+)\.(.+)", path)
    if match is None or f"{path}.weight" not in weights:
        return None
    each = (one for kind in KINDS for one in weights.family.spec(kind, int(match[1])).projections)
    return next((one for one in each if one.path == match[2] and not one.stacked), None)


def _adapters(folder: Path) -> Iterator[tuple[str, Factors]]:
    """Each adapted module's path, and what is added to its matrix."""
    config = read_json(folder / ADAPTER_CONFIG)
    file = TensorFile(folder / ADAPTER_FILE)
    others = [name for name in _OTHERS if config.get(name)]
    if config.get("peft_type") != "LORA" or others or config.get("bias", "none") != "none":
        what = ", ".join(others) or f"peft_type {shown(config.get('peft_type'))}, bias {shown(config.get('bias'))}"
        raise ValueError(f"{folder / ADAPTER_CONFIG}: a draft has LoRA on matrices and nothing else, not {what}")
    patterns = config.get("alpha_pattern") or {}
    firsts = [name for name in file.names() if name.endswith(".lora_A.weight")]
    if sorted([*firsts, *(name.replace(".lora_A.", ".lora_B.") for name in firsts)]) != sorted(file.names()):
        raise ValueError(f"{folder / ADAPTER_FILE} has tensors that are no pairs of lora_A and lora_B")
    for name in firsts:
        path = name.removeprefix(WRAPPED).removesuffix(".lora_A.weight")
        first = file.tensor(name).float()
        second = file.tensor(name.replace(".lora_A.", ".lora_B.")).float()
        own = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", path))
        yield path, Factors(first, second * (next(own, config["lora_alpha"]) / len(first)))
