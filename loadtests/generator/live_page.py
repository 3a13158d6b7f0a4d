"""Live charts beside Locust's own: a page of ours in Locust's web server, under /twostroke.

Locust's page can be given tables, but no charts; it gets a link to ours.
"""

from pathlib import Path
from typing import Any

import msgspec
from flask import request

from twostroke.loadtests.generator.live_series import series
from twostroke.loadtests.generator.locust_head import Head

PAGE = Path(__file__).with_name("live_page.html")
PATH = "/twostroke"
LOCUST_PAGE = "locust.index"  # its Flask endpoint
_LINK = (
    f'<a href="{PATH}" target="_blank" style="position:fixed;left:16px;bottom:16px;padding:8px 14px;border-radius:6px;'
    'background:#15803d;color:#fff;font:14px sans-serif;text-decoration:none;z-index:9999">TTFT, ITL, TPOT, SLO</a>'
)


def add_to(web_ui: Any, head: Head) -> None:
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


def figures(head: Head, first: int) -> dict[str, Any]:
    """What is new from second `first` on, and how the whole stands."""
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
