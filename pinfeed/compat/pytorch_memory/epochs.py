"""Epochs of batches that functions read: each read anew, a batch ahead, on the host as they were made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pinfeed.compat.pytorch_memory.config import Config
from pinfeed.errors import ArgumentError
from pinfeed.feeders.functions import ReaderFeeder, wrap_readers
from pinfeed.tensors.numpy_torch import memory_of
from pinfeed.training.memory_model.tensor_specs import SampleSpec

Apply = Callable[[Iterator[Any]], Any]
Read = Callable[[Any], Iterable[Any]]


class Epoch(Iterator[tuple[Any, Any]]):
    """One pass over the data: ``(X, Y)`` for each batch.

    Nothing runs before the first one is asked for, or after the last one.

    Args:
        batches: Makes the batches of an epoch, given its number.
        number: Of this one.
    """

    def __init__(self, batches: Callable[[int], Iterator[tuple[Any, Any]]], number: int) -> None:
        self._make = batches
        self._batches = batches(number)

    def __next__(self) -> tuple[Any, Any]:
        return next(self._batches)

    def again(self, number: int) -> Epoch:
        """Another pass, from the beginning."""
        return Epoch(self._make, number)

    def close(self) -> None:
        """End it now. It also ends when nobody has it any more."""
        self._batches.close()  # type: ignore[attr-defined]  # a generator


class Feeder:
    """Epochs of full batches, which functions read.

    Args:
        configs: How large batches are.
        input_list: What ``read_input`` is called with, for each identity.
        output_list: What ``get_output`` is called with; as many.
        read_input: Gives the input samples of an identity, ``one_read_count`` of them.
        get_output: Gives its output samples, as many.
        apply_on_input_batch: Makes a batch of an iterator over its input samples. Without it they
            are stacked.
        apply_on_output_batch: The same for output samples.
        shuffle: Identities come in another order in every epoch.
        seed: Of the shuffle.
        device: None for batches as they are made; else they are copied there: ``"cuda"``,
            ``"auto"``, ``"cpu"``.

    Raises:
        ArgumentError: Lists that do not belong together, or have not even a batch; what cannot be
            called.
    """

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
        self._n_epochs = 0
        self._reading = _Reading(
            configs, _listed(input_list), _listed(output_list), read_input, get_output, apply_on_input_batch, apply_on_output_batch,
            shuffle, seed, device, drop_last=True,
        )  # fmt: skip
        n_identities = len(self._reading.inputs)
        if n_identities < configs.sample_count_in_single_batch:
            raise ArgumentError(
                f"input_list has {n_identities} identities, a full batch {configs.sample_count_in_single_batch}, so there would be none; "
                f"give Config total_sample_count={n_identities}, or read with generate_epoch, which has what remains, too"
            )

    def generate_epochs(self, epoch_count: int = 1) -> Iterator[Epoch]:
        """So many epochs, each read when it is iterated.

        With ``shuffle`` they go on where the last call's ended.
        """
        for _ in range(epoch_count):
            number = self._n_epochs
            self._n_epochs = self._n_epochs + 1
            yield Epoch(self._reading, number)


def generate_epoch(
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
) -> Epoch:
    """One epoch, as of a ``Feeder``, and with a last batch that may not be full."""
    return Epoch(
        _Reading(
            configs, _listed(input_list), _listed(output_list), read_input, get_output, apply_on_input_batch, apply_on_output_batch,
            shuffle, seed, device, drop_last=False,
        ),
        0,
    )  # fmt: skip


def multiply_epochs(
    epoch_generator: Iterable[Any], epoch_count: int = 2
) -> Iterator[Iterator[Any]]:
    """So many epochs, each read anew.

    Args:
        epoch_generator: What ``generate_epoch`` returned; or anything that can be iterated again: a
            list, a DataLoader.
        epoch_count: How many.

    Raises:
        ArgumentError: It can be iterated once only, so that its batches would have to be kept.
    """
    if isinstance(epoch_generator, Epoch):
        return map(epoch_generator.again, range(epoch_count))
    if isinstance(epoch_generator, Iterator) or not hasattr(epoch_generator, "__iter__"):
        raise ArgumentError(
            f"multiply_epochs: got a {type(epoch_generator).__name__}, which can be read once, and its batches would have to be kept; give "
            "what generate_epoch returned (and change batches in the loop, or in apply_on_…), or what can be iterated again"
        )
    return (iter(epoch_generator) for _ in range(epoch_count))


class _Made:
    """What a function of the user's has made of a batch: nobody looks into it, and it stays where it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class _Reading:
    """What is read, and how. It is checked when it is made."""

    configs: Config
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    read_input: Read
    get_output: Read
    apply_on_input_batch: Apply | None
    apply_on_output_batch: Apply | None
    shuffle: bool
    seed: int
    device: Any
    drop_last: bool

    def __post_init__(self) -> None:
        self._feeder(None).close()

    def __call__(self, number: int) -> Iterator[tuple[Any, Any]]:
        """The batches of an epoch."""
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        with self._feeder(stream) as feeder:
            feeder.set_epoch(number)
            # Neither keeps a batch.
            yield from feeder if self.device is not None else map(_as_made, feeder)

    def _feeder(self, stream: Any) -> ReaderFeeder:
        apply = {"input": self.apply_on_input_batch, "output": self.apply_on_output_batch}
        samples = {"input": (self.configs.input_samples,), "output": self.configs.output_samples}
        dtypes = {
            kind: _one_dtype(samples[kind]) if made is None else None
            for kind, made in apply.items()
        }
        if self.device is None:
            apply = {
                kind: _made_on(stream, made) if callable(made) else made
                for kind, made in apply.items()
            }
        return wrap_readers(
            self.inputs,
            self.outputs,
            read_input=self.read_input,
            get_output=self.get_output,
            batch_size=self.configs.batch_size,
            one_read_count=self.configs.one_read_count,
            apply_on_input_batch=apply["input"],
            apply_on_output_batch=apply["output"],
            input_dtype=dtypes["input"],
            output_dtype=dtypes["output"],
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last,
            depth=self.configs.depth,
            device="cpu" if self.device is None else self.device,
        )


def _made_on(stream: Any, apply: Apply) -> Apply:
    """``apply``, as if it were called in the loop's thread, whose work on the GPU then comes after it."""

    def made(samples: Iterator[Any]) -> _Made:
        with torch.cuda.stream(stream):
            # None changes nothing
            return _Made(apply(samples))

    return made


def _as_made(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    x, y = (part.value if isinstance(part, _Made) else memory_of(part) for part in batch)
    return x, y


def _one_dtype(samples: Sequence[SampleSpec]) -> Any:
    """Of stacked samples; None for that which they have."""
    dtypes = {dtype for each in samples for dtype in each.dtypes}
    return dtypes.pop() if len(dtypes) == 1 else None


def _listed(identities: Iterable[Any]) -> Any:
    """What can be asked for each identity, again and again."""
    return identities if isinstance(identities, (Sequence, np.ndarray)) else list(identities)
