"""What LP pairs cost on hardware that a search is for, as the cost model predicts it."""

from __future__ import annotations

from surgeon.cost.hardware import Hardware
from surgeon.cost.predict import Deployment, Workload, predict
from surgeon.cost.shapes import ModelShapes
from surgeon.search.budget import Price
from surgeon.search.space import contiguous_windows, pairs_program


def predicted_price(shapes: ModelShapes, hardware: Hardware, workload: Workload, deployment: Deployment) -> Price:
    """Seconds per token with so many pairs in one stretch; where they lie makes no difference to time."""

    def price(pairs: int) -> float:
        window = contiguous_windows(shapes.layers, pairs)[0] if pairs else ()
        program = pairs_program(window, shapes.layers, shapes.family.steps_per_layer)
        return predict(shapes, program, hardware, workload, deployment).per_token

    return price
