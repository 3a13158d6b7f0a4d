"""Garbage collection of all tests, thousands of which run in one process."""

import gc

import pytest


def pytest_collection() -> None:
    """Importing the tests makes millions of objects, none of them garbage."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the collected tests, so that no garbage collection looks through them again."""
    gc.freeze()
    gc.enable()
