"""Checks before anything is started. Each raises ConfigError with one line to act on."""

import errno
import socket
from pathlib import Path

from twostroke.cluster.config.config import ClusterConfig
from twostroke.cluster.config.model_folder import chat_template_text
from twostroke.cluster.config.sections import held_as
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.protocol.errors import ConfigError

PROCESS_BYTES = 150 * 2**20  # what a process other than a worker's takes: the interpreter and Ray
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


def check_model(config: ClusterConfig, folder: Path) -> list[str]:
    """Model and tokenizer must be loadable and all workers fit into memory; returns lines that describe them."""
    import torch

    from twostroke.model.cache.memory import MemoryNeed, available_bytes, check_memory_of_all, gibibytes
    from twostroke.model.costs.sizes import WORKER_BYTES, step_bytes_on_cpu
    from twostroke.model.engine_config import (
        block_bytes,
        check_cores,
        resolve_device,
        resolve_dtype,
        resolve_kv_dtype,
        resolve_max_context,
        resolve_num_blocks,
    )
    from twostroke.model.served import open_model
    from twostroke.router.text.generation_config import read_sampling_defaults
    from twostroke.router.text.tokenizer import TextTokenizer

    found = open_model(folder, has_mtp=config.has_mtp)
    model = found.shape
    TextTokenizer.load(folder, chat_template_text(config.model), config.model.response_template)
    defaults = read_sampling_defaults(folder, config.model.generation_config)
    device = torch.device(config.device)
    free = available_bytes(torch.device("cpu"))
    needs: list[MemoryNeed] = []
    caches: list[str] = []  # of roles for which nobody says a size
    forms: dict[str, str] = {}  # how each role holds the model
    for role, section in config.roles.items():
        most = config.counts[role].most
        if most == 0:
            continue
        engine = WorkerSettings.of(config, section).engine_config(folder)
        dtype = resolve_dtype(engine.dtype, found.dtype, device)
        forms[role] = held_as(str(dtype).removeprefix("torch."), found.weights_as(engine.quantization))
        step = step_bytes_on_cpu(model, engine.bounds, dtype.itemsize)
        try:
            resolve_device(engine)
            check_cores(engine)
            found.check_ranks(engine.parallel, engine.block_size)
            kv_dtype = resolve_kv_dtype(engine.kv_cache_dtype, model, dtype)
            weights = found.weight_bytes(dtype, engine.quantization, engine.parallel)
            num_blocks = resolve_num_blocks(engine, model, kv_dtype, weights + step, free)
            resolve_max_context(engine, model, num_blocks)
        except ConfigError as error:
            raise ConfigError(f"{role} workers: {error}") from error
        cache = (num_blocks or 0) * block_bytes(engine, model, kv_dtype)
        ranks = engine.parallel.num_ranks  # each takes as much as the largest stage's
        if num_blocks is not None and section.num_blocks is None and section.kv_cache_gib is None:
            caches.append(f"{role} {gibibytes(ranks * cache)}")
        needs.append(
            MemoryNeed(
                role,
                most,
                weights=ranks * weights,
                cache=ranks * cache,
                step=ranks * step,
                swap=ranks * engine.swap_bytes,
                processes=ranks * WORKER_BYTES,
                tiers=config.tiers.memory_bytes,
            )
        )
    if device.type == "cpu":
        rest = PROCESS_BYTES * (config.router.replicas + SERVE_PROCESSES)
        check_memory_of_all(needs, rest, free)
    if len(set(forms.values())) == 1:
        form = forms["decode"]
    else:
        form = " and ".join(f"{how} at {role} workers" for role, how in forms.items())
    lines = [f"{found.num_parameters / 1e6:.1f} M parameters, {form} on {device.type}"]
    if str(defaults):
        lines.append(f"Sampling where a request says nothing, by generation_config.json: {defaults}")
    if caches:
        lines.append(
            f"KV cache of each worker, of {gibibytes(free)} of free memory: {', '.join(caches)} (kv_cache_gib sets it)"
        )
    return lines
