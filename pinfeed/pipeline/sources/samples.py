"""Samples that a user's function yields: counted, put into batches, and named by their identity where something is wrong."""

from __future__ import annotations

import contextlib
import itertools
import reprlib
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pinfeed.devices.base import HostArray
from pinfeed.errors import ArgumentError, StoreError
from pinfeed.pipeline.sources.base import HostBatch
from pinfeed.pipeline.sources.dataloader import HostLeaf
from pinfeed.pipeline.sources.guarded import guarded
from pinfeed.rows.orders import Rows
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.tensors.pytree import Rebuild, flatten
from pinfeed.threads.pool import Pending, Workers

T = TypeVar("T")
R = TypeVar("R")

Array = npt.NDArray[Any]
Apply = Callable[[Iterator[Any]], Any]
"""Makes a batch of its samples."""

_END = object()
_SHORT = reprlib.Repr()
# Paths are to be read in full.
_SHORT.maxstring = _SHORT.maxother = 200


class OrderedMap(Protocol):
    """What a function gives for each item, in their order, as ``map`` does; threads may be ahead of whoever asks."""

    def __call__(self, fn: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]: ...


@dataclass(frozen=True)
class ThreadedMap:
    """``OrderedMap`` on ``n_threads`` threads.

    Only so many items are begun and not taken: for memory, and a loop that ends waits for them.
    """

    pool: Workers
    n_threads: int

    def __call__(self, fn: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]:
        # Where the loop ends before they do, it joins the pool before anybody else has their
        # memory.
        begun: deque[Pending[R]] = deque()
        for item in items:
            begun.append(self.pool.submit(fn, item))
            if len(begun) == self.n_threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


@dataclass(frozen=True)
class SampleReader:
    """A function of the user's, and what it is called with.

    Args:
        kind: ``"input"`` or ``"output"``.
        function: Called with one of ``values``; gives the samples of that identity.
        values: One for each identity.
        n_samples: Samples of each identity.
        apply: Makes a batch of its samples; None to stack them.
        dtype: Of stacked samples; None for that which they have.
    """

    kind: str
    function: Callable[[Any], Iterable[Any]]
    values: Sequence[Any]
    n_samples: int
    apply: Apply | None
    dtype: np.dtype[Any] | None

    @property
    def function_name(self) -> str:
        return "read_input" if self.kind == "input" else "get_output"

    @property
    def apply_name(self) -> str:
        return f"apply_on_{self.kind}_batch"

    def call(self, identity: int) -> str:
        """How the function was called for an identity, for messages."""
        try:
            value = _SHORT.repr(self.values[identity])
        except Exception as error:
            # It is the user's, and the message is about something else.
            value = f"unknown ({type(error).__name__})"
        return f"{self.function_name}({self.kind}s[{identity}]), {self.kind}s[{identity}] = {value}"

    def samples(self, identity: int) -> Generator[Any, None, None]:
        """The samples of an identity; exactly as many as there have to be.

        Raises:
            ArgumentError: There are more, or fewer, or what the function gave cannot be iterated.
            The function's own errors, with a note that names the identity.
        """
        wanted = self.n_samples
        given = self.ask(identity, lambda: self.function(self.values[identity]))
        if not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
            raise ArgumentError(
                f"{self.call(identity)}: got {type(given).__name__}; expected an iterable of samples (yield each sample)"
            )
        samples = self.ask(identity, iter, given)
        try:
            for n in range(wanted):
                if (sample := self.ask(identity, next, samples, _END)) is _END:
                    raise ArgumentError(
                        f"{self.call(identity)}: got {n} samples; expected one_read_count={wanted} from every identity"
                    )
                yield sample
                # Else it would be held while the next one is made.
                del sample
            if self.ask(identity, next, samples, _END) is not _END:
                raise ArgumentError(
                    f"{self.call(identity)}: got more than {wanted} samples; expected one_read_count={wanted} from every identity "
                    "(a sample that is not yielded but returned is iterated itself)"
                )
        finally:
            if isinstance(samples, Generator):
                # Now, not when an error's traceback lets it go: it may hold files.
                samples.close()

    def batch(self, identities: Rows, each: OrderedMap, opened: contextlib.ExitStack) -> Any:
        """A batch, as ``apply`` makes it; or its samples, which are read while they are stacked.

        Args:
            identities: Of the batch.
            each: Reads identities.
            opened: Takes what has to be closed once the batch has been read, or will not be.
        """
        if self.apply is None:
            first = self.samples(int(identities[0]))
            opened.callback(first.close)
            return StackedSamples(self, identities, first, each)
        wanted, taken = len(identities) * self.n_samples, 0

        def stream() -> Generator[Any, None, None]:
            nonlocal taken
            for samples in each(lambda identity: list(self.samples(identity)), identities.tolist()):
                for sample in samples:
                    taken += 1
                    yield sample

        try:
            batch = guarded(self.apply, stream())
        except Exception as error:
            _note(error, f"in {self.apply_name} of identities {_SHORT.repr(identities.tolist())}")
            raise
        if taken < wanted:
            raise ArgumentError(
                f"{self.apply_name} took {taken} samples of identities {_SHORT.repr(identities.tolist())}; "
                f"expected it to take all {wanted} before it returns, else inputs and outputs would not belong together"
            )
        return batch

    def array(self, sample: Any, identity: int) -> Array:
        """A sample as an array."""
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
        """The dtype with which a sample is stacked."""
        if self.dtype is not None:
            return self.dtype
        try:
            return check_dtype(array.dtype, "a sample")
        except StoreError as error:
            raise StoreError(f"{self.call(identity)}: {error}; or give {self.apply_name}") from None

    def ask(self, identity: int, fn: Callable[..., Any], *args: Any) -> Any:
        """Call what is the user's; an error gets a note that says for which identity."""
        try:
            return guarded(fn, *args)
        except Exception as error:
            _note(error, f"in {self.call(identity)}")
            raise


