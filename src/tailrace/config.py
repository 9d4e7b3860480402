"""The mechanism of configuration: one TOML file whose tables are folders, strict, with the origin of every value.

In: the section types (frozen Structs beside the code they configure), a TOML text, assignments from the command line.
Out: a `Configuration` of decoded sections that knows where each value came from. This file knows no section by name,
and it alone reads the environment.
"""

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tailrace.errors import ConfigError

FILE_BYTES_MAX = 1024 * 1024
"""A configuration file is a page of text; more than this is the wrong file."""

SECRET_KEYS = frozenset({"api_key"})
"""Shown as set or not set, never as they are."""

Section = TypeVar("Section", bound=msgspec.Struct)
SectionTypes = Mapping[str, type[msgspec.Struct]]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """All that tailrace takes from the environment."""

    config_path: Path | None
    """TAILRACE_CONFIG."""
    cache_dir: Path
    """`tailrace` below XDG_CACHE_HOME, else below ~/.cache."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """One value given on the command line. `text` is what the user wrote, when `value` was parsed from it."""

    section: str
    key: str
    value: Any
    origin: str
    """As shown: `--set`, or the name of the flag."""
    text: str | None = None


class ConfigRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `tailrace config show`. `value` None: computed when a model is given."""

    section: str
    key: str
    value: Any
    origin: str
    """`default`, `computed`, the file's path, or the flag."""
    reason: str | None = None


class Resolved(msgspec.Struct, frozen=True):
    """What a value left out became, and why."""

    value: Any
    reason: str


class Configuration(msgspec.Struct, frozen=True):
    """Decoded sections by name, and the origin of each value that is not a default."""

    sections: dict[str, msgspec.Struct]
    origins: dict[tuple[str, str], str]

    def section(self, section_type: type[Section]) -> Section:
        """The section of that type; asserts that it was asked for when decoding."""
        for value in self.sections.values():
            if isinstance(value, section_type):
                return value
        raise AssertionError(f"section {section_type.__name__} was not decoded")


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """The only reader of the environment. Empty variables count as absent; XDG asks for absolute paths."""
    values = os.environ if variables is None else variables
    config = values.get("TAILRACE_CONFIG") or None
    cache_home = values.get("XDG_CACHE_HOME", "")
    home = Path(values["HOME"]) if values.get("HOME") else Path.home()
    base = Path(cache_home) if cache_home.startswith("/") else home / ".cache"
    return Environment(config_path=Path(config) if config else None, cache_dir=base / "tailrace")


