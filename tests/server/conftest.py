"""One server for all tests that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from openai import OpenAI

    from tests.server.servers import Server


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model; not to be changed."""
    from tests.tiny_models import chat_checkpoint

    return chat_checkpoint(tmp_path_factory.mktemp("served") / "tiny-chat")


@pytest.fixture(scope="session")
def server(chat_model: Path) -> Iterator[Server]:
    """It on two ranks; what test_connections.py floods is started as a user does."""
    from tests.server.servers import serving

    with serving(str(chat_model), "--tp", "2", "--max-batch", "4", "--max-waiting", "8") as started:
        yield started


@pytest.fixture(scope="session")
def client(server: Server) -> OpenAI:
    """OpenAI's own client; it tries nothing twice."""
    from openai import OpenAI

    from tests.waiting import PATIENCE

    return OpenAI(base_url=f"{server.url}/v1", api_key="not asked for", max_retries=0, timeout=PATIENCE)
