"""The command line: a wrong call is told so and leaves no trace, a right one does what each of its flags says."""

import dataclasses
import functools
import importlib
import json
import re
import struct
import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import ale_py.vector_env
import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    SCRIPTS,
    SMALL,
    Run,
    assert_identical,
    checkpoints,
    copy_run,
    curves,
    files_below,
    load,
    run_folder_in,
    scalars,
)
from gymnasium.envs.classic_control.pendulum import PendulumEnv

PPO = "ppo_continuous"
ppo_only = pytest.mark.parametrize("script", [PPO], indirect=True, scope="session")
EVERY_BATCH = ("ppo_continuous", "a2c_atari")  # these log all losses after every batch
SCORE = r"evaluation: (-?[\d.]+) \+- ([\d.]+), (\d+) [^\n]*episodes[^\n]*\n"

WRONG = {  # in every script: {flags: (status, words that stderr holds)}
    "--bogus 1": (2, "--bogus"),
    "--totaltimesteps 1": (2, "--total-timesteps"),
    "Pendulum-v1": (2, "Pendulum-v1"),
    "--seed one": (2, "--seed 'one'"),
    "--total-timesteps 1e3": (2, "--total-timesteps '1e3'"),
    "--seed": (2, "--seed"),
    "--seed -1": (1, "--seed 0"),
    "--capture-video maybe": (2, "maybe"),
    "--env-id !!": (1, "!!"),
    "--eval-episodes 0": (1, "--eval-episodes"),
    "--checkpoint-interval 0": (1, "--checkpoint-interval"),
    "--torch-threads -1": (1, "--torch-threads"),
    "--learning-rate 0": (1, "--learning-rate"),
    "--learning-rate 1e39": (1, "--learning-rate"),
    "--learning-rate nan": (1, "--learning-rate"),
    "--resume nowhere": (1, "nowhere"),
    "--evaluate nowhere": (1, "nowhere"),
}
WRONG_ATARI = {
    "--env-id BraekoutNoFrameskip-v4": (1, "BraekoutNoFrameskip BreakoutNoFrameskip"),
    "--env-id ALE/Braekout-v5": (1, "Braekout Breakout"),
    "--env-id CartPole-v1": (1, "CartPole-v1"),
    "--num-steps 0": (1, "--num-steps"),
    "--total-timesteps 0": (1, ""),
}
WRONG_OF = {
    "ppo_continuous": {
        "--env-id=": (1, "ID"),
        "--env-id HalfCheeta-v4": (1, "HalfCheeta HalfCheetah"),
        "--env-id HalfCheetah-v9": (1, "HalfCheetah v9 v5"),
        "--env-id CartPole-v1": (1, "CartPole-v1 Discrete"),
        "--num-envs 0": (1, "--num-envs"),
        "--total-timesteps 0": (1, "--total-timesteps"),
        "--num-minibatches 7": (1, "minibatches 7 128"),
        "--num-envs 1 --num-steps 16 --num-minibatches 16": (1, "minibatches 16"),
        "--update-epochs 0": (1, "--update-epochs"),
    },
    "a2c_atari": WRONG_ATARI | {"--total-timesteps 0": (1, "--total-timesteps")},
    "a3c_atari": WRONG_ATARI | {"--num-workers 0": (1, "--num-workers"), "--max-episode-length 5": (1, "10")},
    "dqn_per_atari": WRONG_ATARI
    | {
        "--total-timesteps 0": (1, "--total-timesteps"),
        "--learning-starts 67": (1, "--learning-starts"),
        "--learning-starts 137 --buffer-size 600": (1, "--learning-starts"),
        "--buffer-size 9": (1, "--buffer-size"),
        "--middle-fraction 0.6": (1, "--middle-fraction"),
    },
    "qmix_smac": {
        "--env-id 3mm": (1, "3mm"),
        "--batch-size 25": (1, "25 24"),
        "--rnn-hidden-dim 0": (1, "--rnn-hidden-dim"),
        "--save-replay": (1, "--save-replay"),
        "--total-timesteps 0": (1, "--total-timesteps"),
    },
}

