"""The modeling files that travel inside exported checkpoints: short, and needing only torch and transformers.

Which class loads which architecture is data here, so that a new architecture is a class in a modeling file and a line
in its table.

What config.json of a checkpoint in the program form says, for a Llama (`model_type` "llama", `names` "ProgramLlama"):

    model_type       "surgeon_llama": no stock class takes it, so that loading without trust_remote_code is refused
                     (as "llama" it would silently run the unedited layers)
    architectures    ["ProgramLlamaForCausalLM"]
    auto_map         AutoConfig, AutoModel and AutoModelForCausalLM: ProgramLlamaConfig, ProgramLlamaModel and
                     ProgramLlamaForCausalLM of modeling_surgeon_program.py
    surgeon_program  the program's text, over the stored layers
    the rest         as in the original's, `num_hidden_layers` and lists with one entry per layer following the stored
                     layers

`ProgramLlamaConfig` is `LlamaConfig` but for its `model_type`, and so for every architecture. Without running the file:
take "surgeon_" off the `model_type`, leave `auto_map` out, and read the rest as the stock configuration, as
`surgeon.checkpoint.load.read_config` does.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from surgeon.model import PROGRAM_PREFIX

if TYPE_CHECKING:  # takes seconds, and ranks do without
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class RemoteCode:
    """One modeling file, and its classes by architecture.

    Attributes:
        module: the file's name without .py, the same here and in a checkpoint.
        names: by `model_type`, without the prefix, what its classes' names begin with; Config, Model or ForCausalLM
            follows.
        prefix: what its checkpoints put before the original's `model_type`.
    """

    module: str
    names: dict[str, str]
    prefix: str = ""

    @property
    def file(self) -> Path:
        """The file, as it lies in this package."""
        return Path(__file__).with_name(f"{self.module}.py")

    def causal_class(self, model_type: str) -> str:
        """The name of the class with a language-model head."""
        return f"{self.names[model_type]}ForCausalLM"

    def auto_map(self, model_type: str) -> dict[str, str]:
        """The `auto_map` of a checkpoint's config.json."""
        suffixes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
        return {auto: f"{self.module}.{self.names[model_type]}{suffix}" for auto, suffix in suffixes.items()}

    def config_class(self, model_type: str) -> type[PreTrainedConfig]:
        """The configuration's class, this package's own."""
        loaded = self.model_class(model_type).config_class
        assert loaded is not None
        return loaded

    def model_class(self, model_type: str, folder: Path | None = None) -> type[PreTrainedModel]:
        """The class with a language-model head: this package's own, or that of the file's copy in a folder."""
        module = (
            importlib.import_module(f"{__name__}.{self.module}") if folder is None else _import(folder / self.file.name)
        )
        loaded: type[PreTrainedModel] = getattr(module, self.causal_class(model_type))
        return loaded


FUSED = RemoteCode("modeling_surgeon_fused", {"surgeon_fused": "SurgeonFused"})  # one for all architectures
PROGRAM = RemoteCode(
    "modeling_surgeon_program",
    {
        "llama": "ProgramLlama",
        "mistral": "ProgramMistral",
        "qwen2": "ProgramQwen2",
        "qwen3": "ProgramQwen3",
        "gemma2": "ProgramGemma2",
        "phi3": "ProgramPhi3",
        "opt": "ProgramOPT",
        "gpt2": "ProgramGPT2",
        "gpt_neo": "ProgramGPTNeo",
        "gpt_neox": "ProgramGPTNeoX",
    },
    prefix=PROGRAM_PREFIX,
)
SHIPPED = {"fused": FUSED, "program": PROGRAM}  # by form


def _import(path: Path) -> ModuleType:
    """Import a file under a name of its own, replacing what an earlier call imported."""
    spec = importlib.util.spec_from_file_location(f"surgeon_shipped_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # transformers looks classes' modules up there
    spec.loader.exec_module(module)
    return module
