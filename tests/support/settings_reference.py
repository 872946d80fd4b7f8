"""Writes helm/SETTINGS.md from the settings classes; run me: ``python settings_reference.py``.

The reason of a setting is the comment beside its field, or its `Field` description.
"""

import inspect
import re
from pathlib import Path

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from prefixfleet.cluster.settings import NodeSettings, WorkerSettings
from prefixfleet.router.settings import RouterSettings
from prefixfleet.store.settings import PREFIX, FleetSettings, Section

PAGE = Path(__file__).resolve().parents[2] / "helm/SETTINGS.md"
SECTIONS: dict[str, type[Section]] = {
    "Every process of a fleet": FleetSettings,
    "Router": RouterSettings,
    "Node daemon": NodeSettings,
    "Worker": WorkerSettings,
}
HEAD = """# Settings

Made from the code by `python tests/support/settings_reference.py`; a test holds it against the
code. Each is a variable of the environment, read once when a process starts; an unknown name or a
wrong value stops the start, with what was expected.
"""


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
    annotation = re.sub(r"(pathlib\.|typing\.|pydantic\.types\.)", "", str(field.annotation))
    kind = re.sub(r"<class '(.*)'>", r"\1", annotation).replace("SecretStr", "str")
    bounds = [re.sub(r"^(\w)(\w)\(\w+=(.*)\)$", r"\1\2 \3", str(m).lower()) for m in field.metadata]
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    plain = []
    for bound in bounds:
        sign, _, limit = bound.partition(" ")
        if sign in words:
            plain.append(f"{words[sign]} {limit}")
        elif pattern := re.search(r"pattern='([^']*)'", bound):
            plain.append(f"`{pattern[1]}`")
    return ", ".join([kind.replace("|", "or"), *plain]).replace("|", "\\|")


def _reason(section: type[Section], name: str, field: FieldInfo) -> str:
    source = inspect.getsource(section)
    beside = re.search(rf"^    {name}: .*?  # (.*)$", source, re.MULTILINE)
    return field.description or (beside[1] if beside else "")


if __name__ == "__main__":
    PAGE.write_text(page())
