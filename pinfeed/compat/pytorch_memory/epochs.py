"""Epochs of batches that the user's functions read, ahead of the loop and anew in each epoch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pinfeed.compat.pytorch_memory.config import Config
from pinfeed.errors import ArgumentError
from pinfeed.feeders.reader_feeder import ReaderFeeder, wrap_readers
from pinfeed.tensors.numpy_torch import memory_of
from pinfeed.training.memory_model.tensor_specs import SampleSpec
from pinfeed.validation.arguments import whole_number

Apply = Callable[[Iterator[Any]], Any]
Read = Callable[[Any], Iterable[Any]]


class Epoch(Iterator[tuple[Any, Any]]):
    """One pass over the data, as an iterator over batches ``(X, Y)``.

    Reading begins with the first ``next()`` and ends with the last batch.

    Examples:
        >>> from pinfeed.compat.pytorch_memory import Config, GiB, generate_epoch
        >>> shapes = {"input_shape": (8,), "output_shape": (1,)}
        >>> limits = {"cpu_memory_limit": GiB(1), "gpu_memory_limit": GiB(1)}
        >>> sizes = {"total_sample_count": 64, "preferred_batch_size": 16}
        >>> config = Config(**limits, **shapes, **sizes, model_class=torch.nn.Linear(8, 1))
        >>> read_input, get_output = lambda i: [np.full(8, i)], lambda i: [[i]]
        >>> epoch = generate_epoch(config, range(64), range(64), read_input, get_output)
        >>> [x.shape for x, y in epoch]
        [(16, 8), (16, 8), (16, 8), (16, 8)]

    Args:
        batches: Function that returns the batches of an epoch, given its number.
        number: Number of this epoch.
    """

    def __init__(self, batches: Callable[[int], Iterator[tuple[Any, Any]]], number: int) -> None:
        self._read = batches
        self._batches = batches(number)

    def __next__(self) -> tuple[Any, Any]:
        return next(self._batches)

    def again(self, number: int) -> Epoch:
        """Return another pass over the data, with another epoch number."""
        return Epoch(self._read, number)

    def close(self) -> None:
        """End the epoch now; otherwise it ends with the last batch or its garbage collection."""
        self._batches.close()  # type: ignore[attr-defined]  # a generator


class Feeder:
    """Epochs of full batches that the user's functions read.

    Examples:
        >>> from pinfeed.compat.pytorch_memory import Config, Feeder, GiB
        >>> shapes = {"input_shape": (8,), "output_shape": (1,)}
        >>> limits = {"cpu_memory_limit": GiB(1), "gpu_memory_limit": GiB(1)}
        >>> sizes = {"total_sample_count": 64, "preferred_batch_size": 16}
        >>> config = Config(**limits, **shapes, **sizes, model_class=torch.nn.Linear(8, 1))
        >>> read_input, get_output = lambda i: [np.full(8, i)], lambda i: [[i]]
        >>> feeder = Feeder(config, range(64), range(64), read_input, get_output)
        >>> sum(1 for epoch in feeder.generate_epochs(2) for x, y in epoch)
        8

    Args:
        configs: Config that determines the batch size.
        input_list: The argument of ``read_input`` for each identity.
        output_list: The argument of ``get_output`` for each identity.
        read_input: Function that returns the ``one_read_count`` input samples of an identity.
        get_output: Function that returns the ``one_read_count`` output samples of an identity.
        apply_on_input_batch: Function that makes a batch from an iterator over its input samples.
            None stacks the samples.
        apply_on_output_batch: The same for output samples.
        shuffle: Whether to shuffle the identities, in another order in every epoch. The orders
            are the same in every run with the same ``seed``.
        seed: Seed of the shuffle.
        device: Device to which batches are copied: ``"cuda"``, ``"auto"`` or ``"cpu"``. None
            leaves them as the functions return them.

    Raises:
        ArgumentError: If the lists differ in length or have fewer samples than a batch, or if a
            function cannot be called.
    """

    _drop_last = True

    def __init__(
        self,
        configs: Config,
        input_list: Iterable[Any],
        output_list: Iterable[Any],
        read_input: Read,
        get_output: Read,
        apply_on_input_batch: Apply | None = None,
        apply_on_output_batch: Apply | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        device: Any = None,
    ) -> None:
        self.configs = configs
        self._epoch_numbers = itertools.count()
        self._device = device
        self._apply = (apply_on_input_batch, apply_on_output_batch)
        inputs = _as_sequence(input_list)
        outputs = _as_sequence(output_list)
        if self._drop_last:
            # This check is first, because the reader warns about epochs without batches.
            _check_full_batch(configs, inputs, outputs)
        self._wrap_readers = functools.partial(
            wrap_readers,
            inputs,
            outputs,
            read_input=read_input,
            get_output=get_output,
            batch_size=configs.batch_size,
            one_read_count=configs.one_read_count,
            input_dtype=_common_dtype((configs.input_samples,), apply_on_input_batch),
            output_dtype=_common_dtype(configs.output_samples, apply_on_output_batch),
            shuffle=shuffle,
            seed=seed,
            drop_last=self._drop_last,
            depth=configs.depth,
            device="cpu" if device is None else device,
        )
        # A first reader checks the arguments.
        self._reader(None).close()

    def generate_epochs(self, epoch_count: int = 1) -> Iterator[Epoch]:
        """Yield ``epoch_count`` epochs; each one is read when it is iterated.

        With ``shuffle``, the orders continue those of the last call.

        Raises:
            ArgumentError: If ``epoch_count`` is not a whole number, or is negative.
        """
        n = whole_number(epoch_count, "epoch_count", least=0)
        return (Epoch(self._batches, next(self._epoch_numbers)) for _ in range(n))

    def _batches(self, number: int) -> Iterator[tuple[Any, Any]]:
        """Read the batches of an epoch."""
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        with self._reader(stream) as reader:
            reader.set_epoch(number)
            # A loop variable here would keep a batch alive while the next one is read.
            yield from reader if self._device is not None else map(_unwrap, reader)

    def _reader(self, stream: Any) -> ReaderFeeder:
        on_input, on_output = (
            _opaque_on(stream, function)
            if self._device is None and callable(function)
            else function
            for function in self._apply
        )
        return self._wrap_readers(apply_on_input_batch=on_input, apply_on_output_batch=on_output)


class _AllSamplesFeeder(Feeder):
    """Epochs of all samples; the last batch may be smaller."""

    _drop_last = False


def generate_epoch(configs: Config, *args: Any, **options: Any) -> Epoch:
    """Return one epoch of all samples; the last batch may be smaller.

    The arguments are those of ``Feeder``.
    """
    return next(_AllSamplesFeeder(configs, *args, **options).generate_epochs())


def multiply_epochs(
    epoch_generator: Iterable[Any], epoch_count: int = 2
) -> Iterator[Iterator[Any]]:
    """Return ``epoch_count`` epochs, each read anew.

    Args:
        epoch_generator: An epoch from ``generate_epoch``, or any iterable that can be iterated
            again, such as a list or a DataLoader.
        epoch_count: Number of epochs.

    Raises:
        ArgumentError: If ``epoch_generator`` can be iterated only once.
    """
    if isinstance(epoch_generator, Epoch):
        return map(epoch_generator.again, range(epoch_count))
    if isinstance(epoch_generator, Iterator) or not hasattr(epoch_generator, "__iter__"):
        raise ArgumentError(
            f"multiply_epochs: got a {type(epoch_generator).__name__}, which can be iterated only "
            "once; give an epoch from generate_epoch (and change batches in the loop, or in "
            "apply_on_…), or an iterable that can be iterated again, such as a list"
        )
    return (iter(epoch_generator) for _ in range(epoch_count))


class _OpaqueBatch:
    """A batch from the user's function, which pinfeed neither inspects nor copies."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _opaque_on(stream: Any, apply: Apply) -> Apply:
    """Return ``apply`` with its GPU work in the loop's stream, so that the loop's work follows it.

    With ``stream=None``, the current stream stays.
    """

    def make_batch(samples: Iterator[Any]) -> _OpaqueBatch:
        with torch.cuda.stream(stream):
            return _OpaqueBatch(apply(samples))

    return make_batch


