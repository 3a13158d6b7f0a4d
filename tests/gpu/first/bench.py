"""`python3 -m tests.gpu.first.bench gpu|transfer OPTIONS`: `twostroke bench`, with the log on stderr."""

import logging
import sys

from twostroke.cluster.cli import main


def log_to_stderr() -> None:
    """Let each line begin with the milliseconds since the process began."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d ms %(name)s: %(message)s")


if __name__ == "__main__":
    log_to_stderr()
    sys.exit(main(["bench", *sys.argv[1:]]))
