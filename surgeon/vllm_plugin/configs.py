"""The configurations of program checkpoints, by the `model_type` that their architecture had.

They are importable by name, because vLLM sends them to its other processes.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

from surgeon.checkpoint.remote_code import PROGRAM
from surgeon.models.families import FAMILIES


def _program_config(model_type: str) -> Any:
    name = f"{PROGRAM.stem(model_type)}Config"
    stock: Any = CONFIG_MAPPING[model_type]
    return type(name, (stock,), {"model_type": PROGRAM.prefix + model_type, "__module__": __name__})


CONFIGS: dict[str, Any] = {model_type: _program_config(model_type) for model_type in FAMILIES}
globals().update({config.__name__: config for config in CONFIGS.values()})
