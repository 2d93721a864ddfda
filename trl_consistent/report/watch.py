# SPDX-License-Identifier: Apache-2.0
"""A server for the report of a run that is still going on; the page renews itself as the run's files change.

The server only reads. A request can reach the page, the stream of its changes, and the run's own record files. `html.py`
makes the page, and `live.js` renews it in the browser.
"""

import contextlib
import errno
import hashlib
import ipaddress
import logging
import os
import shutil
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from ..records.folder import FOLDER, LOGS, STATE
from ..records.store import record_files
from .html import render_html, render_notice
from .run import load_run


logger = logging.getLogger(__name__)

_SHORTEST_PAUSE = 1.0  # seconds between looks at the files
_LONGEST_PAUSE = 10.0
_KEEP_ALIVE = 15  # looks without a change between signs of life to the page


def watch(path: str | Path, host: str, port: int) -> None:
    """Serves the live report of a run until Ctrl-C.

    Raises:
        `ValueError`, `OSError`: as [`Watcher`] raises them.
    """
    with Watcher(path, host, port) as server, contextlib.suppress(KeyboardInterrupt):
        if not server.is_local:
            print(
                f"Anyone who can reach {host} can read this run and the completions of the model. Without `--host`, only "
                "this machine can read it; from another machine, use a tunnel (`ssh -L`).",
                file=sys.stderr,
            )
        print(f"Watching {server.path} on {server.url} (Ctrl-C ends it)", flush=True)
        server.serve_forever()


class Watcher(ThreadingHTTPServer):
    """
    A server of the live report of one run.

    Args:
        path (`str` or `Path`): The run's output folder, as [`load_run`] takes it; it may not exist yet.
        host (`str`): Address of this machine to listen on.
        port (`int`): Port to listen on; 0 takes any free one.

    Raises:
        `ValueError`: `path` is a file, or the folder around it does not exist. `OSError`: the server cannot listen on this
        address and port; the message says why.
    """

    def __init__(self, path: str | Path, host: str, port: int):
        self.path = Path(path)
        _check(self.path)
        # These come first, because a server that fails to start is closed as well.
        self.closing = threading.Event()
        self.pause = _SHORTEST_PAUSE
        self._rendering = threading.Lock()
        self._rendered_state = ""
        self._page: tuple[int, bytes] = (0, b"")
        try:
            self.address_family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
            super().__init__((str(address[0]), port), _Handler)
        except (OSError, OverflowError) as error:
            in_use = getattr(error, "errno", None) == errno.EADDRINUSE
            remedy = "`--port 0` takes a free one" if in_use else "check `--host` and `--port`"
            raise OSError(f"Cannot listen on {host}, port {port} ({error}): {remedy}.") from None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def host(self) -> str:
        """The address that the server listens on."""
        return str(self.server_address[0])

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.server_port}/"

    def state(self) -> str:
        """A digest of the report's files by name, time and size: another one after every change of any of them."""
        files = [self.path / STATE, *sorted(self.path.glob(f"checkpoint-*/{STATE}")), self.path / FOLDER / LOGS]
        seen = []
        for file in [*files, *self.records().values()]:
            with contextlib.suppress(OSError):  # not there yet, or no longer
                stat = file.stat()
                seen.append((str(file), stat.st_mtime_ns, stat.st_size))
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def records(self) -> dict[str, Path]:
        """The run's record files, by name."""
        try:
            return {file.name: file for file in record_files(self.path)}
        except OSError:
            return {}

    def page(self) -> tuple[int, bytes]:
        """HTTP status and content of the page; it is rendered again only when the files have changed."""
        with self._rendering:
            state = self.state()  # before the files are read: what changes meanwhile is the next change
            if state != self._rendered_state:
                began = time.monotonic()
                self._page = self._render()
                self._rendered_state = state
                # The training needs the processor more: the page rests four times as long as it took to render.
                self.pause = min(max(_SHORTEST_PAUSE, 4 * (time.monotonic() - began)), _LONGEST_PAUSE)
            return self._page

    def _render(self) -> tuple[int, bytes]:
        try:
            return 200, self._report().encode(errors="replace")
        except Exception as error:  # a page that fails must not end the watch: the next files may be whole again
            logger.exception("The report of this state of the run failed.")
            title = "The report failed; it is tried again with the next log"
            return 500, render_notice(self.path.name, title, f"{type(error).__name__}: {error}").encode(
                errors="replace"
            )

    def _report(self) -> str:
        """The live report, or a notice while there is no run to report on."""
        try:
            run = load_run(self.path)
        except FileNotFoundError as error:
            return render_notice(self.path.name, "Waiting for the run to begin", str(error))
        return render_html(run, live=True)

    def server_close(self) -> None:
        self.closing.set()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):  # the reader left
            super().handle_error(request, client_address)


