"""Rates of remote files of a local web server with latency: python -m benchmarks.remote."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import pinfeed

LATENCY_S = 0.02
ROW_BYTES = 4096
MIB = 1 << 20


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    path_of_file = Path()
    count: Any = None

    def do_HEAD(self) -> None:
        self._start(200, self.path_of_file.stat().st_size)

    def do_GET(self) -> None:
        time.sleep(LATENCY_S)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found is not None
        begin, end = int(found[1]), int(found[2]) + 1
        with self.count.get_lock():
            self.count.value += 1
        with self.path_of_file.open("rb") as file:
            file.seek(begin)
            self._start(206, end - begin, f"bytes {begin}-{end - 1}/*")
            self.wfile.write(file.read(end - begin))

    def _start(self, status: int, n: int, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(n))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Write nothing."""


def serve(path: Path, ports: Any, count: Any) -> None:
    Handler.path_of_file = path
    Handler.count = count
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ports.put(server.server_port)
    server.serve_forever()


def main(nbytes: int) -> None:
    context = get_context("spawn")
    ports, count = context.Queue(), context.Value("q", 0)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.npy"
        array = np.random.default_rng(0).integers(0, 256, (nbytes // ROW_BYTES, ROW_BYTES), "u1")
        np.save(path, array)
        server = context.Process(target=serve, args=(path, ports, count))
        server.start()
        try:
            url = f"http://127.0.0.1:{ports.get()}/x.npy"
            small = pinfeed.Config(cpu_memory_limit=192 * MIB, preferred_batch_size=256)
            for shuffle in (False, True):
                for name, options in (
                    ("default", {"batch_size": 256}),
                    ("limit 192 MiB", {"config": small}),
                ):
                    count.value = 0
                    with pinfeed.Feeder(url, shuffle=shuffle, device="cpu", **options) as feeder:
                        begin = time.perf_counter()
                        total = sum(int(batch[:, 0].sum()) for batch in feeder)
                        elapsed = time.perf_counter() - begin
                    assert total == int(array[:, 0].sum()), "other rows"
                    print(
                        f"shuffle={shuffle!s:5} {name:14} {nbytes / elapsed / 1e6:6.0f} MB/s, "
                        f"{count.value:6,} requests"
                    )
        finally:
            server.terminate()
            server.join()


if __name__ == "__main__":
    main(int(sys.argv[1]) * MIB if len(sys.argv) > 1 else 384 * MIB)
