"""Random numbers of samples: torch's functions draw from the generator of the sample."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import ArgumentError, wrap_dataset
from pinfeed.tensors.sample_random import SampleRandom, global_draws
from pinfeed.tensors.transform_calls import seeded_generator

X = torch.linspace(0.1, 0.9, 6)
Call = Callable[..., Any]
CALLS: dict[str, Call] = {
    "bernoulli": lambda **g: torch.bernoulli(X, **g),
    "binomial": lambda **g: torch.binomial(torch.full_like(X, 9), X, **g),
    "multinomial": lambda **g: torch.multinomial(X, 3, **g),
    "normal": lambda **g: torch.normal(0.0, 1.0, (3,), **g),
    "normal of tensors": lambda **g: torch.normal(X, X, **g),
    "poisson": lambda **g: torch.poisson(9 * X, **g),
    "rand": lambda **g: torch.rand(3, **g),
    "rand_like": lambda **g: torch.rand_like(X, **g),
    "randint": lambda **g: torch.randint(99, (3,), **g),
    "randint_like": lambda **g: torch.randint_like(X, 99, **g),
    "randn": lambda **g: torch.randn(3, **g),
    "randn_like": lambda **g: torch.randn_like(X, **g),
    "randperm": lambda **g: torch.randperm(9, **g),
    "rrelu": lambda **g: torch.rrelu(-X, 0.1, 0.9, True, **g),
    "rrelu_": lambda **g: torch.rrelu_(-X, 0.1, 0.9, True, **g),
    "dirichlet": lambda **g: torch._sample_dirichlet(X, **g),
    "gamma": lambda **g: torch._standard_gamma(X, **g),
    "Tensor.bernoulli": lambda **g: X.bernoulli(**g),
    "Tensor.bernoulli_": lambda **g: X.clone().bernoulli_(0.5, **g),
    "Tensor.cauchy_": lambda **g: X.clone().cauchy_(**g),
    "Tensor.exponential_": lambda **g: X.clone().exponential_(**g),
    "Tensor.geometric_": lambda **g: X.clone().geometric_(0.1, **g),
    "Tensor.log_normal_": lambda **g: X.clone().log_normal_(**g),
    "Tensor.multinomial": lambda **g: X.multinomial(3, **g),
    "Tensor.normal_": lambda **g: X.clone().normal_(**g),
    "Tensor.random_": lambda **g: X.clone().random_(99, **g),
    "Tensor.uniform_": lambda **g: X.clone().uniform_(**g),
    "init.uniform_": lambda **g: torch.nn.init.uniform_(X.clone(), **g),
    "init.normal_": lambda **g: torch.nn.init.normal_(X.clone(), **g),
    "init.kaiming_uniform_": lambda **g: torch.nn.init.kaiming_uniform_(torch.ones(3, 3), **g),
    "init.xavier_normal_": lambda **g: torch.nn.init.xavier_normal_(torch.ones(3, 3), **g),
}
ENTROPY = (1, 2, 3, 2)


def generator() -> torch.Generator:
    return seeded_generator("cpu", ENTROPY)


def in_sample(call: Call) -> Any:
    """Return the result of a call in a sample, which must not draw from a global generator."""
    mode = SampleRandom()
    mode.begin(ENTROPY)

    def make() -> Any:
        with mode:
            return call()

    result, drawn = global_draws(make)
    assert drawn == []
    return result


@pytest.mark.parametrize("name", CALLS)
def test_a_function_draws_from_the_sample(name: str) -> None:
    call = CALLS[name]
    wanted = call(generator=generator())
    assert torch.equal(in_sample(call), wanted)
    assert torch.equal(in_sample(lambda: call(generator=None)), wanted)
    other = torch.Generator().manual_seed(5)
    own = call(generator=torch.Generator().manual_seed(5))
    assert torch.equal(in_sample(lambda: call(generator=other)), own)


def test_a_generator_may_be_given_by_position() -> None:
    other = torch.Generator().manual_seed(5)
    wanted = torch.poisson(9 * X, torch.Generator().manual_seed(5))
    assert torch.equal(in_sample(lambda: torch.poisson(9 * X, other)), wanted)


def test_other_devices_are_left_alone() -> None:
    meta = torch.empty(3, device="meta")
    for call in (
        lambda: torch.rand(3, device="meta"),
        lambda: torch.rand_like(meta),
        lambda: torch.rand_like(input=meta),
        lambda: meta.uniform_(),
    ):
        assert in_sample(call).is_meta


def test_distributions_draw_from_the_sample() -> None:
    torch.manual_seed(0)
    for kind in (
        torch.distributions.Normal(X, X),
        torch.distributions.Beta(X, X),
        torch.distributions.Categorical(X),
        torch.distributions.Poisson(X),
        torch.distributions.Uniform(X, X + 1),
    ):
        assert torch.equal(in_sample(kind.sample), in_sample(kind.sample))


F = torch.nn.functional
REFUSED: dict[str, Call] = {
    "dropout": lambda: F.dropout(X, 0.5),
    "Dropout": lambda: torch.nn.Dropout()(X),
    "dropout2d": lambda: F.dropout2d(torch.ones(1, 2, 3, 3)),
    "alpha_dropout": lambda: F.alpha_dropout(X, training=True),
    "torch.dropout": lambda: torch.dropout(X, 0.5, True),
    "torch.dropout by keyword": lambda: torch.dropout(X, p=0.5, train=True),
    "native_dropout": lambda: torch.native_dropout(X, 0.5, True),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "rrelu": lambda: F.rrelu(-X, training=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_without_a_generator_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="torch's global generator"):
        in_sample(REFUSED[name])


def test_dropout_that_draws_nothing_is_permitted() -> None:
    assert torch.equal(in_sample(lambda: F.dropout(X, training=False)), X)
    assert torch.equal(in_sample(lambda: torch.dropout(X, p=0.5, train=False)), X)


GLOBAL: dict[str, Call] = {
    "random": lambda i: random.random(),
    "numpy.random": lambda i: np.random.rand(),  # noqa: NPY002
    "torch": lambda i: torch.ops.aten.rand.default([2]),
}


@pytest.mark.parametrize("on_error", ["raise", "next", "skip"])
@pytest.mark.parametrize("name", GLOBAL)
def test_global_generators_are_refused(name: str, on_error: Any) -> None:
    with pytest.raises(ArgumentError, match=f"global generator of {name}"):
        wrap_dataset(range(4), GLOBAL[name], batch_size=2, device="cpu", on_error=on_error)
    states = random.getstate(), torch.get_rng_state()
    feeder = wrap_dataset(range(4), GLOBAL[name], batch_size=2, device="cpu", reproducible=False)
    assert states[0] == random.getstate()
    assert torch.equal(states[1], torch.get_rng_state())
    assert len(list(feeder)) == 2


@pytest.mark.parametrize("depth", [0, 2])
def test_training_steps_keep_their_random_numbers(depth: int) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(8)
    torch.manual_seed(3)
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    found = []
    for batch in wrap_dataset(
        range(16), lambda i: torch.rand(3), batch_size=2, threads=3, depth=depth, device="cpu"
    ):
        assert batch.shape == (2, 3)
        found.append(torch.rand(1))
    assert torch.equal(torch.cat(found), wanted)
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy  # noqa: NPY002
