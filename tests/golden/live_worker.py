"""A whole worker for tests: real HTTP on loopback, the real app process parts, a real engine process without a model.

The engine's executor is the modeled one, so the text is nonsense but depends on every KV block; a small byte-level
tokenizer stands in for a model's.
"""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tailrace.engine.config import EngineConfig
from tailrace.model.text import TextModel
from tailrace.worker.app import create_app
from tailrace.worker.channel import EngineSpec, ModeledFaults, ModeledSpec
from tailrace.worker.engine_client import EngineClient
from tailrace.worker.restart import RestartPolicy
from tailrace.worker.serve import Phase, ServerEnd, StopSignals, bind, run_server
from tailrace.worker.service import ServedModel, Service
from tailrace.worker.settings import WorkerSettings

WAIT_S = 60
"""Bound that only a hang reaches."""
CONTEXT_MAX = 512
_CORPUS = (
    "The tail of the latency distribution carries the water away behind the turbine, and the stream goes on and on. "
    "A queue that grows is a promise that breaks; the gateway owns the queue, the engine owns the step. "
)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_text_model(folder: Path) -> Path:
    """A byte-level BPE of some four hundred tokens with a chat template. The last token is the end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, special=True) for text in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


class LiveWorker:
    """Runs in a thread with an event loop of its own; `url` is where it answers."""

    def __init__(
        self, text_model: TextModel, settings: WorkerSettings, spec: EngineSpec, send_buffer_bytes: int | None
    ) -> None:
        self.text_model = text_model
        self.service: Service
        self.engine: EngineClient
        self.url = ""
        self.prints = False
        self.end: ServerEnd | None = None
        self.phases: list[Phase] = []
        self._settings = settings
        self._spec = spec
        self._send_buffer_bytes = send_buffer_bytes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: StopSignals | None = None
        self._listening = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="live-worker")

    def start(self) -> None:
        self._thread.start()
        assert self._listening.wait(WAIT_S), "the worker did not start"
        if self._failure is not None:
            raise self._failure

    def press_stop(self) -> None:
        """What one SIGTERM does."""
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.press)

    def join(self) -> ServerEnd | None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the worker did not stop"
        return self.end

    def stop(self) -> None:
        if self._thread.is_alive() and self._stop is not None:
            self.press_stop()
            self.press_stop()
        self.join()

    def run_here(self) -> ServerEnd | None:
        """In the calling thread; in the main one the real signals count."""
        self._run()
        return self.end

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as failure:
                self._failure = failure
                self._listening.set()
                raise

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = StopSignals()
        listener = bind(self._settings)
        if self._send_buffer_bytes is not None:
            # Accepted sockets inherit it, and the kernel stops growing it.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
        self.engine = EngineClient(self._spec, policy=RestartPolicy(backoff_ms_first=1))
        model = ServedModel(names=("modeled", "alias"), source="modeled.gguf", content_hash="c0ffee" * 10, created=1)
        try:
            await self.engine.start()
            self.service = Service(self.engine, self.text_model, model, self._settings)
            app = create_app(self.service, self._settings)
            self.end = await run_server(app, self.service, listener, on_phase=self._on_phase, stop=self._stop)
        finally:
            listener.close()
            await self.engine.close()

    def _on_phase(self, phase: Phase, address: str) -> None:
        self.url = address
        if self.prints:
            print(phase, address, flush=True)
        self.phases.append(phase)
        self._listening.set()


@contextmanager
def live_worker(
    text_model: TextModel,
    *,
    settings: WorkerSettings | None = None,
    engine: EngineConfig | None = None,
    num_blocks: int = 256,
    step_fixed_ms: float = 1.0,
    end_ratio: float = 0.0,
    faults: ModeledFaults | None = None,
    send_buffer_bytes: int | None = None,
) -> Iterator[LiveWorker]:
    worker = make_worker(
        text_model, settings, engine, num_blocks, step_fixed_ms, end_ratio, faults or ModeledFaults(), send_buffer_bytes
    )
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def make_worker(
    text_model: TextModel,
    settings: WorkerSettings | None,
    engine: EngineConfig | None,
    num_blocks: int,
    step_fixed_ms: float,
    end_ratio: float,
    faults: ModeledFaults,
    send_buffer_bytes: int | None,
) -> LiveWorker:
    executor = ModeledSpec(
        num_blocks=num_blocks,
        # Without the end token: an answer has the length asked for, whatever its seed.
        vocab_size=text_model.vocab_size - 1,
        context_tokens_max=CONTEXT_MAX,
        step_fixed_ms=step_fixed_ms,
        end_ratio=end_ratio,
        faults=faults,
    )
    spec = EngineSpec(
        executor=executor,
        engine=engine or EngineConfig(),
        end_token_ids=tuple(sorted(text_model.end_token_ids)),
        step_timeout_ms_min=60_000,
    )
    return LiveWorker(text_model, settings or WorkerSettings(port=0), spec, send_buffer_bytes)


def main(folder: str) -> None:
    """`python live_worker.py FOLDER`: a worker as a process, until a signal."""
    text_model = TextModel.load(Path(folder))
    worker = make_worker(text_model, None, None, 256, 20.0, 0.0, ModeledFaults(), None)
    worker.prints = True
    print(worker.run_here(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
