"""Models of any program from scratch: their configurations, how they are built, and how they are written."""
