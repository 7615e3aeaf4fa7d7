"""How to load an exported checkpoint, as its model card says it: in transformers, in vLLM, and with surgeon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from surgeon.checkpoint.describe import Description
from surgeon.checkpoint.forms import Form, StoredModel
from surgeon.checkpoint.read import Checkpoint
from surgeon.results.card_text import code, paragraph

PROMPT = "Once upon a time"
RANKS = 2  # of the examples
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")


def usage(found: Description, folder: Path, name: str) -> Iterator[str]:
    """The section, for this form."""
    form = found.form
    assert form is not None
    yield "## How to load it\n"
    reason = (found.report or {}).get("reason")
    if isinstance(reason, str):
        yield paragraph(f"It is in surgeon's {form} form: {reason}.")
    has_tokenizer = any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)
    if not has_tokenizer:
        yield paragraph("There is no tokenizer in this folder, as there was none beside the model that it was made of.")
    yield paragraph(f"`{name}` stands for the path of this folder, or for its name on the hub.")
    yield "### transformers\n"
    yield from _transformers(form, folder, name, has_tokenizer)
    yield "### vLLM\n"
    serve = f"vllm serve {quote(name)} --tensor-parallel-size {RANKS}"
    how, command = form.serving(StoredModel(Checkpoint(folder), found.config, found.family), serve)
    yield paragraph(how)
    yield code(command + ("" if has_tokenizer else " --skip-tokenizer-init"), "bash")
    yield "### surgeon\n"
    if has_tokenizer:
        yield paragraph("On one or several ranks; no code that lies in the folder is run:")
        prompt = f'surgeon generate {quote(name)} --tp {RANKS} --prompt "{PROMPT}"'
        yield code(f"{prompt}\nsurgeon serve {quote(name)} --tp {RANKS}", "bash")
    else:
        yield paragraph("As a model of transformers; no code that lies in the folder is run:")
        yield code(f"import surgeon\n\nmodel = surgeon.load({json.dumps(name)})", "python")


def _transformers(form: Form, folder: Path, name: str, has_tokenizer: bool) -> Iterator[str]:
    if form.shipped is None:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
        yield paragraph(f"It loads in the stock class{f' `{named[0]}`' if named else ''}:")
    else:
        yield paragraph(
            f"`trust_remote_code=True` is needed because {form.why_code}: `{form.shipped.file.name}` in this folder "
            "builds the model. The file needs torch and transformers and nothing else; read it before you trust it."
        )
    options = json.dumps(name) + (", trust_remote_code=True" if form.shipped is not None else "")
    model = f"model = AutoModelForCausalLM.from_pretrained({options})"
    if not has_tokenizer:
        yield code(f"from transformers import AutoModelForCausalLM\n\n{model}", "python")
        return
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n",
        f"tokenizer = AutoTokenizer.from_pretrained({options})",
        model,
        f'inputs = tokenizer("{PROMPT}", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))",
    ]
    yield code("\n".join(lines), "python")
