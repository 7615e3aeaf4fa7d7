"""The sections of the page, one file for each kind of run; a new kind is a file here and a line in `KINDS`."""

from typing import Any

from surgeon.findings.runs import Kind
from surgeon.findings.sections.checkpoint import CHECKPOINT
from surgeon.findings.sections.evaluation import EVALUATION
from surgeon.findings.sections.explore import EXPLORATION
from surgeon.findings.sections.heal import HEALING
from surgeon.findings.sections.predict import PREDICTION
from surgeon.findings.sections.scan import SCAN
from surgeon.findings.sections.search import SEARCH
from surgeon.findings.sections.sensitivity import SENSITIVITY
from surgeon.findings.sections.similarity import SIMILARITY
from surgeon.findings.sections.spectrum import SPECTRUM
from surgeon.findings.sections.train import SCRATCH

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
