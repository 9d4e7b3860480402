"""Hop 8 and 11: one message a step, each way, between the app and its engine process.

Frames are a 4-byte little-endian length and a msgpack body, over a socket pair. Deadlines may travel as monotonic
times because both ends are processes of one host. `Start` comes first; the engine answers with progress, then `Ready`.
"""

import struct

import msgspec

from tailrace.cost.memory import MemoryPlan as MemoryPlan
from tailrace.cost.shape import ModelShape
from tailrace.engine.config import EngineConfig
from tailrace.engine.step import SchedulerStats, SequenceEvent
from tailrace.executor.settings import ExecutorSettings
from tailrace.request import FinishReason, RequestId, SamplingParams, SequenceId

FRAME_BYTES_MAX = 256 * 1024 * 1024
_LENGTH = struct.Struct("<I")


class ModeledFaults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong in a modeled engine: a prompt that *starts* with the token named triggers it."""

    die_token: int | None = None
    """The process kills itself in the middle of the step."""
    hang_token: int | None = None
    """The step never ends and cannot be interrupted."""
    fail_token: int | None = None
    """The step fails, whenever that sequence is in it."""
    start_label: str | None = None
    """The start fails with the error of that label."""


class ModeledSpec(msgspec.Struct, frozen=True, kw_only=True, tag="modeled"):
    """An engine without a model, in real time: tests of everything around the kernels."""

    num_blocks: int
    vocab_size: int
    context_tokens_max: int
    step_sizes: tuple[int, ...] = (64, 128, 256)
    step_fixed_ms: float = 1.0
    token_us: float = 10.0
    end_ratio: float = 0.0
    """Probability that an end token is the most probable one at a position."""
    faults: ModeledFaults = ModeledFaults()


class OpenVinoSpec(msgspec.Struct, frozen=True, kw_only=True, tag="openvino"):
    """A converted model on the real kernels."""

    model_xml: str
    """Path of the IR; its weights lie beside it."""
    shape: ModelShape
    settings: ExecutorSettings = ExecutorSettings()


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All an engine process is made from; plain values, so that a restart makes the same engine."""

    executor: OpenVinoSpec | ModeledSpec
    engine: EngineConfig = EngineConfig()
    end_token_ids: tuple[int, ...] = ()
    step_log_max: int = 4_096
    """Steps kept for `ReadSteps`; about a minute and a half at 50 steps a second."""
    step_timeout_ms_min: int = 10_000
    """Floor of the bound that makes a step a hang: a loaded machine may steal seconds."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first frame; nothing is loaded before it."""

    spec: EngineSpec


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One prompt and its choices: `sequence_ids[i]` is choice `first_choice + i`."""

    request_id: RequestId
    sequence_ids: tuple[SequenceId, ...]
    first_choice: int = 0
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    arrival_ns: int
    deadline_ns: int | None = None
    cache_salt: str = ""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: RequestId


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The app found a stop string: the first `tokens_kept` output tokens are the answer."""

    sequence_id: SequenceId
    reason: FinishReason
    tokens_kept: int


class ReadSteps(msgspec.Struct, frozen=True, tag="read_steps"):
    """Ask for the step log; answered by `StepLog` with the same number."""

    query_id: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave now; what runs is lost. (Drain is the app's: it stops submitting and waits.)"""


ToEngine = Start | Submit | Cancel | Finish | ReadSteps | Stop


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    phase: str
    """load, compile, allocate, warm_up"""
    message: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The pool is allocated and touched, the listed step sizes are warm."""

    memory: MemoryPlan
    context_tokens_max: int
    sequences_max: int
    token_budget: int
    itl_target_ms: float | None
    step_timeout_ms: int
    """A step longer than this is a hang."""
    num_threads: int
    startup_ms: dict[str, float]
    """By phase."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the step log: what a later explanation of a p99 needs."""

    step_id: int
    started_ns: int
    duration_ns: int
    """Plan, execute and commit; in the step log also the send."""
    plan_ns: int
    kernel_ns: int
    sampling_ns: int
    commit_ns: int
    num_tokens: int
    num_prefill_tokens: int
    num_decode_rows: int
    num_kv_tokens_read: int
    num_waiting: int
    num_running: int
    num_blocks_held: int
    predicted_ns: int | None = None
    outcome: str = "done"
    """done, cut or failed"""


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Sent after every step, and when a cancel or a deadline ended something between steps (`record` is None then)."""

    events: list[SequenceEvent]
    stats: SchedulerStats
    record: StepRecord | None = None


class StepLog(msgspec.Struct, frozen=True, tag="step_log"):
    query_id: int
    records: list[StepRecord]


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot start or go on; the process ends after this."""

    error_label: str
    message: str


FromEngine = Progress | Ready | StepReport | StepLog | Fatal

_encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """Length prefix and body in one buffer, so that one `send` carries one step."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return bytes(buffer)


def frame_length(prefix: bytes) -> int:
    """Bytes of the body that follows a 4-byte prefix. Raises ValueError above `FRAME_BYTES_MAX`."""
    (length,) = _LENGTH.unpack(prefix)
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"channel frame of {length} bytes: the other end is not a tailrace engine")
    return int(length)


class FrameParser:
    """Cuts a byte stream into frame bodies, whatever the borders of the chunks it comes in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies completed by `data`, in order. Raises ValueError on an absurd length; the stream is lost then."""
        self._buffer += data
        bodies = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            body = start + _LENGTH.size
            end = body + frame_length(bytes(self._buffer[start:body]))
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[body:end]))
            start = end
        del self._buffer[:start]
        return bodies
