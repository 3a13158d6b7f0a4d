"""`twostroke status --watch`: one screen that follows a server, also while it is gone."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from twostroke.cluster.commands.status_tables import (
    Numbers,
    class_rows,
    class_table,
    headline,
    load_rows,
    load_tables,
    scaling_rows,
    scaling_table,
)
from twostroke.protocol.errors import ConfigError

Fetch = Callable[[], dict[str, Any]]


@dataclass
class _Look:
    """An answer, and when it came (seconds of a clock that never jumps)."""

    status: dict[str, Any]
    at: float


class StatusView:
    """What is on the screen: the newest answer with the rates since the one before."""

    def __init__(self, url: str, console: Console):
        self._url = url
        self._console = console
        self._before: _Look | None = None
        self._newest: _Look | None = None
        self._lost: str | None = None

    def answered(self, status: dict[str, Any], now: float) -> None:
        """The server has told its status."""
        self._before, self._newest = self._newest, _Look(status, now)
        if self._lost is not None:
            self._before, self._lost = None, None  # no rates over a time when nobody answered

    def lost(self, reason: str) -> None:
        """Nobody answers now."""
        self._lost = reason

    def shown(self, now: float) -> RenderableType:
        """All of it."""
        lines: list[RenderableType] = [Text(self._url, style="bold")]
        if self._lost is not None:
            lines.append(Text(f"{self._lost}; trying again", style="red"))
        if self._newest is None:
            return Group(*lines)
        if self._lost is not None:
            lines.append(Text(f"What it said {now - self._newest.at:.0f} s ago:", style="dim"))
        newest = self._newest.status
        before: Numbers = self._before.status if self._before is not None else {"workers": ()}
        seconds = self._newest.at - self._before.at if self._before is not None else 0.0
        lines.append(headline(newest))
        lines += load_tables(load_rows(before, newest, seconds), self._console)
        if classes := class_rows(newest):
            lines.append(class_table(classes))
        if scaling := scaling_rows(newest):
            lines.append(scaling_table(scaling))
        return Group(*lines)


def watch(
    url: str,
    fetch: Fetch,
    interval_s: float,
    console: Console,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show what `fetch` brings, again after each interval, until Ctrl-C; returns 0 then.

    On a terminal the screen is drawn over and over; into a file or a pipe, one view follows another.
    """
    view = StatusView(url, console)
    live = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else None
    try:
        if live is not None:
            live.start()
        while True:
            try:
                view.answered(fetch(), clock())
            except ConfigError as error:  # it may be starting, or come back
                view.lost(str(error))
            if live is not None:
                live.update(view.shown(clock()), refresh=True)
            else:
                console.print(Text(time.strftime("%H:%M:%S")), view.shown(clock()))
            sleep(interval_s)
    except KeyboardInterrupt:
        return 0
    finally:
        if live is not None:
            live.stop()
            console.print(view.shown(clock()))  # the last of it stays, once the screen is the shell's again
