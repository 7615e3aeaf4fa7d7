"""Two processes reach what one reaches: replicas of an edited model (DDP), and its parameters shared out (FSDP)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import nn

import surgeon
from surgeon.models.edit import edit
from surgeon.training.scope import follow_checkpoint, group_modules, shard_parameters
from surgeon.training.settings import TrainSettings
from tests.processes.test_torchrun import free_port
from tests.processes.together import REPOSITORY, together
from tests.selection import case
from tests.tiny_models import tiny_model
from tests.training.process import main
from tests.waiting import PATIENCE

PAIRED = "A0 F0 [A1 A2] [F1 F2]"
AGAIN = "A0 F0 >A1 >F1 A1 F1 [A2 A0] [F2 F0]"
DERIVED = "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1~A2 >F1 A2@q4"
PROCESS = "tests.training.process"


def require_alike(one: Path, two: Path) -> None:
    """The same curves, and the same weights at the end, to what sums in another order differ by."""
    for name, columns in (
        ("training.csv", ["step", "loss", "logits"]),
        ("held_out.csv", ["perplexity", "divergence"]),
    ):
        expected, found = (
            pd.read_csv(folder / name)[columns].to_numpy().ravel() for folder in (one, two)
        )
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5), name
    expected_norms, norms = (json.loads((folder / "norms.json").read_text()) for folder in (one, two))
    assert norms.keys() == expected_norms.keys()
    for name, norm in norms.items():
        # It moves no softmax: what Adam follows of its gradient is rounding.
        if not name.endswith("k_proj.bias"):
            assert norm == pytest.approx(expected_norms[name], rel=1e-5), name


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sharded", "family", "program", "lora", "hidden"),
    [
        ("ddp", "llama", PAIRED, "2", "0.5"),
        ("fsdp", "qwen3", DERIVED, "0", "0"),
        ("fsdp", "llama", PAIRED, "2", "0"),
        case("fsdp", "llama", AGAIN, "0", "0.5", default=False),
        # Its head is its embedding, and its MLP two Linears.
        case("fsdp", "opt", DERIVED, "0", "0", default=False),
        case("deepspeed", "llama", AGAIN, "0", "0.5", default=False),
        case("deepspeed", "qwen3", DERIVED, "0", "0", default=False),
        case("deepspeed", "llama", PAIRED, "2", "0", default=False),
    ],
)
def test_two_processes_reach_what_one_does(
    sharded: str, family: str, program: str, lora: str, hidden: str, tmp_path: Path
) -> None:
    if sharded == "deepspeed":  # where it is installed; on CPUs with DS_ACCELERATOR=cpu
        pytest.importorskip("deepspeed")
    asked = family, program, lora, hidden
    main(str(tmp_path / "one"), "no", *asked)
    together(PROCESS, str(tmp_path / "two"), sharded, *asked)
    require_alike(tmp_path / "one", tmp_path / "two")
    if program == AGAIN:  # killed before its last checkpoint, it goes on
        shutil.rmtree(tmp_path / "two" / "checkpoint-4")
        (tmp_path / "two" / "norms.json").unlink()
        together(PROCESS, str(tmp_path / "two"), sharded, *asked)
        require_alike(tmp_path / "one", tmp_path / "two")


def shares(model: nn.Module) -> list[set[str]]:
    """What is gathered together, by the names of parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        {names[id(parameter)] for module in group for parameter in module.parameters()}
        for group in group_modules(model)
    ]


def test_what_is_gathered_together() -> None:
    """Each sublayer; slices with a head norm between them as one; no parameter twice; all but norms of the stream."""
    model = edit(tiny_model("qwen3", 3), "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} [A1 A1] F1")
    found, inside = shares(model), "model.layers."
    slices = {
        f"{inside}A0/2:{piece}.self_attn.{role}_proj.weight" for piece in (0, 1) for role in "qkvo"
    }
    assert slices | {f"{inside}A0/2:0.self_attn.{role}_norm.weight" for role in "qk"} in found
    assert {f"{inside}F0/2:1.mlp.{role}_proj.weight" for role in ("gate", "up", "down")} in found
    every = [name for group in found for name in group]
    left = {name for name, _ in model.named_parameters()} - set(every)
    assert len(every) == len(set(every))
    assert all("layernorm" in name or not name.startswith(inside) for name in left)


