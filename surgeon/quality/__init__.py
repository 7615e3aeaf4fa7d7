"""How well a changed model still predicts: perplexity, and divergence from the original."""
