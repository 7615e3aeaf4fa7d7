"""Surgery on trained transformer language models: programs over the residual stream, edited, searched, exported, run.

    import surgeon
    model = surgeon.open("meta-llama/Llama-2-7b-hf")    # its configuration and the headers of its files, no weights
    scan = surgeon.scan(model, "text.txt", "runs/scan", operations=["lp"])    # what `surgeon scan` does
    print(scan.table())
    loaded = surgeon.load("meta-llama/Llama-2-7b-hf")    # a `transformers` model
    surgeon.edit(loaded, pair="1:7")    # or a program's text, or the path of a recipe
    surgeon.restore(loaded)

Importing surgeon imports nothing heavy: each name below is fetched from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from surgeon.version import __version__

if TYPE_CHECKING:
    from surgeon.commands.bench import bench
    from surgeon.commands.calibrate import calibrate
    from surgeon.commands.chat import chat
    from surgeon.commands.check import check, families
    from surgeon.commands.edit import edit
    from surgeon.commands.evaluate import evaluate
    from surgeon.commands.explore import explore
    from surgeon.commands.export import export
    from surgeon.commands.generate import generate
    from surgeon.commands.heal import heal
    from surgeon.commands.predict import predict
    from surgeon.commands.report import report
    from surgeon.commands.scan import scan
    from surgeon.commands.search import search
    from surgeon.commands.search_problem import SearchProblem
    from surgeon.commands.sensitivity import sensitivity
    from surgeon.commands.serve import serve
    from surgeon.commands.similarity import similarity
    from surgeon.commands.spectrum import spectrum
    from surgeon.commands.train import train
    from surgeon.demo import demo_data
    from surgeon.exports.in_memory import load
    from surgeon.language.program import Fork, Program, Step
    from surgeon.language.recipe import Recipe, read_recipe
    from surgeon.language.sublayer import Sublayer
    from surgeon.models.edit import program_of, restore
    from surgeon.named import demo_model
    from surgeon.opened import Model
    from surgeon.opened import open_model as open
    from surgeon.runtime.worker.rank import RankOptions
    from surgeon.searches.search import SurgerySampler
    from surgeon.training.racks.run import RackOptions
    from surgeon.training.settings import Distillation, TrainSettings

# Where names come from; those that are not here are commands, with a file of their own. A colon: its name there.
_ELSEWHERE = {
    "Distillation": "surgeon.training.settings",
    "Fork": "surgeon.language.program",
    "Model": "surgeon.opened",
    "Program": "surgeon.language.program",
    "RackOptions": "surgeon.training.racks.run",
    "RankOptions": "surgeon.runtime.worker.rank",
    "Recipe": "surgeon.language.recipe",
    "SearchProblem": "surgeon.commands.search_problem",
    "Step": "surgeon.language.program",
    "Sublayer": "surgeon.language.program",
    "SurgerySampler": "surgeon.searches.search",
    "TrainSettings": "surgeon.training.settings",
    "demo_data": "surgeon.demo",
    "demo_model": "surgeon.named",
    "families": "surgeon.commands.check",
    "load": "surgeon.exports.in_memory",
    "open": "surgeon.opened:open_model",
    "program_of": "surgeon.models.edit",
    "read_recipe": "surgeon.language.recipe",
    "restore": "surgeon.models.edit",
    "search": "surgeon.commands.search",
}
__all__ = [
    "Distillation",
    "Fork",
    "Model",
    "Program",
    "RackOptions",
    "RankOptions",
    "Recipe",
    "SearchProblem",
    "Step",
    "Sublayer",
    "SurgerySampler",
    "TrainSettings",
    "__version__",
    "bench",
    "calibrate",
    "chat",
    "check",
    "demo_data",
    "demo_model",
    "edit",
    "evaluate",
    "explore",
    "export",
    "families",
    "generate",
    "heal",
    "load",
    "open",
    "predict",
    "program_of",
    "read_recipe",
    "report",
    "restore",
    "scan",
    "search",
    "sensitivity",
    "serve",
    "similarity",
    "spectrum",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, there = _ELSEWHERE.get(name, f"surgeon.commands.{name}").partition(":")
    value = getattr(import_module(home), there or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
