"""Config: the largest batch for given memory limits and a network."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import torch

from pinfeed.compat.pytorch_memory.network_trace import SampleFormat, find_sample_format
from pinfeed.errors import ArgumentError, NotEnoughCPUMemory
from pinfeed.memory.limits import DEFAULT_DEPTH, check_depth
from pinfeed.memory.plan import Allocation
from pinfeed.memory.units import human, parse_size
from pinfeed.pipeline.loop_memory import PartSize, loop_allocations
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.training.memory_model import config
from pinfeed.training.memory_model.report import Budget, largest_that_fits
from pinfeed.training.memory_model.tensor_specs import SampleSpec, samples_of
from pinfeed.validation.arguments import whole_number

_INDEPENDENT_OF_BATCH = ("parameters", "buffers", "gradients", "optimizer state", "workspace")
"""Parts of a step's memory that do not depend on the size of the batch."""


def round_to(number: int, modulo: int) -> int:
    """Return the largest multiple of ``modulo`` that is not above ``number``."""
    return number // modulo * modulo


@dataclass(frozen=True)
class Config:
    """Memory limits, and the largest batch that fits in them.

    Examples:
        >>> from pinfeed.compat.pytorch_memory import Config, GiB
        >>> config = Config(
        ...     cpu_memory_limit=GiB(2), gpu_memory_limit=GiB(1), total_sample_count=2048,
        ...     input_shape=(8,), output_shape=(1,), model_class=torch.nn.Linear(8, 1),
        ...     preferred_batch_size=256,
        ... )
        >>> config.batch_size, config.batch_count
        (256, 8)

    Args:
        cpu_memory_limit: Limit of the samples in host memory, in bytes or as text (``"2GiB"``).
        gpu_memory_limit: Limit of the training step and of prefetched batches on the GPU, in bytes
            or as text.
        input_shape: Shape of an input sample, or of a batch of one.
        output_shape: Shape of an output sample; None without outputs.
        model_class: The network, or a class or function that makes it.
        total_sample_count: Identities per epoch. An identity is one element of ``input_list``.
        input_dtype: Dtype of input samples.
        output_dtype: Dtype of output samples.
        one_read_count: Samples that ``read_input`` returns for an identity. The batch size is a
            multiple of it.
        preferred_batch_size: Upper bound of the batch size, which is at least ``one_read_count``.
            None or 0 for the largest batch that fits.
        depth: Number of prefetched batches; 0 is the synchronous loop.
        loss: Loss function for the estimate, called with the network's outputs and the output
            samples; None for the sum of the outputs.
        optimizer: A torch optimizer's class, a function called with parameters, or an optimizer of
            the network; None for AdamW.
        network: Alias of ``model_class``, from the first READMEs.

    Raises:
        ArgumentError: If a limit, size, shape, dtype or model is invalid.
        EstimateError: If the training step cannot be predicted, or the network does not accept such
            samples.
        NotEnoughGPUMemory: If the samples of one identity do not fit on the GPU.
            The original and this module call it ``NotEnoughGPURam``.
        NotEnoughCPUMemory: If the samples of one identity do not fit in host memory.
    """

    # It is one class because its attributes are those of the original.

    cpu_memory_limit: float | str
    gpu_memory_limit: float | str
    input_shape: Any
    output_shape: Any
    model_class: Any = None
    total_sample_count: int = 0
    input_dtype: Any = np.float64
    output_dtype: Any = np.float64
    one_read_count: int = 1
    preferred_batch_size: int | None = None
    depth: int = field(default=DEFAULT_DEPTH, kw_only=True)
    loss: Callable[[Any, Any], torch.Tensor] | None = field(default=None, kw_only=True)
    optimizer: Any = field(default=None, kw_only=True)
    network: InitVar[Any] = field(default=None, kw_only=True)

    def __post_init__(self, network: Any) -> None:
        if network is not None:
            if self.model_class is not None:
                raise ArgumentError(
                    "model_class= and network= are two names of one argument; give one of them"
                )
            object.__setattr__(self, "model_class", network)
        for name in ("cpu_memory_limit", "gpu_memory_limit"):
            value = getattr(self, name)
            # The original also takes a float, such as 1.5 * GiB().
            is_real = isinstance(value, (float, np.floating)) and math.isfinite(value)
            object.__setattr__(self, name, parse_size(int(value) if is_real else value, name))
        for name in ("total_sample_count", "one_read_count"):
            whole_number(getattr(self, name), name)
        check_depth(self.depth)
        # The budget is computed now, so that an invalid argument is refused at once.
        _ = self.budget

    @functools.cached_property
    def budget(self) -> Budget:
        """The memory of each part; ``print(config.budget)`` shows a table."""
        limit = int(self.cpu_memory_limit)
        # A network that refuses the samples is reported before a limit that is too low.
        sample_format = self._format
        found = config.Config(
            cpu_memory_limit=limit,
            gpu_memory_limit=int(self.gpu_memory_limit),
            preferred_batch_size=self._most_samples(limit),
            depth=self.depth,
            total_sample_count=self.total_sample_count,
            one_read_count=self.one_read_count,
            input_shape=sample_format.sample_shape,
            output_shape=self._output_sample_shape,
            input_dtype=self.input_dtype,
            output_dtype=self.output_dtype,
            model=sample_format.model,
            loss=self.loss,
            optimizer=self.optimizer,
        ).budget
        on_device = [item for item in found.feeder.items if item.place == "device"]
        items = (*on_device, *self._host_items(found.batch_size))
        return dataclasses.replace(found, feeder=dataclasses.replace(found.feeder, items=items))

    @property
    def batch_size(self) -> int:
        """Samples in a batch."""
        return self.budget.batch_size

    @property
    def sample_count_in_single_batch(self) -> int:
        """Identities in a batch."""
        return self.batch_size // self.one_read_count

    @property
    def batch_count(self) -> int:
        """Full batches in an epoch."""
        return self.total_sample_count // self.sample_count_in_single_batch

    @property
    def allowed_sample_count(self) -> int:
        """Number of identities that fit in ``cpu_memory_limit``, rounded down to whole batches.

        A loop holds ``depth + 3`` batches at a time, even if more fit.
        """
        fitting = int(self.cpu_memory_limit) // max(1, self.sample_size * self.one_read_count)
        return round_to(min(self.total_sample_count, fitting), self.sample_count_in_single_batch)

    @property
    def batch_count_in_memory(self) -> int:
        """Batches of ``allowed_sample_count`` identities."""
        return self.allowed_sample_count // self.sample_count_in_single_batch

    @property
    def total_read_count(self) -> int:
        """The number of times that ``allowed_sample_count`` identities are read in an epoch."""
        return -(-self.total_sample_count // self.allowed_sample_count)

    @property
    def input_item_size(self) -> int:
        """Bytes of an element of the input, or of the first of several inputs."""
        return self.input_samples.dtypes[0].itemsize

    @property
    def output_item_size(self) -> int:
        """Bytes of an element of the output, or of the first of several outputs; 0 without."""
        return self.output_samples[0].dtypes[0].itemsize if self.output_samples else 0

    @property
    def input_size(self) -> int:
        """Bytes of an input sample."""
        return sum(self.input_samples.nbytes)

    @property
    def output_size(self) -> int:
        """Bytes of an output sample."""
        return sum(nbytes for samples in self.output_samples for nbytes in samples.nbytes)

    @property
    def sample_size(self) -> int:
        """Bytes of a sample, input and output."""
        return self.input_size + self.output_size

    @property
    def sample_batch_memory_footprint(self) -> int:
        """Bytes of the samples of a batch."""
        return self.batch_size * self.sample_size

    @property
    def parameter_count(self) -> int:
        """Elements of the network's parameters, each once."""
        return sum(self.budget.step.n_parameters)

    @property
    def total_intermediate_variable_count(self) -> int:
        """Elements of the layers' outputs for a sample, as ``get_variable_count`` counts them.

        ``budget`` shows the estimated bytes of the step.
        """
        return self._format.n_variables

    @property
    def model_memory_usage(self) -> int:
        """Bytes on the GPU that do not depend on the batch size.

        They are parameters, workspace, and gradients and optimizer state at the peak of a step.
        """
        return sum(self.budget.step.breakdown.get(what, 0) for what in _INDEPENDENT_OF_BATCH)

    @property
    def single_sample_memory_usage(self) -> int:
        """Bytes on the GPU for each sample of a batch, in the step and in prefetched batches.

        ``model_memory_usage`` is not included.
        """
        return (self.budget.gpu_bytes - self.model_memory_usage) // self.batch_size

    @functools.cached_property
    def _format(self) -> SampleFormat:
        return find_sample_format(self.model_class, self.input_shape, self.input_dtype)

    @functools.cached_property
    def input_samples(self) -> SampleSpec:
        """Shapes and dtypes of an input sample."""
        return samples_of(self.input_shape, self.input_dtype, "input")

    @functools.cached_property
    def output_samples(self) -> tuple[SampleSpec, ...]:
        """Shapes and dtypes of an output sample; empty without outputs."""
        if self.output_shape is None:
            return ()
        return (samples_of(self.output_shape, self.output_dtype, "output"),)

    @property
    def _output_sample_shape(self) -> Any:
        """The shape of an output sample, without a leading 1 if the input shape had one, too."""
        is_batch = self._format.sample_shape != self.input_shape
        if is_batch and self.output_shape is not None and tuple(self.output_shape[:1]) == (1,):
            return self.output_shape[1:]
        return self.output_shape

    def _most_samples(self, limit: int) -> int:
        """Return the samples of the largest batch that is allowed and fits on the host."""
        most = self.total_sample_count
        if self.preferred_batch_size:
            most = min(most, max(1, self.preferred_batch_size // self.one_read_count))
        n_reads = largest_that_fits(self._host_bytes, limit, most)
        if n_reads == 0:
            need = self._host_bytes(1)
            raise NotEnoughCPUMemory(
                f"{self.depth + 3} batches of {self.one_read_count} samples (the samples of one "
                f"identity) need {human(need)} ({need} bytes) of host memory; cpu_memory_limit is "
                f"{human(limit)} ({limit} bytes); raise cpu_memory_limit, or lower depth (now "
                f"{self.depth})"
            )
        return n_reads * self.one_read_count

    def _host_bytes(self, n_reads: int) -> int:
        return sum(item.total for item in self._host_items(n_reads * self.one_read_count))

    def _host_items(self, batch_size: int) -> tuple[Allocation, ...]:
        """Return the host memory of a loop whose batches stay on the host."""
        specs = (self.input_samples, *self.output_samples)
        parts = [PartSize(batch_size * nbytes) for spec in specs for nbytes in spec.nbytes]
        nbytes = sum(part.nbytes for part in parts)
        samples = Allocation("samples of the batch that is read", "host", 1, nbytes)
        schedule = PrefetchSchedule(self.depth)
        return (*loop_allocations(parts, batch_size, schedule, unified=True), samples)
