# SPDX-License-Identifier: Apache-2.0
"""Each test asks a real server, on a free port of this machine, over a socket of its own."""

import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest
from bs4 import BeautifulSoup

from trl_consistent import cli
from trl_consistent.records.logs import append_logs
from trl_consistent.report import watch as watch_module
from trl_consistent.report.watch import Watcher

from ..processes import fresh_environment
from .test_report import record, write_records


SECRET = b"not of this run"
NAME = "step-00000010-rank-00000.safetensors"


@contextlib.contextmanager
def serving(path, host="127.0.0.1"):
    with Watcher(path, host, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def run(tmp_path):
    """A run of two logs and one record, in a folder with something else beside it."""
    folder = tmp_path / "out" / "run"
    log(folder, 1)
    log(folder, 2)
    (tmp_path / "out" / "secret.txt").write_bytes(SECRET)
    return write_records(folder, record([[0.5, 0.25]], [[0.5, 0.5]]))


@pytest.fixture
def server(run):
    with serving(run) as server:
        yield server


def log(folder, step):
    append_logs(folder / "mismatch", {"step": step, "mismatch/k3/mean": 1e-4, "loss": 0.1})


def exchange(server, request: bytes) -> bytes:
    """Whatever comes back until the server closes."""
    with socket.create_connection(server.server_address[:2], timeout=60) as link:
        link.sendall(request)
        link.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: link.recv(65536), b""))


def ask(server, target: str = "/", method: str = "GET", host: str = "localhost"):
    """Status, headers and body, of a request that no client has tidied up."""
    answer = exchange(server, f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1"))
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, body


def page(server):
    return BeautifulSoup(ask(server)[2], "html.parser")


def news(server):
    """The lines of news as they come."""
    client = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
    client.request("GET", "/events")
    answer = client.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream"

    def told():
        quiet = 0
        for line in answer:
            quiet = 0 if line.startswith(b"data: ") else quiet + 1
            assert quiet < 1000, "signs of life, but no news"
            if not quiet:
                yield line.removeprefix(b"data: ").strip()

    return client, told()


# The page


def test_the_page_is_the_live_report_with_its_records_to_download(server):
    status, headers, _ = ask(server)
    assert (
        status == 200
        and headers["content-type"] == "text/html; charset=utf-8"
        and headers["cache-control"] == "no-store"
    )
    soup = page(server)
    assert soup.h1.text == "run" and "step 10" in soup.header.text and soup.find(id="live").text == "live"
    [link] = soup.find(id="records").find_all("a")
    assert link["href"] == f"records/{NAME}" == f"records/{link.text}"
    assert soup.script and "EventSource" in soup.script.text


def test_the_page_is_made_anew_only_when_a_file_has_changed(server, run, monkeypatch):
    made = []
    load = watch_module.load_run
    monkeypatch.setattr(watch_module, "load_run", lambda path: made.append(path) or load(path))
    first, again = ask(server)[2], ask(server)[2]
    assert first == again and len(made) == 1
    log(run, 11)
    assert "step 11" in page(server).header.text and len(made) == 2
    (run / "checkpoint-12").mkdir()
    state = '{"global_step": 12, "log_history": [{"step": 12, "loss": 0.1}]}'
    (run / "checkpoint-12" / "trainer_state.json").write_text(state)
    ask(server)
    assert len(made) == 3
    write_records(run, record([[0.5]], [[0.5]], step=13))
    assert len(page(server).find(id="records").find_all("a")) == 2 and len(made) == 4
    (run / "notes.txt").write_text("of somebody else")
    ask(server)
    assert len(made) == 4


def test_news_comes_at_once_and_for_every_change(server, run):
    server.pause = 0.01
    client, lines = news(server)
    first = next(lines)
    log(run, 3)
    second = next(lines)
    (run / "mismatch" / "records" / NAME).unlink()
    assert len({first, second, next(lines)}) == 3
    assert ask(server)[0] == 200  # while the other connection stays open
    client.close()


def test_a_run_that_has_not_begun_is_waited_for(tmp_path):
    folder = tmp_path / "soon"
    with serving(folder) as server:
        server.pause = 0.01
        soup = page(server)
        assert soup.h1.text == "Waiting for the run to begin" and "no such file or folder" in soup.text
        assert soup.find(id="live") and soup.script
        client, lines = news(server)
        next(lines)
        folder.mkdir()
        assert page(server).h1.text == "Waiting for the run to begin"
        log(folder, 1)
        next(lines)
        assert page(server).h1.text == "soon"
        client.close()


def test_a_report_that_fails_says_so_and_the_next_log_tries_again(server, run, monkeypatch, caplog):
    def fail(run, live):
        raise RuntimeError("<b>of this state</b> \udc80")

    with monkeypatch.context() as patch:
        patch.setattr(watch_module, "render_html", fail)
        status, _, body = ask(server)
        assert status == 500
        soup = BeautifulSoup(body, "html.parser")
        assert (
            "The report failed" in soup.h1.text and "RuntimeError: <b>of this state</b> ?" in soup.text and not soup.b
        )
        assert soup.find(id="live") and soup.script
        assert "RuntimeError" in caplog.text
    log(run, 3)
    assert ask(server)[0] == 200 and page(server).h1.text == "run"


def test_a_notice_runs_its_own_script_only():
    import base64
    import hashlib

    soup = BeautifulSoup(watch_module.render_notice("run", "t", "s"), "html.parser")
    digest = base64.b64encode(hashlib.sha256(soup.script.text.encode()).digest()).decode()
    policy = soup.find("meta", {"http-equiv": "Content-Security-Policy"})["content"]
    assert policy.startswith("default-src 'none'; ") and f"script-src 'sha256-{digest}'" in policy


# What a request can reach


def test_a_record_is_downloaded_as_it_is(server, run):
    status, headers, body = ask(server, f"/records/{NAME}")
    assert status == 200 and body == (run / "mismatch" / "records" / NAME).read_bytes()
    assert headers["content-disposition"] == f'attachment; filename="{NAME}"'
    assert ask(server, f"/records/{NAME}?x=1")[2] == body


@pytest.mark.parametrize("target", ["/", f"/records/{NAME}", "/nowhere", "/events"])
def test_head_is_get_without_the_body(server, target):
    status, headers, body = ask(server, target, "HEAD")
    assert body == b""
    if target == "/events":
        assert status == 200
    else:
        expected = ask(server, target)
        assert (status, headers["content-length"]) == (expected[0], str(len(expected[2])))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "MKCOL"])
