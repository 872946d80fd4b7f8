"""The router's own ways to make log lines give what `logging` gives."""

import io
import logging

from prefixfleet.router.json_log import DECISION, DecisionRecord
from prefixfleet.router.logs import FORMAT, BlockHandler, LineFormatter

FORM = "request %(request)s: %(tokens)d tokens"
TERMS = {"request": "r", "tokens": 12}


def test_a_line_is_the_one_that_logging_formats():
    ours, theirs = LineFormatter(), logging.Formatter(FORMAT)
    for created in (0.0, 1.5, 1.999, 2.0004, 1_700_000_000.25, 1.25):
        record = logging.LogRecord("x", logging.INFO, "", 0, "said %s", ("it",), None)
        record.created, record.msecs = created, created % 1 * 1_000

        assert ours.format(record) == theirs.format(record)


def test_a_decision_is_the_record_that_logging_makes():
    seen = []
    logger = logging.getLogger("a test of decisions")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = logging.Handler()
    handler.emit = seen.append
    logger.addHandler(handler)

    logger.info(FORM, TERMS, extra={DECISION: TERMS})
    logger.handle(DecisionRecord(logger.name, FORM, TERMS, 12.25))

    usual, ours = seen
    plain = logging.LogRecord("x", logging.INFO, "", 0, "", None, None)  # others may add to theirs
    assert set(vars(ours)) == {*vars(plain), DECISION}
    same = ("name", "msg", "args", "levelno", "levelname", "exc_info", DECISION)
    assert [getattr(usual, n) for n in same] == [getattr(ours, n) for n in same]
    assert ours.getMessage() == usual.getMessage() == "request r: 12 tokens"
    assert (ours.created, ours.msecs) == (12.25, 250)


def test_a_warning_takes_the_lines_before_it_along():
    class Stream(io.StringIO):
        flushed = ""

        def flush(self):
            self.flushed = self.getvalue()

    stream = Stream()
    handler = BlockHandler(stream)

    handler.emit(DecisionRecord("x", FORM, TERMS, 0.0))
    assert stream.flushed == ""
    handler.emit(logging.LogRecord("x", logging.WARNING, "", 0, "late", None, None))

    assert stream.flushed.splitlines()[0].endswith("r: 12 tokens")
    assert stream.flushed.endswith("late\n")
