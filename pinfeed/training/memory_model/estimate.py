"""The peak of a training step, predicted without running it: the step is run on tensors without data."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from pinfeed.errors import ArgumentError, EstimateError, described
from pinfeed.tensors.pytree import flatten
from pinfeed.training.memory_model.caching_allocator import CachingAllocator
from pinfeed.training.memory_model.confidence import confidence_in
from pinfeed.training.memory_model.recurrent import as_on_cpu
from pinfeed.training.memory_model.report import Confidence, Estimate, Kind, Layer, layers_of
from pinfeed.training.memory_model.storage_tracker import Peak, StorageTracker, as_on_cuda, peak_of
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
_ONE_AT_A_TIME = threading.RLock()
"""Held while functions of torch are replaced, for the whole process."""
# The optimizer's state comes with the first one's end.
_N_STEPS = 2
_MOST_SAMPLES = 1 << 40
"""Most samples of a batch that is predicted: sizes in bytes of larger ones overflow in torch."""
_ROUND = {"cuda": 512, "cpu": 64}
# Of cuBLAS, which torch's allocator gives; on Hopper (pytorch 175344), less elsewhere.
_WORKSPACE_BYTES = 32 << 20


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
    """Predict the peak of a training step, on tensors without data: in some seconds, without a GPU, and without its memory.

    Args:
        model: A torch module, which stays as it is; or what makes one when it is called: a class, a
            function.
        batch_size: Samples.
        input_shape: Of a sample, without the dimension of the batch: a shape, or a tuple
            (positional arguments of the model), list or dict (its keyword arguments) of shapes.
        output_shape: Of a sample's target, likewise; None without targets.
        input_dtype: One for all inputs, or a structure like theirs: a dtype of torch or numpy, or
            its name.
        output_dtype: Likewise, of targets.
        loss: Called with the model's outputs and targets; None for the sum of the outputs.
        optimizer: A torch optimizer of the model's parameters; or its class, or a function, called
            with parameters. None for AdamW.
        device: ``"cuda"``: as torch does on a GPU, with what its allocator reserves; ``"cpu"``: as
            on this machine.
        autocast: The dtype of autocast, where it is used.

    Raises:
        ArgumentError: A shape, a dtype or a size that cannot be.
        EstimateError: The step does what cannot be done without data.
    """
    targets = None if output_shape is None else samples_of(output_shape, output_dtype, "output")
    inputs = samples_of(input_shape, input_dtype, "input")
    return StepEstimator(
        model, inputs, targets, loss=loss, optimizer=optimizer, device=device, autocast=autocast
    ).at(batch_size)


class Step(Protocol):
    """How gradients are computed of a batch.

    What it returns is alive until the next step, as the variables of a loop are.
    """

    def __call__(self, run: Run, batch_size: int) -> Any: ...


class Run:
    """A training step under way, on tensors without data.

    Attributes:
        model: On fake tensors.
        tracker: Sees what it takes.
        held: Outputs and loss of the step before, while they are alive.
    """

    def __init__(
        self, estimator: StepEstimator, model: nn.Module, loss: Any, tracker: StorageTracker
    ) -> None:
        self._estimator = estimator
        self.model = model
        self._loss = loss
        self.tracker = tracker
        self.held: tuple[Any, ...] = ()

    def batch(self, n: int) -> tuple[Any, Any]:
        """Inputs and targets of so many samples."""
        self.tracker.enter("batch")
        samples = (self._estimator.inputs, self._estimator.targets)
        found = tuple(
            None
            if one is None
            else one.batch(n, lambda shape, dtype: torch.empty(shape, dtype=dtype))
            for one in samples
        )
        return found[0], found[1]

    def outputs(self, inputs: Any) -> Any:
        """The forward pass."""
        self.tracker.enter("forward")
        with self._estimator.autocast():
            return call_model(self.model, inputs)

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The loss."""
        self.tracker.enter("forward")
        with self._estimator.autocast():
            found: torch.Tensor = self._loss(outputs, targets)
            return found

    def backward(self, loss: Any) -> None:
        """The backward pass; gradients are known for what they are."""
        self.tracker.enter("backward")
        loss.backward()
        self.tracker.label((p.grad for p in self.model.parameters()), "gradients")


def plain_step(run: Run, batch_size: int) -> Any:
    """Forward, loss, backward."""
    inputs, targets = run.batch(batch_size)
    outputs = run.outputs(inputs)
    run.held = run.held[1:]
    loss = run.loss(outputs, targets)
    # The variables of a loop hold what they held until they are assigned again, in the next step.
    run.held = (outputs, loss) if run.tracker.is_cpu else ()
    run.backward(loss)
    return inputs, targets, outputs, loss


