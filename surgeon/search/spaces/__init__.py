"""Spaces: the kinds of edits that a search chooses among, one short file each."""

from surgeon.search.spaces.base import SPACES, Searched, Space, parse_spaces
from surgeon.search.spaces.pair import Pairs, ParallelGroups

__all__ = ["SPACES", "Pairs", "ParallelGroups", "Searched", "Space", "parse_spaces"]
