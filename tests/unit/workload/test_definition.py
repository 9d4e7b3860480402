from pathlib import Path

import pytest
from plan_sources import SIMPLE

from tailrace.errors import ConfigError
from tailrace.workload.definition import (
    FILE_BYTES_MAX,
    Cancellation,
    Cohort,
    Sampling,
    SharedPrefix,
    Workload,
    decode_workload,
    load_workload,
    named_workloads,
    read_workload_text,
)
from tailrace.workload.traces import read_trace

NEEDED = ("chat", "rag-shared-prefix", "long-documents", "conversation", "code-completion", "mixed")
FIXED = ("single-256-128", "prompt-2048", "shared-900-60-48", "own-1000-64", "own-128-512", "mixed-long-short")

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "workloads.md").read_text(encoding="utf-8")

LAWS = """prompt_tokens = { law = "constant", value = 5 }
output_tokens = { law = "constant", value = 5 }
"""


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        decode_workload(text, "file.toml")
    assert "\n" not in caught.value.message
    return caught.value.message


def test_every_promised_workload_is_packaged() -> None:
    assert set(NEEDED + FIXED) <= set(named_workloads())


@pytest.mark.parametrize("name", named_workloads())
def test_a_packaged_workload_decodes_bears_its_files_name_and_says_what_it_is(name: str) -> None:
    workload = load_workload(name)
    assert workload.name == name
    assert workload.description
    assert "\n# " in read_workload_text(name), "its figures have a reason"


@pytest.mark.parametrize("name", named_workloads())
def test_no_packaged_law_is_clipped_so_much_that_it_is_another_law(name: str) -> None:
    shares = [float(word.rstrip("%")) for note in load_workload(name).notes for word in note.split() if "%" in word]
    assert all(share <= 5.0 for share in shares)


def test_only_workloads_with_prefixes_or_turns_declare_sharing() -> None:
    sharing = {name for name in named_workloads() if load_workload(name).declares_sharing}
    assert sharing == {"rag-shared-prefix", "conversation", "code-completion", "mixed", "shared-900-60-48"}


def test_the_hash_is_of_the_load_and_not_of_words_about_it() -> None:
    workload = decode_workload(SIMPLE)
    renamed = decode_workload("# comment\n" + SIMPLE.replace('"simple"', '"other"\ndescription = "more"'))
    written_out = decode_workload(SIMPLE + "weight = 1\n[sampling]\ntemperature = 0.0\n")
    longer = decode_workload(SIMPLE.replace("value = 7", "value = 8"))
    warmer = decode_workload(SIMPLE + "[sampling]\ntemperature = 0.5\n")
    assert workload.sha256 == renamed.sha256 == written_out.sha256
    assert len({workload.sha256, longer.sha256, warmer.sha256}) == 3


def test_sampling_sends_what_is_set_and_greedy_by_default() -> None:
    assert decode_workload(SIMPLE).sampling.fields() == {"temperature": 0.0}
    warm = decode_workload(SIMPLE + "[sampling]\ntemperature = 0.5\ntop_k = 40\n")
    assert warm.sampling.fields() == {"temperature": 0.5, "top_k": 40}


