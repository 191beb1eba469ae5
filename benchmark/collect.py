"""Finished runs as CSV: each run's curves, and a row for it in runs.csv.

    python benchmark/collect.py runs/ppo_continuous    # all finished runs below a folder

A run becomes {results}/{script}/{env}__{variant}__{seed}__{commit}.csv with the columns tag, step,
value, count, and a row of {results}/runs.csv, which replaces the row that the run had. A tag with
more than 1000 points is thinned: the run is cut into 1000 bins of equally many steps, and a row is
the mean value and the mean step of the `count` points in a bin. The variant is the hyperparameters
that are not the script's defaults, without flags that only change the speed. Commit, versions and
machine are those of the run's provenance.json, which the Snakefile writes; for runs that were
started otherwise, name the commit (`--commit`), and collect them where they were made. Runs of a
variant are those below a folder named like `ppo_continuous+rpo`, or with `--script`.
"""

import argparse
import contextlib
import json
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from common import RESULTS, SPEED, curves_name, read_events, read_table, source, variant
from provenance import provenance

TAGS = ("charts/episodic_return", "eval/episodic_return", "eval/battle_won_rate", "charts/SPS")
TAGS += ("charts/updates",)  # qmix_smac.py
KEY = ["script", "env_id", "variant", "seed", "commit"]  # what makes a run, and a row of runs.csv


def thin(points: pd.DataFrame, bins: int = 1000) -> pd.DataFrame:
    """The points (step, value) of one tag, or means over bins of equal width, with their count."""
    points = points[["step", "value"]].assign(count=1)
    if len(points) <= bins:
        return points
    means = points.groupby(points.step * bins // (points.step.max() + 1))
    means = means.agg(step=("step", "mean"), value=("value", "mean"), count=("count", "sum"))
    return means.assign(step=means.step.round().astype(int))


def held(points: pd.DataFrame, steps: np.ndarray) -> np.ndarray:
    """The values of the last points at or before the steps."""
    return points.value.to_numpy()[np.searchsorted(points.step, steps, "right") - 1]


def origin(folder: Path, commit: str | None) -> dict[str, str]:
    """Commit, versions and machine of a run. Raises ValueError if nothing says its commit."""
    path = folder / "provenance.json"
    if path.exists():
        return json.loads(path.read_text())
    if not commit:
        raise ValueError("it has no provenance.json; name its commit with --commit")
    return provenance() | {"commit": commit}


def collect(folder: Path, results: Path, commit: str | None = None, name: str = "") -> None:
    """Write a finished run's curves and its row. Raises ValueError if its log lacks the end."""
    result = json.loads((folder / "result.json").read_text())
    script, env_id, seed = result["script"], result["args"]["env_id"], result["args"]["seed"]
    for path in folder.resolve().parents:
        if source(path.name) or path.name.startswith(f"{script}+"):  # a copy or a variant
            script = path.name
            break
    script = name or script
    made = origin(folder, commit)
    points = read_events(folder)
    of = {tag: points[points.tag == tag] for tag in TAGS}
    if of["eval/episodic_return"].step.max() != result["global_step"]:
        raise ValueError("the evaluation at the end is not in the log")
    curves = pd.concat([thin(of[tag]).assign(tag=tag) for tag in TAGS if len(of[tag])])
    curves["value"] = curves.value.map("{:.6g}".format)

    won, returns = of["eval/battle_won_rate"], np.array(result["episodic_return"])
    last_fifth, evaluation = won[won.step > 0.8 * result["global_step"]].value, ""
    if "battle_won" in result:
        evaluation = np.mean(result["battle_won"])
    elif len(won):  # a peer's test, every twentieth of a run, is logged until the next
        last_fifth = held(won, result["global_step"] * np.array([0.85, 0.9, 0.95, 1]))
        evaluation = last_fifth[-1]
    file, _, patch = script.partition("+")
    program = [f"{file}.py"] if source(script) else ["benchmark/peers.py", script]
    command = shlex.join(["python", *program, "--env-id", env_id, "--seed", str(seed)])
    if patch:
        command = f"git apply variants/{file}/{patch}.patch && {command}"
    values = {
        "script": script,
        "env_id": env_id,
        "variant": variant(script, result["args"]),
        "seed": seed,
        "total_steps": result["global_step"],
        # A point is the mean of the episodes that end at one step
        "training_return": of["charts/episodic_return"].value[-100:].mean(),
        "eval_return": returns.mean(),
        "eval_std": returns.std(),
        "eval_episodes": len(returns),
        "eval_battle_won_rate": evaluation,
        "tests_battle_won_rate": last_fifth.mean(),
        "wall_seconds": round(result["seconds"]),
        "command": f"{command} {variant(script, result['args'], SPEED)}",
        "commit": made["commit"],
        "versions": made["versions"],
        "machine": made["machine"],
        "ended": pd.Timestamp(points.seconds.max(), unit="s").strftime("%Y-%m-%d %H:%M"),
    }
    row = {}
    for name, value in values.items():
        row[name] = f"{value:.6g}" if isinstance(value, float) else str(value).strip()
    path = results / curves_name(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    curves.to_csv(path, columns=["tag", "step", "value", "count"], index=False)
    with contextlib.suppress(ImportError):  # not on Windows
        import fcntl

        lock = os.open(results, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)  # other runs may end at this moment too
    rows = pd.concat([read_table(results / "runs.csv"), pd.DataFrame([row])])
    rows = rows.fillna("").replace("nan", "").drop_duplicates(KEY, keep="last").sort_values(KEY)
    rows.to_csv(results / "runs.tmp", index=False)
    os.replace(results / "runs.tmp", results / "runs.csv")
    os.close(lock)


def main(argv: list[str]) -> int:
    """Collect every finished run below the folders. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="of runs without a provenance.json")
    parser.add_argument("--script", default="", help="what made the runs: ppo_continuous+rpo")
    args = parser.parse_args(argv)
    found = sorted(path.parent for folder in args.folders for path in folder.glob("**/result.json"))
    failed = 0
    for folder in found:
        try:
            collect(folder, args.results, args.commit, args.script)
            print(f"{folder}: collected", flush=True)
        except Exception as error:  # damaged files of one run stop no other
            print(f"failed: {folder}: {type(error).__name__}: {error}", file=sys.stderr)
            failed = 1
    if not found:
        print("error: no finished runs (with result.json) there", file=sys.stderr)
    return failed or int(not found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
