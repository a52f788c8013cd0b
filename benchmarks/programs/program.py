"""Program: a program in its original form and with pinfeed, and its training step."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

NAMES = (
    "graphsage",
    "dlrm",
    "skip_gram",
    "nanogpt",
    "build_nanogpt",
    "forecasting",
    "token_batches",
    "sentence_pairs",
    "group_by_length",
    "criteo",
    "tabular",
    "parquet_batches",
    "hdf5_images",
    "simulations",
    "single_cells",
    "image_augment",
    "audio",
    "replay_buffer",
    "dqn_atari",
    "mnist",
    "vae",
)
"""Modules of the programs, in the order of the table."""
OURS = "pinfeed"
"""Name of the way that uses pinfeed."""
SEED = 1337
DEVICE = "cpu"

Step = Callable[..., Any]
"""A training step, which is called with the tensors of a batch and returns the loss.

A program that makes its own model and optimizer passes them by keyword.
"""
Run = Callable[[Path, Any, Step], None]
"""A program, called with the folder of its files, its size and a step to call for every batch."""


@dataclass(frozen=True)
class Program:
    """A program in its original form and with pinfeed.

    Attributes:
        title: Name in the table.
        sizes: Sizes by name: ``full``, ``quick`` and ``tiny``. Each has ``n_batches`` and
            ``n_steps``, the batches of a run without a training step and with one.
        prepare: Function that writes the files of a size into a folder.
        ways: Ways to run the program by name: the original first, and pinfeed.
        make_step: Function that makes the training step of a size. It makes the model, too,
            unless the program does.
        original: Classes and functions that only the original needs.
        moved: Classes and functions that replace them.
    """

    title: str
    sizes: dict[str, Any]
    prepare: Callable[[Path, Any], None]
    ways: dict[str, Run]
    make_step: Callable[[Any], Step]
    original: tuple[Any, ...]
    moved: tuple[Any, ...]

    def changed_lines(self) -> tuple[int, int]:
        """Return how many lines of code are removed, and how many are added.

        Comments, docstrings and empty lines do not count.
        """
        before = [line for code in self.original for line in code_lines(code)]
        after = [line for code in self.moved for line in code_lines(code)]
        found = list(difflib.ndiff(before, after))
        return (
            sum(line.startswith("- ") for line in found),
            sum(line.startswith("+ ") for line in found),
        )


def code_lines(code: Any) -> list[str]:
    """Return the lines inside a function or the lines of a class, each statement on one line.

    The name of a function and its arguments do not count, because they always differ.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        has_docstring = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(
            node
        )
        if has_docstring and isinstance(body, list):
            del body[0]
    lines = [line for line in ast.unparse(tree).splitlines() if line.strip()]
    return textwrap.dedent("\n".join(lines[1:])).splitlines() if inspect.isfunction(code) else lines


def generator_of_batch(
    seed: int, epoch: int, number: int, device: str | None = None
) -> torch.Generator:
    """Return the generator that pinfeed passes to a transform.

    Args:
        seed: Seed of the loop.
        epoch: Number of the epoch.
        number: Number of the batch.
        device: Device of a ``device_transform``; None for a ``host_transform``.
    """
    which = 0 if device is None else 1
    (value,) = np.random.SeedSequence((seed, epoch, number, which)).generate_state(1, np.uint64)
    return torch.Generator(device or "cpu").manual_seed(int(value))


def load(name: str) -> Program:
    """Import a program by the name of its module."""
    program: Program = importlib.import_module(f"benchmarks.programs.{name}").PROGRAM
    return program
