"""An executor without a model: virtual time, honest about KV. Drives tests and the simulator.

Every block holds, per token slot, a digest of *what was computed there*: a function of the token, its position and all
KV before it, read back through the block table of that step. The next token is drawn from the digest of the last
token. So a wrong position, a stale prefix, a table in the wrong order or a block freed too early changes the text, and
a gap is refused. Equal tokens give equal digests whatever the chunks, the batch or the blocks: text depends on
scheduling only through bugs.
"""

import threading
from collections.abc import Callable, Mapping
from math import exp, log

from tailrace.cost.step_time import StepFeatures, StepTimeModel
from tailrace.engine.budget import features_of
from tailrace.engine.step import (
    ExecutorLimits,
    SamplingRow,
    Slice,
    SliceOutcome,
    StepCut,
    StepDone,
    StepFailed,
    StepOutcome,
    StepPlan,
)
from tailrace.request import PositionLogprobs, SequenceId, StepId, TokenLogprob

_NUM_CANDIDATES = 8
_MASK = (1 << 63) - 1


class Fault:
    """What goes wrong in one step. `failing` are the sequences whose presence fails it; empty: it fails anyway; None:
    not."""

    __slots__ = ("delay_ns", "failing", "is_cut", "message")

    def __init__(
        self,
        *,
        failing: frozenset[SequenceId] | None = None,
        is_cut: bool = False,
        delay_ns: int = 0,
        message: str = "modeled fault",
    ) -> None:
        self.failing = failing
        self.is_cut = is_cut
        self.delay_ns = delay_ns
        self.message = message

    def fails(self, plan: StepPlan) -> bool:
        if self.failing is None:
            return False
        return not self.failing or any(piece.sequence_id in self.failing for piece in plan.slices)


FaultRule = Callable[[StepPlan], Fault | None]


