"""dqn_per_atari.py: its mathematics against definitions, its runs, and the changes readers make."""

import copy
import os
import random
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, command, load, logged, run
from torch import nn
from vectors_reader import cases, check

import dqn_per_atari as dqn

quick = pytest.mark.quick
# Intervals do not divide each other: checkpoints at 0, 64, 112, 176 and 224
SMALL = dict(num_envs=4, num_steps=4, train_frequency=8, target_network_frequency=43)
SMALL |= dict(batch_size=8, buffer_size=130, learning_starts=50, total_timesteps=220)
SMALL |= dict(checkpoint_interval=56, log_interval=3, eval_epsilon=0.5, eval_episodes=2)
SMALL |= dict(torch_threads=1, env_threads=1, cuda=False)


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(dqn, "check_memory", lambda needed: None)


def checkpoints(folder):
    return sorted(Path(folder).glob("checkpoint_*.pt"))


def train(folder, checkpoint=None, **flags):
    """Train in this process; return the final checkpoint."""
    dqn.train(dqn.Args(**SMALL | flags), Path(folder), checkpoint)
    return load(checkpoints(folder)[-1])


def resume(folder, step=10**9, **flags):
    """Resume a copy of a run from its newest checkpoint up to a step; return the final one."""
    copied = Path(folder).with_name(f"resumed_{step}")
    shutil.copytree(folder, copied)
    for path in checkpoints(copied):
        if int(path.stem[-12:]) > step:
            path.unlink()
    return train(copied, dqn.load_checkpoint(copied), **flags)


class Tiny:
    """Episodes of 8 steps; a step pays 3 for the side on which the frame before was bright.

    At step 5 a life is lost. The last environment is truncated at step 8, the others terminate.
    """

    best = 21.0
    actions = (dqn.Action.NOOP, dqn.Action.UP)

    def __init__(self, num_envs, stack_num, **settings):
        self.num_envs, self.stack = num_envs, stack_num
        self.single_observation_space = gym.spaces.Box(0, 255, (stack_num, 84, 84), np.uint8)
        self.single_action_space = gym.spaces.Discrete(2)
        self.ale = SimpleNamespace(get_action_set=lambda: list(self.actions))

    def reset(self, seed):
        self.rng = np.random.default_rng(seed)
        self.t, self.sides = np.zeros(self.num_envs, int), np.zeros((self.num_envs, 2), int)
        self.stacks = np.zeros((self.num_envs, self.stack, 84, 84), np.uint8)
        self.show()
        return self.stacks.copy(), {"episode_frame_number": 4 * self.t}

    def show(self):
        new_sides = self.rng.integers(2, size=self.num_envs)
        self.sides = np.stack([self.sides[:, 1], new_sides], axis=1)
        self.stacks = np.roll(self.stacks, -1, axis=1)
        self.stacks[:, -1] = 0
        for i, side in enumerate(new_sides):
            self.stacks[i, -1, :, 42 * side : 42 * side + 42] = 200

    def step(self, actions):
        rewards = 3 * ((actions == self.sides[:, 0]) & (self.t > 0)).astype(np.int32)
        self.t += 1
        self.show()
        over, final_obs = self.t == 8, self.stacks.copy()
        truncations = over & (np.arange(self.num_envs) == self.num_envs - 1)
        terminations = over & ~truncations | (self.t == 5)
        self.stacks[over, :-1] = self.t[over] = 0
        self.stacks[over, -1] //= 2  # not the old episode's last frame
        info = {"episode_frame_number": 4 * self.t, "final_obs": final_obs}
        return self.stacks.copy(), rewards, terminations, truncations, info

    def close(self):
        pass


class Small(nn.Module):
    """A network that takes less time."""

    def __init__(self, obs_shape, num_actions, dueling):
        super().__init__()
        layers = [nn.AvgPool2d(42), nn.Flatten(), nn.Linear(4 * obs_shape[0], 32), nn.ReLU()]
        self.hidden, self.head = nn.Sequential(*layers), nn.Linear(32, num_actions)

    def forward(self, obs):
        return self.head(self.hidden(obs / 255))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(dqn, "AtariVectorEnv", Tiny)
    monkeypatch.setattr(dqn, "QNetwork", Small)


def make_replay(num_envs=3, rows=40, shape=(4, 84, 84), dtype=np.uint8, **flags):
    args = dqn.Args(num_envs=num_envs, buffer_size=num_envs * rows, **flags)
    return dqn.Replay(args, gym.spaces.Box(0, 255, shape, dtype))


# The sum tree and the draws


@quick
@pytest.mark.parametrize("size", [1, 2, 3, 37, 64, 1000])
def test_tree_is_cumsum_and_searchsorted(size):
    """With integers, so that every sum is exact."""
    rng, tree, leaves = np.random.default_rng(size), dqn.SumTree(size), np.zeros(size)
    for k in range(300):
        where = rng.integers(size, size=rng.integers(1, 40))
        values = rng.integers(0, 5, size=len(where)) * (rng.random() < 0.9)
        tree.set(where, values)
        for leaf, value in zip(where, values):
            leaves[leaf] = value
        np.testing.assert_array_equal(tree.leaves, leaves)
        prefix_sum = np.cumsum(leaves)
        assert tree.nodes[1] == prefix_sum[-1]
        if prefix_sum[-1]:
            draws = rng.random(20) * prefix_sum[-1]
            draws = np.concatenate([draws, rng.integers(prefix_sum[-1], size=20)])
            expected = np.searchsorted(prefix_sum, draws, side="right")
            np.testing.assert_array_equal(tree.find(draws), expected)
        if k % 100 == 99:
            tree.set(np.arange(size), 0.0)
            leaves[:] = 0
            assert not tree.nodes.any()
    for _ in range(500):
        tree.set(rng.integers(size, size=32), 10 ** rng.uniform(-9, 3, 32))
    rebuilt = dqn.SumTree(size)
    rebuilt.set(np.arange(size), tree.leaves)
    np.testing.assert_array_equal(tree.nodes, rebuilt.nodes)  # no drift


