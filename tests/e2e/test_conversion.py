"""Real conversions of a tiny model, in real processes, and what becomes of them when something goes wrong."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from reference_llama import reference_logits
from tailrace.errors import ModelRefused, ModelSourceError
from tailrace.model import cache
from tailrace.model.gate import kl_divergence
from tailrace.model.paged import Piece, load_paged, pack_step
from tailrace.model.source import PreparedModel, find_model, list_models, prepare_model
from tailrace.model.text import TextModel
from tiny_gguf import TOKENS, write_tiny_gguf
from tiny_model import SHAPE, write_tiny_model

BIASES = {f"blk.{i}.attn_{part}.bias": (size,) for i in range(2) for part, size in (("q", 64), ("k", 32), ("v", 32))}
NORMS = {f"blk.{i}.attn_{part}_norm.weight": (32,) for i in range(2) for part in ("q", "k")}


class Phases(list[str]):
    """A progress callback that keeps each phase once, in order."""

    def __call__(self, phase: str, ratio: float) -> None:
        assert 0.0 <= ratio <= 1.0
        if phase not in self:
            self.append(phase)


def prepare(path: Path, cache_dir: Path, **options: Any) -> PreparedModel:
    options = {"weights": None, "progress": Phases(), **options}
    return prepare_model(find_model(str(path)), cache_dir=cache_dir, **options)


def paged_logits(xml: Path, token_ids: list[int]) -> np.ndarray:
    model = load_paged(xml, kv_dtype="f32", inference_dtype="f32")
    blocks = range(-(-len(token_ids) // 32))
    model.allocate(len(blocks))
    return model.step(pack_step([Piece(token_ids, 0, blocks)], list(range(len(token_ids))))).copy()


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return write_tiny_gguf(folder / "tiny.gguf")


def test_a_gguf_file_becomes_a_checked_model_and_nothing_is_written_beside_it(gguf: Path, tmp_path: Path) -> None:
    phases = Phases()
    prepared = prepare(gguf, tmp_path / "cache", progress=phases)
    manifest = prepared.manifest
    assert phases == ["hash", "dequantise", "build", "compress", "check"]
    assert (manifest.name, manifest.source, manifest.weights_format) == ("tiny", "tiny.gguf", "int8")
    assert manifest.gate.kl_paged_against_stateful < 1e-6
    assert manifest.gate.kl_weights_against_source is not None
    assert manifest.gate.kl_weights_against_source < 2e-2
    assert manifest.weights_bytes == (prepared.directory / "openvino_model.bin").stat().st_size
    assert set(manifest.end_token_ids) == TextModel.load(prepared.directory).end_token_ids == {0, 2}
    assert os.listdir(gguf.parent) == ["tiny.gguf"]
    assert os.listdir(tmp_path / "cache" / "staging") == ["lock"]
    assert not [name for name in os.listdir(prepared.directory) if name.startswith("f16")]

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a prepared model needs no process")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forbidden)
        assert prepare(gguf, tmp_path / "cache") == prepared


@pytest.mark.parametrize(
    ("arch", "more", "kind"),
    [
        ("llama", {}, "Q4_1"),
        ("llama", {}, "BF16"),
        ("llama", {}, "Q5_0"),
        ("qwen2", BIASES, "Q8_0"),
        ("qwen3", NORMS, "Q4_0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logits_are_those_of_the_dequantised_source(
    tmp_path: Path, arch: str, more: dict[str, tuple[int, ...]], kind: str
) -> None:
    untied = {**more, "output.weight": (len(TOKENS), 64)}
    extra = {"attention__key_length": 32} if arch == "qwen3" else {}
    path = write_tiny_gguf(
        tmp_path / "m.gguf", arch=arch, more_tensors=untied, quantization=GGMLQuantizationType[kind], **extra
    )
    prepared = prepare(path, tmp_path / "cache", weights="f16")
    token_ids = np.random.default_rng(1).integers(0, len(TOKENS), 70).tolist()
    expected = reference_logits(path, token_ids)
    assert kl_divergence(expected, paged_logits(prepared.directory / "openvino_model.xml", token_ids)) < 1e-5
    assert prepared.manifest.weights_format == "f16"
    assert prepared.manifest.gate.kl_weights_against_source is None


@pytest.mark.model
@pytest.mark.slow
def test_the_packaged_model_computes_what_its_source_says(smollm2_dir: Path) -> None:
    manifest = cache.read_manifest(smollm2_dir)
    assert manifest is not None
    assert manifest.weights_format == "int8"
    text_model = TextModel.load(smollm2_dir)
    text = "The river begins in the hills, where 24 springs meet, and it ends in the sea. " * 3
    token_ids = text_model.encode(text, special=True)
    expected = reference_logits(find_model("smollm2").path, token_ids)
    found = paged_logits(smollm2_dir / "openvino_model.xml", token_ids)
    assert kl_divergence(expected, found) < 2e-2


def test_a_sentencepiece_file_is_converted_with_our_tokenizer(tmp_path: Path) -> None:
    """The library that builds the IR cannot read this tokenizer and is not asked to."""
    prepared = prepare(write_tiny_gguf(tmp_path / "m.gguf", tokenizer__model="llama"), tmp_path / "cache")
    model = TextModel.load(prepared.directory)
    ids = model.encode("he", special=True)
    assert [model.token_text(i) for i in ids] == ["<s>", " he"]
    assert prepared.manifest.end_token_ids == (2,)


def test_a_cut_file_and_a_refused_one_keep_their_errors_across_the_process(gguf: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[:-1000])
    with pytest.raises(ModelSourceError, match="cut or corrupt"):
        prepare(cut, tmp_path / "cache")
    scaled = write_tiny_gguf(tmp_path / "scaled.gguf", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    with pytest.raises(ModelRefused, match=r"scales its rotary.*llama\.cpp"):
        prepare(scaled, tmp_path / "cache")
    assert list_models(tmp_path / "cache") == []
    assert os.listdir(tmp_path / "cache" / "staging") == ["lock"]


def test_two_at_once_do_the_work_once(gguf: Path, tmp_path: Path) -> None:
    results: list[tuple[PreparedModel, Phases]] = []

    def run() -> None:
        phases = Phases()
        results.append((prepare(gguf, tmp_path / "cache", progress=phases), phases))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    (first, first_phases), (second, second_phases) = results
    assert first == second
    assert ["dequantise" in phases for phases in (first_phases, second_phases)].count(True) == 1


PREPARE = """
import sys
from pathlib import Path
from tailrace.model.source import find_model, prepare_model
prepare_model(find_model(sys.argv[1]), weights=None, cache_dir=Path(sys.argv[2]),
              progress=lambda phase, ratio: print(phase, flush=True))
