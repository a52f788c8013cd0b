"""Header of a .npy file.

Everything that numpy writes and pinfeed can serve is read. Everything else is refused.
"""

import ast
import io
import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pinfeed.errors import FileMissing, StoreError
from pinfeed.stores.file_store import RowLayout
from pinfeed.stores.npy_header import read_header
from pinfeed.tensors.dtypes import DTYPES

NUMERIC = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"]
VERSIONS = [(1, 0), (2, 0), (3, 0)]


def save(path: Path, array: np.ndarray, version: tuple[int, int] | None = None) -> str:
    with path.open("wb") as file, warnings.catch_warnings():
        # numpy warns of versions that old releases of numpy cannot read.
        warnings.simplefilter("ignore", UserWarning)
        np.lib.format.write_array(file, array, version)
    return str(path)


def file_of(
    header: str | bytes, version: int = 1, data: bytes = bytes(64), length: int | None = None
) -> bytes:
    """Return a .npy file with any text as its header."""
    text = header if isinstance(header, bytes) else header.encode()
    length = len(text) if length is None else length
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + length.to_bytes(2 if version == 1 else 4, "little")
        + text
        + data
    )


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def header_of(shape: str = "(2, 3)", descr: str = "'<f4'", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


# -- what numpy writes -----------------------------------------------------------------------------


@pytest.mark.parametrize("code", NUMERIC)
def test_numbers_of_every_kind_and_version(tmp_path: Path, code: str) -> None:
    for order, version in itertools.product("<>", VERSIONS):
        array = np.arange(24).astype(np.dtype(code).newbyteorder(order)).reshape(4, 3, 2)
        path = save(tmp_path / f"{order} {version}.npy", array, version)
        header = read_header(path)
        assert header == RowLayout(path, array.dtype, 4, (3, 2), header.offset)
        assert header.dtype.isnative == array.dtype.isnative, path
        assert header.row_nbytes == array[0].nbytes, path
        assert header.end == Path(path).stat().st_size, path
        assert Path(path).read_bytes()[header.offset :] == array.tobytes(), path
        assert header.dtype.name in DTYPES


@pytest.mark.parametrize("shape", [(1,), (5,), (5, 1), (1, 5), (2, 3, 4, 5), (3, 0), (1,) * 32])
def test_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    header = read_header(save(tmp_path / "x.npy", np.zeros(shape, np.int16)))
    assert (header.n_rows, header.row_shape) == (shape[0], shape[1:])
    assert header.row_nbytes == 2 * int(np.prod(shape[1:]))


@pytest.mark.parametrize("shape", [(0,), (0, 4)])
def test_zero_rows_are_no_error_of_the_header(tmp_path: Path, shape: tuple[int, ...]) -> None:
    header = read_header(save(tmp_path / "x.npy", np.zeros(shape, np.float32)))
    assert (header.n_rows, header.row_shape) == (0, shape[1:])
    assert header.end == header.offset


def test_a_file_may_have_more_bytes_than_rows(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", np.arange(4))
    with open(path, "ab") as file:
        file.write(b"more")
    assert read_header(path).n_rows == 4


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.npy", file_of(header_of(shape=f"({1 << 36}, 4)"), data=b""))
    with open(path, "r+b") as file:
        file.truncate((1 << 40) + 200)  # sparse
    header = read_header(path)
    assert (header.n_rows, header.row_shape, header.end) == (
        1 << 36,
        (4,),
        header.offset + (1 << 40),
    )


def test_fortran_order_matters_from_two_axes_on(tmp_path: Path) -> None:
    path = write(tmp_path / "x.npy", file_of(header_of(shape="(4,)", fortran="True")))
    assert read_header(path).n_rows == 4
    with pytest.raises(
        StoreError, match=r"x\.npy is in Fortran order, .* save np\.ascontiguousarray\(array\)"
    ):
        read_header(save(tmp_path / "x.npy", np.asfortranarray(np.zeros((4, 3)))))
    column = np.asfortranarray(np.zeros((4, 1)))
    assert read_header(save(tmp_path / "x.npy", column)).row_shape == (1,)


def test_keys_may_come_in_any_order(tmp_path: Path) -> None:
    text = "{'shape':(2,3),'fortran_order':False,'descr':'<f4'}"
    assert read_header(write(tmp_path / "x.npy", file_of(text))).row_shape == (3,)


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("O", "dtype object .*never unpickled"),
        ([("a", "f4"), ("b", "i4")], "a structured dtype: save each field as a separate array"),
        ("M8[s]", r'dtype datetime64\[s\] .*dates: convert with \.view\("int64"\)'),
        ("m8[ns]", r'dtype timedelta64\[ns\] .*dates: convert with \.view\("int64"\)'),
        (
            "S3",
            (
                r"dtype \|S3 has no torch counterpart \(text: convert it, np\.unique.*\); "
                "expected one of bfloat16, bool, "
            ),
        ),
        ("U3", "dtype <U3 has no torch counterpart"),
        ("g", "has no torch counterpart"),
        (
            "V2",
            (
                r"dtype \|V2 does not say what the items are; if they are bfloat16, give "
                r'NpyStore\(path, dtype="bfloat16"\)'
            ),
        ),
    ],
)
def test_dtypes_that_torch_lacks_are_refused(tmp_path: Path, dtype: Any, message: str) -> None:
    if dtype == "g" and np.dtype("g") == np.dtype("f8"):
        pytest.skip("long double is double here")
    path = save(tmp_path / "x.npy", np.zeros(3, dtype))
    with pytest.raises(StoreError, match=rf"x\.npy: .*{message}"):
        read_header(path)


