"""A command is a function: its signature, with a help beside each parameter, is the library's and the command line's.

    @command()
    def paint(wall: Annotated[str, option("The wall.")], *, coats: Annotated[int, option("How many.", least=1)] = 1):

From it follow the section "Args" of the docstring, the checks of numbers, and what typer reads (`line_of`). Options of
several commands are keys of a TypedDict, declared once: `**text: Unpack[TextFlags]`. Modules here are light at their
top: a command imports what it needs when it runs.
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
)

import typer

from surgeon.language.operations.base import parse_range
from surgeon.language.program import Program
from surgeon.named import split_values
from surgeon.words import join_words, show_value

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SIMPLE = (int, float, bool, str, Path)
# Types of parameters in error messages; others go by their names.
_WORDS = {
    int: "a number",
    float: "a number",
    str: "a text",
    range: "a range",
    Path: "a path",
    Sequence: "a sequence",
    Mapping: "a mapping",
    Callable: "a function",
}
# Of values that are none of a type that its module imports for type checkers alone.
_PLAIN = (str, bytes, Real, Path, list, dict, type(None))
_DOC_WIDTH = 110
INTERRUPTED = 130  # an exit code


@dataclass(frozen=True)
class Declaration:
    """A parameter beside its type and its default.

    Attributes:
        help: for the command line and for "Args".
        flags: of the command line, in place of the parameter's name.
        least: of a number; less is refused in Python, too.
        splits: whether one text of a list may hold several values, with commas between.
        kind: type that the command line reads, in place of the annotation.
        made_by: makes the value of options of the command line, its parameters.
        default: of a key of a TypedDict.
        python: whether it is of the function alone.
        more: for typer; `argument` makes an argument of a parameter with a default.
    """

    help: str
    flags: tuple[str, ...] = ()
    least: float | None = None
    splits: bool = False
    kind: Any = None
    made_by: Callable[..., Any] | None = None
    default: Any = None
    python: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


def option(
    help: str,
    *flags: str,
    least: float | None = None,
    kind: Any = None,
    made_by: Callable[..., Any] | None = None,
    default: Any = None,
    **more: Any,
) -> Declaration:
    """Declare an option, or without a default an argument."""
    return Declaration(help, flags, least, kind=kind, made_by=made_by, default=default, more=more)


def keyword(help: str) -> Declaration:
    """Declare a parameter of the function alone."""
    return Declaration(help, python=True)


def several(help: str, *flags: str, **more: Any) -> Declaration:
    """Declare an option of several values, with commas between or the option again; of the type of a sequence."""
    said = f"{help} Several by commas, or the option again."
    return replace(option(said, *flags, **more), splits=True)


def later(make: Callable[..., Any]) -> Callable[..., Any]:
    """Have `show` get a maker with its options bound, to be called when more is known."""
    return wraps(make)(lambda **flags: partial(make, **flags))


def print_result(call: Callable[[], Any]) -> None:
    """Print the result of a function, if it has text, and the files that it has written."""
    found = call()
    for line in filter(None, [str(found), *getattr(found, "files", ())]):
        print(line)


def command(
    show: Callable[..., int | None] = print_result, name: str | None = None
) -> Callable[[_Function], _Function]:
    """Declare a function as a command.

    Args:
        show: runs it from the command line: gets the function with its options bound, prints, and may return an exit
            code. Its further parameters are options of the command line alone, or replace the function's of that name.
        name: of the command, in place of the function's.
    """

    def declare(function: _Function) -> _Function:
        parameters = declared_options(function)
        plain = inspect.signature(function)
        own_parameters = plain.parameters
        shown = [one for one in own_parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        shown += [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type
            )
            for one in parameters
            if one.name not in own_parameters
        ]
        signature = plain.replace(parameters=shown)

        @wraps(function)
        def call(*positional: Any, **given: Any) -> Any:
            bound = signature.bind(*positional, **given).arguments
            for one in parameters:
                least = one.option.least
                value = bound.get(one.name)
                if one.name in bound:
                    _check_type(one, value)
                if value == "" and "--output" in one.option.flags:
                    raise ValueError(f"{one.name} is empty; say where to write")
                if least is not None and isinstance(value, int | float) and value < least:
                    raise ValueError(f"{one.name} must be at least {least:g}, not {value}")
            return function(*positional, **given)

        vars(call)["__signature__"] = signature
        flags = {flag.lstrip("-"): one.name for one in parameters for flag in one.option.flags}

        # Flags such as --so-and-so get their names in Python.
        def in_python(flag: re.Match[str]) -> str:
            return f"`{flags.get(flag[1], flag[1].replace('-', '_'))}`"

        said = [
            textwrap.fill(
                f"{one.name}: {re.sub('--([a-z][a-z-]*)', in_python, one.option.help)}",
                _DOC_WIDTH,
                subsequent_indent="    ",
            )
            for one in parameters
        ]
        text, *sections = re.split(r"\n\n(?=(?:Returns|Raises):\n)", inspect.getdoc(function) or "")
        if said:
            sections.insert(0, "Args:\n" + textwrap.indent("\n".join(said), "    "))
        call.__doc__ = "\n\n".join([text, *sections])
        line = _line(call, parameters, show)
        line.__name__ = name or function.__name__
        vars(call)["line"] = line
        return cast(_Function, call)

    return declare


def line_of(function: Callable[..., Any]) -> Callable[..., int | None]:
    """Make the command line of a command, for typer."""
    line: Callable[..., int | None] = vars(function).get("line", function)
    return line


@dataclass(frozen=True)
class CommandParameter:
    """A parameter of a command; `inspect.Parameter.empty` stands for no default."""

    name: str
    type: Any
    default: Any
    option: Declaration


@cache
def declared_options(function: Callable[..., Any]) -> list[CommandParameter]:
    """The parameters of a function that are options, in order; in place of a TypedDict those of its keys."""
    function = inspect.unwrap(function)
    names = _names(function.__globals__)
    found: list[CommandParameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint = _evaluate(parameter.annotation, names)
        if get_origin(hint) is Unpack:
            (group,) = get_args(hint)
            keys = group.__annotations__.items()  # those of its own module first, then those of others
            ordered = sorted(keys, key=lambda one: one[1].__forward_module__ != group.__module__)
            every = [_key(*one) for one in ordered]
        else:
            every = [_parameter(name, parameter.annotation, names, parameter.default)]
        found += filter(None, every)
    return found


@cache
def _key(name: str, annotation: ForwardRef) -> CommandParameter | None:
    home = vars(sys.modules[str(annotation.__forward_module__)])
    found = _parameter(name, annotation, _names(home))
    return found and replace(found, default=found.option.default)


def _parameter(
    name: str, annotation: Any, names: Mapping[str, Any], default: Any = None
) -> CommandParameter | None:
    hint = _evaluate(annotation, names)
    if get_origin(hint) is not Annotated:
        return None
    kind, *notes = get_args(hint)
    for note in notes:
        if isinstance(note, Declaration):
            return CommandParameter(name, _evaluate(kind, names), default, note)
    return None


def _names(module: dict[str, Any]) -> Mapping[str, Any]:
    """Names of a module and of this one."""
    return vars(builtins) | globals() | module


def _alternatives(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) in (Union, UnionType):
        return get_args(kind)
    return (kind,)


def _check_type(one: CommandParameter, value: object) -> None:
    """Refuse what a parameter does not take; of sequences and mappings the kind alone counts."""
    kinds = [get_origin(kind) or kind for kind in _alternatives(one.type)]
    if any(_takes(kind, value) for kind in kinds):
        return
    words = dict.fromkeys(
        getattr(kind, "__forward_arg__", None) or _WORDS.get(kind) or kind.__name__
        for kind in kinds
        if kind is not type(None)
    )
    raise ValueError(f"{one.name} must be {join_words(words, 'or')}, not {show_value(value)}")


def _takes(kind: Any, value: object) -> bool:
    if kind in (Any, bool, Literal):  # which words there are, the command says with the nearest one
        return True
    if isinstance(kind, ForwardRef):
        return not isinstance(value, _PLAIN)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real)
    if kind is Sequence and isinstance(value, str):
        return False
    return isinstance(value, kind)


def _evaluate(annotation: Any, names: Mapping[str, Any]) -> Any:
    """The type that is annotated; of a type that is imported for type checkers alone there is only the name."""
    text = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation
    if not isinstance(text, str):
        return text
    code = compile(text, "an annotation", "eval")
    return eval(code, {name: ForwardRef(name) for name in code.co_names}, names)


def _line(
    call: Callable[..., Any], parameters: Sequence[CommandParameter], show: Callable[..., int | None]
) -> Callable[..., int | None]:
    own = {one.name: one for one in declared_options(show)}
    every: list[CommandParameter] = []
    waiting = [*own.values()]
    for one in parameters:
        if one.name in own:  # what `show` has before it, comes before it
            end = waiting.index(own[one.name]) + 1
            every += waiting[:end]
            del waiting[:end]
        else:
            every.append(one)
    every += waiting
    every = [one for one in every if not one.option.python]
    makers = {one.name: one.option.made_by for one in every if one.option.made_by is not None}

    def line(**typed: Any) -> int | None:
        for one in every:
            if one.default is True:  # the flag turns it off
                typed[one.name] = not typed[one.name]
        # Others have their defaults.
        given = {name: value for name, value in typed.items() if value is not None}
        for name, make in makers.items():
            given[name] = make(
                **{one.name: given.pop(one.name) for one in declared_options(make) if one.name in given}
            )
        mine = {name: given.pop(name) for name in own if name in given}
        return show(partial(call, **given), **mine)

    shown = [*_typer_parameters(every)]
    vars(line)["__signature__"] = inspect.Signature(shown)
    line.__doc__ = re.split(r"\n\n(?:Args|Returns|Raises):\n", inspect.getdoc(call) or "")[0]
    line.__annotations__ = {one.name: one.annotation for one in shown}
    return line


def _typer_parameters(parameters: Sequence[CommandParameter]) -> Iterator[inspect.Parameter]:
    for one in parameters:
        if one.option.made_by is not None:
            first, *others = declared_options(one.option.made_by)
            yield from _typer_parameters(
                [CommandParameter(first.name, first.type, one.default, first.option), *others]
            )
        else:
            declaration = one.option
            default = one.default
            kind, is_list = _read_as(one)
            more = {"help": declaration.help, "min": declaration.least, **declaration.more}
            flags = declaration.flags
            if kind is bool and not flags:
                name = f"no-{one.name}" if default else one.name
                flags = ("--" + name.replace("_", "-"),)
            if default is True:
                default = False
            if is_list:
                more["callback"] = _values(declaration.splits, kind is int)
                kind = list[Path] if kind is Path else list[str]
                default = default if default is inspect.Parameter.empty else None
            if default is None:
                kind = kind | None
            if more.pop("argument", default is inspect.Parameter.empty and not flags):
                made = typer.Argument(**more)
            else:
                made = typer.Option(*flags, **more)
            yield inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, made],
            )


def _read_as(one: CommandParameter) -> tuple[Any, bool]:
    """The type that the command line reads, and whether it takes several of it."""
    kind = one.option.kind
    if kind is not None:
        if one.option.splits:
            return get_args(kind)[0], True
        return kind, False
    of_union = _alternatives(one.type)
    for each in of_union:
        if get_origin(each) in (list, tuple, Sequence):
            inner, _ = _read_as(CommandParameter(one.name, get_args(each)[0], None, Declaration("")))
            return inner, True
    for each in of_union:
        if get_origin(each) is Literal:
            return each, False
    simple = [each for each in of_union if each is not type(None)]
    if simple and all(each in _SIMPLE for each in simple):
        # An empty name of an output, read as a path, would be the folder that one is in.
        names = (str, Path) if "--output" in one.option.flags else (Path, str)
        for kind in (*names, float, int, bool):
            if kind in simple:
                return kind, False
    return str, False


def _values(splits: bool, counts: bool) -> Callable[..., list[Any] | None]:
    def read(values: list[Any] | None) -> list[Any] | None:
        if not values or not splits:
            return values
        found = split_values(map(str, values))
        if not found:
            said = ",".join(map(str, values))
            raise typer.BadParameter(
                f"{said!r} names nothing; give one value or more, with commas between"
            )
        if not counts:
            return [type(values[0])(each) for each in found]
        for each in found:
            if not (each.isdecimal() and int(each)):
                raise typer.BadParameter(
                    f"{each!r} is no whole number from 1; write numbers such as 1,8"
                )
        return [*dict.fromkeys(map(int, found))]

    return read


def as_range(layers: range | str | None) -> range | None:
    """Read a range of layers, written as Python slices it: "4:30" is layers 4 to 29."""
    if isinstance(layers, range) and layers.step != 1:
        raise ValueError(
            f"{layers} leaves layers out; give all from the first to the last, as in range(4, 30)"
        )
    if layers is None or isinstance(layers, range):
        return layers
    return parse_range(layers)


def as_list(given: str | float | Path | Program | Sequence[Any]) -> list[str]:
    """List as texts one value or several."""
    if isinstance(given, str | float | Path | Program):
        return [str(given)]
    return [str(one) for one in given]


def as_several(given: Any) -> Sequence[Any]:
    """A sequence of one value or several."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        return given
    return [given]


def warn(notes: Iterable[str]) -> None:
    """Warn of each."""
    for note in notes:
        warnings.warn(note, stacklevel=1)
