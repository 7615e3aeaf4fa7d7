"""What a search measures, against full logits of the edited model; what is kept changes nothing."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from surgeon.analysis.engine.sharing import share
from surgeon.language.program import Program
from surgeon.models.edit import edit, restore
from surgeon.opened import load, load_streamed
from surgeon.quality.data import Windows
from surgeon.quality.head import GREEDY, SAMPLED
from surgeon.quality.summary import Quality
from surgeon.searches import evaluate as evaluate_module
from surgeon.searches.evaluate import Evaluator
from tests.tiny_models import VOCABULARY, tiny_model

LAYERS = 4
IDS = torch.randint(3, VOCABULARY, (6, 16), generator=torch.Generator().manual_seed(5))
TEXT = Windows(IDS, "ids", "digest")
DENSE = Program.dense(LAYERS)
PAIRED = Program.parse("A0 F0 [A1 A2] [F1 F2] A3 F3")
TEXTS = [
    "A0 F0 A1 F1 [A2 A3] [F2 F3]",
    "A0 F0 A1 F1 A2 F2 >A3 >F3",
    "A0 F0 {A1 F1 | A2 F2} A3 F3",
    "A0 F0 {A1 F1 | A2 F2 | A3 F3}",
    "A0 F0 A1 F1@gate9,up9",
    "A0 F0 A1 F1@gate5,up5 A2~A3 F2",
    "A3 F3",
    str(PAIRED),
    str(DENSE),
]
PROGRAMS = [Program.parse(text) for text in TEXTS]
HOPELESS = Program.parse("A3 F3 A3 F3 A3 F3")


def logits_of(program: Program) -> torch.Tensor:
    model = tiny_model("llama", LAYERS)
    with torch.no_grad():
        logits: torch.Tensor = edit(model, program)(input_ids=IDS).logits[:, :-1]
    restore(model)
    return logits.double()


def evaluator(**options: Any) -> Evaluator:
    return Evaluator(tiny_model("llama", LAYERS), options.pop("text", TEXT), **options)


def apart(program: Program) -> Quality:
    """A program measured by itself, with nothing kept."""
    return evaluator(kept=0).measure([program])[program]


def test_divergence_and_perplexity_equal_those_of_full_logits() -> None:
    ran: list[float] = []
    measure = evaluator(ran=ran.append).measure
    original, changed = (logits_of(program).log_softmax(-1) for program in (DENSE, PAIRED))
    per_window = functional.kl_div(changed, original, reduction="none", log_target=True).sum(-1).mean(-1)
    nll = functional.nll_loss(changed.transpose(1, 2), IDS[:, 1:], reduction="none").mean(-1)
    found = measure([PAIRED])[PAIRED]
    np.testing.assert_allclose(found.windows["divergence"], per_window, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.windows["nll"], nll, rtol=1e-5)
    assert found.divergence == pytest.approx(per_window.mean().item(), rel=1e-4, abs=1e-7)
    assert found.perplexity == pytest.approx(nll.mean().exp().item(), rel=1e-5)
    spread = per_window.std() / 6**0.5 * 2.570582  # Student's t for 95% and 5 degrees of freedom
    assert found.divergence_high - found.divergence == pytest.approx(spread.item(), rel=1e-3)
    assert found.tokens == 6 * 15
    assert found.whole
    assert sum(ran) == 8 + 4 + 2  # the original, and the pair on top of the first layer that both share
    other = PROGRAMS[0]
    measure([other])
    assert sum(ran) == 14 + 4  # from the original's state after two layers


def test_acceptances_are_those_of_full_logits_and_are_kept() -> None:
    found = evaluator(sampled=True).measure([PAIRED])[PAIRED]
    original, changed = logits_of(DENSE), logits_of(PAIRED)
    same = (original.argmax(-1) == changed.argmax(-1)).double().mean(-1)
    shared = torch.minimum(original.softmax(-1), changed.softmax(-1)).sum(-1).mean(-1)
    assert found.windows[GREEDY] == pytest.approx(same.tolist())
    assert found.windows[SAMPLED] == pytest.approx(shared.tolist(), rel=1e-5)
    assert found.sampled_acceptance == pytest.approx(shared.mean().item(), rel=1e-5)
    plain = evaluator().measure([PAIRED])[PAIRED]
    assert plain.windows == {name: values for name, values in found.windows.items() if name != SAMPLED}
    assert (plain.greedy_acceptance, plain.divergence) == (found.greedy_acceptance, found.divergence)
    assert not plain.knows(SAMPLED)


def test_what_a_program_is_measured_with_and_what_is_kept_change_nothing() -> None:
    plain = {program: apart(program) for program in PROGRAMS}
    together = evaluator(kept=0).measure(PROGRAMS)
    kept = evaluator()
    one_by_one = {program: kept.measure([program])[program] for program in PROGRAMS}
    tight = evaluator(kept=20_000)
    for program in PROGRAMS:
        assert together[program] == plain[program]
        assert one_by_one[program] == plain[program]
        assert kept.measure(PROGRAMS)[program] == plain[program]
        assert tight.measure([program])[program] == plain[program]


def test_fewer_windows_at_once_change_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory leaves room for fewer; the original is not run again for that."""
    plain = {program: apart(program) for program in PROGRAMS}
    ran: list[float] = []
    measured = evaluator(ran=ran.append, kept=0)
    for room in (6, 2, 1):
        monkeypatch.setattr(evaluate_module, "windows_at_once", lambda *_, room=room: room)
        ran.clear()
        found = measured.measure(PROGRAMS)
        for program in PROGRAMS:
            np.testing.assert_allclose(
                found[program].windows["divergence"],
                plain[program].windows["divergence"],
                rtol=1e-4,
                atol=1e-6,
            )
            np.testing.assert_allclose(
                found[program].windows["nll"], plain[program].windows["nll"], rtol=1e-6
            )
        # The original is one of them.
        running = PROGRAMS if room == 6 else [program for program in PROGRAMS if program != DENSE]
        assert sum(ran) == pytest.approx(share(running).total_sublayers)


