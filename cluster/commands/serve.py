"""`twostroke serve`: a whole server on this machine, from checks to Ctrl-C."""

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console

from cluster.config import ClusterConfig, load_yaml, read_config
from cluster.local_ray import LocalRayOptions, haproxy_binary, local_ray
from cluster.model_folder import resolve_model_folder, served_name
from cluster.preflight import check_model, check_port
from protocol.errors import ConfigError

READY_S = 60.0
_CONFIG_ERROR = re.compile(r"protocol\.errors\.ConfigError: (.+)")


class StartFailed(Exception):
    """The application did not come up. The message is for people."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR|ID", help="a Hugging Face model folder or hub id (default: bundled)")
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML with model, prefill, decode, router, ...")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument("--name", help="what clients call the model")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers; 0: decode workers read prompts, too")
    parser.add_argument("--decode", type=int, metavar="N", help="decode workers")
    parser.add_argument("--transport", choices=("tcp", "torch_distributed"), help="how KV travels")
    parser.add_argument("--no-haproxy", action="store_true", help="use Serve's own proxy in front of the router")
    parser.add_argument("--verbose", action="store_true", help="show what Ray says")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; returns 0 then, 1 where the application could not start. Raises ConfigError."""
    config = configuration(arguments)
    if not 1 <= arguments.port <= 65535:
        raise ConfigError(f"port {arguments.port} is none: choose one from 1 to 65535")
    check_port(arguments.host, arguments.port)
    folder = resolve_model_folder(config.model.path)
    name = served_name(config.model, folder)
    with _own_terminal(arguments.verbose) as (console, log):
        steps = _Steps(console)
        described = check_model(config, folder)
        steps.done(f"Model {name}: {described}")
        stop = _Stop()
        stop.install()
        try:
            haproxy = not arguments.no_haproxy and haproxy_binary() is not None
            if not haproxy and not arguments.no_haproxy:
                steps.done("There is no HAProxy for this machine: Serve's own, slower proxy is used")
            with local_ray(_ray_options(arguments, config, haproxy)):
                stop.install()  # again: Ray has put its own handlers there
                steps.done("Ray is up")
                _deploy(config, f"http://{_reachable(arguments.host)}:{arguments.port}")
                steps.done(f"{config.prefill.replicas} prefill and {config.decode.replicas} decode workers are up")
                _show_ready(console, arguments, name)
                stop.serve()
                console.print("Ending ...")
        except KeyboardInterrupt:
            console.print("Interrupted while starting; everything is ended.")
        except StartFailed as error:
            console.print(f"[red]The server did not start:[/] {error}", highlight=False)
            if log is not None:
                console.print(f"Ray's own words are in {log} and under /tmp/ray/session_latest/logs", highlight=False)
            return 1
    return 0


def configuration(arguments: argparse.Namespace) -> ClusterConfig:
    """The file's settings, overridden by the command line's. Raises ConfigError."""
    raw = load_yaml(arguments.config) if arguments.config is not None else {}
    overrides = {
        ("model", "path"): arguments.model,
        ("model", "name"): arguments.name,
        ("model", "dtype"): arguments.dtype,
        ("prefill", "replicas"): arguments.prefill,
        ("decode", "replicas"): arguments.decode,
        ("kv_transfer", "transport"): arguments.transport,
    }
    read_config(raw)  # what is wrong in the file is told before the command line is laid over it
    for (section, key), value in overrides.items():
        if value is not None:
            raw[section] = {**(raw.get(section) or {}), key: value}
    return read_config(raw)


def _ray_options(arguments: argparse.Namespace, config: ClusterConfig, haproxy: bool) -> LocalRayOptions:
    sections = (config.prefill, config.decode)
    cores = sum(section.replicas * config.threads(section.resources) for section in sections)
    gpus = sum(section.replicas * section.resources.num_gpus for section in sections)
    return LocalRayOptions(
        host=arguments.host,
        port=arguments.port,
        num_cpus=max(cores, len(os.sched_getaffinity(0))),
        num_gpus=-int(-gpus // 1),
        haproxy=haproxy,
        verbose=arguments.verbose,
    )


def _deploy(config: ClusterConfig, url: str) -> None:
    """Start the application and wait until a whole path works. Raises StartFailed or ConfigError."""
    # Ray may be imported now: its switches are set.
    from ray import serve
    from ray.exceptions import RayError

    from cluster.serve_app import application, cluster_secret

    try:
        serve.run(application(config, cluster_secret()), name="twostroke", route_prefix="/")
    except (RuntimeError, RayError) as error:
        # Serve tells a replica's traceback as text.
        told = _CONFIG_ERROR.search(str(error))
        if told is not None:
            raise ConfigError(told[1]) from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise StartFailed(lines[-1] if lines else "Ray Serve gives no reason") from error
    deadline = time.monotonic() + READY_S
    while True:
        missing = _not_ready(url)
        if missing is None:
            return
        if time.monotonic() > deadline:
            raise StartFailed(missing)
        time.sleep(0.1)


def _not_ready(url: str) -> str | None:
    """Why /ready does not say yes; None if it does."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return None
    except urllib.error.HTTPError as error:
        return error.read().decode(errors="replace")[:300] or f"{url}/ready answers {error.code}"
    except OSError as error:
        return f"{url}/ready: {error}"


def _show_ready(console: Console, arguments: argparse.Namespace, name: str) -> None:
    url = f"http://{_reachable(arguments.host)}:{arguments.port}"
    body = json.dumps({"model": name, "prompt": "import os\n\ndef list_files(path):\n", "max_tokens": 48})
    console.print(f"[green]Ready[/] at {url}/v1 — model {name}. Ctrl-C ends it. Try:", highlight=False)
    # As it is, unwrapped and unstyled: to be pasted.
    print(f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", file=console.file, flush=True)


def _reachable(host: str) -> str:
    """The address under which this machine itself reaches a listener on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


class _Steps:
    """Tells each finished step, and how long it took."""

    def __init__(self, console: Console):
        self._console = console
        self._since = time.monotonic()

    def done(self, text: str) -> None:
        now = time.monotonic()
        self._console.print(f"{text} [dim]({now - self._since:.1f} s)[/]", highlight=False)
        self._since = now


class _Stop:
    """SIGINT and SIGTERM: they interrupt the start, end the serving, and are ignored during the ending."""

    def __init__(self) -> None:
        self._serving = False
        self._ending = False
        self._wanted = threading.Event()

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def serve(self) -> None:
        """Return once a signal has come."""
        self._serving = True
        self._wanted.wait()
        self._ending = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._serving:
            self._wanted.set()
        elif not self._ending:
            self._ending = True
            raise KeyboardInterrupt


@contextlib.contextmanager
def _own_terminal(verbose: bool) -> Iterator[tuple[Console, Path | None]]:
    """A console for us alone, and the file where everybody else's output goes; no such file if `verbose`.

    Ray writes from C++ and from threads of its own, so the process's streams themselves are turned away.
    """
    if verbose:
        yield Console(), None
        return
    with tempfile.NamedTemporaryFile(prefix="twostroke-ray-", suffix=".log", delete=False) as log:
        path = Path(log.name)
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(1), os.dup(2)]
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        with os.fdopen(os.dup(kept[0]), "w", encoding="utf-8") as terminal:
            yield Console(file=terminal), path
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for saved, stream in zip(kept, (1, 2), strict=True):
            os.dup2(saved, stream)
            os.close(saved)
