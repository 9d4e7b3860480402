"""What still fits into the step being planned: tokens, time, and the kernels' scratch memory.

One budget of tokens for everything. Decode rows come first and always fit (one token each, `sequences_max` <= budget);
what is left goes to prefill chunks, whose length is decided here.
"""

from collections.abc import Callable

from tailrace.cost.step_time import StepFeatures, StepTimeModel
from tailrace.engine.step import StepPlan

CHUNK_TOKENS_MIN = 8
"""The least prefill progress of a step whose time is spent before it begins. A chunk repacks all its past KV, so a few
tokens pay that once; many would break the ITL target further than progress needs."""


def chunk_tokens(
    needed: int,
    used: int,
    budget: int,
    step_sizes: tuple[int, ...],
    fits: Callable[[int], bool],
    must_progress: bool,
) -> int:
    """Length of the next prefill chunk; 0 when it should wait for another step.

    `needed` tokens finish the prompt, `used` of the `budget` are taken, `step_sizes` ascend. The last chunk of a
    prompt is taken whole, even though the step's total is then not a listed size: splitting the remainder into listed
    sizes would cost several more steps (each reads all weights) to save one re-planning of kernels. Any other chunk is
    trimmed so that the total reaches a listed size. With `must_progress` something is taken all the same (I7): one
    token if that fits, for a single row reads its past without repacking it, else the smallest chunk worth it.
    """
    room = budget - used
    if room <= 0:
        return 0
    if needed <= room and fits(needed):
        return needed
    trimmed = [size - used for size in step_sizes if used < size <= budget and size - used < needed]
    for chunk in reversed(trimmed):
        if fits(chunk):
            return chunk
    if not must_progress:
        return 0
    if fits(1):
        return 1
    for chunk in trimmed:
        if chunk >= CHUNK_TOKENS_MIN:
            return chunk
    return min(needed, room)


class StepBudget:
    """Running totals of the step being planned."""

    __slots__ = (
        "_itl_target_ns", "_scratch_tokens_max", "_step_sizes", "_step_time", "_tokens_before", "_tokens_max", "closed",
        "kv_read", "kv_repacked", "longest", "num_decode_rows", "num_multi", "query_kv", "rows", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        *,
        tokens_max: int,
        step_sizes: tuple[int, ...],
        scratch_tokens_max: int,
        itl_target_ns: int | None,
        step_time: StepTimeModel,
        tokens_before: int,
    ) -> None:
        self._tokens_max = tokens_max
        self._step_sizes = step_sizes
        self._scratch_tokens_max = scratch_tokens_max
        self._itl_target_ns = itl_target_ns
        self._step_time = step_time
        self._tokens_before = tokens_before
        self.tokens = self.kv_read = self.kv_repacked = self.query_kv = self.rows = 0
        self.num_decode_rows = 0
        self.num_multi = 0
        self.longest = 0
        self.closed = False
        """A trimmed chunk brought the total to a listed size: one more token would leave it."""

    @property
    def is_full(self) -> bool:
        """No further token fits, whoever asks."""
        return self.closed or self.tokens >= self._tokens_max

    def add_rows(self, num_rows: int, kv_read: int) -> None:
        """Decode rows: one token each, over contexts that add up to `kv_read`."""
        self.tokens += num_rows
        self.rows += num_rows
        self.num_decode_rows += num_rows
        self.kv_read += kv_read

    def fit_chunk(self, start: int, needed: int) -> int:
        """How many of the `needed` tokens after position `start` this step can take. Changes nothing."""
        if self.closed:
            return 0
        return chunk_tokens(
            needed,
            self.tokens,
            self._tokens_max,
            self._step_sizes,
            lambda chunk: self._fits_scratch(start, chunk) and self._fits_time(start, chunk, chunk == needed),
            must_progress=self.num_multi == 0,
        )

    def add_chunk(self, start: int, num_tokens: int, is_last: bool) -> None:
        self.tokens += num_tokens
        self.rows += is_last
        if num_tokens == 1:
            self.kv_read += start + 1
        else:
            self.num_multi += 1
            self.longest = max(self.longest, start + num_tokens)
            self.kv_repacked += start
            self.query_kv += _pairs(start, num_tokens)
        self.closed = self.closed or not is_last

    def features(self) -> StepFeatures:
        changed = self.tokens != self._tokens_before
        return StepFeatures(self.tokens, self.kv_read, self.kv_repacked, self.query_kv, self.rows, changed)

    def _fits_scratch(self, start: int, chunk: int) -> bool:
        return chunk == 1 or (self.num_multi + 1) * max(self.longest, start + chunk) <= self._scratch_tokens_max

    def _fits_time(self, start: int, chunk: int, is_last: bool) -> bool:
        if self._itl_target_ns is None or self.num_decode_rows == 0:
            return True
        total = self.tokens + chunk
        is_row = chunk == 1
        features = StepFeatures(
            total,
            self.kv_read + (start + 1 if is_row else 0),
            self.kv_repacked + (0 if is_row else start),
            self.query_kv + (0 if is_row else _pairs(start, chunk)),
            self.rows + is_last,
            total != self._tokens_before,
        )
        return self._step_time.predict_ns(features) <= self._itl_target_ns


def _pairs(start: int, num_tokens: int) -> int:
    """Query-KV pairs of a causal chunk: each token sees the past, itself and the chunk's tokens before it."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def features_of(plan: StepPlan, tokens_before: int) -> StepFeatures:
    """The features of a plan, from the plan alone (executors, tests)."""
    tokens = kv_read = kv_repacked = query_kv = rows = 0
    for piece in plan.slices:
        num_tokens = len(piece.token_ids)
        tokens += num_tokens
        rows += piece.sampling is not None
        if num_tokens == 1:
            kv_read += piece.start + 1
        else:
            kv_repacked += piece.start
            query_kv += _pairs(piece.start, num_tokens)
    return StepFeatures(tokens, kv_read, kv_repacked, query_kv, rows, tokens != tokens_before)
