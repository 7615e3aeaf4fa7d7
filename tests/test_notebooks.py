"""The notebooks run, and what they say is right.

    python tests/test_notebooks.py

runs them and keeps their outputs in the files, so that they can be read where nothing is run.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from surgeon.processes.files import lock_file
from tests.waiting import PATIENCE

PROJECT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((PROJECT / "notebooks").glob("*.ipynb"))
NUMBERS = "numbers"  # the tag of the cell that prints them as JSON
LARGEST_FILE = 300_000  # bytes


def run(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of a fresh kernel that works in a folder, and leaves its own files there."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=int(PATIENCE),
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=os.environ | {"TMPDIR": str(folder)})
    return notebook


def numbers_of(notebook: Any) -> dict[str, Any]:
    """What the notebook's last word is."""
    (cell,) = (cell for cell in notebook.cells if NUMBERS in cell.metadata.get("tags", ()))
    found: dict[str, Any] = json.loads(text_of(cell))
    return found


def text_of(cell: Any) -> str:
    return "".join(
        output.text
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )


def refresh(path: Path) -> None:
    """Run a notebook and keep its outputs; progress and what differs from run to run is left out."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = run(path, Path(folder))
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    del output.data["text/plain"]  # an object's address or a figure's size
    nbformat.write(notebook, path)


def executed_once(name: str, factory: pytest.TempPathFactory) -> Any:
    """A notebook that the first test to need it has run, in whatever worker (pytest-xdist) that was."""
    shared = (
        factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    )
    path = shared / name
    with lock_file(shared / f"{name}.lock"):
        if not path.exists():
            notebook = run(PROJECT / "notebooks" / name, factory.mktemp("notebook"))
            nbformat.write(notebook, path)
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return executed_once("anatomy.ipynb", tmp_path_factory)


@pytest.fixture(scope="module")
def faster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return executed_once("faster.ipynb", tmp_path_factory)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return executed_once("drafts.ipynb", tmp_path_factory)


def flat(values: Any, name: str = "") -> dict[str, Any]:
    """Nested numbers by the path to them."""
    if isinstance(values, dict):
        return {
            key: leaf
            for part, value in values.items()
            for key, leaf in flat(value, f"{name}/{part}").items()
        }
    return {name: values}


@pytest.mark.long
def test_numbers_against_plain_transformers(executed: Any) -> None:
    """Perplexity and divergence from full logits, of programs that are put together here."""
    import torch
    from torch.nn import functional

    import surgeon
    from surgeon.analysis.subject import open_subject

    subject = open_subject("demo", "demo", tokens=1024, window=128)
    numbers = numbers_of(executed)
    assert numbers["data"] == subject.windows.digest
    ids, model = subject.windows.ids, subject.model
    late = " ".join(f">A{k} >F{k}" for k in range(8, 16))
    dense = [f"A{k} F{k}" for k in range(16)]
    pairs = [f"[A{k} A{k + 1}] [F{k} F{k + 1}]" for k in range(0, 14, 2)]
    programs = {
        "as it is": " ".join(dense),
        "layers 2 to 13 as LP pairs": " ".join([*dense[:2], *pairs[1:], *dense[14:]]),
        "layers 0 to 13 as LP pairs": " ".join([*pairs, *dense[14:]]),
        "without layer 7": " ".join(dense[:7] + dense[8:]),
        "without layer 0": " ".join(dense[1:]),
        "ladder from layer 8 on": " ".join([*dense[:8], late]),
    }
    with torch.no_grad():
        original = functional.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1], -1)
        for name, program in programs.items():
            surgeon.edit(model, program)
            changed = functional.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1], -1)
            surgeon.restore(model)
            nll = functional.nll_loss(changed.flatten(0, 1), ids[:, 1:].flatten()).item()
            divergence = (original.exp() * (original - changed)).sum(-1).mean().item()
            assert numbers["perplexity"][name] == pytest.approx(math.exp(nll), rel=1e-3), name
            assert numbers["divergence"][name] == pytest.approx(divergence, rel=1e-3, abs=1e-6), name
        weight = model.model.layers[7].mlp.up_proj.weight
        whole = weight.clone()
        u, s, v = torch.linalg.svd(whole, full_matrices=False)
        for rank, divergence in numbers["ranks"].items():
            kept = int(rank)
            weight.copy_(u[:, :kept] @ s[:kept].diag() @ v[:kept])
            changed = functional.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1], -1)
            found = (original.exp() * (original - changed)).sum(-1).mean().item()
            assert divergence == pytest.approx(found, rel=1e-2, abs=1e-6), rank
            share = (s[:kept] ** 2).sum() / (s**2).sum()
            assert numbers["squares kept"][rank] == pytest.approx(share.item(), rel=1e-4)
        weight.copy_(whole)


def test_every_number_is_finite(executed: Any) -> None:
    numbers = {
        key: value for key, value in flat(numbers_of(executed)).items() if isinstance(value, float)
    }
    assert len(numbers) > 10
    assert all(math.isfinite(value) for value in numbers.values())


def test_what_is_stored_is_what_comes_out(executed: Any) -> None:
    """Where the text is the same: it is the standard library's, another one in every version of Python."""
    stored = flat(numbers_of(nbformat.read(PROJECT / "notebooks" / "anatomy.ipynb", as_version=4)))
    now = flat(numbers_of(executed))
    assert stored.keys() == now.keys()
    if stored["/data"] != now["/data"]:
        pytest.skip("this Python's standard library has another text")
    for name, value in stored.items():
        assert now[name] == (
            pytest.approx(value, rel=1e-3, abs=1e-6) if isinstance(value, float) else value
        ), name


