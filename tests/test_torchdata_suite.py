"""The benchmark with torchdata's tests reports which tests fail, and accepts the expected ones."""

from benchmarks import torchdata_suite as suite


def test_only_tests_that_pass_without_pinfeed_count() -> None:
    expected = next(iter(suite.EXPECTED))
    plain = {"a.py::T::test_a": "passed", "a.py::T::test_b": "failed"}
    wrapped = {**dict.fromkeys(plain, "failed"), f"a.py::T::{expected}": "failed"}
    found = {"plain": plain, "depth 0": wrapped}
    assert suite.unexpected(found) == {"depth 0": ["a.py::T::test_a"]}
    assert suite.unexpected({"plain": plain}) == {}
    lines = {line.split("::")[1].split()[0]: line for line in suite.table(found).splitlines()[-3:]}
    assert "not expected" in lines["test_a"]
    assert "without pinfeed, too" in lines["test_b"]
    assert suite.EXPECTED[expected] in lines[expected]
