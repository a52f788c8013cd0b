"""Tables to train on the host: their batches of ids, optimizer, and computation of a step."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

LR = 0.01


@dataclass(frozen=True)
class Rule:
    """An optimizer of torch.

    Args:
        dense: Class for a tensor whose gradient is dense.
        sparse: Class for a tensor whose gradient is sparse.
        state: Names of the state that each row has.
    """

    dense: type[torch.optim.Optimizer]
    sparse: type[torch.optim.Optimizer]
    state: tuple[str, ...]


OPTIMIZERS = {
    "Adam": Rule(torch.optim.Adam, torch.optim.SparseAdam, ("exp_avg", "exp_avg_sq")),
    # FBGEMM has no Adam on the CPU.
    "Adagrad": Rule(torch.optim.Adagrad, torch.optim.Adagrad, ("sum",)),
}


@dataclass(frozen=True)
class RowCell:
    """A table and its batches.

    Args:
        dim: Length of a row, of float32.
        n_ids: Ids in a batch.
        repeated: Share of the ids that repeat an id of the same batch.
        shared: Share of a batch's rows that the previous batch also has.
        table_bytes: Bytes of the table of weights. Adam's state takes twice as much, and Adagrad's
            as much.
        optimizer: Name of the optimizer, a key of ``OPTIMIZERS``.
    """

    dim: int
    n_ids: int
    repeated: float
    shared: float = 0.0
    table_bytes: int = 256 << 20
    optimizer: str = "Adam"

    @property
    def rule(self) -> Rule:
        """Classes and state of the optimizer."""
        return OPTIMIZERS[self.optimizer]

    @property
    def n_rows(self) -> int:
        return self.table_bytes // (4 * self.dim)

    def __str__(self) -> str:
        text = f"rows of {4 * self.dim} B, {self.n_ids} ids, {self.repeated:.0%} repeated"
        text += f", {self.shared:.0%} of the rows in the batch before" * bool(self.shared)
        return text + f", {self.optimizer}" * (self.optimizer != "Adam")

    def batches(self, n: int) -> list[torch.Tensor]:
        """Return the ids of each batch, int64, shape (n_ids,), the same at every call."""
        rng = np.random.default_rng(0)
        n_unique = max(1, round(self.n_ids * (1 - self.repeated)))
        n_kept = round(n_unique * self.shared)
        found = []
        rows = np.empty(0, np.int64)
        for _ in range(n):
            kept = rng.permutation(rows)[:n_kept]
            fresh = np.setdiff1d(rng.integers(self.n_rows, size=n_unique * 2), rows)
            rows = np.concatenate([kept, rng.permutation(fresh)[: n_unique - len(kept)]])
            again = rng.choice(rows, self.n_ids - len(rows))
            found.append(torch.from_numpy(rng.permutation(np.concatenate([rows, again]))))
        return found


class Body:
    """The computation of a step: a small model, and matrix products.

    ``n_products`` products simulate the rest of a large model.
    """

    def __init__(self, cell: RowCell, device: str, n_products: int = 0) -> None:
        self.device = torch.device(device)
        self._n_products = n_products
        self._model = torch.linspace(-1, 1, cell.dim, device=device)
        size = 2048 if self.device.type == "cuda" else 192
        self._a, self._b, self._c = (torch.randn(size, size, device=device) for _ in range(3))

    def loss(self, looked_up: torch.Tensor) -> torch.Tensor:
        self.products(self._n_products)
        # The gradients of the mean would be as small as Adam's eps.
        return functional.softplus(looked_up @ self._model).sum()

    def products(self, n: int) -> None:
        for _ in range(n):
            torch.mm(self._a, self._b, out=self._c)


def start(cell: RowCell) -> torch.Tensor:
    """Return the initial table, the same at every call."""
    return _drawn(cell.n_rows, cell.dim).clone()


@functools.lru_cache(maxsize=1)
def _drawn(n_rows: int, dim: int) -> torch.Tensor:
    return torch.empty(n_rows, dim).normal_(generator=torch.Generator().manual_seed(0))


def wait(body: Body) -> None:
    if body.device.type == "cuda":
        torch.cuda.synchronize()
