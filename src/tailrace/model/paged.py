"""The kernels: one OpenVINO model turned into paged attention, its KV caches and one forward pass at a time.

In goes an IR and arrays of one step, out come the logits of the rows asked for. Nothing in here checks an index and
neither do the kernels (a block that does not exist ends the process): `executor.openvino` checks every plan first.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

from tailrace.engine.step import TOKENS_PER_BLOCK
from tailrace.errors import ModelRefused

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

_ROWS = "sampled_rows"
_STEP_PORTS = (
    "input_ids",
    "position_ids",
    "past_lens",
    "subsequence_begins",
    "block_indices_begins",
    "block_indices",
    _ROWS,
    "max_context_len",
)
_TAIL_TYPES = frozenset({"Add", "Convert", "Divide", "Multiply", "Subtract", "Tanh"})
"""What may stand between the LM head and the result: each row's values depend on that row alone."""
_TAIL_LENGTH_MAX = 16
KERNEL_CACHE_ENTRIES = 64
"""Kernels prepared for past shapes that the plugin keeps, a few for each token count; its default of 5,000 grows for
thousands of steps (see `executor.process`)."""


class Piece(NamedTuple):
    """Consecutive tokens of one sequence: `past` tokens are in the cache, `block_ids` covers past and new ones."""

    token_ids: Sequence[int]
    past: int
    block_ids: Sequence[int]


class StepArrays(NamedTuple):
    """One step as the kernels read it: tokens of all sequences laid end to end, S sequences, T tokens, B table entries.

    Sequence i owns tokens `begins[i]:begins[i + 1]` and the blocks `block_ids[block_begins[i]:block_begins[i + 1]]`.
    """

    token_ids: Int64s  # [T]
    positions: Int64s  # [T]
    past: Int32s  # [S]
    begins: Int32s  # [S + 1]
    block_begins: Int32s  # [S + 1]
    block_ids: Int32s  # [B]
    rows: Int32s  # indices into the T tokens whose logits are wanted
    context_max: Int32s  # []


