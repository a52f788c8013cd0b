"""Batches and their chunks: nested structures of tensors whose first dimension is the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from pinfeed.errors import ArgumentError
from pinfeed.tensors.numpy_torch import to_torch
from pinfeed.tensors.pytree import flatten
from pinfeed.training.memory_model.tensor_specs import SampleSpec, map_tensors, tensor_leaves

_MOST_FIRST = 8
"""Most batches of a source that are read before the first one is computed."""


class Chunk(NamedTuple):
    """Some samples of a batch, on the device."""

    inputs: Any
    targets: Any
    n_terms: float
    """Number of terms in their loss."""


Chunks = Generator[Chunk, None, None]


def _has_rows(leaf: Any) -> bool:
    """Return whether a leaf is a tensor with a first dimension."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def is_differentiable(leaf: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a leaf is a tensor that may have a gradient."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def n_samples(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        ArgumentError: If the batch has no tensors with rows, or tensors of different lengths.
    """
    lengths = {path: len(leaf) for path, leaf in flatten(batch)[0] if _has_rows(leaf)}
    if not lengths:
        raise ArgumentError(
            f"a batch is a {type(batch).__name__}; expected tensors whose first dimension is the "
            "batch"
        )
    if len(set(lengths.values())) > 1:
        raise ArgumentError(f"the tensors of a batch have {lengths} samples; expected equally many")
    return next(iter(lengths.values()))


def slice_samples(batch: Any, start: int, stop: int) -> Any:
    """Return samples [start, stop) of a batch as views; leaves without rows stay as they are."""
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.ndim else tensor, batch)


def split(batch: Any, size: int) -> Iterator[Any]:
    """Yield ``size`` samples of a batch at a time, the last time fewer, as views."""
    for start in range(0, n_samples(batch), size):
        yield slice_samples(batch, start, start + size)


def select_samples(batch: Any, rows: torch.Tensor) -> Any:
    """Return the samples with these row indices; leaves without rows stay as they are."""
    return map_tensors(lambda one: one[rows.to(one.device)] if one.ndim else one, batch)


def check_output_rows(outputs: Any, n: int) -> None:
    """Check that every output tensor of ``n`` samples has one row for each sample.

    Raises:
        ArgumentError: If a tensor has another number of rows.
    """
    for path, leaf in flatten(outputs)[0]:
        if _has_rows(leaf) and len(leaf) != n:
            raise ArgumentError(
                f"output{path} of the model has shape {tuple(leaf.shape)} for {n} samples; "
                "chunks need outputs with one row for each sample"
            )


def concatenate(parts: list[Any]) -> Any:
    """Concatenate batches into one.

    Raises:
        ArgumentError: If there are several parts and they contain floating-point scalars.
    """
    flat = [flatten(one) for one in parts]
    columns = list(zip(*([leaf for _, leaf in leaves] for leaves, _ in flat), strict=True))
    if len(parts) > 1 and any(_is_floating_point_scalar(column[0]) for column in columns):
        raise ArgumentError(
            "the model returns one number for a whole batch, like a loss; let it return the "
            "outputs of each sample, and compute the loss in loss="
        )
    rebuild = flat[0][1]
    return rebuild(torch.cat(column) if _has_rows(column[0]) else column[0] for column in columns)


def _is_floating_point_scalar(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not leaf.ndim


def as_tensors(batch: Any) -> Any:
    """Return the batch with its numpy arrays as tensors that share their memory.

    Raises:
        ArgumentError: If an array has a dtype that torch lacks, or a tensor is sparse, which
            cannot be cut into chunks.
    """
    leaves, rebuild = flatten(batch)
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise ArgumentError(
                f"batch{path} is a {leaf.layout} tensor, which cannot be cut into samples; give a "
                "dense tensor"
            )
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biufcV":
            raise ArgumentError(
                f"batch{path} is an array of dtype {leaf.dtype}; expected a dtype of numbers"
            )
    return rebuild(to_torch(leaf) if isinstance(leaf, np.ndarray) else leaf for _, leaf in leaves)


def sample_spec_of(batch: Any) -> SampleSpec:
    """Return the shapes and dtypes of one sample of a batch.

    Raises:
        ArgumentError: If the batch has leaves that are not tensors with rows.
    """
    leaves, rebuild = flatten(batch)
    tensors = [leaf for _, leaf in leaves if _has_rows(leaf)]
    if len(tensors) < len(leaves):
        raise ArgumentError(
            "a batch has values that are not tensors of samples, so its memory cannot be "
            "predicted; give strategy= and chunk_size=, which need no prediction"
        )
    shapes = tuple(tuple(leaf.shape[1:]) for leaf in tensors)
    return SampleSpec(shapes, tuple(leaf.dtype for leaf in tensors), rebuild)


def shapes_and_dtypes(*batches: Any) -> tuple[Any, ...]:
    """Return shape and dtype of all tensors, which are the key of a chosen strategy."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in tensor_leaves(batches))


def sample_shapes_and_dtypes(*batches: Any) -> tuple[Any, ...]:
    """Return shape without the batch dimension, and dtype, of all tensors."""
    return tuple((shape[1:], dtype) for shape, dtype in shapes_and_dtypes(*batches))


def check_no_sample_lists(batch: Any, n: int, path: str = "") -> None:
    """Check that no list or tuple in a batch has one value for each of its ``n`` samples.

    Lists are not cut, so every chunk would have the whole list.

    Raises:
        ArgumentError: If the batch has such a list.
    """
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            check_no_sample_lists(value, n, f"{path}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        if len(batch) == n > 1 and not any(True for _ in tensor_leaves(batch)):
            raise ArgumentError(
                f"batch{path} is a {type(batch).__name__} with a value for each of {n} samples, "
                "which cannot be cut into chunks; give a tensor"
            )
        for i, value in enumerate(batch):
            check_no_sample_lists(value, n, f"{path}[{i}]")


def is_batch_source(value: Any) -> bool:
    """Return whether a value yields batches, rather than being a batch."""
    is_batch = isinstance(value, (torch.Tensor, np.ndarray, Mapping, tuple, list))
    return not is_batch and hasattr(value, "__iter__")


def input_target_pairs(batches: Any) -> Generator[tuple[Any, Any], None, None]:
    """Yield inputs and targets, as tensors, of each batch of an iterable.

    Raises:
        ArgumentError: If a batch is not a pair, or one of its tensors requires grad.
    """
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ArgumentError(
                f"a batch is a {type(batch).__name__}; expected a pair of inputs and targets"
            )
        inputs = as_tensors(batch[0])
        targets = as_tensors(batch[1])
        if any(leaf.requires_grad for leaf in tensor_leaves((inputs, targets))):
            raise ArgumentError(
                "a batch of the source has a tensor that requires grad; give the whole batch as "
                "tensors"
            )
        yield inputs, targets


def first_batches(
    pairs: Iterable[tuple[Any, Any]], count_terms: Callable[[Any, Any], float]
) -> list[tuple[Any, Any]]:
    """Read batches until they have two samples and a loss term, but at most eight batches."""
    found = []
    n = 0
    n_terms = 0.0
    for inputs, targets in itertools.islice(pairs, _MOST_FIRST):
        found.append((inputs, targets))
        n += n_samples(inputs)
        n_terms += count_terms(inputs, targets)
        if n > 1 and n_terms:
            break
    return found


def joined_with_first(batches: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Concatenate the batches whose samples have the shape of the first batch's samples."""
    shape = sample_shapes_and_dtypes(*batches[0])
    same_shape = [batch for batch in batches if sample_shapes_and_dtypes(*batch) == shape]
    inputs, targets = zip(*same_shape, strict=True)
    return concatenate(list(inputs)), None if targets[0] is None else concatenate(list(targets))
