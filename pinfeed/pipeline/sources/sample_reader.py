"""ReaderSource: batches of samples that a user's functions read; SampleReader calls a function."""

from __future__ import annotations

import contextlib
import itertools
import reprlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pinfeed.errors import ArgumentError, StoreError, add_note
from pinfeed.pipeline.sources.sample_batch import SampleBatch
from pinfeed.pipeline.sources.sample_source import BatchesOfSamples
from pinfeed.pipeline.sources.source import HostBatch
from pinfeed.pipeline.sources.user_calls import guarded
from pinfeed.stores.host_rows import CheckStop
from pinfeed.stores.store import Array
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.tensors.pytree import flatten

Apply = Callable[[Iterator[Any]], Any]
"""Makes a batch from its samples."""

_END = object()
# Error messages show paths in full.
_SHORT = reprlib.Repr()
_SHORT.maxstring = 200
_SHORT.maxother = 200


@dataclass(frozen=True)
class SampleReader:
    """A user's function, and the arguments of its calls.

    Args:
        kind: ``"input"`` or ``"output"``.
        function: Returns the samples of an input, given one of ``values``.
        values: One value for each input.
        n_samples: Number of samples of each input.
        apply: Makes a batch from its samples; None to stack them.
        dtype: Dtype of stacked samples; None for their own dtype.
    """

    kind: str
    function: Callable[[Any], Iterable[Any]]
    values: Sequence[Any]
    n_samples: int
    apply: Apply | None
    dtype: np.dtype[Any] | None

    @property
    def function_name(self) -> str:
        """Name of the user's argument for ``function``."""
        return "read_input" if self.kind == "input" else "get_output"

    @property
    def apply_name(self) -> str:
        """Name of the user's argument for ``apply``."""
        return f"apply_on_{self.kind}_batch"

    def call(self, identity: int) -> str:
        """Return the call of the function for an input, for error messages."""
        try:
            value = _SHORT.repr(self.values[identity])
        except Exception as error:
            # The repr of a user's value failed, but the message is about another error.
            value = f"unknown ({type(error).__name__})"
        return f"{self.function_name}({self.kind}s[{identity}]), {self.kind}s[{identity}] = {value}"

    def samples(self, identity: int) -> Generator[Any, None, None]:
        """Yield the samples of an input.

        Raises:
            ArgumentError: If the number of samples is wrong, or the result is not iterable.
            Exception: If the function raised it; a note names the input.
        """
        wanted = self.n_samples
        given = self.ask(identity, lambda: self.function(self.values[identity]))
        if not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
            raise ArgumentError(
                f"{self.call(identity)}: got {type(given).__name__}; expected an iterable of "
                "samples (yield each sample)"
            )
        samples = self.ask(identity, iter, given)
        try:
            for n in range(wanted):
                if (sample := self.ask(identity, next, samples, _END)) is _END:
                    raise ArgumentError(
                        f"{self.call(identity)}: got {n} samples; expected one_read_count={wanted} "
                        "from every input"
                    )
                yield sample
                # The sample must not be held while the function makes the next one.
                del sample
            if self.ask(identity, next, samples, _END) is not _END:
                raise ArgumentError(
                    f"{self.call(identity)}: got more than {wanted} samples; expected "
                    f"one_read_count={wanted} from every input; if the function returns one "
                    "sample, return it in a list"
                )
        finally:
            if isinstance(samples, Generator):
                # The generator may hold files, so it is closed now, not when an error's traceback
                # is freed.
                samples.close()

    def read(self, identity: int, out: Array | None = None) -> Any:
        """Return the samples of an input: a list for ``apply``, or else a tensor.

        Each sample is copied into the tensor, of shape (n_samples, ...), before the function makes
        the next one.

        Args:
            identity: Index of the input.
            out: Memory to read the samples into, instead of a new tensor, which is then None.
        """
        samples = self.samples(identity)
        if self.apply is not None:
            return list(samples)
        place = out
        n = 0
        try:
            for sample in samples:
                array = self.array(sample, identity)
                if place is None:
                    place = np.empty((self.n_samples, *array.shape), self.dtype_of(array, identity))
                if array.shape != place.shape[1:] or array.dtype != place.dtype:
                    self.require_like(array, place.shape[1:], place.dtype, identity)
                self.ask(identity, np.copyto, place[n : n + 1], array, "unsafe")
                n += 1
                # The sample must not be held while the function makes the next one.
                del array, sample
        finally:
            samples.close()
        if out is not None:
            return None
        from pinfeed.tensors.numpy_torch import to_torch

        assert place is not None
        return to_torch(place)

    def require_like(
        self, sample: Any, shape: tuple[int, ...], dtype: np.dtype[Any], identity: int
    ) -> None:
        """Check that a sample has the shape and the dtype of the batch.

        Raises:
            ArgumentError: If it has not.
        """
        if sample.shape != shape:
            raise ArgumentError(
                f"{self.call(identity)}: got a sample of shape {sample.shape}; expected {shape}, "
                f"as for the first sample of the batch; for samples of several shapes, give "
                f"{self.apply_name}, for example to pad them"
            )
        if sample.dtype != dtype and self.dtype_of(sample, identity) != dtype:
            raise ArgumentError(
                f"{self.call(identity)}: got a sample of {sample.dtype}; expected {dtype}, as for "
                f"the first sample of the batch; give {self.kind}_dtype to convert them"
            )

    def batch(self, identities: Sequence[int], read: Sequence[Any]) -> Any:
        """Return a batch of what ``read`` has returned for each input."""
        if self.apply is not None:
            return self._applied(self.apply, identities, read)
        import torch

        from pinfeed.tensors.numpy_torch import memory_of

        first = memory_of(read[0])
        for identity, tensor in zip(identities, read, strict=True):
            self.require_like(memory_of(tensor)[0], first.shape[1:], first.dtype, identity)
        return torch.cat(list(read))

    def _applied(self, apply: Apply, identities: Sequence[int], read: Sequence[list[Any]]) -> Any:
        """Return a copy of the result of ``apply``, and check that it consumes all samples."""
        wanted = len(identities) * self.n_samples
        shown = f"inputs {_SHORT.repr(identities)}"
        samples = itertools.chain.from_iterable(read)
        try:
            batch = guarded(apply, samples)
        except Exception as error:
            add_note(error, f"in {self.apply_name} of {shown}")
            raise
        if n_left := sum(1 for _ in samples):
            raise ArgumentError(
                f"{self.apply_name} consumed {wanted - n_left} samples of {shown}; expected it to "
                f"consume all {wanted} before it returns, because inputs and outputs would not "
                "match otherwise"
            )
        return _copied(batch, self.apply_name)

    def array(self, sample: Any, identity: int) -> Array:
        """Convert a sample to an array."""
        if type(sample) is np.ndarray:
            return sample
        import torch

        from pinfeed.tensors.numpy_torch import to_numpy

        if not isinstance(sample, torch.Tensor):
            found: Array = self.ask(identity, np.asarray, sample)
            return found
        try:
            return to_numpy(sample.detach().resolve_conj().resolve_neg(), "a sample")
        except StoreError as error:
            raise StoreError(f"{self.call(identity)}: {error}") from None

    def dtype_of(self, array: Array, identity: int) -> np.dtype[Any]:
        """Return the dtype of a sample in the stacked batch."""
        if self.dtype is not None:
            return self.dtype
        try:
            return check_dtype(array.dtype, "a sample")
        except StoreError as error:
            advice = f"or give {self.apply_name}, which makes the batch"
            raise StoreError(f"{self.call(identity)}: {error}; {advice}") from None

    def ask(self, identity: int, fn: Callable[..., Any], *args: Any) -> Any:
        """Call the user's code; a note of its error names the input."""
        try:
            return guarded(fn, *args)
        except Exception as error:
            add_note(error, f"in {self.call(identity)}")
            raise


