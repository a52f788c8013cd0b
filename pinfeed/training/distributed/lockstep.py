"""Lockstep: ranks that say what they are about to do before they do it together, so that none waits for one that does not come.

Every exchange begins with a word from each rank to each. Where one has failed or left, or is about
to do something else, all of them hear it in the same exchange, and raise.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.errors import RankError, described

Numbers = npt.NDArray[np.int64]

MOST_FLAGS = 62
"""How many flags go with a word."""


class Step(IntEnum):
    """What a rank is about to do, or has done."""

    BEGIN = 0
    NEXT = 1
    STEP = 2
    END = 3
    READ = 4
    EXPORT = 5
    SAVE = 6
    RESUME = 7
    BATCH = 8
    ROWS = 9
    NO_BATCH = 10
    # And above: nothing follows.
    FAILED = 11
    BAD_BATCH = 12
    LEFT = 13


_SAID = {
    Step.BEGIN: "begins a loop over its sharded tables",
    Step.NEXT: "takes batch {}",
    Step.STEP: "calls step() in batch {}, of table {} and those with it",
    Step.END: "ends its loop",
    Step.READ: "reads rows",
    Step.EXPORT: "exports a table",
    Step.SAVE: "saves a checkpoint",
    Step.RESUME: "resumes from a checkpoint",
    Step.BATCH: "has a batch {}",
    Step.ROWS: "sends the rows of batch {}",
    Step.NO_BATCH: "has no batch {}",
    Step.FAILED: "failed",
    Step.BAD_BATCH: "failed at batch {}",
    Step.LEFT: "left its loop at batch {}",
}
_MOST_REASON = 2000  # characters
# Numbers: word, batch, table; bytes of the reason, flags.
_SAME, _SENT_TO_EACH = 3, 5


class Channel(Protocol):
    """Exchanges of bytes among ranks.

    Every rank makes the same ones in the same order, one at a time.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_to_all(
        self, sent: torch.Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> torch.Tensor:
        """Send rows of a tensor of uint8, shape (n, row_nbytes), to the ranks, rank 0 first; what they send, likewise.

        Args:
            sent: On the host or on the device.
            n_sent: Rows for each rank.
            n_received: Rows from each rank, as they send them.

        Raises:
            RuntimeError: A rank is gone, or was waited for too long.
        """
        ...


class Lockstep:
    """What the ranks say and send to each other on a line. Used by one thread at a time.

    Args:
        line: The line.
    """

    def __init__(self, line: Channel) -> None:
        self._line = line
        self.rank = line.rank
        self.size = line.size
        self.over = True
        """Whether all ranks know that the loop has ended, or none is under way."""
        # That was spoken of last; that go with a word.
        self._batch = 0
        self._n_numbers = 0
        self.sent: Counter[str] = Counter()
        """Bytes that this rank has sent to others, by what they were."""

    def begin(self, n_numbers: int = 0) -> None:
        """A loop begins, in which so many numbers go with every word."""
        self.over = False
        self._n_numbers = n_numbers

    def end(self) -> None:
        """All ranks know that the loop has ended."""
        self.over = True
        self._n_numbers = 0

    def meet(
        self,
        word: Step,
        batch: int = 0,
        table: int = 0,
        *,
        numbers: Numbers | None = None,
        flags: int = 0,
        why: str = "",
    ) -> tuple[Numbers, int]:
        """Say a word, and hear that of all others.

        Args:
            word: What this rank is about to do.
            batch: At which.
            table: Of which.
            numbers: More for each rank, shape (size, n_numbers).
            flags: Bits.
            why: What errors say beside it.

        Returns:
            The numbers from each rank, shape (size, n_numbers); and the bits that are set on one
            rank at least.

        Raises:
            RankError: Not all say the same.
        """
        # torch takes what can be written.
        reason = np.frombuffer(bytearray(why[:_MOST_REASON].encode()), np.uint8)
        self._batch = batch
        said = np.empty((self.size, _SENT_TO_EACH + self._n_numbers), np.int64)
        said[:, :_SENT_TO_EACH] = word, batch, table, len(reason), flags
        said[:, _SENT_TO_EACH:] = 0 if numbers is None else numbers
        one = [1] * self.size
        heard = self.send("words", said.view(np.uint8), one, one).view(np.int64)
        n_reasons, reasons = heard[:, _SAME].tolist(), [""] * self.size
        if any(n_reasons):
            texts = self.send(
                "words", np.tile(reason, self.size)[:, None], [len(reason)] * self.size, n_reasons
            )
            reasons = [
                text.tobytes().decode() for text in np.split(texts[:, 0], np.cumsum(n_reasons)[:-1])
            ]
        if word >= Step.FAILED or (heard[:, :_SAME] != heard[0, :_SAME]).any():
            self.end()
            raise RankError(_difference(heard[:, :_SAME].tolist(), reasons))
        return heard[:, _SENT_TO_EACH:], int(np.bitwise_or.reduce(heard[:, _SAME + 1]))

    def leave(self, word: Step, why: str, batch: int | None = None) -> None:
        """Tell the others that this rank does not go on, unless all know that the loop is over; for them it ends with an error."""
        if self.over:
            return
        with contextlib.suppress(RankError):
            # This rank has an error of its own.
            self.meet(word, self._batch if batch is None else batch, why=why)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others, who wait for this rank, if what is done here fails."""
        try:
            yield
        except RankError:
            raise  # they know
        except Exception as error:
            with contextlib.suppress(RankError):
                self.meet(Step.FAILED, why=repr(error))
            raise

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """Do what all have agreed on.

        Who fails now cannot tell: what he says, the others would take for what they wait for.
        """
        try:
            yield
        except BaseException:
            self.end()
            raise

    def send(
        self,
        what: str,
        sent: npt.NDArray[np.uint8],
        n_sent: Sequence[int],
        n_received: Sequence[int],
    ) -> npt.NDArray[np.uint8]:
        """As ``send_tensor``, of arrays on the host."""
        received: npt.NDArray[np.uint8] = self.send_tensor(
            what, torch.from_numpy(sent), n_sent, n_received
        ).numpy()
        return received

    def counts(self, counts: Sequence[int]) -> list[int]:
        """Tell each rank a number, and hear one of each."""
        one, numbers = [1] * self.size, np.array(counts, np.int64).view(np.uint8).reshape(-1, 8)
        heard: list[int] = self.send("words", numbers, one, one).view(np.int64)[:, 0].tolist()
        return heard

    def send_rows(
        self,
        what: str,
        rows: Sequence[torch.Tensor],
        n_sent: Sequence[Sequence[int]],
        n_received: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """Send rows of several tables in one exchange.

        Args:
            what: They are.
            rows: Of each table, shape (n, dim): those for rank 0 first, and so on.
            n_sent: For each table, how many for each rank.
            n_received: For each table, how many from each rank.

        Returns:
            What has come, for each table likewise.
        """
        row_nbytes = [of_table.shape[1] * of_table.itemsize for of_table in rows]
        out, back = (
            [
                [n * nbytes for n, nbytes in zip(of_rank, row_nbytes, strict=True)]
                for of_rank in zip(*counts, strict=True)
            ]
            for counts in (n_sent, n_received)
        )
        parts = [
            of_table.reshape(-1).view(torch.uint8).split([n * nbytes for n in counts])
            for of_table, counts, nbytes in zip(rows, n_sent, row_nbytes, strict=True)
        ]
        sent = torch.cat([part for for_rank in zip(*parts, strict=True) for part in for_rank])
        received = self.send_tensor(what, sent[:, None], [*map(sum, out)], [*map(sum, back)])
        pieces = received[:, 0].split([nbytes for of_rank in back for nbytes in of_rank])
        return [
            torch.cat(pieces[i :: len(rows)])
            .view(of_table.dtype)
            .view(sum(n_received[i]), of_table.shape[1])
            for i, of_table in enumerate(rows)
        ]

    def send_tensor(
        self, what: str, sent: torch.Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> torch.Tensor:
        """Send rows of bytes, shape (n, row_nbytes), to the ranks, rank 0 first; and receive theirs.

        Raises:
            RankError: A rank is gone.
        """
        self.sent[what] += (sum(n_sent) - n_sent[self.rank]) * sent.shape[1]
        try:
            return self._line.all_to_all(sent, n_sent, n_received)
        except RuntimeError as error:
            self.end()
            raise RankError(
                f"rank {self.rank} of {self.size} lost the others while they exchanged {what}: {described(error)}"
            ) from error
        except BaseException:
            # An interrupt, before or after the exchange: nobody knows which, and what is said now
            # could be taken for rows.
            self.end()
            raise


def _difference(heard: Sequence[Sequence[int]], reasons: Sequence[str]) -> str:
    """Who said what, and what to do."""
    said: dict[str, list[int]] = {}
    for rank, ((word, *about), reason) in enumerate(zip(heard, reasons, strict=True)):
        said.setdefault(
            _SAID[Step(word)].format(*about) + (f" ({reason})" if reason else ""), []
        ).append(rank)
    who = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in said.items()
    )
    words = {word for word, *_ in heard}
    if words == {Step.BATCH, Step.NO_BATCH}:
        return f"{who}; expected equally many batches on every rank: a DistributedSampler pads or drops, and so does drop_last"
    if words & {Step.BAD_BATCH, Step.LEFT}:
        return f"{who}; what was done up to there counts, on every rank"
    if Step.FAILED in words:
        return who
    if words == {Step.BEGIN}:
        return f"{who}; expected the same tables, optimizers and depth on every rank"
    return (
        f"{who}; expected all ranks to do the same in the same order, whatever is in their batches"
    )
