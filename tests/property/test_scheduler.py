"""I1 to I7 under random schedules: submits, cancels, finishes, deadlines, forks, shared prefixes, small pools,
budgets, cuts and failures. The text of every survivor equals its text alone."""

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference_scheduler import run_alone, run_in_order

from tailrace.cost.step_time import StepTimeModel
from tailrace.engine.scheduler import EngineConfig, Scheduler
from tailrace.engine.sequence import Sequence
from tailrace.engine.step import ExecutorLimits, SequenceEvent, StepDone, StepPlan
from tailrace.errors import KvExhausted, Overloaded
from tailrace.executor.modeled import Fault, ModeledExecutor
from tailrace.request import FinishReason, RequestId, SamplingParams, SequenceId

VOCAB_SIZE = 200
END = (0, 1)
STEPS_A_TOKEN_MAX = 4
"""With a budget of one token a step, every token of every open sequence takes one; cuts and failures repeat some."""
_MS = 1_000_000


class World:
    """One engine under test and its bookkeeping; every random choice comes from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random
        size = pick.choice((1, 2, 4, 8))
        context = pick.randint(12, 64)
        self.limits = ExecutorLimits(
            num_blocks=max(2, pick.choice((context // size, 2 * context // size, 6 * context // size))),
            context_tokens_max=context,
            step_sizes=pick.choice(((4, 8, 16), (16,), (7, 19, 32), (64,))),
            scratch_tokens_max=context * pick.choice((1, 2, 8)),
            tokens_per_block=size,
        )
        sequences_max = pick.randint(1, 6)
        self.config = EngineConfig(
            sequences_max=sequences_max,
            token_budget=pick.choice((None, sequences_max, sequences_max + 3, 16, 40)),
            itl_target_ms=pick.choice((None, None, 5.0, 8.0, 12.0)),
            prefix_caching=pick.random() < 0.7,
            batching="static" if pick.random() < 0.1 else "continuous",
            waiting_max=pick.choice((4, 1000)),
            overtakes_max=pick.choice((0, 2, 16)),
        )
        self.culprits: set[SequenceId] = set()
        self.fault_ratio = pick.choice((0.0, 0.0, 0.2))
        self.executor = ModeledExecutor(
            self.limits, VOCAB_SIZE, end_token_ids=END, end_ratio=pick.choice((0.0, 0.1)), faults=self.fault
        )
        self.alone = ModeledExecutor(self.limits, VOCAB_SIZE, end_token_ids=END, end_ratio=self.executor._end_ratio)
        self.now_ns = 0
        self.last_was_cut = False
        self.prefixes = [[pick.randrange(2, VOCAB_SIZE) for _ in range(context)] for _ in range(2)]
        self.sequences: dict[SequenceId, Sequence] = {}
        self.endings: dict[SequenceId, FinishReason] = {}
        self.labels: dict[SequenceId, str | None] = {}
        self.tokens_seen: dict[SequenceId, list[int]] = {}
        self.prompt_rows_seen: dict[SequenceId, list[int]] = {}

    def fault(self, plan: StepPlan) -> Fault | None:
        if self.culprits & {piece.sequence_id for piece in plan.slices}:
            return Fault(failing=frozenset(self.culprits))
        if self.random.random() < self.fault_ratio:
            kind = self.random.random()
            if kind < 0.5 and not self.last_was_cut:
                self.last_was_cut = True
                return Fault(is_cut=True)
            if kind < 0.7 and len(plan.slices) > 1:
                return Fault(failing=frozenset())
            return Fault(delay_ns=self.random.randrange(50 * _MS))
        self.last_was_cut = False
        return None

    def build(self) -> None:
        config = self.config
        if config.token_budget is not None and config.token_budget < (config.sequences_max or 1):
            config = EngineConfig(sequences_max=config.sequences_max)
        self.scheduler = Scheduler(config, self.limits, frozenset(END), StepTimeModel())

    def params(self) -> SamplingParams:
        pick = self.random
        return SamplingParams(
            max_tokens=pick.choice((pick.randint(1, 6), pick.randint(1, self.limits.context_tokens_max))),
            min_tokens=pick.choice((0, 0, 3)),
            temperature=pick.choice((0.0, 1.0)),
            seed=pick.randrange(100),
            repetition_penalty=pick.choice((1.0, 1.0, 1.3)),
            stop_token_ids=pick.choice(((), (7, 9))),
            ignore_eos=pick.random() < 0.2,
            num_logprobs=pick.choice((None, 2)),
            num_prompt_logprobs=pick.choice((None, None, None, 1)),
        )

    def submit(self) -> None:
        pick = self.random
        length = pick.randint(1, pick.choice((6, self.limits.context_tokens_max - 1)))
        shared = pick.randint(0, length)
        prompt = pick.choice(self.prefixes)[:shared] + [pick.randrange(2, VOCAB_SIZE) for _ in range(length - shared)]
        params, request_id = self.params(), RequestId(f"r{len(self.sequences)}")
        priority, salt = pick.choice((0, 0, 0, 1, -1)), pick.choice(("", "", "b"))
        deadline = self.now_ns + pick.randrange(400 * _MS) if pick.random() < 0.15 else None
        arrival = self.now_ns
        for choice in range(pick.choice((1, 1, 1, 2, 4))):
            sequence = Sequence(
                sequence_id=SequenceId(len(self.sequences)),
                request_id=request_id,
                choice=choice,
                prompt_token_ids=prompt,
                params=params,
                priority=priority,
                arrival_ns=arrival,
                deadline_ns=deadline,
                cache_salt=salt,
            )
            try:
                self.scheduler.submit(sequence, self.now_ns)
            except (KvExhausted, Overloaded):
                continue
            self.sequences[sequence.sequence_id] = sequence
            self.tokens_seen[sequence.sequence_id] = []
            self.prompt_rows_seen[sequence.sequence_id] = []
            if pick.random() < 0.03:
                self.culprits.add(sequence.sequence_id)

    def disturb(self) -> None:
        """A cancel or a finish of anything, known or not, ended or not."""
        pick = self.random
        if not self.sequences:
            return
        sequence = pick.choice(list(self.sequences.values()))
        if pick.random() < 0.5:
            self.scheduler.cancel(sequence.request_id, self.now_ns)
            self.take(self.scheduler.take_events())
        else:
            was_open = sequence.sequence_id not in self.endings
            kept = pick.randint(0, sequence.num_output_tokens)
            self.scheduler.finish(sequence.sequence_id, FinishReason.STOP, kept, self.now_ns)
            if was_open:
                self.endings[sequence.sequence_id] = FinishReason.STOP
                self.tokens_seen[sequence.sequence_id] = self.tokens_seen[sequence.sequence_id][:kept]
                assert sequence.output_token_ids == self.tokens_seen[sequence.sequence_id]

    def take(self, events: list[SequenceEvent]) -> None:
        for event in events:
            assert event.sequence_id not in self.endings, "I4: an event after the end"
            self.tokens_seen[event.sequence_id] += event.token_ids
            self.prompt_rows_seen[event.sequence_id] += [row.chosen.token_id for row in event.prompt_logprobs]
            if event.finish_reason is not None:
                self.endings[event.sequence_id] = event.finish_reason
                self.labels[event.sequence_id] = event.error_label

    def step(self, disturbs: bool) -> None:
        plan = self.scheduler.plan_step(self.now_ns)
        self.take(self.scheduler.take_events())
        self.scheduler.check_invariants()
        if plan is None:
            assert not self.scheduler.has_work
            return
        self.check_plan(plan)
        outcome = self.executor.execute(plan)
        self.now_ns += outcome.kernel_ns if isinstance(outcome, StepDone) else 5 * _MS
        if disturbs and self.random.random() < 0.1:
            self.disturb()
        self.take(self.scheduler.commit_step(plan, outcome, self.now_ns))
        self.scheduler.check_invariants()

    def check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert plan.num_tokens <= config.token_budget
        assert len(plan.slices) <= config.sequences_max
        unfinished = 0
        for piece in plan.slices:
            sequence = self.sequences[piece.sequence_id]
            assert piece.start == sequence.num_computed, "I3: each slice starts where computing ended"
            unfinished += piece.sampling is None
        if unfinished:
            assert unfinished == 1, "one trimmed chunk closes the step"
            floor = config.itl_target_ns is not None
            assert plan.num_tokens in config.step_sizes or floor, "an unlisted size with an unfinished chunk"

    def open_ids(self) -> list[SequenceId]:
        return [sequence_id for sequence_id in self.sequences if sequence_id not in self.endings]

    def run(self) -> None:
        pick = self.random
        busy, submit_ratio = pick.randint(1, 50), pick.choice((0.1, 0.3, 0.6))
        for _ in range(busy):
            while pick.random() < submit_ratio:
                self.submit()
            if pick.random() < 0.05:
                self.disturb()
            self.step(disturbs=True)
        steps, steps_max = 0, STEPS_A_TOKEN_MAX * (1 + len(self.open_ids())) * self.limits.context_tokens_max
        while self.scheduler.has_work:
            self.step(disturbs=False)
            steps += 1
            assert steps < steps_max, "I7: work waits and nothing advances"
        self.check_end()

    def check_end(self) -> None:
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == stats.num_blocks_held == 0
        assert self.endings.keys() == self.sequences.keys(), "I4: a sequence never ended"
        for sequence_id, sequence in self.sequences.items():
            text, reason = run_alone(sequence_of(sequence), self.alone, frozenset(END))
            seen, ending = self.tokens_seen[sequence_id], self.endings[sequence_id]
            assert sequence.output_token_ids == seen, "the events and the sequence differ"
            assert seen == text[: len(seen)], "I6: the text differs from its text alone"
            if self.labels.get(sequence_id) is None and ending is reason is FinishReason.LENGTH:
                assert seen == text
            self.check_prompt_rows(sequence)
            if ending is FinishReason.ERROR:
                assert sequence_id in self.culprits, "an innocent sequence was ended"
                assert self.labels[sequence_id] == "engine_failed"
            times = [sequence.arrival_ns, sequence.admitted_ns, sequence.first_token_ns, sequence.ended_ns]
            known = [value for value in times if value is not None]
            assert known == sorted(known), "I5: order of times"

    def check_prompt_rows(self, sequence: Sequence) -> None:
        """Every prompt token but the first is reported once, in order, before the first output token."""
        rows = self.prompt_rows_seen[sequence.sequence_id]
        wanted = sequence.token_ids[1 : sequence.num_prompt_tokens]
        if sequence.params.num_prompt_logprobs is None:
            assert rows == []
        elif sequence.first_token_ns is None:
            assert rows == wanted[: len(rows)]
        else:
            assert rows == wanted


def sequence_of(sequence: Sequence) -> Sequence:
    """The same as it was submitted."""
    return Sequence(
        sequence_id=sequence.sequence_id,
        request_id=sequence.request_id,
        choice=sequence.choice,
        prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens],
        params=sequence.params,
        priority=sequence.priority,
        arrival_ns=sequence.arrival_ns,
    )


@example(seed=72_057_594_037_927_936)  # one token a step: the bound on steps must grow with the work
@given(seed=st.integers(0, 2**64))
def test_random_schedules_keep_every_invariant_and_every_text(seed: int) -> None:
    world = World(seed)
    world.build()
    world.run()


@settings(max_examples=max(50, settings.default.max_examples // 5))
@given(seed=st.integers(0, 2**64))
def test_equals_the_obvious_scheduler_when_nothing_is_contended(seed: int) -> None:
    """One at a time, no cache: same texts, same order of ends as forty obvious lines."""
    pick = random.Random(seed)
    limits = ExecutorLimits(
        num_blocks=64, context_tokens_max=64, step_sizes=(16, 64), scratch_tokens_max=64, tokens_per_block=4
    )
    executor = ModeledExecutor(limits, VOCAB_SIZE, end_token_ids=END, end_ratio=0.05)
    scheduler = Scheduler(EngineConfig(sequences_max=1, prefix_caching=False), limits, frozenset(END), StepTimeModel())
    sequences = []
    for number in range(pick.randint(1, 8)):
        sequences.append(
            Sequence(
                sequence_id=SequenceId(number),
                request_id=RequestId(str(number)),
                choice=0,
                prompt_token_ids=[pick.randrange(2, VOCAB_SIZE) for _ in range(pick.randint(1, 40))],
                params=SamplingParams(max_tokens=pick.randint(1, 10), seed=number),
                priority=pick.choice((0, 1)),
                arrival_ns=pick.randrange(5),
            )
        )
        scheduler.submit(sequences[-1], 0)
    ended: list[tuple[SequenceId, list[int]]] = []
    by_id = {one.sequence_id: one for one in sequences}
    while (plan := scheduler.plan_step(0)) is not None:
        for event in scheduler.commit_step(plan, executor.execute(plan), 0):
            if event.finish_reason is not None:
                ended.append((event.sequence_id, by_id[event.sequence_id].output_token_ids))
    assert ended == run_in_order([sequence_of(one) for one in sequences], executor, frozenset(END))
