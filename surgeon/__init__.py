"""Surgery on trained transformer language models: programs over the residual stream, edited, searched, exported, run.

    import surgeon
    model = surgeon.load("meta-llama/Llama-2-7b-hf")
    surgeon.edit(model, "A0 F0 [A1 A2] [F1 F2] A3 F3")
    surgeon.restore(model)

Importing surgeon imports nothing heavy: each name below is fetched from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surgeon.demo import demo_data, demo_model
    from surgeon.exports.saving import edit, load
    from surgeon.language.program import Fork, Program, Step, Sublayer
    from surgeon.models.edit import program_of, restore

__version__ = "0.1.0"

__all__ = [
    "Fork",
    "Program",
    "Step",
    "Sublayer",
    "__version__",
    "demo_data",
    "demo_model",
    "edit",
    "export",
    "load",
    "program_of",
    "restore",
]

_HOMES = {
    "Fork": "surgeon.language.program",
    "Program": "surgeon.language.program",
    "Step": "surgeon.language.program",
    "Sublayer": "surgeon.language.program",
    "demo_data": "surgeon.demo",
    "demo_model": "surgeon.demo",
    "edit": "surgeon.exports.saving",
    "export": "surgeon.exports.in_memory",
    "load": "surgeon.exports.saving",
    "program_of": "surgeon.models.edit",
    "restore": "surgeon.models.edit",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
