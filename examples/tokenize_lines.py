"""Text: lines are tokenized and padded ahead of the training step.

The usual loop calls the tokenizer itself. With ``host_transform``, a background thread calls it.
This works with the strings of a DataLoader, and with a text file, from which a Feeder reads the
bytes of the lines.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import pinfeed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Any text: here it is the source of a module.
TEXT = Path(argparse.__file__)

Batch = dict[str, torch.Tensor]


class Tokenizer:
    """Padded word numbers of lines. A word that is not known is 1, and padding is 0.

    Args:
        lines: Lines whose words are known.
    """

    def __init__(self, lines: list[str]) -> None:
        words = sorted({word for line in lines for word in split(line)})
        self.numbers = {word: number for number, word in enumerate(words, 2)}

    def __call__(self, lines: list[str]) -> Batch:
        rows = [
            torch.tensor([self.numbers.get(word, 1) for word in split(line)], dtype=torch.int64)
            for line in lines
        ]
        lengths = torch.tensor([len(row) for row in rows])
        return {"words": pad_sequence(rows, batch_first=True), "lengths": lengths}


def split(line: str) -> list[str]:
    """Return the words of a line."""
    return re.findall(r"\w+|[^\w\s]", line)


def original(loader: DataLoader[str], tokenize: Tokenizer) -> list[Batch]:
    """Return the batches of the usual loop."""
    found = []
    for lines in loader:
        batch = tokenize(lines)
        found.append({key: values.to(DEVICE) for key, values in batch.items()})
    return found


def same(batches: list[Batch], expected: list[Batch]) -> bool:
    """Compare two lists of batches."""
    return all(
        torch.equal(batch[key], want[key])
        for batch, want in zip(batches, expected, strict=True)
        for key in want
    )


def main(n_lines: int = 1000) -> None:
    lines = TEXT.read_text().splitlines(keepends=True)[:n_lines]
    tokenize = Tokenizer(lines)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(lines, 32, shuffle=True, generator=generator, collate_fn=list)
    expected = original(loader, tokenize)
    generator.manual_seed(1)
    assert same(list(pinfeed.wrap_loader(loader, host_transform=tokenize)), expected)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.npy"
        np.save(path, np.frombuffer("".join(lines).encode(), np.uint8))
        offsets = np.cumsum([0, *(len(line.encode()) for line in lines)])

        def tokenize_bytes(batch: tuple[torch.Tensor, torch.Tensor]) -> Batch:
            text, begins = batch
            pieces = zip(begins.tolist(), begins[1:].tolist(), strict=False)
            return tokenize([bytes(text[begin:end].numpy()).decode() for begin, end in pieces])

        ordered = original(DataLoader(lines, 32, collate_fn=list), tokenize)
        with (
            pinfeed.RaggedStore(path, offsets) as store,
            pinfeed.Feeder(store, batch_size=32, host_transform=tokenize_bytes) as feeder,
        ):
            assert same(list(feeder), ordered)
    print(f"{len(expected)} batches of {len(tokenize.numbers)} words, from strings and from a file")


if __name__ == "__main__":
    main()
