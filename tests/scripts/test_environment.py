"""scripts/demo and scripts/test prepare their environment in every state they can find: with a Python made of shell.

The stand-in records how it was called, makes "environments" that are copies of itself, and installs by touching files,
so that the tests take no time and no network. Only the shell utilities that the scripts may use are on the path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    *["scripts/demo", "scripts/test", "scripts/environment.sh", ".ci/run"],
    *[
        "scripts/gpu/next",
        "scripts/gpu/rehearse",
        "scripts/vllm/test",
        "scripts/modeling/test",
        "scripts/real/get",
        "scripts/real/check",
        "scripts/real/tasks",
    ],
]
UTILITIES = [
    "bash",
    "cat",
    "chmod",
    "cksum",
    "cp",
    "dirname",
    "find",
    "flock",
    "head",
    "mkdir",
    "rm",
    "rmdir",
    "sh",
    "tail",
]
STAND_IN = r"""#!/bin/sh
cat >/dev/null || exit 9
here=${0%/*}
echo "$*" >>"$CALLS"
case "$*" in
    *version_info*) test -z "$OLD_PYTHON" ;;
    "-c import ensurepip") test -z "$NO_ENSUREPIP" ;;
    "-c import pip") test -z "$NO_PIP" ;;
    "-m venv"*)
        for folder; do :; done
        mkdir -p "$folder/bin"
        cp "$0" "$folder/bin/python" ;;
    "-m pip --python"*) ;;
    "-m pip install"*)
        echo "Collecting many packages"
        test -z "$PIP_FAILS" || { echo "ERROR: no network"; exit 1; }
        printf '#!/bin/sh\necho "surgeon $*"\n' >"$here/surgeon"
        chmod +x "$here/surgeon" ;;
    "-m pytest"*)
        shift 2
        echo "pytest $* in $PWD" ;;
esac
"""


class Clone:
    """A copy of the scripts in a folder of its own, and what it takes to run them."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"  # with a space in its path
        (self.root / "scripts").mkdir(parents=True)
        for name in (
            "scripts/demo",
            "scripts/test",
            "scripts/environment.sh",
            "pyproject.toml",
            "constraints.txt",
        ):
            shutil.copy(ROOT / name, self.root / name)
        self.calls = folder / "calls"
        self.path = folder / "bin"
        self.path.mkdir()
        for utility in UTILITIES:
            found = shutil.which(utility)
            if found:
                (self.path / utility).symlink_to(found)
        self.python = self.path / "python3"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def run(
        self, script: str = "demo", *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        return subprocess.run(
            ["bash", str(self.root / "scripts" / script), *arguments],
            env={"PATH": str(self.path), "CALLS": str(self.calls), **environment},
            cwd="/",
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )

    @property
    def made_environment(self) -> bool:
        return "-m venv" in self.calls.read_text()

    @property
    def installed(self) -> bool:
        return "-m pip install" in self.calls.read_text()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_valid_bash(script: str) -> None:
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert script.endswith(".sh") or os.access(ROOT / script, os.X_OK)


def test_first_call_makes_everything_and_the_second_nothing(clone: Clone) -> None:
    first = clone.run("test", "-s", "a b")
    assert (first.returncode, first.stdout) == (0, f"pytest -s a b in {clone.root}\n")
    assert clone.made_environment
    assert "-c constraints.txt -e .[dev]\n" in clone.calls.read_text()
    assert clone.run("test", "-s").returncode == 0
    assert clone.calls.read_text() == "-m pytest -s\n"


def test_the_demo_installs_no_developer_tools_and_the_tests_add_them(clone: Clone) -> None:
    demo = clone.run("demo", "--trials", "3 4")
    assert (demo.returncode, demo.stdout) == (0, "surgeon demo --trials 3 4\n")
    assert "-c constraints.txt -e .[all]\n" in clone.calls.read_text()
    clone.run("demo")
    assert not clone.calls.read_text()
    clone.run("test")
    assert not clone.made_environment
    assert "-c constraints.txt -e .[dev]\n" in clone.calls.read_text()
    for script in ("demo", "test"):
        clone.run(script)
        assert not clone.installed


def test_the_demo_of_a_real_model_fetches_it(clone: Clone) -> None:
    get = clone.root / "scripts/real/get"
    get.parent.mkdir()
    get.write_text("#!/bin/sh\necho '/a folder/model.gguf'\n")
    get.chmod(0o755)
    demo = clone.run("demo", "--real", "--trials", "3")
    assert (demo.returncode, demo.stdout) == (
        0,
        "surgeon demo --model /a folder/model.gguf --trials 3\n",
    )
    get.write_text("#!/bin/sh\necho 'error: no network' >&2\nexit 1\n")
    assert clone.run("demo", "--real").returncode == 1
    assert clone.run("demo").returncode == 0


def test_the_demo_takes_no_developer_tools_away(clone: Clone) -> None:
    clone.run("test")
    with (clone.root / "pyproject.toml").open("a") as opened:
        opened.write("# changed\n")
    assert clone.run("demo").returncode == 0
    assert "-c constraints.txt -e .[dev]\n" in clone.calls.read_text()
    clone.run("test")
    assert not clone.installed


def test_an_installation_takes_a_few_lines_and_keeps_those_of_pip(clone: Clone) -> None:
    said = clone.run("demo").stderr
    assert said.count("\n") == 5
    assert "PyTorch" in said
    assert "minutes" in said
    log = clone.root / ".venv" / ".surgeon-pip.log"
    assert str(log) in said
    assert log.read_text() == "Collecting many packages\n"


def test_where_pip_fails_its_last_words_are_shown_and_the_rest_named(clone: Clone) -> None:
    failed = clone.run("demo", PIP_FAILS="1")
    assert failed.returncode == 1
    assert "ERROR: no network" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("error: installing into .venv did not work")
    assert str(clone.root / ".venv" / ".surgeon-pip.log") in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        ([], True),
        (["-x", "-k", "pair"], True),
        (["tests/language/operations", "-k", "pair"], False),
        (["tests/language/operations/test_operations.py::test_pair"], False),
        (["--pdb"], False),
    ],
)
def test_tests_run_side_by_side_unless_they_are_few(
    clone: Clone, arguments: list[str], workers: bool
) -> None:
    (clone.root / "tests/language/operations").mkdir(parents=True)
    (clone.root / "tests/language/operations/test_operations.py").touch()
    (clone.path / "nproc").write_text("#!/bin/sh\necho 32\n")
    (clone.path / "nproc").chmod(0o755)
    given = " ".join([*(["-n 8 --dist worksteal"] if workers else []), *arguments])
    assert clone.run("test", *arguments).stdout == f"pytest {given} in {clone.root}\n"
    (clone.path / "nproc").write_text("#!/bin/sh\necho 1\n")
    assert "-n" not in clone.run("test").stdout


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_a_changed_file_is_installed_into_the_same_environment(clone: Clone, file: str) -> None:
    clone.run()
    with (clone.root / file).open("a") as opened:
        opened.write("# changed\n")
    assert clone.run().returncode == 0
    assert clone.installed
    assert not clone.made_environment
    clone.run()
    assert not clone.installed


def test_an_interrupted_installation_starts_afresh(clone: Clone) -> None:
    assert "pip's last words" in clone.run(PIP_FAILS="1").stderr
    half_done = clone.root / ".venv" / "half-done"
    half_done.touch()
    assert clone.run().stdout == "surgeon demo\n"
    assert clone.made_environment
    assert not half_done.exists()


def test_a_moved_clone_gets_a_new_environment(clone: Clone) -> None:
    clone.run()
    clone.root = clone.root.rename(clone.root.with_name("elsewhere"))
    assert clone.run().returncode == 0
    assert clone.made_environment


def test_an_environment_whose_python_is_gone_is_made_again(clone: Clone) -> None:
    clone.run()
    (clone.root / ".venv/bin/python").unlink()
    assert clone.run().returncode == 0
    assert clone.made_environment


def test_a_working_environment_of_the_users_is_installed_into(clone: Clone) -> None:
    (clone.root / ".venv/bin").mkdir(parents=True)
    shutil.copy(clone.python, clone.root / ".venv/bin/python")
    assert clone.run().returncode == 0
    assert clone.installed
    assert not clone.made_environment


def test_a_useless_environment_of_the_users_is_never_deleted(clone: Clone) -> None:
    mine = clone.root / ".venv" / "mine"
    mine.mkdir(parents=True)
    failed = clone.run()
    assert failed.returncode == 1
    assert "move it away" in failed.stderr
    assert mine.exists()


def test_an_environment_that_is_a_link_is_left_as_it_is(clone: Clone) -> None:
    """It is another clone's, made by the same script there."""
    clone.run()
    others = (clone.root / ".venv").rename(clone.root.with_name("others"))
    (clone.root / ".venv").symlink_to(others)
    (others / ".surgeon-ready").write_text(f"{clone.root}-2\n1 2\nsurgeon\n")
    before = sorted(others.rglob("*"))
    failed = clone.run()
    assert failed.returncode == 1
    assert "belongs elsewhere" in failed.stderr
    assert sorted(others.rglob("*")) == before


def test_without_ensurepip_the_pip_of_this_python_serves(clone: Clone) -> None:
    assert clone.run(NO_ENSUREPIP="1").returncode == 0
    assert "-m venv --without-pip" in clone.calls.read_text()
    assert "-m pip --python" in clone.calls.read_text()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"OLD_PYTHON": "1"}, "no Python 3.11 or later found"),
        ({"NO_ENSUREPIP": "1", "NO_PIP": "1"}, "has neither ensurepip nor pip"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    clone: Clone, environment: dict[str, str], said: str
) -> None:
    failed = clone.run(**environment)
    assert failed.returncode == 1
    assert said in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert not (clone.root / ".venv").exists()


def test_python_can_be_chosen(clone: Clone) -> None:
    chosen = clone.path / "my python"
    clone.python.rename(chosen)
    assert "no Python" in clone.run().stderr
    assert clone.run(PYTHON=str(chosen)).returncode == 0


def test_a_closed_standard_input_does_no_harm(clone: Clone) -> None:
    line = f'"{clone.root}/scripts/demo" <&-'
    environment = {"PATH": str(clone.path), "CALLS": str(clone.calls)}
    done = subprocess.run(
        ["bash", "-c", line],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "surgeon demo\n")
