"""What the benchmark's programs share: machine and versions, tables, a script's arguments, TensorBoard's events.

Imports nothing at the top that Snakemake's own environment lacks.
"""

import ast
import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
FLAG = re.compile(r"--\S+(?: (?!--)\S+)*")  # with its values
PACKAGES = "torch numpy gymnasium mujoco ale-py jax jaxmarl"
PEERS = "stable-baselines3 sbx-rl pfrl"
SPEED = "cuda torch_threads env_threads compile threads".split()  # what changes the speed of a run, or its rounding
NO_HYPERPARAMETERS = (
    SPEED
    + """exp_name seed torch_deterministic track wandb_project_name wandb_entity capture_video
    save_model upload_model hf_entity log_interval run_folder resume evaluate""".split()
)


def machine() -> str:
    """Cores, processor, and GPU if there is one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    gpus = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"] if shutil.which("nvidia-smi") else ["true"]
    gpu = subprocess.run(gpus, capture_output=True, text=True).stdout.strip().replace("\n", ", ")
    return f"{os.cpu_count()} cores of {cpu}" + (f", {gpu}" if gpu else "")


def versions(packages: str = PACKAGES) -> dict[str, str]:
    """Of Python and of those packages that are installed."""
    installed = {each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}
    found = {name: installed[name] for name in packages.split() if name in installed}
    return {"python": platform.python_version()} | found


def commit() -> str:
    """The repository's commit, with `-changed` behind it if a Python file differs from it."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"], capture_output=True).returncode
    return (name or "unknown") + "-changed" * (changed == 1)


def run_name(env_id: str, variant: str) -> list[str]:
    """The names of environment and variant, of characters that suit a file."""
    variant = re.sub(r"[^\w.=-]+", "_", variant.removeprefix("--").replace(" --", " ")) or "default"
    return [env_id.replace("/", "-"), variant]


def read_table(path: Path) -> "pandas.DataFrame":  # noqa: F821
    """A CSV file as it stands: every cell a string, an empty one where nothing was written."""
    import pandas as pd

    return pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else pd.DataFrame()


def read_runs(results: Path) -> "pandas.DataFrame":  # noqa: F821
    """Of runs.csv one row for each seed: where a seed was run again, with newer scripts, the run that ended last."""
    runs = read_table(results / "runs.csv").sort_values("ended", kind="stable")
    return runs.drop_duplicates(["script", "env_id", "variant", "seed"], keep="last").sort_index()


def read_events(run_folder: Path) -> "pandas.DataFrame":  # noqa: F821
    """The points of a run's TensorBoard log (tag, step, value, seconds), without those that a resumed run purged."""
    import pandas as pd
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_folder), size_guidance={"scalars": 0}).Reload()
    columns = ["tag", "step", "value", "seconds"]
    points = [(tag, p.step, p.value, p.wall_time) for tag in events.Tags()["scalars"] for p in events.Scalars(tag)]
    return pd.DataFrame(points, columns=columns)


@functools.cache
def arguments(script: str) -> dict[str, tuple[str, str]]:
    """What a script takes: {flag: (default as written, help)}. None where there is no such script."""
    path = ROOT / f"{script}.py"
    if not path.exists():
        return {}
    text, found = path.read_text(), {}
    body = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Args").body
    for node in body:
        if isinstance(node, ast.AnnAssign):
            default = ast.get_source_segment(text, node.value)
            comment = text.splitlines()[node.end_lineno - 1].partition("  # ")[2]
            found["--" + node.target.id.replace("_", "-")] = (default, comment)
    return found


def variant(script: str, values: dict, beside: tuple[str, ...] | list[str] = ()) -> str:
    """The hyperparameters of a run that are not the script's defaults (a peer's: all), as flags, and those `beside`."""
    flags = []
    known = arguments(script) or {f"--{name.replace('_', '-')}": ("", "") for name in values}
    for flag, (default, _) in known.items():
        name = flag[2:].replace("-", "_")
        with contextlib.suppress(ValueError, SyntaxError):  # a default that is computed
            default = ast.literal_eval(default)
        left_out = name == "env_id" or (name in NO_HYPERPARAMETERS and name not in beside)
        if name not in values or values[name] == default or left_out:
            continue
        yes_or_no = {True: flag, False: f"--no-{flag[2:]}"}
        flags.append(yes_or_no[values[name]] if isinstance(values[name], bool) else f"{flag} {values[name]}")
    return " ".join(flags)


def curves_name(row: dict) -> str:
    """The file below results that holds the curves of a row of runs.csv."""
    commit = re.sub(r"\W+", "-", row["commit"])
    return f"{row['script']}/{'__'.join([*run_name(row['env_id'], row['variant']), str(row['seed']), commit])}.csv"


def setting(script: str, variant: str) -> str:
    """The flags of a variant, sorted, but for the length of its runs and for what is the script's default."""
    defaults = {f"{flag} {default.strip(chr(34))}" for flag, (default, _) in arguments(script).items()}
    flags = [flag for flag in FLAG.findall(variant) if flag not in defaults]
    return " ".join(sorted(flag for flag in flags if not flag.startswith("--total-timesteps ")))


FRONT = {  # README's table and picture: for each script one environment, its longest runs
    "ppo_continuous": "HalfCheetah-v4",
    "a2c_atari": "BreakoutNoFrameskip-v4",
    "a3c_atari": "PongDeterministic-v4",
    "dqn_per_atari": "PongNoFrameskip-v4",
    "qmix_smac": "2s3z",
}


def front(runs: "pandas.DataFrame") -> dict[str, "pandas.DataFrame"]:  # noqa: F821
    """The runs that README shows: {script: the longest runs of its environment with the fewest flags}."""
    found = {}
    for script, env_id in FRONT.items():
        rows = runs[(runs.script == script) & (runs.env_id == env_id)]
        if steps := rows.total_steps.astype(int).groupby(rows.variant).max().to_dict():
            longest = max(steps, key=lambda variant: (steps[variant], -len(setting(script, variant))))
            found[script] = rows[rows.variant == longest]
    return found
