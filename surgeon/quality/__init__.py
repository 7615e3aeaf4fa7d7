"""Quality of a changed model: perplexity, and divergence from the original."""

DEFAULT_TOKENS = 8192
DEFAULT_WINDOW = 512
