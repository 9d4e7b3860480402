"""What would be run wrongly is refused in one sentence that names an engine which can."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer

from tailrace.errors import ModelRefused, ModelSourceError
from tailrace.model.gguf_file import open_gguf
from tailrace.model.gguf_model import check_gguf, gguf_shape, write_f16
from tailrace.model.gguf_tokenizer import end_token_ids, token_names, tokenizer_json
from tailrace.model.text import TextModel
from tiny_gguf import SPECIALS, TOKENS, write_tiny_gguf

BIASES = {f"blk.{i}.attn_{part}.bias": (size,) for i in range(2) for part, size in (("q", 64), ("k", 32), ("v", 32))}
NORMS = {f"blk.{i}.attn_{part}_norm.weight": (32,) for i in range(2) for part in ("q", "k")}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"arch": "qwen2", "more_tensors": BIASES},
        {"arch": "qwen3", "more_tensors": NORMS},
        {"rope__scaling__type": "none"},
    ],
)
def test_plain_models_of_known_architectures_pass(tmp_path: Path, options: dict[str, Any]) -> None:
    check_gguf(open_gguf(write_tiny_gguf(tmp_path / "m.gguf", **options)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arch": "gemma2"}, "architecture 'gemma2'"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "scales its rotary"),
        ({"rope__scaling__factor": 8.0}, "scales its rotary"),
        ({"rope__scale_linear": 2.0}, "scales its rotary"),
        ({"more_tensors": {"rope_freqs.weight": (16,)}}, "scales its rotary"),
        ({"rope__dimension_count": 16}, "rotates 16 of 32"),
        ({"attention__sliding_window": 128}, "sliding window of 128"),
        ({"attn_logit_softcapping": 50.0}, "caps its logits"),
        ({"final_logit_softcapping": 30.0}, "caps its logits"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"more_tensors": BIASES}, "would leave out"),
        ({"attention__head_count_kv": [1, 2]}, "from layer to layer"),
    ],
)
def test_what_the_reader_would_get_wrong_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelRefused, match=says) as refusal:
        check_gguf(open_gguf(write_tiny_gguf(tmp_path / "m.gguf", **options)))
    assert "llama.cpp" in refusal.value.message


def test_a_window_as_wide_as_the_context_is_no_window(tmp_path: Path) -> None:
    check_gguf(open_gguf(write_tiny_gguf(tmp_path / "m.gguf", attention__sliding_window=512)))


def test_a_missing_tensor_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="lacks 1 tensors"):
        check_gguf(open_gguf(write_tiny_gguf(tmp_path / "m.gguf", without=("blk.1.ffn_up.weight",))))


def test_a_weight_beyond_f16_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_gguf

    original = tiny_gguf._tensors
    monkeypatch.setattr(tiny_gguf, "_tensors", lambda *a: {n: t * np.float32(1e6) for n, t in original(*a).items()})
    source = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", quantization=GGMLQuantizationType.F32))
    with pytest.raises(ModelRefused, match="range of F16"):
        write_f16(source, tmp_path / "f16.gguf", lambda _: None)


def test_shape_is_read_from_the_keys(tmp_path: Path) -> None:
    shape = gguf_shape(open_gguf(write_tiny_gguf(tmp_path / "m.gguf")))
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 2, 1, 32)
    assert (shape.vocab_size, shape.context_tokens_max, shape.tied_embeddings) == (len(TOKENS), 512, True)


def test_the_tokenizer_reads_back_what_the_file_says(tmp_path: Path) -> None:
    keys = open_gguf(write_tiny_gguf(tmp_path / "m.gguf")).keys
    model = TextModel(tokenizer_json(keys), end_token_ids=end_token_ids(keys))
    assert model.decode(model.encode("hello, wörld 12 🎉", special=False)) == "hello, wörld 12 🎉"
    assert [model.token_text(i) for i in model.encode("he wll<|im_end|>", special=True)] == [
        "he",
        " w",
        "ll",
        "<|im_end|>",
    ]
    assert token_names(keys) == {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2]}
    assert model.end_token_ids == {0, 2}


def test_a_file_that_wants_bos_gets_it_once(tmp_path: Path) -> None:
    keys = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", tokenizer__add_bos=True)).keys
    model = TextModel(tokenizer_json(keys))
    assert model.encode("he", special=True) == [1, *model.encode("he", special=False)]
    assert model.encode("<|im_start|>he", special=True) == model.encode("he", special=True)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "default"])
@pytest.mark.parametrize("text", ["don't 1234 a  b\n\n c", "🎉漢字 x=1;"])
def test_known_rules_keep_the_text(tmp_path: Path, pre: str, text: str) -> None:
    model = TextModel(tokenizer_json(open_gguf(write_tiny_gguf(tmp_path / "m.gguf", tokenizer__pre=pre)).keys))
    assert model.decode(model.encode(text, special=False)) == text


@pytest.mark.parametrize(("key", "value"), [("tokenizer__pre", "brand-new"), ("tokenizer__model", "t5")])
def test_unknown_tokenizers_are_refused(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ModelRefused, match=r"llama\.cpp"):
        tokenizer_json(open_gguf(write_tiny_gguf(tmp_path / "m.gguf", **{key: value})).keys)


@pytest.mark.parametrize(
    ("pre", "cuts"),
    [
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "ĠDON", "'", "T", "Ġit", "'s", "Ġ", "Ġx", "!", "ĊĊ"]),
        ("gpt-2", ["a", "Ġ1234", "ĠDON", "'", "T", "Ġit", "'s", "Ġ", "Ġx", "!", "ĊĊ"]),
        ("llama-bpe", ["a", "Ġ", "123", "4", "ĠDON", "'T", "Ġit", "'s", "Ġ", "Ġx", "!ĊĊ"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "ĠDON", "'T", "Ġit", "'s", "Ġ", "Ġx", "!ĊĊ"]),
    ],
)
def test_rules_cut_where_their_models_were_trained_to(tmp_path: Path, pre: str, cuts: list[str]) -> None:
    keys = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", tokenizer__pre=pre)).keys
    pre_tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(keys))).pre_tokenizer
    assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str("a 1234 DON'T it's  x!\n\n")] == cuts
