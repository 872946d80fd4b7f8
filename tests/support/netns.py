"""Hosts made of Linux namespaces: own address, processes, hostname, /root, /tmp, /dev/shm, sshd.

One `Network` owns its hosts and a switch between them. Nothing on the real machine changes: a host
can write to nothing but its private folders, and all its processes end with its first one. Needs
root (or CAP_SYS_ADMIN and CAP_NET_ADMIN), `ip` and `nsenter`; with sshd also openssh-server and
rsync (Debian: apt-get install iproute2 util-linux openssh-server rsync).
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Self

REPOSITORY = Path(__file__).resolve().parents[2]
UNSHARE = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child"]
PACKAGES = {"ip": "iproute2", "nsenter": "util-linux", "sshd": "openssh-server", "rsync": "rsync"}
PRIVATE = ("root", "tmp", "run", "dev/shm")
"""Folders of which every host has its own."""

# The first process of a host: mounts what is private, then waits. It ignores SIGCHLD, so that the
# kernel reaps what daemons leave behind.
FIRST_PROCESS = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
while read -r path target; do
  mkdir -p "$target"
  mount --bind "$path" "$target"
  mount -o remount,bind,ro "$target" # what a host removes must never be ours
done <"$1/keep"
cd "$1" # from here by relative path: the folder itself may be hidden by what is mounted
mount --no-canonicalize --bind ./hosts /etc/hosts
for name in {private}; do mount --no-canonicalize --rbind "./$name" "/$name"; done
mount -o remount,bind,ro / # whatever goes wrong on a host, the real machine's files are safe
hostname "$2"
ip link set lo up
echo ready
exec env --ignore-signal=CHLD sleep infinity
"""

SSHD_CONFIG = """
HostKey {root}/host_key
AuthorizedKeysFile {root}/.ssh/authorized_keys
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
MaxStartups 100
"""


