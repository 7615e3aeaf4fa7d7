"""Passes that add one token to each text, recorded once for each number of texts and then done again by one call.

Such a pass is a few hundred small calls of the kernels, and between them Python takes about as long as some of them.
Only the texts' newest tokens, positions and places in the cache change, and they lie in few fixed tensors. The first
pass of a size is recorded while it is computed (kernels/recording.py). Results are the same to the bit.

GPUs repeat passes of few fixed shapes from recordings, without Python in between. A static pass computes one token of
each of its texts at once, with room for a power of two of texts. Passes of a size differ in the contents of one tensor
of inputs only: token, position and block table of each text. Lines without a text write to a block that nobody reads.

Kernels for GPUs (runtime/kernels/triton) read the cache by block tables, each text as far as it goes. Without them, and
in rank space, the keys and values of all texts are copied side by side, as many blocks of each as the longest has,
rounded up to a power of two, and masked. In rank space a fixed buffer takes the copies, another one the keys and values
made of them; a text's number in the batch says where they lie, so that DeInfer's remapping list needs no list.

Nothing waits for the device until the chosen tokens are read, so that a pass can be recorded as a CUDA graph
(kernels/recording.py) where collectives can be (`Collectives.capturable`).

Shapes: B texts, W blocks of each, N tokens that are read of each, D head_dim, H heads and K KV heads of a slice, R the
ranks of k and v together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from surgeon.runtime.batching.blocks import BLOCK_TOKENS, blocks_for, power_of_two
from surgeon.runtime.batching.request import Row, Rows, Wanted
from surgeon.runtime.comm.collectives import Counts, Sent
from surgeon.runtime.kernels.functions import Kernels, Runs, Weighting, Window
from surgeon.runtime.kernels.recording import Arena, GraphRecorder, Recording, Replay, Span
from surgeon.runtime.kernels.triton import Placing, TextBlocks
from surgeon.runtime.model.attending import AllAngles, AttendRaw, attention
from surgeon.runtime.model.paged_cache import PagedCache, angles_at, runs_of, stretches, write_table
from surgeon.runtime.model.rank_model import RankModel, Results, Way

Reading = tuple[int, Window | None]  # a group of the cache, and a window
NOWHERE = -1  # a place of keys and values that are not kept
# Positions whose angles are computed at once: all passes are recorded anew when there are more.
FIRST_ANGLES = 4096
# Rows of the inputs; places in the cache's groups take as many as there are groups, and those in borrowed slots
# (`PagedCache.borrowed`) all further ones.
TOKEN = 0
POSITION = 1
PLACE = 2


class PassInputs:
    """The changing inputs of passes over as many texts, where recordings read them.

    Attributes:
        numbers: (2 + twice the groups of the cache, B).
        reads: of attentions of a group with a window.
    """

    def __init__(self, rows: Rows, angles: AllAngles) -> None:
        self.numbers = torch.tensor(_numbers(rows))
        self.angles = angles
        self.reads: dict[Reading, Runs] = {}

    def load(self, rows: Rows, angles: AllAngles) -> bool:
        """Write the inputs of the next pass; False if another recording is needed for it."""
        if angles is not self.angles:
            return False
        for key, read in self.reads.items():
            runs, ends = runs_of(rows, *key)
            if len(runs) > len(read.runs):
                return False
            read.runs.numpy()[: len(runs)] = runs
            read.ends.numpy()[:] = ends
        self.numbers.numpy()[:] = _numbers(rows)
        return True

    def read(self, rows: Rows, key: Reading) -> Runs:
        """Runs that such attentions read, with room for some more than now."""
        if key not in self.reads:
            runs, ends = runs_of(rows, *key)
            room = torch.zeros(2 * power_of_two(len(runs)), 2, dtype=torch.int64)
            room[: len(runs)] = torch.tensor(runs)
            self.reads[key] = Runs(room, torch.tensor(ends))
        return self.reads[key]


def _numbers(rows: Rows) -> list[list[int]]:
    """Token, position, and place in each group of the cache; in slots of another that knows the token, none."""
    tokens = [row.tokens[0] for row in rows]
    positions = [row.start for row in rows]
    groups = range(len(rows[0].runs))
    places = [
        [stretches(row.runs[group], row.start, row.start + 1)[0].start for row in rows]
        for group in groups
    ]
    new = [row.known <= row.start for row in rows]
    newly = places
    if not all(new):
        newly = [
            [at if is_new else NOWHERE for at, is_new in zip(own, new, strict=True)] for own in places
        ]
    return [tokens, positions, *places, *newly]


class RecordedPass(NamedTuple):
    """A recorded pass over so many texts, with logits, (B, rows of the vocabulary), and what it sends."""

    inputs: PassInputs
    replay: Replay
    logits: Tensor
    sent: Sent
    spans: list[Span]


class RecordedDecode(Way):
    """Recorded passes, where kernels compute all that takes long.

    Attributes:
        problems: by number of texts, why such passes could not be recorded.
    """

    holds_caches = True

    def __init__(self, model: RankModel, kernels: Kernels) -> None:
        self.problems: dict[int, str] = {}
        self._model = model
        self._kernels = kernels
        self._arena = Arena()
        # By cache, because recordings hold its address.
        self._passes: WeakKeyDictionary[PagedCache, dict[int, RecordedPass]] = WeakKeyDictionary()
        model.angles_up_to(min(model.plan.max_tokens, FIRST_ANGLES))

    def fits(self, rows: Rows) -> bool:
        """Tell whether a pass of these rows can be recorded: each adds one token to a text, and none is scored."""
        if len(rows) in self.problems or not all(map(self._model.turns_by_position, rows)):
            return False
        return all(len(row.tokens) == 1 and row.targets is None for row in rows)

    def step(self, rows: Rows, cache: PagedCache) -> Results:
        return Results(*self._model.choose(self.logits(rows, cache), [row.wanted for row in rows]), [])

    def logits(self, rows: Rows, cache: PagedCache) -> Tensor:
        """Compute one pass; this rank's logits of each row, (B, rows of the vocabulary)."""
        model = self._model
        phase = model.peers.counts
        passes = self._passes.setdefault(cache, {})
        angles = model.angles_up_to(1 + max(row.start for row in rows))
        static = passes.get(len(rows))
        if static is not None and static.inputs.load(rows, angles):
            times = static.replay(bool(static.spans))
            if times and model.watcher is not None:
                model.watcher([(what, times[first], times[end]) for what, first, end in static.spans])
            phase.add(static.sent)
            return static.logits
        # Computed as any pass, and recorded if it can be.
        inputs = PassInputs(rows, angles)
        recording = Recording(self._kernels, self._arena)

        def attend(slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
            """Attend over the cache through inputs that a replay finds again."""
            group = cache.group_of[slot]
            pair = cache.pairs[slot]
            with recording.pause():
                read = inputs.read(rows, (group, weighting.window))
            where = group + (len(rows[0].runs) if slot in cache.borrowed else 0)
            self._kernels.keep(kept, inputs.numbers[PLACE + where], pair)
            return self._kernels.attend(queries, pair, read, weighting)

        with phase.apart() as sent, recording.during():
            logits = model.next_logits(inputs.numbers[TOKEN], inputs.numbers[POSITION], angles, attend)
        phase.add(sent)
        replay = recording.finish()
        if replay is None:
            self.problems[len(rows)] = str(recording.problem)
        else:
            kept = self._arena.borrow(logits)
            passes[len(rows)] = RecordedPass(inputs, replay, kept, sent, recording.spans)
        return logits


# Columns of the inputs: how many tokens are known (`Row.known`); tables of the cache's groups take all further ones.
KNOWN = 2
TABLE = 3


class Outputs(NamedTuple):
    """Results of a static pass, on the device: most likely tokens, (B,), and logits, (B, this rank's rows)."""

    best: Tensor
    logits: Tensor


class PassSize(NamedTuple):
    """A static pass's room: so many texts, and so many blocks of each."""

    texts: int
    blocks: int

    @classmethod
    def of(cls, rows: Rows, most_blocks: int, passes: int = 1) -> PassSize:
        """The size for these rows, whose texts have `most_blocks` at most, and for further passes behind."""
        longest = (max(row.start for row in rows) + passes - 1) // BLOCK_TOKENS + 1
        return cls(power_of_two(len(rows)), min(power_of_two(longest), most_blocks))


class StaticLayout:
    """The places of a static pass's texts in the cache, all computed on the device."""

    def __init__(
        self, inputs: Tensor, cache: PagedCache, angles: AllAngles = (), counters: Tensor | None = None
    ) -> None:
        """Read the inputs, (B, 3 + W * groups of the cache)."""
        self._angles = angles if cache.rebuilds else ()
        self.positions = inputs[:, POSITION]
        self._cache = cache
        self._tables = inputs[:, TABLE:].chunk(len(cache.windows), 1)
        self._dtype = cache.stored.dtype
        own = [self._places(group, self.positions[:, None])[:, 0] for group in range(len(cache.windows))]
        self._own = own
        self._newly = own
        if cache.borrowed:  # what others know goes where nobody reads
            is_known = inputs[:, KNOWN] > self.positions
            unread = cache.tokens - BLOCK_TOKENS
            self._newly = [places.masked_fill(is_known, unread) for places in own]
        self._views: dict[tuple[int, Window | None], tuple[Tensor, Tensor, AllAngles]] = {}
        self._texts: list[TextBlocks] = []
        if counters is not None:
            self._texts = [TextBlocks(table, self.positions, counters) for table in self._tables]

    def attend_raw(
        self, slot: int, qkv: Tensor, heads: int, placing: Placing, weighting: Weighting
    ) -> Tensor:
        cache = self._cache
        group = self._cache.group_of[slot]
        assert cache.triton is not None
        queries = cache.triton.place(qkv, heads, placing, self._write(slot), cache.pairs[slot])
        return cache.attend(slot, queries, self._texts[group], weighting)

    def attend(self, slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
        """Put new keys and values into a slot; queries (B, H, D) to attended values (B, H * D)."""
        assert not self._texts or slot in self._cache.rebuilds, (
            "kernels attend where keys and values are cached"
        )
        cache = self._cache
        texts, heads, head_dim = queries.shape
        places, mask, angles = self._view(cache.group_of[slot], weighting.window)
        kv_heads = cache.kv_heads[slot]
        # Keys and values of the texts, (B, K, N, D) each, the new ones among them.
        if slot in cache.rebuilds:
            low_rank = cache.low_rank[slot]
            low_rank.index_copy_(0, self._write(slot), kept)
            room = cache.buffers.for_kept(cache.rebuilds[slot], len(places))
            torch.index_select(low_rank, 0, places, out=room)
            keys, values = (
                one.unflatten(0, (texts, -1)).transpose(1, 2)
                for one in cache.rebuild(slot, room, angles)
            )
        else:
            pair = cache.pairs[slot]
            pair.index_copy_(1, self._write(slot), kept.transpose(0, 1))
            read = pair.index_select(1, places)
            keys, values = read.view(2, kv_heads, texts, -1, head_dim).transpose(1, 2)
        # The heads of one KV group are like several tokens that look at the same keys.
        grouped = queries.view(texts, kv_heads, heads // kv_heads, head_dim)
        return attention(grouped, keys, values, weighting, mask).reshape(texts, heads * head_dim)

    def _write(self, slot: int) -> Tensor:
        return (self._newly if slot in self._cache.borrowed else self._own)[self._cache.group_of[slot]]

    def _places(self, group: int, tokens: Tensor) -> Tensor:
        """Places of tokens of each text, (B, any), in the cache."""
        return (
            self._tables[group].gather(1, tokens // BLOCK_TOKENS) * BLOCK_TOKENS + tokens % BLOCK_TOKENS
        )

    def _view(self, group: int, window: Window | None) -> tuple[Tensor, Tensor, AllAngles]:
        """The places that attentions of a group with this window read, (B * N,), a mask, (B, 1, 1, N), and angles.

        A text's newest token stands for missing ones: an unwritten place may hold NaN, and 0 times NaN is NaN.
        """
        room = self._tables[group].shape[1] * BLOCK_TOKENS
        window = Window.within(window, room)
        key = group, window
        if key not in self._views:
            newest = self.positions[:, None]
            tokens = torch.arange(room if window is None else window.tokens, device=newest.device)[None]
            if window is not None:
                size = window.tokens
                tokens = tokens + (newest // size * size if window.chunked else newest - (size - 1))
            seen = (tokens >= 0) & (tokens <= newest)
            read = torch.where(seen, tokens, newest)
            mask = torch.zeros(seen.shape, dtype=self._dtype, device=newest.device).masked_fill(
                ~seen, -torch.inf
            )
            angles = angles_at(self._angles, read.flatten())
            self._views[key] = self._places(group, read).flatten(), mask[:, None, None], angles
        return self._views[key]


class StaticPass:
    """The fixed tensors of passes of one size; inputs are (B, 3 + W * groups of the cache)."""

    def __init__(self, size: PassSize, unread_block: int, cache: PagedCache) -> None:
        """Allocate all that it writes to."""
        self._unread_block = unread_block
        self._blocks = size.blocks
        columns = TABLE + len(cache.windows) * size.blocks
        self._host = torch.zeros(
            size.texts, columns, dtype=torch.long, pin_memory=cache.device.type == "cuda"
        )
        self._lines = self._host.numpy()
        self.inputs = self._host.to(cache.device, copy=True)
        cache.buffers.reserve(size.texts * size.blocks * BLOCK_TOKENS)
        self.buffers = cache.buffers.kept, cache.buffers.rebuilt
        self.counters = None
        if cache.triton is not None:
            self.counters = cache.counters(size.texts)
        # Computes again what was recorded, from what its tensors hold now.
        self.replay: Callable[[], Outputs] | None = None
        self.sent: Sent = Counts(), Counts()

    def load(self, rows: Rows) -> None:
        """Send the rows to the device; the pass before must have ended."""
        for line, row in zip(self._lines, rows, strict=False):
            line[TOKEN] = row.tokens[0]
            line[POSITION] = row.start
            line[KNOWN] = row.known
            for group, runs in enumerate(row.runs):
                table = line[TABLE + group * self._blocks :][: self._blocks]
                write_table(table, runs, self._unread_block)
        self._lines[len(rows) :, :TABLE] = 0
        self._lines[len(rows) :, TABLE :: self._blocks] = self._unread_block
        self.inputs.copy_(self._host, non_blocking=True)


class StaticDecode(Way):
    """Passes that add one token to each text, in few fixed shapes."""

    spare_blocks = 1
    holds_caches = True

    def __init__(self, model: RankModel, recorder: GraphRecorder | None) -> None:
        self._model = model
        self._recorder = recorder
        # Angles of all positions, as recordings hold their address.
        self._angles = model.angles_up_to(model.plan.max_tokens)
        # On any rank, whatever this one's cache holds: where one records a size and another replays, sums do not meet.
        plans = [model.plan] if model.plan.draft is None else [model.plan, model.plan.draft.plan]
        self._rebuilds = any(one.kv in ("lowrank", "fewer") and one.can_be_low_rank for one in plans)
        # By cache, because recordings hold its address.
        self._passes: WeakKeyDictionary[PagedCache, dict[PassSize, StaticPass]] = WeakKeyDictionary()

    def fits(self, rows: Rows) -> bool:
        """Tell whether a pass of these rows can be a static one: each adds one token to a text."""
        continues = all(row.continues and row.targets is None for row in rows)
        return continues and all(map(self._model.turns_by_position, rows))

    def passes_to_record(self, cache: PagedCache, texts: int) -> Iterator[list[Row]]:
        """Rows of each size that passes over up to so many texts have where all of these can be as long.

        Sizes of most texts come first: the others use their memory again.
        """
        unread = cache.tokens // BLOCK_TOKENS - self.spare_blocks
        tokens = min(
            self._model.plan.max_tokens, unread * BLOCK_TOKENS if self.gathers(cache) else BLOCK_TOKENS
        )
        if self._recorder is None:
            counts = []
        else:
            counts = [1 << power for power in range((texts - 1).bit_length() + 1)]
        for count in reversed(counts):
            end = BLOCK_TOKENS
            while count * blocks_for(end) <= max(unread, count) and end < 2 * tokens:
                runs = ([(unread, 1)] * blocks_for(end),) * len(cache.windows)
                yield [Row(min(end, tokens) - 1, [0], runs, Wanted.BEST)] * count
                end *= 2

    def step(self, rows: Rows, cache: PagedCache) -> Results:
        best, own = self._outputs(self._load(rows, cache), cache)
        full = [at for at, row in enumerate(rows) if row.wanted == Wanted.LOGITS]
        tokens = best.tolist()  # the one time in a pass that this process waits for a GPU
        wanted = [token for token, row in zip(tokens, rows, strict=False) if row.wanted == Wanted.BEST]
        return Results(wanted, self._model.vocabulary.gather(own[full]) if full else None, [])

    def several(self, rows: Rows, passes: int, cache: PagedCache) -> list[list[int]]:
        """Compute passes that add a token to each text; tokens stay on the device until all have been computed."""
        static = self._load(rows, cache, passes)
        found = list[Tensor]()
        for _ in range(passes):
            found.append(self._outputs(static, cache).best.clone())
            static.inputs[:, TOKEN] = found[-1].clamp(min=0)
            static.inputs[:, POSITION] += 1
        tokens: list[list[int]] = torch.stack(found)[:, : len(rows)].tolist()
        return tokens

    def logits(self, rows: Rows, cache: PagedCache) -> Tensor:
        """Compute one pass; this rank's logits of each row."""
        return self._outputs(self._load(rows, cache), cache).logits[: len(rows)]

    def _load(self, rows: Rows, cache: PagedCache, passes: int = 1) -> StaticPass:
        """Load a pass of the rows, and of lines without a text; there is room for those of further passes."""
        blocks = cache.tokens // BLOCK_TOKENS - self.spare_blocks
        most = blocks
        if None not in cache.windows:
            most = sys.maxsize
        size = PassSize.of(rows, most, passes)
        if not self.gathers(cache):
            size = PassSize(size.texts, min(blocks_for(self._model.plan.max_tokens), most))
        static_passes = self._passes.setdefault(cache, {})
        if size not in static_passes:
            static_passes[size] = StaticPass(size, blocks, cache)
        static = static_passes[size]
        static.load(rows)
        return static

    def _outputs(self, static: StaticPass, cache: PagedCache) -> Outputs:
        """Compute a pass that is loaded; the next one may overwrite it."""
        if self._recorder is None:
            return self._compute(static, cache)
        if static.replay is None:

            def compute() -> Outputs:
                # A recorder may compute several times.
                with self._model.peers.counts.apart() as static.sent:
                    return self._compute(static, cache)

            static.replay = self._recorder(compute)
        self._model.peers.counts.add(static.sent)
        return static.replay()

    def gathers(self, cache: PagedCache) -> bool:
        """Tell whether keys are copied, as many blocks of each text as the longest has; the same on all ranks."""
        return cache.triton is None or self._rebuilds

    def _compute(self, static: StaticPass, cache: PagedCache) -> Outputs:
        layout = StaticLayout(static.inputs, cache, self._angles, static.counters)
        attend_raw: AttendRaw | None = None
        if static.counters is not None:
            attend_raw = layout.attend_raw
        logits = self._model.next_logits(
            static.inputs[:, TOKEN], layout.positions, self._angles, layout.attend, attend_raw
        )
        return Outputs(self._model.vocabulary.best(logits), logits)
