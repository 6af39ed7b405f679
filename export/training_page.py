"""How trainings went, side by side on one page: what they came to, and the curves of loss, metric and gradients.

Reads the directories that `slimformer train` wrote; needs no torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ..transformer.config import TransformerConfig
from ..transformer.curves import CURVE, read_curve
from ..transformer.errors import InputError
from ..transformer.files import write_file
from .figure import ACCENT, INK, LONGEST, RULE, SOFT, empty, plain_axes, svg_of
from .numbers import MISSING, at, count, decimals, points
from .tables import Table, cell
from .templating import environment

TRAINING_FILE = "training.html"
WIDTH, HEIGHT = 4.6, 3.2  # inches
STRIP = 0.34  # height of a layer's strip
STYLES = ((ACCENT, "-"), (INK, "--"), (SOFT, ":"), (ACCENT, "-."), (INK, ":"), (SOFT, "--"))


@dataclass(frozen=True)
class Training:
    """A trained checkpoint as the page shows it; `curve` as `read_curve` gives it."""

    name: str
    shape: str
    notes: Mapping[str, Any]
    curve: Mapping[str, Any]


def is_training(path: Path) -> bool:
    """Whether a directory holds a trained checkpoint with its curve."""
    return (path / CURVE).is_file()


def read_training(name: str, directory: Path) -> Training:
    """Read what the page shows; raises InputError where the directory is not what `slimformer train` writes."""
    curve = read_curve(directory)
    try:
        config = TransformerConfig.from_json(
            (directory / "config.json").read_text(encoding="utf-8"), str(directory / "config.json")
        )
        notes = json.loads((directory / "provenance.json").read_text(encoding="utf-8"))["training"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{directory}: not a trained checkpoint ({error})") from error
    return Training(name, shape_of(config), notes, curve)


def shape_of(config: TransformerConfig) -> str:
    """Layers by their mixers, such as `6 x attention, then 2 x ssru`."""
    stacks = []
    for stack in (config.encoder, config.decoder):
        kinds = [layer.mixer.kind if layer.mixer is not None else "no mixer" for layer in stack]
        names = dict.fromkeys(kinds)
        if kinds:
            stacks.append(" and ".join(f"{kinds.count(name)} x {name}" for name in names))
    return ", then ".join(stacks)


def write_training(trainings: Sequence[Training], file: Path) -> None:
    """Write the page; raises InputError where the disk does not take it."""
    page = {"table_of_runs": table_of(trainings), "figures": figures(trainings)}
    write_file(file, environment().get_template("training.html.j2").render(page))


def table_of(trainings: Sequence[Training]) -> Table:
    """A row for each training: its model, what it took, and what the test split says."""
    metrics = list(dict.fromkeys(name for one in trainings for name in at(one.notes, "test") or {}))
    rows = []
    for one in trainings:
        log = at(one.notes, "log") or {}
        seconds = log.get("seconds")
        row = [one.name, one.shape, MISSING if seconds is None else decimals(seconds / 60, 1)]
        row += [count(log.get("steps")), count(log.get("texts")), count(at(one.notes, "best"))]
        rows.append([cell(text) for text in row + [points(at(one.notes, "test", name)) for name in metrics]])
    heads = ["Training", "Layers", "Minutes", "Steps", "Texts seen", "Best epoch", *(f"{m}, test" for m in metrics)]
    return Table.of(heads, rows)


def figures(trainings: Sequence[Training]) -> list[tuple[str, Markup]]:
    """(caption, SVG): loss, deciding metric and learning rate of all, then each one's gradients by layer."""
    drawn: list[tuple[str, Markup]] = []
    deciding = dict.fromkeys(one.curve["deciding"] for one in trainings)
    for caption, name, series in (
        ("Loss on train, mean since the point before", "loss", [_points(one, "loss") for one in trainings]),
        *((f"{metric} on valid", metric, [_epochs(one, metric) for one in trainings]) for metric in deciding),
        ("Learning rate", "learning rate", [_points(one, "lr") for one in trainings]),
    ):
        lines = [(one.name, line) for one, line in zip(trainings, series, strict=True) if line]
        if lines:
            drawn.append((caption, Markup(_lines(lines, name, f"figure{len(drawn)}"))))
    for one in trainings:
        if one.curve["points"]:
            caption = f"{one.name}: norm of the gradient by layer, before clipping, on one logarithmic scale"
            drawn.append((caption, Markup(_strips(one, f"figure{len(drawn)}"))))
    return drawn


Line = list[tuple[float, float]]


def _points(one: Training, name: str) -> Line:
    return [(point.step, getattr(point, name)) for point in one.curve["points"]]


def _epochs(one: Training, metric: str) -> Line:
    return [(epoch["step"], float(epoch[metric])) for epoch in one.curve["epochs"] if metric in epoch]


def _lines(lines: Sequence[tuple[str, Line]], name: str, key: str) -> str:
    with empty(WIDTH, HEIGHT) as figure:
        figure.subplots_adjust(left=0.16, right=0.97, top=0.97, bottom=0.15)
        axes = figure.add_subplot()
        for i, (label, line) in enumerate(lines):
            colour, style = STYLES[i % len(STYLES)]
            mark = "o" if len(line) == 1 else ""
            axes.plot(*zip(*line, strict=True), color=colour, linestyle=style, linewidth=1.4, marker=mark, label=label)
        plain_axes(axes, "optimizer steps", name[:LONGEST])
        if len(lines) > 1:
            for text in axes.legend(frameon=False).get_texts():
                text.set_color(INK)
                text.set_parse_math(False)
        return svg_of(figure, key)


def _strips(one: Training, key: str) -> str:
    """A strip for each layer, all with the same axes."""
    curve = one.curve["points"]
    parts = list(dict.fromkeys(part for point in curve for part in point.gradients))
    values = [norm for point in curve for norm in point.gradients.values() if norm > 0]
    limits = (min(values, default=0.1) / 1.5, max(values, default=1.0) * 1.5)
    height = STRIP * len(parts) + 0.6
    with empty(WIDTH, height) as figure:
        figure.subplots_adjust(left=0.26, right=0.97, top=1 - 0.05 / height, bottom=0.5 / height, hspace=0.15)
        grid = figure.subplots(len(parts), 1, sharex=True, squeeze=False)
        for axes, part in zip(grid[:, 0], parts, strict=True):
            line = [(point.step, point.gradients[part]) for point in curve if point.gradients.get(part, 0) > 0]
            if line:
                axes.plot(*zip(*line, strict=True), color=ACCENT, linewidth=1)
            axes.set_yscale("log")
            axes.set_ylim(*limits)
            plain_axes(axes, "optimizer steps" if part == parts[-1] else "", "")
            axes.set_ylabel(part, color=INK, rotation=0, ha="right", va="center", parse_math=False)
            axes.tick_params(which="both", left=False, labelleft=False, bottom=part == parts[-1])
            axes.axhline(limits[0], color=RULE, linewidth=1)
        return svg_of(figure, key)
