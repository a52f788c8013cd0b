"""Row files with any bytes: a store serves the rows that numpy reads, or refuses the file."""

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.fuzzing import N_STRESS, QUIET, mutated, mutations, npy_file

from pinfeed import NpyStore, errors
from pinfeed.tensors.dtypes import DTYPES


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def rows_or_refusal(open_it: Callable[[], NpyStore], most_bytes: int) -> np.ndarray | None:
    """Return all rows, or None if the file was refused."""
    try:
        with warnings.catch_warnings():
            # numpy warns of numbers as Python 2 wrote them.
            warnings.simplefilter("ignore")
            store = open_it()
    except errors.PinfeedError as error:
        return None if len(str(error)) < 1000 else pytest.fail(f"a long-winded error: {error}")
    with store:
        n = min(store.n_rows, 1000)
        assert n * store.row_nbytes <= most_bytes, "never more bytes than the file has"
        out = np.empty((n, *store.row_shape), store.dtype)
        store.gather(np.arange(n), out)
        return out


TOKENS = [
    "'descr'",
    "'fortran_order'",
    "'shape'",
    "'<f4'",
    "'>i2'",
    "'|u1'",
    "'|O'",
    "'<c8'",
    "'|V2'",
    "True",
    "False",
    "None",
    "0",
    "1",
    "3",
    "-1",
    "2**9",
    "9" * 30,
    "1.5",
    "1j",
    "()",
    "(3,)",
    "(2, 3)",
    "(0,)",
    "[",
    "]",
    "(",
    ")",
    "{",
    "}",
    ",",
    ":",
    " ",
    "\n",
    "__import__('os')",
    "b'x'",
    "\\",
    "'",
    "#",
    "lambda: 0",
    "é",
    "\0",
    "3L",
    "+",
    "-",
    "~",
]
fields = st.fixed_dictionaries(
    {
        "descr": st.sampled_from(
            [
                "'<f4'",
                "'>i2'",
                "'|u1'",
                "'<f8'",
                "'|b1'",
                "'|O'",
                "[('a', '<f4')]",
                "'|V4'",
                "'<U2'",
                "'<M8[s]'",
            ]
        ),
        "fortran_order": st.sampled_from(["False", "True", "0", "None"]),
        "shape": st.one_of(
            st.lists(st.integers(0, 4), max_size=4).map(lambda shape: repr(tuple(shape))),
            st.sampled_from(["(-1, 3)", "[2]", "2", "(2**9,)", f"({2**62}, 4, 0)"]),
        ),
    }
)
ODD_VALUES = {
    "descr": [
        "'float32'",
        "'>i2'",
        "'f4'",
        "'<f4,<f4'",
        "('<f4',())",
        "('<f4',(2,))",
        "['<f4']",
        "[('a','<f4')]",
        "[('','<f4')]",
        "[('a',[('b','<f4')])]",
        "b'<f4'",
        "None",
        "4",
        "True",
        "'|S0'",
        "'<f''4'",
        "{'a':'<f4'}",
    ],
    "fortran_order": ["True", "0", "1", "None", "'False'", "[]", "False|True", "0.0"],
    "shape": [
        "(2,3,)",
        "(True,3)",
        "(2,False)",
        "(-1,3)",
        "(2,-3)",
        "(2.0,3)",
        "('2',3)",
        "[2,3]",
        "6",
        "(6)",
        "((2,3))",
        "(2,(3,))",
        "(0x2,3)",
        "(2L,3L)",
        "(2L,3)",
        "(+2,3)",
        "(2_0,)",
        "(1,2,3)",
        "None",
        "{2,3}",
        "(2,None)",
        "(2,)*2",
    ],
}
GOOD_VALUES = {"descr": "'<f4'", "fortran_order": "False", "shape": "(2, 3)"}
AROUND = [
    " ",
    "\t",
    "\n",
    "\r\n",
    "\f",
    "\v",
    "\0",
    "\xa0",
    "\x1f",
    "\u2028",
    "#",
    "# é",
    ";",
    ",",
    "x",
    "()",
    "{}",
    "\\",
    "L",
]
"""Text before and behind the dict of a header."""
changes_of_headers = st.one_of(
    *(st.tuples(st.just(key), st.sampled_from(odd)) for key, odd in ODD_VALUES.items()),
    st.tuples(st.sampled_from(["without"]), st.sampled_from([*GOOD_VALUES])),
    st.tuples(
        st.sampled_from(["more", "Shape", "", b"shape", 1]),
        st.sampled_from([*GOOD_VALUES.values()]),
    ),
    st.tuples(st.sampled_from(["before", "behind"]), st.sampled_from(AROUND)),
)