"""


@pytest.mark.parametrize("phase", ["compress", "check"])
def test_a_killed_conversion_leaves_nothing_and_the_next_one_works(gguf: Path, tmp_path: Path, phase: str) -> None:
    cache_dir = tmp_path / "cache"
    command = [sys.executable, "-c", PREPARE, str(gguf), str(cache_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert phase in (line.strip() for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    (staged,) = (path for path in (cache_dir / "staging").iterdir() if path.is_dir())
    with (staged / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # free once the orphaned conversion died too
    assert not (staged / "model" / "manifest.json").exists()
    assert list_models(cache_dir) == []
    prepared = prepare(gguf, cache_dir)
    assert [model.directory for model in list_models(cache_dir)] == [prepared.directory]
    assert [name for name in os.listdir(cache_dir / "staging") if name != "lock"] == []


def test_a_conversion_process_that_dies_is_a_message(gguf: Path, tmp_path: Path) -> None:
    def kill(phase: str, _: float) -> None:
        if phase == "check":
            tasks = Path("/proc/self/task").iterdir()
            for child in " ".join((task / "children").read_text() for task in tasks).split():
                os.kill(int(child), signal.SIGKILL)

    with pytest.raises(ModelSourceError, match="ended by SIGKILL"):
        prepare(gguf, tmp_path / "cache", progress=kill)
    assert list_models(tmp_path / "cache") == []


FULL_DISK = """
import sys
from pathlib import Path
from tailrace.errors import ModelSourceError
from tailrace.model import cache
from tailrace.model.source import find_model, list_models, prepare_model
cache.check_room = lambda *_: None  # the room was there when it was checked
try:
    prepare_model(find_model(sys.argv[1]), weights=None, cache_dir=Path(sys.argv[2]), progress=lambda *_: None)
