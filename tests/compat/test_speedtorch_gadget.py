"""A DataGadget reads and writes rows as numpy does."""

from typing import Any

import numpy as np
import pytest
import torch
from support.speedtorch_training import ARRAY

import pinfeed.compat.speedtorch as SpeedTorch  # noqa: N812 - as its users write it
from pinfeed import errors

pytestmark = pytest.mark.usefixtures("in_a_folder", "one_thread")


INDEXES: list[Any] = [
    2,
    slice(1, 5),
    slice(None, None, -2),
    slice(0, 0),
    [5, 1, 5],
    np.array([[5, 1], [5, 0]], np.uint8),
    torch.tensor([6, 0]),
    np.arange(7) % 2 == 0,
    ARRAY > 40,
    ...,
    (),
    (3, 2, 1),
    (3, slice(1, 3)),
    (slice(1, 3), 2),
    (slice(1, 3), ..., [0, 2, 0]),
    ([5, 1, 5], [0, 3, 1]),
    ([[5], [1]], slice(None), [[0, 1]]),
    ([4, 4], slice(0, 2), slice(None)),
    (0, None, 1),
    -1,
    [[0, -7], [-1, 3]],
    (..., -2),
    (slice(None), torch.tensor([1, 1])),
    (torch.arange(7) > 3, slice(0, 2)),
    (torch.tensor(2), torch.tensor([0, 3])),
    None,
    True,
]


@pytest.mark.parametrize("name", ["DataGadget", "DataGadgetMM"])
@pytest.mark.parametrize("indexes", INDEXES, ids=repr)
def test_gadget_indexes_as_numpy_does(name: str, indexes: Any) -> None:
    plain = ARRAY.copy()
    as_array = lambda each: each.numpy() if isinstance(each, torch.Tensor) else each  # noqa: E731
    numpy_indexes = (
        tuple(map(as_array, indexes)) if isinstance(indexes, tuple) else as_array(indexes)
    )
    gadget = getattr(SpeedTorch, name)(ARRAY)
    gadget.gadgetInit()
    got = gadget.getData(indexes)
    assert tuple(got.shape) == plain[numpy_indexes].shape
    np.testing.assert_array_equal(got.cpu().numpy(), plain[numpy_indexes])
    values = -np.arange(got.numel(), dtype=np.float64).reshape(tuple(got.shape)) - 1
    plain[numpy_indexes] = values
    gadget.insertData(torch.as_tensor(values), indexes)
    np.testing.assert_array_equal(gadget.getNumpyVersion(), plain)
    gadget.insertData(0.5, indexes)
    plain[numpy_indexes] = 0.5
    np.testing.assert_array_equal(gadget.getNumpyVersion(), plain)


@pytest.mark.parametrize("name", ["DataGadget", "DataGadgetMM"])
def test_gadget_of_files(name: str) -> None:
    np.save("data.npy", ARRAY)
    gadget = getattr(SpeedTorch, name)("data.npy", CPUPinn=True)
    gadget.gadgetInit()
    gadget.insertData(torch.full((4, 3), -1.0), 2)
    # DataGadgetMM writes to the file; DataGadget has a copy.
    assert (np.load("data.npy")[2] == -1).all() == (name == "DataGadgetMM")
    gadget.saveCupy("copy")
    gadget.saveTorch("copy.pt")
    for load, file in [("loadCupy", "copy"), ("loadTorch", "copy.pt")]:
        np.save("small.npy", np.zeros((2, 2), np.int8))
        other = getattr(SpeedTorch, name)("small.npy")
        other.gadgetInit()
        getattr(other, load)(file)
        np.testing.assert_array_equal(other.getNumpyVersion(), gadget.getNumpyVersion())
        assert (other.getData(2) == -1).all()
    with pytest.raises(errors.FileMissing):
        getattr(SpeedTorch, name)("absent.npy").gadgetInit()


