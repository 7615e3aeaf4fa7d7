"""Racks on processes of their own, one text in flight over all of them: sequential, and as a wavefront.

Rack r holds a stretch of the model and sends the stream of every token on to rack r + 1; the last one says what comes
next. Decoded sequentially, rack 0 waits for that before it begins the next token. As a wavefront it goes on with the
token that its coda drafts, up to `window` tokens ahead of what is known; a draft that turns out wrong makes all that
is in flight behind it void (its epoch), and rack 0 begins anew with the right token. What deeper racks find waiting
they compute in one pass. Greedy: the tokens are those of plain decoding.

Messages go over TCP of this machine. A link is emulated: a message is looked at when it would have arrived. So are,
with a pace, racks that have machines of their own, which they have not here: a pass takes at least so long for every
node, however many tokens it has, as where reading the weights is what takes time; the rest of it is slept.
"""

from __future__ import annotations

import math
import multiprocessing
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from surgeon.runtime.batching.sequence import Row, Wanted
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.comm.collectives import Alone, Counts
from surgeon.runtime.comm.link import Line, Link, SystemClock
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.layers import Pass
from surgeon.runtime.model.paged_cache import angles_at
from surgeon.runtime.model.paged_layout import PagedLayout
from surgeon.runtime.plan.specification import Plan

HEADER = struct.Struct("<IIIIdI")  # epoch, first position, tokens, whether they are a prompt, due, bytes behind
TOKEN_BYTES = 4


class Message(NamedTuple):
    """Tokens on their way, with their streams; to rack 0 only tokens.

    Attributes:
        epoch: grows with every draft that was wrong and with every text.
        first: the position of the first token.
        prompt: whether they are a prompt, of which nothing but what follows it counts.
        due: when it has arrived, by the machine's clock.
    """

    epoch: int
    first: int
    tokens: list[int]
    prompt: bool
    due: float
    stream: Tensor | None


class Wire:
    """A connection to another rack, over an emulated link."""

    def __init__(self, connected: socket.socket) -> None:
        if connected.family == socket.AF_INET:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self.line = Line(Link(), SystemClock())
        self.sent = 0

    def send(self, epoch: int, first: int, tokens: list[int], prompt: bool, stream: Tensor | None) -> None:
        """Send on."""
        body = struct.pack(f"<{len(tokens)}I", *tokens)
        body += b"" if stream is None else stream.contiguous().numpy().tobytes()
        due = self.line.send(HEADER.size + len(body))
        self.sent += HEADER.size + len(body)
        self._socket.sendall(HEADER.pack(epoch, first, len(tokens), prompt, due, len(body)) + body)

    def listen(self, into: queue.SimpleQueue[Message]) -> None:
        """Put all that comes into a queue, from now on, on a thread of its own."""
        threading.Thread(target=self._listen, args=(into,), daemon=True).start()

    def _listen(self, into: queue.SimpleQueue[Message]) -> None:
        while header := self._exactly(HEADER.size):
            epoch, first, count, prompt, due, size = HEADER.unpack(header)
            body = bytearray(self._exactly(size))
            tokens = list(struct.unpack_from(f"<{count}I", body))
            stream = None
            if size > count * TOKEN_BYTES:
                stream = torch.frombuffer(body, dtype=torch.float32, offset=count * TOKEN_BYTES).view(count, -1)
            into.put(Message(epoch, first, tokens, bool(prompt), due, stream))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                return b""
            data += part
        return data


class Stretch:
    """What one rack computes: some nodes of the program, for one text.

    Attributes:
        pace: seconds that each node takes at least.
    """

    def __init__(self, plan: Plan, first: int, end: int) -> None:
        self.engine = RankEngine(plan, Alone(), torch.device("cpu"))
        self.first, self.end = first, end
        blocks = blocks_for(plan.max_tokens)
        self._cache = self.engine.new_cache(blocks)
        self._runs = ([(0, blocks)],)
        self._angles = self.engine.angles_up_to(plan.max_tokens)
        self.pace = 0.0

    def embed(self, tokens: list[int], start: int) -> Tensor:
        """The stream before the program."""
        positions = slice(start, start + len(tokens))
        return self.engine.embedded(torch.tensor(tokens), positions)

    def __call__(self, tokens: list[int], start: int, stream: Tensor) -> Tensor:
        """The stream behind the stretch, (tokens, hidden)."""
        end = time.perf_counter() + self.pace * (self.end - self.first)
        row = Row(start, tokens, self._runs, Wanted.NOTHING)
        layout = PagedLayout([row], self._cache, self._angles)
        shared = Pass(layout.attend, angles_at(self._angles, layout.positions))
        behind = self.engine.stream_after(stream, shared, self.first, self.end)
        time.sleep(max(0.0, end - time.perf_counter()))
        return behind

    def coda(self, tokens: list[int], start: int, stream: Tensor) -> int:
        """What the coda drafts behind these tokens."""
        coda = self.engine.coda
        assert coda is not None
        end = time.perf_counter() + self.pace * len(coda.layers.program)
        row = Row(start, tokens, self._runs, Wanted.BEST)
        layout = PagedLayout([row], self._cache, self._angles)
        shared = Pass(layout.attend, angles_at(self._angles, layout.positions))
        behind = coda.stream_after(stream, shared, self.engine.counts)
        best = int(coda.vocabulary.best(coda.logits(behind[-1:]), Counts())[0])
        time.sleep(max(0.0, end - time.perf_counter()))
        return best

    def best(self, stream: Tensor) -> list[int]:
        """What follows each token, by the whole program."""
        engine = self.engine
        return [int(token) for token in engine.best_tokens(engine.own_logits(stream))]


