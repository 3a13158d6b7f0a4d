"""Ray and Serve for one machine, started and ended by us.

Everything listens on the loopback address, except what README.md and docs name: Serve's replicas accept calls on all
interfaces (authenticated by Ray's token), and so do HAProxy's pages of statistics.
"""

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from twostroke.cluster.deployments.haproxy import BINARY_VARIABLE, write_haproxy_script
from twostroke.cluster.deployments.proxies import HAPROXY_SWITCHES, NO_HAPROXY_SWITCHES, SWITCHES

SERVE_SHUTDOWN_S = 4.0


class StartFailed(Exception):
    """The server did not come up. The message is for people."""


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on at the moment, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def haproxy_switches(folder: Path, *, stats: int, metrics: int, fallback: int) -> dict[str, str]:
    """Of a HAProxy with ports and files of its own: they have fixed defaults, over which two on a machine fall out."""
    return {
        **HAPROXY_SWITCHES,
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        BINARY_VARIABLE: str(write_haproxy_script(folder)),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def ray_environment(folder: Path, *, haproxy: bool) -> dict[str, str]:
    """Ray's switches that exist as environment variables alone. They must be set before Ray is imported."""
    switches = {
        **SWITCHES,
        # Named after the systems where it is the default: Ray takes 127.0.0.1 for the node's address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Nobody balances load over one machine's routers, and so nobody must hear first that one leaves.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
    }
    if haproxy:
        stats, metrics, fallback = free_ports(3)
        return switches | haproxy_switches(folder, stats=stats, metrics=metrics, fallback=fallback)
    return {**switches, **NO_HAPROXY_SWITCHES}


@contextlib.contextmanager
def local_ray(
    *, host: str, port: int, num_cpus: int, num_gpus: int = 0, haproxy: bool, verbose: bool = False
) -> Iterator[None]:
    """Ray with Serve's HTTP listener, for as long as the context lasts. It has at least the CPUs and GPUs that the
    deployments ask for together.

    Raises StartFailed. Call it once per process, on its main thread and before Ray is imported. Ray may end this
    process itself when it loses its head, so whoever must be sure that no process is left is another process
    (`commands/serve.py`).
    """
    with tempfile.TemporaryDirectory(prefix="twostroke-", ignore_cleanup_errors=True) as folder:
        # Ray's own choice is to ask for a token; a shell that opted out must not open our ports to all on this machine.
        os.environ.pop("RAY_AUTH_MODE", None)
        # Over what a shell or deploy/Dockerfile has for the nodes of a cluster.
        os.environ.update(ray_environment(Path(folder), haproxy=haproxy))
        import ray
        from ray import serve
        from ray.exceptions import RayError

        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=verbose,
                logging_level="INFO" if verbose else "ERROR",
            )
            try:
                serve.start(http_options={"host": host, "port": port})
            except RayError as error:
                raise StartFailed(f"Ray Serve does not start: {error}") from error
            yield
        finally:
            # Bounded: a stream that nobody reads would hold a polite shutdown up for as long as it lasts.
            closing = threading.Thread(target=_shut_serve_down, daemon=True)
            closing.start()
            closing.join(SERVE_SHUTDOWN_S)
            # Ray ends a process in which a thread still asks it for something after this, before anybody can say what
            # went wrong: then it is for the end of the process to shut Ray down.
            if not closing.is_alive():
                ray.shutdown()


def _shut_serve_down() -> None:
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    # Whatever fails here, the processes are ended next.
    with contextlib.suppress(RayError, RayServeException, RuntimeError):
        serve.shutdown()
