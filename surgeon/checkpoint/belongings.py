"""What the files of a model's folder are, by their names: what goes on into checkpoints made of it, and what does not.

Names are told without regard to case (`license.txt` is as good as `LICENSE`), and have slashes where a file lies in a
folder inside.
"""

from __future__ import annotations

from enum import Enum
from fnmatch import fnmatchcase

GENERATION = "generation_config.json"
GGUF_RECORD = "gguf.json"  # of which GGUF file a folder was made (its name, SHA-256, types), and its files
REPORT_FILE = "surgeon.json"  # in which a checkpoint says what it was made of
CODAS = "codas"  # where racks' codas lie (see codas.py)
TEMPLATES = "additional_chat_templates"  # where transformers puts all chat templates but the default one


class FileKind(Enum):
    """What a file is; of what stays behind, the value says it to people."""

    TOKENIZER = "of the tokenizer"
    SETTINGS = "settings"
    TERMS = "terms of use"
    CODE = "code that reads no texts or images"
    WEIGHTS = "other weights"
    TRAINING = "of training"
    CODAS = "of these weights alone"
    MADE_ANEW = "made anew"
    OF_TOOLS = "of other tools"
    UNKNOWN = "not known to belong to a model"


CARRIED = {
    FileKind.TOKENIZER: (
        *("*tokenizer*", "special_tokens_map.json", "added_tokens.json", "*vocab*", "merges.txt", "*.model", "*.spm"),
        *("*.tiktoken", "tekken.json", "chat_template*", "*.jinja", f"{TEMPLATES}/*.jinja"),
    ),
    # Of Mistral's models SYSTEM_PROMPT.txt is a part of the documented prompt.
    FileKind.SETTINGS: (GENERATION, "*processor*.json", "*system_prompt*"),
    FileKind.TERMS: (
        *("*license*", "*licence*", "*notice*", "*use_policy*", "*use-policy*", "copying*", "copyright*"),
        *("licenses/*", "licences/*"),
    ),
}
# Which are looked into.
FOLDERS = {pattern.partition("/")[0] for patterns in CARRIED.values() for pattern in patterns if "/" in pattern}

# What is weights, or code, is no tokenizer, whatever else its name says; but for code that reads texts and images.
_CODE = {FileKind.TOKENIZER: ("tokenization_*.py",), FileKind.SETTINGS: ("*processing_*.py",)}
_LEFT = {
    FileKind.OF_TOOLS: (".*", "__pycache__/"),
    FileKind.MADE_ANEW: ("config.json", "readme.md", REPORT_FILE, GGUF_RECORD, "modeling_surgeon_*.py"),
    FileKind.CODAS: (f"{CODAS}/",),
    FileKind.TRAINING: (
        *("optimizer*", "scheduler*", "scaler.pt", "rng_state*", "training_args*", "trainer_state.json", "latest"),
        *("*_results.json", "events.out.tfevents*", "zero_to_fp32.py", "checkpoint-*/", "global_step*/"),
        *("runs/", "logs/", "wandb/", "training.json"),
    ),
    FileKind.WEIGHTS: (
        *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.gguf", "*.ggml"),
        *("*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.npz", "*.npy", "*.ot", "*.tflite", "*.mlmodel", "*.nemo"),
        *("params.json", "original/", "onnx/", "openvino/", "coreml/", "gguf/"),
    ),
    FileKind.CODE: ("*.py", "*.pyc", "*.so", "*.sh", "*.ipynb"),
}


def kind_of(name: str) -> FileKind:
    """What a file is, or a folder, whose name ends in a slash."""
    lower = name.lower()
    last = lower if lower.endswith("/") else lower.rpartition("/")[2]
    for kind, patterns in (*_CODE.items(), *_LEFT.items()):
        if any(fnmatchcase(last, pattern) for pattern in patterns):
            return kind
    for kind, patterns in CARRIED.items():
        if any(fnmatchcase(lower, pattern) and pattern.count("/") == lower.count("/") for pattern in patterns):
            return kind
    return FileKind.UNKNOWN


def patterns_for_the_hub() -> list[str]:
    """What matches the names of files that are carried on, for libraries that tell them by case."""
    names = [pattern for patterns in CARRIED.values() for pattern in patterns]
    return ["".join(f"[{letter.upper()}{letter}]" if letter.isalpha() else letter for letter in name) for name in names]
