"""Several processes (ranks) of A2C: what one process would do.

Most runs here are two processes that find each other by the variables that torchrun sets. What torchrun itself does
(ending all when one dies, starting again) is tested with torchrun.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, Run, assert_identical, checkpoints, comparable, curves, load, processes_of, wait_for

import a2c_atari as a2c

A2C = """--env-id BreakoutNoFrameskip-v4 --log-interval 1 --eval-episodes 2 --num-envs 4 --num-steps 4 --no-cuda
    --total-timesteps 320 --checkpoint-interval 128 --torch-threads 1 --env-threads 1 --conv3-filters 4
    --run-folder run""".split()


def keep_parts():
    """Have what the rank's parts are at the end written to rank{R}.pt."""
    share, parts_of_run = a2c.share, {}

    def share_and_keep(parts, global_step):
        parts_of_run.update(parts)
        return share(parts, global_step)

    def train_and_write(*args, train=a2c.train):
        train(*args)
        states = {name: part.state_dict() for name, part in parts_of_run.items()}
        torch.save(states, f"rank{os.environ['RANK']}.pt")

    a2c.share, a2c.train = share_and_keep, train_and_write


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start(ranks, cwd, *flags, sabotage=keep_parts):
    """Processes that join each other, as torchrun starts them."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)}
    group |= {"TORCHELASTIC_RUN_ID": None if ranks == 1 else "test", "TORCHELASTIC_RESTART_COUNT": "0"}
    cwd.mkdir(exist_ok=True)
    ranks = [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [Run("a2c_atari", *A2C, *flags, cwd=cwd, sabotage=sabotage, env=env) for env in ranks]


def finish(runs):
    results = [run.wait() for run in runs]
    assert [result.status for result in results] == [0] * len(runs), results
    return results


def parts(cwd, rank=0):
    return torch.load(cwd / f"rank{rank}.pt", weights_only=False)


def largest_difference(a, b):
    """Between tensors of the same place in two nested dicts."""
    if isinstance(a, torch.Tensor):
        return (a.double() - b.double()).abs().max().item()
    return max((largest_difference(a[key], b[key]) for key in a), default=0) if isinstance(a, dict) else 0


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of a run of two ranks, and what both said."""

    cwd = tmp_path_factory.mktemp("two")
    return cwd, finish(start(2, cwd))


# Two ranks


def test_ranks_end_with_the_same_parts_and_the_first_alone_writes(two):
    cwd, (first, second) = two
    assert_identical(parts(cwd, 1), parts(cwd, 0))
    assert "evaluation: " in first.stdout and second.stdout == "" and "steps/s" not in second.stderr
    assert len(list((cwd / "run").glob("*tfevents*"))) == 1
    last = load(checkpoints(cwd / "run")[-1])
    assert_identical({name: last[name] for name in parts(cwd)}, parts(cwd))
    assert last["global_step"] == 320


def test_two_ranks_of_a2c_are_one_process(two, tmp_path):
    """The same episodes, and the same parameters to rounding."""
    cwd, _ = two
    finish(start(1, tmp_path))
    assert largest_difference(parts(tmp_path)["agent"], parts(cwd)["agent"]) < 1e-6
    assert largest_difference(parts(tmp_path)["agent"], load(checkpoints(cwd / "run")[0])["agent"]) > 1e-5


def keep_actions():
    """Have the actions and the seeds that each rank plays written to actions{first}.npy and seeds{first}.npy."""
    step, reset, played, seeds = a2c.AtariEnvs.step, a2c.AtariEnvs.reset, [], []

    def step_and_keep(envs, actions):
        result = step(envs, actions)
        if envs.name == "training":
            played.append(actions)
            np.save(f"actions{envs.first}.npy", played)
        return result

    def reset_and_keep(envs, *key):
        obs = reset(envs, *key)
        if envs.name == "training":
            seeds.append(envs.seeds)
            np.save(f"seeds{envs.first}.npy", seeds)
        return obs

    a2c.AtariEnvs.step, a2c.AtariEnvs.reset = step_and_keep, reset_and_keep


