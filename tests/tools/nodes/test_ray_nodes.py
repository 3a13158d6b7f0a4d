"""What nodes leave on disk."""

import os
import subprocess
from pathlib import Path

import pytest

from twostroke.tools.nodes import ray_nodes


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
