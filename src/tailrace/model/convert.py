"""The conversion process: `python -m tailrace.model.convert`, a job on standard input, progress on standard output.

::

    GGUF --dequantise--> GGUF of F16 --build--> IR --compress--> IR of int8 --check--> manifest
    IR   ------------------------------------------------------------------check--> manifest, links

Libraries may print what they like: their standard output and error go to the log that the parent shows on a crash.
"""

import ctypes
import datetime
import errno
import importlib.metadata
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tailrace.errors import ModelSourceError, TailraceError
from tailrace.model import gate, gguf_tokenizer
from tailrace.model.gguf_file import GgufFile, open_gguf
from tailrace.model.gguf_model import check_gguf, gguf_shape, write_f16
from tailrace.model.ir_model import IR_NAME, IR_WEIGHTS_NAME, check_directory, has_rope, ir_files, ir_shape
from tailrace.model.manifest import MANIFEST_NAME, GateFigures, ModelManifest
from tailrace.model.source import (
    ConversionJob,
    JobDone,
    JobFailed,
    JobMessage,
    JobProgress,
    default_weights,
    entry_hash,
)
from tailrace.model.text import (
    GENERATION_CONFIG_NAME,
    TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    TextModel,
    read_json,
)
from tailrace.request import SamplingDefaults

MANIFEST_VERSION = 1
_PR_SET_PDEATHSIG = 1
_GATE_TEXT = (
    "The river begins in the hills, where 24 springs meet, and it ends in the sea. def area(width, height): return "
    "width * height. Dear friend, last winter we walked from the mill to the market and bought bread, salt and two "
    "candles. Question: why is the sky blue? Answer: small particles of air scatter short waves more than long ones."
)
"""Starts the self-written text of the gate. Any text does; ours has prose, code, numbers and a question."""


class Reporter:
    """The parent's end of standard output."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def send(self, message: JobMessage) -> None:
        self._stream.write(msgspec.json.encode(message) + b"\n")
        self._stream.flush()

    def progress(self, phase: str, ratio: float) -> None:
        self.send(JobProgress(phase, ratio))


def main() -> None:
    reporter = Reporter(_private_stdout())
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ConversionJob)
    _die_with_parent(job.parent_pid)
    # NNCF reports its use over the network unless this package cannot be imported.
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    try:
        manifest = convert_gguf(job, reporter) if job.kind == "gguf" else convert_ir(job, reporter)
        (Path(job.target) / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        reporter.send(JobDone(manifest.content_hash))
    except TailraceError as error:
        reporter.send(JobFailed(error.row.label, error.message))
    except OSError as error:
        message = f"cannot prepare the model in {job.target}: {error.strerror or error}"
        reporter.send(JobFailed("model_source_error", message, disk_full=error.errno in (errno.ENOSPC, errno.EDQUOT)))


def convert_gguf(job: ConversionJob, reporter: Reporter) -> ModelManifest:
    source, target = open_gguf(Path(job.source)), Path(job.target)
    check_gguf(source)
    weights_format = job.weights_format or default_weights(source.num_parameters)
    write_text_files(source, target)
    staged = target / "f16.gguf"
    write_f16(source, staged, lambda ratio: reporter.progress("dequantise", ratio))
    reporter.progress("build", 0.0)
    build_ir(staged, source.num_parameters)
    staged.unlink()
    weights = gate.Weights(target / IR_NAME, None)
    if weights_format == "int8":
        reporter.progress("compress", 0.0)
        weights = compress_int8(target)
    figures = _run_gate(weights, target, True, reporter)
    if weights.source_xml is not None:
        weights.source_xml.unlink()
        weights.source_xml.with_suffix(".bin").unlink()
    return _manifest(job, weights_format, figures, sampling_defaults={}, shape=gguf_shape(source))


def convert_ir(job: ConversionJob, reporter: Reporter) -> ModelManifest:
    """Links to the source's files, so that one directory has all that the engine opens."""
    source, target = Path(job.source), Path(job.target)
    check_directory(source)
    for file in ir_files(source):
        (target / file.name).symlink_to(file)
    shape = ir_shape(source, count_parameters(source / IR_NAME))
    figures = _run_gate(gate.Weights(target / IR_NAME, None), target, has_rope(source), reporter)
    generation = read_json(source / GENERATION_CONFIG_NAME)
    return _manifest(job, "as_is", figures, sampling_defaults=generation, shape=shape)


