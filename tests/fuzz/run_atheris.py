"""Coverage-guided fuzzing of one parser with atheris, which only this script needs:

    pip install atheris && make fuzz             # every parser in turn, FUZZ_S seconds each
    python tests/fuzz/run_atheris.py NAME SECONDS [WORK FOLDER]

What crashes a parser is printed with its file. Put that file into tests/fuzz/corpus/NAME/ and it is
a regression test. The work folder keeps inputs that reached new code, for the next run.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"
CORPUS = Path(__file__).with_name("corpus")


def fuzz(name: str, seconds: int, folder: Path) -> None:
    """Feed one target in this process, which atheris ends."""
    import atheris

    sys.path.insert(0, str(SUPPORT))
    with atheris.instrument_imports(include=["prefixfleet"]):
        from fuzz_targets import TARGETS

    target = TARGETS[name]
    for number, seed in enumerate(target.seeds):
        (folder / f"seed-{number}").write_bytes(seed)
    known = CORPUS / name
    folders = [str(folder), *([str(known)] if known.is_dir() else [])]
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={folder}/crash-", "-max_len=8192"]
    atheris.Setup([sys.argv[0], *options, *folders], target.try_bytes)
    atheris.Fuzz()


def fuzz_all(seconds: int, work: Path) -> int:
    """Every target in a process of its own; prints one JSON object as the last line."""
    sys.path.insert(0, str(SUPPORT))
    from fuzz_targets import TARGETS

    runs: dict[str, int] = {}
    crashed = []
    for name in TARGETS:
        command = [sys.executable, __file__, name, str(seconds), str(work)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        print(f"== {name}\n{done.stderr[-600:]}", flush=True)
        runs[name] = _count(done.stderr)
        if done.returncode:
            crashed.append(name)
            print(done.stdout[-2000:] + done.stderr[-4000:])
    print(json.dumps({"seconds_each": seconds, "inputs": runs, "crashed": crashed}))
    return 1 if crashed else 0


def _count(log: str) -> int:
    numbers = [line[1:].split()[0] for line in log.splitlines() if line.startswith("#")]
    return max((int(n) for n in numbers if n.isdigit()), default=0)


def main() -> None:
    first, *rest = sys.argv[1:] or ["60"]
    work = Path(rest[-1] if len(rest) == 2 else tempfile.mkdtemp(prefix="pf-fuzz-"))
    if first.isdigit():
        sys.exit(fuzz_all(int(first), work))
    folder = work / first
    folder.mkdir(parents=True, exist_ok=True)
    fuzz(first, int(rest[0]), folder)


if __name__ == "__main__":
    main()