@quick
def test_no_leaf_of_zero_is_ever_drawn():
    for seed in range(300):
        rng = np.random.default_rng(seed)
        tree, filled = dqn.SumTree(200), rng.integers(1, 150)
        values = rng.random(filled) * (rng.random(filled) < 0.7)
        values[0] += 1e-9
        tree.set(np.arange(filled), values)
        total = tree.nodes[1]
        draws = np.array([0.0, np.nextafter(total, 0), total, *rng.random(20) * total])
        assert (tree.leaves[tree.find(draws)] > 0).all(), f"seed {seed}"


@quick
@pytest.mark.parametrize("prioritized", [True, False])
def test_draws_have_the_papers_probabilities(prioritized):
    """By priority they are stratified, otherwise uniform and independent."""
    priorities = dqn.Priorities(dqn.Args(prioritized=prioritized, per_alpha=0.7), 77)
    rng, valid = np.random.default_rng(0), np.arange(0, 77, 2)
    td_errors = rng.normal(size=len(valid))
    priorities.add(np.arange(77), np.arange(77) % 2 == 0)
    priorities.update(valid, td_errors)
    p = (np.abs(td_errors) + 1e-6) ** (0.7 if prioritized else 0)
    drawn = np.array([priorities.draw(40, 0.5)[0] for _ in range(1500)])
    counts, expected = np.bincount(drawn.ravel(), minlength=77), drawn.size * p / p.sum()
    assert counts[valid].sum() == drawn.size
    chi_square = ((counts[valid] - expected) ** 2 / expected).sum()
    degrees = len(valid) - 1  # its mean; the variance is twice that. Strata make it smaller
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)
    assert (np.diff(drawn, axis=1) >= 0).all() == prioritized
    if not prioritized:
        assert chi_square > degrees - 4 * np.sqrt(2 * degrees)
        for lag in (1, 20):  # draws of a minibatch are independent
            pairs = (drawn[:, lag:] == drawn[:, :-lag]).mean()
            assert pairs == pytest.approx(1 / len(valid), abs=0.004), lag


@quick
def test_priorities_follow_the_vectors():
    for case in cases("per"):
        inputs, operation = case["inputs"], case["operation"]
        if operation == "drawable":
            continue
        leaves = np.atleast_1d(inputs["leaves"])
        priorities = dqn.Priorities(dqn.Args(), len(leaves))
        tree = priorities.tree
        tree.set(np.arange(len(leaves)), leaves)
        if operation == "sum_tree":
            check(case, "nodes", tree.nodes)
            check(case, "total", tree.nodes[1])
        elif operation == "find":
            check(case, "rows", tree.find(inputs["values"]))
        elif operation == "importance_weights":
            probabilities = leaves[inputs["rows"]] / leaves.sum()
            weights = dqn.importance_weights(probabilities, inputs["beta"].item())
            check(case, "weights", weights)
        elif operation == "priority_update":
            priorities.alpha = inputs["alpha"].item()
            priorities.max_priority = inputs["max_priority"].item()
            priorities.update(inputs["rows"], inputs["td_errors"])
            check(case, "leaves", tree.leaves)
            check(case, "total", tree.nodes[1])
            check(case, "max_priority", priorities.max_priority)


@quick
def test_draws_are_stratified(monkeypatch):
    for case in cases("per", "stratified"):
        leaves, uniforms = case["inputs"]["leaves"], torch.tensor(case["inputs"]["uniforms"])
        priorities = dqn.Priorities(dqn.Args(), len(leaves))
        priorities.tree.set(np.arange(len(leaves)), leaves)
        monkeypatch.setattr(torch, "rand", lambda size, dtype, x=uniforms: x)
        rows, weights = priorities.draw(len(uniforms), 1.0)
        check(case, "rows", rows)
        probabilities = case["outputs"]["probabilities"]
        np.testing.assert_allclose(weights, probabilities.min() / probabilities)


@quick
def test_rows_that_may_be_drawn():
    for case in cases("per", "drawable"):
        inputs, outputs = case["inputs"], case["outputs"]
        N, n, stack = inputs["lengths"].shape[1], inputs["n"].item(), inputs["frame_stack"].item()
        args = dqn.Args(num_envs=N, n_step=n, buffer_size=inputs["size"].item())
        replay = dqn.Replay(args, gym.spaces.Box(0, 255, (stack, 2), np.uint8))
        zeros = np.zeros(N)
        for t, ages in enumerate(inputs["lengths"]):
            obs = np.zeros((N, stack, 2), np.uint8)
            replay.add(obs, zeros, zeros, inputs["terminations"][t], ages)
            drawn, drawable = replay.leaves > 0, outputs["drawable"][t]
            allowed = drawable | outputs["optional"][t]
            assert (drawable <= drawn).all() and (drawn <= allowed).all(), (case["name"], t)


class Table(nn.Module):
    """Q-values that do not depend on the observation, one row for each of the batch."""

    def __init__(self, qs):
        super().__init__()
        self.qs = nn.Parameter(torch.as_tensor(qs))

    def forward(self, obs):
        return self.qs


