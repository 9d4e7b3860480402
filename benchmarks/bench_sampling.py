"""What drawing tokens costs: milliseconds of `sample_rows` by setting, batch and vocabulary. Prints one JSON object.

Logits: a peaked part (200 likely tokens, as real text has) over a normal tail; `flat` has no peak, the worst case.
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from common import arguments, report, target
from tailrace.engine.sampling import sample_rows
from tailrace.engine.step import SamplingRow
from tailrace.request import SamplingParams

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, 5 logprobs": {"temperature": 0.0, "num_logprobs": 5},
    "temperature": {},
    "temperature, top-p": {"temperature": 0.8, "top_p": 0.95},
    "temperature, top-k": {"top_k": 50},
    "temperature, top-k, top-p": {"top_k": 50, "top_p": 0.95},
    "temperature, min-p": {"min_p": 0.05},
    "temperature, top-p, penalties": {"top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.1},
}


def make_logits(num_rows: int, vocab_size: int, *, is_flat: bool) -> npt.NDArray[np.float32]:
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((num_rows, vocab_size)).astype(np.float32)
    if not is_flat:
        likely = generator.integers(0, vocab_size, (num_rows, min(200, vocab_size)))
        np.put_along_axis(logits, likely, generator.normal(8.0, 3.0, likely.shape).astype(np.float32), axis=1)
    return logits


def measure_ms(logits: npt.NDArray[np.float32], params: dict[str, Any], repeats: int) -> float:
    """Median over repeats; rows have a history of 1,000 tokens where penalties ask for one."""
    sampling = SamplingParams(max_tokens=1, **params)
    history = list(range(min(1000, logits.shape[1]))) if sampling.needs_history else None
    rows = [
        SamplingRow(params=sampling, choice=0, position=index, history=history, num_prompt_tokens=0)
        for index in range(len(logits))
    ]
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        sample_rows(logits, rows)
        times.append(time.perf_counter() - started)
    return round(float(np.median(times[1:])) * 1e3, 3)


def measure_all(num_rows: int, vocab_size: int, repeats: int) -> dict[str, float]:
    """Milliseconds by setting."""
    peaked = make_logits(num_rows, vocab_size, is_flat=False)
    flat = make_logits(num_rows, vocab_size, is_flat=True)
    return {
        **{name: measure_ms(peaked, params, repeats) for name, params in SETTINGS.items()},
        "temperature, top-p, flat": measure_ms(flat, SETTINGS["temperature, top-p"], repeats),
        "greedy, one row": measure_ms(peaked[:1], SETTINGS["greedy"], repeats),
        "temperature, top-p, one row": measure_ms(peaked[:1], SETTINGS["temperature, top-p"], repeats),
    }


def main() -> None:
    options = arguments(
        "draws of one step, by setting and vocabulary",
        rows=(int, 64, "rows drawn together"),
        repeats=(int, 9, "of which the median is reported"),
    )
    vocab_sizes = (1_000,) if options.quick else (49_152, 151_936)
    num_rows, repeats = (4, 2) if options.quick else (options.rows, options.repeats)
    results = {str(size): measure_all(num_rows, size, repeats) for size in vocab_sizes}
    first = results[str(vocab_sizes[0])]
    report(
        "sampling",
        parameters={"rows": num_rows, "repeats": repeats, "vocab_sizes": vocab_sizes},
        results={"ms_by_vocabulary": results},
        targets=[target(f"{num_rows} rows, temperature + top-p, ms", first["temperature, top-p"], at_most=8.0)],
    )


if __name__ == "__main__":
    main()
