"""The model that a user named, opened without its weights; a model with a recipe or a program to run; loading them.

A model is loaded as a `transformers` model, with its program if it has one, or streamed: its layers are modules on
PyTorch's meta device then, and reading a sublayer's tensors maps a part of a safetensors file into memory, which is
freed with the tensors.
"""

from __future__ import annotations

import copy
import json
import platform
import re
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from surgeon.checkpoint.belongings import GENERATION, GGUF_RECORD
from surgeon.checkpoint.config import CONFIG, dense_config, locate, open_stored, read_config_only
from surgeon.checkpoint.describe import read_report
from surgeon.checkpoint.forms import Form, form_of
from surgeon.checkpoint.stored import Checkpoint, StoredModel
from surgeon.checkpoint.tensor_file import StoredTensor, read_json
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe, read_recipe
from surgeon.language.sublayer import LayerShapes
from surgeon.machine import avoid_cudnn_attention
from surgeon.models.edit import edit, recipe_program
from surgeon.models.families import family_of
from surgeon.models.families.base import longest_text
from surgeon.models.shapes import ModelShapes, check_layers
from surgeon.models.weights import FactorSource, ModelWeights, take_experts_apart
from surgeon.models.weights.quantised import PackedTensor
from surgeon.named import is_gguf, is_program, is_recipe, model_name, name_of, on_disk
from surgeon.version import FORMAT, __version__
from surgeon.words import did_you_mean, first_few, show_value

if TYPE_CHECKING:  # takes seconds, and who does not load it does without
    from transformers import PreTrainedModel

DEVICES = ("auto", "cpu", "cuda")