# For every flag: what it changes first in the order of `outcome`, and the flags of both runs that are compared. What
# stands before that in the order must be as without the flag
BASE = {
    "ppo_continuous": "--total-timesteps 512 --learning-rate 0.01",  # the last batch has the end of an episode
    "a2c_atari": "--total-timesteps 112 --checkpoint-interval 1000 --eval-episodes 1 --learning-rate 0.01",
    "a3c_atari": "--total-timesteps 100 --checkpoint-interval 1000 --eval-episodes 1 --learning-rate 0.01",
    "dqn_per_atari": "--total-timesteps 112 --checkpoint-interval 1000 --eval-episodes 1 --learning-rate 0.01",
    "qmix_smac": "--total-timesteps 300 --checkpoint-interval 1000 --eval-episodes 1 --learning-rate 0.01 "
    "--test-interval 200",
}
ALL_FLAGS = """
    folder: --exp-name other, --run-folder runs/mine
    settings: --no-torch-deterministic, --torch-threads 2, --compile, --env-threads 2
    notes: --cuda
    services: --track
    services: --wandb-project-name other, --wandb-entity other beside --track
    services: --hf-entity other beside --upload-model
    files: --capture-video, --no-save-model, --upload-model
    refused: --resume nowhere, --evaluate nowhere
    scores: --eval-episodes 3
    curves: --log-interval 7
    parameters: --seed 2, --total-timesteps 256, --checkpoint-interval 128, --gamma 0.5, --gae-lambda 0.5, --num-envs 4
    parameters: --num-steps 8, --no-bootstrap-truncation, --learning-rate 0.001, --anneal-lr, --vf-coef 5
    parameters: --ent-coef 0.1, --max-grad-norm 0.01, --bf16
"""
ATARI_FLAGS = """
    parameters: --env-id PongNoFrameskip-v4, --checkpoint-interval 32
    scores: --greedy beside --eval-episodes 6 --learning-rate 1e-5
    parameters: --no-episodic-life beside --total-timesteps 320
"""
FLAGS_OF = {
    "ppo_continuous": """
    parameters: --env-id MountainCarContinuous-v0, --update-epochs 3, --num-minibatches 4, --no-norm-adv
    parameters: --clip-coef 0.01, --no-clip-vloss, --target-kl 1e-9, --no-anneal-lr, --log-std-init -1
    """,
    "a2c_atari": f"""{ATARI_FLAGS}
    parameters: --rmsprop-alpha 0.5, --rmsprop-eps 0.1, --torch-rmsprop, --conv3-filters 3
    """,
    "a3c_atari": f"""{ATARI_FLAGS}
    settings: --num-workers 2
    parameters: --no-crop, --max-episode-length 30
    parameters: --rmsprop-alpha 0.5, --rmsprop-eps 0.1 beside --optimizer rmsprop
    parameters: --episodic-life beside --total-timesteps 600 --max-episode-length 200
    parts: --no-shared-optimizer beside --num-workers 2
    parts: --optimizer rmsprop, --no-lstm
    """,
    "dqn_per_atari": f"""{ATARI_FLAGS}
    parameters: --updates 2, --batch-size 4, --buffer-size 40, --learning-starts 40, --n-step 3, --no-double
    parameters: --target-interval 2, --no-prioritized, --per-alpha 0, --per-beta 1, --start-epsilon 0
    parameters: --middle-epsilon 1, --middle-fraction 0.5, --end-epsilon 1, --adam-eps 0.1
    parameters: --end-fraction 1 beside --middle-epsilon 1 --end-epsilon 0
    scores: --eval-epsilon 0 beside --eval-episodes 6 --learning-rate 1e-5
    parts: --no-checkpoint-replay, --no-dueling
    """,
    "qmix_smac": """
    parts: --mixer vdn, --optimizer adam
    parameters: --rnn-hidden-dim 8, --mixing-embed-dim 8, --hypernet-embed 8, --no-double-q
    parameters: --td-lambda 0.6, --epsilon-start 0.5, --epsilon-finish 0.9, --epsilon-anneal-time 80, --buffer-size 5
    parameters: --batch-size 3, --updates-per-episode 0.5, --target-update-interval 2
    parameters: --no-anneal-lr, --optim-alpha 0.5, --optim-eps 0.1
    curves: --test-interval 100
    tests: --test-nepisode 9
    refused: --save-replay, --env-id 3mm
    elsewhere: --bootstrap-timeouts
    """,
}


