"""The error policy of the command line: what is said, where, and with which exit code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from surgeon import __version__
from surgeon.commands import app as cli
from surgeon.commands.app import explain, explain_interruption
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _surroundings_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`main` sets variables and warning filters for a process of its own; here they are put back."""
    before = dict(os.environ)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings():
        yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line with one command, `act`, that raises or does what the test wants."""

    def run(
        *arguments: str, act: BaseException | Callable[[], None] | None = None
    ) -> tuple[int, str, str]:
        app = typer.Typer()
        app.callback()(cli._global_options)

        @app.command(name="act")
        def command(output: Annotated[str, typer.Option("--output", "-o")] = "") -> None:
            if isinstance(act, BaseException):
                raise act
            if act is not None:
                act()
            typer.echo(f"result {output}")

        monkeypatch.setattr(cli, "app", app)
        code = cli.main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_success(run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("act", "-o", "x") == (0, "result x\n", "")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("depth must be\n  at most 16, not 40"), "error: depth must be at most 16, not 40\n"),
        (FileNotFoundError("there is no model folder m"), "error: there is no model folder m\n"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "a.txt"),
            "error: a.txt: No such file or directory\n",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "out"), "error: out: Permission denied\n"),
        (ImportError("install surgeon[plots] for this"), "error: install surgeon[plots] for this\n"),
        (ValueError(), "error: ValueError\n"),
        (
            ValueError("Rank 1:\nTraceback (most recent call last)\n  x\nValueError: bad"),
            "error: ValueError: bad\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left", "out/a.csv"),
            "error: no space left for out/a.csv; free some space",
        ),
        (
            OSError(errno.ENOSPC, "No space left", "model/tokenizer.json", None, "out/tokenizer.json"),
            "error: no space left for out/tokenizer.json; free some space",
        ),
        (OSError(errno.ENOSPC, "No space left"), "error: no space left for the output; free some space"),
        (
            OSError(errno.EFBIG, "File too large", "out/a.csv"),
            "error: out/a.csv would be larger than files may be here (ulimit -f); raise that limit",
        ),
        (
            RuntimeError("Error while serializing: I/O error: File too large (os error 27)"),
            "error: a file would be larger than files may be here (ulimit -f); raise that limit",
        ),
        (
            RuntimeError("I/O error: No space left on device (os error 28)"),
            "error: no space left for the output",
        ),
        (MemoryError("too big"), "error: out of memory (too big)"),
        (RuntimeError("[enforce fail] can't allocate memory: you tried"), "error: out of memory ("),
    ],
)
def test_what_users_can_mend_is_one_line_and_exit_1(
    run: Callable[..., tuple[int, str, str]], error: Exception, line: str
) -> None:
    code, out, err = run("act", act=error)
    assert (code, out) == (1, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_a_full_disk_names_the_output_when_the_error_names_no_file(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    for arguments in (["-o", "there"], ["--output", "there"], ["--output=there"]):
        _, _, err = run("act", *arguments, act=OSError(errno.ENOSPC, "No space left"))
        assert "no space left for there;" in err


def test_a_full_disk_is_named_where_it_is_not_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) in (disk, Path("/")))
    error = OSError(errno.ENOSPC, "No space left", str(disk / "new" / "a.csv"))
    assert f"/new/a.csv; free some space on {disk} and run" in explain(error, "out")[0]
    for place in (tmp_path / "a.csv", "postgresql://host/database"):
        assert (
            f"{place}; free some space and run"
            in explain(OSError(errno.ENOSPC, "", str(place)), "out")[0]
        )


def test_a_full_disk_in_words_of_our_own_is_left_so() -> None:
    error = OSError("no room for states in there; raise --memory")
    error.__cause__ = OSError(errno.ENOSPC, "No space left")
    assert explain(error, "out")[0] == "error: no room for states in there; raise --memory"


def test_a_full_disk_behind_another_error_is_still_a_full_disk() -> None:
    outer = RuntimeError("could not write the study")
    outer.__cause__ = OSError(errno.ENOSPC, "No space left", "study.db")
    assert explain(outer, "out") == explain(OSError(errno.ENOSPC, "No space left", "study.db"), "out")


def test_a_defect_is_exit_70_and_says_how_to_see_more(run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run("act", act=KeyError("steps"))
    assert code == 70
    assert err == "internal error: KeyError: 'steps'; run again with --debug for the traceback\n"


@pytest.mark.parametrize(
    "arguments", [["--debug", "act"], ["act", "--debug"], ["act", "-o", "x", "--debug"]]
)
def test_debug_shows_the_traceback_and_the_line(
    run: Callable[..., tuple[int, str, str]], arguments: list[str]
) -> None:
    code, _, err = run(*arguments, act=ValueError("no"))
    assert code == 1
    assert err.startswith("Traceback")
    assert err.endswith("\nerror: no\n")


def test_debug_after_two_dashes_is_an_argument(run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run("act", "--", "--debug")
    assert (code, "Traceback" in err) == (2, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["atc"], "error: No such command 'atc'. Did you mean 'act'? (see surgeon --help)\n"),
        (
            ["act", "--ouptut", "x"],
            "error: No such option: --ouptut. Did you mean --output? (see surgeon act --help)\n",
        ),
        (["act", "-o"], "error: Option '-o' requires an argument (see surgeon --help)\n"),
        (["act", "more"], "error: Got unexpected extra argument(s) (more) (see surgeon act --help)\n"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    run: Callable[..., tuple[int, str, str]], arguments: list[str], said: str
) -> None:
    assert run(*arguments) == (2, "", said)


def test_an_interruption_is_exit_130(run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("act", act=KeyboardInterrupt()) == (130, "", "interrupted\n")


@pytest.mark.parametrize(("name", "command"), typer.main.get_group(cli.app).commands.items())
def test_an_interruption_says_what_has_become_of_the_work(name: str, command: Any) -> None:
    """The same command goes on if its own help says so."""
    helps = [command.help, *(getattr(parameter, "help", None) or "" for parameter in command.params)]
    goes_on = "the same command goes on" in " ".join(" ".join(helps).split())
    line = explain_interruption(name, "there")
    assert line.startswith("interrupted; ")
    assert line.endswith("run the same command again to go on") == goes_on


def test_an_evaluation_that_writes_nothing_cannot_go_on() -> None:
    assert explain_interruption("eval") == "interrupted; no answers were kept, as they are with --output"


def test_own_warnings_take_one_line_and_others_none(run: Callable[..., tuple[int, str, str]]) -> None:
    def warn() -> None:
        warnings.warn_explicit(
            "the separator is read as text", UserWarning, "f", 1, module="surgeon.quality.data"
        )
        warnings.warn_explicit(
            "use something else", FutureWarning, "f", 1, module="surgeon.quality.data"
        )
        warnings.warn_explicit("not ours", UserWarning, "f", 1, module="torch.nn")

    assert run("act", act=warn)[2] == "warning: the separator is read as text\n"


def test_settings_of_the_users_stay(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    run("act")
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert os.environ["TQDM_DISABLE"] == "1"


def test_version_and_no_command(run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("--version") == (0, f"surgeon {__version__}\n", "")


def surgeon(line: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from surgeon.commands.app import main; sys.exit(main())"
    environment = {**os.environ, "SURGEON": f"{sys.executable} -c '{code}'", "COLUMNS": "80"}
    shell = ["bash", "-o", "pipefail", "-c", line.replace("surgeon", "eval $SURGEON")]
    return subprocess.run(
        shell, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=False
    )


def test_help_lists_the_commands_in_80_columns() -> None:
    done = surgeon("surgeon --help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    listed = [line.split()[0] for line in takewhile(bool, lines[lines.index("Commands:") + 1 :])]
    assert listed == [
        command.name or command.callback.__name__ for command in cli.app.registered_commands
    ]
    assert {"scan", "similarity", "sensitivity", "search", "export", "eval", "generate", "demo"} <= set(
        listed
    )
    assert "..." not in "".join(lines[lines.index("Commands:") :])


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = surgeon("(sleep 1; surgeon --help) | true")
    assert (done.returncode, done.stderr) == (141, "")


def test_any_other_broken_pipe_is_one(run: Callable[..., tuple[int, str, str]]) -> None:
    broken = BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert run("act", act=broken) == (1, "", "error: [Errno 32] Broken pipe\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, the device without space")
def test_results_that_do_not_fit_are_an_error() -> None:
    done = surgeon("surgeon --version >/dev/full")
    assert done.returncode == 1
    assert (
        done.stderr
        == "error: no space left for the output; free some space and run the same command again\n"
    )


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ("search --budget depth=26", "surgeon search MODEL --budget depth=26 --data DATA"),
        ("search --data=text.txt", "surgeon search MODEL --data=text.txt"),
        ("heal recipe.yaml", "surgeon heal recipe.yaml --data DATA --output OUTPUT"),
        ("export", "surgeon export RECIPE --output FOLDER"),
        ("bench", "surgeon bench DIR"),
    ],
)
def test_what_is_missing_is_shown_in_the_whole_command(
    given: str, whole: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(given.split()) == 2
    assert f"; write {whole} (see surgeon {given.split()[0]} --help)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("heal m --eval-dat t", "No such option: --eval-dat. Did you mean --eval-data?"),
        ("scan m --tokens few", "Invalid value for '--tokens': 'few' should be a valid integer"),
        ("heal m --data t -o h --eval-tokens 0", "'0' should be greater than or equal to 2"),
        (
            "scan m --workers 0",
            "Invalid value for '--workers': '0' should be greater than or equal to 1",
        ),
        (
            "spectrum m --weights ,",
            "Invalid value for '--weights': ',' names nothing; give one value or more",
        ),
        (
            "predict m --hardware h --batch 1,0",
            "Invalid value for '--batch': '0' is no whole number from 1",
        ),
        (
            "scan m --data a.txt --data=b.txt",
            "error: --data takes one text, and is given 2 times; measure each by itself",
        ),
    ],
)
def test_wrong_options_are_said_with_their_values(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(given.split()) == 2
    assert said in capsys.readouterr().err