def test_other_methods_are_refused(server, run, method):
    for target in ("/", f"/records/{NAME}"):
        status, headers, _ = ask(server, target, method)
        assert status == 405 and headers["allow"] == "GET, HEAD"
    assert (run / "mismatch" / "records" / NAME).exists()


@pytest.mark.parametrize(
    "target",
    [
        "/records/../secret.txt", "/records/../../../secret.txt", "/records/..%2f..%2f..%2fsecret.txt",
        "/records/%2e%2e%2f%2e%2e%2f%2e%2e%2fsecret.txt", "/records/%2e%2e/%2e%2e/%2e%2e/secret.txt",
        "/records/%252e%252e%252f%252e%252e%252f%252e%252e%252fsecret.txt", "/../secret.txt", "/%2e%2e/secret.txt",
        "/records/..\\..\\..\\secret.txt", "/records/..%5c..%5c..%5csecret.txt", "/records//etc/passwd", "//etc/passwd",
        "/etc/passwd", "/records/%2fetc%2fpasswd", "/records/file:///etc/passwd", "/records/secret.txt%00.safetensors",
        f"/records/{NAME}%00", f"/records/{NAME}/../../../../secret.txt", f"/records/x/../{NAME}", f"/records/{NAME}/",
        "/records/", "/records", "/records/.", "/mismatch/logs.jsonl", f"/mismatch/records/{NAME}", "/trainer_state.json",
        "/records/%ff", "/secret.txt", "/records/*", "http://localhost/records/../../../secret.txt",
    ],
)  # fmt: skip
def test_no_path_leads_elsewhere(server, target):
    status, _, body = ask(server, target)
    assert status == 404 and body in (b"There is no such page.", b"This run has no such record.")


def test_an_absolute_path_to_a_file_outside_is_no_record(server, run):
    secret = run.parent / "secret.txt"
    for target in (f"/records/{secret}", f"/records/{str(secret).replace('/', '%2F')}", f"{secret}"):
        assert ask(server, target)[0] == 404


