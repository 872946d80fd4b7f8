"""Writes what the chart says of settings from the settings classes themselves; run me to do so.

helm/SETTINGS.md lists them all; helm/values.schema.json knows those that a user of the chart may
set. The reason of a setting is the comment beside its field, or its `Field` description.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from prefixfleet.cluster.settings import NodeSettings, TrtllmSettings, WorkerSettings
from prefixfleet.router.settings import RouterSettings
from prefixfleet.store.settings import PREFIX, FleetSettings, Section

CHART = Path(__file__).resolve().parents[2] / "helm"
PAGE, SCHEMA = CHART / "SETTINGS.md", CHART / "values.schema.json"
WIDTH = 110
SECTIONS: dict[str, type[Section]] = {
    "Every process of a fleet": FleetSettings,
    "Router": RouterSettings,
    "Node daemon": NodeSettings,
    "Worker": WorkerSettings,
    "TensorRT-LLM engine": TrtllmSettings,
}
SET_BY_THE_CHART: dict[str, tuple[type[Section], set[str]]] = {
    "routerSettings": (RouterSettings, {"host", "port"}),
    "nodeSettings": (NodeSettings, {"name", "host", "port", "runtime_dir", "pool_bytes"}),
    "workerSettings": (
        WorkerSettings,
        {"name", "node", "host", "port", "socket_path", "log_file", "model", "served_name"},
    ),
}
HEAD = """# Settings

Made from the code by `python tests/support/settings_reference.py`; a test holds it against the
code. Each is a variable of the environment, read once when a process starts; an unknown name or a
wrong value stops the start, with what was expected. The chart takes them in `router.settings`,
and `nodeSettings` and `workerSettings` of a group, lower case and without the prefix.
"""
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def names() -> set[str]:
    """Every setting there is, by its full name."""
    return {
        f"{PREFIX}{section.section}{field.upper()}"
        for section in SECTIONS.values()
        for field in section.model_fields
    }


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, section in SECTIONS.items():
        rows = "\n".join(_row(section, name) for name in section.model_fields)
        parts.append(f"## {title}\n\n| name | default | expected | |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def schema() -> str:
    """The chart's schema as it is, with the settings as the code has them."""
    content = json.loads(SCHEMA.read_text())
    for name, (section, taken) in SET_BY_THE_CHART.items():
        fields = section.model_json_schema()["properties"]
        content["definitions"][name] = {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                field: {key: fields[field][key] for key in fields[field] if key in _KEPT}
                for field in section.model_fields
                if field not in taken
            },
        }
    return _laid_out(content) + "\n"


_KEPT = {"type", "enum", "pattern", "minimum", "maximum", "exclusiveMinimum", "minLength"}


def _laid_out(value: Any, indent: int = 0) -> str:
    """JSON, each part on one line where it fits."""
    line = json.dumps(value)
    if len(line) + indent <= WIDTH or not isinstance(value, dict | list):
        return line
    pad, deeper = " " * indent, indent + 1
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_laid_out(part, deeper)}" for key, part in value.items()]
        start, end = "{", "}"
    else:
        parts = [_laid_out(part, deeper) for part in value]
        start, end = "[", "]"
    return f"{start}\n" + ",\n".join(f"{pad} {part}" for part in parts) + f"\n{pad}{end}"


def _row(section: type[Section], name: str) -> str:
    field = section.model_fields[name]
    cells = [f"`{PREFIX}{section.section}{name.upper()}`", _default(field), _expected(field)]
    return "| " + " | ".join([*cells, _reason(section, name, field)]) + " |"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    return "none" if value is None or value == "" else f"`{value}`"


def _expected(field: FieldInfo) -> str:
    kind = re.sub(r"<class '(.*)'>", r"\1", str(field.annotation))
    kind = re.sub(r"\b(pathlib|typing|pydantic\.types)\.", "", kind).replace("SecretStr", "str")
    words = [kind]
    for rule in field.metadata:
        found = re.fullmatch(r"(\w\w)\(\w\w=(.*)\)", str(rule).lower())
        if found and found[1] in BOUNDS:
            words.append(f"{BOUNDS[found[1]]} {found[2]}")
        elif pattern := re.search(r"pattern='([^']*)'", str(rule)):
            words.append(f"`{pattern[1]}`")
    return ", ".join(words).replace(" | ", " or ")


def _reason(section: type[Section], name: str, field: FieldInfo) -> str:
    source = inspect.getsource(section)
    beside = re.search(rf"^    {name}: .*?  # (.*)$", source, re.MULTILINE)
    return field.description or (beside[1] if beside else "")


if __name__ == "__main__":
    PAGE.write_text(page())
    SCHEMA.write_text(schema())
