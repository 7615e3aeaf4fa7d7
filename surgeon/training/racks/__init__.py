"""Racks: training a model cut by depth, every part with a loss of its own and nothing that comes back."""
