"""Several processes (ranks) of A2C and PPO: what one process would do (A2C), or what the method says (PPO).

Most runs here are two processes that find each other by the variables that torchrun sets. What torchrun itself does
(ending all when one dies, starting again) is tested with torchrun.
"""

import functools
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
import ppo_continuous as ppo

A2C = """--env-id BreakoutNoFrameskip-v4 --log-interval 1 --eval-episodes 2 --num-envs 4 --num-steps 4 --no-cuda
    --total-timesteps 320 --checkpoint-interval 128 --torch-threads 1 --env-threads 1 --conv3-filters 4
    --run-folder run""".split()
PPO = """--env-id Pendulum-v1 --num-envs 4 --num-steps 64 --num-minibatches 4 --update-epochs 2 --eval-episodes 2
    --total-timesteps 1536 --checkpoint-interval 512 --run-folder run""".split()
FLAGS = {"a2c_atari": A2C, "ppo_continuous": PPO}
every_script = pytest.mark.parametrize("script", list(FLAGS))


def keep_parts(module):
    """Have what the rank's parts are at the end written to rank{R}.pt."""
    share, parts_of_run = module.share, {}

    def share_and_keep(parts, global_step):
        parts_of_run.update(parts)
        return share(parts, global_step)

    def train_and_write(*args, train=module.train):
        train(*args)
        states = {name: module.state_of(part) for name, part in parts_of_run.items()}
        torch.save(states, f"rank{os.environ['RANK']}.pt")

    module.share, module.train = share_and_keep, train_and_write


