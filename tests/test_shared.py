"""What the scripts share behind the divider, tried on one of them, and that it is the same text."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import gymnasium as gym
import pytest
import torch
from conftest import ROOT, SCRIPTS, assert_same, command, load, logged, resume, run, train

import ppo_continuous as ppo

SMALL = dict(env_id="Pendulum-v1", num_envs=2, num_steps=50, num_minibatches=2, update_epochs=2)
SMALL |= dict(total_timesteps=1000, checkpoint_interval=330, eval_episodes=1)
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
ATARI = ("a2c_atari", "a3c_atari", "dqn_per_atari")
SHARED = dict.fromkeys("seed_everything write_file load_checkpoint restore Run".split(), SCRIPTS)
SHARED |= dict(parse_args=SCRIPTS, main=SCRIPTS, AtariEnvs=ATARI, speed_up_cpu=ATARI[::2])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run; not to be changed."""
    return train(ppo, tmp_path_factory.mktemp("shared") / "run", **SMALL)


def definitions(script):
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: ast.unparse(node) for node in tree.body if isinstance(node, kinds)}


@pytest.mark.quick
@pytest.mark.parametrize("name", SHARED)
def test_the_same_text_in_all_scripts(name):
    texts = {script: definitions(script)[name] for script in SHARED[name]}
    first = SHARED[name][0]
    different = [script for script in texts if texts[script] != texts[first]]
    assert not different, f"{name} of {different} is not that of {first}"


# ----- Checkpoints -----


def test_checkpoints_are_written_where_the_interval_is_no_multiple(tmp_path, monkeypatch):
    steps, save = [], ppo.Run.save_checkpoint
    monkeypatch.setattr(
        ppo.Run, "save_checkpoint", lambda self, step: steps.append(step) or save(self, step)
    )
    train(ppo, tmp_path / "run", **SMALL)
    assert steps == [0, 400, 700, 1000]  # batches of 100: the first after each 330
    names = sorted(path.name for path in (tmp_path / "run").glob("checkpoint_*"))
    assert names == ["checkpoint_000000000700.pt", "checkpoint_000000001000.pt"]


