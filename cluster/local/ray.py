"""Ray and Serve for one machine, started and ended by us, and the application on them.

Everything listens on the loopback address, except what README.md and docs name: Serve's replicas accept calls on all
interfaces (authenticated by Ray's token), and so do HAProxy's pages of statistics.

Whoever has Ray's token runs code in our processes, so each run draws its own, and keeps it in the environment of these
processes, which is their user's alone. Ray's own way is a file for all runs that everybody on the machine may read, and
folders for its sockets and logs that everybody may write to.
"""

import contextlib
import os
import random
import re
import secrets
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twostroke.cluster.config.config import ClusterConfig
from twostroke.cluster.config.model_folder import chat_template_text
from twostroke.cluster.deployments.haproxy import BINARY_VARIABLE, write_haproxy_script
from twostroke.cluster.deployments.proxies import HAPROXY_SWITCHES, NO_HAPROXY_SWITCHES, SWITCHES
from twostroke.protocol.errors import ConfigError

SERVE_SHUTDOWN_S = 4.0
SERVER_PORTS = range(20_000, 32_768)
"""Ports above those that Ray gives to its workers, and below Linux's `ip_local_port_range`."""
APPLICATION = "twostroke"
DEPLOY_LOOK_S = 0.1
_CONFIG_ERROR = re.compile(r"protocol\.errors\.ConfigError: (.+)")
LONGEST_FOLDER = 40  # of Ray's sessions, whose sockets have paths of 107 bytes at most


class StartFailed(Exception):
    """The server did not come up. The message is for people."""


def ray_folder() -> Path:
    """Folder of the sockets and logs of this user's servers, the same each time.

    Ray lets everybody write to the folder that it is given, so that lies in one which is the user's alone.
    """
    name = f"twostroke-{os.geteuid()}/ray"
    folder = Path(tempfile.gettempdir()) / name
    return folder if len(str(folder)) <= LONGEST_FOLDER else Path("/tmp") / name


def private_ray_folder() -> Path:
    """`ray_folder`, whose parent is made where it is missing. Raises StartFailed where that is not the user's alone."""
    folder = ray_folder().parent
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StartFailed(
            f"{folder} must be a folder that is yours alone (mode 0700), for Ray's sockets and logs: remove it, or "
            "name another place for it in TMPDIR"
        )
    return ray_folder()


def free_ports(count: int) -> list[int]:
    """Draw TCP ports that nobody listens on at the moment, all different.

    None is one that the system gives to connections by itself: such a port may be taken before a server listens on it.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in random.sample(SERVER_PORTS, len(SERVER_PORTS)):
            if len(ports) == count:
                break
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("", port))
                ports.append(port)
        return ports


def haproxy_switches(folder: Path, *, stats: int, metrics: int, fallback: int) -> dict[str, str]:
    """Return Ray switches that give a HAProxy ports and files of its own. Their defaults are fixed, so two on a
    machine would collide."""
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
        # Also where a shell opted out, or has a cluster's token.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
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
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
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
                _temp_dir=str(private_ray_folder()),
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


def deploy(config: ClusterConfig, settings: dict[str, Any]) -> None:
    """Start the application. `settings` are what `config` was read from. Raises StartFailed or ConfigError.

    An application's own policy, such as the autoscaler, can only be given to Serve in a config, as a file for `serve
    deploy`. Serve then builds the application in a process of its own; without a policy that is avoided.
    """
    from ray import serve
    from ray.exceptions import RayError

    from twostroke.cluster.deployments.serve_app import application, cluster_secret

    try:
        if config.autoscaling.enabled:
            cluster_secret()  # raises here, not in a process of Serve's
            _deploy_as_config(portable_arguments(config, settings))
        else:
            serve.run(application(config, cluster_secret()), name=APPLICATION, route_prefix="/")
    except (RuntimeError, RayError) as error:
        # Serve tells a replica's traceback as text, here or in what it says of the deployments.
        application_status = serve.status().applications.get(APPLICATION)
        deployments = application_status.deployments.values() if application_status is not None else ()
        for text in (str(error), *(deployment.message for deployment in deployments)):
            matched = _CONFIG_ERROR.search(text)
            if matched is not None:
                raise ConfigError(matched[1]) from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise StartFailed(lines[-1] if lines else "Ray Serve gives no reason") from error


def portable_arguments(config: ClusterConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `build_app` for another folder: the settings with this process's own key, absolute paths
    and the chat template."""
    arguments = dict(settings)
    if config.auth.keys:
        arguments["auth"] = config.auth.model_dump(mode="json")
    if config.model.chat_template is not None:
        arguments["model"] = {**settings["model"], "chat_template": chat_template_text(config.model)}
    return arguments


def _deploy_as_config(arguments: dict[str, Any]) -> None:
    """Deploy the application; return once it runs. Raises RuntimeError with Serve's message where it does not."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ApplicationStatus, ServeApplicationSchema, ServeDeploySchema

    from twostroke.cluster.autoscaling.serve_policy import POLICY_FUNCTION

    client = _get_global_client()
    if client is None:
        raise RuntimeError("Ray Serve does not run")
    client.deploy_apps(
        ServeDeploySchema(
            applications=[
                ServeApplicationSchema(
                    name=APPLICATION,
                    route_prefix="/",
                    import_path="twostroke.cluster.deployments.serve_app:build_app",
                    args=arguments,
                    autoscaling_policy={"policy_function": POLICY_FUNCTION},
                )
            ]
        )
    )
    while True:
        status = serve.status().applications.get(APPLICATION)
        if status is not None and status.status == ApplicationStatus.RUNNING:
            return
        if status is not None and status.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            raise RuntimeError(status.message)
        time.sleep(DEPLOY_LOOK_S)
