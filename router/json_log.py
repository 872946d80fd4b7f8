"""Log lines as JSON objects, one a line: time, level, logger, message, and a decision's terms."""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

DECISION = "decision"
"""Name of the attribute of a log record that holds more fields."""


_NOT_LOOKED_FOR = vars(logging.LogRecord("", logging.INFO, "", 0, "", None, None))


class DecisionRecord(logging.LogRecord):
    """An INFO line with ``terms``: what ``log.info(form, terms, extra={DECISION: terms})`` makes,
    without looking for what nobody prints (threads, processes, the caller)."""

    def __init__(self, name: str, form: str, terms: Mapping[str, object], now: float) -> None:
        """``now`` is when it was taken, in seconds since 1970."""
        self.__dict__.update(_NOT_LOOKED_FOR)
        self.__dict__.update(
            {"name": name, "msg": form, "args": terms, DECISION: terms},
            created=now,
            msecs=now % 1 * 1_000,
        )


class JsonFormatter(logging.Formatter):
    """Formats any record; whatever is in its attribute `DECISION` becomes fields of the line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line without a line end; see `logging.Formatter`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, DECISION, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
