"""What the scripts share behind the divider, tried on one of them, and that it is the same text."""

import ast
import functools
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, assert_same, call, command, load, logged, resume, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_continuous as ppo

SMALL = dict(env_id="Pendulum-v1", num_envs=2, num_steps=50, num_minibatches=2, update_epochs=2)
SMALL |= dict(total_timesteps=1000, checkpoint_interval=330, eval_episodes=1)
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
ATARI, SEEDS = ("a2c_atari", "a3c_atari", "dqn_per_atari"), set()
SHARED = dict.fromkeys("seed_everything write_file load_checkpoint Run".split(), SCRIPTS)
SHARED |= dict(main=SCRIPTS, AtariEnvs=ATARI, speed_up_cpu=ATARI[::2])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run; not to be changed."""
    return train(ppo, tmp_path_factory.mktemp("shared") / "run", **SMALL)


@functools.cache
def definitions(script):
    nodes = ast.parse(text := (ROOT / f"{script}.py").read_text()).body
    return {x.name: ast.get_source_segment(text, x) for x in nodes if hasattr(x, "name")}


@pytest.mark.quick
@pytest.mark.parametrize("name", SHARED)
def test_the_same_text_in_all_scripts(name):
    texts = {script: definitions(script)[name] for script in SHARED[name]}
    different = [script for script in texts if texts[script] != texts[SHARED[name][0]]]
    assert not different, f"{name} of {different} is another than that of {SHARED[name][0]}"


@pytest.mark.quick
def test_checkpoints_and_points_of_a_finished_run(finished):
    """Checkpoints after batches of 100 steps, of which the interval is no multiple."""
    assert {path.stem[-4:] for path in finished.glob("checkpoint_*")} == {"0700", "1000"}
    events = EventAccumulator(str(finished)).Reload().Scalars("charts/episodic_return")
    assert [event.step for event in events] == [400]  # one point for both environments


@pytest.mark.quick
def test_damaged_checkpoints_are_skipped_and_code_is_not_run(finished, tmp_path, capsys):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    folder = shutil.copytree(finished, tmp_path / "run")
    older, newest = sorted(folder.glob("checkpoint_*.pt"))
    content, middle = newest.read_bytes(), newest.stat().st_size // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    other = torch.load(newest, weights_only=True) | {"script": "a2c_atari"}
    for damaged in (content[:middle], b"", flipped, b"no zip file", other, other | {"x": Bomb()}):
        if isinstance(damaged, dict):
            torch.save(damaged, newest)
        else:
            newest.write_bytes(damaged)
        assert ppo.load_checkpoint(folder)["global_step"] == 700
        assert newest.name in capsys.readouterr().out
    assert not (tmp_path / "exploded").exists()
    for wrong in (finished / "model.pt", finished):  # no optimizer; another size of the network
        args = ppo.Args(**SMALL | {"env_id": "MountainCarContinuous-v0"})
        with pytest.raises(SystemExit, match="does not fit"):
            ppo.train(args, tmp_path / wrong.name / "new", ppo.load_checkpoint(wrong))
    older.write_bytes(b"")
    with pytest.raises(SystemExit, match="no intact checkpoint"):
        ppo.load_checkpoint(folder)


@pytest.mark.quick
def test_a_write_that_is_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    ppo.write_file(tmp_path / "model.pt", {"x": 1})
    with pytest.raises(Exception, match="Weights only"):  # what could not be loaded
        ppo.write_file(tmp_path / "model.pt", {"x": np.float32(2)})
    monkeypatch.setattr(torch, "save", lambda content, file: file.write_bytes(b"half") // 0)
    with pytest.raises(ZeroDivisionError):
        ppo.write_file(tmp_path / "model.pt", {"x": 2})
    assert torch.load(tmp_path / "model.pt", weights_only=True) == {"x": 1}


@pytest.mark.quick
def test_a_removed_argument_is_named_and_ignored(finished, tmp_path, monkeypatch, capsys):
    checkpoint = torch.load(finished / "model.pt", weights_only=True)
    checkpoint["args"]["old_flag"] = 3
    torch.save(checkpoint, tmp_path / "model.pt")
    flags = f"--evaluate {tmp_path}/model.pt --seed=5 --torch-threads=3 --no-torch-deterministic"
    monkeypatch.setattr(sys, "argv", ["x.py", "--cuda", *flags.split()])
    monkeypatch.setattr(torch, "set_num_threads", (calls := []).append)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(ppo, "evaluate", lambda *arguments: calls.append(arguments))
    ppo.main()
    threads, (args, _, folder), output = *calls, capsys.readouterr().out
    assert "old_flag" in output and ("no CUDA" in output) != torch.cuda.is_available()
    assert not torch.backends.cudnn.deterministic
    assert (args.num_steps, args.seed, threads, folder) == (50, 5, 3, tmp_path)  # saved, given


def test_flags_given_at_a_resume_count_and_time_goes_on(finished, tmp_path):
    again = resume(ppo, finished, tmp_path / "again", total_timesteps=1950, learning_rate=1e-3)
    checkpoint = torch.load(again / "model.pt", weights_only=True)
    assert checkpoint["seconds"] > torch.load(finished / "model.pt", weights_only=True)["seconds"]
    points = logged(again)
    assert points["charts/learning_rate"][1100] == pytest.approx(1e-3 / 2)
    assert points["charts/SPS"][2000] == pytest.approx(2000 / checkpoint["seconds"], rel=0.5)


def test_resumed_at_an_older_checkpoint_a_run_logs_the_same_and_drops_later(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    checkpoint = ppo.load_checkpoint(folder / "checkpoint_000000000700.pt")
    ppo.train(ppo.Args(**checkpoint["args"]), folder, checkpoint)
    assert_same(*[logged(path) | {"charts/SPS": 0} for path in (finished, folder)])
    again = shutil.copytree(folder, tmp_path / "again")
    ppo.train(ppo.Args(**checkpoint["args"] | {"total_timesteps": 800}), again, checkpoint)
    assert {path.stem[-4:] for path in again.glob("checkpoint_*")} == {"0700", "0800"}
    assert max(logged(again)["charts/learning_rate"]) == 800


def test_the_model_is_saved_before_it_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "evaluate", lambda *args: logged(args[2])["charts/SPS"][1000] // 0)
    with pytest.raises(ZeroDivisionError):
        train(ppo, tmp_path / "run", **SMALL)
    assert load(tmp_path / "run" / "model.pt")["global_step"] == 1000
    assert ppo.load_checkpoint(tmp_path / "run")["global_step"] == 1000


class Endless(gym.Env):
    action_space, observation_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-1, 1, (2, 1))

    def reset(self, *, seed=None, options=None):
        SEEDS.add(seed)
        super().reset(seed=seed)
        return np.float32(self.np_random.random((2, 1))), {}

    def step(self, action):
        reward = random.random() + self.action_space.sample()[0]
        return self.observation_space.sample() * np.random.random(), reward, False, False, {}


SPACES = {"Endless": gym.spaces.Box(-1, 1, (2,)), "Table": gym.spaces.Box(-1, 1, (2, 3))}
SPACES |= {"Integers": gym.spaces.Box(0, 9, (2,), int), "Pair": gym.spaces.Tuple(SPACES.values())}
for name, space in SPACES.items():
    gym.register(f"{name}-v1", type(name, (Endless,), {"action_space": space}))
sequence = {"observation_space": gym.spaces.Sequence(SPACES["Endless"])}
gym.register("Sequence-v1", type("Sequence", (Endless,), sequence))


def test_an_environment_without_ends_and_with_generators_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ppo, "EVAL_STEPS", 50)
    runs = [train(ppo, tmp_path / str(i), **SMALL | {"env_id": "Endless-v1"}) for i in range(2)]
    output = capsys.readouterr().out
    assert output.count("no episode ended") == 2 and "0 episodes" in output  # once in each run
    assert output.count("cut off after 50 steps") == 2 and "evaluation: 0.00" not in output
    assert_same(*[load(path / "model.pt") for path in runs])
    assert len(SEEDS) == 2 * 3 + 1  # of two environments at three checkpoints, of the evaluation
    flags = SMALL | dict(env_id="Endless-v1", seed=2, save_model=False)
    assert not (train(ppo, tmp_path / "other", **flags) / "model.pt").exists()
    assert len(SEEDS) == 2 * (2 * 3 + 1)
    sorted(runs[1].glob("checkpoint_*.pt"))[-1].unlink()
    again = resume(ppo, runs[1], tmp_path / "again")
    assert_same(load(runs[0] / "model.pt"), load(again / "model.pt"))


def test_each_run_has_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["x.py", *FLAGS, "--exp-name", "a/b"])
    folders = set()
    monkeypatch.setattr(ppo, "train", lambda args, folder, checkpoint: folders.add(folder))
    assert [ppo.main() for _ in range(3)] and [str(x.parent) for x in folders] == ["runs"] * 3
    sys.argv += ["--run-folder", str(tmp_path)]  # which is there, and empty
    assert ppo.main() is None and tmp_path in folders
    with pytest.raises(SystemExit, match="--eval-episodes"):
        call("ppo_continuous", "--eval-episodes", 0)


def test_a_folder_in_use_and_ctrl_c(tmp_path):
    """The folder is refused; Ctrl-C, with a module's environment, says how to resume."""
    pendulum = "'gymnasium.envs.classic_control:PendulumEnv', max_episode_steps=100"
    (tmp_path / "mine.py").write_text(f"import gymnasium as x\nx.register('Mine-v0', {pendulum})")
    flags = ["--env-id", "mine:Mine-v0", *FLAGS[1:], "--async-envs", "--total-timesteps=999999"]
    flags += ["--checkpoint-interval=999999"]  # while Python forks, as after one, it loses signals
    options = dict(cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, text=True)
    options |= dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen(command("ppo_continuous", *flags), **options, start_new_session=True)
    folder = process.stdout.readline().removeprefix("run folder: ").strip()
    with pytest.raises(SystemExit, match="in use"):
        call("ppo_continuous", *FLAGS, "--run-folder", tmp_path / folder)
    while not any((tmp_path / folder).glob("checkpoint_*.pt")):
        time.sleep(0.1)
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    _, errors = process.communicate(timeout=300)
    hint = re.search(r"resume with: python (.*)", errors)
    assert hint, errors  # beside which an environment's process may show its traceback
    words = [sys.executable, *shlex.split(hint.group(1)), "--total-timesteps", "1"]
    resumed = subprocess.run(words, **options)
    assert "evaluation" in resumed.stdout, resumed