def changed_header(changes: list[tuple[Any, str]]) -> str:
    found: dict[Any, str] = {**GOOD_VALUES, "before": "", "behind": ""}
    for key, value in changes:
        found.pop(value, None) if key == "without" else found.update({key: value})
    before, behind = found.pop("before"), found.pop("behind")
    return (
        before
        + "{"
        + ", ".join(f"{key!r}: {value}" for key, value in found.items())
        + ", }"
        + behind
    )


other_headers = st.lists(changes_of_headers, max_size=3).map(changed_header)
headers = st.one_of(
    other_headers,
    fields.map(
        lambda found: "{" + ", ".join(f"{key!r}: {value}" for key, value in found.items()) + ", }"
    ),
    st.lists(st.sampled_from(TOKENS), max_size=30).map("".join),
)
npy_files = st.one_of(
    st.tuples(
        headers,
        st.sampled_from([1, 2, 3]),
        st.integers(0, 300),
        st.sampled_from(["utf-8", "latin-1", "utf-16"]),
    ).map(lambda parts: npy_file(*parts)),
    st.tuples(
        st.sampled_from([(1, 0), (2, 0), (3, 0)]),
        st.sampled_from(["<f4", ">i2", "|u1", "<c16"]),
        mutations,
    ).map(lambda parts: mutated(saved(parts[0], parts[1]), parts[2])),
)


def saved(version: tuple[int, int], code: str) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        # numpy warns of versions that older versions of it cannot read.
        warnings.simplefilter("ignore", UserWarning)
        np.lib.format.write_array(file, np.arange(15).astype(code).reshape(5, 3), version)
    return file.getvalue()


