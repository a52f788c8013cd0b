"""estimate: predicts the peak memory of a training step by running it on tensors without data."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError, EstimateError, described
from pinfeed.tensors.pytree import flatten
from pinfeed.training.memory_model.caching_allocator import CachingAllocator
from pinfeed.training.memory_model.confidence import confidence_in
from pinfeed.training.memory_model.cublas_workspaces import workspace_bytes
from pinfeed.training.memory_model.models import copies_without_data, require_initialized
from pinfeed.training.memory_model.optimizer_copy import (
    optimizer_for,
    state_tensors,
    use_cuda_defaults,
)
from pinfeed.training.memory_model.recurrent import as_on_cpu
from pinfeed.training.memory_model.report import Confidence, Estimate, Kind, Layer, layers_of
from pinfeed.training.memory_model.step_run import Step, StepRun, plain_step
from pinfeed.training.memory_model.storage_tracker import StorageTracker, as_on_cuda, peak_of
from pinfeed.training.memory_model.tensor_specs import SampleSpec, samples_of
from pinfeed.validation.arguments import whole_number

KINDS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer state",
    "batch",
    "activations",
    "temporary",
)
_PHASE_KINDS = {"forward": "activations", "backward": "temporary", "optimizer": "temporary"}
"""Kind of the memory that a phase allocates, until ``label`` changes it."""
_PHASES = {
    "parameters": "setting up the model and the optimizer",
    "batch": "making the batch",
    "forward": "the forward pass",
    "backward": "the backward pass",
}
"""Descriptions of phases in errors; other phases have their own names."""
_PATCHING_LOCK = threading.RLock()
"""Held while functions of torch are replaced, for the whole process."""
_N_STEPS = 2
"""Number of steps to run; the state of the optimizer exists from the end of the first step on."""
MOST_SAMPLES = 1 << 40
"""Largest batch size to predict; sizes in bytes of larger batches overflow in torch."""
_ROUND = {"cuda": 512, "cpu": 64}
"""Bytes to which an allocation is rounded up."""


def estimate(
    model: Any,
    batch_size: int,
    *,
    input_shape: Any,
    output_shape: Any = None,
    input_dtype: Any = "float32",
    output_dtype: Any = "float32",
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Any = None,
    device: Kind = "cuda",
    autocast: torch.dtype | None = None,
) -> Estimate:
    """Predict the peak memory of a training step.

    The step runs on tensors without data. It takes some seconds, and needs neither a GPU nor the
    memory of a real step.

    Examples:
        >>> model = torch.nn.Linear(10, 1)
        >>> print(pinfeed.estimate(model, 64, input_shape=(10,)))
        step of 64 samples ...

    Args:
        model: A torch module, which stays unchanged; or a class or function that makes one.
        batch_size: Samples in the batch.
        input_shape: Shape of a sample, without the batch dimension; or a tuple (positional
            arguments of the model), list or dict (keyword arguments) of shapes.
        output_shape: Shape of a sample's target, or a structure of shapes; None without targets.
        input_dtype: One dtype for all inputs, or a structure of dtypes like ``input_shape``: a
            dtype of torch or numpy, or its name.
        output_dtype: Dtype of targets, or a structure of dtypes.
        loss: Function of the model's outputs and targets; None for the sum of the outputs.
        optimizer: A torch optimizer of the model's parameters; or its class, or a function of
            parameters. None for AdamW.
        device: ``"cuda"`` predicts the memory that torch's allocator reserves on a GPU; ``"cpu"``
            predicts the memory of the step on this machine.
        autocast: Dtype of autocast; None for no autocast.

    Returns:
        The estimate; ``str(estimate)`` is a table.

    Raises:
        ArgumentError: If a shape, a dtype or a size is invalid.
        EstimateError: If the step cannot run on tensors without data.
    """
    targets = None if output_shape is None else samples_of(output_shape, output_dtype, "output")
    inputs = samples_of(input_shape, input_dtype, "input")
    return StepEstimator(
        model, inputs, targets, loss=loss, optimizer=optimizer, device=device, autocast=autocast
    ).at(batch_size)


class StepEstimator:
    """Predicts steps of one model, at any batch size.

    Args:
        model: A module, which stays unchanged; or a class or function that makes one.
        inputs: Shapes and dtypes of a sample for the model: a tensor, positional arguments (a
            tuple) or keyword arguments (a dict).
        targets: Shapes and dtypes of a sample's target for the loss; None without targets.
        loss: Function of outputs and targets; None for the sum of the outputs.
        optimizer: A torch optimizer of the model's parameters; or its class, or a function of
            parameters. None for AdamW.
        device: ``"cuda"`` predicts the memory that torch's allocator reserves on a GPU; ``"cpu"``
            predicts the memory of the step on this machine.
        autocast: Dtype of autocast; None for no autocast.

    Raises:
        ArgumentError: If ``model``, ``device`` or ``autocast`` is invalid.
    """

    def __init__(
        self,
        model: Any,
        inputs: SampleSpec,
        targets: SampleSpec | None,
        *,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: Any = None,
        device: Kind = "cuda",
        autocast: torch.dtype | None = None,
    ) -> None:
        if not callable(model):
            raise ArgumentError(
                f"model={model!r}: expected a torch module, or a class or function that makes one"
            )
        if isinstance(model, nn.Module):
            require_initialized(model)
        if device not in ("cuda", "cpu"):
            raise ArgumentError(f"device={device!r}: expected 'cuda' or 'cpu'")
        check_autocast(autocast)
        self.model = model
        self.inputs = inputs
        self.targets = targets
        self.loss = loss or _sum_of_outputs
        self._optimizer = optimizer
        self.device = device
        self._dtype = autocast
        self._notes: list[str] = []
        self._estimates: dict[tuple[int, Step], Estimate] = {}
        if loss is None:
            self._notes.append("loss=None: the estimate uses the sum of the outputs as the loss")
        if optimizer is None:
            self._notes.append("optimizer=None: the estimate uses AdamW")

    def autocast(self, device_type: str = "cpu") -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forward passes and losses run."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, self._dtype)

    def optimizer_of(self, model: nn.Module, stand_ins: Mapping[int, torch.Tensor]) -> Any:
        """Return an optimizer for a copy of the model, with the user's class and options.

        Args:
            model: The copy.
            stand_ins: Tensors of the copy, by the id of the original tensor.
        """
        if self._optimizer is None and not any(p.requires_grad for p in model.parameters()):
            raise EstimateError(
                "the model has no parameter that requires a gradient, so a training step cannot be "
                "estimated; unfreeze parameters, or leave out the model and give "
                "preferred_batch_size"
            )
        return optimizer_for(model, self._optimizer, stand_ins)

    def at(self, batch_size: int, step: Step = plain_step) -> Estimate:
        """Return the estimate for a batch of ``batch_size`` samples.

        Raises:
            ArgumentError: If ``batch_size`` is not a whole number from 1 to 2**40.
            EstimateError: If the step cannot run on tensors without data.
        """
        batch_size = whole_number(batch_size, "batch_size", most=MOST_SAMPLES)
        if (batch_size, step) not in self._estimates:
            self._estimates[batch_size, step] = self._estimate(batch_size, step)
        return self._estimates[batch_size, step]

    def _estimate(self, batch_size: int, step: Step) -> Estimate:
        tracker = StorageTracker(is_cpu=self.device == "cpu")
        try:
            with _silent_fake_tensors():
                layers, confidence, notes = self._run(tracker, batch_size, step)
        except (ArgumentError, EstimateError):
            raise
        except Exception as error:
            if "UninitializedParameter" in str(error):
                raise ArgumentError(
                    f"model={self.model!r} makes a lazy module, which has uninitialized "
                    "parameters; expected parameters with known shapes; use modules that are not "
                    "lazy"
                ) from error
            phase = tracker.marks[-1][1] if tracker.marks else "beginning"
            raise EstimateError(self._refusal(error, batch_size, phase)) from error
        peak = peak_of(tracker, _ROUND[self.device])
        breakdown = dict.fromkeys(KINDS, 0)
        for kind, nbytes in peak.kinds.items():
            breakdown[_PHASE_KINDS.get(kind, kind)] += nbytes
        reserved = peak.nbytes
        if self.device == "cuda":
            breakdown["workspace"] = workspace_bytes(tracker.multiplying)
            reserved = CachingAllocator().replay(tracker.events).reserved + breakdown["workspace"]
            breakdown["reserve"] = reserved - sum(breakdown.values())
        phases = {name: nbytes for name, nbytes in peak.phases.items() if name in _PHASE_KINDS}
        return Estimate(
            batch_size,
            peak.nbytes,
            reserved,
            breakdown,
            phases,
            layers,
            confidence,
            (*self._notes, *notes),
        )

    def _run(
        self, tracker: StorageTracker, batch_size: int, step: Step
    ) -> tuple[tuple[Layer, ...], Confidence, list[str]]:
        """Run steps on tensors without data; return layers, confidence and its reasons."""
        # This import is here, because it takes a second.
        from torch._subclasses.fake_tensor import FakeTensorMode

        is_cuda = self.device == "cuda"
        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        # A model that copies its layers would also copy the mode of their tensors. Tensors of
        # another mode would be counted again at each use.
        mode.__deepcopy__ = lambda _: mode
        as_on_device = as_on_cuda if is_cuda else as_on_cpu
        with _PATCHING_LOCK, mode, tracker, as_on_device(), warnings.catch_warnings():
            # Such a copy reads addresses, and torch warns about that although it continues.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            tracker.enter("parameters")
            model, loss, fakes = copies_without_data(self.model, self.loss)
            tracker.label(model.parameters(), "parameters")
            tracker.label(model.buffers(), "buffers")
            optimizer = self.optimizer_of(model, fakes)
            if is_cuda:
                use_cuda_defaults(optimizer)
            run = StepRun(model, loss, (self.inputs, self.targets), self.autocast, tracker)
            for _ in range(_N_STEPS):
                kept = step(run, batch_size)
                tracker.enter("optimizer")
                optimizer.step()
                tracker.label(state_tensors(optimizer), "optimizer state")
                optimizer.zero_grad()
                del kept
            layers = layers_of(model)
            confidence, notes = confidence_in(model, tracker, self.device, self._dtype)
        return layers, confidence, notes

    def _refusal(self, error: Exception, batch_size: int, phase: str) -> str:
        first_line = described(error).splitlines()[0]
        frames = traceback.walk_tb(error.__traceback__)
        is_loss = any(frame.f_code is StepRun.loss.__code__ for frame, _ in frames)
        where = "the loss" if is_loss else _PHASES.get(phase, f"the {phase}")
        no_targets = ""
        if is_loss and self.targets is None:
            no_targets = (
                "; the loss got None instead of targets (give output_shape=, the shape of one "
                "target, such as (1,), or () for a class)"
            )
        targets = "" if self.targets is None else f", targets {self.targets.described(batch_size)}"
        return (
            f"the step cannot be predicted: with tensors without data, inputs "
            f"{self.inputs.described(batch_size)}{targets}, {where} raised {first_line}"
            f"{no_targets}; check input_shape and output_shape (the shape of one sample, without "
            "the batch dimension), their dtypes, the loss and the optimizer; if one of them reads "
            "values (item(), if tensor, masks, sparse gradients, closures), measure the step with "
            "Config.probe() instead"
        )


@contextlib.contextmanager
def _silent_fake_tensors() -> Iterator[None]:
    """Silence the logger of fake tensors, which prints the traceback of errors raised here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = was_disabled


def check_autocast(dtype: Any) -> None:
    """Check that autocast accepts a dtype.

    Raises:
        ArgumentError: If ``dtype`` is neither a floating-point dtype of torch nor None.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(
            f"autocast={dtype!r}: expected a floating-point dtype of torch, such as "
            "torch.bfloat16, or None"
        )


def _sum_of_outputs(outputs: Any, targets: Any) -> torch.Tensor:
    tensors = [leaf for _, leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()