def test_what_accelerate_launch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is heard on CPUs, where accelerate itself would train replicas; another version of FSDP is refused."""
    before = PartialState(cpu=True).distributed_type
    state = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, mixed_precision="bf16")
    accelerator: Any = SimpleNamespace(state=state, parallelism_config=None)
    assert not shard_parameters(accelerator, None)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="fsdp_version 1 does not know programs; use 2"):
        shard_parameters(accelerator, None)
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    try:
        assert shard_parameters(accelerator, None)
    finally:
        PartialState().distributed_type = before
    plugin: Any = state.fsdp_plugin
    assert state.distributed_type == DistributedType.FSDP
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    assert plugin.reshard_after_forward is False
    accelerator.parallelism_config = object()
    with pytest.raises(ValueError, match="share parameters out by FSDP2 alone"):
        shard_parameters(accelerator, None)


@pytest.mark.parametrize(("there", "kind"), [("_0/x", "SHARDED"), (".bin", "FULL")])
def test_a_run_goes_on_as_its_checkpoint_is_written(there: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"pytorch_model_fsdp{there}"
    file.parent.mkdir(exist_ok=True)
    file.touch()
    for asked in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=asked)
        sharded: Any = SimpleNamespace(
            distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin)
        )
        follow_checkpoint(sharded, tmp_path)
        assert plugin.state_dict_type.name == f"{kind}_STATE_DICT"
        assert kind.title() in type(plugin.state_dict_config).__name__
    whole: Any = SimpleNamespace(distributed_type=DistributedType.NO)
    with pytest.raises(
        ValueError, match="is of a run with FSDP, and this one is without; go on with it, or choose"
    ):
        follow_checkpoint(whole, tmp_path)
    (tmp_path / "empty").mkdir()
    follow_checkpoint(whole, tmp_path / "empty")
    with pytest.raises(
        ValueError, match="is of a run without FSDP, and this one is with; go on without it"
    ):
        follow_checkpoint(sharded, tmp_path / "empty")


@pytest.mark.long
@pytest.mark.thorough
def test_the_command_under_accelerate_launch(
    tmp_path: Path, tiny_checkpoint: Path, tiny_text: Path
) -> None:
    """As users start it, by the configuration in recipes/, with a checkpoint at the end that the first process writes.

    Its parameters are shared out on CPUs, too.
    """
    config = (REPOSITORY / "recipes" / "launch" / "fsdp2.yaml").read_text()
    for given, ours in (
        ("use_cpu: false", "use_cpu: true"),
        ("processes: 8", "processes: 2"),
        ("bf16", '"no"'),
    ):
        assert given in config
        config = config.replace(given, ours)
    (tmp_path / "cpu.yaml").write_text(config)
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(tmp_path / "cpu.yaml"),
    ]
    settings = json.loads((tiny_checkpoint / "config.json").read_text()) | {"attention_dropout": 0.0}
    (tiny_checkpoint / "config.json").write_text(json.dumps(settings))
    program = "A0 F0 [A1 A2] [F1 F2] A3 F3"
    command = ["heal", str(tiny_checkpoint), "--program", program, "--data", str(tiny_text)]
    quick = ["--window", "8", "--eval-tokens", "16", "--batch", "2", "--steps", "2", "--train", "all"]
    launch += ["--main_process_port", str(free_port()), "-m", "surgeon.commands"]
    done = subprocess.run(
        [*launch, *command, *quick, "-o", str(tmp_path / "two")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "two")
    assert done.stderr.count("healed   perplexity") == 1
    surgeon.heal(
        tiny_checkpoint, tiny_text, tmp_path / "one", program=program, window=8, eval_tokens=16, device="cpu",
        settings=TrainSettings(batch=2, steps=2, scope="all"),
    )  # fmt: skip
    ways = "one", "two"
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ways]
    assert files[0] == files[1]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ways)
    assert two.keys() == one.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-6)
