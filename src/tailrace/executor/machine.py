"""Reads the facts of the machine: /proc, the scheduler's affinity, the cgroup's limits. A shell around pure parsers.

Files that are missing mean "no limit": not every kernel, container or sandbox shows all of them.
"""

import os
import platform
from collections.abc import Iterable
from pathlib import Path

from tailrace.cost.hardware import HardwareFacts

_CGROUP_V1_UNLIMITED = 1 << 60
"""cgroup v1 spells "no limit" as a huge number, rounded down to a page."""


def read_hardware(root: Path = Path("/")) -> HardwareFacts:
    """Facts as they are now; memory moves, so read again before a decision about it. Linux only."""
    cpuinfo = _read(root / "proc/cpuinfo")
    cpu_ids = tuple(sorted(os.sched_getaffinity(0)))
    total, available = parse_meminfo(_read(root / "proc/meminfo"))
    folders = cgroup_folders(_read(root / "proc/self/cgroup"))
    limits = [_cgroup_memory(root, folder) for folder in folders["memory"]]
    quotas = [_cgroup_quota(root, folder) for folder in folders["cpu"]]
    tightest = min((each for each in limits if each is not None), key=lambda each: each[0] - each[1], default=None)
    return HardwareFacts(
        architecture=platform.machine(),
        isa_flags=parse_isa_flags(cpuinfo),
        num_cpus_online=os.cpu_count() or len(cpu_ids),
        cpu_ids=cpu_ids,
        num_cores=count_cores(cpuinfo, cpu_ids),
        cpu_quota=min((quota for quota in quotas if quota is not None), default=None),
        memory_total_bytes=total,
        memory_available_bytes=available,
        cgroup_memory_max_bytes=None if tightest is None else tightest[0],
        cgroup_memory_used_bytes=None if tightest is None else tightest[1],
    )


def read_resident_bytes(root: Path = Path("/")) -> int:
    """What this process holds in memory now (RSS)."""
    fields = _read(root / "proc/self/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def parse_isa_flags(cpuinfo: str) -> frozenset[str]:
    """From the first processor's `flags` (x86) or `Features` (ARM) line."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def count_cores(cpuinfo: str, cpu_ids: Iterable[int]) -> int:
    """Physical cores among `cpu_ids`; where the topology is not told (ARM, some sandboxes) each processor is one."""
    wanted = set(cpu_ids)
    cores: set[tuple[str, str]] = set()
    known = 0
    for paragraph in cpuinfo.split("\n\n"):
        fields = {
            name.strip(): value.strip() for name, _, value in (line.partition(":") for line in paragraph.splitlines())
        }
        if fields.get("processor", "").isdecimal() and int(fields["processor"]) in wanted and "core id" in fields:
            known += 1
            cores.add((fields.get("physical id", "0"), fields["core id"]))
    return len(cores) if known == len(wanted) and cores else max(1, len(wanted))


def parse_meminfo(meminfo: str) -> tuple[int, int]:
    """Total and available bytes."""
    values = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdecimal():
            values[name] = int(fields[0]) * 1024
    total = values.get("MemTotal", 0)
    return total, values.get("MemAvailable", values.get("MemFree", total))


def cgroup_folders(self_cgroup: str) -> dict[str, list[str]]:
    """Folders under /sys/fs/cgroup whose limits hold for this process: its own group and all above it.

    Inside a container the group's path is often one of the host and not mounted; the mount's root is then its own.
    """
    folders: dict[str, list[str]] = {"memory": [], "cpu": []}
    for line in self_cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller, found in folders.items():
            if controllers == "" or controller in controllers.split(","):
                mount = "" if controllers == "" else controllers if controller == "cpu" else controller
                parts = [part for part in path.split("/") if part not in ("", "..")]
                found.extend("/".join([mount, *parts[:depth]]).strip("/") for depth in range(len(parts), -1, -1))
    return folders


def parse_cpu_max(cpu_max: str) -> float | None:
    """cgroup v2 `cpu.max`: `200000 100000` is two processors, `max 100000` no limit."""
    fields = cpu_max.split()
    return parse_quota(fields[0], fields[1]) if len(fields) == 2 else None


def parse_quota(quota: str, period: str) -> float | None:
    """Microseconds of processor time a period; None: no limit (`max`, -1 or nothing readable)."""
    quota, period = quota.strip(), period.strip()
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return int(quota) / int(period)


def parse_memory_limit(limit: str) -> int | None:
    """Bytes; None: no limit."""
    limit = limit.strip()
    if not limit.isdecimal() or int(limit) >= _CGROUP_V1_UNLIMITED:
        return None
    return int(limit)


def parse_inactive_file_bytes(memory_stat: str) -> int:
    """File pages that the kernel gives back under pressure; they count as used in `memory.current`."""
    for line in memory_stat.splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.strip().isdecimal():
            return int(value)
    return 0


def _cgroup_memory(root: Path, folder: str) -> tuple[int, int] | None:
    """Limit and use of one group."""
    base = root / "sys/fs/cgroup" / folder
    limit = parse_memory_limit(_read(base / "memory.max") or _read(base / "memory.limit_in_bytes"))
    if limit is None:
        return None
    used = (_read(base / "memory.current") or _read(base / "memory.usage_in_bytes")).strip()
    inactive = parse_inactive_file_bytes(_read(base / "memory.stat"))
    return limit, max(0, int(used) - inactive) if used.isdecimal() else 0


def _cgroup_quota(root: Path, folder: str) -> float | None:
    base = root / "sys/fs/cgroup" / folder
    return parse_cpu_max(_read(base / "cpu.max")) or parse_quota(
        _read(base / "cpu.cfs_quota_us"), _read(base / "cpu.cfs_period_us")
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
