"""The replay's one-page report: a self-contained HTML file, no network needed to read it."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

PACKAGE = "prefixfleet.router"


def render_html(runs: Sequence[Mapping[str, Any]]) -> str:
    """The page of one run, or of two side by side, with the charts' library and the figures inside.

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
