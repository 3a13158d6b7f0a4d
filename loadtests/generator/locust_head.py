"""The head of a run, in Locust's master or in its only process: makes all begin together, and adds up their reports.

Locust's page can be given tables, but no charts: it gets a link to a page of ours, in its own web server, with charts.
"""

import logging
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import msgspec
from flask import request

from twostroke.loadtests import unwritable
from twostroke.loadtests.generator.live import LiveFigures, RunProgress, Second, percentile, series
from twostroke.loadtests.generator.locust_sender import BEGIN, PREPARE, Prepared, PrepareOrder, SenderReport
from twostroke.loadtests.generator.run_facts import begin_facts, is_ours, list_models
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.run_folder import GeneratorHealth, RunFolder

BEGIN_DELAY_S = 0.5  # until the message is with all

_log = logging.getLogger(__name__)
_REPORT = msgspec.msgpack.Decoder(SenderReport)
_PREPARED = msgspec.msgpack.Decoder(Prepared)


class LocustHead:
    """One run. Raises LoadTestError, at once, where no server answers."""

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        send_to: Callable[[str, bytes, str | None], None],
        on_progress: Callable[["LocustHead"], None],
    ):
        self.plan = plan
        self.live = LiveFigures()
        self.is_over = False
        self.error: str | None = None
        self._folder = folder
        self._send_to = send_to  # kind, content, which process; None: the only one
        self._on_progress = on_progress
        models = list_models(plan.url)
        self._is_ours = is_ours(models)
        self._facts = begin_facts(plan.url, models)
        self._total = Second()  # of all seconds: adding them up anew each time would take ever longer
        self._elapsed_s: dict[int, float] = {}
        self._waited_for: set[int] = set()
        self._running: set[int] = set()
        self._health: dict[int, GeneratorHealth] = {}
        self._clients: dict[int, str | None] = {}
        self._write_facts(ended_early=True)

    @property
    def elapsed_s(self) -> float:
        return max(self._elapsed_s.values(), default=0.0)

    @property
    def whole_seconds(self) -> int:
        """Number of the run's seconds that all processes have reported."""
        if len(self._elapsed_s) < self.plan.num_workers:
            return 0
        return int(self.elapsed_s) + 1 if self.is_over else max(0, int(min(self._elapsed_s.values())))

    @property
    def progress(self) -> RunProgress:
        total = self._total
        return RunProgress(
            elapsed_s=max(0.0, self.elapsed_s),
            sent=total.sent,
            under_way=total.sent - total.over,
            ok=total.ok,
            refused=total.refused,
            failed=total.failed,
            attainment=total.met / total.judged if total.judged else None,
            ttft_p50_s=percentile([total.ttft], 50),
            lag_p99_s=percentile([total.lag], 99),
            is_over=self.is_over,
            error=self.error,
        )

    def start(self, clients: list[str | None]) -> None:
        """Have these processes prepare their shares; they begin when all have."""
        if len(clients) != self.plan.num_workers:
            self.give_up(f"the plan is for {self.plan.num_workers} processes, and {len(clients)} are there")
            return
        self._clients = dict(enumerate(clients))
        self._waited_for = set(self._clients)
        for worker, client in self._clients.items():
            order = PrepareOrder(self.plan, worker, self._is_ours)
            self._send_to(PREPARE, msgspec.msgpack.encode(order), client)

    def on_prepared(self, content: bytes) -> None:
        prepared = _PREPARED.decode(content)
        if prepared.error is not None:
            self.give_up(prepared.error)
            return
        self._waited_for.discard(prepared.worker)
        if not self._waited_for and not self.is_over:
            self._running = set(self._clients)
            at = time.time() + BEGIN_DELAY_S
            for client in self._clients.values():
                self._send_to(BEGIN, msgspec.msgpack.encode(at), client)

    def on_report(self, content: bytes) -> None:
        report = _REPORT.decode(content)
        self.live.add(report.seconds)
        for second in report.seconds.values():
            self._total.add(second)
        self._elapsed_s[report.worker] = report.elapsed_s
        self._health[report.worker] = report.health
        self.error = self.error or report.error
        if report.over:
            self._running.discard(report.worker)
            self.is_over = not self._running
            self._write_facts(ended_early=bool(self._running or self.error))
        self._on_progress(self)

    def lose_all_but(self, clients: Set[str | None]) -> None:
        """Give up where a process that still has to send is none of those that are there."""
        lost = [worker for worker in self._running if self._clients[worker] not in clients]
        if lost:
            self.give_up(f"sending process {lost[0]} is gone")

    def give_up(self, reason: str) -> None:
        """End the run early; what is under way is recorded as unfinished."""
        _log.error("%s", reason)
        self.error = self.error or reason
        self.is_over = True
        self._write_facts(ended_early=True)
        self._on_progress(self)

    def _write_facts(self, *, ended_early: bool) -> None:
        generators = tuple(self._health[worker] for worker in sorted(self._health))
        facts = msgspec.structs.replace(self._facts, generators=generators, ended_early=ended_early)
        path = self._folder.facts_path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")  # on a full disk what was known before stays
            new.write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=2))
            new.replace(path)
        except OSError as error:
            self.error = self.error or str(unwritable(path, error))


PAGE = Path(__file__).with_name("live_page.html")
PATH = "/twostroke"
LOCUST_PAGE = "locust.index"  # its Flask endpoint
_LINK = (
    f'<a href="{PATH}" target="_blank" style="position:fixed;left:16px;bottom:16px;padding:8px 14px;border-radius:6px;'
    'background:#15803d;color:#fff;font:14px sans-serif;text-decoration:none;z-index:9999">TTFT, ITL, TPOT, SLO</a>'
)


def add_to(web_ui: Any, head: LocustHead) -> None:
    """Adds the page and its figures to Locust's Flask app; behind Locust's login where it has one."""
    app = web_ui.app

    @app.route(PATH)  # type: ignore[untyped-decorator]
    @web_ui.auth_required_if_enabled  # type: ignore[untyped-decorator]
    def live_page() -> str:
        return PAGE.read_text(encoding="utf-8")

    @app.route(f"{PATH}/figures/<int:first>")  # type: ignore[untyped-decorator]
    @web_ui.auth_required_if_enabled  # type: ignore[untyped-decorator]
    def live_figures(first: int) -> Any:
        return app.response_class(msgspec.json.encode(figures(head, first)), mimetype="application/json")

    @app.after_request  # type: ignore[untyped-decorator]
    def link(response: Any) -> Any:
        if request.endpoint == LOCUST_PAGE:
            response.set_data(response.get_data().replace(b"</body>", _LINK.encode() + b"</body>"))
        return response


def figures(head: LocustHead, first: int) -> dict[str, Any]:
    """Return the figures that are new from second `first` on, and the totals."""
    plan = head.plan
    return {
        "name": plan.name,
        "url": plan.url,
        "seconds": plan.seconds,
        "slo": msgspec.to_builtins(plan.slo),
        "lag_limit_s": plan.slo.lag_limit_s,
        "progress": msgspec.to_builtins(head.progress),
        "points": series(head.live, first, head.whole_seconds),
    }
