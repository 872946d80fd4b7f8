"""What a replay adds up to: pure functions from samples to figures.

TTFT, gaps and goodput as the glossary defines them: a request's TBT is the mean of its longest
tenth of gaps; goodput counts requests that ended within both SLOs (Mooncake, FAST'25, 5.1).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from prefixfleet.router.percentiles import reach, spread
from prefixfleet.router.replay_client import Sample


def summarise(
    samples: Sequence[Sample], *, wall_s: float, ttft_slo_s: float, tbt_slo_s: float
) -> dict[str, Any]:
    """Every figure of one run. Rates are per second of ``wall_s``; an empty run is all zeros."""
    good = [s for s in samples if not s.error]
    prompt = sum(s.prompt_tokens for s in good)
    cached = sum(s.cached_tokens for s in good)
    pulled = sum(s.pulled_tokens for s in good)
    within = [s for s in good if s.ttft_s <= ttft_slo_s and tbt(s.gaps_s) <= tbt_slo_s]
    return {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "errors_by_kind": dict(Counter(s.error.split(":")[0] for s in samples if s.error)),
        "wall_s": wall_s,
        "ttft_s": spread([s.ttft_s for s in good]),
        "tbt_s": spread([tbt(s.gaps_s) for s in good if s.gaps_s]),
        "requests_per_s": _rate(len(good), wall_s),
        "output_tokens_per_s": _rate(sum(s.output_tokens for s in good), wall_s),
        "goodput_per_s": _rate(len(within), wall_s),
        "within_slo": len(within) / len(samples) if samples else 0.0,
        "hit_rate": hit_rate(good),
        "prompt_tokens": prompt,
        "pulled_tokens": pulled,
        "local_tokens": max(0, cached - pulled),
        "recomputed_tokens": prompt - cached,
        "late_s": spread([s.late_s for s in samples]),
        "nodes": dict(Counter(s.node for s in good if s.node)),
    }


def hit_rate(samples: Sequence[Sample]) -> dict[str, float]:
    """Tokens from cache over prompt tokens: the mean over all tokens, percentiles by request: what
    so many of a hundred requests reach at least."""
    rates = [s.cached_tokens / s.prompt_tokens for s in samples if s.prompt_tokens]
    prompt = sum(s.prompt_tokens for s in samples)
    mean = sum(s.cached_tokens for s in samples) / prompt if prompt else 0.0
    return reach(rates) | {"mean": mean}


def tbt(gaps_s: Sequence[float]) -> float:
    """Mean of the longest tenth of the gaps, at least one; 0 without gaps."""
    longest = sorted(gaps_s, reverse=True)[: max(1, len(gaps_s) // 10)]
    return sum(longest) / len(longest) if longest else 0.0


def _rate(count: float, wall_s: float) -> float:
    return count / wall_s if wall_s > 0 else 0.0
