"""From memory limits to a batch size: the largest that fits, never one byte more."""

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from pinfeed import Config, Feeder, GiB, MiB
from pinfeed.errors import ArgumentError, BudgetError
from pinfeed.memory.host import FreeHostMemory
from pinfeed.memory.limits import check_depth
from pinfeed.memory.plan import Allocation, Plan, Route
from pinfeed.memory.units import human
from pinfeed.pipeline.loop_transforms import NO_TRANSFORMS
from pinfeed.pipeline.planner import Planner
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.rows import drawn, sequential
from pinfeed.testing import SimDevice, lazy

# More free memory than any limit in these tests.
FREE = GiB(1000)


class Rows:
    """Store without memory, of any size."""

    dtype = np.dtype(np.uint8)

    def __init__(self, n_rows: int, nbytes: int, *, writable: bool, resident_bytes: int) -> None:
        self.n_rows = n_rows
        self.row_shape = (nbytes,)
        self.writable = writable
        self.resident_bytes = resident_bytes

    def gather(self, rows: Any, out: Any) -> None: ...
    def scatter(self, rows: Any, values: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Device(SimDevice):
    """Device that reads some of the stores directly."""

    def __init__(self, load: "Load") -> None:
        super().__init__(lazy)
        self.unified = load.unified  # type: ignore[misc]
        self._load = load
        self.free = FREE

    def reaches(self, source: Any) -> bool:
        return not self._load.staged[self._load.stores.index(source)]

    def free_bytes(self) -> int:
        return self.free


@dataclass(frozen=True)
class Load:
    """The rows that a feeder moves."""

    row_nbytes: tuple[int, ...]
    writable: tuple[bool, ...]
    staged: tuple[bool, ...]
    resident_bytes: int
    n_rows: int
    unified: bool
    repeats: bool = True

    @functools.cached_property
    def stores(self) -> list[Rows]:
        resident = [self.resident_bytes] + [0] * len(self.row_nbytes)
        return [
            Rows(self.n_rows, nbytes, writable=writable, resident_bytes=more)
            for nbytes, writable, more in zip(
                self.row_nbytes, self.writable, resident, strict=False
            )
        ]

    @property
    def route(self) -> Route:
        return "staged" if any(self.staged) else "direct"

    def planner(self, depth: int, config: Config | None = None, free: int = FREE) -> Planner:
        device = Device(self)
        device.free = free
        order = drawn(self.n_rows, 1) if self.repeats else sequential()
        tree = StoreTree(self.stores)
        schedule = PrefetchSchedule(depth, writes=True)
        return Planner(tree, order, None, config, schedule, device, NO_TRANSFORMS, None)

    def allocations(self, batch_size: int, depth: int) -> tuple[Allocation, ...]:
        return tuple(self.planner(depth).allocations(batch_size, depth))


def load_of(**changes: Any) -> Load:
    whole = {
        "row_nbytes": (512,),
        "writable": (False,),
        "resident_bytes": 0,
        "n_rows": 10**6,
        "unified": False,
    } | changes
    return Load(**({"staged": (True,) * len(whole["row_nbytes"])} | whole))  # type: ignore[arg-type]


def loads() -> st.SearchStrategy[Load]:
    store = st.tuples(
        st.one_of(st.integers(0, 64), st.integers(0, 1 << 20)), st.booleans(), st.booleans()
    )

    def load(stores: list[tuple[int, bool, bool]], **rest: Any) -> Load:
        row_nbytes, writable, staged = zip(*stores, strict=True)
        return Load(row_nbytes, writable, staged, **rest)

    return st.builds(
        load,
        st.lists(store, min_size=1, max_size=4),
        resident_bytes=st.sampled_from([0, 1, MiB(16)]),
        n_rows=st.one_of(st.integers(1, 50), st.integers(1, 10**9)),
        unified=st.booleans(),
        repeats=st.booleans(),
    )


LIMIT = st.one_of(st.integers(1, MiB(64)), st.integers(MiB(3), GiB(64)))
DEPTH = st.integers(0, 5)
PREFERRED = st.one_of(st.none(), st.integers(1, 50), st.integers(1, 10**7))


def plan_of(load: Load, cpu: int, gpu: int, depth: int = 2, preferred: int | None = None) -> Plan:
    config = Config(
        cpu_memory_limit=cpu, gpu_memory_limit=gpu, depth=depth, preferred_batch_size=preferred
    )
    return load.planner(depth, config).plan(None)[0]


def plan_or_none(*args: Any, **kwargs: Any) -> Plan | None:
    try:
        return plan_of(*args, **kwargs)
    except BudgetError:
        return None


# -- the plan --------------------------------------------------------------------------------------
@given(load=loads(), cpu=LIMIT, gpu=LIMIT, depth=DEPTH, preferred=PREFERRED)
def test_a_plan_keeps_the_limits_and_is_the_largest_that_does(
    load: Load, cpu: int, gpu: int, depth: int, preferred: int | None
) -> None:
    def excess(batch_size: int) -> bool:
        larger = Plan(batch_size, depth, load.route, load.allocations(batch_size, depth))
        return larger.host_bytes > cpu or (not load.unified and larger.device_bytes > gpu)

    plan = plan_or_none(load, cpu, gpu, depth, preferred)
    if plan is None:
        assert excess(1)
        return
    largest = min(
        load.n_rows, preferred or max(1, min(1 << 16, MiB(64) // max(1, sum(load.row_nbytes))))
    )
    assert 1 <= plan.batch_size <= largest
    assert plan.host_bytes <= cpu
    assert plan.device_bytes == 0 if load.unified else plan.device_bytes <= gpu
    assert plan.batch_size == largest or excess(plan.batch_size + 1)
    assert (plan.depth, plan.n_slots, plan.route) == (depth, depth + 1, load.route)
    assert (plan.cpu_memory_limit, plan.gpu_memory_limit) == (cpu, None if load.unified else gpu)


@given(load=loads(), cpu=LIMIT, gpu=LIMIT, more=st.integers(0, MiB(64)), depth=DEPTH)
def test_more_memory_never_gives_a_smaller_batch(
    load: Load, cpu: int, gpu: int, more: int, depth: int
) -> None:
    small = plan_or_none(load, cpu, gpu, depth)
    assume(small is not None)
    assert small is not None
    for large in (
        plan_of(load, cpu + more, gpu, depth),
        plan_of(load, cpu, gpu + more, depth),
        plan_of(load, cpu + more, gpu + more, depth),
    ):
        assert large.batch_size >= small.batch_size


@given(load=loads(), cpu=LIMIT, gpu=LIMIT, depth=DEPTH)
def test_more_depth_never_gives_a_larger_batch(load: Load, cpu: int, gpu: int, depth: int) -> None:
    deep = plan_or_none(load, cpu, gpu, depth + 1)
    assert deep is None or plan_of(load, cpu, gpu, depth).batch_size >= deep.batch_size


@given(load=loads(), batch_size=st.integers(1, 10**6), depth=DEPTH)
def test_a_plan_is_the_sum_of_its_items(load: Load, batch_size: int, depth: int) -> None:
    items = load.allocations(batch_size, depth)
    plan = Plan(batch_size, depth, load.route, items)
    assert all(item.total == item.count * item.nbytes for item in items)
    assert plan.host_bytes + plan.device_bytes == sum(item.total for item in items)
    assert plan.device_bytes == sum(item.total for item in items if item.place == "device")
    assert (
        plan.pinned_bytes
        == sum(item.total for item in items if item.place == "pinned")
        <= plan.host_bytes
    )
    assert len({item.what for item in items}) == len(items)
    assert all(item.count > 0 for item in items)


@given(load=loads(), batch_size=st.integers(1, 10**6), depth=DEPTH)
def test_memory_grows_with_the_batch(load: Load, batch_size: int, depth: int) -> None:
    small, large = (
        Plan(n, depth, load.route, load.allocations(n, depth)) for n in (batch_size, batch_size + 1)
    )
    assert small.host_bytes < large.host_bytes
    assert small.device_bytes <= large.device_bytes


@given(load=loads(), batch_size=st.integers(1, 10**6), depth=DEPTH)
def test_all_batches_that_exist_at_a_time_are_planned(
    load: Load, batch_size: int, depth: int
) -> None:
    items = {item.what: item for item in load.allocations(batch_size, depth)}
    batch_nbytes = batch_size * sum(load.row_nbytes)
    written_nbytes = batch_size * sum(
        nbytes for nbytes, writable in zip(load.row_nbytes, load.writable, strict=True) if writable
    )
    batches = items["batches"]
    assert (batches.count, batches.place) == (depth + 2, "host" if load.unified else "device")
    assert batches.nbytes >= batch_nbytes
    held = items.get("values that are written back")
    assert (held is not None) == any(load.writable)
    assert held is None or (held.place == batches.place and held.nbytes >= written_nbytes)
    assert held is None or held.count == (max(depth, 2) if depth else 1) + depth + 1
    assert ("staging" in items) == (not load.unified and any(load.staged))
    if "staging" in items:
        assert (items["staging"].count, items["staging"].place) == (depth + 1, "pinned")
        staged = [
            batch_size * nbytes
            for nbytes, staged in zip(load.row_nbytes, load.staged, strict=True)
            if staged
        ]
        assert sum(staged) <= items["staging"].nbytes <= sum(staged) + 4096 * len(staged)
        assert ("staging of a write-back" in items) == any(
            map(all, zip(load.writable, load.staged, strict=True))
        )
    assert items["row indices"].nbytes == batch_size * 8
    for what, place in (("page-locked row indices", "pinned"), ("uploaded row indices", "device")):
        # Only kernels need these.
        assert (what in items) == (not load.unified and not all(load.staged))
        assert what not in items or (items[what].place, items[what].nbytes >= batch_size * 8) == (
            place,
            True,
        )
    # Only rows that occur twice in an epoch are shared.
    is_shared = any(load.writable) and depth > 0 and load.repeats
    for what, place in (
        ("rows of recent batches", "host"),
        ("comparison of rows", "host"),
        ("positions of shared rows", "host"),
        ("staged positions of shared rows", "pinned"),
        ("uploaded positions of shared rows", "device"),
        ("shared rows that are copied", "device"),
    ):
        assert (what in items) == (is_shared and (place == "host" or not load.unified))
        assert what not in items or items[what].place == place
    mapped = items.get("buffers and indices of the stores")
    assert (mapped.total if mapped else 0) == load.resident_bytes


def test_a_read_only_load_has_no_write_backs() -> None:
    read_only = plan_of(load_of(), MiB(64), MiB(64))
    writable = plan_of(load_of(writable=(True,)), MiB(64), MiB(64))
    assert writable.batch_size < read_only.batch_size
    assert not any("write-back" in item.what for item in read_only.items)


def test_a_plan_in_numbers() -> None:
    plan = plan_of(
        load_of(row_nbytes=(1024, 8), writable=(False, False)),
        MiB(64),
        MiB(16),
        depth=2,
        preferred=1000,
    )
    by_name = {item.what: (item.place, item.count, item.nbytes) for item in plan.items}
    assert plan.batch_size == 1000
    assert by_name["batches"] == ("device", 4, 1_024_000 + 8192)
    assert by_name["staging"] == ("pinned", 3, 1_024_000 + 8192)
    assert by_name["row indices"] == ("host", 5, 8000)
    assert plan.device_bytes == 4 * 1_032_192
    assert plan.pinned_bytes == 3 * 1_032_192
    assert plan.host_bytes == plan.pinned_bytes + 40_000 + MiB(3)


def test_the_batch_is_bounded_by_the_preferred_size_and_the_rows() -> None:
    assert plan_of(load_of(), GiB(1), GiB(1), preferred=77).batch_size == 77
    assert plan_of(load_of(n_rows=50), GiB(1), GiB(1), preferred=77).batch_size == 50
    assert plan_of(load_of(n_rows=50), GiB(1), GiB(1)).batch_size == 50


@pytest.mark.parametrize(
    ("row_nbytes", "batch_size"),
    [
        ((4,), 65_536),
        ((1000, 24), 65_536),
        ((2048,), 32_768),
        ((MiB(40), 8), 1),
        ((MiB(100),), 1),
        ((0,), 65_536),
    ],
)
def test_without_a_preferred_size_a_batch_is_bounded(
    row_nbytes: tuple[int, ...], batch_size: int
) -> None:
    load = load_of(row_nbytes=row_nbytes, writable=(False,) * len(row_nbytes))
    plan = plan_of(load, GiB(900), GiB(900))
    assert plan.batch_size == batch_size
    assert plan.notes == (
        (
            f"batches have {batch_size:,} rows, because larger ones move no more rows per second; "
            "set preferred_batch_size for larger batches"
        ),
    )
    more = plan_of(load, GiB(900), GiB(900), preferred=100_000)
    assert (more.batch_size, more.notes) == (
        100_000 if sum(row_nbytes) < MiB(1) else more.batch_size,
        (),
    )
    assert more.batch_size > batch_size


def test_a_bound_that_does_not_decide_is_not_mentioned() -> None:
    assert plan_of(load_of(n_rows=65_536), GiB(1), GiB(1)).notes == ()
    assert plan_of(load_of(), MiB(16), MiB(16)).notes == ()


def test_host_memory_is_one_limit_where_batches_live_there() -> None:
    plan = plan_of(load_of(unified=True), MiB(32), 1)
    assert plan.device_bytes == plan.pinned_bytes == 0
    assert MiB(31) < plan.host_bytes <= MiB(32)


def set_free_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    free = FreeHostMemory(nbytes, nbytes)
    monkeypatch.setattr("pinfeed.pipeline.planner.free_host_memory", lambda: free)


@pytest.mark.parametrize("headroom", [0.0, 0.1, 0.25, 0.999])
def test_without_a_limit_free_memory_less_headroom_is_the_limit(
    headroom: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free_memory(monkeypatch, GiB(40))
    load = load_of(row_nbytes=(100_000,), n_rows=10**9)
    plan, _ = load.planner(2, Config(headroom=headroom), GiB(8)).plan(None)
    assert (plan.cpu_memory_limit, plan.gpu_memory_limit) == (
        int(GiB(40) * (1 - headroom)),
        int(GiB(8) * (1 - headroom)),
    )
    assert plan == plan_of(load, int(GiB(40) * (1 - headroom)), int(GiB(8) * (1 - headroom)))


def test_a_limit_that_is_given_needs_no_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(cpu_memory_limit=MiB(100), gpu_memory_limit=MiB(10))
    plans = []
    for free in (0, FREE):
        set_free_memory(monkeypatch, free)
        plans.append(load_of().planner(2, config, free).plan(None)[0])
    assert plans[0] == plans[1]


# -- refusals --------------------------------------------------------------------------------------
@given(load=loads(), cpu=LIMIT, gpu=LIMIT, depth=DEPTH)
def test_a_refusal_names_the_need_and_the_limit(load: Load, cpu: int, gpu: int, depth: int) -> None:
    try:
        plan_of(load, cpu, gpu, depth)
    except BudgetError as error:
        message = str(error)
    else:
        return
    least = Plan(1, depth, load.route, load.allocations(1, depth))
    on_device = not load.unified and least.device_bytes > gpu
    name, limit, need, kind = (
        ("gpu", gpu, least.device_bytes, "device")
        if on_device
        else ("cpu", cpu, least.host_bytes, "host")
    )
    assert need > limit
    assert f"batches of one row need {human(need)} ({need} bytes) of {kind} memory" in message
    assert f"{name}_memory_limit is {human(limit)} ({limit} bytes)" in message
    synchronous = Plan(1, 0, load.route, load.allocations(1, 0))
    least_need = synchronous.device_bytes if on_device else synchronous.host_bytes
    helps = depth and least_need <= limit
    advice = f"lower depth (now {depth}) or raise" if helps else "raise"
    assert f"; {advice} {name}_memory_limit" in message
    assert all(
        (f"for {item.what}" in message) == ((item.place == "device") == on_device)
        for item in least.items
    )


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("unified", [False, True])
def test_a_refusal_is_exact_to_the_byte(short: int, unified: bool) -> None:
    load = load_of(row_nbytes=(10_000_000,), unified=unified, writable=(True,))
    least = Plan(1, 3, "staged", load.allocations(1, 3))
    for cpu, gpu in (
        (least.host_bytes - short, FREE),
        (least.host_bytes, least.device_bytes - short),
    ):
        plan = plan_or_none(load, cpu, max(1, gpu), 3)
        refused = short and (cpu < least.host_bytes or (gpu < least.device_bytes and not unified))
        assert (plan is None) == bool(refused)
        assert plan is None or plan.batch_size == 1


@pytest.mark.parametrize(
    ("cpu", "gpu", "limit"),
    [(100, FREE, "cpu_memory_limit is 90 B (90 bytes)"), (FREE, 0, "gpu_memory_limit is 0 B (0 ")],
)
def test_a_refusal_for_lack_of_free_memory_says_so(
    cpu: int, gpu: int, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free_memory(monkeypatch, cpu)
    with pytest.raises(BudgetError, match=re.escape(limit)) as refusal:
        load_of().planner(2, Config(), gpu).plan(None)
    assert "bytes), the free memory minus the headroom; raise" in str(refusal.value)


def test_a_refusal_for_a_limit_does_not_mention_free_memory() -> None:
    with pytest.raises(BudgetError) as refusal:
        plan_of(load_of(), 100, 100)
    assert "free memory" not in str(refusal.value)


@pytest.mark.parametrize("name", ["cpu_memory_limit", "gpu_memory_limit", "preferred_batch_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_are_positive(name: str, value: int) -> None:
    with pytest.raises(ArgumentError, match=f"{name}={value}: expected a whole number, at least 1"):
        Config(**{name: value})


@pytest.mark.parametrize("headroom", [-0.1, 1.0, 1, 7, float("nan"), float("inf")])
def test_the_headroom_is_a_share(headroom: float) -> None:
    with pytest.raises(ArgumentError, match=r"headroom=.*: expected a share in \[0, 1\)"):
        Config(headroom=headroom)


def test_the_depth_is_a_number_of_batches() -> None:
    with pytest.raises(
        ArgumentError,
        match=r"depth=-1: expected a whole number, from 0 to 1,024 \(0 is the synchronous loop\)",
    ):
        Config(depth=-1)
    with pytest.raises(ArgumentError, match="depth=-2"):
        check_depth(-2)
    check_depth(0)
    assert Config(depth=0).depth == 0


def test_a_config_has_names_and_does_not_change() -> None:
    with pytest.raises(TypeError):
        Config(1)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().depth = 3  # type: ignore[misc]
    assert Config() == Config(depth=None, headroom=0.1)


# -- messages --------------------------------------------------------------------------------------


def test_a_plan_in_words() -> None:
    text = str(
        plan_of(
            load_of(row_nbytes=(1024,), writable=(True,), resident_bytes=MiB(16)),
            GiB(1),
            MiB(64),
            depth=3,
            preferred=1024,
        )
    )
    first, host, device, *items = text.splitlines()
    assert first == "batches of up to 1024 rows, depth=3, staged route"
    assert re.fullmatch(
        r"host memory: \d+\.\d MiB \(limit 1\.0 GiB\), 6\.2 MiB of it page-locked \(pinned\)", host
    )
    assert device == "GPU memory: 13.3 MiB (limit 64.0 MiB)"
    assert "  device: 5 x 1.0 MiB for batches" in items
    assert "  pinned: 4 x 1.0 MiB for staging" in items
    assert "  host: 1 x 16.0 MiB for buffers and indices of the stores" in items
    assert "  device: 1 x 1.0 MiB for shared rows that are copied" in items
    assert len(items) == 13


def test_a_plan_without_limits_in_words() -> None:
    load = load_of(unified=True, staged=(False,))
    first, host, *items = str(Plan(10, 0, "direct", load.allocations(10, 0))).splitlines()
    assert first == "batches of up to 10 rows, depth=0, rows are copied straight into each batch"
    assert host == "host memory: 3.0 MiB"
    assert [item.split(" x ")[0] for item in items] == ["  host: 2", "  host: 3", "  host: 1"]


def test_only_loops_that_write_reserve_memory_for_it() -> None:
    array = np.random.default_rng(0).random((4000, 64), np.float32)
    expected = array + 1
    config = Config(cpu_memory_limit="4MiB", depth=2)
    read_only = array.copy()
    read_only.flags.writeable = False
    with Feeder(read_only, config=config, device="cpu") as feeder:
        size = feeder.batch_size
    with Feeder(array, config=config, device="cpu", shuffle=True) as feeder:
        assert feeder.batch_size == size < 4000
        assert not any("written back" in item.what for item in feeder.plan.items)
        for batch in feeder.batches():
            batch.write_back(batch.data + 1)
        assert feeder.batch_size == size
        assert any("written back" in item.what for item in feeder.plan.items)
        assert feeder.plan.host_bytes <= MiB(4)
        # There is no memory for more.
        assert feeder.plan.depth == feeder.stats.depth == 0
    np.testing.assert_array_equal(array, expected)
    config = Config(cpu_memory_limit="4MiB", preferred_batch_size=100, depth=2)
    with Feeder(array, config=config, device="cpu") as feeder:
        assert all(feeder.batches())
        assert feeder.plan.depth == 2


def test_write_backs_that_a_limit_cannot_hold_are_refused() -> None:
    config = Config(cpu_memory_limit="4MiB", depth=0)
    with Feeder(np.zeros((4000, 64)), config=config, device="cpu") as feeder:
        n_batches = len(list(feeder))
        with pytest.raises(BudgetError, match="give a smaller preferred_batch_size"):
            feeder.batches()
        assert len(list(feeder)) == n_batches


def test_a_model_and_its_feeder_have_the_same_batch_size() -> None:
    model = torch.nn.Linear(64, 2)
    config = Config(
        cpu_memory_limit="4MiB",
        device="cpu",
        model=model,
        input_shape=(64,),
        output_shape=(),
        output_dtype="int64",
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW,
    )
    source = torch.zeros(4000, 64), torch.zeros(4000, dtype=torch.int64)
    with Feeder(source, config=config, device="cpu", shuffle=True) as feeder:
        assert feeder.batch_size == config.batch_size < 4000
