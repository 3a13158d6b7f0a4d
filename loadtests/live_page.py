"""Live charts beside Locust's own: a page of ours in Locust's web server, under /twostroke."""

from typing import Any

from loadtests.locust_head import Head


def add_to(app: Any, head: Head) -> None:
    """Adds the page, and the figures that it asks for, to Locust's Flask app."""
