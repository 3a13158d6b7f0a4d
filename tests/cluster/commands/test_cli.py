"""The command line where nothing can be started: one clear line and exit code 2, before Ray is touched.

`twostroke loadtest` is told likewise, though it may not be installed whole.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.command_line import answering, one_line
from twostroke.cluster import cli
from twostroke.cluster.cli import main
from twostroke.cluster.local.asking import ask
from twostroke.protocol.errors import how_to_install


def test_a_busy_port_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert one_line(capsys) == f"twostroke: port {port} on 127.0.0.1 is in use: choose another with --port"


def test_a_model_that_is_missing_is_told_before_the_port_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        assert main(["serve", "./nowhere", "--port", str(busy.getsockname()[1])]) == 2
    assert one_line(capsys) == "twostroke: model.path: there is no folder and no GGUF file ./nowhere"


@pytest.mark.parametrize("command", ["config schema", "config reference", "serve --help"])
def test_a_reader_that_leaves_early_ends_a_command_without_a_word(command: str) -> None:
    """The reader leaves early, in the way of `twostroke config schema | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "twostroke.cluster.cli", *command.split()],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writing)
    assert done.stderr == ""
    # argparse writes its help by itself, and minds no error.
    assert done.returncode == (0 if "--help" in command else cli.PIPE_EXIT)


def test_a_command_whose_output_is_closed_ends_without_a_word() -> None:
    command = 'exec "$0" -m twostroke.cluster.cli config reference >&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_pipe_that_breaks_is_no_reader_that_has_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def breaks(_: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_run", breaks)
    with pytest.raises(BrokenPipeError):
        main(["status"])


SERVE = ("serve", "--port", "18123")
NO_URL = "write http://HOST:PORT or https://HOST:PORT"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*SERVE, "--model", "/nowhere/at/all"], "model.path: there is no folder and no GGUF file /nowhere/at/all"),
        (
            [*SERVE, "--model", "Qwen3-8B"],
            "model.path: there is no folder and no GGUF file Qwen3-8B; an id of the Hugging Face hub is OWNER/NAME",
        ),
        ([*SERVE, "--config", "/nowhere.yaml"], "/nowhere.yaml: can't be read: No such file or directory"),
        ([*SERVE, "--port", "70000"], "port 70000 is none: choose one from 1 to 65535"),
        ([*SERVE, "--grace", "-5"], "--grace -5: seconds for streams to end, 0 for none"),
        ([*SERVE, "--grace", "nan"], "--grace nan: seconds for streams to end, 0 for none"),
        ([*SERVE, "--decode", "0"], "decode.replicas: 0 should be greater than or equal to 1 (--decode)"),
        ([*SERVE, "--host", "192.0.2.77"], "can't listen on 192.0.2.77:18123: Cannot assign requested address"),
        (["drain", "--grace", "-1"], "--grace -1: seconds, from 0 to 86400"),
        (["drain", "--grace", "nan"], "--grace nan: seconds, from 0 to 86400"),
        # At once, without Ray, which would try for minutes: systemd waits for it before it starts a new head.
        (
            ["drain", "--address", "127.0.0.1:1"],
            "--address 127.0.0.1:1: nobody listens there: [Errno 111] Connection refused",
        ),
        (["await", "--timeout", "nan"], "--timeout nan: seconds, more than 0, up to 86400"),
        (["status", "--url", "ftp://localhost"], f"--url ftp://localhost: {NO_URL}"),
        (["doctor", "--url", "http://"], f"--url http://: {NO_URL}"),
        (["loadtest", "run"], "--arrivals poisson needs --rate"),
    ],
)
def test_a_wrong_argument_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(arguments) == cli.CONFIG_ERROR_EXIT == 2
    assert one_line(capsys) == f"twostroke: {told}"


def test_a_wrong_file_is_told_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("decode:\n  replcas: 2\n")
    assert main(["serve", "--config", str(path), "--port", "18123"]) == 2
    assert one_line(capsys) == f"twostroke: {path}:2: decode.replcas: there is no such setting; did you mean replicas?"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serve", "m", "--max-modl-len", "8"], "did you mean --max-model-len?"),
        (
            ["serve", "m", "--enable-prefix-caching"],
            "vLLM's enable_prefix_caching: prefixes are always cached: leave it out",
        ),
        (["loadtest", "run", "--secnds", "3"], "did you mean --seconds?"),
        (["status", "--watchh"], "did you mean --watch?"),
        (["status", "--nothing-like-it"], ""),
        (["status", "more"], ""),
    ],
)
def test_an_unknown_flag_is_told_first_and_then_the_nearest_of_ours(
    capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    first, *hints, way_out = capsys.readouterr().err.splitlines()
    name = f"twostroke {' '.join(arguments[: 1 + (arguments[0] == 'loadtest')])}"
    assert first.startswith(f"{name}: error: unrecognized arguments: ")
    assert "\n".join(hints) == hint
    assert way_out == f"({name} --help tells all options)"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("twostroke ")


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_a_command_that_asks_a_server_says_where_none_answers(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main([command, "--url", url]) == 2
    assert one_line(capsys) == f"twostroke: no Twostroke server answers at {url}: Connection refused"


@pytest.mark.parametrize("given", ["{host}", "http://{host}/v1", "{host}/v1/"])
def test_a_server_is_asked_at_what_openai_s_clients_are_given_too(given: str) -> None:
    with (
        answering({"/status": b"{}"}) as url,
        ask(given.format(host=url.removeprefix("http://")), "status", timeout_s=5.0) as answer,
    ):
        assert answer.read() == b"{}"


@pytest.mark.parametrize(
    ("key", "status", "told"),
    [
        (None, 401, " wants an API key with the right `admin` (`metrics` for /status): set TWOSTROKE_API_KEY"),
        ("ts-wrong", 401, ": the API key in TWOSTROKE_API_KEY is not known there"),
        (
            "ts-plain",
            403,
            ": the API key in TWOSTROKE_API_KEY may not: it needs the right `admin`, or `metrics` for /status",
        ),
    ],
)
def test_status_says_what_is_wrong_with_the_api_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str | None, status: int, told: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("TWOSTROKE_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("TWOSTROKE_API_KEY", key)
    with answering({"/status": b"{}"}, status=status) as url:
        assert main(["status", "--url", url]) == 2
    assert one_line(capsys) == f"twostroke: {url}{told}"


def test_missing_packages_are_told_with_the_way_to_get_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_LOADTESTS_NEED", ("sys", "no_such_package"))
    assert cli.main(["loadtest", "run", "--rate", "1"]) == cli.CONFIG_ERROR_EXIT
    assert one_line(capsys) == f"twostroke: loadtest needs no_such_package: {how_to_install('loadtest')}"


def test_our_own_process_is_never_patched_by_gevent() -> None:
    with pytest.raises(SystemExit):
        cli.main(["loadtest", "run", "--help"])
    assert "locust" not in sys.modules
