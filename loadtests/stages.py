"""Users by the clock: `locust -f loadtests/locustfile.py,loadtests/stages.py --headless --host URL`.

An example of a shape, to be copied and changed: https://docs.locust.io/en/stable/custom-load-shape.html
"""

from locust import LoadTestShape


class Stages(LoadTestShape):
    """A calm minute, a minute of five times the users, and a minute to see what is left of that."""

    stages = ((60, 10), (120, 50), (180, 10))  # until which second, how many users

    def tick(self) -> tuple[int, float] | None:
        """Asked once a second: users, and how many of them are started or stopped a second; None ends the test."""
        now_s = self.get_run_time()
        return next(((users, users) for until_s, users in self.stages if now_s < until_s), None)
