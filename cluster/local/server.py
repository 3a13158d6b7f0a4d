"""The process that drives Ray for `twostroke serve`; `commands/serve.py` starts it and looks after it.

It takes one line of JSON on its standard input, and serves until that input ends: so it ends with its starter, however
that ends. What it has to tell goes as lines of JSON to the file descriptor that its only argument names.
"""

import _thread
import asyncio
import errno
import math
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

from twostroke.cluster.config.config import ClusterConfig, api_keys, check_keys, read_config, with_keys
from twostroke.cluster.config.gpus import share_gpus
from twostroke.cluster.config.model_folder import chat_template_text, resolve_model_folder, served_name
from twostroke.cluster.config.sections import Placement, held_as
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.ray import APPLICATION, StartFailed, deploy, local_ray
from twostroke.kvtiers.config import check_machine
from twostroke.protocol.errors import ConfigError
from twostroke.router.http.tenants import KeyConfig, new_key

READY_S = 120.0
LOOK_S = 1.0  # between two looks at the workers
LOOK_TIMEOUT_S = 2.0  # also how long a silent server may delay the end


class ServeOrder(msgspec.Struct, frozen=True):
    """The server's settings, as one line of input."""

    settings: dict[str, Any]  # the configuration, as YAML gives it
    host: str
    port: int
    haproxy: bool
    verbose: bool
    grace_s: float = 0.0  # for streams to end, once the server is to
    gpus: int | None = None  # of this machine, that may be used; None: all


class ServerReport(msgspec.Struct, frozen=True):
    """A line of output."""

    event: Literal[
        "step", "loud", "ready", "news", "wrong", "failed"
    ]  # news: after ready; wrong: a setting, file or folder is
    text: str  # ready: the model's name; else for people


PROCESS_BYTES = 150 * 2**20  # what a process other than a worker's takes: the interpreter and Ray
SERVE_PROCESSES = 4  # controller, proxies, Ray's own


def check_port(host: str, port: int) -> None:
    """Check that the port is free and `host` an address of this machine. Raises ConfigError."""
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


class _Starter:
    """The process that started this one. It is gone when our standard input ends."""

    def __init__(self) -> None:
        self._gone = threading.Event()
        self._interrupts = True
        threading.Thread(target=self._watch, name="starter", daemon=True).start()

    def is_gone_within(self, seconds: float) -> bool:
        """Return whether the starter ends within `seconds`. After the first call the caller is not interrupted any
        more."""
        self._interrupts = False
        return self._gone.wait(seconds)

    def _watch(self) -> None:
        while os.read(0, 4096):  # unbuffered: a buffer's lock, held at the interpreter's end, would be fatal
            pass
        self._gone.set()
        if self._interrupts:  # the main thread is in the middle of starting something
            _thread.interrupt_main()


class FleetWatch:
    """Report lost workers, and their return, on the console.

    It compares one answer of GET /status with the one before. `expected` is the number of workers of each role until
    the autoscaler decides otherwise.
    """

    def __init__(self, expected: Mapping[str, int]):
        self._expected = dict(expected)
        self._known: dict[str, tuple[str, str]] | None = None  # by epoch: role, worker id
        self._is_silent = False

    def news(self, status: Mapping[str, Any]) -> list[str]:
        """A line for each role that is to have more or fewer workers, and for each worker that is gone or new."""
        lines = ["The server answers again"] if self._is_silent else []
        self._is_silent = False
        lines += self._targets(status.get("autoscaling"))
        known = {one["epoch"]: (one["role"], one["worker_id"]) for one in status["workers"] if one["reachable"]}
        if self._known is None:
            self._known = known
            return lines
        before = Counter(role for role, _ in self._known.values())
        lost = [worker for epoch, worker in self._known.items() if epoch not in known]
        new = [worker for epoch, worker in known.items() if epoch not in self._known]
        self._known = known
        there = Counter(role for role, _ in known.values())
        too_many = before - Counter(self._expected)
        for worker in lost:
            lines.append(self._line(worker, "has left" if too_many[worker[0]] > 0 else "is lost", there))
            too_many[worker[0]] -= 1
        return lines + [self._line(worker, "is up", there) for worker in new]

    def no_answer(self, reason: str) -> list[str]:
        """The server did not tell its status; said once, until it answers again."""
        lines = [] if self._is_silent else [f"The server does not answer: {reason}"]
        self._is_silent = True
        return lines

    def _targets(self, autoscaling: Mapping[str, Any] | None) -> list[str]:
        lines: list[str] = []
        for role, entry in (autoscaling or {"roles": {}})["roles"].items():
            target, before = entry["target"], self._expected.get(role)
            if target != before:
                noun = "worker" if target == 1 else "workers"
                lines.append(
                    f"The autoscaler asks for {target} {role} {noun} instead of {before} ({entry['last_change']})"
                )
            self._expected[role] = target
        return lines

    def _line(self, worker: Sequence[str], what: str, there: Mapping[str, int]) -> str:
        role, worker_id = worker
        count, expected = there.get(role, 0), self._expected.get(role, 0)
        return f"{role.capitalize()} worker {worker_id} {what}: {count} of {expected} {role} workers are there"


