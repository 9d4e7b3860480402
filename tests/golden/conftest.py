from collections.abc import Iterator

import openai
import pytest
from live_worker import WAIT_S, LiveWorker, live_worker, write_text_model

from tailrace.model.text import TextModel


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(write_text_model(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="session")
def worker(text_model: TextModel) -> Iterator[LiveWorker]:
    """One worker for every test that changes nothing in it."""
    with live_worker(text_model) as live:
        yield live


@pytest.fixture(scope="session")
def client(worker: LiveWorker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as real:
        yield real
