"""What the benchmark's programs share: tables, a script's arguments, TensorBoard's events.

The program `ppo_continuous+rpo` is `ppo_continuous.py` with `variants/ppo_continuous/rpo.patch`.
Imports nothing at the top that Snakemake's own environment lacks.
"""

import ast
import contextlib
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))
from variants import patched  # noqa: E402

RESULTS = ROOT / "benchmark" / "results"
SCRIPTS = ("ppo_continuous", "a2c_atari", "a3c_atari", "dqn_per_atari", "qmix_smac")
FLAG = re.compile(r"--\S+(?: (?!--)\S+)*")  # with its values
# What changes the speed of a run, or its rounding
SPEED = "cuda torch_threads env_threads async_envs compile threads".split()
NO_HYPERPARAMETERS = (
    SPEED
    + """exp_name seed torch_deterministic track wandb_project_name wandb_entity capture_video
    save_model upload_model hf_entity log_interval run_folder resume evaluate""".split()
)

STEPS = {  # of a run of speed.py, of which the first quarter is warm-up
    "ppo_continuous": 102_400,
    "a2c_atari": 40_000,
    "a3c_atari": 40_000,
    "dqn_per_atari": 24_000,  # after a quarter, Adam's averages of dead units are denormal
    "qmix_smac_3m": 160_000,  # JaxMARL's updates begin after 32,768
    "ppo_continuous_cuda": 40_960,
    "a2c_atari_cuda": 16_000,
    "dqn_per_atari_cuda": 12_000,
}


def run_name(env_id: str, variant: str) -> list[str]:
    """The names of environment and variant, of characters that suit a file."""
    variant = re.sub(r"[^\w.=-]+", "_", variant.removeprefix("--").replace(" --", " "))
    return [env_id.replace("/", "-"), variant or "default"]


def read_table(path: Path) -> "pandas.DataFrame":  # noqa: F821
    """A CSV file as it stands: every cell a string, empty where nothing was written."""
    import pandas as pd

    return pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else pd.DataFrame()


def read_runs(results: Path) -> "pandas.DataFrame":  # noqa: F821
    """runs.csv with one row for each seed: the run that ended last, if a seed was run again."""
    runs = read_table(results / "runs.csv").sort_values("ended", kind="stable")
    runs = runs.drop_duplicates(["script", "env_id", "variant", "seed"], keep="last")
    return runs.sort_index()


def read_events(run_folder: Path) -> "pandas.DataFrame":  # noqa: F821
    """A run's TensorBoard points (tag, step, value, seconds), but those that a resume purged."""
    import pandas as pd
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_folder), size_guidance={"scalars": 0}).Reload()
    points = []
    for tag in events.Tags()["scalars"]:
        points += [(tag, point.step, point.value, point.wall_time) for point in events.Scalars(tag)]
    return pd.DataFrame(points, columns=["tag", "step", "value", "seconds"])


@functools.cache
def source(program: str) -> str:
    """The text of a script or of a variant. Empty if there is none, or its patch does not apply."""
    script, _, name = program.partition("+")
    path, patch = ROOT / f"{script}.py", ROOT / "variants" / script / f"{name}.patch"
    text = path.read_text() if path.exists() else ""
    return (patched(patch, text) or "") if name else text


@functools.cache
def arguments(script: str) -> dict[str, tuple[str, str]]:
    """What a program takes: {flag: (default as written, help)}. Empty if it is none of ours."""
    text, found = source(script), {}
    if not text:
        return {}
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    (args,) = [node for node in classes if node.name == "Args"]
    for node in args.body:
        if isinstance(node, ast.AnnAssign):
            default = ast.get_source_segment(text, node.value)
            comment = text.splitlines()[node.end_lineno - 1].partition("  # ")[2]
            found["--" + node.target.id.replace("_", "-")] = (default, comment)
    return found


def variant(script: str, values: dict, beside: tuple[str, ...] | list[str] = ()) -> str:
    """The flags of a run that differ from the script's defaults (a peer's: all).

    Of the flags that are no hyperparameters only those `beside`.
    """
    flags = []
    known = arguments(script) or {f"--{name.replace('_', '-')}": ("", "") for name in values}
    if unknown := {f"--{name.replace('_', '-')}" for name in values} - known.keys():
        raise ValueError(f"{script} has no {unknown}: another file made the run")
    for flag, (default, _) in known.items():
        name = flag[2:].replace("-", "_")
        with contextlib.suppress(ValueError, SyntaxError):  # a default that is computed
            default = ast.literal_eval(default)
        left_out = name == "env_id" or (name in NO_HYPERPARAMETERS and name not in beside)
        if name not in values or values[name] == default or left_out:
            continue
        if isinstance(values[name], bool):
            flags.append(flag if values[name] else f"--no-{flag[2:]}")
        else:
            flags.append(f"{flag} {values[name]}")
    return " ".join(flags)


def curves_name(row: dict) -> str:
    """The file below results that holds the curves of a row of runs.csv."""
    commit = re.sub(r"\W+", "-", row["commit"])
    name = [*run_name(row["env_id"], row["variant"]), str(row["seed"]), commit]
    return f"{row['script']}/{'__'.join(name)}.csv"


def setting(script: str, variant: str) -> str:
    """The flags of a variant, sorted, without the script's defaults, the length of its runs and the
    interval of their checkpoints.
    """
    left_out, flags = ("--total-timesteps", "--checkpoint-interval"), []
    for flag in FLAG.findall(variant):
        name, _, value = flag.partition(" ")
        default, _ = arguments(script).get(name, ("", ""))
        if name not in left_out and (not value or literal(value) != literal(default)):
            flags.append(flag)
    return " ".join(sorted(flags))


def literal(text: str):
    """The value of a Python literal; other text as it is."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


EARLIER_QMIX = (  # its settings before the present defaults, beside --num-envs 8
    "--td-lambda 0.0 --epsilon-anneal-time 100000 --batch-size 32 --updates-per-episode 1.0 "
    "--target-update-interval 200 --optimizer rmsprop --learning-rate 0.0005"
)


def earlier_qmix(steps: int, mixer: str = "") -> str:
    """The variant of runs with those settings, and a mixer as a flag."""
    return f"--total-timesteps {steps} --num-envs 8{mixer} {EARLIER_QMIX}"


FRONT = {  # README's table and picture: one environment for each script, its longest runs
    "ppo_continuous": "HalfCheetah-v4",
    "a2c_atari": "BreakoutNoFrameskip-v4",
    "a3c_atari": "PongDeterministic-v4",
    "dqn_per_atari": "ALE/Pong-v5",
    "qmix_smac": "2s3z",
}


def front(runs: "pandas.DataFrame") -> dict[str, "pandas.DataFrame"]:  # noqa: F821
    """The runs that README shows: {script: its environment's longest runs with fewest flags}."""
    found = {}
    for script, env_id in FRONT.items():
        rows = runs[(runs.script == script) & (runs.env_id == env_id)]
        rows = rows[~rows.variant.str.contains(EARLIER_QMIX, regex=False)]
        steps = rows.total_steps.astype(int).groupby(rows.variant).max().to_dict()
        if steps:
            longest = max(steps, key=lambda name: (steps[name], -len(setting(script, name))))
            found[script] = rows[rows.variant == longest]
    return found
