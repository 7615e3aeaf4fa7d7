"""lm-eval's own client of OpenAI's API scores tasks through a server as `surgeon eval` does in its own process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.servers import Server

pytest.importorskip("tenacity", reason="pip install 'lm-eval[api]'")


def answered(results: dict[str, Any], task: str) -> list[list[tuple[float, bool]]]:
    """Of each row, the log-likelihood of each text asked about, and whether greedy decoding would write it."""
    return [[answer for (answer,) in sample["resps"]] for sample in results["samples"][task]]


@pytest.mark.parametrize("together", [1, 3])
def test_scores_through_a_server_are_those_of_surgeon_eval(
    server: Server, chat_model: Path, tmp_path: Path, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    import surgeon
    from surgeon.quality.tasks import load_tasks
    from tests.quality import tasks_helpers as helpers
    from tests.tiny_models import tiny_tokenizer

    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)  # it takes most of a second
    texts = {
        "choices": helpers.CHOICES,
        "contexts": helpers.CONTEXTS,
        "continuations": helpers.CONTINUATIONS,
    }
    paths = [helpers.write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in texts.items()]
    model, tokenizer = surgeon.load(chat_model), tiny_tokenizer()
    offline = helpers.evaluate(model, tokenizer, *paths)
    client = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="tiny-chat",
        tokenizer=str(chat_model),
        add_bos_token=True,
        batch_size=together,
        max_length=128,
        max_retries=1,
    )
    tasks = load_tasks([str(path) for path in paths], 128)
    served = evaluate(lm=client, task_dict=tasks.loaded, bootstrap_iters=0, log_samples=True)
    for name in texts:
        rows = zip(answered(served, name), answered(offline, name), strict=True)
        for ours, theirs in [pair for row in rows for pair in zip(*row, strict=True)]:
            assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
            assert ours[1] == theirs[1]
        for metric, value in offline["results"][name].items():
            if isinstance(value, float) and "stderr" not in metric:
                assert served["results"][name][metric] == pytest.approx(value, rel=1e-4), metric
