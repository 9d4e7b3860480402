"""The closed tree of operating errors and its one table. Programmer errors are asserts that name the invariant."""

from typing import NamedTuple


class TailraceError(Exception):
    """An operating error: something outside the program went wrong, and the message says what to do next.

    `param` names the request or configuration field at fault, if one is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def row(self) -> "ErrorRow":
        return ERROR_TABLE[type(self)]


class InvalidRequest(TailraceError):
    """A field is malformed or out of range."""


class Unsupported(TailraceError):
    """A field asks for something this service does not do."""


class ContextExceeded(TailraceError):
    """The prompt does not fit the context; the message carries both numbers."""


class BodyTooLarge(TailraceError):
    """The request body is larger than the service reads."""


class Unauthorized(TailraceError):
    """No key, or a wrong one."""


class NotFound(TailraceError):
    """No such route."""


class ModelNotFound(TailraceError):
    """The request names a model that is not served here."""


class MethodNotAllowed(TailraceError):
    """The route exists, the method does not."""


class Overloaded(TailraceError):
    """The engine's own bound on waiting work is reached."""


class NotReady(TailraceError):
    """The engine is starting or restarting."""


class Draining(TailraceError):
    """The service finishes what runs and accepts nothing new."""


class DeadlineExceeded(TailraceError):
    """The request's own deadline passed."""


class Cancelled(TailraceError):
    """The caller left."""


class EngineFailed(TailraceError):
    """A step failed and this sequence was the culprit, or could not be told from it."""


class EngineDied(TailraceError):
    """The engine process ended or hung while this request ran."""


class KvExhausted(TailraceError):
    """The sequence alone needs more KV blocks than the pool has."""


class ConfigError(TailraceError):
    """A configuration value or file is wrong."""


class ModelRefused(TailraceError):
    """The native engine cannot run this model, or would run it wrongly; the message says which engine can."""


class ModelSourceError(TailraceError):
    """The model's files are missing, corrupt or cannot be written to the cache."""


class StartFailed(TailraceError):
    """The service could not start (port in use, engine did not come up)."""


class ClientFailed(TailraceError):
    """A remote tailrace or OpenAI-compatible address could not be used."""


class SenderFailed(TailraceError):
    """A process of the load generator could not start, or ended before its run did."""


class ErrorRow(NamedTuple):
    label: str
    """Stable, machine-readable: metrics, error frames, logs."""
    http_status: int
    retryable: bool
    exit_code: int
    openai_type: str


_REQUEST = "invalid_request_error"
_SERVER = "server_error"

ERROR_TABLE: dict[type[TailraceError], ErrorRow] = {
    InvalidRequest: ErrorRow("invalid_request", 400, False, 2, _REQUEST),
    Unsupported: ErrorRow("unsupported", 400, False, 2, _REQUEST),
    ContextExceeded: ErrorRow("context_length_exceeded", 400, False, 2, _REQUEST),
    BodyTooLarge: ErrorRow("body_too_large", 413, False, 2, _REQUEST),
    Unauthorized: ErrorRow("invalid_api_key", 401, False, 2, "authentication_error"),
    NotFound: ErrorRow("not_found", 404, False, 2, _REQUEST),
    ModelNotFound: ErrorRow("model_not_found", 404, False, 2, _REQUEST),
    MethodNotAllowed: ErrorRow("method_not_allowed", 405, False, 2, _REQUEST),
    Overloaded: ErrorRow("overloaded", 429, True, 1, "rate_limit_error"),
    NotReady: ErrorRow("not_ready", 503, True, 1, _SERVER),
    Draining: ErrorRow("draining", 503, True, 1, _SERVER),
    DeadlineExceeded: ErrorRow("deadline_exceeded", 504, False, 1, _SERVER),
    Cancelled: ErrorRow("cancelled", 499, False, 1, _REQUEST),
    EngineFailed: ErrorRow("engine_failed", 500, False, 1, _SERVER),
    EngineDied: ErrorRow("engine_died", 502, True, 1, _SERVER),
    KvExhausted: ErrorRow("kv_exhausted", 400, False, 2, _REQUEST),
    ConfigError: ErrorRow("config_error", 500, False, 2, _SERVER),
    ModelRefused: ErrorRow("model_refused", 500, False, 3, _SERVER),
    ModelSourceError: ErrorRow("model_source_error", 500, False, 3, _SERVER),
    StartFailed: ErrorRow("start_failed", 500, True, 4, _SERVER),
    ClientFailed: ErrorRow("client_failed", 502, True, 5, _SERVER),
    SenderFailed: ErrorRow("sender_failed", 500, True, 1, _SERVER),
}
"""Every leaf of the tree has its row (a test holds it).

Exit codes: 1 run time, 2 usage, 3 model, 4 start, 5 remote."""

LABEL_TO_ERROR: dict[str, type[TailraceError]] = {row.label: cls for cls, row in ERROR_TABLE.items()}
