"""Before a run: the service is asked what it serves, and every way in which that fails is one readable line."""

import asyncio
import json

import pytest
from scripted_server import Answer, always, plain, scripted

from tailrace.errors import ClientFailed
from tailrace.workload.job import Endpoint
from tailrace.workload.run.endpoint import Connected, base_url, connect, count_prompt_tokens

LISTED = json.dumps({"data": [{"id": "first", "max_model_len": 64}, {"id": "second"}]}).encode()


def connected(answer: Answer, **options: str) -> Connected:
    async def run() -> Connected:
        async with scripted(answer) as server:
            return await connect(server.url, **options)  # type: ignore[arg-type]

    return asyncio.run(run())


def listing_then(second: bytes) -> Answer:
    async def answer(number: int, _: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(200, LISTED) if number == 0 else second)

    return answer


def test_the_first_model_is_taken_with_its_card_and_the_version() -> None:
    found = connected(listing_then(plain(200, b'{"version":"0.1"}')))
    assert found.endpoint.model == "first"
    assert found.server == {"model": {"id": "first", "max_model_len": 64}, "version": "0.1"}


def test_a_model_is_taken_by_name_and_no_version_is_no_fault() -> None:
    found = connected(listing_then(plain(404, b"")), model="second")
    assert (found.endpoint.model, found.server) == ("second", {"model": {"id": "second"}})


BAD = {
    "a wrong key": (plain(401, b'{"error":{"message":"bad key"}}'), "answered 401: bad key; does the service want"),
    "a web page": (plain(200, b"<html>", "text/html"), "a web page"),
    "no list": (plain(200, b'{"models":[]}'), "did not answer as an OpenAI-compatible service"),
    "no JSON": (plain(200, b"hello"), "did not answer as an OpenAI-compatible service"),
    "an empty list": (plain(200, b'{"data":[]}'), "does not serve any model; it serves: none"),
    "not HTTP": (b"220 ready\r\n", "not an HTTP answer"),
    "a broken service": (plain(500, b""), "answered 500: no message"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_bad_answer_is_one_readable_line(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(ClientFailed) as caught:
        connected(always(data))
    assert message in caught.value.message
    assert caught.value.message.isprintable()


def test_a_model_that_is_not_served_is_named_beside_those_that_are() -> None:
    with pytest.raises(ClientFailed, match="does not serve third; it serves: first, second"):
        connected(listing_then(b""), model="third")


def test_an_address_where_nobody_listens_is_said_so() -> None:
    async def run() -> None:
        async with scripted(always(b"")) as server:
            url = server.url
        await connect(url)

    with pytest.raises(ClientFailed, match="cannot be used"):
        asyncio.run(run())


@pytest.mark.parametrize(("api", "path", "field"), [("chat", "/v1/chat/completions", "messages"),
                                                    ("completions", "/v1/completions", "prompt")])  # fmt: skip
def test_a_probe_asks_for_one_token_and_reads_the_count_of_the_prompt(api: str, path: str, field: str) -> None:
    async def run() -> tuple[int | None, bytes, bytes]:
        async with scripted(always(plain(200, b'{"usage":{"prompt_tokens":12}}'))) as server:
            count = await count_prompt_tokens(Endpoint(base_url=server.url, model="m", api=api), "some words")
            return count, server.heads[0], server.bodies[0]

    count, head, body = asyncio.run(run())
    assert count == 12
    assert head.startswith(b"POST " + path.encode())
    asked = json.loads(body)
    assert (asked["max_tokens"], asked["stream"]) == (1, False)
    assert "some words" in json.dumps(asked[field])


def test_an_answer_without_usage_has_no_count() -> None:
    async def run() -> int | None:
        async with scripted(always(plain(200, b"{}"))) as server:
            return await count_prompt_tokens(Endpoint(base_url=server.url, model="m"), "x")

    assert asyncio.run(run()) is None


def test_the_key_goes_with_every_request_and_odd_headers_are_refused() -> None:
    async def run() -> list[bytes]:
        async with scripted(listing_then(plain(404, b""))) as server:
            await connect(server.url, api_key="secret", headers={"X-Tenant": "a"})
            return server.heads

    heads = asyncio.run(run())
    assert len(heads) == 2
    assert all(b"Authorization: Bearer secret\r\n" in head and b"X-Tenant: a\r\n" in head for head in heads)
    for headers in ({"X-A": "b\r\nX-C: d"}, {"X A": "b"}, {"Content-Length": "3"}):
        with pytest.raises(ClientFailed, match="header"):
            asyncio.run(connect("http://127.0.0.1:9", headers=headers))


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/proxy/v1", "https://h/proxy"),
        ("h:1", "http://h:1"),
    ],
)
def test_an_address_is_taken_with_and_without_v1(text: str, base: str) -> None:
    assert base_url(text) == base


@pytest.mark.parametrize("text", ["ftp://h", "http://", "http:///v1", "http://[::1", "http://user:word@h"])
def test_what_is_no_http_address_is_refused(text: str) -> None:
    with pytest.raises(ClientFailed):
        base_url(text)