def test_a_hopeless_program_is_stopped_with_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "FIRST_TOKENS", {"cpu": 32})
    ran: list[float] = []
    measured = evaluator(ran=ran.append)
    best = measured.measure([PAIRED])[PAIRED]
    whole = apart(HOPELESS)
    ran.clear()
    found = measured.measure([HOPELESS, PROGRAMS[0]], best)
    assert found[PROGRAMS[0]].whole
    stopped = found[HOPELESS]
    assert not stopped.whole
    count = len(stopped.windows["divergence"])
    assert count in (2, 4)
    assert stopped.tokens == count * 15
    np.testing.assert_allclose(
        stopped.windows["divergence"], whole.windows["divergence"][:count], rtol=1e-4
    )
    difference = np.array(whole.windows["divergence"][:count]) - best.windows["divergence"][:count]
    assert stopped.divergence == pytest.approx(
        np.mean(best.windows["divergence"]) + difference.mean(), rel=1e-4
    )
    assert stopped.perplexity == pytest.approx(
        math.exp(
            np.mean(best.windows["nll"])
            + np.mean(np.array(whole.windows["nll"][:count]) - best.windows["nll"][:count])
        ),
        rel=1e-4,
    )
    assert stopped.divergence_low < stopped.divergence < stopped.divergence_high
    # Some windows for one, all for the other, from what is kept.
    assert sum(ran) == pytest.approx(6 * count / 6 + 4)


def test_races_compare_blocks_where_windows_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best's blocks come from its record, and a best without them is compared window by window."""
    monkeypatch.setattr(evaluate_module, "FIRST_TOKENS", {"cpu": 16})
    monkeypatch.setattr("surgeon.searches.evaluate.BLOCK", 3)
    measured = evaluator()
    best = measured.measure([PAIRED])[PAIRED]
    assert len(best.windows["blocks"]) == 6 * 5
    for window, mean in enumerate(best.windows["divergence"]):
        assert np.mean(best.windows["blocks"][5 * window : 5 * window + 5]) == pytest.approx(mean)
    stopped = measured.measure([HOPELESS], Quality(**asdict(best)))[HOPELESS]
    assert len(stopped.windows["divergence"]) == 1
    assert len(stopped.windows["blocks"]) == 5
    assert math.isnan(stopped.divergence_low)  # of one window nothing is known
    by_window = measured.measure(
        [HOPELESS], replace(best, windows={name: best.windows[name] for name in ("nll", "divergence")})
    )[HOPELESS]
    assert not by_window.whole
    assert len(by_window.windows["divergence"]) > 1


def test_ties_and_better_programs_are_never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "ALPHA", 0.4)
    measured = evaluator()
    best = measured.measure([PROGRAMS[6]])[PROGRAMS[6]]
    found = measured.measure(PROGRAMS, best)
    assert found[PROGRAMS[6]].whole
    assert all(one.whole for one in found.values() if one.divergence < best.divergence)
    dense = measured.measure([DENSE])[DENSE]
    assert measured.measure([DENSE], dense)[DENSE].whole


