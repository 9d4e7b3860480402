"""Hops 1, 2 and 12 of the worker: the HTTP routes, nothing else.

Each route reads, calls the service and writes; what may go wrong is raised from the tree of errors and answered here in
OpenAI's shape.
"""

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tailrace import __version__
from tailrace.errors import MethodNotAllowed, ModelNotFound, NotFound, TailraceError
from tailrace.wire.responses import error_object, model_object
from tailrace.wire.tokenize import (
    detokenize_answer,
    to_detokenize_request,
    to_tokenize_request,
    tokenize_answer,
)
from tailrace.worker.engine_client import EngineState
from tailrace.worker.generate import chat_route, completion_route
from tailrace.worker.http import (
    REQUEST_ID_HEADER,
    RETRY_AFTER_S,
    ApiKey,
    RequestIds,
    error_response,
    json_response,
    on_error,
    read_body,
)
from tailrace.worker.metrics import CONTENT_TYPE, LABEL_INTERNAL
from tailrace.worker.service import Service
from tailrace.worker.settings import WorkerSettings


def create_app(service: Service, settings: WorkerSettings) -> Starlette:
    """The worker as an ASGI application; `Service.running` must be entered around it."""
    return Starlette(
        routes=[*_generating_routes(service), *_reading_routes(service, settings), *_text_routes(service)],
        middleware=_middleware(settings),
        exception_handlers={TailraceError: on_error, HTTPException: _on_http_error, Exception: _on_bug},
    )


def _middleware(settings: WorkerSettings) -> list[Middleware]:
    """Outermost first: a browser's preflight carries no key."""
    layers = [Middleware(RequestIds)]
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER],
        )
        layers.append(cors)
    if settings.api_key is not None:
        layers.append(Middleware(ApiKey, key=settings.api_key))
    return layers


def _generating_routes(service: Service) -> list[Route]:
    return [
        Route("/v1/chat/completions", chat_route(service), methods=["POST"]),
        Route("/v1/completions", completion_route(service), methods=["POST"]),
    ]


def _reading_routes(service: Service, settings: WorkerSettings) -> list[Route]:
    async def models(request: HttpRequest) -> Response:  # noqa: ARG001
        rows = [_model(service, name) for name in service.model.names]
        return json_response(msgspec.json.encode({"object": "list", "data": rows}))

    async def model(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in service.model.names:
            raise ModelNotFound(f"the model {name[:100]!r} is not served here", param="model")
        return json_response(msgspec.json.encode(_model(service, name)))

    async def health(request: HttpRequest) -> Response:  # noqa: ARG001
        state = service.engine.state
        is_down = state in (EngineState.STOPPED, EngineState.CLOSED)
        return _status("engine_stopped" if is_down else "ok", is_good=not is_down)

    async def ready(request: HttpRequest) -> Response:  # noqa: ARG001
        if service.draining:
            return _status("draining", is_good=False)
        return _status(service.engine.state.value, is_good=service.is_ready)

    async def metrics(request: HttpRequest) -> Response:  # noqa: ARG001
        engine = service.engine
        text = service.metrics.expose(
            engine.stats, num_open=service.num_open, num_restarts=engine.restarts_total, is_ready=service.is_ready
        )
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def version(request: HttpRequest) -> Response:  # noqa: ARG001
        return json_response(msgspec.json.encode({"version": __version__}))

    async def steps(request: HttpRequest) -> Response:  # noqa: ARG001
        if not settings.debug_steps:
            raise NotFound("the step log is off; start the service with worker.debug_steps = true")
        return json_response(msgspec.json.encode({"steps": await service.engine.read_steps()}))

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/debug/steps", steps),
    ]


def _text_routes(service: Service) -> list[Route]:
    async def tokenize(request: HttpRequest) -> Response:
        with service.slot():
            body = await _body(service, request)
            wanted = await service.off_loop(len(body), lambda: to_tokenize_request(body, service.model.names))
            ids = await service.tokenise(wanted.prompt, special=wanted.add_special_tokens)
            answer = await service.off_loop(len(ids), lambda: _tokenize_answer(service, ids, wanted.return_token_strs))
        return json_response(answer)

    async def detokenize(request: HttpRequest) -> Response:
        with service.slot():
            body = await _body(service, request)
            text_model = service.text_model
            text = await service.off_loop(
                len(body),
                lambda: text_model.decode(to_detokenize_request(body, service.model.names, text_model.vocab_size)),
            )
        return json_response(detokenize_answer(text))

    return [Route("/tokenize", tokenize, methods=["POST"]), Route("/detokenize", detokenize, methods=["POST"])]


async def _body(service: Service, request: HttpRequest) -> bytes:
    settings = service.settings
    return await read_body(
        request.scope, request.receive, bytes_max=settings.body_bytes_max, timeout_s=settings.body_timeout_s
    )


def _tokenize_answer(service: Service, ids: list[int], wants_strings: bool) -> bytes:
    strings = [service.text_model.token_text(token_id) for token_id in ids] if wants_strings else None
    return tokenize_answer(ids, max_model_len=service.context_tokens_max, token_strs=strings)


def _model(service: Service, name: str) -> dict[str, object]:
    model = service.model
    return model_object(
        name,
        created=model.created,
        max_model_len=service.context_tokens_max,
        content_hash=model.content_hash,
        root=model.source,
    )


def _status(status: str, *, is_good: bool) -> Response:
    headers = None if is_good else {"retry-after": str(RETRY_AFTER_S)}
    return json_response(msgspec.json.encode({"status": status}), 200 if is_good else 503, headers)


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    """The router's own refusals."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        response = error_response(MethodNotAllowed(f"{where}: the route exists, the method does not"))
        response.headers.update(error.headers or {})
        return response
    if error.status_code == 404:
        return error_response(NotFound(f"{where}: no such route"))
    body = error_object(error.detail, kind="invalid_request_error", param=None, code="http_error")
    return json_response(body, error.status_code)


async def _on_bug(request: HttpRequest, error: Exception) -> Response:  # noqa: ARG001
    """The server logs the traceback; the caller learns no more than that."""
    body = error_object("an internal error; the log has it", kind="server_error", param=None, code=LABEL_INTERNAL)
    return json_response(body, 500)
