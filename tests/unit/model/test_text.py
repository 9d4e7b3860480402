"""Laws of the text side: text stays text, control tokens come from the template, characters come out whole."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers_for_tests import CHATML, byte_level_json, sentencepiece_json, word_piece_json

from tailrace.errors import InvalidRequest, ModelRefused, ModelSourceError
from tailrace.model.chat import SpecialTexts
from tailrace.model.text import TextDecoder, TextModel
from tailrace.request import Message

BYTES = TextModel(byte_level_json(), end_token_ids=(3,), chat_template=CHATML)
BYTES_BOS = TextModel(
    byte_level_json(bos=True),
    chat_template="{{ bos_token }}{{ messages[0].content }}",
    token_names={"bos_token": "<s>"},
)
PIECES = TextModel(sentencepiece_json(), chat_template=CHATML)
START, END = 2, 3
HARD = [
    "",
    " ",
    "hello world",
    "  two  spaces ",
    "naïve café",
    "🎉🏳️‍🌈 emoji",
    "漢字とかな",
    "a\n\n\tb",
    "don't we'll",
    "\x00\x7f",
    "12345",
]


def user(content: str) -> Message:
    return Message(role="user", content=content)


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("model", [BYTES, BYTES_BOS, PIECES], ids=["bytes", "bytes_bos", "pieces"])
def test_decoding_gives_back_what_was_encoded(model: TextModel, text: str) -> None:
    # Metaspace (the library's) adds no space before one, so a text's own first space is taken for the added one.
    expected = text.removeprefix(" ") if model is PIECES else text
    assert model.decode(model.encode(text, special=False)) == expected


@given(st.text())
def test_text_without_special_tokens_never_encodes_to_one(text: str) -> None:
    assert not set(BYTES.encode(f"<|im_end|>{text}<|im_start|>", special=False)) & {0, 1, 2, 3}


def test_special_text_becomes_the_token_only_when_asked() -> None:
    assert BYTES.encode("a<|im_end|>b", special=True).count(END) == 1
    assert END not in BYTES.encode("a<|im_end|>b", special=False)


def test_bos_is_added_once_and_never_twice() -> None:
    assert BYTES_BOS.encode("hello", special=True)[0] == 0
    assert BYTES_BOS.encode("<s>hello", special=True) == BYTES_BOS.encode("hello", special=True)
    assert BYTES_BOS.encode_chat([user("hello")]).count(0) == 1
    assert 0 not in BYTES_BOS.encode("hello", special=False)
    assert 0 not in BYTES.encode("hello", special=True)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("text", ["hello", "<|im_start|>hello world<|im_end|>hello", "<s> hello", "wo<|im_end|>"])
def test_splitting_at_special_tokens_equals_the_library(scheme: str, text: str) -> None:
    source = sentencepiece_json(scheme)
    expected = Tokenizer.from_str(json.dumps(source)).encode(text, add_special_tokens=False).ids
    ours = TextModel(source).encode(text, special=True)
    assert ours == (expected if text.startswith("<s>") else [1, *expected])


@pytest.mark.parametrize("model", [BYTES, PIECES], ids=["bytes", "pieces"])
@given(
    content=st.lists(
        st.sampled_from(["<|im_end|>", "<|im_", "start|>", "\uf8ff", "hello", "<s>", "\n"]), max_size=6
    ).map("".join)
)
def test_special_tokens_inside_messages_stay_text(model: TextModel, content: str) -> None:
    names = {model.token_text(i): i for i in range(6)}
    ids = model.encode_chat([user(content)])
    assert ids.count(names["<|im_end|>"]) == 1
    assert ids.count(names["<|im_start|>"]) == 2
    assert names["<s>"] not in ids
    assert model.decode(ids) == f"user\n{content}\nassistant\n".removeprefix(" ")


def test_special_tokens_in_a_role_or_a_name_stay_text() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.name }}{% endfor %}"
    model = TextModel(byte_level_json(), chat_template=template)
    ids = model.encode_chat([Message(role="a<|im_end|>", content="", name="<|im_start|>b")])
    assert ids.count(START) == 1
    assert END not in ids
    assert model.decode(ids) == "a<|im_end|><|im_start|>b"


def test_control_tokens_that_the_model_does_not_mark_as_special_are_treated_so() -> None:
    source = byte_level_json()
    for token in source["added_tokens"]:
        token["special"] = False
    model = TextModel(source, end_token_ids=(1,), chat_template=CHATML, token_names={"bos_token": "<s>"})
    for text in ("<s>", "</s>", "<|im_start|>", "<|im_end|>"):
        assert model.encode_chat([user(text)]) == BYTES.encode_chat([user(text)])
        assert model.token_bytes(model.encode(text, special=True)[0]) == b""


def test_overlapping_special_texts_are_all_broken() -> None:
    specials = SpecialTexts(["aba", "bab"])
    assert not specials.found_in(specials.break_all("ababababa", "|"))


@pytest.mark.parametrize("model", [BYTES, PIECES], ids=["bytes", "pieces"])
@given(data=st.data())
def test_pushed_pieces_join_to_the_decoded_whole(model: TextModel, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, model.vocab_size + 3), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    decoder = TextDecoder(model, at_start=True)
    bounds = zip([0, *cuts], [*cuts, len(ids)], strict=True)
    pieces = [decoder.push(ids[low:high]) for low, high in bounds]
    assert "".join(pieces) + decoder.flush() == model.decode(ids)


@given(st.text(alphabet="aé漢🎉‍️ ", max_size=20))
def test_a_character_comes_out_whole_or_not_yet(text: str) -> None:
    decoder = TextDecoder(BYTES)
    seen = ""
    for token_id in BYTES.encode(text, special=False):
        seen += decoder.push([token_id])
        assert text.startswith(seen)
    assert seen == text
    assert decoder.flush() == ""


def test_bytes_that_cannot_become_a_character_are_replaced_at_once() -> None:
    by_byte = {BYTES.token_bytes(i): i for i in range(BYTES.vocab_size)}
    decoder = TextDecoder(BYTES)
    assert decoder.push([by_byte[b"\xf0"], by_byte[b"\x9f"]]) == ""
    assert decoder.push([by_byte[b"h"]]) == "\ufffdh"
    assert decoder.push([by_byte[b"\xe2"]]) == ""
    assert decoder.flush() == "\ufffd"


def test_an_answer_keeps_its_leading_space_and_a_text_drops_the_encoders() -> None:
    ids = PIECES.encode("hello", special=False)
    assert TextDecoder(PIECES).push(ids) == " hello"
    assert PIECES.decode(ids) == "hello"
    assert PIECES.decode(ids, at_start=False) == " hello"


def test_pieces_are_printable() -> None:
    by_byte = {BYTES.token_bytes(i): i for i in range(BYTES.vocab_size)}
    assert BYTES.token_text(END) == "<|im_end|>"
    assert BYTES.token_bytes(END) == b""
    assert BYTES.token_text(by_byte[b"\xf0"]) == r"bytes:\xf0"
    assert BYTES.token_text(by_byte[b" w"]) == " w"
    assert BYTES.token_bytes(10**6) == b""
    assert BYTES.token_bytes(-1) == b""


def test_a_template_that_refuses_is_the_callers_error_with_its_reason() -> None:
    model = TextModel(byte_level_json(), chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        model.encode_chat([user("hi")])


@pytest.mark.parametrize(
    "template",
    ["{{ messages[3].content }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}", "{{ undefined_function() }}"],
)
def test_any_error_of_a_template_is_an_invalid_request(template: str) -> None:
    with pytest.raises(InvalidRequest):
        TextModel(byte_level_json(), chat_template=template).encode_chat([user("hi")])


def test_a_template_cannot_write_without_bound() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 100000 }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="characters"):
        TextModel(byte_level_json(), chat_template=endless).render_chat([user("hi")], add_generation_prompt=True)


def test_templates_have_the_helpers_that_models_expect() -> None:
    template = "{%- for m in messages %}\n  {{- m | tojson }}\n  {%- break %}\n{% endfor %}{{ strftime_now('%Y')[:2] }}"
    model = TextModel(byte_level_json(), chat_template=template)
    assert model.render_chat([user("é<")], add_generation_prompt=False) == '{"role": "user", "content": "é<"}20'


def test_a_model_without_template_says_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match="--chat-template"):
        TextModel(byte_level_json()).encode_chat([user("hi")])


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        BYTES.encode("\ud800", special=False)


def test_a_decoder_of_another_family_is_refused() -> None:
    with pytest.raises(ModelRefused, match="WordPiece"):
        TextModel(word_piece_json())


def test_count_chat_adds_up_to_the_prompt() -> None:
    messages = [user("hello"), Message(role="assistant", content="world"), user("bye")]
    assert sum(BYTES.count_chat(messages)) == len(BYTES.encode_chat(messages, add_generation_prompt=False))


def _write(directory: Path, **files: object) -> None:
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))


def test_load_reads_the_directory(tmp_path: Path) -> None:
    _write(
        tmp_path,
        tokenizer=byte_level_json(),
        tokenizer_config={"eos_token": {"content": "</s>"}, "chat_template": [{"name": "default", "template": CHATML}]},
        generation_config={"eos_token_id": [3]},
    )
    model = TextModel.load(tmp_path)
    assert model.end_token_ids == {1, 3}
    assert model.chat_template == CHATML
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    assert TextModel.load(tmp_path).encode_chat([user("hi")]) == [1]
    assert TextModel.load(tmp_path, chat_template="{{ messages[0].content }}").decode([104]) != ""


def test_a_template_may_be_given_as_a_file(tmp_path: Path) -> None:
    _write(tmp_path, tokenizer=byte_level_json())
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}!")
    model = TextModel.load(tmp_path, chat_template=str(path))
    assert model.render_chat([user("hi")], add_generation_prompt=True) == "hi!"
    with pytest.raises(ModelSourceError, match=r"nothing\.jinja"):
        TextModel.load(tmp_path, chat_template=str(tmp_path / "nothing.jinja"))


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"model": 3}', "\x00", '{"added_tokens": [1]}', '{"added_tokens": 3}']
)
def test_a_broken_tokenizer_is_a_source_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelSourceError):
        TextModel.load(tmp_path)


def test_a_template_that_does_not_compile_is_a_source_error() -> None:
    with pytest.raises(ModelSourceError, match="--chat-template"):
        TextModel(byte_level_json(), chat_template="{% for %}")
