"""Facts of machines, from the texts that kernels show: bare metal, containers, cgroup v1 and v2, ARM."""

from pathlib import Path

import pytest

from tailrace.executor.machine import (
    cgroup_folders,
    count_cores,
    parse_cpu_max,
    parse_inactive_file_bytes,
    parse_isa_flags,
    parse_meminfo,
    parse_memory_limit,
    parse_quota,
    read_hardware,
    read_resident_bytes,
)

HYPERTHREADED = "\n\n".join(
    f"processor\t: {cpu}\nphysical id\t: {socket}\ncore id\t\t: {core}\nflags\t\t: fpu avx2 avx512_bf16"
    for cpu, socket, core in ((0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 0, 0), (5, 0, 1), (6, 1, 0), (7, 1, 1))
)
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16\n\nprocessor\t: 1\nFeatures\t: fp asimd sve bf16\n"


def test_flags_come_from_x86_and_arm_lines() -> None:
    assert parse_isa_flags(HYPERTHREADED) == {"fpu", "avx2", "avx512_bf16"}
    assert parse_isa_flags(ARM) == {"fp", "asimd", "sve", "bf16"}
    assert parse_isa_flags("") == frozenset()


@pytest.mark.parametrize(
    ("cpuinfo", "cpu_ids", "num_cores"),
    [
        (HYPERTHREADED, range(8), 4),
        (HYPERTHREADED, [0, 4], 1),
        (HYPERTHREADED, [0, 2], 2),
        (HYPERTHREADED, [0, 5, 99], 3),
        (ARM, [0, 1], 2),
        ("", [0, 1, 2], 3),
        ("", [], 1),
    ],
)
def test_two_hyperthreads_are_one_core(cpuinfo: str, cpu_ids: list[int], num_cores: int) -> None:
    assert count_cores(cpuinfo, cpu_ids) == num_cores


def test_meminfo_gives_total_and_available_bytes() -> None:
    text = "MemTotal:       24684092 kB\nMemFree:         1000 kB\nMemAvailable:   20000000 kB\nHugePages_Total:   0\n"
    assert parse_meminfo(text) == (24684092 * 1024, 20000000 * 1024)
    assert parse_meminfo("MemTotal: 100 kB\nMemFree: 40 kB\n") == (102400, 40960)
    assert parse_meminfo("") == (0, 0)


def test_cgroup_v2_folders_are_the_group_and_all_above() -> None:
    assert cgroup_folders("0::/kube/pod1/box\n") == {
        "memory": ["kube/pod1/box", "kube/pod1", "kube", ""],
        "cpu": ["kube/pod1/box", "kube/pod1", "kube", ""],
    }


def test_cgroup_v1_folders_lie_under_their_controllers() -> None:
    folders = cgroup_folders("9:name=systemd:/\n4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n")
    assert folders["memory"] == ["memory/box", "memory", ""]
    assert folders["cpu"] == ["cpu,cpuacct/box", "cpu,cpuacct", ""]


def test_a_group_outside_the_mount_is_looked_for_inside_it() -> None:
    assert cgroup_folders("0::/../../other\n")["memory"] == ["other", ""]


@pytest.mark.parametrize(
    ("text", "quota"),
    [("200000 100000\n", 2.0), ("50000 100000", 0.5), ("max 100000", None), ("", None), ("a b", None), ("1 0", None)],
)
def test_cpu_max_is_processors(text: str, quota: float | None) -> None:
    assert parse_cpu_max(text) == quota


def test_a_v1_quota_of_minus_one_is_no_limit() -> None:
    assert parse_quota("-1\n", "100000\n") is None
    assert parse_quota("150000\n", "100000\n") == 1.5


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max\n", None), ("1073741824\n", 1 << 30), ("9223372036854771712\n", None), ("", None), ("x", None)],
)
def test_memory_limits(text: str, limit: int | None) -> None:
    assert parse_memory_limit(text) == limit


def test_inactive_file_pages_of_both_versions() -> None:
    assert parse_inactive_file_bytes("anon 5\ninactive_file 4096\nactive_file 1\n") == 4096
    assert parse_inactive_file_bytes("cache 7\ninactive_file 1\n") == 1
    assert parse_inactive_file_bytes("anon 5\n") == 0


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/cpuinfo": HYPERTHREADED, "proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 6000 kB\n"}


def test_the_tightest_limit_of_the_groups_above_holds(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        MACHINE
        | {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": "4096000\n",
            "sys/fs/cgroup/pod/memory.current": "2000000\n",
            "sys/fs/cgroup/pod/memory.stat": "inactive_file 500000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        },
    )
    facts = read_hardware(root)
    assert facts.cgroup_memory_max_bytes == 4096000
    assert facts.cgroup_memory_used_bytes == 1500000
    assert facts.available_bytes == 2596000
    assert facts.cpu_quota == 1.5
    assert facts.memory_total_bytes == 8000 * 1024


def test_cgroup_v1_limits_are_read(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        MACHINE
        | {
            "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
        },
    )
    facts = read_hardware(root)
    assert facts.available_bytes == 2000000
    assert facts.cpu_quota == 2.0


def test_a_machine_that_shows_nothing_has_no_limits(tmp_path: Path) -> None:
    facts = read_hardware(tmp_path)
    assert (facts.cpu_quota, facts.cgroup_memory_max_bytes) == (None, None)
    assert facts.num_cores >= 1


def test_this_machine_can_be_read() -> None:
    facts = read_hardware()
    assert facts.memory_total_bytes >= facts.memory_available_bytes > 0
    assert 1 <= facts.num_cores <= len(facts.cpu_ids)
    assert facts.isa_flags
    assert read_resident_bytes() > 1_000_000
