"""Transfers and steps at the same time: which of them slows the other one, by mover and step."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, Samples, as_rows, wait
from benchmarks.gpu.conditions import clocks
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.gpu.steady import between_s, mark
from benchmarks.gpu.steps import IMAGE, Products, resnet_step
from pinfeed.stores.host_rows import StoreRows

_ROW_BYTES = (512, 4096, 65_536)
_BATCH_BYTES = 32 << 20
_N_ROUNDS = 4
# Every measurement begins after the same pause and takes as long, so power and clocks are equal.
_PAUSE_S = 0.05
_DUTY_S = 0.06
_IMAGES = 128
ENGINE, NOTHING = "copy engine", "nothing"

Work = Callable[[], object]


def slowdowns(run: Run) -> list[Cell]:
    """Return cells of movers beside steps. The copy engine should come out at 1.00 for both.

    The cells of no mover show how much the ratios of one measurement scatter.
    """
    shared = functools.cache(lambda: Together(run))
    blocks = [(f"{n} blocks", n) for n in (8, 32, 1, 4, 16)]
    few = [(NOTHING, 0), (ENGINE, 0), *blocks[:2]]
    steps = ("products of 4096", "products of 8192", "ResNet-18")
    combinations = [
        *((512, step, mover) for step in steps for mover in few),
        *((4096, steps[0], mover) for mover in blocks),
        *((65_536, steps[0], mover) for mover in blocks[:2]),
        *((512, steps[0], mover) for mover in blocks[2:]),
    ]
    return [
        Cell(
            {"row_nbytes": row_nbytes, "step": step, "by": by},
            functools.partial(
                lambda *arguments: shared().measure(*arguments), row_nbytes, step, n, by
            ),
        )
        for row_nbytes, step, (by, n) in combinations
    ]


class Together:
    """Transfers in the read stream, and steps in the current one."""

    def __init__(self, run: Run) -> None:
        self.device = run.device
        self.bench = bench = Bench(run.device)
        self._memory = bench.words((2 << 30) if run.cuda else (4 << 20))
        self._nbytes = _BATCH_BYTES if run.cuda else (256 << 10)
        self._duty_s, self._pause_s = (_DUTY_S, _PAUSE_S) if run.cuda else (0.002, 0.0)
        self._n_rounds = _N_ROUNDS if run.cuda else 1
        self._samples = functools.cache(self._make_samples)
        self._steps = functools.cache(self._make_step)

    def measure(self, row_nbytes: int, step_name: str, n_blocks: int, by: str) -> Fields:
        """Time transfers and steps alone and together, in turn, each for equally long.

        Returns:
            Milliseconds of one transfer and of one step alone, the ratios of their times together
            to those alone (medians of rounds), and the time of both to the longer one.
        """
        step = self._steps(step_name)
        move = self._mover(row_nbytes, n_blocks, by)
        n_steps = self._count(step)
        n_moves = self._count(move) if move else 0
        rounds: list[dict[str, float]] = []
        conditions = []
        for _ in range(1 + self._n_rounds):
            steps_s, _ = self._timed(None, 0, step, n_steps)
            both_steps_s, both_moves_s = self._timed(move, n_moves, step, n_steps)
            conditions.append(clocks())
            moves_s = self._timed(move, n_moves, None, 0)[1] if move else 0.0
            rounds.append(
                {
                    "step_ms": steps_s / n_steps * 1e3,
                    "step_during_to_alone": both_steps_s / steps_s,
                    "both_to_longer": max(both_steps_s, both_moves_s) / max(steps_s, moves_s),
                }
                | (
                    {
                        "move_ms": moves_s / n_moves * 1e3,
                        "move_during_to_alone": both_moves_s / moves_s,
                    }
                    if move
                    else {}
                )
            )
        # The first round loads code.
        del rounds[0], conditions[0]
        medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        return {
            "n_blocks": n_blocks,
            **{name: round(value, 4) for name, value in medians.items()},
            "step_rounds": [round(one["step_during_to_alone"], 3) for one in rounds],
            "conditions": conditions,
        }

    def _timed(
        self, move: Work | None, n_moves: int, step: Work | None, n_steps: int
    ) -> tuple[float, float]:
        """Return the seconds of all steps, and of all moves; both begin together."""
        bench = self.bench
        wait(bench.device.name)
        time.sleep(self._pause_s)
        start = mark(self.device)
        # The moves are queued first: a host that is slow must not let the steps end before them.
        move_end = self._queue(move, n_moves, start)
        for _ in range(n_steps):
            if step is not None:
                step()
        step_end = mark(self.device)
        return between_s(start, step_end), between_s(start, move_end)

    def _queue(self, move: Work | None, n_moves: int, start: Any) -> Any:
        """Queue moves after ``start``, and return the point at which they end."""
        if move is None:
            return start
        if not self.bench.cuda:
            for _ in range(n_moves):
                move()
            return mark(self.device)
        self.bench.read.raw.wait_event(start)
        for _ in range(n_moves):
            move()
        end = torch.cuda.Event(enable_timing=True)
        end.record(self.bench.read.raw)
        return end

    def _count(self, work: Work) -> int:
        """Return how often work is queued so that it takes the seconds of the duty."""
        for _ in range(2):
            work()
        wait(self.bench.device.name)
        begin = time.perf_counter()
        for _ in range(3):
            work()
        wait(self.bench.device.name)
        return max(2, round(self._duty_s / ((time.perf_counter() - begin) / 3)))

    def _mover(self, row_nbytes: int, n_blocks: int, by: str) -> Work | None:
        if by == NOTHING:
            return None
        bench, samples = self.bench, self._samples(row_nbytes)
        if by == ENGINE:
            sample, into = samples.pairs[0]
            staged = bench.device.staging(samples.nbytes).view(np.int64).reshape(sample.shape)
            return functools.partial(bench.device.copy, staged, into, bench.read)

        def gather() -> None:
            bench.use_route(n_blocks)
            samples.gather()

        return gather

    def _make_samples(self, row_nbytes: int) -> Samples:
        store = as_rows(self._memory, row_nbytes)
        rng = np.random.default_rng(0)
        count = self._nbytes // row_nbytes
        chosen: Sequence[np.ndarray] = [rng.permutation(store.n_rows)[:count] for _ in range(4)]
        return Samples(self.bench, [StoreRows(store, rows) for rows in chosen])

    def _make_step(self, name: str) -> Work:
        if name != "ResNet-18":
            products = Products(self.device, int(name.rpartition(" ")[2]))
            return functools.partial(products, 4 if products.n < 8192 else 1)
        n = _IMAGES if self.device == "cuda" else 1
        images = torch.randint(256, (n, *IMAGE), dtype=torch.uint8, device=self.device)
        return functools.partial(resnet_step(self.device, n), images)
