"""A driver without streams, whose launches call functions, and kernels without a compiler."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.sim_engine import MOVES

from pinfeed.devices import kernels
from pinfeed.devices.cuda_driver import CudaDriver
from pinfeed.devices.kernels import N_BLOCKS, NAMES
from pinfeed.native.driver import DriverTable
from pinfeed.native.engine import Engine
from pinfeed.native.library import library
from pinfeed.native.row_moves import RowMove, RowMoves

Run = Callable[[str, int, int, np.ndarray], int]
"""Runs the kernel of a name with blocks, threads of a block, and its argument."""


class Launching:
    """A driver without streams, whose launches run kernels that were compiled for the CPU.

    Args:
        run: Runs a kernel.

    Attributes:
        launched: Name of the kernel of each launch.
        arguments: Argument of each launch.
        n_blocks: Blocks of each launch.
        n_copies: Number of copies.
    """

    def __init__(self, run: Run) -> None:
        kinds = {
            "create": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint],
            "copy": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p],
            "launch": [
                *(ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p),
                *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
            ],
        }
        names = "push pop exchange_capture_mode create destroy record wait query sync copy launch"
        self._run = run
        self.names = list(NAMES)
        self.launched: list[str] = []
        self.arguments: list[Any] = []
        self.n_blocks: list[int] = []
        self.n_copies = 0
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *kinds.get(name, [ctypes.c_void_p] * 2))(
                getattr(self, f"_{name}", lambda *_: 0)
            )
            for name in names.split()
        }
        self.table = DriverTable.of(0, self._functions)
        self.address = self.table.address

    def move_rows(self, stream: int, move: RowMove) -> None:
        found = library()
        assert found is not None
        CudaDriver(self.table, found, torch.device("cuda", 0)).move_rows(stream, move)

    def start(self, engine: Engine, n_threads: int) -> None:
        engine.start(n_threads)

    def raise_error(self, code: int) -> None:
        raise AssertionError(f"error {code}")

    def _copy(self, to: int, source: int, nbytes: int, stream: int | None) -> int:
        self.n_copies += 1
        ctypes.memmove(to, source, nbytes)
        return 0

    def _launch(self, kernel: int, *rest: Any) -> int:
        n_blocks, _, _, n_threads, *_, arguments, _ = rest
        name = self.names[kernel - 1]
        self.launched.append(name)
        self.n_blocks.append(n_blocks)
        moves = np.frombuffer(ctypes.string_at(arguments[0], MOVES.itemsize), np.uint8).copy()
        self.arguments.append(moves.view(MOVES)[0])
        return self._run(name, n_blocks, n_threads, moves)


class Module:
    """Kernels by name, whose handles are numbers."""

    def __init__(self, index: int, source: str, options: Any, names: Any) -> None:
        self._names = list(names)

    def handle(self, name: str) -> int:
        return 1 + self._names.index(name)


def moves_of(
    stores: Any, kind: Any, *rest: Any, n_blocks: int = N_BLOCKS, **options: Any
) -> RowMoves:
    """Return moves of the rows of stores by kernels whose handles are numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CudaModule", Module)
        stored = stores if isinstance(stores, dict) else dict(enumerate(stores))
        made = kernels.RowKernels(0)
        made.n_blocks = n_blocks
        return made.moves(kind, stored, *rest, **options)