def _copied(batch: Any, name: str) -> Any:
    """Return a batch of a user's function with copies of its arrays and CPU tensors.

    The function may keep them, and fill them again. Arrays become tensors.

    Args:
        batch: The batch.
        name: Name of the function in error messages.

    Raises:
        StoreError: If torch does not have the dtype of an array.
    """
    leaves, rebuild = flatten(batch, name)
    return rebuild(iter([_copied_leaf(leaf, path) for path, leaf in leaves]))


def _copied_leaf(leaf: Any, name: str) -> Any:
    import torch

    from pinfeed.tensors.numpy_torch import to_torch

    if isinstance(leaf, np.ndarray):
        return to_torch(np.array(leaf, check_dtype(leaf.dtype, name)))
    is_dense = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested
    if is_dense and leaf.is_cpu and not leaf.requires_grad:
        return leaf.clone()
    return leaf


@dataclass(frozen=True)
class ReaderSource(BatchesOfSamples):
    """Batches of inputs, which the user's functions read.

    Args:
        readers: One reader for each part of a batch.
    """

    readers: Sequence[SampleReader]

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        n_samples = self.readers[0].n_samples
        found = self.batches.fingerprint
        return {
            "identities": found.pop("n_rows"),
            **found,
            "one_read_count": n_samples,
            "batch_size": found["batch_size"] * n_samples,
        }

    def _batch(self, epoch: int, indices: list[int]) -> SampleBatch:
        return _ReadBatch(self.readers, indices)


