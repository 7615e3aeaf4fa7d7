"""The files that belong to a model beside its configuration and weights, and go with it into other checkpoints."""

from __future__ import annotations

from pathlib import Path

from surgeon.checkpoint.read import check_inside

# What belongs to a model beside its weights; never code, never pickles, and not the model card: what it says that still
# holds goes into a card of the new one's own.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "generation_config.json",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


def companions_of(folder: Path) -> list[Path]:
    """The files that belong to a model beside its configuration and weights: tokenizer, chat template, licence.

    Raises:
        ValueError: if one of them is a symbolic link out of the folder.
    """
    found = {path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    companions = sorted(path for path in found if path.suffix not in (".py", ".bin", ".pt", ".pth", ".pkl"))
    for path in companions:
        check_inside(folder, path)
    return companions