WRONG_IDS = ["Pusher-v4", "HalfCheetah-v2", "nomodule:X-v0", "CartPole-v1", "NoSuch-v0"]
WRONG_IDS += ["Integers-v1", "Table-v1", "Pair-v1", "Sequence-v1"]
WRONG_CALLS = [*(f"--env-id {x}" for x in WRONG_IDS), "--resume nowhere", "--evaluate nowhere.pt"]


@pytest.mark.parametrize("flags", WRONG_CALLS)
def test_wrong_calls_get_a_line(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="|".join(re.split("[:.-]", flags.split()[1]))):
        call("ppo_continuous", *FLAGS, *flags.split())
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.quick
def test_a_seed_of_any_size(monkeypatch):
    assert len({ppo.seed_everything(2**64 + i) for i in range(3)}) == 3
    assert 0 <= ppo.seed_everything(2**80, 5) < 2**31
    assert len({(ppo.seed_everything(1, 2), torch.rand(1).item()) for _ in range(2)}) == 1


def test_wandb_resumes_the_same_run_or_begins_another(tmp_path, monkeypatch):
    calls, path = [], tmp_path / ("x" * 80) / "run"

    def init(id=None, **kwargs):
        if id and len(calls) == 3:
            raise OSError("run was previously created and deleted")
        calls.append(kwargs | {"id": id, "logs": any(path.glob("events*"))})

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Error=OSError))
    monkeypatch.setitem(sys.modules, "fcntl", None)  # no locks, as on Windows
    monkeypatch.chdir(tmp_path)
    flags = SMALL | dict(track=True, wandb_entity="lab", wandb_project_name="mine")
    train(ppo, path.relative_to(tmp_path), **flags)
    train(ppo, path.with_name("other"), **flags)
    for _ in range(2):
        ppo.train(ppo.Args(**flags), path, ppo.load_checkpoint(path))
    first, other, again, new = calls
    assert first["id"] == again["id"] != other["id"] and first["resume"] == "allow"
    assert new["id"] is None and first["config"]["num_steps"] == 50 and first["sync_tensorboard"]
    assert re.fullmatch(r"[\w-]{1,100}", first["id"]) and not first["logs"]  # which it will see
    assert (first["entity"], first["project"], first["allow_val_change"]) == ("lab", "mine", True)


