"""When sessions arrive: a law of arrivals, parsed from its text and drawn as absolute instants before the run.

Gaps are drawn from the law and summed, never rescaled to hit a count or a rate: the count of a window is what the law
gives. Instants come in blocks of fixed size from one random stream, so a longer schedule begins like a shorter one.
"""

import math
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.clock import NS_PER_S, random_stream
from tailrace.errors import InvalidRequest

RATE_PER_S_MIN = 1e-3
RATE_PER_S_MAX = 100_000.0
CLIENTS_MAX = 100_000
CV_MIN, CV_MAX = 0.01, 20.0
SPEED_MIN, SPEED_MAX = 1e-3, 1e3
ARRIVALS_MAX = 20_000_000
"""Of one run: 160 MB of instants."""
_BLOCK = 4096


class Poisson(msgspec.Struct, frozen=True):
    """Independent callers: exponential gaps."""

    rate_per_s: float


class Paced(msgspec.Struct, frozen=True):
    """Equal gaps (`constant:RATE`); the first arrival comes one gap after zero."""

    rate_per_s: float


class Gamma(msgspec.Struct, frozen=True):
    """Bursts: gaps of a gamma law with the coefficient of variation `cv` (1: Poisson)."""

    rate_per_s: float
    cv: float


class Closed(msgspec.Struct, frozen=True):
    """So many callers, each sending again when its answer has ended."""

    num_clients: int


class Trace(msgspec.Struct, frozen=True):
    """Instants and lengths of a file, `speed` times as fast."""

    path: str
    speed: float = 1.0


OpenLaw = Poisson | Paced | Gamma
Arrivals = OpenLaw | Closed | Trace

_FORMS = "poisson:RATE, constant:RATE, gamma:RATE:CV, closed:CLIENTS or trace:FILE (trace:FILE@2.0: twice as fast)"


def parse_arrivals(text: str) -> Arrivals:
    """Raises InvalidRequest that says which part is wrong, and what may stand there."""
    kind, colon, rest = text.partition(":")
    if not colon or not rest:
        raise _wrong(text, f"write {_FORMS}")
    match kind:
        case "poisson":
            return Poisson(_rate(text, rest))
        case "constant":
            return Paced(_rate(text, rest))
        case "gamma":
            rate, colon, cv = rest.partition(":")
            if not colon:
                raise _wrong(text, "write gamma:RATE:CV, for example gamma:4:2.5")
            return Gamma(_rate(text, rate), _number(text, cv, "the coefficient of variation", CV_MIN, CV_MAX))
        case "closed":
            if not (rest.isascii() and rest.isdigit() and len(rest) <= 9 and 1 <= int(rest) <= CLIENTS_MAX):
                raise _wrong(text, f"the number of clients is a whole number from 1 to {CLIENTS_MAX:,}")
            return Closed(int(rest))
        case "trace":
            return _trace(text, rest)
        case _:
            raise _wrong(text, f"{kind!r} is no law of arrivals: write {_FORMS}")


class Schedule:
    """Instants of an open law, drawn as they are asked for.

    `instant_ns(i)` is the i-th arrival after the schedule's zero; it never falls with i.
    """

    _block: ClassVar[int] = _BLOCK

    def __init__(self, law: OpenLaw, seed: int) -> None:
        self._law = law
        self._rng = random_stream(seed, "arrivals")
        self._instants_ns: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._last_s = 0.0

    def instant_ns(self, index: int) -> int:
        self._extend_to(index + 1)
        return int(self._instants_ns[index])

    def first_at_or_after(self, instant_ns: int) -> int:
        """Index of the first arrival not before that instant: the number of arrivals before it."""
        while not len(self._instants_ns) or self._instants_ns[-1] < instant_ns:
            self._extend_to(2 * len(self._instants_ns) + 1)
        return int(np.searchsorted(self._instants_ns, instant_ns, side="left"))

    def instants_ns(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Arrivals begin to end - 1."""
        self._extend_to(end)
        return self._instants_ns[begin:end]

    def _extend_to(self, num_arrivals: int) -> None:
        if num_arrivals <= len(self._instants_ns):
            return
        if num_arrivals > 2 * ARRIVALS_MAX:
            raise InvalidRequest(f"more than {2 * ARRIVALS_MAX:,} arrivals: take a lower rate or a shorter run")
        blocks = [self._instants_ns]
        missing = max(num_arrivals - len(self._instants_ns), len(self._instants_ns) // 2)
        for block in range(math.ceil(missing / self._block)):
            first = len(self._instants_ns) + block * self._block
            blocks.append(self._next_block(first))
        self._instants_ns = np.concatenate(blocks)

    def _next_block(self, first: int) -> npt.NDArray[np.int64]:
        """Arrivals first to first + 4,095, in ns. Blocks are summed one by one, so that no rounding depends on how
        many were asked for at once."""
        rate = self._law.rate_per_s
        match self._law:
            case Paced():
                # By multiplication: a rate like 3/s has no exact gap, and sums of rounded gaps drift.
                return _whole_ns((np.arange(first, first + self._block) + 1) * (NS_PER_S / rate))
            case Poisson():
                gaps_s = self._rng.exponential(1 / rate, self._block)
            case Gamma(cv=cv):
                # Mean shape * scale = 1 / rate, variance shape * scale**2 = (cv / rate)**2.
                gaps_s = self._rng.gamma(1 / cv**2, cv**2 / rate, self._block)
        instants_s = self._last_s + np.cumsum(gaps_s)
        self._last_s = float(instants_s[-1])
        return _whole_ns(instants_s * NS_PER_S)


def _whole_ns(instants_ns: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int64]:
    whole: npt.NDArray[np.int64] = np.rint(instants_ns).astype(np.int64)
    return whole


def _trace(text: str, rest: str) -> Trace:
    path, at, speed = rest.rpartition("@")
    if not at:
        return Trace(rest)
    try:
        float(speed)
    except ValueError:
        return Trace(rest)  # An @ in a file's name.
    if not path:
        raise _wrong(text, "a trace needs a file: write trace:FILE@2.0")
    return Trace(path, _number(text, speed, "the speed", SPEED_MIN, SPEED_MAX))


def _rate(text: str, value: str) -> float:
    return _number(text, value, "the rate, in sessions a second,", RATE_PER_S_MIN, RATE_PER_S_MAX)


def _number(text: str, value: str, what: str, least: float, most: float) -> float:
    try:
        number = float(value)
    except ValueError:
        raise _wrong(text, f"{what} is not a number: {value[:40]!r}") from None
    if not (math.isfinite(number) and least <= number <= most):
        raise _wrong(text, f"{what} must lie in {least:g} to {most:g}")
    return number


def _wrong(text: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"--arrivals {text[:200]!r}: {why}", param="arrivals")
