"""`python3 -m tests.gpu.first.bench gpu|transfer OPTIONS`: `twostroke bench`, with the log on stderr.

With WITHOUT_TMA=1 the TMA kernel of prompts' attention is never taken: it hung, or was wrong, in the tests before.
"""

import logging
import os
import sys

from twostroke.cluster.cli import main
from twostroke.model.cuda.prompt_attention import TmaKernel


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d ms %(name)s: %(message)s")


def leave_out_tma() -> None:
    """Let `TmaKernel` know no form of attention, where WITHOUT_TMA=1 asks for that."""
    if os.environ.get("WITHOUT_TMA") == "1":
        TmaKernel.knows = lambda *_: False  # type: ignore[method-assign]


if __name__ == "__main__":
    log_to_stderr()
    leave_out_tma()
    sys.exit(main(["bench", *sys.argv[1:]]))
