"""``pinfeed plan`` for mixtures, ragged rows and ranks: the plan is that of the same feeder."""

import json
from typing import Any

import h5py
import numpy as np
import pytest
from support.command import X, run, values

from pinfeed import Config, Feeder, MiB, NpyStore, RaggedStore, Ranks, concat, rows
from pinfeed.cli.plan import plan_values
from pinfeed.cli.report import json_of

LENGTHS = np.random.default_rng(0).integers(1, 60, 400)
OFFSETS = np.concatenate(([0], np.cumsum(LENGTHS)))


@pytest.fixture(autouse=True)
def ragged(folder: Any) -> None:
    """Save ragged rows, and labels for them."""
    np.save("tokens.npy", np.arange(OFFSETS[-1], dtype=np.uint16))
    np.save("offsets.npy", OFFSETS)
    np.save("labels.npy", np.arange(len(LENGTHS)))


def tokens(layout: Any) -> RaggedStore:
    return RaggedStore("tokens.npy", "offsets.npy", layout=layout)


def plain(feeder: Feeder[Any]) -> Any:
    """Return the plan of a feeder as the command prints it."""
    with feeder:
        return json.loads(json_of(plan_values(feeder.plan)))


RAGGED = ["tokens.npy", "--offsets", "offsets.npy"]


@pytest.mark.parametrize(
    ("arguments", "layout", "feeder"),
    [
        (["--batch-size", "8", "--shuffle"], "offsets", {"batch_size": 8, "shuffle": True}),
        (
            ["--batch-size", "8", "--bucketed", "--seed", "3"],
            "padded",
            {"batch_size": 8, "rows": rows.bucketed(LENGTHS, batch_size=8, seed=3)},
        ),
        (
            ["--batch-size", "8", "--bucketed", "--world-size", "3"],
            "padded",
            {
                "batch_size": 8,
                "rows": rows.bucketed(LENGTHS, batch_size=24),
                "ranks": Ranks(rank=0, world_size=3),
            },
        ),
        (
            ["--batch-size", "8", "--bucketed", "--block-rows", "9", "--cpu-limit", "8MiB"],
            "padded",
            {
                "rows": rows.bucketed(
                    LENGTHS, batch_size=8, order=rows.block_shuffled(block_rows=9)
                ),
                "config": Config(cpu_memory_limit=MiB(8), preferred_batch_size=8),
            },
        ),
        (
            ["--packed", "64", "--shuffle", "--seed", "2"],
            "packed",
            {"rows": rows.packed(LENGTHS, 64, order=rows.shuffled(2), split="long", seed=2)},
        ),
        (
            ["--packed", "40", "--batch-size", "4", "--world-size", "2", "--cpu-limit", "8MiB"],
            "packed",
            {
                "rows": rows.packed(LENGTHS, 40, batch_size=4, split="long"),
                "ranks": Ranks(rank=0, world_size=2),
                "config": Config(cpu_memory_limit=MiB(8)),
            },
        ),
        (
            ["--max-elements", "300", "--shuffle", "--world-size", "2"],
            "padded",
            {
                "ranks": Ranks(rank=0, world_size=2),
                "rows": rows.element_batches(
                    LENGTHS,
                    300,
                    order=rows.shuffled(0),
                    padded=True,
                    window=50 * int(300 / LENGTHS.mean()),
                ),
            },
        ),
    ],
    ids=str,
)
def test_plan_of_ragged_rows(arguments: list[str], layout: str, feeder: dict[str, Any]) -> None:
    found = values("plan", *RAGGED, "--device", "cpu", *arguments)
    store = tokens(layout)
    assert found["plan"] == plain(Feeder(store, device="cpu", **feeder))
    store.close()
    assert found["ragged"] == {
        "rows": 400,
        "lengths": {
            "shortest": int(LENGTHS.min()),
            "mean": float(LENGTHS.mean()),
            "longest": int(LENGTHS.max()),
        },
    }


def test_the_shares_are_those_of_the_rows() -> None:
    packed = rows.packed(LENGTHS, 64, split="long")
    assert values("plan", *RAGGED, "--packed", "64")["fill"] == packed.fill()
    assert (
        f"fill     {packed.fill():.1%} of the elements"
        in run("plan", *RAGGED, "--packed", "64", "--device", "cpu").stdout
    )
    bucketed = rows.bucketed(LENGTHS, batch_size=8)
    options = [*RAGGED, "--bucketed", "--batch-size", "8"]
    assert values("plan", *options)["padding"] == bucketed.padding()._asdict()
    shown = run("plan", *options).stdout
    assert f"{bucketed.padding().bucketed:.1%} of the elements of batches" in shown
    assert "in buckets of similar lengths, shuffled" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_padding_of_batches_of_few_elements() -> None:
    window = 50 * int(300 / LENGTHS.mean())
    batches = list(rows.element_batches(LENGTHS, 300, padded=True, window=window))
    n_padded = sum(len(batch) * int(LENGTHS[batch].max()) for batch in batches)
    found = values("plan", *RAGGED, "--max-elements", "300")
    assert found["padding"]["bucketed"] == 1 - int(LENGTHS.sum()) / n_padded
    assert found["mean_batch_rows"] == 400 / len(batches)


def test_ragged_rows_with_labels() -> None:
    found = values("plan", *RAGGED, "--with", "labels.npy", "--batch-size", "4", "--device", "cpu")
    assert found["plan"] == plain(
        Feeder((tokens("offsets"), "labels.npy"), batch_size=4, device="cpu")
    )
    assert [source["rows"] for source in found["with"]] == [400]
    result = run("plan", *RAGGED, "--with", "x.npy")
    assert result.exit_code == 3
    assert "offsets.npy has the bounds of 400 rows, but x.npy has 500 rows" in result.stderr


