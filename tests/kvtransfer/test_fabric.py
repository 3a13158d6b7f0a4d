"""RDMA ports of a machine, and the reasons why RDMA may not be used."""

import re
import resource
from pathlib import Path

import pytest

from twostroke.kvtransfer.fabric import RdmaPort, interface_at, rdma_obstacle, rdma_ports

UNLIMITED = resource.RLIM_INFINITY
MLX = RdmaPort("mlx5_0", 1, is_active=True, gbit_s=400.0)
DOWN = RdmaPort("mlx5_1", 1, is_active=False, gbit_s=2.5)


def test_devices_ports_and_rates_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    for name, state, rate in (
        ("mlx5_1", "1: DOWN", "2.5 Gb/sec (1X SDR)"),
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
    ):
        folder = tmp_path / name / "ports/1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text(f"{rate}\n")
    (tmp_path / "rdmap0s31/ports/1").mkdir(parents=True)  # whose driver tells neither
    assert rdma_ports(tmp_path) == (MLX, DOWN, RdmaPort("rdmap0s31", 1, is_active=False, gbit_s=0.0))
    assert MLX.name == "mlx5_0:1"
    assert rdma_ports(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("ports", "locked_bytes", "said"),
    [
        ((), UNLIMITED, "no RDMA device in /sys/class/infiniband"),
        ((DOWN,), UNLIMITED, "no port of mlx5_1:1 is active"),
        ((MLX, DOWN), 8 * 2**20, "may lock 8192 KiB"),
        ((MLX,), UNLIMITED, r"mlx5_0:1 \(400 Gb/s\) would do: look for libibverbs"),
    ],
)
def test_what_stands_in_rdmas_way_is_said_with_what_to_do(
    ports: tuple[RdmaPort, ...], locked_bytes: int, said: str
) -> None:
    assert re.search(said, rdma_obstacle(ports, locked_bytes))


def test_an_address_belongs_to_its_interface() -> None:
    assert interface_at("127.0.0.1") == "lo"
    assert interface_at("203.0.113.77") is None
    assert interface_at("::1") is None
