"""A chaos run: `make chaos`, or `python -m tests.chaos --minutes 2 --seed 7`.

Two prefill and two decode workers and two routers on this machine, as `twostroke serve` deploys them; clients that ask
for completions of all kinds, again and again; and faults, several at a time, from a schedule that the seed draws. Each
fault has to prove that it fired. Every answer is compared with what the same request got before the first fault. The
last line is JSON; the exit code is 1 where something fell short.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.faults import Chaos, Injected, Injector, NotBack, wreak
from tests.chaos.fleet import SETTINGS, NotUp, ServerUnderChaos
from tests.chaos.load import MODEL, ClientAnswer, SteadyLoad, answers_of_all
from tests.chaos.models import NAMES, WITH_EXPERTS, model_path
from tests.chaos.requests import draw_requests
from tests.chaos.stalled_clients import StalledClients
from tests.chaos.ties import unsteady
from tests.chaos.verdict import Verdict, judge
from twostroke.cluster.local.ray import ray_folder
from twostroke.protocol.errors import ConfigError

TIERS: dict[str, Any] = {"host_bytes": "64MiB", "object_tokens": 64, "write_share": 1.0}
DISK: dict[str, Any] = {"bytes": "40MiB"}
"""A quota that the run's prompts exceed, so that objects are dropped all the time."""
LEASE_S = 10.0  # the longest that blocks of a lost router are held (token_channel.lease_s)
SHOWN_FINDINGS = 20
PIPE_COLUMNS = 140


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="of chaos; start and end take another (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of requests and faults (%(default)s)")
    parser.add_argument(
        "--clients", type=int, default=8, help="with one request after another, and a short pause between (%(default)s)"
    )
    parser.add_argument("--requests", type=int, default=60, help="different ones (%(default)s)")
    parser.add_argument("--model", choices=NAMES, default="bundled", help="what is served (%(default)s)")
    parser.add_argument("--transport", choices=("auto", "tcp", "shm", "torch_distributed"), default="auto")
    parser.add_argument("--no-tiers", dest="tiers", action="store_false", help="without KV tiers on disks")
    parser.add_argument(
        "--slack", type=float, default=1.0, help="times may be so many times their bounds (%(default)s)"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="write all answers and faults there, as lines of JSON"
    )
    arguments = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    log = Path(tempfile.mkstemp(prefix="twostroke-chaos-", suffix=".log")[1])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server's processes are ended then, too
    try:
        with tempfile.TemporaryDirectory(prefix="twostroke-chaos-") as folder:
            path = model_path(arguments.model, Path(folder))
            verdict = asyncio.run(run(arguments, path, Path(folder, "keys.yaml"), console, log))
    except (ConfigError, NotUp, NotBack) as error:
        console.print(f"[red]{error}[/] (the server's words: {log}, {ray_folder()}/session_*/logs)")
        return 1
    show(verdict, console)
    print(json.dumps(verdict.summary))
    return int(bool(verdict.failures))


async def run(arguments: argparse.Namespace, model: str, keys_file: Path, console: Console, log: Path) -> Verdict:
    """The whole run, over the model at this path. Raises NotUp, NotBack."""
    began = time.monotonic()

    def tell(injected: Injected) -> None:
        back = "" if injected.back_s is None else f", back after {injected.back_s:.1f} s"
        console.print(f"{injected.begin - began:6.1f} s  {injected.name}: {injected.proof}{back}")

    requests = draw_requests(arguments.seed, arguments.requests)
    settings = {
        **SETTINGS,
        "model": {
            **SETTINGS["model"],
            "path": model,
            "name": MODEL,
            # In fp32 weights that stay quantised are widened at each step, which takes a model of this size too long.
            "quantization": "none" if arguments.model == "smollm2" else "auto",
        },
        "kv_transfer": {"transport": arguments.transport},
    }
    folders = [keys_file.parent / "disk", keys_file.parent / "shared"] if arguments.tiers else []
    for folder in folders:
        folder.mkdir()
    if folders:  # all workers write into both
        settings["kv_cache"] = {"tiers": TIERS | {"disk": DISK | {"path": str(folders[0])}, "shared": str(folders[1])}}
    console.print("Starting 2 prefill workers, 2 decode workers, 2 routers ...")
    async with ServerUnderChaos(settings, keys_file, log, folders) as server:
        console.print(f"Up after {time.monotonic() - began:.1f} s. The same requests without faults first:")
        expected = await answers_of_all(server.target, requests, arguments.clients)
        if arguments.model in WITH_EXPERTS:
            left_out = unsteady(
                model, ((r.key, r.body["prompt"], c.tokens) for r in requests for c in expected[r.key].choices)
            )
            requests = [request for request in requests if request.key not in left_out]
            console.print(f"Left out, since rounding decides which expert computes a token: {sorted(left_out)}")
        load = SteadyLoad(server.target, requests, arguments.seed, clients=arguments.clients)
        chaos = Chaos()
        await load.start()
        stalled = StalledClients(server.target)
        injector = Injector(server, load, stalled, random.Random(arguments.seed))
        await wreak(injector, chaos, 60 * arguments.minutes, arguments.seed, tell)
        await load.stop()
        never_ended = await stalled.never_ended()
        console.print(f"{len(chaos.faults)} faults have fired; {chaos.idle} found nothing to harm.")
        if folders:
            console.print(await tiers_told(server))
        if arguments.keep is not None:
            keep(arguments.keep, began, [*expected.values(), *load.answers], chaos.faults)
        return judge(
            load.answers,
            expected,
            chaos.faults,
            minutes=arguments.minutes,
            leaked_blocks=await leaked_blocks(server),
            deaths=server.control.deaths,
            never_ended=never_ended,
            slack=arguments.slack,
        )


async def tiers_told(server: ServerUnderChaos) -> str:
    """Return the numbers of the tiers of all workers that are there, since their start."""
    status = await server.status()
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for worker in status["workers"] if status is not None else ():
        for tier in worker["stats"].get("tiers") or ():
            for name in ("hit_tokens", "written_objects", "evicted", "quarantined", "errors", "late", "dropped"):
                found[tier["name"]][name] += tier.get(name, 0)
    return f"Tiers: {json.dumps(found)}"


async def leaked_blocks(server: ServerUnderChaos) -> int:
    """Blocks that are still owned two leases after the last request's end."""
    deadline = time.monotonic() + 2 * LEASE_S
    while True:
        owned = await server.owned_blocks()
        if owned == 0 or time.monotonic() > deadline:
            return owned
        await asyncio.sleep(0.2)


def keep(path: Path, began: float, answers: Sequence[ClientAnswer], faults: Sequence[Injected]) -> None:
    """The run's log. Times are of `time.monotonic`; `began` is what the progress counts from."""
    lines = [{"began": began}, *map(dataclasses.asdict, answers), *map(dataclasses.asdict, faults)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def show(verdict: Verdict, console: Console) -> None:
    table = Table("fault", "fired", "streams", "stall P50", "P99", "most", "back", title="Seconds of stall by fault")
    for row in verdict.rows:
        back = "" if row.back_s is None else f"{row.back_s:.1f}"
        table.add_row(
            row.name,
            str(row.fired),
            str(row.stalls),
            f"{row.p50_s:.2f}",
            f"{row.p99_s:.2f}",
            f"{row.most_s:.2f}",
            back,
        )
    console.print(table)
    for finding in verdict.findings[:SHOWN_FINDINGS]:
        console.print(f"{finding.flaw}: request {finding.key}, {finding.text}")
    for failure in verdict.failures:
        console.print(f"[red]{failure}[/]")


if __name__ == "__main__":
    sys.exit(main())