def flags_of(script):
    return re.findall(r"^    (\w+): .+ = .+  # ", (ROOT / f"{script}.py").read_text(), re.M)


def flag_table(script):
    """{name of a field: (the other flags, the flag, what it changes)}; a later line wins."""
    table = {}
    for line in filter(str.strip, (ALL_FLAGS + FLAGS_OF[script]).splitlines()):
        what, _, rest = line.strip().partition(": ")
        flags, _, others = rest.partition(" beside ")
        for flag in flags.split(", "):
            name = re.sub("^--(no-)?", "", flag.split()[0]).replace("-", "_")
            table[name] = (others, flag, what)
    return {name: row for name, row in table.items() if name in flags_of(script)}


FLAGS = {script: flag_table(script) for script in SCRIPTS}


def rows(tables):
    return [pytest.param(script, *row, id=f"{script} {row[0]}") for script in SCRIPTS for row in tables[script].items()]


def quick(flags):
    """Without what is the same text in all scripts and goes through PPO, and what test_{script}.py sees to."""
    return {
        name: row
        for name, row in flags.items()
        if row[2] not in ("refused", "files", "services", "folder", "elsewhere")
    }


def assert_refused(result, status, words):
    """One line (the parser's own errors have a frame), and status 1 (2)."""
    assert (result.status, result.stdout) == (status, "")
    notes = [note for note in result.notes if not note.startswith("note: ")]
    assert status == 2 or (len(notes) == 1 and notes[0].startswith("error: ")), notes
    for word in words.split():
        assert word in result.stderr


# Wrong calls


@pytest.mark.parametrize("script, flags, told", rows({script: WRONG | WRONG_OF[script] for script in SCRIPTS}))
def test_a_wrong_call_is_told_so_and_leaves_no_trace(call, tmp_path, script, flags, told):
    assert_refused(call(script, *SMALL[script], *flags.split()), *told)
    assert not list(tmp_path.iterdir())


def test_help_names_every_flag_with_its_comment(call, tmp_path, script):
    result = call(script, "--help")
    assert (result.status, result.stderr) == (0, "")
    shown = re.sub(r"[\s│]+", "", result.stdout)
    lines = (ROOT / f"{script}.py").read_text().splitlines()
    for field in dataclasses.fields(importlib.import_module(script).Args):
        (comment,) = [line.partition("  # ")[2] for line in lines if line.startswith(f"    {field.name}: ")]
        assert "--" + field.name.replace("_", "-") in shown and re.sub(r"\s+", "", comment) in shown
    assert not list(tmp_path.iterdir())


@ppo_only
@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
@pytest.mark.parametrize(
    "content",
    [{"script": "another"}, {"args": [1]}, {"args": {"bogus": 1}}, {"agent": {}}, 5]
    + [{name: None} for name in ("script", "args", "agent", "global_step")],
    ids=str,
)
def test_what_is_not_a_run_of_this_script(call, finished, tmp_path, script, flag, content):
    name = copy_run(finished[1], tmp_path)
    for path in checkpoints(tmp_path / name):
        changed = load(path) | content if isinstance(content, dict) else content
        missing = [key for key, value in content.items() if value is None] if isinstance(content, dict) else []
        torch.save({k: v for k, v in changed.items() if k not in missing} if missing else changed, path)
    before = files_below(tmp_path)
    assert_refused(call(script, flag, name), 1, "")
    assert files_below(tmp_path) == before


@ppo_only
def test_a_run_that_does_not_know_its_seconds_goes_on(call, finished, tmp_path, script):
    name = copy_run(finished[1], tmp_path)
    for path in checkpoints(tmp_path / name):
        torch.save({key: value for key, value in load(path).items() if key != "seconds"}, path)
    assert call(script, "--resume", name, "--total-timesteps", "2304").status == 0
    assert json.loads((tmp_path / name / "result.json").read_text())["seconds"] > 0


