"""The `surgeon` command: its list of commands, and one policy for all errors.

Exit codes: 1 is something the user can mend (a ValueError, an OSError, a missing extra, too little memory or disk), 2
wrong usage (an unknown command or option, a missing argument, a value that its option cannot take whatever the model
is, two texts where one is measured), 70 a defect of surgeon's, 130 an interruption, 141 a closed pipe.
"""

from __future__ import annotations

import logging
import os
import re
import select
import shlex
import sys
import traceback
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from surgeon.commands.bench import bench
from surgeon.commands.calibrate import calibrate
from surgeon.commands.chat import chat
from surgeon.commands.check import check, families
from surgeon.commands.command import INTERRUPTED, line_of
from surgeon.commands.demo import demo
from surgeon.commands.evaluate import evaluate
from surgeon.commands.explore import explore
from surgeon.commands.export import card, export
from surgeon.commands.generate import generate
from surgeon.commands.heal import heal
from surgeon.commands.predict import predict
from surgeon.commands.report import report
from surgeon.commands.scan import scan
from surgeon.commands.search import search
from surgeon.commands.sensitivity import sensitivity
from surgeon.commands.serve import serve
from surgeon.commands.show import show
from surgeon.commands.similarity import similarity
from surgeon.commands.spectrum import spectrum
from surgeon.commands.train import train
from surgeon.errors import is_out_of_memory
from surgeon.machine import avoid_cudnn_attention, wait_asleep
from surgeon.processes.files import full_place, is_full_disk, is_too_large
from surgeon.version import __version__

# In the order in which they are used. These modules are light: what a command needs, it imports when it runs.
COMMANDS = (
    (explore, "Start here: what a model can spare, in minutes, on one page."),
    (check, "Say what would work with a model, and how much memory it takes."),
    (families, "List the architectures, and what works with each."),
    (scan, "Measure what every stretch of layers tolerates; draw heatmaps."),
    (similarity, "Measure what each layer owes to the one before it (CKA)."),
    (sensitivity, "Bound and measure the error of running layers in pairs."),
    (spectrum, "Find singular values, and what lower ranks of each matrix do."),
    (search, "Search for the change of least damage within a budget."),
    (heal, "Train an edited model back, on text or towards the original."),
    (train, "Train a model of any program from scratch."),
    (export, "Write the changed model as a checkpoint."),
    (show, "Say what a checkpoint or a recipe is; draw its program."),
    (card, "Write a checkpoint's model card, with what was measured."),
    (evaluate, "Measure perplexity, divergence, and accuracy on tasks."),
    (generate, "Continue a text, on one or several ranks."),
    (chat, "Talk with a model, on one or several ranks."),
    (serve, "Answer requests as OpenAI's API does, on one or several ranks."),
    (bench, "Measure how fast programs run on ranks, one against another."),
    (predict, "Say what programs would cost on hardware you do not have."),
    (calibrate, "Measure this machine, as a hardware file for predictions."),
    (report, "Put what was measured into one HTML page."),
    (demo, "All of this on a small model that ships with surgeon."),
)
MENDABLE = 1
USAGE = 2
INTERNAL = 70
CLOSED_PIPE = 141

# Of commands that keep what they have found as they go.
_GOES_ON = "run the same command again to go on"
_KEEPS_NOTHING = "nothing was written"
_ANEW = f"{_KEEPS_NOTHING}; the same command would begin anew"
_INTERRUPTED = {
    "export": f"no checkpoint was written, and factors that were made are kept; {_GOES_ON}",
    "generate": "the text is not finished",
    "chat": "the conversation is lost",
    "serve": "requests that were running are lost",
    "bench": _ANEW,
    "calibrate": _ANEW,
}
_INTERRUPTED |= dict.fromkeys(
    ["explore", "scan", "sensitivity", "spectrum", "search", "heal", "train", "eval", "demo"], _GOES_ON
)
_INTERRUPTED |= dict.fromkeys(
    ["check", "families", "similarity", "show", "card", "predict", "report"], _KEEPS_NOTHING
)
# In a message: a parameter of a function, by its name of several words or between backticks, but no part of a path.
_PARAMETER = re.compile(r"""(?<![\w/.'"=-])(?:`\w+`|[a-z]+_\w+)(?![\w/'"=-]|\.\w)""")
DEBUG_FLAG = "--debug"
STANDARD_OUTPUT = 1
NOTE = (
    "Layers count from 0; ranges are Python slices: 4:30 is layers 4 to 29. With --debug, before or after the "
    "command, an error shows its traceback."
)

