"""The one reader of the environment: ``PREFIXFLEET_*`` names to frozen, checked records.

A process reads its own section (`SECTIONS`) and the fleet-wide names. A name that its section does
not have stops the start; other sections are left to their own processes.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from prefixfleet.store.errors import ConfigError

PREFIX = "PREFIXFLEET_"
SECTIONS = ("ROUTER_", "NODE_", "WORKER_", "TRTLLM_")
MIN_SECRET_BYTES = 16


class Section(BaseModel):
    """Base of a settings record; a subclass names its section and its fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        allow_inf_nan=False,  # a wait or a limit without an end
    )
    section: ClassVar[str] = ""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The record in ``environ`` (the process environment by default).

        Raises:
            ConfigError: unknown names or wrong values, all of them, each with what to set.
        """
        prefix = PREFIX + cls.section
        values = {
            name.removeprefix(prefix).lower(): value
            for name, value in (os.environ if environ is None else environ).items()
            if name.startswith(prefix) and not (cls.section == "" and _of_a_section(name))
        }
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(cls._explain(error, prefix))) from None

    @classmethod
    def _explain(cls, error: ValidationError, prefix: str) -> list[str]:
        lines = []
        for problem in error.errors(include_url=False):
            name = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                close = difflib.get_close_matches(name, list(cls.model_fields), 1)
                hint = f"; did you mean {prefix}{close[0].upper()}?" if close else ""
                lines.append(f"environment: unknown setting {prefix}{name.upper()}{hint}")
            else:
                lines.append(f"environment: {prefix}{name.upper()}: {_what(problem)}")
        return lines


class FleetSettings(Section):
    """What every process of a fleet must agree on.

    ``redis_url`` is redis://, rediss:// or unix://; redis+sentinel://[[user]:password@]host,host/[db]
    ?master=NAME[&sentinel_password=...]; or redis+cluster://[[user]:password@]host,host, where a
    fleet lies on one shard.
    """

    fleet: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    secret_file: Path | None = None

    def secret(self) -> bytes:
        """The cluster secret. Raises `ConfigError` if the file is absent, unreadable or short."""
        if self.secret_file is None:
            raise ConfigError(
                f"no cluster secret: set {PREFIX}SECRET_FILE to a file of at least "
                f"{MIN_SECRET_BYTES} random bytes, the same on every host"
            )
        try:
            secret = self.secret_file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"{PREFIX}SECRET_FILE: {error}") from error
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"{PREFIX}SECRET_FILE: {self.secret_file} holds {len(secret)} bytes, "
                f"expected at least {MIN_SECRET_BYTES}"
            )
        return secret


def _what(problem: ErrorDetails) -> str:
    if problem["type"] == "literal_error":  # one of a few names is no secret
        return f"got {problem['input']!r:.80}, expected {problem['ctx']['expected']}"
    return problem["msg"]


def _of_a_section(name: str) -> bool:
    return name.removeprefix(PREFIX).startswith(SECTIONS)
