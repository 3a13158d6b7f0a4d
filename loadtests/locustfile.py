"""What Locust is given: `locust -f loadtests/locustfile.py --plan plan.json [--master | --worker]`.

Locust gives processes, messages between them, its web page and its table. When requests are sent, and how they are
measured, is ours (loadtests/generator: dispatcher.py, http_stream.py): each process has one user, who sends the
process's share of the plan.
"""

import os
import signal
from pathlib import Path
from typing import Any

import gevent
import msgspec
from locust import LoadTestShape, User, events, task
from locust.exception import StopUser
from locust.runners import STATE_MISSING, LocalRunner, MasterRunner, WorkerRunner

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator import locust_head as live_page
from twostroke.loadtests.generator.locust_head import Head
from twostroke.loadtests.generator.locust_sender import BEGIN, PREPARE, PREPARED, REPORT, PrepareOrder, Sender
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.run_folder import Record, RunFolder, read_json

_heads: list[Head] = []  # of this process: one, or none in a worker
_senders: list[Sender] = []  # one, or none in a master


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_arguments(parser: Any) -> None:
    for name, kind, help_text in (
        ("--plan", str, "the plan (plan.json); workers are sent the master's"),
        ("--folder", str, "where records and run.json go (default: the plan's folder, or the current one)"),
        ("--progress-fd", int, "an open file: a line of JSON goes there each second"),
    ):
        parser.add_argument(name, type=kind, help=help_text, include_in_web_ui=False)


@events.init.add_listener  # type: ignore[untyped-decorator]
def _init(environment: Any, runner: Any, web_ui: Any, **_: Any) -> None:
    options = environment.parsed_options
    # Strings: the master sends its options to workers.
    folder = Path(options.folder) if options.folder else Path(options.plan or "").parent
    if not isinstance(runner, MasterRunner):
        _senders.append(_make_sender(environment, runner, RunFolder(folder)))
    if not isinstance(runner, WorkerRunner):
        if options.plan is None:
            raise SystemExit("locustfile: name the plan: --plan plan.json")
        try:
            head = _make_head(environment, runner, read_json(Path(options.plan), Plan), RunFolder(folder))
        except LoadTestError as error:
            raise SystemExit(f"locustfile: {error}") from error
        _heads.append(head)
        # Locust would end a master without its workers' last reports, or, while a shape runs, heed no SIGTERM at all.
        gevent.signal_handler(signal.SIGTERM, head.give_up, "ended from outside")
        environment.events.quitting.add_listener(lambda **_: _stop_workers(runner))
        options.expect_workers = head.plan.num_workers
        if web_ui is not None:
            live_page.add_to(web_ui, head)


def _make_sender(environment: Any, runner: Any, folder: RunFolder) -> Sender:
    sender = Sender(folder, runner.send_message, lambda record, name: _tell_locust(environment, record, name))
    decode = msgspec.msgpack.Decoder(PrepareOrder).decode
    runner.register_message(PREPARE, lambda environment, msg: sender.prepare(decode(msg.data)))
    runner.register_message(BEGIN, lambda environment, msg: sender.begin(msgspec.msgpack.decode(msg.data)))
    return sender


def _make_head(environment: Any, runner: Any, plan: Plan, folder: RunFolder) -> Head:
    progress_fd = environment.parsed_options.progress_fd

    def send_to(kind: str, content: bytes, client: str | None) -> None:
        runner.send_message(kind, content, client)

    def tell_progress(head: Head) -> None:
        if progress_fd is None:
            return
        try:
            os.write(progress_fd, msgspec.json.encode(head.progress) + b"\n")
        except BrokenPipeError:
            if not head.is_over:
                head.give_up("who started this run is gone")

    head = Head(plan, folder, send_to, tell_progress)
    runner.register_message(PREPARED, lambda environment, msg: head.on_prepared(msg.data))
    runner.register_message(REPORT, lambda environment, msg: head.on_report(msg.data))

    def start(**_: Any) -> None:
        """All processes have their user: from here on the plan alone says what is sent."""
        head.start([None] if isinstance(runner, LocalRunner) else list(runner.clients))

    environment.events.spawning_complete.add_listener(start)
    return head


def _stop_workers(runner: Any) -> None:
    """Waits for their last reports. A master that quits gives them half a second, whatever they still have to do."""
    if isinstance(runner, MasterRunner):
        runner.stop()


def _tell_locust(environment: Any, record: Record, name: str) -> None:
    """Requests are Locust's requests; the other times have rows of their own, which don't count as requests."""
    environment.events.request.fire(
        request_type="E2E",
        name=name,
        response_time=(record.end_s - record.scheduled_s) * 1e3,
        response_length=0,
        exception=None if record.status == "ok" else LoadTestError(record.error or record.status),
        context={},
    )
    for kind, seconds in (("TTFT", [record.ttft_s]), ("TPOT", [record.tpot_s]), ("ITL", record.gaps_s)):
        row = environment.stats.get(name, kind)
        for value in seconds:
            if value is not None:
                row.log(value * 1e3, 0)


class ShareSender(User):  # type: ignore[misc]
    """The one user of a process."""

    @task  # type: ignore[untyped-decorator]
    def send_share(self) -> None:
        _senders[0].run()
        raise StopUser


class Shares(LoadTestShape):  # type: ignore[misc]
    """As many users as processes, until all shares are sent."""

    def tick(self) -> tuple[int, float] | None:
        head = _heads[0]
        if isinstance(self.runner, MasterRunner):
            head.lose_all_but({name for name, node in self.runner.clients.items() if node.state != STATE_MISSING})
        if head.is_over:
            if head.error is not None:
                _stop_workers(self.runner)
            self.runner.environment.process_exit_code = 0 if head.error is None else 1
            return None
        return head.plan.num_workers, float(head.plan.num_workers)
