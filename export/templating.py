"""The templates of pages, and how they are filled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


def environment(finalize: Callable[[Any], Any] | None = None) -> Environment:
    """Templates whose values are escaped and all have to be there; `finalize` sees every value first."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalize,
    )
    made.filters["literal"] = Markup
    return made
