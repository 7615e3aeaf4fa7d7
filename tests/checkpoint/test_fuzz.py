"""Whatever a model's files hold, an export is a proven checkpoint or one clear error, and never half of something."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surgeon.checkpoint.tensor_file import verify
from surgeon.exports.export import plan_export, write_export
from surgeon.language.program import Program
from surgeon.opened import open_model
from tests.checkpoint.helpers import save_source

PROGRAM = Program.parse("A0 F0 >A1 >F1")
SETTINGS = settings(
    derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
INDEX = "model.safetensors.index.json"

NUMBERS = st.one_of(
    st.integers(-3, 200),
    st.sampled_from([2**31, 2**63, 10**12, 10**30]),
    st.floats(),
    st.sampled_from([1e308, -0.5]),
)
WORDS = st.one_of(
    st.sampled_from(["", "six", "float16", "..", "/etc/passwd", "x.safetensors"]), st.text(max_size=8)
)
SIMPLE = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
VALUES = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
SUSPECT = (  # entries that config.json of this model does not have
    *(
        "num_labels",
        "layer_types",
        "rope_scaling",
        "quantization_config",
        "torch_dtype",
        "per_layer_config",
    ),
    *("surgeon_program", "attribute_map", "auto_map", "id2label", "_attn_implementation", "return_dict"),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in two shards."""
    folder = tmp_path_factory.mktemp("fuzz") / "source"
    save_source(folder, num_layers=2, shards="60KB", vocab_size=31)
    assert len(list(folder.glob("*.safetensors"))) == 2
    return folder


def fresh(source: Path, place: Path) -> Path:
    """A copy to be changed and exported; what an earlier case left is removed."""
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(source, place / "source"))


def outcome(folder: Path) -> str:
    """Export; returns what the error said, or "" if the checkpoint is there, proven and whole."""
    target = folder.parent / "target"
    said = ""
    try:
        write_export(plan_export(open_model(folder), PROGRAM), target)
    except (ValueError, OSError) as error:
        said = str(error)
        assert said
        assert {path.name for path in folder.parent.iterdir()} == {"source"}
    else:
        assert {path.name for path in folder.parent.iterdir()} == {"source", "target"}
        assert verify(target, target / "surgeon.json") > 0
    return said


@settings(SETTINGS, max_examples=30)
@given(data=st.data())
def test_any_config(source: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = fresh(source, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        inside = config["rope_parameters"] if data.draw(st.booleans()) else config
        inside = inside if isinstance(inside, dict) else config
        key = data.draw(st.sampled_from([*inside, *SUSPECT]))
        if data.draw(st.integers(0, 4)) == 0:
            inside.pop(key, None)
        else:
            inside[key] = data.draw(VALUES)
    (folder / "config.json").write_text(json.dumps(config))
    outcome(folder)


@settings(SETTINGS, max_examples=30)
@given(data=st.data())
def test_any_index(source: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = fresh(source, tmp_path)
    index = json.loads((folder / INDEX).read_text())
    names = index["weight_map"]
    files = st.sampled_from(sorted(set(names.values())))
    change = data.draw(st.sampled_from(["file", "name", "forget", "whole", "text"]))
    name = data.draw(st.sampled_from(sorted(names)))
    if change == "file":
        names[name] = data.draw(files | VALUES)
    elif change == "name":
        names[data.draw(WORDS)] = names.pop(name)
    elif change == "forget":
        del names[name]
    elif change == "whole":
        index = data.draw(st.sampled_from([{}, [], 5, {"weight_map": data.draw(VALUES)}]))
    text = json.dumps(index).encode()
    if change == "text":
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.binary(max_size=3)) + text[at + 1 :]
    (folder / INDEX).write_bytes(text)
    said = outcome(folder)
    # Which file holds a tensor is what the files say; an index that says something else is refused.
    assert said or change in ("forget", "file", "text")


@settings(SETTINGS, max_examples=60)
@given(data=st.data())
def test_any_header(source: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = fresh(source, tmp_path)
    path = min(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    change = data.draw(st.sampled_from(["byte", "length", "cut", "entry", "more"]))
    if change == "byte":
        content[data.draw(st.integers(0, length + 7))] ^= data.draw(st.integers(1, 255))
    elif change == "length":
        content[:8] = struct.pack(
            "<Q", data.draw(st.integers(0, length + 50) | st.integers(0, 2**64 - 1))
        )
    elif change == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif change == "more":
        content += data.draw(st.binary(min_size=1, max_size=9))
    else:
        content = with_other_entry(content, length, data)
    path.write_bytes(content)
    said = outcome(folder)
    # Blanks of the header, a key of its metadata, the same value again.
    assert said or change in ("byte", "entry")


def with_other_entry(content: bytearray, length: int, data: st.DataObject) -> bytearray:
    """The file with one thing said otherwise about one of its tensors."""
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    entry = header[data.draw(st.sampled_from(sorted(header)))]
    key = data.draw(st.sampled_from(sorted(entry)))
    of_key = {
        "dtype": st.sampled_from(["F16", "BF16", "F32", "F8_E5M2", "I64", "X", 5, None]),
        "shape": st.lists(st.integers(-1, 64) | NUMBERS, max_size=3),
        "data_offsets": st.lists(st.integers(-8, 4096) | NUMBERS, max_size=3),
    }
    entry[key] = data.draw(of_key.get(key, VALUES))
    text = json.dumps(header).encode()
    return bytearray(struct.pack("<Q", len(text)) + text) + content[8 + length :]
