"""One rack's process: `python -m surgeon.training.racks.process RUN RACK --meet HOST:PORT`.

The supervisor starts all of them, and again where one is killed. By hand, on several machines, each has a copy of the
prepared RUN (racks.json, texts.arrow, texts.safetensors, start/), and every rack gets the same address, of rack 0's
machine, at a free port:

    python -m surgeon.training.racks.process RUN 1 --meet 10.0.0.1:4000

Where one ends, all do, and the same commands resume from the newest checkpoint that all racks have. When all are done,
and every RUN/rack-R is back in RUN, the command that prepared it gathers the result. Like torchrun's, the connections
are neither encrypted nor authenticated: the machines need a network of their own.

Replicas of a rack are started by torchrun, with the same arguments, and see one folder RUN:

    torchrun --standalone --nproc-per-node 2 -m surgeon.training.racks.process RUN 1 --meet 10.0.0.1:4000

Each exchanges its windows' streams with the replica of its number in other racks, and finds its own rack's by torchrun
(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does export it
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from surgeon.errors import Diverged, first_line
from surgeon.processes.children import when_parent_ends
from surgeon.processes.files import write_json
from surgeon.processes.rendezvous import connect_store, key_prefix, serve_store
from surgeon.processes.sockets import interface_of, interface_variables
from surgeon.processes.torchrun import TorchrunEnvironment
from surgeon.quality.head import HeldOutQuality
from surgeon.training.arguments import gather_whole, set_whole, share_of_batch
from surgeon.training.checkpoints import (
    checkpoints_of,
    fault_of,
    naming_ended_process,
    remove_checkpoint,
)
from surgeon.training.racks.exchange import PATIENCE, RackExchange, RackStreams
from surgeon.training.racks.model import open_rack
from surgeon.training.racks.rack_log import RackLog, paced_loss
from surgeon.training.racks.run_files import (
    PROCESS_FILE,
    RESULT_FILE,
    RacksPlan,
    parse_averaging,
    rack_folder,
    read_texts,
    start_file,
    teacher_file,
)
from surgeon.training.racks.task import rack_task, train_rack

FAILED = 1  # exit statuses
DIVERGED = 4
Address = tuple[str, int]


def open_store(meet: Address, index: int, is_held: bool, away: float) -> Store:
    """Open the store in which racks find each other, on rack 0's machine.

    Args:
        index: of this process's rack: the first one's holds the store.
        is_held: whether another process holds it already.
        away: seconds to wait for the other racks.
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
    """Name the network interface towards an address, such as eth0; None if unknown."""
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
    """Have all racks resume from the newest checkpoint that every one of them has; later ones are removed.

    A rack that is done begins there again, too, if another one is not, which needs its streams.

    Args:
        first: whether this is the first of the rack's processes, which answers for all of them.
        away: seconds to wait for the others.

    Returns:
        Whether all racks are done.
    """
    folder = rack_folder(run, index)
    if first:
        done = (folder / RESULT_FILE).is_file()
        store.set(f"checkpoints of {index}", json.dumps([done, list_whole_checkpoints(folder)]))
    said = [json.loads(_wait_for(store, f"checkpoints of {rack}", rack, away)) for rack in range(racks)]
    all_done = all(done for done, _ in said)
    if first:
        if not all_done:
            (folder / RESULT_FILE).unlink(missing_ok=True)
            common = find_newest_common([steps for _, steps in said])
            for step, path in checkpoints_of(folder).items():
                if step > common:
                    remove_checkpoint(path)
        store.set(f"{index} is ready", "")
    _wait_for(store, f"{index} is ready", index, away)
    return all_done


def _wait_for(store: Store, key: str, rack: int, away: float) -> bytes:
    try:
        return bytes(store.get(key))
    except RuntimeError:
        raise OSError(
            f"rack {rack} has not come within {away:g} s; start it, then the same command goes on"
        ) from None


def list_whole_checkpoints(folder: Path) -> list[int]:
    """Steps of a run's whole checkpoints."""
    return [step for step, path in checkpoints_of(folder).items() if fault_of(path) is None]


def find_newest_common(steps: Sequence[Sequence[int]]) -> int:
    """The last step that all have a checkpoint of; 0, the beginning, without one."""
    return max(set.intersection(*map(set, steps)), default=0)


def average_codas(codas: list[Tensor]) -> Tensor:
    """Average the racks' codas, (numbers,) each, summed in the order of the racks, so that all get the same."""
    total = codas[0].clone()
    for coda in codas[1:]:
        total += coda
    return total / len(codas)


