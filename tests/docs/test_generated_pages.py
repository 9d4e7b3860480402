"""The generated pages are what the code says today."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["docs/cli.md", "docs/configuration.md", "docs/http_api.md", "docs/peers.svg", "README.md"]
)
def test_a_generated_page_is_fresh(generator: ModuleType, name: str) -> None:
    path = ROOT / name
    assert path.read_text(encoding="utf-8") == generator.render()[path], f"{name} is stale: run `make docs`"


def test_every_setting_is_explained_where_it_is_defined(generator: ModuleType) -> None:
    unexplained = [
        f"{name}.{field}"
        for name, section in generator.SECTION_TYPES.items()
        for field in section.__struct_fields__
        if not generator.field_texts(section).get(field)
    ]
    assert unexplained == []
