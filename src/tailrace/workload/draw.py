"""Draws a run: from workload, arrivals and seed to sessions, each a pure function of (seed, index).

Every sender draws the same plan and sends its share; nothing is exchanged. Text is not made here (`workload.prompts`).
"""

import bisect
import hashlib
import itertools
import math
from functools import cached_property

import msgspec
import numpy as np

from tailrace.clock import NS_PER_S, random_stream
from tailrace.errors import InvalidRequest
from tailrace.workload.arrivals import ARRIVALS_MAX, Closed, OpenLaw, Schedule, Trace, parse_arrivals
from tailrace.workload.definition import Cohort, SharedPrefix, Workload, decode_workload
from tailrace.workload.job import PlanSource
from tailrace.workload.plan import Plan, PlannedSession, PlannedTurn, Segment
from tailrace.workload.replay import TracePlan

DURATION_S_MAX = 7 * 24 * 3600.0
_SESSIONS_HASHED = 256
_SESSION_KEYS = 1 << 63
"""Above the CRCs that name `clock.random_stream`s, so that no session shares a stream with anything else."""


def draw_plan(source: PlanSource) -> Plan:
    """The run of a source. Equal sources give equal plans, in any process.

    Raises ConfigError (workload or trace file) or InvalidRequest (arrivals, window).
    """
    _check_window(source)
    workload = decode_workload(source.workload_toml)
    arrivals = parse_arrivals(source.arrivals)
    sessions = SessionDraw(workload, source.seed, source.run_id)
    match arrivals:
        case Closed(num_clients=num_clients):
            return ClosedPlan(source, sessions, num_clients)
        case Trace():
            return TracePlan(source, workload, arrivals)
        case _:
            return OpenPlan(source, sessions, arrivals)


class SessionDraw:
    """Sessions of a workload by index."""

    def __init__(self, workload: Workload, seed: int, run_id: str) -> None:
        self.workload = workload
        self._seed = seed
        self._run_id = run_id
        self._weights = list(itertools.accumulate(cohort.weight for cohort in workload.cohorts))
        self._popularity = {
            cohort.name: _zipf(cohort.shared_prefix) for cohort in workload.cohorts if cohort.shared_prefix is not None
        }
        self._group_tokens: dict[str, int] = {}

    def session(self, index: int, scheduled_ns: int | None) -> PlannedSession:
        rng = _session_stream(self._seed, index)
        cohort = self._cohort(rng)
        prefix, group = self._prefix(cohort, rng)
        return PlannedSession(
            session_id=f"{self._run_id}-{index}",
            scheduled_ns=scheduled_ns,
            cohort=cohort.name,
            group=group,
            tenant=cohort.tenant,
            turns=self._turns(cohort, prefix, index, rng),
        )

    def _cohort(self, rng: np.random.Generator) -> Cohort:
        if len(self._weights) == 1:
            return self.workload.cohorts[0]
        return self.workload.cohorts[bisect.bisect_right(self._weights, rng.random() * self._weights[-1])]

    def _prefix(self, cohort: Cohort, rng: np.random.Generator) -> tuple[Segment | None, str]:
        shared = cohort.shared_prefix
        if shared is None:
            return None, ""
        popularity = self._popularity[cohort.name]
        number = bisect.bisect_right(popularity, rng.random() * popularity[-1])
        group = f"{cohort.name}-{number}" if cohort.name else f"{number}"
        if group not in self._group_tokens:
            self._group_tokens[group] = shared.tokens.sample_count(random_stream(self._seed, f"group/{group}"))
        return Segment(f"{self._run_id}/shared/{group}", self._group_tokens[group]), group

    def _turns(
        self, cohort: Cohort, prefix: Segment | None, index: int, rng: np.random.Generator
    ) -> tuple[PlannedTurn, ...]:
        turns: list[PlannedTurn] = []
        num_earlier_tokens = 0
        for number in range(cohort.num_turns.sample_count(rng)):
            first = number == 0
            own = Segment(f"{self._run_id}/{index}/{number}", cohort.prompt_tokens.sample_count(rng))
            begins = (prefix,) if first and prefix is not None else ()
            in_system = cohort.shared_prefix is not None and cohort.shared_prefix.role == "system"
            num_output_tokens = cohort.output_tokens.sample_count(rng)
            turn = PlannedTurn(
                request_id=f"{self._run_id}-{index}-{number}",
                system=begins if in_system else (),
                user=(own,) if in_system else (*begins, own),
                num_output_tokens=num_output_tokens,
                think_ns=0 if first else round(cohort.think_s.sample(rng) * NS_PER_S),
                cancel_after_tokens=_cancellation(cohort, num_output_tokens, rng),
                num_shared_tokens=sum(segment.num_tokens for segment in begins) if first else num_earlier_tokens,
            )
            turns.append(turn)
            num_earlier_tokens += turn.num_prompt_tokens
            if turn.cancel_after_tokens is not None:
                break
        return tuple(turns)