def test_bfloat16_must_be_named(tmp_path: Path) -> None:
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    path = save(tmp_path / "x.npy", np.arange(6).astype(bfloat16).reshape(3, 2))
    with pytest.raises(StoreError, match="if they are bfloat16, give NpyStore"):
        read_header(path)
    header = read_header(path, bfloat16)
    assert (header.dtype, header.n_rows, header.row_nbytes) == (bfloat16, 3, 4)


def test_items_can_be_taken_for_others_of_their_size(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", np.zeros(3, np.uint16))
    assert read_header(path, np.dtype(np.int16)).dtype == np.int16
    with pytest.raises(
        StoreError,
        match=r"has items of dtype uint16, which cannot be read as float32",
    ):
        read_header(path, np.dtype(np.float32))
    with pytest.raises(
        StoreError, match="has items of dtype object, which cannot be read as int64"
    ):
        read_header(save(tmp_path / "x.npy", np.zeros(3, object)), np.dtype(np.int64))


def test_the_byte_order_of_the_file_is_kept(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", np.arange(3, dtype=">f4"))
    assert read_header(path, np.dtype(np.float32)).dtype == np.dtype(">f4")
    with pytest.raises(
        StoreError,
        match=r"has items of dtype >f4, .* plain items of 4 bytes, in this machine's byte order",
    ):
        read_header(path, np.dtype(np.int32))


# -- files that are not .npy files -----------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(
        FileMissing,
        match=rf"{re.escape(str(tmp_path))}/x\.npy: no such file \(looked in .*\); "
        r"expected a \.npy file",
    ):
        read_header(str(tmp_path / "x.npy"))


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"is a directory; expected a \.npy file, or a pattern such as .*/\*\.npy"
    ):
        read_header(str(tmp_path))
    with pytest.raises(StoreError, match=rf"such as {re.escape(str(tmp_path))}/\*\.npy$"):
        read_header(f"{tmp_path}/")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty (0 bytes)"),
        (b"\n", r"is not a .npy file (it starts with b'\n'); expected a file"),
        (
            b"PK\x03\x04" + bytes(100),
            "is not a .npy file; it looks like a zip archive: for a .npz file, save each",
        ),
        (
            b"hello, world, this is text",
            "is not a .npy file (it starts with b'hello,'); expected a file",
        ),
        (
            b"\x93NUMPX" + bytes(100),
            "is not a .npy file (it starts with b'\\x93NUMPX'); expected a file",
        ),
    ],
)
def test_another_kind_of_file(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(StoreError, match=re.escape(f"x.npy {said}")):
        read_header(write(tmp_path / "x.npy", content))


def test_an_npz_file_is_another_kind(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros(3))
    with pytest.raises(StoreError, match=r"x\.npz is not a \.npy file"):
        read_header(str(tmp_path / "x.npz"))


@pytest.mark.parametrize("version", [(0, 0), (4, 0), (1, 1), (255, 255)])
def test_another_version(tmp_path: Path, version: tuple[int, int]) -> None:
    content = b"\x93NUMPY" + bytes(version) + file_of(header_of())[8:]
    with pytest.raises(
        StoreError,
        match=re.escape(
            f"version {version[0]}.{version[1]} is not known; expected 1.0, 2.0 or 3.0"
        ),
    ):
        read_header(write(tmp_path / "x.npy", content))


def test_a_single_number(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"holds a single number \(shape \(\)\); expected \(n_rows, \.\.\.\)"
    ):
        read_header(save(tmp_path / "x.npy", np.array(3.0)))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_truncation_is_noticed(tmp_path: Path, version: tuple[int, int]) -> None:
    path = Path(save(tmp_path / "x.npy", np.arange(5, dtype=np.int16), version))
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(StoreError):
            read_header(str(path))


def test_missing_rows_are_reported(tmp_path: Path) -> None:
    path = Path(save(tmp_path / "x.npy", np.zeros((10, 3), np.float32)))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        StoreError,
        match="is truncated: 10 rows of 12 bytes from byte 128 on need 248 bytes in all; "
        "the file has 247",
    ):
        read_header(str(path))


