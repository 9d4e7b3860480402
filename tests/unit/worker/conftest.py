import pytest

from tailrace.worker.channel import EngineSpec, ModeledSpec


@pytest.fixture
def spec() -> EngineSpec:
    executor = ModeledSpec(num_blocks=64, vocab_size=1_000, context_tokens_max=512)
    return EngineSpec(executor=executor, end_token_ids=(0,))
