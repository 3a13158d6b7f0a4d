"""`twostroke bench tiers`: one worker with a disk tier, beside the same without, in turns.

    restart   prompts of 4,096 tokens that were used twice, after the server was started again; beside new prompts
    disk      the same, with nothing of the files in the kernel's page cache
    miss      prompts that never come again: requests per second without tiers and with
    reuse     prompts of four times the cache's tokens, in random order: the share of their tokens that is not computed,
              beside what a cache without bounds would find
    chats     conversations of several turns, whose KV is four times the cache: tokens per second without and with

Only one server computes at a time. Ratios are medians over turns. `mismatched` counts greedy answers of `restart` and
`disk` that differ from those before the restart: in fp32 none may.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.benchmarks.clients import FIRST_TOKEN_ID, completion_body, stream_completion
from twostroke.benchmarks.console import conclude, positive, say
from twostroke.benchmarks.engines.engine import MODELS
from twostroke.benchmarks.peers.command import write_model
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.processes import leaving_no_process
from twostroke.cluster.local.server_process import ServerProcess, config_file, twostroke_server
from twostroke.loadtests.generator.http_stream import BadResponse, ClientExchange, events_of, response_of, text_of
from twostroke.protocol.errors import TwostrokeError

OFF, ON = "off", "on"
PARTS = ("restart", "miss", "reuse", "chats")
CACHE_TOKENS = 8192
BLOCK_SIZE = 16
LONG = 4096
"""Prompt tokens of `restart`; the model's context has room for the answer beside."""
CONTEXT = 8192
HOST_BYTES = "1GiB"
DISK_BYTES = "40GiB"
VOCABULARY = 20_000
END_S = 5.0
WRITTEN_S = 120.0
"""Longest wait for objects to be written."""


class Answer(NamedTuple):
    """One answer, as its client saw it."""

    ttft_s: float
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int


class RequestFailed(TwostrokeError):
    """A request got no whole answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="160m", help="shape of the random model (%(default)s)")
    parser.add_argument("--turns", type=positive, default=3, help="turns of each part (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these")
    parser.add_argument("--disk", type=Path, help="a directory on the disk to measure (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="one short turn, which shows that all works")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns 1 where a request failed.

    Raises ConfigError, and ServerFailed where a server does not start.
    """
    if arguments.quick:
        arguments.turns = 1
    figures: dict[str, Any] = {"model": arguments.model, "errors": 0}
    with leaving_no_process(END_S), tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write_model(arguments.model, CONTEXT, model)
        try:
            if "restart" in arguments.parts:
                figures |= measure_restart(model, Path(folder), arguments)
            if set(arguments.parts) - {"restart"}:
                figures |= measure_loads(model, Path(folder), arguments)
        except RequestFailed as error:
            say(f"a request failed: {error}")
            figures["errors"] = 1
    conclude(figures | {"load_average": os.getloadavg()[0]})
    return 1 if figures["errors"] or figures.get("mismatched") else 0


@contextlib.contextmanager
def started(name: str, model: Path, disk: Path | None) -> Iterator[ServerProcess]:
    """Run a server with one worker while the context lasts, with a tier where `disk` is given. Raises ServerFailed."""
    settings: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32", "max_context": CONTEXT},
        "prefill": {"replicas": 0},
        "decode": {"replicas": 1, "num_blocks": CACHE_TOKENS // BLOCK_SIZE, "speculation": "off"},
    }
    if disk is not None:
        disk.mkdir(exist_ok=True)
        settings["kv_cache"] = {"tiers": {"host_bytes": HOST_BYTES, "disk": {"path": str(disk), "bytes": DISK_BYTES}}}
    with (
        config_file(settings) as path,
        twostroke_server(["--config", path, "--name", "model"]) as server,
    ):
        say(f"{name} answers after {server.started_in_s:.1f} s")
        yield server


# --- restart, disk ---