@quick
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_targets_losses_and_n_step_returns_follow_the_vectors(precision):
    dtype = getattr(torch, precision)
    for case in cases("dqn", "q_targets"):
        inputs = {name: torch.tensor(x).to(dtype) for name, x in case["inputs"].items()}
        actions, ones = torch.zeros(len(inputs["returns"]), dtype=torch.long), torch.ones(())
        batch = [None, actions, inputs["returns"], inputs["discounts"], None, ones]
        for name in ("double", "single"):
            networks = Table(inputs["online_qs"]), Table(inputs["target_qs"])
            args = dqn.Args(double=name == "double")
            _, td_errors, _ = dqn.td_loss(*networks, batch, args)
            check(case, name, td_errors + inputs["online_qs"][:, 0], precision)
    for case in cases("dqn", "td_loss"):
        names = ("values", "targets", "weights")
        values, targets, weights = (torch.tensor(case["inputs"][x]).to(dtype) for x in names)
        network, zeros = Table(values[:, None]), torch.zeros(len(values), dtype=torch.long)
        batch = [None, zeros, targets, torch.zeros_like(values), None, weights]
        loss, td_errors, _ = dqn.td_loss(network, network, batch, dqn.Args())
        loss.backward()
        check(case, "loss", loss.detach(), precision)
        check(case, "td_errors", td_errors, precision)
        check(case, "grad_values", network.qs.grad[:, 0], precision)
    for case in cases("dqn", "dueling"):
        network = dqn.QNetwork((4, 84, 84), case["inputs"]["advantages"].shape[1], True)
        network.trunk = nn.Identity()
        values, advantages = (torch.tensor(x).to(dtype) for x in case["inputs"].values())
        network.value, network.advantage = Table(values[:, None]), Table(advantages)
        check(case, "qs", network(torch.zeros(1, 4, 84, 84)).detach(), "float32")
    for case in cases("dqn", "n_step"):
        inputs, outputs, n = case["inputs"], case["outputs"], case["inputs"]["n"].item()
        for t in np.flatnonzero(outputs["complete"]):
            rows = np.arange(t, outputs["last_rows"][t] + 1)
            if inputs["truncations"][rows[-1]] and not inputs["terminations"][rows[-1]]:
                if len(rows) < n:
                    continue  # such a row is never drawn
            padded = np.zeros((2, 1, n))
            padded[0, 0, : len(rows)] = inputs["rewards"][rows]
            padded[1, 0, : len(rows)] = inputs["terminations"][rows]
            args = (padded[0], padded[1].astype(bool), inputs["gamma"].item())
            for name, value in zip(("returns", "discounts"), dqn.n_step_returns(*args)):
                expected = outputs[name][t]
                assert value[0] == pytest.approx(expected, abs=1e-12), (case["name"], t, name)


@quick
def test_new_transitions_have_the_maximum_priority_so_far():
    replay = make_replay(1, 60)
    obs, step = (
        np.zeros((1, 4, 84, 84), np.uint8),
        (np.zeros(1, int), np.zeros(1), np.zeros(1, bool)),
    )
    for t in range(9):
        replay.add(obs, *step, np.array([t]))
    np.testing.assert_array_equal(replay.leaves[:9], [*[1.0] * 8, 0.0])  # no successor yet
    replay.priorities.update(np.array([2, 4]), np.array([-7.0, 0.0]))
    replay.priorities.update(np.array([2]), np.array([0.5]))
    replay.add(obs, *step, np.array([9]))
    p = np.array([1, 1, 0.5 + 1e-6, 1, 1e-6, 1, 1, 1, 7 + 1e-6])
    np.testing.assert_allclose(replay.leaves[:9], p**0.6, rtol=1e-12)


# The replay against a ledger, which writes down whole stacks


class Ledger:
    def __init__(self, replay):
        self.replay, self.streams = replay, [[] for _ in range(replay.num_envs)]
        self.drawn, self.truncated = set(), 0

    def add(self, obs, actions, rewards, terminations, ages, next_obs, over):
        """A step of the replay, and the next observations and whether the episodes are over."""
        self.replay.add(obs, actions, rewards, terminations, ages)
        for i, stream in enumerate(self.streams):
            columns = (obs, actions, rewards, terminations, next_obs, over)
            stream.append([np.array(column[i]) for column in columns])

    def cut(self):
        """All episodes end here."""
        for stream in self.streams:
            stream[-1][5] = np.array(True)

    def drawable(self):
        """{row: n steps} of what the replay can give back."""
        found, n = {}, self.replay.n_step
        length, self.truncated = self.replay.num_rows // len(self.streams), 0
        for i, stream in enumerate(self.streams):
            oldest = max(0, len(stream) - length + self.replay.frame_stack - 1)
            for place in range(oldest, len(stream) - n):
                steps = stream[place : place + n]
                ends = [bool(s[3]) for s in steps if s[3] or s[5]]
                if ends and not ends[0]:
                    self.truncated += 1
                else:
                    found[place % length * len(self.streams) + i] = steps
        return found

    def check(self, batch_size):
        """Draw and compare; then change the priorities of what was drawn."""
        found, n, gamma = self.drawable(), self.replay.n_step, self.replay.gamma
        assert np.flatnonzero(self.replay.leaves).tolist() == sorted(found)
        if not found:
            return
        rows, batch = self.replay.sample(batch_size, 0.5)
        batch = [x.numpy() for x in batch]
        for row, obs, action, returns, discount, next_obs, _ in zip(rows.tolist(), *batch):
            steps = found[row]
            self.drawn.add((row, self.replay.count))
            end = next((k + 1 for k, step in enumerate(steps) if step[3]), None)
            expected = sum(gamma**k * float(s[2]) for k, s in enumerate(steps[:end]))
            np.testing.assert_array_equal(obs, steps[0][0])
            assert action == steps[0][1] and returns == pytest.approx(expected, abs=1e-5)
            assert discount == pytest.approx(0 if end else gamma**n, abs=1e-6)
            if not end:
                np.testing.assert_array_equal(next_obs, steps[-1][4])
        self.replay.priorities.update(rows, np.random.default_rng(0).normal(size=batch_size))
        assert np.flatnonzero(self.replay.leaves).tolist() == sorted(found)


