"""The sections of the page, one file for each kind of run; a new kind is a file here and a line in `KINDS`."""

from surgeon.report.runs import Kind
from surgeon.report.sections.checkpoint import CHECKPOINT
from surgeon.report.sections.evaluation import EVALUATION
from surgeon.report.sections.heal import HEALING
from surgeon.report.sections.predict import PREDICTION
from surgeon.report.sections.scan import SCAN
from surgeon.report.sections.search import SEARCH
from surgeon.report.sections.sensitivity import SENSITIVITY
from surgeon.report.sections.similarity import SIMILARITY
from surgeon.report.sections.spectrum import SPECTRUM
from surgeon.report.sections.train import SCRATCH

# In the order of the page.
KINDS: tuple[Kind, ...] = (
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
