"""What vLLM finds of the plugin, and what it refuses; vLLM itself is not needed."""

from __future__ import annotations

import json
import pickle
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig

from surgeon.checkpoint.forms import PROGRAM
from surgeon.language.program import Program
from surgeon.models.families import FAMILIES
from surgeon.training.scratch.tracks import narrow
from surgeon.vllm_plugin.configs import attentions_at_once, reason_against, stage_nodes, with_all_heads
from tests.checkpoint.helpers import run_export, save_source
from tests.tiny_models import tiny_model
from tests.vllm_plugin import fake_vllm
from tests.vllm_plugin.fake_vllm import configuration

GROUP = "vllm.general_plugins"
ROOT = Path(__file__).resolve().parents[2]


class Shape:
    """As much of vLLM's class that reads a model's shape as the plugin builds on."""

    def __init__(self, config: Any) -> None:
        self.hf_text_config = config


def test_vllm_starts_it_as_often_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}
    fake_vllm.install(monkeypatch)
    registry = SimpleNamespace(register_model=found.__setitem__)
    monkeypatch.setattr(sys.modules["vllm"], "ModelRegistry", registry, raising=False)
    shapes = ModuleType("vllm.transformers_utils.model_arch_config_convertor")
    vars(shapes).update(
        ModelArchConfigConvertorBase=Shape, MODEL_ARCH_CONFIG_CONVERTORS={"falcon": Shape}
    )
    utils = ModuleType("vllm.transformers_utils")
    utils.model_arch_config_convertor = shapes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setitem(sys.modules, shapes.__name__, shapes)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    register = EntryPoint("surgeon", points["surgeon"], GROUP).load()
    register()
    register()
    assert set(found) == {PROGRAM.shipped.class_name(name) for name in FAMILIES}
    own = {PROGRAM.shipped.prefix + name for name in FAMILIES}
    assert set(shapes.MODEL_ARCH_CONFIG_CONVERTORS) == {"falcon"} | own
    assert set(sys.modules["vllm.model_executor.models.config"].MODELS_CONFIG_MAP) == set(found)
    (model,) = set(found.values())
    module, _, name = model.partition(":")
    assert f"class {name}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()


def test_configurations_are_read_without_the_checkpoint_s_own_code(tmp_path: Path) -> None:
    from surgeon.vllm_plugin.configs import CONFIGS

    save_source(tmp_path / "source", num_layers=2)
    run_export(tmp_path / "source", tmp_path / "ladder", "A0 F0 >A1 >F1")
    config_class = CONFIGS["llama"]
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    config = AutoConfig.from_pretrained(tmp_path / "ladder", trust_remote_code=False)
    stored = json.loads((tmp_path / "ladder" / "config.json").read_text())
    assert type(config) is config_class
    assert isinstance(config, LlamaConfig)
    assert config.architectures == stored["architectures"] == [PROGRAM.shipped.class_name("llama")]
    assert config.surgeon_program == "A0 F0 >A1 >F1"
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("program", "attentions"),
    [
        ("A0 F0 A1 F1", 1),
        ("[A0 A1] [F0 F1]", 1),
        ("{A0 F0 A1 F1 | A2 F2 A3 F3} {A4 F4 | A5 F5}", 2),
        ("{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1 F1", 1),
        ("{[A0 F0] | [A1 F1] | [A2 F2]}", 3),
        ("{A0 {A1 | A2} | F0}", 2),
        ("{{A0 | A1} F0 | A2 F2}", 3),
        ("F0", 1),
    ],
)
def test_heads_that_ranks_share(program: str, attentions: int) -> None:
    assert attentions_at_once(Program.parse(program)) == attentions


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_the_heads_of_all_tracks_divide_among_ranks(family: str) -> None:
    """A track may have a single head: two tracks have two, for two ranks; the heads' width stays that of one."""
    from surgeon.vllm_plugin.configs import CONFIGS

    dense = tiny_model(
        family, 2, num_attention_heads=2, **({"num_key_value_heads": 2} if family == "llama" else {})
    )
    narrowed, program = narrow(dense.config, count=2, depth=1)
    entries = narrowed.to_dict() | {"model_type": f"surgeon_{family}", "surgeon_program": str(program)}
    shape = with_all_heads(Shape)(CONFIGS[family].from_dict(entries))
    assert narrowed.num_attention_heads == 1
    assert shape.get_total_num_attention_heads() == shape.get_total_num_kv_heads() == 2
    assert shape.get_head_size() == (getattr(narrowed, "head_dim", None) or narrowed.hidden_size)


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("load_config", "load_format", "dummy", "not by --load-format dummy; use auto or safetensors"),
        (
            "parallel_config",
            "decode_context_parallel_size",
            2,
            "leave out --decode-context-parallel-size",
        ),
        (None, "quant_config", object(), "leave out --quantization"),
    ],
)
def test_what_the_plugin_cannot_do(part: str | None, name: str, value: Any, message: str) -> None:
    config = configuration("folder")
    assert reason_against(config) is None
    setattr(config if part is None else getattr(config, part), name, value)
    assert message in str(reason_against(config))


@pytest.mark.parametrize(
    ("level", "asked", "reduce", "recorded"),
    [
        (2, None, "auto", "FULL_DECODE_ONLY"),
        (2, "FULL", "auto", "FULL"),
        (2, "NONE", "auto", "NONE"),
        (2, "FULL", "torch", "NONE"),
        (0, None, "auto", None),
    ],
)
def test_which_passes_are_recorded(
    level: int, asked: str | None, reduce: str, recorded: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm.install(monkeypatch)
    from surgeon.vllm_plugin.passes import ProgramPasses

    config = configuration("folder", reduce=reduce)
    config.optimization_level = level
    config.compilation_config.cudagraph_mode = asked and fake_vllm.CUDAGraphMode[asked]
    ProgramPasses.verify_and_update_config(config)
    assert config.compilation_config.mode == fake_vllm.CompilationMode.NONE
    assert config.compilation_config.cudagraph_mode == (recorded and fake_vllm.CUDAGraphMode[recorded])
    config.compilation_config.mode = fake_vllm.CompilationMode.VLLM_COMPILE
    with pytest.raises(ValueError, match="are not compiled; leave out -cc.mode"):
        ProgramPasses.verify_and_update_config(config)
    fake_vllm.forget(monkeypatch)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_have_all_nodes_in_order(stages: int) -> None:
    nodes = Program.parse("A0 F0 >A1 >F1 {A2 | F2}").nodes
    parts = [stage_nodes(nodes, stage, stages) for stage in range(stages)]
    assert sum(parts, ()) == nodes
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ValueError, match="5 nodes cannot be cut into 6 pipeline stages"):
        stage_nodes(nodes, 0, 6)