class Model(StoredModel):
    """A model that somebody named, by its configuration and the headers of its weights.

    Or by its configuration alone (`open_model` with `weights=False`, `Model.of_config`): then anything that needs more
    of it raises ValueError.
    """

    @classmethod
    def of_config(cls, config: Any, name: str, own: Program | None = None) -> Model:
        """Make a model of a `transformers` configuration alone."""
        family_of(config)
        return cls(name, None, config, own)

    def __repr__(self) -> str:
        stored = "configuration only" if self.files is None else f"{self.form} form"
        inside = "" if self.wrapped is None else f" inside {self.wrapped.wrapper.name}"
        return f"<surgeon.Model {self.name}: {self.family.name}{inside}, {self.num_layers} layers, {stored}>"

    @property
    def label(self) -> str:
        """A short name for titles and tables."""
        there = on_disk(self.name)
        if there is None:  # demo, or a name on the hub
            return self.name.partition("/")[2] or self.name
        if is_gguf(there):
            return there.stem
        there = there.resolve()
        return (there.parent if there.name == CONFIG else there).name

    @property
    def public_name(self) -> str:
        """The name without the place on this machine."""
        return name_of(self.name)

    @property
    def reference(self) -> str:
        """The name in a recipe, wherever it is used from: a folder by its whole path, else as the user typed it."""
        there = on_disk(self.name)
        if there is not None and is_gguf(there):
            return str(there.absolute())
        if there is not None:
            return str(self.folder.resolve())
        return self.name

    @property
    def form(self) -> Form:
        """The form that it is stored in."""
        return form_of(self.checkpoint)

    @cached_property
    def report(self) -> dict[str, Any] | None:
        """surgeon.json, the record of its export; None where it has none."""
        return read_report(self)

    @cached_property
    def layer_shapes(self) -> LayerShapes:
        """Shapes of its layers' matrices, by the configuration."""
        return self.family.layer_shapes(self.config)

    @cached_property
    def shapes(self) -> ModelShapes:
        """Sizes, by the configuration."""
        return ModelShapes.of(self.label, self.config)

    @property
    def positions(self) -> int:
        """The most tokens that it can read at once."""
        return longest_text(self.family, self.config)

    @property
    def hash(self) -> str:
        """SHA-256 of its weights, which are read for it once, and of its config.json."""
        return self.checkpoint.model_hash()

    @property
    def gguf(self) -> dict[str, Any]:
        """An entry for records: the GGUF file that it was converted from; empty if it was not."""
        if self.files is None and not is_gguf(self.name):
            return {}
        path = (locate(self.name) if self.files is None else self.folder) / GGUF_RECORD
        if not path.is_file():
            return {}
        return {"gguf": {name: value for name, value in read_json(path).items() if name != "written"}}

    def provenance(self, **more: Any) -> dict[str, Any]:
        """Return the record that goes into results; weights are read for their hash."""
        return provenance(self.name, self.hash, **more, **self.gguf)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, every token of which has a row in the embedding."""
        # Importing transformers' tokenizers takes a second.
        from surgeon.checkpoint.texts import open_tokenizer

        return open_tokenizer(self)

    def program_of(self, recipe: Recipe) -> Program:
        """Return the program that a recipe makes of it."""
        made = recipe_program(recipe, self.config, self.own)
        if recipe.weights is not None and self.files is not None:
            recipe.require_model(self.hash, self.checkpoint.weights_hash())
        return made

    def check(self, program: Program) -> None:
        """Refuse a program that names layers or experts which it does not have, or averages mixtures."""
        check_layers(program, self.num_layers)
        self.family.layer_shapes(self.config).check_experts(program.sublayers())


def open_model(name: str | Path | Model, weights: bool = True) -> Model:
    """`surgeon.open`: open a folder, a name on the hub, or "demo"; a model that is open is returned as it is.

    Args:
        weights: whether its weights have to be there. Without, a config.json will do, nothing else is fetched from the
            hub, and a checkpoint in the fused form is the model that it was made of, under the program that it runs.

    Raises:
        FileNotFoundError: if there is no such model, or a file of it is missing.
        ValueError: if a file is damaged, the architecture is not supported, or it is a recipe, a program, or an address
            of something else than a model on the hub.
    """
    if isinstance(name, Model):
        return name
    if not isinstance(name, str | Path | Recipe | EditedModel):
        raise ValueError(
            f"a model is given by its folder or name, or open, not by {type(name).__name__} {show_value(name)}"
        )
    if isinstance(name, EditedModel):
        raise ValueError(
            f"{name.name} was edited, and this takes models as they are stored; give its `model`, and its `program` "
            "where one is taken, or export it and give the folder"
        )
    if isinstance(name, Recipe):
        text = name.source
    else:
        text = str(name)
    if isinstance(name, Recipe) or is_recipe(text) or is_program(text):
        what = "a program" if is_program(text) else "a recipe"
        raise ValueError(
            f"{text} is {what}, which is applied to a model; open the model by its folder or name"
        )
    text = model_name(text)
    if weights:
        stored = open_stored(text)
        return Model(text, stored.files, stored.config, stored.own)
    return Model(text, None, *read_config_only(text))


@dataclass(frozen=True)
class EditedModel:
    """A model and the program that it is to run; its weights have not been read.

    Attributes:
        name: as the user named it: the model's name, or a recipe.
        asked: the program to run in place of the model's own; None to run that.
        recipe: if it is one.
        factors: of matrices that the program has a rank for; by default their truncated singular values.
        factors_identity: the inputs that such factors follow from, as JSON values.
    """

    name: str
    model: Model
    asked: Program | None = None
    recipe: Recipe | None = None
    factors: FactorSource | None = None
    factors_identity: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<surgeon.EditedModel {self.name}: {self.program} of {self.model.family.name}>"

    @property
    def program(self) -> Program:
        return self.asked or self.model.program

    def load(self, device: str = "auto", packed: bool = False) -> PreTrainedModel:
        """Load the model under its program; for cuda onto one GPU that has room for it, else all of them.

        Args:
            packed: as `surgeon.load` takes it.
        """
        where = choose_device(device)
        places = self.model.device_map(self.asked) if where == "cuda" else None
        loaded = load(self.model, device_map=places, packed=packed)
        if self.asked is None:
            return loaded
        return edit(loaded, self.asked, factors=self.factors)

    def identity(self, device: str) -> dict[str, Any]:
        """Return all that its answers on a device depend on, as JSON values; weights are read."""
        tokenizer = self.model.tokenizer
        generation = self.model.folder / GENERATION
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            words = json.dumps(tokenizer.get_vocab(), sort_keys=True)
        else:
            words = backend.to_str()
        return {
            "model_hash": self.model.hash,
            # Penalties, end tokens.
            "generation": read_json(generation) if generation.is_file() else None,
            "program": str(self.program),
            "tokenizer": words,
            "special": tokenizer.special_tokens_map,
            # Numbers differ a little, and 16-bit weights are computed as such.
            "device": choose_device(device),
            "lm_eval": version("lm_eval"),
            **({} if self.factors_identity is None else {"factors": self.factors_identity}),
        }

    def provenance(self, **more: Any) -> dict[str, Any]:
        """Return the record that goes into results; weights are read for their hash."""
        if self.recipe is not None:
            more = {"recipe": self.recipe.to_yaml()} | more
        return self.model.provenance(program=str(self.program), **more)


def open_edited(
    what: str | Path | Recipe | Model | EditedModel,
    program: Program | str | None = None,
    *,
    original: str | Path | Model | None = None,
    tokenizer: bool = True,
) -> EditedModel:
    """Check a model's files, its program and its tokenizer; weights are read only to tell if a recipe is for them.

    Args:
        what: a checkpoint folder (plain, fused, or with a program), a hub name, "demo", a recipe or its path (.yaml), a
            model that is open, or one that was edited.
        program: to run in place of the checkpoint's own.
        original: a model in place of a recipe's own; if the recipe was made for another one, a warning says so.
        tokenizer: whether it has to have one.

    Raises:
        FileNotFoundError: if there is no such model or recipe, or a file of it is missing.
        ValueError: if a file is damaged, the program does not fit, there is no tokenizer, or a recipe was made for
            another model.
    """
    if isinstance(what, str | Path) and is_recipe(what):
        what = read_recipe(Path(what))
    if program is not None and isinstance(what, Recipe | EditedModel):
        if isinstance(what, Recipe):
            kind = f"{what.source} is a recipe"
        else:
            kind = f"{what.name} was edited"
        raise ValueError(f"{kind}, which has a program of its own; give the program with its model")
    if isinstance(what, EditedModel):
        edited = what
    elif isinstance(what, Recipe):
        model = open_model(original or what.model)
        recipe = what
        if original is not None and recipe.weights is not None:
            if mismatch := recipe.mismatch(model.hash, model.checkpoint.weights_hash()):
                warnings.warn(mismatch, stacklevel=2)
            recipe = replace(recipe, weights=model.hash)
        made = model.program_of(recipe)
        model.check(made)
        edited = EditedModel(recipe.source, model, made, recipe)
    else:
        model = open_model(what)
        asked = Program.parse(program) if isinstance(program, str) else program
        if asked is not None:
            model.check(asked)
        edited = EditedModel(model.name, model, asked)
    if tokenizer:
        _ = edited.model.tokenizer  # what is wrong with it is said now
    return edited


def choose_device(device: str) -> str:
    """Return the device to compute on, "cpu" or "cuda"; "auto" is cuda where there is one."""
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; {did_you_mean(device, DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU that this PyTorch can use; use the device cpu")
    if device != "cpu" and torch.cuda.is_available():
        return "cuda"
    return "cpu"


def load(
    model: str | Path | StoredModel,
    dtype: torch.dtype | None = None,
    device_map: Any = None,
    packed: bool = False,
) -> PreTrainedModel:
    """Load a model for surgery, in evaluation mode; no code that lies in the folder is run.

    Args:
        model: a checkpoint folder (edited by surgeon or not), a hub name, or a model that is open (`surgeon.open`).
        dtype: to compute in; by default that of the stored embedding, but float32 for 16-bit weights on a CPU.
        device_map: as in `transformers`: "auto", a device, or a mapping of modules to devices.
        packed: keep quantised matrices in memory as they are stored (`PackedTensor`), and make their numbers whenever
            something is computed with them: less memory, more time, and they cannot be trained.

    Raises:
        FileNotFoundError: if there is no such model, or a file of it is missing.
        ValueError: if the architecture is not supported or a file is damaged.
    """
    avoid_cudnn_attention()
    stored = open_stored(model)
    if dtype is None:
        places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
        on_gpu = any(str(place) not in ("None", "cpu", "disk", "meta") for place in places)
        dtype = stored.compute_dtype("cuda" if on_gpu and torch.cuda.is_available() else "cpu")
    model_class = form_of(stored.checkpoint).model_class(stored)
    config = copy.deepcopy(stored.config)  # which becomes the loaded model's own
    if note := stored.describe_dequantising(str(dtype).removeprefix("torch."), packed):
        warnings.warn(note, stacklevel=1)
    try:
        loaded = from_files(
            model_class, stored, packed, config=config, dtype=dtype, device_map=device_map
        )
    except (ArithmeticError, AssertionError, LookupError, TypeError) as error:
        raise ValueError(
            f"{stored.folder / 'config.json'} describes no model that can be built ({type(error).__name__}: {error})"
        ) from error
    ready: PreTrainedModel = loaded.eval()
    if stored.own is not None:
        edit(ready, stored.own)
        vars(ready)["own_program"] = stored.own  # which recipes start from, whatever it is edited to
    return ready


def from_files(
    model_class: Any, stored: StoredModel, packed: bool = False, **options: Any
) -> PreTrainedModel:
    """Build a model from a folder, or the text decoder in it, as `from_pretrained` does.

    Quantised matrices are read as numbers, or stay `packed`, as `load` takes it.
    """
    wrapped = stored.wrapped
    options = options | {"ignore_mismatched_sizes": True, "output_loading_info": True}
    if stored.checkpoint.quantised or stored.checkpoint.imported:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, GenerationConfig

        if model_class is AutoModelForCausalLM:  # which takes names only
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(options["config"])]
        options["config"] = dense_config(copy.deepcopy(options["config"]))
        tensors = {name: _Unread(stored.checkpoint, name, packed) for name in stored.checkpoint.names()}
        loaded, report = model_class.from_pretrained(None, state_dict=tensors, **options)
        loaded.name_or_path = loaded.config._name_or_path = str(stored.folder)
        if (stored.folder / GENERATION).is_file():
            loaded.generation_config = GenerationConfig.from_pretrained(stored.folder)
    elif wrapped is None:
        loaded, report = model_class.from_pretrained(stored.folder, **options)
    else:
        # Patterns of stored names, and what stands in their place in the text decoder alone.
        inside = {
            f"^{before.replace('.', '[.]')}": own for before, own in wrapped.prefixes if before != own
        }
        with quiet():  # it would tell of all that is around the text decoder
            loaded, report = model_class.from_pretrained(stored.folder, key_mapping=inside, **options)
        vars(loaded).pop("_weight_conversions", None)  # saved, the decoder is a model of its own
    check_complete(stored.folder, report["mismatched_keys"], report["missing_keys"])
    made: PreTrainedModel = loaded
    if stored.family.mixture is not None:
        take_experts_apart(made)
    return made


@dataclass(frozen=True, eq=False)
class _Unread:
    """A tensor that `transformers` reads by indexing it with `...`, when it has a place for it."""

    checkpoint: Checkpoint
    name: str
    packed: bool

    def __getitem__(self, everything: Any) -> Tensor:
        matrix = self.checkpoint.quantised.get(self.name)
        if self.packed and matrix is not None and len(matrix.shape) == 2:
            # Others are stacked, and used in parts.
            return PackedTensor.of(matrix)
        return self.checkpoint.tensor(self.name)[everything]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence `transformers`' reports while inside."""
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def check_complete(
    folder: Path, misshapen: Iterable[tuple[str, Sequence[int], Sequence[int]]], missing: Iterable[str]
) -> None:
    """Refuse weights that do not fit or are missing, which `transformers` would replace by random numbers.

    Args:
        misshapen: tensors, with their shapes and those that config.json asks for.
    """
    for name, stored, expected in sorted(misshapen):
        raise ValueError(
            f"{folder}: tensor {name} has the shape {tuple(stored)}, but config.json asks for {tuple(expected)}"
        )
    if lacking := sorted(missing):
        raise ValueError(f"{folder} lacks a tensor of its model: {first_few(lacking, 1)}")