# -- hostile headers -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("length", [65537, 1 << 31, (1 << 32) - 1])
def test_a_header_of_gigabytes_is_not_read(tmp_path: Path, version: int, length: int) -> None:
    with pytest.raises(StoreError, match=f"a header of {length} bytes; expected at most 65536"):
        read_header(write(tmp_path / "x.npy", file_of(header_of(), version, length=length)))


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"header is damaged .*it has 59 of 60000 bytes"):
        read_header(write(tmp_path / "x.npy", file_of(header_of(), data=b"", length=60_000)))


SHAPES = [
    "(-1, 3)", "(2, -3)", "(2.0, 3)", "(True, 3)", "[2, 3]", "6", "None", "'23'",
    "('2', 3)", "(2, (3,))", "(2**3, 3)", "(1e3, 3)",
    "(" + "2," * 65 + ")",
    f"({1 << 63},)",
    f"(1, {1 << 64})",
    "(" + "9" * 4000 + ",)",
    "(" + "9" * 5000 + ",)",
    "(0x" + "f" * 20_000 + ",)",
    "(" + "0xffffffffffffff," * 3000 + ")",
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[:12])
def test_invalid_shapes_are_refused(tmp_path: Path, shape: str) -> None:
    with pytest.raises(StoreError, match=r"x\.npy: the \.npy header is damaged \(") as refusal:
        read_header(write(tmp_path / "x.npy", file_of(header_of(shape=shape))))
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    "shape",
    ["(5, 4)", f"({(1 << 63) - 1},)", "(" + f"{(1 << 63) - 1}," * 64 + ")"],
    ids=lambda shape: shape[:20],
)
def test_shapes_larger_than_the_file(tmp_path: Path, shape: str) -> None:
    with pytest.raises(StoreError, match="is truncated"):
        read_header(write(tmp_path / "x.npy", file_of(header_of(shape=shape))))


DESCRIPTIONS = [
    "()", "('<f4',)", "[]", "''", "None", "5", "True", "1.5", "b'<f4'", "...", "{}",
    "'a'", "'a5'", "'4f4'", "'(2, 3)f4'", "'f4,f4'", "'T'", "'|O'", "'<f4\\x00'", "'é'",
    "'" + "f" * 50_000 + "'",
    "('<f4', (2,))", "('<f4', (1000000000000,))", "('<f4', -1)", f"('<f4', ({1 << 70},))",
    "(('<f4', 2), 2)",
    "[('a',)]", "[('a', 'b', 'c', 'd')]", "['x']", "[5]", "[(5, '<f4')]", "[('', '<f4')]",
    "[('a', '<f4'), ('a', '<f4')]", "{'names': []}",
    "'<f4' if 1 else 2", "__import__('os').abort()", "open('/etc/passwd')",
]  # fmt: skip


@pytest.mark.parametrize("descr", DESCRIPTIONS, ids=lambda descr: descr[:30])
def test_descriptions_that_are_no_numbers(tmp_path: Path, descr: str) -> None:
    with pytest.raises(StoreError, match=r"x\.npy"):
        read_header(write(tmp_path / "x.npy", file_of(header_of(descr=descr))))


HEADERS: list[str | bytes] = [
    "", " ", "\n", "#", "{", "{}", "[]", "()", "1", "None", "'descr'", "['descr']", "{'descr'}",
    "{'descr': '<f4'}", "\x00", "\t{}",
    "{'descr': '<f4', 'shape': (2,)}", "{'fortran_order': False, 'shape': (2,)}",
    "{'descr': '<f4', 'fortran_order': False}",
    "{**{}}", "{[]: 1}", "{1, []}", "1j+1", "f'{1}'", "'\\d'", "1is 2", "b'a''b'",
    header_of() + header_of(), header_of()[:-3], header_of().replace("'", ""),
    f"dict({header_of()})", f"lambda: {header_of()}",
    "(" * 60_000, "[" * 60_000, "{" * 60_000, "'" * 60_000, "9" * 60_000, "1_" * 30_000,
    "[1" * 3000, "(((" * 30 + "1" + ",)))" * 30,
    "-" * 60_000 + "1", "~" * 60_000 + "1", "1+" * 30_000 + "1", "not " * 15_000 + "1",
    "a." * 30_000 + "b", "a(" * 30_000, "lambda:" * 8000 + "1",
    b"\xff\xfe", b"\x80" * 1000, header_of().encode("utf-16"), header_of().encode() + b"\xe9",
]  # fmt: skip


