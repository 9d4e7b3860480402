"""Inference without a server: the real service and engine child, with the modeled executor."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from live_worker import CONTEXT_MAX, write_text_model

from tailrace.cli.backend import AskOptions, Turn
from tailrace.cli.compose import Composition
from tailrace.cli.local import LocalBackend
from tailrace.errors import ContextExceeded, InvalidRequest
from tailrace.model.text import TextModel
from tailrace.request import Message
from tailrace.worker.channel import EngineSpec, ModeledSpec
from tailrace.worker.engine_client import EngineClient, EngineState
from tailrace.worker.service import ServedModel, Service
from tailrace.worker.settings import WorkerSettings

T = TypeVar("T")
ASKED = [Message(role="system", content="be brief"), Message(role="user", content="hello there")]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(write_text_model(tmp_path_factory.mktemp("text")))


def use(text_model: TextModel, work: Callable[[LocalBackend], Awaitable[T]]) -> tuple[T, EngineState]:
    """Starts an engine, does the work, closes; the state of the engine afterwards."""

    async def run() -> tuple[T, EngineState]:
        executor = ModeledSpec(num_blocks=64, vocab_size=text_model.vocab_size, context_tokens_max=CONTEXT_MAX)
        engine = EngineClient(EngineSpec(executor=executor))
        ready = await engine.start()
        model = ServedModel(names=("modeled",), source="m", content_hash="c0ffee", created=1)
        service = Service(engine, text_model, model, WorkerSettings())
        backend = await LocalBackend.of(Composition(engine, service, ready))
        try:
            result = await work(backend)
        finally:
            await backend.close()
        return result, engine.state

    return asyncio.run(run())


def test_a_turn_streams_its_text_and_counts_its_tokens(text_model: TextModel) -> None:
    shown: list[str] = []

    async def work(backend: LocalBackend) -> Turn:
        return await backend.ask(ASKED, AskOptions(max_tokens=12, seed=1), shown.append)

    turn, state = use(text_model, work)
    assert "".join(shown) == turn.text
    assert (turn.finish_reason, turn.num_output_tokens) == ("length", 12)
    assert turn.num_prompt_tokens == len(text_model.encode_chat(ASKED))
    assert turn.ttft_ns is not None
    assert turn.ttft_ns <= turn.duration_ns
    assert state is EngineState.CLOSED


def test_the_same_question_is_answered_alike_and_from_the_prefix_cache(text_model: TextModel) -> None:
    async def work(backend: LocalBackend) -> list[Turn]:
        prompt = "the tail of the latency distribution " * 8
        options = AskOptions(max_tokens=8, temperature=0.0)
        return [await backend.complete(prompt, options, lambda _: None) for _ in range(2)]

    (first, second), _ = use(text_model, work)
    assert first.text == second.text
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens is not None
    assert second.num_cached_tokens >= 32


def test_tokens_are_counted_by_message(text_model: TextModel) -> None:
    async def work(backend: LocalBackend) -> list[int] | None:
        return await backend.count(ASKED)

    counts, _ = use(text_model, work)
    assert counts == text_model.count_chat(ASKED)


@pytest.mark.parametrize(
    ("content", "options", "error"),
    [
        ("x" * 4 * CONTEXT_MAX, AskOptions(), ContextExceeded),
        ("x", AskOptions(temperature=9.0), InvalidRequest),
    ],
)
def test_what_http_refuses_is_refused_here_too(
    text_model: TextModel, content: str, options: AskOptions, error: type[Exception]
) -> None:
    async def work(backend: LocalBackend) -> None:
        with pytest.raises(error):
            await backend.ask([Message(role="user", content=content)], options, lambda _: None)

    _, state = use(text_model, work)
    assert state is EngineState.CLOSED
