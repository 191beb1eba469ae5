"""Exact resume: whatever ends a run, resuming it gives the checkpoint and the curves of the run that nothing ended.

"Nothing" is one run per script, by `python script.py` in a process of its own. Kills are real: SIGKILL to a process.
"""

import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import pkgutil
import random
import re
import resource
import shlex
import shutil
import signal
import struct
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    SCALE,
    SMALL,
    Result,
    Run,
    checkpoints,
    copy_run,
    files_below,
    load,
    run_folder_in,
    scalars,
    step_of,
    wait_for,
)

# What is done to a process before it runs the script


def exists(step):
    """Whether the checkpoint of a step has been written; None stands for no step at all."""
    return step is None or any(Path("runs").glob(f"*/checkpoint_{step}.pt"))


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


def killer(script, name, step=None, *rest):
    """`kill_in` with the step of a script whose steps are scaled."""
    return functools.partial(kill_in, name, step and step // SCALE[script], *rest)


def fill_disk(step=None, size=512):
    """Let no file be written beyond `size` bytes once a checkpoint exists. (Python ignores SIGXFSZ.)"""
    replace = os.replace

    def call(*args, **kwargs):
        replace(*args, **kwargs)
        if exists(step):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    os.replace = call
    if step is None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# Comparison


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
        assert found.numpy().tobytes() == expected.numpy().tobytes(), at
    else:
        assert repr(found) == repr(expected), at


def curves(run_folder):
    return {tag: points for tag, points in scalars(run_folder).items() if tag != "charts/SPS"}


def assert_same_run(run_folder, reference):
    files = [path for path in sorted(run_folder.iterdir()) if path.suffix != ".damaged"]
    names = [re.sub(r"tfevents.*", "tfevents", path.name) for path in files]
    assert names == [re.sub(r"tfevents.*", "tfevents", path.name) for path in sorted(reference.iterdir())]
    for path in (*checkpoints(reference), reference / "model.pt"):
        assert_identical(load(run_folder / path.name), load(path), path.name)
    assert curves(run_folder) == curves(reference)
    assert [step for step, _ in scalars(run_folder)["charts/SPS"]] == [
        step for step, _ in scalars(reference)["charts/SPS"]
    ]


@pytest.fixture
def reference(finished):
    """The folder of the run that nothing ended, for reading only."""
    return finished[1]


@pytest.fixture(scope="module")
def killed(script, tmp_path_factory):
    """The folder of a run that was killed between its sixth and seventh checkpoint, for copying."""
    cwd = tmp_path_factory.mktemp("killed")
    kill = killer(script, "os.replace", 2560)
    assert Run(script, *SMALL[script], cwd=cwd, sabotage=kill).wait().status == -9
    folder = run_folder_in(cwd)
    for path in folder.glob("*.tmp"):
        path.unlink()
    return folder


@pytest.fixture
def interrupted(killed, tmp_path):
    """A copy of `killed` in this test's folder: its path as the command line takes it, and as it is."""
    name = copy_run(killed, tmp_path)
    return name, tmp_path / name


# The uninterrupted run


def test_the_same_seed_gives_the_same_run_and_another_does_not(call, tmp_path, reference, script):
    assert call(script, *SMALL[script]).status == 0
    run_folder = run_folder_in(tmp_path)
    assert_same_run(run_folder, reference)
    shutil.rmtree(tmp_path / "runs")
    assert call(script, *SMALL[script], "--seed", "2").status == 0
    other = curves(run_folder_in(tmp_path))
    assert other.keys() == curves(reference).keys()
    (tag,) = {"losses/value_loss", "losses/td_loss"} & other.keys()
    assert other[tag] != curves(reference)[tag]


def test_the_last_two_checkpoints_are_kept(reference, script):
    steps = [step // SCALE[script] for step in (*range(0, 4609, 512), 4736)]
    assert [step_of(path) for path in checkpoints(reference)] == steps[-2:]
    assert [step for step, _ in scalars(reference)["charts/checkpoint"]] == steps
    assert not list(reference.glob("*.tmp"))


# Kills

EVENT = "tensorboard.summary.writer.event_file_writer.EventFileWriter.add_event"
LOG = "torch.utils.tensorboard.SummaryWriter"
LIVES = {  # of a run, each ended by a kill; the next one resumes
    "before the second checkpoint is whole": [("os.replace", 0)],
    "before and after a checkpoint gets its name": [
        ("os.fsync", 1024, 2),  # the first is for the folder
        ("os.replace", 1536),
        ("os.replace", 2048, 1, True),
        ("pathlib.Path.unlink", 3072),  # of an old checkpoint
    ],
    "at once after resuming": [("os.fsync", 2048, 2), (f"{LOG}.add_scalar",), (f"{LOG}.add_scalar", None, 25)],
    "as logs are copied and removed": [
        *[("os.replace", 2048), (EVENT, None, 20), (EVENT, None, 40)],
        *[("pathlib.Path.unlink",), ("pathlib.Path.unlink", None, 2), ("pathlib.Path.unlink", None, 1, True)],
        *[(EVENT, None, 20), ("os.replace", 3584)],
    ],
    "at the very end": [("os.replace", 4736), (f"{LOG}.close",)],  # before the model gets its name
}


@pytest.mark.parametrize("lives", LIVES.values(), ids=LIVES)
def test_killed_at_a_certain_moment(call, tmp_path, reference, script, lives):
    argv = SMALL[script]
    for moment in lives:
        assert Run(script, *argv, cwd=tmp_path, sabotage=killer(script, *moment)).wait().status == -9
        argv = ["--resume", f"runs/{run_folder_in(tmp_path).name}"]
    result = call(script, *argv)
    assert (result.status, result.stderr) == (0, "")
    assert_same_run(run_folder_in(tmp_path), reference)


def live_and_be_killed(script, argv, cwd):
    """Run a script until it has written its second checkpoint or its second after those found, and a little longer."""

    def last():
        return max(map(step_of, cwd.glob("runs/*/checkpoint_*.pt")), default=-interval)

    interval = 512 // SCALE[script]
    goal = last() + 2 * interval
    run = Run(script, *argv, cwd=cwd)
    wait_for(lambda: last() >= goal)
    time.sleep(random.uniform(0, 0.04 * SCALE[script]))
    run.kill()
    assert run.wait().status == -9


def test_killed_before_the_first_checkpoint(call, tmp_path, script):
    kill = functools.partial(kill_in, "torch.save")
    assert Run(script, *SMALL[script], cwd=tmp_path, sabotage=kill).wait().status == -9
    result = call(script, "--resume", f"runs/{run_folder_in(tmp_path).name}")
    assert result.status == 2
    assert re.fullmatch(r"error: [^\n]*no checkpoint[^\n]*\n", result.stderr)


def test_killed_at_any_moment_again_and_again(tmp_path, reference, script):
    argv = SMALL[script]
    for _ in range(4):
        live_and_be_killed(script, argv, tmp_path)
        argv = ["--resume", f"runs/{run_folder_in(tmp_path).name}"]
    result = Run(script, *argv, cwd=tmp_path).wait()
    assert (result.status, result.stderr) == (0, "")
    assert_same_run(run_folder_in(tmp_path), reference)


def test_a_half_written_point_at_the_end_of_the_log(call, interrupted, reference, script):
    name, run_folder = interrupted
    (log,) = run_folder.glob("events.out.tfevents.*")
    log.write_bytes(log.read_bytes()[:-11])
    assert call(script, "--resume", name).status == 0
    assert_same_run(run_folder, reference)


# Signals


@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_one_line(call, tmp_path, reference, script, signum, status):
    run = Run(script, *SMALL[script], cwd=tmp_path)
    wait_for(lambda: [*tmp_path.glob(f"runs/*/checkpoint_{1024 // SCALE[script]}.pt")])
    run.kill(signum)
    sent = time.monotonic()
    result = run.wait()
    assert time.monotonic() - sent < 2
    run_folder = run_folder_in(tmp_path)
    resume = f"--resume runs/{run_folder.name}"
    assert result.status == status
    assert re.fullmatch(rf"interrupted; [^\n]*{checkpoints(run_folder)[-1].name}[^\n]* {resume}", result.stderr.strip())
    assert not list(run_folder.glob("*.tmp"))
    assert call(script, *resume.split()).status == 0
    assert_same_run(run_folder, reference)


def signal_in_a_callback():
    """Called in the run's process: SIGINT arrives in a callback of the garbage collector, which drops exceptions."""
    sent = []

    def callback(phase, info):
        if not sent and [*Path().glob("runs/*/checkpoint_*.pt")]:
            sent.append(phase)
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    gc.set_threshold(100)


def test_a_signal_is_not_lost_in_a_callback(tmp_path, script):
    result = Run(script, *SMALL[script], cwd=tmp_path, sabotage=signal_in_a_callback).wait()
    assert result.status == 130
    assert re.fullmatch(r"interrupted; [^\n]* --resume [^\n]*\n", result.stderr)


def test_a_second_signal_changes_nothing(tmp_path, script):
    """Launchers pass a Ctrl-C on to a program that the terminal has sent it to already."""
    run = Run(script, *SMALL[script], cwd=tmp_path)
    wait_for(lambda: [*tmp_path.glob(f"runs/*/checkpoint_{1024 // SCALE[script]}.pt")])
    for _ in range(3):
        with contextlib.suppress(ProcessLookupError):  # the first may have ended it already
            run.kill(signal.SIGINT)
        time.sleep(0.003)
    result = run.wait()
    assert result.status == 130
    assert re.fullmatch(r"interrupted; [^\n]*", result.stderr.strip())


# Damage


def damage(path, how):
    data = path.read_bytes()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(data[:-1000])
    elif how == "garbage":
        path.write_bytes(random.Random(0).randbytes(len(data)))
    elif how == "a flipped bit":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        state = load(path)
        if how == "another script's":
            state["script"] = "another"
        elif how == "another environment's":
            state["args"]["env_id"] = "Another-v1"
        torch.save(state, path)


@pytest.mark.parametrize(
    "how", ["empty", "truncated", "garbage", "a flipped bit", "another script's", "another environment's"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(call, interrupted, reference, script, how):
    name, run_folder = interrupted
    before, newest = checkpoints(run_folder)
    damage(newest, how)
    result = call(script, "--resume", name)
    assert result.status == 0
    assert re.fullmatch(rf"note: [^\n]*{newest.name}[^\n]*{before.name}[^\n]*\n", result.stderr)
    assert_same_run(run_folder, reference)


@pytest.mark.parametrize("text", ["{", "[]", '{"lr": 1}', "null"])
def test_an_args_json_of_something_else_says_nothing(killed, tmp_path, script, text):
    module = pkgutil.resolve_name(script)
    (path := tmp_path / "checkpoint_1.pt").write_bytes(checkpoints(killed)[-1].read_bytes())
    (tmp_path / "args.json").write_text(text)
    assert module.read_checkpoint(path)["global_step"] == load(path)["global_step"]


def test_no_sound_checkpoint_is_a_wrong_call(call, interrupted, tmp_path, script):
    name, run_folder = interrupted
    before, newest = checkpoints(run_folder)
    damage(before, "truncated")
    damage(newest, "a flipped bit")
    files = files_below(tmp_path)
    for flag in ("--resume", "--evaluate"):
        result = call(script, flag, name)
        assert (result.status, result.stdout) == (2, "")
        assert re.fullmatch(r"error: [^\n]+\n", result.stderr)
        assert before.name in result.stderr and newest.name in result.stderr
    assert files_below(tmp_path) == files


def test_no_flipped_bit_is_loaded(killed, tmp_path, script):
    """A flip either is noticed or does not matter (padding)."""
    module = pkgutil.resolve_name(script)
    data, sound = checkpoints(killed)[-1].read_bytes(), load(checkpoints(killed)[-1])
    path, noticed = tmp_path / "checkpoint_1.pt", 0
    positions = random.Random(0).sample(range(len(data)), 100)
    for position in positions:
        path.write_bytes(data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :])
        try:
            assert_identical(module.read_checkpoint(path), sound)
        except ValueError as error:
            assert path.name in str(error)
            noticed += 1
    assert noticed > 0.7 * len(positions)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_no_code_in_a_checkpoint_is_run(call, interrupted, tmp_path, reference, script):
    name, run_folder = interrupted
    newest = checkpoints(run_folder)[-1]
    torch.save({**load(newest), "recent_returns": Bomb()}, newest)
    result = call(script, "--evaluate", f"{name}/{newest.name}")
    assert result.status == 2 and newest.name in result.stderr
    result = call(script, "--resume", name)
    assert result.status == 0 and result.stderr.startswith("note: ")
    assert not (tmp_path / "exploded").exists()
    assert_same_run(run_folder, reference)


def test_other_files_in_the_run_folder(call, interrupted, reference, script):
    name, run_folder = interrupted
    strange = ["checkpoint_3072.tmp", "checkpoint_best.pt", "checkpoint_.pt", "notes.txt"]
    for file in strange:
        (run_folder / file).write_text("mine")
    result = call(script, "--resume", name)
    assert (result.status, result.stderr) == (0, "")
    for file in strange[1:]:
        assert (run_folder / file).read_text() == "mine"
        (run_folder / file).unlink()
    assert_same_run(run_folder, reference)


# A full disk


def test_a_disk_full_from_the_start(tmp_path, script):
    result = Run(script, *SMALL[script], cwd=tmp_path, sabotage=fill_disk).wait()
    assert result.status == 1
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr)
    assert not checkpoints(run_folder_in(tmp_path)) and not list(tmp_path.rglob("*.tmp"))


def test_a_disk_that_fills_up(call, tmp_path, reference, script):
    result = Run(
        script, *SMALL[script], cwd=tmp_path, sabotage=functools.partial(fill_disk, 2048 // SCALE[script])
    ).wait()
    run_folder = run_folder_in(tmp_path)
    resume = f"--resume runs/{run_folder.name}"
    assert result.status == 1
    kept = [f"checkpoint_{step // SCALE[script]}.pt" for step in (1536, 2048)]
    assert re.fullmatch(rf"error: [^\n]*{kept[1]}[^\n]* {resume}\n", result.stderr)
    assert [path.name for path in checkpoints(run_folder)] == kept
    assert not list(run_folder.glob("*.tmp"))
    result = call(script, *resume.split())
    assert (result.status, result.stderr) == (0, "")
    assert_same_run(run_folder, reference)


def test_resuming_on_a_full_disk_spoils_nothing(call, interrupted, tmp_path, reference, script):
    name, run_folder = interrupted
    result = Run(script, "--resume", name, cwd=tmp_path, sabotage=fill_disk).wait()
    assert result.status == 1
    last = f"checkpoint_{2560 // SCALE[script]}.pt"
    assert re.fullmatch(rf"error: [^\n]*{last}[^\n]* --resume {name}\n", result.stderr)
    result = call(script, "--resume", name)
    assert (result.status, result.stderr) == (0, "")
    assert_same_run(run_folder, reference)


def test_numbers_that_explode(call, tmp_path, script):
    result = call(script, *SMALL[script], "--learning-rate", "1e30")
    run_folder = run_folder_in(tmp_path)
    assert result.status == 1
    assert re.fullmatch(r"error: [^\n]*not finite[^\n]*checkpoint_0.pt[^\n]*\n", result.stderr)
    assert [path.name for path in checkpoints(run_folder)] == ["checkpoint_0.pt"]
    assert all(parameter.isfinite().all() for parameter in load(run_folder / "checkpoint_0.pt")["agent"].values())


# Resuming what was not interrupted, and with other flags


def test_resuming_a_finished_run_evaluates_again(call, tmp_path, reference, script):
    name = copy_run(reference, tmp_path)
    first, again = (call(script, "--resume", name) for _ in range(2))
    assert (first.status, first.stderr) == (0, "")
    assert first == again and "evaluation: " in first.stdout
    assert_same_run(tmp_path / name, reference)


def test_a_finished_run_goes_on_with_more_steps(call, tmp_path, reference, script):
    name = copy_run(reference, tmp_path)
    before, end, batch = (steps // SCALE[script] for steps in (4736, 5120, 128))
    result = call(script, "--resume", name, "--total-timesteps", str(end))
    assert result.status == 0
    assert re.fullmatch(rf"note: [^\n]*total_timesteps {before} -> {end}[^\n]*\n", result.stderr)
    run_folder = tmp_path / name
    assert [step_of(path) for path in checkpoints(run_folder)] == [before, end]
    assert json.loads((run_folder / "args.json").read_text())["total_timesteps"] == end
    old, new = scalars(reference), scalars(run_folder)
    for tag, points in old.items():
        if tag != "eval/episodic_return":
            assert new[tag][: len(points)] == points
    assert [step for step, _ in new["charts/learning_rate"]] == list(range(batch, end + 1, batch))
    assert [step for step, _ in new["eval/episodic_return"]] == [end]


def test_changed_flags_are_said(call, interrupted, script):
    name, run_folder = interrupted
    result = call(script, "--resume", name, "--learning-rate", "2e-4", "--gamma", "0.9", "--exp-name", script)
    assert result.status == 0
    assert re.fullmatch(r"note: [^\n]*\n", result.stderr)
    for words in ("learning_rate", "0.0002", "gamma 0.99 -> 0.9"):
        assert words in result.stderr
    for words in ("resume", "exp_name", "seed"):
        assert words not in result.stderr
    assert load(checkpoints(run_folder)[-1])["args"]["gamma"] == 0.9


# Where runs with other batches, killed at 2560 / SCALE, end: at the first multiple from 4736 / SCALE on
BATCHES = {
    "ppo_continuous": {"--num-envs 4": 4864, "--num-steps 32": 4736},
    "a2c_atari": {"--num-envs 4": 304, "--num-steps 2": 296},
    "dqn_per_atari": {"--num-envs 4 --no-checkpoint-replay": 304, "--num-steps 2": 296},
}


def test_going_on_with_another_batch_ends_at_the_same_step(call, killed, tmp_path, script):
    for flags, last in BATCHES[script].items():
        name = copy_run(killed, tmp_path)
        assert call(script, "--resume", name, *flags.split()).status == 0
        assert step_of(checkpoints(tmp_path / name)[-1]) == last
        assert max(step for step, _ in scalars(tmp_path / name)["charts/SPS"]) == last
        shutil.rmtree(tmp_path / name)


# Weights and Biases


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


def test_tracking_has_each_point_once_also_after_a_kill(tmp_path, script):
    argv = [*SMALL[script], "--total-timesteps", str(1536 // SCALE[script]), "--track"]
    env = {"WANDB_MODE": "offline"}
    result = Run(script, *argv, cwd=tmp_path, env=env, sabotage=killer(script, "os.replace", 512)).wait()
    assert result == Result(-9, result.stdout, "")
    run_folder = run_folder_in(tmp_path)
    # W&B takes every log of the second in which it starts for its own. A program takes longer than that to start
    wait_for(lambda: time.time() >= 1 + max(int(log.name.split(".")[3]) for log in run_folder.glob("events.*")))
    result = Run(script, "--resume", f"runs/{run_folder.name}", cwd=tmp_path, env=env).wait()
    assert (result.status, result.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    (path,) = run_folder.rglob("*.wandb")
    tracked = {point: values for point, values in history(path).items() if "/" in point[0]}
    tracked = {point: values for point, values in tracked.items() if not point[0].startswith("charts/priorities")}
    # Two episodes may end at one step: W&B keeps the last
    logged = {
        (tag, step): [pytest.approx(value)] for tag, points in scalars(run_folder).items() for step, value in points
    }
    assert tracked == logged


def test_new_arguments_outlive_a_kill_before_the_next_checkpoint(call, finished, tmp_path, monkeypatch, script):
    """And a newest checkpoint that is damaged is put aside: it is not named as a good one, nor one of the two kept."""
    name = copy_run(finished[1], tmp_path)
    sound, damaged = checkpoints(tmp_path / name)
    before = load(sound)
    damaged.write_bytes(b"damaged")
    seen = []
    monkeypatch.setattr(importlib.import_module(script), "train", lambda args, *_: seen.append(args))  # no step of it
    for flags in (["--gamma", "0.5", "--total-timesteps", "99999"], []):
        assert call(script, "--resume", name, *flags).status == 0
    assert [(args.gamma, args.total_timesteps) for args in seen] == [(0.5, 99999)] * 2
    assert checkpoints(tmp_path / name) == [sound] and damaged.with_suffix(".damaged").exists()
    assert str(load(sound)) == str(before | {"args": before["args"] | {"gamma": 0.5, "total_timesteps": 99999}})


def test_the_line_that_resumes_can_be_pasted(tmp_path, script):
    module = importlib.import_module(script)
    folder = tmp_path / "two words"
    folder.mkdir()
    (folder / "checkpoint_512.pt").touch()
    words = shlex.split(module.how_to_resume(folder).split("resume with: ")[1])
    assert words[-2:] == ["--resume", str(folder)]
