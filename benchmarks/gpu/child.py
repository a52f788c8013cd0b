"""The process of one part: ``python -m benchmarks.gpu.child TARGET FILE DEVICE DEADLINE LIMIT``."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.environment import compiled_part, environment, launch_us
from benchmarks.gpu.recorder import Recorder, Run
from benchmarks.memory import free


def main() -> None:
    """Measure the cells that the function ``TARGET``, given as ``module:function``, returns."""
    target, path, device, deadline, limit = sys.argv[1:]
    # The traceback of a part that hangs is printed just before the part is killed.
    faulthandler.dump_traceback_later(max(0.1, float(limit) - 1 - time.monotonic()))
    recorder = Recorder(Path(path), float(deadline), free)
    recorder.record |= {
        "environment": environment(),
        "compiled_part": compiled_part(),
        "launch_us": launch_us(device),
    }
    if device == "cpu":
        # The reader threads need a core.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    module, name = target.split(":")
    part = getattr(importlib.import_module(module), name)
    recorder.add(part(Run(device, recorder)))
    recorder.run()


if __name__ == "__main__":
    status = 0
    try:
        main()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread or a driver that hangs at the interpreter's exit would cost the time of later parts.
    os._exit(status)
