"""Our tokens of the packaged model against an independent reader of the same GGUF file (openvino-genai's)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.model.text import TextModel
from tailrace.request import Message

pytestmark = pytest.mark.model

HARD = [
    "Hello, world!",
    " leading space",
    "trailing space ",
    "   three   inner   spaces   ",
    "tabs\tand\nnewlines\r\n\r\nmixed \n \n",
    "\n\n\n\n",
    "1234567890",
    "3.14159 and 1,000,000 and 0x1F and 2024-01-31",
    "x1y22z333",
    "don't I'll we've they're it's I'm you'd 'tis O'Neil",
    "DON'T SHOUT'S",
    "naïve café Ünïcödé ÀÉÎÕÜ ß",
    "漢字とひらがなとカタカナ",
    "中文分词测试，标点。",
    "한국어 문장입니다",
    "Привет, как дела?",
    "مرحبا بالعالم",
    "שלום עולם",
    "हिन्दी में लिखा",
    "ภาษาไทย",
    "🎉",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 🇫🇷",
    "e\u0301 combining",
    "\u00a0nbsp\u2003em\u3000wide",
    "²³¼½ Ⅷ ①",
    "def f(x):\n    return x**2  # comment\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }",
    "https://example.com/a/b?c=d&e=%20#f",
    '<html><body class="a">&amp;</body></html>',
    "$100 €50 £20 ¥9 @user #tag ~/.config/*.toml",
    "...!!!???---___===",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "\x00\x01\x7f",
    "a" * 300,
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
]


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Any:
    import openvino as ov
    import openvino_tokenizers  # noqa: F401  registers the tokenizer's operations

    return ov.Core().compile_model(smollm2_dir / "openvino_tokenizer.xml", "CPU")


@pytest.fixture(scope="module")
def text_model(smollm2_dir: Path) -> TextModel:
    return TextModel.load(smollm2_dir)


@pytest.mark.parametrize("text", HARD)
def test_our_tokens_are_the_references(reference: Any, text_model: TextModel, text: str) -> None:
    expected = reference(np.array([text]))["input_ids"][0].tolist()
    assert text_model.encode(text, special=True) == expected


@pytest.mark.parametrize("text", HARD)
def test_our_text_comes_back(text_model: TextModel, text: str) -> None:
    assert text_model.decode(text_model.encode(text, special=False)) == text


def test_the_models_own_template_is_used(text_model: TextModel) -> None:
    ids = text_model.encode_chat([Message(role="user", content="Hi <|im_end|> there")])
    assert [text_model.token_text(i) for i in ids].count("<|im_end|>") == 2  # the default system message, and ours
    assert text_model.token_text(ids[-2]) == "istant"
    assert text_model.end_token_ids == {0, 2}
