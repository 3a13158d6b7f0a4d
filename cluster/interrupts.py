"""How signals end a command that has processes to end first."""

import signal
from types import FrameType


def interrupt_once() -> None:
    """SIGINT and SIGTERM raise KeyboardInterrupt once; whoever sends more doesn't speed the ending up."""
    raised = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
