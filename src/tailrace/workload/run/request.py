"""What a user asks of a measurement, before anything is drawn or connected."""

import uuid

import msgspec

from tailrace.measure.slo import Slo
from tailrace.workload.job import BodyOptions, PlanSource

TIMEOUT_S = 600.0
NUM_IN_FLIGHT_MAX = 4_096


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One run; of several, one each with its own `run_id` and seed."""

    url: str
    workload_toml: str
    arrivals: str
    run_id: str
    seed: int = 0
    duration_s: float | None = None
    num_requests: int | None = None
    """Length of the window: one of the two."""
    warmup_s: float = 0.0
    slo: Slo = Slo()
    api: str = "chat"
    model: str | None = None
    """None: the first that the service lists."""
    api_key: str | None = None
    headers: dict[str, str] = {}
    options: BodyOptions = BodyOptions()
    num_senders: int | None = None
    """None: as many as the null server shows to be needed."""
    timeout_s: float = TIMEOUT_S
    num_in_flight_max: int = NUM_IN_FLIGHT_MAX
    calibrates: bool = True
    """Whether the schedule is first sent to a null server."""
    keeps_text: bool = False
    """For a count of tokens by the client, after the run."""

    def source(self) -> PlanSource:
        return PlanSource(
            workload_toml=self.workload_toml,
            arrivals=self.arrivals,
            seed=self.seed,
            run_id=self.run_id,
            duration_s=self.duration_s,
            num_requests=self.num_requests,
            warmup_s=self.warmup_s,
        )


def new_run_id() -> str:
    """Part of every prompt, so that no run finds the prefixes of another in a cache."""
    return uuid.uuid4().hex[:12]


def repeat(request: BenchRequest, number: int) -> BenchRequest:
    """The same run again: other text, and from the second on another draw of the same laws."""
    return msgspec.structs.replace(request, run_id=f"{request.run_id}-{number + 1}", seed=request.seed + number)
