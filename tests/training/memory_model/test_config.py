"""Config with a model: the largest batch that fits, and the budget of each byte."""

import dataclasses
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.programs import Programs
from torch import nn

import pinfeed
from pinfeed import Config, GiB, KiB, MiB, errors
from pinfeed.testing.sim import SimDevice
from pinfeed.training.memory_model.real_steps import is_out_of_memory
from pinfeed.training.memory_model.report import largest_that_fits
from pinfeed.training.memory_model.training_step import bytes_on_device

pytestmark = pytest.mark.usefixtures("planned")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


MODEL: dict[str, Any] = {
    "model": mlp,
    "input_shape": (64,),
    "output_shape": (),
    "output_dtype": "int64",
    "loss": nn.functional.cross_entropy,
    "optimizer": torch.optim.SGD,
}


@given(
    slope=st.floats(0, 1e6),
    base=st.floats(0, 1e9),
    step=st.integers(1, 1 << 21),
    limit=st.integers(0, 10**10),
    most=st.one_of(st.none(), st.integers(0, 10**6)),
)
def test_the_largest_that_fits(
    slope: float, base: float, step: int, limit: int, most: int | None
) -> None:
    calls = []

    def need(n: int) -> float:
        calls.append(n)
        return -(-max(base, slope * n) // step) * step

    if most is None and slope < 1:
        # Without this bound the search would not end.
        most = 10**6
    found = largest_that_fits(need, limit, most)
    assert 0 <= found <= (most if most is not None else found)
    assert not found or need(found) <= limit
    assert (most is not None and found == most) or need(found + 1) > limit
    assert len(calls) < 100


def test_a_model_that_refuses_a_batch_of_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    arguments: dict[str, Any] = {"cpu_memory_limit": GiB(1), "model": model, "input_shape": (8,)}
    assert Config(gpu_memory_limit=GiB(1), preferred_batch_size=16, **arguments).batch_size == 16
    with pytest.raises(errors.NotEnoughGPUMemory, match="a batch of 2 samples needs"):
        Config(gpu_memory_limit=MiB(1), **arguments)
    with pytest.raises(errors.EstimateError, match="more than 1 value"):
        Config(gpu_memory_limit=GiB(1), preferred_batch_size=1, **arguments)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("gpu", "one_read_count"), [(MiB(24), 7), (MiB(64), 1)])
def test_one_more_read_would_not_fit_on_the_gpu(gpu: int, one_read_count: int) -> None:
    config = Config(
        cpu_memory_limit=GiB(1),
        gpu_memory_limit=gpu + MiB(64),
        one_read_count=one_read_count,
        **MODEL,
    )
    assert config.batch_size % one_read_count == 0
    assert config.batch_size > 100
    assert (
        config.budget.gpu_bytes
        <= gpu + MiB(64)
        < config._search.at(config.batch_size + one_read_count).gpu_bytes
    )
    assert config.budget.gpu_memory_limit == gpu + MiB(64)


def test_one_more_would_not_fit_on_the_host() -> None:
    config = Config(cpu_memory_limit=MiB(32), device="cpu", **MODEL)
    assert config.budget.gpu_memory_limit is None
    assert config.budget.cpu_bytes <= MiB(32) < config._search.at(config.batch_size + 1).cpu_bytes
    # On a GPU only batches are on the host.
    on_gpu = Config(cpu_memory_limit=MiB(6), gpu_memory_limit=GiB(1), **MODEL)
    assert on_gpu.budget.cpu_bytes <= MiB(6) < on_gpu._search.at(on_gpu.batch_size + 1).cpu_bytes


@pytest.mark.parametrize(
    ("one_read_count", "preferred", "total", "batch_size"),
    [
        (2, 16, None, 16),
        (3, 16, None, 15),
        (4, 6, None, 4),
        (5, 4, None, 5),
        (1, 100, 40, 40),
        (3, None, 4, 12),
        (1, 1, None, 1),
    ],
)
def test_preferred_batch_sizes(
    one_read_count: int, preferred: int | None, total: int | None, batch_size: int
) -> None:
    config = Config(
        gpu_memory_limit=GiB(1),
        one_read_count=one_read_count,
        preferred_batch_size=preferred,
        total_sample_count=total,
        **MODEL,
    )
    assert config.batch_size == batch_size


