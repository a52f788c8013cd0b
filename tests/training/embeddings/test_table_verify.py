"""train_rows(verify=True) finds rows that differ from the synchronous loop."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.simtorch import SimTorchDevice
from support.table_runs import FIXED, MIXED, USERS, Run, check

from pinfeed import ArrayStore
from pinfeed.errors import VerificationError
from pinfeed.testing import favour


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread, because more of them slow down work on small tensors."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


class Faulty(ArrayStore):
    """A store that reads row 4 wrongly once, or always writes it wrongly."""

    def __init__(self, array: Any, what: str) -> None:
        super().__init__(array)
        self.what = what
        self.wrong = False

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)
        if self.what == "gather" and 4 in rows and not self.wrong:
            self.wrong = True
            out[list(rows).index(4)] += 1

    def scatter(self, rows: Any, values: Any) -> None:
        if self.what == "scatter" and 4 in rows:
            values = values.copy()
            values[list(rows).index(4)] += 1
        super().scatter(rows, values)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("what", "stop_after", "message"),
    [
        ("gather", None, "batch 1: users, weights?, row 4 is "),
        # A batch that is gathered before a wrong write is completed has the right values.
        ("scatter", None, "(batch 4|after the loop, in the store): users, weights?, row 4 is "),
    ],
)
def test_verify_names_what_differs(
    what: str, stop_after: int | None, message: str, depth: int
) -> None:
    run = Run("SGD", stop_after=stop_after)
    with pytest.raises(VerificationError, match=message):
        run.fed(
            "cpu",
            depth,
            verify=True,
            stores=lambda array: Faulty(array, what if array.shape == USERS else ""),
        )


def test_verify_looks_at_the_stores_after_the_loop() -> None:
    run = Run("SGD", FIXED[:2])
    with pytest.raises(
        VerificationError, match=r"after the loop, in the store: users, weights?, row 4"
    ):
        run.fed(
            "cpu",
            1,
            verify=True,
            stores=lambda array: Faulty(array, "scatter" if array.shape == USERS else ""),
        )


def test_verify_finds_rows_that_are_out_of_date() -> None:
    class Forgetful(SimTorchDevice):
        def copy_rows(self, *args: Any) -> None:
            pass

    device = Forgetful(favour("read", "pinfeed-read"))
    with (
        pytest.raises(VerificationError, match=r"batch 1: items, weights?, row 0 is "),
        device.factories(),
    ):
        Run("Adam").fed(device, 2, verify=True)


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_verify_changes_nothing(direct: bool) -> None:
    check(
        SimTorchDevice(favour("read", "pinfeed-read"), direct=direct),
        2,
        "Adam",
        does=MIXED,
        verify=True,
    )
    check("cpu", 2, "Adam", does=MIXED, verify=True)


@pytest.mark.gpu
def test_verify_on_cuda() -> None:
    Run("Adam", does=MIXED).fed("cuda", 2, verify=True)