class StreamedLayers(nn.ModuleList):
    """A decoder's layers without their weights, which `stored` holds.

    Args:
        layers: on the meta device.
        device: to compute on.
    """

    def __init__(self, layers: nn.ModuleList, stored: StoredModel, device: torch.device) -> None:
        super().__init__(layers)
        self.stored = stored
        self.dtype = stored.compute_dtype(device)
        self.device = device

    def weights(self, head_dim: int, factors: FactorSource | None = None) -> ModelWeights:
        """The files' weights, read on demand; `factors` as `ModelWeights` takes them."""
        checkpoint = self.stored.checkpoint
        prefix = self.stored.weights.names.layers
        for name, parameter in self.named_parameters():
            stored = checkpoint.tensors.get(f"{prefix}{name}")
            if stored is not None and stored.shape != parameter.shape:
                raise ValueError(
                    f"{checkpoint.folder}: tensor {prefix}{name} has the shape {stored.shape}, but config.json asks "
                    f"for {tuple(parameter.shape)}"
                )
        placed = checkpoint.copy()
        placed.tensors = {
            name: _Placed(one, self.device, self.dtype) for name, one in checkpoint.tensors.items()
        }
        return ModelWeights(placed, self.stored.family, head_dim, factors)

    def sublayer_bytes(self, kind: str) -> int:
        """Return the memory of the largest attention's, or feed-forward's, weights."""
        spec = self.stored.family.spec
        called = (
            [layer.get_submodule(path) for path in spec(kind, place).stages]
            for place, layer in enumerate(self)
        )
        sizes = (sum(one.numel() for module in own for one in module.parameters()) for own in called)
        return max(sizes) * self.dtype.itemsize