@ppo_only
def test_a_model_cannot_be_resumed_and_no_other_environment_or_seed_taken(call, finished, tmp_path, script):
    name = copy_run(finished[1], tmp_path)
    before = files_below(tmp_path)
    assert_refused(call(script, "--resume", f"{name}/model.pt"), 1, "adam")
    for argv in (["--resume"], ["--evaluate"], [*SMALL[script], "--run-folder"]):
        result = call(script, *argv, name, "--env-id", "MountainCarContinuous-v0")
        assert_refused(result, 1, "Pendulum-v1 MountainCarContinuous-v0")
    for argv in (["--resume"], [*SMALL[script], "--run-folder"]):  # an evaluation may have another seed
        assert_refused(call(script, *argv, name, "--seed", "2"), 1, "seed 1 2")
    assert_refused(call(script, "--resume", name, "--run-folder", "other"), 1, "--resume --run-folder")
    (tmp_path / name / "checkpoint_000000009999.pt").write_bytes((tmp_path / name / "model.pt").read_bytes())
    assert_refused(call(script, "--resume", name), 1, "adam")
    (tmp_path / name / "checkpoint_000000009999.pt").unlink()
    assert files_below(tmp_path) == before


@ppo_only
def test_no_module_is_imported_because_a_file_says_so(call, finished, tmp_path, monkeypatch, script):
    """gym.make imports what is before the colon of an id."""
    name = copy_run(finished[1], tmp_path)
    (tmp_path / "evil.py").write_text("open('exploded', 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    for path in (*checkpoints(tmp_path / name), tmp_path / name / "model.pt"):
        model = load(path)
        torch.save(model | {"args": model["args"] | {"env_id": "evil:Pendulum-v1"}}, path)
    for argv in (["--resume"], ["--evaluate"], [*SMALL[script], "--run-folder"]):
        assert_refused(call(script, *argv, name), 1, "evil:Pendulum-v1")
    assert not (tmp_path / "exploded").exists()
    assert call(script, "--evaluate", f"{name}/model.pt", "--env-id", "evil:Pendulum-v1").status == 0
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "flags, file", [([], "runs"), (["--run-folder", "x/mine"], "x"), (["--exp-name", "x" * 240], "")]
)
def test_a_folder_that_cannot_be_made(call, tmp_path, flags, file):
    """Because a file is in its way, or its name is too long: one line."""
    (tmp_path / (file or "other")).write_text("a file")
    assert_refused(call(PPO, *SMALL[PPO], *flags), 1, f"{file} Errno")
    assert not list(tmp_path.glob("*/*/*"))


# Flags


class Services:
    """Stands for wandb and huggingface_hub, and notes what they are asked for and when."""

    def __init__(self, cwd):
        self.calls, self.cwd, self.config = [], cwd, SimpleNamespace(update=lambda *_, **__: None)

    def __getattr__(self, name):
        def note(*args, **kwargs):
            trained = any(self.cwd.rglob("checkpoint_*"))
            paths = {key for key, value in kwargs.items() if isinstance(value, Path) or key == "id"}
            self.calls.append((name, args, {k: v for k, v in kwargs.items() if k not in paths}, trained))
            return SimpleNamespace(repo_id=args[0] if args else None)

        return note

    def HfApi(self):
        return self


