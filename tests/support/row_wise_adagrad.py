"""Row-wise Adagrad, as FBGEMM and DLRM publish it."""

from typing import Any

import torch


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one number for each row if gradients are sparse, and plain Adagrad otherwise.

    Like DLRM's, it makes its state in the very first step, and records this in an attribute.
    """

    def __init__(self, params: Any, lr: float, eps: float = 1e-10, weight_decay: float = 0) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        self.has_begun = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        self.has_begun = True

    def _update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state = weight.grad, self.state[weight]
        assert gradient is not None
        if not gradient.is_sparse:
            if not self.has_begun:
                state["sum"] = torch.zeros_like(weight)
            state["sum"].addcmul_(gradient, gradient)
            weight.addcdiv_(gradient, state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])
            return
        if group["weight_decay"]:
            raise RuntimeError("no weight decay of sparse gradients")
        if not self.has_begun:
            state["momentum"] = torch.zeros(len(weight), device=weight.device)
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        state["momentum"][rows] += values.square().mean(1)
        scale = state["momentum"][rows].sqrt().add_(group["eps"])
        weight.index_add_(0, rows, (values / scale[:, None]).to(weight.dtype), alpha=-group["lr"])
