"""Hops 9 and 11: `plan_step` decides what the next step computes, `commit_step` takes in what it computed.

In: sequences, cancels, finishes, outcomes. Out: plans and events. Time is an argument; one plan is in flight at a time
and all calls come from one thread. A step hands out tokens from one budget until tokens computed catch up with tokens
wanted: rows (one token left to compute) first, then chunks of running sequences, then waiting ones. Each decision is
in a file of its own: who may start and with which blocks (`admission`), how many tokens (`budget`), in which order
(`waiting`), whose prefix (`prefix`), what a running sequence holds and who is preempted (`residents`), what a token
does (`progress`).
"""

import heapq

from tailrace.cost.step_time import StepFeatures, StepTimeModel
from tailrace.engine.admission import Admission, WaitFor, check_fits, find_source, size_admission
from tailrace.engine.blocks import BlockPool
from tailrace.engine.budget import StepBudget
from tailrace.engine.config import EngineConfig as EngineConfig
from tailrace.engine.config import resolve_config
from tailrace.engine.draft import StepDraft
from tailrace.engine.progress import advance
from tailrace.engine.residents import Residents
from tailrace.engine.sequence import END_STATE, Sequence, SequenceState
from tailrace.engine.step import (
    ExecutorLimits,
    SchedulerStats,
    SequenceEvent,
    StepCut,
    StepDone,
    StepFailed,
    StepOutcome,
    StepPlan,
)
from tailrace.engine.totals import Totals
from tailrace.engine.waiting import WaitingQueue
from tailrace.errors import ERROR_TABLE, Cancelled, DeadlineExceeded, EngineFailed, Overloaded
from tailrace.request import FinishReason, RequestId, SequenceId, StepId

_RUNNING = SequenceState.RUNNING
_DEADLINES_SPARE = 64
"""Deadlines of ended sequences that may lie about before they are swept."""


