"""A training run with two tables, on any device and under any schedule."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from support.random_policy import random_policy
from support.schedules import next_stream, switch
from support.simtorch import META, SimTorchDevice
from torch import nn
from torch.nn import functional

from pinfeed import ArrayStore, HostEmbedding, RowOptimizer, read_rows, train_rows

USERS, ITEMS = (12, 3), (9, 2)


class Pulled(torch.optim.Optimizer):
    """An optimizer that pulls rows back to their first values, more strongly at later steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["n"], state["norm"], state["origin"] = (
                        0,
                        torch.zeros(()),
                        p.detach().clone(),
                    )
                state["n"] += 1
                # State of the whole table that is a tensor.
                state["norm"] += 0.25
                p.sub_(p.grad, alpha=group["lr"]).lerp_(state["origin"], 1 - 0.9 ** state["n"])


SGD = torch.optim.SGD
ADAM = torch.optim.Adam
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], dict[str, float | None]]] = {
    # Class, options, and row-wise state with its initial value; None is a copy of the weights.
    "SGD": (SGD, {"lr": 0.1, "weight_decay": 0.01}, {}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, {"momentum_buffer": 0}),
    "Nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"momentum_buffer": 0}),
    "Adam": (ADAM, {"lr": 0.1}, {"exp_avg": 0, "exp_avg_sq": 0}),
    "amsgrad": (
        ADAM,
        {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1},
        {"exp_avg": 0, "exp_avg_sq": 0, "max_exp_avg_sq": 0},
    ),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}, {"exp_avg": 0, "exp_avg_sq": 0}),
    "foreach": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}, {"exp_avg": 0, "exp_avg_sq": 0}),
    "fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}, {"exp_avg": 0, "exp_avg_sq": 0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}, {"exp_avg": 0, "exp_inf": 0}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}, {"exp_avg": 0, "exp_avg_sq": 0}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1, "betas": (0.5, 0.6)}, {"exp_avg": 0, "exp_avg_sq": 0}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}, {"sum": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {}, {"square_avg": 0, "acc_delta": 0}),
    "RMSprop": (
        torch.optim.RMSprop,
        {"lr": 0.1, "centered": True, "momentum": 0.9},
        {"square_avg": 0, "grad_avg": 0, "momentum_buffer": 0},
    ),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}, {"prev": 0, "step_size": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 2}, {"ax": 0}),
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 0.1}, {"exp_avg": 0, "exp_avg_sq": 0}),
    "Pulled": (Pulled, {}, {"origin": None}),
}
Ids = list[int]
FIXED: list[tuple[Ids, Ids, Ids]] = [
    ([0, 1, 2, 1, 3], [0, 1, 0, 8, 3], [1, 0, 2, 2, 2]),
    ([4, 5, 6, 7, 8], [4, 4, 4, 4, 4], [5, 6, 7, 8, 0]),
    ([2, 1, 2], [3, 1, 7], [1, 3, 1]),
    ([9, 9], [6, 2], [2, 6]),
    ([10, 2, 0, 4], [5, 5, 1, 1], [0, 8, 8, 0]),
    ([1], [0], [0]),
    ([11, 10, 9, 11], [2, 3, 4, 5], [5, 4, 3, 2]),
    ([9, 8, 1, 0, 1], [8, 8, 8, 1, 1], [1, 1, 7, 7, 8]),
]
PLAIN: tuple[str, ...] = ("step",)
MIXED = ("step", "by hand", "twice", "nothing", "drop", "look")
"""Actions of the training steps, in turn.

"by hand" changes the rows without a step, "twice" steps twice, "drop" has gradients that no step
uses, and "look" reads a whole table between two steps, which flushes all writes so far.
"""
EVALUATING = ("step", "look up", "twice", "read rows", "by hand")
"""Actions of training steps of which some look up ``TESTS`` after each of two steps.

"look up" does so in eval mode, and "read rows" in a loop over ``read_rows`` in ``evaluating()``.
"""
TESTS = [torch.tensor([0, 1, 2, 8]), torch.tensor([[7, 3], [3, 4]]), torch.tensor([6, 5])]
"""Ids that are looked up in both tables."""


