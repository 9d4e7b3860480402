"""A random two-layer decoder as an OpenVINO IR with the state and the attention that an export has: real kernels in
milliseconds, without any model file. Positions matter (learnt embeddings) and attention weighs heavily, so a wrong
block, a stale one or a wrong position changes the logits by far more than rounding does.
"""

from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo

from tailrace.cost.shape import ModelShape

SHAPE = ModelShape(
    architecture="tiny",
    num_layers=2,
    hidden_size=64,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=500,
    context_tokens_max=2048,
    num_parameters=150_000,
)


def write_tiny_model(folder: Path, *, scale: float = 1.0) -> Path:
    """Writes `openvino_model.xml` and returns its path."""
    xml = folder / "openvino_model.xml"
    ov.save_model(_Builder(scale).build(), xml, compress_to_fp16=False)
    return xml


class _Builder:
    def __init__(self, scale: float) -> None:
        self.random = np.random.default_rng(0)
        self.scale = scale
        self.input_ids = _parameter("input_ids", [-1, -1], np.int64)
        self.attention_mask = _parameter("attention_mask", [-1, -1], np.int64)
        self.position_ids = _parameter("position_ids", [-1, -1], np.int64)
        self.beam_idx = _parameter("beam_idx", [-1], np.int32)
        self.sinks: list[ov.Node] = []

    def build(self) -> ov.Model:
        zero = ops.constant(0, dtype=np.int32)
        x = ops.add(
            ops.gather(self.weights(SHAPE.vocab_size, SHAPE.hidden_size, 1.0), self.input_ids, zero),
            ops.gather(self.weights(SHAPE.context_tokens_max, SHAPE.hidden_size, 1.0), self.position_ids, zero),
        )
        batch = ops.gather(ops.shape_of(self.input_ids, output_type="i64"), ops.constant([0], dtype=np.int64), zero)
        for layer in range(SHAPE.num_layers):
            x = ops.add(x, self.attention(_normed(x), layer, batch))
            x = ops.add(x, self.linear(ops.gelu(self.linear(_normed(x), 64, 128), "erf"), 128, 64))
        logits = self.linear(_normed(x), SHAPE.hidden_size, SHAPE.vocab_size, gain=2.0)
        logits.output(0).get_tensor().set_names({"logits"})
        result = ops.result(logits)
        parameters = [self.input_ids, self.attention_mask, self.position_ids, self.beam_idx]
        return ov.Model([result], self.sinks, parameters, "tiny")

    def attention(self, x: ov.Node, layer: int, batch: ov.Node) -> ov.Node:
        query = self.heads(self.linear(x, 64, 64))
        key = self.state(self.heads(self.linear(x, 64, 64)), f"past_key_values.{layer}.key", batch)
        value = self.state(self.heads(self.linear(x, 64, 64)), f"past_key_values.{layer}.value", batch)
        attended = ops.scaled_dot_product_attention(query, key, value, self.mask(x, key))
        joined = ops.reshape(
            ops.transpose(attended, ops.constant([0, 2, 1, 3], dtype=np.int64)),
            ops.constant([0, 0, SHAPE.hidden_size], dtype=np.int64),
            special_zero=True,
        )
        return self.linear(joined, 64, 64, gain=4.0)

    def heads(self, x: ov.Node) -> ov.Node:
        split = ops.reshape(x, ops.constant([0, 0, SHAPE.num_heads, SHAPE.head_dim], dtype=np.int64), special_zero=True)
        return ops.transpose(split, ops.constant([0, 2, 1, 3], dtype=np.int64))

    def state(self, new: ov.Node, name: str, batch: ov.Node) -> ov.Node:
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, SHAPE.num_kv_heads, -1, SHAPE.head_dim])
        info.data_type = ov.Type.f32
        info.variable_id = name
        variable = Variable(info)
        sizes = [ops.constant([size], dtype=np.int64) for size in (SHAPE.num_kv_heads, 0, SHAPE.head_dim)]
        empty = ops.broadcast(ops.constant(0.0, dtype=np.float32), ops.concat([batch, *sizes], axis=0))
        past = ops.gather(ops.read_value(empty, variable), self.beam_idx, ops.constant(0, dtype=np.int32))
        joined = ops.concat([past, new], axis=2)
        self.sinks.append(ops.assign(joined, variable))
        return joined

    def mask(self, x: ov.Node, key: ov.Node) -> ov.Node:
        """0 where a query may look, else a large negative number; [1, 1, new, past + new]."""
        zero = ops.constant(0, dtype=np.int64)
        one = ops.constant(1, dtype=np.int64)
        columns = ops.gather(ops.shape_of(key, output_type="i64"), ops.constant(2, dtype=np.int64), zero)
        rows = ops.gather(ops.shape_of(x, output_type="i64"), one, zero)
        column_ids = ops.unsqueeze(ops.range(zero, columns, one, "i64"), zero)
        row_ids = ops.unsqueeze(ops.range(ops.subtract(columns, rows), columns, one, "i64"), one)
        allowed = ops.less_equal(column_ids, row_ids)
        mask = ops.select(allowed, ops.constant(0.0, dtype=np.float32), ops.constant(-1e9, dtype=np.float32))
        return ops.unsqueeze(mask, ops.constant([0, 1], dtype=np.int64))

    def linear(self, x: ov.Node, num_in: int, num_out: int, gain: float = 1.0) -> ov.Node:
        return ops.matmul(x, self.weights(num_out, num_in, gain * num_in**-0.5), False, True)

    def weights(self, rows: int, columns: int, deviation: float) -> ov.Node:
        values = self.random.standard_normal((rows, columns)) * deviation * self.scale
        return ops.constant(values.astype(np.float32))


def _normed(x: ov.Node) -> ov.Node:
    """Each token's vector, scaled to a mean square of 1."""
    return ops.divide(x, ops.sqrt(ops.reduce_mean(ops.multiply(x, x), ops.constant([-1], dtype=np.int64), True)))


def _parameter(name: str, shape: list[int], dtype: type) -> ov.Node:
    parameter = ops.parameter(shape, dtype, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter
