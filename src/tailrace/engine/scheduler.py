"""Hops 9 and 11: `plan_step` decides what the next step computes, `commit_step` takes in what it computed.

In: sequences, cancels, finishes, outcomes. Out: plans and events. Time is an argument; one plan is in flight at a time
and the calls come from one thread. Each decision is a function of a neighbouring file: which blocks (`admission`,
`blocks`), how many tokens (`budget`), in which order (`waiting`), which prefix (`prefix`). This file keeps the lists.

A step hands out tokens from one budget until tokens computed catch up with tokens wanted: rows (one token left to
compute) first, then prefill chunks of running sequences, then waiting ones.
"""

import heapq
from collections.abc import Iterable
from operator import attrgetter

from tailrace.cost.step_time import StepFeatures, StepTimeModel
from tailrace.engine.admission import Admission, WaitFor, decide_admission
from tailrace.engine.blocks import BlockPool
from tailrace.engine.budget import StepBudget
from tailrace.engine.config import EngineConfig as EngineConfig
from tailrace.engine.config import resolve_config
from tailrace.engine.prefix import PrefixesInProgress, extend_keys, parent_key
from tailrace.engine.progress import advance, chunk_slice, row_slice
from tailrace.engine.sequence import END_STATE, Sequence, SequenceState
from tailrace.engine.step import (
    ExecutorLimits,
    SchedulerStats,
    SequenceEvent,
    Slice,
    StepCut,
    StepDone,
    StepFailed,
    StepOutcome,
    StepPlan,
)
from tailrace.engine.waiting import WaitingQueue
from tailrace.errors import (
    ERROR_TABLE,
    Cancelled,
    ContextExceeded,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    KvExhausted,
    Overloaded,
)
from tailrace.request import FinishReason, RequestId, SequenceId, StepId

