"""InfinityBatch: the trainer of infinitybatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pinfeed.compat.infinitybatch.forward import BatchForward
from pinfeed.compat.infinitybatch.settings import InfinityBatchError, Settings, warn
from pinfeed.memory import limits
from pinfeed.training.large_batch.batches import as_tensors, n_samples
from pinfeed.training.large_batch.strategy_selector import StrategyChoice
from pinfeed.training.memory_model.tensor_specs import to_device
from pinfeed.training.trainer.evaluate import pair_of
from pinfeed.validation.arguments import whole_number


class InfinityBatch(Settings):
    """Trainer for batches of any size, in bounded memory.

    Examples:
        >>> import warnings
        >>> from pinfeed.compat import infinitybatch
        >>> warnings.simplefilter("ignore", infinitybatch.InfinityBatchWarning)  # without a GPU
        >>> loader = [(torch.randn(500, 8), torch.randn(500, 1)) for _ in range(3)]
        >>> ib = infinitybatch.InfinityBatch(torch.nn.Linear(8, 1), verbose=False, chunk_size=100)
        >>> ib.optimizer = torch.optim.Adam(ib.model.parameters())
        >>> ib.criterion, ib.dataloader = torch.nn.MSELoss(), loader
        >>> ib.train(2)

    Args:
        model: The model; the first dimension of its inputs is the batch. Like ``optimizer`` and
            ``criterion``, it can also be set later, once.
        optimizer: The optimizer of the model's parameters.
        criterion: The loss function, called with outputs and targets.
        dataloader: An iterable of pairs of inputs and targets.
        backward_device: The device of outputs, targets and losses; None for the CPU.
        verbose: Whether to print progress.
        config: Memory limits; None for the free memory.
        chunk_size: Samples per chunk; None for the largest chunk that fits.
        strategy: A strategy of ``pinfeed.BigBatch``, except for ``"accumulate"``.
        verify: Whether to compare gradients with those of the plain step, as ``pinfeed.BigBatch``
            does.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Any = None,
        criterion: Any = None,
        dataloader: Any = None,
        backward_device: torch.device | str | int | None = None,
        verbose: bool = True,
        *,
        config: limits.MemoryLimits | None = None,
        chunk_size: int | None = None,
        strategy: str = "auto",
        verify: bool = True,
    ) -> None:
        if not torch.cuda.is_available():
            warn("there is no CUDA device, so batches are computed on the CPU, in host memory", 3)
        super().__init__(BatchForward(config, chunk_size, strategy, verify), verbose)
        self._loss: torch.Tensor | None = None
        self.backward_device = backward_device
        self.dataloader = dataloader
        self.model = model
        self.optimizer = optimizer
        self.criterion = criterion

    def __call__(self, num_epochs: int) -> None:
        """Do the same as ``train``."""
        self.train(num_epochs)

    def train(self, num_epochs: int) -> None:
        """Clear the containers and train for ``num_epochs`` epochs.

        Raises:
            ArgumentError: If ``num_epochs`` is not a whole number, or is negative.
        """
        num_epochs = whole_number(num_epochs, "num_epochs", least=0)
        self.clearcontainers_()
        self._print(f"Training for {num_epochs} epochs.")
        for epoch in range(num_epochs):
            self._print(f"Epoch: {epoch + 1}/{num_epochs}")
            self.epoch()

    def epoch(self) -> None:
        """Train for one epoch.

        Raises:
            InfinityBatchError: If a setting is missing, or the dataloader yields no batch.
        """
        for name in ("model", "optimizer", "criterion", "dataloader"):
            self._required(name)
        self.updateforwarddevice()
        self.epochstart_()
        self.zero_grad()
        n_batches = n = size = 0
        for batch in self._loader:
            inputs, targets = pair_of(batch)
            size = n_samples(as_tensors(inputs))
            self._print(
                f"-- batch {n_batches}: finished with {n}, current batch size {size}.", end="\r"
            )
            self.targets[-1].append(to_device(as_tensors(targets), self.backward_device))
            self.batch_(inputs)
            n_batches += 1
            n += size
            self.loss()
            self.backward()
            self.step()
            self.zero_grad()
        if not n_batches:
            raise InfinityBatchError(
                f"dataloader={self._loader!r} yielded no batch; expected at least one"
            )
        self._containers.read_losses()
        self._print(
            f"-- Epoch finished with {n_batches} batch(es), {n} element(s) were forwarded, "
            f"last batch size was {size}."
        )

    def batch_(self, inputs: Any = None) -> Any:
        """Compute the outputs of a whole batch, on the backward device.

        Args:
            inputs: The inputs of the batch; None for the inputs that ``dataloader`` yielded last.

        Raises:
            InfinityBatchError: If there is no model, or ``dataloader`` has not yielded a batch yet.
        """
        model = self._required("model")
        if not self.inputs:
            self.epochstart_()
        if inputs is None:
            if not self.inputs[-1]:
                raise InfinityBatchError(
                    "batch_() has no inputs, because dataloader has not yielded a batch yet; "
                    "iterate ib.dataloader, or give the inputs: batch_(inputs)"
                )
            inputs = self.inputs[-1][-1]
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        outputs = self._batch_forward.outputs(
            model, inputs, self._optimizer, device, self._backward_device
        )
        if self._batch_forward.unpredicted is not None:
            warn(
                "the whole batch is computed at once, "
                f"because {self._batch_forward.unpredicted}; give chunk_size= to compute chunks",
                3,
            )
            self._batch_forward.unpredicted = None
        self.inputs[-1].append(inputs)
        self.outputs[-1].append(outputs)
        return outputs

    def loss(self) -> None:
        """Compute the loss of the last outputs and targets, for ``losses`` and ``backward``.

        Raises:
            InfinityBatchError: If there are no outputs or no targets.
        """
        if not self.outputs or not self.outputs[-1]:
            raise InfinityBatchError("loss() has no outputs; call batch_(inputs) first")
        if not self.targets[-1]:
            raise InfinityBatchError(
                "loss() has no targets; "
                "iterate ib.dataloader, or call ib.targets[-1].append(targets) first"
            )
        outputs = self.outputs[-1][-1]
        targets = to_device(self.targets[-1][-1], self._backward_device)
        loss = self._required("criterion")(outputs, targets)
        self._loss = loss
        self._containers.add_loss(loss, n_samples(outputs))

    def backward(self) -> None:
        """Run the backward pass of the last loss. Warn if there is none."""
        if self._loss is None:
            warn("backward() has no loss; call loss() first", 3)
            return
        loss = self._loss
        self._loss = None
        loss.backward()
        self._containers.detach_outputs()

    def step(self) -> None:
        """Run a step of the optimizer."""
        self._required("optimizer").step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._required("optimizer").zero_grad()

    @property
    def chosen(self) -> StrategyChoice | None:
        """The strategy that computed the last batch."""
        return self._batch_forward.chosen

    @property
    def inputs(self) -> list[Any]:
        """The inputs by epoch. The last batch is ``inputs[-1][-1]``; no other batch is kept."""
        return self._containers.inputs

    @property
    def outputs(self) -> list[Any]:
        """The outputs by epoch. The last batch is ``outputs[-1][-1]``; no other batch is kept."""
        return self._containers.outputs

    @property
    def targets(self) -> list[Any]:
        """The targets by epoch. The last batch is ``targets[-1][-1]``; no other batch is kept."""
        return self._containers.targets

    @property
    def losses(self) -> list[list[tuple[float, int]]]:
        """The loss and the number of samples of each batch, as ``losses[epoch][batch]``."""
        return self._containers.read_losses()

    def clearcontainers_(self) -> None:
        """Clear the containers."""
        self._containers.clear()

    def epochstart_(self) -> None:
        """Begin a new epoch in the containers."""
        self._containers.begin_epoch()

    def _print(self, *words: str, end: str = "\n") -> None:
        if self.verbose_mode:
            print(*words, end=end)