def pack_step(pieces: Sequence[Piece], rows: Sequence[int]) -> StepArrays:
    """Arrays of one step. `rows` index the concatenated tokens. Surplus entries of a block table are left out."""
    token_ids: list[int] = []
    block_ids: list[int] = []
    positions: list[int] = []
    begins, block_begins, past = [0], [0], []
    context_max = 0
    for piece in pieces:
        end = piece.past + len(piece.token_ids)
        token_ids.extend(piece.token_ids)
        positions.extend(range(piece.past, end))
        block_ids.extend(piece.block_ids[: -(-end // TOKENS_PER_BLOCK)])
        past.append(piece.past)
        begins.append(len(token_ids))
        block_begins.append(len(block_ids))
        context_max = max(context_max, end)
    return StepArrays(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        past=np.array(past, dtype=np.int32),
        begins=np.array(begins, dtype=np.int32),
        block_begins=np.array(block_begins, dtype=np.int32),
        block_ids=np.array(block_ids, dtype=np.int32),
        rows=np.array(rows, dtype=np.int32),
        context_max=np.array(context_max, dtype=np.int32),
    )


class PagedGraph(NamedTuple):
    """A transformed model before compilation."""

    model: ov.Model
    positions_consumed: bool
    """False: every token would have position 0. Right only for a model without positions (NoPE, ALiBi)."""


def read_paged(xml: Path) -> PagedGraph:
    """The IR as paged attention, with the LM head behind a gather of wanted rows.

    Raises ModelRefused when the file is no IR, has no attention that the transformation knows, or ends otherwise than
    in an LM head.
    """
    try:
        model = ov.Core().read_model(xml)
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise ModelRefused(
            f"{xml.name} does not run as paged attention ({_last_line(error)}); use `llama.cpp`"
        ) from error
    consumed = _positions_consumed(model)
    _gather_rows(model)
    return PagedGraph(model, consumed)


def _positions_consumed(model: ov.Model) -> bool:
    for parameter in model.get_parameters():
        if "position_ids" in parameter.output(0).get_names():
            return len(parameter.output(0).get_target_inputs()) > 0
    return False


def _gather_rows(model: ov.Model) -> None:
    """Lets the head see wanted rows only: else every prefill token pays it (a third of a small model's work)."""
    head = _lm_head(model)
    rows = opset13.parameter([-1], np.int32, name=_ROWS)
    rows.output(0).get_tensor().set_names({_ROWS})
    axis = opset13.constant(0, dtype=np.int32)
    head.input(0).replace_source_output(opset13.gather(head.input_value(0), rows, axis).output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def _lm_head(model: ov.Model) -> ov.Node:
    """The MatMul nearest to the logits, through nodes that keep rows apart."""
    if len(model.outputs) != 1:
        raise ModelRefused(f"the model has {len(model.outputs)} outputs where one (logits) is needed; use `llama.cpp`")
    node = model.outputs[0].get_node().input_value(0).get_node()
    for _ in range(_TAIL_LENGTH_MAX):
        if node.get_type_name() == "MatMul":
            return node
        if node.get_type_name() not in _TAIL_TYPES:
            break
        node = _data_input(node)
    raise ModelRefused(f"the model ends in {node.get_type_name()}, not in an LM head (MatMul); use `llama.cpp`")


def _data_input(node: ov.Node) -> ov.Node:
    """The input of an elementwise node that is no constant (the first, if both or none are)."""
    inputs = [node.input_value(i).get_node() for i in range(node.get_input_size())]
    return next((each for each in inputs if not _is_constant(each)), inputs[0])


def _is_constant(node: ov.Node) -> bool:
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class PagedModel:
    """A compiled model, its caches, and one infer request. One step at a time; only `cancel` may come from outside."""

    def __init__(
        self,
        graph: PagedGraph,
        *,
        kv_dtype: str,
        num_threads: int | None = None,
        inference_dtype: str | None = None,
        pin_threads: bool = True,
    ) -> None:
        """Compiles. `kv_dtype` is always set: what the plugin picks by itself depends on how the IR was written.

        `inference_dtype` None leaves the choice to the plugin (bf16 where the CPU has it, else f32). An f32 cache needs
        f32. Pinned threads of two workers would meet on the same cores. Raises ModelRefused when the plugin refuses
        the combination or the model has states besides KV.
        """
        properties: dict[str, str | int | bool] = {
            "CPU_RUNTIME_CACHE_CAPACITY": KERNEL_CACHE_ENTRIES,
            "ENABLE_CPU_PINNING": pin_threads,
            "KV_CACHE_PRECISION": kv_dtype,
        }
        if inference_dtype is not None:
            properties["INFERENCE_PRECISION_HINT"] = inference_dtype
        if num_threads is not None:
            properties["INFERENCE_NUM_THREADS"] = num_threads
        try:
            compiled = ov.Core().compile_model(graph.model, "CPU", properties)
        except RuntimeError as error:
            raise ModelRefused(
                f"the CPU kernels do not run this model with a {kv_dtype} KV cache and "
                f"{inference_dtype or 'default'} inference ({_last_line(error)}); try another executor.kv_dtype"
            ) from error
        self.positions_consumed = graph.positions_consumed
        self.kv_dtype = kv_dtype
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        self._cache_ports, self._step_ports = _sort_ports(compiled)
        self._caches: list[npt.NDArray[np.generic]] = []
        self._buffers: list[npt.NDArray[Any] | None] = [None] * len(self._step_ports)
        self._sizes: set[int] = set()
        self._sizes_started: set[int] = set()
        self.is_torn = False
        """A step was cut or failed: `mend` before the next one."""
        self.num_blocks = 0
        self.vocab_size = int(compiled.outputs[0].partial_shape[-1].get_length())
        self.inference_dtype = str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
        self.num_threads = int(compiled.get_property("INFERENCE_NUM_THREADS"))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values, as compiled (u8 and u4 carry their scales along)."""
        return sum(_block_bytes(port) for port in self._cache_ports)

    @property
    def num_layers(self) -> int:
        return len(self._cache_ports) // 2

    def allocate(self, num_blocks: int) -> None:
        """Makes and writes the caches: unwritten pages would be shared with each other, and fault in during a step.

        One block more than asked for is kept aside for `mend`.
        """
        assert num_blocks > 0, "a pool has blocks"
        self._caches = []
        for port in self._cache_ports:
            sizes = [port.partial_shape[i].get_length() for i in range(1, len(port.partial_shape))]
            tensor = ov.Tensor(port.element_type, ov.Shape([num_blocks + 1, *sizes]))
            self._request.set_tensor(port, tensor)
            # u4 shows as flat bytes, bf16 as float16 of the same bits: bytes by block are right for copying them all.
            self._caches.append(tensor.data.reshape(-1).view(np.uint8).reshape(num_blocks + 1, -1))
        with ThreadPoolExecutor(self.num_threads, thread_name_prefix="allocate") as threads:
            list(threads.map(_write_zeros, self._caches))  # page faults, which cores take side by side
        self.num_blocks = num_blocks

    def copy_block(self, source: int, destination: int) -> None:
        """All layers' keys and values of one block."""
        for cache in self._caches:
            cache[destination] = cache[source]

    def step(self, arrays: StepArrays) -> Float32s:
        """Logits `[len(rows), vocab]` of one forward pass, which also writes the new tokens' KV.

        The result is a view of the output buffer: **the next step overwrites it**. Raises RuntimeError from the
        kernels, also when `cancel` cut the step; blocks that it was to write then hold garbage, and `mend` comes next.
        """
        self.start(arrays)
        return self.wait()

    def start(self, arrays: StepArrays) -> None:
        """Begins a step and returns at once: from here to the end of `wait`, `cancel` cuts this one."""
        assert not self.is_torn, "a torn model is mended before its next step"
        self._sizes_started = {each.size for each in arrays}
        values: list[npt.NDArray[Any]] = list(arrays)
        for index, (port, array) in enumerate(zip(self._step_ports, values, strict=True)):
            if port is None:
                continue
            buffer = self._buffers[index]
            if buffer is not None and buffer.shape == array.shape:
                buffer[...] = array
                continue
            # Of our own, so that no later step writes into an array of the caller's. Decode steps keep their shapes:
            # without this, making and setting tensors takes 0.25 ms of each.
            fresh = array.copy()
            self._request.set_tensor(port, ov.Tensor(fresh, shared_memory=True))
            self._buffers[index] = fresh
        self._request.start_async(share_inputs=True)

    def wait(self) -> Float32s:
        """The logits of the step begun; without the interpreter lock meanwhile. As `step`."""
        try:
            self._request.wait()
        except RuntimeError:
            self._sizes |= self._sizes_started
            self.is_torn = True
            raise
        self._sizes = self._sizes_started
        logits: Float32s = self._request.get_output_tensor(0).data
        return logits.reshape(-1, self.vocab_size)

    def mend(self) -> None:
        """Makes the kernels usable after a cut or failed step, by a step of a few tokens on a block kept aside.

        A step that ends early leaves nodes whose outputs have its shape while their remembered inputs have that of the
        step before: a next step of that shape skips them and fails (38 of 38 cuts, measured on the pinned version). So
        the mending step has a size that neither of the two had, in tokens, sequences, rows and blocks. After it every
        node agrees with itself (0 of 36). Raises RuntimeError when even that fails; it may be tried again.
        """
        count = next(size for size in range(1, len(self._sizes) + 2) if size not in self._sizes)
        aside = Piece([0], 0, [self.num_blocks])
        self.is_torn = False
        self.step(pack_step([aside] * count, range(count)))

    def cancel(self) -> None:
        """Cuts whatever runs now: the caller makes sure that it is the step meant."""
        self._request.cancel()


def load_paged(
    xml: Path,
    *,
    kv_dtype: str,
    num_threads: int | None = None,
    inference_dtype: str | None = None,
    pin_threads: bool = True,
) -> PagedModel:
    """`read_paged` and compile. The caches come with `allocate`, once `block_bytes` told what they cost."""
    return PagedModel(
        read_paged(xml),
        kv_dtype=kv_dtype,
        num_threads=num_threads,
        inference_dtype=inference_dtype,
        pin_threads=pin_threads,
    )


def _write_zeros(cache: npt.NDArray[np.generic]) -> None:
    cache[:] = 0


def _block_bytes(port: ov.Output) -> int:
    elements = 1
    for i in range(1, len(port.partial_shape)):
        elements *= int(port.partial_shape[i].get_length())
    return elements * int(port.element_type.bitwidth) // 8


def _sort_ports(compiled: ov.CompiledModel) -> tuple[list[ov.Output], list[ov.Output | None]]:
    """Cache ports, and step ports in the order of `StepArrays`, found among all names of a port (never `any_name`)."""
    caches: list[ov.Output] = []
    by_name: dict[str, ov.Output] = {}
    for port in compiled.inputs:
        names = port.get_names()
        if any(name.startswith(("key_cache.", "value_cache.")) for name in names):
            caches.append(port)
            continue
        known = next((name for name in _STEP_PORTS if name in names), None)
        if known is None:
            raise ModelRefused(f"the model needs the input {sorted(names)}: states besides KV; use `llama.cpp`")
        by_name[known] = port
    missing = [name for name in _STEP_PORTS if name not in by_name and name != "position_ids"]
    if missing or not caches:
        raise ModelRefused(f"the transformed model has no {', '.join(missing) or 'KV cache'}; use `llama.cpp`")
    return caches, [by_name.get(name) for name in _STEP_PORTS]