@dataclass(eq=False)
class RackKeeper(TrainerCallback):
    """Keeps a rack in step with the others: checkpoints, so that all have one in common, and averaged codas.

    The last rack's coda, the model's own end, takes part. Each rack's optimiser keeps its own state.

    Args:
        exchange: with the other racks.
        parameters: gives those of this rack's coda, by names that are the same in all racks; sharding replaces them
            before the first step.
        every: steps, after which a coda is set to the mean of all racks', waiting for the slowest; None for never.
    """

    exchange: RackExchange
    log: RackLog
    parameters: Callable[[], Mapping[str, nn.Parameter]]
    every: int | None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.log.begin_computing()

    @torch.no_grad()
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Average codas, and wait for the others before a checkpoint is written, and the oldest one removed."""
        del args
        if self.every is not None and state.global_step % self.every == 0:
            coda = [one for _, one in sorted(self.parameters().items())]
            own = torch.cat([gather_whole(one).flatten().cpu() for one in coda])
            mean = average_codas(self.exchange.gather(state.global_step, own))
            for one, part in zip(coda, mean.split([one.numel() for one in coda]), strict=True):
                set_whole(one, part.view(one.shape))
        if control.should_save:
            self.exchange.before_checkpoint()

    def on_save(self, *_: Any, **__: Any) -> None:
        self.exchange.checkpoint_saved()
        self.log.write()


def run_rack(run: Path, index: int, meet: Address, is_held: bool) -> None:
    """Train one rack, or resume it, until all racks are done; each of its replicas calls this.

    Args:
        meet: address of the store in which all find each other.
        is_held: whether another process holds it already.

    Raises:
        FileNotFoundError: if the run was not prepared.
        ValueError, OSError: as `train`; and if another rack does not come, or ends, a disk is full, or a port is taken.
    """
    plan = RacksPlan.read(run)
    if not 0 <= index < plan.racks:
        raise ValueError(f"{run} has racks 0 to {plan.racks - 1}, and no rack {index}")
    wanted = plan.options.replicas
    there = int(os.environ.get("WORLD_SIZE", "1"))
    replica = int(os.environ.get("RANK", "0"))
    if there != wanted:
        if wanted == 1:
            how = "without torchrun"
        else:
            how = f"with torchrun --standalone --nproc-per-node {wanted}"
        raise ValueError(
            f"a rack of this run has {wanted} processes, and this one has {there}; start it {how}"
        )
    folder = rack_folder(run, index, replica)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PROCESS_FILE, {"process": os.getpid()})
    if not is_held:
        os.environ.update(interface_variables(interface_to(meet)))
    away = plan.options.away
    store = open_store(meet, index, is_held or replica > 0, away)
    if agree(store, run, index, plan.racks, replica == 0, away):
        return
    log = RackLog(folder)
    ahead = plan.options.ahead * share_of_batch(plan.settings, plan.options.replicas)
    exchange = RackExchange(
        PrefixStore(str(replica), store), index, plan.racks, ahead, plan.options.link, log
    )
    PartialState(cpu=plan.device == "cpu", timeout=PATIENCE)
    rack = open_rack(start_file(run, index))
    texts = read_texts(run)
    settings = plan.settings
    streams = RackStreams(
        settings.batch, None if rack.is_first else exchange, None if rack.is_last else exchange
    )
    teacher = None
    if settings.distillation is not None:
        teacher = open_rack(teacher_file(run, rack.index))
    held_out = HeldOutQuality(texts.held_out, None)
    task = rack_task(rack, held_out, streams, teacher, settings.distillation)
    every = parse_averaging(plan.options.average)
    task = replace(task, callbacks=[RackKeeper(exchange, log, rack.coda_parameters, every)])
    if plan.options.pace:
        assert task.towards is not None
        task = replace(task, towards=paced_loss(task.towards, plan.options.pace[rack.index], log))
    train_rack(rack, task, texts, settings, run, plan.identity, plan.device)
    exchange.finish()
    log.write()


def _parse_address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write it as HOST:PORT")
    return host.strip("[]"), int(port)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a rack by its command line."""
    parser = argparse.ArgumentParser(
        prog="python -m surgeon.training.racks.process", description=__doc__.split("\n")[0]
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run that was prepared")
    parser.add_argument("rack", type=int, metavar="RACK", help="which rack, from 0")
    parser.add_argument(
        "--meet",
        type=_parse_address,
        required=True,
        metavar="HOST:PORT",
        help="of the machine of rack 0; the same for all",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # of a supervisor
    given = parser.parse_args(arguments)
    if given.child:
        when_parent_ends(lambda: os._exit(FAILED))
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        with naming_ended_process():
            run_rack(given.run, given.rack, given.meet, is_held=given.child)
    except Diverged as error:
        _fail(given.rack, first_line(error), DIVERGED)
    except (ValueError, OSError) as error:
        _fail(given.rack, first_line(error))


def _fail(rack: int, said: str, status: int = FAILED) -> NoReturn:
    print(f"error: rack {rack}: {said}", file=sys.stderr, flush=True)
    os._exit(status)  # threads may still wait for other racks


if __name__ == "__main__":
    main()
