"""A server for tests on this machine that answers without waits of its own."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

POLL = 0.02
"""Seconds after which a closed server notices it."""


class LocalHandler(BaseHTTPRequestHandler):
    """A handler that keeps connections and says nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for an ACK

    def log_message(self, *_: object) -> None: ...


class LocalServer(ThreadingHTTPServer):
    """A server that runs in a thread from the start."""

    daemon_threads = True
    request_queue_size = (
        64  # beyond the usual 5, a connection is tried again after a second
    )

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        super().__init__(address, handler)
        threading.Thread(target=self.serve_forever, args=(POLL,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
