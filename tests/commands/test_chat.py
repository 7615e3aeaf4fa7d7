"""`surgeon chat`: from a pipe, at a terminal, and when Ctrl-C ends an answer."""

from __future__ import annotations

import codecs
import io
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import surgeon
from surgeon.commands.app import main
from tests import warm
from tests.tiny_models import chat_checkpoint
from tests.waiting import PATIENCE, wait_until

ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "OMP_NUM_THREADS": "1",
    "TERM": "dumb",
}
RUN = "import sys; from surgeon.commands.app import main; sys.exit(main())"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose answers do not end by themselves."""
    return chat_checkpoint(tmp_path_factory.mktemp("chat") / "tiny-chat", eos_token_id=None)


def answers(model: Path, *messages: str, **options: int) -> list[str]:
    with surgeon.chat(model, **options) as conversation:
        return ["".join(conversation.say(message)) for message in messages]


def test_lines_of_a_pipe_are_messages(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = answers(chat_model, "the dog", "and the fox", max_new_tokens=8)
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("the dog\n\n  and the fox \n/reset\nthe dog\n/exit\nthe fox\n")
    )
    assert main(["chat", str(chat_model), "--tp", "2", "--max-new-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{first}\n{second}\n{first}\n"
    assert err.count("(cut off after 8 tokens: --max-new-tokens allows no more)") == 3
    assert "forgotten" in err
    assert re.search(r"prefill  \d+ tokens \(\d+ more were shared\)", err)
    assert "decode   24 tokens of 3 texts" in err


def test_a_pipe_ends_where_a_message_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = chat_checkpoint(tmp_path / "short", max_position_embeddings=64, eos_token_id=None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the dog\nthe fox\n"))
    assert main(["chat", str(short)]) == 1
    err = capsys.readouterr().err
    assert "no positions are left; /reset forgets what was said" in err
    assert re.search(r"error: the conversation has come to \d+ tokens, .* room for 64", err)


@pytest.mark.parametrize("system", [[], ["--system", "a"]], ids=str)
def test_chats_that_cannot_be(
    system: list[str], tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "tiny-llama has no chat template"
    if system:
        said = "chat template does not take a system message, which has to be left out: no such role"
        refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no such role') }}{% endif %}"
        (tiny_checkpoint / "chat_template.jinja").write_text(refusal)
    assert main(["chat", str(tiny_checkpoint), *system]) == 1
    assert said in capsys.readouterr().err


def test_an_interruption_ends_an_answer_and_not_the_program(chat_model: Path) -> None:
    options = [str(chat_model), "--tp", "2", "--draft", "A0 F0 A1 F1 A3 F3"]
    pipe = subprocess.PIPE
    command = warm.Popen(
        [sys.executable, "-c", RUN, "chat", *options],
        env=ENVIRONMENT,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    with command:
        assert command.stdin is not None
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdin.write(b"the dog\n/reset\n")
        command.stdin.flush()
        assert len(command.stdout.read(20)) == 20
        command.send_signal(signal.SIGINT)
        while command.stderr.readline() != b"forgotten\n":
            assert command.poll() is None
        ranks = [rank.pid for rank in warm.ranks_of(command.pid)]
        out, err = command.communicate(timeout=PATIENCE)
    assert (command.returncode, len(ranks)) == (0, 2)
    decoded = re.search(rb"decode   (\d+) tokens at", err)
    assert decoded is not None
    assert 0 < int(decoded[1]) < 8000
    assert out.endswith(b"\n")
    for rank in ranks:
        wait_until(lambda rank=rank: not Path(f"/proc/{rank}").exists())  # type: ignore[misc]


class Terminal:
    """`surgeon chat` as a user starts it, at a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.end, its = os.openpty()
        self.screen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The first terminal that the leader of a session opens is the one whose Ctrl-C reaches it.
        code = f"import os; os.close(os.open(os.ttyname(0), os.O_RDWR)); {RUN}"
        command = [sys.executable, "-c", code, "chat", *arguments]
        self.process = subprocess.Popen(
            command, env=ENVIRONMENT, stdin=its, stdout=its, stderr=its, start_new_session=True
        )
        os.close(its)

    def wait_for(self, shown: str, patience: float = PATIENCE) -> str:
        """What comes next on the screen, up to a text."""
        while shown not in self.screen:
            if not select.select([self.end], [], [], patience)[0]:
                raise TimeoutError(self.screen)
            self.screen += self._decoder.decode(os.read(self.end, 4096))
            # With bracketed paste, off and on.
            self.screen = re.sub("\r|\x1b\\[\\?2004[hl]", "", self.screen)
        before, _, self.screen = self.screen.partition(shown)
        return before

    def interrupt_line(self) -> None:
        """Press Ctrl-C until there is a new prompt: readline misses a signal that comes before it waits for keys."""
        for _ in range(int(PATIENCE)):
            self.type("\x03")
            with suppress(TimeoutError):
                self.wait_for("\n> ", 1)
                return
        raise TimeoutError(self.screen)

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())


def test_at_a_terminal(chat_model: Path) -> None:
    expected = answers(chat_model, "the dog", max_new_tokens=40)[0].replace("\r", "")
    terminal = Terminal(str(chat_model))
    assert "/reset forgets what was said; Ctrl-C ends an answer" in terminal.wait_for("> ")
    terminal.type("the dig\x7f\x7fog\n")  # it can be edited
    terminal.wait_for(expected)
    terminal.type("\x03")
    terminal.wait_for("\n> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.interrupt_line()
    terminal.type("/reset\n")
    terminal.wait_for("forgotten\n> ")
    terminal.type("the dog\n")
    terminal.wait_for(expected)  # again to the first message
    terminal.type("\x03")
    terminal.wait_for("\n> ")
    terminal.type("\x04")
    assert "tokens of 2 texts at" in terminal.wait_for("vocab ")
    assert terminal.process.wait(PATIENCE) == 0
    os.close(terminal.end)
