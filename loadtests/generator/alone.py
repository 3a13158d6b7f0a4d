"""A plan, carried out by one process without Locust: for benches, whose runs are short and many.

The process is light on the cores that it shares with the server: it stamps bytes as they come, and reads an answer when
it is whole. Its records come on its standard output when all is over, and after them how it fared itself.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import gevent
import msgspec
from gevent.pool import Group

from twostroke.loadtests import RunLost
from twostroke.loadtests.generator.dispatcher import Dispatcher, Line, check_prompts
from twostroke.loadtests.generator.http_stream import ClientExchange, make_endpoint, stream
from twostroke.loadtests.generator.run_facts import api_key
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.run_folder import Record

LOOK_INTERVAL_S = 0.25


class Greenlets:
    """Implements Crew (dispatcher.py) where gevent has patched blocking calls."""

    def __init__(self) -> None:
        self._group = Group()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        gevent.sleep(seconds)

    def spawn(self, work: Callable[..., object], *arguments: object) -> None:
        self._group.spawn(work, *arguments)

    def join(self) -> None:
        self._group.join()

    def kill(self) -> None:
        self._group.kill()


class Sent(msgspec.Struct, frozen=True):
    """The records of a plan that was sent; they are in the order in which their requests ended."""

    records: list[Record]
    began: float  # of `time.monotonic`, which all processes of a machine share; records count from it
    wall_s: float
    cpu_s: float  # that the sending process used


def send(plan: Plan, is_over: Callable[[], bool] = lambda: False) -> Sent:
    """Carry out a plan in a process of its own. When it `is_over` nothing more is sent; what is under way goes on.

    Raises LoadTestError for a plan that can't be sent, RunLost where the process fails.
    """
    check_prompts(plan)
    # The process inherits the mask: it may be told that all is over before it can hear that.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    order: bytes | None = msgspec.json.encode(plan)
    try:
        while True:
            try:
                output, _ = process.communicate(order, LOOK_INTERVAL_S)
                break
            except subprocess.TimeoutExpired:  # it has the order, and what it said is kept
                order = None
                if is_over():
                    process.terminate()
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RunLost(f"the process that sends ended with {process.returncode}")
    return msgspec.msgpack.decode(output, type=Sent)


def main() -> None:
    """Send the plan on standard input; after SIGTERM nothing more of it."""
    from gevent import monkey

    monkey.patch_all(ssl=False)
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    endpoint = make_endpoint(plan.url, api_key())

    def post(path: str, body: bytes, exchange: ClientExchange) -> None:
        stream(endpoint, endpoint.request(path, body), exchange, plan.request_limit_s)

    records: list[Record] = []
    dispatcher = Dispatcher(plan, 0, Line(post, False, lambda at_s: None, records.append), Greenlets())
    dispatcher.prepare()
    began, began_cpu = time.monotonic(), time.process_time()
    gevent.signal_handler(signal.SIGTERM, dispatcher.end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    dispatcher.run(began)
    sent = Sent(records, began, time.monotonic() - began, time.process_time() - began_cpu)
    with os.fdopen(1, "wb", closefd=False) as output:
        output.write(msgspec.msgpack.encode(sent))


if __name__ == "__main__":
    main()