def test_ragged_items_of_another_format() -> None:
    with h5py.File("tokens.h5", "w") as file:
        file.create_dataset("ids", data=np.arange(OFFSETS[-1]), chunks=(100,))
    result = run("plan", "tokens.h5:/ids", "--offsets", "offsets.npy", "--packed", "64")
    assert result.exit_code == 0, result.output
    assert "400 ragged rows of 1 to 59 items" in result.stdout.replace("\n  ", " ")


def test_a_file_of_bounds_that_does_not_fit() -> None:
    np.save("more.npy", OFFSETS * 2)
    result = run("plan", "tokens.npy", "--offsets", "more.npy", "--packed", "64")
    assert result.exit_code == 3
    assert "expected offsets of at most the number of items" in result.stderr
    result = run("plan", *RAGGED, "--max-elements", "20")
    assert result.exit_code == 3
    assert "max_elements=20; expected rows that fit in a batch" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "order"),
    [
        ([], None),
        (["--seed", "4"], None),
        (["--block-rows", "20", "--window-blocks", "3"], rows.block_shuffled(0, block_rows=20)),
    ],
    ids=str,
)
def test_plan_of_a_mixture(arguments: list[str], order: Any) -> None:
    if order is not None:
        order = rows.block_shuffled(block_rows=20, window_blocks=3)
    seed = 4 if "--seed" in arguments else 0
    sources = {"s-0.npy": NpyStore("s-0.npy"), "x.npy": NpyStore("x.npy")}
    mixture = rows.mixed(sources, weights={"s-0.npy": 3, "x.npy": 1}, order=order, seed=seed)
    options = ["s-0.npy", "x.npy", "--weights", "0.75,0.25", "--batch-size", "16", *arguments]
    found = values("plan", *options, "--device", "cpu")
    assert found["plan"] == plain(
        Feeder(concat(sources), batch_size=16, rows=mixture, device="cpu")
    )
    assert found["epoch_rows"] == mixture.length(800)
    assert [one["weight"] for one in found["mixture"]] == [0.75, 0.25]
    assert found["source"]["rows"] == 800
    assert found["source"]["files"] == ["s-0.npy", "x.npy"]
    shown = run("plan", *options).stdout
    assert "s-0.npy: 300 rows of shape (3, 8), float32, 28.1 KiB, weight 0.75" in shown
    assert f"epoch    {mixture.length(800):,} of 800 rows" in shown
    assert max(map(len, shown.splitlines())) <= 80
    for source in sources.values():
        source.close()


def test_a_pattern_is_one_source_of_a_mixture() -> None:
    np.save("other.npy", X)
    found = values("plan", "s-*.npy", "other.npy", "--weights", "1,2", "--batch-size", "4")
    assert [one["rows"] for one in found["mixture"]] == [500, 500]
    assert found["order"] == "mixed by weight, shuffled"


def test_a_mixture_of_other_formats() -> None:
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("a", data=X)
    found = values("plan", "x.h5:/a", "x.npy", "--weights", "1,1", "--batch-size", "4")
    assert found["source"]["rows"] == 1000
    assert found["plan"]["batch_size"] == 4


def test_plan_of_one_rank() -> None:
    options = ["x.npy", "--world-size", "4", "--batch-size", "8", "--device", "cpu"]
    found = values("plan", *options, "--shuffle")
    expected = Feeder(
        "x.npy", batch_size=8, shuffle=True, ranks=Ranks(rank=0, world_size=4), device="cpu"
    )
    assert found["plan"] == plain(expected)
    assert "rank 0 of 4: 125 of 500 rows (pad)" in found["plan"]["notes"][0]
    limited = values("plan", "x.npy", "--world-size", "4", "--cpu-limit", "8MiB")
    assert limited["plan"]["cpu_memory_limit"] == MiB(8)


def test_plan_of_blocks_in_windows() -> None:
    found = values("plan", "x.npy", "--block-rows", "10", "--window-blocks", "2", "--device", "cpu")
    order = rows.block_shuffled(block_rows=10, window_blocks=2)
    size = found["plan"]["batch_size"]
    assert found["plan"] == plain(Feeder("x.npy", batch_size=size, rows=order, device="cpu"))
    assert found["order"] == "shuffled in blocks of 10, 2 in a window"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.npy", "--window-blocks", "3"], "--window-blocks 3 has no effect without --block-rows"),
        (["x.npy", "--packed", "8"], "--packed needs the lengths of rows; give --offsets FILE"),
        (["x.npy", "--bucketed"], "--bucketed needs the lengths of rows; give --offsets FILE"),
        (
            [*RAGGED, "--packed", "8", "--max-elements", "9"],
            "--max-elements and --packed conflict, because each makes the batches",
        ),
        (
            ["s-0.npy", "s-1.npy", "--weights", "1"],
            "--weights has 1 weights, but there are 2 FILEs",
        ),
        (["x.npy", "x.npy", "--weights", "1,1"], "a FILE occurs twice in x.npy, x.npy"),
        (["x.npy", "--weights", "1", "--with", "s-0.npy"], "--weights and --with conflict"),
        ([*RAGGED, "--weights", "1"], "--weights and --offsets conflict"),
        (["x.npy", "--weights", "1,-2"], "'1,-2' is not a list of weights; expected numbers above"),
        (["x.npy", "--weights", "nan"], "'nan' is not a list of weights"),
        (["x.npy", "--world-size", "0"], "Invalid value for '--world-size'"),
    ],
    ids=str,
)
def test_options_that_are_refused(arguments: list[str], message: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
