"""The rules of the house that imports alone do not show, read from the syntax trees and from the tracked files."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tailrace"
MODULES = sorted(PACKAGE.rglob("*.py"))

KERNEL_LIBRARIES = {"openvino", "openvino_genai", "openvino_tokenizers", "nncf"}
IMPURE_MODULES = {
    "asyncio",
    "threading",
    "multiprocessing",
    "concurrent",
    "os",
    "time",
    "datetime",
    "random",
    "socket",
    "subprocess",
    "pathlib",
    "logging",
    "uuid",
    "secrets",
}
PURE_FOLDERS = ("engine", "cost", "wire")


def imported_roots(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def reads_the_environment(tree: ast.AST) -> bool:
    # Not `putenv`: it tells a C library something and reads nothing.
    wanted = {"environ", "environb", "getenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in wanted:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os" and wanted & {a.name for a in node.names}:
            return True
    return False


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def inside(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_pure_folders_import_no_clock_thread_file_or_network() -> None:
    found = {
        inside(path): bad
        for path in MODULES
        if inside(path).startswith(tuple(f"{folder}/" for folder in PURE_FOLDERS))
        and (bad := set(imported_roots(parse(path))) & (IMPURE_MODULES | KERNEL_LIBRARIES))
    }
    assert found == {}


def test_only_the_executor_and_the_model_folder_know_the_kernel_library() -> None:
    importing = {inside(path) for path in MODULES if set(imported_roots(parse(path))) & KERNEL_LIBRARIES}
    assert {name for name in importing if not name.startswith("model/")} <= {"executor/openvino.py"}


def test_only_config_reads_the_environment() -> None:
    assert {inside(path) for path in MODULES if reads_the_environment(parse(path))} == {"config.py"}


def test_every_module_says_what_it_is() -> None:
    assert [inside(path) for path in MODULES if not ast.get_docstring(parse(path))] == []


def repository_files() -> list[Path]:
    """Tracked files and new ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git work tree")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# Written so that this file does not match itself.
FORBIDDEN_TEXT = {
    "a path of one machine": re.compile(r"(?<![\w.])/(?:wor[k]|roo[t]|opt/pyp[i]|Users)/"),
    "a package registry": re.compile(
        r"https?://[^\s\"'<>]*(?:pyp[i]|registr[y]|artifactor[y]|mirro[r])[^\s\"'<>]*", re.IGNORECASE
    ),
    "a credential": re.compile(
        r"(?:gh[pousr]_[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9]{20,}|BEGIN [A-Z ]*PRIVATE KE[Y])"
    ),
}


def test_the_repository_names_no_machine_registry_or_credential() -> None:
    found = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for what, pattern in FORBIDDEN_TEXT.items():
            match = pattern.search(text)
            if match is not None:
                found.append(f"{path.relative_to(ROOT)}: {what}: {match[0]}")
    assert found == []


def test_no_large_or_generated_file_is_kept() -> None:
    large = [str(p.relative_to(ROOT)) for p in repository_files() if p.stat().st_size > 1024 * 1024]
    assert large == []
