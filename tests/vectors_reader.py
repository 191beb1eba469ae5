"""Read the test vectors in vectors/ as numpy arrays."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent.parent / "vectors"


def cases(subject: str, operation: str | None = None) -> Iterator[dict]:
    """The cases of a subject; arrays float64, int64 or bool, strings as they are."""
    for case in json.loads((FOLDER / f"{subject}.json").read_text(encoding="utf-8"))["cases"]:
        if operation in (None, case["operation"]):
            for group in ("inputs", "outputs"):
                case[group] = {name: np.array(x) for name, x in case[group].items()}
            yield case


def check(case: dict, output: str, values, precision: str = "float64") -> None:
    """Fail where `values` differ from an output by more than atol + rtol |output|."""
    name = f"{case['operation']}, {case['name']}: {output}"
    expected = case["outputs"][output]
    np.testing.assert_allclose(values, expected, **case["tolerance"][precision], err_msg=name)
