"""Everything that can go wrong for `surgeon serve`, provoked: run.py runs these after its load."""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from scripts.load.cases import Case
from scripts.load.server import COMPLETIONS, LONGEST_SECONDS, Server, serving
from surgeon.runtime.batching.windows import blocks_for

DEADLINE_SECONDS = 10  # after a rank's death, for every answer and the end of the process
STUCK_SECONDS = 60  # after which the server gives up a rank that is stopped


@dataclass(frozen=True)
class Check:
    """One thing that can go wrong, what should happen, and what did."""

    name: str
    seen: str
    passed: bool


BAD_BODIES: tuple[bytes, ...] = (
    b"{",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": []}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": "a", "max_tokens": 1000000000}',
    b'{"prompt": "a", "temprature": 0}',
    b'{"prompt": "a", "n": 0}',
)


def long_body(server: Server) -> dict[str, Any]:
    """A request that fills all positions but some."""
    room = httpx2.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    return {"prompt": [5] * 8, "max_tokens": room - 8, "temperature": 0, "ignore_eos": True}


def check_bad_requests(server: Server) -> Check:
    statuses = []
    for body in BAD_BODIES:
        answer = httpx2.post(server.url + COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        statuses.append(answer.status_code)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    healthy = httpx2.get(f"{server.url}/health").status_code
    seen = f"{statuses.count(400)} of {len(BAD_BODIES)} answered with 400; healthy after: {healthy == 200}"
    return Check("bad requests", seen, set(statuses) == {400} and healthy == 200)


def check_disconnects(server: Server) -> Check:
    body = long_body(server) | {"stream": True}
    before = server.metrics()["surgeon_new_tokens_total"]
    with httpx2.Client(base_url=server.url, timeout=LONGEST_SECONDS) as client:
        request = client.build_request("POST", COMPLETIONS, json=body)
        streams = [client.send(request, stream=True) for _ in range(4)]
        used = server.metrics()["surgeon_used_blocks"]
        for stream in streams:
            stream.close()
    seconds = server.wait_for(lambda found: found["surgeon_used_blocks"] == 0)
    share = (server.metrics()["surgeon_new_tokens_total"] - before) / (4 * body["max_tokens"])
    seen = f"4 streams used {used:.0f} blocks, free {seconds:.2f} s after they hung up; {share:.0%} was computed"
    return Check("client disconnect", seen, used > 0 and share < 1)


async def post_all(server: Server, number: int, body: dict[str, Any]) -> list[tuple[int, dict[str, Any], float]]:
    """Statuses, answers and times of so many requests at once; answers that break off have the status 0."""

    async def post(client: httpx2.AsyncClient) -> tuple[int, dict[str, Any], float]:
        try:
            answer = await client.post(server.url + COMPLETIONS, json=body)
            return answer.status_code, answer.json(), time.monotonic()
        except httpx2.HTTPError as error:
            return 0, {"error": str(error)}, time.monotonic()

    async with httpx2.AsyncClient(timeout=LONGEST_SECONDS) as client:
        return await asyncio.gather(*(post(client) for _ in range(number)))


class Background:
    """`post_all` in a thread."""

    def __init__(self, server: Server, number: int, body: dict[str, Any]) -> None:
        self.found: list[tuple[int, dict[str, Any], float]] = []
        self._thread = threading.Thread(target=self._run, args=(server, number, body))
        self._thread.start()

    def _run(self, server: Server, number: int, body: dict[str, Any]) -> None:
        self.found = asyncio.run(post_all(server, number, body))

    def results(self) -> list[tuple[int, dict[str, Any], float]]:
        self._thread.join()
        return self.found


def four_long(server: Server) -> Background:
    """Four requests that take their time, once the server has them all."""
    others = Background(server, 4, long_body(server))
    server.wait_for(lambda found: found["surgeon_running"] + found["surgeon_waiting"] == 4)
    return others


def check_queue_limit(server: Server) -> Check:
    """With room for 2 and a queue of 2."""
    others = four_long(server)
    answer = httpx2.post(server.url + COMPLETIONS, json={"prompt": "a"})
    retry = answer.headers.get("Retry-After")
    statuses = [status for status, _, _ in others.results()]
    seen = f"fifth of 4: {answer.status_code}, Retry-After {retry}; the others: {sorted(set(statuses))}"
    return Check("queue limit", seen, answer.status_code == 429 and retry is not None and set(statuses) == {200})


def check_few_blocks(server: Server, cases: Sequence[Case], new_tokens: int) -> Check:
    """With room for few texts in the cache, and all prompts at once."""

    async def ask_all() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(base_url=server.url, timeout=LONGEST_SECONDS) as client:
            bodies = [{"prompt": case.prompt, "max_tokens": new_tokens, "temperature": 0} for case in cases]
            return await asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in bodies))

    answers = asyncio.run(ask_all())
    right = [
        answer.status_code == 200 and answer.json()["choices"][0]["text"] == case.answer
        for case, answer in zip(cases, answers, strict=True)
    ]
    found = server.metrics()
    seen = (
        f"{len(cases)} requests, {found['surgeon_blocks']:.0f} blocks: {sum(right)} answers as offline; "
        f"preempted {found['surgeon_preempted_total']:.0f} times; used after: {found['surgeon_used_blocks']:.0f}"
    )
    return Check("few blocks", seen, all(right) and found["surgeon_used_blocks"] == 0)


