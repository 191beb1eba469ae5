"""What the tests of the programs share: the smallest settings of each script, three ways to run it, and its files."""

import contextlib
import fcntl
import importlib
import itertools
import json
import multiprocessing
import os
import pkgutil
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # SMAX is compiled once, not in each of a hundred processes
    compiled = tempfile.TemporaryDirectory()  # gone when this process ends, the first one; the others inherit its name
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(10**9)  # with a limit they wait for each other
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles in half the time

SCRIPTS = ["ppo_continuous", "a2c_atari", "a3c_atari", "dqn_per_atari", "qmix_smac"]

# For each script a run of a second or a few: at least three checkpoints, and the last batch after one. Where the text
# of the scripts is the same (test_house.py sees to it), PPO stands for all in most tests
ATARI = "--env-id BreakoutNoFrameskip-v4 --log-interval 1 --eval-episodes 2 "
SMALL = {
    "ppo_continuous": "--env-id Pendulum-v1 --num-envs 2 --num-steps 64 --num-minibatches 2 --update-epochs 2 "
    "--total-timesteps 2176 --checkpoint-interval 512 --eval-episodes 2".split(),
    "a2c_atari": f"{ATARI} --num-envs 2 --num-steps 4 --total-timesteps 136 --checkpoint-interval 32 "
    "--torch-threads 1 --env-threads 1 --no-cuda --conv3-filters 4".split(),
    "a3c_atari": f"{ATARI} --num-workers 1 --num-steps 10 --total-timesteps 450 --checkpoint-interval 200 "
    "--max-episode-length 40".split(),
    "dqn_per_atari": f"{ATARI} --num-envs 2 --num-steps 4 --updates 1 --batch-size 2 --buffer-size 66 "
    "--learning-starts 4 --total-timesteps 136 --checkpoint-interval 32 --eval-epsilon 0.5 --torch-threads 1 "
    "--env-threads 1 --no-cuda".split(),
    "qmix_smac": "--env-id 3m --num-envs 2 --total-timesteps 1000 --checkpoint-interval 300 --batch-size 4 "
    "--buffer-size 24 --log-interval 100 --test-interval 400 --test-nepisode 3 --eval-episodes 3 --rnn-hidden-dim 16 "
    "--epsilon-anneal-time 800 --target-update-interval 7".split(),
}


@pytest.fixture(scope="session", params=SCRIPTS)
def script(request):
    """The name of a script: a test that takes it runs once for each."""
    return request.param


@dataclass
class Result:
    status: int
    stdout: str
    stderr: str

    @property
    def notes(self):
        """The lines on stderr but the progress bar."""
        rest = re.sub(r" *(\d+%\|[^|]*\||\d+ steps )[^]\r\n]*(steps/s|s/ steps)[^]\r\n]*\]", "", self.stderr)
        return [line.strip() for line in re.split(r"[\r\n]+", rest) if line.strip()]


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Run a script in this process, in the folder tmp_path: the quickest way, for calls that nobody interrupts."""

    def call(script, *argv):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *argv])
        # The lock on a run folder is held until a process ends, and here that is this one. Compilers lock files
        real_flock = fcntl.flock

        def flock(descriptor, operation):
            folder = isinstance(descriptor, int) and stat.S_ISDIR(os.fstat(descriptor).st_mode)
            os.close(descriptor) if folder else real_flock(descriptor, operation)

        monkeypatch.setattr("fcntl.flock", flock)
        handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        capfd.readouterr()
        status = 0
        try:
            importlib.import_module(script).main()
        except SystemExit as exit_:
            status = exit_.code or 0
            if isinstance(status, str):  # as Python does it
                status = print(status, file=sys.stderr) or 1
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        return Result(status, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def finished(script, tmp_path_factory, worker_id):
    """A small run that nothing ended, by `python script.py` as anybody would: its result and folder, for reading."""
    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent  # that of all processes of pytest: one of them does the run
    cwd, outputs = root / f"finished_{script}", [root / f"{script}.{name}" for name in ("stdout", "stderr")]
    with open(root / f"{script}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cwd.exists():
            cwd.mkdir()
            command = [sys.executable, str(ROOT / f"{script}.py"), *SMALL[script]]
            done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done
            outputs[0].write_text(done.stdout)
            outputs[1].write_text(done.stderr)
    return Result(0, *(output.read_text() for output in outputs)), run_folder_in(cwd)


class Run:
    """A process of its own, forked from one that has imported the scripts already.

    `sabotage` is called in it before the script is. A value None in `env` unsets the variable.
    """

    context = multiprocessing.get_context("forkserver")
    # Optimisers import torch._dynamo, for two seconds
    context.set_forkserver_preload(["conftest", *SCRIPTS, "torch._dynamo"])

    def __init__(self, script, *argv, cwd, sabotage=None, env=()):
        self.outputs = [tempfile.NamedTemporaryFile("r") for _ in range(2)]
        names = [output.name for output in self.outputs]
        self.process = self.context.Process(target=run_forked, args=(script, argv, cwd, names, dict(env), sabotage))
        with pytest.MonkeyPatch.context() as patch:  # for the process that imports and forks
            patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
            self.process.start()

    def kill(self, signum=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self.process.pid, signum)

    def wait(self, timeout=200):
        """The result; the status is minus the signal's number where a signal ended the process."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            pytest.fail(f"still running after {timeout} s: " + self.outputs[1].read())
        return Result(self.process.exitcode, *(output.read() for output in self.outputs))

    def leaves_no_orphan(self):
        """Whether all that the process has started ends with it."""
        return wait_for(lambda: not processes_of(self.process.pid))


