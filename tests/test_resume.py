"""Exact resume: whatever ends a run, resuming it gives the checkpoint and the curves of the run that nothing ended.

"Nothing" is one run per script, by `python script.py` in a process of its own. Kills are real: SIGKILL to a process.
What only tests text that all scripts share goes through PPO, the quickest of them.
"""

import functools
import importlib
import json
import math
import os
import random
import resource
import shlex
import shutil
import signal
import threading
import time
import zipfile

import numpy as np
import pytest
import torch
from conftest import (
    SMALL,
    Run,
    assert_identical,
    assert_same_run,
    checkpoints,
    copy_run,
    curves,
    exists,
    files_below,
    kill_in,
    load,
    run_folder_in,
    scalars,
    step_of,
    wait_for,
)

PPO = "ppo_continuous"
ppo_only = pytest.mark.parametrize("script", [PPO], indirect=True, scope="session")


def interval(script):
    return int(SMALL[script][SMALL[script].index("--checkpoint-interval") + 1])


def total(script):
    return int(SMALL[script][SMALL[script].index("--total-timesteps") + 1])


@pytest.fixture
def reference(finished):
    """The folder of the run that nothing ended, for reading only."""
    return finished[1]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run of PPO that was killed between its fourth and fifth checkpoint, for copying."""
    cwd = tmp_path_factory.mktemp("killed")
    kill = functools.partial(kill_in, "os.replace", 3 * interval(PPO))
    assert Run(PPO, *SMALL[PPO], cwd=cwd, sabotage=kill).wait().status == -9
    return run_folder_in(cwd)


@pytest.fixture
def interrupted(killed, tmp_path):
    """A copy of `killed` in this test's folder: its path as the command line takes it, and as it is."""
    name = copy_run(killed, tmp_path)
    return name, tmp_path / name


def resumed(script, *argv, cwd, **options):
    """A process that resumes a run; it begins in another second than the one before it.

    TensorBoard orders the logs of a run by the second of their creation and then by the process's number.
    """
    logs = [int(log.name.split(".")[3]) for log in cwd.rglob("events.*")]
    wait_for(lambda: time.time() >= 1 + max(logs, default=0))
    return Run(script, *argv, cwd=cwd, **options)


# The uninterrupted run


def test_the_same_seed_gives_the_same_run_and_another_does_not(call, tmp_path, reference, script):
    assert call(script, *SMALL[script]).status == 0
    assert_same_run(run_folder_in(tmp_path), reference)
    shutil.rmtree(tmp_path / "runs")
    assert call(script, *SMALL[script], "--seed", "2", "--total-timesteps", str(interval(script))).status == 0
    other, one = run_folder_in(tmp_path), load(reference / "model.pt")
    assert not any(torch.equal(load(other / "model.pt")["agent"][name], tensor) for name, tensor in weights(one))
    assert json.loads((other / "result.json").read_text())["seconds"] > 0


def weights(model):
    """The matrices of a model; vectors begin at zero."""
    return [(name, tensor) for name, tensor in model["agent"].items() if tensor.dim() > 1]


def test_the_last_two_checkpoints_are_kept(reference, script):
    before, last = map(step_of, checkpoints(reference))
    assert last == load(reference / "model.pt")["global_step"] >= total(script) > before
    assert last - before <= interval(script) and not list(reference.glob("*.tmp"))


@pytest.mark.parametrize("script", [PPO, "a2c_atari", "dqn_per_atari", "qmix_smac"], indirect=True, scope="session")
def test_random_numbers_begin_anew_at_each_checkpoint_and_do_not_repeat(call, monkeypatch, script):
    make, keys = np.random.default_rng, []
    monkeypatch.setattr("numpy.random.default_rng", lambda key: keys.append(key) or make(key))
    assert call(script, *SMALL[script], "--seed", "3").status == 0
    seeds, steps = zip(*(key for key in keys if len(key) == 2))  # the evaluation's key has a third part
    assert set(seeds) == {3} and len(steps) == math.ceil(total(script) / interval(script))
    assert steps[0] == 0 and all(0 <= step - k * interval(script) < 130 for k, step in enumerate(steps))