def write_text_files(source: GgufFile, target: Path) -> None:
    """tokenizer.json and its companions, in Hugging Face's formats."""
    names = gguf_tokenizer.token_names(source.keys)
    _write_json(target / TOKENIZER_NAME, gguf_tokenizer.tokenizer_json(source.keys))
    _write_json(target / TOKENIZER_CONFIG_NAME, names)
    _write_json(target / GENERATION_CONFIG_NAME, {"eos_token_id": list(gguf_tokenizer.end_token_ids(source.keys))})
    template = source.keys.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        (target / TEMPLATE_NAME).write_text(template, encoding="utf-8")


def build_ir(staged: Path, num_parameters: int) -> None:
    """`openvino_model.xml` and GenAI's tokenizer files beside `staged`. Raises ModelSourceError when that fails.

    GenAI writes the IR as soon as it is built, and compiles it afterwards, which is half of the time. So it is given a
    device that does not exist, and its failure there is the end of the work that is wanted.
    """
    import openvino_genai

    reason = "it wrote nothing"
    try:
        openvino_genai.LLMPipeline(str(staged), "NONE", enable_save_ov_model=True)
    except Exception as error:  # the library raises bare RuntimeErrors
        reason = str(error).strip().splitlines()[-1]
    weights = staged.parent / IR_WEIGHTS_NAME
    # Equal constants are stored once, so a whole file may be a little smaller; a cut one does not load in the gate.
    expected_bytes = num_parameters * 2 * 0.9
    if not (staged.parent / IR_NAME).is_file() or not weights.is_file() or weights.stat().st_size < expected_bytes:
        raise ModelSourceError(f"openvino-genai {_version('openvino-genai')} could not build the model: {reason}")


def compress_int8(target: Path) -> gate.Weights:
    """int8 weights, asymmetric, a scale for each output channel; the f16 IR stays beside it for the gate."""
    import nncf
    import openvino as ov

    original = target / "f16.xml"
    (target / IR_NAME).rename(original)
    (target / IR_WEIGHTS_NAME).rename(original.with_suffix(".bin"))
    model = nncf.compress_weights(ov.Core().read_model(original), mode=nncf.CompressWeightsMode.INT8_ASYM)
    ov.save_model(model, target / IR_NAME)
    return gate.Weights(target / IR_NAME, original)


def count_parameters(xml: Path) -> int:
    """Elements of the weight constants. Scales and zero points of compressed weights end in a dimension of one."""
    import openvino as ov

    shapes = [n.get_output_shape(0) for n in ov.Core().read_model(xml).get_ops() if n.get_type_name() == "Constant"]
    return sum(math.prod(int(size) for size in shape) for shape in shapes if len(shape) > 1 and shape[-1] > 1)


def _run_gate(weights: gate.Weights, target: Path, rope: bool, reporter: Reporter) -> GateFigures:
    reporter.progress("check", 0.0)
    prompt_ids = TextModel.load(target).encode(_GATE_TEXT, special=False)
    return gate.check_model(
        weights, has_rope=rope, prompt_ids=prompt_ids, progress=lambda ratio: reporter.progress("check", ratio)
    )


def _manifest(
    job: ConversionJob, weights_format: str, figures: GateFigures, *, sampling_defaults: dict[str, Any], shape: Any
) -> ModelManifest:
    target = Path(job.target)
    return ModelManifest(
        format_version=MANIFEST_VERSION,
        name=job.name,
        source=Path(job.source).name,
        source_hash=job.source_hash,
        content_hash=entry_hash(job.source_hash, weights_format, job.versions),
        weights_format=weights_format,
        weights_bytes=(target / IR_WEIGHTS_NAME).stat().st_size,
        shape=shape,
        end_token_ids=tuple(sorted(TextModel.load(target).end_token_ids)),
        sampling_defaults=_sampling_defaults(sampling_defaults),
        gate=figures,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _sampling_defaults(generation: dict[str, Any]) -> SamplingDefaults:
    """From generation_config.json."""

    def number(key: str) -> float | None:
        value = generation.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    top_k, max_tokens = number("top_k"), number("max_new_tokens")
    return SamplingDefaults(
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=int(top_k) if top_k else None,
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
        max_tokens=int(max_tokens) if max_tokens else None,
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _private_stdout() -> BinaryIO:
    """Standard output for the parent alone; file descriptor 1 becomes the log."""
    private = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return private


def _die_with_parent(parent_pid: int) -> None:
    """A parent that was killed leaves no conversion running (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before this began")


if __name__ == "__main__":
    main()
