"""Config of the earlier system's shape: from limits, and a network, to the largest batch."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import torch

from pinfeed.compat.pytorch_memory.model_summary import Recognised, recognised
from pinfeed.errors import ArgumentError, NotEnoughCPUMemory
from pinfeed.memory.demand import Demand, plan_allocations
from pinfeed.memory.depth import DEFAULT_DEPTH, check_depth
from pinfeed.memory.plan import Allocation
from pinfeed.memory.units import human
from pinfeed.training.memory_model import config
from pinfeed.training.memory_model.budget import Budget
from pinfeed.training.memory_model.tensor_specs import SampleSpec, samples_of
from pinfeed.validation.arguments import whole_number

_MODEL = ("parameters", "buffers", "gradients", "optimizer state", "workspace")


def KiB(coef: float = 1) -> int:
    """Bytes in so many KiB, rounded down."""
    return math.floor(coef * 1024)


def MiB(coef: float = 1) -> int:
    """Bytes in so many MiB, rounded down to whole KiB of them: as ever, unlike ``pinfeed.MiB``."""
    return 1024 * KiB(coef)


def GiB(coef: float = 1) -> int:
    """Bytes in so many GiB, rounded down to whole MiB of them: as ever, unlike ``pinfeed.GiB``."""
    return 1024 * MiB(coef)


def round_to(number: int, modulo: int) -> int:
    """The multiple of ``modulo`` that is not above ``number``."""
    return number // modulo * modulo


@dataclass(frozen=True)
class Config:
    """Limits, and the largest batch that they hold.

    Args:
        cpu_memory_limit: Of samples on the host, in bytes.
        gpu_memory_limit: Of the training step, and of the batches on their way to it, in bytes.
        input_shape: Of an input sample, or of a batch of one.
        output_shape: Of an output sample; None without.
        model_class: A class, or a function, that makes the network; or the network.
        total_sample_count: Identities of an epoch.
        input_dtype: Of input samples.
        output_dtype: Of output samples.
        one_read_count: Samples that ``read_input`` gives of an identity; a batch is a multiple of
            it.
        preferred_batch_size: Samples of a batch at most, but at least those of an identity. None or
            0 for what fits.
        depth: Batches read ahead of the loop; 0 is the synchronous loop.
        loss: Called with the network's outputs and the output samples, for the estimate; None for
            the sum of the outputs.
        optimizer: A torch optimizer's class, a function called with parameters, or an optimizer of
            the network; None for AdamW.
        network: The name that ``model_class`` has in the first READMEs.

    Raises:
        ArgumentError: A limit, size, shape, dtype or model that cannot be.
        EstimateError: The training step cannot be predicted; the network does not take such
            samples.
        NotEnoughGPURam: Not even the samples of an identity fit.
        NotEnoughCPUMemory: … on the host.
    """

    cpu_memory_limit: int
    gpu_memory_limit: int
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
                    "model_class and network are two names of one argument; pass one of them"
                )
            object.__setattr__(self, "model_class", network)
        for name in ("cpu_memory_limit", "gpu_memory_limit"):
            if (
                not isinstance(value := getattr(self, name), (int, float, np.number))
                or not 1 <= value < math.inf
            ):
                raise ArgumentError(f"{name}={value!r}: expected bytes, as GiB(1.5)")
        for name in ("total_sample_count", "one_read_count"):
            whole_number(getattr(self, name), name)
        check_depth(self.depth)
        # What cannot be is refused now.
        _ = self.budget

    @functools.cached_property
    def budget(self) -> Budget:
        """Where each byte goes; ``print(config.budget)`` is a table."""
        limit, network = int(self.cpu_memory_limit), self._network
        most = self.total_sample_count
        if self.preferred_batch_size:
            most = min(most, max(1, self.preferred_batch_size // self.one_read_count))
        n_reads = bisect.bisect_left(
            range(1, most + 1),
            True,
            key=lambda n: (
                sum(item.total for item in self._on_host(n * self.one_read_count)) > limit
            ),
        )
        if n_reads == 0:
            need = sum(item.total for item in self._on_host(self.one_read_count))
            raise NotEnoughCPUMemory(
                f"batches of {self.one_read_count} samples, the fewest there can be, need {human(need)} ({need} bytes) on the host, "
                f"{self.depth + 3} of them at a time; cpu_memory_limit is {human(limit)} ({limit} bytes); raise it, or lower depth"
            )
        stripped = (
            network.sample_shape != self.input_shape
            and self.output_shape is not None
            and tuple(self.output_shape[:1]) == (1,)
        )
        found = config.Config(
            cpu_memory_limit=limit,
            gpu_memory_limit=int(self.gpu_memory_limit),
            preferred_batch_size=n_reads * self.one_read_count,
            depth=self.depth,
            total_sample_count=self.total_sample_count,
            one_read_count=self.one_read_count,
            input_shape=network.sample_shape,
            output_shape=self.output_shape[1:] if stripped else self.output_shape,
            input_dtype=self.input_dtype,
            output_dtype=self.output_dtype,
            model=network.model,
            loss=self.loss,
            optimizer=self.optimizer,
        ).budget
        on_device = tuple(item for item in found.feeder.items if item.place == "device")
        plan = dataclasses.replace(
            found.feeder, items=(*on_device, *self._on_host(found.batch_size))
        )
        return dataclasses.replace(found, feeder=plan)

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return self.budget.batch_size

    @property
    def sample_count_in_single_batch(self) -> int:
        """Identities of a batch."""
        return self.batch_size // self.one_read_count

    @property
    def batch_count(self) -> int:
        """Full batches of an epoch."""
        return self.total_sample_count // self.sample_count_in_single_batch

    @property
    def allowed_sample_count(self) -> int:
        """Identities, in whole batches, that ``cpu_memory_limit`` holds; a loop has ``depth + 3`` batches at a time."""
        return round_to(self._allowed_sample_count, self.sample_count_in_single_batch)

    @property
    def batch_count_in_memory(self) -> int:
        """Batches that these are."""
        return self.allowed_sample_count // self.sample_count_in_single_batch

    @property
    def total_read_count(self) -> int:
        """How many times so many identities are an epoch."""
        return -(-self.total_sample_count // self.allowed_sample_count)

    @property
    def input_item_size(self) -> int:
        """Bytes of an element of an input; of the first one, where there are several."""
        return self.input_samples.dtypes[0].itemsize

    @property
    def output_item_size(self) -> int:
        """Bytes of an element of an output, likewise."""
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
        return sum(layer.n_trainable + layer.n_frozen for layer in self.budget.step.layers)

    @property
    def total_intermediate_variable_count(self) -> int:
        """Elements that layers give for a sample, as ``get_variable_count`` counts.

        ``budget`` says what of it is kept, and what else.
        """
        return self._network.n_variables

    @property
    def model_memory_usage(self) -> int:
        """Bytes on the GPU whatever the batch is: parameters, what a step has of gradients and optimizer state at its peak, workspace."""
        return sum(self.budget.step.breakdown.get(what, 0) for what in _MODEL)

    @property
    def single_sample_memory_usage(self) -> int:
        """Bytes on the GPU for each sample of a batch, beside these: its share of the step, and of the batches that are under way."""
        return (self.budget.gpu_bytes - self.model_memory_usage) // self.batch_size

    @property
    def _allowed_sample_count(self) -> int:
        return min(
            self.total_sample_count,
            int(self.cpu_memory_limit) // max(1, self.sample_size * self.one_read_count),
        )

    @functools.cached_property
    def _network(self) -> Recognised:
        return recognised(self.model_class, self.input_shape, self.input_dtype)

    @functools.cached_property
    def input_samples(self) -> SampleSpec:
        """Shapes and dtypes of an input sample."""
        return samples_of(self.input_shape, self.input_dtype, "input")

    @functools.cached_property
    def output_samples(self) -> tuple[SampleSpec, ...]:
        """Of an output sample, if there are any."""
        return (
            ()
            if self.output_shape is None
            else (samples_of(self.output_shape, self.output_dtype, "output"),)
        )

    def _on_host(self, batch_size: int) -> tuple[Allocation, ...]:
        """What the loop has on the host, if its batches stay there."""
        nbytes = tuple(
            size
            for samples in (self.input_samples, *self.output_samples)
            for size in samples.nbytes
        )
        nothing = (False,) * len(nbytes)
        items = plan_allocations(
            Demand(nbytes, nothing, 0, batch_size, unified=True, staged=nothing),
            batch_size,
            self.depth,
        )
        return (
            *items,
            Allocation(
                "samples of the batch that is read", "host", 1, batch_size * self.sample_size
            ),
        )
