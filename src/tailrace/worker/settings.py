"""The `[worker]` section: how one engine is put on the network."""

from typing import Annotated

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
Count = Annotated[int, Meta(ge=1)]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8000
    """0 takes a free one."""
    api_key: str | None = None
    """When set, every route but /health, /ready, /version and /metrics wants `Authorization: Bearer KEY`."""
    served_model_name: str | None = None
    """Name in requests and answers; the model's own when unset."""
    cors_origins: tuple[str, ...] = ()
    """Origins a browser may call from; `*` allows all. None by default."""
    body_bytes_max: Count = 10_000_000
    """A larger request body is refused while it is read."""
    body_timeout_s: Seconds = 30.0
    """A body that takes longer to arrive is refused."""
    requests_max: Count = 1024
    """Requests open at once, waiting ones included; beyond it the answer is 429."""
    request_timeout_s: Seconds | None = None
    """Deadline of a request that names none in `x-request-timeout-ms`. None: no deadline."""
    stall_timeout_s: Seconds = 30.0
    """A client that takes no bytes for so long while text waits for it is disconnected and its request cancelled."""
    drain_timeout_s: Seconds = 30.0
    """After SIGTERM what runs may take this long; then it is ended with the label `draining`."""
    keep_alive_s: Annotated[int, Meta(ge=1, le=3600)] = 5
    """An idle connection is closed after this time, and one whose request line and headers take longer to arrive."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """Base of the sampling seeds of requests that name none: the same order of requests draws the same tokens.
    None: from the operating system."""
    debug_steps: bool = False
    """Serves the step log at /debug/steps."""
