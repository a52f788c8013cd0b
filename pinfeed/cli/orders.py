"""OrderOptions: the options of the command line that select rows, their order and their batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pinfeed.rows.orders import Order


Numbers = int | tuple[int, ...]
"""One number, or one for each of several axes."""


@dataclass(frozen=True)
class OrderOptions:
    """Options for the row order; None or False if an option was not given.

    Attributes:
        shuffle: Whether all rows are shuffled.
        block_rows: Rows of a block of a block-shuffled order.
        window_blocks: Blocks of a window of this order.
        seed: Seed of all random choices.
        weights: Shares of the files in a mixture.
        offsets: File with the bounds of ragged rows.
        bucketed: Whether batches have rows of similar lengths.
        max_elements: Most elements of a padded batch.
        packed: Elements of a sequence of packed rows.
        world_size: Number of ranks that share the rows.
        length: Indices of a window, which is then a row; None for the rows of the files.
        axis: Axis of the windows, 0 by default.
        stride: Indices from one index of a window to the next, 1 by default.
        step: Indices from the beginning of one window to that of the next, 1 by default.
    """

    shuffle: bool = False
    block_rows: int | None = None
    window_blocks: int | None = None
    seed: int | None = None
    weights: tuple[float, ...] | None = None
    offsets: str | None = None
    bucketed: bool = False
    max_elements: int | None = None
    packed: int | None = None
    world_size: int | None = None
    length: Numbers | None = None
    axis: Numbers | None = None
    stride: Numbers | None = None
    step: Numbers | None = None

    @property
    def windows(self) -> dict[str, Numbers]:
        """The arguments of ``windows``; empty for the rows of the files."""
        if self.length is None:
            return {}
        given = {"axis": self.axis, "stride": self.stride, "step": self.step}
        defaults: dict[str, Numbers] = {"axis": 0, "length": self.length, "stride": 1, "step": 1}
        return defaults | {name: value for name, value in given.items() if value is not None}

    @property
    def by_length(self) -> str:
        """The option that makes batches by the lengths of rows; empty without one."""
        return next(iter(self._by_length), "")

    @property
    def _by_length(self) -> list[str]:
        given = {
            "--bucketed": self.bucketed,
            "--max-elements": self.max_elements,
            "--packed": self.packed,
        }
        return [name for name, value in given.items() if value]

    def check(self, files: Sequence[str] = (), others: Sequence[str] = ()) -> None:
        """Check that the options do not conflict.

        Args:
            files: Names of the files or quoted patterns, as they were given.
            others: Further sources.

        Raises:
            click.UsageError: If two options conflict, or one has no effect.
        """
        if self.shuffle and self.block_rows is not None:
            raise click.UsageError("--shuffle and --block-rows conflict; give one of them")
        if self.window_blocks is not None and self.block_rows is None:
            raise click.UsageError(
                f"--window-blocks {self.window_blocks} has no effect without --block-rows; give it"
            )
        is_random = self.shuffle or self.block_rows is not None or self.weights or self.by_length
        if self.seed is not None and not is_random:
            raise click.UsageError(
                f"--seed {self.seed} has no effect without a random order; give --shuffle or "
                "--block-rows"
            )
        self._check_lengths()
        self._check_windows()
        if self.weights is not None:
            self._check_weights(files, others)

    def _check_lengths(self) -> None:
        """Check the options for the lengths of rows."""
        if len(self._by_length) > 1:
            raise click.UsageError(
                f"{' and '.join(self._by_length)} conflict, because each makes the batches; give "
                "one of them"
            )
        if self.by_length and self.offsets is None:
            raise click.UsageError(
                f"{self.by_length} needs the lengths of rows; give --offsets FILE, a .npy file "
                "with the position of each row in FILE, and the end of the last row"
            )

    def _check_windows(self) -> None:
        """Check the options for windows."""
        for name, value in (("axis", self.axis), ("stride", self.stride), ("step", self.step)):
            if value is not None and self.length is None:
                raise click.UsageError(
                    f"--{name} needs the length of windows; give --length, the number of indices "
                    "of a window"
                )
        for name, other in (("--weights", self.weights), ("--offsets", self.offsets)):
            if other is not None and self.length is not None:
                raise click.UsageError(
                    f"--length and {name} conflict, because windows are rows of one length of one "
                    "source; leave out one of them"
                )

    def _check_weights(self, files: Sequence[str], others: Sequence[str]) -> None:
        """Check the options for mixtures."""
        assert self.weights is not None
        for name, value in (("--offsets", self.offsets), ("--with", others)):
            if value:
                raise click.UsageError(
                    f"--weights and {name} conflict, because each FILE is a source of a mixture; "
                    "leave out one of them"
                )
        if len(self.weights) != len(files):
            raise click.UsageError(
                f"--weights has {len(self.weights)} weights, but there are {len(files)} FILEs; "
                'expected a weight for each; quote a pattern of shards ("web-*.npy"), so that it '
                "is one FILE"
            )
        if len(set(files)) < len(files):
            raise click.UsageError(f"--weights: a FILE occurs twice in {', '.join(files)}")

    @property
    def order(self) -> Order:
        """Order of the rows, before they are mixed, sorted or packed."""
        from pinfeed.rows.orders import block_shuffled, sequential, shuffled

        seed = self.seed or 0
        if self.block_rows is not None:
            more = {} if self.window_blocks is None else {"window_blocks": self.window_blocks}
            return block_shuffled(seed, block_rows=self.block_rows, **more)
        return shuffled(seed) if self.shuffle else sequential()

    @property
    def order_name(self) -> str:
        """Name of this order for people."""
        if self.block_rows is None:
            return "shuffled" if self.shuffle else "in sequence"
        window = f", {self.window_blocks:,} in a window" if self.window_blocks is not None else ""
        return f"shuffled in blocks of {self.block_rows:,}{window}"

    @property
    def ranks(self) -> Any:
        """The argument ``ranks`` of a feeder: the first of the ranks."""
        from pinfeed.rows.ranks import Ranks

        return None if self.world_size is None else Ranks(rank=0, world_size=self.world_size)
