"""How a server ends: told to, or by a rank's death."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2

from surgeon.processes.children import PATIENCE_SECONDS
from tests.server.servers import serving
from tests.waiting import wait_until

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {
    "prompt": "The quick brown fox",
    "max_tokens": 800,
    "ignore_eos": True,
    "temperature": 0,
}
KEY = "a key with spaces"


def read_all(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def test_sigterm_lets_running_requests_finish(chat_model: Path) -> None:
    """The server has a key, too, and one place for a request and one in the queue."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with serving(
        str(chat_model), "--tp", "2", "--max-batch", "1", "--max-waiting", "1", key=KEY
    ) as server:
        wrong: list[dict[str, str]] = [{}, {"Authorization": KEY}, {"Authorization": f"Bearer {KEY}x"}]
        for each in wrong:
            answer = server.ask("GET", "/v1/models", headers=each)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert KEY not in answer.text
        assert server.ask("POST", COMPLETIONS, json=LONG).status_code == 401
        assert server.ask("GET", "/v1/models", headers=headers).status_code == 200
        assert server.ask("GET", "/health").status_code == 200

        answers: list[httpx2.Response] = []

        def ask() -> None:
            body = LONG | {"max_tokens": 400}
            answers.append(server.ask("POST", COMPLETIONS, json=body, headers=headers))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        server.wait_for(lambda found: (found["surgeon_running"], found["surgeon_waiting"]) == (1, 1))
        # So that the requests have not ended before anything has been looked at.
        for rank in server.ranks():
            rank.suspend()
        server.send(signal.SIGTERM)
        wait_until(lambda: server.ask("GET", "/health").status_code == 503)
        refused = server.ask("POST", COMPLETIONS, json=LONG, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        for rank in server.ranks():
            rank.resume()
        for thread in threads:
            thread.join()
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [400, 400]
        assert server.wait_until_ended() == 0
        assert server.lines[-1] == "ending; 2 open requests first"
        assert answers[0].json()["choices"][0]["text"] == answers[1].json()["choices"][0]["text"]


def test_a_second_sigterm_ends_at_once(chat_model: Path) -> None:
    with serving(str(chat_model), "--tp", "2") as server:
        ranks = server.ranks()
        with server.open_request(COMPLETIONS, LONG | {"max_tokens": 8000}):
            server.wait_for(lambda found: found["surgeon_running"] == 1)
            server.send(signal.SIGTERM)
            wait_until(lambda: server.ask("GET", "/health").status_code == 503)
            server.send(signal.SIGTERM)
            assert server.wait_until_ended() == 1
        assert (
            server.lines[-1] == "error: ended by a second SIGTERM; requests that were running are lost"
        )
        assert len(ranks) == 2
        assert not any(rank.is_running() and rank.status() != "zombie" for rank in ranks)


def test_a_killed_rank_fails_every_request_and_the_server(chat_model: Path) -> None:
    arguments = (str(chat_model), "--tp", "2", "--max-batch", "2")
    with serving(*arguments) as server:
        body = LONG | {"max_tokens": 8000}
        whole = [server.open_request(COMPLETIONS, body) for _ in range(4)]
        stream = server.open_request(COMPLETIONS, body | {"stream": True})
        waiting = server.open_request(COMPLETIONS, body | {"stream": True})
        server.wait_for(lambda found: (found["surgeon_running"], found["surgeon_waiting"]) == (2, 4))
        victim = server.ranks()[1]
        killed = time.monotonic()
        victim.kill()
        answers = [read_all(connection) for connection in (*whole, stream, waiting)]
        assert server.wait_until_ended() == 1
        # After which ranks that do not answer are given up.
        assert time.monotonic() - killed < PATIENCE_SECONDS
        assert server.lines[-1].startswith(f"error: rank 1 (process {victim.pid}) was ended by SIGKILL")
    assert sum(answer.startswith(b"HTTP/1.1 503") for answer in answers) >= 4
    for answer in answers:
        assert b'"code":"rank_failed"' in answer
        assert b"rank 1" in answer
        assert b"[DONE]" not in answer
