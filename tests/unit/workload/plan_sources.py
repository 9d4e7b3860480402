"""Sources of plans for the tests of this folder: short to write, and each value can be said."""

from typing import Any

from tailrace.workload.draw import draw_plan
from tailrace.workload.job import PlanSource
from tailrace.workload.plan import Plan

SIMPLE = """
name = "simple"
[[cohorts]]
prompt_tokens = { law = "uniform", low = 10, high = 90 }
output_tokens = { law = "constant", value = 7 }
"""


def plan_source(**given: Any) -> PlanSource:
    values: dict[str, Any] = {
        "workload_toml": SIMPLE,
        "arrivals": "poisson:10",
        "seed": 1,
        "run_id": "run",
        "duration_s": 20.0,
        "num_requests": None,
        "warmup_s": 2.0,
    }
    return PlanSource(**(values | given))


def drawn(**given: Any) -> Plan:
    return draw_plan(plan_source(**given))