def read_file(path: Path) -> str:
    """Text of a configuration file. Raises ConfigError when it is missing, unreadable, too large or not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes: is it a configuration file?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error


def load(section_types: SectionTypes, path: Path | None, assignments: Sequence[Assignment] = ()) -> Configuration:
    """`decode` of a file; without a path, of defaults and assignments alone."""
    return decode(section_types, "" if path is None else read_file(path), str(path), assignments)


def decode(
    section_types: SectionTypes, text: str, file_name: str, assignments: Sequence[Assignment] = ()
) -> Configuration:
    """Strictly decodes a TOML text into the sections; assignments win over the file, later ones over earlier.

    Raises ConfigError, naming file, section, key and value, and for an unknown name the nearest one.
    """
    raw: dict[str, dict[str, Any]] = {name: {} for name in section_types}
    origins: dict[tuple[str, str], str] = {}
    for section, table in _parse(text, file_name).items():
        _check_section(section_types, section, f"in {file_name}")
        if not isinstance(table, dict):
            raise ConfigError(f"{section} in {file_name} must be a table: write [{section}]", param=section)
        for key, value in table.items():
            field = _field(section_types, section, key, f"in {file_name}")
            raw[section][key] = _convert(field, section, value, f"in {file_name}")
            origins[section, key] = file_name
    for given in assignments:
        place = f"from {given.origin}"
        _check_section(section_types, given.section, place)
        field = _field(section_types, given.section, given.key, place)
        raw[given.section][given.key] = _convert(field, given.section, given.value, place, given.text)
        origins[given.section, given.key] = given.origin
    sections = {name: _build(section_types[name], name, values, origins) for name, values in raw.items()}
    return Configuration(sections, origins)


def parse_assignment(text: str) -> Assignment:
    """`section.key=value`, the value as TOML or, when it is not TOML, as a string. Raises ConfigError."""
    name, equals, value_text = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {text!r}: write section.key=value, for example engine.sequences_max=8", param=name)
    return Assignment(
        section=section, key=key, value=_toml_value(value_text.strip()), origin="--set", text=value_text.strip()
    )


def flag_assignments(flags: Mapping[str, tuple[str, Any]]) -> list[Assignment]:
    """Named flags as assignments: `{"--port": ("worker.port", 8000)}`; None means that the flag was not given."""
    given = []
    for flag, (name, value) in flags.items():
        if value is not None:
            section, _, key = name.partition(".")
            given.append(Assignment(section=section, key=key, value=value, origin=flag))
    return given


def rows(configuration: Configuration, resolved: Mapping[str, Resolved] | None = None) -> list[ConfigRow]:
    """Every value with its origin. `resolved` (by `section.key`) says what the ones left out became, and why."""
    table = []
    for name, section in configuration.sections.items():
        for field in msgspec.structs.fields(section):
            value = getattr(section, field.name)
            origin = configuration.origins.get((name, field.name))
            found = (resolved or {}).get(f"{name}.{field.name}")
            if found is not None and found.value != value:
                value, origin = found.value, origin or "computed"
            if field.name in SECRET_KEYS:
                value = "(set)" if value else None
            reason = found.reason if found is not None else None
            table.append(
                ConfigRow(section=name, key=field.name, value=value, origin=origin or "default", reason=reason)
            )
    return table


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most like the name; None only without choices."""
    found = difflib.get_close_matches(name, sorted(choices), n=1, cutoff=0.0)
    return found[0] if found else None


def is_utf8(text: str) -> bool:
    """Whether `text` came from UTF-8: Python keeps other bytes of an argument as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse(text: str, file_name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file_name} is not valid TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{file_name} is nested too deeply") from None


def _toml_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return table["value"] if list(table) == ["value"] else text


def _check_section(section_types: SectionTypes, section: str, place: str) -> None:
    if section not in section_types:
        raise ConfigError(
            f"unknown section [{section}] {place}; the nearest is [{nearest(section, section_types)}]", param=section
        )


def _field(section_types: SectionTypes, section: str, key: str, place: str) -> msgspec.structs.FieldInfo:
    fields = {field.name: field for field in msgspec.structs.fields(section_types[section])}
    if key in fields:
        return fields[key]
    for other, other_type in section_types.items():
        if key in other_type.__struct_fields__:
            raise ConfigError(f"unknown key {key!r} in [{section}] {place}; it belongs to [{other}]", param=key)
    raise ConfigError(
        f"unknown key {key!r} in [{section}] {place}; the nearest is {nearest(key, fields)!r}", param=f"{section}.{key}"
    )


def _convert(field: msgspec.structs.FieldInfo, section: str, value: Any, place: str, text: str | None = None) -> Any:
    """The value as the field's type. `text`: what the user wrote, tried when the parsed value does not fit."""
    if isinstance(value, str) and not is_utf8(value):
        # Nothing could be encoded with it later: not a key to compare with, not a model's name in an answer.
        raise ConfigError(f"[{section}] {field.name} {place} is not UTF-8 text", param=f"{section}.{field.name}")
    try:
        return msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        if text is not None and text != value:
            try:
                return msgspec.convert(text, field.type)
            except msgspec.ValidationError:
                pass
        shown = "(not shown)" if field.name in SECRET_KEYS else repr(value)
        raise ConfigError(
            f"[{section}] {field.name} = {shown} {place}: {_lower_first(str(error))}", param=f"{section}.{field.name}"
        ) from error


def _build(
    section_type: type[msgspec.Struct], name: str, values: dict[str, Any], origins: Mapping[tuple[str, str], str]
) -> msgspec.Struct:
    try:
        return section_type(**values)
    except (TypeError, ValueError) as error:
        places = sorted({origins[name, key] for key in values})
        raise ConfigError(f"[{name}] from {', '.join(places) or 'defaults'}: {error}", param=name) from error


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
