"""Config: memory limits, and the largest batch of a model's training step that they hold, with the feeder's own buffers counted."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.devices import resolve, torch_device
from pinfeed.errors import ArgumentError, DeviceError, EstimateError
from pinfeed.memory import limits
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.limits import DEFAULT_DEPTH, Demand, GiB, Plan, n_batches, plan_items
from pinfeed.training.memory_model.budget import Budget, largest_that_fits, refusal
from pinfeed.training.memory_model.estimate import StepEstimator, bytes_there, check_autocast
from pinfeed.training.memory_model.probe import measured
from pinfeed.training.memory_model.report import Kind
from pinfeed.training.memory_model.tensor_specs import SampleSpec, samples_of
from pinfeed.validation.arguments import explain_arguments, whole_number

# Margin for workspace that the model of oneDNN's layouts misses.
_CLOSE = 0.06
# What malloc keeps of memory that was freed, with ``enforce(malloc=True)``.
_HEAP = 0.08
_MAX_PROBES = 8
_M_MMAP_THRESHOLD = -3  # mallopt(3)
_MALLOC_BYTES = 1 << 20
_GPU, _CPU = (
    "give gpu_memory_limit=, in bytes: pinfeed.GiB(8)",
    "give cpu_memory_limit=, in bytes: pinfeed.GiB(8)",
)
_HINTS = {
    "batch_size": "give it to the feeder, or give preferred_batch_size=, up to which the largest batch that fits is taken",
    **dict.fromkeys(("gpu_memory", "gpu_limit", "gpu_mem", "vram", "max_gpu_memory"), _GPU),
    **dict.fromkeys(
        ("cpu_memory", "cpu_limit", "memory", "memory_limit", "host_memory", "ram", "max_memory"),
        _CPU,
    ),
    "chunk_size": "give it to the Trainer or the BigBatch, in place of config=",
}
"""Advice, by names that users try."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Config(limits.MemoryLimits):
    """Memory limits, and how they are used.

    With a model, ``batch_size`` is the largest that its training step and a feeder fit in.

    Args:
        cpu_memory_limit: Host memory that may be taken, in bytes; None for what is free, less
            ``headroom``; the processes that torchrun starts on a machine share it. Where training
            is on the CPU, the step is in it.
        gpu_memory_limit: Device memory that may be taken, in bytes; None likewise. With a model,
            its training step is in it; without one, it is for batches.
        preferred_batch_size: Samples per batch at most, but those of one read; the largest batch
            that fits is taken up to this. None is 65,536; and without a model, 64 MiB of rows,
            where that is less.
        depth: Batches prefetched ahead of the loop; 0 is the synchronous loop. None is 2, or more
            where batches are small.
        headroom: Share of the free memory that is left alone where a limit is None.
        total_sample_count: Reads of an epoch, of ``one_read_count`` samples each.
        input_shape: Of a sample, without the dimension of the batch: a shape, or a tuple
            (positional arguments of the model), list or dict (its keyword arguments) of shapes.
        output_shape: Of a sample's target, likewise; None without targets.
        model: A torch module, which stays as it is; or what makes one when it is called.
        model_class: The same.
        input_dtype: One for all inputs, or a structure like theirs: a dtype of torch or numpy, or
            its name.
        output_dtype: Likewise, of targets.
        one_read_count: Samples that a read gives; a batch is a multiple of it.
        loss: Called with the model's outputs and targets.
        optimizer: A torch optimizer of the model's parameters; or its class, or a function, called
            with parameters.
        autocast: The dtype of autocast, where it is used.
        device: Where training is: ``"cuda"``, ``"cpu"``, or ``"auto"``: on a GPU where there is
            one, or a ``gpu_memory_limit``.
        seen: What steps took when they ran, in estimates: ``probe`` finds it.

    Raises:
        ArgumentError: A limit, size or shape that cannot be; a model without ``input_shape``.
        DeviceError: ``device`` is neither the CPU nor a CUDA device.
        EstimateError: The step cannot be predicted.
        NotEnoughGPUMemory: Not even the samples of one read fit on the device.
        NotEnoughCPUMemory: … on the host.
    """

    total_sample_count: int | None = None
    input_shape: Any = None
    output_shape: Any = None
    model: Any = None
    model_class: Any = None
    input_dtype: Any = "float32"
    output_dtype: Any = "float32"
    one_read_count: int = 1
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: Any = None
    autocast: torch.dtype | None = None
    device: Any = "auto"
    seen: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("total_sample_count", "one_read_count"):
            value = getattr(self, name)
            if not (value is None and name == "total_sample_count"):
                object.__setattr__(self, name, whole_number(value, name))
        if self.device != "auto":
            torch_device(self.device, "'auto', 'cpu', 'cuda' or 'cuda:N'")
        check_autocast(self.autocast)
        if self.model is not None and self.model_class is not None:
            raise ArgumentError("both model and model_class were given; give one of them")
        if self._model is not None:
            if self.input_shape is None:
                raise ArgumentError(
                    "a model was given without input_shape; give the shape of a sample, without the dimension of the batch"
                )
            # What cannot be is refused now.
            _ = self.budget

    @property
    def batch_size(self) -> int:
        """Samples per batch."""
        return self.budget.batch_size

    @property
    def batch_count(self) -> int:
        """Whole batches of an epoch."""
        return self._reads // (self.batch_size // self.one_read_count)

    @property
    def sample_count_in_memory(self) -> int:
        """Samples that are in memory at a time, of all batches that are under way."""
        return n_batches(self._depth) * self.batch_size

    @functools.cached_property
    def budget(self) -> Budget:
        """Where each byte goes, with the largest batch that fits.

        Raises:
            ArgumentError: There is no model.
        """
        if self._model is None:
            raise ArgumentError(
                "there is no model, so the batch is not known; give model= and input_shape=, or batch_size= to the feeder"
            )
        found = self._largest(self.seen)
        if found is None:
            raise refusal(self._at(self._least, self.seen), self._least)
        return found

    def probe(self, make_batch: Callable[[int], Any] | None = None) -> Config:
        """Run steps of a copy of the model, on the device, with the batch as it was estimated; and smaller ones where that does not fit.

        Args:
            make_batch: Called with a number of samples, gives inputs and targets; None for random
                numbers, and for zeros where integers are wanted.

        Returns:
            The same limits, with a batch whose step was seen to run within them as
            ``preferred_batch_size``. What it took more than was estimated is in ``budget``. On the
            CPU that is the growth of this process, which is rough where its heap has room.

        Raises:
            DeviceError: There is no such device here.
            EstimateError: On the CPU, ``/proc/self/clear_refs`` cannot be written, so the growth of
                the process cannot be measured.
            NotEnoughGPUMemory: Not even the samples of one read fit on the device.
            NotEnoughCPUMemory: … on the host.
        """
        device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu")
            if self.device == "auto"
            else self.device
        )
        if (device.type == "cpu") != (self._kind == "cpu") or (
            device.type == "cuda" and not torch.cuda.is_available()
        ):
            raise DeviceError(
                "probe() runs steps on the GPU, and there is none here; take estimates, or device='cpu' where that is meant"
            )
        ran: Budget | None = None
        tried, failed = self.batch_size, None
        for _ in range(_MAX_PROBES):
            taken = measured(self._estimator, tried, device, make_batch)
            seen = None if taken is None else taken / self._estimator.at(tried).reserved_bytes
            if seen is not None and device.type == "cpu":
                # A process grows by less where its heap has room.
                seen = max(1.0, seen)
            budget = self._at(tried, seen)
            if seen is not None and budget.fits:
                ran = budget
            else:
                failed = tried
            larger = None if seen is None else self._largest(seen)
            tried = tried // 2 if larger is None else larger.batch_size
            if failed is not None:
                tried = min(tried, failed - self.one_read_count)
            tried -= tried % self.one_read_count
            if ran is not None and tried <= 1.03 * ran.batch_size:
                break
            if tried < self.one_read_count:
                raise refusal(self._at(self.one_read_count, seen), self.one_read_count)
        if ran is None:
            raise refusal(self._at(tried, seen), tried)
        return dataclasses.replace(self, preferred_batch_size=ran.batch_size, seen=ran.seen)

    def for_feeder(self) -> limits.MemoryLimits:
        """What is left for the feeder, with the batch as it was decided."""
        if self._model is None:
            return self
        budget = self.budget
        cpu, gpu = budget.cpu_memory_limit, budget.gpu_memory_limit
        return limits.MemoryLimits(
            cpu_memory_limit=cpu - (budget.step_bytes if gpu is None else 0),
            gpu_memory_limit=None if gpu is None else gpu - budget.step_bytes,
            preferred_batch_size=budget.batch_size,
            depth=self._depth,
        )

    def enforce(self, *, malloc: bool = False) -> None:
        """Have the limits hold for what is not pinfeed's as well, in this process, from now on.

        On a GPU torch's allocator gets no more than ``gpu_memory_limit`` (what CUDA itself takes,
        some hundred MiB, is beyond that).

        Args:
            malloc: Have blocks of 1 MiB or more given back to the system as soon as they are freed,
                as glibc does until the first of them is freed: else its heap keeps up to half as
                much again as tensors take.
        """
        if self._kind == "cuda" and torch.cuda.is_available():
            gpu = self.gpu_memory_limit if self._model is None else self.budget.gpu_memory_limit
            if gpu is not None:
                index = torch.device(self.device if self.device != "auto" else "cuda").index or 0
                torch.cuda.set_per_process_memory_fraction(
                    min(1.0, gpu / torch.cuda.get_device_properties(index).total_memory), index
                )
        if malloc:
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MALLOC_BYTES)

    @property
    def _model(self) -> Any:
        return self.model_class if self.model is None else self.model

    @property
    def _kind(self) -> Kind:
        if self.device == "auto":
            return (
                "cuda" if torch.cuda.is_available() or self.gpu_memory_limit is not None else "cpu"
            )
        return "cpu" if torch.device(self.device).type == "cpu" else "cuda"

    @property
    def _depth(self) -> int:
        return DEFAULT_DEPTH if self.depth is None else self.depth

    @property
    def _reads(self) -> int:
        if self.total_sample_count is None:
            raise ArgumentError(
                "total_sample_count was not given, so the number of batches is not known"
            )
        return self.total_sample_count

    @functools.cached_property
    def _samples(self) -> tuple[SampleSpec, SampleSpec | None]:
        targets = (
            None
            if self.output_shape is None
            else samples_of(self.output_shape, self.output_dtype, "output")
        )
        return samples_of(self.input_shape, self.input_dtype, "input"), targets

    @functools.cached_property
    def _estimator(self) -> StepEstimator:
        return StepEstimator(
            self._model,
            *self._samples,
            loss=self.loss,
            optimizer=self.optimizer,
            device=self._kind,
            autocast=self.autocast,
        )

    @functools.cached_property
    def _least(self) -> int:
        """Samples of the smallest batch that is tried: two, where the model refuses one, as batch normalisation does."""
        if (
            self.one_read_count == 1
            and self.preferred_batch_size != 1
            and self.total_sample_count != 1
        ):
            try:
                self._estimator.at(1)
            except EstimateError:
                return 2
        return self.one_read_count

    @functools.cached_property
    def _limits(self) -> tuple[int, int | None]:
        """Of the host, and of the device if that is not the host."""
        # What is free is beside the model, where that is there already; the estimate counts it
        # again.
        on_host, on_gpu = (bytes_there(self._model, torch.device(kind)) for kind in ("cpu", "cuda"))
        if self._kind == "cpu":
            return self.host_limit(free_host_bytes() + on_host), None
        gpu = self.gpu_memory_limit or self._limit(None, _free_on_gpu(self.device) + on_gpu)
        return self.host_limit(free_host_bytes()), gpu

    def __getstate__(self) -> dict[str, Any]:
        # Not what was computed of them.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _largest(self, seen: float | None) -> Budget | None:
        """With the largest batch that fits, if there is one."""
        cpu, gpu = self._limits
        at = functools.cache(lambda n: self._at(n * self.one_read_count, seen))

        def need(n_reads: int) -> float:
            budget = at(max(n_reads, self._least // self.one_read_count))
            return max(budget.cpu_bytes / cpu, 0 if gpu is None else budget.gpu_bytes / gpu)

        preferred = (
            None
            if self.preferred_batch_size is None
            else max(1, self.preferred_batch_size // self.one_read_count)
        )
        bounds = [bound for bound in (preferred, self.total_sample_count) if bound is not None]
        found = largest_that_fits(need, 1.0, min(bounds, default=None))
        if preferred is None:
            # A small model on a large machine would have a batch that no training wants.
            found = min(found, max(1, limits.MOST_ROWS // self.one_read_count))
        return at(found) if found else None

    def _at(self, batch_size: int, seen: float | None) -> Budget:
        cpu, gpu = self._limits
        step = self._estimator.at(batch_size)
        nbytes = tuple(
            size for samples in self._samples if samples is not None for size in samples.nbytes
        )
        nothing = (False,) * len(nbytes)
        demand = Demand(
            nbytes,
            nothing,
            0,
            batch_size,
            unified=gpu is None,
            staged=(gpu is not None,) * len(nbytes),
        )
        feeder = Plan(
            batch_size, self._depth, demand.route, plan_items(demand, batch_size, self._depth)
        )
        if seen is None:
            margin = (
                (_CLOSE if step.confidence != "exact" else 0) + (_HEAP if gpu is None else 0)
            ) * step.allocated_bytes
        else:
            margin = (seen - 1) * step.reserved_bytes
        return Budget(batch_size, step, feeder, int(margin), seen, cpu, gpu)


# The dataclass has made __init__ only now; its signature stays as it is.
Config.__init__ = explain_arguments(_HINTS)(Config.__init__)  # type: ignore[method-assign]


def _free_on_gpu(device: Any) -> int:
    if not torch.cuda.is_available():
        raise ArgumentError(
            f"device={device!r}: there is no GPU here to ask what is free; give gpu_memory_limit, as pinfeed.{GiB.__name__}(8)"
        )
    return resolve("cuda" if device == "auto" else device, n_spare=0).free_bytes()