def keep_all_parts():
    keep_parts(a2c)
    keep_parts(ppo)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start(script, ranks, cwd, *flags, sabotage=keep_all_parts):
    """Processes that join each other, as torchrun starts them."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)}
    group |= {"TORCHELASTIC_RUN_ID": None if ranks == 1 else "test", "TORCHELASTIC_RESTART_COUNT": "0"}
    cwd.mkdir(exist_ok=True)
    flags = [*FLAGS[script], *flags]
    return [
        Run(script, *flags, cwd=cwd, sabotage=sabotage, env=group | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


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

    @functools.cache
    def run(script):
        cwd = tmp_path_factory.mktemp(script)
        return cwd, finish(start(script, 2, cwd))

    return run


# Two ranks


@every_script
def test_ranks_end_with_the_same_parts_and_the_first_alone_writes(script, two):
    cwd, (first, second) = two(script)
    assert_identical(parts(cwd, 1), parts(cwd, 0))
    assert "evaluation: " in first.stdout and second.stdout == "" and "steps/s" not in second.stderr
    assert len(list((cwd / "run").glob("*tfevents*"))) == 1
    last = load(checkpoints(cwd / "run")[-1])
    assert_identical({name: last[name] for name in parts(cwd)}, parts(cwd))
    assert last["global_step"] == {"a2c_atari": 320, "ppo_continuous": 1536}[script]


def test_two_ranks_of_a2c_are_one_process(two, tmp_path):
    """The same episodes, and the same parameters to rounding."""
    cwd, _ = two("a2c_atari")
    finish(start("a2c_atari", 1, tmp_path))
    assert largest_difference(parts(tmp_path)["agent"], parts(cwd)["agent"]) < 1e-6
    assert largest_difference(parts(tmp_path)["agent"], load(checkpoints(cwd / "run")[0])["agent"]) > 1e-5
    assert parts(tmp_path)["rng"] == parts(cwd)["rng"]


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
        finish(start("a2c_atari", ranks, tmp_path / str(ranks), "--learning-rate", "1e-30", sabotage=keep_actions))
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
    finish(start("a2c_atari", 2, tmp_path, sabotage=count_messages))
    parameters = sum(tensor.numel() for tensor in load(tmp_path / "run" / "model.pt")["agent"].values())
    for rank in range(2):
        assert (tmp_path / f"messages{rank}").read_text().split() == [str(parameters)] * (320 // 16)


# The parts of PPO


def test_environments_are_seeded_by_their_place_among_all(tmp_path):
    args = ppo.Args(env_id="Pendulum-v1")

    def states(num_envs, first):
        envs = ppo.Environments(args, num_envs, tmp_path, first=first)
        envs.reset(0)
        return [tuple(env.unwrapped.state) for env in envs.envs]

    assert states(2, 0) + states(2, 2) == states(4, 0) and len(set(states(4, 0))) == 4


class Call:
    """A sabotage that runs a function of the rank, in joined processes, instead of the script."""

    def __init__(self, function, ranks):
        self.function, self.ranks = function, ranks

    def __call__(self):
        def main():
            ppo.join_ranks(ppo.Args(num_envs=self.ranks))
            self.function(dist.get_rank())

        ppo.main = main


ROWS = np.random.default_rng(3).normal(1e4, [1.0, 10.0, 0.1], (60, 3))
SHARES = [slice(0, 10), slice(10, 35), slice(35, 60)]  # before, and what each of two ranks counts after


def statistics_of(*shares):
    stats = ppo.RunningMeanStd((3,))
    for share in shares:
        for row in ROWS[share]:
            stats.update(row[None])
    return stats


def count_and_merge(rank):
    for name, before in (("from nothing", ()), ("from something", SHARES[:1])):
        old, stats = statistics_of(*before), statistics_of(*before, SHARES[1 + rank])
        ppo.merge((stats,), (old,))
        torch.save(stats.state_dict(), f"{name}{rank}.pt")


def test_merged_statistics_are_those_of_all_rows(tmp_path):
    finish(start("ppo_continuous", 2, tmp_path, sabotage=Call(count_and_merge, 2)))
    for name, shares in (("from nothing", SHARES[1:]), ("from something", SHARES)):
        rows = np.concatenate([ROWS[share] for share in shares])
        found = [load(tmp_path / f"{name}{rank}.pt") for rank in range(2)]
        assert_identical(found[1], found[0])
        assert found[0]["count"] == len(rows)
        np.testing.assert_allclose(found[0]["mean"], rows.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found[0]["m2"] / len(rows), rows.var(0), rtol=1e-6)


def one_minibatch_step(minibatch, traced):
    """theta after three steps on a minibatch, and the last metrics."""
    torch.manual_seed(1)
    args = ppo.Args(ent_coef=0.01)
    agent = ppo.Agent(5, 3)
    theta = torch.nn.utils.parameters_to_vector(agent.parameters()).detach()
    state = (theta, torch.zeros_like(theta), torch.zeros_like(theta), torch.zeros((), dtype=torch.int64))
    step = (
        ppo.accelerate(ppo.minibatch_step, agent, args)
        if traced
        else functools.partial(ppo.minibatch_step, agent, args)
    )
    for _ in range(3):
        metrics = step(*state, torch.tensor(1e-3, dtype=torch.float64), minibatch)
    return theta, metrics


def make_minibatch():
    rng = torch.Generator().manual_seed(2)
    obs, actions = (torch.randn(32, size, generator=rng) for size in (5, 3))
    logprobs, values, advantages, returns = (torch.randn(32, generator=rng) for _ in range(4))
    return obs, actions, logprobs - 4, values, 3 + 2 * advantages, returns


def step_on_a_half(rank):
    half = tuple(tensor[16 * rank : 16 * rank + 16] for tensor in make_minibatch())
    for traced in (False, True):
        theta, metrics = one_minibatch_step(half, traced)
        torch.save({"theta": theta, "kl": ppo.average(metrics["approx_kl"])}, f"{traced}{rank}.pt")


def test_a_minibatch_over_two_ranks_is_a_minibatch(tmp_path):
    """Its advantages are normalised over both; traced or not."""
    finish(start("ppo_continuous", 2, tmp_path, sabotage=Call(step_on_a_half, 2)))
    theta, metrics = one_minibatch_step(make_minibatch(), traced=False)
    for traced in (False, True):
        found = [load(tmp_path / f"{traced}{rank}.pt") for rank in range(2)]
        assert_identical(found[1], found[0])
        torch.testing.assert_close(found[0]["theta"], theta, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found[0]["kl"], metrics["approx_kl"])


def large_kl_on_the_second_rank():
    def ppo_loss(*args, ppo_loss=ppo.ppo_loss):
        loss, metrics = ppo_loss(*args)
        return loss, metrics | {"approx_kl": metrics["approx_kl"] + float(dist.get_rank() == 1)}

    ppo.ppo_loss = ppo_loss
    keep_parts(ppo)


@pytest.mark.parametrize("target_kl, epochs", [(0.4, 1), (0.6, 3)])
def test_the_mean_kl_ends_an_update_on_all_ranks(tmp_path, target_kl, epochs):
    """Where it is about 0 on the first rank and 1 on the second."""
    flags = ["--target-kl", str(target_kl), "--update-epochs", "3"]
    finish(start("ppo_continuous", 2, tmp_path, *flags, sabotage=large_kl_on_the_second_rank))
    assert_identical(parts(tmp_path, 1), parts(tmp_path, 0))
    assert int(parts(tmp_path)["adam_steps"]) == 6 * 4 * epochs  # updates, minibatches, epochs
    assert curves(tmp_path / "run")["losses/approx_kl"][0][1] == pytest.approx(0.5, abs=0.1)


# Other parameters, other numbers


def start_elsewhere():
    """As if the initialisation of the second rank's machine gave other numbers."""
    if os.environ["RANK"] == "1":
        torch.manual_seed = lambda seed, manual_seed=torch.manual_seed: manual_seed(seed + 1)
    keep_all_parts()


