"""A small run of racks: as processes, and one after the other in this process as what they are compared with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from surgeon.models.edit import program_of
from surgeon.quality.data import Windows, digest_of
from surgeon.training.racks.model import RackModel, open_rack, rack_of
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.process import train_in_processes
from surgeon.training.racks.run import RACK_FILE, RackOptions, RacksToTrain, rack_folder, train_in_turn
from surgeon.training.run import TrainedModel
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainingText, TrainTexts
from tests.tiny_models import tiny_model
from tests.training.racks.reference import train_together


def windows(count: int, seed: int) -> Windows:
    ids = torch.randint(3, 60, (count, 8), generator=torch.Generator().manual_seed(seed))
    return Windows(ids, "random", digest_of(ids))


TEXTS = TrainTexts(TrainingText.of(windows(10, 1)), windows(3, 2))
SETTINGS = TrainSettings(
    scope="all", steps=6, batch=4, micro_batch=2, learning_rate=1e-2, evaluate_every=2, save_every=2,
    arguments={"logging_steps": 1},
)  # fmt: skip
THREE, TWO = "0:1,1:2,2:3", "0:1,1:3"


def whole(dropout: float = 0.2) -> Any:
    """With dropout, so that random numbers count, too."""
    return tiny_model("llama", 3, dropout=dropout)


def racks_of(model: Any, texts: str = THREE) -> Racks:
    return Racks.parse(texts, program_of(model), 1)


def rack_options(**options: Any) -> RackOptions:
    return RackOptions(THREE.split(","), processes=True, **options)


def one_after_the_other(folder: Path, settings: TrainSettings = SETTINGS) -> TrainedModel:
    """What three racks come to in one process."""
    model = whole()
    return train_in_turn(RacksToTrain(model, racks_of(model), TEXTS, settings, folder))


def weights(folder: Path, racks: int = 3) -> list[dict[str, Tensor]]:
    """Of every rack at the end."""
    return [load_file(rack_folder(folder, index) / RACK_FILE) for index in range(racks)]


def in_processes(
    folder: Path,
    settings: TrainSettings = SETTINGS,
    dropout: float = 0.2,
    racks: str = THREE,
    **options: Any,
) -> TrainedModel:
    """What they come to in processes of their own."""
    model = whole(dropout)
    given = rack_options(**{"threads": 1, "away": 60.0} | options)
    return train_in_processes(
        RacksToTrain(model, racks_of(model, racks), TEXTS, settings, folder), given
    )


def in_step(
    settings: TrainSettings, racks: str, average: int | None = None
) -> tuple[list[RackModel], list[Any]]:
    """What racks without dropout come to in plain PyTorch, and the loss of each at each step."""
    model = whole(0.0)
    cut = racks_of(model, racks)
    found = [rack_of(model, cut, index) for index in range(len(cut))]
    return found, train_together(found, TEXTS.training.ids, settings, average)


def require_close(
    folder: Path, expected: Sequence[RackModel], tolerance: float = 1e-5
) -> list[RackModel]:
    """The racks of a run that is done, whose weights are these."""
    found = [open_rack(rack_folder(folder, index) / RACK_FILE) for index in range(len(expected))]
    for mine, wanted in zip(found, expected, strict=True):
        state = wanted.model.state_dict()
        for name, value in mine.model.state_dict().items():
            assert torch.allclose(value, state[name], atol=tolerance), (mine.index, name)
    return found


def main(folder: str, ahead: str = "4") -> None:
    """The same as a command."""
    torch.set_num_threads(1)
    in_processes(Path(folder), ahead=int(ahead))
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
