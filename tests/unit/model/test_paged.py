"""The transformed model gives the logits of the IR it came from, whatever the blocks; what it cannot run it refuses."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from tailrace.cost.memory import kv_block_bytes
from tailrace.engine.step import TOKENS_PER_BLOCK
from tailrace.errors import ModelRefused
from tailrace.model.paged import PagedModel, Piece, load_paged, pack_step, read_paged
from tiny_model import SHAPE

TOKENS = np.random.default_rng(0).integers(0, SHAPE.vocab_size, 100).tolist()
F32_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def stateful_logits(tiny_xml: Path) -> np.ndarray:
    """All rows of `TOKENS` from the IR itself, f32."""
    request = ov.Core().compile_model(tiny_xml, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    length = len(TOKENS)
    request.infer(
        {
            "input_ids": np.array([TOKENS]),
            "attention_mask": np.ones((1, length), np.int64),
            "position_ids": np.arange(length)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
    )
    return request.get_output_tensor(0).data[0].copy()


@pytest.fixture(scope="module")
def paged(tiny_xml: Path) -> PagedModel:
    model = load_paged(tiny_xml, kv_dtype="f32", inference_dtype="f32", num_threads=1)
    model.allocate(16)
    return model


def test_rows_asked_for_are_those_of_the_stateful_model(paged: PagedModel, stateful_logits: np.ndarray) -> None:
    rows = [99, 0, 31, 32, 64]
    logits = paged.step(pack_step([Piece(TOKENS, 0, [9, 2, 15, 0])], rows))
    assert logits.shape == (5, SHAPE.vocab_size)
    np.testing.assert_allclose(logits, stateful_logits[rows], atol=F32_TOLERANCE)


def test_a_mixed_step_gives_each_sequence_its_own_logits(paged: PagedModel, stateful_logits: np.ndarray) -> None:
    """A decode row, a chunk behind a past and a fresh prefill share the step."""
    first, second, third = [0, 1], [2, 3, 4], [5]
    paged.step(pack_step([Piece(TOKENS[:33], 0, first), Piece(TOKENS[:40], 0, second)], [0]))
    pieces = [Piece(TOKENS[33:34], 33, first), Piece(TOKENS[40:75], 40, second), Piece(TOKENS[:20], 0, third)]
    logits = paged.step(pack_step(pieces, [0, 35, 55]))
    np.testing.assert_allclose(logits, stateful_logits[[33, 74, 19]], atol=F32_TOLERANCE)


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "u8", "u4"])
def test_a_copied_block_holds_the_same_keys_and_values(tiny_xml: Path, kv_dtype: str) -> None:
    inference_dtype = "f32" if kv_dtype == "f32" else None
    model = load_paged(tiny_xml, kv_dtype=kv_dtype, inference_dtype=inference_dtype, num_threads=1)
    model.allocate(8)
    model.step(pack_step([Piece(TOKENS[:70], 0, [0, 1, 2])], [0]))
    expected = model.step(pack_step([Piece(TOKENS[70:71], 70, [0, 1, 2])], [0])).copy()
    # Other tokens overwrite what was not copied.
    for source, destination in ((0, 5), (1, 6), (2, 7)):
        model.copy_block(source, destination)
    model.step(pack_step([Piece(TOKENS[::-1][:90], 0, [0, 1, 2])], [0]))
    copied = model.step(pack_step([Piece(TOKENS[70:71], 70, [5, 6, 7])], [0]))
    # u8 and u4 scales of the last block were widened by a later token: near, not equal.
    np.testing.assert_allclose(copied, expected, atol={"u8": 0.02, "u4": 0.3}.get(kv_dtype, 0.0))


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "u8", "u4"])
def test_block_bytes_are_those_of_the_formula(tiny_xml: Path, kv_dtype: str) -> None:
    inference_dtype = "f32" if kv_dtype == "f32" else None
    model = load_paged(tiny_xml, kv_dtype=kv_dtype, inference_dtype=inference_dtype)
    assert model.block_bytes == kv_block_bytes(SHAPE, kv_dtype)
    assert model.num_layers == SHAPE.num_layers


def test_the_pool_is_written_before_use(paged: PagedModel) -> None:
    paged.allocate(4)
    assert paged.num_blocks == 4
    assert all(not cache.any() and cache.nbytes % 4 == 0 for cache in paged._caches)
    paged.allocate(16)


def test_pack_step_lays_sequences_end_to_end() -> None:
    arrays = pack_step([Piece([7, 8, 9], 30, [4, 2, 99]), Piece([5], 64, (1, 3, 6))], [2, 3])
    assert arrays.token_ids.tolist() == [7, 8, 9, 5]
    assert arrays.positions.tolist() == [30, 31, 32, 64]
    assert arrays.past.tolist() == [30, 64]
    assert arrays.begins.tolist() == [0, 3, 4]
    assert arrays.block_ids.tolist() == [4, 2, 1, 3, 6], "33 tokens need two blocks"
    assert arrays.block_begins.tolist() == [0, 2, 5]
    assert arrays.rows.tolist() == [2, 3]
    assert arrays.context_max.tolist() == 65


def test_a_block_has_32_tokens() -> None:
    assert TOKENS_PER_BLOCK == 32


def test_consumed_positions_are_told(tiny_xml: Path) -> None:
    assert read_paged(tiny_xml).positions_consumed


def edited(xml: Path, folder: Path, edit: Callable[[ov.Model], ov.Model | None]) -> Path:
    model = ov.Core().read_model(xml)
    model = edit(model) or model
    ov.save_model(model, folder / "edited.xml", compress_to_fp16=False)
    return folder / "edited.xml"


def test_positions_without_a_consumer_are_told(tiny_xml: Path, tmp_path: Path) -> None:
    def cut_positions(model: ov.Model) -> None:
        positions = next(each for each in model.get_parameters() if "position_ids" in each.output(0).get_names())
        zeros = ops.multiply(model.input("input_ids").get_node(), ops.constant(0, dtype=np.int64))
        for target in positions.output(0).get_target_inputs():
            target.replace_source_output(zeros.output(0))

    assert not read_paged(edited(tiny_xml, tmp_path, cut_positions)).positions_consumed


def test_elementwise_nodes_behind_the_head_are_walked_through(
    tiny_xml: Path, tmp_path: Path, stateful_logits: np.ndarray
) -> None:
    def add_tail(model: ov.Model) -> None:
        result = model.outputs[0].get_node()
        head = result.input_value(0)
        tail = ops.multiply(ops.constant(np.float32(2.0)), ops.tanh(ops.divide(head, ops.constant(np.float32(4.0)))))
        result.input(0).replace_source_output(tail.output(0))

    model = load_paged(edited(tiny_xml, tmp_path, add_tail), kv_dtype="f32", inference_dtype="f32")
    model.allocate(4)
    logits = model.step(pack_step([Piece(TOKENS, 0, [0, 1, 2, 3])], [50]))
    np.testing.assert_allclose(logits, 2 * np.tanh(stateful_logits[[50]] / 4), atol=F32_TOLERANCE)


def test_a_model_that_ends_otherwise_is_refused(tiny_xml: Path, tmp_path: Path) -> None:
    def end_in_softmax(model: ov.Model) -> None:
        result = model.outputs[0].get_node()
        result.input(0).replace_source_output(ops.softmax(result.input_value(0), 2).output(0))

    with pytest.raises(ModelRefused, match="ends in Softmax"):
        read_paged(edited(tiny_xml, tmp_path, end_in_softmax))


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    ids = ops.parameter([-1, -1], np.int64, name="input_ids")
    ids.output(0).get_tensor().set_names({"input_ids"})
    table = ops.constant(np.zeros((10, 4), np.float32))
    model = ov.Model([ops.gather(table, ids, ops.constant(0, dtype=np.int32))], [ids], "none")
    ov.save_model(model, tmp_path / "none.xml")
    with pytest.raises(ModelRefused, match="does not run as paged attention"):
        read_paged(tmp_path / "none.xml")


@pytest.mark.parametrize("content", ["", "<xml", "not xml at all"])
def test_a_file_that_is_no_ir_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "openvino_model.xml").write_text(content)
    with pytest.raises(ModelRefused, match=r"openvino_model\.xml"):
        read_paged(tmp_path / "openvino_model.xml")


def test_a_combination_that_the_kernels_refuse_is_refused_with_what_to_change(tiny_xml: Path) -> None:
    with pytest.raises(ModelRefused, match=r"executor\.kv_dtype"):
        load_paged(tiny_xml, kv_dtype="i8")


def test_a_step_leaves_the_arrays_of_earlier_steps_alone(paged: PagedModel) -> None:
    first, second = pack_step([Piece(TOKENS[:5], 0, [0])], [4]), pack_step([Piece(TOKENS[5:10], 0, [1])], [4])
    expected = paged.step(first).copy()
    paged.step(second)
    assert first.token_ids.tolist() == TOKENS[:5]
    assert np.array_equal(paged.step(first), expected)


def test_logits_are_a_view_that_the_next_step_overwrites(paged: PagedModel) -> None:
    """Why the executor draws before it computes again."""
    first = paged.step(pack_step([Piece(TOKENS[:5], 0, [0])], [4]))
    kept = first.copy()
    paged.step(pack_step([Piece(TOKENS[50:55], 0, [1])], [4]))
    assert not np.array_equal(first, kept)