def play_noise(ledger, steps, rng):
    """Short episodes of noise that end in every way: lost lives, terminations, truncations."""
    N, stack = ledger.replay.num_envs, ledger.replay.frame_stack
    shape, dtype = ledger.replay.frames.shape[1:], ledger.replay.frames.dtype
    obs, ages = np.zeros((N, stack, *shape), dtype), np.zeros(N, int)
    obs[:, -1] = rng.integers(256, size=(N, *shape))
    for t in range(steps):
        next_obs = np.roll(obs, -1, axis=1)
        next_obs[:, -1] = rng.integers(256, size=(N, *shape))
        dice = rng.random(N)
        over = dice < 0.16
        terminations = (dice > 0.08) & (dice < 0.28)
        step = rng.integers(9, size=N), rng.integers(-1, 2, N), terminations
        ledger.add(obs, *step, ages, next_obs, over)
        obs, ages = next_obs.copy(), ages + 1
        if t % 31 == 30 or t == steps - 1:
            ledger.cut()
            over[:] = True
        obs[over, :-1] = ages[over] = 0
        if t % 2 == 0:
            ledger.check(16)


@quick
@pytest.mark.parametrize("n_step", [1, 2, 5])
@pytest.mark.parametrize("stack", [1, 2, 4])
def test_replay_gives_back_what_happened(n_step, stack):
    """Also with as few rows as are allowed, and for n-step returns the double sum."""
    for rows in (n_step + stack, n_step + stack + 7):
        ledger = Ledger(make_replay(3, rows, (stack, 5), np.float32, n_step=n_step, gamma=0.9))
        play_noise(ledger, 250, np.random.default_rng(n_step))
        assert len(ledger.drawn) > 200


@pytest.mark.parametrize(
    "game, n_step, stack", [("BreakoutNoFrameskip-v4", 3, 4), ("ALE/Pong-v5", 1, 3)]
)
def test_stacks_are_the_emulators(monkeypatch, game, n_step, stack):
    make = dqn.AtariVectorEnv
    short = dict(max_num_frames_per_episode=400)
    monkeypatch.setattr(dqn, "AtariVectorEnv", lambda **kw: make(**kw | short))
    args = dqn.Args(env_id=game, env_threads=1, frame_stack=stack)
    envs, rng = dqn.AtariEnvs(args, 3), np.random.default_rng(0)
    ledger = Ledger(make_replay(3, 80, envs.obs_shape, n_step=n_step))
    obs, truncated = envs.reset(0, None), 0
    for t in range(1, 180):
        ages, actions = envs.lengths.copy(), rng.integers(envs.num_actions, size=3)
        new_obs, next_obs, rewards, terminations, _, _ = envs.step(actions)
        step = envs.executed_actions, rewards, terminations
        ledger.add(obs, *step, ages, next_obs, envs.lengths == 0)
        obs = new_obs
        if t % 70 == 0:
            ledger.cut()
            obs = envs.reset(t, None)
        if t % 7 == 0:
            ledger.check(32)
            truncated += ledger.truncated
    assert len(ledger.drawn) > 300 and truncated > 3


@quick
@pytest.mark.parametrize("steps", [1, 12, 49, 100])
def test_replay_continues_from_its_state(steps, monkeypatch):
    """Hardly begun, nearly full, wrapped; in several pieces."""
    monkeypatch.setattr(dqn, "PIECE", 30)
    replay, other = (make_replay(2, 50, n_step=2) for _ in range(2))
    ledger, rng = Ledger(replay), np.random.default_rng(0)
    play_noise(ledger, steps, rng)
    if steps > 1:
        valid = np.flatnonzero(replay.leaves)
        replay.priorities.update(valid, np.arange(len(valid)) - 2.0)
    state = copy.deepcopy(replay.state_dict())
    other.load_state_dict(copy.deepcopy(state))
    np.testing.assert_array_equal(other.frames, replay.frames)
    np.testing.assert_array_equal(other.priorities.tree.nodes, replay.priorities.tree.nodes)
    assert_same(other.state_dict(), state)
    ledger.replay = other
    play_noise(ledger, 80, rng)


@quick
@pytest.mark.parametrize("flag", ["rows", "num_envs", "n_step", "per_alpha", "prioritized"])
def test_replay_of_other_settings_is_refused(flag):
    settings = dict(num_envs=2, rows=52, n_step=1, per_alpha=0.6, prioritized=True)
    state = make_replay(**settings).state_dict()
    other = dict(num_envs=4, rows=26, n_step=2, per_alpha=0.5, prioritized=False)
    with pytest.raises(ValueError):
        make_replay(**settings | {flag: other[flag]}).load_state_dict(state)


def test_memory_is_taken_as_the_replay_fills_and_little_for_a_checkpoint():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, taken = resident(), []
    replay = make_replay(8, 2500)
    step = [np.ones((8, 4, 84, 84), np.uint8), *np.zeros((4, 8), int)]
    for k in range(2501):
        if k % 1250 == 0:
            taken.append(resident() - before)
        replay.add(*step)
    full = 20_000 * (84 * 84 + 29)
    assert taken == pytest.approx([0, full / 2, full], abs=15e6)
    assert sum(x.nbytes for x in replay.state_dict()["frames"]) < full / 100