def _unwrap(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return a batch with the values of the user's functions, or with arrays of stacked samples."""
    x, y = (part.value if isinstance(part, _OpaqueBatch) else memory_of(part) for part in batch)
    return x, y


def _common_dtype(samples: Sequence[SampleSpec], apply: Apply | None) -> Any:
    """Return the dtype for stacked samples.

    None keeps the dtypes of the samples, if they differ, or if ``apply`` makes the batch.
    """
    dtypes = {dtype for each in samples for dtype in each.dtypes}
    return dtypes.pop() if apply is None and len(dtypes) == 1 else None


def _check_full_batch(configs: Config, inputs: Any, outputs: Any) -> None:
    """Check that the identities fill one batch. The reader refuses lists that differ in length.

    Raises:
        ArgumentError: If there are too few identities.
    """
    n_identities = len(inputs)
    if n_identities == len(outputs) and n_identities < configs.sample_count_in_single_batch:
        raise ArgumentError(
            f"input_list has {n_identities} identities; expected at least "
            f"{configs.sample_count_in_single_batch}, one full batch; give Config "
            f"total_sample_count={n_identities}, or read with generate_epoch, which also yields "
            "the remaining samples"
        )


def _as_sequence(identities: Iterable[Any]) -> Any:
    """Return the identities as a sequence or an array."""
    return identities if isinstance(identities, (Sequence, np.ndarray)) else list(identities)
