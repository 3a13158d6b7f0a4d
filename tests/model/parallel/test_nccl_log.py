"""Parsing of NCCL's log, and the environment that torch reads before it makes a group of NCCL.

The log's lines follow NVIDIA's documentation; no GPU has written them here.
"""

import os
import subprocess
import sys

import pytest

from twostroke.model.parallel.tensor_parallel import NcclLog, networks

OVER_SOCKETS = """host-7:53:271 [0] NCCL INFO NET/IB : No device found.
host-7:53:271 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
host-7:53:271 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
host-7:53:271 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""
OVER_IB = """host-7:53:271 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.5<0>
host-7:53:271 [3] NCCL INFO Channel 00/0 : 0[3] -> 1[3] [send] via NET/IB/0/GDRDMA
host-7:53:271 [3] NCCL INFO Channel 01/0 : 0[3] -> 1[3] [send] via NET/IB/3(1)/GDRDMA/Shared
"""
OVER_EFA = "host-7:53:271 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/1/GDRDMA\n"
WITHIN_A_HOST = """host-7:53:271 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
host-7:53:271 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read
host-7:53:271 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via SHM/direct/direct
"""


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (OVER_SOCKETS, {"Socket": 2}),
        (OVER_IB, {"IB": 2}),
        (OVER_EFA, {"AWS Libfabric": 1}),
        (WITHIN_A_HOST, {}),
        (OVER_IB + OVER_SOCKETS[:-40], {"IB": 2, "Socket": 1}),
        ("", {}),
    ],
)
def test_the_networks_of_channels_are_told_whatever_else_was_found(log: str, found: dict[str, int]) -> None:
    assert networks(log) == found


@pytest.fixture
def no_log(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)
    return monkeypatch


def test_nccl_is_told_to_write_where_only_what_comes_later_is_read(no_log: pytest.MonkeyPatch) -> None:
    log = NcclLog()
    log.begin()
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "NET")
    with open(os.environ["NCCL_DEBUG_FILE"], "w") as nccl:
        nccl.write(OVER_IB)
        nccl.flush()
        start = log.num_bytes
        assert log.networks_since(0) == {"IB": 2}
        nccl.write(OVER_SOCKETS)
    assert log.networks_since(start) == {"Socket": 2}
    heir = NcclLog()  # of a process that this one has started
    heir.begin()
    assert heir.num_bytes == 0


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE"])
def test_a_log_that_somebody_has_asked_for_stays_his(name: str, no_log: pytest.MonkeyPatch) -> None:
    no_log.setenv(name, "WARN")
    log = NcclLog()
    log.begin()
    assert os.environ[name] == "WARN"
    assert log.networks_since(0) == {}


READ_BACK = """
import ctypes
import torch.distributed as dist
from twostroke.model.parallel import tensor_parallel

getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p


class Group:
    class Options:
        pass

    def __init__(self, *_):
        for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "WAIT_TIMEOUT_DUMP_MILSEC"):
            print(name, getenv(f"TORCH_NCCL_{name}".encode()).decode())


dist.ProcessGroupNCCL = Group
tensor_parallel.process_group(None, 0, 2, 1.0, None)
"""


def test_torch_neither_ends_the_process_nor_waits_for_a_dump_once_a_peer_of_nccl_is_dead() -> None:
    """Read back as torch reads it, by getenv, in a process that has made no group before."""
    asked = {"TORCH_NCCL_ENABLE_MONITORING": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    child = subprocess.run(
        [sys.executable, "-c", READ_BACK],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert dict(line.split() for line in child.stdout.splitlines()) == {
        "ASYNC_ERROR_HANDLING": "0",
        "ENABLE_MONITORING": "0",
        "DUMP_ON_TIMEOUT": "0",
        "WAIT_TIMEOUT_DUMP_MILSEC": "1",
    }
