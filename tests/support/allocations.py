"""Peak memory of training steps, measured by torch's profiler."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_of_two_steps(model: Any, x: Any, y: Any, loss: Any, optimizer: Any) -> int:
    """Return the most bytes that the CPU's allocator holds at a time during two steps.

    Args:
        model: Function that makes the model.
        x: Inputs.
        y: Targets.
        loss: Function of outputs and targets.
        optimizer: Function that makes an optimizer of parameters.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = model()
        stepper = optimizer(made.parameters())
        for _ in range(2):
            inputs, targets = x.clone(), y.clone()
            outputs = made(inputs)
            found = loss(outputs, targets)
            found.backward()
            stepper.step()
            stepper.zero_grad()
    events = profiler.profiler.kineto_results.events()
    allocations = [event for event in events if event.name() == "[memory]"]
    now = 0
    most = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
