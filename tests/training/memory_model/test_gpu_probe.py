"""The batch size of a Config on a GPU, measured on a simulated one."""

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.simulated_gpu import GPU, SimulatedGPU, cupy_with_pool
from torch import nn

import pinfeed
from pinfeed import Config, GiB, MiB, errors
from pinfeed.training.memory_model.real_steps import StepCopy
from pinfeed.training.memory_model.tensor_specs import samples_of
from pinfeed.training.memory_model.training_step import TrainingStep

LIMIT = MiB(32)
"""Limit of the process on the GPU in most tests."""
CONTEXT = MiB(2)

MakeGPU = Callable[..., SimulatedGPU]


@pytest.fixture
def make_gpu(monkeypatch: pytest.MonkeyPatch) -> MakeGPU:
    def make(**options: Any) -> SimulatedGPU:
        memory = {"total": MiB(64), "context": CONTEXT, "workspace": MiB(1), "libraries": 1 << 19}
        return SimulatedGPU(monkeypatch, **memory | options)

    return make


@pytest.fixture
def gpu(make_gpu: MakeGPU) -> SimulatedGPU:
    return make_gpu()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


class Sizes:
    """A loss that lists the batch sizes of all steps.

    Args:
        work: Function of outputs that takes memory until its result is free.
    """

    def __init__(self, work: Callable[[torch.Tensor], Any] = lambda outputs: None) -> None:
        self.steps: list[int] = []
        self._work = work

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.steps.append(len(outputs))
        kept = self._work(outputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        del kept
        return loss

    @property
    def tried(self) -> list[int]:
        """Each size that was tried, in order."""
        return list(dict.fromkeys(self.steps))


def config_of(loss: Any = nn.functional.cross_entropy, **options: Any) -> Config:
    arguments = {"model": mlp, "optimizer": torch.optim.Adam, "gpu_memory_limit": LIMIT}
    return Config(
        cpu_memory_limit=GiB(1),
        input_shape=(64,),
        output_shape=(),
        output_dtype="int64",
        loss=loss,
        **arguments | options,
    )


def fits(n: int, **options: Any) -> bool:
    """Return whether steps of exactly ``n`` samples fit."""
    try:
        return config_of(one_read_count=n, preferred_batch_size=n, **options).batch_size == n
    except errors.NotEnoughGPUMemory:
        return False


def deep() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def wide() -> nn.Module:
    """Return a model whose optimizer needs most of the memory."""
    return nn.Sequential(nn.Linear(64, 12_000), nn.ReLU(), nn.Linear(12_000, 10))


class Recomputed(nn.Module):
    """A model that keeps almost nothing for its backward pass, which needs much memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = deep()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("model", "limit"), [(mlp, MiB(12)), (deep, MiB(12)), (wide, LIMIT), (Recomputed, MiB(12))]
)
def test_the_batch_is_nearly_the_largest_that_fits(
    make_gpu: MakeGPU, model: Any, limit: int
) -> None:
    loss = Sizes()
    options = {"model": model, "gpu_memory_limit": limit}
    with make_gpu():
        n = config_of(loss, **options).batch_size
    assert loss.tried[-1] == n
    assert len(loss.tried) <= 5
    assert loss.steps.count(n) == 3
    with make_gpu():
        assert fits(n, **options)
        assert not fits(int(1.1 * n), **options)


def test_the_cap_comes_first_and_stays(gpu: SimulatedGPU) -> None:
    caps = []
    with gpu:
        budget = config_of(Sizes(lambda outputs: caps.append(gpu.cap))).budget
        # The libraries that the first product loads are outside the allocator, too.
        assert set(caps) == {LIMIT - CONTEXT, gpu.cap}
        assert caps[0] == LIMIT - CONTEXT
        assert gpu.cap == caps[3] == LIMIT - CONTEXT - (1 << 19)
        assert gpu.reserved == MiB(1), "only the workspace stays"
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(LIMIT - CONTEXT, dtype=torch.uint8, device=GPU)
    assert budget.gpu_memory_limit == LIMIT
    assert 0.9 * LIMIT < budget.gpu_bytes <= LIMIT
    assert budget.other_bytes == CONTEXT + (1 << 19)


def test_a_loop_of_the_chosen_size_fits_under_the_cap(gpu: SimulatedGPU) -> None:
    config = config_of()
    with gpu:
        n = config.batch_size
        retries = gpu.retries
        model = mlp().to(GPU)
        optimizer = torch.optim.Adam(model.parameters())
        ahead = [torch.empty(n * (64 * 4 + 8), dtype=torch.uint8) for _ in range(3)]
        x, y = torch.zeros(n, 64), torch.zeros(n, dtype=torch.int64)
        for _ in range(4):
            outputs = model(x)
            loss = nn.functional.cross_entropy(outputs, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert gpu.retries == retries
        assert gpu.reserved <= gpu.cap
        assert len(ahead) == 3


@pytest.mark.parametrize("error", [RuntimeError("no such row"), KeyboardInterrupt()])
def test_the_cap_is_released_after_errors(gpu: SimulatedGPU, error: BaseException) -> None:
    def fail(outputs: torch.Tensor) -> None:
        raise error

    torch.cuda.set_per_process_memory_fraction(0.75, GPU)
    with gpu, pytest.raises(type(error)):
        _ = config_of(Sizes(fail)).batch_size
    assert gpu.cap == 0.75 * gpu.total
    with gpu:
        n = config_of(enforce=False).batch_size
    assert gpu.cap == 0.75 * gpu.total
    with gpu:
        assert config_of().batch_size == n
    assert gpu.cap < 0.75 * gpu.total


def test_ten_percent_less_follows_a_size_that_does_not_fit(gpu: SimulatedGPU) -> None:
    """The memory of this loss grows with the square of the batch, so a line leads too far."""
    loss = Sizes(lambda outputs: torch.empty(len(outputs), len(outputs) // 8))
    with gpu:
        budget = config_of(loss).budget
        assert not fits(int(1.25 * budget.batch_size), loss=Sizes(loss._work))
    assert 3 <= len(loss.tried) <= 5
    assert loss.tried[-1] == budget.batch_size == int(0.9 * loss.tried[-2])
    assert f"measured in {len(loss.tried)} sizes" in str(budget)


def test_steps_that_empty_the_cache_do_not_fit(gpu: SimulatedGPU) -> None:
    """Each step allocates a block of another size, so unused blocks collect."""
    loss = Sizes(lambda outputs: torch.empty(len(outputs) * (300 + len(loss.steps)), 1))
    with gpu:
        n = config_of(loss).batch_size
        retries = gpu.retries
        x = torch.zeros(n, 64)
        model = mlp()
        for _ in range(3):
            loss(model(x), torch.zeros(n, dtype=torch.int64)).backward()
        assert gpu.retries == retries
    assert len(loss.tried) > 3


def test_at_most_five_sizes_are_tried(gpu: SimulatedGPU) -> None:
    def fail(outputs: torch.Tensor) -> None:
        if len(outputs) > 100:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")

    loss = Sizes(fail)
    with gpu:
        assert config_of(loss).batch_size < 100
    assert len(loss.tried) <= 5
    assert loss.tried[0] == 16


def test_bounds_of_the_batch_end_the_search(gpu: SimulatedGPU) -> None:
    for bounds, tried in (
        ({"preferred_batch_size": 8}, [8]),
        ({"preferred_batch_size": 300}, [16, 300]),
        ({"total_sample_count": 20, "one_read_count": 10}, [10, 200]),
        ({"preferred_batch_size": 65, "one_read_count": 7}, [14, 63]),
    ):
        loss = Sizes()
        with gpu:
            assert config_of(loss, **bounds).batch_size == tried[-1]
        assert loss.tried == tried


def test_the_message(gpu: SimulatedGPU, caplog: pytest.LogCaptureFixture) -> None:
    with gpu, caplog.at_level("INFO", "pinfeed"):
        config = config_of(preferred_batch_size=300)
        assert not caplog.messages, "the steps run when the batch size is needed"
        print(config.budget)
        _ = config_of(preferred_batch_size=3, enforce=False).batch_size
    said, not_set = caplog.messages
    assert said.startswith("batch_size=300: 0.01 of 0.03 GiB measured in 2 sizes (")
    assert said.endswith(" s); the limit is set")
    assert said in str(config.budget)
    assert "in 1 size (" in not_set
    assert not_set.endswith("the limit is not set")


def test_the_pool_of_cupy_is_outside(gpu: SimulatedGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy_with_pool(MiB(6)))
    gpu.outside += MiB(6)
    with gpu:
        budget = config_of().budget
    assert gpu.cap == LIMIT - gpu.outside
    assert budget.gpu_bytes <= LIMIT


def test_other_processes_count_up_to_a_gibibyte(make_gpu: MakeGPU) -> None:
    gpu = make_gpu(total=GiB(8), context=GiB(4))
    with gpu:
        config = config_of(gpu_memory_limit=GiB(3), preferred_batch_size=16)
        assert config.budget.other_bytes == GiB(1)
    assert gpu.cap == GiB(2)


def test_without_a_limit_the_free_memory_counts(gpu: SimulatedGPU) -> None:
    gpu.outside += MiB(20)
    with gpu:
        held = torch.zeros(MiB(4), dtype=torch.uint8)
        limit = gpu.outside + MiB(4) + 0.75 * (gpu.total - gpu.outside - MiB(4))
        budget = config_of(gpu_memory_limit=None, headroom=0.25).budget
        assert budget.gpu_memory_limit == limit
        assert gpu.cap == limit - gpu.outside
        # The limit of the other Config still holds.
        assert config_of(gpu_memory_limit=None, headroom=0).batch_size == budget.batch_size
        assert len(held) == MiB(4)


def test_a_batch_that_does_not_fit_is_refused(gpu: SimulatedGPU) -> None:
    loss = Sizes()
    with (
        gpu,
        pytest.raises(
            errors.NotEnoughGPUMemory,
            match=r"a step of 1 sample ran out of memory; gpu_memory_limit is 3.0 MiB \(3145728 "
            r"bytes\), of which CUDA, libraries and other tensors take 2.5 MiB; raise gpu_memory_l",
        ),
    ):
        _ = config_of(loss, gpu_memory_limit=MiB(3)).batch_size
    assert gpu.cap == gpu.total
    with gpu, pytest.raises(errors.NotEnoughGPUMemory, match=r"500 samples .*train in chunks"):
        _ = config_of(gpu_memory_limit=MiB(4), one_read_count=500).batch_size
    with gpu, pytest.raises(errors.NotEnoughCPUMemory, match="staging"):
        _ = Config(
            cpu_memory_limit="1KiB", gpu_memory_limit=LIMIT, model=mlp, input_shape=(64,)
        ).batch_size


def test_small_batches_are_tried_if_16_samples_do_not_fit(gpu: SimulatedGPU) -> None:
    loss = Sizes(lambda outputs: torch.empty(len(outputs), 1 << 20))
    with gpu:
        assert config_of(loss).batch_size in (5, 6)
    assert loss.tried[:2] == [16, 4]


def test_a_model_that_refuses_one_sample_is_refused(gpu: SimulatedGPU) -> None:
    def model() -> nn.Module:
        return nn.Sequential(mlp(), nn.BatchNorm1d(10))

    with gpu:
        assert config_of(model=model, preferred_batch_size=8).batch_size == 8
    with gpu, pytest.raises(errors.NotEnoughGPUMemory):
        _ = config_of(model=model, gpu_memory_limit=MiB(3)).batch_size
    with gpu, pytest.raises(ValueError, match="more than 1 value per channel"):
        _ = config_of(model=model, preferred_batch_size=1).batch_size


def test_the_program_stays_as_it_is(gpu: SimulatedGPU) -> None:
    """The model is on the GPU, and counts once although its copy is trained beside it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(mlp(), nn.Dropout(), nn.BatchNorm1d(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            np.random.rand()  # noqa: NPY002
            return self.inner(x)

    torch.manual_seed(0)
    with gpu:
        model = Model()
        optimizer = torch.optim.Adam(model.parameters())
        nn.functional.cross_entropy(model(torch.rand(8, 64)), torch.zeros(8).long()).backward()
        optimizer.step()
        model.eval()
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        generators = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index] # noqa: NPY002
        with torch.no_grad():
            n = config_of(model=model, optimizer=optimizer).batch_size
        assert not model.training
        after = model.state_dict(), optimizer.state_dict()
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert all(map(torch.equal, gradients, (p.grad for p in model.parameters())))
        assert torch.equal(torch.get_rng_state(), generators[0])
        assert (np.random.get_state()[1] == generators[1]).all()  # type: ignore[index] # noqa: NPY002
        del before, gradients, after
    with gpu:
        del model, optimizer
        assert config_of(model=Model).batch_size == pytest.approx(n, rel=0.05)


def test_a_function_that_returns_a_model_of_the_program(gpu: SimulatedGPU) -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with gpu:
        assert config_of(model=lambda: model).batch_size > 100
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_steps_that_read_values_are_measured(gpu: SimulatedGPU) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return y if y.sum().item() > 0 else -y

    with gpu:
        assert config_of(model=Looks).batch_size > 100


def test_a_copied_config_does_not_measure_again(gpu: SimulatedGPU) -> None:
    config = config_of(loss=None, model=nn.Linear(64, 10))
    with gpu:
        n = config.batch_size
    copied = pickle.loads(pickle.dumps(config))
    retries, caps = gpu.retries, len(gpu.caps)
    assert copied.batch_size == n
    assert (gpu.retries, len(gpu.caps)) == (retries, caps)


def test_a_feeder_gets_the_rest_of_the_limit(gpu: SimulatedGPU) -> None:
    with gpu:
        config = config_of(preferred_batch_size=300)
        left = config.for_feeder()
        budget = config.budget
    assert left.gpu_memory_limit == LIMIT - budget.step_bytes
    assert left.preferred_batch_size == 300
    assert budget.feeder.device_bytes <= LIMIT - budget.step_bytes
    assert budget.step.breakdown["optimizer state"] >= 2 * budget.step.breakdown["parameters"]
    with pinfeed.Feeder(np.zeros((900, 64), "f4"), config=left, device="cpu") as feeder:
        assert feeder.plan.batch_size == 300


def test_a_compiled_model_is_copied_with_its_compiler() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    model = torch.compile(mlp(), backend=backend)
    before = copy.deepcopy(model.state_dict())
    step = TrainingStep(model, samples_of((64,), "float32", "input"), None)
    phases = StepCopy(step, torch.device("cpu")).phases(4)
    for _ in range(6):
        next(phases)
    assert calls
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
