"""The real model on the real kernels: how far scheduling moves the logits, and that a cut comes while the step runs."""

import threading
from pathlib import Path

import numpy as np
import pytest

from tailrace.engine.step import ExecutorLimits, Slice, StepCut, StepDone, StepPlan
from tailrace.executor.machine import read_hardware
from tailrace.executor.openvino import OpenVinoExecutor
from tailrace.executor.settings import ExecutorSettings, resolve_settings
from tailrace.model.paged import Float32s, PagedModel, Piece, StepArrays, load_paged, pack_step
from tailrace.request import SequenceId, StepId

pytestmark = pytest.mark.model

KL_MEAN_MAX = 5e-3
NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def paged(smollm2_dir: Path) -> PagedModel:
    """At the precision that production takes on this machine."""
    resolved = resolve_settings(ExecutorSettings(), read_hardware())
    model = load_paged(
        smollm2_dir / "openvino_model.xml",
        kv_dtype=resolved.kv_dtype.value,
        inference_dtype=resolved.inference_dtype.value,
        num_threads=resolved.threads.value,
    )
    model.allocate(NUM_BLOCKS)
    return model


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 40_000, length).tolist()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    exact = exact - exact.max(axis=-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))


def mean_kl(reference: np.ndarray, other: np.ndarray) -> float:
    ours, theirs = log_softmax(reference), log_softmax(other)
    return float((np.exp(ours) * (ours - theirs)).sum(axis=-1).mean())


def all_rows(paged: PagedModel, prompt: list[int], table: list[int]) -> np.ndarray:
    return paged.step(pack_step([Piece(prompt, 0, table)], range(len(prompt)))).copy()


def test_chunked_batched_shared_and_forked_rows_stay_near_single_runs(paged: PagedModel) -> None:
    first, second = tokens(1, 130), tokens(2, 75)
    alone_first, alone_second = all_rows(paged, first, [0, 1, 2, 3, 4]), all_rows(paged, second, [5, 6, 7])

    # Both prefills in chunks of shared steps: first 0..69 with second 0..39, then the rest of both.
    table_a, table_b = [20, 33, 21, 22, 9], [10, 11, 12]
    steps = [
        [Piece(first[:70], 0, table_a), Piece(second[:40], 0, table_b)],
        [Piece(first[70:], 70, table_a), Piece(second[40:], 40, table_b)],
    ]
    rows_a, rows_b = [], []
    for pieces in steps:
        cut = len(pieces[0].token_ids)
        logits = paged.step(pack_step(pieces, range(cut + len(pieces[1].token_ids)))).copy()
        rows_a.append(logits[:cut])
        rows_b.append(logits[cut:])
    assert mean_kl(alone_first, np.concatenate(rows_a)) < KL_MEAN_MAX
    assert mean_kl(alone_second, np.concatenate(rows_b)) < KL_MEAN_MAX

    # A follower on the first three blocks, and a fork through a copy of the fourth, decode together.
    paged.copy_block(22, 40)
    pieces = [
        Piece(first[96:97], 96, [20, 33, 21, 41]),
        Piece(first[127:128], 127, [20, 33, 21, 40]),
        Piece(second[74:75], 74, table_b),
    ]
    logits = paged.step(pack_step(pieces, [0, 1, 2]))
    assert mean_kl(np.stack([alone_first[96], alone_first[127], alone_second[74]]), logits) < KL_MEAN_MAX


def test_another_prompt_is_far_away(paged: PagedModel) -> None:
    """What the bound above is worth: one other token early in the prompt moves the mean far beyond it."""
    prompt = tokens(3, 60)
    other = [*prompt[:5], (prompt[5] + 7) % 40_000, *prompt[6:]]
    assert mean_kl(all_rows(paged, prompt, [0, 1])[6:], all_rows(paged, other, [2, 3])[6:]) > 10 * KL_MEAN_MAX


def test_an_interrupt_stops_the_kernels_of_a_long_prefill(paged: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ExecutorLimits(num_blocks=NUM_BLOCKS, context_tokens_max=2048, step_sizes=(64,), scratch_tokens_max=4096)
    executor = OpenVinoExecutor(paged, limits)
    prompt = tokens(4, 1500)

    def plan(step: int, num_tokens: int) -> StepPlan:
        piece = Slice(sequence_id=SequenceId(1), start=0, token_ids=prompt[:num_tokens], block_ids=range(NUM_BLOCKS))
        return StepPlan(step_id=StepId(step), slices=(piece,))

    executor.execute(plan(1, 64))
    begun = threading.Event()
    kernel_errors: list[str] = []
    start, wait = paged.start, paged.wait

    def start_and_tell(arrays: StepArrays) -> None:
        start(arrays)
        begun.set()

    def wait_and_tell() -> Float32s:
        try:
            return wait()
        except RuntimeError as error:
            kernel_errors.append(str(error))
            raise

    def interrupt() -> None:
        begun.wait(60)
        executor.interrupt(StepId(2))

    monkeypatch.setattr(paged, "start", start_and_tell)
    monkeypatch.setattr(paged, "wait", wait_and_tell)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert isinstance(executor.execute(plan(2, 1500)), StepCut)
    finally:
        thread.join()
    assert len(kernel_errors) == 1, "the kernels stopped; the result of a whole step was not thrown away"
    assert isinstance(executor.execute(plan(3, 64)), StepDone)
