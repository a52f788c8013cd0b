"""Each factory, method and attribute of SpeedTorch that its documentation names."""

from typing import Any

import numpy as np
import pytest
import torch
from support.speedtorch_training import (
    ARRAY,
    COMS,
    DIM,
    LAZY,
    MODELS,
    OTHERS,
    STATES,
    Model,
    N,
    made,
    start,
)
from torch import nn

import pinfeed.compat.speedtorch as SpeedTorch  # noqa: N812 - as its users write it
from pinfeed import errors
from pinfeed.compat.speedtorch import tables

pytestmark = pytest.mark.usefixtures("in_a_folder", "one_thread")


def test_a_default_device_is_not_for_tables() -> None:
    with torch.device("meta"):
        model = Model(2).to_empty(device="cpu")
        weights = SpeedTorch.ModelFactory(model.inner.words, N, DIM)
        states = SpeedTorch.OptimizerFactory(
            OTHERS["momentum"]([model.inner.words.weight]), N, DIM, model, "inner.words"
        )
        weights.zerosInit()
        states.optInit()
        for table in (weights, states):
            table.beforeForwardPass([1, 1])
            table.afterOptimizerStep([1, 1])
            table.saveCupy("table")
            table.loadCupy("table")
        gadget = SpeedTorch.DataGadget(ARRAY)
        gadget.gadgetInit()
        np.testing.assert_array_equal(gadget.getData(1).cpu().numpy(), ARRAY[1])


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "uint16", "uint32", "uint64", "bfloat16", "complex64"]
)
def test_tables_of_torch_have_every_dtype(dtype: str) -> None:
    table = tables.DeviceTable(torch.zeros(5, 2, dtype=getattr(torch, dtype)))
    values = torch.tensor([[1, 0], [0, 1]]).to(getattr(torch, dtype))
    table.write(np.array([3, 1]), values)
    assert torch.equal(table.read(np.array([3, 1]), torch.device("cpu"), values.dtype), values)


@pytest.mark.parametrize(
    ("name", "options", "place"),
    [
        (name, {}, ("cuda", False))
        for name in ("ModelFactory", "PytorchModelFactory", "GPUPytorchModelFactory")
    ]
    + [
        ("ModelFactory", {"CPUPinn": True}, ("cpu", True)),
        ("PytorchModelFactory", {"deviceType": "cpu"}, ("cpu", False)),
    ]
    + [("CPUPytorchModelFactory", {}, ("cpu", True))],
)
def test_where_tables_are(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], place: tuple[str, bool]
) -> None:
    places: list[tables.Place] = []

    def in_memory(place: tables.Place, *arguments: Any) -> tables.Table:
        places.append(place)
        return new_table(tables.Place("cpu"), *arguments)

    new_table = tables.Place.new_table
    monkeypatch.setattr(tables.Place, "new_table", in_memory)
    model = Model(2)
    weights = getattr(SpeedTorch, name)(model.inner.words, N, DIM, **options)
    optimizer = OTHERS["momentum"](model.inner.words.parameters())
    states = getattr(SpeedTorch, name.replace("Model", "Optimizer"))(
        optimizer, N, DIM, model, "inner.words", **options
    )
    counts = getattr(SpeedTorch, name.replace("ModelFactory", "COM"))(N, **options)
    weights.zerosInit()
    states.optInit()
    counts.comInit()
    assert places == [tables.Place(*place)] * 3


def test_attributes_that_programs_read() -> None:
    embedding = nn.Embedding(2, DIM)
    weights = SpeedTorch.ModelFactory(embedding, N, DIM, CPUPinn=True)
    weights.zerosInit()
    assert weights.CUPYcorpus.device == "cpu"
    assert weights.CPUPinn
    mapped, gadget = (
        SpeedTorch.ModelFactoryMM(embedding, N, DIM, "mine"),
        SpeedTorch.DataGadgetMM(ARRAY, diskname="data"),
    )
    assert (mapped.diskname, mapped.CPUPinn, gadget.diskname, gadget.CPUPinn) == (
        "mine",
        False,
        "data",
        False,
    )
    torch_weights = SpeedTorch.CPUPytorchModelFactory(embedding, N, DIM)
    assert (torch_weights.deviceType, torch_weights.pinType) == ("cpu", True)
    gpu_weights = SpeedTorch.GPUPytorchModelFactory(embedding, N, DIM)
    assert (gpu_weights.deviceType, gpu_weights.pinType) == ("cuda", False)
    assert not hasattr(SpeedTorch.ModelFactory, "getCupyMM")


@pytest.mark.parametrize("name", MODELS)
def test_initialisers(name: str) -> None:
    weights = getattr(SpeedTorch, name)(nn.Embedding(2, DIM), N, DIM)
    with pytest.raises(errors.ClosedError, match="no table yet"):
        weights.beforeForwardPass([0])
    weights.zerosInit()
    assert weights.getNumpyVersion().shape == (N, DIM)
    assert weights.getNumpyVersion().dtype == np.float32
    assert not weights.getNumpyVersion().any()
    for method, arguments, function in [
        ("uniformDistributionInit", (2.0, 3.0), nn.init.uniform_),
        ("normalDistributionInit", (5.0, 0.5), nn.init.normal_),
    ]:
        torch.manual_seed(4)
        getattr(weights, method)(*arguments)
        torch.manual_seed(4)
        expected = function(torch.empty(N, DIM), *arguments)
        np.testing.assert_array_equal(weights.getNumpyVersion(), expected.numpy())
        torch.manual_seed(4)
        weights.customInit(function, *arguments)
        assert torch.equal(weights.getTorchVar().cpu(), expected)
        np.testing.assert_array_equal(weights.getCupyVar(), expected.numpy())
    weights.close()
    if not name.endswith("MM"):
        weights.getTorchVar()[1] = 9  # shared
        weights.beforeForwardPass([1])
        assert (weights.model_variable.weight == 9).all()


