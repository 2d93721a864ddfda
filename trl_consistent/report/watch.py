# SPDX-License-Identifier: Apache-2.0
"""The report of a run that is still going on, served on this machine and renewed as its files change.

Reads and answers, no more: what a request can reach is the page, its news, and the run's own record files. `html.py` makes
the page and holds its script.
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
from typing import Any
from urllib.parse import unquote, urlsplit

from ..records.record import FOLDER, LOGS, STATE
from ..records.store import record_files
from .html import render_html, render_notice
from .run import load_run


logger = logging.getLogger(__name__)

_POLL, _LONGEST_PAUSE = 1.0, 10.0  # seconds between looks at the files
_KEEP_ALIVE = 15  # looks without news between signs of life to the page


def watch(path: str | Path, host: str, port: int) -> None:
    """Serves the live report of a run until Ctrl-C.

    Raises:
        `ValueError`, `OSError`: as of [`Watcher`].
    """
    with Watcher(path, host, port) as server, contextlib.suppress(KeyboardInterrupt):
        if not server.is_local:
            print(
                f"Anyone who can reach {host} can read this run, with what the model wrote. Without `--host`, only this "
                "machine can; a tunnel (`ssh -L`) brings it to another one.",
                file=sys.stderr,
            )
        print(f"Watching {server.path} on {server.url} (Ctrl-C ends it)", flush=True)
        server.serve_forever()


class Watcher(ThreadingHTTPServer):
    """
    A server of the live report of one run.

    Args:
        path (`str` or `Path`): The run's output folder, as of [`load_run`]; it may not be there yet.
        host (`str`): Address of this machine to listen on.
        port (`int`): 0 is any that is free.

    Raises:
        `ValueError`: `path` is a file, or in a folder that is not there. `OSError`: it cannot listen there; says why.
    """

    def __init__(self, path: str | Path, host: str, port: int):
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"{path} is a file: give the output folder of a run. `trl-consistent report` reads one record."
            )
        if not self.path.parent.is_dir():
            raise ValueError(
                f"No folder {self.path.parent}, in which {self.path.name} could appear: check the path. A run that has not "
                "begun can be watched, but in a folder that exists."
            )
        self.closing = threading.Event()  # before anything that may fail, for then it is closed as well
        self.pause = _POLL
        self._rendering = threading.Lock()
        self._page: tuple[str, int, bytes] = ("", 0, b"")
        try:
            self.address_family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
            super().__init__((str(address[0]), port), _Handler)
        except (OSError, OverflowError) as error:
            in_use = getattr(error, "errno", None) == errno.EADDRINUSE
            remedy = "`--port 0` takes a free one" if in_use else "check `--host` and `--port`"
            raise OSError(f"Cannot listen on {host}, port {port} ({error}): {remedy}.") from None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def host(self) -> str:
        """The address it listens on."""
        return str(self.server_address[0])

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.server_port}/"

    def state(self) -> str:
        """Changes whenever a file does that the report is made of."""
        files = [self.path / STATE, *sorted(self.path.glob(f"checkpoint-*/{STATE}")), self.path / FOLDER / LOGS]
        seen = []
        for file in [*files, *self.records().values()]:
            try:
                stat = file.stat()
            except OSError:
                continue  # not there yet, or no longer
            seen.append((str(file), stat.st_mtime_ns, stat.st_size))
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def records(self) -> dict[str, Path]:
        """The run's record files, by name."""
        try:
            return {file.name: file for file in record_files(self.path)}
        except OSError:
            return {}

    def page(self) -> tuple[int, bytes]:
        """Status and content of the page, made anew when the files have changed."""
        with self._rendering:
            state = self.state()  # before it is read: what changes meanwhile is news
            if state != self._page[0]:
                began = time.monotonic()
                self._page = state, *self._render()
                # The training needs the processor more: news waits until the page has rested longer than it worked.
                self.pause = min(max(_POLL, 4 * (time.monotonic() - began)), _LONGEST_PAUSE)
            return self._page[1:]

    def _render(self) -> tuple[int, bytes]:
        try:
            try:
                run = load_run(self.path)
            except FileNotFoundError as error:
                return 200, _encoded(render_notice(self.path.name, "Waiting for the run to begin", str(error)))
            return 200, _encoded(render_html(run, live=True))
        except Exception as error:  # a page that fails must not end the watch: the next files may be whole again
            logger.exception("The report of this state of the run failed.")
            sentence = f"{type(error).__name__}: {error}"
            return 500, _encoded(
                render_notice(self.path.name, "The report failed; it is tried again with the next log", sentence)
            )

    def server_close(self) -> None:
        self.closing.set()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):  # the reader left
            super().handle_error(request, client_address)


def _encoded(page: str) -> bytes:
    return page.encode(errors="replace")


class _Handler(BaseHTTPRequestHandler):
    server: Watcher
    server_version, sys_version = "trl-consistent", ""
    timeout = 30

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def do_GET(self) -> None:
        # Another site may point its own name at this machine, to have a reader's browser read this page for it.
        if self.server.is_local and not self._is_addressed():
            self._answer(403, f"This page is for this machine only: open {self.server.url}")
            return
        target = unquote(self.path.partition("?")[0])
        if target == "/":
            status, page = self.server.page()
            self._answer(status, page, "text/html; charset=utf-8")
        elif target == "/events":
            self._tell_news()
        elif target.startswith("/records/"):
            self._send_record(target.removeprefix("/records/"))
        else:
            self._answer(404, "There is no such page.")

    do_HEAD = do_GET

    def _is_addressed(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        try:
            return len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in (
                "localhost",
                self.server.server_address[0],
            )
        except ValueError:
            return False

    def _refuse_method(self) -> None:
        self._answer(405, "This server only answers GET and HEAD.", Allow="GET, HEAD")

    def _tell_news(self) -> None:
        """A line now and for every change, until either side leaves."""
        self._head(200, "text/event-stream")
        told, quiet = "", 0
        while self.command != "HEAD":
            state = self.server.state()
            quiet = 0 if state != told else quiet + 1
            if state != told:
                self.wfile.write(f"data: {state}\n\n".encode())
            elif quiet % _KEEP_ALIVE == 0:
                self.wfile.write(b":\n\n")  # fails once the page is closed
            told = state
            if self.server.closing.wait(self.server.pause):
                break

    def _send_record(self, name: str) -> None:
        """One of the run's records: a name is looked up, never joined to a path; links that lead out are not followed."""
        file = self.server.records().get(name)
        try:
            if not (file and file.is_file() and file.resolve().is_relative_to(self.server.path.resolve())):
                raise FileNotFoundError
            with file.open("rb") as content:
                self._head(
                    200,
                    "application/octet-stream",
                    Content_Length=str(os.fstat(content.fileno()).st_size),
                    Content_Disposition=f'attachment; filename="{name}"',
                )
                if self.command != "HEAD":
                    shutil.copyfileobj(content, self.wfile)
        except FileNotFoundError:
            self._answer(404, "This run has no such record.")

    def _answer(
        self, status: int, content: bytes | str, kind: str = "text/plain; charset=utf-8", **headers: str
    ) -> None:
        content = content.encode() if isinstance(content, str) else content
        self._head(status, kind, Content_Length=str(len(content)), **headers)
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: int, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Says nothing: the terminal is where the URL stands."""
