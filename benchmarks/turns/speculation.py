"""`twostroke bench speculation`: the same server with and without drafts, in turns under the same loads.

    edit    a file of code is to be written again with a name changed: much of it stands in the prompt (1, 8 users)
    plain   sampled answers at a high temperature, which repeat nothing (1, 8 and 32 users)
    schema  answers held to a JSON schema, whose fixed parts are known in advance (1, 8 users)
    schemas the same, each to a schema of its own, so that no earlier answer tells its keys (1 user)
    mixed   prompts of code, JSON and chat, written by the generator too, answered greedily (1 user)

Only one server computes at a time. A ratio divides the tokens per second with drafts by those without of the same
turn, and the median over turns counts. `repeated` is the share of an answer's tokens that end three tokens which
stand earlier in that answer. `tokens_per_step` has the tokens that each step with a part of a request brought it with
drafts (1 without), and `steps_per_answer` has the steps of an answer with and without. `mismatched` counts answers
that differ: in bf16, where a row's last bits depend on the rows beside it, a near-tie between two tokens may fall the
other way.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from twostroke.benchmarks.clients import stream_completion
from twostroke.benchmarks.console import conclude, positive, say
from twostroke.cluster.config.model_folder import instruct_model
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.processes import leaving_no_process
from twostroke.cluster.local.server_process import ServerProcess, config_file, twostroke_server

OFF, ON = "off", "on"
LOADS = {
    "c1_edit": ("edit", 1),
    "c8_edit": ("edit", 8),
    "c1_plain": ("plain", 1),
    "c8_plain": ("plain", 8),
    "c32_plain": ("plain", 32),
    "c1_schema": ("schema", 1),
    "c8_schema": ("schema", 8),
    "c1_schemas": ("schemas", 1),
    "c1_mixed": ("mixed", 1),
}
ANSWER_TOKENS = 128
REQUESTS = {1: 3, 8: 8, 32: 32}
"""Requests of a load by its users."""
END_S = 5.0
_NAMES = (
    "total",
    "price",
    "weight",
    "count",
    "length",
    "score",
    "delay",
    "width",
    "index",
    "offset",
    "amount",
    "ratio",
)
_VERBS = ("add", "scale", "clip", "merge", "update", "shift", "load", "round", "check", "store")
_SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 12},
        "order_number": {"type": "integer", "minimum": 1, "maximum": 9999},
        "shipping_address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 16}, "city": {"type": "string", "maxLength": 12}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "is_express_delivery": {"type": "boolean"},
    },
    "required": ["customer_name", "order_number", "shipping_address", "is_express_delivery"],
    "additionalProperties": False,
}


def a_schema(draw: random.Random) -> dict[str, Any]:
    """Write the schema of an object with properties that few others have."""
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "string", "maxLength": 12},
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"type": "boolean"},
        {"enum": [f"{draw.choice(_VERBS)}_{draw.choice(_NAMES)}" for _ in range(3)]},
    )
    names = {f"{draw.choice(_VERBS)}_{draw.choice(_NAMES)}_{draw.choice(_NAMES)}": draw.choice(kinds) for _ in range(5)}
    return {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}


def code(draw: random.Random, functions: int) -> str:
    """Write small functions of Python that differ from each other."""
    parts = []
    for _ in range(functions):
        first, second, third = draw.sample(_NAMES, 3)
        verb, number = draw.choice(_VERBS), draw.randint(2, 99)
        parts.append(
            f"def {verb}_{first}(values, {second}):\n"
            f"    {third} = [value * {number} for value in values]\n"
            f"    if {second} > {number + 1}:\n"
            f"        return sum({third}) / {second}\n"
            f"    return max({third}) - {draw.randint(2, 9)}\n"
        )
    return "\n".join(parts)


def edit_prompt(draw: random.Random) -> str:
    """Ask for a file again with one name changed, behind an example of that."""
    example, file = code(draw, 1), code(draw, 5)
    changed = example.replace("values", "numbers")
    return (
        f"### Original\n{example}\n### The same with values renamed to numbers\n{changed}\n"
        f"### Original\n{file}\n### The same with values renamed to numbers\n"
    )


def mixed_prompt(draw: random.Random) -> str:
    """Ask for code, JSON or a chat's answer."""
    kind = draw.randrange(3)
    if kind == 0:
        return f"# A module of helpers\n\n{code(draw, 2)}\ndef {draw.choice(_VERBS)}_all(values):\n"
    if kind == 1:
        rows = [{name: draw.randint(1, 999) for name in draw.sample(_NAMES, 3)} for _ in range(4)]
        return "[\n" + "".join(f"  {json.dumps(row)},\n" for row in rows)
    topic, other = draw.sample(_NAMES, 2)
    return f"User: How do I explain the {topic} and the {other} of a parcel to a customer?\nAssistant:"


