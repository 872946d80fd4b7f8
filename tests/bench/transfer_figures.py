"""What `transfer.py` measured, and the medians and ratios of it."""

from statistics import median

from tests.bench.transfer_peers import SIZES

GIB = 1 << 30


def size_bytes(size):
    block, count = SIZES[size]
    return block * count


class Figures:
    """Seconds of every pull, by who and size, a list a round."""

    def __init__(self):
        self.seconds = {}
        self.cpu = {}

    def add(self, who, size, seconds, cpu_s):
        self.seconds.setdefault((who, size), []).append(seconds)
        self.cpu.setdefault((who, size), []).append([c / len(seconds) for c in cpu_s])

    def ratio(self, who, rival, size="1MiB"):
        """How many times as fast ``who`` is; None where one is absent."""
        ours, theirs = self.seconds.get((who, size)), self.seconds.get((rival, size))
        if not ours or not theirs:
            return None
        pairs = zip(ours, theirs, strict=True)
        return round(median(median(t) / median(o) for o, t in pairs), 3)

    def summary(self, who, size):
        every = sorted(s for taken in self.seconds[who, size] for s in taken)
        p50 = median(every)
        figures = {
            "gb_per_s": round(size_bytes(size) / p50 / 1e9, 2),
            "p50_ms": round(p50 * 1e3, 2),
            "p99_ms": round(every[min(len(every) - 1, int(len(every) * 0.99))] * 1e3, 2),
            "pulls": len(every),
        }
        if self.cpu[who, size][0]:
            sides = [median(side) for side in zip(*self.cpu[who, size], strict=True)]
            per_gib = [round(side * GIB / size_bytes(size), 3) for side in sides]
            figures["cpu_s_per_gib"] = dict(zip(("target", "source"), per_gib, strict=True))
        return figures