def measure_restart(model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Use prompts twice, start the server again, and time them beside new ones."""
    draw = random.Random("restart")
    count = 2 if arguments.quick else 4
    prompts = [_tokens(draw, LONG) for _ in range(2 * count)]
    cold: list[float] = []
    first: list[tuple[int, ...]] = []
    with started(ON, model, folder / "restart") as server:
        _warm_up(server.url)
        for prompt in prompts:
            answer = _ask(server.url, prompt, 8)
            cold.append(answer.ttft_s)
            first.append(answer.token_ids)
            _ask(server.url, prompt, 1)
        _await_writes(server.url)
    warm, disk = list[float](), list[float]()
    mismatched = 0
    with started("on, again", model, folder / "restart") as server:
        _warm_up(server.url)
        for turn, prompt in enumerate(prompts):
            cold.append(_ask(server.url, _tokens(draw, LONG), 1).ttft_s)
            if turn % 2:
                _forget_files(folder / "restart")
            answer = _ask(server.url, prompt, 8)
            (disk if turn % 2 else warm).append(answer.ttft_s)
            mismatched += answer.token_ids != first[turn]
            say(f"cold {cold[-1]:.3f} s, {'disk' if turn % 2 else 'page cache'} {answer.ttft_s:.3f} s")
        tiers = _tiers(server.url)
    cold_s = statistics.median(cold)
    return {
        "restart_warm_ttft_over_cold": round(statistics.median([*warm, *disk]) / cold_s, 3),
        "disk_ttft_over_recompute": round(statistics.median(disk) / cold_s, 3),
        "page_cache_ttft_over_recompute": round(statistics.median(warm) / cold_s, 3),
        "cold_ttft_s": round(cold_s, 3),
        "disk_ttft_s": round(statistics.median(disk), 3),
        "restart_tiers": tiers,
        "mismatched": mismatched,
    }


def _forget_files(disk: Path) -> None:
    """Have the kernel forget what it keeps of a tier's files in memory."""
    for path in disk.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# --- loads ---


def measure_loads(model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run two servers, and load each in its turns."""
    figures: dict[str, Any] = {}
    with started(OFF, model, None) as off, started(ON, model, folder / "loads") as on:
        urls = {OFF: off.url, ON: on.url}
        for url in urls.values():
            _warm_up(url)
        if "miss" in arguments.parts:
            figures |= _measure_miss(urls, arguments)
        if "reuse" in arguments.parts:
            figures |= _measure_reuse(urls, arguments)
        if "chats" in arguments.parts:
            figures |= _measure_chats(urls, arguments)
        figures["tiers"] = _tiers(on.url)
    return figures


def _measure_miss(urls: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Send prompts that never come again."""
    rates: dict[str, list[float]] = {OFF: [], ON: []}
    ratios: list[float] = []
    for turn in range(2 * arguments.turns):
        for name in (OFF, ON) if turn % 2 else (ON, OFF):
            draw = random.Random(f"miss {turn} {name}")
            prompts = [_tokens(draw, 1024) for _ in range(4 if arguments.quick else 12)]
            seconds, _ = asyncio.run(_ask_all(urls[name], prompts, 16, users=4))
            rates[name].append(len(prompts) / seconds)
        ratios.append(rates[OFF][-1] / rates[ON][-1])
        say(f"miss: off {rates[OFF][-1]:.2f} requests/s, on {rates[ON][-1]:.2f}")
    return {
        "miss_overhead": round(statistics.median(ratios) - 1, 3),
        "miss_turns": [round(one - 1, 3) for one in ratios],
    }


def _measure_reuse(urls: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Send prompts of four times the cache's tokens again and again; count what was not computed.

    What an unbounded cache and one of this size would find is counted, not measured: LRU, in whole blocks.
    """
    draw = random.Random("reuse")
    prompts: list[list[int]] = []
    while sum(map(len, prompts)) < 4 * CACHE_TOKENS:
        prompts.append(_tokens(draw, draw.randint(1024, 3072)))
    order = [draw.randrange(len(prompts)) for _ in range(len(prompts) * (3 if arguments.quick else 8))]
    unbounded = bounded = 0
    recent: list[int] = []  # prompts in a cache of this size, the last used last
    for place, index in enumerate(order):
        tokens = (len(prompts[index]) - 1) // BLOCK_SIZE * BLOCK_SIZE
        unbounded += tokens if index in order[:place] else 0
        bounded += tokens if index in recent else 0
        recent = [*(one for one in recent if one != index), index]
        while sum(len(prompts[one]) for one in recent) > CACHE_TOKENS:
            recent.pop(0)
    seconds, answers = asyncio.run(_ask_all(urls[ON], [prompts[index] for index in order], 1, users=1))
    found = sum(answer.cached_tokens for answer in answers)
    say(f"reuse: {found / unbounded:.3f} of an unbounded cache's hits, {bounded / unbounded:.3f} without a tier")
    return {
        "working_set_4x_hit_share": round(found / unbounded, 3),
        "working_set_4x_hit_share_without": round(bounded / unbounded, 3),
        "working_set_4x_s": round(seconds, 1),
    }


def _measure_chats(urls: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Have conversations whose KV is four times the cache: each user goes on with another at each turn."""
    ratios: list[float] = []
    rounds = 2 if arguments.quick else 5
    for turn in range(arguments.turns):
        rates: dict[str, float] = {}
        for name in (OFF, ON) if turn % 2 else (ON, OFF):
            draw = random.Random(f"chats {turn}")
            chats = [_tokens(draw, 512) for _ in range(4 * CACHE_TOKENS // (512 + rounds * 320) + 1)]
            tokens, began = 0, time.monotonic()
            for _ in range(rounds):
                _, answers = asyncio.run(_ask_all(urls[name], chats, 64, users=4))
                for chat, answer in zip(chats, answers, strict=True):
                    chat += [*answer.token_ids, *_tokens(draw, 256)]
                    tokens += len(answer.token_ids)
            rates[name] = tokens / (time.monotonic() - began)
        ratios.append(rates[ON] / rates[OFF])
        say(f"chats: off {rates[OFF]:.1f} tokens/s, on {rates[ON]:.1f}, ratio {ratios[-1]:.2f}")
    return {"chats_tokens_per_s_over_off": round(statistics.median(ratios), 3)}


# --- requests ---


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(count)]


def _warm_up(url: str) -> None:
    """Let the worker learn what its steps cost, and compile."""
    draw = random.Random(f"warm up {url}")
    asyncio.run(_ask_all(url, [_tokens(draw, length) for length in (64, 512, 1024, 2048, 300, 700)], 16, users=2))


def _ask(url: str, prompt: Sequence[int], max_tokens: int) -> Answer:
    _, (answer,) = asyncio.run(_ask_all(url, [prompt], max_tokens, users=1))
    return answer


async def _ask_all(
    url: str, prompts: Sequence[Sequence[int]], max_tokens: int, *, users: int
) -> tuple[float, list[Answer]]:
    """Have so many users send the prompts in order; return the seconds and the answers. Raises RequestFailed."""
    left = iter(enumerate(prompts))
    answers: dict[int, Answer] = {}

    async def user() -> None:
        for number, prompt in left:
            body = completion_body("model", prompt, max_tokens) | {"return_token_ids": True}
            answers[number] = _answer(await stream_completion(url, body))

    began = time.monotonic()
    await asyncio.gather(*(user() for _ in range(users)))
    return time.monotonic() - began, [answers[number] for number in range(len(prompts))]


def _answer(exchange: ClientExchange) -> Answer:
    if exchange.broken is not None:
        raise RequestFailed(exchange.broken)
    token_ids: list[int] = []
    ttft_s, usage = 0.0, dict[str, Any]()
    try:
        head, body = response_of(exchange.arrivals)
        if head.status != 200:
            raise RequestFailed(f"{head.status_line}: {text_of(body)}")
        for event in events_of(body):
            if event.data == b"[DONE]":
                break
            chunk = json.loads(event.data)
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                token_ids += choice.get("token_ids") or ()
            if token_ids and not ttft_s:
                ttft_s = event.at - exchange.sent_at
    except BadResponse as error:
        raise RequestFailed(str(error)) from error
    if not token_ids or not usage:
        raise RequestFailed("the answer has no tokens, or no usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(ttft_s, tuple(token_ids), usage["prompt_tokens"], cached)


def _tiers(url: str) -> dict[str, dict[str, float]]:
    """Return the numbers of the server's tiers, by tier."""
    tiers = fetch_status(url)["workers"][0]["stats"].get("tiers") or ()
    return {one["name"]: {name: value for name, value in one.items() if name != "name" and value} for one in tiers}


def _await_writes(url: str) -> None:
    """Return once the tier's number of objects has not changed for two seconds."""
    last, since = -1.0, time.monotonic()
    end = since + WRITTEN_S
    while time.monotonic() < min(end, since + 2.0):
        written = _tiers(url).get("disk", {}).get("written_objects", 0)
        if written != last:
            last, since = written, time.monotonic()
        time.sleep(0.2)
