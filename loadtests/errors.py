"""What a load test can't go on with."""


class LoadTestError(Exception):
    """A setting, file or server is wrong. The message is one line for people: what, and the way out."""