def test_a_small_model_has_a_batch_that_training_wants() -> None:
    arguments: dict[str, Any] = {
        "cpu_memory_limit": GiB(1),
        "gpu_memory_limit": GiB(1),
        "model": nn.Linear(2, 2),
        "input_shape": (2,),
    }
    assert Config(**arguments).batch_size == 1 << 16
    assert Config(one_read_count=3, **arguments).batch_size == 65_535
    assert Config(preferred_batch_size=100_000, **arguments).batch_size == 100_000
    assert Config(one_read_count=100_000, **arguments).batch_size == 100_000


def test_counts_of_batches_and_samples() -> None:
    config = Config(
        gpu_memory_limit=GiB(1),
        one_read_count=2,
        preferred_batch_size=16,
        total_sample_count=2050,
        depth=3,
        **MODEL,
    )
    assert (config.batch_size, config.batch_count, config.sample_count_in_memory) == (
        16,
        256,
        5 * 16,
    )
    assert (
        Config(gpu_memory_limit=GiB(1), preferred_batch_size=16, **MODEL).sample_count_in_memory
        == 4 * 16
    )
    with pytest.raises(errors.ArgumentError, match="unknown without total_sample_count"):
        _ = Config(gpu_memory_limit=GiB(1), preferred_batch_size=16, **MODEL).batch_count
    with pytest.raises(errors.ArgumentError, match="the batch size is unknown without a model"):
        _ = Config().batch_size


def test_limits_that_cannot_hold() -> None:
    with pytest.raises(errors.NotEnoughGPUMemory) as refused:
        Config(gpu_memory_limit=MiB(1), one_read_count=64, **MODEL)
    need = int(re.search(r"\((\d+) bytes\): ", str(refused.value))[1])  # type: ignore[index]
    assert "a batch of 64 samples needs" in str(refused.value)
    # Without prefetching, the step would not fit either.
    assert str(refused.value).endswith(
        "gpu_memory_limit is 1.0 MiB (1048576 bytes); raise gpu_memory_limit, or train in chunks "
        "or with checkpoints (BigBatch)"
    )
    Config(gpu_memory_limit=need, one_read_count=64, **MODEL)
    with pytest.raises(
        errors.NotEnoughGPUMemory,
        match=r"raise gpu_memory_limit, or lower depth \(now 2\), or train in chunks",
    ):
        Config(gpu_memory_limit=need - 1, one_read_count=64, **MODEL)


@pytest.mark.parametrize(
    ("limits", "name", "has_step"),
    [
        ({}, "gpu", True),
        ({"device": "cpu"}, "cpu", True),
        ({"gpu_memory_limit": GiB(1)}, "cpu", False),
    ],
    ids=["GPU", "CPU", "host memory of a GPU"],
)
def test_advice_is_that_which_may_help(limits: dict[str, Any], name: str, has_step: bool) -> None:
    def message(limit: int) -> str:
        arguments = {**MODEL, **limits, f"{name}_memory_limit": limit}
        with pytest.raises(errors.BudgetError, match="a batch of 1 sample needs") as refused:
            Config(**arguments)
        return str(refused.value)

    far = message(KiB(1))
    chunks = ", or train in chunks or with checkpoints (BigBatch)" if has_step else ""
    # A step that exceeds the limit by itself would not fit without prefetching either.
    lower = "" if has_step else ", or lower depth (now 2)"
    assert far.endswith(f"; raise {name}_memory_limit{lower}{chunks}")
    near = message(int(re.search(r"\((\d+) bytes\): ", far)[1]) - 1)  # type: ignore[index]
    assert near.endswith(f"; raise {name}_memory_limit, or lower depth (now 2){chunks}")
    with pytest.raises(errors.NotEnoughCPUMemory, match="cpu_memory_limit is 64"):
        Config(cpu_memory_limit=KiB(64), gpu_memory_limit=GiB(1), **MODEL)
    with pytest.raises(errors.NotEnoughCPUMemory, match="activations"):
        Config(cpu_memory_limit=MiB(1), device="cpu", one_read_count=1000, **MODEL)
    assert issubclass(errors.NotEnoughGPUMemory, errors.BudgetError)


