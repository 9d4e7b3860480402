"""Hop 10: logits of some rows in, one drawn token a row out. Pure numpy: no clock, no global randomness.

Order: logit bias, penalties (repetition, then frequency and presence), masks, greedy when the temperature is 0, else
temperature, top-k, top-p, min-p, and an inverse-CDF draw over the tokens left, **in order of token id**: near ties may
swap ranks between kernels, ids never do, so a small difference in logits moves the draw by as little.

Equal values rank by token id, the lower first: in greedy decoding, top-k, top-p and reported alternatives.
Log-probabilities are those of the model (raw logits, before everything above), as vLLM's default does.
`tests/unit/engine/test_sampling.py` holds the plain version with full sorts that this one must equal.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tailrace.engine.random_keys import PURPOSE_TOKEN, uniforms
from tailrace.engine.step import SamplingRow
from tailrace.errors import EngineFailed
from tailrace.request import PositionLogprobs, SamplingParams, TokenLogprob

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

TEMPERATURE_MIN = 1e-5
"""Below it a draw is greedy: float32 logits do not tell the two apart."""
_GROUP = 64
"""Tokens a group in two-level searches; only speed depends on it."""
_NUCLEUS_PROBABILITY = 3e-5
"""First guess of what the least probable token of a nucleus has; only speed depends on it."""
_BUCKET_SHIFT = 20
"""Leaves a float32's exponent and three bits of its mantissa."""


def sample_rows(logits: Float32s, rows: Sequence[SamplingRow]) -> list[tuple[int, PositionLogprobs | None]]:
    """One token for each row of `logits [rows, vocab]`, which is read and never written.

    The result of a row depends on that row alone. Raises EngineFailed when a row's logits are not numbers.
    """
    assert len(logits) == len(rows), "one sampling row for each row of logits"
    if all(_is_greedy(row.params) for row in rows):
        return [_sample(values, row, 0.0) for values, row in zip(logits, rows, strict=True)]
    draws = uniforms(
        [row.params.seed for row in rows],
        [row.choice for row in rows],
        [row.position for row in rows],
        PURPOSE_TOKEN,
    )
    return [_sample(values, row, float(draw)) for values, row, draw in zip(logits, rows, draws, strict=True)]


def prompt_logprobs(logits: Float32s, targets: Sequence[int], num_top: int) -> tuple[PositionLogprobs, ...]:
    """The log-probability of `targets[i]` under row i of `logits [rows, vocab]`, and the `num_top` best ones there."""
    assert len(logits) == len(targets), "one target for each row of logits"
    return tuple(position_logprobs(values, token, num_top) for values, token in zip(logits, targets, strict=True))


def position_logprobs(values: Float32s, token_id: int, num_top: int) -> PositionLogprobs:
    """Natural log-probabilities under raw logits `values [vocab]`. Raises EngineFailed when they are not numbers."""
    peak = float(values[_peak(values)])
    normaliser = peak + math.log(float(np.exp(values - np.float32(peak)).sum(dtype=np.float64)))

    def entry(token: int) -> TokenLogprob:
        return TokenLogprob(token, float(values[token]) - normaliser)

    return PositionLogprobs(entry(token_id), tuple(entry(int(each)) for each in top_ids(values, num_top)))


def top_ids(values: Float32s, count: int) -> Int64s:
    """The `count` largest of `values [vocab]`, best first, equal values by id.

    The count-th largest of the groups' maxima is a lower bound of the count-th largest value (each of `count` groups
    holds at least one value as large), so few candidates are left to sort. Groups are strided: numpy takes the
    maximum along the first axis six times faster than along the last.
    """
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, dtype=np.int64)
    bound = -np.inf
    num_groups = len(values) // _GROUP
    if count <= num_groups:
        maxima = values[: num_groups * _GROUP].reshape(_GROUP, num_groups).max(axis=0)
        bound = np.partition(maxima, num_groups - count)[num_groups - count]
    candidates = np.flatnonzero(values >= bound)
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]


def _sample(values: Float32s, row: SamplingRow, draw: float) -> tuple[int, PositionLogprobs | None]:
    params = row.params
    adjusted = _adjust(values, row)
    best = _peak(adjusted)
    token = best if _is_greedy(params) else _draw(adjusted, adjusted[best], params, draw)
    if params.num_logprobs is None:
        return token, None
    return token, position_logprobs(values, token, params.num_logprobs)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < TEMPERATURE_MIN


def _peak(values: Float32s) -> int:
    """Where the largest value is. `argmax` returns the first NaN if there is one, so one look finds bad logits."""
    best = int(values.argmax())
    if not math.isfinite(values[best]):
        raise EngineFailed(f"the model's logits are not numbers (token {best}: {values[best]})")
    return best


def _adjust(values: Float32s, row: SamplingRow) -> Float32s:
    """`values` itself when nothing applies, else a changed copy."""
    params = row.params
    if not (params.logit_bias or params.needs_history or row.masked_ids):
        return values
    changed = values.copy()
    for token, bias in params.logit_bias.items():
        changed[token] += bias
    if params.needs_history:
        _penalise(changed, row)
    if row.masked_ids:
        changed[list(row.masked_ids)] = -np.inf
    return changed