@pytest.mark.parametrize("entity, owner", [(None, ""), ("lab", "lab/")])
def test_upload(tmp_path, monkeypatch, capsys, entity, owner):
    calls, listed = {}, lambda folder_path, **x: calls.update(x, files={*os.listdir(folder_path)})
    api = types.SimpleNamespace(upload_folder=listed)
    api.create_repo = lambda x, exist_ok: types.SimpleNamespace(repo_id=exist_ok and f"user/{x}")
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=lambda: api))
    flags = SMALL | dict(total_timesteps=500, upload_model=True, save_model=False)
    train(ppo, tmp_path / "run", **flags, hf_entity=entity, exp_name="x/y")
    output = capsys.readouterr()
    assert " 500/500 " in output.err and "no episode ended" not in output.out  # in 100 steps
    assert calls["repo_id"] == f"user/{owner}Pendulum-v1-x-y-1"
    files = calls["files"] - shutil.ignore_patterns(calls["ignore_patterns"])("", calls["files"])
    assert {"model.pt", "result.json"} < files and len(files) == 3  # no checkpoints


@pytest.mark.filterwarnings("error:.*Overwriting")  # one environment is recorded
def test_video(tmp_path):
    try:
        train(ppo, tmp_path / "run", **SMALL | dict(total_timesteps=600, capture_video=True))
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        pytest.skip(f"no renderer here: {error}")
    videos = sorted(path.parent.name for path in (tmp_path / "run" / "videos").rglob("*.mp4"))
    assert videos == ["0", "400", "evaluation"]
