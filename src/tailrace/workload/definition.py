"""What a workload is: a strict TOML file, packaged by name or the user's own.

In: a name or a path. Out: a frozen `Workload` and the text it came from (a sender process decodes the same text again).
"""

import hashlib
import math
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config import nearest
from tailrace.errors import ConfigError
from tailrace.workload.lengths import (
    Constant,
    Empirical,
    Exponential,
    Law,
    Lognormal,
    Uniform,
    clipped_ratio,
    mean,
)

FILE_BYTES_MAX = 1024 * 1024
COHORTS_MAX = 64
GROUPS_MAX = 100_000
TURNS_MAX = 256
_CLIPPING_SAID_FROM = 0.01
_DOTTED_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){16}""")
"""No table is that deep, and tomllib keeps every start of a dotted key: 200 kB of one take 40 GB."""
_KEY_CHARS_SHOWN = 64


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sent with each request. The default is greedy, which every engine understands alike."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None

    def fields(self) -> dict[str, Any]:
        """As they stand in a request's body; what is not set is not sent (`BodyOptions.sampling`)."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature {self.temperature:g} must lie in 0 to 2")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p:g} must lie above 0, at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} must be at least 1")


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each session belongs to one of `num_groups` groups; prompts of a group begin with the same text."""

    num_groups: int = 1
    tokens: Law
    """Length of a group's text, drawn once a group."""
    zipf_exponent: float = 0.0
    """Group k (from 1) is as popular as 1 / k ** exponent; 0: all alike."""
    role: str = "user"
    """`user`: the text begins the first message. `system`: it is a message of its own, which adds tokens of the model's
    template that the calibration does not see."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_groups <= GROUPS_MAX:
            raise ValueError(f"num_groups {self.num_groups} must lie in 1 to {GROUPS_MAX}")
        if not 0 <= self.zipf_exponent <= 10:
            raise ValueError(f"zipf_exponent {self.zipf_exponent:g} must lie in 0 to 10")
        if self.role not in ("user", "system"):
            raise ValueError(f"role {self.role!r} must be user or system")


class Cancellation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Callers that leave before the end. Drawn before the run; a conversation ends with the turn that is left."""

    share_ratio: float
    """Of requests, 0 to 1."""
    after_tokens: Law = Constant(value=0)
    """How many tokens the caller waits for; 0: it leaves when the request has been sent."""

    def __post_init__(self) -> None:
        if not 0 <= self.share_ratio <= 1:
            raise ValueError(f"share_ratio {self.share_ratio:g} must lie in 0 to 1")