@every_script
def test_ranks_begin_with_the_parameters_of_the_first(script, two, tmp_path):
    cwd, _ = two(script)
    finish(start(script, 2, tmp_path, sabotage=start_elsewhere))
    for rank in range(2):
        assert_identical(parts(tmp_path, rank), parts(cwd))


@pytest.mark.parametrize(
    "script, flags, told",
    [
        ("a2c_atari", ["--num-envs", "3"], "3 environments cannot be divided among 2 processes"),
        ("ppo_continuous", ["--num-envs", "3"], "3 environments cannot be divided among 2 processes"),
        ("ppo_continuous", "--num-envs 2 --num-steps 100 --num-minibatches 8".split(), "16 equal minibatches"),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path, script, flags, told):
    for run in start(script, 2, tmp_path, *flags):
        result = run.wait()
        assert result.status == 1 and told in result.notes[-1] and "Traceback" not in result.stderr
    assert not list(tmp_path.glob("run/*"))


# Resuming


def kill_after_a_checkpoint():
    for module in (a2c, ppo):

        def save_checkpoint(run, *args, save=module.Run.save_checkpoint):
            save(run, *args)
            if len(checkpoints(run.folder)) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        module.Run.save_checkpoint = save_checkpoint


@every_script
def test_a_run_that_lost_a_rank_is_continued_to_the_bit_by_as_many(script, two, tmp_path):
    cwd, _ = two(script)
    killed, survivor = start(script, 2, tmp_path, sabotage=kill_after_a_checkpoint)
    assert killed.wait().status == -signal.SIGKILL
    assert survivor.wait().status == 1  # nobody answers it
    finish(start(script, 2, tmp_path))
    for mine, reference in zip(checkpoints(tmp_path / "run"), checkpoints(cwd / "run"), strict=True):
        assert_identical(comparable(load(mine)), comparable(load(reference)))
    assert curves(tmp_path / "run") == curves(cwd / "run")


def test_one_process_continues_what_two_began(two, tmp_path):
    cwd, _ = two("a2c_atari")
    for run in start("a2c_atari", 2, tmp_path, sabotage=kill_after_a_checkpoint):
        run.wait()
    finish(start("a2c_atari", 1, tmp_path))
    assert largest_difference(parts(tmp_path)["agent"], parts(cwd)["agent"]) < 1e-6


# torchrun


def torchrun(script, cwd, *flags, restarts=0):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "--local-ranks-filter", "0"]
    command += [str(ROOT / f"{script}.py"), *FLAGS[script], *flags]
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
    process = torchrun("ppo_continuous", tmp_path, "--total-timesteps", "7680", restarts=restarts)
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
        assert load(tmp_path / "run" / "model.pt")["global_step"] == 7680
        assert int(re.findall(r"(\d+)/7680 \[00:00<\?", stderr)[-1]) >= 512  # where the second start began
    else:
        assert process.returncode == 1
        assert "failed (exitcode: -9) local_rank: 1" in stderr  # torchrun says who
