"""The plan of a recorded trace: instants and lengths are the file's, divided by the speed; text is ours."""

import bisect
import hashlib
from functools import cached_property

import msgspec

from tailrace.clock import NS_PER_S
from tailrace.errors import InvalidRequest
from tailrace.workload.arrivals import Trace
from tailrace.workload.definition import Workload
from tailrace.workload.job import PlanSource
from tailrace.workload.plan import PlannedSession, PlannedTurn, Segment
from tailrace.workload.trace_rows import TraceRow
from tailrace.workload.traces import TraceFile, read_trace


class TracePlan:
    """Of the workload only its sampling counts. A window by number counts arrivals of sessions."""

    num_clients: int | None = None

    def __init__(self, source: PlanSource, workload: Workload, arrivals: Trace) -> None:
        self.workload = workload
        self._run_id = source.run_id
        self._file: TraceFile = read_trace(arrivals.path)
        self._instants_ns = [round(rows[0].at_ns / arrivals.speed) for rows in self._file.sessions]
        self._speed = arrivals.speed
        self.num_sessions: int | None = len(self._instants_ns)
        self.num_window_requests = source.num_requests
        self.window_start_ns = round(source.warmup_s * NS_PER_S)
        self._first = bisect.bisect_left(self._instants_ns, self.window_start_ns)
        self._end_ns = self._window_end_ns(source)
        self.window_end_ns: int | None = self._end_ns
        self._last = bisect.bisect_left(self._instants_ns, self._end_ns)
        num_requests = sum(len(rows) for rows in self._file.sessions[self._first : self._last])
        self.offered_per_s: float | None = num_requests / ((self._end_ns - self.window_start_ns) / NS_PER_S)

    def _window_end_ns(self, source: PlanSource) -> int:
        """Where the window ends: as asked, or one mean gap after the file's last arrival."""
        num_left = len(self._instants_ns) - self._first
        if num_left == 0:
            raise InvalidRequest(
                f"the trace ends {self._instants_ns[-1] / NS_PER_S:.1f} s after its start, within the warm-up of "
                f"{source.warmup_s:g} s: take a shorter --warmup or a lower speed",
                param="warmup",
            )
        if source.num_requests is not None:
            if source.num_requests > num_left:
                raise InvalidRequest(
                    f"the trace has {num_left:,} arrivals after the warm-up, fewer than --requests "
                    f"{source.num_requests:,}",
                    param="requests",
                )
            return self._middle_ns(self._first + source.num_requests)
        assert source.duration_s is not None, "checked by draw_plan"
        asked_ns = self.window_start_ns + round(source.duration_s * NS_PER_S)
        end_ns = min(asked_ns, self._instants_ns[-1] + self._mean_gap_ns())
        if self._instants_ns[self._first] >= end_ns:
            raise InvalidRequest("the trace has no arrival in the window: take a longer --duration", param="duration")
        return end_ns

    def _middle_ns(self, index: int) -> int:
        """Of the gap before an arrival; one mean gap after the last where there is none."""
        before = self._instants_ns[index - 1]
        if index == len(self._instants_ns):
            return before + self._mean_gap_ns()
        return before + (self._instants_ns[index] - before) // 2 + 1

    def _mean_gap_ns(self) -> int:
        """Of the arrivals after the warm-up: n of them stand for n gaps, so that their rate is n over the window. A
        second where they have none."""
        num_gaps = len(self._instants_ns) - self._first - 1
        spanned_ns = self._instants_ns[-1] - self._instants_ns[self._first]
        return spanned_ns // num_gaps if spanned_ns >= num_gaps > 0 else NS_PER_S

    @property
    def declares_sharing(self) -> bool:
        return self._file.declares_sharing

    @property
    def notes(self) -> list[str]:
        return list(self._file.notes)

    @cached_property
    def schedule_sha256(self) -> str:
        """Of the window's instants and rows, and of the sampling."""
        digest = hashlib.sha256(f"trace/{self.workload.sha256}/{self.window_start_ns}".encode())
        for index in range(self._first, self._last):
            digest.update(msgspec.json.encode((self._instants_ns[index], self._file.sessions[index])))
        return digest.hexdigest()

    def scheduled_ns(self, index: int) -> int:
        return self._instants_ns[index]

    def session(self, index: int) -> PlannedSession:
        rows = self._file.sessions[index]
        turns: list[PlannedTurn] = []
        for number, row in enumerate(rows):
            turns.append(self._turn(row, index, number, sum(turn.num_prompt_tokens for turn in turns)))
            if row.cancel_after_tokens is not None:
                break
        return PlannedSession(
            session_id=f"{self._run_id}-{index}",
            scheduled_ns=self._instants_ns[index],
            cohort=rows[0].cohort,
            group=rows[0].group,
            tenant=rows[0].tenant,
            turns=tuple(turns),
        )

    def _turn(self, row: TraceRow, index: int, number: int, num_earlier_tokens: int) -> PlannedTurn:
        return PlannedTurn(
            request_id=f"{self._run_id}-{index}-{number}",
            user=self._segments(row, f"{index}/{number}"),
            num_output_tokens=row.output_tokens,
            think_ns=round(row.think_ns / self._speed) if number else 0,
            cancel_after_tokens=row.cancel_after_tokens,
            num_shared_tokens=num_earlier_tokens if number else row.shared_tokens,
        )

    def _segments(self, row: TraceRow, own_key: str) -> tuple[Segment, ...]:
        segments = [Segment(f"{self._run_id}/block/{hash_id}", tokens) for hash_id, tokens in row.blocks]
        if row.group and row.shared_tokens:
            segments.append(Segment(f"{self._run_id}/shared/{row.group}", row.shared_tokens))
        own = row.prompt_tokens - sum(segment.num_tokens for segment in segments)
        if own > 0:
            segments.append(Segment(f"{self._run_id}/{own_key}", own))
        return tuple(segments)
