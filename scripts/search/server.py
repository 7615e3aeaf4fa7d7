"""A PostgreSQL server of one's own, in a folder, on 127.0.0.1: started, killed, started again."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

USER = "surgeon"
PASSWORD = "not a secret"
DATABASE = "searches"
UNPRIVILEGED = "postgres"  # whom Debian's package makes; PostgreSQL refuses to run as root
SECONDS = 60.0


def program(name: str) -> str:
    """Where a program of PostgreSQL lies: Debian keeps those of every version apart.

    Raises:
        FileNotFoundError: if it is not installed.
    """
    every = sorted(
        Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3])
    )
    found = str(every[-1]) if every else shutil.which(name)
    if found is None:
        raise FileNotFoundError(
            f"{name} of PostgreSQL is not there; install it: apt-get install postgresql"
        )
    return found


@dataclass
class Server:
    """A server with a database, a user and a password.

    Attributes:
        folder: empty; the server's user gets it.
    """

    folder: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", self.port))
            self.port = one.getsockname()[1]
        if os.geteuid() == 0:
            account = pwd.getpwnam(UNPRIVILEGED)
            os.chown(self.folder, account.pw_uid, account.pw_gid)

    @property
    def address(self) -> str:
        """What `--storage` takes; the password is in PGPASSWORD."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{DATABASE}"

    def make(self) -> None:
        """Make its files, start it, and make the database."""
        secret = self.folder / "password"
        self._run(["sh", "-c", f"umask 077; printf '%s' '{PASSWORD}' > '{secret}'"])
        own = ["-U", USER, f"--pwfile={secret}", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        self._run([program("initdb"), "-D", str(self.folder / "data"), *own])
        self.start()
        to = ["-h", "127.0.0.1", "-p", str(self.port), "-U", USER]
        self._run([program("createdb"), *to, DATABASE])

    def start(self) -> None:
        """Start it, and wait until it answers; what a killed one has left may hold it up for a moment."""
        ending = time.monotonic() + SECONDS
        while time.monotonic() < ending:
            if self.process is None or self.process.poll() is not None:
                where = f"-p {self.port} -c listen_addresses=127.0.0.1 -k"
                options = [*where.split(), str(self.folder)]
                with (self.folder.parent / "postgres.log").open("ab") as log:
                    command = [program("postgres"), "-D", str(self.folder / "data"), *options]
                    self.process = subprocess.Popen(
                        command, stdout=log, stderr=log, user=self._user, start_new_session=True, cwd="/"
                    )
            ready = subprocess.run(
                [program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)], check=False
            )
            if ready.returncode == 0 and self.process.poll() is None:
                return
            time.sleep(0.2)
        raise TimeoutError("PostgreSQL does not start; postgres.log in the working folder says why")

    def kill(self) -> None:
        """End it at once, as a machine that fails does: nothing is tidied up."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def _user(self) -> str | None:
        if os.geteuid() == 0:
            return UNPRIVILEGED
        return None

    def _run(self, command: Sequence[str]) -> None:
        environment = os.environ | {"PGPASSWORD": PASSWORD}
        done = subprocess.run(
            command,
            env=environment,
            user=self._user,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
        if done.returncode:
            raise OSError(f"{Path(command[0]).name} failed: {done.stderr.strip()}")
