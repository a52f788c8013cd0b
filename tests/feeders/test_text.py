"""Text beside tensors: lists of strings that equal those of the plain loop."""

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.schedules import randomly
from torch.utils.data import DataLoader

import pinfeed
from pinfeed import ArrowStore, Config, Feeder, MiB, ParquetStore, RowDataset, TextStore
from pinfeed.errors import ArgumentError, ReadError, RowIndexError, StoreError, WriteBackError
from pinfeed.testing import SimDevice

N = 300
TEXTS = [None if i % 11 == 0 else f"größe {i} 😀" * (i % 4) for i in range(N)]
NUMBERS = np.arange(N)


def chunked(n_chunks: int) -> pa.ChunkedArray:
    ends = np.linspace(0, N, n_chunks + 1).astype(int)
    parts = [pa.array(TEXTS[a:b]) for a, b in itertools.pairwise(ends)]
    return pa.chunked_array([parts[0][:0], *parts])


def plain(rows: torch.Tensor) -> list[Any]:
    """Return the texts of a plain loop."""
    return [TEXTS[row] for row in rows.tolist()]


COLUMNS: dict[str, Any] = {
    "one chunk": chunked(1),
    "several chunks": chunked(7),
    "an array": pa.array(TEXTS),
    "a part": pa.array(["other", *TEXTS, "other"]).slice(1, N),
    "large_string": pa.array(TEXTS, pa.large_string()),
    "string_view": pa.array(TEXTS, pa.string_view()),
    "dictionary": pa.array(TEXTS).dictionary_encode(),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("depth", [0, 2])
def test_batches_have_the_texts_of_their_rows(column: Any, depth: int) -> None:
    source = {"text": column, "y": NUMBERS}
    with Feeder(source, batch_size=64, shuffle=True, depth=depth, device="cpu") as feeder:
        for _ in range(2):
            seen = []
            for batch in feeder:
                assert batch["text"] == plain(batch["y"])
                seen += batch["y"].tolist()
            assert sorted(seen) == list(range(N))


@pytest.mark.parametrize("seed", range(4))
def test_texts_stay_on_the_host_of_a_device(seed: int) -> None:
    device = SimDevice(randomly(seed))
    source = (NUMBERS, TextStore(COLUMNS["one chunk"]), np.ones((N, 2), "float32"))
    rows: list[list[int]] = []
    texts = []
    with Feeder(source, batch_size=50, shuffle=True, device=device) as feeder:
        for y, text, _ in feeder:
            device.launch(lambda y: rows.append(y.tolist()), y)
            texts.append(text)
    device.drain()
    assert texts == [[TEXTS[row] for row in batch] for batch in rows]
    assert sum(map(len, texts)) == N


def test_numpy_strings_are_text() -> None:
    words = np.array(["a", "bc", "", "d"])
    with Feeder((words, np.arange(4)), batch_size=2, rows=[3, 0, 2, 1]) as feeder:
        assert [(text, y.tolist()) for text, y in feeder] == [
            (["d", "a"], [3, 0]),
            (["", "bc"], [2, 1]),
        ]


def test_older_versions_of_pyarrow_have_no_string_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pa.types, "is_string_view")
    table = pa.table({"text": TEXTS, "y": NUMBERS})
    with Feeder(table, batch_size=64) as feeder:
        for batch in feeder:
            assert batch["text"] == plain(batch["y"])


def test_text_alone_is_a_source() -> None:
    with Feeder(COLUMNS["several chunks"], batch_size=128) as feeder:
        assert [text for batch in feeder for text in batch] == TEXTS


def test_ragged_rows_and_text_keep_their_places() -> None:
    tokens = pinfeed.RaggedStore(np.arange(2 * N), np.arange(0, 2 * N + 1, 2))
    source = {"t": chunked(1), "r": tokens, "u": chunked(2), "y": NUMBERS}
    with Feeder(source, batch_size=70, shuffle=True) as feeder:
        for batch in feeder:
            assert batch["t"] == batch["u"] == plain(batch["y"])
            assert batch["r"][0].view(-1, 2)[:, 0].tolist() == (2 * batch["y"]).tolist()


