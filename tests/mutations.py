"""Plant one-line bugs, one at a time, and see whether the tests catch them.

    python tests/mutations.py                              # all; takes about an hour on two cores
    python tests/mutations.py --script ppo_continuous -n 2

Each bug is planted into a copy of the project, where the tests of that script run until the first failure: first its
own file, then the shared ones; the other way round where the bug stands behind the script's divider. It prints the
test that caught the bug, or `survived`; then the status is 1.
`mutations.csv` beside this file is the list: script, what the bug is, the old text, which stands exactly once in the
script (`test_house.py` checks that), and the new text.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import conftest  # noqa: F401  so that JAX compiles once for the tests of all bugs

ROOT = Path(__file__).parent.parent
SHARED = ["tests/test_resume.py", "tests/test_command_line.py"]


def mutations() -> list[dict]:
    """The rows of mutations.csv."""
    with open(Path(__file__).with_suffix(".csv"), newline="") as file:
        return list(csv.DictReader(file))


def plant(row: dict, folder: Path) -> None:
    """Copy the project into `folder` with one bug. ValueError where the old text is not there exactly once."""
    ignore = shutil.ignore_patterns(".git", "runs", "results", "figures", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=ignore, dirs_exist_ok=True)
    path = folder / f"{row['script']}.py"
    text = path.read_text()
    if text.count(row["old"]) != 1 or row["old"] == row["new"]:
        raise ValueError(f"{row['script']}: {row['old']!r} stands there {text.count(row['old'])} times")
    path.write_text(text.replace(row["old"], row["new"]))


def caught_by(row: dict) -> str | None:
    """The first test that fails with this bug, None if none does."""
    with tempfile.TemporaryDirectory() as folder:
        plant(row, Path(folder))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        ranks = ["tests/test_torchrun.py"] * (row["script"] == "a2c_atari")
        order = [[f"tests/test_{row['script']}.py", *ranks], [*SHARED, "-k", row["script"]]]
        algorithm = (ROOT / f"{row['script']}.py").read_text().split("# ----- The run")[0]
        for files in order if row["old"] in algorithm else reversed(order):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *files]
            result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if result.returncode:
                found = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", result.stdout, re.M)
                return found[1] if found else f"pytest's status {result.returncode}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=sorted({row["script"] for row in mutations()}))
    parser.add_argument("-n", type=int, default=2, help="bugs tried at once")
    args = parser.parse_args()
    rows = [row for row in mutations() if args.script in (None, row["script"])]
    survived = 0
    with ThreadPoolExecutor(args.n) as pool:
        for row, test in zip(rows, pool.map(caught_by, rows)):
            survived += test is None
            print(f"{row['script']}: {row['what']}: {'survived' if test is None else test}", flush=True)
    print(f"{len(rows) - survived} of {len(rows)} caught")
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
