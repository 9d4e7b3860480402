"""The service under test, before the run: is it there, does it serve the model, how does it count a prompt?

Every way in which that fails is a ClientFailed whose line says what came instead.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec

from tailrace.errors import ClientFailed
from tailrace.wire.chunks import Models, Usage, error_text, printable
from tailrace.workload.job import Endpoint
from tailrace.workload.send.connection import Connection
from tailrace.workload.send.pool import Pool, Target

ANSWER_BYTES_MAX = 16 * 1024 * 1024
_LIST_S = 30.0
_PROBE_S = 300.0
"""A probe may wait behind other people's requests."""
_VERSION_CHARS_MAX = 100

_T = TypeVar("_T")


class Connected(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: Endpoint
    server: dict[str, Any]
    """For `RunInfo.server`: the model's card as listed, and the version where the service tells one."""


def base_url(text: str) -> str:
    """`host:port`, `http://host` or `http://host/v1` -> the address without `/v1` and without a slash at its end.

    Raises ClientFailed for anything that is not an HTTP address.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ClientFailed(f"{text} is not an HTTP address; write http://host:port")
    if "@" in parts.netloc:  # Addresses are written into reports.
        raise ClientFailed("the address carries a user name or password; give the service's key as an API key instead")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


async def connect(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    api: str = "chat",
    headers: Mapping[str, str] | None = None,
) -> Connected:
    """Asks for the list of models and for the version.

    `model` None: the first one listed. Raises ClientFailed when the address does not answer, refuses the key or lacks
    the model.
    """
    base = base_url(url)
    endpoint = Endpoint(base_url=base, model=model or "", api=api, api_key=api_key, headers=dict(headers or {}))
    listed = await _get_models(endpoint)
    card = _pick(listed, model, base)
    server: dict[str, Any] = {"model": card}
    version = await _version(endpoint)
    if version is not None:
        server["version"] = version
    return Connected(endpoint=msgspec.structs.replace(endpoint, model=str(card["id"])), server=server)


async def count_prompt_tokens(endpoint: Endpoint, text: str) -> int | None:
    """Prompt tokens that the service counts for a text, by a request for one token of output.

    None when its answer carries no count. Raises ClientFailed.
    """
    asked: dict[str, Any] = {"model": endpoint.model, "max_tokens": 1, "temperature": 0.0, "stream": False}
    if endpoint.api == "chat":
        path = "/v1/chat/completions"
        asked["messages"] = [{"role": "user", "content": text}]
    else:
        path = "/v1/completions"
        asked["prompt"] = text
    content = await ask(endpoint, "POST", path, msgspec.json.encode(asked), _PROBE_S)
    usage = _decode(content, _Answer, endpoint.base_url + path).usage
    return None if usage is None else usage.prompt_tokens


class _Answer(msgspec.Struct):
    usage: Usage | None = None


class _Version(msgspec.Struct):
    version: str


async def _get_models(endpoint: Endpoint) -> list[dict[str, Any]]:
    where = f"{endpoint.base_url}/v1/models"
    content = await ask(endpoint, "GET", "/v1/models", b"", _LIST_S)
    _decode(content, Models, where)  # Its form; the cards are then kept whole.
    cards: list[dict[str, Any]] = msgspec.json.decode(content)["data"]
    return cards


async def _version(endpoint: Endpoint) -> str | None:
    try:
        content = await ask(endpoint, "GET", "/version", b"", _LIST_S)
        return printable(_decode(content, _Version, "/version").version, _VERSION_CHARS_MAX)
    except ClientFailed:
        return None  # Few services have it, and nothing depends on it.


def _pick(cards: list[dict[str, Any]], wanted: str | None, base: str) -> dict[str, Any]:
    for card in cards:
        if wanted is None or card["id"] == wanted:
            return card
    names = printable(", ".join(str(card["id"]) for card in cards)) or "none"
    raise ClientFailed(f"{base} does not serve {wanted or 'any model'}; it serves: {names}")


async def ask(endpoint: Endpoint, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
    """The body of an answer with status 200, a stream's too, read to its end. Every failure becomes ClientFailed."""
    where = endpoint.base_url + path
    target = Target(endpoint)
    pool = Pool(target)
    whole = _WholeAnswer()
    try:
        async with asyncio.timeout(timeout_s):
            await pool.resolve()
            pool.send(target.request(method, path, body), whole)
            await whole.over.wait()
    except TimeoutError as error:
        raise ClientFailed(f"{where} did not answer in time; is it overloaded?") from error
    finally:
        whole.is_over = True
        await pool.close()
    if whole.problem:
        hint = "" if whole.is_connected else "; is a server running there?"
        raise ClientFailed(f"{where} cannot be used: {whole.problem}{hint}")
    if whole.status != 200:
        hint = "; does the service want an API key?" if whole.status == 401 and endpoint.api_key is None else ""
        raise ClientFailed(f"{where} answered {whole.status}: {error_text(bytes(whole.content))}{hint}")
    if whole.content_type == "text/html":
        raise ClientFailed(f"{where} did not answer as an OpenAI-compatible service: it sent a web page")
    return bytes(whole.content)


def _decode(content: bytes, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClientFailed(f"{where} did not answer as an OpenAI-compatible service: {error}") from error


class _WholeAnswer:
    """A `PooledExchange` that keeps the body."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.is_over = False
        self.is_connected = False
        self.status = 0
        self.content_type = ""
        self.content = bytearray()
        self.problem = ""

    def connected(self, t_ns: int, connection: Connection, is_reused: bool) -> None:  # noqa: ARG002
        self.is_connected = True

    def sent(self, t_ns: int) -> None:
        pass

    def headers(self, t_ns: int, status: int, content_type: str) -> None:  # noqa: ARG002
        self.status, self.content_type = status, content_type

    def body(self, t_ns: int, data: bytes) -> None:
        self.content += data
        if len(self.content) > ANSWER_BYTES_MAX:
            self.lost(t_ns, f"it answered with more than {ANSWER_BYTES_MAX} bytes", True)

    def ended(self, t_ns: int) -> None:  # noqa: ARG002
        self.over.set()

    def lost(self, t_ns: int, message: str, had_answer: bool) -> None:  # noqa: ARG002
        self.problem = self.problem or message
        self.over.set()