@dataclass
class Decoded:
    """A text that racks have decoded.

    Attributes:
        seconds: from its first new token to its last.
        drafts: that were compared with what was right.
        accepted: of these, the right ones.
        fed: tokens that rack 0 computed behind the prompt.
        sent: bytes from rack 0 to rack 1.
    """

    tokens: list[int]
    seconds: float
    drafts: int
    accepted: int
    fed: int
    sent: int


class FirstRack:
    """Rack 0: it feeds tokens, known or drafted, and takes in what is said of them."""

    def __init__(self, stretch: Stretch, onward: Wire, answers: queue.SimpleQueue[Message]) -> None:
        self.stretch, self.onward, self.answers = stretch, onward, answers
        self.epoch = 0
        self._held: Message | None = None

    @torch.inference_mode()
    def decode(self, prompt: list[int], new: int, window: int) -> Decoded:
        """Continue a prompt greedily.

        Args:
            window: how many tokens may be in flight; 1 is sequential decoding, without drafts.
        """
        drafting, goal, before = window > 1, len(prompt) + new, self.onward.sent
        self.epoch += 1
        text, known, fed, drafts, accepted = list(prompt), len(prompt), len(prompt), 0, 0
        self._feed(text, 0, drafting, prompt=True)
        began = 0.0
        while known < goal:
            # Behind the prompt, and behind a text whose next token nobody has drafted, there is nothing to feed.
            can_feed = fed < min(len(text), goal - 1) and fed - known < window - 1
            answer = self._answer(wait=not can_feed)
            if answer is None:
                self._feed(text, fed, drafting)
                fed += 1
                continue
            if answer.epoch != self.epoch:
                continue
            for token in answer.tokens:
                known += 1
                began = began or time.perf_counter()
                if known > len(text):
                    text.append(token)
                    continue
                drafts += 1
                if text[known - 1] == token:
                    accepted += 1
                    continue
                text[known - 1 :] = [token]
                if fed >= known:
                    self.epoch += 1
                fed = known - 1
                break
        ended = time.perf_counter()
        return Decoded(text[len(prompt) : goal], ended - began, drafts, accepted, fed, self.onward.sent - before)

    def _answer(self, wait: bool) -> Message | None:
        """The next answer that has arrived; None if there is none and it is not to be waited for."""
        if self._held is None:
            if not wait and self.answers.empty():
                return None
            self._held = self.answers.get()
        if not wait and self._held.due > time.perf_counter():
            return None
        SystemClock().wait_until(self._held.due)
        answer, self._held = self._held, None
        return answer

    def _feed(self, text: list[int], at: int, drafting: bool, prompt: bool = False) -> None:
        """Compute the tokens from a position on, send them on, and draft the one behind them if nobody knows it."""
        tokens = text[at:] if prompt else text[at : at + 1]
        stream = self.stretch(tokens, at, self.stretch.embed(tokens, at))
        self.onward.send(self.epoch, at, tokens, prompt, stream)
        if drafting:
            draft = self.stretch.coda(tokens, at, stream)
            if at + len(tokens) == len(text):
                text.append(draft)


def arrived(messages: queue.SimpleQueue[Message]) -> Message:
    """The next message, when it has arrived."""
    message = messages.get()
    SystemClock().wait_until(message.due)
    return message


def gather(messages: queue.SimpleQueue[Message], waiting: list[Message]) -> list[Message]:
    """The messages that one pass can compute: those that have arrived, newest epoch only, without a gap."""
    if not waiting:
        waiting.append(arrived(messages))
    while not messages.empty():
        waiting.append(messages.get())
    now = time.perf_counter()
    ready = [message for message in waiting if message.due <= now]
    if not ready:
        SystemClock().wait_until(waiting[0].due)
        ready = waiting[:1]
    del waiting[: len(ready)]
    newest = max(message.epoch for message in ready)
    ready = [message for message in ready if message.epoch == newest]
    if ready[0].prompt:
        waiting[:0] = ready[1:]
        return ready[:1]
    return ready


