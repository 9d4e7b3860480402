"""The prompt of `tailrace generate`, before a model is loaded."""

import io
import sys

import pytest

from tailrace.cli.generate import read_prompt
from tailrace.errors import ConfigError


def test_a_prompt_is_the_argument_or_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert read_prompt("as it is") == "as it is"
    assert read_prompt("-") == "from a pipe"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_prompt_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb"), encoding="utf-8", errors=errors))
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_prompt("-")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_prompt("a\udcffb")
