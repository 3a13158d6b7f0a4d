"""What can be found out before anything is started: each check raises ConfigError with one line to act on."""

import errno
import socket
from pathlib import Path

from cluster.config import ClusterConfig, WorkerResources, kv_cache_size
from protocol.errors import ConfigError

# What a process of ours takes beside weights and cache: the interpreter, torch, Ray.
PROCESS_BYTES = 300 * 2**20
SERVE_PROCESSES = 4  # controller, proxies, Ray's own


def check_port(host: str, port: int) -> None:
    """Somebody else must not be listening there, and `host` must be an address of this machine."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            # As servers do: a port whose last connections are still winding down is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use: choose another with --port") from error
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}") from error


def check_model(config: ClusterConfig, folder: Path) -> str:
    """Model and tokenizer must be loadable and all workers fit into memory; returns a line that describes the model."""
    import torch

    from model.config import load_model_config
    from model.kv_cache import kv_block_bytes
    from model.load import resolve_dtype
    from model.memory import available_bytes, gibibytes
    from model.weights import Checkpoint
    from router.tokenizer import TextTokenizer

    model = load_model_config(folder)
    checkpoint = Checkpoint(folder, model)
    TextTokenizer.load(folder)
    on_cpu = config.model.device == "cpu" or not torch.cuda.is_available()
    device = torch.device("cpu" if on_cpu else "cuda")
    dtype = resolve_dtype(config.model.dtype, checkpoint.dtype, device)
    block_bytes = kv_block_bytes(model, config.model.block_size, dtype)

    def worker_bytes(resources: WorkerResources) -> int:
        cache_bytes, num_blocks = kv_cache_size(resources)
        return (cache_bytes or (num_blocks or 0) * block_bytes) + checkpoint.num_parameters * dtype.itemsize

    needed = config.prefill.replicas * worker_bytes(config.prefill.resources)
    needed += config.decode.replicas * worker_bytes(config.decode.resources)
    if on_cpu:
        needed += PROCESS_BYTES * (config.num_workers + config.router.replicas + SERVE_PROCESSES)
        free = available_bytes(device)
        if needed > free:
            raise ConfigError(
                f"too little memory: {config.num_workers} workers and Ray need {gibibytes(needed)}, but only "
                f"{gibibytes(free)} are free: lower kv_cache_gib or replicas, or take a smaller model"
            )
    return f"{checkpoint.num_parameters / 1e6:.1f} M parameters, {str(dtype).removeprefix('torch.')} on {device.type}"
