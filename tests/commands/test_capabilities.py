"""What `surgeon.check` says of drawn models is so: what it says yes to runs, the rest is refused in its words."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import surgeon
from surgeon.commands.capabilities import ADAPTER_RANK, FACTORS, LENGTH, PAIRS, Capabilities, answer
from surgeon.exports.export import plan_export, write_export
from surgeon.findings.check import NO, PARTLY, YES, Verdict
from surgeon.language.operations.base import VARIANTS
from surgeon.language.operations.variants import variant
from surgeon.language.program import Program
from surgeon.models.edit import edit
from surgeon.models.families import FAMILIES
from surgeon.opened import load_streamed, open_model
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.searches.mixture import Mixture
from surgeon.searches.spaces import parse_spaces
from surgeon.training.racks.model import rack_of
from surgeon.training.racks.partition import Racks, allowed_cuts
from surgeon.training.racks.run import RackOptions
from surgeon.training.scope import add_adapters, choose_parameters
from surgeon.training.settings import TrainSettings
from tests.checkpoint.helpers import IDS, logits_of
from tests.drawn import configurations
from tests.runtime.on_ranks import logits_in_chunks
from tests.selection import case
from tests.tiny_models import save_checkpoint, tiny_model

LP = "A0 F0 [A1 A2] [F1 F2] A3 F3"
RANKS = 2
PLACES = 2  # of a map that are tried
AREAS = ("scan", "search", "export", "ranks", "train")
SOME = 3  # of these, of each model
# Configurations that little can be done with, which cases of all paths therefore do not draw.
ODD: dict[str, dict[str, Any]] = {"opt": {"word_embed_proj_dim": 16}}
# Families whose layers are those of another one with other flags.
BY_DEFAULT = ("llama", "gpt2", "gpt_neox", "gemma2", "opt", "gpt_oss", "deepseek_v3", "qwen3_next")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RankOptions(RANKS)) as started:
        yield started


@pytest.mark.sampled
@pytest.mark.parametrize("family", [case(family, default=family in BY_DEFAULT) for family in FAMILIES])
def test_what_check_says_is_so(family: str, ranks: Ranks, drawn_settings: settings) -> None:
    @drawn_settings
    @given(draw=st.data(), layers=st.integers(3, 4))
    def check(draw: st.DataObject, layers: int) -> None:
        config = draw.draw(configurations(family, layers))
        if family in ODD and draw.draw(st.booleans()):
            config |= ODD[family]
        with tempfile.TemporaryDirectory() as folder:
            tiny_model(family, layers, dropout=0.0, **config).save_pretrained(Path(folder) / "source")
            tried = Tried(Path(folder) / "source", ranks)
            for area in draw.draw(st.permutations(AREAS))[:SOME]:
                what, ask = draw.draw(st.sampled_from([*tried.able.questions(area)]))
                tried.hold(answer(area, what, ask))

    check()


@pytest.mark.parametrize(
    ("config", "area", "what", "command"),
    [
        (
            {"word_embed_proj_dim": 16},
            "ranks",
            "2 ranks",
            lambda m: surgeon.generate(m, ["the fox"], ranks=2),
        ),
        ({"word_embed_proj_dim": 16}, "ranks", "lp", lambda m: surgeon.bench(m, program=LP, ranks=2)),
        (
            {"word_embed_proj_dim": 16},
            "ranks",
            "2 ranks",
            lambda m: surgeon.predict(m, hardware="cpu-2"),
        ),
        (
            {"word_embed_proj_dim": 16},
            "train",
            "rack by rack",
            lambda m: heal(m, "all", RackOptions(["0:1", "1:4"])),
        ),
        ({"layer_norm_elementwise_affine": False}, "train", "heal norms", lambda m: heal(m, "norms")),
        (
            {"layer_norm_elementwise_affine": False},
            "train",
            "heal edited-norms",
            lambda m: heal(m, "edited-norms"),
        ),
    ],
)
def test_commands_refuse_in_the_words_of_check(
    config: dict[str, Any], area: str, what: str, command: Callable[[Path], Any], tmp_path: Path
) -> None:
    """And before they read a text."""
    folder = save_checkpoint(tmp_path / "model", "opt", **config)
    verdict = surgeon.check(folder, ranks=[2]).of_area(area)[what]
    assert verdict.works == NO
    with pytest.raises(ValueError, match=re.escape(verdict.why)):
        command(folder)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


def heal(folder: Path, scope: str, racks: RackOptions | None = None) -> None:
    surgeon.heal(
        folder,
        "no-such.txt",
        folder.with_name("out"),
        program=LP,
        settings=TrainSettings(scope),
        racks=racks,
    )


class Tried:
    """A model of which is tried what `check` says."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.started = folder, ranks
        self.able = Capabilities(open_model(folder), (RANKS,), "float32")

    @property
    def model(self) -> Any:
        return self.able.model

    def hold(self, verdict: Verdict) -> None:
        """Hold an answer against what becomes of all that it is about."""
        refusals = [outcome(attempt) for attempt in getattr(self, verdict.area)(verdict.what)]
        refused = [one for one in refusals if one is not None]
        said = f"{verdict} and {refusals}"
        if verdict.works == YES:
            assert not refused, said
        elif verdict.works == NO:
            assert verdict.why in str(refusals[0]), said
            assert len(refused) == len(refusals), said
        else:
            assert verdict.works == PARTLY
            # Of the first place that is refused.
            quoted = verdict.why.partition("not ")[2].partition(": ")[2]
            assert not refused or quoted in refused[0], said

    def places(self, name: str) -> list[Program]:
        """Programs of a map."""
        found = self.able.maps[name]
        if isinstance(found, ValueError):
            raise found
        return [program for _, program, _ in found[:PLACES]]

    def of_map(self, name: str, attempt: Callable[[Program], Any]) -> Sequence[Callable[[], Any]]:
        try:
            return [partial(attempt, program) for program in self.places(name)]
        except ValueError:
            return [partial(self.places, name)]

    # By area, and by what `check` calls it.

    def scan(self, what: str) -> Sequence[Callable[[], Any]]:
        if what in self.able.map_names:
            return self.of_map(what, self.run)
        if what == "layer by layer":
            return [partial(load_streamed, self.folder)]
        return [partial(self.run, self.model.program)]

    def run(self, program: Program) -> None:
        assert logits_of(edit(surgeon.load(self.folder), program)).isfinite().all()

    def search(self, space: str) -> Sequence[Callable[[], Any]]:
        mixture = Mixture(parse_spaces(space, RANKS), self.model)
        if outcome(mixture.require_edits) is not None:
            return [mixture.require_edits]
        return [
            partial(self.run, mixture.program((one,))) for one in (mixture.edits[0], mixture.edits[-1])
        ]

    def export(self, what: str) -> Sequence[Callable[[], Any]]:
        if what == "all programs":
            return [partial(self.write, "auto", self.model.program)]
        if what == "pairs as one layer":
            return self.of_map(PAIRS, partial(self.write, "fused"))
        return self.of_map(what, partial(self.write, "auto"))

    def write(self, form: str, program: Program) -> None:
        plan = plan_export(open_model(self.folder), program, form)
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as beside:
            write_export(plan, Path(beside) / "target")

    def ranks(self, what: str) -> Sequence[Callable[[], Any]]:
        every = range(self.model.num_layers)
        if what.endswith("ranks") or what.startswith("texts of"):
            program = self.model.program
        elif what == "two factors":
            program = self.places(FACTORS)[0]
        else:
            name = what if VARIANTS[what].argument is None else f"{what.partition(':')[0]}:{LENGTH}"
            return [lambda: self.on_ranks(variant(name, self.model.program, every, RANKS))]
        return [partial(self.on_ranks, program)]

    def on_ranks(self, program: Program) -> None:
        plan = make_plan(self.folder, RANKS, None, program, dtype="float32")
        for logits, *_ in self.started.call(logits_in_chunks, plan, [IDS]):
            assert logits.isfinite().all()

    def train(self, what: str) -> Sequence[Callable[[], Any]]:
        pairs = self.able.maps[PAIRS]
        program = pairs[0][1] if isinstance(pairs, list) else self.model.program
        if what == "rack by rack":
            return [partial(self.cut, program)]
        scope = "edited"
        if what != "heal by adapters":
            scope = what.removeprefix("heal ")
        return [partial(self.heal, program, scope, ADAPTER_RANK if what == "heal by adapters" else None)]

    def heal(self, program: Program, scope: str, rank: int | None) -> None:
        student = edit(surgeon.load(self.folder).float(), program)
        if rank is None:
            choose_parameters(student, scope, program)
            trained: Any = student
        else:
            trained = add_adapters(student, scope, program, rank)
        steps(trained)
        whole = trained if rank is None else trained.merge_and_unload()
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as beside:
            surgeon.export(whole.eval(), Path(beside) / "healed")

    def cut(self, program: Program) -> None:
        middle = cuts[len(cuts) // 2] if (cuts := allowed_cuts(program)) else 1
        racks = Racks.parse([f"0:{middle}", f"{middle}:{self.model.num_layers}"], program)
        whole = edit(surgeon.load(self.folder), program)
        for index in range(len(racks)):
            rack_of(whole, racks, index)


def steps(model: Any) -> None:
    """One step of training, which has to change something."""
    ids: Tensor = IDS
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    chosen = [one for one in model.parameters() if one.requires_grad]
    torch.optim.SGD(chosen, 1e-3).step()
    assert any(one.grad is not None and one.grad.any() for one in chosen)


def outcome(attempt: Callable[[], Any]) -> str | None:
    """Why something is refused, as `check` says it; None if it works."""
    try:
        attempt()
    except (ValueError, OSError, ImportError) as refusal:
        return " ".join(str(refusal).split())
    return None