@pytest.fixture
def outcome(call, tmp_path, monkeypatch):
    """Run a script on short episodes, with all that is outside of it replaced, and return what came out, in order."""

    def outcome(script, flags):
        for folder in (tmp_path / "runs").glob("*"):
            folder.rename(tmp_path / f"{folder.name}-{len([*tmp_path.iterdir()])}")
        module, settings, played, services = importlib.import_module(script), {}, [], Services(tmp_path)
        hub = ModuleType("huggingface_hub")
        hub.whoami, hub.HfApi = services.whoami, services.HfApi
        monkeypatch.setitem(sys.modules, "wandb", services)
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch, "compile", lambda function, **_: settings.update(compiled=True) or function)
        if hasattr(module, "play"):  # QMIX's tests
            play = module.play
            monkeypatch.setattr(module, "play", lambda *args: played.append(args[2:]) or play(*args))
        if hasattr(module, "actor_learner"):  # A3C's workers
            monkeypatch.setattr(module.mp, "spawn", functools.partial(Threads, settings))
            monkeypatch.setattr(module, "prepare_worker", lambda args: torch.device("cpu"))
        if hasattr(module, "AtariVectorEnv"):
            monkeypatch.setattr(module, "AtariVectorEnv", functools.partial(short_episodes, settings))
        result = call(script, *SMALL[script], *BASE[script].split(), *flags.split())
        if result.status:
            return {"refused": result.stderr}
        folder = run_folder_in(tmp_path)
        newest = load(checkpoints(folder)[-1])
        settings |= {"threads": torch.get_num_threads(), "deterministic": torch.backends.cudnn.deterministic}
        scores = json.loads((folder / "result.json").read_text())
        return {
            "refused": None,
            "settings": settings,
            "parts": {name: sorted(map(str, part)) for name, part in newest.items() if isinstance(part, dict)},
            "parameters": newest["agent"],
            "scores": {name: value for name, value in scores.items() if "episod" in name or "won" in name},
            "curves": curves(folder),
            "tests": list(played),
            "files": sorted(re.sub("tfevents.*", "", str(path)) for path in files_below(folder)),
            "services": services.calls,
            "notes": result.notes,
            "folder": re.sub(r"__\d+$", "", folder.name),
        }

    return outcome


def short_episodes(settings, **kwargs):
    settings["env_threads"] = kwargs["num_threads"]
    frames = min(kwargs["max_num_frames_per_episode"], max(200, 100 * kwargs["num_envs"]))
    return ale_py.vector_env.AtariVectorEnv(**kwargs | {"max_num_frames_per_episode": frames, "noop_max": 1})


class Threads:
    """Stands for torch.multiprocessing.spawn: quicker than processes, and the patches hold in them."""

    def __init__(self, settings, function, args, nprocs, **_):
        settings["workers"] = nprocs
        self.threads = [threading.Thread(target=function, args=(rank, *args), daemon=True) for rank in range(nprocs)]
        for thread in self.threads:
            thread.start()

    def join(self, timeout=None):
        for thread in self.threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self.threads)


def same(found, expected):
    try:
        assert_identical(found, expected)
    except AssertionError:
        return False
    return True


KNOWN = {}  # what runs without the flag in question gave: few runs stand beside many


@pytest.mark.parametrize("script, flag, row", rows({s: FLAGS[s] if s == PPO else quick(FLAGS[s]) for s in SCRIPTS}))
def test_a_flag_changes_what_it_says(outcome, script, flag, row):
    beside, flags, what = row
    if (script, beside) not in KNOWN:
        KNOWN[script, beside] = outcome(script, beside)
    without, with_it = KNOWN[script, beside], outcome(script, flags + " " + beside)
    differing = [name for name in without if not same(with_it.get(name), without[name])]
    assert differing and differing[0] == what, f"{flags} changes {differing}"


def test_every_flag_is_in_the_table(script):
    fields = [field.name for field in dataclasses.fields(importlib.import_module(script).Args)]
    assert flags_of(script) == fields and set(FLAGS[script]) == set(fields)


@ppo_only
def test_an_upload_is_one_commit_and_the_login_is_asked_for_before_training(outcome, tmp_path, script):
    calls = outcome(script, "--upload-model --hf-entity me")["services"]
    assert [name for name, *_ in calls] == ["whoami", "create_repo", "upload_folder"]
    assert [trained for *_, trained in calls] == [False, True, True]
    assert calls[1][1] == ("me/Pendulum-v1-ppo_continuous-1",)
    folder, patterns = run_folder_in(tmp_path), calls[2][2]["allow_patterns"]
    assert calls[2][2]["repo_id"] == "me/Pendulum-v1-ppo_continuous-1"
    sent = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert sent == {"README.md", "model.pt", "args.json", "result.json"} and "videos/*" in patterns
    assert "--upload-model --hf-entity me" in (folder / "README.md").read_text()


# Right calls


