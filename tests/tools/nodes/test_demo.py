"""`twostroke cluster-demo`: what it refuses, and what it leaves on disk. All else: tests/e2e/test_several_nodes.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.command_line import one_line
from twostroke.cluster.cli import main
from twostroke.tools.nodes import machines as isolated
from twostroke.tools.nodes import ray_nodes
from twostroke.tools.nodes.site import node_for


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode", "1"], "twostroke: --decode 1: nodes, from 2 to 16"),
        (["--prefill", "0"], "twostroke: --prefill 0: nodes, from 1 to 16"),
        (["--rate", "nan"], "twostroke: --rate nan: requests a second, from 0.1 to 50"),
        (
            ["--machines", "loopback", "--unplug"],
            "twostroke: --unplug: on the loopback interface there is no cable to cut",
        ),
        (
            ["--machines", "loopback", "--fault", "head"],
            "twostroke: --fault head: on the loopback interface the head alone takes requests",
        ),
        (["--fault", "drain", "--unplug"], "twostroke: --unplug: with --fault node alone, not drain"),
    ],
)
def test_what_can_not_be_shown_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster-demo", *arguments]) == 2
    assert one_line(capsys) == message


def test_namespaces_that_can_not_be_had_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolated, "_PROGRAMS", ("ip", "no-such-program"))
    assert main(["cluster-demo", "--machines", "namespaces"]) == 2
    assert one_line(capsys) == (
        "twostroke: --machines namespaces: no-such-program can't be found (Debian: iproute2 and util-linux)"
    )


def test_folders_of_processes_that_are_gone_are_removed_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes, "_TEMPORARY", tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = tmp_path / f"{ray_nodes._FOLDERS}{ended.pid}"
    kept = [tmp_path / f"{ray_nodes._FOLDERS}{os.getpid()}", tmp_path / "twostroke-n5ab_c1d", tmp_path / "ts-n0des-1"]
    for folder in (gone, *kept):
        folder.mkdir()
    ray_nodes._remove_stale_folders()
    assert sorted(tmp_path.iterdir()) == sorted(kept)


_RAY = """#!/bin/sh
case "$*" in *--head*) ;; *) test -e tried || { touch tried; echo "no agent" >&2; exit 1; } ;; esac
echo "Ray runtime started."
exec sleep 1000
"""


def test_a_node_that_does_not_come_up_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a real one does on a busy machine: here by a `ray` that fails once."""
    (tmp_path / "ray").write_text(_RAY, encoding="utf-8")
    (tmp_path / "ray").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with isolated.LoopbackMachines() as machines, ray_nodes.RayNodes(machines, node_for("router")) as rays:
        node = rays.add(node_for("decode"))
        address = node.address
        rays.await_up(node)
        assert (rays.head.starts, node.starts, node.address) == (1, 2, address)
        monkeypatch.setattr(ray_nodes, "NODE_STARTS", 1)
        (tmp_path / "tried").unlink()
        with pytest.raises(ray_nodes.NodeFailed, match="decode has ended: no agent"):
            rays.await_up(rays.add(node_for("decode")))
