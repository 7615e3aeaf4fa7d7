"""Which exports miss the goals of their benchmark, and how it ends then; nothing large is exported."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import export
from scripts.bench.export import PEAK_LIMIT, Run, main, short_of_goals
from scripts.bench.goals import MISSED, missed_in

COPIED = Run(1000, 10.0)


def test_goals() -> None:
    """A copy has no peak, and factors take as long as they take."""
    speed = COPIED.size / COPIED.seconds
    assert not list(short_of_goals("cp", COPIED, speed))
    assert not list(short_of_goals("plain", Run(1000, 20.0, PEAK_LIMIT), speed))
    assert not list(short_of_goals("low-rank", Run(1000, 900.0, PEAK_LIMIT), speed))
    assert list(short_of_goals("plain", Run(1000, 25.0, 5), speed)) == [
        "plain has 0.40 of the copy's speed, not 0.5"
    ]
    large = list(short_of_goals("low-rank", Run(1000, 900.0, 2 << 30), speed))
    assert large == ["low-rank took 2.15 GB, not at most 1.57 GB"]
    assert len(list(short_of_goals("fused", Run(1000, 25.0, 2 << 30), speed))) == 2


@pytest.mark.parametrize("peak", [PEAK_LIMIT, 2 << 30])
def test_the_table_is_printed_whether_or_not_goals_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], peak: int
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"num_hidden_layers": 4}')

    def exported(recipe: Path, target: Path) -> Run:
        target.mkdir()
        return Run(1000, 12.5, peak if recipe.stem == "fused" else 1 << 30)

    copies = iter([COPIED, Run(1000, 5.0), COPIED])  # before, between and behind the exports
    monkeypatch.setattr(export, "copy_of", lambda *_: next(copies))
    monkeypatch.setattr(export, "export", exported)
    only = [word for form in ("plain", "fused") for word in ("--only", form)]
    monkeypatch.setattr("sys.argv", ["export.py", "--folder", str(model), *only])
    if peak <= PEAK_LIMIT:
        main()
    else:
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == MISSED
    page = capsys.readouterr().out
    assert "plain" in page
    assert "0.53" in page  # 80 bytes a second beside 100 and 200
    assert "10.0 (5.0 to 10.0)" in page
    assert missed_in(page) == (None if peak <= PEAK_LIMIT else "fused took 2.15 GB, not at most 1.57 GB")