class ModeledExecutor:
    """See the module. `duration_ns` maps features to kernel time; the default is the step-time model's prior.

    `end_token_ids` and `end_ratio`: the most probable token is an end token with that probability. `faults(plan)` is
    asked before each step. With `real_time` a step takes as long as it says, on `threading.Event.wait`, so that
    `interrupt` works from another thread; without, time is only a number in the outcome.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        vocab_size: int,
        *,
        duration_ns: Callable[[StepFeatures], int] | None = None,
        end_token_ids: tuple[int, ...] = (),
        end_ratio: float = 0.0,
        faults: FaultRule | None = None,
        real_time: bool = False,
    ) -> None:
        assert vocab_size >= 2, "a vocabulary has two tokens at least"
        self._limits = limits
        self._vocab_size = vocab_size
        self._duration_ns = duration_ns or StepTimeModel().predict_ns
        self._end_token_ids = end_token_ids
        self._end_ratio = end_ratio
        self._faults = faults
        self._real_time = real_time
        self._blocks: list[list[int]] = [[] for _ in range(limits.num_blocks)]
        self._tokens_before = 0
        self._lock = threading.Lock()
        self._current: StepId | None = None
        self._interrupted = threading.Event()

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Asserts that the plan is within the limits and leaves no gap; then copies, computes, draws."""
        with self._lock:
            self._current = plan.step_id
            self._interrupted.clear()
        fault = self._faults(plan) if self._faults is not None else None
        features = features_of(plan, self._tokens_before)
        duration_ns = self._duration_ns(features) + (fault.delay_ns if fault is not None else 0)
        outcomes = self._compute(plan)
        if self._real_time:
            self._interrupted.wait(duration_ns / 1e9)
        with self._lock:
            self._current = None
            if self._interrupted.is_set():
                return StepCut()
        if fault is not None and fault.is_cut:
            return StepCut()
        if fault is not None and fault.fails(plan):
            return StepFailed(fault.message)
        self._tokens_before = features.tokens
        return StepDone(outcomes=outcomes, kernel_ns=duration_ns)

    def interrupt(self, step_id: StepId) -> None:
        """Cuts the step named if it runs right now (a real-time one: virtual steps take no time), else does nothing."""
        with self._lock:
            if self._current == step_id:
                self._interrupted.set()

    def _compute(self, plan: StepPlan) -> tuple[SliceOutcome, ...]:
        assert plan.slices, "an empty plan"
        assert len({piece.sequence_id for piece in plan.slices}) == len(plan.slices), "a sequence is twice in a plan"
        for source, destination in plan.block_copies:
            assert max(source, destination) < len(self._blocks), "a copy outside the pool"
            assert min(source, destination) >= 0, "a copy outside the pool"
            self._blocks[destination] = list(self._blocks[source])
        multi = [piece.start + len(piece.token_ids) for piece in plan.slices if len(piece.token_ids) > 1]
        assert not multi or len(multi) * max(multi) <= self._limits.scratch_tokens_max, "the scratch bound is exceeded"
        # All slices write before any is read for its draw: a block written by two sequences of one step shows up.
        digests = [self._write(piece) for piece in plan.slices]
        return tuple(self._draw(piece, chain) for piece, chain in zip(plan.slices, digests, strict=True))

    def _write(self, piece: Slice) -> list[int]:
        """Writes the slice's digests and returns them. What a block held from there on is gone."""
        size = self._limits.tokens_per_block
        end = piece.start + len(piece.token_ids)
        assert piece.token_ids, "an empty slice"
        assert end <= self._limits.context_tokens_max, "a slice beyond the context"
        assert len(piece.block_ids) * size >= end, "the block table does not cover the slice"
        assert min(piece.block_ids) >= 0, "a block outside the pool"
        assert max(piece.block_ids) < len(self._blocks), "a block outside the pool"
        table = [self._blocks[block] for block in piece.block_ids[: -(-end // size)]]
        chain = []
        base = previous = 0
        for position, token_id in enumerate(piece.token_ids, piece.start):
            assert 0 <= token_id < self._vocab_size, "a token outside the vocabulary"
            index, offset = divmod(position, size)
            block = table[index]
            assert len(block) >= offset, (
                f"a gap: position {position} is written and the one before it is not in its block"
            )
            if offset == 0 or position == piece.start:
                base = hash(tuple(_last(table[before], size) for before in range(index)))
                previous = block[offset - 1] if offset else base
            previous = hash((previous, token_id, position, base))
            del block[offset:]
            block.append(previous)
            chain.append(previous)
        return chain

    def _draw(self, piece: Slice, chain: list[int]) -> SliceOutcome:
        if piece.num_prompt_logprobs is None and piece.sampling is None:
            return SliceOutcome()
        prompt: tuple[PositionLogprobs, ...] = ()
        if piece.num_prompt_logprobs is not None:
            count = piece.num_prompt_logprobs
            prompt = tuple(
                _report(self._logits(digest, None, (target,)), target, count)
                for digest, target in zip(chain, piece.prompt_targets, strict=False)
            )
        if piece.sampling is None:
            return SliceOutcome((), (), prompt)
        assert piece.sampling.position == piece.start + len(piece.token_ids), "the draw is for another position"
        # Read again through the table: a block that another slice of this step wrote is no longer what it was.
        size = self._limits.tokens_per_block
        index, offset = divmod(piece.sampling.position - 1, size)
        digest = _at(self._blocks[piece.block_ids[index]], offset)
        logits = self._logits(digest, piece.sampling, ())
        token_id = _choose(logits, piece.sampling)
        num_logprobs = piece.sampling.params.num_logprobs
        reported = () if num_logprobs is None else (_report(logits, token_id, num_logprobs),)
        return SliceOutcome((token_id,), reported, prompt)

    def _logits(self, digest: int, row: SamplingRow | None, also: tuple[int, ...]) -> dict[int, float]:
        """A few candidate tokens, most probable first by construction; the rest of the vocabulary counts as
        impossible."""
        logits: dict[int, float] = {}
        for rank in range(_NUM_CANDIDATES):
            logits.setdefault(hash((digest, rank)) % self._vocab_size, 4.0 - rank)
        if self._end_token_ids and (hash((digest, -7)) & _MASK) / _MASK < self._end_ratio:
            logits[self._end_token_ids[digest % len(self._end_token_ids)]] = 5.0
        for token_id in also:
            logits.setdefault(token_id, -6.0)
        if row is None:
            return logits
        for token_id, bias in row.params.logit_bias.items():
            logits[token_id] = logits.get(token_id, -6.0) + bias
        if row.history is not None:
            _penalise(logits, row)
        for token_id in row.masked_ids:
            logits.pop(token_id, None)
        if not logits:  # everything was masked: the lowest token that is not
            logits[next(token for token in range(self._vocab_size) if token not in row.masked_ids)] = 0.0
        return logits


def _last(block: list[int], size: int) -> int:
    return _at(block, size - 1)


def _at(block: list[int], offset: int) -> int:
    """What a read of that slot gives; unwritten memory gives a value that no honest digest has been derived from."""
    return block[offset] if offset < len(block) else -1


def _penalise(logits: dict[int, float], row: SamplingRow) -> None:
    assert row.history is not None
    output = list(row.history[row.num_prompt_tokens :])
    seen = set(row.history)
    for token_id in logits:
        if token_id in seen:
            value, factor = logits[token_id], row.params.repetition_penalty
            logits[token_id] = value / factor if value > 0 else value * factor
        count = output.count(token_id)
        logits[token_id] -= row.params.frequency_penalty * count + row.params.presence_penalty * (count > 0)


def _choose(logits: Mapping[int, float], row: SamplingRow) -> int:
    """Argmax, of logits with Gumbel noise when the temperature is not 0: noise keyed by (seed, choice, position)."""
    temperature = row.params.temperature

    def noisy(token_id: int) -> tuple[float, int]:
        if temperature == 0.0:
            return logits[token_id], -token_id
        unit = ((hash((row.params.seed, row.choice, row.position, token_id)) & _MASK) + 1) / (_MASK + 2)
        return logits[token_id] / temperature - log(-log(unit)), -token_id

    return max(logits, key=noisy)


def _report(logits: Mapping[int, float], token_id: int, num_top: int) -> PositionLogprobs:
    """Natural log-softmax over the candidates."""
    largest = max(logits.values())
    total = largest + log(sum(exp(value - largest) for value in logits.values()))
    best = sorted(logits, key=lambda token: (-logits[token], token))[:num_top]
    return PositionLogprobs(
        TokenLogprob(token_id, logits[token_id] - total),
        tuple(TokenLogprob(token, logits[token] - total) for token in best),
    )