class StackedSamples:
    """A part: the samples of a batch, each read and written to its place.

    The very first is read now, and says shape and dtype.

    Args:
        reader: Reads them.
        identities: Of the batch.
        first: Samples of the first identity; closed by whoever opened them.
        each: Reads identities.
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

    def read(self, out: Array) -> Iterator[None]:
        """Read the samples into ``out``, an identity in a step."""
        n = self._reader.n_samples

        def write(i: int) -> None:
            identity, place = self._identities[i], i * n
            for sample in self._reader.samples(identity) if i else self._first:
                self._put(self._reader.array(sample, identity), out[place : place + 1], identity)
                place += 1
                # Else it would be held while the next one is made.
                del sample

        for _ in self._each(write, range(len(self._identities))):
            yield

    def _put(self, sample: Array, place: Array, identity: int) -> None:
        if sample.shape != self.shape[1:]:
            raise ArgumentError(
                f"{self._reader.call(identity)}: got a sample of shape {sample.shape}; expected {self.shape[1:]}, the first one's of its "
                f"batch (samples of several shapes: give {self._reader.apply_name}, to pad them, say)"
            )
        if sample.dtype != self.dtype and self._reader.dtype_of(sample, identity) != self.dtype:
            raise ArgumentError(
                f"{self._reader.call(identity)}: got a sample of {sample.dtype}; expected {self.dtype}, the first one's of its batch "
                f"(give {self._reader.kind}_dtype, to convert them)"
            )
        self._reader.ask(identity, np.copyto, place, sample, "unsafe")


class CopiedArray:
    """A part: an array that a user's function has made.

    It is copied, for he may keep it and fill it again.
    """

    def __init__(self, array: Array, name: str) -> None:
        self._array: Array | None = array
        self.shape = array.shape
        self.dtype = check_dtype(array.dtype, name)

    def read(self, out: Array) -> Iterator[None]:
        """Copy the array into ``out``, once."""
        assert self._array is not None
        np.copyto(out, self._array)
        # Not kept while the batch waits to be lent.
        self._array = None
        yield


def load_of(batches: Sequence[tuple[str, Any]], n_samples: int) -> HostBatch:
    """Batches, each with its name, as one load of a tuple; their leaves are on the host."""
    leaves: list[tuple[str, Any]] = []
    rebuilds: list[Rebuild] = []
    for name, batch in batches:
        found, rebuild = flatten(batch, name)
        leaves += found
        # Which does not know, and keep, the leaves as they are on the host.
        rebuilds.append(flatten(rebuild(itertools.repeat(None)))[1])
    parts = [_part(leaf, name) for name, leaf in leaves]
    kept = [leaf if part is None else None for (_, leaf), part in zip(leaves, parts, strict=True)]
    moves = [part is not None for part in parts]

    def make(tensors: Iterator[Any]) -> tuple[Any, ...]:
        made = iter(
            [next(tensors) if moved else leaf for leaf, moved in zip(kept, moves, strict=True)]
        )
        return tuple(rebuild(made) for rebuild in rebuilds)

    return HostBatch([part for part in parts if part is not None], make, [(n_samples, 0)])


def _part(leaf: Any, name: str) -> HostArray | None:
    """What brings a leaf to the device; None if it stays as it is."""
    import torch

    from pinfeed.tensors.numpy_torch import NUMPY, memory_of

    if isinstance(leaf, StackedSamples):
        return leaf
    if isinstance(leaf, np.ndarray):
        return CopiedArray(leaf, name)
    dense = (
        type(leaf) is torch.Tensor
        and leaf.dtype in NUMPY
        and leaf.layout is torch.strided
        and not leaf.is_nested
    )
    if dense and leaf.device.type == "cpu" and not leaf.requires_grad:
        return CopiedArray(memory_of(leaf.resolve_conj().resolve_neg()), name)
    return HostLeaf(leaf) if callable(getattr(leaf, "to", None)) else None


def _note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
