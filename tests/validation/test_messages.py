"""Messages of errors, warnings and reprs that say what to do."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.programs import Programs

from pinfeed import (
    BigBatch,
    Config,
    Feeder,
    HostEmbedding,
    RowDataset,
    RowOptimizer,
    errors,
    train_rows,
    wrap_loader,
)

ARRAY = np.zeros((10, 2), np.float32)


class Rows:
    """A store, of which tests leave out parts."""

    n_rows = 10
    row_shape = (2,)
    dtype = np.dtype(np.float32)
    writable = False
    resident_bytes = 0

    def gather(self, rows: Any, out: Any) -> None:
        out[...] = 1

    def scatter(self, rows: Any, values: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("missing", [name for name in vars(Rows) if not name.startswith("_")])
@pytest.mark.parametrize("use", [lambda store: Feeder(store, batch_size=5), RowDataset])
def test_a_store_without_an_attribute_names_it(use: Callable[[Any], Any], missing: str) -> None:
    parts = {name: part for name, part in vars(Rows).items() if name != missing}
    store = type("Mine", (), {name: part for name, part in parts.items() if name[0] != "_"})()
    with pytest.raises(errors.StoreError, match=f"got Mine; .* a Store also needs {missing}, as"):
        use(store)
    # The advice works.
    setattr(type(store), missing, vars(Rows)[missing])
    use(store)


def of_rows(ids: Any) -> Any:
    return next(iter(Feeder(ARRAY, rows=[ids], device="cpu")))


def of_fetch(ids: Any) -> Any:
    return next(iter(wrap_loader([{"id": ids}], fetch={"x": (ARRAY, "id")}, device="cpu")))


def of_table(ids: Any) -> Any:
    table = HostEmbedding(10, 2)
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=0.1)
    with train_rows([{"id": ids}], {table: "id"}, optimizer=optimizer, device="cpu") as loop:
        return next(iter(loop))


def of_lookup(ids: Any) -> Any:
    return HostEmbedding(10, 2).eval()(ids)


@pytest.mark.parametrize("use", [of_rows, of_fetch, of_table, of_lookup])
def test_ids_that_are_floats_are_refused_with_advice(use: Callable[[Any], Any]) -> None:
    ids = torch.tensor([1.0, 3.0])
    with pytest.raises(errors.RowIndexError, match=r"float32; expected integer.*with ids\.long"):
        use(ids)
    use(ids.long())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"route": "direct", "batch_size": 5}, "route='direct'"),
        ({"config": Config(gpu_memory_limit="1GiB")}, "gpu_memory_limit"),
    ],
)
def test_options_of_a_gpu_are_warned_of_on_the_cpu(
    given: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Feeder(ARRAY, device="cpu", **given) as feeder:
        assert any(note.startswith(name) for note in feeder.plan.notes)
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert warning.getMessage().startswith(f"{name} ")
    assert "has no effect" in warning.getMessage()


_PROGRAM = """
import logging, sys, numpy as np, pinfeed
if sys.argv[1] == "configured":
    logging.basicConfig(format="%(name)s says %(message)s")
if sys.argv[1] == "closed":
    sys.stderr.close()
pinfeed.Feeder(np.zeros((4, 2)), batch_size=2, device="cpu", route="staged")
"""


@pytest.mark.parametrize(
    ("logs", "start"), [("bare", "pinfeed: route="), ("configured", "pinfeed says route=")]
)
def test_a_warning_says_once_that_it_is_pinfeeds(logs: str, start: str, programs: Programs) -> None:
    done = programs.run(_PROGRAM, logs)
    assert not done.returncode
    (line,) = done.stderr.splitlines()
    assert line.startswith(start)


def test_a_warning_that_cannot_be_printed_stops_no_program(programs: Programs) -> None:
    assert not programs.run(_PROGRAM, "closed").returncode


def test_a_big_batch_shows_its_options() -> None:
    big = BigBatch(torch.nn.Linear(2, 2), torch.nn.MSELoss(), chunk_size=4)
    assert repr(big) == "<BigBatch: Linear on cpu, strategy='auto', chunk_size=4>"
    big.close()
    assert repr(big).endswith(", closed>")


def test_strategies_on_the_cpu_do_not_show_device_memory() -> None:
    config = Config(cpu_memory_limit="1GiB")
    model = torch.nn.Linear(2, 2)
    with BigBatch(model, torch.nn.MSELoss(), config=config) as big:
        big.backward(torch.zeros(8, 2), torch.zeros(8, 2))
        text = str(big.chosen)
    assert "memory" in text
    assert "device memory" not in text
