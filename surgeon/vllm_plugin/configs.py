"""The configurations of program checkpoints, by the `model_type` that their architecture had.

They are importable by name, because vLLM sends them to its other processes.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

from surgeon.checkpoint.remote_code import PROGRAM
from surgeon.models.families import FAMILIES

CONFIGS: dict[str, Any] = {
    name: type(
        f"{PROGRAM.stem(name)}Config",
        (CONFIG_MAPPING[name],),
        {"model_type": PROGRAM.prefix + name, "__module__": __name__},
    )
    for name in FAMILIES
}
globals().update({config.__name__: config for config in CONFIGS.values()})
