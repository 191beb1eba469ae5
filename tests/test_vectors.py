"""The test vectors themselves: reproducible, well formed, and able to tell right from wrong."""

import json
import subprocess
import sys

import numpy as np
import pytest
import vectors_reader
from conftest import ROOT

FILES = sorted(vectors_reader.FOLDER.glob("*.json"))


def test_regenerated_files_are_identical(tmp_path):
    """By Python's standard library alone: -S hides all other packages."""
    words = [sys.executable, "-S", ROOT / "tools" / "make_vectors.py", tmp_path]
    subprocess.run(words, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in FILES]
    for path in FILES:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.quick
@pytest.mark.parametrize("subject", [path.stem for path in FILES])
def test_files_follow_the_format(subject):
    content = json.loads((vectors_reader.FOLDER / f"{subject}.json").read_text(encoding="utf-8"))
    assert set(content) == {"subject", "format", "cases"}
    assert content["subject"] == subject and content["format"] == 1
    names = [(case["operation"], case["name"]) for case in content["cases"]]
    assert len(set(names)) == len(names) > 0
    for case in vectors_reader.cases(subject):
        name, fields = case["name"], {"operation", "name", "inputs", "outputs"}
        assert set(case) == fields | {"tolerance", "wrong"} and case["wrong"], name
        assert set(case["tolerance"]) == {"float32", "float64"}, name
        arrays = [*case["inputs"].values(), *case["outputs"].values()]
        assert all(x.dtype.kind in "bifU" for x in arrays), f"{name}: not rectangular"
        assert all(np.isfinite(np.array(x, float)).all() for x in case["outputs"].values()), name
        for wrong in case["wrong"]:
            assert wrong["mistake"] and ("value" in wrong or len(wrong) == 1), name
            for precision, tolerance in case["tolerance"].items() if "value" in wrong else ():
                right = float(case["outputs"][wrong["output"]][tuple(wrong["at"])])
                allowed = tolerance["atol"] + tolerance["rtol"] * abs(right)
                difference = abs(float(wrong["value"]) - right)
                assert difference > 2 * allowed, (name, wrong["mistake"], precision)


@pytest.mark.quick
def test_python_in_the_readme_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    text, namespace = (ROOT / "vectors" / "README.md").read_text(encoding="utf-8"), {}
    for block in text.split("```python\n")[1:]:
        exec(compile(block.split("```")[0], "vectors/README.md", "exec"), namespace)
    assert namespace