app = typer.Typer(
    name="surgeon",
    help="Find what a transformer can give up, reorder, run in parallel or factorise; heal it, export it, run it.",
    epilog=NOTE,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command, _summary in COMMANDS:
    app.command(short_help=_summary, epilog=NOTE)(line_of(_command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"surgeon {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            DEBUG_FLAG, help="Show the traceback of an error, and every library's log messages."
        ),
    ] = False,
) -> None:
    del version, debug  # the one acts by itself, the other is read by `main` before anything is parsed


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; returns the exit code. Errors become one line on standard error."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = DEBUG_FLAG in arguments[:end]  # before or after the command's name, to which it is no option
    arguments[:end] = [argument for argument in arguments[:end] if argument != DEBUG_FLAG]
    # Of other options the last one counts, so that a script's can be overridden; who gives two texts means both.
    texts = len([*filter(re.compile("--data(=|$)").match, arguments[:end])])
    if texts > 1 and not getattr(_options_of(arguments).get("data"), "multiple", True):
        _say(f"error: --data takes one text, and is given {texts} times; measure each by itself")
        return USAGE
    wait_asleep()
    avoid_cudnn_attention()
    if not debug:
        # Other libraries' progress bars and warnings stay off the screen, also in child processes; ours take one line.
        quiet = {
            "TRANSFORMERS_VERBOSITY": "error",
            "DATASETS_VERBOSITY": "error",
            "HF_HUB_VERBOSITY": "error",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",
        }
        os.environ.update(quiet | os.environ)
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        if not sys.warnoptions:
            warnings.filterwarnings("ignore")
            warnings.filterwarnings("always", category=UserWarning, module=r"surgeon\b")
        warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
    try:
        code = typer.main.get_command(app).main(
            args=arguments, prog_name="surgeon", standalone_mode=False
        )
        if sys.stdout is not None:
            sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except SystemExit as ended:
        # typer leaves in silence on every broken pipe, also on one that is not standard output.
        if not isinstance(ended.__context__, OSError):
            raise
        return _fail(ended.__context__, arguments, debug)
    except Exception as error:  # noqa: BLE001 - the one place where everything ends
        return _fail(error, arguments, debug)
    if code == INTERRUPTED:
        # The terminal has written ^C.
        below = "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
        _say(below + explain_interruption("".join(arguments[:1]), _output_of(arguments)))
    return code or 0


def _options_of(arguments: list[str]) -> dict[str, Any]:
    """The options of the command that is named, by what its function calls them."""
    group: Any = typer.main.get_command(app)
    command = group.commands.get(next(iter(arguments), None))
    every = getattr(command, "params", ())
    return {one.name: one for one in every if one.param_type_name == "option"}