class Run:
    """One program as a loop over train_rows and as the synchronous loop.

    It trains two tables, and looks one of them up twice in a batch.

    Args:
        optimizer: Key of ``OPTIMIZERS``.
        batches: Ids of each batch.
        does: Actions of the training steps, in turn.
        stop_after: Number of batches after which the loop is left; None for all.
        switch_after: Number of batches after which the loop changes its stream after each batch.
        switch_once: Number of batches after which the loop changes its stream for good.
        switch_in: Number of the batch at whose beginning the loop changes its stream for good.
        caches: ``device_cache`` of both tables.
        policy: Seed of random decisions of the caches; None for those of the real policy.
        n_epochs: Number of loops over the batches.
    """

    def __init__(
        self,
        optimizer: str,
        batches: Sequence[tuple[Ids, Ids, Ids]] = FIXED,
        *,
        does: Sequence[str] = PLAIN,
        stop_after: int | None = None,
        switch_after: int | None = None,
        switch_once: int | None = None,
        switch_in: int | None = None,
        caches: tuple[Any, Any] = (None, None),
        policy: int | None = None,
        n_epochs: int = 1,
    ) -> None:
        self.optimizer_class, self.options, self.initial = OPTIMIZERS[optimizer]
        self.does = does
        self.stop_after = stop_after
        self.switch_after = switch_after
        self.switch_once = switch_once
        self.switch_in = switch_in
        self.caches = caches
        self.policy = policy
        self.n_epochs = n_epochs
        rng = np.random.default_rng(len(batches))
        self.tables = [rng.standard_normal(shape).astype("f4") for shape in (USERS, ITEMS)]
        self.batches = [
            {
                "user": torch.tensor(u),
                "item": (torch.tensor(a), torch.tensor(b)),
                "y": torch.from_numpy(rng.random(len(u), "f4")),
            }
            for u, a, b in batches
        ]
        self.losses: list[torch.Tensor] = []
        self.state: list[dict[str, Any]] = [{}, {}]

    @staticmethod
    def loss(
        users: Callable[..., torch.Tensor], items: Callable[..., torch.Tensor], batch: Any
    ) -> torch.Tensor:
        one, other = batch["item"]
        return (
            (users(batch["user"]).sum(1) + (items(one) * items(other)).sum(1) - batch["y"]) ** 2
        ).mean()

    def actions(self, i: int) -> tuple[bool, int, bool]:
        """Return the action of batch ``i``.

        Returns:
            Whether it changes rows by hand, how often it has gradients, and whether they are used.
        """
        what = self.does[i % len(self.does)]
        return (
            what == "by hand",
            {"step": 1, "drop": 1, "by hand": 0, "nothing": 0}.get(what, 2),
            what != "drop",
        )

    def synchronous(self) -> "Run":
        """Run the synchronous loop, which copies rows from arrays and back without pinfeed."""
        rows = [
            {k: np.full_like(t, v) if v is not None else t.copy() for k, v in self.initial.items()}
            for t in self.tables
        ]
        begun, own = False, [{}, {}]
        for i, batch in enumerate(self.n_epochs * self.batches[: self.stop_after]):
            unique = [np.unique(batch["user"]), np.unique(torch.cat(batch["item"]))]
            blocks = [
                nn.Parameter(torch.from_numpy(table[ids]))
                for table, ids in zip(self.tables, unique, strict=True)
            ]
            optimizer = self.optimizer_class(blocks, **self.options)
            if begun:
                for block, ids, kept, one in zip(blocks, unique, rows, own, strict=True):
                    optimizer.state[block] = {
                        **one,
                        **{key: torch.from_numpy(kept[key][ids]) for key in kept},
                    }
            lookups = [
                partial(lookup, block, torch.from_numpy(ids))
                for block, ids in zip(blocks, unique, strict=True)
            ]
            by_hand, n_losses, used = self.actions(i)
            if by_hand:
                with torch.no_grad():
                    blocks[0].mul_(0.5)
            for _ in range(n_losses):
                loss = self.loss(*lookups, batch)
                loss.backward()
                if self.optimizer_class is torch.optim.SparseAdam:
                    for block in blocks:
                        # All rows in order, whose sum the synchronous loop has, too.
                        block.grad = torch.sparse_coo_tensor(
                            torch.arange(len(block))[None], block.grad, check_invariants=True
                        )
                if used:
                    optimizer.step()
                optimizer.zero_grad()
                self.losses.append(loss.detach())
                what = self.does[i % len(self.does)]
                seen = [
                    torch.from_numpy(table).index_copy(0, torch.from_numpy(ids), block.detach())
                    for table, ids, block in zip(self.tables, unique, blocks, strict=True)
                ]
                if what == "look":
                    self.losses.append(seen[0])
                if what in ("look up", "read rows"):
                    self.losses += [table[ids] for ids in TESTS for table in seen]
            for table, block, ids in zip(self.tables, blocks, unique, strict=True):
                table[ids] = block.detach()
            if n_losses and used:
                begun = True
                own = [dict(optimizer.state[block]) for block in blocks]
                for one, kept, ids in zip(own, rows, unique, strict=True):
                    for key in kept:
                        kept[key][ids] = one.pop(key)
        if begun:
            self.state = [{**kept, **one} for kept, one in zip(rows, own, strict=True)]
        return self

    def fed(
        self,
        device: Any,
        depth: int,
        *,
        verify: bool = False,
        stores: Callable[[Any], Any] = ArrayStore,
    ) -> "Run":
        host = getattr(device, "host", lambda value: value.cpu().clone())
        users, items = (
            HostEmbedding(*t.shape, store=stores(t), name=name, device_cache=cache)
            for t, name, cache in zip(self.tables, ("users", "items"), self.caches, strict=True)
        )
        optimizer = RowOptimizer(self.optimizer_class, [users, items], **self.options)
        looked_up = {users: lambda batch: batch["user"], items: "item"}
        with random_policy(self.policy):
            loop = train_rows(
                self.batches,
                looked_up,
                optimizer=optimizer,
                device=device,
                depth=depth,
                verify=verify,
            )
        self.loop: Any = loop
        self.reads: Any = read_rows(
            TESTS, dict.fromkeys((users, items), lambda ids: ids), device=device, depth=depth
        )
        losses: list[torch.Tensor] = []
        with loop:
            for epoch in range(self.n_epochs):
                first = epoch * len(self.batches[: self.stop_after])
                for i, batch in enumerate(loop, first):
                    if i == self.switch_in:
                        switch(device, "another")
                        share(device, batch)
                    self.body(i, batch, users, items, optimizer, losses)
                    if i + 1 - first == self.stop_after:
                        break
                    if name := next_stream(i, self.switch_after, self.switch_once):
                        # The rows of this batch are then written back from the other stream.
                        switch(device, name)
                    # Dropped before the next batch, so that its memory can be reused.
                    del batch
        # The rows as the user reads them right after the loop.
        self.tables = [table.store.array.copy() for table in (users, items)]
        if optimizer.tables[users].is_initialized:
            own = [found["state"] for found in optimizer.state_dict()["tables"]]
            rows = [
                {r.key: s.array.copy() for r, s in zip(t.layout.rows, t.stores, strict=True)}
                for t in optimizer.tables.values()
            ]
            self.state = [{**one, **kept} for one, kept in zip(own, rows, strict=True)]
        later = self.temporaries(device, 7.0)
        self.losses = [host(loss) for loss in losses]
        self.state = [
            {key: host(v) if isinstance(v, torch.Tensor) else v for key, v in one.items()}
            for one in self.state
        ]
        if isinstance(device, SimTorchDevice):
            device.drain()
        assert all(bool((host(tensor) == 7).all()) for tensor in later), (
            "memory written after the loop had ended"
        )
        return self

    def body(
        self, i: int, batch: Any, users: Any, items: Any, optimizer: Any, losses: list[torch.Tensor]
    ) -> None:
        by_hand, n_losses, used = self.actions(i)
        if by_hand:
            with torch.no_grad():
                users.weight.mul_(0.5)
        for _ in range(n_losses):
            loss = self.loss(users, items, batch)
            loss.backward()
            if used:
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if self.does[i % len(self.does)] == "look":
                losses.append(users.read(np.arange(USERS[0])))
            losses += self.evaluated(i, users, items)
        self.temporaries(batch["y"].device, -2.0)

    def evaluated(self, i: int, users: Any, items: Any) -> list[torch.Tensor]:
        """Return what an evaluation after a step of batch ``i`` looks up."""
        what = self.does[i % len(self.does)]
        found: list[torch.Tensor] = []
        if what == "read rows":
            with self.loop.evaluating():
                for ids in self.reads:
                    found += [users(ids), items(ids)]
        if what == "look up":
            tables = nn.ModuleList([users, items]).eval()
            with torch.no_grad():
                found += [table(ids) for ids in TESTS for table in tables]
            tables.train()
        return found

    def temporaries(self, device: Any, value: float) -> list[torch.Tensor]:
        """Allocate as a model does, as much as the parts of the largest batch."""
        if isinstance(device, SimTorchDevice):
            device = META
        most = [
            max(len(batch["user"]) for batch in self.batches),
            max(len(set(torch.cat(b["item"]).tolist())) for b in self.batches),
        ]
        made = [
            torch.full((n, d), value, device=device)
            for n, d in zip(most, (3, 2), strict=True)
            for _ in range(4)
        ]
        # One is as large as the buffer that small parts share.
        made.append(torch.full((2048,), value, device=device))
        # Others are as large as the row indices.
        made += [torch.full((n,), value, device=device) for n in most]
        return made + [torch.full((n,), int(value), device=device) for n in most for _ in range(2)]