def _penalise(values: Float32s, row: SamplingRow) -> None:
    """Repetition (prompt and output: Keskar et al. 2019, CTRL) divides positive and multiplies negative logits."""
    assert row.history is not None, "penalties need the history"
    params, history = row.params, np.asarray(row.history, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(history)
        old = values[seen]
        penalty = np.float32(params.repetition_penalty)
        values[seen] = np.where(old > 0, old / penalty, old * penalty)
    if params.frequency_penalty or params.presence_penalty:
        drawn, counts = np.unique(history[row.num_prompt_tokens :], return_counts=True)
        values[drawn] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)


def _draw(values: Float32s, peak: np.float32, params: SamplingParams, draw: float) -> int:
    """Softmax with temperature (the best token's weight is 1), then truncation, then the inverse CDF."""
    inverse = np.float32(1.0 / params.temperature)
    ids: Int64s | None = None
    if params.top_k is not None and params.top_k < len(values):
        ids = np.sort(top_ids(values, params.top_k))
        values = values[ids]
    weights = values - peak
    weights *= inverse
    np.exp(weights, out=weights)
    index = _draw_truncated(weights, params, draw)
    return index if ids is None else int(ids[index])


def _draw_truncated(weights: Float32s, params: SamplingParams, draw: float) -> int:
    """Index of the drawn one among `weights`, of which the largest is 1."""
    floor = np.float32(params.min_p)
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        kept = kept[weights[kept] >= floor]
    elif floor > 0.0:
        kept = np.flatnonzero(weights >= floor)
    else:
        return _pick(weights, draw)
    return int(kept[_pick(weights[kept], draw)])


def _nucleus(weights: Float32s, top_p: float) -> Int64s:
    """Ascending indices of the smallest set of best tokens that has `top_p` of the total weight.

    The tokens above a threshold hold the nucleus if they reach `top_p` together. Those below (1 - top_p) / count sum to
    less than 1 - top_p, so the second threshold always holds it.
    """
    total = float(_group_sums(weights).sum(dtype=np.float64))
    wanted = top_p * total
    for probability in (_NUCLEUS_PROBABILITY, (1.0 - top_p) / len(weights) / 2):  # half: room for float32 rounding
        candidates = np.flatnonzero(weights >= np.float32(probability * total))
        if float(weights[candidates].sum(dtype=np.float64)) >= wanted:
            break
    return candidates[_nucleus_of(weights[candidates], wanted)]


def _nucleus_of(weights: Float32s, wanted: float) -> Int64s:
    """Ascending indices of the best tokens, up to and with the one at which their running sum reaches `wanted`.

    Flat distributions have tens of thousands of candidates: only those of one bucket need sorting. A bucket is an
    eighth of an octave: the bits of non-negative floats are in the order of the floats.
    """
    buckets = weights.view(np.int32) >> _BUCKET_SHIFT
    lowest = int(buckets.min())
    running = np.cumsum(np.bincount(buckets - lowest, weights=weights)[::-1])
    place = min(int(np.searchsorted(running, wanted, side="left")), len(running) - 1)
    last = lowest + len(running) - 1 - place
    inside = np.flatnonzero(buckets == last)
    inside = inside[np.argsort(-weights[inside], kind="stable")]
    above = float(running[place - 1]) if place else 0.0
    size = int(np.searchsorted(above + np.cumsum(weights[inside], dtype=np.float64), wanted, side="left")) + 1
    kept = buckets > last
    kept[inside[:size]] = True
    return np.flatnonzero(kept)


def _pick(weights: Float32s, draw: float) -> int:
    """Index where the running sum passes `draw` (0 <= draw < 1) of the total; never one of weight 0.

    First the group, then the token in it: no running sum over a whole vocabulary.
    """
    sums = _group_sums(weights)
    running = np.cumsum(sums, dtype=np.float64)
    target = draw * float(running[-1])
    group = _passed(sums, running, target)
    inside = weights[group * _GROUP : (group + 1) * _GROUP]
    before = float(running[group - 1]) if group else 0.0
    return group * _GROUP + _passed(inside, np.cumsum(inside, dtype=np.float64), target - before)


def _passed(weights: Float32s, running: Float64s, target: float) -> int:
    """First index whose running sum is above the target; rounding may leave none, then the last with a weight."""
    index = int(np.searchsorted(running, target, side="right"))
    return index if index < len(running) else int(np.flatnonzero(weights)[-1])


def _group_sums(weights: Float32s) -> Float32s:
    """Sums of consecutive groups of `_GROUP` weights, the last one shorter. (einsum is three times faster than sum.)"""
    whole = len(weights) // _GROUP * _GROUP
    sums: Float32s = np.einsum("ij->i", weights[:whole].reshape(-1, _GROUP))
    return sums if whole == len(weights) else np.append(sums, weights[whole:].sum())
