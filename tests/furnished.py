"""A model's folder with everything that people's folders have, and what becomes of each file."""

from __future__ import annotations

import json
from pathlib import Path

# By name: the forms that have the file, as it was, or why none has it.
ALL = ("plain", "fused", "program")
UNKNOWN, CODE = "not known to belong to a model", "code that reads no texts or images"
TRAINING, WEIGHTS = "of training", "other weights"
BECOMES: dict[str, tuple[str, ...] | str] = {
    "tokenizer.json": ALL,
    "tokenizer_config.json": ALL,
    "chat_template.jinja": ALL,
    "additional_chat_templates/rag.jinja": ALL,
    "additional_chat_templates/tool_use.jinja": ALL,
    "special_tokens_map.json": ALL,
    "added_tokens.json": ALL,
    "vocab.json": ALL,
    "merges.txt": ALL,
    "tokenizer.model": ALL,
    "spiece.model": ALL,
    "qwen.tiktoken": ALL,
    "tokenization_own.py": ALL,
    "generation_config.json": ALL,
    "preprocessor_config.json": ALL,
    "processor_config.json": ALL,
    "processing_own.py": ALL,
    "SYSTEM_PROMPT.txt": ALL,
    "LICENSE": ALL,
    "license.txt": ALL,
    "LICENSES/Apache-2.0.txt": ALL,
    "NOTICE": ALL,
    "USE_POLICY.md": ALL,
    "configuration_own.py": CODE,
    "modeling_own.py": CODE,
    "layers_own.py": CODE,
    "notes.txt": UNKNOWN,
    "assets/": UNKNOWN,
    "pytorch_model.bin": WEIGHTS,
    "pytorch_model.bin.index.json": WEIGHTS,
    "model.safetensors.index.json": WEIGHTS,  # beside model.safetensors it lies idle
    "model-00001-of-00002.safetensors": WEIGHTS,
    "consolidated.00.pth": WEIGHTS,
    "model.Q4_K_M.gguf": WEIGHTS,
    "tokenizer.bin": WEIGHTS,
    "original/": WEIGHTS,
    "optimizer.pt": TRAINING,
    "scheduler.pt": TRAINING,
    "training_args.bin": TRAINING,
    "trainer_state.json": TRAINING,
    "rng_state_0.pth": TRAINING,
    "checkpoint-500/": TRAINING,
    "codas/": "of these weights alone",
}
OF_TOOLS = (".gitattributes", ".cache/", "__pycache__/")  # of which nothing is said
MADE_ANEW = ("config.json", "README.md", "model.safetensors", "surgeon.json")
AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}


def furnish(folder: Path) -> Path:
    """Put all of BECOMES into a saved model's folder, those that are there already as they are."""
    for name in (*BECOMES, *OF_TOOLS, "README.md"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
            (path / "inside.txt").write_text("inside")
        elif not path.exists():
            path.write_text("{}" if path.suffix == ".json" else f"this is {name}\n")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# another card\n")
    # Written by hand: other software would put it differently.
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7,   "eos_token_id": 1}')
    _add(folder / "config.json", auto_map=AUTO_MAP)
    _add(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
    )
    _add(folder / "processor_config.json", auto_map={"AutoProcessor": "processing_own.OwnProcessor"})
    return folder


def expected() -> dict[str, str]:
    """What a checkpoint leaves behind, and why."""
    return {name: becomes for name, becomes in BECOMES.items() if isinstance(becomes, str)}


def check(source: Path, target: Path, form: str, changed: tuple[str, ...] = ()) -> None:
    """Compare what was written with BECOMES.

    Args:
        changed: files that are there, and not as they were.
    """
    carried = {
        name for name, becomes in BECOMES.items() if not isinstance(becomes, str) and form in becomes
    }
    shipped = set() if form == "plain" else {f"modeling_surgeon_{form}.py"}
    found = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert found == carried | shipped | set(MADE_ANEW)
    other = {name for name in carried if (target / name).read_bytes() != (source / name).read_bytes()}
    assert other == set(changed)
    assert not any(path.is_symlink() for path in target.rglob("*"))
    report = json.loads((target / "surgeon.json").read_text())
    assert report["companions"]["left_behind"] == expected()
    assert set(report["companions"]["carried"]) == carried
    assert carried <= report["files"].keys()


def _add(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