class _Placed(StoredTensor):
    """A stored tensor that is read onto a device, in another dtype."""

    def __init__(self, stored: StoredTensor, device: torch.device, dtype: torch.dtype) -> None:
        self.stored = stored
        self.device = device
        self.dtype = dtype
        self.paths = stored.paths
        self.shape = stored.shape

    def read(self) -> Tensor:
        return self.stored.read().to(self.device, self.dtype)

    def part(self, dim: int, first: int, end: int) -> Tensor:
        return self.stored.part(dim, first, end).to(self.device, self.dtype)


def load_streamed(model: str | Path | StoredModel, device: str = "cpu") -> PreTrainedModel:
    """Load a model whose decoder layers are `StreamedLayers`, in evaluation mode."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM  # takes seconds, and ranks do without

    avoid_cudnn_attention()
    stored = open_stored(model)
    family = stored.family
    dtype = stored.compute_dtype(device)
    require_streamable(stored)
    if note := stored.describe_dequantising(str(dtype).removeprefix("torch.")):
        warnings.warn(note, stacklevel=1)
    config = copy.deepcopy(stored.config)  # which becomes the model's own
    with init_empty_weights(include_buffers=False):
        whole: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Embeddings, final norm and head are those of the same model with no decoder layers.
    shallow = copy.deepcopy(stored.config)
    for key, value in family.attention_entries(stored.config, []).items():
        setattr(shallow, key, value)
    shallow.num_hidden_layers = 0
    outside: nn.Module = from_files(AutoModelForCausalLM, stored, config=shallow, dtype=dtype)
    whole.load_state_dict(outside.to(device).state_dict(), strict=False, assign=True)
    whole.tie_weights()
    for module in whole.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(whole.device))
    for name, parameter in whole.named_parameters():
        assert not parameter.is_meta or name.startswith(f"{family.layers}."), name
    path, _, name = family.layers.rpartition(".")
    parent = whole.get_submodule(path)
    setattr(parent, name, StreamedLayers(getattr(parent, name), stored, torch.device(device)))
    streamed: PreTrainedModel = whole.eval()
    return streamed


def require_streamable(stored: StoredModel) -> None:
    """Refuse models whose layers cannot be read one by one."""
    if form_of(stored.checkpoint).shipped is not None:
        raise ValueError(f"{stored.folder} is an edited model, which has to fit into memory")


def streamed_layers(model: PreTrainedModel) -> StreamedLayers | None:
    """Return the decoder's layers if they are streamed."""
    layers = model.get_submodule(family_of(model.config).layers)
    if isinstance(layers, StreamedLayers):
        return layers
    return None


def provenance(model: str, model_hash: str, *, seed: int | None = None, **more: Any) -> dict[str, Any]:
    """Record a run: model, its hash, seed, the command line, versions, and further entries.

    Args:
        model: as the user named it.
        model_hash: `Checkpoint.model_hash()` of it.
        more: data, its hash, program, settings; values that JSON can hold.
    """
    return {
        "format": FORMAT,
        "command": command_line(),
        "model": model,
        "model_hash": model_hash,
        **({} if seed is None else {"seed": seed}),
        **more,
        "versions": versions(),
    }


def command_line() -> str:
    """Return the command as typed, with the program by its name alone, and without passwords."""
    return shlex.join([Path(sys.argv[0]).name, *map(without_password, sys.argv[1:])])


def without_password(text: str) -> str:
    """Replace passwords of addresses (database://user:password@host) by stars."""
    text = re.sub(r"(://[^/@:\s]*):\S*@", r"\1:***@", text)
    return re.sub(r"([?&]password=)[^&\s]*", r"\1***", text)


def versions() -> dict[str, str]:
    """Return versions that the numbers depend on."""
    import transformers

    return {
        "surgeon": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
