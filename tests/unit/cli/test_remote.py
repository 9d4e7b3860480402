"""The client side against servers that answer badly; the good ones are in tests/e2e."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from tailrace.cli.backend import AskOptions, Turn
from tailrace.cli.remote import RemoteBackend
from tailrace.errors import ClientFailed
from tailrace.request import Message

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ASKED = [Message(role="user", content="hello")]


async def list_models(_: web.Request) -> web.StreamResponse:
    return web.json_response({"data": [{"id": "first", "max_model_len": 64}, {"id": "second"}]})


def streaming(*parts: bytes) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    return handler


def answering(status: int, body: bytes) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body)

    return handler


NOT_FOUND = answering(404, b"")


def ask(
    chat: Handler = NOT_FOUND, *, models: Handler = list_models, model: str | None = None
) -> tuple[Turn, list[str], RemoteBackend]:
    """One turn against a server on a free local port."""

    async def turn() -> tuple[Turn, list[str], RemoteBackend]:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            _, port = runner.addresses[0][:2]
            backend = await RemoteBackend.connect(f"http://127.0.0.1:{port}/v1/", model=model, api_key=None)
            shown: list[str] = []
            try:
                return await backend.ask(ASKED, AskOptions(), shown.append), shown, backend
            finally:
                await backend.close()
        finally:
            await runner.cleanup()

    return asyncio.run(turn())


CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{"content":"lo"},"finish_reason":"stop"}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}'
)


def test_a_stream_becomes_text_as_it_comes_and_a_turn_at_its_end() -> None:
    turn, shown, backend = ask(streaming(CHUNK[:20], CHUNK[20:] + LAST, USAGE + b"\n\ndata: [DONE]\n\n"))
    assert shown == ["Hel", "lo"]
    assert (turn.text, turn.finish_reason) == ("Hello", "stop")
    assert (turn.num_prompt_tokens, turn.num_cached_tokens, turn.num_output_tokens) == (9, 4, 2)
    assert turn.ttft_ns is not None
    assert (backend.name, backend.context_tokens_max) == ("first", 64)


def test_usage_may_be_missing() -> None:
    turn, _, _ = ask(streaming(LAST, b"data: [DONE]\n\n"), model="second")
    assert (turn.text, turn.num_output_tokens, turn.tokens_per_s) == ("lo", None, None)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (streaming(CHUNK), "cut before its end"),
        (streaming(b'data: {"error":{"message":"engine died"}}\n\n'), "engine died"),
        (streaming(b"data: {nonsense\n\n"), "OpenAI-compatible"),
        (streaming(b'data: {"choices":5}\n\n'), "OpenAI-compatible"),
        (answering(429, b'{"error":{"message":"too busy"}}'), "429: too busy"),
        (answering(500, b"\xff\xfe"), "answered 500"),
        (answering(400, b'["odd"]'), "answered 400"),
    ],
)
def test_a_bad_answer_is_a_client_failure_that_says_what_came(handler: Handler, message: str) -> None:
    with pytest.raises(ClientFailed, match=message):
        ask(handler)


def test_a_model_that_is_not_served_is_refused_with_the_names_of_those_that_are() -> None:
    with pytest.raises(ClientFailed, match="first, second"):
        ask(model="third")


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"data":[]}', b'{"data":[{}]}'])
def test_an_address_that_is_no_such_service_is_refused(body: bytes) -> None:
    with pytest.raises(ClientFailed):
        ask(models=answering(200, body))


def test_an_address_where_nobody_listens_is_a_client_failure() -> None:
    async def connect() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        await RemoteBackend.connect(f"http://127.0.0.1:{port}", model=None, api_key=None)

    with pytest.raises(ClientFailed, match="cannot be used"):
        asyncio.run(connect())
