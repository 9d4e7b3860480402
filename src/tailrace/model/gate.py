"""The import gate: does this IR compute, as paged attention, what its stateful form computes?

An IR can be silently wrong after the transformation (softcaps dropped, positions unused), and an answer that reads well
proves nothing: a near tie flips it. So next-token distributions are compared, on text that the model wrote itself::

    sequence A  |---- prefill 1 ----|---- prefill 2 ----|-|-|-|-|   joint decode
    sequence B  |-------- prefill 1 --------|- prefill 2 -|-|-|-|-|
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov

from tailrace.engine.step import TOKENS_PER_BLOCK
from tailrace.errors import ModelRefused
from tailrace.model.manifest import KL_DECODE_MAX, GateFigures
from tailrace.model.paged import PagedGraph, PagedModel, Piece, pack_step, read_paged

Float32s = npt.NDArray[np.float32]
Logits = npt.NDArray[np.floating]

KL_PAGED_MAX = 1e-6
"""f32 on both sides: sound models gave 1e-12 to 5e-7, broken ones from 1e-3."""
KL_WEIGHTS_MAX = 2e-2
"""int8 costs about 6e-3 on a model of 135M parameters."""
FAST_KV_DTYPES = ("bf16", "f16")
"""Of the width that inference has; the first that compiles is what this machine runs by default."""
SMALL_KV_DTYPES = ("u8", "u4")

_NUM_SEQUENCES = 8
_NUM_GENERATED = 24
_NUM_DECODED = 4
_NUM_PRODUCTION_STEPS = 24
_SEED = 20

Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Two sequences of equal length."""
Progress = Callable[[float], None]


def kl_divergence(reference: Logits, other: Logits) -> float:
    """Mean over rows of KL(reference || other) in nats, from logits `[rows, vocab]`. Never negative, inf for NaN."""
    assert reference.shape == other.shape, "rows are compared one by one"
    total = 0.0
    for row, other_row in zip(reference, other, strict=True):  # a row at a time: float64 of all would be gigabytes
        expected, found = _log_softmax(row), _log_softmax(other_row)
        total += float(np.sum(np.exp(expected) * (expected - found)))
    mean = total / len(reference)
    return max(0.0, mean) if np.isfinite(mean) else float("inf")


def _log_softmax(row: Logits) -> npt.NDArray[np.float64]:
    values = row.astype(np.float64)
    values -= values.max()
    result: npt.NDArray[np.float64] = values - np.log(np.exp(values).sum())
    return result


class Weights(NamedTuple):
    """The model whose figures are taken, and the one it was compressed from, if it was."""

    xml: Path
    source_xml: Path | None


def check_model(weights: Weights, *, has_rope: bool, prompt_ids: Sequence[int], progress: Progress) -> GateFigures:
    """Figures of a model that passed. `prompt_ids`: any text, of which short pieces start the self-written text.

    Raises ModelRefused with the figure when paged and stateful logits differ, positions are unused though the model
    has RoPE, the weights cost too much, or decode at this machine's own KV precision does.
    """
    exact_xml = weights.source_xml or weights.xml
    graph = read_paged(exact_xml)
    if has_rope and not graph.positions_consumed:
        raise ModelRefused("as paged attention this model loses its positions (RoPE); use `llama.cpp` or `vllm`")
    exact = _compile(graph, "f32", "f32")
    progress(0.1)
    pair = self_written_pair(exact, prompt_ids)
    progress(0.2)
    expected = stateful_logits(exact_xml, pair)
    progress(0.35)
    kl_paged = max(kl_divergence(expected, found) for found in paged_logits(exact, pair))
    _require("paged attention against the stateful model", kl_paged, KL_PAGED_MAX)
    del exact  # the memory of one compiled model at a time
    progress(0.5)
    kl_weights = None
    if weights.source_xml is not None:
        graph = read_paged(weights.xml)
        compressed_rows = np.concatenate(prefill_logits(_compile(graph, "f32", "f32"), pair))
        kl_weights = kl_divergence(expected, compressed_rows)
        _require("the compressed weights against the source", kl_weights, KL_WEIGHTS_MAX)
        expected = compressed_rows
    progress(0.65)
    production = production_figures(graph, pair, expected, lambda ratio: progress(0.65 + 0.35 * ratio))
    return GateFigures(
        kl_paged_against_stateful=kl_paged, kl_decode_production=production, kl_weights_against_source=kl_weights
    )


def _compile(graph: PagedGraph, kv_dtype: str, inference_dtype: str | None = None) -> PagedModel:
    model = PagedModel(graph, kv_dtype=kv_dtype, inference_dtype=inference_dtype)
    model.allocate(_NUM_SEQUENCES * _TABLE_BLOCKS)
    return model


def _require(what: str, figure: float, limit: float) -> None:
    if not figure < limit:
        raise ModelRefused(
            f"the import check failed: {what} differ by a mean KL of {figure:.2g} nats where {limit:.0e} is allowed; "
            "use `llama.cpp` or `vllm`"
        )


def production_figures(graph: PagedGraph, pair: Pair, expected: Float32s, progress: Progress) -> dict[str, float]:
    """Mean KL of decode steps by KV dtype that this CPU runs. A small dtype over the limit is reported, not refused:
    the default does not need it."""
    figures: dict[str, float] = {}
    for i, kv_dtype in enumerate((*FAST_KV_DTYPES, *SMALL_KV_DTYPES)):
        if kv_dtype in FAST_KV_DTYPES and figures:
            continue
        try:
            model = _compile(graph, kv_dtype)
        except ModelRefused:
            continue
        start = len(pair[0]) - _NUM_PRODUCTION_STEPS
        found = decode_logits(model, pair, start)
        wanted = expected.reshape(2, len(pair[0]), -1)[:, start:].reshape(found.shape)
        figures[kv_dtype] = kl_divergence(wanted, found)
        if kv_dtype in FAST_KV_DTYPES:
            _require(f"decode with a {kv_dtype} KV cache and f32", figures[kv_dtype], KL_DECODE_MAX)
        progress((i + 1) / 4)
    if not figures:
        raise ModelRefused("no KV precision of this CPU runs this model; use `llama.cpp`")
    return figures


