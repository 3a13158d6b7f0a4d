"""`twostroke key new`, `list` and `revoke`: keys come, are shown and go, in a file that routers read."""

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.cluster.command_line import one_line
from twostroke.cluster.cli import main
from twostroke.cluster.config.config import api_keys, read_config
from twostroke.router.http.tenants import Tenants


def keys_in(file: Path) -> Tenants:
    config = read_config({"auth": {"keys_file": str(file)}})
    return Tenants(api_keys(config), clock=lambda: 0.0)


def drawn(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["key", "new", *arguments]) == 0
    return re.findall(r"ts-\S+", capsys.readouterr().out)[0]


def test_a_key_is_added_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    alice = drawn(capsys, "alice", "--file", str(file), "--admin")
    os.chmod(file, 0o640)
    bob = drawn(capsys, 'Bob "B"', "--file", str(file), "--slo-class", "standard", "--expires", "2020-01-01")
    assert file.stat().st_mode & 0o777 == 0o640
    assert alice not in file.read_text()
    known = keys_in(file)
    assert known.of(f"Bearer {alice}").is_admin
    assert known.names == {"alice", 'Bob "B"'}
    assert main(["key", "list", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["key", "list", "--file", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    for none_or_two in ([], [str(file), "--file", str(file)]):
        assert main(["key", "list", *none_or_two]) == 2
        assert one_line(capsys) == "twostroke: key list: name one file of keys, --file FILE"
    assert [re.split(r"\s{2,}", line)[::2] for line in lines[1:]] == [
        ["alice", "-", "never"],
        ['Bob "B"', "standard", "2020-01-01T00:00:00+00:00 (expired)"],
    ]
    assert main(["key", "revoke", 'Bob "B"', "--file", str(file)]) == 0
    assert keys_in(file).names == {"alice"}
    assert main(["key", "revoke", "alice", "--file", str(file)]) == 0
    assert "nobody gets in" in capsys.readouterr().out
    assert yaml.safe_load(file.read_text()) == {"keys": []}
    assert [path.name for path in tmp_path.iterdir()] == ["keys.yaml"]
    assert bob.startswith("ts-")


def test_a_span_is_counted_from_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for span in ("1m", "12h", "90d"):
        drawn(capsys, span, "--file", str(tmp_path / "keys.yaml"), "--expires", span)
    keys = api_keys(read_config({"auth": {"keys_file": str(tmp_path / "keys.yaml")}}))
    first, second, third = (key.expires_at for key in keys)
    assert second - first == pytest.approx(12 * 3600 - 60, abs=60)
    assert third - first == pytest.approx(90 * 86400 - 60, abs=60)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["revoke", "carol", "--file", "{file}"], "{file}: has no key carol; it has alice"),
        (["new", "alice", "--file", "{file}"], "keys: name alice is there twice"),
        (["new", "x", "--expires", "soon"], "expires: 'soon' is no date like 2026-12-31 or 2026-12-31T18:00:00Z"),
        (["list", "{file}.none"], "{file}.none: can't be read: No such file or directory"),
        (["revoke", "alice", "--file", "{wrong}"], "{wrong}: keys[0].sha256: is required"),
    ],
)
def test_what_can_not_be_done_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    file, wrong = tmp_path / "keys.yaml", tmp_path / "wrong.yaml"
    file.write_text(before := f"keys: [{{name: alice, sha256: {'ab' * 32}}}]  # a comment")
    wrong.write_text("keys: [{name: alice}]")
    names = {"file": file, "wrong": wrong}
    assert main(["key", *(argument.format(**names) for argument in arguments)]) == 2
    assert one_line(capsys) == f"twostroke: {told.format(**names)}"
    assert file.read_text() == before


def test_a_revoked_key_stays_revoked_while_others_are_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command reads the file, changes it and writes it: nobody else's change may fall in between."""
    file = tmp_path / "keys.yaml"
    for name in ("keep", *(f"old-{i}" for i in range(6))):
        drawn(capsys, name, "--file", str(file))
    begin = threading.Barrier(12)

    def run(*arguments: str) -> int:
        begin.wait()
        return main(["key", *arguments, "--file", str(file)])

    with ThreadPoolExecutor(12) as threads:
        codes = [threads.submit(run, "revoke", f"old-{i}") for i in range(6)]
        codes += [threads.submit(run, "new", f"new-{i}") for i in range(6)]
    assert [code.result() for code in codes] == [0] * 12
    assert keys_in(file).names == {"keep", *(f"new-{i}" for i in range(6))}


def test_a_link_to_the_file_of_keys_stays_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Routers read the file that it leads to, where a revoked key has to vanish."""
    (tmp_path / "real").mkdir()
    file, link = tmp_path / "real" / "keys.yaml", tmp_path / "keys.yaml"
    drawn(capsys, "alice", "--file", str(file))
    link.symlink_to(file)
    assert main(["key", "revoke", "alice", "--file", str(link)]) == 0
    assert keys_in(file).names == set()
    assert link.is_symlink()


def test_a_named_pipe_is_refused_in_place_of_a_file_of_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "keys.yaml"
    os.mkfifo(pipe)
    for command in (
        ["key", "list", str(pipe)],
        ["key", "revoke", "alice", "--file", str(pipe)],
        ["config", "check", str(pipe)],
    ):
        assert main(command) == 2
        assert f"{pipe}: is no regular file" in capsys.readouterr().err