@pytest.mark.parametrize("text", HEADERS, ids=lambda text: repr(text[:30]))
def test_invalid_headers_are_refused(tmp_path: Path, text: str | bytes) -> None:
    for version in (1, 3):
        path = write(tmp_path / f"{version}.npy", file_of(text, version))
        with pytest.raises(
            StoreError,
            match=rf"{version}\.npy: the \.npy header is damaged \(.*\); save the array again",
        ) as refusal:
            read_header(path)
        assert len(str(refusal.value)) < 500


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("npy") / "x.npy"


def header_or_refusal(path: Path, content: bytes) -> RowLayout | None:
    try:
        return read_header(write(path, content))
    except StoreError:
        return None


@settings(max_examples=100)
@given(
    version=st.sampled_from([b"\1\0", b"\2\0", b"\3\0", b""]),
    length=st.sampled_from([None, 0, 10, 118]),
    content=st.binary(max_size=300),
)
def test_any_bytes_behind_the_magic(
    scratch: Path, version: bytes, length: int | None, content: bytes
) -> None:
    size = b"" if length is None else length.to_bytes(2 if version == b"\1\0" else 4, "little")
    header_or_refusal(scratch, b"\x93NUMPY" + version + size + content)


@settings(max_examples=200)
@given(
    text=st.text(alphabet="{}()[]',:.<>|=-+0123456789abcdefgorstuvx \\\"\n#é", max_size=60),
    version=st.sampled_from([1, 2, 3]),
)
@example(text="'<f4'", version=1)
def test_any_text_as_header_or_description(scratch: Path, text: str, version: int) -> None:
    for header in (
        text,
        header_of(descr=text),
        header_of(descr=repr(text)),
        header_of(shape=text),
        header_of(fortran=text),
    ):
        header_or_refusal(scratch, file_of(header, version))


LITERALS = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=4),
        st.just("<f4"),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner),
    ),
    max_leaves=8,
)


@settings(max_examples=100)
@given(
    descr=LITERALS,
    fortran=LITERALS,
    shape=st.one_of(LITERALS, st.lists(st.integers(0, 9)).map(tuple)),
)
def test_any_literals_as_fields(scratch: Path, descr: Any, fortran: Any, shape: Any) -> None:
    header_or_refusal(
        scratch, file_of(repr({"descr": descr, "fortran_order": fortran, "shape": shape}), 3)
    )


def valid(version: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        np.lib.format.write_array(file, np.arange(6, dtype=np.int32).reshape(3, 2), version)
    return file.getvalue()


@settings(max_examples=400)
@given(version=st.sampled_from(VERSIONS), position=st.integers(0, 79), byte=st.integers(0, 255))
def test_one_damaged_byte(
    scratch: Path, version: tuple[int, int], position: int, byte: int
) -> None:
    content = bytearray(valid(version))
    content[position] = byte
    header = header_or_refusal(scratch, bytes(content))
    if header is not None:
        assert header.end <= len(content), "it never promises more than the file has"
        assert header.dtype.name in DTYPES


@settings(max_examples=150)
@given(
    version=st.sampled_from(VERSIONS),
    position=st.integers(0, 127),
    removed=st.integers(0, 5),
    added=st.binary(max_size=5),
)
def test_damage_that_moves_the_rest(
    scratch: Path, version: tuple[int, int], position: int, removed: int, added: bytes
) -> None:
    content = valid(version)
    content = content[:position] + added + content[position + removed :]
    header = header_or_refusal(scratch, content)
    assert header is None or header.end <= len(content)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_header_that_another_thread_has_kept_from_being_parsed(
    tmp_path: Path, version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPython's parser has one depth for all threads, and may find that another changed it."""
    path = save(tmp_path / "x.npy", np.zeros((3, 2)), version)
    parse = ast.literal_eval
    failures = [SystemError("AST constructor recursion depth mismatch")] * 3

    def disturbed(text: str) -> Any:
        if failures:
            raise failures.pop()
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", disturbed)
    assert read_header(path).n_rows == 3
    assert not failures
