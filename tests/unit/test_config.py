"""The mechanism of configuration on made-up sections."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import config
from tailrace.config import Resolved
from tailrace.errors import ConfigError


class Wheel(msgspec.Struct, frozen=True, kw_only=True):
    num_blades: Annotated[int, msgspec.Meta(ge=1)] = 3
    """Blades."""
    pitch_ratio: float = 0.5
    material: Literal["steel", "bronze"] = "steel"
    names: tuple[str, ...] = ()
    speed_max: int | None = None


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    width_m: float = 2.0
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.width_m > 10:
            raise ValueError("width_m above 10 does not fit the channel")


SECTIONS = {"wheel": Wheel, "gate": Gate}


def decode(text: str = "", *assignments: str) -> config.Configuration:
    return config.decode(SECTIONS, text, "mill.toml", [config.parse_assignment(item) for item in assignments])


def message_of(text: str = "", *assignments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        decode(text, *assignments)
    return caught.value.message


def test_an_empty_file_gives_the_defaults() -> None:
    assert decode().section(Wheel) == Wheel()
    assert decode().origins == {}


def test_values_of_the_file_are_decoded_to_the_types_of_the_section() -> None:
    decoded = decode('[wheel]\nnum_blades = 7\npitch_ratio = 1\nnames = ["a", "b"]\n')
    assert decoded.section(Wheel) == Wheel(num_blades=7, pitch_ratio=1.0, names=("a", "b"))
    assert decoded.origins["wheel", "num_blades"] == "mill.toml"


def test_an_unknown_key_names_the_nearest_key_and_the_file() -> None:
    message = message_of("[wheel]\nnum_blade = 4")
    assert "num_blade" in message
    assert "'num_blades'" in message
    assert "mill.toml" in message


def test_an_unknown_section_names_the_nearest_section() -> None:
    assert "the nearest is [wheel]" in message_of("[whel]\nnum_blades = 4")


def test_a_key_of_another_section_is_sent_there() -> None:
    assert "it belongs to [gate]" in message_of("[wheel]\nwidth_m = 4.0")


def test_a_wrong_type_names_key_value_and_file() -> None:
    message = message_of('[wheel]\nnum_blades = "many"')
    assert "num_blades = 'many' in mill.toml" in message
    assert "expected `int`" in message


@pytest.mark.parametrize(
    "text", ["[wheel]\nnum_blades = 0", "[wheel]\nmaterial = 'wood'", "[gate]\nwidth_m = 11.0", "wheel = 3", "[wheel"]
)
def test_a_value_out_of_range_is_refused(text: str) -> None:
    assert "mill.toml" in message_of(text)


def test_an_assignment_wins_over_the_file_and_the_last_assignment_over_earlier_ones() -> None:
    decoded = decode("[wheel]\nnum_blades = 7", "wheel.num_blades=8", "wheel.num_blades=9")
    assert decoded.section(Wheel).num_blades == 9
    assert decoded.origins["wheel", "num_blades"] == "--set"


def test_an_assigned_value_is_toml_or_else_a_string() -> None:
    decoded = decode("", "wheel.material=bronze", 'wheel.names=["x=y"]', "gate.width_m=3.5")
    assert decoded.section(Wheel) == Wheel(material="bronze", names=("x=y",))
    assert decoded.section(Gate).width_m == 3.5


def test_a_string_key_takes_digits_as_text() -> None:
    assert decode("", "gate.api_key=12345").section(Gate).api_key == "12345"


@pytest.mark.parametrize("text", ["wheel", "wheel.num_blades", "num_blades=3", ".num_blades=3", "wheel.=3", ""])
def test_a_malformed_assignment_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        config.parse_assignment(text)


def test_an_unknown_assigned_key_names_the_nearest_one() -> None:
    assert "from --set; the nearest is 'num_blades'" in message_of("", "wheel.blades=3")


def test_a_flag_left_out_changes_nothing_and_a_given_one_is_named_as_origin() -> None:
    flags = config.flag_assignments({"--blades": ("wheel.num_blades", 5), "--speed": ("wheel.speed_max", None)})
    decoded = config.decode(SECTIONS, "", "none", flags)
    assert decoded.section(Wheel) == Wheel(num_blades=5)
    assert decoded.origins == {("wheel", "num_blades"): "--blades"}


def test_rows_carry_value_origin_and_reason() -> None:
    decoded = decode("[wheel]\nnum_blades = 7")
    table = {row.key: row for row in config.rows(decoded, {"wheel.speed_max": Resolved(90, "the river's")})}
    assert (table["num_blades"].value, table["num_blades"].origin) == (7, "mill.toml")
    assert (table["pitch_ratio"].value, table["pitch_ratio"].origin) == (0.5, "default")
    assert (table["speed_max"].value, table["speed_max"].origin) == (90, "computed")
    assert table["speed_max"].reason == "the river's"


def test_a_given_value_that_was_cut_shows_what_it_became() -> None:
    decoded = decode("[wheel]\nspeed_max = 100")
    table = {row.key: row for row in config.rows(decoded, {"wheel.speed_max": Resolved(90, "cut to the river's")})}
    assert (table["speed_max"].value, table["speed_max"].origin) == (90, "mill.toml")


def test_a_secret_is_never_shown() -> None:
    decoded = decode("", "gate.api_key=hush")
    assert "hush" not in repr(config.rows(decoded))
    assert "hush" not in message_of("[gate]\napi_key = ['hush']")


def test_file_problems_are_configuration_errors(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (config.FILE_BYTES_MAX + 1))
    for path in (missing, binary, large, tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            config.load(SECTIONS, path)


def test_bytes_that_are_not_utf8_are_refused_wherever_text_is_wanted() -> None:
    with pytest.raises(ConfigError, match=r"\[gate\] api_key from --set is not UTF-8"):
        decode("", "gate.api_key=k\udcff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        config.decode(SECTIONS, "", "-", config.flag_assignments({"--api-key": ("gate.api_key", "k\udcff")}))


def test_deeply_nested_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        decode(f"a = {'[' * 100_000}")
    with pytest.raises(ConfigError, match="expected `float`"):
        decode("", f"gate.width_m={'[' * 100_000}")


def test_the_environment_is_three_variables() -> None:
    read = config.read_environment({"HOME": "/home/u", "TAILRACE_CONFIG": "/etc/t.toml", "TAILRACE_PORT": "1"})
    assert read == config.Environment(config_path=Path("/etc/t.toml"), cache_dir=Path("/home/u/.cache/tailrace"))
    moved = config.read_environment({"HOME": "/home/u", "XDG_CACHE_HOME": "/fast"})
    assert moved == config.Environment(config_path=None, cache_dir=Path("/fast/tailrace"))
    relative = config.read_environment({"HOME": "/home/u", "XDG_CACHE_HOME": "fast", "TAILRACE_CONFIG": ""})
    assert relative == config.Environment(config_path=None, cache_dir=Path("/home/u/.cache/tailrace"))


@given(st.text())
def test_any_text_as_file_is_decoded_or_refused(text: str) -> None:
    try:
        decode(text)
    except ConfigError:
        return


@given(st.text())
def test_any_text_as_assignment_is_decoded_or_refused(text: str) -> None:
    try:
        decode("", f"wheel.names={text}")
    except ConfigError:
        return
