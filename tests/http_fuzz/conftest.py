"""Fixtures for fuzzing HTTP: one server for all cases of a test file."""

import asyncio
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.http_fuzz.virtual_site import MODEL_FOLDER, Answer, VirtualSite
from twostroke.router.text.tokenizer import TextTokenizer
from twostroke.simulator.virtual_loop import VirtualLoop

Ask = Callable[[str, str, dict[str, str], bytes], Answer]


@pytest.fixture(autouse=True)
def _quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody reads thousands of them."""
    caplog.set_level("CRITICAL")


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Asks the server (method, URL, headers, body) and waits for the whole answer. What is left behind fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twostroke.router.text.tokenizer.OFF_LOOP_CHARS", sys.maxsize)  # virtual time knows of no threads
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s=1e6)) as runner:
            site = runner.run(_entered())
            yield lambda method, url, headers, body: runner.run(site.ask(method, url, headers, body))
            runner.run(site.__aexit__())


async def _entered() -> VirtualSite:
    return await VirtualSite(TextTokenizer.load(MODEL_FOLDER)).__aenter__()
