"""Whether cheap measures order edits as their divergence does: rank correlations (Spearman) on one model.

    python scripts/real/orders.py SIMILARITY SEARCH ...

SIMILARITY is a folder of `surgeon similarity`, each SEARCH one of `surgeon search` (scripts/real/compare.py leaves them
in FOLDER/search) whose single edits were measured. A layer's measures are held against the edits that end with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

MEASURES = ("cka_attention", "cka_mlp", "block_influence", "attention_size", "mlp_size")


def correlations(similarity: pd.DataFrame, terms: pd.DataFrame) -> pd.DataFrame:
    """A row for each kind of edit of one search, with its correlation with each measure."""
    kinds = terms["edit"].str.replace(r" \d+:\d+", "", regex=True)
    found = {}
    for kind, edits in terms.groupby(kinds):
        measures = (
            similarity.set_index("layer")[[*MEASURES]].reindex(edits["last"]).reset_index(drop=True)
        )
        damage = edits["divergence"].reset_index(drop=True)
        found[f"{kind} ({len(edits)})"] = measures.corrwith(damage, method="spearman")
    return pd.DataFrame(found).T.round(2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("similarity", type=Path)
    parser.add_argument("searches", type=Path, nargs="+")
    options = parser.parse_args()
    similarity = pd.read_csv(options.similarity / "similarity.csv")
    tables = [correlations(similarity, pd.read_csv(search / "terms.csv")) for search in options.searches]
    print(pd.concat(tables).to_string())


if __name__ == "__main__":
    main()
