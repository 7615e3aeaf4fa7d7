"""What is around the text decoder of a checkpoint: tensors, and entries of config.json, which are carried on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from surgeon.checkpoint.tensor_file import TensorFiles
from surgeon.models.wrappers import Prefixes, Wrapper, renamed

TIED = "tie_word_embeddings"
# Entries of a parsed configuration that are not of the decoder alone, or say how it was read.
_NOT_OF_THE_TEXT = frozenset(("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", TIED))


@dataclass(frozen=True)
class Wrapped:
    """A folder's text decoder inside its wrapper.

    Attributes:
        files: all tensors of the folder, by the names that they are stored under.
        entries: its config.json.
    """

    wrapper: Wrapper
    files: TensorFiles
    entries: dict[str, Any]

    @cached_property
    def _prefixes(self) -> Prefixes:
        return self.wrapper.prefixes_among(self.files.names())

    def text_names(self) -> dict[str, str]:
        """The text decoder's tensors: their names in a causal language model, and those that they are stored under."""
        found = ((renamed(name, self._prefixes), name) for name in self.files.names())
        return {own: name for own, name in found if own is not None}

    def stored_name(self, name: str) -> str:
        """What files in this folder's way call a tensor of the text decoder."""
        found = renamed(name, [(own, stored) for stored, own in self._prefixes])
        assert found is not None, name
        return found

    @property
    def around(self) -> list[str]:
        """The stored names of the tensors that are not the text decoder's."""
        return [name for name in self.files.names() if renamed(name, self._prefixes) is None]

    def stock_class(self) -> tuple[Any, Any]:
        """The class of `transformers` that builds the whole model, and its configuration."""
        from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        config = CONFIG_MAPPING[self.wrapper.model_type].from_dict(self.entries)
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)], config

    @property
    def loading(self) -> dict[str, str]:
        """What makes `transformers` load the text decoder alone: patterns of stored names, and what replaces them."""
        return {f"^{stored.replace('.', '[.]')}": own for stored, own in self._prefixes if stored != own}

    def around_text(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of the same wrapper around another text decoder.

        What does not differ from this one's stays as it is written here: entries may have more to say than a text needs
        (positions in images), or leave out what is the default.

        Args:
            config: the entries of a causal language model's config.json.
        """
        from transformers import CONFIG_MAPPING  # takes a second, and who only reads does without

        before = self.wrapper.text_entries(self.entries)
        read = CONFIG_MAPPING[before["model_type"]].from_dict
        old, new = (read(dict(one)).to_dict() for one in (before, config))
        changed = {key: new[key] for key in new.keys() - _NOT_OF_THE_TEXT if key not in old or old[key] != new[key]}
        entries = self.entries | {self.wrapper.text: self.entries[self.wrapper.text] | changed}
        if before[TIED] == config.get(TIED, before[TIED]):
            return entries
        return entries | {TIED: config[TIED]}