@quick
def test_replay_beyond_memory_ends_in_one_line(monkeypatch):
    monkeypatch.undo()
    meminfo = "MemTotal: 64 kB\nMemFree: 1 kB\nMemAvailable: 6835937 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: meminfo)
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    dqn.Replay(dqn.Args(buffer_size=990_000), space)
    dqn.Replay(dqn.Args(total_timesteps=990_000), space)
    with pytest.raises(SystemExit, match=r"error: --buffer-size needs 7.1 GB, 7.0 are free"):
        dqn.Replay(dqn.Args(), space)


# The network and the loss, against float64


def plain_q(network, obs):
    """Q (B, A) in float64: [DQN] Methods; [DUEL] Eq. (9)."""
    p = {name: x.detach().double() for name, x in network.state_dict().items()}

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    x = obs.double() / 255
    for k, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.conv2d(x, p[f"trunk.{k}.weight"], p[f"trunk.{k}.bias"], stride).relu()
    x = linear(x.flatten(1), "trunk.7").relu()
    if "head.weight" in p:
        return linear(x, "head")
    value, advantage = (
        linear(linear(x, f"{s}.0").relu(), f"{s}.2") for s in ("value", "advantage")
    )
    return value + advantage - advantage.sum(1, keepdim=True) / advantage.shape[1]


def make_networks(dueling=True, stack=4):
    """Two networks whose values are far enough apart to disagree."""
    networks = [dqn.QNetwork((stack, 84, 84), 6, dueling) for _ in range(2)]
    for network in networks:
        list(network.parameters())[-2].data.mul_(20)
    return networks


def make_batch(size=16, stack=4):
    rng = np.random.default_rng(0)
    obs, next_obs = rng.integers(256, size=(2, size, stack, 84, 84), dtype=np.uint8)
    columns = [3 * rng.normal(size=size), 0.9 * (rng.random(size) < 0.7), rng.random(size)]
    returns, discounts, weights = np.float32(columns)
    batch = [obs, rng.integers(6, size=size), returns, discounts, next_obs, weights]
    return [torch.from_numpy(x) for x in batch]


@quick
@pytest.mark.parametrize(
    "double, dueling, stack", [(True, True, 4), (False, True, 3), (True, False, 4)]
)
def test_update_is_the_papers_in_float64(double, dueling, stack):
    """Values, loss, TD errors, and the gradient of one whole step, from the plain formulas."""
    q_network, target_network = make_networks(dueling, stack)
    batch = obs, actions, returns, discounts, next_obs, weights = make_batch(16, stack)
    loss, td_errors, metrics = dqn.td_loss(
        q_network, target_network, batch, dqn.Args(double=double)
    )
    loss.backward()

    q = plain_q(q_network, obs)
    torch.testing.assert_close(q_network(obs).double(), q, rtol=1e-4, atol=1e-5)
    next_q, next_target = plain_q(q_network, next_obs), plain_q(target_network, next_obs)
    assert (next_q.argmax(1) != next_target.argmax(1)).any()
    expected, deltas = 0.0, []
    for i in range(16):
        greedy = (next_q if double else next_target)[i].argmax()
        delta = returns[i] + discounts[i] * next_target[i, greedy] - q[i, actions[i]]
        huber = delta**2 / 2 if abs(delta) < 1 else abs(delta) - 0.5
        expected += weights[i] * huber / 16
        deltas.append(delta.item())
    assert min(map(abs, deltas)) < 1 < max(map(abs, deltas))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    np.testing.assert_allclose(td_errors, deltas, rtol=1e-4, atol=1e-4)
    assert metrics["q_values"].item() == pytest.approx(
        q[range(16), actions].mean().item(), rel=1e-4
    )
    assert not td_errors.requires_grad and all(p.grad is None for p in target_network.parameters())

    # d loss / d Q(s_t, a_t) is -w_i times the TD error clipped to [-1, 1]; through a float64 copy
    double_network = copy.deepcopy(q_network).double()
    double_network.zero_grad()
    slopes = -weights.double() * torch.tensor(deltas).clip(-1, 1) / 16
    x = double_network.trunk(obs.double() / 255)
    if dueling:
        advantage = double_network.advantage(x)
        x = double_network.value(x) + advantage - advantage.mean(1, keepdim=True)
    else:
        x = double_network.head(x)
    (x[range(16), actions] * slopes).sum().backward()
    for (name, p), exact in zip(q_network.named_parameters(), double_network.parameters()):
        torch.testing.assert_close(p.grad.double(), exact.grad, rtol=1e-3, atol=1e-5, msg=name)


@quick
def test_bfloat16_has_the_gradient_of_float32():
    """Twice with other parameters: nothing that autocast caches outlives a step."""
    batch = make_batch(64)
    autocast = torch.autocast("cpu", torch.bfloat16)
    q_network, target_network = make_networks()
    for _ in range(2):
        gradients = []
        for bf16 in (False, True):
            q_network.zero_grad()
            with autocast if bf16 else torch.autocast("cpu", enabled=False):
                loss, td_errors, _ = dqn.td_loss(q_network, target_network, batch, dqn.Args())
            assert loss.dtype == td_errors.dtype == torch.float32
            loss.backward()
            gradients.append([p.grad.flatten().clone() for p in q_network.parameters()])
        for exact, rounded in zip(*gradients):
            assert F.cosine_similarity(exact, rounded, dim=0) > 0.95
            assert rounded.norm().item() == pytest.approx(exact.norm().item(), rel=0.1)
        with torch.no_grad():
            for parameter in q_network.parameters():
                parameter.mul_(1.5)


