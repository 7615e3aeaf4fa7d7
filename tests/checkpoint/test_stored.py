"""Checkpoint folders as they come: damaged, contradictory, or pointing elsewhere. What is wrong is said before work."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from surgeon.checkpoint.stored import Checkpoint
from surgeon.checkpoint.tensor_file import read_header, read_json
from surgeon.exports.export import check_exportable
from surgeon.opened import open_model
from tests.checkpoint.helpers import run_export, save_source, weights_of
from tests.stored import configure, with_index

PRUNED = "A0 F0 A2 F2"
INDEX = "model.safetensors.index.json"


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_file(path: Path, header: Any, data: int, length: int | None = None) -> Path:
    """A file with this header, whatever it says, and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))
    return path


def test_a_sound_header(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2, 3), "b": torch.tensor(7), "c": torch.empty(0, 4).half()}
    save_file(tensors, tmp_path / "x", {"format": "pt"})
    found = read_header(tmp_path / "x")
    assert {name: (stored.dtype, stored.shape) for name, stored in found.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    stored = found["a"]
    content = (tmp_path / "x").read_bytes()[stored.begin : stored.end]
    assert torch.equal(
        torch.frombuffer(bytearray(content), dtype=torch.float32).view(2, 3), tensors["a"]
    )


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"", 0, "truncated or not a safetensors file .*EOF while parsing"),
        (b"\xff\xfe{}", 0, "invalid utf-8"),
        (b'{"a": ' * 1000, 0, "recursion limit"),
        ([1], 0, "invalid type: sequence"),
        ({"a": 5}, 0, "invalid type: integer `5`, expected struct TensorInfo"),
        (json.dumps({"a": entry()}).encode()[:-1] + b', "a": 0}', 24, "truncated or not"),
        (
            json.dumps({"a": entry()}).encode()[:-1] + b", " + json.dumps({"a": entry()}).encode()[1:],
            24,
            "'a' twice",
        ),
        ({"__metadata__": {"step": 5}}, 0, "invalid type: integer `5`, expected a string"),
        (b'{"__metadata__": {"a": "\\ud800"}}', 0, "hex escape"),
        ({"a": entry()}, 20, "file not fully covered"),
        ({"a": entry()}, 30, "file not fully covered"),
        ({"a": entry(dtype="C64", offsets=[0, 48])}, 48, "dtype C64, which is not supported"),
        ({"a": entry(shape=[2, -3])}, 24, "invalid value: integer `-3`"),
        ({"a": entry(shape=[2, 3.0])}, 24, "invalid type: floating point `3.0`"),
        ({"a": entry(shape=[10**6, 10**6])}, 24, "invalid shape, data type, or offset"),
        ({"a": entry(offsets=[24, 0])}, 24, "invalid offset for tensor `a`"),
        ({"a": entry(offsets=[True, 24])}, 24, "invalid type: boolean `true`"),
        ({"a": entry(), "b": entry(offsets=[12, 36])}, 36, "invalid offset for tensor `b`"),
        ({"a": entry(), "b": entry(offsets=[28, 52])}, 52, "invalid offset for tensor `b`"),
    ],
)
def test_headers_that_do_not_describe_their_file(
    tmp_path: Path, header: Any, data: int, said: str
) -> None:
    path = write_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(ValueError, match=said):
        read_header(path)


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\0", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 10) + b"{}"]
)
def test_files_that_are_cut_off(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        read_header(tmp_path / "x")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder", Path("/dev/zero")):
        with pytest.raises(ValueError, match="not a regular file"):
            read_header(path)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1, "a": 2}', '{"a": ' * 100_000, "\udcff"])
def test_json_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="not valid JSON|should hold a JSON object"):
        read_json(tmp_path / "x.json")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of several shards."""
    save_source(tmp_path / "sharded", num_layers=3, shards="40KB")
    return tmp_path / "sharded"


@pytest.fixture
def index(sharded: Path) -> Callable[..., Path]:
    """Changes the index: a function of its weight map, or another index altogether."""

    def change(edit: Callable[[dict[str, Any]], Any]) -> Path:
        path = sharded / INDEX
        stored = json.loads(path.read_text())
        stored["weight_map"] = edit(stored["weight_map"])
        path.write_text(json.dumps(stored))
        return sharded

    return change


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "../..", 5, None, ["a"], "x\0y.safetensors"],
)
def test_an_index_names_files_of_its_folder_only(index: Callable[..., Path], file: Any) -> None:
    with pytest.raises(ValueError, match="outside the folder"):
        Checkpoint(index(lambda names: names | {"model.norm.weight": file}))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda _: None, "no weight_map"),
        (lambda _: [], "no weight_map"),
        (lambda _: {}, "no weight_map"),
        (
            lambda names: names | {"model.norm.weight": "config.json"},
            r"only \*.safetensors files are read",
        ),
        (lambda names: names | {"model.norm.weight": ""}, r"only \*.safetensors files are read"),
        (lambda names: names | {"more": names["model.norm.weight"]}, "tensor 'more' is not in model-"),
        (lambda names: names | {"model.norm.weight": "none.safetensors"}, "none.safetensors is missing"),
    ],
)
def test_an_index_that_does_not_fit(index: Callable[..., Path], edit: Any, said: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        Checkpoint(index(edit))


def test_a_tensor_that_the_index_forgets_is_there(index: Callable[..., Path], tmp_path: Path) -> None:
    folder = index(
        lambda names: {name: file for name, file in names.items() if name != "model.norm.weight"}
    )
    assert "model.norm.weight" in Checkpoint(folder)  # transformers loads it, too
    run_export(folder, tmp_path / "target", PRUNED)


def test_of_a_file_and_an_index_the_one_that_transformers_loads_is_read(tmp_path: Path) -> None:
    model = save_source(tmp_path / "both", num_layers=3)
    alone = Checkpoint(tmp_path / "both").model_hash()
    with_index(tmp_path / "both")
    checkpoint = Checkpoint(tmp_path / "both")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)
    assert torch.equal(checkpoint.tensor("model.norm.weight"), model.model.norm.weight)
    assert {path.name for path in checkpoint.weight_files} == {"model.safetensors"}
    assert checkpoint.model_hash() == alone
    (tmp_path / "both" / INDEX).write_text("{")  # not looked at
    Checkpoint(tmp_path / "both")


@pytest.mark.parametrize("named", ["other.safetensors", "other.safetensors.index.json"])
def test_weights_that_the_configuration_names(named: str, tmp_path: Path) -> None:
    model = save_source(tmp_path / "source", num_layers=3)
    with_index(tmp_path / "source")
    configure(tmp_path / "source", transformers_weights=named)
    with pytest.raises(
        FileNotFoundError, match=rf"{named} is missing: config.json names it as transformers_weights"
    ):
        Checkpoint(tmp_path / "source")
    (tmp_path / "source" / ("model.safetensors" if named.endswith("safetensors") else INDEX)).rename(
        tmp_path / "source" / named
    )
    norm = AutoModelForCausalLM.from_pretrained(tmp_path / "source").model.norm.weight
    assert torch.equal(norm, model.model.norm.weight) == named.endswith("safetensors")
    assert torch.equal(Checkpoint(tmp_path / "source").tensor("model.norm.weight"), norm)
    run_export(tmp_path / "source", tmp_path / "target", PRUNED)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "target").model.norm.weight, norm)


def test_an_adapter_in_the_folder_is_refused(tmp_path: Path) -> None:
    save_source(tmp_path, num_layers=1)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"holds an adapter .adapter_config.json., .*; merge it into its model"
    ):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "named", ["../model.safetensors", "a/b.safetensors", "pytorch_model.bin", "", 5, ["x"]]
)
def test_weights_that_the_configuration_must_not_name(named: Any, tmp_path: Path) -> None:
    save_source(tmp_path, num_layers=1)
    configure(tmp_path, transformers_weights=named)
    with pytest.raises(
        ValueError, match=r"should name a \*.safetensors or .* of its folder as transformers_weights"
    ):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    held = weights_of(sharded)
    own = {name: held[name] for name in read_header(second)}
    double = next(iter(read_header(first)))
    save_file(own | {double: held[double]}, second)
    with pytest.raises(ValueError, match=f"'{double}' is in {first.name} and in {second.name}"):
        Checkpoint(sharded)


def test_links_are_followed_and_none_is_written(sharded: Path, tmp_path: Path) -> None:
    """Of a hub cache's snapshot, and to wherever else they lead."""
    plain = weights_of(sharded)
    (sharded / "tokenizer.json").write_text("{}")
    cached = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    cached.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (cached / path.name).symlink_to(f"../../blobs/{number:064x}")
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in cached.iterdir():
        (linked / path.name).symlink_to(path)
    for source in (cached, linked):
        target = tmp_path / f"{source.name}-target"
        run_export(source, target, PRUNED)
        assert not any(path.is_symlink() for path in target.iterdir())
        assert (target / "tokenizer.json").read_text() == "{}"
        assert Checkpoint(source).model_hash() == Checkpoint(cached).model_hash()
        found = {name: Checkpoint(source).tensor(name) for name in plain}
        assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


