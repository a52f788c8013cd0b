"""A process that has loaded torch, and forks a child for every program that it is given.

Loading torch takes longer than most programs of the tests. The children load pinfeed anew, run the
program as ``__main__``, and end as a Python interpreter ends.

Run as ``python fork_server.py DESCRIPTOR``, with a socket that ``programs.py`` writes to.
"""

import array
import gc
import importlib
import json
import os
import socket
import sys
import warnings
from types import CodeType
from typing import Any

MAX_BYTES = 1 << 18
"""Largest size of a request."""


def request_of(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a request with the descriptors of its output and errors; nothing at the end."""
    message, ancillary, _, _ = channel.recvmsg(MAX_BYTES, socket.CMSG_SPACE(8))
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    return json.loads(message) if message else {}, list(descriptors)


def program_of(channel: socket.socket) -> CodeType:
    """Serve requests; return the program to run, in every child and only there."""
    while True:
        request, descriptors = request_of(channel)
        if not request:
            os._exit(0)
        child = os.fork()
        if not child:
            channel.close()
            return prepared(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.sendall(str(child).encode())
        channel.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def prepared(request: dict[str, Any], descriptors: list[int]) -> CodeType:
    """Turn this process into a new interpreter, and return its compiled program."""
    # The tests end the group of a program that hangs.
    os.setsid()
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["warnings"]:
        sys.warnoptions.append(request["warnings"])
        warnings.simplefilter(request["warnings"])
    path = request["path"]
    sys.path[0] = os.path.dirname(path)
    sys.argv = [path or "-c", *request["arguments"]]
    names = vars(sys.modules["__main__"])
    for name in set(names) - {"__builtins__", "__name__"}:
        del names[name]
    if path:
        names["__file__"] = path
    return compile(request["source"], path or "<string>", "exec")


if __name__ == "__main__":
    # The first optimizer, and DistributedDataParallel, import torch._dynamo.
    for _name in ("torch", "torch.utils.data"):
        importlib.import_module(_name)
    gc.freeze()
    exec(program_of(socket.socket(fileno=int(sys.argv[1]))))
