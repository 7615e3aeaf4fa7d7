"""The tokenizer of a checkpoint whose model type only a shipped file knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig

from surgeon.checkpoint.read import read_json
from surgeon.processes.files import write_json

TOKENIZER_CONFIG = "tokenizer_config.json"


def keep_tokenizer_class(folder: Path, config: Any) -> None:
    """Make `AutoTokenizer` open a written checkpoint's tokenizer in the class that it takes for the original.

    It goes by the model type where the tokenizer's files name no class (GPT-2's own do not), or one that is known to
    be wrong for that type (Phi3's); a type of the checkpoint's own would get another class, and so other tokens.
    Where there is no tokenizer that can be read, nothing is changed.

    Args:
        folder: with config.json and the copied tokenizer files; tokenizer_config.json is rewritten if need be.
        config: the original's, as `transformers` reads it.
    """
    try:
        wanted = type(AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False))
        written = PreTrainedConfig.from_dict(read_json(folder / "config.json"))
        found = type(AutoTokenizer.from_pretrained(folder, config=written, trust_remote_code=False))
    except Exception:  # noqa: BLE001 - a tokenizer that cannot be read is copied as it is
        return
    if found is not wanted:
        path = folder / TOKENIZER_CONFIG
        stored = read_json(path) if path.exists() else {}
        write_json(path, stored | {"tokenizer_class": wanted.__name__})
