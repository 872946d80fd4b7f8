"""Children end with their supervisor, and take their own children along."""

import asyncio
import os
import signal
import sys

import pytest
from eventually import alive, until

from prefixfleet.cluster.child import Child
from prefixfleet.cluster.leash import leashed
from prefixfleet.cluster.ports import hold_port
from prefixfleet.store.errors import ConfigError

GRANDCHILD = (
    "import subprocess, sys, time;"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print(p.pid, flush=True); time.sleep(600)"
)
DEAF = (
    "import signal, time; signal.signal(15, signal.SIG_IGN);"
    "print('deaf', flush=True); time.sleep(600)"
)


async def start(tmp_path, code):
    return await Child.start(
        [sys.executable, "-c", code], environ=os.environ, log_file=tmp_path / "child.log"
    )


async def test_what_a_child_prints_is_in_its_log(tmp_path):
    child = await start(tmp_path, "print('hello'); raise SystemExit(3)")

    assert await child.wait() == 3
    assert child.log_tail() == "hello"
    assert not child.running


async def test_a_line_of_its_own_output_is_found_and_no_earlier_ones(tmp_path):
    first = await start(tmp_path, "print('x.Error: a'); print('x.Error: b'); print('y' * 5000)")
    await first.wait()
    second = await start(tmp_path, "print('nothing')")
    await second.wait()

    assert first.said_after("x.Error: ") == "b"
    assert second.said_after("x.Error: ") == ""
    assert second.log_tail() == "nothing"
    (tmp_path / "child.log").unlink()
    assert first.said_after("x.Error: ") == ""


async def test_a_stopped_child_takes_its_own_children_along(tmp_path):
    child = await start(tmp_path, GRANDCHILD)
    grandchild = int(await until(lambda: child.log_tail()))

    await child.stop(grace_s=10)

    await until(lambda: not alive(grandchild))


async def test_a_killed_child_leaves_nothing_of_its_group(tmp_path):
    child = await start(tmp_path, GRANDCHILD)
    grandchild = int(await until(lambda: child.log_tail()))

    os.kill(child.pid, signal.SIGKILL)
    await child.wait()

    await until(lambda: not alive(grandchild))


async def test_a_child_that_ignores_the_request_is_ended_after_its_grace(tmp_path):
    child = await start(tmp_path, DEAF)
    await until(lambda: child.log_tail() == "deaf")

    assert await child.stop(grace_s=0.1) == -signal.SIGKILL


async def test_a_child_ends_when_its_supervisor_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, time;open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import os, subprocess, sys; from prefixfleet.cluster.leash import leashed;"
        "subprocess.Popen(leashed([sys.executable, '-c', sys.argv[1]])).wait()",
        code,
    )
    pid = int(await until(lambda: pid_file.exists() and pid_file.read_text()))

    supervisor.kill()
    await supervisor.wait()

    await until(lambda: not alive(pid))


DEAF_CHILD = (
    "import os, signal, subprocess, sys, time;"
    "deaf = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)';"
    "p = subprocess.Popen([sys.executable, '-c', deaf]);"
    "ignore = {ignore};"
    "ignore and signal.signal(15, signal.SIG_IGN);"
    "open({pids!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}.'); time.sleep(600)"
)


@pytest.mark.parametrize("ignore", [False, True], ids=["its child is deaf", "it is deaf too"])
async def test_nothing_of_a_childs_group_outlives_a_whole_supervisors_group(tmp_path, ignore):
    """As an engine's core process, which heeds its engine only, once that was killed at once with
    whoever had started it."""
    pids = tmp_path / "pids"
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import os, subprocess, sys; from prefixfleet.cluster.leash import leashed;"
        "subprocess.Popen(leashed([sys.executable, '-c', sys.argv[1]], grace_s=0.2)).wait()",
        DEAF_CHILD.format(pids=str(pids), ignore=ignore),
        start_new_session=True,
    )
    await until(lambda: pids.exists() and pids.read_text().endswith("."))
    engine, core = map(int, pids.read_text().rstrip(".").split())

    os.killpg(supervisor.pid, signal.SIGKILL)
    await supervisor.wait()

    await until(lambda: not alive(engine) and not alive(core))


async def test_a_command_on_a_leash_has_no_child_that_it_does_not_know():
    code = "import os; print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read())"
    process = await asyncio.create_subprocess_exec(
        *leashed([sys.executable, "-c", code]), stdout=asyncio.subprocess.PIPE
    )

    out, _ = await asyncio.wait_for(process.communicate(), 60)  # the watcher does not hold its end

    assert out.strip() == b""


async def test_a_command_whose_supervisor_is_gone_is_not_started(tmp_path):
    command = leashed([sys.executable, "-c", "print('ran')"])
    command[3] = "1"  # as if the parent had died and init had adopted us

    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()

    assert (process.returncode, out) == (1, b"")
    assert b"process 1 is gone" in err


async def test_a_command_that_cannot_start_is_an_error_with_its_name(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")

    with pytest.raises(ConfigError, match=r"cannot start no-such-command.*File exists"):
        await Child.start(["no-such-command"], environ={}, log_file=blocked / "child.log")


async def test_a_held_port_is_given_to_nobody_else_but_a_server_may_listen_on_it():
    with hold_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", port)

        async with server:
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be used.*in use"):
                hold_port("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_refused():
    with pytest.raises(ConfigError, match=r"203\.0\.113\.9:0 cannot be used"):
        hold_port("203.0.113.9")
