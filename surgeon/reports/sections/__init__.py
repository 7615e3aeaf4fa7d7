"""The sections of the page, one file for each kind of run; a new kind is a file here and a line in `KINDS`."""

from typing import Any

from surgeon.reports.runs import Kind
from surgeon.reports.sections.checkpoint import CHECKPOINT
from surgeon.reports.sections.evaluation import EVALUATION
from surgeon.reports.sections.explore import EXPLORATION
from surgeon.reports.sections.heal import HEALING
from surgeon.reports.sections.predict import PREDICTION
from surgeon.reports.sections.scan import SCAN
from surgeon.reports.sections.search import SEARCH
from surgeon.reports.sections.sensitivity import SENSITIVITY
from surgeon.reports.sections.similarity import SIMILARITY
from surgeon.reports.sections.spectrum import SPECTRUM
from surgeon.reports.sections.train import SCRATCH

# In the order of the page.
KINDS: tuple[Kind[Any], ...] = (
    EXPLORATION,
    SCAN,
    SIMILARITY,
    SENSITIVITY,
    SPECTRUM,
    SEARCH,
    HEALING,
    SCRATCH,
    CHECKPOINT,
    EVALUATION,
    PREDICTION,
)
