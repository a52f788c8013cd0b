"""estimate: predicts the peak memory of a training step by running it on tensors without data."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError, EstimateError, described
from pinfeed.memory.host import free_host_bytes
from pinfeed.tensors.argument_types import DTypeLike, LossFunction, Shapes
from pinfeed.training.memory_model.real_steps import peak_of_gradients
from pinfeed.training.memory_model.report import Kind, StepMemory, count_parameters
from pinfeed.training.memory_model.storage_tracker import StorageTracker, peaks_of
from pinfeed.training.memory_model.tensor_specs import samples_of
from pinfeed.training.memory_model.training_step import (
    Step,
    StepRun,
    TrainingStep,
    copies,
    plain_step,
    state_tensors,
    tensors_of,
)
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
_N_STEPS = 2
"""Number of steps to run; the state of the optimizer exists from the end of the first step on."""
MOST_SAMPLES = 1 << 40
"""Largest batch size to predict; sizes in bytes of larger batches overflow in torch."""
_ROUND = {"cuda": 512, "cpu": 64}
"""Bytes to which an allocation is rounded up."""
_MOST_MEASURED_BYTES = 64 << 20
"""Bytes of activations of a real step that is measured; larger batches are not run."""
_WORKSPACE_BYTES = 2 * (32 << 20)
"""Bytes that cuBLAS keeps on a Hopper GPU: one workspace for the loop, and one for autograd."""
_RANGE = (
    "estimated without fragments and without the temporary memory of operations: on one NVIDIA "
    "H200, steps took 0.7 to 2.4 times as much; a Config measures steps where the GPU is present"
)


def estimate(
    model: torch.nn.Module | Callable[..., torch.nn.Module],
    batch_size: int,
    *,
    input_shape: Shapes,
    output_shape: Shapes | None = None,
    input_dtype: DTypeLike = "float32",
    output_dtype: DTypeLike = "float32",
    loss: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    device: Kind = "cuda",
    autocast: torch.dtype | None = None,
) -> StepMemory:
    """Predict the peak memory of a training step.

    The step runs on tensors without data. It takes some seconds, and needs neither a GPU nor the
    memory of a real step. Operations such as convolutions take temporary memory that depends on the
    machine: ``device="cpu"`` also measures it, in a real step of a copy of the model with few
    samples. For a GPU it is unknown; where the GPU is present, ``Config`` measures steps instead.

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
        device: ``"cuda"`` predicts the memory of the step on a GPU, without the temporary memory of
            convolutions and recurrent layers; ``"cpu"`` predicts its memory on this machine.
        autocast: Dtype of autocast; None for no autocast.

    Returns:
        The memory of the step; ``print`` shows it as a table.

    Raises:
        ArgumentError: If a shape, a dtype or a size is invalid.
        EstimateError: If the step cannot run on tensors without data.
    """
    targets = None if output_shape is None else samples_of(output_shape, output_dtype, "output")
    inputs = samples_of(input_shape, input_dtype, "input")
    return StepEstimator(
        model, inputs, targets, loss=loss, optimizer=optimizer, device=device, autocast=autocast
    ).at(batch_size)


@dataclass(frozen=True)
class _Counted:
    """Memory that was counted in steps on tensors without data.

    Attributes:
        peaks: Bytes of each kind at the peak of each phase.
        n_samples: Samples of the largest forward pass.
        n_parameters: Elements of the parameters that require gradients, and of the other ones.
    """

    peaks: dict[str, dict[str, int]]
    n_samples: int
    n_parameters: tuple[int, int]

    def phases(self, temporary: int = 0) -> dict[str, int]:
        """Return the peak of each phase; both passes also take ``temporary`` bytes."""
        further = dict.fromkeys(("forward", "backward"), temporary)
        return {
            phase: sum(kinds.values()) + further.get(phase, 0)
            for phase, kinds in self.peaks.items()
        }


@dataclass(eq=False)
class StepEstimator(TrainingStep):
    """Training step whose memory is predicted, at any batch size.

    It takes the arguments of ``TrainingStep``, and ``device`` as in ``estimate``.

    Raises:
        ArgumentError: If ``model``, ``device`` or ``autocast`` is invalid.
    """

    device: Kind = field(default="cuda", kw_only=True)

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ArgumentError(f"device={self.device!r}: expected 'cuda' or 'cpu'")
        self._notes: list[str] = []
        self._counted: dict[tuple[int, Step], _Counted] = {}
        self._measured: dict[int, int] = {}
        """Bytes of real steps that were not counted, by the number of samples."""
        if self.loss is None:
            self._notes.append("loss=None: the estimate uses the sum of the outputs as the loss")
        if self.optimizer is None:
            self._notes.append("optimizer=None: the estimate uses AdamW")
        super().__post_init__()

    def at(self, batch_size: int, step: Step = plain_step) -> StepMemory:
        """Return the estimate for a batch of ``batch_size`` samples.

        Raises:
            ArgumentError: If ``batch_size`` is not a whole number from 1 to 2**40.
            EstimateError: If the step cannot run on tensors without data.
        """
        batch_size = whole_number(batch_size, "batch_size", most=MOST_SAMPLES)
        counted = self._count(batch_size, step)
        temporary = 0
        note = _RANGE
        if self.device == "cpu":
            temporary, note = self._temporary_bytes(counted.n_samples)
        phases = counted.phases(temporary)
        largest = max(phases, key=phases.__getitem__)
        breakdown = dict.fromkeys(KINDS, 0)
        for kind, nbytes in counted.peaks[largest].items():
            breakdown[_PHASE_KINDS.get(kind, kind)] += nbytes
        # Temporary memory of operations is not counted.
        breakdown["temporary"] += phases[largest] - sum(breakdown.values())
        if self.device == "cuda":
            breakdown["workspace"] = _WORKSPACE_BYTES
        shown = {name: nbytes for name, nbytes in phases.items() if name in _PHASE_KINDS}
        return StepMemory(batch_size, breakdown, shown, counted.n_parameters, (*self._notes, note))

    def _temporary_bytes(self, n_samples: int) -> tuple[int, str]:
        """Return the temporary memory of a forward and a backward pass on the CPU, and a note.

        It is measured in a real step with at most ``n_samples`` samples and about
        ``_MOST_MEASURED_BYTES`` of activations, and grows with the number of samples.
        """
        taken = "the temporary memory of operations on the CPU"
        try:
            size, nbytes = self._measure(n_samples)
        except Exception as error:
            # The estimate needs no step that runs, and another profiler may be running.
            why = described(error).splitlines()[0]
            return 0, f"{taken} was not measured ({why}); the step may take much more"
        return nbytes * n_samples // size, f"{taken} was measured in a step of {size} samples"

    def _measure(self, n_samples: int) -> tuple[int, int]:
        """Return the samples of a real step, and its bytes that were not counted."""
        peak = max(self._count(n_samples).peaks.values(), key=lambda kinds: sum(kinds.values()))
        most = max(2, _MOST_MEASURED_BYTES * n_samples // max(1, peak.get("forward", 0)))
        # Few sizes are measured, because a search for the largest batch estimates many.
        size = 1 << (min(n_samples, most).bit_length() - 1)
        if size not in self._measured:
            phases = self._count(size).phases()
            counted = max(phases["forward"], phases["backward"])
            # An LSTM takes several times the memory that is counted.
            if 4 * counted > free_host_bytes():
                raise EstimateError("little memory is free")
            self._measured[size] = max(0, peak_of_gradients(self, size) - counted)
        return size, self._measured[size]

    def _count(self, batch_size: int, step: Step = plain_step) -> _Counted:
        """Count the memory of steps on tensors without data, once for each size and step."""
        key = batch_size, step
        if key not in self._counted:
            tracker = StorageTracker()
            try:
                with _silent_fake_tensors():
                    self._counted[key] = self._run(tracker, batch_size, step)
            except (ArgumentError, EstimateError):
                raise
            except Exception as error:
                if "UninitializedParameter" in str(error):
                    raise ArgumentError(
                        f"model={self.model!r} makes a lazy module, which has uninitialized "
                        "parameters; expected parameters with known shapes; use modules that are "
                        "not lazy"
                    ) from error
                raise EstimateError(self._refusal(error, batch_size, tracker.activity)) from error
        return self._counted[key]

    def _run(self, tracker: StorageTracker, batch_size: int, step: Step) -> _Counted:
        """Run steps on tensors without data."""
        # This import is here, because it takes a second.
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        # A model that copies its layers would also copy the mode of their tensors. Tensors of
        # another mode would be counted again at each use.
        mode.__deepcopy__ = lambda _: mode
        with mode, tracker, warnings.catch_warnings(), torch.enable_grad():
            # Such a copy reads addresses, and torch warns about that although it continues.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            tracker.enter("parameters", "setting up the model and the optimizer")
            originals = {id(one): one for one in tensors_of(self.model, self.loss)}
            fakes = {key: _without_data(one) for key, one in originals.items()}
            model, loss = copies(self.model, self.loss, fakes)
            tracker.label(model.parameters(), "parameters")
            tracker.label(model.buffers(), "buffers")
            optimizer = self.optimizer_of(model, fakes)
            if self.device == "cuda":
                for group in optimizer.param_groups:
                    # The default on CUDA: all parameters together, with temporary memory of about
                    # their size.
                    if group.get("foreach", False) is None and not group.get("fused"):
                        group["foreach"] = True
            run = StepRun(self, model, loss, tracker)
            for _ in range(_N_STEPS):
                kept = step(run, batch_size)
                tracker.enter("optimizer", "the optimizer")
                optimizer.step()
                tracker.label(state_tensors(optimizer), "optimizer state")
                optimizer.zero_grad()
                del kept
            peaks = peaks_of(tracker, _ROUND[self.device])
            return _Counted(peaks, run.n_samples, count_parameters(model))

    def _refusal(self, error: Exception, batch_size: int, activity: str) -> str:
        first_line = described(error).splitlines()[0]
        no_targets = ""
        if activity == "the loss" and self.targets is None:
            no_targets = (
                "; the loss got None instead of targets (give output_shape=, the shape of one "
                "target, such as (1,), or () for a class)"
            )
        targets = "" if self.targets is None else f", targets {self.targets.described(batch_size)}"
        return (
            f"the step cannot be predicted: with tensors without data, inputs "
            f"{self.inputs.described(batch_size)}{targets}, {activity} raised {first_line}"
            f"{no_targets}; check input_shape and output_shape (the shape of one sample, without "
            "the batch dimension), their dtypes, the loss and the optimizer; if one of them reads "
            "values (item(), if tensor, masks, sparse gradients, closures), use a Config where the "
            "GPU is present, which measures steps, or give preferred_batch_size without a model"
        )


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like this one, in the fake tensor mode that is active."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake


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
