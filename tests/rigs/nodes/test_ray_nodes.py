"""Ray nodes on machines of our own: what they leave on disk, and that one which does not come up is started again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.nodes import machines as isolated
from tests.rigs.nodes import ray_nodes
from tests.rigs.nodes.site import node_for


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
    """A real node fails on a busy machine; here a `ray` fails once."""
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
