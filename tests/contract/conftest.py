"""Every implementation of a protocol as a parameter."""

from pathlib import Path

import pytest
from executors import LIMITS, VOCAB_SIZE, Implementation

from tailrace.engine.step import Executor
from tailrace.executor.modeled import ModeledExecutor
from tailrace.executor.openvino import OpenVinoExecutor
from tailrace.model.paged import PagedModel, load_paged


@pytest.fixture(scope="session")
def tiny_paged(tiny_xml: Path) -> PagedModel:
    """f32 in all places: batched and single rows then agree to rounding."""
    return load_paged(tiny_xml, kv_dtype="f32", inference_dtype="f32", num_threads=2)


@pytest.fixture(params=["modeled", "openvino"])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "modeled":
        return Implementation(
            lambda: ModeledExecutor(LIMITS, VOCAB_SIZE, duration_ns=lambda _: 1_000_000),
            lambda: ModeledExecutor(LIMITS, VOCAB_SIZE, duration_ns=lambda _: 60_000_000_000, real_time=True),
        )
    paged: PagedModel = request.getfixturevalue("tiny_paged")

    def make() -> Executor:
        paged.allocate(LIMITS.num_blocks)
        return OpenVinoExecutor(paged, LIMITS)

    return Implementation(make, make)


@pytest.fixture
def executor(implementation: Implementation) -> Executor:
    return implementation.make()
