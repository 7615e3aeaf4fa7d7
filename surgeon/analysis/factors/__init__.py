"""Low-rank factors: what is measured for them, how they are made, and where they are kept."""
