"""Files that anybody may have written: whatever their bytes, what comes out is rows or a PinfeedError, and nothing of them is executed.

Default runs are short; ``-m stress`` runs each for 100,000 examples (PINFEED_FUZZ_EXAMPLES for
another number).
"""

import io
import json
import os
import pickle
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from pinfeed import HostEmbedding, MmapStore, checkpoint, errors
from pinfeed.tensors.dtypes import DTYPES

N_STRESS = int(os.environ.get("PINFEED_FUZZ_EXAMPLES", "100000"))
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}

mutations = st.lists(
    st.tuples(
        st.sampled_from(["set", "cut", "insert", "repeat"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=6,
)


def mutated(content: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    """A file with some of its bytes changed, taken away, put in or doubled."""
    for kind, where, new in changes:
        i = int(where * len(content))
        content = {
            "set": content[:i] + new + content[i + len(new) :],
            "cut": content[:i] + content[i + len(new) :],
            "insert": content[:i] + new + content[i:],
            "repeat": content[:i] + content[i : i + 16] * len(new) + content[i:],
        }[kind]
    return content


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def rows_or_refusal(open_it: Callable[[], MmapStore], most_bytes: int) -> np.ndarray | None:
    """The rows, all of them; None where the file was refused."""
    try:
        with warnings.catch_warnings():
            # numpy's, of numbers as Python 2 wrote them.
            warnings.simplefilter("ignore")
            store = open_it()
    except errors.PinfeedError as error:
        return None if len(str(error)) < 1000 else pytest.fail(f"a long-winded error: {error}")
    with store:
        n = min(store.n_rows, 1000)
        assert n * store.row_nbytes <= most_bytes, "never more than the file has"
        out = np.empty((n, *store.row_shape), store.dtype)
        store.gather(np.arange(n), out)
        return out


# ---- .npy ----------------------------------------------------------------------------------------

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
"""What may stand before and behind a dict."""
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


def npy_file(header: str, version: int, n_bytes: int, encoding: str = "utf-8") -> bytes:
    text = header.encode(encoding, "backslashreplace")
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + len(text).to_bytes(2 if version == 1 else 4, "little")
        + text
        + bytes(range(256)) * 2
        + bytes(n_bytes)
    )


def saved(version: tuple[int, int], code: str) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        # Of versions that old numpys cannot read.
        warnings.simplefilter("ignore", UserWarning)
        np.lib.format.write_array(file, np.arange(15).astype(code).reshape(5, 3), version)
    return file.getvalue()


def numpys(content: bytes) -> np.ndarray | None:
    """What numpy makes of it, where it takes it at all."""
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
    got = rows_or_refusal(lambda: MmapStore(path), len(content))
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
        # As Python 2 wrote it.
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


@settings(max_examples=1000, derandomize=True, **QUIET)
@given(
    header=other_headers,
    version=st.sampled_from([1, 2, 3]),
    encoding=st.sampled_from(["utf-8", "latin-1"]),
)
def test_any_npy_header(scratch: Path, header: str, version: int, encoding: str) -> None:
    same_as_numpy(scratch / "x.npy", npy_file(header, version, 0, encoding))


@settings(max_examples=300, **QUIET)
@given(content=npy_files)
def test_any_npy_file(scratch: Path, content: bytes) -> None:
    same_as_numpy(scratch / "x.npy", content)


@pytest.mark.stress
@pytest.mark.usefixtures("unhurried")
@settings(max_examples=N_STRESS, **QUIET)
@given(content=npy_files)
def test_any_npy_file_for_long(scratch: Path, content: bytes) -> None:
    same_as_numpy(scratch / "x.npy", content)


# ---- safetensors, raw ----------------------------------------------------------------------------

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
    rows_or_refusal(lambda: MmapStore.safetensors(path, "w"), path.stat().st_size)


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
        lambda: MmapStore.raw(scratch / "x.bin", shape=shape, dtype=dtype, offset=offset), n_bytes
    )


# ---- checkpoints ---------------------------------------------------------------------------------


class Run:
    """What is saved, and what a damaged save must leave as it is."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.table = HostEmbedding(20, 3, name="table")
        self.model = nn.Linear(3, 2)
        self.parts: dict[str, Any] = {"table": self.table, "model": self.model}

    @property
    def values(self) -> list[bytes]:
        arrays = [
            self.table.read(range(20)),
            *self.model.state_dict().values(),
            torch.get_rng_state(),
        ]
        return [array.numpy().tobytes() for array in arrays]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("whole"), **Run().parts, step=3)


def signed(directory: Path, body: Any) -> None:
    """Write a manifest whose checksum is right."""
    text = json.dumps(body)
    (directory / "manifest.json").write_text(
        json.dumps({"crc32": zlib.crc32(text.encode()), "body": text})
    )


def forge(directory: Path, name: str, content: bytes) -> None:
    """Replace a file, and let the manifest say that it is right."""
    (directory / name).write_bytes(content)
    body = json.loads(json.loads((directory / "manifest.json").read_text())["body"])
    body["files"][name] = {
        "bytes": len(content),
        "crc32": [
            zlib.crc32(content[i : i + (16 << 20)]) for i in range(0, len(content), 16 << 20)
        ],
    }
    signed(directory, body)


def refused_or_resumed(root: Path, whole: Path, change: Callable[[Path], object]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    directory = Path(shutil.copytree(whole, root / whole.name))
    change(directory)
    run = Run()
    before = run.values
    try:
        checkpoint.resume(root, **run.parts)
    except errors.CheckpointError as error:
        if "does not take over its state" not in str(error):
            # That of the object itself, half of which it may have taken.
            assert run.values == before, "refused, and changed all the same"


FILES = ["manifest.json", "table.npy", "model.pt", "random.pt"]
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 2**70),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["../x", "/etc/passwd", "table.npy", ".", "a\0b"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["bytes", "crc32", "kind", "stores", "value", "../x", "a\0", ""]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


def changed_body(whole: Path, path: list[str], value: Any) -> Any:
    body = json.loads(json.loads((whole / "manifest.json").read_text())["body"])
    target = body
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return body


places = st.sampled_from(
    [
        ["files"],
        ["objects"],
        ["format"],
        ["files", "table.npy"],
        ["files", "table.npy", "bytes"],
        ["files", "table.npy", "crc32"],
        ["files", "../x"],
        ["files", "random.pt"],
        ["objects", "table"],
        ["objects", "table", "kind"],
        ["objects", "table", "stores"],
        ["objects", "step"],
        ["objects", "step", "kind"],
    ]
)


@settings(max_examples=50, **QUIET)
@given(name=st.sampled_from(FILES), changes=mutations, forged=st.booleans())
def test_any_file_of_a_checkpoint(
    scratch: Path, whole: Path, name: str, changes: Any, forged: bool
) -> None:
    content = mutated((whole / name).read_bytes(), changes)
    forged = forged and name != "manifest.json"
    refused_or_resumed(
        scratch / "run",
        whole,
        lambda directory: (
            forge(directory, name, content) if forged else (directory / name).write_bytes(content)
        ),
    )


@settings(max_examples=50, **QUIET)
@given(path=places, value=json_values)
def test_any_manifest_of_a_checkpoint(
    scratch: Path, whole: Path, path: list[str], value: Any
) -> None:
    body = changed_body(whole, path, value)
    refused_or_resumed(scratch / "run", whole, lambda directory: signed(directory, body))


@pytest.mark.stress
@pytest.mark.usefixtures("unhurried")
@settings(max_examples=N_STRESS // 2, **QUIET)
@given(name=st.sampled_from(FILES), changes=mutations, forged=st.booleans())
def test_any_file_of_a_checkpoint_for_long(
    scratch: Path, whole: Path, name: str, changes: Any, forged: bool
) -> None:
    content = mutated((whole / name).read_bytes(), changes)
    forged = forged and name != "manifest.json"
    refused_or_resumed(
        scratch / "run",
        whole,
        lambda directory: (
            forge(directory, name, content) if forged else (directory / name).write_bytes(content)
        ),
    )


@pytest.mark.stress
@pytest.mark.usefixtures("unhurried")
@settings(max_examples=N_STRESS // 2, **QUIET)
@given(path=places, value=json_values)
def test_any_manifest_of_a_checkpoint_for_long(
    scratch: Path, whole: Path, path: list[str], value: Any
) -> None:
    body = changed_body(whole, path, value)
    refused_or_resumed(scratch / "run", whole, lambda directory: signed(directory, body))


class Executed:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.modules[__name__].Executed._ran, ()

    @staticmethod
    def _ran() -> None:
        raise SystemExit("code of a checkpoint was executed")


@pytest.mark.parametrize("name", ["model.pt", "random.pt", "table.npy"])
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_no_code_of_a_checkpoint_is_executed(
    scratch: Path, whole: Path, name: str, how: str
) -> None:
    file = io.BytesIO()
    torch.save({"weight": Executed()}, file) if how == "torch" else pickle.dump(Executed(), file)
    refused_or_resumed(
        scratch / "run", whole, lambda directory: forge(directory, name, file.getvalue())
    )
    objects = io.BytesIO()
    np.save(objects, np.array([Executed()] * 20, dtype=object), allow_pickle=True)
    refused_or_resumed(
        scratch / "run", whole, lambda directory: forge(directory, "table.npy", objects.getvalue())
    )


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a link outside": lambda path: _linked_outside(path),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "depth": lambda path: path.write_text("[" * 100_000),
    "size": lambda path: os.truncate(path, 1 << 40),
}


FORGED: dict[str, bytes] = {
    "nothing": b"",
    "no .npy file": b"PK\x03\x04",
    "a damaged header": npy_file("{'descr': '<f4', 'fortran_order': 1, 'shape': (20, 3)}", 1, 240),
    "fewer rows than told": npy_file(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2000, 3)}", 1, 0
    ),
    "another shape": npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (20, 4)}", 1, 240),
    "another order": npy_file("{'descr': '<f4', 'fortran_order': True, 'shape': (20, 3)}", 1, 240),
    "another dtype": npy_file("{'descr': '<f8', 'fortran_order': False, 'shape': (20, 3)}", 1, 240),
    "the other byte order": npy_file(
        "{'descr': '>f4', 'fortran_order': False, 'shape': (20, 3)}", 1, 240
    ),
    "objects": npy_file("{'descr': '|O', 'fortran_order': False, 'shape': (20, 3)}", 1, 240),
    "a single number": npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': ()}", 1, 240),
}


@pytest.mark.parametrize("how", FORGED)
@pytest.mark.parametrize("name", ["table.npy", "model.pt", "random.pt"])
def test_a_forged_file_of_a_checkpoint(scratch: Path, whole: Path, name: str, how: str) -> None:
    """The manifest says that it is right."""
    root, run = scratch / "run", Run()
    shutil.rmtree(root, ignore_errors=True)
    forge(Path(shutil.copytree(whole, root / whole.name)), name, FORGED[how])
    before = run.values
    with pytest.raises(errors.CheckpointError, match=name.replace(".", r"\.")) as refusal:
        checkpoint.resume(root, **run.parts)
    assert refusal.value.__cause__ is not None or "expected (20, 3), float32" in str(refusal.value)
    assert run.values == before


def _linked_outside(path: Path) -> None:
    elsewhere = path.parents[2] / f"elsewhere-{path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("name", FILES)
def test_what_stands_for_a_file_of_a_checkpoint(
    scratch: Path, whole: Path, name: str, how: str
) -> None:
    root = scratch / "run"
    shutil.rmtree(root, ignore_errors=True)
    HOSTILE[how](Path(shutil.copytree(whole, root / whole.name)) / name)
    with pytest.raises(errors.CheckpointError, match=name.replace(".", r"\.")):
        checkpoint.resume(root, **Run().parts)


def test_saves_that_are_links_or_files_are_none(scratch: Path, whole: Path) -> None:
    root = scratch / "linked"
    root.mkdir()
    (root / "00000009").symlink_to(whole)
    (root / "20240101").write_text("a file of the user's")
    assert not checkpoint.exists(root)
    assert checkpoint.save(root, step=1).name == "00000001"
    assert checkpoint.save(root, step=2).name == "00000002"
    assert sorted(os.listdir(root)) == ["00000002", "00000009", "20240101"]
    assert checkpoint.resume(root) == {"step": 2}
