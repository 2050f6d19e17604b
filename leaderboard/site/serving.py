"""Built pages over HTTP, to this machine alone."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.errors import UsageError
from bench.leaderboard.site.pages import MARK


class _Handler(SimpleHTTPRequestHandler):
    extensions_map = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".svg": "image/svg+xml",
        ".js": "text/javascript",
    }

    def end_headers(self) -> None:
        """Adds that nothing is kept, and that types are as told."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def server(out: Path, port: int) -> ThreadingHTTPServer:
    """A server of built pages on 127.0.0.1.

    Raises:
        UsageError: If there are no pages, or the port is taken.
    """
    if not (out / MARK).is_file():
        raise UsageError(f"{out} holds no board: bench board build --out {out}")
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, directory=str(out)))
    except (OSError, OverflowError) as error:
        raise UsageError(f"--port {port}: {getattr(error, 'strerror', None) or error}") from None