def test_mean_turns_of_cohorts_go_by_their_weights() -> None:
    text = f'name = "a"\n[[cohorts]]\nname = "one"\nweight = 3\n{LAWS}[[cohorts]]\nname = "five"\n{LAWS}'
    text += 'num_turns = { law = "constant", value = 5 }\n'
    assert decode_workload(text).num_turns_mean == 2.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nam = 'a'\n[[cohorts]]\n" + LAWS, "unknown key 'nam'; the nearest is 'name'"),
        (SIMPLE + "wieght = 2", "unknown key 'wieght' in cohorts[0]; the nearest is 'weight'"),
        (SIMPLE.replace("low", "lowest"), "unknown key 'lowest' in cohorts[0].prompt_tokens; the nearest is 'low'"),
        (SIMPLE + "[sampling]\ntemprature = 1", "unknown key 'temprature' in sampling; the nearest is 'temperature'"),
        (
            SIMPLE + "[cohorts.shared_prefix]\ngroups = 2",
            "unknown key 'groups' in cohorts[0].shared_prefix; the nearest is 'num_groups'",
        ),
    ],
)
def test_an_unknown_key_fails_and_names_its_place_and_the_nearest(text: str, said: str) -> None:
    assert said in refusal(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "not valid TOML"),
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a." * 100_000 + "a = 1", "a key of more than 16 parts"),
        ("a = " + "9" * 5000, "not valid TOML"),
        ("k" * 100_000 + " = 1", "unknown key '" + "k" * 64 + "'"),
        ("name = 'a'", "missing required key `cohorts`"),
        ("name = 'a'\ncohorts = []", "1 to 64"),
        ("name = 'a b'\n[[cohorts]]\n" + LAWS, "name must be"),
        (SIMPLE.replace("uniform", "unifrm"), "laws: constant, uniform"),
        (SIMPLE.replace("low = 10", "low = true"), "Expected `float`"),
        (SIMPLE + "weight = 0", "weight 0"),
        (SIMPLE + "weight = nan", "weight nan"),
        (SIMPLE + SIMPLE.partition("\n[[")[2].join(["[[", ""]), "same name"),
        (SIMPLE + "[sampling]\ntemperature = 3", "temperature 3"),
        (SIMPLE + 'num_turns = { law = "exponential", mean = 30 }', "num_turns goes beyond"),
        (SIMPLE + "[cohorts.cancellation]\nshare_ratio = 1.5", "share_ratio 1.5"),
        (SIMPLE + '[cohorts.shared_prefix]\nnum_groups = 0\ntokens = { law = "constant", value = 3 }', "num_groups 0"),
        (SIMPLE + '[cohorts.shared_prefix]\nrole = "x"\ntokens = { law = "constant", value = 3 }', "role 'x'"),
    ],
)
def test_a_wrong_workload_ends_in_one_line_that_names_the_file_and_the_fault(text: str, said: str) -> None:
    message = refusal(text)
    assert message.startswith("file.toml")
    assert said in message
    assert len(message) < 400


def test_an_unknown_name_gives_the_nearest_and_all_names() -> None:
    with pytest.raises(ConfigError, match=r"nearest is 'chat'.*code-completion") as caught:
        load_workload("caht")
    assert caught.value.param == "workload"


def test_a_file_of_ones_own_is_read_by_its_path_and_by_a_bare_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text(SIMPLE)
    (tmp_path / "bare").write_text(SIMPLE)
    monkeypatch.chdir(tmp_path)
    assert load_workload(str(tmp_path / "mine.toml")).name == "simple"
    assert load_workload("bare").name == "simple"


@pytest.mark.parametrize("path", ["missing.toml", ".", "a\0b.toml", "./chat"])
def test_a_path_that_cannot_be_read_is_said_in_one_line(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot read the workload"):
        load_workload(path)


def test_a_file_without_end_or_without_text_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_workload(str(large))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_workload(str(binary))


def block(language: str) -> str:
    return PAGE.partition(f"```{language}\n")[2].partition("```")[0]


def test_the_pages_example_is_a_workload_and_shows_every_key() -> None:
    workload = decode_workload(block("toml"))
    assert [cohort.name for cohort in workload.cohorts] == ["question", "conversation"]
    keys = {*Workload.__struct_fields__, *Cohort.__struct_fields__, *SharedPrefix.__struct_fields__}
    keys |= {*Cancellation.__struct_fields__, *Sampling.__struct_fields__}
    assert {key for key in keys if key not in block("toml")} == set()


def test_the_page_lists_the_packaged_workloads() -> None:
    assert [name for name in named_workloads() if f"| `{name}` |" not in PAGE] == []


def test_the_pages_trace_is_read(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(block("json"))
    read = read_trace(str(tmp_path / "trace.jsonl"))
    assert (read.layout, [len(turns) for turns in read.sessions]) == ("tailrace", [1, 2, 1])


@pytest.mark.parametrize("name", named_workloads())
def test_a_packaged_prompt_has_room_for_a_chat_template_and_its_own_start(name: str) -> None:
    """30 tokens of template (SmolLM2's with its default system text) and 8 words of salt."""
    for cohort in load_workload(name).cohorts:
        law = cohort.prompt_tokens
        prefix = 0 if cohort.shared_prefix is None else cohort.shared_prefix.tokens.quantile(1e-9)
        assert prefix + law.clip(law.quantile(1e-9)) >= 38
