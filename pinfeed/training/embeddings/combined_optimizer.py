"""CombinedOptimizer: RowOptimizers and optimizers of dense parameters, used as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pinfeed.errors import ArgumentError
from pinfeed.training.embeddings.optimizer import RowOptimizer


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers used as one, for example those of tables and of dense parameters.

    Its parameter groups are the groups of all optimizers, the same objects, in order. So one
    scheduler, one ``GradScaler`` and one call of gradient clipping (``optimizer.parameters()``)
    serve all of them. ``train_rows`` takes the RowOptimizers in it, and ``pinfeed.checkpoint``
    saves it with their row-wise state.

        rows = pinfeed.RowOptimizer(torch.optim.Adagrad, [users], lr=0.1)
        dense = torch.optim.Adam(model.parameters(), lr=1e-3)
        optimizer = pinfeed.CombinedOptimizer(rows, dense)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
        for batch in pinfeed.train_rows(loader, ids, optimizer=optimizer):
            ...

    Args:
        optimizers: Optimizers of different parameters and tables.

    Raises:
        ArgumentError: If there are none, one is not a torch optimizer, or two of them have a table
            or a parameter in common.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        _check(optimizers)
        first, *others = (optimizer.defaults for optimizer in optimizers)
        # OneCycleLR and CyclicLR read here which momentum all groups have.
        defaults = {key: first[key] for key in first if all(key in other for other in others)}
        # Optimizer.__init__ would make groups, which are those of the optimizers here. Without it,
        # torch prepares an optimizer, for example an unpickled one, by __setstate__.
        self.__setstate__({"defaults": defaults})
        self.optimizers = optimizers

    def __repr__(self) -> str:
        return f"CombinedOptimizer({', '.join(map(repr, self.optimizers))})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute there
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]  # an attribute there
        """A copy of the mapping of parameters to their state, for all optimizers."""
        return {key: one for optimizer in self.optimizers for key, one in optimizer.state.items()}

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all optimizers, for example to clip gradients.

        Those of tables are the rows of the current batch.
        """
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers, the RowOptimizers first.

        Args:
            closure: Function that is called first, with gradients enabled; its loss is returned.

        Raises:
            ArgumentError: As for ``RowOptimizer.step``; the dense parameters are then unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rows = row_optimizers(self)
        for optimizer in (*rows, *(one for one in self.optimizers if one not in rows)):
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse, because it is not known which optimizer should get the parameters.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            "add_param_group() of a CombinedOptimizer; expected one of its optimizers, which would "
            "step the group; call optimizer.add_param_group() of that one"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers; row-wise state is in the stores of its tables."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned.

        Raises:
            ArgumentError: If it is of other optimizers. No optimizer has changed then.
        """
        states = state_dict.get("optimizers", ())
        if len(states) != len(self.optimizers):
            raise ArgumentError(
                f"a state of {len(states)} optimizers; expected what state_dict() of a "
                f"CombinedOptimizer of {len(self.optimizers)} optimizers returned"
            )
        earlier = self.state_dict()["optimizers"]
        try:
            self._load(states)
        except BaseException:
            self._load(earlier)
            raise

    def _load(self, states: Sequence[Mapping[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(dict(state))

    def close(self) -> None:
        """Flush and close the files of row-wise state. A second call does nothing."""
        for optimizer in row_optimizers(self):
            optimizer.close()


def row_optimizers(optimizer: Any) -> list[RowOptimizer]:
    """Return the RowOptimizers among an optimizer and those that it combines."""
    combined = optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
    return [one for one in combined if isinstance(one, RowOptimizer)]


def _check(optimizers: tuple[Any, ...]) -> None:
    """Check the arguments of ``CombinedOptimizer``."""
    if not optimizers:
        raise ArgumentError(
            "CombinedOptimizer() without optimizers; expected "
            "CombinedOptimizer(row_optimizer, optimizer)"
        )
    known: set[int] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(
            optimizer, CombinedOptimizer
        ):
            raise ArgumentError(
                f"CombinedOptimizer: got a {type(optimizer).__name__}; expected torch optimizers "
                "and RowOptimizers, each as an argument of its own: "
                "CombinedOptimizer(row_optimizer, optimizer)"
            )
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        owned: list[Any] = [*row_tables(optimizer), *parameters]
        for one in owned:
            if id(one) in known:
                name = getattr(one, "name", None) or f"a parameter of shape {tuple(one.shape)}"
                raise ArgumentError(f"{name} is trained by two optimizers; expected one")
        known.update(map(id, owned))


def row_tables(optimizer: Any) -> list[Any]:
    """Return the tables that an optimizer trains."""
    return [table for one in row_optimizers(optimizer) for table in one.tables]
