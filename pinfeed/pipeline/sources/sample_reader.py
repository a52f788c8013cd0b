"""SampleReader: calls a user's function for an input, and checks and stacks its samples."""

from __future__ import annotations

import contextlib
import itertools
import reprlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, StoreError, add_note
from pinfeed.pipeline.sources.guarded import guarded
from pinfeed.rows.orders import Rows
from pinfeed.stores.host_rows import CheckStop, never
from pinfeed.tensors.dtypes import check_dtype

Array = npt.NDArray[Any]
Apply = Callable[[Iterator[Any]], Any]
"""Makes a batch from its samples."""
OrderedMap = Callable[[Callable[[int], Any], Iterable[int]], Iterator[Any]]
"""A function like ``map``, with results in order, which threads may compute early."""

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

    def batch(self, identities: Rows, each: OrderedMap, opened: contextlib.ExitStack) -> Any:
        """Return the result of ``apply``, or a StackedSamples that reads the batch later.

        Args:
            identities: Indices of the inputs.
            each: Map that reads the inputs.
            opened: Stack that closes the batch's generators, whether they are read or not.
        """
        if self.apply is None:
            first = self.samples(int(identities[0]))
            opened.callback(first.close)
            return StackedSamples(self, identities, first, each)
        return self._apply(self.apply, identities, each)

    def _apply(self, apply: Apply, identities: Rows, each: OrderedMap) -> Any:
        """Return the result of ``apply``, and check that it consumes all samples."""
        wanted = len(identities) * self.n_samples
        taken = 0

        def stream() -> Generator[Any, None, None]:
            nonlocal taken
            for samples in each(lambda identity: list(self.samples(identity)), identities.tolist()):
                for sample in samples:
                    taken += 1
                    yield sample

        try:
            batch = guarded(apply, stream())
        except Exception as error:
            shown = _SHORT.repr(identities.tolist())
            add_note(error, f"in {self.apply_name} of inputs {shown}")
            raise
        if taken < wanted:
            shown = _SHORT.repr(identities.tolist())
            raise ArgumentError(
                f"{self.apply_name} consumed {taken} samples of inputs {shown}; expected it to "
                f"consume all {wanted} before it returns, because inputs and outputs would not "
                "match otherwise"
            )
        return batch

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


class StackedSamples:
    """The samples of a batch as one part; each sample is read and written to its place.

    The first sample is read when the part is made, and determines the shape and the dtype.

    Args:
        reader: Reader of the samples.
        identities: Indices of the batch's inputs.
        first: Samples of the first input. The caller closes this generator.
        each: Map that reads the inputs.
    """

    def __init__(
        self, reader: SampleReader, identities: Rows, first: Iterator[Any], each: OrderedMap
    ) -> None:
        self._reader = reader
        self._identities = identities.tolist()
        self._each = each
        head = reader.array(next(first), self._identities[0])
        self.shape = (len(identities) * reader.n_samples, *head.shape)
        self.dtype = reader.dtype_of(head, self._identities[0])
        self._first = itertools.chain((head,), first)

    def read(self, out: Array, check_stop: CheckStop = never) -> None:
        """Read the samples into ``out``, one input per step."""
        n = self._reader.n_samples

        def write(i: int) -> None:
            identity = self._identities[i]
            place = i * n
            for sample in self._reader.samples(identity) if i else self._first:
                self._put(self._reader.array(sample, identity), out[place : place + 1], identity)
                place += 1
                # The sample must not be held while the function makes the next one.
                del sample

        for _ in self._each(write, range(len(self._identities))):
            check_stop()

    def _put(self, sample: Array, place: Array, identity: int) -> None:
        """Check a sample, and copy it to its place."""
        reader = self._reader
        if sample.shape != self.shape[1:]:
            raise ArgumentError(
                f"{reader.call(identity)}: got a sample of shape {sample.shape}; expected "
                f"{self.shape[1:]}, as for the first sample of the batch; for samples of several "
                f"shapes, give {reader.apply_name}, for example to pad them"
            )
        if sample.dtype != self.dtype and reader.dtype_of(sample, identity) != self.dtype:
            raise ArgumentError(
                f"{reader.call(identity)}: got a sample of {sample.dtype}; expected {self.dtype}, "
                f"as for the first sample of the batch; give {reader.kind}_dtype to convert them"
            )
        reader.ask(identity, np.copyto, place, sample, "unsafe")
