"""A service level objective: limits on percentiles, in the form people write them.

`ttft_ms_p99<=500, tpot_ms_p99<=60`. A request *attains* the objective when each of its own values is within the limits;
the *run* passes when the bound of each percentile is.
"""

import math
import re
from decimal import Decimal

import msgspec

from tailrace.errors import InvalidRequest

REQUEST_METRICS = ("ttft_ms", "tpot_ms", "e2e_ms", "stall_ms")
"""One value a request: these decide attainment."""
POOLED_METRICS = ("itl_ms", "chunk_gap_ms")
"""Many values a request: these have percentiles, and no part in attainment (`stall_ms` is their worst)."""

LIMITS_MAX = 32
"""Each percentile costs a bootstrap; nobody writes so many."""

_LIMIT = re.compile(r"([a-z0-9]+(?:_[a-z0-9]+)*?_ms)_p(\d{1,2})(?:[._](\d{1,2}))?\s*<=?\s*(\d+(?:\.\d+)?)")


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    metric: str
    percentile_ratio: float
    """0.99 for p99."""
    limit_ms: float

    def __str__(self) -> str:
        """Parses back to the same limit, whatever its size."""
        return f"{self.metric}_{percentile_name(self.percentile_ratio)}<={Decimal(repr(self.limit_ms)).normalize():f}"


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    limits: tuple[Limit, ...] = ()

    def __str__(self) -> str:
        return ", ".join(str(limit) for limit in self.limits)

    def limit_ms(self, metric: str) -> float | None:
        """The tightest limit on a metric, at whatever percentile; None without one."""
        found = [limit.limit_ms for limit in self.limits if limit.metric == metric]
        return min(found) if found else None


def parse_slo(text: str) -> Slo:
    """Raises InvalidRequest that names the part which is not a limit."""
    limits = tuple(_parse_limit(part.strip()) for part in text.split(",") if part.strip())
    if len(limits) > LIMITS_MAX:
        raise InvalidRequest(f"an SLO has at most {LIMITS_MAX} limits, not {len(limits)}", param="slo")
    seen = [(limit.metric, limit.percentile_ratio) for limit in limits]
    if len(set(seen)) < len(seen):
        raise InvalidRequest(f"the SLO {text!r} limits the same percentile twice", param="slo")
    return Slo(limits=limits)


def percentile_name(ratio: float) -> str:
    """0.99 -> `p99`, 0.999 -> `p99_9`."""
    return "p" + f"{ratio * 100:.2f}".rstrip("0").rstrip(".").replace(".", "_")


def _parse_limit(text: str) -> Limit:
    match = _LIMIT.fullmatch(text)
    known = REQUEST_METRICS + POOLED_METRICS
    if match is None or match[1] not in known:
        raise InvalidRequest(
            f"{text!r} is not a limit; write METRIC_pNN<=MS, such as ttft_ms_p99<=500, with one of {', '.join(known)}",
            param="slo",
        )
    ratio = float(f"{match[2]}.{match[3] or '0'}") / 100
    limit_ms = float(match[4])
    if not (0 < ratio < 1 and math.isfinite(limit_ms) and limit_ms > 0):
        raise InvalidRequest(f"{text!r}: the percentile lies between 0 and 100, the limit above 0", param="slo")
    return Limit(metric=match[1], percentile_ratio=round(ratio, 6), limit_ms=limit_ms)
