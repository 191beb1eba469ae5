"""Exercises: plant a bug, or blank a function, and watch until it is fixed.

    python docs/exercises/check.py ppo_continuous_1            # the first bug of PPO's page
    python docs/exercises/check.py ppo_continuous_implement    # write compute_gae anew
    python docs/exercises/check.py ppo_continuous_experiment   # the five-minute experiment

Changes the script in place, runs its tests, and prints the first that fails: that is the symptom.
Then it runs them again whenever you save the script, until all pass. Ctrl-C stops it; the script
stays as you left it, and `git checkout SCRIPT` brings the original back.
"""

import ast
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import experiments

EXERCISES = Path(__file__).resolve().parent
ROOT = EXERCISES.parent.parent
IMPLEMENT = {
    "ppo_continuous": "compute_gae",
    "a2c_atari": "compute_returns",
    "a3c_atari": "SharedAdam.update",
    "dqn_per_atari": "Priorities.find",
    "qmix_smac": "QMixer.forward",
}


def blank(text: str, dotted: str) -> str:
    """The text of a script in which a function has its docstring and nothing behind it."""
    node = ast.parse(text)
    for name in dotted.split("."):
        (node,) = [child for child in node.body if getattr(child, "name", None) == name]
    body = node.body[1:] if ast.get_docstring(node) else node.body
    lines = text.splitlines(keepends=True)
    indent = " " * body[0].col_offset
    lines[body[0].lineno - 1 : body[-1].end_lineno] = [f"{indent}raise NotImplementedError\n"]
    return "".join(lines)


def failure(script: str) -> str | None:
    """The end of the report on the first test that fails, or None. Quick tests come first."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for marker in ("quick", "not quick"):
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--tb", "short"]
        words += ["-m", marker, f"tests/test_{script}.py"]
        process = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        if process.returncode not in (0, 5):  # 5: there is no such test
            return "\n".join(process.stdout.strip().splitlines()[-15:])
    return None


def main(name: str) -> None:
    script, _, which = name.rpartition("_")
    if which == "experiment" and script in IMPLEMENT:
        experiments.main(script)
        return
    if importlib.util.find_spec("pytest") is None:
        sys.exit("error: first pip install -r requirements-dev.txt")
    path, patch = ROOT / f"{script}.py", EXERCISES / f"{name}.patch"
    if script not in IMPLEMENT or not (which == "implement" or patch.exists()):
        known = sorted(path.stem for path in EXERCISES.glob("*.patch"))
        sys.exit(f"error: choose one of {' '.join(known)}, SCRIPT_implement or SCRIPT_experiment")
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", path.name], cwd=ROOT)
    if changed.returncode > 1:
        sys.exit("error: exercises need a git clone of the repository")
    if changed.returncode:
        sys.exit(f"error: {path.name} has changes; commit them, or `git checkout {path.name}`")
    if which == "implement":
        path.write_text(blank(path.read_text(), IMPLEMENT[script]))
        print(f"{IMPLEMENT[script]} in {path.name} is now blank. Rewrite it.")
    else:
        subprocess.run(["git", "apply", str(patch)], cwd=ROOT, check=True)
        print(f"{path.name} has a bug now. Find it, without looking at the patch.")
    failed_before = False
    while True:
        print("running the tests ...", flush=True)
        saved = path.stat().st_mtime
        report = failure(script)
        if report is None and failed_before:
            print("fixed: all tests pass")
            return
        if report is None:
            sys.exit("no test notices this bug; its symptom is on the page, the fix in the answers")
        failed_before = True
        print(f"{report}\n\nnot fixed yet; waiting for {path.name} to be saved", flush=True)
        while path.stat().st_mtime == saved:
            time.sleep(0.5)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit("\nstopped; the script stays as it is")
