from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from live_worker import WAIT_S, LiveWorker, live_worker, write_text_model

from tailrace.model.text import TextModel


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def text_model(text_folder: Path) -> TextModel:
    return TextModel.load(text_folder)


@pytest.fixture(scope="session")
def worker(text_model: TextModel) -> Iterator[LiveWorker]:
    """One worker for every test that changes nothing in it."""
    with live_worker(text_model) as live:
        yield live


@pytest.fixture(scope="session")
def client(worker: LiveWorker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as real:
        yield real
