"""A request sent over a socket of its own, and the raw bytes of the answer, each stamped as it comes.

Nothing is read while it streams: the less a chunk costs, the more streams a core can stamp on time. Under gevent's
monkey patching all of this waits for one request while others run; without it, it just blocks.

Each request has a connection of its own, as each of many users behind a load balancer has: the balancer then spreads
requests, not a few connections, and no request fails since the server has just closed an idle one. What connecting
costs counts in the time to first token.
"""

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.completions import Exchange

RECEIVE_BYTES = 65536
TRIAL_LIMIT_S = 2.0  # to connect to one of several addresses of a name


@dataclass(frozen=True)
class Endpoint:
    """A server, looked up once: asking the resolver for each request would cost the generator more than sending it."""

    family: socket.AddressFamily
    address: Any  # of that family
    host: str
    base_path: str
    head: str  # the fields that all requests have
    tls: ssl.SSLContext | None

    def request(self, path: str, body: bytes) -> bytes:
        """All bytes of a POST to `path`, which begins with a slash."""
        head = f"POST {self.base_path}{path} HTTP/1.1\r\n{self.head}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body


def endpoint_of(url: str, api_key: str | None = None) -> Endpoint:
    """The server at `url`, which has no /v1. Raises LoadTestError for what is no address, or can't be looked up."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise LoadTestError(f"url {url}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LoadTestError(f"url {url}: write http://HOST:PORT or https://HOST:PORT, with a path where there is one")
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LoadTestError(f"url {url}: {parts.hostname} can't be looked up: {error.strerror}") from error
    family, address = _first_that_answers([(family, address) for family, _, _, _, address in found])
    head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    if api_key:
        head += f"Authorization: Bearer {api_key}\r\n"
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Endpoint(family, address, parts.hostname, parts.path.rstrip("/"), head, tls)


def stream(
    endpoint: Endpoint,
    request: bytes,
    exchange: Exchange,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Send `request` and put all that comes into `exchange`, until the server closes the connection.

    Stamps `exchange.sent_at` as it begins to connect. Raises nothing for what the server or the network does:
    `exchange.broken` then says why. Whoever ends this from outside finds in `exchange` what had come by then.
    """
    exchange.sent_at = clock()
    deadline = exchange.sent_at + limit_s
    arrivals = exchange.arrivals
    try:
        with _connect(endpoint, limit_s) as connection:
            connection.sendall(request)
            while data := connection.recv(RECEIVE_BYTES):
                now = clock()
                arrivals.append((now, data))
                if now >= deadline:
                    raise TimeoutError
                connection.settimeout(deadline - now)
    except TimeoutError:
        exchange.broken = f"no whole answer within {limit_s:g} s"
    except OSError as error:  # ssl.SSLError is one
        what = "the connection broke" if arrivals else "no connection"
        exchange.broken = f"{what}: {error.strerror or error}"


def _first_that_answers(addresses: list[tuple[socket.AddressFamily, Any]]) -> tuple[socket.AddressFamily, Any]:
    """`localhost` is ::1, too, where many a server does not listen. Where none answers the first says why, later."""
    for family, address in addresses if len(addresses) > 1 else ():
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.settimeout(TRIAL_LIMIT_S)
            if trial.connect_ex(address) == 0:
                return family, address
    return addresses[0]


def _connect(endpoint: Endpoint, limit_s: float) -> socket.socket:
    connection = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        connection.settimeout(limit_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect(endpoint.address)
        if endpoint.tls is not None:
            return endpoint.tls.wrap_socket(connection, server_hostname=endpoint.host)
        return connection
    except BaseException:
        connection.close()
        raise