def main() -> int:
    """Serve; returns 0 when the input has ended, 1 after a failure, 2 where a setting, file or folder is wrong."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServeOrder)
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as reports:
        starter = _Starter()
        try:
            _serve(order, starter, reports)
        except KeyboardInterrupt:
            return 0
        except ConfigError as error:
            _report(reports, ServerReport("wrong", str(error)))
            return 2
        except StartFailed as error:
            _report(reports, ServerReport("failed", str(error)))
            return 1
    return 0


def _serve(order: ServeOrder, starter: _Starter, reports: TextIO) -> None:
    shared = share_gpus(order.settings, min(order.gpus or sys.maxsize, _gpus_in_sight()) if order.gpus != 0 else 0)
    config, api_key = with_own_key(check_keys(read_config(shared.settings)))
    if shared.line is not None:
        _report(reports, ServerReport("loud" if shared.is_idle else "step", shared.line))
    check_is_anywhere(config)
    for line in check_machine(config.tiers):
        _report(reports, ServerReport("loud", line))
    folder = resolve_model_folder(config.model.path, revision=config.model.revision)
    name = served_name(config.model, folder)
    described, *caches = check_model(config, folder)
    for line in (f"Model {name}: {described}", *caches):
        _report(reports, ServerReport("step", line))
    _report(reports, ServerReport("step", "Starting Ray ..."))
    cpus, gpus = _resources(config)
    ray = local_ray(
        host=order.host, port=order.port, num_cpus=cpus, num_gpus=gpus, haproxy=order.haproxy, verbose=order.verbose
    )
    with ray:
        _report(reports, ServerReport("step", "Ray is up. Starting the workers ..."))
        # Ray may be imported now: its switches are set.
        from twostroke.cluster.deployments.router import drain_application

        deploy(config, shared.settings)
        _await_ready(own_url(order.host, order.port))
        for line in _describe_workers(own_url(order.host, order.port), api_key):
            _report(reports, ServerReport("step", line))
        _report(reports, ServerReport("ready", name))
        watch = FleetWatch({role: counts.first for role, counts in config.counts.items()})
        while not starter.is_gone_within(LOOK_S):
            for line in _news(watch, own_url(order.host, order.port), api_key):
                _report(reports, ServerReport("news", line))
        if order.grace_s > 0:
            notice_s = config.router.drain_notice_s
            asyncio.run(
                drain_application(
                    APPLICATION, order.grace_s, notice_s, lambda line: _report(reports, ServerReport("news", line))
                )
            )


def _gpus_in_sight() -> int:
    import torch

    return torch.cuda.device_count()


def _news(watch: FleetWatch, url: str, api_key: str | None) -> list[str]:
    try:
        return watch.news(fetch_status(url, api_key, timeout_s=LOOK_TIMEOUT_S))
    except ConfigError as error:
        return watch.no_answer(str(error))


def _resources(config: ClusterConfig) -> tuple[int, int]:
    """The CPUs and GPUs of as many workers as there may be; no fewer CPUs than this machine has."""
    ranks = [(config.counts[role].most * each.num_ranks, each) for role, each in config.roles.items()]
    cores = sum(count * config.threads(resources) for count, resources in ranks)
    gpus = sum(count * resources.gpus for count, resources in ranks)
    if config.autoscaling.enabled and config.autoscaling.budget is not None:
        gpus = min(gpus, config.autoscaling.budget)
    return max(cores, len(os.sched_getaffinity(0))), math.ceil(gpus)


def _await_ready(url: str) -> None:
    """Return once a whole path works. Raises StartFailed where none does in time."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except urllib.error.HTTPError as error:
            missing = error.read().decode(errors="replace")[:300] or f"/ready answers {error.code}"
        except OSError as error:
            missing = f"/ready: {error}"
        if time.monotonic() > deadline:
            raise StartFailed(missing)
        time.sleep(0.1)


def check_is_anywhere(config: ClusterConfig) -> None:
    """Check that no worker or router has to run on some node of a Ray cluster. Raises ConfigError."""
    placements: list[tuple[str, Placement]] = [*config.roles.items(), ("router", config.router)]
    for name, placement in placements:
        if not placement.is_anywhere:
            setting = "node_labels" if placement.node_labels else "node_resources"
            raise ConfigError(
                f"{name}.{setting}: `twostroke serve` has this machine alone, and would wait for such a node for ever: "
                "delete it, or deploy on a Ray cluster (docs/hosts.md)"
            )


def with_own_key(config: ClusterConfig) -> tuple[ClusterConfig, str | None]:
    """The configuration with a key for this process beside its own, and that key; None where none is needed.

    Raises ConfigError where somebody else's has its name: requests could not be told apart in the log.
    """
    if not api_keys(config):
        return config, None
    key, sha256 = new_key()
    config = with_keys(config, [KeyConfig(name="twostroke serve", sha256=sha256, admin=True)])
    api_keys(config)
    return config, key


def _describe_workers(url: str, api_key: str | None) -> list[str]:
    """A line for each kind of worker: how many are up, and what one's KV cache holds."""
    kinds = Counter(
        tuple(
            worker[name]
            for name in ("role", "ranks", "num_blocks", "block_size", "kv_dtype", "full_contexts", "max_context")
        )
        for worker in fetch_status(url, api_key)["workers"]
    )
    lines: list[str] = []
    for (role, ranks, num_blocks, block_size, dtype, requests, max_context), count in sorted(kinds.items()):
        who = f"{count} {role} " + ("worker is up with" if count == 1 else "workers are up, each with")
        shared = "" if ranks == 1 else f"{ranks} ranks and "
        lines.append(
            f"{who} {shared}{num_blocks} KV blocks of {block_size} tokens in {dtype}: room for {requests:.1f} requests "
            f"of the full context of {max_context} tokens"
        )
    return lines


def own_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a listener on `host`."""
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _report(reports: TextIO, report: ServerReport) -> None:
    reports.write(msgspec.json.encode(report).decode() + "\n")
    reports.flush()


if __name__ == "__main__":
    sys.exit(main())
