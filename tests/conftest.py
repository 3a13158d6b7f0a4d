"""What all tests share: how garbage is collected while thousands of them run in one process."""

import gc

import pytest


def pytest_collection() -> None:
    """Importing the tests makes millions of objects, none of them garbage."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on, no collection looks through them again."""
    gc.freeze()
    gc.enable()