class Scheduler:
    """Owns the sequences and the KV blocks of one engine. Pure: no clock, no I/O, no randomness."""

    def __init__(
        self,
        config: EngineConfig,
        limits: ExecutorLimits,
        end_token_ids: frozenset[int],
        step_time: StepTimeModel,
    ) -> None:
        """Raises ConfigError when `config` contradicts itself or `limits`."""
        self.config = resolve_config(config, limits)
        self.limits = limits
        self.step_time = step_time
        self.step_features: StepFeatures | None = None
        """Of the last plan."""
        self.predicted_ns = 0
        """Of the last plan, for the step log and for who watches for a hang."""

        self._end_token_ids = end_token_ids
        self._totals = Totals()
        self._pool = BlockPool(limits.num_blocks)
        self._waiting = WaitingQueue(self.config.overtakes_max)
        self._residents = Residents(
            self._pool,
            self._waiting,
            self._totals,
            tokens_per_block=limits.tokens_per_block,
            prefix_caching=self.config.prefix_caching,
        )
        self._sequences: dict[SequenceId, Sequence] = {}
        self._requests: dict[RequestId, list[Sequence]] = {}
        self._deadlines: list[tuple[int, SequenceId]] = []
        self._events: list[SequenceEvent] = []
        self._suspects: list[Sequence] = []
        """Sequences of a failed step that were not tried alone yet."""
        self._num_submitted = 0
        self._num_ended = dict.fromkeys(END_STATE.values(), 0)

        self._plan: StepPlan | None = None
        self._planned: list[Sequence] = []
        self._planned_alone = False
        self._next_step_id = 1
        self._tokens_before = 0

    # ---- what comes from the app -------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence, now_ns: int) -> None:  # noqa: ARG002 (every call says when)
        """Raises InvalidRequest, ContextExceeded, KvExhausted or Overloaded; then nothing has changed."""
        assert sequence.sequence_id not in self._sequences, "I4: a sequence id is used once"
        check_fits(sequence, self.limits)
        if self.num_waiting >= self.config.waiting_max:
            raise Overloaded(f"{self.num_waiting} sequences wait, which is this engine's bound: try again later")
        sequence.bind(self._end_token_ids, self.limits.context_tokens_max)
        siblings = self._requests.setdefault(sequence.request_id, [])
        for sibling in siblings:
            if _same_prompt(sibling, sequence):
                sequence.prompt_group = sibling.prompt_group
                sequence.prompt_group.append(sequence)
                break
        siblings.append(sequence)
        self._sequences[sequence.sequence_id] = sequence
        if sequence.deadline_ns is not None:
            self._remember_deadline(sequence.deadline_ns, sequence.sequence_id)
        self._waiting.add(sequence)
        self._num_submitted += 1
        source = self._find_source(sequence)
        if isinstance(source, WaitFor):  # at once, so that the leader inherits its class even while the queue stands
            self._residents.park(sequence, source)

    def cancel(self, request_id: RequestId, now_ns: int) -> None:
        """Ends all choices of a request, in whatever state. An unknown one has ended already: nothing happens."""
        for sequence in tuple(self._requests.get(request_id, ())):
            self._end_between_steps(sequence, FinishReason.CANCELLED, ERROR_TABLE[Cancelled].label, now_ns)

    def finish(self, sequence_id: SequenceId, reason: FinishReason, tokens_kept: int, now_ns: int) -> None:
        """The app found the end in the text: keeps the first `tokens_kept` output tokens. No event: the app knows.

        May come late, when the sequence drew more tokens or ended by itself; the latter is counted, nothing else.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            self._totals.late_finishes += 1
            return
        self._end(sequence, reason, now_ns)
        del sequence.token_ids[sequence.num_prompt_tokens + tokens_kept :]

    def expire(self, now_ns: int) -> None:
        """Ends what is past its deadline, in any state. `plan_step` does it too."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            sequence = self._sequences.get(heapq.heappop(self._deadlines)[1])
            if sequence is not None:
                label = ERROR_TABLE[DeadlineExceeded].label
                self._end_between_steps(sequence, FinishReason.DEADLINE, label, now_ns)

    def _remember_deadline(self, deadline_ns: int, sequence_id: SequenceId) -> None:
        """Those of ended sequences stay in the heap until they pass, or until they are the most of it."""
        if len(self._deadlines) > 2 * len(self._sequences) + _DEADLINES_SPARE:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._sequences]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_ns, sequence_id))

    def take_events(self) -> list[SequenceEvent]:
        """What cancels and deadlines ended since the last call."""
        events, self._events = self._events, []
        return events

    # ---- plan --------------------------------------------------------------------------------------------------------

    def plan_step(self, now_ns: int) -> StepPlan | None:
        """What to compute next; None when nothing waits or runs. Must be committed before the next call."""
        assert self._plan is None, "the plan in flight was not committed"
        self.expire(now_ns)
        draft = StepDraft(self._new_budget())
        self._planned_alone = self._draft_suspect(draft)
        if not self._planned_alone:
            self._draft(draft, now_ns)
        slices, budget = draft.slices, draft.budget
        if not slices:
            assert not self._sequences, "I7: work waits and none of it was planned"
            return None
        assert budget.tokens <= self.config.token_budget, "I3: more tokens planned than the budget"
        assert len(slices) <= self.config.sequences_max, "I3: more sequences planned than may run"
        self.step_features = budget.features()
        self.predicted_ns = self.step_time.predict_ns(self.step_features)
        self._planned = draft.sequences
        copies = self._residents.copies_of(draft.sequences)
        self._plan = StepPlan(step_id=StepId(self._next_step_id), slices=tuple(slices), block_copies=copies)
        self._next_step_id += 1
        return self._plan

    def _new_budget(self) -> StepBudget:
        return StepBudget(
            tokens_max=self.config.token_budget,
            step_sizes=self.config.step_sizes,
            scratch_tokens_max=self.limits.scratch_tokens_max,
            itl_target_ns=self.config.itl_target_ns,
            step_time=self.step_time,
            tokens_before=self._tokens_before,
        )

    def _draft(self, draft: StepDraft, now_ns: int) -> None:
        residents, tokens_per_block = self._residents, self.limits.tokens_per_block
        was_empty = not residents.sequences
        if draft.add_rows(residents.sequences, tokens_per_block, residents.grow):
            draft.add_chunks(residents.sequences)
        if self.config.batching == "continuous" or was_empty:
            self._admit(draft, now_ns)

    def _draft_suspect(self, draft: StepDraft) -> bool:
        """After a failed step, its sequences run alone, one a step, until the culprit is found. False: nobody is
        left."""
        while self._suspects:
            sequence = self._suspects[0]
            if sequence.state is _RUNNING:
                if draft.add_rows((sequence,), self.limits.tokens_per_block, self._residents.grow):
                    draft.add_chunk(sequence)
                if draft.slices:
                    return True
            self._suspects.pop(0)
        return False

    def _admit(self, draft: StepDraft, now_ns: int) -> None:
        """Waiting sequences that fit, best rank first. A static batch is filled at once, tokens or not."""
        is_static = self.config.batching == "static"
        for sequence in self._waiting.candidates():
            if len(self._residents) >= self.config.sequences_max or (draft.budget.is_full and not is_static):
                return
            source = self._find_source(sequence)
            if isinstance(source, WaitFor):
                self._residents.park(sequence, source)
                continue
            admission = size_admission(
                sequence,
                source,
                self._pool,
                tokens_per_block=self.limits.tokens_per_block,
                num_running=len(self._residents),
            )
            if admission is None:
                continue
            if is_static or draft.budget.fit_chunk(source.start, len(sequence.token_ids) - source.start) > 0:
                self._count_admission(sequence, admission, now_ns)
                self._residents.start(sequence, admission)
                draft.add_chunk(sequence)

    def _find_source(self, sequence: Sequence) -> Admission | WaitFor:
        return find_source(
            sequence,
            self._pool,
            self._residents.in_progress,
            tokens_per_block=self.limits.tokens_per_block,
            prefix_caching=self.config.prefix_caching,
            may_wait=self.config.batching == "continuous",
        )

    def _count_admission(self, sequence: Sequence, admission: Admission, now_ns: int) -> None:
        """Cached tokens by source: prefix and fork count at the first admission, later ones are recomputation."""
        if sequence.admitted_ns is None:
            sequence.admitted_ns = now_ns
            sequence.num_cached_tokens = 0 if admission.is_fork else admission.start
            if self.config.prefix_caching and not admission.is_fork and not sequence.wants_prompt_logprobs:
                self._totals.prefix_query_tokens += sequence.num_prompt_tokens  # only where the cache was asked
            self._totals.prefix_hit_tokens += sequence.num_cached_tokens
            self._totals.fork_tokens += admission.start - sequence.num_cached_tokens
        self._totals.recompute_tokens += max(0, sequence.num_lost - admission.start)
        sequence.num_lost = 0

    # ---- commit ------------------------------------------------------------------------------------------------------

    def commit_step(self, plan: StepPlan, outcome: StepOutcome, now_ns: int) -> list[SequenceEvent]:
        """Takes in what the executor did with the plan in flight. A cut or failed step leaves everything as it was."""
        assert plan is self._plan, "only the plan in flight can be committed"
        self._plan = None
        match outcome:
            case StepDone():
                events = self._commit_done(plan, outcome, now_ns)
            case StepCut():
                self._totals.steps_cut += 1
                events = []
            case StepFailed(message):
                self._totals.steps_failed += 1
                events = self._commit_failed(message, now_ns)
        self._planned = []
        self._assert_conserved()
        return events

    def _commit_done(self, plan: StepPlan, outcome: StepDone, now_ns: int) -> list[SequenceEvent]:
        self._observe(outcome)
        self._residents.settle_copies(self._planned)
        events = []
        tokens_per_block = self.limits.tokens_per_block
        for sequence, piece, result in zip(self._planned, plan.slices, outcome.outcomes, strict=True):
            if sequence.state is not _RUNNING:
                continue  # it ended while the step ran
            computed = sequence.num_computed = piece.start + len(piece.token_ids)
            if computed // tokens_per_block > sequence.num_blocks_published:
                self._residents.publish(sequence)
            if sequence.followers:
                self._residents.wake_ready(sequence)
            event = advance(sequence, piece, result, now_ns)
            if event is not None:
                events.append(event)
                if event.finish_reason is not None:
                    self._end(sequence, event.finish_reason, now_ns)
        if self._planned_alone:
            self._suspects.pop(0)
        return events

    def _commit_failed(self, message: str, now_ns: int) -> list[SequenceEvent]:
        """The sequences of a failed step are tried again one by one; the one that fails alone is ended."""
        planned = [sequence for sequence in self._planned if sequence.state is _RUNNING]
        if not self._planned_alone:
            self._suspects = planned
            return []
        self._suspects.pop(0)
        events = []
        for sequence in planned:
            self._end(sequence, FinishReason.ERROR, now_ns)
            events.append(
                SequenceEvent(
                    sequence_id=sequence.sequence_id,
                    finish_reason=FinishReason.ERROR,
                    error_label=ERROR_TABLE[EngineFailed].label,
                    error_message=message,
                )
            )
        return events

    def _observe(self, outcome: StepDone) -> None:
        assert self.step_features is not None, "a plan has features"
        self._tokens_before = self.step_features.tokens
        duration_ns, target_ns = outcome.kernel_ns + outcome.sampling_ns, self.config.itl_target_ns
        if duration_ns > 0:
            self.step_time.observe(self.step_features, duration_ns)
        if target_ns is not None and duration_ns > target_ns and self.step_features.kv_read > 0:
            self._totals.itl_budget_overruns += 1

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, reason: FinishReason, now_ns: int) -> None:
        """From any state, exactly once: everything it holds is given back before this returns."""
        if sequence.state is _RUNNING:
            self._residents.leave(sequence)
        elif sequence.leader is not None:
            self._residents.unpark(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.move_to(END_STATE[reason])
        sequence.ended_ns = now_ns
        self._num_ended[sequence.state] += 1
        sequence.prompt_group.remove(sequence)
        del self._sequences[sequence.sequence_id]
        siblings = self._requests[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request_id]

    def _end_between_steps(self, sequence: Sequence, reason: FinishReason, label: str, now_ns: int) -> None:
        self._end(sequence, reason, now_ns)
        self._events.append(SequenceEvent(sequence_id=sequence.sequence_id, finish_reason=reason, error_label=label))

    # ---- what others look at -----------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._residents.num_followers

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def next_deadline_ns(self) -> int | None:
        while self._deadlines and self._deadlines[0][1] not in self._sequences:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def stats(self) -> SchedulerStats:
        totals = self._totals
        return SchedulerStats(
            num_running=len(self._residents),
            num_waiting=self.num_waiting,
            num_blocks=self._pool.num_blocks,
            num_blocks_held=self._pool.num_held,
            num_blocks_cached=self._pool.num_cached,
            preemptions_total=totals.preemptions,
            prefix_query_tokens_total=totals.prefix_query_tokens,
            prefix_hit_tokens_total=totals.prefix_hit_tokens,
            fork_tokens_total=totals.fork_tokens,
            recompute_tokens_total=totals.recompute_tokens,
            steps_cut_total=totals.steps_cut,
            steps_failed_total=totals.steps_failed,
            itl_budget_overruns_total=totals.itl_budget_overruns,
            late_finishes_total=totals.late_finishes,
        )

    def _assert_conserved(self) -> None:
        alive = len(self._residents) + self.num_waiting
        assert alive == len(self._sequences), "I1: a sequence is in no list, or in two"
        assert self._num_submitted == alive + sum(self._num_ended.values()), "I1: a sequence was lost"

    def check_invariants(self) -> None:
        """The full check of I1, I2 and I4: O(sequences + blocks), for tests and idle moments."""
        self._assert_conserved()
        self._waiting.check_invariants()
        self._residents.check_invariants()


def _same_prompt(one: Sequence, other: Sequence) -> bool:
    num_tokens = other.num_prompt_tokens
    return (
        one.num_prompt_tokens == num_tokens
        and one.cache_salt == other.cache_salt
        and one.token_ids[:num_tokens] == other.token_ids
    )