class Cohort(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of caller."""

    name: str = ""
    weight: float = 1.0
    """Share of sessions, against the other cohorts' weights."""
    prompt_tokens: Law
    """A turn's own tokens, besides a shared prefix and what earlier turns said; those of the model's template are
    within it."""
    output_tokens: Law
    shared_prefix: SharedPrefix | None = None
    num_turns: Law = Constant(value=1)
    think_s: Law = Constant(value=0)
    """From the end of an answer to the caller's next turn."""
    cancellation: Cancellation | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight {self.weight:g} must be a positive number")
        if len(self.name) > 64 or len(self.tenant) > 64:
            raise ValueError("name and tenant have at most 64 characters")
        turns = self.num_turns
        if max(turns.clip(0.0), turns.clip(turns.quantile(1 - 1e-9))) > TURNS_MAX:
            raise ValueError(f"num_turns goes beyond {TURNS_MAX}: give it a max")

    @property
    def has_turns(self) -> bool:
        return self.num_turns != Constant(value=1)


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file."""

    name: str
    description: str = ""
    sampling: Sampling = Sampling()
    cohorts: tuple[Cohort, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.cohorts) <= COHORTS_MAX:
            raise ValueError(f"a workload has 1 to {COHORTS_MAX} [[cohorts]]")
        names = [cohort.name for cohort in self.cohorts]
        if len(set(names)) != len(names):
            raise ValueError("two cohorts have the same name")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.name):
            raise ValueError("name must be 1 to 64 letters, digits, dots, dashes or underscores")

    @property
    def sha256(self) -> str:
        """Of all that makes load: every default written out, without name and description."""
        content = msgspec.to_builtins({"sampling": self.sampling, "cohorts": self.cohorts})
        return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()

    @property
    def declares_sharing(self) -> bool:
        """Whether prefix caches may find anything: a shared prefix, or turns that repeat their history."""
        return any(cohort.shared_prefix is not None or cohort.has_turns for cohort in self.cohorts)

    @property
    def num_turns_mean(self) -> float:
        """Requests a session, cancellations aside."""
        weight = sum(cohort.weight for cohort in self.cohorts)
        return sum(cohort.weight * mean(cohort.num_turns, whole=True) for cohort in self.cohorts) / weight

    @property
    def notes(self) -> list[str]:
        """What limits do to the laws, for the report."""
        found = []
        for cohort in self.cohorts:
            for key in ("prompt_tokens", "output_tokens"):
                low, high = clipped_ratio(getattr(cohort, key))
                if low + high >= _CLIPPING_SAID_FROM:
                    where = f"{cohort.name}: " if cohort.name else ""
                    clipped = {"lifted to min": low, "cut to max": high}
                    said = [f"{share:.1%} of draws are {how}" for how, share in clipped.items() if share >= 0.001]
                    found.append(f"{where}{key}: {', '.join(said)}")
        return found


def named_workloads() -> list[str]:
    """Names of the packaged workloads, sorted."""
    folder = resources.files("tailrace.workload") / "named"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def read_workload_text(name_or_path: str) -> str:
    """Text of a packaged workload, or of a file. A name without slash and dot is looked up among the packaged ones.

    Raises ConfigError when there is no such name or file, or it is too large or not UTF-8.
    """
    if re.fullmatch(r"[A-Za-z0-9_-]+", name_or_path) and not Path(name_or_path).is_file():
        names = named_workloads()
        if name_or_path not in names:
            raise ConfigError(
                f"no workload {name_or_path!r}; the nearest is {nearest(name_or_path, names)!r}. Named workloads: "
                f"{', '.join(names)}. A file of your own: give its path",
                param="workload",
            )
        return (resources.files("tailrace.workload") / "named" / f"{name_or_path}.toml").read_text(encoding="utf-8")
    return _read_file(Path(name_or_path))


def decode_workload(text: str, origin: str = "the workload") -> Workload:
    """The workload of a TOML text. Raises ConfigError that names the key at fault."""
    if _DOTTED_KEY.search(text):
        raise ConfigError(f"{origin} has a key of more than 16 parts: is it a workload?", param="workload")
    try:
        raw = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and int's own of a number with thousands of digits
        raise ConfigError(f"{origin} is not valid TOML: {error}", param="workload") from error
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply", param="workload") from None
    try:
        return msgspec.convert(raw, Workload, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_explain(str(error), raw)}", param="workload") from error


def load_workload(name_or_path: str) -> Workload:
    """`decode_workload` of `read_workload_text`."""
    return decode_workload(read_workload_text(name_or_path), name_or_path)


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the workload {str(path)!r}: {why}", param="workload") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes: is it a workload?", param="workload")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})", param="workload") from error


_TABLES: dict[str, type[msgspec.Struct]] = {
    "": Workload,
    "cohorts": Cohort,
    "sampling": Sampling,
    "shared_prefix": SharedPrefix,
    "cancellation": Cancellation,
}
_LAWS: dict[str, type[msgspec.Struct]] = {
    "constant": Constant,
    "uniform": Uniform,
    "lognormal": Lognormal,
    "exponential": Exponential,
    "empirical": Empirical,
}
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `\$([^`]*)`)?$")


def _explain(message: str, raw: dict[str, Any]) -> str:
    """msgspec's words, and the nearest key where one is unknown."""
    unknown = _UNKNOWN.match(message)
    if unknown is not None:
        key, path = unknown.group(1), unknown.group(2) or ""
        choices = _keys_at(path, raw)
        if choices:
            where = f" in {path.lstrip('.')}" if path else ""
            key = key[:_KEY_CHARS_SHOWN]
            return f"unknown key {key!r}{where}; the nearest is {nearest(key, choices)!r}"
    if "Invalid value " in message and ".law" in message:
        return f"{message}; laws: {', '.join(_LAWS)}"
    return message.replace("`$.", "`").replace("Object", "Table").replace("field", "key")


def _keys_at(path: str, raw: dict[str, Any]) -> list[str]:
    """Keys that the table at msgspec's path (`.cohorts[0].prompt_tokens`) may have."""
    value: Any = raw
    name = ""
    for name, position in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[int(position)] if position else value[name]
    steps = re.findall(r"\.(\w+)", path)
    name = steps[-1] if steps else ""
    table = _TABLES.get(name) or _LAWS.get(value.get("law", ""))
    if table is None:
        return []
    return [*table.__struct_fields__, *(["law"] if name not in _TABLES else [])]
