"""`surgeon chat`, `surgeon.chat`: a conversation with a model, on one rank or several."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Unpack

from surgeon.commands.command import command, option
from surgeon.commands.options import CacheMemory, Checkpoint, System, WritingFlags

if TYPE_CHECKING:
    from surgeon.runtime.conversation import Conversation

HINT = "/reset forgets what was said; Ctrl-C ends an answer, /exit or Ctrl-D all"


def _show(call: Callable[[], Conversation]) -> None:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with call() as conversation:
        # Only now, as these come by what the model needs.
        from surgeon.checkpoint.describe import describe
        from surgeon.commands.generation import GeneratedText, Generation

        if is_terminal:
            print(HINT, file=sys.stderr)
        texts = []
        for line in _lines(is_terminal):
            if line == "/reset":
                conversation.reset()
                print("forgotten", file=sys.stderr)
                continue
            before = signal.signal(signal.SIGINT, lambda *_: conversation.stop())
            try:
                for piece in conversation.say(line):
                    print(piece, end="", flush=True)
                print(flush=True)
            except ValueError as error:
                if not is_terminal:
                    raise
                print(f"error: {error}", file=sys.stderr)
                continue
            finally:
                signal.signal(signal.SIGINT, before)
            answer = conversation.answers[-1]
            if answer.finish_reason == "length":
                if answer.usage.prompt + answer.usage.new < conversation.service.max_tokens:
                    why = "--max-new-tokens allows no more"
                else:
                    why = "no positions are left; /reset forgets what was said"
                print(f"(cut off after {answer.usage.new} tokens: {why})", file=sys.stderr)
            texts.append(GeneratedText(prompt=line, **vars(answer)))
        if any(text.usage.new for text in texts):
            service = conversation.service
            drafts = service.options.draft is not None
            layers = describe(service.plan.folder).num_layers
            found = Generation(
                tuple(texts), service.plan, layers, service.options.ranks, service.figures(), drafts
            )
            print(found, file=sys.stderr)


def _lines(is_terminal: bool) -> Iterator[str]:
    """Lines that are typed or piped in, until /exit or the end; at a terminal they can be edited."""
    if is_terminal:
        with suppress(ImportError):
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")  # what is pasted is one message
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:  # of what has been typed
            if not is_terminal:
                raise
            print()
            continue
        except UnicodeDecodeError as error:
            raise ValueError(
                f"what is read is not text in UTF-8 ({error.reason}); write messages in it"
            ) from error
        if line == "/exit":
            return
        if line:
            yield line


@command(_show)
def chat(
    model: Checkpoint,
    *,
    system: System = None,
    max_new_tokens: Annotated[
        int | None,
        option("How many tokens an answer may have. Default: as many as there is room for.", least=1),
    ] = None,
    memory: CacheMemory = None,
    **writing: Unpack[WritingFlags],
) -> Conversation:
    """Talk with a model, on one or more ranks.

    Each line is a message, at a terminal or from a pipe; answers go to stdout as they come, and what they took to
    stderr at the end. For each answer all that was said is put into the tokenizer's chat template, of which the ranks
    compute what is new. Ctrl-C ends an answer, which stays in the conversation as far as it came; /reset forgets what
    was said; /exit, Ctrl-D or the end of the pipe ends. Ranks, drafts and how tokens are chosen are as of surgeon
    generate.

    Raises:
        FileNotFoundError, ValueError: if model or options cannot be used, or the chat template takes no system message.
        RankFailed: if a rank fails.
    """
    from surgeon.checkpoint.texts import begin_conversation, chat_text
    from surgeon.commands.generate import choose_sampling
    from surgeon.commands.opening import open_stored, service_options
    from surgeon.runtime.conversation import Conversation
    from surgeon.runtime.service import Service

    opened, program = open_stored(model, writing.get("program"))
    sampling = choose_sampling(opened.folder, writing, max_new_tokens or sys.maxsize)
    tokenizer = opened.tokenizer
    # What the template does not take is said before ranks are started in vain.
    chat_text(tokenizer, [*begin_conversation(system), {"role": "user", "content": "?"}], opened.name)
    options = service_options(opened, program, writing, max_batch=1, memory=memory)
    return Conversation(Service(opened, options, tokenizer), tokenizer, sampling, system)
