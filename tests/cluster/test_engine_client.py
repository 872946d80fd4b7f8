"""The engine's channel heals itself, answers or fails every question, and waits for nobody."""

import logging
import queue
import socket
import threading
import time
from contextlib import suppress

import pytest

from prefixfleet.cluster import engine_client
from prefixfleet.cluster.engine_channel import encode_frame, receive_frame
from prefixfleet.cluster.engine_client import EngineClient
from prefixfleet.store.errors import DeadlineExceeded, PeerLost, PeerRefused, ProtocolError

WELCOME = {
    "node": "n",
    "epoch": 3,
    "pool_path": "/p",
    "pool_bytes": 1,
    "hash_key": b"secret key",
    "namespace_digest": b"d" * 16,
}
WAIT_S = 20


class RawDaemon:
    """Does on the wire what the test says: its connections come out of ``connections``."""

    def __init__(self, path):
        self.connections: queue.Queue[socket.socket] = queue.Queue()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._open = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(WAIT_S)
                self._open.append(connection)
                self.connections.put(connection)

    def greeted(self, **changes):
        """The next connection, its hello answered."""
        connection = self.connections.get(timeout=WAIT_S)
        hello = receive_frame(connection)
        assert hello["op"] == "hello"
        say(connection, id=hello["id"], **WELCOME | changes)
        return connection

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()


def say(connection, **message):
    connection.sendall(encode_frame(message))


@pytest.fixture
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("s") / "d.sock"


@pytest.fixture
def daemon(path):
    running = RawDaemon(path)
    yield running
    running.close()


@pytest.fixture
def client(path):
    made = EngineClient(path, {"engine": "e", "role": "scheduler"})
    yield made
    made.close()


@pytest.fixture
def connected(daemon, client):
    """(client, connection) after the hello."""
    client.start()
    connection = daemon.greeted()
    assert client.settle(WAIT_S) is not None
    return client, connection


def test_the_welcome_is_read_and_keeps_the_key_out_of_logs(connected):
    client, _ = connected

    assert (client.welcome.node, client.welcome.epoch, client.welcome.connection) == ("n", 3, 1)
    assert "secret key" not in repr(client.welcome)


def test_answers_in_any_order_reach_their_questions(connected):
    client, connection = connected
    asked = [client.ask("release", within_s=WAIT_S, request=name) for name in "abc"]
    questions = [receive_frame(connection) for _ in asked]

    for question in reversed(questions):
        say(connection, id=question["id"], request=question["request"])

    assert [a.result(WAIT_S)["request"] for a in asked] == ["a", "b", "c"]


def test_without_a_daemon_a_question_fails_at_once_and_the_channel_heals(client, path, caplog):
    client.start()
    assert client.settle(WAIT_S) is None
    with pytest.raises(PeerLost):
        client.ask("release", within_s=WAIT_S).result(WAIT_S)

    daemon = RawDaemon(path)
    connection = daemon.greeted()
    deadline = time.monotonic() + WAIT_S
    while client.welcome is None and time.monotonic() < deadline:
        time.sleep(0.005)
    answer = client.ask("release", within_s=WAIT_S)  # the only one that can reach the daemon
    question = receive_frame(connection)
    say(connection, id=question["id"])

    assert answer.result(WAIT_S) == {}
    daemon.close()


def test_a_lost_daemon_is_logged_once_however_often_it_is_missed(client, monkeypatch, caplog):
    monkeypatch.setattr(engine_client, "FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(engine_client, "LAST_RETRY_S", 0.001)
    with caplog.at_level(logging.WARNING, "prefixfleet.cluster.engine_client"):
        client.start()
        client.settle(WAIT_S)
        for _ in range(200):
            client.ask("release", within_s=WAIT_S).exception(WAIT_S)

    assert len(caplog.records) == client.losses == 1


def test_a_question_that_is_not_answered_ends_the_connection_and_a_new_one_is_made(
    connected, daemon
):
    client, connection = connected
    late = client.ask("prepare", within_s=0.05)
    other = client.ask("release", within_s=WAIT_S)

    with pytest.raises(DeadlineExceeded, match="prepare"):
        late.result(WAIT_S)
    with pytest.raises(PeerLost):
        other.result(WAIT_S)
    daemon.greeted()
    assert receive_frame(connection)["op"] == "prepare"


def test_questions_in_flight_fail_when_the_daemon_goes(connected):
    client, connection = connected
    asked = [client.ask("release", within_s=WAIT_S) for _ in range(3)]
    receive_frame(connection)
    connection.shutdown(socket.SHUT_RDWR)

    for answer in asked:
        with pytest.raises(PeerLost):
            answer.result(WAIT_S)
    assert client.losses == 1


def test_a_refusal_is_told_and_not_taken_for_a_daemon(daemon, client):
    client.start()
    connection = daemon.connections.get(timeout=WAIT_S)
    say(connection, id=receive_frame(connection)["id"], error="another model")
    client.settle(WAIT_S)

    assert client.welcome is None
    assert client.refusal == "another model"
    daemon.greeted()  # it goes on asking


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "x"},
        {"hash_key": "text"},
        {"node": None},
        {"pool_bytes": 0},
        {"pool_bytes": -1},
        {"namespace_digest": b"d" * 15},
    ],
)
def test_a_welcome_that_is_none_is_no_daemon(daemon, client, change):
    client.start()
    daemon.greeted(**change)
    client.settle(WAIT_S)

    assert client.welcome is None


