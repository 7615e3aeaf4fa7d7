"""The command line: one file per command, and app.py, which registers them."""
