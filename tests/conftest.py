"""What the tests of the programs share: the smallest settings of each script, three ways to run it, and its files."""

import atexit
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

# For each script a run of half a second, or three where networks see pictures. In every one: checkpoints at 0, 512, ...
# 4608 and, at the end, 4736 steps, divided by SCALE; two environments, with whole episodes between the checkpoints
# where SCALE is 1; a replay that wraps several times.
SMALL = {
    "ppo_continuous": "--env-id Pendulum-v1 --num-envs 2 --num-steps 64 --num-minibatches 2 --update-epochs 2 "
    "--total-timesteps 4736 --checkpoint-interval 512 --eval-episodes 2".split(),
    "a2c_atari": "--env-id BreakoutNoFrameskip-v4 --num-envs 2 --num-steps 4 --log-interval 1 --total-timesteps 296 "
    "--checkpoint-interval 32 --eval-episodes 2 --torch-threads 1 --env-threads 1 --no-cuda".split(),
    "dqn_per_atari": "--env-id BreakoutNoFrameskip-v4 --num-envs 2 --num-steps 4 --updates 1 --batch-size 2 "
    "--buffer-size 66 --learning-starts 4 --log-interval 1 --total-timesteps 296 --checkpoint-interval 32 "
    "--eval-episodes 2 --eval-epsilon 0.0 --torch-threads 1 --env-threads 1 --no-cuda".split(),
}
SCALE = {"ppo_continuous": 1, "a2c_atari": 16, "dqn_per_atari": 16}

# Tests that take seconds with Atari and would only go once more through what the house's scripts share word for word
LEFT_OUT = """logs.are.copied|very.end|half_written|second_signal
    other_files|no_code|another.script's|another.environment's|garbage|empty\\b|cannot_be_written|full_from_the_start
    resuming_on_a_full|no_model_is_saved|asks_for_no_login|no_login_and|at.once.after
    tracking_has|a_terminal_shows|more_steps"""


# Of the tests of resuming A2C goes through these: DQN goes through the others, with the same text and a replay more
KEPT = r"any_moment|same_seed|signal_ends|without_one|other_batch|another_batch"


def pytest_collection_modifyitems(config, items):
    def left_out(item):
        atari = [script for script in SMALL if SCALE[script] > 1 and script in item.name]
        resume = "test_resume.py" in item.nodeid and "a2c_atari" in atari
        return atari and (words.search(item.nodeid) or (resume and not re.search(KEPT, item.nodeid)))

    words = re.compile("|".join(LEFT_OUT.split()))
    out = [item for item in items if left_out(item)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session", params=SMALL)
def script(request):
    """The name of a script: a test that takes it runs once for each."""
    return request.param


@dataclass
class Result:
    status: int
    stdout: str
    stderr: str


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Run a script in this process, in the folder tmp_path: the quickest way, for calls that nobody interrupts."""

    def call(script, *argv):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *argv])
        handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        capfd.readouterr()
        try:
            importlib.import_module(script).main()
            status = 0
        except SystemExit as exit_:
            status = exit_.code or 0
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        return Result(status, *capfd.readouterr())

    return call


def execute(script, *argv, cwd):
    """Run `python script.py` as anybody would: a second or more for the imports alone."""
    command = [sys.executable, str(ROOT / f"{script}.py"), *argv]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def finished(script, tmp_path_factory):
    """A small run that nothing ended, by `python script.py`, for reading only: its result and its folder."""
    cwd = tmp_path_factory.mktemp("finished")
    result = execute(script, *SMALL[script], cwd=cwd)
    assert (result.status, result.stderr) == (0, ""), result
    return result, run_folder_in(cwd)


class Run:
    """A process of its own, forked from one that has imported the scripts already.

    `sabotage` is called in it before the script is. `stdout` may be the name of a terminal. A value None in `env`
    unsets the variable.
    """

    context = multiprocessing.get_context("forkserver")
    # Optimisers import torch._dynamo, for two seconds
    context.set_forkserver_preload(["conftest", *SMALL, "torch._dynamo", "wandb", "moviepy"])

    def __init__(self, script, *argv, cwd, sabotage=None, stdout=None, env=()):
        self.outputs = [tempfile.NamedTemporaryFile("r") for _ in range(2)]
        names = (stdout or self.outputs[0].name, self.outputs[1].name)
        arguments = (script, argv, cwd, names, dict(env), sabotage)
        self.process = self.context.Process(target=run_forked, args=arguments)
        with pytest.MonkeyPatch.context() as patch:  # for the process that imports and forks
            patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
            self.process.start()

    def kill(self, signum=signal.SIGKILL):
        os.kill(self.process.pid, signum)

    def wait(self, timeout=60):
        """The result; the status is minus the signal's number where a signal ended the process."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            pytest.fail(f"still running after {timeout} s: " + self.outputs[1].read())
        return Result(self.process.exitcode, *(output.read() for output in self.outputs))


def run_forked(script, argv, cwd, outputs, env, sabotage):
    for descriptor, name in enumerate(outputs, start=1):
        os.dup2(os.open(name, os.O_WRONLY), descriptor)
    os.chdir(cwd)
    for name, value in env.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    sys.argv = [f"{script}.py", *argv]
    if sabotage:
        sabotage()
    try:
        importlib.import_module(script).main()
    finally:
        atexit._run_exitfuncs()  # as at the end of any program; multiprocessing leaves them out


def wait_for(condition, seconds=30):
    """Wait until condition() is true, and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)
    return value


def run_folder_in(cwd):
    """The one run folder below cwd/runs."""
    (folder,) = (cwd / "runs").iterdir()
    return folder


def copy_run(source, cwd):
    """A copy of a run folder below cwd/runs; returns the path as the command line takes it, relative to cwd."""
    shutil.copytree(source, cwd / "runs" / source.name)
    return f"runs/{source.name}"


def files_below(folder):
    """Everything below a folder: {path: content}, None for a folder."""
    return {path.relative_to(folder): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def load(path):
    return torch.load(path, weights_only=True)


def checkpoints(run_folder):
    """The checkpoints of a run, oldest first."""
    return sorted(run_folder.glob("checkpoint_*.pt"), key=step_of)


def step_of(checkpoint):
    """The step at which a checkpoint was written."""
    return int(checkpoint.stem.removeprefix("checkpoint_"))


def scalars(run_folder):
    """All points of a run's one event file as they stand in it: {tag: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    (path,) = run_folder.glob("events.out.tfevents.*")
    points = defaultdict(list)
    for event in map(Event.FromString, RawEventFileLoader(str(path)).Load()):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                points[value.tag].append((event.step, value.simple_value))
    return dict(points)
