"""Clients that send half of what they announce, or take nothing of what they asked for; and keys that come and go."""

import asyncio
import contextlib
import itertools
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.chaos.clients import MODEL, PATIENCE_S, head_of

CUT_OFF_S = 20.0  # router.body_timeout_s, and as much again for a busy machine, several times
UNREAD_S = 6.0
KNOWN_S = 20.0  # for each router to look at the file of keys, also one that has just started
IN_A_ROW = 8  # answers, so that every router has been asked


async def send_half(url: str, api_key: str) -> str | None:
    """More than HAProxy holds, so that a router waits for the rest."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    began = time.monotonic()
    answer = asyncio.create_task(reader.read())
    try:
        writer.write(head_of(url, api_key, 60_000) + b" " * 30_000)
        while not answer.done() and time.monotonic() < began + CUT_OFF_S:
            await asyncio.wait([answer], timeout=0.5)
            writer.write(b" ")
        took_s = time.monotonic() - began
        with contextlib.suppress(ConnectionError):
            if not answer.done() or answer.result()[9:12] not in (b"", b"408"):
                return None
        return f"cut off after {took_s:.1f} s"
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        writer.close()


async def take_nothing(url: str, api_key: str) -> str | None:
    """For a while, and then all of it: what a client does not read waits for it, and nobody else waits."""
    parts = urlsplit(url)
    body = {"model": MODEL, "prompt": "import os", "max_tokens": 600, "logprobs": 5, "stream": True}
    payload = json.dumps({**body, "ignore_eos": True, "return_token_ids": True}).encode()
    receiving = socket.socket()
    receiving.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    receiving.setblocking(False)
    await asyncio.get_running_loop().sock_connect(receiving, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=receiving, limit=2048)
    try:
        writer.write(head_of(url, api_key, len(payload)) + payload)
        if b" 200 " not in await reader.readline():
            return None
        await asyncio.sleep(UNREAD_S)  # the reader holds 4 KiB, and then reads no more itself
        async with asyncio.timeout(PATIENCE_S):
            rest = await reader.read()
        whole = b"data: [DONE]" in rest
        return f"took nothing for {UNREAD_S:g} s, and then {len(rest)} bytes" if whole else None
    except (ConnectionError, TimeoutError):
        return None
    finally:
        writer.transport.abort()


class Keys:
    """The server's file of keys, changed by the command line as an operator would. `own` stays, and is an admin's."""

    def __init__(self, file: Path):
        self.file = file
        self._numbers = itertools.count()
        self.own = self._drawn("own", "--admin")

    def add(self) -> tuple[str, str]:
        """A new key, and its name."""
        name = f"guest-{next(self._numbers)}"
        return name, self._drawn(name)

    def revoke(self, name: str) -> None:
        """Take it out of the file."""
        self._run("revoke", name)

    async def becomes(self, url: str, key: str, status: int) -> bool:
        """Whether every router answers so to the key, within some time."""
        deadline, in_a_row = time.monotonic() + KNOWN_S, 0
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
            while in_a_row < IN_A_ROW and time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):  # a router was killed meanwhile
                    answer = await client.get(f"{url}/v1/models")
                    in_a_row = in_a_row + 1 if answer.status_code == status else 0
                await asyncio.sleep(0.1)
        return in_a_row == IN_A_ROW

    def _drawn(self, name: str, *options: str) -> str:
        return re.findall(r"ts-\S+", self._run("new", name, *options))[0]

    def _run(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "twostroke.cluster.cli", "key", *arguments, "--file", str(self.file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
