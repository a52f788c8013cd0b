"""Damaged files for the fuzz tests: changed bytes, and ``.npy`` files with any header.

The default runs of the fuzz tests are short. ``-m stress`` runs each for 100,000 examples, or for
PINFEED_FUZZ_EXAMPLES examples.
"""

import os

from hypothesis import HealthCheck
from hypothesis import strategies as st

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
