"""`tailrace coldstart`: from just before exec to the first token of a server, by phase, repeated.

In: a command and where it will listen. Out: the instants of each launch and their spread. Every launch is a new
process on a page cache that earlier reads have warmed; the port must be free before it and is free after it. Never
mixed with warm numbers: nothing here is a `RequestRecord`.
"""

import asyncio
import socket
import statistics
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from tailrace.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from tailrace.errors import ClientFailed, ConfigError, StartFailed, TailraceError
from tailrace.wire.chunks import error_text
from tailrace.workload.cold.launched import Launched
from tailrace.workload.cold.short_call import CallFailed, FirstToken, first_model, get, stream_first_token
from tailrace.workload.job import Endpoint
from tailrace.workload.send.pool import Target

_T = TypeVar("_T")

POLL_NS = 10 * NS_PER_MS
"""Quantum of `port open` and `ready`. A refused connect costs some 0.1 ms of processor time: 1 % of one core."""
PROBE_S_MAX = 5.0
"""A server that holds a probe until it is ready answers it at once then; one that lost it gets another."""
PORT_FIELD = "{port}"
PORT_FREE_S_MAX = 30.0
_MODELS_PATH = "/v1/models"


class ColdstartJob(msgspec.Struct, frozen=True, kw_only=True):
    command: tuple[str, ...]
    """`{port}` in it becomes the port."""
    host: str = "127.0.0.1"
    port: int | None = None
    """None: a free one for each launch, put in the place of `{port}`."""
    base_path: str = ""
    repeats: int = 3
    timeout_s: float = 300.0
    """For one launch, exec to the end of the first answer."""
    grace_s: float = 10.0
    """SIGTERM to SIGKILL."""
    ready_path: str = _MODELS_PATH
    api: str = "chat"
    model: str | None = None
    """None: the first that the server lists."""
    prompt: str = "Say hello."
    max_tokens: int = 1
    api_key: str | None = None


class Coldstart(msgspec.Struct, frozen=True, kw_only=True):
    """One launch. Milliseconds since just before exec."""

    port_open_ms: float
    """A TCP connect succeeded."""
    ready_ms: float
    """The ready path answered 200."""
    first_token_ms: float
    answered_ms: float
    """The first request's whole answer."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    median_ms: float
    min_ms: float
    max_ms: float


class ColdstartResult(msgspec.Struct, frozen=True, kw_only=True):
    command: tuple[str, ...]
    model: str
    quantum_ms: float
    """Of `port_open` and `ready`, which are found by polling."""
    launches: list[Coldstart]
    since_exec: dict[str, Spread]
    """`port_open`, `ready`, `first_token`, `answered`."""
    phases: dict[str, Spread]
    """`exec_to_port`, `port_to_ready`, `ready_to_first_token`, `first_token_to_answered`: each launch's own, so the
    medians need not add up."""


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """How the caller hears of progress."""

    on_start: Callable[[int], None]
    on_launch: Callable[[int, Coldstart], None]
    on_log: Callable[[str], None]
    """The command's last output, when a launch fails."""


async def measure_coldstart(job: ColdstartJob, watch: Watch) -> ColdstartResult:
    """Raises ConfigError (the job), StartFailed (the command) or ClientFailed (its answers); nothing is left running in
    any case."""
    await _check(job)
    launches: list[Coldstart] = []
    model = ""
    for number in range(job.repeats):
        watch.on_start(number + 1)
        # The port of an earlier launch may take a while to be free; before the first one it is somebody else's.
        launch, model = await _launch(job, watch, PORT_FREE_S_MAX if number else 0.0)
        watch.on_launch(number + 1, launch)
        launches.append(launch)
    return ColdstartResult(
        command=job.command,
        model=model,
        quantum_ms=POLL_NS / NS_PER_MS,
        launches=launches,
        since_exec={name: spread([getattr(each, f"{name}_ms") for each in launches]) for name in _INSTANTS},
        phases={name: spread([after(each) - before(each) for each in launches]) for name, before, after in _PHASES},
    )


_INSTANTS = ("port_open", "ready", "first_token", "answered")
_Instant = Callable[[Coldstart], float]
_PHASES: tuple[tuple[str, _Instant, _Instant], ...] = (
    ("exec_to_port", lambda _: 0.0, lambda each: each.port_open_ms),
    ("port_to_ready", lambda each: each.port_open_ms, lambda each: each.ready_ms),
    ("ready_to_first_token", lambda each: each.ready_ms, lambda each: each.first_token_ms),
    ("first_token_to_answered", lambda each: each.first_token_ms, lambda each: each.answered_ms),
)


def spread(values: Sequence[float]) -> Spread:
    return Spread(median_ms=statistics.median(values), min_ms=min(values), max_ms=max(values))