# Kills


def half_write(step):
    """Have the process killed while a checkpoint is half written, once another exists."""

    def save(content, path):
        original(content, path)
        if exists(step):
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    original, torch.save = torch.save, save


STEP, END = interval(PPO), total(PPO)
POINT = "torch.utils.tensorboard.SummaryWriter.add_scalar"
LIVES = [  # of one run, each ended by a kill; the next one continues
    functools.partial(half_write, 0),
    functools.partial(kill_in, "os.replace", STEP),  # before a checkpoint gets its name (the first is for args.json)
    functools.partial(kill_in, "os.replace", STEP, 2),
    functools.partial(kill_in, "os.replace", STEP, 2, True),
    functools.partial(kill_in, POINT),  # at once
    functools.partial(kill_in, POINT, 2 * STEP, 15),
    functools.partial(kill_in, "pathlib.Path.unlink", 3 * STEP),  # of an old checkpoint
    functools.partial(kill_in, f"{PPO}.Environments.step", 4 * STEP, 64),
    functools.partial(kill_in, f"{PPO}.Environments.step", 4 * STEP, 64 + 100),  # in the evaluation
    functools.partial(kill_in, f"{PPO}.evaluate", 4 * STEP, 1, True),
    functools.partial(kill_in, "os.replace", 4 * STEP, 3),  # before the last checkpoint gets its name
    functools.partial(kill_in, "os.replace", END),  # before the model gets its name
    functools.partial(kill_in, "os.replace", END, 3),  # before the result gets its name
]


@ppo_only
def test_killed_at_certain_moments(tmp_path, reference, script):
    """The next life continues with --resume or --run-folder, by turns."""
    calls = [[*SMALL[PPO], "--run-folder", "runs/mine"], ["--resume", "runs/mine"]]
    for name in ("torch.save", "os.replace"):  # before the first checkpoint: the same command begins anew
        kill = functools.partial(kill_in, name)
        assert resumed(PPO, *calls[0], cwd=tmp_path, sabotage=kill).wait().status == -9
    for i, moment in enumerate(LIVES):
        assert resumed(PPO, *calls[i % 2], cwd=tmp_path, sabotage=moment).wait().status == -9, moment
    result = resumed(PPO, *calls[1], cwd=tmp_path).wait()
    assert (result.status, result.notes) == (0, [])
    assert_same_run(tmp_path / "runs" / "mine", reference)


def test_killed_before_the_first_checkpoint(call, tmp_path):
    kill = functools.partial(kill_in, "torch.save")
    assert Run(PPO, *SMALL[PPO], cwd=tmp_path, sabotage=kill).wait().status == -9
    folder = f"runs/{run_folder_in(tmp_path).name}"
    result = call(PPO, "--resume", folder)
    assert (result.status, result.notes) == (1, [f"error: no sound checkpoint in {folder}"])


@ppo_only
def test_points_from_before_the_first_checkpoint_are_logged_again(tmp_path, monkeypatch, script):
    """Such as those of QMIX's test at step 0, where the run was killed between that and its first checkpoint."""
    ppo = importlib.import_module(script)
    monkeypatch.setattr("fcntl.flock", lambda *_: None)  # the lock of a run ends with its process
    for value in (1.0, 2.0):
        run = ppo.Run(ppo.Args(), tmp_path, None, {}, 10)
        run.log(0, {"eval/episodic_return": value})
        run.writer.close()
        run.bar.close()
    assert [point[1] for point in curves(tmp_path)["eval/episodic_return"]] == [2.0]


