"""An entry of the cache is whole or absent, whatever happens to whoever makes it."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tailrace.cost.shape import ModelShape
from tailrace.errors import ConfigError, ModelSourceError
from tailrace.model import cache
from tailrace.model.hashing import content_hash
from tailrace.model.manifest import GateFigures, ModelManifest

SHAPE = ModelShape(
    architecture="llama",
    num_layers=1,
    hidden_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    vocab_size=8,
    context_tokens_max=8,
    num_parameters=8,
)


def manifest(name: str, key: str) -> ModelManifest:
    return ModelManifest(
        format_version=1,
        name=name,
        source=f"{name}.gguf",
        source_hash="s",
        content_hash=key,
        weights_format="int8",
        weights_bytes=3,
        shape=SHAPE,
        end_token_ids=(2,),
        gate=GateFigures(kl_paged_against_stateful=0.0, kl_decode_production={}),
        created_at="2026-01-01T00:00:00+00:00",
    )


def put(cache_dir: Path, name: str, key: str) -> Path:
    with cache.staging(cache_dir) as stage:
        (stage.directory / "openvino_model.bin").write_bytes(b"abc")
        (stage.directory / "manifest.json").write_bytes(msgspec.json.encode(manifest(name, key)))
        return cache.publish(stage, cache_dir, key)


def test_a_cache_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelSourceError, match=r"file/models: Not a directory"):
        cache.list_models(tmp_path / "file")


def test_a_model_deleted_while_others_are_listed_hides_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("aa11", "bb22", "cc33"):
        put(tmp_path, "tiny", key)
    read_manifest = cache.read_manifest

    def read_then_delete(directory: Path) -> ModelManifest | None:
        found = read_manifest(directory)
        if directory == cache.entry_path(tmp_path, "bb22"):
            shutil.rmtree(directory)
        return found

    monkeypatch.setattr(cache, "read_manifest", read_then_delete)
    assert {model.manifest.content_hash for model in cache.list_models(tmp_path)} == {"aa11", "cc33"}


def test_of_two_who_delete_a_model_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "tiny", "aa11")
    seen_by_both = cache.list_models(tmp_path)
    monkeypatch.setattr(cache, "list_models", lambda _: seen_by_both)
    assert cache.remove_model(tmp_path, "tiny") == seen_by_both[0]
    with pytest.raises(ConfigError, match="deleted by somebody else"):
        cache.remove_model(tmp_path, "tiny")


def test_a_published_model_is_listed_and_nothing_is_left_in_staging(tmp_path: Path) -> None:
    directory = put(tmp_path, "tiny", "aa11")
    (model,) = cache.list_models(tmp_path)
    assert (model.directory, model.manifest) == (directory, manifest("tiny", "aa11"))
    assert model.num_bytes == sum(path.stat().st_size for path in directory.iterdir())
    assert os.listdir(tmp_path / "staging") == ["lock"]


def test_a_staging_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with cache.staging(tmp_path) as stage:
            (stage.directory / "manifest.json").write_bytes(b"{}")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert cache.list_models(tmp_path) == []
    assert os.listdir(tmp_path / "staging") == ["lock"]


def test_rubbish_of_the_dead_is_removed_and_the_work_of_the_living_kept(tmp_path: Path) -> None:
    dead = tmp_path / "staging" / "dead"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "weights").write_bytes(b"x" * 100)
    (tmp_path / "staging" / "died_early").mkdir()
    with cache.staging(tmp_path) as living, cache.staging(tmp_path) as other:
        assert {path.name for path in (tmp_path / "staging").iterdir()} == {
            "lock",
            living.directory.parent.name,
            other.directory.parent.name,
        }


def test_an_entry_without_a_readable_manifest_is_absent(tmp_path: Path) -> None:
    directory = put(tmp_path, "tiny", "aa11")
    (directory / "manifest.json").write_bytes(b'{"format_version": 1')
    assert cache.read_manifest(directory) is None
    assert cache.list_models(tmp_path) == []
    put(tmp_path, "tiny", "aa11")
    assert len(cache.list_models(tmp_path)) == 1


def test_only_one_prepares_a_model_at_a_time(tmp_path: Path) -> None:
    inside: list[str] = []
    waits = threading.Event()

    def second() -> None:
        with cache.preparing(tmp_path, "key", waits.set):
            inside.append("second")

    thread = threading.Thread(target=second)
    with cache.preparing(tmp_path, "key", lambda: pytest.fail("nobody else is here")):
        thread.start()
        assert waits.wait(30)
        inside.append("first")
    thread.join(30)
    assert inside == ["first", "second"]


def test_other_models_are_not_waited_for(tmp_path: Path) -> None:
    with (
        cache.preparing(tmp_path, "one", lambda: pytest.fail("waits")),
        cache.preparing(tmp_path, "two", lambda: pytest.fail("waits")),
    ):
        pass


def test_remove_takes_the_beginning_of_a_hash_or_a_name(tmp_path: Path) -> None:
    for name, key in (("tiny", "aa11"), ("other", "aa22"), ("tiny", "bb33")):
        put(tmp_path, name, key)
    assert cache.remove_model(tmp_path, "aa1").manifest.content_hash == "aa11"
    assert cache.remove_model(tmp_path, "other").manifest.content_hash == "aa22"
    assert [model.manifest.content_hash for model in cache.list_models(tmp_path)] == ["bb33"]


@pytest.mark.parametrize("key", ["aa", "zz", ""])
def test_remove_refuses_what_is_not_one_model_and_says_what_there_is(tmp_path: Path, key: str) -> None:
    put(tmp_path, "tiny", "aa11")
    put(tmp_path, "other", "aa22")
    with pytest.raises(ConfigError, match=r"aa11 \(tiny\)"):
        cache.remove_model(tmp_path, key)
    assert len(cache.list_models(tmp_path)) == 2


def test_too_small_a_disk_is_refused_with_bytes_and_path(tmp_path: Path) -> None:
    needed = shutil.disk_usage(tmp_path).total + 1
    with pytest.raises(ModelSourceError, match=f"{needed} bytes.*{tmp_path}"):
        cache.check_room(tmp_path, needed)


def test_a_cache_that_cannot_be_made_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelSourceError, match=r"model\.cache_dir"):
        cache.check_room(tmp_path / "file" / "cache", 1)


@pytest.fixture
def read_counter(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    from tailrace.model import hashing

    read: list[Path] = []
    original: Callable[[Path, Callable[[float], None]], str] = hashing._hash_file
    monkeypatch.setattr(hashing, "_hash_file", lambda path, progress: (read.append(path), original(path, progress))[1])
    return read


def test_a_file_is_hashed_once_until_it_changes(tmp_path: Path, read_counter: list[Path]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    hashes = [content_hash([path], tmp_path / "cache", lambda _: None) for _ in range(3)]
    assert len(set(hashes)) == 1
    assert read_counter == [path]
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert content_hash([path], tmp_path / "cache", lambda _: None) != hashes[0]
    assert read_counter == [path, path]


def test_a_lost_or_broken_memory_of_hashes_costs_time_only(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    first = content_hash([path], tmp_path, lambda _: None)
    (tmp_path / "hashes.json").write_bytes(b"\xff{")
    assert content_hash([path], tmp_path, lambda _: None) == first


def test_equal_contents_under_two_names_are_two_models(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"same")
    assert content_hash([tmp_path / "a"], tmp_path, lambda _: None) != content_hash(
        [tmp_path / "b"], tmp_path, lambda _: None
    )


def test_an_unreadable_file_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="nothing"):
        content_hash([tmp_path / "nothing"], tmp_path, lambda _: None)
