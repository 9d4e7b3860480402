"""The gate passes a sound model with figures and refuses a broken one with the figure."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tailrace.errors import ModelRefused
from tailrace.model import gate
from tailrace.model.gate import Weights, check_model, kl_divergence
from tailrace.model.manifest import KL_DECODE_MAX
from tiny_model import write_tiny_model

LOGITS = arrays(np.float32, (3, 5), elements=st.floats(-30, 30, width=32))
PROMPT = list(range(1, 80))


@given(LOGITS, LOGITS)
def test_kl_is_the_mean_of_its_definition_and_never_negative(p: np.ndarray, q: np.ndarray) -> None:
    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x.astype(np.float64))
        return e / e.sum(axis=-1, keepdims=True)

    expected = np.mean(np.sum(softmax(p) * (np.log(softmax(p)) - np.log(softmax(q))), axis=-1))
    assert kl_divergence(p, q) == pytest.approx(expected, abs=1e-9)
    assert kl_divergence(p, q) >= 0.0


@given(LOGITS, st.floats(-5, 5))
def test_kl_ignores_a_constant_added_to_a_row(p: np.ndarray, shift: float) -> None:
    assert kl_divergence(p, p.astype(np.float64) + shift) < 1e-9


def test_kl_of_nan_is_infinite() -> None:
    assert kl_divergence(np.zeros((2, 3)), np.full((2, 3), np.nan)) == float("inf")


def test_a_sound_model_passes_with_figures(tiny_xml: Path) -> None:
    ratios: list[float] = []
    figures = check_model(Weights(tiny_xml, None), has_rope=True, prompt_ids=PROMPT, progress=ratios.append)
    assert figures.kl_paged_against_stateful < gate.KL_PAGED_MAX
    assert figures.kl_weights_against_source is None
    fast = [
        figures.kl_decode_production[dtype] for dtype in gate.FAST_KV_DTYPES if dtype in figures.kl_decode_production
    ]
    assert len(fast) == 1
    assert fast[0] < KL_DECODE_MAX
    assert "u8" in figures.kl_decode_production
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0


def test_weights_that_are_not_the_sources_are_refused_with_the_figure(tiny_xml: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path, scale=1.2)
    with pytest.raises(ModelRefused, match=r"compressed weights.*KL of \d"):
        check_model(Weights(other, tiny_xml), has_rope=True, prompt_ids=PROMPT, progress=lambda _: None)


def test_paged_logits_that_differ_are_refused_with_the_figure(
    tiny_xml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stateful side computes another model: what a transformation that drops a part looks like."""
    other = write_tiny_model(tmp_path, scale=1.01)
    original = gate.stateful_logits
    monkeypatch.setattr(gate, "stateful_logits", lambda _, pair: original(other, pair))
    with pytest.raises(ModelRefused, match=r"stateful model.*KL of \d"):
        check_model(Weights(tiny_xml, None), has_rope=True, prompt_ids=PROMPT, progress=lambda _: None)


def test_a_wrong_block_table_would_be_seen(tiny_xml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sequences on the same blocks: the figures are sensitive to the cache."""
    monkeypatch.setattr(gate, "_table", lambda _: range(gate._TABLE_BLOCKS))
    with pytest.raises(ModelRefused, match="stateful model"):
        check_model(Weights(tiny_xml, None), has_rope=True, prompt_ids=PROMPT, progress=lambda _: None)


def test_a_short_prompt_is_enough(tiny_xml: Path) -> None:
    check_model(Weights(tiny_xml, None), has_rope=True, prompt_ids=[5], progress=lambda _: None)


def test_a_file_that_is_no_ir_is_refused(tmp_path: Path, tiny_xml: Path) -> None:
    shutil.copy(tiny_xml, tmp_path / "openvino_model.xml")  # without its weights
    with pytest.raises(ModelRefused):
        check_model(
            Weights(tmp_path / "openvino_model.xml", None), has_rope=True, prompt_ids=PROMPT, progress=lambda _: None
        )
