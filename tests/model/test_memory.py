"""How much memory a CPU engine may take, by the host and by its cgroups' limits."""

from pathlib import Path

import pytest
import torch

from twostroke.model.cache import memory

GIB = 2**30


def cgroup(folder: Path, most: str, used: int, *, cached: int = 0, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, text in zip(names, (most, str(used)), strict=True):
        (folder / name).write_text(f"{text}\n")
    field = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{field} {cached}\n")


def own(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "self-cgroup"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_host_without_limits_gives_what_the_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cgroup"
    assert memory._cgroup_bytes(root, own(tmp_path, "0::/")) == []
    cgroup(root, "max", GIB)
    assert memory._cgroup_bytes(root, own(tmp_path, "0::/")) == []
    assert memory._cgroup_bytes(root, tmp_path / "none") == []
    monkeypatch.setattr(memory, "_cgroup_bytes", list)
    assert memory.available_bytes(torch.device("cpu")) > 0


def test_a_services_limit_counts_and_so_do_those_around_it(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    cgroup(root / "system.slice", str(8 * GIB), 6 * GIB)
    cgroup(root / "system.slice" / "a.service", str(4 * GIB), 3 * GIB, cached=GIB)
    found = memory._cgroup_bytes(root, own(tmp_path, "0::/system.slice/a.service"))
    assert found == [2 * GIB, 2 * GIB]


def test_limits_of_the_first_version_count(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    cgroup(root / "memory", str(4 * GIB), GIB, cached=GIB, version=1)
    assert memory._cgroup_bytes(root, own(tmp_path, "4:memory:/x")) == [4 * GIB]
    cgroup(root / "memory" / "x", str(2 * GIB), GIB, version=1)
    assert memory._cgroup_bytes(root, own(tmp_path, "4:cpu,memory:/x")) == [4 * GIB, GIB]


def test_a_full_group_leaves_nothing(tmp_path: Path) -> None:
    cgroup(tmp_path / "cgroup", str(GIB), 2 * GIB)
    assert memory._cgroup_bytes(tmp_path / "cgroup", own(tmp_path, "0::/")) == [0]
