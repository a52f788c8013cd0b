"""estimate: predicts the peak memory of a training step by running it on tensors without data."""

from __future__ import annotations

import contextlib
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pinfeed.errors import ArgumentError, EstimateError, described
from pinfeed.memory.host import free_host_bytes
from pinfeed.tensors.argument_types import DTypeLike, Shapes
from pinfeed.training.memory_model.real_steps import peak_of_gradients
from pinfeed.training.memory_model.report import Kind, StepMemory, count_parameters
from pinfeed.training.memory_model.storage_tracker import Peak, StorageTracker, peak_of
from pinfeed.training.memory_model.tensor_specs import SampleSpec, samples_of
from pinfeed.training.memory_model.training_step import (
    Step,
    StepRun,
    TrainingStep,
    copies_without_data,
    plain_step,
    state_tensors,
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
_PHASES = {
    "parameters": "setting up the model and the optimizer",
    "batch": "making the batch",
    "forward": "the forward pass",
    "backward": "the backward pass",
}
"""Descriptions of phases in errors; other phases have their own names."""
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
    model: Callable[..., Any],
    batch_size: int,
    *,
    input_shape: Shapes,
    output_shape: Shapes | None = None,
    input_dtype: DTypeLike = "float32",
    output_dtype: DTypeLike = "float32",
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
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


class StepEstimator(TrainingStep):
    """Training step whose memory is predicted, at any batch size.

    It takes the arguments of ``TrainingStep``, and ``device`` as in ``estimate``.

    Raises:
        ArgumentError: If ``model``, ``device`` or ``autocast`` is invalid.
    """

    def __init__(
        self,
        model: Any,
        inputs: SampleSpec,
        targets: SampleSpec | None,
        *,
        device: Kind = "cuda",
        **options: Any,
    ) -> None:
        if device not in ("cuda", "cpu"):
            raise ArgumentError(f"device={device!r}: expected 'cuda' or 'cpu'")
        super().__init__(model, inputs, targets, **options)
        self.device = device
        self._notes: list[str] = []
        self._estimates: dict[tuple[int, Step], StepMemory] = {}
        self._plain_peaks: dict[int, Peak] = {}
        """Counted peaks of plain steps, by the number of samples."""
        self._measured: dict[int, int] = {}
        """Bytes of real steps that were not counted, by the number of samples."""
        if options.get("loss") is None:
            self._notes.append("loss=None: the estimate uses the sum of the outputs as the loss")
        if options.get("optimizer") is None:
            self._notes.append("optimizer=None: the estimate uses AdamW")

    def at(self, batch_size: int, step: Step = plain_step) -> StepMemory:
        """Return the estimate for a batch of ``batch_size`` samples.

        Raises:
            ArgumentError: If ``batch_size`` is not a whole number from 1 to 2**40.
            EstimateError: If the step cannot run on tensors without data.
        """
        batch_size = whole_number(batch_size, "batch_size", most=MOST_SAMPLES)
        if (batch_size, step) not in self._estimates:
            self._estimates[batch_size, step] = self._estimate(batch_size, step)
        return self._estimates[batch_size, step]

    def _estimate(self, batch_size: int, step: Step) -> StepMemory:
        tracker, n_parameters = self._count(batch_size, step)
        temporary = 0
        note = _RANGE
        if self.device == "cpu":
            if step is plain_step:
                # A second count of the same step would take as long as the first.
                self._plain_peaks[batch_size] = peak_of(tracker, _ROUND["cpu"])
            temporary, note = self._temporary_bytes(tracker.n_samples)
        peak = peak_of(tracker, _ROUND[self.device], temporary)
        breakdown = dict.fromkeys(KINDS, 0)
        for kind, nbytes in peak.kinds.items():
            breakdown[_PHASE_KINDS.get(kind, kind)] += nbytes
        if self.device == "cuda":
            breakdown["workspace"] = _WORKSPACE_BYTES
        phases = {name: nbytes for name, nbytes in peak.phases.items() if name in _PHASE_KINDS}
        return StepMemory(batch_size, breakdown, phases, n_parameters, (*self._notes, note))

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
        peak = self._plain_peak(n_samples)
        activations = max(1, peak.kinds.get("forward", 0))
        most = max(2, _MOST_MEASURED_BYTES * n_samples // activations)
        # Few sizes are measured, because a search for the largest batch estimates many.
        size = 1 << (min(n_samples, most).bit_length() - 1)
        if size not in self._measured:
            phases = self._plain_peak(size).phases
            counted = max(phases["forward"], phases["backward"])
            # An LSTM takes several times the memory that is counted.
            if 4 * counted > free_host_bytes():
                raise EstimateError("little memory is free")
            self._measured[size] = max(0, peak_of_gradients(self, size) - counted)
        return size, self._measured[size]

    def _plain_peak(self, n_samples: int) -> Peak:
        """Return the counted peak of a plain step, without temporary memory."""
        if n_samples not in self._plain_peaks:
            tracker = self._count(n_samples, plain_step)[0]
            self._plain_peaks[n_samples] = peak_of(tracker, _ROUND["cpu"])
        return self._plain_peaks[n_samples]

    def _count(self, batch_size: int, step: Step) -> tuple[StorageTracker, tuple[int, int]]:
        """Run steps on tensors without data; return what was counted, and parameters."""
        tracker = StorageTracker()
        try:
            with _silent_fake_tensors():
                n_parameters = self._run(tracker, batch_size, step)
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
        return tracker, n_parameters

    def _run(self, tracker: StorageTracker, batch_size: int, step: Step) -> tuple[int, int]:
        # This import is here, because it takes a second.
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        # A model that copies its layers would also copy the mode of their tensors. Tensors of
        # another mode would be counted again at each use.
        mode.__deepcopy__ = lambda _: mode
        with mode, tracker, warnings.catch_warnings(), torch.enable_grad():
            # Such a copy reads addresses, and torch warns about that although it continues.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            tracker.enter("parameters")
            model, loss, fakes = copies_without_data(self.model, self.loss)
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
                tracker.enter("optimizer")
                optimizer.step()
                tracker.label(state_tensors(optimizer), "optimizer state")
                optimizer.zero_grad()
                del kept
            return count_parameters(model)

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
            "values (item(), if tensor, masks, sparse gradients, closures), use a Config where the "
            "GPU is present, which measures steps, or give preferred_batch_size without a model"
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