def test_shapes_are_compared_with_the_config_before_any_work(sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    asked = r"mlp.\w+_proj.weight has the shape .* but config.json asks for \((40, 32|32, 40)\)"
    with pytest.raises(ValueError, match=asked):
        check_exportable(open_model(sharded))


def test_every_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    save_source(tmp_path / "source", num_layers=3)
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    mixed = {
        name: t.to(dtypes[i % 4]) for i, (name, t) in enumerate(weights_of(tmp_path / "source").items())
    }
    save_file(mixed, tmp_path / "source" / "model.safetensors")
    proof = run_export(tmp_path / "source", tmp_path / "target", "A0 F0 A1 F1")
    assert proof.written < 1e-6
    written = weights_of(tmp_path / "target")
    assert all(
        torch.equal(tensor, mixed[name]) and tensor.dtype == mixed[name].dtype
        for name, tensor in written.items()
    )
    proof = run_export(tmp_path / "source", tmp_path / "fused", "A0 F0 [A1 A2] [F1 F2]")
    assert proof.exact < 1e-5


def test_a_file_that_shrinks_while_it_is_read(sharded: Path) -> None:
    checkpoint = Checkpoint(sharded)
    (path,) = checkpoint["lm_head.weight"].paths
    os.truncate(path, 100)
    with pytest.raises(OSError, match="became shorter while it was read"):
        list(checkpoint["lm_head.weight"].blocks())


def test_a_models_hash_is_of_what_config_json_means_and_of_the_weights(tmp_path: Path) -> None:
    save_source(tmp_path, num_layers=1)
    known = Checkpoint(tmp_path).model_hash()
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for same in (
        dict(reversed(config.items())),
        config | {"transformers_version": "4.0", "_name_or_path": "/elsewhere", "use_cache": False},
        {key: value for key, value in config.items() if key != "dtype"} | {"torch_dtype": "float16"},
    ):
        path.write_text(json.dumps(same, indent=1))
        assert Checkpoint(tmp_path).model_hash() == known
    rope = config["rope_parameters"] | {"rope_theta": 5.0}
    for other in (
        config | {"rope_parameters": rope},
        config | {"rms_norm_eps": 1e-3},
        {key: value for key, value in config.items() if key != "rms_norm_eps"},
        config | {"something_new": 1},
    ):
        path.write_text(json.dumps(other))
        assert Checkpoint(tmp_path).model_hash() != known
    path.write_text(json.dumps(config))
    assert Checkpoint(tmp_path).model_hash() == known
    weights = Checkpoint(tmp_path).weights_hash()
    save_file(
        weights_of(tmp_path) | {"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors"
    )
    assert Checkpoint(tmp_path).weights_hash() != weights
    assert Checkpoint(tmp_path).model_hash() != known