def test_killed_at_any_moment_again_and_again(tmp_path, reference, script):
    """Each life lasts until a checkpoint more is written, and a random while longer."""
    argv = [*SMALL[script], "--run-folder", "runs/mine"]
    for _ in range(3 if script == PPO else 2):
        goal = max(map(step_of, tmp_path.rglob("checkpoint_*.pt")), default=-1) + 1
        run = resumed(script, *argv, cwd=tmp_path)
        reached = lambda: max(map(step_of, tmp_path.rglob("checkpoint_*.pt")), default=-1) >= goal  # noqa: B023, E731
        wait_for(lambda: reached() or not run.process.is_alive())  # noqa: B023  it may have ended before
        time.sleep(random.uniform(0, 0.2))
        run.kill()
        assert run.wait().status in (-9, 0) and run.leaves_no_orphan()
    result = resumed(script, *argv, cwd=tmp_path).wait()
    assert (result.status, result.notes) == (0, [])
    assert_same_run(tmp_path / "runs" / "mine", reference)


# Signals


@ppo_only
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_one_line(tmp_path, reference, script, signum):
    ignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as shells do in the background
    run = Run(PPO, *SMALL[PPO], cwd=tmp_path, sabotage=ignore)
    wait_for(lambda: [*tmp_path.rglob(f"checkpoint_*{2 * STEP}.pt")])
    run.kill(signum)
    result = run.wait()
    folder = f"runs/{run_folder_in(tmp_path).name}"
    assert result.status == 130 and run.leaves_no_orphan()
    assert result.notes == [f"interrupted; continue with: python {PPO}.py --resume {folder}"]
    command = shlex.split(result.notes[0].partition("python ")[2])
    assert resumed(*(word.removesuffix(".py") for word in command), cwd=tmp_path).wait().status == 0
    assert_same_run(tmp_path / folder, reference)


def test_a_signal_before_the_first_checkpoint_promises_nothing(tmp_path):
    kill = functools.partial(kill_in, "torch.save")
    assert Run(PPO, *SMALL[PPO], cwd=tmp_path, sabotage=kill).wait().status == -9
    result = Run(PPO, *SMALL[PPO], cwd=tmp_path, sabotage=interrupt_in_save).wait()
    assert (result.status, result.notes) == (130, ["interrupted"])


def interrupt_in_save():
    torch.save = lambda *_: os.kill(os.getpid(), signal.SIGINT)