@pytest.mark.parametrize(
    "datatype",
    ["float16", np.float16, np.dtype("float16"), torch.float16, "bfloat16", torch.bfloat16],
)
def test_datatypes(datatype: Any) -> None:
    weights = SpeedTorch.ModelFactoryMM(nn.Embedding(2, DIM), N, DIM, "table", datatype)
    weights.normalDistributionInit(0, 1)
    weights.beforeForwardPass([3, 2])
    assert weights.model_variable.weight.dtype is torch.float32
    assert torch.equal(
        weights.model_variable.weight.detach(), weights.getTorchVar()[[3, 2]].float()
    )
    weights.saveCupy("saved")
    other = SpeedTorch.ModelFactory(nn.Embedding(2, DIM), N, DIM, datatype, CPUPinn=True)
    other.loadCupy("saved.npy")
    assert torch.equal(other.getTorchVar(), weights.getTorchVar())


def test_invalid_arguments_are_refused() -> None:
    embedding = nn.Embedding(2, DIM)
    with pytest.raises(errors.StoreError, match="datatype"):
        SpeedTorch.ModelFactory(embedding, N, DIM, torch.complex32)
    with pytest.raises(errors.StoreError, match="datatype=int32: random rows"):
        SpeedTorch.ModelFactory(embedding, N, DIM, "int32").uniformDistributionInit(0, 1)
    with pytest.raises(errors.ArgumentError, match="deviceType='mps'"):
        SpeedTorch.PytorchModelFactory(embedding, N, DIM, deviceType="mps")
    with pytest.raises(errors.ArgumentError, match="deviceType='gpu'"):
        SpeedTorch.PytorchModelFactory(embedding, N, DIM, deviceType="gpu")
    with pytest.raises(errors.ArgumentError, match="padding_idx"):
        SpeedTorch.ModelFactory(nn.Embedding(2, DIM, padding_idx=0), N, DIM)
    with pytest.raises(errors.ArgumentError, match="model_variable=ReLU"):
        SpeedTorch.ModelFactory(nn.ReLU(), N, DIM)


def test_variable_transformer() -> None:
    weights = SpeedTorch.ModelFactory(nn.Embedding(2, DIM), N, DIM)
    np.testing.assert_array_equal(weights.variableTransformer(2, 3), [[0, 1, 2], [3, 4, 5]])
    pos, neg = weights.variableTransformer(2, 1, negPerBatch=2)
    np.testing.assert_array_equal(pos, [[0], [1]])
    np.testing.assert_array_equal(neg, [[2, 3], [4, 5]])
    assert pos.dtype == neg.dtype == np.int64


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "wrong", [[0, -1], np.array([[0], [N]]), torch.tensor([1.0]), np.array([True, False])]
)
def test_ids_out_of_range(name: str, wrong: Any) -> None:
    weights, states, _, _ = made(name, LAZY["adagrad"])
    for table in (weights, states):
        with pytest.raises(errors.RowIndexError):
            table.beforeForwardPass(np.array([[0]]), wrong)
    np.testing.assert_array_equal(weights.getNumpyVersion(), start().numpy())


@pytest.mark.parametrize("name", MODELS)
def test_a_name_that_is_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(
        errors.StoreError,
        match=r"datatype='float23' is not a dtype; expected one of bfloat16, bool",
    ):
        getattr(SpeedTorch, name)(nn.Embedding(4, DIM), N, DIM, datatype="float23")


@pytest.mark.parametrize("name", COMS)
def test_co_occurrences(name: str) -> None:
    com = getattr(SpeedTorch, name)(12)
    with pytest.raises(errors.ClosedError, match=r"comInit\(\)"):
        com.getNumpyVersion()
    com.comInit(CPUPinn=False)
    assert com.getNumpyVersion().shape == (12, 12)
    assert com.getNumpyVersion().dtype == (np.int32 if "Pytorch" in name else np.uint32)
    assert com.getTorchVar().dtype == (torch.int32 if "Pytorch" in name else torch.uint32)
    com.getTorchVar()[3, 4] = 7
    assert com.getNumpyVersion()[3, 4] == 7
    com.saveCupy("com.npy")
    com.saveTorch("com.pt")
    for load, file in [("loadCupy", "com.npy"), ("loadTorch", "com.pt")]:
        other = getattr(SpeedTorch, name)(12)
        getattr(other, load)(file)
        np.testing.assert_array_equal(other.getCupyVar(), com.getNumpyVersion())


def test_every_documented_name_exists() -> None:
    assert set(MODELS + STATES + COMS + ["DataGadget", "DataGadgetMM"]) == set(SpeedTorch.__all__)