@quick
def test_exploration_is_uniform_over_all_actions_and_independent():
    best = torch.arange(100_000) % 5
    network = lambda obs: F.one_hot(obs, 5).float()  # noqa: E731
    for epsilon in (0.0, 0.3, 1.0):
        actions = dqn.epsilon_greedy(network, best.numpy(), epsilon, "cpu")
        for action in range(5):
            share = epsilon / 5 + (1 - epsilon) / 5
            assert np.mean(actions == action) == pytest.approx(share, abs=0.006), (epsilon, action)
        assert np.mean(actions == best.numpy()) == pytest.approx(1 - epsilon * 4 / 5, abs=0.006)


# What a run does


@pytest.mark.parametrize("flags", [{}, dict(n_step=3), dict(prioritized=False, double=False)])
def test_a_tiny_game_is_learned(tmp_path, tiny, flags):
    flags |= dict(total_timesteps=960, train_frequency=2, gamma=0.5, learning_rate=3e-3)
    flags |= dict(buffer_size=900, target_network_frequency=80, end_fraction=0.8)
    train(tmp_path, checkpoint_interval=10**6, eval_episodes=20, eval_epsilon=0.0, **flags)
    (score,) = logged(tmp_path)["eval/episodic_return"].values()
    assert score > 0.9 * Tiny.best  # half of it by chance


def record(monkeypatch, owner, name, what):
    """A list of what(arguments, outputs) at each call of a function."""
    calls, function = [], getattr(owner, name)

    def spy(*args):
        outputs = function(*args)
        calls.append(what(args, outputs))
        return outputs

    monkeypatch.setattr(owner, name, spy)
    return calls