def test_each_environment_plays_what_it_would_play_in_one_process(tmp_path):
    for ranks in (1, 2, 4):
        finish(start(ranks, tmp_path / str(ranks), "--learning-rate", "1e-30", sabotage=keep_actions))
    for what in ("actions", "seeds"):
        whole = np.load(tmp_path / "1" / f"{what}0.npy")
        assert len(np.unique(whole[:, 0])) > 1 and whole.shape[1] == 4
        for ranks in (2, 4):
            shares = [np.load(tmp_path / str(ranks) / f"{what}{first}.npy") for first in range(0, 4, 4 // ranks)]
            np.testing.assert_array_equal(np.concatenate(shares, axis=1), whole)


def count_messages():
    all_reduce, sizes = dist.all_reduce, []

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        Path(f"messages{dist.get_rank()}").write_text(" ".join(map(str, sizes)))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted


def test_a2c_sends_one_message_an_update(tmp_path):
    finish(start(2, tmp_path, sabotage=count_messages))
    parameters = sum(tensor.numel() for tensor in load(tmp_path / "run" / "model.pt")["agent"].values())
    for rank in range(2):
        assert (tmp_path / f"messages{rank}").read_text().split() == [str(parameters)] * (320 // 16)


# Other parameters, other numbers


def start_elsewhere():
    """As if the initialisation of the second rank's machine gave other numbers."""
    if os.environ["RANK"] == "1":
        torch.manual_seed = lambda seed, manual_seed=torch.manual_seed: manual_seed(seed + 1)
    keep_parts()


def test_ranks_begin_with_the_parameters_of_the_first(two, tmp_path):
    cwd, _ = two
    finish(start(2, tmp_path, sabotage=start_elsewhere))
    for rank in range(2):
        assert_identical(parts(tmp_path, rank), parts(cwd))


def test_what_cannot_be_divided_is_refused(tmp_path):
    for run in start(2, tmp_path, "--num-envs", "3"):
        result = run.wait()
        assert result.status == 1 and "3 environments cannot be divided among 2 processes" in result.notes[-1]
        assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("run/*"))


# Resuming


def kill_after_a_checkpoint():
    def save_checkpoint(run, *args, save=a2c.Run.save_checkpoint):
        save(run, *args)
        if len(checkpoints(run.folder)) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    a2c.Run.save_checkpoint = save_checkpoint


def test_a_run_that_lost_a_rank_is_continued_to_the_bit_by_as_many(two, tmp_path):
    cwd, _ = two
    killed, survivor = start(2, tmp_path, sabotage=kill_after_a_checkpoint)
    assert killed.wait().status == -signal.SIGKILL
    assert survivor.wait().status == 1  # nobody answers it
    finish(start(2, tmp_path))
    for mine, reference in zip(checkpoints(tmp_path / "run"), checkpoints(cwd / "run"), strict=True):
        assert_identical(comparable(load(mine)), comparable(load(reference)))
    assert curves(tmp_path / "run") == curves(cwd / "run")


def test_one_process_continues_what_two_began(two, tmp_path):
    cwd, _ = two
    for run in start(2, tmp_path, sabotage=kill_after_a_checkpoint):
        run.wait()
    finish(start(1, tmp_path))
    assert largest_difference(parts(tmp_path)["agent"], parts(cwd)["agent"]) < 1e-6


# torchrun


def torchrun(cwd, *flags, restarts=0):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "--local-ranks-filter", "0"]
    command += [str(ROOT / "a2c_atari.py"), *A2C, *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=cwd, start_new_session=True, env=env, **pipes)


def ranks_of(process):
    """The processes of the ranks, in order."""
    ranks = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().decode().split("\0")
            parent = re.search(r"PPid:\t(\d+)", (path / "status").read_text())[1]
        except OSError:
            continue
        if parent == str(process.pid):
            ranks |= {int(each[5:]): int(path.name) for each in variables if each.startswith("RANK=")}
    return ranks


@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_ends_all_when_a_rank_is_killed_or_begins_again(two, tmp_path, restarts):
    process = torchrun(tmp_path, "--total-timesteps", "1600", restarts=restarts)
    try:
        wait_for(lambda: len(list(tmp_path.glob("run/checkpoint_*"))) == 2, seconds=120)
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert not processes_of(process.pid)
    if restarts:
        assert process.returncode == 0 and "evaluation: " in stdout, stderr
        assert load(tmp_path / "run" / "model.pt")["global_step"] == 1600
        assert int(re.findall(r"(\d+)/1600 \[00:00<\?", stderr)[-1]) >= 128  # where the second start began
    else:
        assert process.returncode == 1
        assert "failed (exitcode: -9) local_rank: 1" in stderr  # torchrun says who
