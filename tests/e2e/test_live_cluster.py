"""A live server: the official client is answered, and so is every curl of the pages that tell how to ask; nothing
leaks, nothing listens where it should not."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import psutil
import pydantic
import pytest

from tests.e2e.conftest import MODEL, PROMPT, Server, serving
from tests.rigs.completions import stream_completion
from tests.rigs.processes import eventually
from twostroke.cluster.local.server_process import processes_named
from twostroke.loadtests.generator.http_stream import read_stream

LEAVING_S = 2.0  # a second for the workers to let go, and half a second each for their reports and for noise

# Ray Serve offers no way to bind these elsewhere (README, "What listens where").
# Serve's replicas take calls from Serve's handles, with Ray's token; HAProxy shows statistics.
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
ALLOWED_ON_ALL_INTERFACES = ("ServeReplica:", "haproxy")

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{name}.md" for name in ("start", "api", "tools", "tutorials/first-request"))]
WRITTEN_URL = "http://127.0.0.1:8000/"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One prefill worker and one decode worker, KV through shared memory: what is chosen on one machine. The bundled
    model, as if it had been taught to call tools. Clients have less time than by default. Prompts are computed by the
    prefill worker, though the decode worker is quicker with a model as small as this."""
    config = tmp_path_factory.mktemp("config") / "cluster.yaml"
    settings = "model: {response_template: hermes}\nrouter: {body_timeout_s: 5, decodes_alone: false, roles: fixed}\n"
    config.write_text(settings, encoding="utf-8")
    yield from serving("--config", str(config))


def test_kv_goes_through_shared_memory_and_the_tokens_are_those_of_one_engine(
    server: Server, expected: list[list[int]]
) -> None:
    server.check_ways("shm")
    server.check_tokens(expected)


def test_a_streamed_completion_is_the_one_in_a_piece(server: Server) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = server.client.completions.create(**asked)
    usage = {"include_usage": True}
    chunks = list(server.client.completions.create(**asked, stream=True, stream_options=usage))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason


def test_a_chat_answers_streamed_and_in_a_piece(server: Server) -> None:
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = server.client.chat.completions.create(**asked)
    chunks = server.client.chat.completions.create(**asked, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert whole.choices[0].message.role == "assistant"
    assert "".join(pieces) == whole.choices[0].message.content


def test_the_readme_s_locust_command_loads_it_and_shows_the_tokens_times(server: Server) -> None:
    (written,) = re.findall(
        r"^ +\.venv/bin/(locust .*)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    command = written.replace(WRITTEN_URL.rstrip("/"), server.url).replace("-t 30s", "-t 3s")
    assert command.endswith(server.url)
    assert "-t 3s" in command
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    for kind in ("POST", "TTFT", "TPOT", "ITL"):
        assert re.search(rf"^{kind} +/v1/chat/completions +[1-9]", done.stdout, re.MULTILINE), done.stdout


def test_two_choices_are_seeded_apart_and_repeat(server: Server) -> None:
    def draw() -> list[str]:
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.0, "seed": 7, "n": 2}
        answer = server.client.completions.create(model=MODEL, **asked)
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = draw()
    assert len(first) == 2
    assert first[0] != first[1]
    assert draw() == first


def test_eight_choices_compute_the_end_of_their_prompt_once_and_are_told_with_what_use_that_makes(
    server: Server,
) -> None:
    def total(name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"twostroke:{name}{{"))

    def has_settled(name: str) -> Callable[[], bool]:
        """Whether the workers' reports, two a second, have brought nothing new for two seconds."""
        seen = [(total(name), time.monotonic())]

        def is_still() -> bool:
            if (value := total(name)) != seen[-1][0]:
                seen.append((value, time.monotonic()))
            return time.monotonic() - seen[-1][1] > 2.0

        return is_still

    eventually("nothing is under way", lambda: total("num_requests_running") == 0)
    eventually("the workers have told of all prompts", has_settled("worker_prompt_tokens_total"))
    computed = total("worker_prompt_tokens_total")
    asked: dict[str, Any] = {"max_tokens": 8, "n": 8, "seed": 3, "extra_body": {"ignore_eos": True}}
    answer = server.client.completions.create(model=MODEL, prompt=[300 + i for i in range(31)], **asked)
    assert len({choice.text for choice in answer.choices}) > 1
    # The last token is computed for each of the other seven, since its logits are drawn from.
    eventually("the workers tell", lambda: total("worker_prompt_tokens_total") - computed >= 31 + 7)
    assert total("worker_prompt_tokens_total") - computed == 31 + 7
    assert total("worker_flops_total") > 0
    assert 0 < total("model_bandwidth_utilization") < 2