def body_of(kind: str, draw: random.Random) -> dict[str, Any]:
    """Make one request of a load's kind."""
    body: dict[str, Any] = {"model": "model", "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    if kind == "edit":
        return body | {"prompt": edit_prompt(draw)}
    if kind == "mixed":
        return body | {"prompt": mixed_prompt(draw)}
    if kind == "plain":
        prompt = " ".join(draw.choices(_NAMES + _VERBS, k=96))
        return body | {"prompt": prompt, "temperature": 2.0, "seed": draw.randrange(1 << 30)}
    schema = a_schema(draw) if kind == "schemas" else _SCHEMA
    form = {"type": "json_schema", "json_schema": {"name": "order", "strict": True, "schema": schema}}
    prompt = f"An order of {draw.randint(2, 99)} parcels as JSON: "
    return body | {"prompt": prompt, "response_format": form, "ignore_eos": False, "seed": draw.randrange(1 << 30)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model.path of the servers (default: as `twostroke serve`)")
    parser.add_argument("--turns", type=positive, default=5, help="turns of all loads (default: %(default)s)")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="only these")
    parser.add_argument("--layout", choices=("aggregated", "default"), default="default", help="workers (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short turn, which shows that all works")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns 1 where a request failed.

    Raises ConfigError, and ServerFailed where a server does not start.
    """
    with leaving_no_process(END_S), contextlib.ExitStack() as running:
        urls = {name: running.enter_context(started(name, arguments)).url for name in (OFF, ON)}
        figures = measure(urls, arguments)
    conclude(figures)
    return 1 if figures["errors"] else 0


@contextlib.contextmanager
def started(name: str, arguments: argparse.Namespace) -> Iterator[ServerProcess]:
    """Run a server with or without drafts while the context lasts. Raises ServerFailed."""
    speculation = {"speculation": "off" if name == OFF else "auto"}
    settings: dict[str, Any] = {
        "prefill": dict(speculation),
        "decode": dict(speculation),
    }
    model = arguments.model or instruct_model()
    if model is not None:
        settings["model"] = {"path": str(model)}
    if arguments.layout == "aggregated":
        settings["prefill"]["replicas"] = 0
    with (
        config_file(settings) as path,
        twostroke_server(["--config", path, "--name", "model"]) as server,
    ):
        say(f"{name} answers after {server.started_in_s:.1f} s")
        yield server


def measure(urls: Mapping[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Take all turns, and return ratios, rates and acceptance."""
    rates: dict[str, dict[str, list[float]]] = {load: {OFF: [], ON: []} for load in arguments.loads}
    drafts: dict[str, list[tuple[int, int, int]]] = {load: [] for load in arguments.loads}
    repeated: dict[str, list[float]] = {load: [] for load in arguments.loads}
    lengths: dict[str, list[int]] = {load: [] for load in arguments.loads}  # of answers with drafts, in tokens
    errors = mismatched = 0
    for url in urls.values():  # workers learn what their steps cost
        for kind, users in (("edit", 1), ("plain", 8), ("edit", 8)):
            asyncio.run(send_all(url, [body_of(kind, random.Random(f"{kind} {n}")) for n in range(2 * users)], users))
    for turn in range(1 if arguments.quick else arguments.turns):
        for load in arguments.loads:
            kind, users = LOADS[load]
            count = users if arguments.quick else REQUESTS[users]
            bodies = [body_of(kind, random.Random(f"{load} {turn} {number}")) for number in range(count)]
            answers: dict[str, list[Any]] = {}
            for name in (OFF, ON) if turn % 2 else (ON, OFF):
                before = _drafts(urls[name])
                seconds, answers[name] = asyncio.run(send_all(urls[name], bodies, users))
                tokens = sum(len(one) for one in answers[name] if one)
                errors += sum(one is None for one in answers[name])
                rates[load][name].append(tokens / seconds)
                if name == ON:
                    after = _drafts(urls[name])
                    drafts[load].append(tuple(b - a for a, b in zip(before, after, strict=True)))  # type: ignore[arg-type]
                time.sleep(0.5)
            mismatched += sum(one != other for one, other in zip(answers[OFF], answers[ON], strict=True))
            repeated[load] += [_repeated(one) for one in answers[OFF] if one]
            lengths[load] += [len(one) for one in answers[ON] if one]
            off, on = rates[load][OFF][-1], rates[load][ON][-1]
            say(f"turn {turn + 1} {load:<10} off {off:7.1f} tok/s, on {on:7.1f}, ratio {on / off:.2f}")
    found: dict[str, Any] = {}
    for load in arguments.loads:
        pairs = zip(rates[load][ON], rates[load][OFF], strict=True)
        found[load] = round(statistics.median(on / off for on, off in pairs), 3)
    found["acceptance"] = {load: _share([d[2] for d in of], [d[1] for d in of]) for load, of in drafts.items()}
    found["drafted_tokens"] = {load: sum(d[1] for d in of) for load, of in drafts.items()}
    found["accepted_tokens"] = {load: sum(d[2] for d in of) for load, of in drafts.items()}
    steps = {load: sum(lengths[load]) - found["accepted_tokens"][load] for load in arguments.loads}
    found["tokens_per_step"] = {
        load: round(sum(lengths[load]) / count, 2) if count > 0 else None for load, count in steps.items()
    }
    found["steps_per_answer"] = {
        load: {name: round(count / max(1, len(of)), 1) for name, count in ((OFF, sum(of)), (ON, steps[load]))}
        for load, of in lengths.items()
    }
    found["repeated"] = {load: round(statistics.mean(of), 3) for load, of in repeated.items() if of}
    found["tokens_per_s"] = {
        load: {name: round(statistics.median(of), 1) for name, of in by.items()} for load, by in rates.items()
    }
    return found | {"errors": errors, "mismatched": mismatched, "load_average": os.getloadavg()[0]}


async def send_all(url: str, bodies: Sequence[Mapping[str, Any]], users: int) -> tuple[float, list[Any]]:
    """Have so many users send the requests; return the seconds and each answer's token ids, None of a failed one."""
    left = iter(enumerate(bodies))
    answers: list[Any] = [None] * len(bodies)

    async def user() -> None:
        for number, body in left:
            answers[number] = _tokens_of(await stream_completion(url, body))

    began = time.monotonic()
    await asyncio.gather(*(user() for _ in range(users)))
    return time.monotonic() - began, answers


def _tokens_of(exchange: Any) -> list[int] | None:
    """Return the token ids of a streamed answer; None where it is broken."""
    if exchange.broken is not None:
        say(f"a request failed: {exchange.broken}")
        return None
    token_ids: list[int] = []
    text = b"".join(data for _, data in exchange.arrivals)
    for line in text.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in msgspec.json.decode(line[6:]).get("choices", ()):
                token_ids += choice.get("token_ids") or ()
    return token_ids or None


def _repeated(token_ids: Sequence[int]) -> float:
    """Return the share of tokens whose last three stand earlier in the answer."""
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for end in range(3, len(token_ids) + 1):
        key = tuple(token_ids[end - 3 : end])
        hits += key in seen
        seen.add(key)
    return hits / max(1, len(token_ids))


def _drafts(url: str) -> tuple[int, int, int]:
    """Return the drafts, drafted and accepted tokens of all workers so far."""
    rows = [row["stats"] for row in fetch_status(url)["workers"]]
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return tuple(sum(row.get(name) or 0 for row in rows) for name in names)  # type: ignore[return-value]


def _share(part: Sequence[int], whole: Sequence[int]) -> float | None:
    return round(sum(part) / sum(whole), 3) if sum(whole) else None
