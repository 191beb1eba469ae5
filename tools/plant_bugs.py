"""Plant bugs of a line or two, one at a time, and see whether the tests catch them.

    python tools/plant_bugs.py --check                    # does every bug still have its place?
    python tools/plant_bugs.py --script ppo_continuous    # an hour or less on two cores
    python tools/plant_bugs.py --what entropy             # bugs whose description says so

Each bug goes into a copy of the project. There the script's own tests run until the first failure,
then the shared ones (the other way round for a bug behind the divider), those on the GPU, real or
pretended, and the smoke test last.
The program first runs the tests without a bug. It prints the test that caught each bug, or
`survived`; its exit status is 1 if any did.
planted_bugs.csv is the list: script, what the bug is, the old text, which occurs exactly once in
the script, and the new text. The bugs of docs/exercises are planted too.
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

ROOT = Path(__file__).resolve().parent.parent
BUGS = Path(__file__).parent / "planted_bugs.csv"
LEFT_OUT = (".*", "runs", "results", "figures", "docs", "__pycache__")
TIMEOUT = 1800  # seconds for the tests of one bug


def read_bugs(path: Path = BUGS) -> list[dict]:
    """The rows of the list, and the patches of the exercises."""
    with open(path, newline="") as file:
        bugs = list(csv.DictReader(file))
    for patch in sorted((ROOT / "docs" / "exercises").glob("*.patch")):
        script, _, number = patch.stem.rpartition("_")
        bugs.append({"script": script, "what": f"exercise {number}", "patch": str(patch)})
    return bugs


def plant(bug: dict, folder: Path) -> None:
    """Plant a bug in `folder`, a copy of the project. Raises ValueError if it has no place."""
    path = folder / f"{bug['script']}.py"
    if "patch" in bug:
        words = ["git", "apply", "--unsafe-paths", bug["patch"]]
        process = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        if process.returncode:
            raise ValueError(f"{bug['script']}: {bug['what']}: {process.stderr.strip()}")
        return
    text = path.read_text()
    count = text.count(bug["old"])
    if count != 1 or bug["old"] == bug["new"]:
        raise ValueError(f"{bug['script']}: {bug['what']}: {bug['old']!r} occurs {count} times")
    path.write_text(text.replace(bug["old"], bug["new"]))


def run_tests(folder: Path, *flags: str) -> str | None:
    """Run tests until the first failure. Returns the failed test, or None if all passed.

    Raises RuntimeError where pytest itself fails.
    """
    words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        process = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return "no test: they did not end"
    if process.returncode in (0, 5):  # 5: no test was selected
        return None
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", process.stdout, re.M)
    if not failed:
        raise RuntimeError(f"pytest {flags} ended with {process.returncode}:\n{process.stdout}")
    return failed.group(1)


def caught_by(bug: dict) -> str | None:
    """The first test that fails with this bug, or None. A bug without a place raises ValueError.

    Without old text or a patch: the first test that fails without a bug.
    """
    script = bug["script"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ignore = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(ROOT, folder, ignore=ignore, dirs_exist_ok=True)
        if bug.keys() & {"old", "patch"}:
            plant(bug, folder)
        own, shared = [f"tests/test_{script}.py"], []
        if script.endswith("_atari"):
            own.append("tests/test_atari_envs.py")
        if script == "ppo_continuous":  # with which the shared text is tested
            shared = ["tests/test_shared.py", "-k", "not same_text"]
        gpu, smoke = ([f"tests/test_{name}.py", "-k", script] for name in ("gpu", "smoke"))
        algorithm = (ROOT / f"{script}.py").read_text().split("# ----- The run")[0]
        order = [own, shared] if bug.get("old", "") in algorithm else [shared, own]
        for flags in filter(None, [*order, gpu, smoke]):
            if test := run_tests(folder, *flags):
                return test
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--script", choices=sorted({bug["script"] for bug in read_bugs()}))
    parser.add_argument("--what", default="", help="plant only bugs with this in their description")
    parser.add_argument(
        "--check", action="store_true", help="only check that bugs have their place"
    )
    parser.add_argument("-n", type=int, default=2, help="bugs tried at the same time")
    args = parser.parse_args()
    bugs = [bug for bug in read_bugs() if args.script in (None, bug["script"])]
    bugs = [bug for bug in bugs if args.what in bug["what"]]
    if args.check:
        faults = 0
        for bug in bugs:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy(ROOT / f"{bug['script']}.py", folder)
                try:
                    plant(bug, Path(folder))
                except ValueError as error:
                    faults += 1
                    print(error)
        sys.exit(faults > 0)
    survived, scripts = 0, dict.fromkeys(bug["script"] for bug in bugs)
    with ThreadPoolExecutor(args.n) as pool:
        for test in pool.map(caught_by, [{"script": script} for script in scripts]):
            if test:
                sys.exit(f"error: {test} fails without a bug")
        for bug, future in [(bug, pool.submit(caught_by, bug)) for bug in bugs]:
            try:
                test = future.result() or "survived"
            except (ValueError, RuntimeError) as error:  # it has no place, or pytest failed
                test = f"survived: {error}"
            survived += test.startswith("survived")
            print(f"{bug['script']}: {bug['what']}: {test}", flush=True)
    print(f"{len(bugs) - survived} of {len(bugs)} caught")
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