def test_logprobs_are_told_for_every_token_with_its_alternatives(server: Server) -> None:
    answer = server.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.token_logprobs) == answer.usage.completion_tokens
    for drawn, alternatives in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(alternatives) >= 3
        assert drawn == max(alternatives.values())  # greedy


class Person(pydantic.BaseModel):
    """Type that answers are parsed as."""

    name: Annotated[str, pydantic.Field(max_length=10)]
    age: Annotated[int, pydantic.Field(ge=0, le=130)]
    kind: Literal["friend", "foe"]


def test_the_clients_parse_gives_an_object_and_a_stream_the_same_text(server: Server) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Who is it?"}],
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 200,
    }
    parsed = server.client.chat.completions.parse(**asked, response_format=Person)
    (choice,) = parsed.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)
    with server.client.chat.completions.stream(**asked, response_format=Person) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.content == choice.message.content
    assert streamed.message.parsed == choice.message.parsed


def test_errors_are_those_that_the_client_knows(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.completions.create(model="another", prompt=PROMPT)
    assert caught.value.param == "model"
    for fields in ({"max_tokens": -1}, {"prompt": [400] * 20_000}):
        with pytest.raises(openai.BadRequestError) as refused:
            server.client.completions.create(**{"model": MODEL, "prompt": PROMPT, **fields})  # type: ignore[call-overload]
        assert [refused.value.param] == list(fields)
    assert [model.id for model in server.client.models.list()] == [MODEL]


def test_a_client_that_leaves_frees_its_blocks_on_both_sides(server: Server) -> None:
    def aborted() -> int:
        return sum(worker["stats"]["aborted_requests"] for worker in server.workers("decode"))

    before = aborted()
    stream = server.long_stream()
    next(iter(stream))
    eventually("the workers report the request's blocks", lambda: server.owned_blocks() > 0)
    stream.close()
    eventually("the decode worker reports an aborted request", lambda: aborted() > before)
    eventually("all blocks are free again", lambda: server.owned_blocks() == 0)
    eventually("no place is held", lambda: server.status()["places_held"] == 0)


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
        for result, body in zip(results, bodies, strict=True):
            answer = read_stream(result)
            assert (answer.status, answer.usage.completion_tokens) == ("ok", body["max_tokens"]), answer.error

    (worker,) = map(psutil.Process, processes_named("ServeReplica:twostroke:DecodeWorker", server.processes()))
    asyncio.run(run())
    sockets = len(worker.net_connections("all"))
    asyncio.run(run())
    eventually("all blocks are free again", lambda: server.owned_blocks() == 0)
    eventually("no place is held", lambda: server.status()["places_held"] == 0)
    eventually("no socket is left over", lambda: len(worker.net_connections("all")) <= sockets)


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(server: Server) -> None:
    """The decode worker has the answer's KV: it reads the rest itself, or a prefill worker pulls it, as is cheaper."""
    first = list(range(500, 700))
    written, _ = server.greedy_tokens(first, 200)
    reply, cached = server.greedy_tokens([*first, *written, *range(300, 330)], 8)
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


def test_requests_cause_no_full_collection_of_garbage(server: Server) -> None:
    """It would look through all that the start has made, and stop every stream meanwhile."""

    def full_collections() -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
        told = [line.rsplit(" ", 1) for line in lines if "garbage_collection_seconds_total{" in line]
        return {series: float(seconds) for series, seconds in told if 'generation="2"' in series}

    before = full_collections()
    assert {kind for kind in ("router", "prefill", "decode") for series in before if kind in series} == {
        "router",
        "prefill",
        "decode",
    }
    for _ in range(20):
        complete(server)
    assert full_collections() == before


def test_an_answer_has_one_request_id_whatever_the_client_sends(server: Server) -> None:
    for given, is_sound in ((b"label-1", True), (b"my id \xe9", False)):
        answer = httpx.get(f"{server.url}/health", headers={b"X-Request-Id": given}, timeout=30)
        (told,) = answer.headers.get_list("x-request-id")
        assert (told.encode("latin-1") == given) == is_sound


def test_a_body_that_trickles_is_refused_in_time_and_its_connection_closed(server: Server) -> None:
    """More of it than HAProxy holds, so that the router is the one that waits."""
    answer, began = b"", time.monotonic()
    with socket.create_connection(("127.0.0.1", server.process.port), timeout=0.5) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 60000\r\n\r\n")
        client.sendall(b" " * 30000)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < began + 30:
                with contextlib.suppress(TimeoutError):
                    part = client.recv(65536)
                    answer += part
                    if not part:
                        break
                client.sendall(b" ")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer
    assert time.monotonic() < began + 20


def test_nobody_else_on_this_machine_reaches_a_socket_or_the_token(server: Server) -> None:
    """Sockets in the file system lie in folders that are the user's alone; the token is in no file."""
    paths = set()
    for pid in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            paths |= {one.laddr for one in psutil.Process(pid).net_connections("unix") if one.laddr.startswith("/")}
    assert any(path.endswith("plasma_store") for path in paths)
    assert [path for path in paths if not any(one.stat().st_mode & 0o077 == 0 for one in Path(path).parents)] == []
    (router,) = processes_named("ServeReplica:twostroke:Router", server.processes())
    environment = Path(f"/proc/{router}/environ").read_bytes().split(b"\0")
    (token,) = [one.partition(b"=")[2] for one in environment if one.startswith(b"RAY_AUTH_TOKEN=")]
    kept = Path.home() / ".ray" / "auth_token"
    assert not kept.exists() or token not in kept.read_bytes()
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.processes()]
    assert [command for command in commands if token in command] == []