@quick
@pytest.mark.parametrize("resumed", [False, True])
def test_training_is_adam_with_a_target_network(tmp_path, monkeypatch, tiny, resumed):
    """The recorded minibatches, on plain networks with PyTorch's Adam, give the same parameters."""
    flags = dict(learning_rate=3e-3, max_grad_norm=0.2, adam_eps=1e-3, checkpoint_interval=64)
    flags |= dict(total_timesteps=240)
    state = {}
    if resumed:  # target copies depend on the step, not on when the process began
        train(tmp_path / "run", **flags)
        state = load(checkpoints(tmp_path / "run")[0])
    rows = record(monkeypatch, dqn.Replay, "sample", lambda _, out: out[0].tolist())
    batches = record(monkeypatch, dqn, "td_loss", lambda args, out: (args[2], out[1].tolist()))
    updates = record(monkeypatch, dqn.Priorities, "update", lambda args, _: args[1:])
    final = resume(tmp_path / "run", 192, **flags) if resumed else train(tmp_path / "run", **flags)
    first = state.get("global_step", 48)  # updates begin in the fourth iteration
    assert len(batches) == len(rows) == 2 * ((240 - first) // 16)
    for drawn, (_, errors), (updated, new_errors) in zip(rows, batches, updates):
        assert drawn == updated.tolist() and errors == new_errors.tolist()
    dqn.seed_everything(1, 0)
    q_network = Small((4, 84, 84), 2, True)
    target_network = copy.deepcopy(q_network)
    adam = torch.optim.Adam(q_network.parameters(), lr=3e-3, eps=1e-3)
    if resumed:
        q_network.load_state_dict(state["agent"])
        target_network.load_state_dict(state["target_network"])
        adam.load_state_dict(state["optimizer"])
    monkeypatch.undo()
    norms = []
    for k, (batch, _) in enumerate(batches):
        loss, *_ = dqn.td_loss(q_network, target_network, batch, dqn.Args())
        adam.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(q_network.parameters(), 0.2).item())
        adam.step()
        step = first + 16 * (k // 2 + 1)
        if k % 2 == 1 and step // 43 > (step - 16) // 43:
            target_network.load_state_dict(q_network.state_dict())
    assert resumed or min(norms) < 0.2 < max(norms), norms
    for network, name in ((q_network, "agent"), (target_network, "target_network")):
        for parameter, expected in network.state_dict().items():
            torch.testing.assert_close(final[name][parameter], expected, msg=f"{name} {parameter}")


@quick
def test_replay_ratio_does_not_depend_on_num_envs(tmp_path, tiny, monkeypatch):
    calls = record(monkeypatch, dqn, "td_loss", lambda *_: None)
    for num_envs in (2, 3, 5):
        train(tmp_path / str(num_envs), num_envs=num_envs, learning_starts=0, total_timesteps=208)
        assert abs(len(calls) - 208 / 8) <= 2
        calls.clear()


@quick
def test_schedules_follow_training_progress(tmp_path, tiny, monkeypatch):
    epsilons = record(monkeypatch, dqn, "epsilon_greedy", lambda args, _: args[2])
    betas = record(monkeypatch, dqn.Replay, "sample", lambda args, _: args[2])
    flags = dict(total_timesteps=640, learning_starts=590, buffer_size=800, middle_fraction=0.1)
    train(tmp_path, log_interval=1, checkpoint_interval=10**6, **flags)
    x, points = np.arange(0, 640, 16) / 640, logged(tmp_path)
    flat = np.maximum(0.1 - 0.09 * (x - 0.1) / 0.4, 0.01)
    expected = {"epsilon": np.where(x < 0.1, 1 - 0.9 * x / 0.1, flat), "per_beta": 0.4 + 0.6 * x}
    for tag, values in expected.items():
        found = points[f"charts/{tag}"]
        assert list(found) == list(range(16, 641, 16)), tag
        np.testing.assert_allclose(list(found.values()), values, rtol=1e-5, err_msg=tag)
    np.testing.assert_allclose(epsilons[:160:4], expected["epsilon"])
    np.testing.assert_allclose(betas[::2], expected["per_beta"][-4:])
    assert list(points["losses/q_values"]) == [592, 608, 624, 640]


@quick
@pytest.mark.parametrize("episodic_life", [True, False])
def test_a_run_stores_how_episodes_end(tmp_path, tiny, episodic_life):
    """The last environment's are truncated; the checkpoint after 20 steps ends all of them."""
    flags = dict(total_timesteps=160, buffer_size=400, checkpoint_interval=80)
    replay = train(tmp_path, episodic_life=episodic_life, **flags)["replay"]
    step = np.array([*range(8), *range(8), *range(4)] * 2)[:, None]
    last, t = np.arange(4) == 3, np.arange(40)[:, None]
    terminations = (step == 7) & ~last | (step == 4) & episodic_life
    valid = terminations | ~((step == 7) & last | (t == 19)) & (t < 39)
    expected = {"terminations": terminations, "ages": step + np.zeros((1, 4)), "leaves": valid}
    for name, values in expected.items():
        found = replay[name][:160].reshape(40, 4).numpy()
        np.testing.assert_array_equal(found > 0 if name == "leaves" else found, values, name)
    assert set(replay["rewards"][:160].tolist()) == {0, 1}  # the sign of 3


@quick
def test_fire_is_stored_as_it_was_executed(tmp_path, tiny, monkeypatch):
    executed = []

    class Fire(Tiny):
        actions = (dqn.Action.NOOP, dqn.Action.FIRE)

        def step(self, actions):
            executed.append((self.t.copy(), actions.copy()))
            return super().step(actions)

    monkeypatch.setattr(dqn, "AtariVectorEnv", Fire)
    stored = record(monkeypatch, dqn.Replay, "add", lambda args, _: args[2].copy())
    train(tmp_path)
    np.testing.assert_array_equal([actions for _, actions in executed[: len(stored)]], stored)
    assert len(stored) == 56 and any(0 in actions for actions in stored)
    for t, actions in executed:
        assert actions[np.isin(t, (0, 5))].all()


@quick
@pytest.mark.parametrize("what", ["TD error", "gradient"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_ends_the_run_without_a_checkpoint(tmp_path, tiny, monkeypatch, what):
    td_loss, calls = dqn.td_loss, []

    def broken(*args):
        loss, td_errors, metrics = td_loss(*args)
        calls.append(loss)
        if len(calls) == 3 and what == "TD error":
            metrics["td_loss"] = td_errors[0] = torch.tensor(torch.inf)
        elif len(calls) == 3:
            loss = loss + (loss - loss.detach()).abs().sqrt()
        return loss, td_errors, metrics

    monkeypatch.setattr(dqn, "td_loss", broken)
    with pytest.raises(FloatingPointError, match="not finite at step 80"):
        train(tmp_path, checkpoint_interval=80)
    assert [path.stem[-3:] for path in checkpoints(tmp_path)] == ["000"]


# Resume


@quick
@pytest.mark.parametrize("step", [0, 64, 128])
def test_resumed_is_bit_identical(tmp_path, tiny, monkeypatch, step):
    monkeypatch.setattr(dqn, "PIECE", 50)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *args: None)  # keep all checkpoints
        whole = train(tmp_path / "run")
    steps = [int(path.stem[-12:]) for path in checkpoints(tmp_path / "run")]
    assert steps == [0, 64, 112, 176, 224]
    assert_same(resume(tmp_path / "run", step), whole)
    assert list(logged(tmp_path / "run")["losses/td_loss"]) == [96, 144, 192, 224]


def test_killed_at_a_random_moment_and_resumed_is_bit_identical(tmp_path):
    flags = ["--no-cuda"]
    settings = SMALL | dict(total_timesteps=300, eval_epsilon=1.0, eval_episodes=1)
    for name in settings.keys() - {"cuda"}:
        flags += [f"--{name.replace('_', '-')}", settings[name]]
    begin = time.time()
    run("dqn_per_atari", *flags, "--run-folder", "whole", cwd=tmp_path)
    seconds, seed = time.time() - begin, random.randrange(10**6)
    print(f"seed of the random moments: {seed}")
    rng = random.Random(seed)
    flags += ["--run-folder", "killed"]
    for _ in range(2):
        process = subprocess.Popen(command("dqn_per_atari", *flags), cwd=tmp_path)
        while not checkpoints(tmp_path / "killed") and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.random() * seconds / 2)
        process.kill()
        process.wait()
    run("dqn_per_atari", *flags, cwd=tmp_path)
    whole, killed = (load(checkpoints(tmp_path / name)[-1]) for name in ("whole", "killed"))
    assert_same(killed, whole)


@quick
def test_resume_without_the_replay_fills_another_one(tmp_path, tiny, monkeypatch):
    train(tmp_path / "run")
    counts = record(monkeypatch, dqn.Replay, "sample", lambda args, _: args[0].count)
    last = resume(tmp_path / "run", checkpoint_replay=False, total_timesteps=320)
    assert "replay" not in last and (counts[0], counts[-1]) == (64, 96)


@quick
@pytest.mark.parametrize("flag, group", [("learning_rate", "lr"), ("adam_eps", "eps")])
def test_flags_of_adam_given_at_a_resume_win(tmp_path, tiny, flag, group):
    train(tmp_path / "run")
    last = resume(tmp_path / "run", total_timesteps=250, **{flag: 1e-3})
    assert last["optimizer"]["param_groups"][0][group] == 1e-3


# The changes that readers make, each with exact resume


class Noisy(nn.Linear):
    """Gaussian noise of each weight (Fortunato et al. 2018)."""

    def forward(self, x):
        return F.linear(x, self.weight + 0.02 * torch.randn_like(self.weight), self.bias)


class Changed(Small):
    """`kind` says how."""

    def __init__(self, obs_shape, num_actions, dueling):
        super().__init__(obs_shape, num_actions, dueling)
        if self.kind == "dropout":
            self.hidden.append(nn.Dropout(0.3))
        elif self.kind == "noisy":
            self.head = Noisy(32, num_actions)
        elif self.kind == "frozen":
            self.hidden.requires_grad_(False)


@quick
@pytest.mark.parametrize("kind", ["dropout", "noisy", "frozen", "AdamW", "adaptive loss", "stack"])
def test_small_changes_do_what_is_meant(tmp_path, tiny, monkeypatch, kind):
    td_loss, adam, coefficients = dqn.td_loss, torch.optim.Adam, []
    batches = record(monkeypatch, dqn.Replay, "sample", lambda _, out: out[1])
    if kind == "stack":
        assert train(tmp_path, frame_stack=2)["agent"]["hidden.2.weight"].shape == (32, 8)
        assert {batch[i].shape for batch in batches for i in (0, 4)} == {(8, 2, 84, 84)}
        return

    def adaptive(*args):
        loss, td_errors, metrics = td_loss(*args)
        coefficients.append(metrics["td_loss"].item())
        return loss * metrics["td_loss"], td_errors, metrics

    plain = train(tmp_path / "plain")
    monkeypatch.setattr(Changed, "kind", kind, raising=False)
    monkeypatch.setattr(dqn, "QNetwork", Changed)
    if kind == "AdamW":
        adamw = torch.optim.AdamW
        monkeypatch.setattr(torch.optim, "Adam", lambda *a, **k: adamw(*a, weight_decay=50, **k))
    if kind == "adaptive loss":
        monkeypatch.setattr(dqn, "td_loss", adaptive)
    whole = train(tmp_path / "run")
    monkeypatch.setattr(torch.optim, "Adam", adam) if kind != "AdamW" else None
    assert_same(resume(tmp_path / "run", 176), whole)
    head, plain_head = whole["agent"]["head.weight"], plain["agent"]["head.weight"]
    assert not torch.equal(head, plain_head)
    if kind == "AdamW":
        assert head.norm() < 0.95 * plain_head.norm()
    if kind == "frozen":
        dqn.seed_everything(1, 0)
        initial = Small((4, 84, 84), 2, True).state_dict()
        assert torch.equal(whole["agent"]["hidden.2.weight"], initial["hidden.2.weight"])
    if kind == "adaptive loss":
        assert len(set(coefficients)) > 10


@quick
def test_another_observation_shape(tmp_path, monkeypatch):
    """CartPole: vectors in float32, no emulator, one frame."""

    def make_atari(args, num_envs, color=False):
        def make():
            return gym.wrappers.ReshapeObservation(gym.make("CartPole-v1"), (1, 4))

        return gym.vector.SyncVectorEnv([make] * num_envs, autoreset_mode="SameStep")

    class Network(nn.Sequential):
        def __init__(self, obs_shape, num_actions, dueling):
            super().__init__(nn.Flatten(), nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, num_actions))

    monkeypatch.setattr(dqn, "make_atari", make_atari)
    monkeypatch.setattr(dqn, "QNetwork", Network)
    flags = dict(frame_stack=1, buffer_size=1000, total_timesteps=400, checkpoint_interval=170)
    batches = record(monkeypatch, dqn.Replay, "sample", lambda _, out: out[1])
    whole = train(tmp_path / "run", **flags)
    assert batches[0][0].shape == (8, 1, 4) and batches[0][0].dtype == torch.float32
    assert (batches[-1][0] != batches[-1][0].round()).any()
    assert_same(resume(tmp_path / "run", 352, **flags), whole)
    assert "charts/episodic_return" in logged(tmp_path / "run")


