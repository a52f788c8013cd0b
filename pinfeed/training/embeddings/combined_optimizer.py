"""CombinedOptimizer: RowOptimizers and optimizers of dense parameters, used as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pinfeed.errors import ArgumentError
from pinfeed.training.embeddings.optimizer import RowOptimizer


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers used as one, for example those of tables and of dense parameters.

    Its parameter groups are the groups of all optimizers, in order, as the same objects. One
    scheduler, one ``GradScaler`` and one call of gradient clipping (``optimizer.parameters()``)
    therefore serve all optimizers. ``train_rows`` uses the RowOptimizers that it contains, and
    ``pinfeed.checkpoint`` saves it together with their row-wise state.

    Examples:
        >>> users = pinfeed.HostEmbedding(1_000, 16, name="users")
        >>> model = torch.nn.Linear(16, 1)
        >>> rows = pinfeed.RowOptimizer(torch.optim.Adagrad, [users], lr=0.1)
        >>> dense = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = pinfeed.CombinedOptimizer(rows, dense)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
        >>> len(optimizer.param_groups)
        2

    Args:
        optimizers: Optimizers of different parameters and tables.

    Raises:
        ArgumentError: If no optimizer is given, one is not a torch optimizer, or two optimizers
            share a table or a parameter.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        _check(optimizers)
        first, *others = (optimizer.defaults for optimizer in optimizers)
        # OneCycleLR and CyclicLR read from the defaults which kind of momentum all groups have.
        defaults = {key: first[key] for key in first if all(key in other for other in others)}
        # Optimizer.__init__ would make new groups, but the groups are those of the optimizers.
        # torch uses __setstate__ to prepare an optimizer without __init__, for example after
        # unpickling.
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

        The parameter of a table is the rows of its current batch.
        """
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers, the RowOptimizers first.

        Args:
            closure: Function that is called first, with gradients enabled. The method returns its
                loss.

        Raises:
            ArgumentError: As for ``RowOptimizer.step``. The dense parameters then stay unchanged.
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
        """Refuse the group, because the optimizer that should get it is unknown.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            "add_param_group() of a CombinedOptimizer; expected add_param_group() of the one of "
            "its optimizers that should step the group"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers, without row-wise state, which is in stores."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned.

        Raises:
            ArgumentError: If the state is from other optimizers. No optimizer is changed then.
        """
        states = state_dict.get("optimizers", ())
        if len(states) != len(self.optimizers):
            raise ArgumentError(
                f"a state of {len(states)} optimizers; expected a state of "
                f"{len(self.optimizers)}, as state_dict() of this CombinedOptimizer returns"
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
                "and RowOptimizers as separate arguments: "
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