except ModelSourceError as error:
    print(error.message)
print(list_models(Path(sys.argv[2])))
"""


@pytest.mark.parametrize("size_kib", [48, 200, 440])
def test_a_disk_that_fills_up_is_named_with_the_bytes_needed(gguf: Path, tmp_path: Path, size_kib: int) -> None:
    """On a real file system of that size, in a mount namespace of its own."""
    target = tmp_path / "small"
    target.mkdir()
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size={size_kib}k tmpfs {target}"
    if shutil.which("unshare") is None or subprocess.run([*unshare, mount], capture_output=True).returncode != 0:
        pytest.skip("this system gives no mount namespace to users")
    script = f'{mount} && exec "$0" -c "$1" "$2" "{target}"'
    run = subprocess.run([*unshare, script, sys.executable, FULL_DISK, str(gguf)], capture_output=True, text=True)
    lines = run.stdout.splitlines()
    assert "bytes) in" in lines[0], run.stderr
    assert str(target) in lines[0]
    assert lines[1] == "[]"


def test_no_room_is_noticed_before_anything_is_written(gguf: Path, tmp_path: Path, monkeypatch: Any) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    phases = Phases()
    with pytest.raises(ModelSourceError, match=r"bytes\) in .*model\.cache_dir"):
        prepare(gguf, tmp_path / "cache", progress=phases)
    assert phases == ["hash"]


def write_ir(directory: Path) -> Path:
    import json

    directory.mkdir()
    write_tiny_model(directory)
    prepared = {"model_type": "tiny", "hidden_size": SHAPE.hidden_size, "num_hidden_layers": SHAPE.num_layers}
    prepared |= {"num_attention_heads": SHAPE.num_heads, "vocab_size": SHAPE.vocab_size}
    prepared |= {"max_position_embeddings": SHAPE.context_tokens_max, "rope_theta": 1.0}
    (directory / "config.json").write_text(json.dumps(prepared))
    generation = {"eos_token_id": [2, 0], "temperature": 0.6, "top_k": 20, "max_new_tokens": 77}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    from tailrace.model.gguf_file import open_gguf
    from tailrace.model.gguf_tokenizer import tokenizer_json

    keys = open_gguf(write_tiny_gguf(directory.parent / "for_tokenizer.gguf")).keys
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(keys)))
    return directory


def test_an_ir_directory_is_used_in_place(tmp_path: Path) -> None:
    source = write_ir(tmp_path / "ir")
    before = sorted(os.listdir(source))
    prepared = prepare(source, tmp_path / "cache")
    manifest = prepared.manifest
    assert sorted(os.listdir(source)) == before
    assert (prepared.directory / "openvino_model.bin").resolve() == source / "openvino_model.bin"
    assert (manifest.weights_format, manifest.end_token_ids) == ("as_is", (0, 2))
    assert (manifest.sampling_defaults.temperature, manifest.sampling_defaults.top_k) == (0.6, 20)
    assert manifest.sampling_defaults.max_tokens == 77
    assert manifest.shape.num_parameters > 100_000
    assert prepare(source, tmp_path / "cache") == prepared


def test_an_ir_that_moved_or_changed_is_prepared_again(tmp_path: Path) -> None:
    source = write_ir(tmp_path / "ir")
    first = prepare(source, tmp_path / "cache")
    moved = source.rename(tmp_path / "elsewhere")
    second = prepare(moved, tmp_path / "cache")
    assert second.directory == first.directory
    assert (second.directory / "openvino_model.xml").resolve() == moved / "openvino_model.xml"
    (moved / "generation_config.json").write_text('{"eos_token_id": 0}')
    third = prepare(moved, tmp_path / "cache")
    assert third.directory != first.directory
    assert third.manifest.end_token_ids == (0,)