def test_a_race_against_half_a_measurement_is_refused() -> None:
    measured = evaluator()
    best = measured.measure([PAIRED])[PAIRED]
    half = replace(
        best, windows={name: values[:2] for name, values in best.windows.items()}, whole=False
    )
    with pytest.raises(ValueError, match="measured on all 6 windows, not on 2"):
        measured.measure([DENSE], half)


def test_streams_give_the_same_quality() -> None:
    measured = evaluator()
    found = measured.measure(PROGRAMS)
    ran: list[float] = []
    fresh = evaluator(ran=ran.append)
    windows = range(2)
    streams = dict(fresh.streams([*PROGRAMS, *PROGRAMS], windows))
    assert set(streams) == set(PROGRAMS)
    reference = fresh.head.reference(streams[DENSE], IDS[:2])
    for program in PROGRAMS:
        quality = fresh.head.compare(streams[program], reference)
        np.testing.assert_allclose(
            quality["divergence"], found[program].windows["divergence"][:2], rtol=1e-4, atol=1e-6
        )
    before = sum(ran)
    again = dict(fresh.streams(PROGRAMS, windows))
    assert sum(ran) == before  # from kept states
    assert all(torch.equal(again[program], streams[program]) for program in PROGRAMS)


def test_streams_of_a_part_of_each_window() -> None:
    ran: list[float] = []
    whole, short = evaluator(ran=ran.append), evaluator(text=Windows(IDS[:, :6], "ids", "digest"))
    programs, windows = PROGRAMS[:5], range(1, 3)
    kept = dict(whole.streams(programs, windows))
    before = sum(ran)
    found, expected = dict(whole.streams(programs, windows, 6)), dict(short.streams(programs, windows))
    for program in programs:
        torch.testing.assert_close(found[program], expected[program], rtol=1e-5, atol=1e-6)
    assert sum(ran) - before == pytest.approx(before * 6 / 16), (
        "what is kept of whole windows is not gone on with"
    )
    again = dict(whole.streams(programs, windows))
    assert all(torch.equal(again[program], kept[program]) for program in programs), "nor is it replaced"


def test_one_window_has_no_interval() -> None:
    found = evaluator(text=Windows(IDS[:1], "ids", "digest")).measure([PAIRED])[PAIRED]
    assert found.divergence > 0
    assert math.isnan(found.divergence_low)
    assert math.isnan(found.divergence_high)


def test_an_edited_model_is_refused() -> None:
    model: Any = edit(tiny_model("llama", LAYERS), "A0 F0 A2 F2")
    with pytest.raises(ValueError, match="edited program"):
        Evaluator(model, TEXT)


def test_the_original_is_at_no_distance_from_itself() -> None:
    assert evaluator().measure([DENSE])[DENSE].divergence == 0


def test_states_give_way_to_a_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    held = 100 << 20
    monkeypatch.setattr(evaluate_module, "resident_bytes", lambda: held)
    monkeypatch.setattr("surgeon.analysis.engine.machine.resident_bytes", lambda: held)
    roomy = evaluator(memory=1 << 30)
    roomy.measure(PROGRAMS)
    assert roomy.cache is not None
    assert 0 < roomy.cache.bytes <= roomy.cache.limit < (1 << 30) - held
    working = evaluate_module.working_bytes(
        roomy.model, evaluate_module.share([DENSE, PAIRED]), IDS.numel()
    )
    tight = evaluator(memory=held + working)
    tight.measure([PAIRED])
    assert tight.cache is not None
    assert tight.cache.bytes == 0


def test_a_model_whose_weights_are_read_as_it_goes_gives_the_same_numbers(tiny_checkpoint: Path) -> None:
    ids = torch.randint(3, 60, (4, 16), generator=torch.Generator().manual_seed(6))
    text = Windows(ids, "ids", "digest")
    streamed, whole = (
        Evaluator(load_streamed(tiny_checkpoint), text),
        Evaluator(load(tiny_checkpoint), text),
    )
    assert streamed.cache is None
    found, plain = (each.measure(PROGRAMS[:3]) for each in (streamed, whole))
    for program in PROGRAMS[:3]:
        np.testing.assert_allclose(
            found[program].windows["divergence"],
            plain[program].windows["divergence"],
            rtol=1e-4,
            atol=1e-6,
        )
    streams = dict(streamed.streams(PROGRAMS[:2], range(2)))
    for program, stream in whole.streams(PROGRAMS[:2], range(2)):
        torch.testing.assert_close(streams[program], stream, rtol=1e-4, atol=1e-5)
