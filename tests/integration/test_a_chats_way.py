"""The files of the product that run code for one streamed chat: a stranger has these to read."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from tests.integration.local_fleet import SECRET, Shape, serve
from twostroke.router.http.app import build_app
from twostroke.router.http.doctor import Doctor
from twostroke.router.http.service import RouterService, ServiceConfig
from twostroke.router.text.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "model" / "bundled"
MAX_FILES = 77
"""docs/design/architecture.md tells the way in these."""
QUIET = {"stats_interval_s": 600.0, "lease_s": 3600.0}
"""Workers' reports of their numbers come for no request."""


class CalledFiles:
    """Notes the files whose functions are called while `is_on`, on every thread that starts while it is installed."""

    def __init__(self) -> None:
        self.is_on = False
        self.names: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call":
            self.names.add(frame.f_code.co_filename)

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def product(self) -> list[str]:
        """Return the files of the product among them, from the root."""
        paths = (Path(name).resolve() for name in self.names if name.startswith("/"))
        found = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}
        return sorted(name for name in found if not name.startswith(("tests/", ".venv/")))


async def chat(client: httpx.AsyncClient, text: str) -> str:
    """Stream a chat to its end, and return the body."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 12, "stream": True}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.text


async def test_a_chat_runs_through_few_files() -> None:
    called = CalledFiles()
    with called.installed():
        async with serve(MODEL, Shape("tcp", token_channel=QUIET)) as served:
            service = RouterService(
                config=ServiceConfig("m"),
                tokenizer=TextTokenizer.load(MODEL),
                fleet=served.fleet,
                channels=served.channels,
                pipeline=served.pipeline,
            )
            doctor = Doctor(fleet=served.fleet, stats=served.channels.stats, secret=SECRET, expected=dict)
            app = build_app(service, doctor)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
                await chat(client, "What comes before the one that is measured?")
                await served.idle()
                called.is_on = True
                assert "[DONE]" in await chat(client, "How many files does a chat take?")
                called.is_on = False
                await served.idle()
            assert served.fleet.stats("decode").transfers_done == 2
    files = called.product()
    assert {name.split("/")[0] for name in files} >= {"router", "worker", "model", "kvtransfer", "protocol"}
    assert len(files) <= MAX_FILES, "\n".join(files)
