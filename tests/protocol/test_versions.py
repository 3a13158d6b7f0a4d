"""Processes of two versions don't take each other's messages, whose fields travel by position."""

import os
import subprocess
import sys

import msgspec
import pytest

from twostroke.protocol import kv_layout, messages, network, requests, stats
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import PROTOCOL, Message, fingerprint, structs_of
from twostroke.protocol.network import Connection, TcpNetwork, draw_hello
from twostroke.protocol.requests import DecodeReply, GenerateRequest, PrefillReply
from twostroke.protocol.stats import WorkerInfo, WorkerStats


class Before(msgspec.Struct, array_like=True):
    first: int
    second: str


def changed() -> "list[type[msgspec.Struct]]":
    """Return `Before` with each change that another version may bring."""
    kinds = [
        [("second", str), ("first", int)],
        [("first", int)],
        [("first", int), ("second", str), ("third", int, 0)],
        [("first", float), ("second", str)],
        [("first", int), ("other", str)],
    ]
    structs = [msgspec.defstruct("Before", fields, array_like=True) for fields in kinds]
    return [*structs, msgspec.defstruct("Before", [("first", int), ("second", str)])]


def test_the_version_of_messages_changes_with_their_fields_names_types_and_order() -> None:
    same = msgspec.defstruct("Before", [("first", int), ("second", str)], array_like=True)
    assert fingerprint([Before]) == fingerprint([same])
    others = [fingerprint([one]) for one in changed()]
    assert len({fingerprint([Before]), *others}) == 1 + len(others)
    assert len(PROTOCOL) == 16


def test_the_version_is_that_of_all_that_travels_and_the_same_in_every_process() -> None:
    known = set(structs_of(messages, requests, stats, kv_layout))
    assert known >= {*Message.__subclasses__(), GenerateRequest, PrefillReply, DecodeReply, WorkerInfo, WorkerStats}
    script = "from twostroke.protocol.messages import PROTOCOL; print(PROTOCOL)"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        said = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
        )
        assert said.stdout.strip() == PROTOCOL


async def test_processes_of_two_versions_do_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live: the worker listens with its version, the router comes with another."""
    opened = []

    async def serve(connection: Connection) -> None:
        opened.append(connection)

    listener = await TcpNetwork(b"s").listen("127.0.0.1", serve)
    try:
        drawn = iter([bytes(8), bytes.fromhex(PROTOCOL)])  # the connector's comes first
        monkeypatch.setattr(network, "draw_hello", lambda _: draw_hello(next(drawn)))
        with pytest.raises(ConnectionLost, match="the peer runs another version"):
            await TcpNetwork(b"s").connect(listener.address)
    finally:
        await listener.close()
    assert opened == []
