"""`sample_rows` equals a plain version with full sorts, and keeps its promises about ties, masks and bad logits."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.engine.random_keys import PURPOSE_TOKEN, uniforms
from tailrace.engine.sampling import position_logprobs, prompt_logprobs, sample_rows, top_ids
from tailrace.engine.step import SamplingRow
from tailrace.errors import EngineFailed
from tailrace.request import SamplingParams

CLOSE = 1e-5
"""Float32 weights: a set or a draw nearer than this to its border may go either way."""


def row(
    *,
    position: int = 5,
    history: list[int] | None = None,
    num_prompt: int = 0,
    masked: tuple[int, ...] = (),
    **params: Any,
) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(max_tokens=1, **params),
        choice=0,
        position=position,
        masked_ids=masked,
        history=history,
        num_prompt_tokens=num_prompt,
    )


def plain_sample(logits: np.ndarray, row: SamplingRow) -> int | None:
    """The documented order in obvious steps, in float64. None where rounding may decide."""
    p = row.params
    x = logits.astype(np.float64)
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in set(row.history or ()):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in (row.history or [])[row.num_prompt_tokens :]:
        x[token] -= p.frequency_penalty
    for token in set((row.history or [])[row.num_prompt_tokens :]):
        x[token] -= p.presence_penalty
    for token in row.masked_ids:
        x[token] = -math.inf
    ranked = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if p.temperature == 0:
        return ranked[0]
    ranked = ranked[: p.top_k]
    weights = {token: math.exp((x[token] - x[ranked[0]]) / p.temperature) for token in ranked}
    if p.top_p < 1:
        total, running, nucleus = sum(weights.values()), 0.0, []
        for token in ranked:
            nucleus.append(token)
            running += weights[token] / total
            if abs(running - p.top_p) < CLOSE:
                return None
            if running >= p.top_p:
                break
        ranked = nucleus
    if any(abs(weights[token] - p.min_p) < CLOSE * p.min_p for token in ranked):
        return None
    kept = sorted(token for token in ranked if weights[token] >= p.min_p)
    draw = uniforms([p.seed], [row.choice], [row.position], PURPOSE_TOKEN)[0]
    running, total = 0.0, sum(weights[token] for token in kept)
    for token in kept:
        running += weights[token] / total
        if abs(running - draw) < CLOSE:
            return None
        if running > draw:
            return token
    return None


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, SamplingRow]:
    size = draw(st.sampled_from([1, 2, 63, 64, 65, 128, 500, 3000]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 0.1, 3.0, 30.0, 1000.0]))
    logits = (generator.standard_normal(size) * spread).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    if draw(st.booleans()) and size > 1:
        logits[generator.integers(0, size, size // 2)] = -np.inf
        logits[generator.integers(0, size)] = 1.0
    token = st.integers(0, size - 1)
    history = draw(st.none() | st.lists(token, min_size=1, max_size=40))
    penalties = {} if history is None else {
        "presence_penalty": draw(st.sampled_from([0.0, 1.5, -2.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.25, -2.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.25, 0.5])),
    }  # fmt: skip
    masked = draw(st.sets(token, max_size=3))
    if not np.isfinite(np.delete(logits, list(masked))).any():
        masked = set()
    made = row(
        position=draw(st.integers(0, 10_000)),
        history=history,
        num_prompt=0 if history is None else draw(st.integers(0, len(history))),
        masked=tuple(masked),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_k=draw(st.none() | st.integers(1, 80)),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.9])),
        seed=draw(st.integers(0, 2**64 - 1)),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.0, 2.0, 100.0]), max_size=4)),
        **penalties,
    )
    return logits, made


@settings(max_examples=400, deadline=None)
@given(cases())
def test_a_row_is_sampled_as_the_plain_version_does(case: tuple[np.ndarray, SamplingRow]) -> None:
    logits, sampling_row = case
    before = logits.copy()
    expected = plain_sample(logits, sampling_row)
    ((token, logprobs),) = sample_rows(logits[None, :], [sampling_row])
    assert logprobs is None
    assert expected is None or token == expected
    assert np.array_equal(logits, before), "the kernels' output is read only"


@settings(max_examples=50, deadline=None)
@given(st.lists(cases(), min_size=2, max_size=6))
def test_a_row_is_sampled_alike_alone_and_in_any_batch(batch: list[tuple[np.ndarray, SamplingRow]]) -> None:
    size = max(len(logits) for logits, _ in batch)
    stacked = np.stack([np.pad(logits, (0, size - len(logits)), constant_values=-np.inf) for logits, _ in batch])
    rows = [sampling_row for _, sampling_row in batch]
    together = sample_rows(stacked, rows)
    assert together == [sample_rows(stacked[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    assert together[::-1] == sample_rows(stacked[::-1], rows[::-1])


@pytest.mark.parametrize("params", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.5}])
def test_frequencies_of_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    logits = (generator.standard_normal(200) * 1.5).astype(np.float32)
    count = 4000
    rows = [row(position=i, **params) for i in range(count)]
    drawn = np.array([token for token, _ in sample_rows(np.broadcast_to(logits, (count, 200)), rows)])
    weights = np.exp((logits - logits.max()).astype(np.float64) / params.get("temperature", 1.0))
    order = np.argsort(-weights, kind="stable")
    if "top_k" in params:
        weights[order[40:]] = 0
    if "top_p" in params:
        running = np.cumsum(weights[order]) / weights.sum()
        weights[order[np.searchsorted(running, 0.9) + 1 :]] = 0
    weights[weights < params.get("min_p", 0.0)] = 0
    expected = count * weights / weights.sum()
    assert set(drawn) <= set(np.flatnonzero(weights))
    common = expected > 5
    counts = np.bincount(drawn, minlength=200)
    chi_square = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    assert chi_square < common.sum() + 5 * math.sqrt(2 * common.sum())


def test_equal_logits_rank_by_token_id() -> None:
    flat = np.zeros((1, 1000), dtype=np.float32)
    assert sample_rows(flat, [row(temperature=0.0)])[0][0] == 0
    assert top_ids(flat[0], 5).tolist() == [0, 1, 2, 3, 4]
    drawn = {sample_rows(flat, [row(position=i, top_k=3)])[0][0] for i in range(50)}
    assert drawn == {0, 1, 2}
    drawn = {sample_rows(flat, [row(position=i, top_p=0.0039)])[0][0] for i in range(100)}
    assert drawn == {0, 1, 2, 3}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2000), st.integers(0, 70), st.integers(0, 2**32), st.booleans())
def test_top_ids_are_those_of_a_full_sort(size: int, count: int, seed: int, ties: bool) -> None:
    values = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * 3
    values = np.round(values) if ties else values
    assert top_ids(values, count).tolist() == np.argsort(-values, kind="stable")[:count].tolist()


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.zeros((1, 300), dtype=np.float32)
    logits[0, 7] = 50.0
    masked = row(temperature=0.0, masked=(7,))
    assert sample_rows(logits, [masked])[0][0] == 0
    drawn = {sample_rows(logits, [row(position=i, masked=(7,))])[0][0] for i in range(200)}
    assert 7 not in drawn
    assert len(drawn) > 50


def test_a_bias_of_100_forces_and_of_minus_100_bans() -> None:
    logits = np.random.default_rng(1).standard_normal((1, 300)).astype(np.float32)
    for position in range(30):
        forced = row(position=position, logit_bias={123: 100.0})
        assert sample_rows(logits, [forced])[0][0] == 123
    best = int(logits.argmax())
    assert sample_rows(logits, [row(temperature=0.0, logit_bias={best: -100.0})])[0][0] != best


def test_logprobs_are_of_the_model_and_not_of_the_settings() -> None:
    logits = np.random.default_rng(2).standard_normal((1, 500)).astype(np.float32)
    changed = row(temperature=0.1, top_k=2, num_logprobs=3, logit_bias={9: 100.0})
    ((token, logprobs),) = sample_rows(logits, [changed])
    exact = logits[0].astype(np.float64) - math.log(np.exp(logits[0].astype(np.float64)).sum())
    assert token == 9
    assert logprobs is not None
    assert logprobs.chosen.logprob == pytest.approx(exact[9], abs=1e-5)
    assert [each.token_id for each in logprobs.top] == np.argsort(-exact)[:3].tolist()
    assert [each.logprob for each in logprobs.top] == pytest.approx(np.sort(exact)[::-1][:3].tolist(), abs=1e-5)


def test_zero_alternatives_report_the_drawn_token_alone() -> None:
    logits = np.zeros((1, 4), dtype=np.float32)
    ((token, logprobs),) = sample_rows(logits, [row(temperature=0.0, num_logprobs=0)])
    assert logprobs is not None
    assert (logprobs.chosen.token_id, logprobs.top) == (token, ())
    assert logprobs.chosen.logprob == pytest.approx(math.log(0.25))


def test_prompt_logprobs_are_those_of_each_row() -> None:
    logits = np.random.default_rng(3).standard_normal((3, 100)).astype(np.float32)
    targets = [4, 99, 0]
    reported = prompt_logprobs(logits, targets, 2)
    assert reported == tuple(position_logprobs(logits[i], targets[i], 2) for i in range(3))
    assert [each.chosen.token_id for each in reported] == targets


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"logit_bias": {1: 1.0}}])
def test_logits_that_are_no_numbers_fail(bad: float, params: dict[str, Any]) -> None:
    logits = np.zeros((2, 300), dtype=np.float32)
    logits[1, 200] = bad
    with pytest.raises(EngineFailed, match="not numbers"):
        sample_rows(logits, [row(**params), row(**params)])


def test_a_row_without_any_token_left_fails() -> None:
    with pytest.raises(EngineFailed, match="not numbers"):
        sample_rows(np.zeros((1, 2), dtype=np.float32), [row(masked=(0, 1))])


def test_tiny_temperatures_are_greedy() -> None:
    logits = np.random.default_rng(4).standard_normal((1, 300)).astype(np.float32)
    for temperature in (0.0, 1e-300, 1e-30, 1e-6, 1e-5, 1e-4):
        assert sample_rows(logits, [row(temperature=temperature)])[0][0] == int(logits.argmax())