@pytest.mark.parametrize(
    "config", [None, Config(cpu_memory_limit=MiB(64), preferred_batch_size=40)]
)
def test_transforms_receive_the_texts(config: Config | None) -> None:
    def tokenize(batch: dict[str, Any]) -> dict[str, Any]:
        lengths = torch.tensor([len(text or "") for text in batch["text"]])
        return {**batch, "n": lengths}

    size = {"batch_size": 40} if config is None else {"config": config}
    with Feeder(
        {"text": chunked(3), "y": NUMBERS},
        shuffle=True,
        host_transform=tokenize,
        device_transform=lambda batch: {**batch, "n": batch["n"] + 1},
        transform_threads=2,
        **size,
    ) as feeder:
        for batch in feeder:
            assert batch["text"] == plain(batch["y"])
            assert batch["n"].tolist() == [len(text or "") + 1 for text in batch["text"]]


def test_a_loop_resumes_with_its_texts() -> None:
    source = {"text": chunked(2), "y": NUMBERS}
    with Feeder(source, batch_size=32, shuffle=True) as feeder:
        batches = iter(feeder)
        next(batches)
        state = feeder.state_dict()
        expected = [batch["text"] for batch in batches]
    with Feeder(source, batch_size=32, shuffle=True) as feeder:
        feeder.load_state_dict(state)
        assert [batch["text"] for batch in feeder] == expected


def test_verify_compares_texts() -> None:
    prefetched = threading.Event()

    class Told(pinfeed.ArrayStore):
        def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
            super().gather(rows, out)
            # The texts of a batch are read before its numbers.
            if 50 in rows:
                prefetched.set()

    words = np.array([f"word {i}" for i in range(N)])
    source = (words, Told(NUMBERS))
    with Feeder(source, batch_size=50, verify=True, depth=2, device="cpu") as feeder:
        batches = iter(feeder)
        next(batches)
        prefetched.wait()
        words[52] = "changed"
        with pytest.raises(
            pinfeed.VerificationError, match=r"1 of 50 rows of source\[0\].* row 52"
        ):
            next(batches)


def test_only_numbers_are_written_back() -> None:
    x = np.zeros(N)
    with Feeder({"text": chunked(1), "x": x}, batch_size=50) as feeder:
        for batch in feeder.batches():
            with pytest.raises(WriteBackError, match=r"\['text'\], which has read-only text; give"):
                batch.write_back(batch.data)
            batch.write_back({"text": None, "x": batch.data["x"] + 1})
    assert (x == 1).all()


def test_a_table_has_text_beside_its_numbers() -> None:
    table = pa.table({"text": chunked(2), "y": NUMBERS})
    with Feeder(table, batch_size=100, shuffle=True) as feeder:
        for batch in feeder:
            assert batch["text"] == plain(batch["y"])
    assert "source['text'] text" in repr(feeder)


def test_a_shuffled_dataset_has_the_texts_of_its_rows() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset(pa.table({"text": chunked(2), "y": NUMBERS})).shuffle(seed=1)
    for view in (dataset, dataset.with_format("torch")):
        with Feeder(view, batch_size=100) as feeder:
            found = [text for batch in feeder for text in batch["text"]]
        assert found == list(dataset["text"])


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_text_of_parquet_files(tmp_path: Path, as_dictionary: bool) -> None:
    for number, part in enumerate((slice(0, 120), slice(120, N))):
        texts = pa.array(TEXTS[part])
        texts = texts.dictionary_encode() if as_dictionary else texts
        table = pa.table({"text": texts, "y": NUMBERS[part]})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=50)
    path = str(tmp_path / "*.parquet")
    source = {"text": ParquetStore.text(path, "text"), "y": ParquetStore(path, "y")}
    with Feeder(source, batch_size=64, shuffle=True) as feeder:
        for batch in feeder:
            assert batch["text"] == plain(batch["y"])
        uses = {item.what: item for item in feeder.plan.items}
    n_characters = sum(len((text or "").encode()) for text in TEXTS)
    assert uses["texts of batches, on average"].total > 0
    assert uses["buffers and indices of the stores"].total > n_characters


