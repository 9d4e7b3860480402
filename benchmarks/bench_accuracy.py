"""Accuracy of the load generator: reported latencies against the log of an independent server with known instants.

The server (`tests/golden/pacing_server.py`) notes, on the clock that all processes of this host share, the instants
just before and just after each send. A report's error is its figure less the figure of the log, where a chunk's
instant is the one just before its send: what the kernel and the sender need counts as error. The quantum of the log,
after less before, is reported beside it.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import arguments, report, say, summary, target

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "golden"))

from paced_run import PacedPair, pacing_server

SCRIPTS: dict[str, dict[str, Any]] = {
    "one token a chunk": {},
    "several tokens a chunk": {"tokens": [2, 1, 4], "first_tokens": 3},
    "uneven, with empty chunks, a stall and a burst": {
        "gaps_ms": [3, 17, 8], "empty_every": 4, "stall_after": 9, "stall_ms": 80, "burst_last": 3,
    },
}  # fmt: skip
ARRIVALS = "poisson:{rate:g}"
ERROR_MS_P99_MAX = 1.0


def main() -> None:
    options = arguments(
        __doc__.splitlines()[0],
        requests=(int, 300, "of each script"),
        rate=(float, 4.0, "requests a second"),
        output_tokens=(int, 24, "tokens of each answer"),
        senders=(int, 1, "client processes"),
    )
    num_requests = 8 if options.quick else options.requests
    rate = 20.0 if options.quick else options.rate
    errors: dict[str, list[float]] = {}
    quanta: list[float] = []
    by_script: dict[str, object] = {}
    with pacing_server() as server:
        for name, script in SCRIPTS.items():
            run = server.run(
                script,
                num_requests=num_requests,
                arrivals=ARRIVALS.format(rate=rate),
                num_output_tokens=options.output_tokens,
                chunk_usage=True,
                num_senders=options.senders,
            )
            own = errors_ms(run.pairs)
            quanta += [(c.after_ns - c.before_ns) / 1e6 for pair in run.pairs for c in pair.served.texts]
            by_script[name] = {
                "num_requests": len(run.pairs),
                "outcomes": run.report.outcomes,
                "errors_ms": {metric: summary(values) for metric, values in own.items()},
                "num_wrong_counts": sum(map(has_wrong_counts, run.pairs)),
            }
            for metric, values in own.items():
                errors.setdefault(metric, []).extend(values)
            say(f"{name}: " + ", ".join(f"{m} p99 {summary(v)['p99']:.3f} ms" for m, v in own.items()))
    absolute = {metric: summary([abs(value) for value in values]) for metric, values in errors.items()}
    num_wrong = sum(row["num_wrong_counts"] for row in by_script.values())  # type: ignore[index]
    report(
        "accuracy",
        parameters={
            "scripts": SCRIPTS,
            "num_requests": num_requests,
            "rate_per_s": rate,
            "num_output_tokens": options.output_tokens,
            "num_senders": options.senders,
        },
        results={"absolute_errors_ms": absolute, "log_quantum_ms": summary(quanta), "scripts": by_script},
        targets=[
            *(
                target(f"{metric}: error p99, ms", values["p99"], at_most=ERROR_MS_P99_MAX)
                for metric, values in absolute.items()
            ),
            target("requests with a wrong count of chunks or tokens", num_wrong, at_most=0),
        ],
    )


def errors_ms(pairs: list[PacedPair]) -> dict[str, list[float]]:
    """Reported less true, by metric. Of requests whose counts are right; the others are counted apart."""
    pairs = [pair for pair in pairs if not has_wrong_counts(pair)]
    found: dict[str, list[float]] = {"chunk_gap_ms": []}
    for pair in pairs:
        reported, true = pair.received_ns, [chunk.before_ns for chunk in pair.served.texts]
        for name, figure in FIGURES.items():
            start_ns = pair.record.scheduled_ns
            tokens = [chunk.tokens for chunk in pair.served.texts]
            error = figure(start_ns, reported, tokens) - figure(start_ns, true, tokens)
            found.setdefault(name, []).append(error / 1e6)
        gaps = zip(pairwise(reported), pairwise(true), strict=True)
        found["chunk_gap_ms"] += [((b - a) - (d - c)) / 1e6 for (a, b), (c, d) in gaps]
    return found


def has_wrong_counts(pair: PacedPair) -> bool:
    record = pair.record
    tokens = record.chunk_tokens or [1] * len(record.chunk_gaps_ns)
    return tokens != [chunk.tokens for chunk in pair.served.texts] or record.num_output_tokens != sum(tokens)


FIGURES: dict[str, Callable[[int, list[int], list[int]], float]] = {
    "ttft_ms": lambda start_ns, at_ns, _: at_ns[0] - start_ns,
    "e2e_ms": lambda start_ns, at_ns, _: at_ns[-1] - start_ns,
    "tpot_ms": lambda _, at_ns, tokens: (at_ns[-1] - at_ns[0]) / (sum(tokens) - tokens[0]),
    "stall_ms": lambda _, at_ns, __: max(b - a for a, b in pairwise(at_ns)),
}
"""(scheduled, instants of the chunks, their tokens) -> ns."""


if __name__ == "__main__":
    main()
