"""How the processes of racks find each other, and from which checkpoint all of them go on."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does export it

from surgeon.processes.rendezvous import connect_store, key_prefix, serve_store
from surgeon.processes.sockets import interface_of
from surgeon.processes.torchrun import TorchrunEnvironment
from surgeon.training.checkpoints import checkpoints_of, fault_of, remove_checkpoint
from surgeon.training.racks.run_files import RESULT_FILE, rack_folder

Address = tuple[str, int]


def open_store(meet: Address, index: int, is_held: bool, away: float) -> Store:
    """The store in which racks find each other, at an address of rack 0's machine.

    Args:
        index: of the rack whose process this is: the first one's holds the store.
        is_held: whether another process holds it already.
        away: seconds that the other racks are waited for.

    Raises:
        OSError: if the port is taken, or nobody holds the store in time.
    """
    host, port = meet
    place = TorchrunEnvironment(index, index + 1, 0, 1, host, port, patience=away)
    if index == 0 and not is_held:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            raise OSError(
                f"rack 0 cannot listen at {host}:{port} ({error.strerror or error}); give another --meet to all racks, "
                "or end what listens there"
            ) from None
        return PrefixStore(key_prefix(place), serve_store(listening, timedelta(seconds=away)))
    try:
        return connect_store(place)
    except TimeoutError:
        raise OSError(
            f"rack 0 has not come to {host}:{port} within {away:g} s; start it, then the same command goes on"
        ) from None


def interface_to(meet: Address) -> str | None:
    """The network interface by which this machine reaches an address, such as eth0; None if that cannot be told.

    Raises:
        OSError: if the address is no machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(*meet, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise OSError(
            f"{meet[0]} cannot be found from here ({error.strerror}); --meet names rack 0's machine"
        ) from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return interface_of(probe.getsockname()[0])


def agree(store: Store, run: Path, index: int, racks: int, first: bool, away: float) -> bool:
    """Have all racks go on from the newest checkpoint that every one of them has; later ones are removed.

    A rack that is done begins there again, too, if another one is not: the other one needs its streams.

    Args:
        first: whether this is the first of the rack's processes, which answers for all of them.
        away: seconds that the others are waited for.

    Returns:
        Whether all racks are done.

    Raises:
        OSError: if a rack does not come in time.
    """
    folder = rack_folder(run, index)
    if first:
        done = (folder / RESULT_FILE).is_file()
        store.set(f"checkpoints of {index}", json.dumps([done, whole_checkpoints(folder)]))
    said = [json.loads(_read(store, f"checkpoints of {rack}", rack, away)) for rack in range(racks)]
    all_done = all(done for done, _ in said)
    if first:
        if not all_done:
            (folder / RESULT_FILE).unlink(missing_ok=True)
            common = newest_common([steps for _, steps in said])
            for step, path in checkpoints_of(folder).items() if folder.is_dir() else ():
                if step > common:
                    remove_checkpoint(path)
        store.set(f"{index} is ready", "")
    _read(store, f"{index} is ready", index, away)
    return all_done


def _read(store: Store, key: str, rack: int, away: float) -> bytes:
    try:
        return bytes(store.get(key))
    except RuntimeError:
        raise OSError(f"rack {rack} has not come within {away:g} s; start it, then the same command goes on") from None


def common_step(folders: Sequence[Path]) -> int:
    """The last step that all of these racks have a whole checkpoint of; 0, the beginning, where there is none."""
    return newest_common([whole_checkpoints(folder) for folder in folders])


def whole_checkpoints(folder: Path) -> list[int]:
    """The steps of a run's checkpoints that are whole."""
    if not folder.is_dir():
        return []
    return [step for step, path in checkpoints_of(folder).items() if fault_of(path) is None]


def newest_common(steps: Sequence[Sequence[int]]) -> int:
    """The last step that all have a checkpoint of; 0, the beginning, where there is none."""
    return max(set.intersection(*map(set, steps)), default=0)