@pytest.mark.quick
def test_damaged_checkpoints_are_skipped_with_a_line(finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "run")
    older, newest = sorted(folder.glob("checkpoint_*.pt"))
    content = newest.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (content[: len(content) // 2], b"", bytes(flipped), b"no zip file"):
        newest.write_bytes(damaged)
        assert ppo.load_checkpoint(folder)["global_step"] < 1000
        assert newest.name in capsys.readouterr().out
    older.write_bytes(b"")
    with pytest.raises(SystemExit, match="no intact checkpoint"):
        ppo.load_checkpoint(folder)
    other = torch.load(finished / "model.pt", weights_only=True) | {"script": "a2c_atari"}
    torch.save(other, tmp_path / "other.pt")
    with pytest.raises(SystemExit, match="no intact checkpoint"):
        ppo.load_checkpoint(tmp_path / "other.pt")


@pytest.mark.quick
def test_pickled_code_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    torch.save({"script": "ppo_continuous", "args": {}, "bomb": Bomb()}, tmp_path / "model.pt")
    with pytest.raises(SystemExit):
        ppo.load_checkpoint(tmp_path / "model.pt")
    assert not (tmp_path / "exploded").exists()


def test_a_write_that_is_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    ppo.write_file(path, {"x": 1})

    def torn(content, file):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        ppo.write_file(path, {"x": 2})
    assert torch.load(path, weights_only=True) == {"x": 1}


def test_a_removed_argument_is_named_and_ignored(finished, tmp_path, monkeypatch, capsys):
    checkpoint = torch.load(finished / "model.pt", weights_only=True)
    checkpoint["args"]["old_flag"] = 3
    torch.save(checkpoint, tmp_path / "model.pt")
    monkeypatch.setattr(
        sys, "argv", ["x.py", "--evaluate", str(tmp_path / "model.pt"), "--seed", "5"]
    )
    args, folder, _ = ppo.parse_args()
    assert "old_flag" in capsys.readouterr().out
    assert (args.num_steps, args.seed, folder) == (50, 5, tmp_path)  # saved, given


def test_flags_given_at_a_resume_count_and_time_goes_on(finished, tmp_path):
    again = resume(ppo, finished, tmp_path / "again", total_timesteps=2000, learning_rate=1e-3)
    checkpoint = torch.load(again / "model.pt", weights_only=True)
    assert checkpoint["global_step"] == 2000
    assert checkpoint["seconds"] > torch.load(finished / "model.pt", weights_only=True)["seconds"]
    rates = logged(again)["charts/learning_rate"]
    assert rates[1100] == pytest.approx(1e-3 / 2)
    speeds = logged(again)["charts/SPS"]
    assert speeds[2000] == pytest.approx(2000 / checkpoint["seconds"], rel=0.5)


def test_the_log_of_a_resumed_run_is_that_of_an_uninterrupted_one(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    sorted(folder.glob("checkpoint_*.pt"))[-1].unlink()  # killed after step 700, having logged on
    again = resume(ppo, folder, tmp_path / "again")
    a, b = logged(finished), logged(again)
    for log in (a, b):
        log.pop("charts/SPS")
    assert_same(a, b)


def test_many_ends_at_one_step_are_one_point(tmp_path):
    path = train(
        ppo, tmp_path / "run", **SMALL | dict(num_envs=4, num_steps=25, checkpoint_interval=10**6)
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path)).Reload()
    steps = [event.step for event in events.Scalars("charts/episodic_return")]
    assert steps and len(steps) == len(set(steps)), steps


def test_the_model_is_saved_before_it_is_evaluated(tmp_path, monkeypatch):
    def evaluate(*args):
        raise RuntimeError("a simulator of which there can be only one")

    monkeypatch.setattr(ppo, "evaluate", evaluate)
    with pytest.raises(RuntimeError):
        train(ppo, tmp_path / "run", **SMALL)
    model = load(tmp_path / "run" / "model.pt")
    assert model["global_step"] == 1000
    assert ppo.load_checkpoint(tmp_path / "run")["global_step"] == 1000


class Endless(gym.Env):
    observation_space = action_space = gym.spaces.Box(-1, 1, (2,))

    def __init__(self):  # no render_mode
        self.noise = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        import random

        import numpy as np

        draws = [random.random(), np.random.random()]  # noqa: NPY002
        return np.float32(draws), self.action_space.sample().sum().item(), False, False, {}


gym.register("Endless-v1", Endless)
gym.register("Missing-v0", "no_such_module:Env")


def test_an_environment_without_ends_and_with_generators_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ppo, "EVAL_STEPS", 50)
    flags = SMALL | {"env_id": "Endless-v1"}
    runs = [train(ppo, tmp_path / str(i), **flags) for i in range(2)]
    output = capsys.readouterr().out
    assert "no episode ended" in output and "cut off after 50 steps" in output
    assert_same(*[load(path / "model.pt") for path in runs])
    sorted(runs[1].glob("checkpoint_*.pt"))[-1].unlink()
    again = resume(ppo, runs[1], tmp_path / "again")
    assert_same(load(runs[0] / "model.pt"), load(again / "model.pt"))


# ----- The command line -----


def test_two_runs_of_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x.py", *FLAGS])
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    folders = set()
    for _ in range(3):
        _, folder, checkpoint = ppo.parse_args()
        folders.add(folder)
        assert checkpoint is None
    assert len(folders) == 3


def test_runs_that_start_at_once_do_not_meet(tmp_path):
    """Nor is a folder left by a run that could not start."""
    words = [command("ppo_continuous", *FLAGS), command("ppo_continuous", "--env-id", "NoSuch-v0")]
    options = dict(cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    processes = [subprocess.Popen(words[i], **options) for i in (0, 0, 1)]
    assert [process.wait() for process in processes] == [0, 0, 1]
    assert len(list(tmp_path.glob("runs/*/model.pt"))) == len(list(tmp_path.glob("runs/*"))) == 2


def test_a_folder_in_use_is_refused(tmp_path):
    words = command("ppo_continuous", *FLAGS, "--run-folder", "run", "--total-timesteps", 10**6)
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert "run folder" in process.stdout.readline()
    second = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert second.returncode == 1 and "in use" in second.stderr, second
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0


def test_ctrl_c_says_how_to_resume(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import gymnasium as gym\nfrom gymnasium.envs.classic_control import PendulumEnv\n"
        "gym.register('Mine-v0', PendulumEnv, max_episode_steps=100)\n"
    )
    flags = ["--env-id", "mine:Mine-v0", *FLAGS[1:], "--async-envs", "--total-timesteps", 10**6]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(
        command("ppo_continuous", *flags),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert "run folder" in process.stdout.readline()
    time.sleep(3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    _, errors = process.communicate(timeout=60)
    hint = re.search(r"resume with: python (.*)", errors)
    assert hint and "Traceback" not in errors, errors
    resumed = subprocess.run(
        [sys.executable, *hint.group(1).split(), "--total-timesteps", "1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "evaluation" in resumed.stdout, resumed


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--env-id Pusher-v4", "Pusher-v4"),
        ("--env-id HalfCheetah-v2", "v2"),
        ("--env-id nomodule:X-v0", "nomodule"),
        ("--env-id CartPole-v1", "CartPole-v1"),
        ("--env-id NoSuch-v0", "NoSuch"),
        ("--resume nowhere", "nowhere"),
        ("--evaluate nowhere.pt", "nowhere"),
    ],
)
def test_wrong_calls_get_a_line(flags, message, tmp_path):
    process = run("ppo_continuous", *flags.split(), cwd=tmp_path, check=False)
    assert process.returncode == 1
    assert "Traceback" not in process.stderr and message in process.stderr, process.stderr
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.quick
def test_a_seed_of_any_size(monkeypatch):
    assert len({ppo.seed_everything(2**64 + i) for i in range(3)}) == 3
    assert 0 <= ppo.seed_everything(2**80, 5) < 2**31
    first = ppo.seed_everything(1, 2), torch.rand(1)
    assert first == (ppo.seed_everything(1, 2), torch.rand(1))


# ----- Services -----


def test_wandb_resumes_the_same_run(tmp_path, monkeypatch):
    calls = []

    class CommError(Exception):
        """W&B's, for a run that was deleted."""

    def init(**kwargs):
        calls.append(kwargs)
        if deleted and "id" in kwargs:
            raise CommError

    deleted = []
    wandb = types.SimpleNamespace(init=init, errors=types.SimpleNamespace(CommError=CommError))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    path = train(ppo, tmp_path / "run", **SMALL, track=True)
    ppo.train(ppo.Args(**SMALL, track=True), path.parent / "other", None)
    (path / "x").touch()
    checkpoint = ppo.load_checkpoint(path)
    monkeypatch.setattr(ppo, "Run", type("Unlocked", (ppo.Run,), {}))
    monkeypatch.setitem(sys.modules, "fcntl", None)
    ppo.train(ppo.Args(**SMALL, track=True), path, checkpoint)
    deleted.append(True)
    ppo.train(ppo.Args(**SMALL, track=True), path.parent / "third", None)
    first, other, again, _, new = calls
    assert "id" not in new and new["resume"] == "allow"
    assert first["id"] == again["id"] != other["id"] and first["resume"] == "allow"
    assert first["config"]["num_steps"] == 50 and first["sync_tensorboard"]


def test_upload(tmp_path, monkeypatch):
    calls = {}

    class HfApi:
        def create_repo(self, name, exist_ok):
            return types.SimpleNamespace(repo_id=name)

        def upload_folder(self, **kwargs):
            calls.update(kwargs)

    hub = types.SimpleNamespace(HfApi=HfApi)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    train(ppo, tmp_path / "run", **SMALL, upload_model=True, hf_entity="lab", save_model=False)
    assert calls["repo_id"] == "lab/Pendulum-v1-ppo_continuous-1"
    names = {path.name for path in calls["folder_path"].iterdir()}
    assert {"model.pt", "README.md", "result.json"} <= names
    assert calls["ignore_patterns"] == "checkpoint_*"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["args"]["seed"] == 1


def test_video(tmp_path):
    flags = SMALL | dict(total_timesteps=600, capture_video=True, async_envs=False)
    try:
        train(ppo, tmp_path / "run", **flags)
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        pytest.skip(f"no renderer here: {error}")
    videos = {path.parent.name for path in (tmp_path / "run" / "videos").rglob("*.mp4")}
    assert {"0", "evaluation"} <= videos, videos
