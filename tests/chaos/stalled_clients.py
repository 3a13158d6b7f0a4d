"""Clients that stall: they send a part of a request and nothing more, or read the beginning of an answer and no more.

The server has to end each connection with half a request in time. Whether it did is asked at the end of a run, since it
may take as long as HAProxy's own deadlines.
"""

import asyncio
import json
import socket
from typing import Literal
from urllib.parse import urlsplit

from tests.chaos.load import MODEL, ServerAddress
from twostroke.cluster.deployments.haproxy import REQUEST_S

Part = Literal["head", "body", "large body"]

COUNT = 24  # connections at once
ENDED_S = REQUEST_S + 15.0  # from a connection's opening to its end, at most
LARGE_BYTES = 65536  # more than a buffer of HAProxy, so that the router has the beginning
_SCORED_PROMPTS, _PROMPT_TOKENS = 3, 900  # 2 MB of log-probabilities


class StalledClients:
    """All of one run."""

    def __init__(self, target: ServerAddress):
        self._target = target
        self._ended: list[asyncio.Task[bool]] = []

    async def send_halves(self, part: Part) -> int:
        """Open connections that send this much of a request; returns how many there are."""
        head = self._target.head(2 * LARGE_BYTES)
        sent = {
            "head": head[: len(head) // 2],
            "body": self._target.head(200) + b'{"prompt": "a',
            "large body": head + b'{"prompt": "' + b"a" * LARGE_BYTES,
        }[part]
        opened = await asyncio.gather(*(self._open(sent) for _ in range(COUNT)))
        return sum(opened)

    async def _open(self, sent: bytes) -> bool:
        try:
            reader, writer = await self._target.connect()
        except OSError:  # the router or its proxy is being replaced
            return False
        writer.write(sent)
        self._ended.append(asyncio.create_task(self._ends(reader, writer)))
        return True

    async def _ends(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether the server refuses the request, or ends the connection, in time.

        After the router has refused a body, HAProxy waits another minute for a silent client.

        After the router's refusal of a body HAProxy waits another minute for a client that is silent.
        """
        try:
            async with asyncio.timeout(ENDED_S):
                while data := await reader.read(65536):
                    if data.startswith(b"HTTP/1.1 408"):
                        return True
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        finally:
            writer.close()
        return True

    async def never_ended(self) -> int:
        """Connections that the server did not end in time; waits until that is known of each."""
        return [await task for task in self._ended].count(False)

    async def read_nothing(self, silent_s: float) -> str:
        """Ask for a large stream, read its beginning, and the rest after `silent_s`; returns how it ended.

        Sockets hold megabytes on the way, so the rest may have waited there; else the server has cut the stream.
        Returns nothing where the request was refused.
        """
        body = {
            "model": MODEL,
            "prompt": [[300 + n] * _PROMPT_TOKENS for n in range(_SCORED_PROMPTS)],
            "max_tokens": 200,
            "ignore_eos": True,
            "echo": True,
            "logprobs": 20,
            "stream": True,
        }
        payload = json.dumps(body).encode()
        parts = urlsplit(self._target.url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            try:
                await loop.sock_connect(connection, (parts.hostname, parts.port))
                await loop.sock_sendall(connection, self._target.head(len(payload)) + payload)
                async with asyncio.timeout(ENDED_S):
                    came = await loop.sock_recv(connection, 512)
                    if b" 200 " not in came:
                        return ""
                    await asyncio.sleep(silent_s)  # the fault: it reads nothing meanwhile
                    while data := await loop.sock_recv(connection, 65536):
                        came = came[-16:] + data
            except (TimeoutError, ConnectionError):  # cut, and what was on its way thrown away
                return "cut"
        return "whole" if b"[DONE]" in came else "cut"
