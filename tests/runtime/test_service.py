"""A service as its users see it: streams from any thread, stop texts, cancelling, failures that everybody hears of."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgeon.models.edit import edit
from surgeon.processes.children import PATIENCE_SECONDS
from surgeon.runtime import service as service_module
from surgeon.runtime.batching.request import Event, QueueFull, Sampling, Stats, UndefinedLogits
from surgeon.runtime.comm.collectives import Link
from surgeon.runtime.service import Service, ServiceOptions, Stream
from surgeon.runtime.worker.rank import RankOptions, gpu_room
from surgeon.runtime.worker.ranks import RankFailed
from tests.tiny_models import damage, save_checkpoint
from tests.waiting import PATIENCE, takes_less_than, wait_until

PROMPT = "The quick brown fox"
NEW = 12
GREEDY = Sampling(max_new_tokens=NEW, ignore_end=True)
LONG = replace(GREEDY, max_new_tokens=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("service") / "tiny-llama")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(PROMPT).input_ids
    return ids


@pytest.fixture(scope="module")
def expected(folder: Path, prompt: list[int]) -> list[int]:
    """Tokens of `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens: list[int] = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )[0].tolist()
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def service(folder: Path, tokenizer: Any) -> Iterator[Service]:
    with Service(
        folder, ServiceOptions(RankOptions(2), max_batch=3, max_waiting=5), tokenizer
    ) as started:
        yield started


def read(stream: Stream) -> tuple[list[int], str, Event]:
    """All tokens, all text, and the last event."""
    events = list(stream)
    assert [event.finish_reason is None for event in events] == [True] * (len(events) - 1) + [False]
    assert {event.request for event in events} == {stream.id}
    return (
        [token for event in events for token in event.tokens],
        "".join(e.text for e in events),
        events[-1],
    )


def settled(service: Service, finished: int) -> bool:
    """Wait until the ranks have finished so many requests and have nothing to do."""
    wait_until(lambda: service.stats().finished >= finished)
    return service.stats().running == service.stats().waiting == 0


def test_tokens_text_and_usage(
    service: Service, tokenizer: Any, prompt: list[int], expected: list[int]
) -> None:
    tokens, text, last = read(service.submit(prompt, GREEDY))
    assert tokens == expected
    whole = tokenizer.decode(prompt + expected, skip_special_tokens=True)
    assert text == whole.removeprefix(PROMPT)
    assert (last.usage.prompt, last.usage.new, last.finish_reason) == (len(prompt), NEW, "length")
    assert 0 < last.queue_seconds < 60


def test_passes_at_once(
    folder: Path,
    tokenizer: Any,
    prompt: list[int],
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on GPUs; a text ends among them, by its own end or by its client's."""
    monkeypatch.setitem(service_module.MOST_AT_ONCE, "cpu", 8)
    with Service(folder, ServiceOptions(RankOptions(2), max_batch=3), tokenizer) as service:
        cut = service.submit(prompt, LONG)
        next(iter(cut))
        streams = [service.submit(prompt, replace(GREEDY, max_new_tokens=n)) for n in (NEW, 7)]
        assert [read(stream)[0] for stream in streams] == [expected, expected[:7]]
        service.cancel(cut.id)
        assert read(cut)[2].finish_reason in ("cancelled", "length")


def test_windows_caps_and_norms_behind_sublayers(
    tmp_path: Path, tokenizer: Any, prompt: list[int]
) -> None:
    """Gemma2, an LP pair in it; prompts that begin alike, of different lengths, twice as long as the window."""
    folder = save_checkpoint(tmp_path / "tiny-gemma2", "gemma2", sliding_window=8)
    program = "A0 F0 [A1 A2] [F1 F2] A3 F3"
    model = edit(AutoModelForCausalLM.from_pretrained(folder), program)
    prompts = [prompt, prompt * 2, prompt * 2 + prompt[1:3]]
    assert len(prompts[1]) > 16
    with Service(
        folder, ServiceOptions(RankOptions(2), program=program, max_batch=2), tokenizer
    ) as service:
        streams = [service.submit(tokens, GREEDY) for tokens in prompts]
        found = [read(stream)[0] for stream in streams]
    for tokens, new in zip(prompts, found, strict=True):
        whole = model.generate(
            torch.tensor([tokens]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        assert new == whole[0, len(tokens) :].tolist()


def test_many_threads(service: Service, prompt: list[int], expected: list[int]) -> None:
    found: SimpleQueue[tuple[list[int], str, Event]] = SimpleQueue()

    def ask() -> None:
        found.put(read(service.submit(prompt, GREEDY)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    results = [found.get(timeout=PATIENCE) for _ in threads]
    assert all(tokens == expected for tokens, _, _ in results)
    assert len({text for _, text, _ in results}) == 1


def test_listening_late_misses_nothing_and_a_listener_that_fails_harms_nobody(
    service: Service, prompt: list[int], expected: list[int]
) -> None:
    before = service.stats().finished
    stream, failing = service.submit(prompt, GREEDY), service.submit(prompt, GREEDY)
    heard: list[Event | Exception] = []

    def fail(_: Event | Exception) -> None:
        raise KeyError("a client's own mistake")

    failing.listen(fail)
    assert service.submit(prompt, GREEDY).id > stream.id
    assert settled(service, before + 3)
    stream.listen(heard.append)
    assert [token for event in heard if isinstance(event, Event) for token in event.tokens] == expected
    assert service.failure is None


def test_stop_texts_end_a_request(service: Service, prompt: list[int]) -> None:
    _, text, _ = read(service.submit(prompt, LONG))
    stop = text[len(text) // 3 : len(text) // 3 + 4]
    before, finished = text.partition(stop)[0], service.stats().finished
    tokens, shown, last = read(service.submit(prompt, replace(LONG, stop=("never this", stop))))
    assert shown == before
    assert last.finish_reason == "stop"
    assert last.usage.new == len(tokens) < 100
    assert settled(service, finished + 1), "the ranks have been told"


def test_sampling_is_the_same_for_the_same_seed(service: Service, prompt: list[int]) -> None:
    sampling = replace(GREEDY, temperature=1.0, top_p=0.9, seed=7, logprobs=2)
    (first, _, last), (second, _, _) = (read(service.submit(prompt, sampling)) for _ in range(2))
    assert first == second
    assert len(last.logprobs) == 1
    assert len(last.logprobs[0].top) == 2
    unseeded = [
        read(service.submit(prompt, replace(sampling, seed=None, top_p=1.0)))[0] for _ in range(3)
    ]
    assert len(set(map(tuple, unseeded))) > 1


def test_cancelling(service: Service, prompt: list[int]) -> None:
    streams = [service.submit(prompt, LONG) for _ in range(5)]  # three run, two wait
    next(iter(streams[0]))
    assert service.cancel(streams[0].id)
    assert service.cancel(streams[4].id)
    assert list(streams[0])[-1].finish_reason == "cancelled"
    last = list(streams[4])
    assert [event.finish_reason for event in last] == ["cancelled"]
    assert last[0].usage.new == 0
    assert not service.cancel(streams[0].id)
    assert not service.cancel(10**6)
    assert all(read(stream)[2].finish_reason == "length" for stream in streams[1:4])


def test_the_queue_is_limited(service: Service, prompt: list[int]) -> None:
    streams = [service.submit(prompt, LONG) for _ in range(8)]
    with pytest.raises(QueueFull, match="8 requests are open already"):
        service.submit(prompt, LONG)
    for stream in streams:
        service.cancel(stream.id)
    assert {list(stream)[-1].finish_reason for stream in streams} == {"cancelled"}
    assert read(service.submit(prompt, GREEDY))[2].finish_reason == "length"


def test_statistics(folder: Path, prompt: list[int]) -> None:
    with Service(folder, ServiceOptions(RankOptions(2), max_batch=2, blocks=20)) as service:
        assert service.stats() == Stats(blocks=20, free_blocks=20)
        long = prompt * 4
        for _ in range(2):
            tokens, text, _ = read(service.submit(long, GREEDY))
            assert text == ""
        stats = service.stats()
        shared = (len(long) - 1) // 16 * 16
        assert (stats.prompt_tokens, stats.cached_tokens, stats.new_tokens) == (
            2 * len(long),
            shared,
            2 * len(tokens),
        )
        assert (stats.running, stats.waiting, stats.finished, stats.free_blocks) == (0, 0, 2, 20)
        assert stats.passes == 2 * NEW
        figures = service.figures()
        counts = [
            count
            for each in (figures[0].prefill, figures[0].decode)
            for count in (each.layers, each.vocabulary)
        ]
        sums = sum(count.all_reduces for count in counts)
        assert sums == stats.passes * (8 + 1)  # of the four layers, and of the embedding
        assert [each.prefill.passes + each.decode.passes for each in figures] == [stats.passes] * 2
        assert figures[0].decode.tokens == 2 * (NEW - 1)
        assert figures[0].prefill.tokens == 2 * len(long) - shared


def test_an_emulated_link_and_compressed_reductions(folder: Path, prompt: list[int]) -> None:
    with Service(
        folder, ServiceOptions(RankOptions(2, link=Link(0.005), compression="int4"))
    ) as service:
        tokens = read(service.submit(prompt, GREEDY))[0]
        decode = service.figures()[0].decode
        assert len(tokens) == NEW
        assert decode.passes == NEW - 1
        # 8 steps, the embedding and the head, one after the other.
        assert decode.seconds >= decode.passes * 10 * 0.005
        assert (decode.layers.all_reduces, decode.layers.all_gathers) == (0, 8 * decode.passes)
        # 32 features: one exact (4 bytes), its place (2), a scale (4), and two integers in a byte.
        assert decode.layers.bytes == decode.passes * 8 * (4 + 2 + 4 + 16)
        assert decode.vocabulary.all_reduces == decode.passes


@pytest.mark.parametrize("listening", [False, True])
def test_an_interruption_at_the_start_leaves_no_ranks(
    listening: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = Service._start, []

    def interrupted(service: Service) -> None:
        if listening:
            start(service)
        started.extend(service._ranks.pids)
        raise KeyboardInterrupt

    monkeypatch.setattr(Service, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Service(folder, ServiceOptions(RankOptions(2)))
    assert len(started) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_requests_that_are_refused(service: Service, folder: Path, prompt: list[int]) -> None:
    for tokens, sampling, message in [
        ([], GREEDY, "the prompt is empty"),
        ([1, 300], GREEDY, r"token ids must lie in 0\.\.\d+, the model's vocabulary"),
        ([1, -1], GREEDY, "token ids must lie in"),
        (
            [1] * 100,
            replace(GREEDY, max_new_tokens=29),
            "100 tokens of the prompt and 29 new .* more than the 128",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            service.submit(tokens, sampling)
    with (
        Service(folder) as bare,
        pytest.raises(ValueError, match="stop texts cannot be found without a tokenizer"),
    ):
        bare.submit(prompt, replace(GREEDY, stop=("a",)))


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_killed(who: int, folder: Path, prompt: list[int]) -> None:
    with Service(folder, ServiceOptions(RankOptions(2), max_batch=2)) as service:
        streams = [service.submit(prompt, LONG) for _ in range(4)]
        heard: SimpleQueue[Event | Exception] = SimpleQueue()
        streams[3].listen(heard.put)
        next(iter(streams[0]))
        killed = service._ranks.pids[who]
        os.kill(killed, signal.SIGKILL)
        began = time.monotonic()
        for stream in streams[:3]:
            with pytest.raises(
                RankFailed, match=rf"rank {who} \(process {killed}\) was ended by SIGKILL"
            ):
                list(stream)
        while isinstance(event := heard.get(timeout=PATIENCE), Event):
            assert event.finish_reason is None
        assert isinstance(event, RankFailed)
        # After which ranks that do not answer are given up.
        assert time.monotonic() - began < PATIENCE_SECONDS
        with pytest.raises(RankFailed):
            service.submit(prompt, GREEDY)
        with pytest.raises(RankFailed):
            service.figures()
        assert isinstance(service.failure, RankFailed)
        assert service.drain(1)
        assert service.stats().blocks > 0


def test_a_rank_that_is_killed_while_nothing_is_asked(folder: Path) -> None:
    with Service(folder, ServiceOptions(RankOptions(2))) as service:
        os.kill(service._ranks.pids[1], signal.SIGKILL)
        wait_until(lambda: service.failure is not None)
        assert "rank 1" in str(service.failure)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_stopped(who: int, folder: Path, prompt: list[int]) -> None:
    """While nothing is asked that harms nobody; whoever then asks is told in time, and which rank it is."""
    patience = 4  # a twelfth of it apart, three pulses at once are seldom late even on a busy machine
    with Service(folder, ServiceOptions(RankOptions(2), max_batch=2, patience=patience)) as service:
        stopped = service._ranks.pids[who]
        if who == 1:
            os.kill(stopped, signal.SIGSTOP)
            time.sleep(patience + 1)
            os.kill(stopped, signal.SIGCONT)
        assert read(service.submit(prompt, GREEDY))[2].finish_reason == "length"
        streams = [service.submit(prompt, LONG) for _ in range(4)]
        next(iter(streams[0]))
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        for stream in streams:
            with pytest.raises(
                RankFailed, match=rf"^rank {who} \(process {stopped}\) has not answered for 4 seconds"
            ):
                list(stream)
        assert patience / 2 < time.monotonic() - began < PATIENCE
        with pytest.raises(RankFailed, match="has not answered"):
            service.submit(prompt, GREEDY)
        assert isinstance(service.failure, RankFailed)


def test_draining_and_closing(folder: Path, prompt: list[int], expected: list[int]) -> None:
    service = Service(folder, ServiceOptions(RankOptions(2)))
    stream, other = service.submit(prompt, GREEDY), service.submit(prompt, LONG)
    assert not service.drain(0)
    with pytest.raises(ValueError, match="takes no more requests"):
        service.submit(prompt, GREEDY)
    assert read(stream)[0] == expected
    service.close()
    assert list(other)[-1].finish_reason in ("cancelled", "length")
    with pytest.raises(ValueError, match="takes no more requests"):
        service.submit(prompt, GREEDY)
    assert service.failure is None
    assert service.drain(0)
    service.close()


def test_ranks_that_wait_use_no_processor(folder: Path, prompt: list[int]) -> None:
    with Service(folder, ServiceOptions(RankOptions(2))) as service:
        read(service.submit(prompt, GREEDY))

        def used() -> float:
            """Processor time of both in a second; the first one may be left from the request."""
            before = ticks()
            time.sleep(1.0)
            return (ticks() - before) / 100

        def ticks() -> int:
            stats = [
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                for pid in service._ranks.pids
            ]
            return sum(int(fields[11]) + int(fields[12]) for fields in stats)

        assert takes_less_than(0.06, used)


def test_memory_is_checked_before_anything_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    # 4 layers of 2 KV heads of 8 features in float32: 16 tokens take 8 KB.
    with pytest.raises(
        ValueError,
        match="and 200 blocks of 8.19 KB do not fit: 1.05 MB are allowed; at most 103 blocks do",
    ):
        Service(folder, ServiceOptions(RankOptions(2), blocks=200, memory=1 << 20))
    with pytest.raises(
        ValueError, match="the weights take 200 KB and 102 KB are allowed; give more memory"
    ):
        Service(folder, ServiceOptions(memory=100 << 10))
    with pytest.raises(ValueError, match="max_batch must be at least 1, not 0"):
        Service(folder, ServiceOptions(max_batch=0))
    with pytest.raises(
        ValueError, match="collectives none leave the ranks unconnected, and their text would be wrong"
    ):
        Service(folder, ServiceOptions(RankOptions(collectives="none")))
    with pytest.raises(ValueError, match="there is no compression 'int9'"):
        Service(folder, ServiceOptions(RankOptions(2, compression="int9")))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tokens must be at least 2"):
        Service(folder, ServiceOptions(max_tokens=1))
    with pytest.raises(ValueError, match="blocks must be at least 1, not 0"):
        ServiceOptions(blocks=0)
    with pytest.raises(ValueError, match="patience must be above 0 seconds, not 0"):
        ServiceOptions(patience=0)


def test_a_cache_that_limits_the_length(folder: Path, prompt: list[int]) -> None:
    with Service(folder, ServiceOptions(blocks=2)) as service:
        assert service.max_tokens == 32
        with pytest.raises(ValueError, match="more than the 32 that fit"):
            service.submit(prompt, LONG)


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_that_are_not_finite_fail_their_own_requests_only(
    ranks: int, tmp_path: Path, prompt: list[int], expected: list[int]
) -> None:
    folder = save_checkpoint(tmp_path / "tiny")
    bad = next(token for token in range(5, 300) if token not in prompt + expected)
    damage(folder, bad)
    kinds = [
        GREEDY,
        Sampling(temperature=1.0),
        Sampling(logprobs=2),
        Sampling(max_new_tokens=0, prompt_logprobs=1),
    ]
    long = [*prompt * 3, bad, *prompt]
    with Service(folder, ServiceOptions(RankOptions(ranks), max_batch=3)) as service:
        good = service.submit(prompt * 3, GREEDY)
        for sampling in kinds:
            with pytest.raises(
                UndefinedLogits, match=f"not finite .* .{len(long)} tokens of the prompt, 0 new ones"
            ):
                list(service.submit(long, sampling))
        assert read(good)[2].finish_reason == "length"
        # Nothing of the failed texts is taken from the cache.
        again = read(service.submit(prompt * 3, GREEDY))
        assert read(service.submit(prompt, GREEDY))[0] == expected
        assert again[2].finish_reason == "length"
        assert settled(service, 7)


def test_ranks_say_what_is_free_on_their_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process asks no GPU, which would take memory of each for good; the ranks end where it is too little."""
    ended: list[str] = []

    class FewBytes(AbstractContextManager["FewBytes"]):
        def __init__(self, options: RankOptions) -> None:
            assert options.ranks == 2

        def call(self, function: object) -> list[int]:
            assert function is gpu_room
            return [1 << 30, 5000]

        def __exit__(self, *_: object) -> None:
            ended.append("ranks")

    monkeypatch.setattr(service_module, "Ranks", FewBytes)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda *_: pytest.fail("the starting process asks a GPU")
    )
    options = ServiceOptions(RankOptions(2, "cuda"))
    with pytest.raises(ValueError, match=r"on each GPU and 5 KB are free"):
        Service(folder, options)
    assert ended == ["ranks"]
    with pytest.raises(ValueError, match=r"on each GPU and 5 KB are allowed"):
        Service(folder, replace(options, memory=5000))
    assert ended == ["ranks"]  # nobody was asked