def numpys(content: bytes) -> np.ndarray | None:
    """Return the rows that numpy reads from a file, or None if numpy refuses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return np.lib.format.read_array(
                io.BytesIO(content), allow_pickle=False, max_header_size=1 << 16
            )
        except Exception:
            return None


def same_as_numpy(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    got = rows_or_refusal(lambda: NpyStore(path), len(content))
    want = numpys(content)
    served = (
        want is not None
        and want.ndim > 0
        and len(want) > 0
        and want.dtype.name in DTYPES
        and (want.ndim == 1 or not want.flags.f_contiguous)
    )
    if got is None:
        assert not served, "numpy reads it"
    else:
        assert want is not None, "numpy refuses it"
        assert got.dtype == want.dtype.newbyteorder("=")
        assert got.tobytes() == want[:1000].astype(got.dtype).tobytes()


SAID = "'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)"


@pytest.mark.parametrize(
    ("header", "version", "encoding", "taken"),
    [
        (f"{{{SAID}}}", 1, "latin-1", True),
        (f"{{{SAID}, 'more': 1}}", 1, "latin-1", False),
        (f"{{{SAID.replace('False', '0')}}}", 2, "latin-1", False),
        (f"{{{SAID.replace('False', '1')}}}", 3, "utf-8", False),
        (f"{{{SAID.replace('False', 'None')}}}", 3, "utf-8", False),
        (f"{{{SAID}, 'more': 1}}", 3, "utf-8", False),
        (f"{{{SAID.replace('2, 3', 'True, 3')}}}", 1, "latin-1", False),
        # Python 2 wrote long numbers with an L.
        (f"{{{SAID.replace('2, 3', '2L, 3')}}}", 1, "latin-1", True),
        (f"{{{SAID.replace('2, 3', '2L, 3')}}}", 3, "utf-8", False),
        (f"{{{SAID}}} # é", 1, "latin-1", True),
        (f"{{{SAID}}} # é", 1, "utf-8", True),
        (f"{{{SAID}}} # é", 3, "utf-8", True),
        (f"{{{SAID}}} # é", 3, "latin-1", False),
        (f"{{{SAID}}}\v", 3, "utf-8", False),
        (f"\xa0{{{SAID}}}", 1, "latin-1", False),
        (f"\xa0{{{SAID}}}", 3, "utf-8", False),
        (f"{{{SAID}}}" + " " * 20_000, 2, "latin-1", True),
    ],
)
def test_a_header_that_numpy_takes_or_refuses(
    scratch: Path, header: str, version: int, encoding: str, taken: bool
) -> None:
    content = npy_file(header, version, 0, encoding)
    assert (numpys(content) is not None) == taken
    same_as_numpy(scratch / "x.npy", content)


@settings(max_examples=400, derandomize=True, **QUIET)
@given(
    header=other_headers,
    version=st.sampled_from([1, 2, 3]),
    encoding=st.sampled_from(["utf-8", "latin-1"]),
)
def test_any_npy_header(scratch: Path, header: str, version: int, encoding: str) -> None:
    same_as_numpy(scratch / "x.npy", npy_file(header, version, 0, encoding))


@settings(max_examples=150, **QUIET)
@given(content=npy_files)
def test_any_npy_file(scratch: Path, content: bytes) -> None:
    same_as_numpy(scratch / "x.npy", content)


@pytest.mark.stress
@pytest.mark.usefixtures("unhurried")
@settings(max_examples=N_STRESS, **QUIET)
@given(content=npy_files)
def test_any_npy_file_for_long(scratch: Path, content: bytes) -> None:
    same_as_numpy(scratch / "x.npy", content)


tensors_headers = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "w": st.fixed_dictionaries(
                {},
                optional={
                    "dtype": st.sampled_from(["F32", "I8", "BF16", "F4", "X", 3, None]),
                    "shape": st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**40, 2**63]), max_size=3),
                    "data_offsets": st.lists(
                        st.sampled_from([0, 4, 6, 12, 24, -1, 2**62, 2**70]), max_size=3
                    ),
                },
            ),
            "__metadata__": st.dictionaries(
                st.text(max_size=2), st.one_of(st.text(max_size=2), st.integers()), max_size=2
            ),
        },
    ).map(json.dumps),
    st.sampled_from(
        [
            "[" * 5000,
            '{"w":' * 3000,
            '{"w": NaN}',
            '{"w": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}, "w": 3}',
        ]
    ),
)


def check_safetensors(
    path: Path, header: str, changes: list[tuple[str, float, bytes]], whole: bool
) -> None:
    content = len(header.encode()).to_bytes(8, "little") + header.encode() + bytes(24)
    if whole:
        save_file({"w": torch.ones(4, 3), "v": torch.ones(5)}, path)
        content = path.read_bytes()
    path.write_bytes(mutated(content, changes) if changes else content)
    rows_or_refusal(lambda: NpyStore.safetensors(path, "w"), path.stat().st_size)


@settings(max_examples=100, **QUIET)
@given(header=tensors_headers, changes=st.one_of(st.just([]), mutations), whole=st.booleans())
def test_any_safetensors_file(scratch: Path, header: str, changes: Any, whole: bool) -> None:
    check_safetensors(scratch / "x.safetensors", header, changes, whole)


@pytest.mark.stress
@pytest.mark.usefixtures("unhurried")
@settings(max_examples=N_STRESS, **QUIET)
@given(header=tensors_headers, changes=st.one_of(st.just([]), mutations), whole=st.booleans())
def test_any_safetensors_file_for_long(
    scratch: Path, header: str, changes: Any, whole: bool
) -> None:
    check_safetensors(scratch / "x.safetensors", header, changes, whole)


@settings(max_examples=100, **QUIET)
@given(
    n_bytes=st.integers(0, 100),
    shape=st.lists(st.sampled_from([-2, -1, 0, 1, 2, 3, 2**31, 2**63]), max_size=4).map(tuple),
    dtype=st.sampled_from(["u1", "<f4", ">i8", "bfloat16"]),
    offset=st.sampled_from([-1, 0, 1, 7, 2**63]),
)
def test_any_raw_file(
    scratch: Path, n_bytes: int, shape: tuple[int, ...], dtype: str, offset: int
) -> None:
    (scratch / "x.bin").write_bytes(bytes(n_bytes))
    rows_or_refusal(
        lambda: NpyStore.raw(scratch / "x.bin", shape=shape, dtype=dtype, offset=offset), n_bytes
    )