def test_rows_by_index_have_text() -> None:
    dataset = RowDataset({"text": chunked(3), "y": NUMBERS})
    assert dataset[5] == {"text": TEXTS[5], "y": torch.tensor(5)}
    assert dataset[[7, 2]]["text"] == [TEXTS[7], TEXTS[2]]
    words = RowDataset((np.array(["a", "b", "c"]), np.arange(3)))
    (batch,) = DataLoader(words, batch_size=3)
    assert list(batch[0]) == ["a", "b", "c"]


@pytest.mark.parametrize("row", [N, -1])
def test_rows_out_of_range_are_refused(row: int) -> None:
    with pytest.raises(RowIndexError, match=str(row)):
        TextStore(chunked(1)).read(np.array([0, row]))


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (["a", "b"], "list; expected text"),
        (pa.array([1, 2]), "of int64; expected text"),
        (pa.array([b"a"]), "of binary; expected text"),
        (pa.array([1]).dictionary_encode(), "of dictionary"),
        (np.array([1, 2]), "of int64; expected text"),
        (np.array([["a"]]), "expected text"),
        (np.array(["a", None], object), "of object; expected text"),
        (pa.array([], pa.string()), "no rows"),
    ],
)
def test_other_columns_are_refused(column: Any, found: str) -> None:
    with pytest.raises(StoreError, match=found):
        TextStore(column)


@pytest.mark.parametrize("depth", [0, 2])
def test_text_in_another_encoding_is_an_error_of_its_column(depth: int) -> None:
    ends, data = (pa.py_buffer(part) for part in (np.array([0, 1, 2], "i4"), b"a\xe9"))
    latin = pa.StringArray.from_buffers(2, ends, data)
    with (
        Feeder(TextStore(latin, name="title"), batch_size=1, depth=depth) as feeder,
        pytest.raises(ReadError, match=r"title: a row is not in UTF-8 .*0xe9"),
    ):
        list(feeder)


def test_errors_name_the_text_store(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": TEXTS, "y": NUMBERS}), path)
    with pytest.raises(
        StoreError, match=r"column of string.*pinfeed.ParquetStore.text\(path, name"
    ):
        Feeder(path, batch_size=4)
    with pytest.raises(StoreError, match=r"'y' has int64; expected text; give pinfeed.Parq"):
        ParquetStore.text(path, "y")
    with pytest.raises(StoreError, match="no column 'z'; expected one of 'text', 'y'"):
        ParquetStore.text(path, "z")


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a"], pa.large_string()),
        pa.array(["a"], pa.string_view()),
        pa.array(["a"]).dictionary_encode(),
    ],
)
def test_stores_of_numbers_name_the_text_store(column: pa.Array) -> None:
    with pytest.raises(StoreError, match=r"expected numbers.*give pinfeed.TextStore\(column\)"):
        ArrowStore(column)


def test_lists_of_text_are_not_for_the_text_store() -> None:
    with pytest.raises(StoreError, match=r"column of string; .* convert it to numbers"):
        ArrowStore(pa.array([["a"], ["b"]]))


def test_what_cannot_take_text_says_so() -> None:
    text = TextStore(chunked(1))
    with pytest.raises(StoreError, match=r"is text; .*pyarrow.concat_tables"):
        pinfeed.concat([text, text])
    with pytest.raises(ArgumentError, match="the source has text; expected numbers"):
        pinfeed.mean_and_std((NUMBERS, text))
    with pytest.raises(ArgumentError, match=r"fetch\['t'\] has a TextStore"):
        pinfeed.wrap_loader(DataLoader(NUMBERS), fetch={"t": (text, lambda batch: batch)})
    with pytest.raises(StoreError, match="unequal numbers of rows"):
        Feeder((text, np.zeros(N - 1)), batch_size=4)