def check_sigterm(server: Server) -> Check:
    body = long_body(server)
    others = four_long(server)
    server.process.send_signal(signal.SIGTERM)
    late = httpx2.post(server.url + COMPLETIONS, json=body).status_code
    full = [
        status == 200 and answer["usage"]["completion_tokens"] == body["max_tokens"]
        for status, answer, _ in others.results()
    ]
    code = server.process.wait(LONGEST_SECONDS)
    seen = f"{sum(full)} of 4 open ones finished; a new one: {late}; exit code {code}"
    return Check("SIGTERM", seen, all(full) and late == 503 and code == 0)


def check_rank_death(server: Server) -> Check:
    others = four_long(server)
    killed = time.monotonic()
    server.rank(-1).kill()
    found = others.results()
    code = server.process.wait(LONGEST_SECONDS)
    ended = time.monotonic() - killed
    answered = max(moment for _, _, moment in found) - killed
    statuses = [status for status, _, _ in found]
    named = "rank " in server.lines[-1] and "SIGKILL" in server.lines[-1]
    seen = f"{statuses.count(503)} of 4 got 503 in {answered:.1f} s; exit code {code} in {ended:.1f} s; named: {named}"
    return Check("rank SIGKILL", seen, set(statuses) == {503} and ended < DEADLINE_SECONDS and code == 1 and named)


def check_rank_stop(server: Server) -> Check:
    others = four_long(server)
    stopped = time.monotonic()
    server.rank(-1).suspend()
    statuses = [status for status, _, _ in others.results()]
    code = server.process.wait(LONGEST_SECONDS)
    ended = time.monotonic() - stopped
    named = f"rank {server.ranks - 1} " in server.lines[-1] and "not answered" in server.lines[-1]
    seen = f"{statuses.count(503)} of 4 got 503; exit code {code} in {ended:.0f} s; named: {named}"
    in_time = STUCK_SECONDS <= ended < STUCK_SECONDS + 3 * DEADLINE_SECONDS
    return Check("rank SIGSTOP", seen, set(statuses) == {503} and in_time and code == 1 and named)


def run_checks(options: argparse.Namespace, cases: Sequence[Case]) -> list[Check]:
    found: list[Check] = []
    small = ("--max-batch", "2", "--max-waiting", "2")
    with serving(options, "--max-batch", "4") as server:
        found += [check_disconnects(server), check_bad_requests(server)]
    with serving(options, *small) as server:
        found += [check_queue_limit(server), check_sigterm(server)]
    with serving(options, *small) as server:
        found.append(check_rank_death(server))
    longest = blocks_for(options.prompt_tokens + options.max_tokens)
    with serving(options, "--max-batch", "16", "--blocks", str(2 * longest)) as server:
        found.append(check_few_blocks(server, cases, options.max_tokens))
    with serving(options, *small) as server:
        found.append(check_rank_stop(server))
    return found
