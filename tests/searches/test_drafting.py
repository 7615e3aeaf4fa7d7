"""Programs as drafts: what they are worth by hand, which edits make none, and a search for the best of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import surgeon
from surgeon.benchmarks.measure import DecodedTexts, MeasuredDrafts
from surgeon.commands.opening import draft_program
from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.predict import PredictedRanks, predict, predict_drafting
from surgeon.cost.work import Forward
from surgeon.findings.result import RunResult
from surgeon.language.operations.applied import Edit
from surgeon.language.operations.variants import variant
from surgeon.language.program import Program
from surgeon.models.edit import edit, program_of, restore
from surgeon.models.verified import VerifiedKeys, draft_with
from surgeon.quality.data import Windows
from surgeon.quality.head import GREEDY, SAMPLED, VERIFIED
from surgeon.quality.summary import Quality, interval
from surgeon.runtime.comm.collectives import Link
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_draft
from surgeon.searches.drafting import DraftValue, FoundDraft, by_verified_keys, draft_obstacle
from surgeon.searches.evaluate import Evaluator, Terms
from surgeon.searches.mixture import Mixture
from surgeon.searches.pricing import Pricing, _sent_bytes
from surgeon.searches.proposer import Goal, near_the_best
from surgeon.searches.quantities import Aspect, parse_objectives
from surgeon.searches.question import PricedQuestion, Question
from surgeon.searches.search import Search
from surgeon.searches.spaces.base import parse_spaces
from surgeon.testing.spaces import small_model
from tests.cost.examples import hardware, model
from tests.tiny_models import tiny_model

SMALL, LOAD, DENSE = model(), Workload(2, 5, 4), Program.dense(4)
HALF = Program.parse("A0 F0 A3 F3")
PASS, DRAFT = Aspect("draft_pass", "hw"), Aspect("draft", "hw")
LIKE = Deployment(2, "float32")


def test_finalists_read_the_keys_of_the_model() -> None:
    """Against windows that are drafted in rounds by what `VerifiedKeys` gives, and the scan's own measure."""
    one, ids = (
        tiny_model("llama"),
        torch.randint(5, 90, (3, 22), generator=torch.Generator().manual_seed(1)),
    )
    evaluator = Evaluator(one, Windows(ids, "ids", "digest"), sampled=True)
    draft = variant("tracks:2", evaluator.dense, range(1, 3), 2)
    own = evaluator.measure([evaluator.dense, draft])
    found, why = by_verified_keys(evaluator, own)
    assert (why, found[evaluator.dense]) == ("", own[evaluator.dense])
    assert program_of(one) == evaluator.dense
    equal, shared = [], []
    for window in ids:
        logits, keys = VerifiedKeys.of(restore(one), window[None])
        with torch.no_grad(), draft_with(edit(one, draft), keys):
            p, q = (
                each[0, :-1].softmax(-1)
                for each in (logits, one(input_ids=window[None], use_cache=False).logits)
            )
        equal.append(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
        shared.append(float((p + q - (p - q).abs()).sum(-1).mean() / 2))
    restore(one)
    assert found[draft].windows[GREEDY] == pytest.approx(equal)
    assert found[draft].windows[SAMPLED] == pytest.approx(shared, abs=1e-5)
    assert found[draft].sampled_acceptance == pytest.approx(np.mean(shared), abs=1e-5)
    assert found[draft].sampled_acceptance != pytest.approx(own[draft].sampled_acceptance, abs=1e-4)
    assert {
        **found[draft].windows,
        **{name: own[draft].windows[name] for name in (GREEDY, SAMPLED)},
    } == own[draft].windows


def test_finalists_of_other_attentions_keep_their_own_keys() -> None:
    evaluator = Evaluator(tiny_model("gpt_neo"), Windows(torch.randint(5, 90, (1, 9)), "ids", "digest"))
    own = evaluator.measure([HALF])
    found, why = by_verified_keys(evaluator, own)
    assert found == own
    assert why.startswith("attentions of GPT-Neo cannot be given keys")


def priced(**ways: Any) -> Pricing:
    return Pricing(
        SMALL, (PASS,), replace(LIKE, **ways), LOAD, {"hw": hardware(launch="1e-4", collective="2e-4")}
    )


def drafts() -> DraftValue:
    return DraftValue(priced(), DRAFT, GREEDY)


def measured(*accepted: float, by: str = GREEDY) -> Quality:
    return Quality(9.0, divergence=0.1, windows={by: accepted}, **{by: float(np.mean(accepted))})


@pytest.mark.parametrize("ways", [{}, {"emulated": Link(1e-3)}, {"ranks": 1}])
def test_a_pass_of_a_draft_is_that_of_whole_predictions(ways: dict[str, Any]) -> None:
    """Pairs lie in slices there, also of two layers that take unequal times, which alone would be a rank's each."""
    pricing = priced(**ways)
    deployment = replace(LIKE, **ways)
    texts = ["A0 F0 A3 F3", ">A0 >F0 [A1 A2] [F1 F2]", "[A0 A1@q32,k16,v16,o32] [F0@up24 F1] A3 F3"]
    texts += [str(variant("tracks:2", DENSE, range(4), 2))] if deployment.ranks == 2 else [str(DENSE)]
    for program in map(Program.parse, texts):
        verifier = predict(SMALL.shapes, DENSE, pricing.hardware["hw"], LOAD, deployment)
        (whole,) = predict_drafting(verifier, program, [0.7])
        assert pricing.price(PASS, program) == pytest.approx(whole.draft, rel=1e-9)
        found = DraftValue(pricing, DRAFT, GREEDY).by_quality(program, measured(0.6, 0.8))
        assert found is not None
        assert found.ahead == whole.ahead
        assert found.speedup == pytest.approx(whole.speedup)
    assert pricing.price(PASS, Program.parse("A0 A0 F0")) == math.inf
    assert (
        DraftValue(pricing, DRAFT, GREEDY).by_quality(Program.parse("A0 A0 F0"), measured(0.9)) is None
    )
    assert DraftValue(pricing, DRAFT, SAMPLED).by_quality(HALF, measured(0.9)) is None


def test_what_slices_send_is_what_ranks_count() -> None:
    """A rank with a whole layer gathers no factors; with slices of both it does."""
    program = Program.parse("[A0 A1@q32,k16,v16,o32] F0 [F1@up24,gate24,down24 F2]")
    pricing = priced(low_rank="gather")
    plan = pricing._plan(program, sliced=True)
    ranks = PredictedRanks(SMALL.shapes, plan, pricing.hardware["hw"], pricing.deployment)
    sent = ranks.forward(Forward(1, 1), graphs=False).layers.bytes
    assert _sent_bytes(SMALL.shapes, plan) == sent
    assert _sent_bytes(SMALL.shapes, replace(plan, sliced=False)) != sent


def test_what_a_draft_is_worth_by_hand() -> None:
    accepted = (0.9, 0.95, 0.85, 0.98)
    found = drafts().add_value(HALF, measured(*accepted))
    known = drafts().by_quality(HALF, measured(*accepted))
    assert known is not None
    ahead = known.ahead
    assert ahead > 0
    assert found.more == {
        "draft_time": pytest.approx(np.mean(found.windows["draft_time"])),
        "draft@hw": pytest.approx(known.speedup),
        "ahead": ahead,
    }

    def time(acceptance: float) -> float:
        tokens = sum(acceptance**place for place in range(ahead + 1))
        return (ahead * known.draft + known.verify) / tokens / known.model.per_token

    mean, step = float(np.mean(accepted)), 1e-6
    assert found.more["draft_time"] == pytest.approx(time(mean)) == pytest.approx(1 / known.speedup)
    slope = (time(mean + step) - time(mean - step)) / (2 * step)
    low, high = interval(found.by_window("draft_time"))
    half = stats.t.ppf(0.975, 3) * float(stats.sem(accepted)) * abs(slope)
    assert (low, high) == pytest.approx((time(mean) - half, time(mean) + half), rel=1e-4)
    never = drafts().add_value(HALF, measured(0.01, 0.02))
    assert (never.more["draft_time"], never.more["ahead"]) == (pytest.approx(1.0), 0)
    assert "draft_time" not in drafts().add_value(Program.parse("A0 A0 F0"), measured(0.9)).more
    assert DRAFT.read_cost(found) == found.more["draft_time"]
    assert DRAFT.read_cost(measured(0.9)) == math.inf


def test_lines_say_what_is_predicted_and_what_is_measured() -> None:
    texts = [measured(0.98, 0.99), measured(0.96, 0.97)]
    seen, unseen = (drafts().by_quality(HALF, one) for one in texts)
    assert seen is not None
    assert unseen is not None
    plain = [DecodedTexts([[1]], 10, 2.0, 10, 0, 0), DecodedTexts([[1]], 10, 1.0, 10, 0, 0)]
    fast = [DecodedTexts([[1]], 10, 1.0, 4, 8, 6), DecodedTexts([[1]], 10, 0.8, 6, 4, 4)]
    here = MeasuredDrafts.of(plain, fast)
    assert (here.speedup, here.low, here.high) == (pytest.approx(1.625), pytest.approx(1.25), 2.0)
    assert (here.accepted, here.tokens_per_pass) == (pytest.approx(10 / 12), 2.0)
    found = FoundDraft(GREEDY, [seen, unseen], here)
    acceptance, ahead, last = found.lines()
    assert acceptance == (
        "greedy acceptance 0.985 on the text of the search, by its own keys, 0.965 on held-out text, by its own keys"
    )
    other = replace(found, keys=VERIFIED)
    assert "0.965 on held-out text, by the model's keys" in other.lines()[0]
    assert (found.to_json()["held_out_keys"], other.to_json()["held_out_keys"]) == ("own", "verified")
    assert "lower estimate" in replace(found, why_own="weights are streamed").lines()[1]
    assert ahead.startswith(
        f"{unseen.ahead} tokens ahead: {unseen.speedup:.3g}x is predicted; a pass of the draft"
    )
    assert last == (
        "measured in turns with no drafts: 1.62x (1.25x to 2x over the rounds), 83% of drafted tokens accepted"
    )
    told = found.to_json()
    assert told["predicted"]["held_out"]["speedup"] == unseen.speedup
    assert told["measured"]["speedup"] == pytest.approx(1.625)
    never = drafts().by_quality(HALF, measured(0.1))
    assert never is not None
    assert "none ahead: drafts are not predicted to pay" in FoundDraft(GREEDY, [never]).lines()[1]


def test_trials_go_to_the_levels_of_the_best() -> None:
    goals = [Goal((), float(level)) for level in range(5)]
    assert near_the_best(goals, {0.0: 0.9, 1.0: 0.7}, 3) == [0, 0, 1, 1, 1]
    assert near_the_best(goals, {0.0: 0.9, 1.0: 0.7, 2.0: 0.6, 3.0: 0.8, 4.0: 0.95}, 4) == [
        0,
        1,
        2,
        1,
        0,
    ]


def asked(space: str) -> Search:
    """A search of a made-up model, whose edits do the same damage each; tracks save most, and drops little."""
    settings = Question(space, None, "draft@hw", link_delay="1ms")
    of = small_model(layers=6)
    mixture = settings.mixture(of)
    ways = Deployment(2, "float32", emulated=Link(1e-3))
    pricing = Pricing(of, settings.aspects, ways, LOAD, {"hw": hardware(launch="1e-6")})
    alone = np.array([3.0 if edit.space == "drop" else 0.001 for edit in mixture.edits])
    question = PricedQuestion(settings, mixture, pricing, measured(1.0))
    nothing: Any = None
    return Search(question, nothing, Terms(alone, np.eye(len(alone))))


@pytest.mark.thorough
def test_what_promises_most_is_tried_first() -> None:
    searching = asked("tracks:4,drop:layers,pair")
    assert list(searching.strands) == ["mixture", "tracks", "pair"], "drops alone never pay"
    question, first = searching.question, searching._first_round
    promises = []
    for proposal in first:
        damage = sum(3.0 if edit.space == "drop" else 0.001 for edit in proposal.choice)
        promises.append(question.drafting.promise(Program.parse(proposal.key), damage))
    assert promises == sorted(promises)
    assert promises[0] < 0.6 < promises[-1]
    assert [*asked("drop:layers").strands["drop"].goals], "a space alone is tried whatever it promises"


@pytest.mark.parametrize("divergence", [1e-3, 0.02, 0.3])
def test_a_promise_is_that_of_the_acceptance_which_is_foretold(divergence: float) -> None:
    verifier = predict(SMALL.shapes, DENSE, priced().hardware["hw"], LOAD, LIKE)
    (known,) = predict_drafting(verifier, HALF, [1 - 0.5 * divergence**0.5])
    assert drafts().promise(HALF, divergence) == pytest.approx(1 / known.speedup)
    assert drafts().promise(Program.parse("A0 A0 F0"), divergence) == math.inf


def test_edits_that_make_no_draft_are_refused_and_counted() -> None:
    settings = Question("pair,width,repeat,drop", None, "draft@cpu-2")
    for space, said in (("width", "go by a text"), ("repeat", "A0 of the draft has no keys and values")):
        with pytest.raises(ValueError, match=f"the space {space} has no edits of .*{said}"):
            replace(settings, space=f"pair,{space}").mixture(small_model(layers=4))
    usual = replace(settings, space=None).on(small_model(layers=4)).space
    assert usual is not None
    assert "width" not in usual
    assert "drop" in usual
    mixture = replace(settings, space="pair,drop").mixture(small_model(layers=4))
    assert mixture.refusals == {}
    assert {edit.space for edit in mixture.edits} == {"pair", "drop"}
    model, repeats = small_model(layers=4), parse_spaces("repeat", 2)
    (counted,) = Mixture(repeats, model, draft_obstacle(model, 2)).refusals["repeat"].items()
    assert counted[0].startswith("A0 of the draft has no keys and values of the model's to read")
    assert counted[1] == len(Mixture(repeats, model).edits) == 4 + 3
    said = iter(["layer 1 is late", "it is odd", "layer 2 is late", "layer 10 is late"])
    refused = Mixture(parse_spaces("drop:layers", 2), model, lambda *_: next(said)).refusals
    assert refused == {"drop": {"layer 1 is late": 3, "it is odd": 1}}


@pytest.mark.parametrize("ranks", [2, 4])
def test_edits_that_draft_alone_draft_together(ranks: int) -> None:
    """So that a search leaves no trial out for it, which nobody would count."""
    model, choose = small_model(layers=6, num_attention_heads=4, num_key_value_heads=2), Random(ranks)
    mixture = replace(Question("pair,drop,ladder,order,rank", None, "draft@cpu-2"), ranks=ranks).mixture(
        model
    )
    for _ in range(20):
        chosen: list[Edit] = []
        for one in choose.sample(mixture.edits, len(mixture.edits)):
            chosen += [one] if mixture.is_free(chosen, one) else []
        assert draft_obstacle(model, ranks)(mixture.recipe(chosen, ""), mixture.program(chosen)) == ""


@pytest.mark.parametrize(
    ("budget", "objective", "said"),
    [
        (None, "draft,depth", "a draft is looked for alone"),
        ("divergence<=0.1", "draft", "drafts cost no quality"),
        ("draft>=1.3@cpu-2", "divergence", "a draft is an objective, and no limit"),
    ],
)
def test_what_does_not_go_with_drafts(budget: str | None, objective: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Question("pair", budget, objective)


def test_a_draft_is_of_this_machine_if_nothing_is_said() -> None:
    assert parse_objectives("draft") == (Aspect("draft", "here"),)
    settings = Question("pair", None, "draft@cpu-2", sampled_acceptance=True)
    assert settings.recorded_aspects == (Aspect("draft", "cpu-2"),)
    assert settings.aspects == (Aspect("draft_pass", "cpu-2"),)
    assert (settings.acceptance, replace(settings, sampled_acceptance=False).acceptance) == (
        SAMPLED,
        GREEDY,
    )
    assert "sampled_acceptance" not in replace(settings, sampled_acceptance=False).identity


@pytest.mark.parametrize("sampled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_search_for_drafts(
    sampled: bool,
    tiny_checkpoint: Path,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all trials the winner promises most, by its own acceptance, and its recipe drafts for the model."""
    monkeypatch.setattr(RunResult, "draw", lambda *_: [])
    asked: dict[str, Any] = {
        "tokens": 256,
        "window": 32,
        "holdout": 64,
        "link_delay": "1ms",
        "prompt": 8,
        "new": 8,
    }
    found = surgeon.search(
        tiny_checkpoint, tiny_text, tmp_path, 8, space="pair,drop:layers", objective="draft@cpu-2",
        sampled_acceptance=sampled, **asked,
    )  # fmt: skip
    trials, best = found.table(), found.winner.trial
    name = SAMPLED if sampled else GREEDY
    assert trials["draft@cpu-2"].max() == pytest.approx(best.measured.more["draft@cpu-2"])
    assert (SAMPLED in trials) is sampled
    assert found.winner.draft is not None
    (seen, unseen) = found.winner.draft.predicted
    verifier = predict(
        found.question.mixture.model.shapes,
        found.question.mixture.model.program,
        found.question.pricing.hardware["cpu-2"],
        found.question.settings.workload(found.question.mixture.model.positions),
        found.question.pricing.deployment,
    )
    (again,) = predict_drafting(verifier, found.program, [getattr(best.measured, name)])
    assert seen.speedup == pytest.approx(again.speedup)
    assert found.record["draft"]["held_out_keys"] == "verified"
    assert found.record["draft"]["predicted"]["held_out"]["speedup"] == unseen.speedup
    opened = surgeon.open(tiny_checkpoint)
    draft = draft_program(opened, found.files[0])
    assert draft == found.program
    assert with_draft(make_plan(opened, 2, 16), opened, draft).draft is not None
    if not sampled:
        surgeon.report([tmp_path], tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert "greedy acceptance" in page
        assert "tokens ahead" in page or "none ahead" in page
        assert "draft time, held out" in page
    with pytest.raises(ValueError, match="has weights of its own"):
        surgeon.search(
            tiny_checkpoint,
            tiny_text,
            tmp_path,
            8,
            objective="draft@cpu-2",
            heal=1,
            heal_data=str(tiny_text),
        )
