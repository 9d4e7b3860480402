"""The soak benchmark's random steps are plans that the kernels run, and its arithmetic finds growth."""

from pathlib import Path

import pytest

from tailrace.executor.settings import ExecutorSettings
from tailrace.executor.start import start_executor
from tiny_model import SHAPE


def test_random_steps_run_and_their_memory_is_told(tiny_xml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    import bench_soak

    started = start_executor(
        tiny_xml,
        SHAPE,
        ExecutorSettings(kv_memory="8MiB", threads=1),
        sequences_max=bench_soak.SEQUENCES_MAX,
        on_phase=lambda _phase, _message: None,
        observe=lambda _plan, _duration_ns: None,
    )
    resident = bench_soak.resident_by_step(started.executor, SHAPE.vocab_size, 60, seed=1)
    assert len(resident) == 60
    assert min(resident) > 1_000_000
    told = bench_soak.growth([100] * 10 + list(range(100, 180)) + [200] * 10)
    assert told["growth_bytes"] == 100
    assert told["growth_ratio"] == 1.0
