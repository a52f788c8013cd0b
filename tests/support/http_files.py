"""HttpFiles: a web server with files in memory, on this machine."""

from __future__ import annotations

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpFiles(ThreadingHTTPServer):
    """Web server that answers requests of ranges, after a delay.

    Args:
        latency_s: Time before each answer, in seconds.
    """

    request_queue_size = 256
    daemon_threads = False

    def __init__(self, latency_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.latency_s = latency_s
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        """Headers of all answers, such as an ETag."""
        self.ignores_ranges = False
        self.short_answers = 0
        """Number of the next answers that lack their last byte."""
        self.requests: list[tuple[int, int]] = []
        """First byte of each request of a range, and the byte after its last one."""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def handle_error(self, *args: Any) -> None:
        """Ignore clients that close a connection."""

    def __enter__(self) -> HttpFiles:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Otherwise, the end of an answer waits for the client.
    disable_nagle_algorithm = True
    server: HttpFiles

    def setup(self) -> None:
        super().setup()
        # The thread of an idle connection ends soon after the client closes it.
        self.connection.settimeout(5)

    def do_HEAD(self) -> None:
        content = self.server.files.get(self.path[1:])
        self._start(404 if content is None else 200, len(content or b""))

    def do_GET(self) -> None:
        server = self.server
        time.sleep(server.latency_s)
        content = server.files.get(self.path[1:])
        if content is None:
            self._start(404, 0)
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None or server.ignores_ranges:
            self._start(200, len(content))
            self.wfile.write(content)
            return
        begin, end = int(found[1]), int(found[2]) + 1
        server.requests.append((begin, end))
        place = f"bytes {begin}-{end - 1}/{len(content)}"
        part = memoryview(content)[begin:end]
        if server.short_answers:
            server.short_answers -= 1
            part = part[:-1]
        self._start(206, len(part), {"Content-Range": place})
        self.wfile.write(part)

    def _start(self, status: int, n: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**self.server.headers, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(n))
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Write nothing."""
