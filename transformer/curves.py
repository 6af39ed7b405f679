"""How a training went, to be looked at: a file of its curve, and TensorBoard while it runs.

`curve.json` of a trained checkpoint holds `deciding` (the metric that chose the best epoch), `points` (step, mean loss
since the point before, learning rate, norms of the gradients by layer) and `epochs` (epoch, step, metrics on valid).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import InputError
from .files import write_file, writing

CURVE = "curve.json"


@dataclass(frozen=True)
class CurvePoint:
    """A step of a training: the mean loss of the steps since the point before, the learning rate, and gradients.

    `gradients` are the norms of each part's gradient (`training.gradient_norms`) before clipping, at this step.
    """

    step: int
    loss: float
    lr: float
    gradients: dict[str, float]


def write_curve(
    directory: Path, points: Sequence[CurvePoint], epochs: Sequence[Mapping[str, Any]], deciding: str
) -> None:
    """Write the curve into a checkpoint directory."""
    content = {"deciding": deciding, "points": [asdict(point) for point in points], "epochs": list(epochs)}
    write_file(directory / CURVE, json.dumps(content) + "\n")


def read_curve(directory: Path) -> dict[str, Any]:
    """The curve of a trained checkpoint.

    Raises:
        InputError: there is none, or it is not one.
    """
    if not (directory / CURVE).is_file():
        raise InputError(f"{directory} has no {CURVE}: name a directory that slimformer train wrote")
    try:
        content = json.loads((directory / CURVE).read_text(encoding="utf-8"))
        points = [CurvePoint(**point) for point in content["points"]]
        epochs = [{"step": int(epoch["step"]), **epoch} for epoch in content["epochs"]]
        return {"deciding": str(content["deciding"]), "points": points, "epochs": epochs}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{directory / CURVE}: not the curve of a training ({error})") from error


class Board:
    """Writes the curve for TensorBoard, whose package has to be installed."""

    def __init__(self, directory: Path) -> None:
        """Open the directory; raises InputError where TensorBoard is not installed or the disk does not take it."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError("TensorBoard is not installed: pip install slimformer[tensorboard]") from error
        with writing(directory):
            self._writer: Any = SummaryWriter(str(directory))

    def point(self, point: CurvePoint) -> None:
        """A point of the curve."""
        values = {"loss": point.loss, "learning rate": point.lr}
        values |= {f"gradient/{part}": norm for part, norm in point.gradients.items()}
        self._scalars("train", values, point.step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """What an epoch came to on valid."""
        self._scalars("valid", values, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _scalars(self, split: str, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{split}/{name}", value, step)
