"""Starts the rigs."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.register_assert_rewrite("tests.faults.rig")

from tests.faults.children import Nursery  # noqa: E402
from tests.faults.rig import Rig  # noqa: E402
from tests.rigs.kv_links import NIXL  # noqa: E402


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    return Nursery()


@pytest_asyncio.fixture(
    scope="session",
    loop_scope="session",
    params=["tcp", "shm", "torch_distributed", pytest.param("nixl", marks=[*NIXL.marks, pytest.mark.wide])],
)
async def rig(request: pytest.FixtureRequest, nursery: Nursery) -> AsyncIterator[Rig]:
    """Two sources and two targets of one transport, used by all of its tests: what leaks in one shows in the next."""
    async with Rig.started(nursery, request.param) as started:
        yield started


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def watched(rig: Rig) -> AsyncIterator[None]:
    """Another pair goes on during every test, and the survivors hold afterwards what they held before."""
    async with rig.watched():
        yield
