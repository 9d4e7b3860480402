"""A scheduler with a modeled executor under it, driven step by step."""

from collections.abc import Iterable

from tailrace.cost.step_time import StepTimeModel
from tailrace.engine.scheduler import EngineConfig, Scheduler
from tailrace.engine.sequence import Sequence
from tailrace.engine.step import ExecutorLimits, SequenceEvent, StepDone, StepOutcome, StepPlan
from tailrace.executor.modeled import FaultRule, ModeledExecutor
from tailrace.request import FinishReason, RequestId, SamplingParams, SequenceId

VOCAB_SIZE = 1000
END_ID = 0
MS = 1_000_000


def make_limits(
    *,
    num_blocks: int = 64,
    context: int = 128,
    step_sizes: tuple[int, ...] = (16, 32, 64),
    scratch: int = 100_000,
    tokens_per_block: int = 4,
) -> ExecutorLimits:
    return ExecutorLimits(
        num_blocks=num_blocks,
        context_tokens_max=context,
        step_sizes=step_sizes,
        scratch_tokens_max=scratch,
        tokens_per_block=tokens_per_block,
    )


class Engine:
    """Steps on demand; keeps every event and every plan. Sequences get their number as id and arrival time."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        limits: ExecutorLimits | None = None,
        *,
        step_time: StepTimeModel | None = None,
        faults: FaultRule | None = None,
        end_ratio: float = 0.0,
    ) -> None:
        self.limits = limits or make_limits()
        self.executor = ModeledExecutor(
            self.limits, VOCAB_SIZE, end_token_ids=(END_ID,), end_ratio=end_ratio, faults=faults
        )
        self.scheduler = Scheduler(
            config or EngineConfig(sequences_max=8), self.limits, frozenset({END_ID}), step_time or StepTimeModel()
        )
        self.now_ns = 0
        self.plans: list[StepPlan] = []
        self.events: list[SequenceEvent] = []
        self.sequences: dict[int, Sequence] = {}

    def submit(
        self,
        prompt: Iterable[int],
        *,
        max_tokens: int = 4,
        request: str | None = None,
        choice: int = 0,
        priority: int = 0,
        deadline_ns: int | None = None,
        salt: str = "",
        params: SamplingParams | None = None,
    ) -> Sequence:
        number = len(self.sequences)
        sequence = Sequence(
            sequence_id=SequenceId(number),
            request_id=RequestId(request or f"r{number}"),
            choice=choice,
            prompt_token_ids=list(prompt),
            params=params or SamplingParams(max_tokens=max_tokens, temperature=0.0),
            priority=priority,
            arrival_ns=number,
            deadline_ns=deadline_ns,
            cache_salt=salt,
        )
        self.scheduler.submit(sequence, self.now_ns)
        self.sequences[number] = sequence
        return sequence

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan_step(self.now_ns)
        assert plan is not None, "nothing was planned"
        self.events += self.scheduler.take_events()
        self.plans.append(plan)
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome | None = None) -> list[SequenceEvent]:
        outcome = outcome or self.executor.execute(plan)
        self.now_ns += outcome.kernel_ns if isinstance(outcome, StepDone) else MS
        events = self.scheduler.commit_step(plan, outcome, self.now_ns)
        self.events += events
        self.scheduler.check_invariants()
        return events

    def step(self) -> StepPlan:
        plan = self.plan()
        self.commit(plan)
        return plan

    def run(self, steps_max: int = 1000) -> None:
        """To the end of all work."""
        for _ in range(steps_max):
            plan = self.scheduler.plan_step(self.now_ns)
            self.events += self.scheduler.take_events()
            if plan is None:
                assert self.scheduler.stats().num_blocks_held == 0
                return
            self.plans.append(plan)
            self.commit(plan)
        raise AssertionError("I7: still running")

    def ending(self, sequence: Sequence) -> tuple[FinishReason | None, str | None]:
        """Reason and label of the one last event; fails when there was none or more than one."""
        (event,) = [one for one in self.events if one.sequence_id == sequence.sequence_id and one.finish_reason]
        return event.finish_reason, event.error_label


def planned_ids(plan: StepPlan) -> list[int]:
    return [piece.sequence_id for piece in plan.slices]


def text_alone(
    sequence: Sequence, limits: ExecutorLimits, *, end_ratio: float = 0.0, prompt: list[int] | None = None
) -> list[int]:
    """The same prompt and parameters in an engine of its own with a pool that never runs short."""
    roomy = ExecutorLimits(
        num_blocks=1000,
        context_tokens_max=limits.context_tokens_max,
        step_sizes=(1024,),
        scratch_tokens_max=100_000,
        tokens_per_block=limits.tokens_per_block,
    )
    engine = Engine(EngineConfig(sequences_max=1), roomy, end_ratio=end_ratio)
    alone = engine.submit(
        prompt or sequence.token_ids[: sequence.num_prompt_tokens], choice=sequence.choice, params=sequence.params
    )
    engine.run()
    return alone.output_token_ids
