"""From a configuration to a model with random weights: architecture, tokenizer, program."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from surgeon.checkpoint.random_weights import RandomFactors
from surgeon.checkpoint.texts import SPECIAL_IDS, read_tokenizer, rows_needed
from surgeon.language.operations.width import chosen_by
from surgeon.language.program import Program
from surgeon.models.edit import edit, recipe_program
from surgeon.models.families import FAMILIES, Family, family_of
from surgeon.models.shapes import check_layers
from surgeon.quality.data import tokenizer_digest
from surgeon.training.racks.model import require_known
from surgeon.training.racks.run import check_settings
from surgeon.training.scope import choose_or_adapt
from surgeon.training.scratch.config import ScratchConfig
from surgeon.training.scratch.tracks import narrow
from surgeon.training.texts import TrainTexts, load_texts
from surgeon.training.token_store import documents_of
from surgeon.words import did_you_mean, show_value

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
# Of a configuration, what says nothing of how a model begins or what it computes.
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache")


@dataclass(frozen=True)
class Blueprint:
    """A model that could be built, checked as far as possible without weights.

    Attributes:
        config: its source.
        architecture: of the model before it runs its program; of native tracks, with all their narrow layers.
        tokenizer: gives the vocabulary, and goes into the checkpoint.
        parameters: numbers, before its program takes some of its sublayers apart or together.
    """

    config: ScratchConfig
    architecture: PreTrainedConfig
    program: Program
    tokenizer: Any
    parameters: int

    @property
    def family(self) -> Family:
        return family_of(self.architecture)

    def build(self) -> PreTrainedModel:
        """Build the model in float32, with random weights that follow from the seed and the architecture alone.

        Its layers are initialised before they run as a program, so that all programs on an architecture begin alike.
        """
        torch.manual_seed(self.config.settings.seed)
        model = AutoModelForCausalLM.from_config(self.architecture, dtype=torch.float32)
        return edit(model, self.program)

    def texts(self) -> TrainTexts:
        """Load the training text, as much as the steps go through, and held-out text.

        Raises:
            FileNotFoundError: if there is no such text.
            ValueError: if it cannot be used, or is shorter than one batch.
        """
        config = self.config
        settings = self.config.settings
        texts = load_texts(
            self.tokenizer,
            config.data,
            config.window,
            config.tokens or settings.tokens_on(config.window),
            config.eval_data,
            config.eval_tokens,
            config.separator,
            documents_of(config.documents),
        )
        with config.under("data"):
            settings.steps_on(len(texts.training))
        return texts

    def identity(self) -> dict[str, Any]:
        entries = {
            name: each
            for name, each in self.architecture.to_dict().items()
            if name not in _NOT_OF_THE_MODEL
        }
        return {
            "task": "train",
            "model": entries,
            "program": str(self.program),
            "tokenizer": self.tokenizer_digest,
        }

    @cached_property
    def tokenizer_digest(self) -> str:
        return tokenizer_digest(self.tokenizer)


def blueprint(config: ScratchConfig) -> Blueprint:
    """Check a configuration as far as possible without weights and text; the tokenizer is read.

    Raises:
        FileNotFoundError: if there is no such tokenizer.
        ValueError: if the architecture is not supported or impossible, its vocabulary is too small for the tokenizer,
            or the program does not fit it; with file and line.
    """
    try:
        tokenizer = read_tokenizer(config.tokenizer)
    except (OSError, ValueError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(str(config.error(f"tokenizer: {error}", "tokenizer"))) from error
    architecture = _make_architecture(config, tokenizer)
    if config.tracks is not None:
        with config.under("tracks"):
            architecture, program = narrow(architecture, config.tracks.count, config.tracks.depth)
    elif config.program is not None:
        program = Program.parse(config.program)
        with config.under("program"):
            check_layers(program, architecture.num_hidden_layers)
    else:
        for operation in config.operations:
            line = f"{config.source}:{operation.line}: {operation.name}:"
            if operation.parameters.get("method", "plain") != "plain":
                raise ValueError(
                    f"{line} method {operation.parameters['method']} goes by what a trained model computes, and this "
                    "one begins with random weights; use method: plain"
                )
            if operation.name == "width" and chosen_by(operation.parameters):
                raise ValueError(
                    f"{line} this model begins with random weights, of which some are as good as others; leave out "
                    f"{'by' if 'by' in operation.parameters else 'calibration'}"
                )
            if isinstance(listed := operation.parameters.get("heads"), list):
                raise ValueError(
                    f"{line} which heads are listed says nothing of random weights; give their number, "
                    f"heads: {len(listed)}"
                )
        program = recipe_program(config.recipe, architecture)
    try:
        with torch.device("meta"):
            # Edited below, with its configuration.
            own = copy.deepcopy(architecture)
            model = AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    except Exception as error:  # whatever it trips over is a fault of the entries
        raise config.error(f"model: it cannot be built: {_reason(error)}", "model") from error
    if config.racks is not None:
        with config.under("racks"):
            config.racks.cut(program)
            require_known(model)
        with config.under("training"):
            check_settings(config.settings)
    parameters = sum(each.numel() for each in model.parameters())
    with config.under("training"):
        choose_or_adapt(edit(model, program, factors=RandomFactors("meta")), program, config.settings)
    return Blueprint(config, architecture, program, tokenizer, parameters)


def _make_architecture(config: ScratchConfig, tokenizer: Any) -> PreTrainedConfig:
    given = dict(config.model)
    model_type = given.pop("model_type", None)
    if model_type is None:
        raise config.error(
            f"model: model_type is missing; write model_type: llama, or another of {', '.join(sorted(FAMILIES))}",
            "model",
        )
    if model_type not in FAMILIES:
        raise config.error(
            f"model: model_type {show_value(model_type)} is not supported; {did_you_mean(str(model_type), FAMILIES)}",
            *("model", "model_type"),
        )
    config_class: Any = CONFIG_MAPPING[model_type]
    # transformers would keep unknown entries without a word.
    of_family = FAMILIES[model_type]
    blank = config_class()
    entries = [*blank.to_dict(), *blank.attribute_map]
    for name, value in given.items():
        if name not in entries:
            raise config.error(
                f"model: {of_family.name} has no entry {show_value(name)}; {did_you_mean(str(name), entries)}",
                "model",
                name,
            )
        own_name = blank.attribute_map.get(name, name)
        is_size = {name, own_name} & {*SIZES, of_family.intermediate}
        if is_size and value is not None and (type(value) is not int or value < 1):
            raise config.error(
                f"model: {name} must be a whole number above 0, not {show_value(value)}", "model", name
            )
    defaults = {"vocab_size": rows_needed(tokenizer)} | {
        name: getattr(tokenizer, name, None) for name in SPECIAL_IDS
    }
    found: PreTrainedConfig
    try:
        found = config_class(**(defaults | given))
        family = family_of(found)
    except Exception as error:  # whatever it trips over is a fault of the entries
        reason = _reason(error)
        named = max((name for name in given if name in reason), key=len, default=None)
        raise config.error(f"model: {reason}", "model", *([named] if named else [])) from error
    _check_sizes(config, found, family, tokenizer)
    return found


def _check_sizes(config: ScratchConfig, found: PreTrainedConfig, family: Family, tokenizer: Any) -> None:
    """Refuse sizes that do not fit each other, the tokenizer, or the text's windows."""
    units = family.units(found)
    hidden = int(found.hidden_size)
    heads = units["heads"]
    kv_heads = units["kv_heads"]
    if config.model.get("head_dim") is None and hidden % heads:
        raise config.error(
            f"model: {heads} heads do not divide a width of {hidden}; make hidden_size a multiple of {heads}, such as "
            f"{heads * max(1, round(hidden / heads))}, or give head_dim",
            *("model", "num_attention_heads"),
        )
    if heads % kv_heads:
        raise config.error(
            f"model: {kv_heads} KV heads do not divide {heads} heads; use one of "
            f"{', '.join(str(each) for each in range(1, heads + 1) if heads % each == 0)}",
            *("model", "num_key_value_heads"),
        )
    if found.vocab_size < (needed := rows_needed(tokenizer)):
        raise config.error(
            f"model: vocab_size {found.vocab_size:,} is too small for the tokenizer {config.tokenizer}, which has "
            f"{needed:,} tokens; use at least that, or leave it out",
            *("model", "vocab_size"),
        )
    for name in SPECIAL_IDS:
        value = config.model.get(name)
        if type(value) is int and value >= found.vocab_size:
            raise config.error(
                f"model: {name} {value:,} is beyond a vocabulary of {found.vocab_size:,}; leave it out, and it is the "
                "tokenizer's",
                *("model", name),
            )
    positions = getattr(found, "max_position_embeddings", None)
    if positions is not None and config.window > positions:
        raise config.error(
            f"window: {config.window} tokens are more than the model's {positions} positions; use a smaller window, or "
            f"give the model max_position_embeddings: {config.window}",
            "window",
        )


def _reason(error: Exception) -> str:
    """Reduce an error to one line; those of strict configurations have it in their last one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = re.sub(r"^\w+Error: ", "", lines[-1]) if lines else ""
    if isinstance(error, LookupError) or not reason:
        return f"{type(error).__name__}: {reason}"
    return reason
