"""The load balancers of deploy/, run as they are but for addresses and folders: in front of given ports on loopback."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.programs import ROOT, environment
from tests.rigs.processes import eventually
from twostroke.cluster.local.ray import free_ports

START_S = 10.0


@dataclass(frozen=True)
class Proxy:
    """A running load balancer."""

    url: str  # for clients
    operators_url: str


def adapted(text: str, changes: dict[str, str]) -> str:
    """The text with each key, which must be there once, replaced by its value."""
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return text


def haproxy_config(entries: Sequence[int], clients: int, operators: int, folder: Path, *, check: str = "1s") -> str:
    """deploy/haproxy.cfg for these ports, with health checks at this interval."""
    return adapted(
        (ROOT / "deploy/haproxy.cfg").read_text(encoding="utf-8"),
        {
            "bind :8080": f"bind 127.0.0.1:{clients}",
            "127.0.0.1:8081": f"127.0.0.1:{operators}",
            "10.0.0.11:8000": f"127.0.0.1:{entries[0]}",
            "10.0.0.12:8000": f"127.0.0.1:{entries[1]}",
            "stats socket /run/haproxy-twostroke.sock": f"stats socket {folder}/haproxy.sock",
            "inter 1s fastinter 500ms": f"inter {check} fastinter {check}",
        },
    )


def nginx_config(entries: Sequence[int], clients: int, operators: int, folder: Path) -> str:
    """deploy/nginx.conf for these ports. Debian's build writes below /var/lib, which a fetched nginx has not."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    elsewhere = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    return adapted(
        (ROOT / "deploy/nginx.conf").read_text(encoding="utf-8"),
        {
            "http {\n": f"http {{\n{elsewhere}",
            "listen 8080;": f"listen 127.0.0.1:{clients};",
            "listen 127.0.0.1:8081;": f"listen 127.0.0.1:{operators};",
            "10.0.0.11:8000": f"127.0.0.1:{entries[0]}",
            "10.0.0.12:8000": f"127.0.0.1:{entries[1]}",
            "pid /run/nginx-twostroke.pid;": f"pid {folder}/nginx.pid;",
            "worker_processes auto;": "worker_processes 1;",
        },
    )


def nginx_command(program: str, config: Path, *arguments: str) -> list[str]:
    """nginx with this file, in the foreground. Root's workers stay root: test folders are root's alone."""
    user = "user root; " if os.geteuid() == 0 else ""
    return [program, "-e", "stderr", "-c", str(config), "-g", f"{user}daemon off;", *arguments]


@contextlib.contextmanager
def running(kind: str, program: str, entries: Sequence[int], folder: Path, *, check: str = "1s") -> Iterator[Proxy]:
    """`kind` is haproxy or nginx; its log is in `folder`, too."""
    clients, operators = free_ports(2)
    config = folder / f"{kind}.conf"
    if kind == "haproxy":
        config.write_text(haproxy_config(entries, clients, operators, folder, check=check), encoding="utf-8")
        command = [program, "-db", "-f", str(config)]
    else:
        config.write_text(nginx_config(entries, clients, operators, folder), encoding="utf-8")
        command = nginx_command(program, config)
    with started(command, (clients, operators), folder / f"{kind}.log"):
        yield Proxy(f"http://127.0.0.1:{clients}", f"http://127.0.0.1:{operators}")


@contextlib.contextmanager
def started(command: Sequence[str], ports: Sequence[int], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A program that listens on these ports of loopback; what it says goes to `log`."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def listens() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        with contextlib.suppress(ConnectionError):
            for port in ports:
                socket.create_connection(("127.0.0.1", port), timeout=START_S).close()
            return True
        return False

    try:
        eventually(f"{command[0]} listens", listens, within_s=START_S)
        yield process
    finally:
        process.terminate()
        process.wait(START_S)
