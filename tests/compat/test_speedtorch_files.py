"""Tables that are in files, are saved, or are loaded."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from support.speedtorch_training import (
    ARRAY,
    DIM,
    LAZY,
    MODELS,
    OTHERS,
    N,
    batches,
    made,
    start,
    train,
)
from torch import nn

import pinfeed.compat.speedtorch as SpeedTorch  # noqa: N812 - as its users write it
from pinfeed import errors
from pinfeed.memory.host import resident_bytes

pytestmark = pytest.mark.usefixtures("in_a_folder", "one_thread")


def test_loading_tables_that_were_saved_before_the_first_step() -> None:
    """Tables saved before the first step are loaded into an optimizer that has taken steps."""
    states = made("ModelFactory", OTHERS["momentum"])[1]
    assert (
        states.getCupyVar()["momentum_buffer"].shape
        == states.getTorchVar()["momentum_buffer"].shape
        == (N, DIM)
    )
    for optimizer in ("momentum", "adam"):
        weights, states, model, inner = made("ModelFactory", OTHERS[optimizer])
        states.saveCupy("new")
        expected = train(weights, states, model, inner, batches(True))
        weights.customInit(lambda table: table.copy_(start()))
        states.loadCupy("new")
        np.testing.assert_array_equal(train(weights, states, model, inner, batches(True)), expected)


@pytest.mark.parametrize("way", ["Cupy", "Torch"])
def test_loading_ends_the_batch(way: str) -> None:
    weights, states, model, _ = made("ModelFactory", OTHERS["momentum"])
    for table in (weights, states):
        getattr(table, f"save{way}")("table")
        table.beforeForwardPass([1, 1])
        getattr(table, f"load{way}")("table")
        with pytest.raises(errors.WriteBackError, match="not in the model"):
            table.afterOptimizerStep([1, 1])
    assert not model.inner.words.weight._backward_hooks


def test_files_are_found_after_a_change_of_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("data.npy", ARRAY)
    weights, gadget = (
        SpeedTorch.ModelFactoryMM(nn.Embedding(2, DIM), N, DIM),
        SpeedTorch.DataGadgetMM("data.npy"),
    )
    weights.zerosInit()
    gadget.gadgetInit()
    os.mkdir("elsewhere")
    monkeypatch.chdir("elsewhere")
    weights.beforeForwardPass([1])
    weights.afterOptimizerStep([1])
    assert not weights.getNumpyVersion().any()
    np.testing.assert_array_equal(gadget.getNumpyVersion(), ARRAY)
    assert os.listdir() == []


def test_saving_into_the_tables_own_file() -> None:
    rows = np.arange(1 << 14, dtype=np.float32).reshape(-1, DIM + 1)
    np.save("data.npy", rows)
    os.symlink("data.npy", "link.npy")
    gadget = SpeedTorch.DataGadgetMM("data.npy")
    gadget.gadgetInit()
    gadget.insertData(-1.0, 0)
    rows[0] = -1
    for name in ("data", "data.npy", "link"):
        gadget.saveCupy(name)
        np.testing.assert_array_equal(np.load("data.npy"), rows)
    gadget.insertData(-2.0, 1)
    assert (np.load("data.npy")[1] == -2).all()
    states = made("ModelFactoryMM", OTHERS["momentum"])[1]
    for table, name in [
        (gadget, "link.npy"),
        (states, "inner.wordsSGD0.memmapmomentum_buffer.cpy.npy"),
    ]:
        with pytest.raises(errors.ArgumentError, match="is the file of the table itself"):
            table.saveTorch(name)


def test_saving_replaces_a_file_as_a_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, states, _, _ = made("ModelFactory", OTHERS["adam"])
    for save, name in [
        (weights.saveCupy, "a.npy"),
        (weights.saveTorch, "a"),
        (states.saveCupy, "s.npz"),
        (states.saveTorch, "s"),
    ]:
        save(name)
        first = os.stat(name).st_ino
        save(name)
        # A new file has replaced the first one.
        assert os.stat(name).st_ino != first

    def fail_halfway(file: Any, array: Any) -> None:
        file.write(b"half")
        raise ZeroDivisionError

    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(np, "save", fail_halfway)
        weights.saveCupy("a.npy")
    np.testing.assert_array_equal(np.load("a.npy"), start().numpy())
    assert sorted(os.listdir()) == ["a", "a.npy", "s", "s.npz"]
    # saveCupy has written a.npy, and saveTorch a: the first one is found.
    weights.loadCupy("a")


def test_files_of_tables_that_could_not_be_filled_are_removed() -> None:
    weights, states, _, optimizer = made("ModelFactory", OTHERS["adam"])
    np.save("wrong.npy", np.zeros((3, 3)))
    states.saveTorch("states")
    saved = torch.load("states")
    before = sorted(os.listdir())
    weights = SpeedTorch.ModelFactoryMM(weights.model_variable, N, DIM)
    with pytest.raises(ZeroDivisionError):
        weights.customInit(lambda table: 1 / 0)
    with pytest.raises(errors.StoreError, match=r"the saved (table|state) has"):
        weights.loadCupy("wrong")
    states = SpeedTorch.OptimizerFactoryMM(
        optimizer, N, DIM, states.model, "inner.words", dtype="float64"
    )
    with pytest.raises(errors.StoreError, match=r"the saved (table|state) has"):
        states.restore(saved | {"rows.exp_avg": torch.zeros(3, 3)})
    assert sorted(os.listdir()) == before


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [(name, "adam") for name in MODELS]
    + [("ModelFactory", each) for each in ("momentum", "rprop", "asgd", "adamw fused", "sparse")],
)
@pytest.mark.parametrize("way", ["Cupy", "Torch"])
def test_training_continues_after_save_and_load(name: str, optimizer: str, way: str) -> None:
    make = OTHERS.get(optimizer, lambda p: torch.optim.SparseAdam(p, lr=0.1))
    sparse = optimizer == "sparse"
    ids = list(batches(True, 6))
    expected = train(*made(name, make, sparse=sparse), ids)
    weights, states, model, inner = made(name, make, sparse=sparse)
    train(weights, states, model, inner, ids[:3])
    getattr(weights, f"save{way}")("weights")
    getattr(states, f"save{way}")("states")
    weights, states, model, inner = made(name, make, sparse=sparse, seed=1)
    getattr(weights, f"load{way}")("weights")
    getattr(states, f"load{way}")("states")
    np.testing.assert_array_equal(train(weights, states, model, inner, ids[3:]), expected)


def test_loading_refuses_files_of_other_tables() -> None:
    weights, states, model, _ = made("ModelFactory", OTHERS["adam"])
    states.saveTorch("adam.pt")
    np.save("other.npy", np.zeros((N, 2)))
    with pytest.raises(errors.StoreError, match=r"has shape \(40, 2\); expected \(40, 3\)"):
        weights.loadCupy("other")
    other = SpeedTorch.OptimizerFactory(
        LAZY["adagrad"]([model.inner.words.weight]), N, DIM, model, "inner.words"
    )
    for without, problem in [
        ((), "the saved state belongs to Adam; expected Adagrad"),
        (("optimizer",), "Adagrad expects"),
    ]:
        with pytest.raises(errors.StoreError, match=problem):
            other.restore(
                {key: value for key, value in torch.load("adam.pt").items() if key not in without}
            )
    torch.save(torch.zeros(2), "tensor.pt")
    with pytest.raises(errors.StoreError, match="expected the tables of an optimizer"):
        other.loadTorch("tensor.pt")
    for load in (weights.loadCupy, weights.loadTorch, states.loadCupy, states.loadTorch):
        with pytest.raises(errors.FileMissing):
            load("absent")


def test_files_hold_the_rows() -> None:
    weights, states, model, optimizer = made("ModelFactoryMM", OTHERS["adam"])
    train(weights, states, model, optimizer, batches(True))
    weights.close()
    states.close()
    assert sorted(os.listdir()) == [
        "inner.wordsAdam0.memmapexp_avg.cpy.npy",
        "inner.wordsAdam0.memmapexp_avg_sq.cpy.npy",
        "variable0.memmap.cpy.npy",
    ]
    expected = train(*made("ModelFactory", OTHERS["adam"]), batches(True))
    np.testing.assert_array_equal(np.load("variable0.memmap.cpy.npy"), expected)
    np.testing.assert_array_equal(weights.getCupyMM(), expected)
    assert np.load("inner.wordsAdam0.memmapexp_avg.cpy.npy").any()
    made("ModelFactoryMM", OTHERS["adam"])
    assert "variable1.memmap.cpy.npy" in os.listdir()
    named = SpeedTorch.OptimizerFactoryMM(optimizer, N, DIM, model, "inner.words", diskname="mine")
    named.optInit()
    assert "mine0.memmapexp_avg.cpy.npy" in os.listdir()


def test_modelfactory_takes_the_diskname_of_the_first_readmes() -> None:
    embedding = nn.Embedding(4, DIM)
    weights = SpeedTorch.ModelFactory(
        embedding,
        total_classes=N,
        embed_dimension=DIM,
        diskname="words",
        datatype="float32",
        CPUPinn=False,
    )
    weights.uniformDistributionInit(-1, 1)
    saved = np.load("words0.memmap.cpy.npy")
    assert saved.shape == (N, DIM)
    weights.beforeForwardPass(np.arange(4))
    np.testing.assert_array_equal(embedding.weight.detach().numpy(), saved[:4])
    embedding.weight.data.fill_(2)
    weights.afterOptimizerStep(np.arange(4))
    weights.close()
    assert (np.load("words0.memmap.cpy.npy")[:4] == 2).all()


@pytest.mark.parametrize("rest", [("words",), ("words", "float32"), ("words", "float32", True)])
def test_a_diskname_in_the_place_of_the_datatype_is_refused(rest: tuple[Any, ...]) -> None:
    with pytest.raises(
        errors.StoreError,
        match=r"datatype='words' is not a dtype; .*by keyword: diskname=",
    ):
        SpeedTorch.ModelFactory(nn.Embedding(4, DIM), N, DIM, *rest)
    assert not os.listdir()


def test_rows_of_files_are_not_in_memory() -> None:
    rows = 1 << 20
    weights = SpeedTorch.ModelFactoryMM(nn.Embedding(2, 64), rows, 64)
    before = resident_bytes()
    weights.zerosInit()
    ids = np.arange(0, rows, 4097)
    weights.beforeForwardPass(ids)
    with torch.no_grad():
        weights.model_variable.weight += 1
    weights.afterOptimizerStep(ids)
    after = resident_bytes()
    weights.close()
    assert os.path.getsize("variable0.memmap.cpy.npy") > rows * 256
    assert sum(after.values()) - sum(before.values()) < rows * 256 // 8
    table = np.load("variable0.memmap.cpy.npy", mmap_mode="r")
    assert (table[ids] == 1).all()
    assert not table[ids + 1].any()


def test_rows_lie_beyond_two_to_the_31_elements() -> None:
    rows = (1 << 31) // 512 + 9
    # The file is sparse and takes little of the disk.
    weights = SpeedTorch.ModelFactoryMM(nn.Embedding(1, 512), rows, 512, datatype="float16")
    weights.zerosInit()
    ids = np.array([0, rows - 1, rows - 1, rows - 9])
    for value in (2.0, 3.0):
        weights.beforeForwardPass(ids)
        weights.model_variable.weight.data.fill_(value)
        weights.afterOptimizerStep(ids)
    weights.beforeForwardPass(np.array([rows - 1, rows - 2, 0]))
    assert weights.model_variable.weight[:, 0].tolist() == [3, 0, 3]
