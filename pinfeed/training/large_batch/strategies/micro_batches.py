"""Batches, and parts of them: tensors in any structure, whose first dimension is that of the batch."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from pinfeed.errors import ArgumentError
from pinfeed.tensors.numpy_torch import to_torch
from pinfeed.tensors.pytree import flatten
from pinfeed.training.memory_model.tensor_specs import SampleSpec

NEED_ROWS = "chunks need outputs with one row for each sample"


def n_samples(batch: Any) -> int:
    """Samples of a batch.

    Raises:
        ArgumentError: Its tensors have none, or not equally many.
    """
    lengths = {
        path: len(leaf)
        for path, leaf in flatten(batch)[0]
        if isinstance(leaf, torch.Tensor) and leaf.ndim
    }
    if not lengths:
        raise ArgumentError(
            f"got {type(batch).__name__}; expected tensors whose first dimension is that of the batch"
        )
    if len(set(lengths.values())) > 1:
        raise ArgumentError(f"the tensors of a batch have {lengths} samples; expected equally many")
    return next(iter(lengths.values()))


def slice_samples(batch: Any, start: int, stop: int) -> Any:
    """Samples [start, stop) of a batch; what has no samples stays."""
    leaves, rebuild = flatten(batch)
    return rebuild(
        leaf[start:stop] if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf
        for _, leaf in leaves
    )


def select_samples(batch: Any, rows: torch.Tensor) -> Any:
    """The samples with these row indices; leaves without samples stay as they are."""
    leaves, rebuild = flatten(batch)
    has_rows = [isinstance(leaf, torch.Tensor) and leaf.ndim for _, leaf in leaves]
    return rebuild(
        leaf[rows.to(leaf.device)] if has else leaf
        for (_, leaf), has in zip(leaves, has_rows, strict=True)
    )


def check_output_rows(outputs: Any, n: int) -> None:
    """Check that every tensor among the outputs of ``n`` samples has one row for each of them.

    Raises:
        ArgumentError: One has not.
    """
    for path, leaf in flatten(outputs)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) != n:
            raise ArgumentError(
                f"output{path} of the model has shape {tuple(leaf.shape)} for {n} samples; {NEED_ROWS}"
            )


def concatenate(parts: list[Any]) -> Any:
    """Batches one after the other as one.

    Raises:
        ArgumentError: They have numbers of their own, which nobody can join.
    """
    flat = [flatten(one) for one in parts]
    columns = list(zip(*([leaf for _, leaf in leaves] for leaves, _ in flat), strict=True))
    if len(parts) > 1 and any(
        isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not leaf.ndim
        for leaf, *_ in columns
    ):
        raise ArgumentError(
            "the model gives a number for the whole batch, as if it were a loss; have it give outputs, and loss= one of them"
        )
    return flat[0][1](
        torch.cat(column) if isinstance(column[0], torch.Tensor) and column[0].ndim else column[0]
        for column in columns
    )


def as_tensors(batch: Any) -> Any:
    """The batch with tensors in place of its numpy arrays, on their memory.

    Raises:
        ArgumentError: An array has a dtype that torch has not, or a tensor is sparse, which cannot
            be cut.
    """
    leaves, rebuild = flatten(batch)
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise ArgumentError(
                f"batch{path} is a {leaf.layout} tensor, which cannot be cut into samples; give a dense one"
            )
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biufcV":
            raise ArgumentError(f"batch{path} is an array of {leaf.dtype}; expected numbers")
    return rebuild(to_torch(leaf) if isinstance(leaf, np.ndarray) else leaf for _, leaf in leaves)


def sample_spec_of(batch: Any) -> SampleSpec:
    """What a sample of a batch is."""
    leaves, rebuild = flatten(batch)
    found = [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if len(found) < len(leaves):
        raise ArgumentError(
            "a batch has values that are no tensors of samples; give strategy= and chunk_size=, which need no prediction"
        )
    return SampleSpec(
        tuple(tuple(leaf.shape[1:]) for leaf in found), tuple(leaf.dtype for leaf in found), rebuild
    )


def shapes_and_dtypes(*batches: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of all tensors: what a decision is made for."""
    leaves = (
        leaf for batch in batches for _, leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor)
    )
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def check_no_sample_lists(batch: Any, n: int, path: str = "") -> None:
    """Check that no list or tuple in a batch has a value for each of its ``n`` samples: chunks would have all of them.

    Raises:
        ArgumentError: One has.
    """
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            check_no_sample_lists(value, n, f"{path}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        if len(batch) == n > 1 and not any(
            isinstance(leaf, torch.Tensor) for _, leaf in flatten(batch)[0]
        ):
            raise ArgumentError(
                f"batch{path} is a {type(batch).__name__} with a value for each of {n} samples, which cannot be cut; give a tensor"
            )
        for i, value in enumerate(batch):
            check_no_sample_lists(value, n, f"{path}[{i}]")


def sample_shapes_and_dtypes(*batches: Any) -> tuple[Any, ...]:
    """Shapes without the number of samples, and dtypes, of all tensors."""
    return tuple((shape[1:], dtype) for shape, dtype in shapes_and_dtypes(*batches))


def is_batch_source(value: Any) -> bool:
    """Whether it gives batches, rather than being one."""
    return not isinstance(value, (torch.Tensor, np.ndarray, Mapping, tuple, list)) and hasattr(
        value, "__iter__"
    )


def input_target_pairs(batches: Any) -> Generator[tuple[Any, Any], None, None]:
    """Inputs and targets that a source gives.

    Raises:
        ArgumentError: It gives something else.
    """
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ArgumentError(
                f"a batch is a {type(batch).__name__}; expected a pair of inputs and targets"
            )
        inputs, targets = as_tensors(batch[0]), as_tensors(batch[1])
        if any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad
            for _, leaf in flatten((inputs, targets))[0]
        ):
            raise ArgumentError(
                "a batch of a source has a tensor that requires grad; give the whole batch as tensors"
            )
        yield inputs, targets


class ChunkLoader:
    """The chunks of a batch, as a loader gives them.

    Attributes:
        batch: Inputs and targets.
        size: Samples of a chunk.
    """

    def __init__(self) -> None:
        self.batch: Any = None
        self.size = 1

    def __iter__(self) -> Iterator[Any]:
        batch, size = self.batch, self.size
        for start in range(0, n_samples(batch), size):
            yield slice_samples(batch, start, start + size)
