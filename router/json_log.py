"""Log lines as JSON objects, one a line: time, level, logger, message, and a decision's terms."""

import logging
from datetime import UTC, datetime

import msgspec

DECISION = "decision"
"""Name of the attribute of a log record that holds more fields."""


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