def test_what_its_words_say(executed: Any) -> None:
    """The conclusions that are drawn in prose hold for the numbers."""
    numbers = numbers_of(executed)
    base, divergence = numbers["perplexity"]["as it is"], numbers["divergence"]
    assert numbers["perplexity"]["layers 2 to 13 as LP pairs"] < 1.1 * base
    assert numbers["perplexity"]["layers 0 to 13 as LP pairs"] > 10 * base
    assert divergence["without layer 0"] > 20 * divergence["without layer 7"]
    lengths = {name: last - first + 1 for name, (first, last) in numbers["within"].items()}
    assert lengths["prune"] <= 4
    assert lengths["2-parallel"] >= 10
    cka = numbers["cka"]
    assert 2 * cka.pop("1") < min(cka.values())
    kept, lost = numbers["squares kept"], list(numbers["ranks"].values())
    assert kept["8"] < 0.25  # they fall slowly
    assert lost == sorted(lost, reverse=True)
    assert max(lost) < divergence["without layer 7"] / 5  # the predictions hardly move
    assert numbers["figures"] == ["cells.csv", "cka.svg", "cka.tex", "heatmaps.pdf"]
    outputs = [output for cell in executed.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3


@pytest.mark.long
@pytest.mark.thorough
def test_faster_is_measured_as_plain_transformers_has_it(faster: Any) -> None:
    """Perplexity and divergence of the edit, before anything is trained, from full logits."""
    import torch
    from torch.nn import functional

    import surgeon
    from surgeon.analysis.subject import open_subject

    numbers = numbers_of(faster)
    subject = open_subject("demo", "demo", tokens=2048, window=128)
    ids, model = subject.windows.ids, subject.model
    assert surgeon.Program.parse(numbers["program"]).effective_depth() == 8
    with torch.no_grad():
        original = functional.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1], -1)
        surgeon.edit(model, numbers["program"])
        edited = functional.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1], -1)
    nll = functional.nll_loss(edited.flatten(0, 1), ids[:, 1:].flatten()).item()
    divergence = (original.exp() * (original - edited)).sum(-1).mean().item()
    assert numbers["perplexity"]["edited"] == pytest.approx(math.exp(nll), rel=1e-3)
    assert numbers["divergence"]["edited"] == pytest.approx(divergence, rel=1e-3, abs=1e-6)


@pytest.mark.thorough
def test_faster_gives_back_and_answers_what_its_words_say(faster: Any) -> None:
    numbers = numbers_of(faster)
    divergence, curve = numbers["divergence"], numbers["curve"]
    assert numbers["perplexity"]["healed"] < numbers["perplexity"]["edited"]
    assert divergence["healed"] < 0.9 * divergence["edited"]
    assert curve == sorted(curve, reverse=True)  # falls all the way
    assert curve[0] == pytest.approx(divergence["edited"], rel=1e-3)
    assert curve[-1] == pytest.approx(divergence["healed"], rel=0.02)  # written as the original is
    assert numbers["written"] == numbers["answered"]
    assert numbers["written"].strip()
    outputs = [output for cell in faster.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


@pytest.mark.long
@pytest.mark.thorough
def test_drafts_write_what_plain_transformers_writes(drafts: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import surgeon

    numbers = numbers_of(drafts)
    folder = surgeon.demo_model()
    prompt = AutoTokenizer.from_pretrained(folder)("def close(self):", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    new = len(numbers["own"])
    text = model.generate(**prompt, max_new_tokens=new, do_sample=False)[0, -new:].tolist()
    assert numbers["own"] == text
    assert len(numbers["drafted"]) == 2
    assert all(tokens == text for tokens in numbers["drafted"].values())
    assert numbers["drawn"][0] == numbers["drawn"][1] != text
    kept, acceptance = numbers["accepted"], numbers["acceptance"]
    # As they are guessed right.
    assert all(accepted > drafted / 2 for accepted, drafted in kept.values())
    assert (
        min(acceptance[name] for name in kept)
        > 0.8
        > max(acceptance[name] for name in acceptance.keys() - kept)
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_notebooks_are_fit_to_read(path: Path) -> None:
    """Small, executed from top to bottom, and without paths or noise of the machine they were run on."""
    content = path.read_text(encoding="utf-8")
    assert len(content) < LARGEST_FILE
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [
        output for output in outputs if output.get("name") == "stderr" or output.output_type == "error"
    ]
    text = json.dumps(
        [{key: value for key, value in output.items() if key != "data"} for output in outputs]
    )
    assert not re.search(r"(?<![\w.])/(home|tmp|root|work|Users|usr|var)/", text)


if __name__ == "__main__":
    for one in NOTEBOOKS:
        refresh(one)
