"""What tests of scripts share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> ModuleType:
    """The script that a test module called test_NAME is about, as a module."""
    name = request.module.__name__.rpartition("test_")[2]
    if str(SCRIPTS) not in sys.path:  # where scripts find each other when they are run
        sys.path.append(str(SCRIPTS))
    specification = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module