def test_a_table_of_where_each_byte_goes() -> None:
    config = Config(
        cpu_memory_limit=GiB(1), gpu_memory_limit=MiB(96), preferred_batch_size=1000, **MODEL
    )
    budget = config.budget
    text = str(budget)
    for what in (
        "parameters",
        "gradients",
        "activations",
        "workspace",
        "staging",
        "batches of 1000 samples",
        "(limit 96.0 MiB)",
    ):
        assert what in text
    assert budget.gpu_bytes == sum(item.total for item in budget.items if item.place == "device")
    batches = next(item for item in budget.items if item.what == "batches")
    assert batches.total == 4 * (-(-1000 * 256 // 512) * 512 + -(-1000 * 8 // 512) * 512)
    assert [item.what for item in budget.items].count("batch") == 0, (
        "the step's batch is one of the feeder's"
    )


def test_the_feeder_gets_the_remaining_memory() -> None:
    config = Config(cpu_memory_limit=GiB(1), gpu_memory_limit=MiB(96), **MODEL)
    left = config.for_feeder()
    assert left.gpu_memory_limit is not None
    assert left.gpu_memory_limit + config.budget.step_bytes == MiB(96)
    assert config.budget.feeder.device_bytes <= left.gpu_memory_limit
    x, y = np.zeros((10_000, 64), np.float32), np.zeros(10_000, np.int64)
    config = Config(cpu_memory_limit=MiB(64), device="cpu", preferred_batch_size=300, **MODEL)
    with pinfeed.Feeder((x, y), config=config, device="cpu") as feeder:
        assert feeder.plan.batch_size == 300
        assert feeder.plan.cpu_memory_limit == MiB(64) - config.budget.step_bytes
        assert sum(len(a) for a, _ in feeder) == 10_000
    without = Config(cpu_memory_limit=MiB(64))
    assert without.for_feeder() is without


def test_an_existing_model_stays_unchanged() -> None:
    model = mlp().eval()
    optimizer = torch.optim.Adam(model.parameters())
    config = Config(gpu_memory_limit=MiB(96), **(MODEL | {"model": model, "optimizer": optimizer}))
    assert config.batch_size > 1
    assert not model.training
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert dataclasses.replace(config, preferred_batch_size=2).batch_size == 2
    same = Config(
        gpu_memory_limit=MiB(96),
        **(MODEL | {"model": mlp, "optimizer": torch.optim.Adam}),
    )
    assert same.batch_size == config.batch_size


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"one_read_count": 0}, "one_read_count=0: expected a whole number, at least 1"),
        ({"total_sample_count": 0.5}, "total_sample_count=0.5"),
        ({"input_shape": None}, "model= needs input_shape="),
        ({"output_dtype": "nothing"}, "output_dtype='nothing'"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.ArgumentError, match=said):
        Config(gpu_memory_limit=GiB(1), **(MODEL | arguments))


def test_without_a_gpu() -> None:
    with pytest.raises(
        errors.ArgumentError,
        match="free GPU memory is unknown, because this machine has no GPU; give",
    ):
        Config(device="cuda", **MODEL)
    assert (
        Config(cpu_memory_limit=MiB(64), preferred_batch_size=4, **MODEL).budget.gpu_memory_limit
        is None
    )


def test_the_heap_gives_back_what_is_freed(programs: Programs) -> None:
    """This runs in a process of its own, because the setting cannot be undone."""
    script = (
        "import torch, pinfeed, sys\n"
        "from pinfeed.memory.host import resident_bytes\n"
        "limits = {'cpu_memory_limit': '64MiB', 'device': 'cpu', 'preferred_batch_size': 2}\n"
        "model = {'model': torch.nn.Linear(2, 2), 'input_shape': (2,)}\n"
        "pinfeed.Config(**limits, **model, enforce=sys.argv[1] == 'enforce')\n"
        "kept = []\n"
        "for n in range(10):\n"
        # Each takes 2 MiB, below a block that is kept.
        "    many = [torch.ones(2 << 18) for _ in range(20)]\n"
        "    kept.append(torch.ones(1 << 16))\n"
        "    del many\n"
        "print(resident_bytes()['anonymous'])\n"
    )
    enforced, not_enforced = (int(programs.run(script, word).stdout) for word in ("enforce", "not"))
    assert enforced < not_enforced - (20 << 20)


