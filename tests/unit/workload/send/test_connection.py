"""Connections on real sockets: when a request counts as sent, when a connection is used again, and TLS."""

# ruff: noqa: ARG002  (what an exchange is told is more than one test looks at)

import asyncio
import errno
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from scripted_server import GOOD, ListedPlan, always, plain, scripted, send, session, whole_stream

from tailrace.errors import ClientFailed
from tailrace.measure.record import Outcome
from tailrace.workload.job import Endpoint
from tailrace.workload.send.connection import Connection
from tailrace.workload.send.pool import Pool, Target, _why

Runner = Callable[[Awaitable[None]], None]


class Heard:
    """A `PooledExchange` that keeps what it is told."""

    def __init__(self) -> None:
        self.is_over = False
        self.told: list[str] = []
        self.content = b""
        self.over = asyncio.Event()
        self.was_sent = asyncio.Event()

    def connected(self, t_ns: int, connection: Connection, is_reused: bool) -> None:
        self.told.append("reused" if is_reused else "new")

    def sent(self, t_ns: int) -> None:
        self.told.append("sent")
        self.was_sent.set()

    def headers(self, t_ns: int, status: int, content_type: str) -> None:
        self.told.append(f"{status} {content_type}")

    def body(self, t_ns: int, data: bytes) -> None:
        self.content += data

    def ended(self, t_ns: int) -> None:
        self.told.append("ended")
        self.over.set()

    def lost(self, t_ns: int, message: str, had_answer: bool) -> None:
        self.told.append(f"lost {had_answer}")
        self.over.set()


async def ask(pool: Pool, request: bytes) -> Heard:
    heard = Heard()
    pool.send(request, heard)
    await heard.over.wait()
    return heard


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    runner: Runner = request.param
    return runner


def test_every_step_is_told_in_order_and_the_connection_is_used_again(run: Runner) -> None:
    async def main() -> None:
        async with scripted(always(plain(200, b"hello", "text/plain; charset=utf-8"))) as server:
            target = Target(Endpoint(base_url=server.url, model="m"))
            pool = Pool(target)
            await pool.resolve()
            first = await ask(pool, target.request("POST", "/x", b"{}"))
            second = await ask(pool, target.request("GET", "/y"))
            await pool.close()
        assert first.told == ["new", "sent", "200 text/plain", "ended"]
        assert second.told == ["reused", "sent", "200 text/plain", "ended"]
        assert first.content == b"hello"
        assert (pool.num_opened, pool.num_reused, pool.num_stale) == (1, 1, 0)

    run(main())


def test_a_request_is_sent_only_when_the_kernel_has_its_last_byte(run: Runner) -> None:
    """The server does not read: no buffer of a kernel takes 64 MiB."""

    async def main() -> None:
        may_read = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await may_read.wait()
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length" in head
            await reader.readexactly(64 << 20)
            writer.write(plain(200, b""))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        target = Target(Endpoint(base_url=url, model="m"))
        pool = Pool(target)
        heard = Heard()
        pool.send(target.request("POST", "/", b"x" * (64 << 20)), heard)
        while not heard.told:
            await asyncio.sleep(0.001)
        assert heard.told == ["new"]
        may_read.set()
        await heard.over.wait()
        assert heard.told[:2] == ["new", "sent"]
        await pool.close()
        server.close()

    run(main())


def test_a_connection_closed_while_idle_leaves_the_pool(run: Runner) -> None:
    async def main() -> None:
        async with scripted(always(plain(200, b"ok"))) as server:
            target = Target(Endpoint(base_url=server.url, model="m"))
            pool = Pool(target)
            await ask(pool, target.request("GET", "/"))
            assert len(pool._idle) == 1
            server.writers[0].close()
            while pool._idle:
                await asyncio.sleep(0.001)
            second = await ask(pool, target.request("GET", "/"))
            await pool.close()
        assert second.told[0] == "new"
        assert pool.num_stale == 0

    run(main())


def test_a_kept_connection_ends_where_the_answer_says_so(run: Runner) -> None:
    async def main() -> None:
        closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
        async with scripted(always(closing)) as server:
            target = Target(Endpoint(base_url=server.url, model="m"))
            pool = Pool(target)
            told = [(await ask(pool, target.request("GET", "/"))).told[0] for _ in range(2)]
            await pool.close()
        assert told == ["new", "new"]

    run(main())


def test_connections_that_never_stood_are_not_kept(run: Runner) -> None:
    """A service that is down is asked for as long as the run lasts."""

    async def main() -> None:
        async with scripted(always(b"")) as server:
            target = Target(Endpoint(base_url=server.url, model="m"))
        pool = Pool(target)  # Nobody listens there any more.
        heard = [await ask(pool, target.request("GET", "/")) for _ in range(3)]
        assert [each.told for each in heard] == [["lost False"]] * 3
        assert not pool._open
        await pool.close()

    run(main())


def test_a_limit_of_the_clients_own_machine_is_not_laid_to_the_service() -> None:
    text = _why(OSError(errno.EMFILE, "Too many open files"))
    assert "this client is at a limit of its own machine" in text
    assert "ulimit -n" in text
    assert _why(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) == "[Errno 111] refused"


def test_an_unknown_name_is_said() -> None:
    async def main() -> None:
        await Pool(Target(Endpoint(base_url="http://no-such-host.invalid:1", model="m"))).resolve()

    with pytest.raises(ClientFailed, match=r"no-such-host\.invalid is not known"):
        asyncio.run(main())


def test_the_path_of_an_address_comes_before_the_route() -> None:
    target = Target(Endpoint(base_url="https://h/proxy", model="m", api_key="k"))
    assert (target.host, target.port, target.is_tls) == ("h", 443, True)
    assert target.request("GET", "/v1/models").startswith(b"GET /proxy/v1/models HTTP/1.1\r\nHost: h\r\n")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_is_spoken_to_a_trusted_service_and_refused_to_another(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += [
        "-keyout",
        key,
        "-out",
        certificate,
        "-days",
        "2",
        "-subj",
        "/CN=x",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    subprocess.run(command, check=True, capture_output=True)

    async def main() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b'"answers": []}')
            writer.write(whole_stream(GOOD))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        refused = (await send(ListedPlan([session("a")]), url)).only
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        trusted = (await send(ListedPlan([session("a")]), url)).only
        monkeypatch.delenv("SSL_CERT_FILE")
        server.close()
        assert (refused.outcome, trusted.outcome) == (Outcome.UNREACHABLE, Outcome.OK)
        assert "certificate" in refused.message

    run(main())
