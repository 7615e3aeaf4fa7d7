"""Where a model's files lie: in a folder, in the hub's cache, or in ours, for what is converted first."""

from __future__ import annotations

import re
from pathlib import Path

from surgeon.checkpoint.belongings import patterns_for_the_hub
from surgeon.checkpoint.gguf import convert_gguf
from surgeon.checkpoint.offline import fetching
from surgeon.checkpoint.read import PICKLE, PICKLES, UNPICKLE
from surgeon.demo import demo_model
from surgeon.errors import shown
from surgeon.named import GGUF, HOW_TO_NAME, hub_name, on_disk

DEMO = "demo"
# Of a model on the hub: what it consists of, what goes on with it, and code that a configuration may name.
WANTED = ("*.json", "*.safetensors", "README.md", "*.py", *patterns_for_the_hub())


def locate(path_or_name: str | Path) -> Path:
    """The folder of a model given as a folder, as "demo" for the one that ships with surgeon, or as a hub name.

    A hub model is downloaded, or taken from the hub's cache, at the revision that is named. A GGUF file, here or on the
    hub, is converted into a folder, or has been (`convert_gguf`).

    Raises:
        FileNotFoundError: if it is neither.
        ValueError: if it is no text and no path, or an address of something else than a model on the hub; or as
            `convert_gguf` does.
    """
    if not isinstance(path_or_name, str | Path):
        raise ValueError(
            f"a model is given by its folder or its name on the hub, not by {type(path_or_name).__name__} "
            f"{shown(path_or_name)}"
        )
    name = str(path_or_name)
    there = on_disk(path_or_name)
    if there is not None:
        if there.suffix.lower() == GGUF and not there.is_dir():
            return convert_gguf(there)
        if not there.is_dir():
            pickled = there.suffix.lower() in PICKLES
            raise FileNotFoundError(
                f"{there} is {PICKLE if pickled else 'a file'}; a model is a folder with config.json and *.safetensors"
                f"{f' ({UNPICKLE})' if pickled else ''}"
            )
        return there
    if name == DEMO:
        return demo_model()
    if (named := hub_name(name)) is None:
        raise FileNotFoundError(f"there is no model folder {name}; {HOW_TO_NAME}")
    with fetching(str(named), "", "check the name and the connection, or give the path of a local folder"):
        from huggingface_hub import snapshot_download

        wanted = [*WANTED]
        if named.file is not None:
            wanted = [re.sub(r"-\d{5}(-of-\d{5}\.)", r"-*\1", named.file)]  # all parts of a split one
        folder = Path(snapshot_download(named.repository, revision=named.revision, allow_patterns=wanted))
    if named.file is None:
        return folder
    if not (folder / named.file).is_file():
        raise FileNotFoundError(
            f"{named.repository} has no file {named.file} on the hub; look up what its files are called"
        )
    return locate(folder / named.file)