def _check(path: Path) -> None:
    """Refuses a path at which no run can appear."""
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"{path} is a file: give the output folder of a run. `trl-consistent report` reads one record."
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"No folder {path.parent}, in which {path.name} could appear: check the path. A run that has not begun can be "
            "watched, but the folder around it must exist."
        )


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Watcher
    server_version = "trl-consistent"
    sys_version = ""
    timeout = 30

    def parse_request(self) -> bool:
        """Reads the request; whether it is one for `do_GET`. Other methods and other hosts are refused here."""
        if not super().parse_request():
            return False
        if self.command not in ("GET", "HEAD"):
            self._answer(405, "This server only answers GET and HEAD.", Allow="GET, HEAD")
            return False
        # Another site may point its own name at this machine, to have a reader's browser read this page for it.
        if self.server.is_local and not self._is_for_this_host():
            self._answer(403, f"This page is for this machine only: open {self.server.url}")
            return False
        return True

    def _is_for_this_host(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        try:
            return len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in ("localhost", self.server.host)
        except ValueError:
            return False

    def do_GET(self) -> None:
        target = unquote(self.path.partition("?")[0])
        if target == "/":
            status, page = self.server.page()
            self._answer(status, page, "text/html; charset=utf-8")
        elif target == "/events":
            self._stream_changes()
        elif target.startswith("/records/"):
            self._send_record(target.removeprefix("/records/"))
        else:
            self._answer(404, "There is no such page.")

    do_HEAD = do_GET

    def _stream_changes(self) -> None:
        """Sends the state of the files now and after every change, until the reader leaves or the server closes."""
        self._head(200, "text/event-stream")
        sent = ""
        looks_since = 0
        while self.command != "HEAD":
            state = self.server.state()
            if state != sent:
                self.wfile.write(f"data: {state}\n\n".encode())
                sent = state
                looks_since = 0
            else:
                looks_since += 1
                if looks_since % _KEEP_ALIVE == 0:
                    self.wfile.write(b":\n\n")  # fails once the page is closed
            if self.server.closing.wait(self.server.pause):
                break

    def _send_record(self, name: str) -> None:
        content = self._open_record(name)
        if content is None:
            self._answer(404, "This run has no such record.")
            return
        with content:
            self._head(
                200,
                "application/octet-stream",
                Content_Length=str(os.fstat(content.fileno()).st_size),
                Content_Disposition=f'attachment; filename="{name}"',
            )
            if self.command != "HEAD":
                shutil.copyfileobj(content, self.wfile)

    def _open_record(self, name: str) -> BinaryIO | None:
        """Opens a record of the run. A name is looked up, never joined to a path; links that lead out are not followed."""
        file = self.server.records().get(name)
        if file and file.is_file() and file.resolve().is_relative_to(self.server.path.resolve()):
            with contextlib.suppress(FileNotFoundError):  # removed since
                return file.open("rb")
        return None

    def _answer(
        self, status: int, content: bytes | str, kind: str = "text/plain; charset=utf-8", **headers: str
    ) -> None:
        content = content.encode() if isinstance(content, str) else content
        self._head(status, kind, Content_Length=str(len(content)), **headers)
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: int, kind: str, **headers: str) -> None:
        """Sends status and headers; `_` in the name of a header stands for `-`."""
        always = {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        self.send_response(status)
        for name, value in (always | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Prints nothing: the terminal is for the address of the page."""