_RUNNING, _WAITING = SequenceState.RUNNING, SequenceState.WAITING
_by_rank = attrgetter("rank")


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
        self.pool = BlockPool(limits.num_blocks)
        self.step_features: StepFeatures | None = None
        """Of the last plan; with `predicted_ns` for the step log and the hang detector."""
        self.predicted_ns = 0

        self._end_token_ids = end_token_ids
        self._sequences: dict[SequenceId, Sequence] = {}
        self._requests: dict[RequestId, list[Sequence]] = {}
        self._waiting = WaitingQueue(self.config.overtakes_max)
        self._running: list[Sequence] = []  # by rank: the last is the next victim
        self._in_progress = PrefixesInProgress()
        self._copying: list[Sequence] = []
        self._suspects: list[Sequence] = []
        self._deadlines: list[tuple[int, SequenceId]] = []
        self._events: list[SequenceEvent] = []

        self._next_step_id = 1
        self._plan: StepPlan | None = None
        self._planned: list[Sequence] = []
        self._planned_alone = False
        self._tokens_before = 0

        self._num_submitted = 0
        self._num_followers = 0
        self._num_ended = dict.fromkeys((SequenceState.FINISHED, SequenceState.CANCELLED, SequenceState.FAILED), 0)
        self._totals = dict.fromkeys(
            ("preemptions", "prefix_query_tokens", "prefix_hit_tokens", "fork_tokens", "recompute_tokens", "steps_cut",
             "steps_failed", "itl_budget_overruns", "late_finishes"), 0
        )  # fmt: skip

    # ---- what comes from the app -------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence, now_ns: int) -> None:  # noqa: ARG002 (every call says when)
        """Raises InvalidRequest, ContextExceeded, KvExhausted or Overloaded; then nothing has changed."""
        assert sequence.sequence_id not in self._sequences, "I4: a sequence id is used once"
        self._check_fits(sequence)
        if self.num_waiting >= self.config.waiting_max:
            raise Overloaded(f"{self.num_waiting} sequences wait, which is this engine's bound: try again later")
        sequence.bind(self._end_token_ids, self.limits.context_tokens_max)
        self._sequences[sequence.sequence_id] = sequence
        siblings = self._requests.setdefault(sequence.request_id, [])
        for sibling in siblings:
            if _same_prompt(sibling, sequence):
                sequence.prompt_group = sibling.prompt_group
                sequence.prompt_group.append(sequence)
                break
        siblings.append(sequence)
        if sequence.deadline_ns is not None:
            heapq.heappush(self._deadlines, (sequence.deadline_ns, sequence.sequence_id))
        self._waiting.add(sequence)
        self._num_submitted += 1

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
            self._totals["late_finishes"] += 1
            return
        self._end(sequence, reason, now_ns)
        del sequence.token_ids[sequence.num_prompt_tokens + tokens_kept :]

    def expire(self, now_ns: int) -> None:
        """Ends what is past its deadline, in any state. `plan_step` calls it; a shell without work to plan may."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            sequence = self._sequences.get(heapq.heappop(self._deadlines)[1])
            if sequence is not None:
                label = ERROR_TABLE[DeadlineExceeded].label
                self._end_between_steps(sequence, FinishReason.DEADLINE, label, now_ns)

    def take_events(self) -> list[SequenceEvent]:
        """What cancels and deadlines ended since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._num_followers

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def next_deadline_ns(self) -> int | None:
        while self._deadlines and self._deadlines[0][1] not in self._sequences:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # ---- plan --------------------------------------------------------------------------------------------------------

    def plan_step(self, now_ns: int) -> StepPlan | None:
        """What to compute next; None when nothing waits or runs. Must be committed before the next call."""
        assert self._plan is None, "the plan in flight was not committed"
        self.expire(now_ns)
        budget = StepBudget(
            tokens_max=self.config.token_budget,
            step_sizes=self.config.step_sizes,
            scratch_tokens_max=self.limits.scratch_tokens_max,
            itl_target_ns=self.config.itl_target_ns,
            step_time=self.step_time,
            tokens_before=self._tokens_before,
        )
        slices: list[Slice] = []
        planned: list[Sequence] = []
        self._planned_alone = self._plan_suspect(budget, slices, planned)
        if not self._planned_alone:
            is_idle = not self._running
            if self._plan_rows(self._running, budget, slices, planned):
                self._plan_chunks(self._running, budget, slices, planned)
            if self.config.batching == "continuous" or is_idle:
                self._admit(budget, slices, planned, now_ns)
        if not slices:
            assert not self._sequences, "I7: work waits and none of it was planned"
            return None
        assert budget.tokens <= self.config.token_budget, "I3: more tokens planned than the budget"
        assert len(slices) <= self.config.sequences_max, "I3: more sequences planned than may run"
        self.step_features = budget.features()
        self.predicted_ns = self.step_time.predict_ns(self.step_features)
        copies = self._take_copies(planned) if self._copying else ()
        self._plan = StepPlan(step_id=StepId(self._next_step_id), slices=tuple(slices), block_copies=copies)
        self._planned = planned
        self._next_step_id += 1
        return self._plan

    def _plan_rows(
        self, sequences: Iterable[Sequence], budget: StepBudget, slices: list[Slice], planned: list[Sequence]
    ) -> int:
        """One token for each sequence that has one left to compute. Returns how many have more.

        The hot loop: everything about a decode row that can be known before was put into the sequence.
        """
        tokens_per_block = self.limits.tokens_per_block
        num_longer = kv_read = 0
        num_before = len(slices)
        for sequence in sequences:
            token_ids = sequence.token_ids
            length = len(token_ids)
            if length - sequence.num_computed != 1:
                num_longer += 1
                continue
            if len(sequence.block_ids) * tokens_per_block < length and not self._grow(sequence):
                continue
            kv_read += length
            planned.append(sequence)
            slices.append(row_slice(sequence))
        budget.add_rows(len(slices) - num_before, kv_read)
        return num_longer

    def _plan_chunks(
        self, sequences: Iterable[Sequence], budget: StepBudget, slices: list[Slice], planned: list[Sequence]
    ) -> None:
        """The next tokens of running sequences that have more than one left to compute."""
        for sequence in sequences:
            if len(sequence.token_ids) - sequence.num_computed > 1:
                self._plan_chunk(sequence, budget, slices, planned)

    def _plan_chunk(self, sequence: Sequence, budget: StepBudget, slices: list[Slice], planned: list[Sequence]) -> None:
        start = sequence.num_computed
        needed = len(sequence.token_ids) - start
        num_tokens = budget.fit_chunk(start, needed)
        if num_tokens > 0:
            budget.add_chunk(start, num_tokens, num_tokens == needed)
            planned.append(sequence)
            slices.append(chunk_slice(sequence, num_tokens))

    def _plan_suspect(self, budget: StepBudget, slices: list[Slice], planned: list[Sequence]) -> bool:
        """After a failed step, its sequences run alone, one a step, until the culprit is found."""
        while self._suspects:
            sequence = self._suspects[0]
            if sequence.state is _RUNNING:
                if self._plan_rows((sequence,), budget, slices, planned):
                    self._plan_chunk(sequence, budget, slices, planned)
                if slices:
                    return True
            self._suspects.pop(0)
        return False

    def _admit(self, budget: StepBudget, slices: list[Slice], planned: list[Sequence], now_ns: int) -> None:
        """Waiting sequences that fit, best rank first. A static batch is filled at once, tokens or not."""
        is_static = self.config.batching == "static"
        for sequence in self._waiting.candidates():
            if len(self._running) >= self.config.sequences_max:
                return
            decision = decide_admission(
                sequence,
                self.pool,
                self._in_progress,
                tokens_per_block=self.limits.tokens_per_block,
                prefix_caching=self.config.prefix_caching,
                may_wait=not is_static,
                num_running=len(self._running),
            )
            if decision is None:
                continue
            if isinstance(decision, WaitFor):
                self._park(sequence, decision)
                continue
            if not is_static and budget.fit_chunk(decision.start, len(sequence.token_ids) - decision.start) == 0:
                if budget.closed or budget.tokens >= self.config.token_budget:
                    return
                continue
            self._start(sequence, decision, now_ns)
            self._plan_chunk(sequence, budget, slices, planned)

    def _start(self, sequence: Sequence, admission: Admission, now_ns: int) -> None:
        self._waiting.remove(sequence)
        self._waiting.count_overtaking(sequence)
        self.pool.acquire(admission.shared)
        own = self.pool.allocate(admission.num_new)
        assert own is not None, "I2: admission counted the blocks"
        sequence.block_ids = admission.shared + own
        sequence.num_computed = admission.start
        sequence.num_blocks_published = len(admission.shared)
        sequence.num_overtaken = 0
        if admission.copy_source is not None:
            self.pool.acquire((admission.copy_source,))
            sequence.pending_copy = (admission.copy_source, own[0])
            self._copying.append(sequence)
        if self.config.prefix_caching:
            tokens_per_block = self.limits.tokens_per_block
            extend_keys(sequence, len(sequence.token_ids) // tokens_per_block, tokens_per_block)
            self._in_progress.add(sequence, len(admission.shared))
        self._count_admission(sequence, admission)
        sequence.move_to(_RUNNING)
        sequence.admitted_ns = now_ns if sequence.admitted_ns is None else sequence.admitted_ns
        self._running.append(sequence)
        self._running.sort(key=_by_rank)

    def _count_admission(self, sequence: Sequence, admission: Admission) -> None:
        """Cached tokens by source: prefix and fork count at the first admission, later ones are recomputation."""
        if sequence.admitted_ns is None:
            self._totals["prefix_query_tokens"] += sequence.num_prompt_tokens
            self._totals["fork_tokens" if admission.is_fork else "prefix_hit_tokens"] += admission.start
            sequence.num_cached_tokens = 0 if admission.is_fork else admission.start
        self._totals["recompute_tokens"] += max(0, sequence.num_lost - admission.start)
        sequence.num_lost = 0

    def _grow(self, sequence: Sequence) -> bool:
        """One more block for a decoding sequence, if need be by preemption: the running one of the worst rank first.

        Rows are planned in order of rank, so a victim was never planned before in this step, and the best sequence
        always gets its block (it fits alone): that is why preemption cannot go round in circles. False: it was itself
        the victim.
        """
        while (blocks := self.pool.allocate(1)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids += blocks
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes all its KV; its output stays, and it waits to be computed again."""
        sequence.num_lost = sequence.num_computed
        self._leave_running(sequence)
        sequence.num_computed = 0
        sequence.move_to(_WAITING)
        self._waiting.add(sequence)
        self._totals["preemptions"] += 1

    def _leave_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._in_progress.discard(sequence, sequence.num_blocks_published, len(sequence.block_keys))
        if sequence.pending_copy is not None:
            self._drop_copy(sequence)  # first: its source was built on blocks that are released next
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_blocks_published = 0
        self._wake(sequence, sequence.followers)

    # ---- leaders and followers, forks --------------------------------------------------------------------------------

    def _park(self, sequence: Sequence, wait: WaitFor) -> None:
        """Waits for its leader instead of in the queue; the leader inherits the better class of the two."""
        self._waiting.remove(sequence)
        self._num_followers += 1
        sequence.leader, sequence.wait_tokens = wait
        sequence.leader.followers.append(sequence)
        self._rank_leader(sequence.leader)

    def _wake(self, leader: Sequence, followers: Iterable[Sequence]) -> None:
        """Back to the queue, to be planned again."""
        for follower in tuple(followers):
            self._unpark(follower)
            self._waiting.add(follower)
        self._rank_leader(leader)

    def _unpark(self, follower: Sequence) -> None:
        assert follower.leader is not None
        follower.leader.followers.remove(follower)
        follower.leader = None
        self._num_followers -= 1

    def _rank_leader(self, leader: Sequence) -> None:
        best = min([leader.priority, *(follower.rank[0] for follower in leader.followers)])
        if leader.rank[0] != best:
            leader.rank = (best, leader.arrival_ns, leader.sequence_id)
            self._running.sort(key=_by_rank)

    def _take_copies(self, planned: list[Sequence]) -> tuple[tuple[int, int], ...]:
        chosen = set(planned)
        return tuple(one.pending_copy for one in self._copying if one in chosen and one.pending_copy is not None)

    def _drop_copy(self, sequence: Sequence) -> None:
        """Its copy was made, or is not needed any more."""
        assert sequence.pending_copy is not None
        self.pool.release([sequence.pending_copy[0]])
        sequence.pending_copy = None
        self._copying.remove(sequence)

    # ---- commit ------------------------------------------------------------------------------------------------------

    def commit_step(self, plan: StepPlan, outcome: StepOutcome, now_ns: int) -> list[SequenceEvent]:
        """Takes in what the executor did with the plan in flight. A cut or failed step leaves everything as it was."""
        assert plan is self._plan, "only the plan in flight can be committed"
        self._plan = None
        planned = [sequence for sequence in self._planned if sequence.state is _RUNNING]
        match outcome:
            case StepDone():
                assert len(outcome.outcomes) == len(plan.slices), "one outcome a slice"
                self._observe(outcome)
                events = self._commit_done(plan, outcome, now_ns)
            case StepCut():
                self._totals["steps_cut"] += 1
                events = []
            case StepFailed(message):
                self._totals["steps_failed"] += 1
                events = self._commit_failed(planned, message, now_ns)
        self._planned = []
        self._assert_conserved()
        return events

    def _commit_done(self, plan: StepPlan, outcome: StepDone, now_ns: int) -> list[SequenceEvent]:
        events = []
        tokens_per_block = self.limits.tokens_per_block
        if self._copying:
            for sequence in self._planned:
                if sequence.pending_copy is not None:
                    self._drop_copy(sequence)
        for sequence, piece, result in zip(self._planned, plan.slices, outcome.outcomes, strict=True):
            if sequence.state is not _RUNNING:
                continue  # ended while the step ran
            computed = sequence.num_computed = piece.start + len(piece.token_ids)
            if computed // tokens_per_block > sequence.num_blocks_published:
                self._publish(sequence)
            if sequence.followers:
                self._wake(sequence, [one for one in sequence.followers if one.wait_tokens <= computed])
            event = advance(sequence, piece, result, now_ns)
            if event is not None:
                events.append(event)
                if event.finish_reason is not None:
                    self._end(sequence, event.finish_reason, now_ns)
        if self._planned_alone:
            self._suspects.pop(0)
        return events

    def _commit_failed(self, planned: list[Sequence], message: str, now_ns: int) -> list[SequenceEvent]:
        """The sequences of a failed step are tried again one by one; the one that fails alone is ended."""
        if not self._planned_alone:
            self._suspects = planned
            return []
        self._suspects.pop(0)
        for sequence in planned:
            self._end(sequence, FinishReason.ERROR, now_ns)
        return [
            SequenceEvent(
                sequence_id=sequence.sequence_id,
                finish_reason=FinishReason.ERROR,
                error_label=ERROR_TABLE[EngineFailed].label,
                error_message=message,
            )
            for sequence in planned
        ]

    def _publish(self, sequence: Sequence) -> None:
        """Makes the blocks that are full now findable."""
        if not self.config.prefix_caching:
            return
        first, end = sequence.num_blocks_published, sequence.num_computed // self.limits.tokens_per_block
        keys = extend_keys(sequence, end, self.limits.tokens_per_block)
        for index in range(first, end):
            block = sequence.block_ids[index]
            sequence.block_ids[index] = self.pool.publish(block, keys[index], parent_key(sequence, index))
        self._in_progress.discard(sequence, first, end)
        sequence.num_blocks_published = end

    def _observe(self, outcome: StepDone) -> None:
        assert self.step_features is not None
        self._tokens_before = self.step_features.tokens
        duration_ns = outcome.kernel_ns + outcome.sampling_ns
        if duration_ns > 0:
            self.step_time.observe(self.step_features, duration_ns)
        target_ns = self.config.itl_target_ns
        if target_ns is not None and duration_ns > target_ns and self.step_features.kv_read > 0:
            self._totals["itl_budget_overruns"] += 1

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, reason: FinishReason, now_ns: int) -> None:
        """From any state, exactly once: everything it holds is given back before this returns."""
        if sequence.state is _RUNNING:
            self._leave_running(sequence)
        elif sequence.leader is not None:
            leader = sequence.leader
            self._unpark(sequence)
            self._rank_leader(leader)
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

    def _check_fits(self, sequence: Sequence) -> None:
        num_prompt, context = sequence.num_prompt_tokens, self.limits.context_tokens_max
        if num_prompt == 0:
            raise InvalidRequest("the prompt has no tokens: send at least one", param="prompt")
        if num_prompt >= context:
            raise ContextExceeded(
                f"the prompt has {num_prompt} tokens and the context holds {context}, the answer included: shorten it "
                "or raise context_tokens_max",
                param="prompt",
            )
        computed_max = min(num_prompt + sequence.params.max_tokens, context) - 1  # the last token drawn is not computed
        num_blocks = -(-computed_max // self.limits.tokens_per_block)
        if num_blocks > self.limits.num_blocks:
            raise KvExhausted(
                f"prompt and answer may need {num_blocks} KV blocks and the pool has {self.limits.num_blocks}: lower "
                "max_tokens or raise kv_memory",
                param="max_tokens",
            )

    # ---- what others look at -----------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=self.num_waiting,
            num_blocks=self.pool.num_blocks,
            num_blocks_held=self.pool.num_held,
            num_blocks_cached=self.pool.num_cached,
            **{f"{name}_total": value for name, value in self._totals.items()},
        )

    def _assert_conserved(self) -> None:
        alive = len(self._running) + len(self._waiting) + self._num_followers
        assert alive == len(self._sequences), "I1: a sequence is in no list, or in two"
        assert self._num_submitted == alive + sum(self._num_ended.values()), "I1: a sequence was lost"

    def check_invariants(self) -> None:
        """The full check of I1, I2 and I4: O(sequences + blocks), for tests and idle moments."""
        self._assert_conserved()
        for sequence in self._running:
            held, length = len(sequence.block_ids), len(sequence.token_ids)
            tokens_per_block = self.limits.tokens_per_block
            assert sequence.state is _RUNNING, "I4: a sequence in the running list does not run"
            assert sequence.leader is None, "I4: a running sequence waits for another"
            assert sequence.num_computed < length, "I7: a running sequence has nothing to compute"
            assert -(-sequence.num_computed // tokens_per_block) <= held <= -(-length // tokens_per_block), (
                "I2: blocks held"
            )
            for follower in sequence.followers:
                assert follower.leader is sequence, "I4: a follower follows another"
                assert follower.state is _WAITING, "I4: a follower does not wait"
        for sequence in self._waiting:
            assert sequence.state is _WAITING, "I4: a queued sequence does not wait"
            assert not sequence.block_ids, "I2: a waiting sequence holds blocks"
            assert not sequence.followers, "I7: somebody waits for a sequence that does not run"
        assert self._running == sorted(self._running, key=_by_rank), "the last running sequence is the next victim"
        assert self._running or not len(self._in_progress), "prefixes are in progress and nothing runs"
        assert sum(len(one.followers) for one in self._running) == self._num_followers, "I1: followers"
        holders = [block for one in self._running for block in one.block_ids]
        holders += [one.pending_copy[0] for one in self._copying if one.pending_copy is not None]
        self.pool.check_invariants(holders)


def _same_prompt(one: Sequence, other: Sequence) -> bool:
    num_tokens = other.num_prompt_tokens
    return (
        one.num_prompt_tokens == num_tokens
        and one.cache_salt == other.cache_salt
        and one.token_ids[:num_tokens] == other.token_ids
    )
