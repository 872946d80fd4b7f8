"""The replay's one-page report: a self-contained HTML file, no network needed to read it."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

PACKAGE = "prefixfleet.router"


def write_html(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write the report of one run, or of two side by side, to ``path``."""
    path.write_text(render_html(runs), encoding="utf-8")


def render_html(runs: Sequence[Mapping[str, Any]]) -> str:
    """The page, with the charts' library and the figures inside.

    The figures hold texts from outside (file names, servers' errors): ``<`` is escaped so that
    none of them can end the script element that carries them.
    """
    page = packaged("replay_report.html")
    figures = json.dumps(list(runs)).replace("<", "\\u003c")
    page = page.replace("/*UPLOT_CSS*/", packaged("uplot.min.css"))
    page = page.replace("/*UPLOT_JS*/", packaged("uplot.min.js"))
    return page.replace("/*RUNS*/", figures)


def packaged(name: str) -> str:
    """A text file that lies beside this one."""
    return resources.files(PACKAGE).joinpath(name).read_text(encoding="utf-8")