# --- the text ---


def self_written_pair(model: PagedModel, prompt_ids: Sequence[int]) -> Pair:
    """Eight continuations at temperature 1, laid end to end four by four."""
    generator = np.random.default_rng(_SEED)
    width = max(1, min(8, len(prompt_ids) // _NUM_SEQUENCES))
    texts = [list(prompt_ids[i * width : (i + 1) * width]) or [0] for i in range(_NUM_SEQUENCES)]
    logits = _step(model, [Piece(text, 0, _table(i)) for i, text in enumerate(texts)], last_only=True)
    for step in range(_NUM_GENERATED):
        noise = generator.gumbel(size=logits.shape)
        for text, token_id in zip(texts, (logits + noise).argmax(axis=-1), strict=True):
            text.append(int(token_id))
        if step < _NUM_GENERATED - 1:
            pieces = [Piece(text[-1:], len(text) - 1, _table(i)) for i, text in enumerate(texts)]
            logits = _step(model, pieces, last_only=True)
    half = _NUM_SEQUENCES // 2
    return tuple(itertools.chain(*texts[:half])), tuple(itertools.chain(*texts[half:]))


# --- the ways to compute it ---


def stateful_logits(xml: Path, pair: Pair) -> Float32s:
    """`[2 * tokens, vocab]`, in f32, from the IR as it was exported: both sequences as one batch."""
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    try:
        compiled = ov.Core().compile_model(xml, "CPU", properties)
        num_tokens = len(pair[0])
        values = {
            "input_ids": np.array(pair, dtype=np.int64),
            "attention_mask": np.ones((2, num_tokens), dtype=np.int64),
            "position_ids": np.tile(np.arange(num_tokens, dtype=np.int64), (2, 1)),
            "beam_idx": np.arange(2, dtype=np.int32),
        }
        named = {name for port in compiled.inputs for name in port.get_names()}
        request = compiled.create_infer_request()
        logits = request.infer({name: value for name, value in values.items() if name in named})[compiled.outputs[0]]
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ModelRefused(f"the model does not run in its stateful form ({reason}); export it again") from error
    result: Float32s = logits.reshape(2 * num_tokens, -1)
    return result


def paged_logits(model: PagedModel, pair: Pair) -> list[Float32s]:
    """The same rows in two ways: prefilled at once, and in unequal chunks that end in a joint decode."""
    at_once = np.concatenate(prefill_logits(model, pair))
    num_tokens = len(pair[0])
    start = num_tokens - _NUM_DECODED
    cuts = (start * 2 // 5 + 1, start * 3 // 4 + 1)  # inside a block
    first = [Piece(text[:cut], 0, _table(i)) for i, (text, cut) in enumerate(zip(pair, cuts, strict=True))]
    second = [Piece(text[cut:start], cut, _table(i)) for i, (text, cut) in enumerate(zip(pair, cuts, strict=True))]
    parts = [_split(_step(model, pieces), pieces) for pieces in (first, second)]
    decoded = decode_rows(model, pair, start)
    chunked = [np.concatenate([parts[0][i], parts[1][i], decoded[i]]) for i in range(2)]
    return [at_once, np.concatenate(chunked)]


def prefill_logits(model: PagedModel, pair: Pair) -> list[Float32s]:
    pieces = [Piece(text, 0, _table(i)) for i, text in enumerate(pair)]
    return _split(_step(model, pieces), pieces)


def decode_logits(model: PagedModel, pair: Pair, start: int) -> Float32s:
    """Rows from `start` on, one token a step, over a cache that this model filled itself."""
    _step(model, [Piece(text[:start], 0, _table(i)) for i, text in enumerate(pair)], last_only=True)
    return np.concatenate(decode_rows(model, pair, start))


def decode_rows(model: PagedModel, pair: Pair, start: int) -> list[Float32s]:
    steps = []
    for at in range(start, len(pair[0])):
        steps.append(_step(model, [Piece(text[at : at + 1], at, _table(i)) for i, text in enumerate(pair)]))
    stacked = np.stack(steps)  # [steps, 2, vocab]
    return [stacked[:, i] for i in range(2)]


def _step(model: PagedModel, pieces: Sequence[Piece], *, last_only: bool = False) -> Float32s:
    ends = np.cumsum([len(piece.token_ids) for piece in pieces])
    rows = [int(end) - 1 for end in ends] if last_only else list(range(int(ends[-1])))
    return model.step(pack_step(pieces, rows)).astype(np.float32, copy=True)


def _split(logits: Float32s, pieces: Sequence[Piece]) -> list[Float32s]:
    return np.split(logits, np.cumsum([len(piece.token_ids) for piece in pieces])[:-1])


_TABLE_BLOCKS = -(-(_NUM_SEQUENCES // 2) * (8 + _NUM_GENERATED) // TOKENS_PER_BLOCK)
"""Covers half of the continuations laid end to end."""


def _table(sequence: int) -> range:
    return range(sequence * _TABLE_BLOCKS, (sequence + 1) * _TABLE_BLOCKS)
