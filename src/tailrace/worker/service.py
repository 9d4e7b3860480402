"""Hop 8, the shell: accepts requests, turns text into tokens, hands them to the engine, counts how they end.

In: checked `Request`s from the routes. Out: `Call`s to read. Every call ends exactly once with a label. Never parses or
writes HTTP, never decides about scheduling.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import msgspec

from tailrace import __version__
from tailrace.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from tailrace.errors import (
    ERROR_TABLE,
    Cancelled,
    ContextExceeded,
    Draining,
    InvalidRequest,
    NotReady,
    Overloaded,
    TailraceError,
)
from tailrace.model.text import TextModel
from tailrace.request import (
    ChatPrompt,
    Prompt,
    Request,
    RequestId,
    SamplingDefaults,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from tailrace.wire.openai import RequestContext
from tailrace.wire.responses import AnswerHead
from tailrace.worker.call import Call
from tailrace.worker.channel import Submit
from tailrace.worker.engine_client import EngineClient, EngineState
from tailrace.worker.metrics import LABEL_INTERNAL, LABEL_OK, WorkerMetrics
from tailrace.worker.settings import WorkerSettings

T = TypeVar("T")
INLINE_CHARS_MAX = 8_192
"""Longer text is tokenised in a thread: a slow core does some 2 million characters a second, so this is about 4 ms."""
_MESSAGE_CHARS = 100
"""What the template's own work on one message costs, as text: 4,096 empty messages take 0.2 s."""
LOGPROBS_MAX = 1_000_000
"""Log-probabilities that one request may ask for in all: each is some 200 bytes until it is sent."""
_TICK_S = 0.25


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The one model of this worker, as callers see it."""

    names: tuple[str, ...]
    """The first is the one shown; the others are accepted too."""
    source: str
    content_hash: str
    created: int
    """Unix time in seconds."""
    defaults: SamplingDefaults = SamplingDefaults()


class Service:
    """Use from one event loop. `running()` must be entered while requests are served."""

    def __init__(
        self, engine: EngineClient, text_model: TextModel, model: ServedModel, settings: WorkerSettings
    ) -> None:
        self.engine = engine
        self.text_model = text_model
        self.model = model
        self.settings = settings
        self.metrics = WorkerMetrics(model.names[0])
        self._calls: set[Call] = set()
        self._num_slots = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._num_seeds = 0
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")
        engine.on_step(lambda report: self.metrics.on_step(report, monotonic_ns(), engine.restarts_total))

    # State

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def num_open(self) -> int:
        """Requests that hold a slot now."""
        return self._num_slots

    @property
    def is_ready(self) -> bool:
        return self.engine.state is EngineState.READY and not self._draining

    @property
    def context_tokens_max(self) -> int | None:
        """None until the engine was ready once."""
        ready = self.engine.ready
        return None if ready is None else ready.context_tokens_max

    def check_ready(self) -> None:
        """Raises Draining or NotReady."""
        if self._draining:
            raise Draining("this service is shutting down; send the request to another replica")
        if self.engine.state is not EngineState.READY:
            raise NotReady(f"the engine is {self.engine.state.value}; try again shortly")

    # Life of the process

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Housekeeping runs inside."""
        task = asyncio.create_task(self._housekeeping(), name="worker-housekeeping")
        try:
            yield
        finally:
            task.cancel()
            self._threads.shutdown(wait=False, cancel_futures=True)

    def begin_drain(self) -> None:
        """From now on requests are refused; what runs goes on."""
        self._draining = True

    async def drained(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    def abandon_all(self, error: TailraceError) -> None:
        """Ends every open request with `error`."""
        for call in list(self._calls):
            call.abandon(error)

    # Requests

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Bounds what is open at once. Raises Overloaded."""
        if self._num_slots >= self.settings.requests_max:
            raise Overloaded(f"{self._num_slots} requests are open, which is the limit here; try again later")
        self._num_slots += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_slots -= 1
            if self._num_slots == 0:
                self._idle.set()

    @contextmanager
    def call(self, id_prefix: str) -> Iterator[Call]:
        """One generating request from its first byte to its end; whatever happens inside, it is counted once."""
        arrival_ns = monotonic_ns()
        label = LABEL_INTERNAL
        try:
            with self.slot():
                self.check_ready()
                with self._open_call(id_prefix, arrival_ns) as call:
                    yield call
            label = LABEL_OK
        except TailraceError as error:
            label = error.row.label
            raise
        except (asyncio.CancelledError, GeneratorExit):
            label = ERROR_TABLE[Cancelled].label
            raise
        finally:
            self.metrics.on_request_end(label, monotonic_ns() - arrival_ns)

    def context(self, call: Call, timeout_ms: int | None) -> RequestContext:
        """What parsing a body needs to know."""
        if timeout_ms is None and self.settings.request_timeout_s is not None:
            timeout_ms = int(self.settings.request_timeout_s * 1000)
        return RequestContext(
            request_id=call.request_id,
            arrival_ns=call.arrival_ns,
            served_models=self.model.names,
            vocab_size=self.text_model.vocab_size,
            seed=self._next_seed(),
            defaults=self.model.defaults,
            deadline_ns=None if timeout_ms is None else call.arrival_ns + timeout_ms * NS_PER_MS,
        )

    def head(self, request: Request) -> AnswerHead:
        return AnswerHead(
            id=request.request_id,
            created=int(time.time()),
            model=request.model,
            system_fingerprint=f"tailrace-{__version__}-{self.model.content_hash[:8]}",
        )

    async def start(self, call: Call, request: Request) -> None:
        """Tokenises and submits every prompt.

        Raises ContextExceeded, InvalidRequest, NotReady, Draining, Overloaded, or what the call was abandoned with.
        """
        call.begin(request)
        # Together: many prompts, each short enough for the loop, are long.
        tokens = await self.off_loop(
            sum(map(_size, request.prompts)), lambda: [self._tokens(prompt) for prompt in request.prompts]
        )
        params = [self._fitted(request, len(token_ids)) for token_ids in tokens]
        _check_logprobs(request.num_choices, list(map(len, tokens)), params)
        for i, (token_ids, fitted) in enumerate(zip(tokens, params, strict=True)):
            sequence_ids = self.engine.new_sequence_ids(request.num_choices)
            call.submit(
                Submit(
                    request_id=request.request_id,
                    sequence_ids=sequence_ids,
                    first_choice=i * request.num_choices,
                    prompt_token_ids=token_ids,
                    params=fitted,
                    priority=request.priority,
                    arrival_ns=request.arrival_ns,
                    deadline_ns=request.deadline_ns,
                    cache_salt=request.cache_salt,
                )
            )
            self.metrics.on_submit(sequence_ids, request.arrival_ns, len(token_ids))

    async def tokenise(self, prompt: ChatPrompt | TextPrompt, *, special: bool) -> list[int]:
        """For `/tokenize`. Raises InvalidRequest."""
        return await self.off_loop(_size(prompt), lambda: self._tokens(prompt, special=special))

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Runs `work` in a thread when `size` (characters, bytes) is large, so that streams do not wait for it."""
        if size <= INLINE_CHARS_MAX:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # Inside

    @contextmanager
    def _open_call(self, id_prefix: str, arrival_ns: int) -> Iterator[Call]:
        # The caller's own x-request-id may be sent twice, and the engine cancels by this id: it is always ours.
        request_id = RequestId(f"{id_prefix}-{secrets.token_hex(12)}")
        call = Call(request_id, arrival_ns, self.engine, self.text_model, self.metrics.on_choice_end)
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)
            call.close()
            self.metrics.forget(call.sequence_ids)

    def _tokens(self, prompt: Prompt, *, special: bool = True) -> list[int]:
        match prompt:
            case TokenPrompt(token_ids):
                return list(token_ids)
            case TextPrompt(text):
                return self.text_model.encode(text, special=special)
            case ChatPrompt(messages, add_generation_prompt):
                return self.text_model.encode_chat(messages, add_generation_prompt=add_generation_prompt)

    def _fitted(self, request: Request, num_prompt_tokens: int) -> SamplingParams:
        """`max_tokens` cut to what the context leaves. Raises ContextExceeded with both numbers."""
        context_max = self.context_tokens_max
        if context_max is None:
            raise NotReady("the engine is starting; try again shortly")
        param = "messages" if isinstance(request.prompts[0], ChatPrompt) else "prompt"
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param=param)
        left = context_max - num_prompt_tokens
        if left < 1:
            raise ContextExceeded(
                f"the prompt has {num_prompt_tokens} tokens, the context is {context_max} tokens"
                " and the answer needs at least one; shorten the prompt",
                param=param,
            )
        params = request.sampling
        max_tokens = min(params.max_tokens, left)
        return msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))

    def _next_seed(self) -> int:
        if self.settings.seed is None:
            return secrets.randbits(63)
        self._num_seeds += 1
        return self.settings.seed + self._num_seeds - 1

    async def _housekeeping(self) -> None:
        """Measures how late this loop runs, and ends requests whose clients take nothing."""
        while True:
            before_ns = monotonic_ns()
            await asyncio.sleep(_TICK_S)
            now_ns = monotonic_ns()
            self.metrics.on_lag(max(0, now_ns - before_ns - int(_TICK_S * NS_PER_S)))
            self._end_stalled(now_ns)

    def _end_stalled(self, now_ns: int) -> None:
        limit_ns = int(self.settings.stall_timeout_s * NS_PER_S)
        for call in list(self._calls):
            since_ns = call.sending_since_ns
            if since_ns is not None and now_ns - since_ns > limit_ns:
                call.abandon(Cancelled(f"the client took nothing for {self.settings.stall_timeout_s} s"))
                if call.disconnect is not None:
                    call.disconnect()


def _size(prompt: Prompt) -> int:
    """What tokenising costs, in characters of text."""
    match prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt(messages):
            return sum(len(m.content) + len(m.name or "") + _MESSAGE_CHARS for m in messages)
        case TokenPrompt():
            return 0


def _check_logprobs(num_choices: int, prompt_tokens: Sequence[int], params: Sequence[SamplingParams]) -> None:
    """Bounds what one answer holds in memory, its echoed prompts included. Raises InvalidRequest."""
    asked = 0
    for num_prompt_tokens, each in zip(prompt_tokens, params, strict=True):
        if each.num_logprobs is not None:
            asked += each.max_tokens * (each.num_logprobs + 1)
        if each.num_prompt_logprobs is not None:
            asked += num_prompt_tokens * (each.num_prompt_logprobs + 1)
    if asked * num_choices > LOGPROBS_MAX:
        raise InvalidRequest(
            f"the answers may need {asked * num_choices} log-probabilities, the limit is {LOGPROBS_MAX}; "
            "ask for fewer choices, alternatives or tokens",
            param="logprobs",
        )