@torch.inference_mode()
def deeper(stretch: Stretch, last: bool, messages: queue.SimpleQueue[Message], onward: Wire) -> None:
    """Be a rack behind the first one, for ever."""
    waiting: list[Message] = []
    void, expected = 0, {}
    while True:
        ready = gather(messages, waiting)
        epoch, first, prompt = ready[0].epoch, ready[0].first, ready[0].prompt
        tokens = [token for message in ready for token in message.tokens]
        # Only the last rack knows which drafts are wrong.
        if last and (epoch == void or (not prompt and expected.get(first) != tokens[0])):
            void = epoch
            continue
        streams = [message.stream for message in ready if message.stream is not None]
        stream = stretch(tokens, first, torch.cat(streams))
        if not last:
            onward.send(epoch, first, tokens, prompt, stream)
            continue
        following = stretch.best(stream[-1:] if prompt else stream)
        right = 1
        while right < len(following) and following[right - 1] == tokens[right]:
            right += 1
        if right < len(following):
            void = epoch
        end = first + len(tokens) if prompt else first + right
        expected = {end: following[right - 1]}
        onward.send(epoch, end - right, following[:right], False, None)


@dataclass(frozen=True)
class RackRole:
    """What a process is told.

    Attributes:
        ports: at which the racks listen, rack r for rack r - 1, and rack 0 for the last.
        nodes: after how many nodes of the program each rack ends.
    """

    rack: int
    plan: Plan
    nodes: tuple[int, ...]
    ports: tuple[int, ...]


def be_rack(role: RackRole, listening: socket.socket, control: Connection) -> None:
    """Runs in a process of its own."""
    torch.set_num_threads(1)
    racks = len(role.nodes)
    first = role.nodes[role.rack - 1] if role.rack else 0
    stretch = Stretch(role.plan, first, role.nodes[role.rack])
    onward = Wire(socket.create_connection(("127.0.0.1", role.ports[(role.rack + 1) % racks])))
    inward = Wire(listening.accept()[0])
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    inward.listen(messages)
    control.send("ready")
    if role.rack:

        def obey() -> None:
            while True:
                onward.line.link, stretch.pace = control.recv()

        threading.Thread(target=obey, daemon=True).start()
        deeper(stretch, role.rack == racks - 1, messages, onward)
    rack = FirstRack(stretch, onward, messages)
    while (order := control.recv()) is not None:
        if isinstance(order[0], Link):
            onward.line.link, stretch.pace = order
        else:
            control.send(rack.decode(*order))


class Racks:
    """The processes of all racks."""

    def __init__(self, plan: Plan, nodes: tuple[int, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        listening = [socket.create_server(("127.0.0.1", 0)) for _ in nodes]
        ports = tuple(one.getsockname()[1] for one in listening)
        self.controls: list[Connection] = []
        self.processes = []
        for rack, server in enumerate(listening):
            ours, theirs = context.Pipe()
            role = RackRole(rack, plan, nodes, ports)
            process = context.Process(target=be_rack, args=(role, server, theirs), daemon=True)
            process.start()
            self.controls.append(ours)
            self.processes.append(process)
        for control in self.controls:
            assert control.recv() == "ready"

    def emulate(self, delay: float, pace: float = 0.0, bandwidth: float = math.inf) -> None:
        """Have this link between all of them, and this pace, from now on."""
        for control in self.controls:
            control.send((Link(delay, bandwidth), pace))
        time.sleep(0.05)

    def decode(self, prompt: list[int], new: int, window: int) -> Decoded:
        """Continue a prompt greedily; see `FirstRack.decode`."""
        self.controls[0].send((prompt, new, window))
        found: Decoded = self.controls[0].recv()
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def even_racks(plan: Plan, racks: int, nodes: int) -> tuple[int, ...]:
    """After how many nodes each rack ends: the first after its own, the others share what is left."""
    from surgeon.language.program import Program

    total = len(Program.parse(plan.program))
    others = racks - 1
    return tuple(nodes + (total - nodes) * number // others for number in range(others + 1))


def folder_plan(folder: Path, max_tokens: int) -> Plan:
    """The plan of a checkpoint with codas, on one rank."""
    from surgeon.runtime.plan.checks import make_plan
    from surgeon.runtime.plan.codas import with_coda

    return with_coda(make_plan(folder, 1, max_tokens))
