"""What must hold of a live server beside its answers: nothing leaks, nothing listens where it should not, all ends."""

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import openai

from tests.e2e.conftest import ENDING_S, EXACT, MODEL, Server, alive, eventually
from twostroke.benchmarks.clients import stream_completion, whole_answer
from twostroke.cluster.local.server_process import ServerProcess, processes_named

PROMPT = "import os\n\ndef list_files(path):\n"
LEAVING_S = 2.0  # a second for the workers to let go, and half a second each for their reports and for noise

# Ray Serve offers no way to bind these elsewhere (README, "What listens where").
# Serve's replicas take calls from Serve's handles, with Ray's token; HAProxy shows statistics.
ALLOWED_ON_ALL_INTERFACES = ("ServeReplica:", "haproxy")


def test_a_client_that_leaves_frees_its_blocks_on_both_sides(server: Server) -> None:
    aborted = sum(worker["stats"]["aborted_requests"] for worker in server.workers("decode"))
    stream = server.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    eventually("the workers report the request's blocks", lambda: server.owned_blocks() > 0)
    stream.close()
    eventually("all blocks are free again", lambda: server.owned_blocks() == 0)
    eventually("no place is held", lambda: server.status()["places_held"] == 0)
    assert sum(worker["stats"]["aborted_requests"] for worker in server.workers("decode")) > aborted


def test_a_client_of_an_unstreamed_answer_that_leaves_frees_its_blocks(server: Server) -> None:
    """httpx sends head and body in two packets, as most clients do; a proxy may treat those otherwise than one."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8000, "ignore_eos": True}
    try:
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(10, read=1.0))
    except httpx.ReadTimeout:
        eventually("all blocks are free again", lambda: server.owned_blocks() == 0, within_s=LEAVING_S)
    else:
        raise AssertionError("the answer came before the client could leave: it must be longer")


def test_64_streams_at_once_end_whole_and_leave_nothing(server: Server) -> None:
    async def run() -> None:
        bodies = [
            {"model": MODEL, "prompt": f"def f{i}(x):\n", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            for i in range(64)
        ]
        results = await asyncio.gather(*(stream_completion(server.url, body) for body in bodies))
        for result in results:
            whole_answer(result, 24)

    workers = processes_named("ServeReplica:twostroke:DecodeWorker", server.processes())
    assert len(workers) == 1
    asyncio.run(run())
    sockets = num_sockets(workers[0])
    asyncio.run(run())
    eventually("all blocks are free again", lambda: server.owned_blocks() == 0)
    eventually("no place is held", lambda: server.status()["places_held"] == 0)
    eventually("no socket is left over", lambda: num_sockets(workers[0]) <= sockets)


def num_sockets(pid: int) -> int:
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += os.readlink(descriptor).startswith("socket:")
        except FileNotFoundError:
            continue  # closed meanwhile
    return count


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(server: Server) -> None:
    """The decode worker has the answer's KV: it reads the rest itself, or a prefill worker pulls it, as is cheaper."""

    def ask(prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        body = {"ignore_eos": True, "return_token_ids": True}
        answer = server.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0.0, extra_body=body
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return answer.choices[0].model_extra["token_ids"], details.cached_tokens or 0 if details else 0

    first = list(range(500, 700))
    written, _ = ask(first, 200)
    reply, cached = ask([*first, *written, *range(300, 330)], 8)
    assert len(reply) == 8
    assert cached == (len(first) + len(written) - 1) // 16 * 16
    eventually("all blocks are free again", lambda: server.owned_blocks() == 0)


def test_an_idle_fleets_metrics_show_no_owned_block_in_either_role(server: Server) -> None:
    complete(server)
    eventually("all blocks are free again", lambda: server.owned_blocks() == 0)
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    for role in ("prefill", "decode"):
        (owned,) = [line for line in lines if line.startswith(f'twostroke:kv_blocks_owned{{role="{role}"')]
        assert owned.split()[-1] == "0.0"


def test_an_answer_has_one_request_id_whatever_the_client_sends(server: Server) -> None:
    for given, is_sound in ((b"label-1", True), (b"my id \xe9", False)):
        answer = httpx.get(f"{server.url}/health", headers={b"X-Request-Id": given}, timeout=30)
        (told,) = answer.headers.get_list("x-request-id")
        assert (told.encode("latin-1") == given) == is_sound


def test_the_router_process_has_no_torch(server: Server) -> None:
    processes = server.processes()
    (router,) = processes_named("ServeReplica:twostroke:Router", processes)
    (decode,) = processes_named("ServeReplica:twostroke:DecodeWorker", processes)
    assert "libtorch" not in Path(f"/proc/{router}/maps").read_text(encoding="utf-8")
    assert "libtorch" in Path(f"/proc/{decode}/maps").read_text(encoding="utf-8")  # the check would see it


def test_only_what_is_documented_listens_beyond_the_loopback_interface(server: Server) -> None:
    strangers = []
    for pid in server.processes():
        command = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
        for address in listening_addresses(pid):
            is_allowed = any(name in command for name in ALLOWED_ON_ALL_INTERFACES)
            if address not in LOOPBACK and not is_allowed:
                strangers.append((command[:80], address))
    assert strangers == []
    assert ("127.0.0.1", server.process.port) in {
        entry for pid in server.processes() for entry in listeners(pid)
    }  # the check sees what listens


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listening_addresses(pid: int) -> set[str]:
    return {host for host, _ in listeners(pid)}


def listeners(pid: int) -> set[tuple[str, int]]:
    """(address, port) of every listening TCP socket of a process, from /proc."""
    inodes = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except FileNotFoundError:
        return set()  # it ended, or closed one, meanwhile
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                address, port = fields[1].split(":")
                # Each 32-bit word is printed in the machine's byte order.
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def test_requests_are_served_while_the_prefill_worker_is_dead_and_it_comes_back(server: Server) -> None:
    (victim,) = processes_named("ServeReplica:twostroke:PrefillWorker", server.processes())
    (before,) = server.workers("prefill")
    expected = complete(server)
    os.kill(victim, signal.SIGKILL)
    for _ in range(5):
        assert complete(server) == expected
    eventually(
        "another prefill worker is there",
        lambda: [w["epoch"] for w in server.workers("prefill") if w["reachable"]] not in ([], [before["epoch"]]),
        within_s=60,
    )
    assert complete(server) == expected
    eventually("all blocks are free again", lambda: server.owned_blocks() == 0)


def complete(server: Server) -> str:
    answer = server.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0)
    return answer.choices[0].text


def test_a_signal_ends_every_process_within_ten_seconds_even_under_a_stream() -> None:
    with ServerProcess([*EXACT, "--prefill", "0"]) as process:
        server = Server(process)
        stream = server.client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        reader = threading.Thread(target=drain, args=(stream,))
        reader.start()
        processes = server.processes()
        assert len(processes) > 5
        took_s = process.end(signal.SIGTERM)
        reader.join()
        server.client.close()
    assert alive(processes) == {}
    assert took_s < ENDING_S


def drain(stream: "openai.Stream[openai.types.Completion]") -> None:
    """Read until the server's end cuts it off."""
    try:
        for _ in stream:
            pass
    except (openai.APIError, httpx.HTTPError):
        return
