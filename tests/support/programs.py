"""Programs that the tests run in a process of their own, by a server that has loaded torch."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from support import fork_server

ROOT = Path(__file__).parents[2]
WITHOUT_A_NETWORK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}
"""Environment of ranks on one machine, which may have no other network interface.

Even a single rank of NCCL opens a socket, and by default searches for InfiniBand first.
"""


class Program:
    """A running program.

    Args:
        pid: Its process, which leads a process group.
        channel: Socket that gets its exit status.
    """

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel

    def wait(self, timeout_s: float = 60) -> int:
        """Return the exit status; negative if a signal has ended the program.

        Raises:
            TimeoutError: If it runs longer than ``timeout_s``. It is killed, with all processes
                that it has started.
        """
        self._channel.settimeout(timeout_s)
        try:
            return int(self._channel.recv(100))
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._channel.settimeout(None)
            self._channel.recv(100)
            raise
        finally:
            self._channel.settimeout(None)


class Programs:
    """Runs programs one after the other, each in a process forked from one that has loaded torch.

    Use it for programs that need torch anyway. Those that show what is imported, or how, need
    ``subprocess``.

    Args:
        channel: Socket of ``fork_server.py``.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def start(
        self,
        program: str | Path,
        *arguments: object,
        stdout: IO[Any],
        stderr: IO[Any],
        warnings: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Program:
        """Start a program.

        Args:
            program: Source, or path of a script.
            *arguments: Arguments of the program, for ``sys.argv``.
            stdout: File for its output.
            stderr: File for its errors.
            warnings: Action on a warning, as for ``warnings.simplefilter``; ``"error"`` raises it.
            environment: Environment in place of that of this process.
        """
        is_script = isinstance(program, Path)
        request = {
            "source": program.read_text() if isinstance(program, Path) else program,
            "path": str(program) if is_script else "",
            "arguments": list(map(str, arguments)),
            "warnings": warnings,
            "environment": dict(os.environ if environment is None else environment),
            "folder": os.getcwd(),
        }
        socket.send_fds(
            self._channel, [json.dumps(request).encode()], [stdout.fileno(), stderr.fileno()]
        )
        return Program(int(self._channel.recv(100)), self._channel)

    def run(
        self, program: str | Path, *arguments: object, timeout_s: float = 60, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, and return its exit status and all that it has written."""
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            running = self.start(program, *arguments, stdout=stdout, stderr=stderr, **options)
            status = running.wait(timeout_s)
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(
                [str(program), *map(str, arguments)], status, stdout.read(), stderr.read()
            )


@contextlib.contextmanager
def served() -> Iterator[Programs]:
    """Start the server, and end it after use."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        with there:
            process = subprocess.Popen(
                [sys.executable, str(fork_server.__file__), str(there.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, fork_server.MAX_BYTES)
        try:
            yield Programs(here)
        finally:
            # Forked processes may still hold this socket.
            here.shutdown(socket.SHUT_RDWR)
            process.wait()
