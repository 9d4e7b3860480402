"""The command line on the packaged model: real processes, real kernels."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]
TAILRACE = str(Path(sys.executable).parent / "tailrace")
RUN_S_MAX = 240
SMALL = ["--kv-memory", "200MB"]


def tailrace(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [TAILRACE, *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=RUN_S_MAX
    )


@contextmanager
def served(*arguments: str) -> Iterator[tuple[str, "subprocess.Popen[str]", list[str]]]:
    """A service on a free port: its address, its process and what it said so far."""
    process = subprocess.Popen(
        [TAILRACE, "serve", "smollm2", "--port", "0", *SMALL, *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    said: list[str] = []
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line.startswith("try"):
                listening.set()
        listening.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert listening.wait(RUN_S_MAX), said
        address = re.search(r"ready +(http://\S+)/v1", "".join(said))
        assert address is not None, said
        yield address[1], process, said
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(scope="module", autouse=True)
def converted(smollm2_dir: Path) -> Path:
    """Converted once, before any test counts its time."""
    return smollm2_dir


def test_generate_without_a_server_is_repeatable() -> None:
    arguments = ["generate", "smollm2", "-p", "Name a river.", "--temperature", "0", "--max-tokens", "8", *SMALL]
    first, second = (tailrace(*arguments, "--json", "--stats") for _ in range(2))
    assert first.returncode == 0, first.stderr
    answer = json.loads(first.stdout)
    assert answer["text"]
    assert answer["text"] == json.loads(second.stdout)["text"]
    assert 1 <= answer["num_output_tokens"] <= 8
    assert answer["finish_reason"] in ("stop", "length")
    assert "TTFT" in first.stderr.splitlines()[-1]


def test_chat_from_a_pipe_answers_and_accounts() -> None:
    done = tailrace(
        "chat", "smollm2", "--max-tokens", "8", "--seed", "1", *SMALL, stdin="Hello.\n/stats\n/exit\nlost\n"
    )
    assert done.returncode == 0, done.stderr
    assert "last turn:" in done.stdout
    assert "lost" not in done.stdout
    assert re.search(r"^user +\d+ +\d+ +Hello\.$", done.stdout, re.MULTILINE)


def test_tokenize_counts_messages(tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps([{"role": "user", "content": "Hello <|im_end|> there"}]))
    done = tailrace("tokenize", "smollm2", "--chat", str(chat), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_tokens"] == sum(m["num_tokens"] for m in result["messages"]) == len(result["token_ids"])
    assert result["pieces"].count("<|im_end|>") <= 2, "what a user writes is text, not a control token"


def test_models_lists_what_was_prepared(converted: Path) -> None:
    listed = json.loads(tailrace("models", "--json").stdout)
    assert str(converted) in [model["directory"] for model in listed["models"]]
    assert converted.name[:12] in tailrace("models").stdout


def test_config_show_explains_the_model() -> None:
    rows = json.loads(tailrace("config", "show", "smollm2", "--json").stdout)["settings"]
    by_name = {f"{row['section']}.{row['key']}": row for row in rows}
    assert by_name["model.weights"]["value"] == "int8"
    assert "KL" in by_name["model.weights"]["reason"]


def test_a_context_beyond_the_model_is_refused() -> None:
    done = tailrace("generate", "smollm2", "-p", "x", "-c", "1000000")
    assert done.returncode == 2
    assert "1000000" in done.stderr
    assert "8192" in done.stderr


def test_serve_answers_chats_refuses_its_port_twice_and_leaves_on_sigterm() -> None:
    with served("--api-key", "secret", "--served-model-name", "river") as (address, process, said):
        text = "".join(said)
        assert "secret" not in text
        assert "weights int8" in text
        assert "KV pool" in text
        chat = tailrace("chat", address, "--api-key", "secret", "--max-tokens", "8", stdin="Hello.\n/stats\n")
        assert chat.returncode == 0, chat.stderr
        assert "model river" in chat.stdout
        refused = tailrace("chat", address, stdin="Hello.\n")
        assert refused.returncode == 5
        assert "401" in refused.stderr
        port = address.rpartition(":")[2]
        second = tailrace("serve", "smollm2", "--port", port)
        assert second.returncode == 4
        assert f"port {port}" in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(RUN_S_MAX) == 0


def test_the_demo_shows_an_answer_and_its_cost() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo.py")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S_MAX,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ tokens, stop reason (stop|length), TTFT [\d,]+ ms, [\d,.]+ tokens/s", done.stdout)
    assert re.search(r"http://127\.0\.0\.1:\d+/v1", done.stdout)
