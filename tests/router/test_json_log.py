"""Log lines as JSON: one object a line, with the terms of each decision."""

import io
import json
import logging

from prefixfleet.router.logs import BlockHandler


def lines(handler_stream):
    return [json.loads(line) for line in handler_stream.getvalue().splitlines()]


async def test_each_request_has_one_line_that_says_why(rig):
    engine = await rig.engine()
    await rig.start(engine)
    stream = io.StringIO()
    handler = BlockHandler(stream)
    handler.use_json()
    logger = logging.getLogger("prefixfleet.router.decisions")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        _, headers, _ = await rig.post()
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)

    (line,) = lines(stream)
    assert line["request"] == headers["x-prefixfleet-request"]
    assert (line["worker"], line["node"], line["source"]) == ("a", "node-a", "nobody")
    assert {"tokens", "hit_blocks", "pull_blocks", "queue_s", "pull_s", "prefill_s"} <= set(line)
    assert line["level"] == "info"


def test_what_stands_in_a_message_cannot_make_a_second_line():
    stream = io.StringIO()
    handler = BlockHandler(stream)
    handler.use_json()
    try:
        raise ValueError('a "fault"\nof two lines')
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "", 0, "failed: %s", (error,), (type(error), error, None)
        )
    handler.emit(record)

    (line,) = lines(stream)
    assert line["message"] == 'failed: a "fault"\nof two lines'
    assert "ValueError" in line["exception"]
