"""Figures as SVG that takes the page's colours; here the report's: what each stage lost against what it gained.

The same points always give the same bytes: matplotlib's ids are salted with a constant and no date is written.
"""

import io
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.6, 3.2  # inches; the page scales them
LONGEST = 32  # characters of a name
# Colours that matplotlib draws with, and what the page puts in their place.
COLOURS = {"#000001": "currentColor", "#000002": "var(--accent)", "#000003": "var(--rule)", "#000004": "var(--soft)"}
INK, ACCENT, RULE, SOFT = COLOURS


@dataclass(frozen=True)
class Point:
    """A stage: speed-up against accuracy difference, each with the ends of its interval."""

    label: str
    speedup: tuple[float, float, float]
    loss: tuple[float, float, float]


@contextmanager
def empty(width: float, height: float) -> Iterator["Figure"]:
    """A figure to draw on, in inches; what is drawn inside the block looks alike on all pages."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # its first run announces a cache
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": "slimformer", "svg.fonttype": "none", "font.size": 9, "axes.unicode_minus": False}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height))
        FigureCanvasSVG(figure)
        yield figure


def plain_axes(axes: "Axes", x: str, y: str) -> None:
    """The page's ink, and of the frame the two sides with numbers."""
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK, parse_math=False)
    axes.tick_params(which="both", colors=INK, length=3)
    for side, spine in axes.spines.items():
        spine.set_color(RULE)
        spine.set_visible(side in ("left", "bottom"))


def svg_of(figure: "Figure", key: str) -> str:
    """A figure's `<svg>` element, its ids beginning with `key`."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(text.getvalue(), key)


def draw(points: Sequence[Point], metric: str, key: str) -> str:
    """One `<svg>` element of at least one point, its ids beginning with `key`."""
    with empty(WIDTH, HEIGHT) as figure:
        figure.subplots_adjust(left=0.16, right=0.98, top=0.97, bottom=0.15)
        axes = figure.add_subplot()
        axes.axhline(0, color=RULE, linewidth=1)
        x, y = [p.speedup[0] for p in points], [p.loss[0] for p in points]
        axes.plot(x, y, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
        axes.errorbar(
            x,
            y,
            xerr=_arms([p.speedup for p in points]),
            yerr=_arms([p.loss for p in points]),
            fmt="o",
            markersize=4.5,
            color=ACCENT,
            elinewidth=1.3,
            capsize=2.5,
        )
        top, bottom = max(p.loss[2] for p in points), min(p.loss[1] for p in points)
        _label(axes, points, gap=(top - bottom) * 0.09)
        axes.margins(x=0.14, y=0.14)
        plain_axes(axes, "speed-up, times the original's speed", f"{metric[:LONGEST]}, points against the original")
        return svg_of(figure, key)


def _arms(values: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """(middle, low, high) of each point -> lengths below and above, as matplotlib wants them."""
    return [[max(m - low, 0) for m, low, _ in values], [max(high - m, 0) for m, _, high in values]]


def _label(axes: "Axes", points: Sequence[Point], gap: float) -> None:
    """Write each name beside its point; one that would stand on the name before it goes below its point."""
    taken: list[tuple[float, float]] = []
    first, last = min(p.speedup[1] for p in points), max(p.speedup[2] for p in points)
    spread = last - first
    for point in points:
        x, y = point.speedup[0], point.loss[0]
        below = any(abs(x - other) < 0.2 * spread and abs(y - height) < gap for other, height in taken)
        right = x > first + spread / 2  # of the middle: written towards it
        taken.append((x, y))
        axes.annotate(
            point.label[:LONGEST],
            (x, y),
            xytext=(-5 if right else 5, -5 if below else 5),
            textcoords="offset points",
            ha="right" if right else "left",
            va="top" if below else "bottom",
            color=INK,
            parse_math=False,
        )


def _inline(document: str, key: str) -> str:
    """The `<svg>` element alone, without metadata and size, with the page's colours and ids of its own."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    svg = f'<svg {box[0] if box else ""} role="img" aria-hidden="true">{rest}'
    svg = re.sub(r'\bid="|url\(#|xlink:href="#', lambda found: f"{found[0]}{key}-", svg).replace("xlink:href", "href")
    for drawn, shown in COLOURS.items():
        svg = svg.replace(drawn, shown)
    return svg
