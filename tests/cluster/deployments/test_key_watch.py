"""Routers learn of changes of the file of keys, and keep what they have where it is wrong."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke.cluster.config.config import ClusterConfig, api_keys, read_config
from twostroke.cluster.deployments import key_watch
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


def watch_of(file: Path, clock: Callable[[], float] = time.monotonic) -> tuple[KeyWatch, Tenants]:
    config: ClusterConfig = read_config({"auth": {"keys": [OWN], "keys_file": str(file)}})
    tenants = Tenants(api_keys(config), clock=lambda: 0.0, is_needed=True)
    return KeyWatch(config, tenants, clock), tenants


async def test_keys_of_the_file_come_and_go_and_the_configurations_own_stay(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch, tenants = watch_of(file)
    assert tenants.names == {"own", "alice"}
    with caplog.at_level(logging.INFO, "twostroke.cluster.deployments.key_watch"):
        other = file.with_name("other")
        other.write_text("keys:\n" + line("bob", "2"))
        os.replace(other, file)
        await watch.check()
    assert tenants.names == {"own", "bob"}
    assert [record.getMessage() for record in caplog.records] == ["API keys new: bob", "API keys revoked: alice"]
    become(file, "keys: []")
    await watch.check()
    assert tenants.names == {"own"}


async def test_a_file_in_the_same_ones_place_is_read_though_it_is_as_long(file: Path) -> None:
    """A key's rotation leaves a file of the same length."""
    watch, tenants = watch_of(file)
    await watch.check()
    other = file.with_name("other")
    other.write_text("keys:\n" + line("carol", "1"))
    os.replace(other, file)
    await watch.check()
    assert tenants.names == {"own", "carol"}


@pytest.mark.parametrize(
    "text",
    ["", "null", "{}", "# keys", "keys:", "keys: [", "keys: [{name: bob}]", "keys:\n" + line("own", "3"), None],
)
async def test_a_file_that_is_wrong_or_gone_changes_nothing_and_is_told_once(
    file: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    watch, tenants = watch_of(file)
    await watch.check()
    become(file, text)
    for _ in range(3):
        await watch.check()
    assert tenants.names == {"own", "alice"}
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"the API keys stay as they are: auth.keys_file: {file}: ")
    become(file, "keys:\n" + line("carol", "4"))
    await watch.check()
    assert tenants.names == {"own", "carol"}


@pytest.mark.parametrize(
    "expires",
    ["2026-02-30", "9999-12-31T23:59:59-01:00", "0001-01-01T00:00:00+01:00", "!!timestamp soon", "!!int ''"],
)
async def test_a_watch_outlives_dates_that_can_not_be_and_takes_the_next_good_file(
    file: Path, caplog: pytest.LogCaptureFixture, expires: str
) -> None:
    watch, tenants = watch_of(file)
    await watch.check()
    become(file, f"keys:\n- {{name: bob, sha256: '{'2' * 64}', expires: {expires}}}\n")
    await watch.check()
    assert tenants.names == {"own", "alice"}
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"the API keys stay as they are: auth.keys_file: {file}: ")
    become(file, "keys: []")
    await watch.check()
    assert tenants.names == {"own"}


async def test_a_look_that_fails_in_any_way_is_logged_and_followed_by_the_next(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of the failures to come, so none may end the watch."""
    watch, tenants = watch_of(file)

    def fail(config: ClusterConfig) -> None:
        raise MemoryError("no room")

    become(file, "keys: []")
    with monkeypatch.context() as patch:
        patch.setattr(key_watch, "api_keys", fail)
        await watch.check()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == f"the API keys stay as they are: auth.keys_file: {file}: MemoryError: no room"
    await watch.check()
    assert tenants.names == {"own"}


async def test_a_file_that_becomes_readable_is_read_though_its_text_and_times_stayed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root reads any file, so the refusal is played."""
    watch, tenants = watch_of(file)
    await watch.check()
    become(file, "keys:\n" + line("bob", "2"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        await watch.check()
    assert tenants.names == {"own", "alice"}
    await watch.check()
    assert tenants.names == {"own", "bob"}


def refuse(path: Path, encoding: str | None = None) -> str:
    raise PermissionError(13, "Permission denied")


async def test_the_keys_age_grows_while_the_file_is_wrong_and_only_then(file: Path) -> None:
    now = 100.0
    watch, _ = watch_of(file, clock=lambda: now)
    now = 103.0
    assert watch.age_s() == 3.0
    await watch.check()
    assert watch.age_s() == 0.0
    become(file, "keys: [")
    now = 105.0
    await watch.check()
    now = 107.0
    await watch.check()
    assert watch.age_s() == 4.0
    become(file, "keys: []")
    await watch.check()
    assert watch.age_s() == 0.0
    now = 109.0
    await watch.check()  # the file is the same, and known to be
    assert watch.age_s() == 0.0


async def test_a_file_of_keys_that_is_no_file_does_not_hold_the_watch(file: Path) -> None:
    """Reading a named pipe would wait for whoever writes to it, for ever."""
    watch, tenants = watch_of(file)
    become(file, None)
    os.mkfifo(file)
    async with asyncio.timeout(5):
        await watch.check()
    assert tenants.names == {"own", "alice"}
