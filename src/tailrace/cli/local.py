"""A conversation with a model of ours, without HTTP: the same service and the same engine child as `tailrace serve`."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing

import msgspec

from tailrace.cli.backend import AskOptions, Turn, TurnTimer
from tailrace.cli.compose import Composition
from tailrace.request import Message, Request
from tailrace.wire.openai import RequestContext, to_chat_request, to_completion_request
from tailrace.worker.service import Service


class LocalBackend:
    """Use `of`."""

    def __init__(self, service: Service, closing: AsyncExitStack) -> None:
        self._service = service
        self._closing = closing
        self.name = service.model.names[0]
        self.context_tokens_max = service.context_tokens_max

    @classmethod
    async def of(cls, composition: Composition) -> "LocalBackend":
        """Takes the engine over: `close` ends it."""
        closing = AsyncExitStack()
        closing.push_async_callback(composition.engine.close)
        await closing.enter_async_context(composition.service.running())
        return cls(composition.service, closing)

    async def ask(self, messages: Sequence[Message], options: AskOptions, on_text: Callable[[str], None]) -> Turn:
        body: dict[str, object] = {"messages": [{"role": m.role, "content": m.content} for m in messages]}
        return await self._run(body, options, on_text, to_chat_request)

    async def complete(self, prompt: str, options: AskOptions, on_text: Callable[[str], None]) -> Turn:
        """Continues a text as it is, without the chat template."""
        return await self._run({"prompt": prompt}, options, on_text, to_completion_request)

    async def count(self, messages: Sequence[Message]) -> list[int] | None:
        return self._service.text_model.count_chat(messages)

    async def close(self) -> None:
        await self._closing.aclose()

    async def _run(
        self,
        body: dict[str, object],
        options: AskOptions,
        on_text: Callable[[str], None],
        parse: Callable[[bytes, RequestContext], Request],
    ) -> Turn:
        """The request passes the same checks and gets the same defaults as one over HTTP."""
        given = {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
        timer = TurnTimer(on_text)
        reason: str | None = None
        with self._service.call("local") as call:
            content = msgspec.json.encode({"model": self.name, **body, **given})
            await self._service.start(call, parse(content, self._service.context(call, None)))
            async with aclosing(call.deltas()) as arrivals:
                async for deltas in arrivals:
                    timer.token()
                    for delta in deltas:
                        timer.text(delta.piece.text)
                        reason = delta.finish_reason or reason
            usage = call.usage()
        return timer.turn(
            reason,
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=usage.cached_tokens,
            num_output_tokens=usage.completion_tokens,
        )
