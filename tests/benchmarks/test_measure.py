"""What is measured of passes on ranks, variants and candidates by name, and traces."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.runtime import expected_decode
from surgeon.benchmarks.measure import Measurement, Needs, RankBench, Result, plan_candidates, summarise
from surgeon.benchmarks.timing import PassTiming, RankRun
from surgeon.cost.candidates import open_candidates
from surgeon.cost.clocks import Transfer
from surgeon.cost.deployment import Workload
from surgeon.language.operations import tracks
from surgeon.language.program import Program
from surgeon.runtime.comm.collectives import Counts, Link
from surgeon.runtime.plan.specification import Plan, Ways
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from tests.tiny_models import damage, tiny_model
from tests.waiting import wait_until

DELAY = 0.005  # far longer than a step for one token, shorter than one for hundreds
HIDDEN = 256
MANY = Workload(batch=8, prompt=100, new=2)
DENSE = Program.dense(4)
LADDER = "A0 F0 >A1 >F1 >A2 >F2 >A3 >F3"
PROGRAMS = {
    "dense": str(DENSE),
    "ladder": LADDER,
    "lp": "A0 F0 [A1 A2] [F1 F2] A3 F3",
    "tracks": str(tracks(DENSE, range(0, 4), count=2, depth=2)),
}
NEW = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    tiny_model("llama", hidden_size=HIDDEN, intermediate_size=1024).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plans(checkpoint: Path) -> dict[str, Plan]:
    needs = Needs(ranks=2, tokens=MANY.prompt + MANY.new, device="cpu")
    plans = {name: needs.plan(checkpoint, program) for name, program in PROGRAMS.items()}
    return plans | {"upper-bound": plans["dense"]}


@pytest.fixture(scope="module")
def bench(plans: dict[str, Plan]) -> Iterator[RankBench]:
    with Ranks(RankOptions(2, link=Link(DELAY))) as started:
        yield RankBench.load(started, plans, {"upper-bound"})


Results = dict[tuple[str, int], Result]


def measured(bench: RankBench) -> Results:
    found = bench.measure([Workload(1, 3, NEW), Workload(2, 5, NEW)], 2, lambda _: None)
    return {(result.name, result.load.batch): result for result in found}


@pytest.fixture(scope="module")
def results(bench: RankBench) -> Results:
    return measured(bench)


MeasuredUntil = Callable[[Callable[[Results], bool]], None]


@pytest.fixture(scope="module")
def measured_until(bench: RankBench, results: Results) -> MeasuredUntil:
    """Times in which a busy machine hides what is to be seen are measured again."""

    def again() -> bool:
        results.update(measured(bench))
        return False

    return lambda holds: wait_until(lambda: holds(results) or again())


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pass_sends_what_the_program_says_and_waits_for_it(
    name: str, batch: int, results: Results, measured_until: MeasuredUntil
) -> None:
    result = results[name, batch]
    program = Program.parse(PROGRAMS[name])
    syncs, behind = (
        program.sync_points(2),
        Program(program.nodes[program.attended_nodes :]).sync_points(2),
    )
    assert len(result.rounds) == 2
    for one in result.rounds:
        assert one.decode_pass is not None
        for split, tokens in ((one.prefill_pass, batch * result.load.prompt), (one.decode_pass, batch)):
            # Behind the last attention only each text's last token goes on.
            assert split.layers == Counts(
                syncs, 0, ((syncs - behind) * tokens + behind * batch) * HIDDEN * 4
            )
            assert (split.vocabulary.all_reduces, split.vocabulary.all_gathers) == (1, 1)
            assert split.compute > 0
        assert one.first_token >= one.prefill
        assert one.rate == pytest.approx(batch * NEW / (one.first_token + one.decode))
        assert one.per_token == pytest.approx(one.decode / (NEW - 1))

    def waits(found: Results) -> bool:
        # A ladder lands two reductions in the time of one; nothing else can wait less than the link takes, unless it
        # is interrupted meanwhile.
        least = 3 if name == "ladder" else syncs
        splits = [
            split for one in found[name, batch].rounds for split in (one.prefill_pass, one.decode_pass)
        ]
        return all(split is not None and split.waiting > (least + 2) * DELAY * 0.5 for split in splits)

    measured_until(waits)


@pytest.mark.alone
def test_programs_that_synchronise_less_or_later_are_faster(measured_until: MeasuredUntil) -> None:
    def are_faster(results: Results) -> bool:
        times = {
            name: min(one.per_token for one in results[name, 1].rounds)
            for name in (*PROGRAMS, "upper-bound")
        }
        assert times["dense"] > 10 * DELAY
        return times["upper-bound"] < times["tracks"] < times["lp"] < times["dense"] > times["ladder"]

    measured_until(are_faster)


def test_what_is_expected_of_a_known_link_happens(measured_until: MeasuredUntil) -> None:
    def happens(results: Results) -> bool:
        """Waiting for the other rank comes on top; a link never ends early; ranks may be interrupted in a step."""
        return all(
            0.9 * expected_decode(Program.parse(PROGRAMS[name]), result.runs[-1], Transfer(delay=DELAY))
            < result.rounds[-1].per_token
            for (name, _), result in results.items()
            if name != "upper-bound"
        )

    measured_until(happens)


def test_the_upper_bound_neither_sends_nor_waits(results: Results) -> None:
    for one in results["upper-bound", 2].rounds:
        assert one.decode_pass is not None
        assert one.decode_pass.layers == one.decode_pass.vocabulary == Counts()
        assert one.decode_pass.waiting == 0


def test_one_new_token_has_no_decoding_passes(bench: RankBench) -> None:
    load = Workload(1, 3, 1)
    one = summarise(bench.run("dense", load), load, connected=True)
    assert one.decode == 0
    assert math.isnan(one.per_token)
    assert one.decode_pass is None
    assert one.rate == pytest.approx(1 / one.first_token)


def passes(*seconds: tuple[float, float], decode: bool) -> list[PassTiming]:
    """Passes of some duration each, of which some time is waited."""
    counts = Counts()
    return [
        PassTiming(decode, 1, 10.0, 10.0 + all_of_it, waits, counts, counts)
        for all_of_it, waits in seconds
    ]


def test_the_split_is_of_the_rank_that_waits_most() -> None:
    prompts = [passes((3.0, 1.0), decode=False), passes((3.0, 2.0), decode=False)]
    later = [passes((4.0, 3.0), (6.0, 5.0), decode=True), passes((4.0, 1.0), (6.0, 1.0), decode=True)]
    runs = [RankRun(9.0, first + then) for first, then in zip(prompts, later, strict=True)]
    one = summarise(runs, Workload(2, 3, 3), connected=True)
    assert (one.first_token, one.prefill, one.decode, one.per_token) == (4.0, 3.0, 10.0, 5.0)
    assert one.rate == 6 / 14
    assert (one.prefill_pass.rank, one.prefill_pass.waiting, one.prefill_pass.compute) == (1, 2.0, 1.0)
    assert one.decode_pass is not None
    assert (one.decode_pass.rank, one.decode_pass.waiting, one.decode_pass.compute) == (0, 4.0, 1.0)


def test_of_ranks_that_do_not_wait_the_slowest_counts() -> None:
    runs = [RankRun(9.0, passes((seconds, 0.0), decode=False)) for seconds in (1.0, 5.0, 2.0)]
    one = summarise(runs, Workload(1, 3, 1), connected=False)
    assert (one.prefill, one.prefill_pass.rank) == (5.0, 1)


# -- candidates --


def open_plans(model: str, compared: Sequence[str], needs: Needs, **options: Any) -> dict[str, Plan]:
    return plan_candidates(open_candidates(model, compared, weights=True, **options), needs)


@pytest.fixture
def needs() -> Needs:
    return Needs(ranks=2, tokens=16, device="cpu")


def test_variants_by_name(checkpoint: Path, needs: Needs) -> None:
    names = ["dense", "lp", "ladder", "ladder-over-lp", "fused", "tracks:1", "desync", "upper-bound"]
    found = open_plans(str(checkpoint), names, needs, program="A0 F0", layers=range(1, 3))
    assert {name: plan.program for name, plan in found.items()} == {
        "tiny": "A0 F0",
        "dense": "A0 F0 A1 F1 A2 F2 A3 F3",
        "lp": "A0 F0 [A1 A2] [F1 F2] A3 F3",
        "ladder": "A0 F0 >A1 >F1 >A2 >F2 A3 F3",
        "ladder-over-lp": "A0 F0 >[A1 A2] >[F1 F2] A3 F3",
        "fused": "A0 F0 [A1 F1] [A2 F2] A3 F3",
        "tracks:1": "A0 F0 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} {A2/2:0 F2/2:0 | A2/2:1 F2/2:1} A3 F3",
        "desync": "A0 F0 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} {A2/2:0 F2/2:0 | A2/2:1 F2/2:1} A3 F3",
        "upper-bound": "A0 F0",
    }


def test_caches_in_rank_space_are_for_those_that_can(checkpoint: Path, needs: Needs) -> None:
    wanted = replace(needs, ways=Ways(kv="lowrank"))
    found = open_plans(str(checkpoint), ["A0@k3,v3 F0", "A0@k3 F0"], wanted)
    assert [plan.kv for plan in found.values()] == ["auto", "lowrank", "auto"]
    with pytest.raises(ValueError, match="no attention here has factors of both"):
        open_plans(str(checkpoint), ["A0@k3 F0"], wanted)


def test_the_first_and_last_two_layers_stay_by_default(tmp_path: Path, needs: Needs) -> None:
    tiny_model("gpt_neox", num_layers=6).save_pretrained(tmp_path / "neox")
    lp = open_plans(str(tmp_path / "neox"), ["lp"], needs)["lp"]
    assert lp.program == "[A0 F0] [A1 F1] [A2 F2 A3 F3] [A4 F4] [A5 F5]"


def test_calibrated_factors_are_not_what_is_measured(
    checkpoint: Path, tmp_path: Path, needs: Needs
) -> None:
    recipe = tmp_path / "low.yaml"
    low = 'lowrank: {layers: "0:1", keep: 0.5, method: whitened, calibration: {data: demo}}'
    recipe.write_text(f"surgeon: 1\nmodel: {checkpoint}\noperations:\n  - {low}\n")
    with pytest.warns(UserWarning, match="ranks run factors, heads and neurons by the weights alone"):
        (found,) = open_plans(str(recipe), [], needs).values()
    assert "@q" in found.program


def test_recipes_programs_and_checkpoints(checkpoint: Path, tmp_path: Path, needs: Needs) -> None:
    recipe = tmp_path / "one-pair.yaml"
    recipe.write_text(f'surgeon: 1\nmodel: {checkpoint}\noperations:\n  - pair: {{layers: "0:2"}}\n')
    found = open_plans(
        str(recipe), ["[A0 F0]", "{A0|F0}", ">A1 F1", str(checkpoint), str(recipe)], needs
    )
    assert [(name, plan.program) for name, plan in found.items()] == [
        ("one-pair", "[A0 A1] [F0 F1] A2 F2 A3 F3"),
        ("[A0 F0]", "[A0 F0]"),
        ("{A0|F0}", "{A0 | F0}"),
        (">A1 F1", ">A1 F1"),
        ("tiny", str(DENSE)),
        ("one-pair (2)", "[A0 A1] [F0 F1] A2 F2 A3 F3"),
    ]
    recipe.write_text(f"{recipe.read_text()}weights: sha256:{'0' * 64}\n")
    with pytest.raises(ValueError, match="one-pair.yaml:5: weights: the recipe was made for sha256:0"):
        open_plans(str(recipe), [], needs)


@pytest.mark.parametrize(
    ("named", "options", "message"),
    [
        (
            "lp",
            {},
            "the model has 4 layers, and variants leave the first and last 2 alone; .*layers 0:4",
        ),
        (
            "tracks:x",
            {"layers": range(1, 3)},
            "tracks:x of layers 1:3: write how many layers a track has",
        ),
        ("ladder", {"layers": range(3, 9)}, "ladder of layers 3:9: layers 3:9 are out of range"),
        ("A0 F9", {}, "F9 is out of range"),
        ("A0 F", {}, "expected|cannot read"),
        ("gone.yaml", {}, "there is no recipe gone.yaml"),
        ("gone", {}, "there is no model folder gone"),
    ],
)
def test_what_cannot_be_compared(
    named: str, options: dict[str, Any], message: str, checkpoint: Path, needs: Needs
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_plans(str(checkpoint), [named], needs, **options)


def test_slices_need_ranks(checkpoint: Path) -> None:
    with pytest.raises(
        ValueError, match="^tracks:1: the 4 heads and 2 KV heads of A1 do not divide into 3"
    ):
        open_plans(str(checkpoint), ["lp", "tracks:1"], Needs(3, 16, "cpu"), layers=range(1, 3))
    with pytest.raises(
        ValueError, match="desync has a slice of the layers for each rank; use 2 ranks or more"
    ):
        open_plans(str(checkpoint), ["desync"], Needs(1, 16, "cpu"), layers=range(1, 3))


# -- traces --


def in_flight(file: Path) -> list[str]:
    """Late steps that a rank computed between the start of the sum before them and the wait for it."""
    events = [
        one for one in json.loads(file.read_text())["traceEvents"] if one.get("cat") == "user_annotation"
    ]
    named = sorted(events, key=lambda one: float(one["ts"]))
    names = [str(one["name"]) for one in named]
    found = []
    for at, name in enumerate(names):
        if name.startswith("start all-reduce") and f"wait for {name[6:]}" in names[at:]:
            waits = names.index(f"wait for {name[6:]}", at)
            found += [one for one in names[at:waits] if one in LADDER.split()]
    return found


def test_every_rank_writes_a_profile_of_all_programs(bench: RankBench, tmp_path: Path) -> None:
    """In which a ladder's sums are on their way while the next step is computed, and a dense program's are not."""
    two = RankBench(bench.ranks, {name: bench.plans[name] for name in ("dense", "ladder")})
    files = two.profile(Workload(1, 3, 2), tmp_path / "trace.json")
    assert [file.name for file in files] == ["trace.rank0.json", "trace.rank1.json"]
    for file in files:
        names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
        assert (names.count("dense"), names.count("ladder")) == (1, 1)
        assert names.count("wait for all-reduce >F2") == 2  # passes
        assert "wait for all-gather of the vocabulary" in names
        late = [step for step in LADDER.split() if step.startswith(">")]
        assert in_flight(file) == 2 * late


def test_a_model_that_computes_no_numbers(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "broken")
    damage(tmp_path / "broken", slice(None))
    plans = open_plans(str(tmp_path / "broken"), [], Needs(ranks=1, tokens=8, device="cpu"))
    with Ranks(RankOptions(1)) as ranks:
        bench = RankBench.load(ranks, plans)
        with pytest.raises(ValueError, match="the logits of broken are not finite"):
            bench.measure([Workload(1, 4, 2)], 1, lambda _: None)


def test_measurements_are_frozen(results: Results) -> None:
    one: Measurement = results["dense", 1].rounds[0]
    with pytest.raises(AttributeError):
        one.rate = 0.0  # type: ignore[misc]
