"""How much memory each process of a run holds, by what it is."""

from pathlib import Path

from prefixfleet.cluster.leftovers import processes_of

KINDS = {
    "cluster.leash": "watchers",  # its command line goes on with what it watches
    "EngineCore": "engine core",
    "vllm": "engine",
    "VLLM": "engine",
    "HostActor": "node daemon or worker",
    "valkey": "redis",
    "prefixfleet.router": "router",
    "raylet": "ray",
    "gcs_server": "ray",
    "ray": "ray",
}


def resident_bytes(run: str) -> dict[str, list[int]]:
    """Resident bytes of every process of ``run``, largest first, by kind."""
    found: dict[str, list[int]] = {}
    for pid in processes_of(run):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
        found.setdefault(_kind(command), []).append(pages * 4096)
    return {kind: sorted(sizes, reverse=True) for kind, sizes in sorted(found.items())}


def _kind(command: str) -> str:
    return next((kind for mark, kind in KINDS.items() if mark in command), "other")
