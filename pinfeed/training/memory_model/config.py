"""Config: memory limits, and the largest batch whose training step and feeder fit in them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.devices import chosen_device, torch_device
from pinfeed.devices.cuda import check_gpu
from pinfeed.errors import ArgumentError
from pinfeed.memory import limits
from pinfeed.memory.host import free_host_bytes, return_large_blocks
from pinfeed.memory.limits import n_batches
from pinfeed.memory.units import GiB, SizeField
from pinfeed.tensors.argument_types import DTypeLike, LossFunction, Shapes
from pinfeed.training.memory_model.batch_search import BatchSearch
from pinfeed.training.memory_model.estimate import StepEstimator
from pinfeed.training.memory_model.report import Budget, Kind
from pinfeed.training.memory_model.tensor_specs import samples_of
from pinfeed.training.memory_model.training_step import bytes_on_device, check_autocast
from pinfeed.validation.arguments import explain_arguments, whole_number


@dataclass(frozen=True, kw_only=True, repr=False)
class Config(limits.MemoryLimits):
    """Memory limits; with a model, also the largest batch that fits in them.

    With a model, ``batch_size`` is the largest batch whose training step and feeder fit together.
    If training is on a GPU of this machine, the first use of ``batch_size`` measures steps of a
    copy of the model, which takes some seconds. Otherwise, the memory is estimated. On the CPU, a
    step with few samples is measured, too.

    Examples:
        >>> model = torch.nn.Linear(1000, 10)
        >>> limits = {"cpu_memory_limit": pinfeed.GiB(4), "gpu_memory_limit": pinfeed.GiB(8)}
        >>> config = pinfeed.Config(**limits, model=model, input_shape=(1000,))
        >>> config.batch_size
        65536
        >>> print(config.budget)
        batches of 65536 samples...

    Args:
        cpu_memory_limit: Limit of host memory, in bytes or as text (``"2GiB"``); None for the free
            memory less ``headroom``, divided among the processes that torchrun starts on the
            machine. It includes the training step if there is a model and training is on the CPU;
            otherwise it limits the memory of the feeder only.
        gpu_memory_limit: Limit of device memory, in bytes or as text; None for the free memory less
            ``headroom``. It includes the training step if there is a model; otherwise it limits
            batches only. It has no effect on a feeder whose batches are on the CPU.
        preferred_batch_size: Upper bound of the batch size, in samples, at least
            ``one_read_count``. None is 65,536 samples; without a model, 65,536 rows or 64 MiB of
            rows, whichever is less.
        depth: Number of prefetched batches; 0 is the synchronous loop. With None and a model,
            ``budget`` and a feeder use 2. Without a model, a feeder chooses 2, or more if batches
            are small.
        headroom: Share of the free memory that stays unused if a limit is None.
        total_sample_count: Number of inputs per epoch, and the most inputs of a batch. An input has
            ``one_read_count`` samples. ``batch_count``, the full batches of an epoch, needs it.
        input_shape: Shape of a sample, without the batch dimension; or a tuple (positional
            arguments of the model), list or dict (keyword arguments) of shapes.
        output_shape: Shape of a sample's target, or a structure of shapes; None without targets.
        model: A torch module, which stays unchanged; or a function that makes one.
        input_dtype: One dtype for all inputs, or a structure of dtypes like ``input_shape``: a
            dtype of torch or numpy, or its name.
        output_dtype: Dtype of targets, or a structure of dtypes.
        one_read_count: Samples per input; the batch size is a multiple of it.
        loss: Function of the model's outputs and targets; None for the sum of the outputs.
        optimizer: A torch optimizer of the model's parameters; or its class, or a function of
            parameters. None for AdamW.
        autocast: Dtype of autocast; None for no autocast.
        device: Device of the training step: ``"cuda"``, ``"cpu"`` or ``"auto"``. ``"auto"`` is a
            GPU if the machine has one or ``gpu_memory_limit`` is given. It does not choose the
            device of a feeder or a loop, which have an argument ``device`` of their own.
        device_cache: Device memory for the caches of tables in ``train_rows``, in bytes or as
            text, which ``gpu_memory_limit`` includes. Tables with ``device_cache="auto"`` share the
            part that tables with caches of a given size leave.
        enforce: Whether the limit of a step that was measured holds from then on, in this process:
            torch's allocator raises ``torch.OutOfMemoryError`` instead of taking more than
            ``gpu_memory_limit`` less the memory of CUDA's context, libraries and CuPy. On the CPU,
            malloc returns freed blocks of 1 MiB or more to the system. Without a model, nothing is
            set.

    Raises:
        ArgumentError: If a limit, size or shape is invalid, or a model has no ``input_shape``.
        DeviceError: If ``device`` is neither the CPU nor a CUDA device.
        EstimateError: If the step cannot be predicted.
        NotEnoughGPUMemory: If not even the samples of one read fit on the device.
        NotEnoughCPUMemory: If not even the samples of one read fit on the host.
    """

    # Declared again, because mypy takes the type of an inherited field from its setter.
    cpu_memory_limit: SizeField = SizeField()
    gpu_memory_limit: SizeField = SizeField()
    total_sample_count: int | None = None
    input_shape: Shapes | None = None
    output_shape: Shapes | None = None
    model: torch.nn.Module | Callable[..., torch.nn.Module] | None = None
    input_dtype: DTypeLike = "float32"
    output_dtype: DTypeLike = "float32"
    one_read_count: int = 1
    loss: LossFunction | None = None
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None
    autocast: torch.dtype | None = None
    device: str | torch.device = "auto"
    device_cache: SizeField = SizeField()
    enforce: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gpu_memory_limit is not None and (self.device_cache or 0) > self.gpu_memory_limit:
            raise ArgumentError(
                f"device_cache={self.device_cache}: expected at most gpu_memory_limit, "
                f"{self.gpu_memory_limit}, which includes it; lower device_cache"
            )
        for name in ("total_sample_count", "one_read_count"):
            value = getattr(self, name)
            if not (value is None and name == "total_sample_count"):
                object.__setattr__(self, name, whole_number(value, name))
        if self.device != "auto":
            torch_device(self.device)
        check_autocast(self.autocast)
        if self.model is not None:
            if self.input_shape is None:
                raise ArgumentError(
                    "model= needs input_shape=; give the shape of a sample, without the batch "
                    "dimension"
                )
            # Errors are raised now. Steps on a GPU wait until a batch size is needed, because they
            # take seconds, and a process that has used CUDA cannot fork workers that use it.
            _ = self._search if self._is_measured else self.budget

    @property
    def batch_size(self) -> int:
        """Number of samples in a batch.

        Raises:
            ArgumentError: If there is no model.
            NotEnoughGPUMemory: If not even the samples of one read fit on the device.
            NotEnoughCPUMemory: If not even the samples of one read fit on the host.
        """
        return self.budget.batch_size

    @property
    def batch_count(self) -> int:
        """Number of whole batches in an epoch.

        Raises:
            ArgumentError: If there is no model, or ``total_sample_count`` is None.
        """
        if self.total_sample_count is None:
            raise ArgumentError(
                "batch_count is unknown without total_sample_count; give total_sample_count="
            )
        return self.total_sample_count // (self.batch_size // self.one_read_count)

    @property
    def sample_count_in_memory(self) -> int:
        """Number of samples in all batches that are in memory at a time.

        Raises:
            ArgumentError: If there is no model.
        """
        return n_batches(self.budget.feeder.depth) * self.batch_size

    @functools.cached_property
    def budget(self) -> Budget:
        """Memory of the largest batch that fits, item by item.

        Raises:
            ArgumentError: If there is no model.
        """
        if self.model is None:
            raise ArgumentError(
                "the batch size is unknown without a model; give model= and input_shape= to the "
                "Config, or batch_size= to the feeder"
            )
        if not self._is_measured:
            found = self._search.estimated()
            if self.enforce and self._kind == "cpu":
                return_large_blocks()
            return found
        gpu = torch.device("cuda", check_gpu(chosen_device(self.device).index))
        return self._search.measured(gpu)

    def for_feeder(self) -> limits.MemoryLimits:
        """Return the limits that the training step leaves for the feeder, and the batch size."""
        if self.model is None:
            return self
        budget = self.budget
        cpu_limit = budget.cpu_memory_limit
        gpu_limit = budget.gpu_memory_limit
        if gpu_limit is None:
            cpu_limit -= budget.step_bytes
        else:
            gpu_limit -= budget.step_bytes
        return limits.MemoryLimits(
            cpu_memory_limit=cpu_limit,
            gpu_memory_limit=gpu_limit,
            preferred_batch_size=budget.batch_size,
            depth=budget.feeder.depth,
        )

    @property
    def _kind(self) -> Kind:
        if self.device != "auto":
            return "cpu" if torch.device(self.device).type == "cpu" else "cuda"
        has_gpu = torch.cuda.is_available() or self.gpu_memory_limit is not None
        return "cuda" if has_gpu else "cpu"

    @property
    def _is_measured(self) -> bool:
        """Whether the step runs on a GPU of this machine."""
        return self._kind == "cuda" and torch.cuda.is_available()

    @functools.cached_property
    def _search(self) -> BatchSearch:
        free = free_host_bytes()
        gpu_limit = None
        if self._kind == "cpu":
            # The estimate includes the model, so the memory that the model takes already counts as
            # free.
            free += bytes_on_device(self.model, torch.device("cpu"))
        elif self.gpu_memory_limit is not None or self._is_measured:
            # None is the free memory of a GPU of this machine, which is measured.
            gpu_limit = self.gpu_memory_limit
        else:
            raise ArgumentError(
                f"device={self.device!r}: free GPU memory is unknown, because this machine has no "
                f"GPU; give gpu_memory_limit, such as pinfeed.{GiB.__name__}(8)"
            )
        targets = None
        if self.output_shape is not None:
            targets = samples_of(self.output_shape, self.output_dtype, "output")
        estimator = StepEstimator(
            self.model,
            samples_of(self.input_shape, self.input_dtype, "input"),
            targets,
            loss=self.loss,
            optimizer=self.optimizer,
            device=self._kind,
            autocast=self.autocast,
        )
        return BatchSearch(estimator, self, self.host_limit(free), gpu_limit)

    def __getstate__(self) -> dict[str, Any]:
        # A copy keeps the budget, because another process must not measure again.
        return {name: value for name, value in vars(self).items() if name != "_search"}


# The decorator ``dataclass`` has made ``__init__`` just before. Its signature stays the same.
Config.__init__ = explain_arguments({})(Config.__init__)  # type: ignore[method-assign]