@quick
def test_a_distributional_head(tmp_path, tiny, monkeypatch):
    """Categorical over 11 atoms (Bellemare et al. 2017); priorities are of its cross-entropy."""
    atoms = torch.linspace(-2, 2, 11)

    class Network(Small):
        def __init__(self, obs_shape, num_actions, dueling):
            super().__init__(obs_shape, num_actions * 11, dueling)

        def logits(self, obs):
            return super().forward(obs).unflatten(1, (-1, 11))

        def forward(self, obs):
            return (self.logits(obs).softmax(2) * atoms).sum(2)

    def td_loss(q_network, target_network, batch, args):
        obs, actions, returns, discounts, next_obs, weights = batch
        index = torch.arange(len(obs))
        logits = q_network.logits(obs)[index, actions]
        with torch.no_grad():
            greedy = q_network(next_obs).argmax(1)
            next_p = target_network.logits(next_obs).softmax(2)[index, greedy]
            targets = (returns[:, None] + discounts[:, None] * atoms).clamp(-2, 2)
            triangle = (1 - (targets[:, None] - atoms[:, None]).abs() / 0.4).clamp(0)
            p = (triangle * next_p[:, None]).sum(2)
        losses = -(p * logits.log_softmax(1)).sum(1)
        return (weights * losses).mean(), losses.detach(), {"td_loss": losses.detach().mean()}

    monkeypatch.setattr(dqn, "QNetwork", Network)
    monkeypatch.setattr(dqn, "td_loss", td_loss)
    whole = train(tmp_path / "run")
    assert_same(resume(tmp_path / "run", 176), whole)