@pytest.mark.parametrize("flags", ["", "--env-id HalfCheetah-v4 --num-envs 1"], ids=["Pendulum", "HalfCheetah"])
def test_the_console_says_no_more_than_it_should(tmp_path, flags):
    result = Run(PPO, *SMALL[PPO], *flags.split(), "--seed", "3", cwd=tmp_path).wait()
    assert (result.status, result.notes) == (0, [])
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    folder = run_folder_in(tmp_path)
    assert re.fullmatch(rf"[\w-]+__{PPO}__3__\d+", folder.name)
    assert re.fullmatch(rf"run folder: runs/{folder.name}\n{SCORE}", result.stdout)
    assert "2176/2176" in result.stderr and ("return -" in result.stderr) == (not flags)


def test_the_files_of_a_run(finished, script):
    """Of a run by `python script.py`, which says no more than it should either."""
    result, folder = finished
    assert re.fullmatch(rf"run folder: runs/{folder.name}\n({SCORE})+", result.stdout) and not result.notes
    assert [path.name for path in folder.parent.parent.iterdir()] == ["runs"]
    kinds = sorted(re.sub(r"\d.*", "", path.name) for path in folder.iterdir())
    assert kinds == ["args.json", "checkpoint_", "checkpoint_", "events.out.tfevents.", "model.pt", "result.json"]
    args = json.loads((folder / "args.json").read_text())
    assert list(args) == [field.name for field in dataclasses.fields(importlib.import_module(script).Args)]
    given = {flag[2:].replace("-", "_"): value for flag, value in pairwise(SMALL[script]) if flag[:2] == "--"}
    assert all(str(args[name]) == value for name, value in given.items() if name in args)
    model, checkpoint = load(folder / "model.pt"), load(checkpoints(folder)[-1])
    assert set(model) < set(checkpoint)
    assert model["args"] == checkpoint["args"] == args
    steps = model["global_step"]
    assert steps == checkpoint["global_step"] >= args["total_timesteps"]

    points = scalars(folder)
    values = np.array([value for tag in points for _, value in points[tag]])
    assert np.isfinite(values).all() and min(value for _, value in points["charts/SPS"]) > 0
    assert all(0 <= step <= steps for tag in points for step, _ in points[tag])
    if script in EVERY_BATCH:
        batch = args["num_envs"] * args["num_steps"]
        for tag in points.keys() - {"charts/episodic_return", "charts/episodic_length", "eval/episodic_return"}:
            assert [step for step, _ in points[tag]] == list(range(batch, steps + 1, batch)), tag
        rates = [value for _, value in points["charts/learning_rate"]]
        assert rates[0] == pytest.approx(args["learning_rate"])
        assert (np.diff(rates) < 0).all() if args["anneal_lr"] else len(set(rates)) == 1
    returns, lengths = (points.get(f"charts/episodic_{name}", []) for name in ("return", "length"))
    assert [step for step, _ in returns] == [step for step, _ in lengths]
    assert script != PPO or [length for _, length in lengths] == [200] * 8  # one in each interval
    module = importlib.import_module(script)
    content = json.loads((folder / "result.json").read_text())
    assert content["args"] == args and content["global_step"] == steps and content["seconds"] > 0
    assert set(content["versions"]) == {*module.PACKAGES, "python"} and content["machine"]
    for name in (name for name in content if name.startswith("eval/")):
        scores = content[name.removeprefix("eval/")]
        assert len(scores) == args["eval_episodes"]
        step, value = points[name][-1]  # A3C evaluates at each checkpoint
        assert step == steps and value == pytest.approx(content[name]) == pytest.approx(np.mean(scores))
    mean, std, count = map(float, last_score(result).groups())
    scores = content["episodic_return"]
    assert [mean, std, count] == pytest.approx([np.mean(scores), np.std(scores), len(scores)], abs=0.01)


def last_score(result):
    return [*re.finditer(SCORE, result.stdout)][-1]


# Evaluation


def test_evaluation_repeats_the_end_of_training(call, finished, tmp_path, script):
    result, folder = finished
    before = files_below(folder)
    paths = (folder, folder / "model.pt", checkpoints(folder)[-1]) if script == PPO else (folder / "model.pt",)
    for path in paths:
        evaluation = call(script, "--evaluate", str(path))
        assert (evaluation.status, evaluation.notes) == (0, [])
        assert evaluation.stdout == last_score(result)[0]
    assert files_below(folder) == before and not list(tmp_path.iterdir())