class _ReadBatch(SampleBatch):
    """A batch whose samples are tuples, with what each reader has read for one input.

    Args:
        readers: The readers.
        identities: Indices of the inputs.
    """

    def __init__(self, readers: Sequence[SampleReader], identities: list[int]) -> None:
        def joined(samples: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
            columns = zip(readers, zip(*samples, strict=True), strict=True)
            return tuple(reader.batch(identities, column) for reader, column in columns)

        has_apply = any(reader.apply is not None for reader in readers)
        super().__init__(
            lambda: contextlib.nullcontext(identities.__getitem__),
            len(identities),
            joined if has_apply else None,
            None,
        )
        self._readers = readers
        self._identities = identities

    def host_batch(self) -> HostBatch:
        batch = super().host_batch()
        batch.batches = [(self._n * self._readers[0].n_samples, 0)]
        return batch

    def read(self, out: Array, check_stop: CheckStop) -> None:
        # The samples of an input have an axis of their own.
        super().read(out.reshape((self._n, self._readers[0].n_samples, *out.shape[1:])), check_stop)

    def _shape(self, column: Any) -> tuple[int, ...]:
        return (self._n * column.shape[0], *column.shape[1:])

    def _make(self, make: Callable[[int], Any], position: int) -> tuple[Any, ...] | None:
        identity = make(position)
        if self._places is None:
            return tuple(reader.read(identity) for reader in self._readers)
        for reader, place in zip(self._readers, self._places, strict=True):
            reader.read(identity, place[position])
        return None

    def _write(self, position: int, sample: Any) -> None:
        if sample is None:
            # It was read into its place.
            return
        from pinfeed.tensors.numpy_torch import memory_of

        identity = self._identities[position]
        try:
            for reader, tensor, column in zip(
                self._readers, sample, self._layout.columns, strict=True
            ):
                if tensor.shape != column.shape or tensor.dtype is not column.of_torch:
                    first = memory_of(tensor)[0]
                    reader.require_like(first, column.shape[1:], column.dtype, identity)
        except ArgumentError as error:
            self._fail(position, error)
            return
        super()._write(position, sample)

    def _rebuild(self, tensors: Iterator[Any]) -> tuple[Any, ...]:
        return tuple(tensors)