def processes_of(group):
    """The living processes of a process group."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats.append(path.read_text().rpartition(")")[2].split())  # state, parent, group, ...
        except OSError:  # it has just ended
            continue
    return [stat for stat in stats if stat[2] == str(group) and stat[0] != "Z"]


def run_forked(script, argv, cwd, outputs, env, sabotage):
    os.setpgid(0, 0)
    for descriptor, name in enumerate(outputs, start=1):
        os.dup2(os.open(name, os.O_WRONLY), descriptor)
    os.chdir(cwd)
    for name, value in env.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    sys.argv = [f"{script}.py", *argv]
    if sabotage:
        sabotage()
    importlib.import_module(script).main()


def exists(step):
    """Whether the checkpoint of a step has been written below this folder; None stands for no step at all."""
    return step is None or any(Path().rglob(f"checkpoint_{step:012}.pt"))


def kill_in(name, step=None, nth=1, after=False):
    """Have the process killed just before, or just after, the nth call of a function once a checkpoint exists."""
    owner, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    function, calls = getattr(owner, attribute), itertools.count(1)

    def call(*args, **kwargs):
        fatal = exists(step) and next(calls) == nth
        if fatal and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, attribute, call)


def wait_for(condition, seconds=60):
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
    """Everything below a folder: {path: hash of the content}, None for a folder."""
    return {path.relative_to(folder): None if path.is_dir() else hash(path.read_bytes()) for path in folder.rglob("*")}


def load(path):
    return torch.load(path, weights_only=True)


def checkpoints(run_folder):
    """The checkpoints of a run, oldest first."""
    return sorted(run_folder.glob("checkpoint_*.pt"))


def step_of(checkpoint):
    """The step at which a checkpoint was written."""
    return int(checkpoint.stem.removeprefix("checkpoint_"))


def scalars(run_folder):
    """All points of a run as TensorBoard shows them: {tag: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run_folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(point.step, point.value) for point in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def curves(run_folder):
    """The points but those of the speed."""
    return {tag: points for tag, points in scalars(run_folder).items() if tag != "charts/SPS"}


def assert_identical(found, expected, at=""):
    """Bit by bit and type by type, also in what tensors, lists and dicts hold."""
    assert type(found) is type(expected), at
    if isinstance(expected, dict):
        assert list(found) == list(expected), at
        for key in expected:
            assert_identical(found[key], expected[key], f"{at}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), at
        for index, pair in enumerate(zip(found, expected)):
            assert_identical(*pair, f"{at}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        same = found.contiguous().numpy().tobytes() == expected.contiguous().numpy().tobytes()
        assert same, at  # without the contents: where CI is set, pytest compares all of them for minutes
    else:
        same = repr(found) == repr(expected)
        assert same, f"{at}: {found!r:.200} instead of {expected!r:.200}"


def comparable(content):
    """A checkpoint, model or result without its seconds and how its run was called."""
    args = {name: value for name, value in content["args"].items() if name not in ("run_folder", "resume")}
    return {name: value for name, value in content.items() if name != "seconds"} | {"args": args}


def assert_same_run(run_folder, reference):
    """The same files with the same content, and the same curves: whatever interrupted one of the runs."""
    found, expected = ({path.name for path in folder.iterdir()} for folder in (run_folder, reference))
    logs = {name for name in found | expected if "tfevents" in name}
    assert found - logs == expected - logs
    for path in (*checkpoints(reference), reference / "model.pt"):
        assert_identical(comparable(load(run_folder / path.name)), comparable(load(path)), path.name)
    results = [comparable(json.loads((folder / "result.json").read_text())) for folder in (run_folder, reference)]
    assert results[0] == results[1]
    assert curves(run_folder) == curves(reference)
    speeds = [[step for step, _ in scalars(folder)["charts/SPS"]] for folder in (run_folder, reference)]
    assert speeds[0] == speeds[1]