def test_links_that_leave_the_run_are_not_followed(server, run):
    records, outside = run / "mismatch" / "records", run.parent / "secret.txt"
    linked = "step-00000011-rank-00000.safetensors"
    (records / linked).symlink_to(outside)
    assert linked in server.records() and ask(server, f"/records/{linked}")[0] == 404
    # one that stays inside is
    inside = "step-00000012-rank-00000.safetensors"
    (records / inside).symlink_to(records / NAME)
    assert ask(server, f"/records/{inside}")[2] == (records / NAME).read_bytes()
    # a whole folder that is elsewhere
    elsewhere = run.parent / "elsewhere"
    shutil.move(records, elsewhere)
    records.symlink_to(elsewhere)
    assert NAME in server.records() and ask(server, f"/records/{NAME}")[0] == 404


def test_what_is_no_file_is_no_record(server, run):
    records = run / "mismatch" / "records"
    (records / "step-00000011-rank-00000.safetensors").mkdir()
    os.mkfifo(records / "step-00000012-rank-00000.safetensors")
    for step in (11, 12):
        assert ask(server, f"/records/step-{step:08}-rank-00000.safetensors")[0] == 404


@pytest.mark.parametrize(
    "request_", [b"\r\n\r\n", b"GET\r\n\r\n", b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\xff" * 70000]
)
def test_what_is_no_request_leaves_the_server_there(server, request_):
    exchange(server, request_)
    assert ask(server)[0] == 200


# Who can reach it


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9000"])
def test_this_machine_is_answered_through_a_tunnel_too(server, host):
    assert ask(server, host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8642",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.2",
        "",
        "[",
        "localhost@evil.example",
    ],
)
def test_another_name_for_this_machine_is_refused(server, host):
    for target in ("/", "/events", f"/records/{NAME}"):
        status, _, body = ask(server, target, host=host)
        assert status == 403 and server.url.encode() in body


def test_no_host_or_two_are_refused(server):
    for hosts in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        assert exchange(server, b"GET / HTTP/1.1\r\n" + hosts + b"\r\n").startswith(b"HTTP/1.0 403")


def test_it_listens_on_loopback_unless_told_otherwise(run):
    with serving(run) as server:
        assert server.is_local and server.url == f"http://127.0.0.1:{server.server_port}/"
    with serving(run, host="0.0.0.0") as server:
        assert not server.is_local and ask(server, host="this-machine.example")[0] == 200


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_it_listens_on_ipv6_too(run):
    with serving(run, host="::1") as server:
        assert server.is_local and server.url == f"http://[::1]:{server.server_port}/"
        assert ask(server, host=f"[::1]:{server.server_port}")[0] == 200


# The command


def started(*arguments, **kwargs):
    command = [sys.executable, "-m", "trl_consistent.cli", "watch", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=fresh_environment(), **kwargs
    )


def test_the_command_says_where_the_page_is_and_ends_cleanly_on_ctrl_c(run):
    with started(run, "--port", 0) as process:
        line = process.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)", line)[1])
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        client.request("GET", "/events")
        assert client.getresponse().readline().startswith(b"data: ")
        process.send_signal(signal.SIGINT)  # with a page open
        _, errors = process.communicate(timeout=60)
        client.close()
    assert str(run) in line and process.returncode == 0 and errors == ""


def test_another_host_comes_with_a_warning(run):
    with started(run, "--port", 0, "--host", "0.0.0.0") as process:
        assert "http://0.0.0.0:" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "Anyone who can reach 0.0.0.0 can read this run" in errors and process.returncode == 0


def test_a_port_in_use_is_an_error_that_says_what_to_do(run, server, capsys):
    assert cli.main(["watch", str(run), "--port", str(server.server_port)]) == 2
    error = capsys.readouterr().err
    assert f"port {server.server_port}" in error and "`--port 0` takes a free one" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/typo/run"], "No folder {tmp}/typo, in which run could appear"),
        (["{tmp}/file"], "{tmp}/file is a file: give the output folder"),
        (["{tmp}", "--port", "70000"], "Cannot listen on 127.0.0.1, port 70000"),
        (["{tmp}", "--port", "0", "--host", "192.0.2.1"], "Cannot listen on 192.0.2.1, port 0"),
    ],
)
def test_what_cannot_be_watched_is_an_error(tmp_path, capsys, arguments, message):
    (tmp_path / "file").touch()
    assert cli.main(["watch", *(argument.format(tmp=tmp_path) for argument in arguments)]) == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err


def test_help_does_not_load_torch():
    code = "import sys\nfrom trl_consistent import cli\ntry:\n    cli.main(['watch', '--help'])\nexcept SystemExit:\n    pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "RUN_DIR" in done.stdout and done.stdout.endswith("False\n")