def test_an_answer_that_says_no_fails_its_question_only(connected):
    client, connection = connected
    first, second = (client.ask("reserve", within_s=WAIT_S) for _ in range(2))
    one, two = receive_frame(connection), receive_frame(connection)
    say(connection, id=one["id"], error="no room")
    say(connection, id=two["id"], slots=[1])

    with pytest.raises(PeerRefused, match="no room"):
        first.result(WAIT_S)
    assert second.result(WAIT_S) == {"slots": [1]}


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x01\0\0\0\x07"])
def test_junk_ends_the_connection_and_a_new_one_is_made(connected, daemon, junk):
    client, connection = connected
    answer = client.ask("release", within_s=WAIT_S)

    connection.sendall(junk)

    with pytest.raises(PeerLost):
        answer.result(WAIT_S)
    daemon.greeted()


@pytest.mark.parametrize("id", [[1], {"a": 1}, None, "1"])
def test_an_answer_without_a_number_ends_the_connection_and_a_new_one_is_made(
    connected, daemon, id
):
    client, connection = connected
    answer = client.ask("release", within_s=WAIT_S)

    say(connection, id=id)

    with pytest.raises(PeerLost):
        answer.result(WAIT_S)
    daemon.greeted()


def test_a_welcome_without_a_number_does_not_end_the_channel(daemon, client):
    client.start()
    connection = daemon.connections.get(timeout=WAIT_S)
    receive_frame(connection)
    say(connection, **WELCOME)
    welcome = client.settle(WAIT_S)

    assert welcome is not None
    assert welcome.connection == 1


def test_a_frame_that_the_daemon_could_not_read_ends_the_connection(connected, daemon):
    client, connection = connected
    answer = client.ask("release", within_s=WAIT_S)

    say(connection, id=0, error="what is that?")

    with pytest.raises(PeerLost):
        answer.result(WAIT_S)
    daemon.greeted()


def test_an_answer_that_nobody_waits_for_is_dropped(connected):
    client, connection = connected
    say(connection, id=4711, blocks=3)
    answer = client.ask("release", within_s=WAIT_S)
    say(connection, id=receive_frame(connection)["id"])

    assert answer.result(WAIT_S) == {}


def test_a_waiter_that_gives_up_does_not_end_the_channel(connected):
    client, connection = connected
    given_up = client.ask("prepare", within_s=WAIT_S)
    first = receive_frame(connection)

    assert not given_up.cancel()
    say(connection, id=first["id"], blocks=1)
    answer = client.ask("release", within_s=WAIT_S)
    say(connection, id=receive_frame(connection)["id"])

    assert answer.result(WAIT_S) == {}


def test_a_question_too_long_to_send_fails_alone(connected):
    client, connection = connected
    with pytest.raises(ProtocolError):
        client.ask("prepare", within_s=WAIT_S, chain=bytes(17 << 20)).result(WAIT_S)

    answer = client.ask("release", within_s=WAIT_S)
    say(connection, id=receive_frame(connection)["id"])
    assert answer.result(WAIT_S) == {}


def test_questions_do_not_pile_up_without_end(connected, monkeypatch):
    monkeypatch.setattr(engine_client, "MAX_OUTSTANDING", 3)
    client, _ = connected
    asked = [client.ask("release", within_s=WAIT_S) for _ in range(3)]

    with pytest.raises(PeerLost, match="3 questions"):
        client.ask("release", within_s=WAIT_S).result(WAIT_S)
    assert not any(answer.done() for answer in asked)


def test_closing_fails_what_is_asked_and_what_will_be(connected):
    client, _ = connected
    answer = client.ask("release", within_s=WAIT_S)

    client.close()

    for question in (answer, client.ask("release", within_s=WAIT_S)):
        with pytest.raises(PeerLost):
            question.result(WAIT_S)


def test_a_client_that_was_never_started_fails_its_questions(client):
    with pytest.raises(PeerLost):
        client.ask("release", within_s=WAIT_S).result(WAIT_S)
