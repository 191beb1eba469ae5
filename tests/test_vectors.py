"""The test vectors themselves: reproducible, well formed, and able to tell right from wrong."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import vectors_reader

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "vectors").glob("*.json"))
ALL_CASES = [
    pytest.param(case, id=f"{path.stem}-{number}")
    for path in FILES
    for number, case in enumerate(vectors_reader.cases(path.stem))
]


def test_regenerated_files_are_identical(tmp_path):
    subprocess.run([sys.executable, ROOT / "tools" / "make_vectors.py", tmp_path], check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in FILES]
    for path in FILES:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_two_megabytes_at_most():
    assert sum(path.stat().st_size for path in FILES) <= 2_000_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_follows_the_format(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert set(content) == {"subject", "format", "cases"}
    assert content["subject"] == path.stem and content["format"] == 1
    names = [(case["operation"], case["name"]) for case in content["cases"]]
    assert len(set(names)) == len(names) > 0


def leaves(value) -> list:
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_cases_follow_the_format(path):
    fields = {"operation", "name", "inputs", "outputs", "tolerance", "wrong"}
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
        assert set(case) == fields, case["name"]
        assert set(case["tolerance"]) == {"float32", "float64"}
        for tolerance in case["tolerance"].values():
            assert set(tolerance) == {"rtol", "atol"}
        for value in [*case["inputs"].values(), *case["outputs"].values()]:
            assert len({type(leaf) for leaf in leaves(value)}) == 1, "one type in an array"
            assert np.array(value).dtype != object, "rectangular"
        numbers = [x for value in case["outputs"].values() for x in leaves(value)]
        assert np.isfinite(np.array(numbers, float)).all()
        assert case["wrong"], "at least one mistake"


@pytest.mark.parametrize("case", ALL_CASES)
def test_wrong_values_lie_outside_the_tolerance(case):
    for wrong in case["wrong"]:
        assert wrong["mistake"]
        if "value" not in wrong:
            assert set(wrong) == {"mistake"}
            continue
        right = case["outputs"][wrong["output"]][tuple(wrong["at"])]
        for precision, tolerance in case["tolerance"].items():
            allowed = tolerance["atol"] + tolerance["rtol"] * abs(float(right))
            difference = abs(float(wrong["value"]) - float(right))
            assert difference > 2 * allowed, (case["name"], wrong["mistake"], precision)


@pytest.mark.parametrize("case", ALL_CASES)
def test_inputs_are_exact_in_float32_or_hyperparameters(case):
    """So that an implementation in float32 computes with the numbers of the file."""
    for name, value in case["inputs"].items():
        if value.dtype == np.float64 and value.ndim > 0 and value.size > 1:
            exact = value == value.astype(np.float32)
            decimals = {"discounts", "learning_rates"}
            if case["operation"] == "find":  # tenths, whose sums are rounded
                decimals |= {"leaves", "values"}
            assert exact.all() or name in decimals, name


def test_the_reader_reports_a_planted_error():
    case = next(vectors_reader.cases("gae", "gae"))
    vectors_reader.check(case, "advantages", case["outputs"]["advantages"], "float32")
    with pytest.raises(AssertionError, match="gae, no end: advantages"):
        vectors_reader.check(case, "advantages", case["outputs"]["advantages"] + 1e-3, "float32")


def test_python_in_the_readme_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace = {}
    blocks = (ROOT / "vectors" / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]
    assert blocks
    for block in blocks:
        exec(compile(block.split("```")[0], "vectors/README.md", "exec"), namespace)


def test_make_vectors_uses_the_standard_library_only():
    before = set(sys.modules)
    runpy.run_path(str(ROOT / "tools" / "make_vectors.py"), run_name="imported")
    added = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert added <= set(sys.stdlib_module_names), added


def test_the_readme_names_every_field():
    readme = (ROOT / "vectors" / "README.md").read_text(encoding="utf-8")
    for path in FILES:
        for case in vectors_reader.cases(path.stem):
            names = {case["operation"], *case["inputs"], *case["outputs"]}
            # Parameters of the mixer: `hyper_w1.0`, whose weight and bias share a row
            names = {name.removesuffix(".weight").removesuffix(".bias") for name in names}
            missing = {name for name in names if f"`{name}`" not in readme}
            assert not missing, (path.name, missing)
