"""Rank correlations of a similarity's measures with what edits cost."""

from __future__ import annotations

import pandas as pd

from scripts.real.orders import MEASURES, correlations


def test_a_layer_is_held_against_the_edits_that_end_with_it() -> None:
    similarity = pd.DataFrame({"layer": range(4), **{name: [9.0, 1.0, 2.0, 3.0] for name in MEASURES}})
    terms = pd.DataFrame(
        {"edit": ["pair 0:2", "pair 1:3", "pair 2:4"], "last": [1, 2, 3], "divergence": [5.0, 7.0, 8.0]}
    )
    assert correlations(similarity, terms).loc["pair (3)"].tolist() == [1.0] * len(MEASURES)
    falling = terms.assign(divergence=[8.0, 7.0, 5.0])
    assert correlations(similarity, falling).loc["pair (3)"].tolist() == [-1.0] * len(MEASURES)
