"""What tests of several folders share. This file's folder is importable, so `tiny_model` is."""

from pathlib import Path

import pytest

from tailrace.config import read_environment
from tailrace.model.source import find_model, prepare_model
from tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_xml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An IR with random weights that the real kernels run in milliseconds."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Directory of the prepared SmolLM2-135M-Instruct (int8), kept where the product keeps it: the first use converts.

    Only for tests marked `model`.
    """
    source = find_model("smollm2")
    cache_dir = read_environment().cache_dir
    return prepare_model(source, weights=None, cache_dir=cache_dir, progress=lambda *_: None).directory
