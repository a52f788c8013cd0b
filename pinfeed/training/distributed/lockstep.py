"""Lockstep: ranks agree on each step before they take it, so no rank waits for a missing one.

Every exchange begins with a message from each rank to every rank. If a rank has failed or left, or
is about to take another step, these messages inform all ranks, and all raise an error.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.errors import RankError, described


class RankStep(Enum):
    """The step that a rank is about to take, or the reason why it takes no step.

    Each has a description with the number of the batch and of the table.
    """

    BEGIN = "begins a loop over its sharded tables"
    NEXT = "takes batch {}"
    STEP = "calls step() in batch {} (for table {} and the tables exchanged with it)"
    END = "ends its loop"
    READ = "reads rows"
    EXPORT = "exports a table"
    SAVE = "saves a checkpoint"
    RESUME = "resumes from a checkpoint"
    BATCH = "has a batch {}"
    ROWS = "sends the rows of batch {}"
    NO_BATCH = "has no batch {}"
    # After one of the following, the rank takes no further step.
    FAILED = "failed"
    BAD_BATCH = "failed at batch {}"
    LEFT = "left its loop at batch {}"


_STEPS = list(RankStep)
"""Every step, at its number in messages."""
_ENDS = {RankStep.FAILED, RankStep.BAD_BATCH, RankStep.LEFT}

_MAX_REASON = 2000  # characters
# A message consists of step, batch, table, length of the reason in bytes, further numbers. All
# ranks must send the same first three.
_N_AGREED = 3
_N_HEADER = 4


class Channel(Protocol):
    """Exchanges of bytes between ranks.

    Every rank makes the same exchanges in the same order, one at a time.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_to_all(
        self, sent: torch.Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> torch.Tensor:
        """Send rows of a uint8 tensor, shape (n, row_nbytes), and receive rows from all ranks.

        Args:
            sent: Rows on the host or on the device, in the order of their target ranks.
            n_sent: Number of rows for each rank.
            n_received: Number of rows from each rank.

        Returns:
            The received rows, in the order of their source ranks.

        Raises:
            RuntimeError: If a rank has died, or the timeout has passed.
        """
        ...


class Lockstep:
    """The messages and exchanges of the ranks on a channel, used by one thread at a time.

    Args:
        channel: The channel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.rank = channel.rank
        self.size = channel.size
        self.is_over = True
        """Whether no loop is running, or all ranks know that the loop has ended."""
        # The batch of the last message.
        self._batch = 0
        # Further numbers in each message.
        self._n_numbers = 1
        self.sent: Counter[str] = Counter()
        """Bytes that this rank has sent to other ranks, by kind."""

    def begin(self, n_numbers: int) -> None:
        """Begin a loop in which every message has ``n_numbers`` further numbers, instead of one."""
        self.is_over = False
        self._n_numbers = n_numbers

    def end(self) -> None:
        """Note that all ranks know that the loop has ended."""
        self.is_over = True
        self._n_numbers = 1

    def agree(
        self,
        step: RankStep,
        batch: int = 0,
        table: int = 0,
        *,
        numbers: npt.ArrayLike = (0,),
        reason: str = "",
    ) -> npt.NDArray[np.int64]:
        """Send the next step to all ranks, and check that all ranks take the same step.

        Args:
            step: Step that this rank is about to take.
            batch: Number of the batch.
            table: Number of the table.
            numbers: Further numbers for each rank, shape (size, n) or (n,) for every rank the same.
                All ranks give equally many, at most ``n_numbers``.
            reason: Text that errors add to the step.

        Returns:
            The further numbers from each rank, shape (size, n).

        Raises:
            RankError: If not all ranks take the same step.
        """
        # A bytearray, because torch accepts only writable memory.
        text = np.frombuffer(bytearray(reason[:_MAX_REASON].encode()), np.uint8)
        self._batch = batch
        given = np.asarray(numbers)
        stop = _N_HEADER + given.shape[-1]
        message = np.zeros((self.size, _N_HEADER + self._n_numbers), np.int64)
        message[:, :_N_HEADER] = _STEPS.index(step), batch, table, len(text)
        message[:, _N_HEADER:stop] = given
        one = [1] * self.size
        found = self._exchange_message(message.view(np.uint8), one, one).view(np.int64)
        n_bytes = found[:, _N_AGREED].tolist()
        reasons = [""] * self.size
        if any(n_bytes):
            sent = np.tile(text, self.size)[:, None]
            texts = self._exchange_message(sent, [len(text)] * self.size, n_bytes)[:, 0]
            split = np.split(texts, np.cumsum(n_bytes)[:-1])
            reasons = [one.tobytes().decode() for one in split]
        agreed = found[:, :_N_AGREED]
        if step in _ENDS or (agreed != agreed[0]).any():
            self.end()
            raise RankError(_difference(agreed.tolist(), reasons))
        return found[:, _N_HEADER:stop]

    def leave(self, step: RankStep, reason: str, batch: int | None = None) -> None:
        """Inform the other ranks that this rank stops; their loops end with an error.

        Nothing is sent if all ranks know that the loop has ended.
        """
        if self.is_over:
            return
        # This rank already has its own error to raise.
        with contextlib.suppress(RankError):
            self.agree(step, self._batch if batch is None else batch, reason=reason)

    @contextlib.contextmanager
    def report_failure(self) -> Iterator[None]:
        """Inform the other ranks, which wait for this rank, if the block raises an error."""
        try:
            yield
        except RankError:
            # The other ranks already know the error.
            raise
        except Exception as error:
            with contextlib.suppress(RankError):
                self.agree(RankStep.FAILED, reason=repr(error))
            raise

    @contextlib.contextmanager
    def no_report(self) -> Iterator[None]:
        """Run a block on which all ranks have agreed, and send no message if it raises an error.

        The other ranks would mistake the message for the bytes that they expect in this step.
        """
        try:
            yield
        except BaseException:
            self.end()
            raise

    def exchange_rows(
        self,
        kind: str,
        rows: Sequence[torch.Tensor],
        n_sent: Sequence[Sequence[int]],
        n_received: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """Exchange rows of several tables at once.

        Args:
            kind: Kind of the rows, for ``sent`` and for errors.
            rows: Rows of each table, shape (n, dim), in the order of their target ranks.
            n_sent: For each table, the number of rows for each rank.
            n_received: For each table, the number of rows from each rank.

        Returns:
            The received rows of each table, in the order of their source ranks.
        """
        row_nbytes = [of_table.shape[1] * of_table.itemsize for of_table in rows]
        nbytes_sent = _nbytes_by_rank(n_sent, row_nbytes)
        nbytes_received = _nbytes_by_rank(n_received, row_nbytes)
        parts = [
            of_table.reshape(-1).view(torch.uint8).split(list(lengths))
            for of_table, lengths in zip(rows, zip(*nbytes_sent, strict=True), strict=True)
        ]
        sent = torch.cat([part for for_rank in zip(*parts, strict=True) for part in for_rank])
        received = self._exchange_bytes(
            kind, sent[:, None], [*map(sum, nbytes_sent)], [*map(sum, nbytes_received)]
        )
        received_parts = received[:, 0].split([*itertools.chain(*nbytes_received)])
        return [
            torch.cat(received_parts[i :: len(rows)])
            .view(of_table.dtype)
            .view(sum(n_received[i]), of_table.shape[1])
            for i, of_table in enumerate(rows)
        ]

    def _exchange_message(
        self, sent: npt.NDArray[np.uint8], n_sent: Sequence[int], n_received: Sequence[int]
    ) -> npt.NDArray[Any]:
        message = torch.from_numpy(sent)
        return self._exchange_bytes("control bytes", message, n_sent, n_received).numpy()

    def _exchange_bytes(
        self, kind: str, sent: torch.Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> torch.Tensor:
        """Exchange rows of bytes, shape (n, row_nbytes), as ``Channel.all_to_all`` does.

        Raises:
            RankError: If a rank has died, or the timeout has passed.
        """
        self.sent[kind] += (sum(n_sent) - n_sent[self.rank]) * sent.shape[1]
        try:
            return self._channel.all_to_all(sent, n_sent, n_received)
        except RuntimeError as error:
            self.end()
            raise RankError(
                f"rank {self.rank} of {self.size} lost the other ranks in an exchange of {kind}: "
                f"{described(error)}"
            ) from error
        except BaseException:
            # An interrupt, before or after the exchange. Another rank could mistake a message for
            # rows.
            self.end()
            raise


def _nbytes_by_rank(counts: Sequence[Sequence[int]], row_nbytes: Sequence[int]) -> list[list[int]]:
    """Return the bytes for each rank and table, from the numbers of rows by table and rank."""
    nbytes: list[list[int]] = (np.array(counts).T * np.array(row_nbytes)).tolist()
    return nbytes


def _difference(messages: Sequence[Sequence[int]], reasons: Sequence[str]) -> str:
    """Return an error message with the step of each rank and the remedy."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, ((step, *numbers), reason) in enumerate(zip(messages, reasons, strict=True)):
        text = _STEPS[step].value.format(*numbers) + (f" ({reason})" if reason else "")
        ranks_by_text.setdefault(text, []).append(rank)
    who = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in ranks_by_text.items()
    )
    steps = {_STEPS[step] for step, *_ in messages}
    if steps == {RankStep.BATCH, RankStep.NO_BATCH}:
        return (
            f"{who}; expected the same number of batches on every rank; use a DistributedSampler, "
            "which pads or drops, or drop_last=True"
        )
    if steps & {RankStep.BAD_BATCH, RankStep.LEFT}:
        return f"{who}; all steps before that count on every rank"
    if RankStep.FAILED in steps:
        return who
    if steps == {RankStep.BEGIN}:
        return f"{who}; expected the same tables, optimizers and depth on every rank"
    return (
        f"{who}; expected all ranks to take the same steps in the same order, independent of the "
        "contents of their batches"
    )
