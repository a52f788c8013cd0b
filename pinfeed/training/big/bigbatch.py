"""BigBatch: the gradients of a batch that does not fit on the device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ... import config as limits
from ...errors import ArgumentError, ClosedError
from ...loader import LoaderFeeder, wrap_loader
from ...memory import free_host_bytes
from .. import randomness
from ..memory.probe import is_out_of_memory
from ..memory.shapes import moved
from .check import Check, compared
from .choice import MOST_COMPARED, STRATEGIES, Chosen, Predictor, Strategy, batch_norms, choose, chunk_strategies, predictor_of, said_of
from .chunks import Cut, is_source, n_samples, pairs, part, samples_like, shapes_of, tensors
from .losses import Count, Reduction, count_of, reduction_of
from .proof import Proofs
from .recompute import recomputed
from .strategies import Accumulation, Pieces, Task, all_or_nothing, give_back, plain, two_pass

if TYPE_CHECKING:
    from .offload import Offload

_SOURCE = object()  # stands for the shapes of all that sources give


class BigBatch:
    """Trains with batches of any size: ``backward`` adds the gradients of the whole batch, in the memory of a part of it.

    Strategies:
        ``"plain"``: the whole batch at once.
        ``"accumulate"``: chunk after chunk, the next one on its way; for losses that are sums or means of terms, weighed by their number:
            torch's own (also by ``functools.partial``), and others where ``reduction`` says so.
        ``"two_pass"``: the outputs of all chunks, the loss of them, and each chunk again, with the same random numbers: for any loss.
        ``"checkpoint"``: the whole batch; parts of the model are computed again in the backward pass.
        ``"offload"``: the whole batch; what is kept for the backward pass waits on the host.
        ``"auto"``: decided at the first batch of each size, by what they take and whether they are right; ``chosen`` says why. Chunks are
            taken only where they give the gradients of the plain step on some of the first batch's samples (see ``prove``).

    Args:
        model: On the device, in the mode in which it is trained.
        loss: Called with outputs and targets; with outputs and None where there are none.
        config: Limits. A chunk is the largest that fits.
        chunk_size: Samples at a time, in place of that.
        strategy: One of the above.
        reduction: ``"mean"`` or ``"sum"`` of terms, which only the caller knows of a loss that is none of torch's.
        count: Called with targets, the number of terms that a mean is taken of. None for samples; of classes, in the first tensor of the
            targets, for those that are not ``ignore_index`` (-100), by the weight of their class.
        modules: Others that have parameters, where the loss uses them.
        autocast: The dtype of autocast for forward passes and losses.
        scaler: A ``torch.amp.GradScaler``; unscale and step are the caller's.
        prove: Compare ``"accumulate"``, ``"two_pass"`` and ``"checkpoint"`` with the plain step before they are used: at the first batch,
            and again for another shape of samples and after ``train()`` or ``eval()``. Three samples are computed, whole and in chunks of
            two and one, and the loss of six targets; outputs, gradients and what the forward pass changes are compared. ``"auto"`` takes
            another strategy or refuses where they differ; of one that was named, a warning tells. False leaves that out.

    Raises:
        ArgumentError: What cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        config: limits.Config | None = None,
        chunk_size: int | None = None,
        strategy: str = "auto",
        reduction: Reduction | None = None,
        count: Count | None = None,
        modules: Sequence[nn.Module] = (),
        autocast: torch.dtype | None = None,
        scaler: Any = None,
        prove: bool = True,
    ) -> None:
        _check_arguments(model, loss, chunk_size, strategy, reduction)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._config, self._chunk_size, self._strategy = config, chunk_size, strategy
        self._modules = (model, *([loss] if isinstance(loss, nn.Module) else []), *modules)
        self._model, self._loss, self._count, self._dtype = model, loss, count or count_of(loss), autocast
        self._scale = (lambda found: found) if scaler is None else scaler.scale
        self._found: Reduction | None = reduction or reduction_of(loss)
        self._by_shape: dict[Any, Chosen] = {}
        self._proofs = Proofs(prove, autocast)
        self._predictors: dict[Any, Predictor] = {}
        self._cut, self._is_closed = Cut(), False
        self._stream: LoaderFeeder | None = None
        self._offload: Offload | None = None
        self.chosen: Chosen | None = None
        """How the last batch was computed."""
        self.n_halved = 0
        """Chunks that did not fit, and were computed in halves."""

    def __enter__(self) -> BigBatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread that brings chunks, give page-locked memory back. Idempotent."""
        self._is_closed = True
        with contextlib.ExitStack() as stack:
            for owned in (self._stream, self._offload):
                if owned is not None:
                    stack.callback(owned.close)

    def backward(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Add the gradients of a whole batch to those that are there.

        Args:
            inputs: Tensors or numpy arrays, on the host or on the device, in any structure, as the model takes them: a tuple is
                positional arguments, a dict keyword arguments. Or a Feeder, a DataLoader or an iterator of (inputs, targets), all of whose
                batches are one; then only ``"accumulate"`` is possible, and they are cut where they are larger than a chunk.
            targets: Likewise, of the same samples.

        Returns:
            The loss of the whole batch, a tensor of shape ().

        Raises:
            ClosedError: This is closed.
            ArgumentError: Tensors of different numbers of samples; a strategy that is wrong for this model and loss.
            NotEnoughGPUMemory: Not even one sample fits.
            NotEnoughCPUMemory: Likewise, where the model is on the CPU.
        """
        if self._is_closed:
            raise ClosedError("this BigBatch is closed; make another one")
        if targets is None and is_source(inputs):
            return self._of_source(inputs)
        inputs, targets = tensors(inputs), tensors(targets)
        n = n_samples(inputs)
        if targets is not None and n_samples(targets) != n:
            raise ArgumentError(f"inputs have {n} samples and targets {n_samples(targets)}; expected equally many")
        if n == 0:
            raise ArgumentError("the batch is empty; expected at least one sample")
        self.chosen = self._choose(inputs, targets)
        return self._compute(self.chosen, inputs, targets)

    def check(self, inputs: Any, targets: Any = None, *, chunk_size: int | None = None) -> Check:
        """Compare the gradients of a small batch with those of the plain step; nothing is changed.

        Args:
            inputs: As for ``backward``; as many samples as fit on the device at once, and no more.
            targets: Likewise.
            chunk_size: For this; None for a third of the samples.

        Returns:
            How far they are apart; true as a bool if by no more than rounding.
        """
        inputs, targets = tensors(inputs), tensors(targets)
        n, strategy = n_samples(inputs), self._strategy
        if strategy == "auto":
            strategy = (self.chosen or self._choose(inputs, targets)).strategy
        chosen = self._as_told(strategy, n, chunk_size or max(1, n // 3))  # type: ignore[arg-type]
        whole, task = (self._moved(inputs), self._moved(targets)), self._task()
        return compared(task, strategy, lambda: plain(task, *whole), lambda: self._compute(chosen, inputs, targets))

    def _compute(self, chosen: Chosen, inputs: Any, targets: Any) -> torch.Tensor:
        task, size = self._task(), chosen.chunk_size
        with all_or_nothing(task):
            if chosen.strategy == "accumulate":
                total = float(n_samples(inputs) if targets is None else self._count(targets))
                if task.reduction == "mean" and not total:  # a mean of nothing: as the plain step has it, whatever that is
                    return plain(task, self._moved(part(inputs, 0, size)), self._moved(part(targets, 0, size)))
                return self._accumulated(task, self._pieces(inputs, targets, size), total, self._key(inputs, targets))
            if chosen.strategy in ("plain", "two_pass"):
                return self._again_if_it_does_not_fit(task, chosen, inputs, targets)
            with recomputed(self._model) if chosen.strategy == "checkpoint" else self._offloaded():
                return plain(task, self._moved(inputs), self._moved(targets))

    def _accumulated(self, task: Task, pieces: Pieces, total: float | None, key: Any) -> torch.Tensor:
        accumulation = Accumulation(task)
        try:
            with contextlib.closing(pieces):  # an error that somebody keeps would keep the loop over chunks, too
                return accumulation.run(pieces, total)
        finally:
            if accumulation.n_halved:  # the next batch is cut smaller at once
                self.n_halved += accumulation.n_halved
                chosen = self._by_shape.get(key)
                if chosen is not None:
                    self._by_shape[key] = dataclasses.replace(chosen, chunk_size=-(-chosen.chunk_size // 2))

    def _again_if_it_does_not_fit(self, task: Task, chosen: Chosen, inputs: Any, targets: Any) -> torch.Tensor:
        """The whole batch, or two passes; from the beginning in smaller chunks, as long as there is no memory."""
        state, size = randomness.capture(), chosen.chunk_size
        try:
            with all_or_nothing(task):
                if chosen.strategy == "plain" or size >= n_samples(inputs):
                    return plain(task, self._moved(inputs), self._moved(targets))
                return two_pass(task, functools.partial(self._pieces, inputs, targets, size), self._moved(targets))
        except (RuntimeError, MemoryError) as error:
            cannot_cut = size == 1 or self._strategy == "plain" or (chosen.strategy == "plain" and batch_norms(self._model))
            if not is_out_of_memory(error) or cannot_cut:
                raise
        # Out of the except block: until then the traceback keeps the tensors of the frames that failed.
        give_back()
        randomness.restore(state)
        self.n_halved += 1
        strategy: Strategy = "two_pass"
        if chosen.strategy == "plain":
            strategy = self._right_chunks(inputs, targets)
        smaller = dataclasses.replace(chosen, strategy=strategy, chunk_size=-(-size // 2), why="more did not fit")
        self.chosen = self._by_shape[self._key(inputs, targets)] = smaller
        return self._compute(smaller, inputs, targets)

    def _of_source(self, source: Any) -> torch.Tensor:
        if self._strategy not in ("auto", "accumulate"):
            raise ArgumentError(
                f"strategy={self._strategy!r} needs all samples at once; give the whole batch as tensors, or strategy='accumulate'"
            )
        with contextlib.ExitStack() as stack:
            batches = source
            if not hasattr(source, "batches") and not isinstance(source, LoaderFeeder):
                batches = stack.enter_context(wrap_loader(source, device=self._device, depth=1))
            coming = stack.enter_context(contextlib.closing(pairs(batches)))
            first = next(coming, None)
            if first is None:
                raise ArgumentError("there is no batch; expected at least one")
            if self._strategy == "auto" and (norms := batch_norms(self._model)):
                raise ArgumentError(
                    f"{norms[0]} normalizes over the batch, and batches that come one by one can only be added; give the whole batch as "
                    "tensors, or strategy='accumulate' for statistics of chunks"
                )
            if _SOURCE not in self._by_shape:
                self._by_shape[_SOURCE] = self._as_told("accumulate", None, self._size("accumulate", None, *first))
            if problem := self._problem_of("accumulate", *first):
                self._report("accumulate", problem)
            self.chosen, task = self._by_shape[_SOURCE], self._task()
            pieces = self._cut_pieces(itertools.chain([first], coming), self.chosen.chunk_size)
            with all_or_nothing(task):
                return self._accumulated(task, pieces, None, _SOURCE)

    def _cut_pieces(self, batches: Iterable[tuple[Any, Any]], size: int) -> Pieces:
        for inputs, targets in batches:
            for start in range(0, n_samples(inputs), size):
                # Tensors are on the device already; numpy arrays are moved here.
                x, y = (self._moved(part(batch, start, start + size)) for batch in (inputs, targets))
                yield x, y, float(n_samples(x) if y is None else self._count(y))

    def _pieces(self, inputs: Any, targets: Any, size: int) -> Pieces:
        """Chunks, on the device, one ahead."""
        if self._stream is None:
            self._stream = wrap_loader(self._cut, device=self._device, depth=1)
        self._cut.batch, self._cut.size = (inputs, targets), size
        chunks: Any = iter(self._stream)
        try:
            for start, (x, y) in zip(range(0, n_samples(inputs), size), chunks, strict=True):
                yield x, y, float(n_samples(x) if y is None else self._count(part(targets, start, start + size)))
        finally:
            chunks.close()
            self._cut.batch = None

    def _choose(self, inputs: Any, targets: Any) -> Chosen:
        key, n = self._key(inputs, targets), n_samples(inputs)
        if key not in self._by_shape:
            if self._strategy == "auto":
                predictor = None if self._config is None else self._predictor(inputs, targets)
                problem_of = functools.partial(self._problem_of, inputs=inputs, targets=targets)
                self._by_shape[key] = choose(self._model, n, self._chunk_size, self._found is not None, predictor, problem_of)
            else:
                size = self._size(self._strategy, n, inputs, targets)
                self._by_shape[key] = chosen = self._as_told(self._strategy, n, size)  # type: ignore[arg-type]
                if self._is_doubtful(chosen, n) and (problem := self._problem_of(chosen.strategy, inputs, targets)):
                    self._report(chosen.strategy, problem)
        return self._by_shape[key]

    def _is_doubtful(self, chosen: Chosen, n: int) -> bool:
        """Whether a strategy that was named may compute something else than the plain step, and nothing has warned of that yet."""
        if chosen.strategy == "checkpoint":
            return True
        return chosen.strategy in ("accumulate", "two_pass") and chosen.chunk_size < n and not batch_norms(self._model)

    def _right_chunks(self, inputs: Any, targets: Any) -> Strategy:
        """The strategy for a batch that was to be computed whole and does not fit."""
        problems: dict[str, str] = {}
        for strategy in chunk_strategies(self._found is not None):
            problems[strategy] = problem = self._problem_of(strategy, inputs, targets)
            if not problem:
                return strategy
        raise ArgumentError(
            f"the whole batch does not fit, and chunks do not give its gradients ({said_of(problems)}); give strategy='offload'"
        )

    def _problem_of(self, strategy: Strategy, inputs: Any, targets: Any) -> str:
        def most() -> int:
            is_limited = self._config is not None and self._chunk_size is None
            return MOST_COMPARED if not is_limited else self._predictor(inputs, targets).n_compared(n_samples(inputs))

        return self._proofs.problem_of(strategy, self._task(), inputs, targets, most)

    def _report(self, strategy: Strategy, problem: str) -> None:
        """Raise for a strategy that was chosen here, warn of one that was named."""
        said = f"strategy={strategy!r} does not give the gradients of the plain step: {problem}"
        if self._strategy == "auto":
            raise ArgumentError(
                f"{said}; batches that come one by one can only be added: give the whole batch as tensors, strategy='accumulate' if the "
                "difference does not matter, or prove=False"
            )
        warnings.warn(f"{said}; take strategy='auto', or give prove=False if the difference does not matter", stacklevel=5)

    def _key(self, inputs: Any, targets: Any) -> Any:
        """What a decision is made for: in another mode a model may compute otherwise."""
        return shapes_of(inputs, targets), *(module.training for module in self._model.modules())

    def _size(self, strategy: str, n: int | None, inputs: Any, targets: Any) -> int:
        """Of a chunk."""
        if strategy not in ("accumulate", "two_pass"):
            return n or 1
        if self._chunk_size is not None:
            return self._chunk_size
        if self._config is None:
            raise ArgumentError("neither chunk_size nor a config with a limit was given; give one of them")
        return self._predictor(inputs, targets).chunk_size(n, in_two_passes=strategy == "two_pass")

    def _as_told(self, strategy: Strategy, n: int | None, chunk_size: int) -> Chosen:
        """``n`` is None for a source, which tells its samples at its end."""
        size = (n or 1) if strategy not in ("accumulate", "two_pass") else chunk_size if n is None else min(n, chunk_size)
        if (n is None or size < n) and (norms := batch_norms(self._model)):
            warnings.warn(
                f"{norms[0]} normalizes over chunks of {size} samples, not over the whole batch: gradients and running statistics are "
                "those of the chunks; 'offload' and 'checkpoint' see the whole batch",
                stacklevel=4,
            )
        if strategy == "accumulate" and self._found is None:
            raise ArgumentError(
                "the loss is none of torch's, so it is not known how that of a batch is made of those of its chunks; give reduction='mean' "
                "or 'sum' if it is made so (and count= if it is a mean of other things than samples or classes), or strategy='two_pass'"
            )
        why = "batches that come one by one can only be added" if n is None else "it was asked for"
        return Chosen(strategy, size, why, {})

    def _predictor(self, inputs: Any, targets: Any) -> Predictor:
        key = samples_like(inputs).key, targets is not None and samples_like(targets).key, *batch_norms(self._model)
        if key not in self._predictors:
            assert self._config is not None
            self._predictors[key] = predictor_of(
                self._model, self._config, self._device, inputs, targets, loss=self._loss, autocast=self._dtype
            )
        return self._predictors[key]

    def _task(self) -> Task:
        return Task(self._model, self._loss, self._modules, self._found or "sum", self._count, self._context, self._scale)

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def _moved(self, batch: Any) -> Any:
        return moved(batch, self._device)

    def _offloaded(self) -> contextlib.AbstractContextManager[Any]:
        if self._offload is None:
            from .offload import Offload

            limit = None if self._config is None else self._config.host_limit(free_host_bytes())
            self._offload = Offload(self._device, host_limit=limit)
        return self._offload.step(*self._modules)


def _check_arguments(model: Any, loss: Any, chunk_size: int | None, strategy: str, reduction: str | None) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={model!r}: expected a torch module")
    if not callable(loss):
        raise ArgumentError(f"loss={loss!r}: expected a function of outputs and targets")
    if chunk_size is not None and (not hasattr(chunk_size, "__index__") or chunk_size < 1):
        raise ArgumentError(f"chunk_size={chunk_size!r}: expected a whole number, at least 1")
    if strategy != "auto" and strategy not in STRATEGIES:
        raise ArgumentError(f"strategy={strategy!r}: expected 'auto', {', '.join(map(repr, STRATEGIES))}")
    if reduction not in (None, "mean", "sum"):
        raise ArgumentError(f"reduction={reduction!r}: expected 'mean', 'sum' or None")
