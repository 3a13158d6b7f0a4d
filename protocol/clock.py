"""Time as a constructor argument.

Live code passes `time.monotonic`; a simulation passes its event loop's virtual `time`. No deadline that crosses a
process is absolute: send remaining durations, keep monotonic deadlines.
"""

import secrets
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds since an arbitrary, fixed moment of this process; never goes back."""


def draw_epoch() -> int:
    """A random 63-bit number that names one incarnation of a process."""
    return secrets.randbits(63)
