"""Errors become one line and an exit code; help is quick and loads no kernels."""

import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.cli import version as version_verb
from tailrace.errors import ERROR_TABLE, TailraceError


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(version_verb, "installed_version", failing)


@pytest.mark.parametrize("cls", ERROR_TABLE)
def test_an_operating_error_is_one_line_and_the_exit_code_of_its_row(
    cls: type[TailraceError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, cls("it broke:\n  do this next"))
    assert main.run(["version"]) == ERROR_TABLE[cls].exit_code
    assert capsys.readouterr().err == "tailrace: it broke: do this next\n"


def test_a_bug_is_one_line_too_and_debug_shows_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, RuntimeError("odd"))
    assert main.run(["version"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main.run(["--debug", "version"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert main.run(["version"]) == main.EXIT_INTERRUPTED


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["serve"],
        ["version", "--nonsense"],
        ["generate", "m"],
        ["serve", "m", "--port", "many"],
        ["serve", "m", "--set", "engine.nonsense=1"],
        ["serve", "m", "--kv-memory", "bogus"],
        ["config", "show", "--set", "nonsense"],
        ["config", "show", "--config", "/no/such/file.toml"],
        ["tokenize", "m"],
        ["tokenize", "m", "-p", "a", "--file", "b"],
        ["chat", "http://127.0.0.1:1", "--threads", "2"],
        ["chat", "http://127.0.0.1:1", "--set", "engine.sequences_max=1"],
        ["chat", "smollm2", "--api-key", "k"],
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("verb", ["serve", "generate", "tokenize", "config show"])
def test_a_model_that_is_not_there_is_a_model_error(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["-p", "x"] if verb in ("generate", "tokenize") else ["--set", "worker.port=0"]
    assert main.run([*verb.split(), "/no/such/model.gguf", *prompt]) == 3
    assert "/no/such/model.gguf" in capsys.readouterr().err


def test_an_address_where_nobody_is_is_a_remote_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["chat", "http://127.0.0.1:1"]) == 5
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_help_loads_no_kernels_no_numpy_and_no_server() -> None:
    code = (
        "import sys\n"
        "from tailrace.cli.main import run\n"
        "assert run(['serve', '--help']) == 0\n"
        "heavy = {'openvino', 'nncf', 'numpy', 'tokenizers', 'starlette', 'uvicorn', 'aiohttp', 'jinja2'}\n"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    assert done.returncode == 0


def test_settings_need_no_kernels_either(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from tailrace.cli.main import run\n"
        "assert run(['config', 'show']) == 0\n"
        f"assert run(['models', '--set', 'model.cache_dir={tmp_path}']) == 0\n"
        "sys.exit(','.join(sorted({'openvino', 'nncf'} & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flag", ["--max-model-len", "-c", "--context-tokens-max"])
def test_the_words_of_other_engines_are_accepted(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "/no/such/model.gguf", flag, "512", "--port", "0", "--parallel", "4", "-b", "256"]
    assert main.run(arguments) == 3
    assert "no file or directory" in capsys.readouterr().err


def test_broken_pipe_is_not_an_error_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, BrokenPipeError(32, "broken pipe"))
    assert main.run(["version"]) in (1, main.EXIT_BROKEN_PIPE)
    assert capsys.readouterr().err == ""