def test_the_router_process_has_no_torch(server: Server) -> None:
    processes = server.processes()
    (router,) = processes_named("ServeReplica:twostroke:Router", processes)
    (decode,) = processes_named("ServeReplica:twostroke:DecodeWorker", processes)
    assert "libtorch" not in Path(f"/proc/{router}/maps").read_text(encoding="utf-8")
    assert "libtorch" in Path(f"/proc/{decode}/maps").read_text(encoding="utf-8")  # the check would see it


def test_only_what_is_documented_listens_beyond_the_loopback_interface(server: Server) -> None:
    strangers, ours = [], False
    for pid in server.processes():
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            listening = [one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        except psutil.NoSuchProcess:
            continue  # it has ended meanwhile
        ours |= ("127.0.0.1", server.process.port) in [(address.ip, address.port) for address in listening]
        if not any(name in command for name in ALLOWED_ON_ALL_INTERFACES):
            strangers += [(command[:80], address) for address in listening if address.ip not in LOOPBACK]
    assert strangers == []
    assert ours  # the check sees what listens


def examples() -> Iterator[tuple[str, tuple[str, str]]]:
    """(page and line, (command, first line of its answer or what else is there)) of each curl to a server on this
    machine; a command ends with its quotes."""
    for page in PAGES:
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            if not (line.strip().startswith("curl ") and WRITTEN_URL in line):
                continue
            for end in range(number, len(lines) + 1):
                command = "\n".join(lines[number - 1 : end]).strip()
                try:
                    shlex.split(command)
                except ValueError:
                    continue
                if not command.endswith("\\"):
                    break
            yield f"{page}:{number}", (command, lines[end])


EXAMPLES = dict(examples())


def test_every_page_has_examples() -> None:
    assert {place.split(":")[0] for place in EXAMPLES} == {*PAGES}


@pytest.mark.parametrize("place", EXAMPLES)
def test_an_example_is_answered(server: Server, place: str) -> None:
    """Run as it stands on its page, but for the port and the model's name."""
    written, told = EXAMPLES[place]
    command = re.sub(r'"model": "[^"]*"', f'"model": "{MODEL}"', written.replace(WRITTEN_URL, f"{server.url}/"))
    command = command.replace("curl ", "curl -sS -w '\\n%{http_code}' ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    answer, _, status = done.stdout.rpartition("\n")
    assert status == "200", answer
    assert answer.strip()
    assert '"error":{' not in answer.replace(" ", "")
    if told.startswith("# {"):
        assert json.loads(answer.splitlines()[0]) == json.loads(told.removeprefix("# "))


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
    return server.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text
