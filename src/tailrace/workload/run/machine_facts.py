"""What a reader needs to know of the host that measured; nothing here names its owner or its network."""

import platform
from pathlib import Path
from typing import Any

import tailrace
from tailrace.executor.machine import read_hardware
from tailrace.workload.send.self_check import cpu_governor

_TEXT_MAX = 200


def machine_facts() -> dict[str, Any]:
    """Values that are not known are left out."""
    hardware = read_hardware()
    found = {
        "cpu": _cpu_model(),
        "num_cpus": len(hardware.cpu_ids),
        "num_cores": hardware.num_cores,
        "cpu_quota": hardware.cpu_quota,
        "governor": cpu_governor(),
        "memory_bytes": hardware.memory_total_bytes,
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "tailrace": tailrace.__version__,
        "commit": _commit(Path(tailrace.__file__).resolve()),
    }
    return {name: value for name, value in found.items() if value is not None}


def _cpu_model() -> str | None:
    return _value_of("/proc/cpuinfo", "model name")


def _value_of(path: str, name: str) -> str | None:
    """Of the first line `name : value`."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == name:
                    return value.strip()[:_TEXT_MAX] or None
    except OSError:
        pass
    return None


def _commit(module: Path) -> str | None:
    """Of the work tree that the package runs from, if it does; git itself is not started."""
    git = next((parent / ".git" for parent in module.parents if (parent / ".git").is_dir()), None)
    if git is None:
        return None
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if head.startswith("ref: "):
            head = (git / head.removeprefix("ref: ")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return head if len(head) in (40, 64) else None