@cache
def missing() -> str:
    """Why hosts cannot be made here; empty where they can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [PACKAGES[tool] for tool in PACKAGES if not shutil.which(tool, path=path)]
    if absent:
        return f"missing tools (on Debian: apt-get install {' '.join(absent)})"
    script = "ip link add name veth-a type veth peer name veth-b && mount -t tmpfs tmpfs /mnt"
    tried = subprocess.run([*UNSHARE, "sh", "-c", script], capture_output=True, text=True)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class Host:
    """One host. Owned by its `Network`."""

    name: str
    address: str
    folder: Path
    pid: int
    init: subprocess.Popen[str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def port(self) -> str:
        """Name of the switch's end of its cable; names of interfaces are short."""
        return f"port{self.address.rpartition('.')[2]}"

    def command(self, *argv: str | Path) -> list[str]:
        """The command line that runs ``argv`` on this host, with its working folder /root."""
        inside = ["nsenter", "-t", str(self.pid), "-n", "-p", "-m", "-u", "-i", "--wd=/root"]
        return [*inside, "env", "HOME=/root", *map(str, argv)]

    def run(
        self, *argv: str | Path, timeout_s: float = 30, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run to its end. With ``check``, a failure raises and shows both outputs."""
        done = subprocess.run(
            self.command(*argv), capture_output=True, text=True, timeout=timeout_s
        )
        if check and done.returncode:
            raise AssertionError(
                f"{self.name}: {argv} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    def start(self, *argv: str | Path, log: str) -> subprocess.Popen[bytes]:
        """Start in the background; both outputs go to the file ``log`` in the host's folder."""
        with (self.folder / log).open("wb") as out:
            process = subprocess.Popen(self.command(*argv), stdout=out, stderr=subprocess.STDOUT)
        self.started.append(process)
        return process

    def talk(self, *argv: str | Path) -> subprocess.Popen[str]:
        """Start with both ends of a conversation: its standard input and output."""
        process = subprocess.Popen(
            self.command(*argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return process

    def power_off(self) -> None:
        """Kill every process of the host at once, as a power cut does."""
        if self.init.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.init.wait(timeout=10)
            assert self.init.stdout is not None
            self.init.stdout.close()
        for process in self.started:
            process.wait(timeout=10)


@dataclass
class Network:
    """Hosts on one switch, 10.77.0.1 upward. ``keep``: folders that every host may read.

    The first host holds the switch and is never cut: the operator's machine.
    """

    folder: Path
    keep: Sequence[Path] = ()
    hosts: list[Host] = field(default_factory=list)

    @classmethod
    @contextmanager
    def of(cls, folder: Path, *names: str, keep: Sequence[Path] = ()) -> Iterator[Self]:
        """A network of hosts ``names``; all of it is gone afterwards."""
        network = cls(folder, keep)
        try:
            for name in names:
                network._add(name, names)
            yield network
        finally:
            for host in network.hosts:
                host.power_off()

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def cut(self, host: Host) -> None:
        """Pull the host's cable: packets are dropped, nothing is refused."""
        self.hosts[0].run("ip", "link", "set", host.port, "down")

    def heal(self, host: Host) -> None:
        """Put the cable back."""
        self.hosts[0].run("ip", "link", "set", host.port, "up")

    def serve_ssh(self, key: Path) -> None:
        """Start sshd on every host; whoever holds ``key`` (made here) may log in as root."""
        self.hosts[0].run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        public = self.hosts[0].run("cat", f"{key}.pub").stdout
        for host in self.hosts:
            root = host.folder / "root"
            (root / ".ssh").mkdir(mode=0o700, exist_ok=True)
            (root / ".ssh/authorized_keys").write_text(public)
            (root / "sshd_config").write_text(SSHD_CONFIG.format(root="/root"))
            (host.folder / "run/sshd").mkdir()
            host.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/root/host_key")
            host.run("/usr/sbin/sshd", "-f", "/root/sshd_config", "-E", "/root/sshd.log")

    def _add(self, name: str, names: Sequence[str]) -> None:
        number = len(self.hosts) + 1
        folder = self.folder / name
        for private in PRIVATE:
            (folder / private).mkdir(parents=True)
        addresses = [f"10.77.0.{i} {other}" for i, other in enumerate(names, 1)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses, ""]))
        (folder / "keep").write_text("".join(self._kept(folder)))
        script = FIRST_PROCESS.format(private=" ".join(PRIVATE))
        with (folder / "init.log").open("w") as log:
            init = subprocess.Popen(
                [*UNSHARE, "bash", "-c", script, "init", str(folder), name],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert init.stdout is not None
        started = init.stdout.readline() == "ready\n"
        assert started, f"host {name}: {(folder / 'init.log').read_text()}"
        pid = int(Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()[0])
        host = Host(name, f"10.77.0.{number}", folder, pid, init)
        self.hosts.append(host)
        self._connect(host)

    def _kept(self, folder: Path) -> Iterator[str]:
        for path in {Path(sys.prefix), Path(sys.base_prefix), REPOSITORY, *self.keep}:
            for private in PRIVATE:
                if path.is_relative_to(f"/{private}"):
                    yield f"{path} {folder}{path}\n"

    def _connect(self, host: Host) -> None:
        switch = self.hosts[0]
        if host is switch:
            host.run("ip", "link", "add", "switch", "type", "bridge")
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", "switch")
            host.run("ip", "link", "set", "switch", "up")
            return
        ends = ["ip", "link", "add", host.port, "netns", str(switch.pid), "type", "veth"]
        subprocess.run([*ends, "peer", "name", "eth0", "netns", str(host.pid)], check=True)
        switch.run("ip", "link", "set", host.port, "master", "switch", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        # Leads nowhere; programs ask the routing table which address is their own.
        host.run("ip", "route", "add", "default", "via", switch.address)


def wait_until(true: Callable[[], bool], *, within_s: float, what: str) -> float:
    """Seconds until ``true()``; fails with ``what`` after ``within_s``."""
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.2)
    return time.monotonic() - start