@ppo_only
def test_ctrl_c_while_a_checkpoint_is_written_is_not_lost(tmp_path, script):
    """Whenever it comes: `main` has an answer to KeyboardInterrupt, to torch's own error it has none."""
    module, path = importlib.import_module(script), tmp_path / "checkpoint.pt"
    content = {str(i): torch.zeros(100_000) for i in range(100)}  # 40 MB
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
    started = time.monotonic()
    module.write_file(path, content)
    seconds, interrupts = time.monotonic() - started, 0
    for k in range(10):
        timer = threading.Timer(0.01 + seconds * k / 10, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            time.sleep(0.01)
            module.write_file(path, content)
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            interrupts += 1
        assert set(load(path)) == set(content)
    signal.signal(signal.SIGINT, before)
    assert interrupts == 10


# Damage


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


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
    elif how == "an entry marked as a folder":  # torch.load reads nothing into its tensor
        with zipfile.ZipFile(path) as archive:
            position = archive.start_dir
        for _ in range(5):
            position = data.index(b"PK\x01\x02", position + 1)
        path.write_bytes(data[: position + 38] + bytes([data[position + 38] ^ 16]) + data[position + 39 :])
    else:
        content = {"another script's": {"script": "another"}, "code": {"rng": Bomb()}, "no state": None}[how]
        torch.save(load(path) | content if content else [PPO], path)


KINDS = ["empty", "truncated", "garbage", "a flipped bit", "an entry marked as a folder", "another script's", "code"]


@pytest.mark.parametrize("how", [*KINDS, "no state"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(interrupted, monkeypatch, capfd, tmp_path, how):
    monkeypatch.chdir(tmp_path)
    module, (_, folder) = importlib.import_module(PPO), interrupted
    before, newest = checkpoints(folder)
    assert_identical(module.load_checkpoint(folder), load(newest))
    damage(newest, how)
    assert_identical(module.load_checkpoint(folder), load(before))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"note: {newest} is damaged or no checkpoint of this {PPO}.py")
    before.unlink()
    with pytest.raises(SystemExit, match=r"^error: no sound checkpoint in \S*$"):
        module.load_checkpoint(folder)
    assert not (tmp_path / "exploded").exists()


@ppo_only
def test_a_run_goes_on_from_the_checkpoint_before(interrupted, tmp_path, reference, script):
    name, folder = interrupted
    _, newest = checkpoints(folder)
    damage(newest, "a flipped bit")
    result = resumed(PPO, "--resume", name, cwd=tmp_path).wait()
    assert result.status == 0 and len(result.notes) == 1 and newest.name in result.notes[0]
    assert_same_run(folder, reference)


def test_no_sound_checkpoint_is_a_wrong_call(call, interrupted, tmp_path):
    name, folder = interrupted
    for path in checkpoints(folder):
        damage(path, "truncated")
    files = files_below(tmp_path)
    for argv in (["--resume", name], ["--evaluate", name], [*SMALL[PPO], "--run-folder", name]):
        result = call(PPO, *argv)
        assert (result.status, result.stdout, result.notes[-1]) == (1, "", f"error: no sound checkpoint in {name}")
        assert len(result.notes) == 3
    assert files_below(tmp_path) == files


@ppo_only
def test_no_flipped_bit_is_loaded(reference, tmp_path, script):
    """A flip either is noticed or does not matter (padding). Half of them hit the archive's directory."""
    module, path = importlib.import_module(PPO), tmp_path / "model.pt"
    data, sound, draw = (reference / "model.pt").read_bytes(), load(reference / "model.pt"), random.Random(0)
    with zipfile.ZipFile(reference / "model.pt") as archive:
        directory = archive.start_dir
    positions = [draw.randrange(len(data)) for _ in range(500)] + [draw.randrange(directory, len(data))
                                                                   for _ in range(500)]  # fmt: skip
    noticed = 0
    for position in positions:
        path.write_bytes(data[:position] + bytes([data[position] ^ 1 << draw.randrange(8)]) + data[position + 1 :])
        try:
            assert_identical(module.load_checkpoint(path), sound)
        except SystemExit:
            noticed += 1
    assert noticed > 0.5 * len(positions)


# Two processes, a full disk, numbers that explode


@ppo_only
def test_a_second_process_in_a_run_folder_ends_with_one_line(tmp_path, reference, script):
    argv = [*SMALL[PPO], "--run-folder", "runs/mine"]
    first = Run(PPO, *argv, cwd=tmp_path)
    wait_for(lambda: exists_in(tmp_path))
    first.kill(signal.SIGSTOP)
    second = Run(PPO, *argv, cwd=tmp_path).wait()
    assert (second.status, second.notes) == (1, ["error: another process is at work in runs/mine"])
    first.kill(signal.SIGCONT)
    assert first.wait().status == 0
    assert_same_run(tmp_path / "runs" / "mine", reference)


def exists_in(cwd):
    return [*cwd.rglob("checkpoint_*.pt")]


def fill_disk(step):
    """Let no file be written beyond 1000 bytes once a checkpoint exists. (Python ignores SIGXFSZ.)"""

    def replace(*args, **kwargs):
        original(*args, **kwargs)
        if exists(step):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    original, os.replace = os.replace, replace


@ppo_only
def test_a_full_disk_leaves_the_older_checkpoint(tmp_path, reference, script):
    result = Run(PPO, *SMALL[PPO], cwd=tmp_path, sabotage=functools.partial(fill_disk, STEP)).wait()
    assert result.status == 1
    folder = run_folder_in(tmp_path)
    assert [step_of(path) for path in checkpoints(folder)] == [0, STEP]
    result = resumed(PPO, "--resume", f"runs/{folder.name}", cwd=tmp_path).wait()
    assert (result.status, result.notes) == (0, [])
    assert_same_run(folder, reference)


def test_numbers_that_explode_are_not_saved(tmp_path, script):
    result = Run(script, *SMALL[script], "--learning-rate", "1e30", cwd=tmp_path).wait()
    assert result.status == 1 and "finite" in result.notes[-1]
    assert len(result.notes) == 1 or script == "a3c_atari"  # whose worker's traceback is shown
    (path,) = checkpoints(run_folder_in(tmp_path))
    assert step_of(path) == 0
    assert all(parameter.isfinite().all() for parameter in load(path)["agent"].values())


# Resuming what was not interrupted, and with other flags


@ppo_only
@pytest.mark.parametrize("flag", ["--resume", "--run-folder"])
def test_a_finished_run_evaluates_again_and_doubles_no_point(tmp_path, finished, script, flag):
    result, reference = finished
    name = copy_run(reference, tmp_path)
    for _ in range(2):
        again = resumed(PPO, *([] if flag == "--resume" else SMALL[PPO]), flag, name, cwd=tmp_path).wait()
        assert (again.status, again.notes) == (0, [])
        assert again.stdout.splitlines()[-1] == result.stdout.splitlines()[-1]
    assert_same_run(tmp_path / name, reference)


@ppo_only
def test_a_finished_run_goes_on_with_more_steps(tmp_path, reference, script):
    name, end = copy_run(reference, tmp_path), END + 3 * 128
    result = resumed(PPO, "--resume", name, "--total-timesteps", str(end), cwd=tmp_path).wait()
    assert (result.status, result.notes) == (0, [])
    folder = tmp_path / name
    assert [step_of(path) for path in checkpoints(folder)] == [END, end]
    assert json.loads((folder / "args.json").read_text())["total_timesteps"] == end
    assert json.loads((folder / "result.json").read_text())["global_step"] == end
    old, new = curves(reference), curves(folder)
    assert all(new[tag][: len(points)] == points for tag, points in old.items())
    assert [step for step, _ in new["charts/learning_rate"]] == list(range(128, end + 1, 128))
    assert [step for step, _ in new["eval/episodic_return"]] == [END, end]


# Batches of another size than those before, so that the run does not end at a multiple of it
OTHER_BATCH = {
    "a2c_atari": ("--num-envs", "3"),
    "dqn_per_atari": ("--num-steps", "5"),
    "qmix_smac": ("--num-envs", "3"),
}


@pytest.mark.parametrize("script", OTHER_BATCH, indirect=True, scope="session")
def test_the_last_point_is_logged_also_where_a_batch_has_another_size(tmp_path, reference, script):
    name, end = copy_run(reference, tmp_path), str(total(script) + 64)
    argv = ("--resume", name, *OTHER_BATCH[script], "--total-timesteps", end, "--log-interval", "1000000")
    assert resumed(script, *argv, cwd=tmp_path).wait().status == 0
    folder = tmp_path / name
    points, last = scalars(folder), step_of(checkpoints(folder)[-1])
    assert last >= int(end) and points["charts/learning_rate"][-1][0] == points["charts/SPS"][-1][0] == last


def test_flags_that_are_given_win_over_the_checkpoint(call, interrupted, monkeypatch):
    name, _ = interrupted
    seen = []
    monkeypatch.setattr(f"{PPO}.train", lambda args, *_: seen.append(args))
    assert call(PPO, "--resume", name, "--gamma", "0.5").status == 0
    assert call(PPO, *SMALL[PPO], "--run-folder", name, "--gamma", "0.5").status == 0
    for args in seen:
        assert (args.gamma, args.num_steps, args.env_id) == (0.5, 64, "Pendulum-v1")
