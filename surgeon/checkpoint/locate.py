"""Locating a model: a folder, the hub's cache, or ours, for GGUF files; without a network nothing is retried."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from surgeon.checkpoint.belongings import patterns_for_the_hub
from surgeon.checkpoint.gguf import convert_gguf
from surgeon.checkpoint.stored import PICKLE, PICKLES, UNPICKLE
from surgeon.demo import demo_model
from surgeon.errors import shown
from surgeon.named import GGUF, HOW_TO_NAME, hub_name, is_gguf, on_disk

SECONDS = 5.0  # that a connection may take


@contextmanager
def fetching(name: str, what: str, advice: str) -> Iterator[None]:
    """Fetch something of a hub model in the block; whatever goes wrong is FileNotFoundError, ending in `advice`."""
    try:
        with without_retries():
            yield
    except Exception as error:
        raise FileNotFoundError(
            f"{name} is no folder here, and {what}could not be fetched from the hub ({type(error).__name__}); {advice}"
        ) from error


@contextmanager
def without_retries() -> Iterator[None]:
    """Work as under HF_HUB_OFFLINE=1 if the hub cannot be reached.

    Its libraries would try for half a minute, for every file, before they look into their cache.
    """
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or hub_answers(constants.ENDPOINT):
        yield
        return
    before = datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False
        datasets.config.HF_HUB_OFFLINE = before


def hub_answers(address: str) -> bool:
    """Tell whether the address accepts connections; behind a proxy it may."""
    url = urlsplit(address)
    if url.scheme in getproxies() or url.hostname is None:
        return True
    try:
        socket.create_connection(
            (url.hostname, url.port or (80 if url.scheme == "http" else 443)), SECONDS
        ).close()
    except OSError:
        return False
    return True


DEMO = "demo"
CONFIG = "config.json"
# Of a model on the hub: what it consists of, what goes on with it, and code that a configuration may name.
WANTED = ("*.json", "*.safetensors", "README.md", "*.py", *patterns_for_the_hub())


def locate(path_or_name: str | Path) -> Path:
    """Return the folder of a model: itself, "demo" for the one that ships with surgeon, or a hub name's download.

    A GGUF file, here or on the hub, is converted into a folder (`convert_gguf`). Without a model it is
    FileNotFoundError.
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
    with fetching(
        str(named), "", "check the name and the connection, or give the path of a local folder"
    ):
        from huggingface_hub import snapshot_download

        wanted = [*WANTED]
        if named.file is not None:
            wanted = [re.sub(r"-\d{5}(-of-\d{5}\.)", r"-*\1", named.file)]  # all parts of a split one
        folder = Path(
            snapshot_download(named.repository, revision=named.revision, allow_patterns=wanted)
        )
    if named.file is None:
        return folder
    if not (folder / named.file).is_file():
        raise FileNotFoundError(
            f"{named.repository} has no file {named.file} on the hub; look up what its files are called"
        )
    return locate(folder / named.file)


def find_config(what: str | Path) -> Path:
    """Return the config.json of a model: its folder or itself, demo, or a hub name, of which only it is fetched."""
    name = str(what)
    there = on_disk(what)
    if is_gguf(what):  # which is one file with all that there is
        return locate(what) / CONFIG
    if there is not None and not there.is_dir():
        if there.suffix.lower() != ".json":
            raise FileNotFoundError(
                f"{there} is no {CONFIG}; give one, a folder with one, a name on the hub, or a recipe"
            )
        return there
    if there is not None or name == DEMO or (named := hub_name(name)) is None:
        return locate(what) / CONFIG
    advice = "check the name and the connection, or give the path of a config.json"
    with fetching(str(named), "its configuration ", advice):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(named.repository, CONFIG, revision=named.revision))
