"""What is known of a checkpoint that was exported: its report, surgeon.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surgeon.findings.result import RunResult


@dataclass(frozen=True, repr=False)
class ExportRun(RunResult):
    """The result of `export`."""

    COMMAND = "export"
    RECORD = "surgeon.json"

    @classmethod
    def is_ours(cls, record: dict[str, Any]) -> bool:
        return isinstance(record.get("form"), str) and isinstance(record.get("source"), dict)

    @classmethod
    def model_of(cls, record: dict[str, Any]) -> tuple[str, str]:
        source, trained = record["source"], record.get("trained")
        if "model" in source and source["model"] is None and isinstance(trained, dict):
            return from_scratch(trained.get("data")), ""
        return super().model_of(source)


def from_scratch(data: Any) -> str:
    """What models from scratch go by where others go by their original: the text that they were trained on."""
    return f"models from scratch on {data}"
