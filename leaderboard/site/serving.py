"""Built pages over HTTP, to this machine alone: its own names, its own files, few connections at once."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR, socket
from typing import Any, Final

from bench.errors import UsageError
from bench.leaderboard.site.pages import MARK

_MOST: Final = 64
"""Connections at once; one more is closed at once."""
_SECONDS: Final = 10.0
"""A connection lives no longer, however slowly it sends; a deadline for each read would not end it."""
_POLICY: Final = "default-src 'none'; style-src 'self'; img-src 'self' data:; script-src 'self'"
"""That of the pages themselves (`templates/base.html.j2`); `frame-ancestors` counts in a header alone."""


class _Handler(SimpleHTTPRequestHandler):
    extensions_map = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".svg": "image/svg+xml",
        ".js": "text/javascript",
    }

    def parse_request(self) -> bool:
        """Refuses names of other hosts: by one of theirs a page elsewhere could read what lies here."""
        if not super().parse_request():
            return False
        name, colon, port = self.headers.get("Host", "").rpartition(":")
        if not colon:
            name, port = port, "80"
        if name in ("127.0.0.1", "localhost") and port == str(self.connection.getsockname()[1]):
            return True
        self.send_error(421, "this server has the names 127.0.0.1 and localhost alone")
        return False

    def send_head(self) -> Any:
        """Refuses links, which lead out of the site, and listings of folders."""
        path, root = Path(self.translate_path(self.path)), Path(self.directory)
        path = path / "index.html" if path.is_dir() else path
        inside = [path, *path.parents][: len(path.parts) - len(root.parts)]
        if not path.is_relative_to(root) or any(part.is_symlink() for part in inside):
            self.send_error(404, "there is no such page")
            return None
        return super().send_head()

    def list_directory(self, path: Any) -> Any:
        """A folder without a page of its own has none."""
        self.send_error(404, "there is no such page")

    def end_headers(self) -> None:
        """Adds that nothing is kept, that types are as told, and what a page may do."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", f"{_POLICY}; frame-ancestors 'none'")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


class Server(ThreadingHTTPServer):
    """Holds at most `most` connections at once, each for at most `seconds`."""

    daemon_threads = True
    request_queue_size = _MOST

    def __init__(self, address: tuple[str, int], handler: Any, most: int, seconds: float) -> None:
        self.seconds = seconds
        self._free = threading.BoundedSemaphore(most)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection, if there is one to spare."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection until its deadline."""
        deadline = threading.Timer(self.seconds, _closed, [request])
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of connections that broke off."""


def _closed(connection: socket) -> None:
    """Ends what a thread waits for, reading or writing."""
    with suppress(OSError):  # it may have ended by itself
        connection.shutdown(SHUT_RDWR)


def server(out: Path, port: int, most: int = _MOST, seconds: float = _SECONDS) -> Server:
    """A server of built pages on 127.0.0.1.

    Args:
        out: Folder of the pages.
        port: 0 is any that is free.
        most: Connections at once.
        seconds: That a connection may last.

    Raises:
        UsageError: If there are no pages, or the port is taken.
    """
    if not (out / MARK).is_file():
        raise UsageError(f"{out} holds no board: bench board build --out {out}")
    try:
        handler = partial(_Handler, directory=os.path.abspath(out))
        return Server(("127.0.0.1", port), handler, most, seconds)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--port {port}: {getattr(error, 'strerror', None) or error}") from None