def lookup(block: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(torch.searchsorted(rows, ids), block)


def share(device: SimTorchDevice, batch: Any) -> None:
    """Keep the memory of a batch while another stream uses it, as torch requires of programs."""
    for tensor in (batch["user"], *batch["item"], batch["y"]):
        device.share(tensor, device.current_stream())


def assert_same(got: Run, want: Run) -> None:
    def same(one: Any, other: Any) -> bool:
        one, other = np.asarray(one), np.asarray(other)
        return (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())

    assert len(got.losses) == len(want.losses)
    for i, (one, other) in enumerate(zip(got.losses, want.losses, strict=True)):
        assert same(one, other), f"loss {i}"
    for name, *tables in zip(("users", "items"), got.tables, want.tables, strict=True):
        assert same(*tables), name
    for name, one, other in zip(("users", "items"), got.state, want.state, strict=True):
        assert one.keys() == other.keys(), name
        for key in one:
            assert same(one[key], other[key]), f"{name}, {key}"


def check(
    device: Any, depth: int, optimizer: str, *args: Any, verify: bool = False, **kwargs: Any
) -> None:
    got = Run(optimizer, *args, **kwargs)
    if isinstance(device, SimTorchDevice):
        with device.factories():
            got.fed(device, depth, verify=verify)
    else:
        got.fed(device, depth, verify=verify)
    assert_same(got, Run(optimizer, *args, **kwargs).synchronous())


def looked_up(n: int) -> Any:
    def some(below: int) -> Any:
        return st.lists(st.integers(0, below - 1), min_size=n, max_size=n)

    return st.tuples(some(12), some(9), some(9))
