"""The server under chaos: started, looked at, and ended with all its processes; and the process that drives its Ray."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from tests.chaos.load import ServerAddress
from tests.chaos.log_pipe import LOG_PIPE_VARIABLE, LogPipe
from tests.chaos.orders import Control
from tests.chaos.verdict import STEP_BOUND_S
from twostroke.cluster.commands.application import order as order_worker
from twostroke.cluster.config.config import read_config
from twostroke.cluster.deployments.haproxy import haproxy_binary
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.processes import become_subreaper, descendants, end_descendants
from twostroke.cluster.local.ray import free_ports, local_ray
from twostroke.cluster.local.server_process import processes_named
from twostroke.protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
ROLES = ("prefill", "decode")
REPLICAS = 2  # of each role, and routers
START_S = 180.0
SEND_TIMEOUT_S = 5.0  # in which a client has to take what it is sent
POLITE_S = 6.0
IMPOLITE_S = 1.0

SETTINGS: dict[str, Any] = {
    # Tokens are compared: bf16 leaves near-ties that the order of additions decides.
    "model": {"dtype": "float32"},
    # Room for what runs at once, and not for every prompt of the run: KV has to travel.
    "prefill": {"replicas": REPLICAS, "threads": 1, "num_blocks": 400, "max_step_s": STEP_BOUND_S},
    "decode": {"replicas": REPLICAS, "threads": 1, "num_blocks": 400, "max_step_s": STEP_BOUND_S},
    "logging": {"to": "stdout"},  # each replica takes the run's pipe for it
    "router": {"replicas": REPLICAS, "body_timeout_s": 5.0, "send_timeout_s": SEND_TIMEOUT_S},
}


class NotUp(Exception):
    """The server did not come up, or did not get whole again; the message says where its words are."""


def new_api_key(file: Path, name: str, *options: str) -> str:
    """A key that `twostroke key new` adds to the file."""
    return _key_command("new", name, "--file", str(file), *options).split("\n\n")[1].strip()


def revoke_api_key(file: Path, name: str) -> None:
    """Revoke a key as `twostroke key revoke` does."""
    _key_command("revoke", name, "--file", str(file))


def _key_command(*arguments: str) -> str:
    command = [sys.executable, "-m", "twostroke.cluster.cli", "key", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class ServerOrder(msgspec.Struct, frozen=True):
    """Settings of the server, and the address at which the driver listens for the workers' agents."""

    settings: dict[str, Any]  # the configuration, as YAML gives it
    port: int
    control: int


class ServerUnderChaos:
    """A context manager: inside it the whole fleet is up at `target`. All processes below this one are the server's.

    `keys_file` is where the server's API keys are to lie; the one of `target` is made here. `tier_folders` are those
    of the settings' KV tiers.
    """

    log_pipe: LogPipe

    def __init__(self, settings: dict[str, Any], keys_file: Path, log: Path, tier_folders: Sequence[Path] = ()):
        (self.port,) = free_ports(1)
        self.keys_file = keys_file
        self.tier_folders = tier_folders
        self.target = ServerAddress(f"http://127.0.0.1:{self.port}", new_api_key(keys_file, "load", "--admin"))
        self.control = Control()
        self._settings = {**settings, "auth": {"keys_file": str(keys_file)}}
        self._log = log
        self._output: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> "ServerUnderChaos":
        become_subreaper()
        process = self._begin(ServerOrder(self._settings, self.port, await self.control.start()))
        try:
            async with asyncio.timeout(START_S):
                while not await self.is_whole():
                    if process.poll() is not None:
                        raise NotUp(f"the server has ended, see {self._log}")
                    await asyncio.sleep(0.2)
        except TimeoutError:
            self._end()
            raise NotUp(f"the server was not whole after {START_S:g} s, see {self._log}") from None
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._end)
        await self.control.close()
        self.log_pipe.close()

    async def status(self) -> dict[str, Any] | None:
        """Return a router's status; None where none answers."""
        try:
            return await asyncio.to_thread(fetch_status, self.target.url, self.target.api_key, timeout_s=5.0)
        except ConfigError:
            return None

    async def order(self, worker_id: str, order: Mapping[str, Any]) -> bool:
        """Have a router give a worker an operator's order. Return False where it refuses, or none answers."""
        try:
            await asyncio.to_thread(order_worker, self.target.url, worker_id, order, self.target.api_key)
        except ConfigError:
            return False
        return True

    async def is_whole(self) -> bool:
        """Return whether a router reaches every worker, each of which is known to our agents."""
        return all([await self.is_role_whole(role) for role in ROLES])

    async def is_role_whole(self, role: str) -> bool:
        known = {worker.worker_id for worker in self.control.of_role(role)}
        return len(known) == REPLICAS and await self.reachable(role) == known

    async def reachable(self, role: str) -> set[str]:
        """The ids of the workers that a router reaches."""
        status = await self.status() or {"workers": []}
        return {one["worker_id"] for one in status["workers"] if one["home_role"] == role and one["reachable"]}

    async def dropped_log_lines(self) -> dict[str, int]:
        """Return by worker the log lines that it has dropped."""
        status = await self.status() or {"workers": []}
        return {one["worker_id"]: one["stats"]["dropped_log_lines"] for one in status["workers"] if one["stats"]}

    async def owned_blocks(self) -> int:
        """Return the owned blocks of all workers; -1 where they are unknown."""
        status = await self.status()
        if status is None or any(one["stats"] is None for one in status["workers"]):
            return -1
        owned: int = sum(one["stats"]["owned_blocks"] for one in status["workers"])
        return owned

    def routers(self) -> list[int]:
        """Their process ids."""
        return processes_named("ServeReplica:twostroke:Router", descendants())

    def controllers(self) -> list[int]:
        """The process ids of Serve's controllers, of which there is one."""
        return processes_named("ServeController", descendants())

    def _begin(self, order: ServerOrder) -> "subprocess.Popen[bytes]":
        self._output = self._log.open("wb", buffering=0)
        pipe = self.keys_file.parent / "log-pipe"
        self.log_pipe = LogPipe(pipe, self._output)
        self.log_pipe.collect()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.fleet"],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
                LOG_PIPE_VARIABLE: str(pipe),
            },
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # a terminal's Ctrl-C must not end Ray's processes in any odd order
        )
        assert self._process.stdin is not None  # asked for above
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None  # asked for at its start
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # Ray is stuck: what is left is ended next
                self._process.wait(POLITE_S)
        end_descendants(IMPOLITE_S)
        if self._output is not None:
            self._output.close()


def serve() -> None:
    """Drive Ray for a chaos run: `twostroke serve`'s application, with workers that can be harmed.

    Takes one line of JSON, a ServerOrder, on standard input, and serves until that ends.
    """
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerOrder)
    config = read_config(order.settings)
    ray = local_ray(host="127.0.0.1", port=order.port, num_cpus=config.num_ranks, haproxy=haproxy_binary() is not None)
    with ray:
        # Ray may be imported now: its switches are set.
        from ray.serve import run

        from tests.chaos.replicas import ChaosDecodeReplica, ChaosPrefillReplica, ChaosRouterReplica
        from twostroke.cluster.deployments.serve_app import ReplicaClasses, application, cluster_secret

        replicas = ReplicaClasses(ChaosPrefillReplica, ChaosDecodeReplica, ChaosRouterReplica, (order.control,))
        run(application(config, cluster_secret(), replicas), name="twostroke", route_prefix="/")
        while os.read(0, 4096):  # until our starter is gone
            pass


if __name__ == "__main__":
    serve()