class _DrawnPlan:
    """What plans have in common."""

    num_sessions: int | None = None
    num_clients: int | None = None
    window_start_ns: int
    window_end_ns: int | None
    num_window_requests: int | None
    offered_per_s: float | None

    def __init__(self, source: PlanSource, sessions: SessionDraw) -> None:
        self._sessions = sessions
        self._seed = source.seed
        self.workload = sessions.workload
        self.num_window_requests = source.num_requests
        self.window_start_ns = round(source.warmup_s * NS_PER_S)

    @property
    def declares_sharing(self) -> bool:
        return self.workload.declares_sharing

    @property
    def notes(self) -> list[str]:
        return self.workload.notes

    def _hash(self, first_session: int, instants: bytes) -> str:
        """Of instants and of what the sessions ask for. Lengths are a function of workload, seed and index, so the
        first 256 sessions of the window stand for the others, and a sender need not draw a million."""
        digest = hashlib.sha256(f"{self.workload.sha256}/{self._seed}/{self.window_start_ns}".encode())
        digest.update(instants)
        for index in range(first_session, first_session + _SESSIONS_HASHED):
            drawn = self._sessions.session(index, None)
            asked = [(t.num_prompt_tokens, t.num_output_tokens, t.think_ns, t.cancel_after_tokens) for t in drawn.turns]
            digest.update(msgspec.json.encode((drawn.cohort, drawn.group, asked)))
        return digest.hexdigest()


class OpenPlan(_DrawnPlan):
    """Arrivals by a law, whatever the service does. The law has no end: load goes on until the window's
    requests have ended."""

    def __init__(self, source: PlanSource, sessions: SessionDraw, law: OpenLaw) -> None:
        super().__init__(source, sessions)
        self._schedule = Schedule(law, source.seed)
        self.offered_per_s = law.rate_per_s * self.workload.num_turns_mean
        expected = law.rate_per_s * (source.warmup_s + (source.duration_s or 0.0)) + (source.num_requests or 0)
        if expected > ARRIVALS_MAX:
            raise InvalidRequest(
                f"about {expected:,.0f} arrivals are more than {ARRIVALS_MAX:,}: take a lower rate or a shorter run",
                param="arrivals",
            )
        if source.num_requests is not None and source.num_requests / law.rate_per_s > DURATION_S_MAX:
            raise InvalidRequest(
                f"{source.num_requests:,} requests at {law.rate_per_s:g} a second take longer than "
                f"{DURATION_S_MAX:g} s: take a higher rate or fewer",
                param="requests",
            )
        self._first = self._schedule.first_at_or_after(self.window_start_ns)
        if source.num_requests is not None:
            self._end_ns = self._middle_ns(self._first + source.num_requests)
        else:
            self._end_ns = self.window_start_ns + _duration_ns(source)
        self.window_end_ns = self._end_ns

    def _middle_ns(self, index: int) -> int:
        """Of the gap before an arrival: a window that ended at an arrival would leave no time to issue it."""
        before, after = (self._schedule.instant_ns(i) for i in (index - 1, index))
        return before + (after - before) // 2 + 1

    @cached_property
    def schedule_sha256(self) -> str:
        end = self._schedule.first_at_or_after(self._end_ns)
        return self._hash(self._first, self._schedule.instants_ns(self._first, end).astype("<i8").tobytes())

    def scheduled_ns(self, index: int) -> int:
        return self._schedule.instant_ns(index)

    def session(self, index: int) -> PlannedSession:
        return self._sessions.session(index, self._schedule.instant_ns(index))


class ClosedPlan(_DrawnPlan):
    """So many callers at once; a session begins when a caller is free."""

    def __init__(self, source: PlanSource, sessions: SessionDraw, num_clients: int) -> None:
        super().__init__(source, sessions)
        self.num_clients = num_clients
        self.offered_per_s = None
        by_number = source.num_requests is not None
        self.window_end_ns = None if by_number else self.window_start_ns + _duration_ns(source)

    @cached_property
    def schedule_sha256(self) -> str:
        return self._hash(0, f"closed:{self.num_clients}".encode())

    def scheduled_ns(self, index: int) -> None:  # noqa: ARG002
        return None

    def session(self, index: int) -> PlannedSession:
        return self._sessions.session(index, None)


def _check_window(source: PlanSource) -> None:
    if (source.duration_s is None) == (source.num_requests is None):
        raise InvalidRequest("give the length of the window once: --duration or --requests", param="duration")
    for name, value in (("duration", source.duration_s), ("warmup", source.warmup_s)):
        if value is not None and not (math.isfinite(value) and 0 <= value <= DURATION_S_MAX):
            raise InvalidRequest(f"--{name} {value:g} s must lie in 0 to {DURATION_S_MAX:g}", param=name)
    if source.duration_s == 0:
        raise InvalidRequest("--duration must be more than 0 s", param="duration")
    if source.num_requests is not None and not 1 <= source.num_requests <= ARRIVALS_MAX:
        raise InvalidRequest(f"--requests {source.num_requests} must lie in 1 to {ARRIVALS_MAX:,}", param="requests")


def _duration_ns(source: PlanSource) -> int:
    assert source.duration_s is not None, "checked: a window by time"
    return round(source.duration_s * NS_PER_S)


def _session_stream(seed: int, index: int) -> np.random.Generator:
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, _SESSION_KEYS | index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def _zipf(shared: SharedPrefix) -> list[float]:
    """Cumulative weights of the groups."""
    return list(itertools.accumulate((k + 1) ** -shared.zipf_exponent for k in range(shared.num_groups)))


def _cancellation(cohort: Cohort, num_output_tokens: int, rng: np.random.Generator) -> int | None:
    """Tokens after which this caller leaves: always before the answer's end, or it would not be leaving."""
    if cohort.cancellation is None or rng.random() >= cohort.cancellation.share_ratio:
        return None
    return min(cohort.cancellation.after_tokens.sample_count(rng, at_least=0), num_output_tokens - 1)
