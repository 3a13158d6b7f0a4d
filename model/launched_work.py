"""Work that a GPU has been given so far, for any thread to wait for."""

import torch


class LaunchedWork:
    """All that was launched on the current stream of `device` before this was made."""

    def __init__(self, device: torch.device):
        # Waiters sleep. By default they spin, and a step of milliseconds would take one core from the event loop and
        # from the thread that launches the next step.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))
        self._device = device

    def synchronize(self) -> None:
        """Return once it is done. Frees the interpreter's lock. Raises RuntimeError where the device has failed."""
        # A thread without a current device would be given the first GPU, and a context of 500 MiB there.
        with torch.cuda.device(self._device):
            self._event.synchronize()
