"""Routers learn of changes of the file of keys, and keep what they have where it is wrong."""

import logging
import os
from pathlib import Path

import pytest

from twostroke.cluster.config.config import ClusterConfig, keys_of, read_config
from twostroke.cluster.deployments.key_watch import KeyWatch
from twostroke.router.http.tenants import Tenants

OWN = {"name": "own", "sha256": "ab" * 32}


def line(name: str, digit: str) -> str:
    return f"- {{name: {name}, sha256: '{digit * 64}'}}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + line("alice", "1"))
    return path


def become(file: Path, text: str | None) -> None:
    """None: there is no such file any more."""
    if text is None:
        file.unlink()
    else:
        file.write_text(text)


def watch_of(file: Path) -> tuple[KeyWatch, Tenants]:
    config: ClusterConfig = read_config({"auth": {"keys": [OWN], "keys_file": str(file)}})
    tenants = Tenants(keys_of(config), secret=b"s", clock=lambda: 0.0, is_needed=True)
    return KeyWatch(config, tenants), tenants


async def test_keys_of_the_file_come_and_go_and_the_configurations_own_stay(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch, tenants = watch_of(file)
    assert tenants.names == {"own", "alice"}
    with caplog.at_level(logging.INFO, "twostroke.cluster.deployments.key_watch"):
        other = file.with_name("other")
        other.write_text("keys:\n" + line("bob", "2"))
        os.replace(other, file)
        await watch.look()
    assert tenants.names == {"own", "bob"}
    assert [record.getMessage() for record in caplog.records] == ["API keys new: bob", "API keys revoked: alice"]
    become(file, "keys: []")
    await watch.look()
    assert tenants.names == {"own"}


async def test_a_file_in_the_same_ones_place_is_read_though_it_is_as_long(file: Path) -> None:
    """As a key's rotation makes it."""
    watch, tenants = watch_of(file)
    await watch.look()
    other = file.with_name("other")
    other.write_text("keys:\n" + line("carol", "1"))
    os.replace(other, file)
    await watch.look()
    assert tenants.names == {"own", "carol"}


@pytest.mark.parametrize("text", ["keys: [", "keys: [{name: bob}]", "keys:\n" + line("own", "3"), None])
async def test_a_file_that_is_wrong_or_gone_changes_nothing_and_is_told_once(
    file: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    watch, tenants = watch_of(file)
    await watch.look()
    become(file, text)
    for _ in range(3):
        await watch.look()
    assert tenants.names == {"own", "alice"}
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"the API keys stay as they are: auth.keys_file: {file}: ")
    become(file, "keys:\n" + line("carol", "4"))
    await watch.look()
    assert tenants.names == {"own", "carol"}
