"""Spaces: the kinds of edits that a search chooses among, one short file each.

Every module of this folder is imported here, which registers its spaces.
"""

from importlib import import_module
from pkgutil import iter_modules

from surgeon.searches.spaces.base import DEEPER, SPACES, Space, parse_spaces, register, usual_spaces

__all__ = ["DEEPER", "SPACES", "Space", "parse_spaces", "register", "usual_spaces"]

for _name in sorted(found.name for found in iter_modules(__path__)):
    import_module(f"{__name__}.{_name}")