@pytest.mark.parametrize("name", ["DataGadget", "DataGadgetMM"])
def test_gadget_runs_as_documented_without_gadgetinit(name: str) -> None:
    make = getattr(SpeedTorch, name)
    np.save("data.npy", ARRAY)
    np.testing.assert_array_equal(
        make("data.npy", CPUPinn=False).getData([6, 0]).cpu().numpy(), ARRAY[[6, 0]]
    )
    np.testing.assert_array_equal(make("data.npy").getNumpyVersion(), ARRAY)
    gadget = make("data.npy")
    gadget.insertData(torch.full((4, 3), -1.0), 2)
    np.testing.assert_array_equal(
        gadget.getNumpyVersion(), np.concatenate([ARRAY[:2], -np.ones((1, 4, 3)), ARRAY[3:]])
    )
    make("data.npy").saveCupy("copy")
    np.testing.assert_array_equal(np.load("copy.npy"), np.load("data.npy"))
    other = make("absent.npy")
    with pytest.raises(errors.FileMissing, match=r"absent\.npy"):
        other.getData(0)
    other.loadCupy("copy.npy")
    np.testing.assert_array_equal(other.getData(0).cpu().numpy(), ARRAY[0])


def test_gadget_reads_its_file_again_only_at_gadgetinit() -> None:
    np.save("data.npy", ARRAY)
    gadget = SpeedTorch.DataGadget("data.npy")
    gadget.insertData(-1.0, 0)
    np.save("data.npy", ARRAY + 1)
    assert (gadget.getData(0) == -1).all()
    gadget.gadgetInit()
    np.testing.assert_array_equal(gadget.getNumpyVersion(), ARRAY + 1)


def test_gadget_takes_files_of_any_order() -> None:
    np.save("fortran.npy", np.asfortranarray(ARRAY))
    np.save("swapped.npy", ARRAY.astype(">f4"))
    for number in range(2):
        np.save(f"part{number}.npy", ARRAY[3 * number :][: 3 + number])
    for name in ("fortran.npy", "swapped.npy", "part*.npy"):
        gadget = SpeedTorch.DataGadget(name)
        gadget.gadgetInit()
        np.testing.assert_array_equal(gadget.getData([6, 0]).cpu().numpy(), ARRAY[[6, 0]])
        np.testing.assert_array_equal(gadget.getNumpyVersion(), ARRAY)
        with pytest.raises(
            errors.StoreError,
            match=r"is in Fortran order|expected one file in this machine's byte order",
        ):
            SpeedTorch.DataGadgetMM(name).gadgetInit()


@pytest.mark.parametrize("name", ["DataGadget", "DataGadgetMM"])
@pytest.mark.parametrize("dtype", ["bfloat16", "uint32", "complex64"])
def test_gadget_dtypes(name: str, dtype: str) -> None:
    rows = torch.arange(12).view(4, 3).to(getattr(torch, dtype))
    gadget = getattr(SpeedTorch, name)(rows)
    gadget.gadgetInit()
    gadget.insertData(gadget.getData([0, 0]), (slice(None, 2),))
    assert torch.equal(gadget.getData(-1).cpu(), rows[-1])
    assert torch.equal(
        gadget.getTorchVar(), torch.arange(12).view(4, 3)[[0, 0, 2, 3]].to(rows.dtype)
    )


def test_gadget_says_what_is_wrong() -> None:
    gadget = SpeedTorch.DataGadget(torch.from_numpy(ARRAY))
    gadget.gadgetInit()
    for wrong in (
        -8,
        7,
        [0, -8],
        torch.tensor([0, 99]),
        [0.5],
        "rows",
        np.ones(3, bool),
        (0, 0, 3),
        slice(0, 1, 0),
        [[0], [1, 2]],
    ):
        with pytest.raises(errors.RowIndexError):
            gadget.getData(wrong)
        with pytest.raises(errors.RowIndexError):
            gadget.insertData(1.0, wrong)
    for values in (np.zeros((5, 4, 3)), "none", torch.eye(3).to_sparse()):
        with pytest.raises(errors.WriteBackError, match=r"expected values of shape \(2, 4, 3\)"):
            gadget.insertData(values, [1, 2])
    np.testing.assert_array_equal(gadget.getNumpyVersion(), ARRAY)