@pytest.mark.gpu
def test_torch_gets_no_more_than_the_limit() -> None:
    config: Config = Config(gpu_memory_limit=GiB(2), preferred_batch_size=100_000, **MODEL)
    try:
        assert config.budget.gpu_bytes <= GiB(2)
        assert "the limit is set" in str(config.budget)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(GiB(2), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 9 bytes"
        ),
        np._core._exceptions._ArrayMemoryError((3,), np.dtype("f4")),  # type: ignore[attr-defined]
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_of_every_kind(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_other_errors_are_not_out_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_config_can_be_pickled_and_copied() -> None:
    arguments = MODEL | {"model": None, "input_shape": {"input": (64,)}}
    config = Config(gpu_memory_limit=MiB(96), preferred_batch_size=8, **arguments)
    assert pickle.loads(pickle.dumps(config)).preferred_batch_size == 8
    sized = Config(gpu_memory_limit=MiB(96), preferred_batch_size=8, **MODEL)
    assert pickle.loads(pickle.dumps(sized)).batch_size == 8


def test_an_existing_model_is_not_counted_twice() -> None:
    model = nn.Linear(1000, 1000)
    model.weight.grad = torch.zeros(1000, 1000)
    assert bytes_on_device(model, torch.device("cpu")) == 4 * (2 * 1000 * 1000 + 1000)
    assert (
        bytes_on_device(model, torch.device("cuda"))
        == bytes_on_device(mlp, torch.device("cpu"))
        == 0
    )


@pytest.mark.parametrize(
    ("config", "device", "note"),
    [
        (Config(gpu_memory_limit=MiB(1)), "cpu", "gpu_memory_limit of config has no effect"),
        (Config(gpu_memory_limit=GiB(1), **MODEL), "cpu", "gpu_memory_limit of config has no"),
        (Config(device="cuda"), "cpu", "device='cuda' of config has no effect"),
        (Config(cpu_memory_limit=GiB(1)), "cpu", ""),
        (Config(device="cpu"), "cpu", ""),
        (Config(gpu_memory_limit=MiB(1)), SimDevice(), ""),
    ],
    ids=["limit", "limit and model", "device", "no GPU limit", "CPU", "batches on a device"],
)
def test_a_plan_on_the_cpu_says_that_gpu_limits_have_no_effect(
    config: Config, device: Any, note: str
) -> None:
    with pinfeed.Feeder(np.zeros((100, 64), "float32"), config=config, device=device) as feeder:
        found = [line for line in feeder.plan.notes if "has no effect on the feeder" in line]
    assert len(found) == bool(note)
    assert all(line.startswith(note) for line in found)


def lazy_model() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            lazy_model,
            errors.ArgumentError,
            "call the model with one batch first",
        ),
        (lambda: lazy_model, errors.ArgumentError, "makes a lazy module"),
        (nn.ReLU, errors.EstimateError, "no parameter that requires a gradient"),
    ],
    ids=["lazy", "makes a lazy one", "nothing to train"],
)
def test_models_without_parameters_to_train(model: Any, error: Any, message: str) -> None:
    limits = {"cpu_memory_limit": "1GiB", "gpu_memory_limit": "1GiB"}
    with pytest.raises(error, match=message):
        Config(**limits, model=model(), input_shape=(8,)).batch_size  # noqa: B018


def test_more_samples_than_any_batch_has_only_bound_the_batch() -> None:
    limits = {"cpu_memory_limit": "1GiB", "gpu_memory_limit": "1GiB"}
    shapes = {"input_shape": (8,), "total_sample_count": 10**15}
    assert Config(**limits, model=nn.Linear(8, 1), **shapes).batch_size > 1


@pytest.mark.parametrize("device", ["gpu", 3.5, "mps"])
def test_devices_that_do_not_exist(device: Any) -> None:
    with pytest.raises(
        errors.DeviceError, match=f"device='?{device}'? is not .*; expected 'auto', 'cpu', 'cuda'"
    ):
        Config(device=device, **MODEL)
