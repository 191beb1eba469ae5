"""The test vectors themselves: reproducible. The generator checks that they catch mistakes."""

import subprocess
import sys

import pytest
from conftest import ROOT

FILES = sorted((ROOT / "vectors").glob("*.json"))


def test_regenerated_files_are_identical(tmp_path):
    """By Python's standard library alone: -S hides all other packages."""
    subprocess.run([sys.executable, "-S", ROOT / "tools" / "make_vectors.py", tmp_path], check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in FILES]
    for path in FILES:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.quick
def test_python_in_the_readme_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    text, namespace = (ROOT / "vectors" / "README.md").read_text(encoding="utf-8"), {}
    for block in text.split("```python\n")[1:]:
        exec(compile(block.split("```")[0], "vectors/README.md", "exec"), namespace)
    assert namespace
