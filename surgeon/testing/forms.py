"""The contract of forms of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from surgeon.checkpoint.config import open_stored
from surgeon.checkpoint.describe import compare, describe
from surgeon.checkpoint.forms import FORMS, Form
from surgeon.checkpoint.stored import Checkpoint
from surgeon.exports.export import plan_export, write_export
from surgeon.exports.in_memory import edit
from surgeon.language.program import Program
from surgeon.models.edit import restore
from surgeon.opened import load, open_model
from surgeon.testing.sublayers import logits_of

LAYERS = 6
Exported = dict[str, Path]  # folders by program


class FormContract:
    """Tests of one form, on a small random model that is exported with several programs.

    class TestPlain(FormContract):
        @pytest.fixture
        def form(self):
            return FORMS["plain"]

        @pytest.fixture
        def programs(self):
            return ["A0 F0 A2 F2 A5 F5", "A0 F0 A1~A2 F1~F2"]

        @pytest.fixture
        def refused(self):
            return {"A0 F0 >A1 >F1": "the step >A1 is late"}
    """

    @pytest.fixture
    def form(self) -> Form:
        """The form: an entry of `surgeon.checkpoint.forms.FORMS`."""
        raise NotImplementedError(
            "give a fixture `form` that returns an entry of surgeon.checkpoint.forms.FORMS"
        )

    @pytest.fixture
    def programs(self) -> list[str]:
        """Programs that it can hold, over the model's layers."""
        raise NotImplementedError(
            "give a fixture `programs` that returns programs of six layers that the form can hold"
        )

    @pytest.fixture
    def refused(self) -> dict[str, str]:
        """Programs that it cannot hold, each with a part of the reason it gives."""
        return {}

    @pytest.fixture
    def form_model(self) -> PreTrainedModel:
        """A Llama of six layers; a form that only other architectures can have needs another one."""
        torch.manual_seed(0)
        config = LlamaConfig(
            num_hidden_layers=LAYERS,
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_bias=True,
            mlp_bias=True,
        )
        model: PreTrainedModel = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            # Distinct values show a parameter that is left out or taken from another layer.
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        return model

    @pytest.fixture
    def source(self, form_model: PreTrainedModel, tmp_path: Path) -> Path:
        """The model's own checkpoint."""
        form_model.save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    @pytest.fixture
    def exported(self, form: Form, programs: list[str], source: Path) -> Exported:
        """A checkpoint in this form for each of the programs, proven by being written."""
        folders = {
            program: source.with_name(f"target{number}") for number, program in enumerate(programs)
        }
        for program, folder in folders.items():
            write_export(plan_export(open_model(source), Program.parse(program), form.name), folder)
        return folders

    def test_it_is_known_and_described(self, form: Form) -> None:
        assert FORMS[form.name] is form
        assert bool(form.why_code) == (form.shipped is not None), "who has to trust a file is told why"

    def test_it_computes_what_the_program_does(
        self, form: Form, exported: Exported, form_model: PreTrainedModel
    ) -> None:
        """Loaded by surgeon, and by the class that others load it with."""
        ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
        for program, folder in exported.items():
            expected = logits_of(edit(form_model, program), ids)
            restore(form_model)
            others, config = form.written_class(open_stored(folder))
            for model in (
                load(folder),
                others.from_pretrained(folder, config=config, dtype=torch.float32).eval(),
            ):
                assert (logits_of(model, ids) - expected).abs().max() < 1e-5 * expected.abs().max()

    def test_a_folder_says_what_it_is(self, form: Form, exported: Exported, source: Path) -> None:
        for program, folder in exported.items():
            found = describe(folder)
            assert found.form is form
            assert str(found.program) == program
            reason = json.loads((folder / "surgeon.json").read_text())["reason"]
            assert reason, "users read why it has this form"
            card = " ".join((folder / "README.md").read_text().split())
            assert f"It is in surgeon's {form} form" in card
            how, command = form.serving(found.stored, "vllm serve NAME")
            assert how.endswith(":"), "a command follows it"
            assert f"### vLLM {how} ```bash" in card
            assert "vllm serve NAME" in command
        assert not form.is_marked(Checkpoint(source).config), "the original is in no edited form"

    def test_its_layers_are_the_originals(self, form: Form, exported: Exported) -> None:
        """Every stored layer comes from known layers of the original, as `surgeon show A B` needs it."""
        for folder in exported.values():
            found = describe(folder)
            sources = form.sources(found.program, found.stored.family, found.num_layers)
            assert len(sources) == found.stored.num_layers
            assert {layer for layers in sources for layer in layers} <= set(range(LAYERS))
            assert compare(found, found).is_equal

    def test_what_it_cannot_hold_is_refused_with_the_reason(
        self, form: Form, refused: dict[str, str], source: Path
    ) -> None:
        original = open_model(source)
        for program, reason in refused.items():
            with pytest.raises(
                ValueError, match=f"this program cannot be written in the {form} form.*{reason}"
            ):
                plan_export(original, Program.parse(program), form.name)