def _fail(error: Any, arguments: list[str], debug: bool) -> int:
    if hasattr(error, "format_message") and hasattr(error, "ctx"):  # typer's, of wrong usage
        if type(error).__name__ == "NoArgsIsHelpError":
            _say(error.format_message())
        else:
            near = getattr(error, "possibilities", None)
            # Pydantic's of what typer raised.
            said = error.format_message().rstrip(".").replace("Value error, ", "")
            if hasattr(error.__cause__, "errors"):
                said = said.replace("Input", repr(error.__cause__.errors()[0]["input"]), 1)
            message = f"{error.message}. Did you mean {near[0]}?" if near else said
            if type(error).__name__ == "MissingParameter":
                # The whole command, with the text to measure on where none is given; bench measures speed alone.
                command, *given = arguments
                every = error.ctx.command.params
                positional = [one for one in every if one.param_type_name == "argument"]
                if error.param in positional:
                    given.insert(
                        positional.index(error.param), error.param.metavar or error.param.name.upper()
                    )
                for option in every:
                    is_text = option.name == "data" and command != "bench"
                    is_wanted = option not in positional and (option.required or is_text)
                    if is_wanted and not any(word.partition("=")[0] in option.opts for word in given):
                        given += [option.opts[0], option.name.upper()]
                message += f"; write {shlex.join(['surgeon', command, *given])}"
            path = error.ctx.command_path if error.ctx else "surgeon"
            _say(f"error: {message} (see {path} --help)")
        return int(error.exit_code)
    if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():
        # The interpreter flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), STANDARD_OUTPUT)
        return CLOSED_PIPE
    if debug:
        traceback.print_exception(error)
    line, code = explain(error, _output_of(arguments))
    _say(_name_options(line, arguments))
    return code


def _name_options(line: str, arguments: list[str]) -> str:
    """Call parameters in a message as the command line does; but a user's own words stay as they are."""
    options = _options_of(arguments)
    values = (word.partition("=")[2] if word.startswith("-") else word for word in arguments)
    own = re.findall(r"\w+", " ".join(values))

    def name(found: re.Match[str]) -> str:
        word = found[0].strip("`")
        if word not in options or (word == found[0] and word in own):
            return found[0]
        return str(options[word].opts[0])

    return _PARAMETER.sub(name, line)


def _stdout_has_no_reader() -> bool:
    poll = select.poll()
    poll.register(STANDARD_OUTPUT, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _output_of(arguments: list[str]) -> str | None:
    for flag, value in pairwise(arguments):
        if flag in ("-o", "--output"):
            return value
    return next((a.partition("=")[2] for a in arguments if a.startswith("--output=")), None)


def _say(line: str) -> None:
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


def explain(error: BaseException, output: str | None = None) -> tuple[str, int]:
    """Put an exception into one line, with its exit code; for a full disk without a file names the output."""
    if is_full_disk(error) and not (isinstance(error, OSError) and error.errno is None):
        place = full_place(error) or output
        disk = ""
        if place is not None and "://" not in place:
            path = Path(place).absolute()
            mount = next(
                parent
                for parent in (path, *path.parents)
                if os.path.ismount(parent) or parent == parent.parent
            )
            if mount != mount.parent:  # there are several
                disk = f" on {mount}"
        line = f"error: no space left for {place or 'the output'}; free some space{disk} and run the same command again"
        return line, MENDABLE
    if is_too_large(error):
        what = f"{output or full_place(error) or 'a file'} would be larger than files may be here (ulimit -f)"
        return f"error: {what}; raise that limit and run the same command again", MENDABLE
    if is_out_of_memory(error):
        advice = "use a smaller model or a smaller limit, or close other programs"
        return f"error: out of memory ({_text(error)}); {advice}", MENDABLE
    if isinstance(error, OSError | ValueError | ImportError):
        return f"error: {_text(error)}", MENDABLE
    kind = type(error).__name__
    return f"internal error: {kind}: {_text(error)}; run again with --debug for the traceback", INTERNAL


def explain_interruption(command: str, output: str | None = None) -> str:
    """Say what became of an interrupted command's work."""
    words = _INTERRUPTED.get(command)
    if command == "eval" and output is None:
        words = "no answers were kept, as they are with --output"
    return "interrupted" if words is None else f"interrupted; {words}"


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    lines = str(error).strip().splitlines()
    # A traceback of another process ends in the error.
    if any(line.startswith("Traceback ") for line in lines):
        lines = lines[-1:]
    return " ".join(" ".join(lines).split()) or type(error).__name__
