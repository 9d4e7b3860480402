"""What the scheduler counts since the engine started."""

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """The totals of `step.SchedulerStats`, by the same names."""

    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    fork_tokens: int = 0
    recompute_tokens: int = 0
    steps_cut: int = 0
    steps_failed: int = 0
    itl_budget_overruns: int = 0
    late_finishes: int = 0
