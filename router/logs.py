"""The router's log: a line a decision, written in blocks, so that a line costs no system call."""

import asyncio
import logging
import sys
import time
from typing import TextIO

from prefixfleet.router.json_log import JsonFormatter

FLUSH_S = 0.25
BUFFER_BYTES = 64 * 1024
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LineFormatter(logging.Formatter):
    """Formats times as `logging.Formatter` does, but asks for each second once."""

    def __init__(self, form: str = FORMAT) -> None:
        super().__init__(form)
        self._second: tuple[int, str] = (-1, "")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """See `logging.Formatter`; ``datefmt`` is not looked at."""
        number, text = self._second
        if number != int(record.created):
            number = int(record.created)
            text = time.strftime(self.default_time_format, self.converter(number))
            self._second = (number, text)
        return f"{text},{int(record.msecs):03d}"


class BlockHandler(logging.StreamHandler[TextIO]):
    """Lines up to INFO wait for the next `flush`; a warning takes all before it along at once."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.setFormatter(LineFormatter())

    def use_json(self) -> None:
        """Write one JSON object a line from now on."""
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line into the block; see `logging.Handler`."""
        try:
            self.stream.write(self.format(record) + self.terminator)
            if record.levelno >= logging.WARNING:
                self.flush()
        except (OSError, ValueError):
            self.handleError(record)


def start_logging() -> BlockHandler:
    """Log to standard error from now on; whoever starts it runs `flush_logs`."""
    # Nothing prints these, and they are half of the time that a line takes
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # as the logging HOWTO says: nobody looks for the caller
    stream = open(sys.stderr.fileno(), "w", BUFFER_BYTES, encoding="utf-8", closefd=False)  # noqa: SIM115
    handler = BlockHandler(stream)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    return handler


async def flush_logs(handler: BlockHandler) -> None:
    """Write what waits, again and again until cancelled."""
    try:
        while True:
            await asyncio.sleep(FLUSH_S)
            handler.flush()
    finally:
        handler.flush()
