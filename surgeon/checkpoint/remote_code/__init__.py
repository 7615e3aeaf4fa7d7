"""The modeling files that travel inside exported checkpoints: short, and needing only torch and transformers.

The fused form's file builds an architecture of its own. The program form's makes the classes for any architecture of
`transformers`, as config.json describes it; for a Llama (`model_type` "llama", class `LlamaConfig`):

    model_type       "surgeon_llama": no stock class takes it, so that loading without trust_remote_code is refused
                     (as "llama" it would silently run the unedited layers)
    architectures    ["ProgramLlamaForCausalLM"]
    auto_map         AutoConfig, AutoModel and AutoModelForCausalLM: ProgramLlamaConfig, ProgramLlamaModel and
                     ProgramLlamaForCausalLM of modeling_surgeon_program.py
    surgeon_program  the program's text, over the stored layers
    logit_scale      the factor of logits, if any: vLLM's name for it
    surgeon_family   where a layer has its sublayers, and how the decoder calls it (`Family` in the modeling file)
    the rest         the original's, `num_hidden_layers` and lists with one entry per layer following the stored layers

Inside a wrapper (`model_type` "mistral3") it is "surgeon_mistral3", and the classes are ProgramMistral3Config and
ProgramMistral3ForImageTextToText, for AutoModelForImageTextToText.

`ProgramLlamaConfig` is `LlamaConfig` but for its `model_type`. To read it without running the file: take "surgeon_" off
the `model_type`, leave out `auto_map` and entries that begin with "surgeon_", and read the rest as the stock
configuration, as `surgeon.checkpoint.config.read_config` does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING

from surgeon.checkpoint.imported import WRAPPERS
from surgeon.models.edit import PROGRAM_PREFIX

if TYPE_CHECKING:  # takes seconds, and ranks do without
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RemoteCode:
    """A modeling file, and its classes by architecture.

    Attributes:
        module: the file's name without .py, the same here and in a checkpoint.
        stem: the beginning of its classes' names for a `model_type`; Config, Model or ForCausalLM follows.
        prefix: of its checkpoints' `model_type`, before the original's.
    """

    module: str
    stem: Callable[[str], str]
    prefix: str = ""

    @property
    def file(self) -> Path:
        """The file, as it lies in this package."""
        return Path(__file__).with_name(f"{self.module}.py")

    def class_name(self, model_type: str) -> str:
        """Return the name of the class with a language-model head, of an architecture or a wrapper."""
        return f"{self.stem(model_type)}{head_of(model_type)}"

    def auto_map(self, model_type: str) -> dict[str, str]:
        """Return the `auto_map` of a checkpoint's config.json."""
        head = head_of(model_type)
        suffixes = {"AutoConfig": "Config", "AutoModel": "Model", f"AutoModel{head}": head}
        if head == AROUND:
            del suffixes["AutoModel"]
        return {
            auto: f"{self.module}.{self.stem(model_type)}{suffix}" for auto, suffix in suffixes.items()
        }

    def entries(self, model_type: str) -> dict[str, Any]:
        """Return config.json's entries for the classes."""
        return {
            "architectures": [self.class_name(model_type)],
            "auto_map": self.auto_map(model_type),
            "model_type": self.prefix + model_type,
        }

    def model_class(self, model_type: str, folder: Path | None = None) -> type[PreTrainedModel]:
        """Return the class with a language-model head: this package's, or that of a folder's copy."""
        if folder is None:
            module = importlib.import_module(f"{__name__}.{self.module}")
        else:
            # Under a name of its own, and without a __pycache__ beside it, which would be a part of the checkpoint.
            module = ModuleType(f"surgeon_shipped_{self.module}")
            sys.modules[module.__name__] = module  # transformers looks classes' modules up there
            module.__file__ = str(folder / self.file.name)
            exec(compile((folder / self.file.name).read_bytes(), module.__file__, "exec"), vars(module))
        loaded: type[PreTrainedModel] = getattr(module, self.class_name(model_type))
        return loaded


def head_of(model_type: str) -> str:
    """Return the end of the names of an architecture's classes with a language-model head."""
    return AROUND if model_type in WRAPPERS else "ForCausalLM"


AROUND = "ForImageTextToText"  # ends names of classes around a text decoder
FAMILY_KEY = "surgeon_family"  # in config.json, beside the program
FUSED = RemoteCode("modeling_surgeon_fused", lambda _: "SurgeonFused")  # one for all architectures
PROGRAM = RemoteCode(
    "modeling_surgeon_program",
    lambda model_type: f"Program{CONFIG_MAPPING[model_type].__name__.removesuffix('Config')}",
    prefix=PROGRAM_PREFIX,
)