def parse_url(url: str) -> tuple[str, int, str]:
    """Host, port and path before `/v1`. Raises ConfigError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        raise ConfigError(f"{url} is not an HTTP address; write http://host:port") from None
    if "@" in parts.netloc:
        raise ConfigError("the address holds a user or password; give it as --api-key")
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment or " " in parts.path:
        raise ConfigError(f"{url} is not a plain HTTP address; write http://host:port")
    return parts.hostname, port or 80, parts.path.rstrip("/").removesuffix("/v1").rstrip("/")


async def _check(job: ColdstartJob) -> None:
    """Raises ConfigError for what no launch could make good."""
    if job.port is None and not any(PORT_FIELD in part for part in job.command):
        raise ConfigError("where will the command listen? give --port or --url, or write {port} in the command")
    if not (job.ready_path.isascii() and job.ready_path.isprintable()) or " " in job.ready_path:
        raise ConfigError(f"the ready path {job.ready_path!r} has a character that an address cannot carry")
    try:
        _target(job, job.port or 1)
        await asyncio.get_running_loop().getaddrinfo(job.host, job.port or 1, type=socket.SOCK_STREAM)
    except ClientFailed as error:
        raise ConfigError(error.message) from error
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the name {job.host} is not known: {error}; is --url right?") from error


def _target(job: ColdstartJob, port: int) -> Target:
    """Raises ClientFailed for a key that no header can carry."""
    base_url = f"http://{f'[{job.host}]' if ':' in job.host else job.host}:{port}{job.base_path}"
    return Target(Endpoint(base_url=base_url, model="", api_key=job.api_key))


async def _launch(job: ColdstartJob, watch: Watch, port_free_s_max: float) -> tuple[Coldstart, str]:
    port = job.port if job.port is not None else _free_port(job.host)
    await _wait_port_free(job.host, port, port_free_s_max)
    command = [part.replace(PORT_FIELD, str(port)) for part in job.command]
    started_ns = monotonic_ns()
    async with Launched(command, grace_s=job.grace_s) as launched:
        run = _Run(job, port, launched, started_ns)
        try:
            return await run.measure()
        except TailraceError:
            watch.on_log(await launched.output())
            raise


class _Run:
    """One launch, from exec to its first answer."""

    def __init__(self, job: ColdstartJob, port: int, launched: Launched, started_ns: int) -> None:
        self._job = job
        self._port = port
        self._launched = launched
        self._started_ns = started_ns
        self._deadline_ns = started_ns + round(job.timeout_s * NS_PER_S)
        self._last_refusal = ""
        self._target = _target(job, port)

    async def measure(self) -> tuple[Coldstart, str]:
        port_open_ns = await self._poll(self._connects, f"opened port {self._port}")
        ready_ns = await self._poll(self._is_ready, f"answered GET {self._job.ready_path} with status 200")
        self._last_refusal = ""
        first, model = await self._until_end(self._ask(), "answered its first request")
        return Coldstart(
            port_open_ms=self._ms(port_open_ns),
            ready_ms=self._ms(ready_ns),
            first_token_ms=self._ms(first.first_token_ns),
            answered_ms=self._ms(first.answered_ns),
        ), model

    async def _poll(self, probe: Callable[[], Awaitable[bool]], what: str) -> int:
        return await self._until_end(self._poll_forever(probe), what)

    async def _poll_forever(self, probe: Callable[[], Awaitable[bool]]) -> int:
        due_ns = monotonic_ns()
        while not await probe():
            # From the instant it was due, but never in the past: a slow probe must not cause a burst.
            due_ns = max(due_ns + POLL_NS, monotonic_ns())
            await asyncio.sleep((due_ns - monotonic_ns()) / NS_PER_S)
        return monotonic_ns()

    async def _connects(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(self._job.host, self._port)
        except OSError:
            return False
        writer.close()
        return True

    async def _is_ready(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_S_MAX):
                answer = await get(self._target, self._job.ready_path)
        except TimeoutError:
            self._last_refusal = f"a probe had no answer within {PROBE_S_MAX:g} s"
            return False
        except CallFailed as error:
            self._last_refusal = str(error)
            return False
        self._last_refusal = f"it answered {answer.status}: {error_text(answer.body)}"
        return answer.status == 200

    async def _ask(self) -> tuple[FirstToken, str]:
        """The model's name is asked for only where the caller gave none: it costs a round trip."""
        try:
            model = self._job.model or await first_model(self._target)
            path, body = first_request(self._job, model)
            return await stream_first_token(self._target, path, body), model
        except CallFailed as error:
            raise ClientFailed(f"the server is ready, but its first request failed: {error}") from error

    async def _until_end(self, work: Coroutine[Any, Any, _T], what: str) -> _T:
        """Of result, end of the command and deadline whichever comes first. Raises StartFailed for the last two."""
        task = asyncio.create_task(work)
        end = asyncio.create_task(self._launched.ended.wait())
        left_s = (self._deadline_ns - monotonic_ns()) / NS_PER_S
        try:
            await asyncio.wait([task, end], timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if end.done():
                raise StartFailed(f"the command ended with {self._launched.exit_text} before it {what}")
            raise StartFailed(
                f"within {self._job.timeout_s:g} s the command never {what}"
                + (f" (last: {self._last_refusal})" if self._last_refusal else "")
                + "; --timeout gives it longer"
            )
        finally:
            task.cancel()
            end.cancel()
            await asyncio.gather(task, end, return_exceptions=True)

    def _ms(self, at_ns: int) -> float:
        return round((at_ns - self._started_ns) / NS_PER_MS, 3)


def first_request(job: ColdstartJob, model: str) -> tuple[str, bytes]:
    """Path and body of the streamed request."""
    common = {"model": model, "max_tokens": job.max_tokens, "temperature": 0, "stream": True}
    if job.api == "chat":
        body = common | {"messages": [{"role": "user", "content": job.prompt}]}
        return "/v1/chat/completions", msgspec.json.encode(body)
    return "/v1/completions", msgspec.json.encode(common | {"prompt": job.prompt})


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


async def _wait_port_free(host: str, port: int, s_max: float) -> None:
    """Nobody else may answer in the command's place. Raises StartFailed."""
    until_ns = monotonic_ns() + round(s_max * NS_PER_S)
    while await _is_taken(host, port):
        if monotonic_ns() >= until_ns:
            raise StartFailed(f"port {port} of {host} is taken by another process; stop it or choose another port")
        await asyncio.sleep(POLL_NS / NS_PER_S)


async def _is_taken(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PROBE_S_MAX)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