@ppo_only
def test_evaluation_with_other_episodes(call, finished, monkeypatch, script):
    """And with none of training's: its seeds are others."""
    _, folder = finished
    module, model = importlib.import_module(script), load(folder / "model.pt")
    args, before = module.Args(**model["args"]), str(model)
    monkeypatch.setattr(module.RunningMeanStd, "update", lambda *_: pytest.fail("the statistics are not frozen"))
    two, three = (
        module.evaluate(dataclasses.replace(args, eval_episodes=n), model, folder)["episodic_return"] for n in (2, 3)
    )
    assert len(three) == 3 and not set(two) & set(
        module.evaluate(dataclasses.replace(args, seed=7), model, folder)["episodic_return"]
    )
    assert module.evaluate(args, model, folder)["episodic_return"] == two and str(model) == before


def test_no_two_episodes_begin_with_the_same_seed(call, monkeypatch):
    """Neither those after two checkpoints, nor training's and the evaluation's, nor those of two runs."""
    seeds = []
    reset = PendulumEnv.reset

    def note(env, *, seed=None, options=None):
        seeds.extend([seed] if seed is not None else [])
        return reset(env, seed=seed, options=options)

    monkeypatch.setattr(PendulumEnv, "reset", note)
    for seed in "12":
        assert call(PPO, *SMALL[PPO], "--total-timesteps", "1024", "--seed", seed).status == 0
    assert len(set(seeds)) == len(seeds) == 2 * (2 * 2 + 2)


@ppo_only
def test_evaluation_needs_no_services_and_no_device(call, finished, tmp_path, monkeypatch, script):
    """A model that was trained with all of them is evaluated by someone who has none."""
    result, folder = finished
    model = load(folder / "model.pt")
    model["args"] |= dict.fromkeys(["track", "upload_model", "cuda"], True)
    torch.save(model, tmp_path / "model.pt")
    for package in ("wandb", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    evaluation = call(script, "--evaluate", "model.pt")
    assert (evaluation.status, evaluation.stdout) == (0, last_score(result)[0])
    (note,) = evaluation.notes
    assert "CPU" in note


# Videos, Weights and Biases


@pytest.mark.parametrize("script", SCRIPTS)
def test_videos_move(outcome, tmp_path, script):
    moviepy = pytest.importorskip("moviepy")
    assert "videos" in outcome(script, "--capture-video --eval-episodes 1")["files"]
    videos = sorted((run_folder_in(tmp_path) / "videos").iterdir())
    assert {video.suffix for video in videos} == {".mp4"}
    for kind in ("evaluation", "training-0"):
        with moviepy.VideoFileClip(str(next(path for path in videos if path.name.startswith(kind)))) as video:
            frames = list(video.iter_frames())
        frames = np.stack(frames[:: max(1, len(frames) // 8)])
        assert len(frames) >= 4 and frames.max() > 200 and frames.min() < 50
        assert all((before != after).any() for before, after in pairwise(frames))


def history(path):
    """The points in a .wandb file: {(tag, step): [value, ...]}. The file is a LevelDB log after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, record, points = path.read_bytes(), 7, b"", {}
    while position + 7 <= len(data):
        if (room := 32768 - position % 32768) < 7:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record = (record if kind in (3, 4) else b"") + data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4) and (parsed := Record.FromString(record)).WhichOneof("record_type") == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in parsed.history.item}
            for tag, value in row.items():
                points.setdefault((tag, row.get("global_step")), []).append(value)
    return points


def test_tracking_has_the_points_of_the_log(tmp_path):
    result = Run(PPO, *SMALL[PPO], "--track", cwd=tmp_path, env={"WANDB_MODE": "offline"}).wait()
    assert (result.status, result.notes) == (0, [])
    (path,) = tmp_path.rglob("*.wandb")
    tracked = {point: values for point, values in history(path).items() if "/" in point[0]}
    # Two episodes may end at one step: W&B keeps the last
    points = scalars(run_folder_in(tmp_path)).items()
    logged = {(tag, step): [pytest.approx(value)] for tag, points in points for step, value in points}
    assert tracked == logged