class StepEstimator:
    """Predicts steps of one model, at any batch size.

    Args:
        model: A module, which stays as it is, or what makes one when it is called: a class, a
            function.
        inputs: What a sample is, for the model: a tensor, positional arguments (a tuple) or keyword
            arguments (a dict).
        targets: What a sample is, for the loss.
        loss: Called with outputs and targets; None for the sum of the outputs.
        optimizer: A torch optimizer, of the model's parameters; or its class, or a function, called
            with the parameters. None for AdamW.
        device: ``"cuda"``: as torch would on a GPU, with what its allocator reserves; ``"cpu"``: as
            on this machine.
        autocast: The dtype of autocast, where it is used.

    Raises:
        ArgumentError: ``model`` is neither, or ``device`` or ``autocast`` is invalid.
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
        if device not in ("cuda", "cpu"):
            raise ArgumentError(f"device={device!r}: expected 'cuda' or 'cpu'")
        check_autocast(autocast)
        self.model = model
        self.inputs = inputs
        self.targets = targets
        self.loss = loss or _sum
        self._optimizer = optimizer
        self.device = device
        self._dtype = autocast
        self._notes: list[str] = []
        self._known: dict[tuple[int, Step], Estimate] = {}
        if loss is None:
            self._notes.append("no loss was given: the sum of the outputs was taken")
        if optimizer is None:
            self._notes.append("no optimizer was given: AdamW was taken")

    def autocast(self, device_type: str = "cpu") -> contextlib.AbstractContextManager[Any]:
        """What the forward pass runs in."""
        return (
            contextlib.nullcontext()
            if self._dtype is None
            else torch.autocast(device_type, self._dtype)
        )

    def optimizer_of(self, model: nn.Module, stand_ins: Mapping[int, torch.Tensor]) -> Any:
        """An optimizer, as it was given, of a copy of the model; and what stands for the tensors of the model there, by their id."""
        given = self._optimizer
        if isinstance(given, torch.optim.Optimizer):
            if any(id(p) not in stand_ins for group in given.param_groups for p in group["params"]):
                raise ArgumentError(
                    "the optimizer has parameters that are neither the model's nor the loss's; give its class"
                )
            groups = [
                group | {"params": [stand_ins[id(p)] for p in group["params"]]}
                for group in given.param_groups
            ]
            return type(given)(groups, **_taken(type(given), given.defaults))
        return (given or torch.optim.AdamW)([p for p in model.parameters() if p.requires_grad])

    def at(self, batch_size: int, step: Step = plain_step) -> Estimate:
        """The estimate for a batch of so many samples.

        Raises:
            ArgumentError: ``batch_size`` is not a whole number from 1 to 2**40.
            EstimateError: The step does what cannot be done without data.
        """
        batch_size = whole_number(batch_size, "batch_size", most=_MOST_SAMPLES)
        if (batch_size, step) not in self._known:
            self._known[batch_size, step] = self._estimated(batch_size, step)
        return self._known[batch_size, step]

    def _estimated(self, batch_size: int, step: Step) -> Estimate:
        tracker, log = (
            StorageTracker(is_cpu=self.device == "cpu"),
            logging.getLogger("torch._subclasses.fake_tensor"),
        )
        # It prints the traceback of what is raised here.
        was_silent = log.disabled
        log.disabled = True
        try:
            layers, confidence, notes = self._follow(tracker, batch_size, step)
        except ArgumentError:
            raise
        except Exception as error:
            raise EstimateError(
                self._refusal(
                    error, batch_size, tracker.marks[-1][1] if tracker.marks else "beginning"
                )
            ) from error
        finally:
            log.disabled = was_silent
        peak = peak_of(tracker, _ROUND[self.device])
        return self._summary(batch_size, tracker, peak, layers, confidence, notes)

    def _follow(
        self, tracker: StorageTracker, batch_size: int, step: Step
    ) -> tuple[tuple[Layer, ...], Confidence, list[str]]:
        # Takes a second to load.
        from torch._subclasses.fake_tensor import FakeTensorMode

        cuda = self.device == "cuda"
        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        # A model that copies its layers copies the mode of their tensors with them. Tensors of
        # another mode would be counted anew at each use.
        mode.__deepcopy__ = lambda _: mode
        as_there = as_on_cuda if cuda else as_on_cpu
        with _ONE_AT_A_TIME, mode, tracker, as_there(), warnings.catch_warnings():
            # Such a copy asks for addresses, of which torch warns although it goes on.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            tracker.enter("parameters")
            model, loss, fakes = _without_data(self.model, self.loss)
            tracker.label(model.parameters(), "parameters")
            tracker.label(model.buffers(), "buffers")
            optimizer = self.optimizer_of(model, fakes)
            if cuda:
                _as_by_default(optimizer)
            run = Run(self, model, loss, tracker)
            for _ in range(_N_STEPS):
                kept = step(run, batch_size)
                tracker.enter("optimizer")
                optimizer.step()
                tracker.label(_state_of(optimizer), "optimizer state")
                optimizer.zero_grad()
                del kept
            layers = layers_of(model)
            confidence, notes = confidence_in(model, tracker, self.device, self._dtype)
        return layers, confidence, notes

    def _refusal(self, error: Exception, batch_size: int, phase: str) -> str:
        first = described(error).splitlines()[0]
        targets = "" if self.targets is None else f", targets {self.targets.described(batch_size)}"
        return (
            f"the step cannot be predicted: on tensors without data, inputs {self.inputs.described(batch_size)}{targets}, its {phase} "
            f"raised {first}; check input_shape, output_shape, their dtypes, the loss and the optimizer; where one "
            "looks at values (item(), if tensor, masks, sparse gradients, closures), run probe()"
        )

    def _summary(
        self,
        batch_size: int,
        tracker: StorageTracker,
        peak: Peak,
        layers: tuple[Layer, ...],
        confidence: Confidence,
        notes: list[str],
    ) -> Estimate:
        named = {"forward": "activations", "backward": "temporary", "optimizer": "temporary"}
        breakdown = dict.fromkeys(KINDS, 0)
        for kind, nbytes in peak.kinds.items():
            breakdown[named.get(kind, kind)] += nbytes
        reserved = peak.nbytes
        if self.device == "cuda":
            breakdown["workspace"] = _WORKSPACE_BYTES
            reserved = CachingAllocator().replay(tracker.events).reserved + _WORKSPACE_BYTES
            breakdown["reserve"] = reserved - sum(breakdown.values())
        phases = {phase: nbytes for phase, nbytes in peak.phases.items() if phase in named}
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


def check_autocast(dtype: Any) -> None:
    """Refuse what autocast cannot compute in.

    Raises:
        ArgumentError: ``dtype`` is neither a floating-point dtype of torch nor None.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(
            f"autocast={dtype!r}: expected a floating-point dtype of torch, as torch.bfloat16, or None"
        )


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """The model on inputs: positional arguments if they are a tuple or list, keyword arguments if they are a mapping."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def _without_data(model: Any, loss: Any) -> tuple[nn.Module, Any, dict[int, torch.Tensor]]:
    """Model and loss on fake tensors, in the fake mode that is active; and the fakes of their tensors, by their id."""
    fakes: dict[int, torch.Tensor] = {}
    for module in (given for given in (model, loss) if isinstance(given, nn.Module)):
        for tensor in tensors_of(module):
            if id(tensor) not in fakes:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
                fakes[id(tensor)] = (
                    nn.Parameter(fake, tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else fake
                )
    # deepcopy keeps what is in its memo for what it stands for.
    memo = dict(fakes)
    made = copy.deepcopy(model, memo) if isinstance(model, nn.Module) else model()
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            f"model={model!r} made a {type(made).__name__}; expected a torch module"
        )
    return (
        made if made.training else made.train(),
        copy.deepcopy(loss, memo) if isinstance(loss, nn.Module) else loss,
        fakes,
    )


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors that are plain attributes."""
    yield from module.parameters()
    yield from module.buffers()
    for one in module.modules():
        yield from (value for value in vars(one).values() if isinstance(value, torch.Tensor))


def bytes_there(model: Any, device: torch.device) -> int:
    """Bytes of a model's parameters, buffers and gradients that are on the device already."""
    if not isinstance(model, nn.Module):
        return 0
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    found = {
        id(tensor): tensor
        for tensor in (*tensors_of(model), *gradients)
        if tensor.device.type == device.type
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def _taken(kind: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an optimizer's defaults that its constructor takes."""
    import inspect

    return {
        name: value
        for name, value in defaults.items()
        if name in inspect.signature(kind).parameters
    }


def _as_by_default(optimizer: Any) -> None:
    """On CUDA torch steps many parameters together unless it is told otherwise, which takes about their size in temporary memory."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _state_of(optimizer: Any) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (leaf for _, leaf in flatten(state)[0] if isinstance(leaf, torch.Tensor))


def _sum(outputs: Any, targets: Any) -> torch.Tensor:
    return torch.stack(
        [leaf.float().sum() for _, leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
    ).sum()
