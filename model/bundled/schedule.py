"""How far a training run is: by the clock, by the number of steps, or as recorded in an earlier run."""

import time

BLOCK_STEPS = 20  # steps that share one reading of the clock, so that a run's schedule is a short list


class Schedule:
    """The progress, 0 to 1, at each step. `recorded` holds one number for each block of BLOCK_STEPS steps."""

    def __init__(self, minutes: float | None, steps: int | None, recorded: list[float], replay: bool) -> None:
        self.minutes, self.steps, self.recorded, self.replay = minutes, steps, recorded, replay
        # A resumed run goes on at the progress it had: the time in between does not count.
        done = recorded[-1] if recorded else 0.0
        self.start = time.monotonic() - done * (minutes or 0.0) * 60

    def progress(self, step: int) -> float:
        """Whichever of time and steps is further on. Appends to `recorded` at the first step of each block."""
        block = step // BLOCK_STEPS
        if block < len(self.recorded):
            return self.recorded[block]
        if self.replay:
            return 1.0
        by_steps = step / self.steps if self.steps is not None else 0.0
        elapsed_s = time.monotonic() - self.start
        by_clock = elapsed_s / (self.minutes * 60) if self.minutes is not None else 0.0
        self.recorded.append(round(min(1.0, max(by_steps, by_clock)), 5))
        return self.recorded[block]
