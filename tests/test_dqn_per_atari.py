"""The mathematics of dqn_per_atari.py: against definitions and plain re-computations, on toys, and on real games.

A `Ledger` writes down everything that happens in some environments in the plainest way, whole stacks and all. What a
replay of single frames gives back is compared with it, bit by bit.
"""

import copy
import functools
import importlib
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import (
    Run,
    assert_identical,
    checkpoints,
    copy_run,
    files_below,
    kill_in,
    load,
    run_folder_in,
    scalars,
)

import dqn_per_atari as dqn

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


# The sum tree

SIZES = [1, 2, 3, 37, 64, 1000]


@pytest.mark.parametrize("size", SIZES)
def test_tree_is_cumsum_and_searchsorted(size):
    """Through thousands of writes of new leaves, updates, zeros, duplicates: whole numbers, so every sum is exact."""
    rng, tree, leaves = np.random.default_rng(size), dqn.SumTree(size), np.zeros(size)
    for k in range(1500):
        where = rng.integers(size, size=rng.integers(1, 40))
        values = rng.integers(0, 5, size=len(where)) * (rng.random() < 0.9)
        tree.set(where, values)
        for leaf, value in zip(where, values):  # of a leaf named twice the last value stays
            leaves[leaf] = value
        np.testing.assert_array_equal(tree.leaves, leaves)
        cumulated = np.cumsum(leaves)
        assert tree.nodes[1] == cumulated[-1]
        if tree.nodes[1]:
            draws = np.concatenate([rng.random(20) * tree.nodes[1], rng.integers(cumulated[-1], size=20)])
            np.testing.assert_array_equal(tree.find(draws), np.searchsorted(cumulated, draws, side="right"))
        if k % 100 == 0:
            tree.set(np.arange(size), 0.0)
            leaves[:] = 0
            assert (tree.nodes == 0).all()


def test_sums_do_not_drift():
    rng, tree = np.random.default_rng(0), dqn.SumTree(1000)
    for _ in range(5000):
        tree.set(rng.integers(1000, size=32), 10 ** rng.uniform(-9, 3, 32))
    rebuilt = dqn.SumTree(1000)
    rebuilt.set(np.arange(1000), tree.leaves)
    np.testing.assert_array_equal(tree.nodes, rebuilt.nodes)  # to the last bit: the sums depend on the leaves only
    assert tree.nodes[1] == pytest.approx(tree.leaves.sum(), rel=1e-14)


def test_no_leaf_of_zero_is_ever_drawn():
    """The largest number below the total, where the last leaves are zero: rounding leads beyond the last sum."""
    for seed in range(500):
        rng = np.random.default_rng(seed)
        tree, filled = dqn.SumTree(200), rng.integers(1, 150)
        tree.set(np.arange(filled), rng.random(filled) * (rng.random(filled) < 0.7) + 1e-9 * (np.arange(filled) == 0))
        draws = np.array([0.0, np.nextafter(tree.nodes[1], 0), tree.nodes[1], *rng.random(20) * tree.nodes[1]])
        assert (tree.leaves[tree.find(draws)] > 0).all()


def replay_with_priorities(leaves):
    """A replay of one row per leaf, in which only the priorities matter."""
    replay = make_replay(1, len(leaves))
    replay.tree.set(np.arange(len(leaves)), leaves)
    return replay


@pytest.mark.parametrize("stratified", [True, False])
def test_sampled_frequencies_are_the_probabilities(stratified):
    rng, draws = np.random.default_rng(0), 80_000
    values = rng.random(77) ** 3 * (rng.random(77) < 0.8)
    replay = replay_with_priorities(values)
    if stratified:
        drawn = np.concatenate([replay.sample(40, 0.5, rng)[0] for _ in range(draws // 40)])
    else:
        drawn = replay.tree.find(rng.random(draws) * replay.tree.nodes[1])
    expected = draws * values / values.sum()
    counts = np.bincount(drawn, minlength=77)
    assert (counts[expected == 0] == 0).all()
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    degrees = (expected > 0).sum() - 1
    # Mean `degrees`, variance twice that. Strata bring the counts closer to what is expected than chance does
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)
    assert stratified or chi_square > degrees - 4 * np.sqrt(2 * degrees)


def test_each_part_of_the_total_gives_one_draw():
    rows, _ = replay_with_priorities(np.ones(32)).sample(32, 0.5, np.random.default_rng(0))
    np.testing.assert_array_equal(rows, np.arange(32))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_the_papers(beta):
    leaves = np.random.default_rng(0).random(500)
    minibatch = np.random.default_rng(1).integers(500, size=32)
    w = [(500 * leaves[i] / leaves.sum()) ** -beta for i in minibatch]
    np.testing.assert_allclose(dqn.importance_weights(leaves[minibatch], beta), np.array(w) / max(w), rtol=1e-12)


# The replay against a ledger


def make_replay(num_envs=3, rows=40, **options):
    return dqn.Replay(dqn.Args(num_envs=num_envs, buffer_size=num_envs * rows, learning_starts=1, **options))


class Ledger:
    """What happened in the environments beside a replay: for each one the list of its transitions, stacks and all."""

    def __init__(self, replay):
        self.replay, self.streams, self.drawn = replay, [[] for _ in range(replay.N)], set()
        self.at_life = self.at_end = self.cut_off = 0

    def step(self, obs, columns, successors, truncations, ended):
        """One step: what `Replay.add` takes, and whole stacks (N, 4, 84, 84) before and after it, not of a reset."""
        self.replay.add(*columns)
        _, _, actions, rewards, terminations = columns
        for i, stream in enumerate(self.streams):
            stream.append({"obs": obs[i].copy(), "next_obs": successors[i].copy(), "action": actions[i]})
            stream[-1] |= {"reward": rewards[i], "terminated": terminations[i], "over": ended[i]}
            stream[-1]["truncated"] = truncations[i] and not terminations[i]

    def truncate(self):
        """All episodes end here: the next step is the first of others."""
        for stream in self.streams:
            if stream:
                stream[-1] |= {"truncated": not stream[-1]["terminated"], "over": True}

    def can_be_drawn(self):
        """{row: (stream, place)} of the transitions whose frames the replay holds and whose return is known."""
        found, n, N = {}, self.replay.n, self.replay.N
        length, self.cut_off = self.replay.size // N, 0
        for i, stream in enumerate(self.streams):
            for place in range(max(0, len(stream) - length + 3), len(stream) - n):  # 3 have lost a frame, n wait
                ends = [s["terminated"] for s in stream[place : place + n] if s["terminated"] or s["truncated"]]
                if ends and not ends[0]:
                    self.cut_off += 1
                else:
                    found[place % length * N + i] = i, place
        return found

    def check(self, size, rng):
        """Draw once and compare, then set the priorities of what was drawn."""
        found, n, gamma = self.can_be_drawn(), self.replay.n, self.replay.gamma
        assert np.flatnonzero(self.replay.tree.leaves).tolist() == sorted(found)
        if not found:
            return
        rows, (obs, actions, returns, discounts, next_obs, _) = self.replay.sample(size, 0.5, rng)
        assert obs.dtype == next_obs.dtype == np.uint8
        for b, row in enumerate(rows.tolist()):
            i, place = found[row]
            self.drawn.add((i, place))
            expected, R = self.streams[i][place], 0.0
            for k in range(n):
                last = self.streams[i][place + k]
                R += gamma**k * last["reward"]
                if last["terminated"]:
                    break
            np.testing.assert_array_equal(obs[b], expected["obs"])
            assert actions[b] == expected["action"]
            assert returns[b] == pytest.approx(R, abs=1e-6)
            assert discounts[b] == pytest.approx(0 if last["terminated"] else gamma**n)
            if not last["terminated"]:
                np.testing.assert_array_equal(next_obs[b], last["next_obs"])
            self.at_life += bool(last["terminated"] and not last["over"])
            self.at_end += bool(last["terminated"] and last["over"])
        self.replay.update(rows, rng.normal(size=size))
        assert np.flatnonzero(self.replay.tree.leaves).tolist() == sorted(found)


def random_step(envs, obs, rng):
    """One step with random actions.

    Returns what `Replay.add` takes, the next observations, those before any reset, and the truncations.
    """
    frames, lengths = obs[:, -1], envs.lengths.copy()
    actions = np.where(envs.fire, envs.fire_action or 0, rng.integers(envs.num_actions, size=len(obs)))
    next_obs, successors, rewards, terminations, truncations = envs.step(actions)
    return (frames, lengths, actions, rewards, terminations), next_obs, successors, truncations


@pytest.mark.parametrize(
    "env_id, n_step, rows, frames",
    [("BreakoutNoFrameskip-v4", 1, 150, 400), ("ALE/Pong-v5", 1, 100, 300), ("BreakoutNoFrameskip-v4", 4, 61, 500)],
)
def test_stacks_are_the_environments(monkeypatch, env_id, n_step, rows, frames):
    """A memory that wraps several times; episodes that end, are truncated, lose lives, and end at checkpoints."""
    make = dqn.AtariVectorEnv
    monkeypatch.setattr(dqn, "AtariVectorEnv", lambda **kw: make(**kw | {"max_num_frames_per_episode": frames}))
    ledger, rng = Ledger(make_replay(3, rows, n_step=n_step)), np.random.default_rng(0)
    envs = dqn.AtariEnvs(dqn.Args(env_id=env_id, env_threads=1), 3, Path())
    obs, checkpoints, ends, cut_off, terminated = envs.reset(0), 0, 0, 0, 0
    for t in range(1, 400):
        columns, next_obs, successors, truncations = random_step(envs, obs, rng)
        ended, terminations = envs.lengths == 0, columns[-1]
        ledger.step(obs, columns, successors, truncations, ended)
        obs, ends, terminated = next_obs, ends + ended.sum(), terminated + (ended & terminations).sum()
        if t % 140 == 0:
            ledger.truncate()
            obs, checkpoints = envs.reset(t), checkpoints + 1
        if t % 3 == 0:
            ledger.check(32, rng)
            cut_off += ledger.cut_off
    assert len(ledger.streams[0]) > 2.5 * rows and checkpoints == 2 and ends > 3
    assert len(ledger.drawn) > 800 and cut_off > 50
    assert (ledger.at_life > 30) == ("Breakout" in env_id) and (ledger.at_end > 0) == (terminated > 0)


def play_random_frames(ledger, steps, rng, check=2):
    """Episodes of a few steps with frames of noise, ended in every way: a life lost, the last one, a time limit."""
    N = ledger.replay.N
    obs, lengths = np.zeros((N, 4, 84, 84), np.uint8), np.zeros(N, int)
    obs[:, -1] = rng.integers(256, size=(N, 84, 84))
    for t in range(steps):
        successors = np.roll(obs, -1, axis=1)
        successors[:, -1] = rng.integers(256, size=(N, 84, 84))
        dice = rng.random(N)
        truncations, ended = dice < 0.08, dice < 0.16
        terminations = (dice > 0.04) & (dice < 0.28)
        actions, rewards = rng.integers(9, size=N), rng.integers(-1, 2, N)
        ledger.step(obs, (obs[:, -1], lengths, actions, rewards, terminations), successors, truncations, ended)
        obs, lengths = successors, lengths + 1
        if t % 31 == 30:
            ledger.truncate()
            ended[:] = True
        obs[ended, :3] = lengths[ended] = 0
        if t % check == 0:
            ledger.check(16, rng)
    ledger.truncate()


@pytest.mark.parametrize("n_step", [1, 2, 3, 7])
@pytest.mark.parametrize("spare", [0, 1, 9])
def test_n_step_targets_are_the_double_sum(n_step, spare):
    """Also with as few rows as --buffer-size allows."""
    ledger = Ledger(make_replay(3, n_step + 4 + spare, n_step=n_step, gamma=0.9))
    play_random_frames(ledger, 250, np.random.default_rng(n_step))
    assert len(ledger.drawn) > 250 and min(ledger.at_life, ledger.at_end) > 30


def test_new_transitions_have_the_highest_priority_of_all_so_far():
    replay = make_replay(1, 60)
    step = np.zeros(1, int), np.zeros(1), np.zeros(1, bool)
    for t in range(9):
        replay.add(np.zeros((1, 84, 84), np.uint8), np.array([t]), *step)
    np.testing.assert_array_equal(replay.tree.leaves[:9], [*[1.0] * 8, 0.0])  # the newest has no successor yet
    replay.update(np.array([2, 4]), np.array([-7.0, 0.0]))
    replay.update(np.array([2]), np.array([0.5]))
    replay.add(np.zeros((1, 84, 84), np.uint8), np.array([9]), *step)
    eps, alpha = 1e-6, replay.alpha
    expected = [1, 1, (0.5 + eps) ** alpha, 1, eps**alpha, 1, 1, 1, (7 + eps) ** alpha]
    np.testing.assert_allclose(replay.tree.leaves[:9], expected, rtol=1e-12)


@pytest.mark.parametrize("options", [dict(prioritized=False), dict(per_alpha=0.0)])
def test_without_priorities_all_are_equal(options):
    replay = make_replay(1, 30, **options)
    play_random_frames(Ledger(replay), 40, np.random.default_rng(0))
    rows, (*_, weights) = replay.sample(8, 0.4, np.random.default_rng(0))
    replay.update(rows, np.arange(8))
    assert set(replay.tree.leaves) == {0.0, 1.0} and (weights == 1).all()


def test_weights_and_rows_of_a_sample_belong_together():
    replay, rng = make_replay(2, 50), np.random.default_rng(0)
    play_random_frames(Ledger(replay), 60, rng)
    drawable = np.flatnonzero(replay.tree.leaves)
    replay.update(drawable, rng.normal(size=len(drawable)))
    leaves = replay.tree.leaves.copy()
    rows, (*_, weights) = replay.sample(32, 0.7, rng)
    w = (len(drawable) * leaves[rows] / leaves.sum()) ** -0.7
    np.testing.assert_allclose(weights, w / w.max(), rtol=1e-5)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_the_memory_of_a_replay_is_taken_as_it_fills():
    args = dqn.Args(num_envs=8, buffer_size=40_000, learning_starts=1)
    step = [np.ones((8, 84, 84), np.uint8), *np.zeros((3, 8), int), np.zeros(8, bool)]
    before = resident_bytes()
    replay, taken = dqn.Replay(args), []
    for k in range(5001):
        if k in (0, 2500, 5000):
            taken.append(resident_bytes() - before)
        replay.add(*step)
    full = 40_000 * (84 * 84 + 25) + 16 * 2**16
    assert taken == pytest.approx([0, full / 2, full], abs=15e6)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_checkpoint_keeps_no_memory_of_what_it_packs(monkeypatch):
    monkeypatch.setattr(dqn, "PIECE", 400)
    monkeypatch.setattr(dqn, "ThreadPoolExecutor", lambda threads: ThreadPoolExecutor(1))
    replay, rng = make_replay(8, 2500), np.random.default_rng(0)
    for rows in np.array_split(replay.frames, 10):
        rows[:] = rng.integers(2, size=rows.shape, dtype=np.uint8)
    replay.count = replay.size
    before = resident_bytes()
    state = replay.state_dict()
    packed = sum(data.nbytes for data in state["frames"])
    assert resident_bytes() - before - packed < 30e6 < packed


@pytest.mark.parametrize("game", ["Breakout", "JourneyEscape", "YarsRevenge"])
def test_a_checkpoint_of_a_million_frames_is_less_than_a_gigabyte(game):
    """The screens of the last two are full of noise."""
    args = dqn.Args(env_id=f"{game}NoFrameskip-v4", env_threads=1, num_envs=1, buffer_size=1500, learning_starts=1)
    replay, envs, rng = dqn.Replay(args), dqn.AtariEnvs(args, 1, Path()), np.random.default_rng(0)
    obs = envs.reset(0)
    while replay.count < 1500:
        columns, obs, *_ = random_step(envs, obs, rng)
        replay.add(*columns)
    state = replay.state_dict()
    frames = state.pop("frames")
    total = sum(x.nbytes for x in [*frames, *state.values()] if isinstance(x, torch.Tensor))
    assert total / replay.count * 1e6 < 1e9


@pytest.mark.parametrize("steps", [0, 12, 49, 100])
def test_a_replay_is_saved_and_goes_on_as_if_nothing_had_happened(steps, monkeypatch):
    """Empty, hardly begun, almost full and wrapped; then with more episodes beside the one that was saved."""
    monkeypatch.setattr(dqn, "PIECE", 30)
    replay, other = (make_replay(2, 50, n_step=2) for _ in range(2))
    ledger, rng = Ledger(replay), np.random.default_rng(0)
    play_random_frames(ledger, steps, rng)
    if steps:
        replay.update(np.flatnonzero(replay.tree.leaves)[:5], np.arange(-2.0, 3.0))
    state = copy.deepcopy(replay.state_dict())
    assert len(state["frames"]) == -(-min(steps, 50) // 15)
    other.load_state_dict(state)
    np.testing.assert_array_equal(other.frames, replay.frames)
    np.testing.assert_array_equal(other.tree.nodes, replay.tree.nodes)
    assert_identical(other.state_dict(), state)
    ledger.replay = other
    play_random_frames(ledger, 80, rng)


# The network and the loss


def make_network(num_actions=6, **options):
    return dqn.QNetwork(num_actions, **options).to(DEVICE)


def make_batch(size=16, num_actions=6):
    """Like what `Replay.sample` draws: obs, actions, returns, discounts, next_obs, weights."""
    rng = np.random.default_rng(0)
    obs, next_obs = rng.integers(256, size=(2, size, 4, 84, 84), dtype=np.uint8)
    columns = [3 * rng.normal(size=size), 0.9 * (rng.random(size) < 0.7), rng.random(size)]
    returns, discounts, weights = np.array(columns, np.float32)
    batch = obs, rng.integers(num_actions, size=size), returns, discounts, next_obs, weights
    return tuple(torch.from_numpy(x).to(DEVICE) for x in batch)


def q_of(network, obs):
    return network(network.scale(obs))


def plain_q(network, obs):
    """Q (B, A) in float64: [DQN] Methods; [DUEL] Eq. (9)."""
    p = {name: x.detach().double().cpu() for name, x in network.state_dict().items()}

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    x = obs.cpu().double() / 255
    for k, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.conv2d(x, p[f"trunk.{k}.weight"], p[f"trunk.{k}.bias"], stride).relu()
    x = linear(x.flatten(1), "trunk.7").relu()
    if "head.weight" in p:
        return linear(x, "head")
    value, advantage = (linear(linear(x, f"{name}.0").relu(), f"{name}.2") for name in ("value", "advantage"))
    return value + advantage - advantage.sum(1, keepdim=True) / advantage.shape[1]


@pytest.mark.parametrize("dueling", [True, False])
def test_network_is_the_papers(dueling):
    network, obs = make_network(dueling=dueling), make_batch()[0]
    torch.testing.assert_close(q_of(network, obs).double().cpu(), plain_q(network, obs), rtol=1e-4, atol=1e-5)


def test_advantages_have_mean_zero():
    """So V is the mean of Q, whatever is added to all advantages."""
    network, obs = make_network(), make_batch()[0]
    value = network.value(network.trunk(obs.float() / 255))
    torch.testing.assert_close(q_of(network, obs).mean(1, keepdim=True), value, rtol=1e-4, atol=1e-5)
    before = q_of(network, obs)
    network.advantage[2].bias.data += 3
    torch.testing.assert_close(q_of(network, obs), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_loss_is_the_papers(double, dueling):
    q_network, target_network = make_network(dueling=dueling), make_network(dueling=dueling)
    for network in (q_network, target_network):  # values apart, so that the two networks disagree
        [*network.parameters()][-2].data.mul_(20)
    batch = obs, actions, returns, discounts, next_obs, weights = make_batch()
    loss, td_errors, values = dqn.td_loss(q_network, target_network, *batch, double=double)

    q, next_q = plain_q(q_network, obs), plain_q(q_network, next_obs)
    next_target = plain_q(target_network, next_obs)
    assert (next_q.argmax(1) != next_target.argmax(1)).any()
    expected, deltas = 0.0, []
    for i in range(16):
        chosen = (next_q if double else next_target)[i].argmax()
        y = returns[i].item() + discounts[i].item() * next_target[i, chosen].item()
        delta = y - q[i, actions[i]].item()
        huber = delta**2 / 2 if abs(delta) < 1 else abs(delta) - 0.5
        expected += weights[i].item() * huber / 16
        deltas.append(delta)
    assert min(map(abs, deltas)) < 1 < max(map(abs, deltas))
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(td_errors.cpu(), deltas, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(values.cpu(), q.gather(1, actions.cpu()[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    assert not td_errors.requires_grad and not values.requires_grad

    # d L / d Q(s_t, a_t) is w_i times the TD error cut off at 1; the target has no gradient
    loss.backward()
    assert all(p.grad is None for p in target_network.parameters())
    slopes = -weights.cpu() * torch.tensor(deltas).clip(-1, 1) / 16
    bias = q_network.advantage[2].bias if dueling else q_network.head.bias
    per_action = torch.zeros(6).index_add_(0, actions.cpu(), slopes.float())
    grad = per_action - per_action.mean() if dueling else per_action
    torch.testing.assert_close(bias.grad.cpu(), grad, rtol=1e-3, atol=1e-4)


def test_bfloat16_has_the_gradient_of_float32():
    """Also twice in a row with other parameters: nothing that autocast keeps outlives a step."""
    batch = make_batch(64)
    for scale in (1.0, 2.0):
        gradients = []
        for bf16 in (False, True):
            torch.manual_seed(0)
            q_network, target_network = make_network(bf16=bf16), make_network(bf16=bf16)
            loss, *_ = dqn.td_loss(q_network, target_network, *batch, True)
            for parameter in q_network.parameters():
                parameter.data.mul_(scale)
            loss, *_ = dqn.td_loss(q_network, target_network, *batch, True)
            assert loss.dtype == torch.float32
            loss.backward()
            gradients.append([p.grad.flatten() for p in q_network.parameters()])
        for exact, rounded in zip(*gradients):
            assert F.cosine_similarity(exact, rounded, dim=0) > 0.98
            assert rounded.norm().item() == pytest.approx(exact.norm().item(), rel=0.1)


class OneHot(nn.Module):
    """Q (B, 4) of observations whose first number is the best action."""

    def __init__(self):
        super().__init__()
        self.ones, self.scale = nn.Parameter(torch.eye(4)), lambda obs: obs

    def forward(self, obs):
        return self.ones[obs[:, 0, 0, 0].long()]


def test_exploration_is_random_as_often_as_epsilon_says():
    obs, rng = np.arange(100_000, dtype=np.int64)[:, None, None, None] % 4, np.random.default_rng(0)
    for epsilon in (0.0, 0.3, 1.0):
        actions = dqn.epsilon_greedy(OneHot(), obs, epsilon, rng)
        best = np.mean(actions == np.arange(100_000) % 4)
        assert best == pytest.approx(1 - epsilon * 3 / 4, abs=0.006)


# Toys


def updates_of_blind_cliffwalk(n, prioritized, seed):
    """Updates of single transitions until Q is right in Blind Cliffwalk, [PER] Sec. 3.1 and App. B.1.

    Of the two actions in each of n states one goes on and the other ends the episode; only the last step pays. The
    replay holds all 2^n episodes that there are; one transition in 2^(n+1) - 2 has a reward.
    """
    replay = make_replay(1, 2**n * 3 + 20, prioritized=prioritized, gamma=1 - 1 / n)
    rng, one = np.random.default_rng(seed), np.atleast_1d
    for episode in rng.permutation(2**n):
        for s in range(n):
            right = episode >> s & 1
            ended = not right or s == n - 1
            frame, reward = np.full((1, 84, 84), s, np.uint8), right * (s == n - 1)
            replay.add(frame, one(s), one(right), one(reward), one(ended))
            if ended:
                break
    replay.add(frame, one(0), one(0), one(0.0), one(False))  # the last one waited for its successor
    assert (replay.tree.leaves > 0).sum() == 2 ** (n + 1) - 2
    Q, truth = rng.normal(0, 0.1, (n, 2)), np.zeros((n, 2))
    truth[:, 1] = replay.gamma ** np.arange(n - 1, -1, -1)
    for updates in range(1, 100_000):
        rows, (obs, (action,), (reward,), (discount,), next_obs, _) = replay.sample(1, 0.0, rng)
        s, next_s = obs[0, 3, 0, 0], next_obs[0, 3, 0, 0]
        delta = reward + discount * Q[next_s].max() - Q[s, action]
        Q[s, action] += 0.25 * delta
        replay.update(rows, np.array([delta]))
        if ((Q - truth) ** 2).mean() < 1e-3:
            return updates


def test_blind_cliffwalk_takes_several_times_fewer_updates_with_priorities():
    uniform, prioritized = ([updates_of_blind_cliffwalk(7, flag, seed) for seed in range(3)] for flag in (False, True))
    assert min(uniform) > 3 * max(prioritized)  # five times in the median


class Tiny:
    """Episodes of 8 steps. Frames are bright on the left or the right; a step pays 3 for the side of the frame before.

    That frame is in the stack, but in an episode's first step, which pays nothing. At step 5 a life is lost; the last
    environment is truncated at step 8, the others terminate.
    """

    best = 21.0
    buttons = (dqn.ale_py.Action.NOOP, dqn.ale_py.Action.UP)

    def __init__(self, num_envs, **settings):
        self.num_envs, self.single_action_space = num_envs, SimpleNamespace(n=2)
        self.ale = SimpleNamespace(get_action_set=lambda: self.buttons)

    def reset(self, seed):
        self.rng = np.random.default_rng(seed)
        self.stacks, self.t = np.zeros((self.num_envs, 4, 84, 84), np.uint8), np.zeros(self.num_envs, int)
        self.sides = np.zeros((self.num_envs, 2), int)
        self.show()
        return self.stacks.copy(), {"episode_frame_number": 4 * self.t}

    def show(self):
        self.sides = np.stack([self.sides[:, 1], self.rng.integers(2, size=self.num_envs)], axis=1)
        self.stacks = np.roll(self.stacks, -1, axis=1)
        self.stacks[:, -1] = 0
        for i, side in enumerate(self.sides[:, 1]):
            self.stacks[i, -1, :, 42 * side : 42 * side + 42] = 200

    def step(self, actions):
        rewards = 3 * ((actions == self.sides[:, 0]) & (self.t > 0)).astype(np.int32)
        self.t += 1
        self.show()
        over, final = self.t == 8, self.stacks.copy()
        truncations = over & (np.arange(self.num_envs) == self.num_envs - 1)
        terminations = over & ~truncations | (self.t == 5)
        self.stacks[over, :3] = self.t[over] = 0
        self.stacks[over, 3] //= 2  # a new episode's first frame is not the old one's last
        info = {"episode_frame_number": 4 * self.t, "final_obs": final}
        return self.stacks.copy(), rewards, terminations, truncations, info

    def close(self):
        pass


@pytest.fixture
def tiny(monkeypatch):
    """Any environment is a tiny one."""
    monkeypatch.setattr(dqn, "AtariVectorEnv", Tiny)


def train(folder, checkpoint=None, **options):
    """Train; return the final checkpoint."""
    defaults = dict(num_envs=4, total_timesteps=160, buffer_size=400, learning_starts=80, batch_size=8, updates=1)
    defaults |= dict(log_interval=1, checkpoint_interval=10**9, eval_episodes=1, eval_epsilon=1.0)
    defaults |= dict(cuda=CUDA, torch_threads=1, env_threads=1)
    folder.mkdir(exist_ok=True)
    dqn.train(dqn.Args(**defaults | options), folder, checkpoint)
    return load(checkpoints(folder)[-1])


MODES = {
    "default": {},
    "plain DQN": dict(double=False, dueling=False, prioritized=False),
    "three steps": dict(n_step=3),
    "not prioritised": dict(prioritized=False),
    "bfloat16": dict(bf16=True),
    "compiled": dict(compile=True),
}


def test_learning_waits_until_something_can_be_drawn(tmp_path, tiny, monkeypatch):
    """Whatever --learning-starts says: after the first iteration all rows still wait for their fifth reward."""
    counts = []

    def spy(self, *args, sample=dqn.Replay.sample):
        counts.append(self.count)
        return sample(self, *args)

    monkeypatch.setattr(dqn.Replay, "sample", spy)
    train(tmp_path, learning_starts=0, n_step=5)
    assert counts == list(range(32, 161, 16))


@pytest.mark.parametrize("mode", ["default", "three steps", "not prioritised", "plain DQN"])
def test_a_tiny_game_is_learned(tmp_path, tiny, mode):
    options = MODES[mode] | dict(total_timesteps=640, updates=3, gamma=0.5, learning_rate=1e-3, target_interval=5)
    options |= dict(learning_starts=100, end_fraction=0.8, middle_fraction=0.5)
    train(tmp_path, buffer_size=800, eval_episodes=20, eval_epsilon=0.0, **options)
    ((_, score),) = scalars(tmp_path)["eval/episodic_return"]
    assert score > 0.9 * Tiny.best  # by chance half of it


# What a run does


@pytest.mark.parametrize("cuda", [False, pytest.param(True, marks=pytest.mark.skipif(not CUDA, reason="no GPU"))])
@pytest.mark.parametrize("mode", MODES)
def test_a_few_steps_in_every_mode(tmp_path, monkeypatch, tiny, mode, cuda):
    if mode == "compiled" and not cuda:  # the graph is captured; to translate it into C++ takes half a minute
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    checkpoint = train(tmp_path, cuda=cuda, **MODES[mode])
    assert all(tensor.isfinite().all() for tensor in checkpoint["agent"].values())
    points = scalars(tmp_path)
    assert len(points["losses/td_loss"]) == 6 and len(points["charts/epsilon"]) == 10
    if mode == "compiled":
        other = train(tmp_path / "other", cuda=cuda)
        for name, tensor in other["agent"].items():
            torch.testing.assert_close(checkpoint["agent"][name], tensor, rtol=0, atol=1e-4)


def test_training_is_adam_on_the_minibatches_with_a_target_network(tmp_path, monkeypatch, tiny):
    """The minibatches of a run, replayed with torch.optim on ordinary networks, give the run's parameters."""
    batches, drawn, errors, updated = [], [], [], []
    rates = dict(learning_rate=3e-4, max_grad_norm=0.7, adam_eps=1e-3)

    def td_loss(*inputs, td_loss=dqn.td_loss):
        batches.append(copy.deepcopy(inputs[2:]))
        errors.append((outputs := td_loss(*inputs))[1].tolist())
        return outputs

    def sample(*inputs, sample=dqn.Replay.sample):
        drawn.append((outputs := sample(*inputs))[0].tolist())
        return outputs

    def update(replay, rows, td_errors, update=dqn.Replay.update):
        updated.append((rows.tolist(), td_errors.tolist()))
        update(replay, rows, td_errors)

    monkeypatch.setattr(dqn, "td_loss", td_loss)
    monkeypatch.setattr(dqn.Replay, "sample", sample)
    monkeypatch.setattr(dqn.Replay, "update", update)
    checkpoint = train(tmp_path, total_timesteps=240, updates=2, target_interval=3, **rates)
    assert updated == list(zip(drawn, errors))  # each priority is of the transition whose TD error it is
    assert len(batches) == 2 * 11  # 16 steps per iteration; 80 are stored after the fifth
    assert set(torch.cat([returns for _, _, returns, *_ in batches]).tolist()) == {0, 1}  # the sign of 3
    monkeypatch.undo()
    torch.manual_seed(1)
    q_network, target_network = make_network(2), make_network(2)
    target_network.load_state_dict(q_network.state_dict())
    adam, norms = torch.optim.Adam(q_network.parameters(), lr=3e-4, eps=1e-3), []
    start = copy.deepcopy(q_network.state_dict())
    for k, batch in enumerate(batches):
        loss, *_ = dqn.td_loss(q_network, target_network, *batch)
        adam.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(q_network.parameters(), 0.7).item())
        adam.step()
        if k % 2 == 1 and (5 + k // 2) % 3 == 0:
            target_network.load_state_dict(q_network.state_dict())
    assert min(norms) < 0.7 < max(norms)
    moved = max((tensor - start[name]).abs().max().item() for name, tensor in q_network.state_dict().items())
    for network, name in ((q_network, "agent"), (target_network, "target_network")):
        for parameter, expected in network.state_dict().items():
            tolerance = 0.02 * moved
            torch.testing.assert_close(checkpoint[name][parameter], expected.cpu(), rtol=0, atol=tolerance)


def test_numbers_that_slow_a_cpu_down_are_flushed_to_zero_which_changes_no_parameter(tmp_path, tiny):
    """A unit that died has gradients of zero, and what Adam remembers of it fades until it is denormal."""

    def small(tensor):  # compared as integers: a flushing processor takes denormal numbers for zero here too
        return bool(((tensor.view(torch.int32) << 1 != 0) & (tensor.view(torch.int32) & 0x7F800000 == 0)).any())

    found = {}
    try:
        for flush in (False, True):
            flushes = torch.set_flush_denormal(flush) and flush
            parameter = nn.Parameter(torch.linspace(-1, 1, 1000))
            adam = torch.optim.Adam([parameter], lr=1e-4, fused=True)
            for k in range(1200):
                parameter.grad = torch.linspace(-3, 2, 1000) if k < 5 else torch.zeros(1000)
                adam.step()
            found[flush] = parameter.detach(), adam.state[parameter]["exp_avg"]
        torch.set_flush_denormal(False)
        train(tmp_path)
        product = torch.full((8,), 1e-30) * 1e-9
    finally:
        torch.set_flush_denormal(False)
    assert found[False][0].tolist() == found[True][0].tolist()
    assert small(found[False][1]) and small(found[True][1]) == small(product) == (not flushes)


def test_schedules_are_parts_of_the_run(tmp_path, tiny, monkeypatch):
    """What is logged, and what the exploration and the replay are given: 4 steps and, in the end, 2 draws a time."""
    used = {"charts/epsilon": [], "charts/per_beta": []}
    act, sample = dqn.epsilon_greedy, dqn.Replay.sample

    def spy_on_act(q_network, obs, epsilon, rng):
        used["charts/epsilon"].append(epsilon)
        return act(q_network, obs, epsilon, rng)

    def spy_on_sample(self, size, beta, *rest):
        used["charts/per_beta"].append(beta)
        return sample(self, size, beta, *rest)

    monkeypatch.setattr(dqn, "epsilon_greedy", spy_on_act)
    monkeypatch.setattr(dqn.Replay, "sample", spy_on_sample)
    train(tmp_path, total_timesteps=640, updates=2, batch_size=2, learning_starts=600, buffer_size=800)
    points = scalars(tmp_path)
    for tag, expected in {
        "charts/epsilon": lambda x: 1 - 0.9 * x / 0.025 if x < 0.025 else max(0.1 - 0.09 * (x - 0.025) / 0.475, 0.01),
        "charts/per_beta": lambda x: 0.4 + 0.6 * x,
        "charts/learning_rate": lambda x: 1e-4,
    }.items():
        steps, values = zip(*points[tag])
        assert steps == tuple(range(16, 641, 16))
        np.testing.assert_allclose(values, [expected((step - 16) / 640) for step in steps], rtol=1e-5)
        if tag in used:
            times = {"charts/epsilon": np.repeat(steps, 4), "charts/per_beta": np.repeat(steps[-3:], 2)}[tag]
            found = used[tag][: len(times)]  # the evaluation explores too
            np.testing.assert_allclose(found, [expected((step - 16) / 640) for step in times], rtol=1e-12)
    assert [step for step, _ in points["losses/q_values"]] == list(range(608, 641, 16))


def test_a_run_stores_how_episodes_end(tmp_path, tiny):
    """Of 4 environments the last one's episodes are truncated; after 20 steps a checkpoint ends all of them."""
    replay = make_replay(4, 100)
    checkpoint = train(tmp_path, checkpoint_interval=80)
    replay.load_state_dict(checkpoint["replay"])
    step, last = np.array([*range(8), *range(8), *range(4)] * 2)[:, None], np.arange(4) == 3
    at_checkpoint = (np.arange(40) == 19)[:, None]
    alive, lengths, drawable = (x[:160].reshape(40, 4) for x in (replay.alive, replay.lengths, replay.tree.leaves > 0))
    terminations, truncations = (step == 4) | (step == 7) & ~last, (step == 7) & last | at_checkpoint
    np.testing.assert_array_equal(alive, ~terminations)  # n is 1
    np.testing.assert_array_equal(lengths, step + np.zeros((1, 4)))
    newest = (np.arange(40) == 39)[:, None]
    np.testing.assert_array_equal(drawable, terminations | ~truncations & ~newest)


def test_only_the_last_life_ends_the_return_where_lives_do_not_count(tmp_path, tiny):
    """In 160 steps there are 20 episodes of two lives; those of one environment are truncated."""
    for episodic_life, ends in ((True, 35), (False, 15)):
        checkpoint = train(tmp_path / str(ends), episodic_life=episodic_life)
        assert (~checkpoint["replay"]["alive"][:160]).sum() == ends


def test_fire_is_pressed_on_the_first_step_of_each_life_and_stored_as_it_was_played(tmp_path, monkeypatch):
    played, stored = [], []

    class Fire(Tiny):
        buttons = (dqn.ale_py.Action.NOOP, dqn.ale_py.Action.FIRE)

        def step(self, actions):
            played.append((self.t.copy(), actions.copy()))
            return super().step(actions)

    def store(self, frames, lengths, actions, *rest, add=dqn.Replay.add):
        stored.append(actions.copy())
        return add(self, frames, lengths, actions, *rest)

    monkeypatch.setattr(dqn, "AtariVectorEnv", Fire)
    monkeypatch.setattr(dqn.Replay, "add", store)
    train(tmp_path)
    assert len(stored) == 40 and len(played) > 40  # training's and the evaluation's
    np.testing.assert_array_equal([actions for _, actions in played[:40]], stored)
    for t, actions in played:
        assert actions[np.isin(t, (0, 5))].all()
    assert any(0 in actions for _, actions in played[:40]) and any(0 in actions for _, actions in played[40:])


def test_all_episodes_have_seeds_of_their_own(tmp_path, monkeypatch):
    """Those at the beginning and at a checkpoint, the evaluation's, and those of another run's seed."""
    seeds = []

    class Spy(Tiny):
        def reset(self, seed):
            seeds.append(seed.tolist())
            return super().reset(seed)

    monkeypatch.setattr(dqn, "AtariVectorEnv", Spy)
    for seed in (1, 2):
        options = dict(seed=seed, checkpoint_interval=80, eval_episodes=3)
        train(tmp_path / str(seed), **options)
        before, _ = checkpoints(tmp_path / str(seed))  # from where training went on with other episodes
        dqn.evaluate(dqn.Args(**load(before)["args"]), load(before), tmp_path)
    assert [len(each) for each in seeds] == [4, 4, 3, 3] * 2
    assert len(np.unique(np.concatenate(seeds))) == 28


def at_step(monkeypatch, what):
    """Call `what` with a run's folder and step each time that it shows its progress."""

    def progress(self, global_step, recent_scores, progress=dqn.Run.progress):
        progress(self, global_step, recent_scores)
        what(self.folder, global_step)

    monkeypatch.setattr(dqn.Run, "progress", progress)


def test_live_json_changes_the_learning_rate(tmp_path, tiny, monkeypatch, capfd):
    bad = ["{", '{"gamma": 0.5}', '{"learning_rate": -1}', "[]", '{"learning_rate": "much"}', "[" * 100_000]
    bad += [f'{{"learning_rate": {10**400}}}', '{"learning_rate": NaN}', "\ud800"]
    good = '\ufeff{"learning_rate": 5e-05}'  # as some editors begin a file
    texts = {16 * k: text for k, text in enumerate([good, good, *bad], start=2)}

    def write(folder, global_step):
        assert global_step == 16 or not (folder / "live.json").exists()
        if global_step in texts:
            (folder / "live.json").write_text(texts[global_step], encoding="utf-8", errors="surrogatepass")

    at_step(monkeypatch, write)
    checkpoint = train(tmp_path, total_timesteps=240)
    ignored = [line for line in capfd.readouterr().err.splitlines() if "live.json" in line]
    assert len(ignored) == len(bad)
    assert all('live.json is ignored: it must be like {"learning_rate": 5e-05' in note for note in ignored)
    assert checkpoint["args"]["learning_rate"] == 1e-4 and checkpoint["optimizer"]["param_groups"][0]["lr"] == 5e-5
    rates = [value for _, value in scalars(tmp_path)["charts/learning_rate"]]
    assert rates == pytest.approx([1e-4] * 2 + [5e-5] * 13)


class Killed(Exception):
    pass


PARTS = ("agent", "target_network", "optimizer", "replay")


@pytest.mark.parametrize("death", [80, 96, 144])
def test_a_run_whose_learning_rate_was_changed_is_resumed_exactly(tmp_path, tiny, monkeypatch, death):
    """Changes at steps 80 and 112, a checkpoint at each, and at 128. Killed at 80 the file is still there."""
    results = []
    for dies in (False, True):
        folder, options = tmp_path / str(dies), dict(total_timesteps=192, checkpoint_interval=64)

        def write_or_die(folder, global_step, dies=dies):
            if rate := {80: 0.01, 112: 2e-3}.get(global_step):
                (folder / "live.json").write_text(f'{{"learning_rate": {rate}}}')
            if global_step == death != 80 and dies and not (folder / "died").exists():
                (folder / "died").touch()
                raise Killed

        def unlink(path, missing_ok=False, unlink=Path.unlink, dies=dies):
            if path.name == "live.json" and death == 80 and dies and not (path.parent / "died").exists():
                (path.parent / "died").touch()
                raise Killed
            unlink(path, missing_ok)

        with monkeypatch.context() as patch:
            at_step(patch, write_or_die)
            patch.setattr(Path, "unlink", unlink)
            try:
                results.append(train(folder, **options))
            except Killed:
                checkpoint = load(checkpoints(folder)[-1])
                resumed = shutil.copytree(folder, tmp_path / "resumed")  # this process has a lock on the other one
                results.append(train(resumed, checkpoint, **options))
    whole, resumed = results
    assert (tmp_path / "True" / "died").exists()
    assert [rate for _, rate in scalars(tmp_path / "False")["charts/learning_rate"]] == pytest.approx(
        [1e-4] * 5 + [0.01] * 2 + [2e-3] * 5
    )
    for name in PARTS:
        assert_identical(resumed[name], whole[name])


@pytest.mark.parametrize("what", ["TD error", "gradient"])
def test_what_is_not_finite_ends_the_run_before_the_step(tmp_path, tiny, monkeypatch, what):
    """An infinite TD error has a finite gradient: the Huber loss clips it."""
    before, calls = {}, []

    def td_loss(q_network, *inputs, td_loss=dqn.td_loss):
        loss, td_errors, values = td_loss(q_network, *inputs)
        calls.append(loss)
        if len(calls) == 3:
            before.update(copy.deepcopy(q_network.state_dict()), network=q_network)
            q = q_of(q_network, inputs[1]).sum()
            loss = loss + (np.inf if what == "TD error" else (q - q.detach()).abs().sqrt())
        return loss, td_errors, values

    monkeypatch.setattr(dqn, "td_loss", td_loss)
    with pytest.raises(FloatingPointError, match="not finite at step 112"):
        train(tmp_path)
    for name, parameter in before.pop("network").state_dict().items():
        assert torch.equal(parameter, before[name])


def test_a_replay_of_another_layout_is_refused():
    state = make_replay(2, 50).state_dict()
    make_replay(2, 50, gamma=0.5).load_state_dict(state)  # in a sum of one reward there is no gamma
    with pytest.raises(ValueError, match="a replay of another"):
        make_replay(2, 50, n_step=2, gamma=0.5).load_state_dict(make_replay(2, 50, n_step=2).state_dict())
    for options in (
        dict(rows=51),
        dict(num_envs=4, rows=25),
        dict(n_step=2),
        dict(per_alpha=0.5),
        dict(prioritized=False),
    ):
        with pytest.raises(ValueError, match="a replay of another"):
            make_replay(**dict(num_envs=2, rows=50) | options).load_state_dict(state)


@pytest.mark.parametrize("free, said", [(7e9, True), (7.2e9, False)])
def test_a_replay_larger_than_the_free_memory_is_named(monkeypatch, capfd, free, said):
    monkeypatch.setattr(Path, "read_text", lambda path: f"MemTotal: 64 kB\nMemAvailable: {free / 1024:.0f} kB\n")
    dqn.note_memory(dqn.Replay(dqn.Args()).frames.nbytes)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == said and all(re.fullmatch(r"note: a full replay takes 7\.1 GB, 7\.0 GB .*", x) for x in lines)


# Resume. The replay has wrapped, is in several pieces, and all is as if nothing had happened

ARGV = """--env-id BreakoutNoFrameskip-v4 --no-cuda --torch-threads 1 --env-threads 1 --num-envs 2 --num-steps 8
    --updates 1 --batch-size 4 --buffer-size 140 --learning-starts 100 --total-timesteps 480 --checkpoint-interval 160
    --log-interval 5 --n-step 2 --eval-episodes 1 --eval-epsilon 1""".split()


def small_pieces(*moment):
    """Called in the run's process: 50 frames to a piece; and the process is killed at a moment."""
    importlib.import_module("dqn_per_atari").PIECE = 50
    if moment:
        kill_in(*moment)


def run(cwd, *argv, moment=()):
    return Run("dqn_per_atari", *argv, cwd=cwd, sabotage=functools.partial(small_pieces, *moment)).wait()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of the run that nothing ended, for reading only."""
    cwd = tmp_path_factory.mktemp("reference")
    result = run(cwd, *ARGV)
    assert (result.status, result.notes) == (0, [])
    return run_folder_in(cwd)


@pytest.fixture
def resumable(reference, tmp_path, monkeypatch):
    """A copy of the reference as it was before its last checkpoint: its name on the command line, and its folder."""
    monkeypatch.setattr(dqn, "PIECE", 50)
    name = copy_run(reference, tmp_path)
    checkpoints(tmp_path / name)[-1].unlink()
    return name, tmp_path / name


def test_the_replay_of_the_reference_has_wrapped_and_is_in_pieces(reference):
    before, last = map(load, checkpoints(reference))
    assert (before["global_step"], last["global_step"]) == (320, 480)
    assert last["replay"]["count"] == 480 and len(last["replay"]["frames"]) == 3
    assert (reference / "model.pt").stat().st_size < 8e6
    assert not torch.equal(last["agent"]["trunk.0.weight"], before["agent"]["trunk.0.weight"])


def test_killed_again_and_again_and_resumed_is_bit_identical(tmp_path, reference):
    """While it learns; then as the replay is compressed; then as an old checkpoint is removed."""
    argv = ARGV
    for moment in (("dqn_per_atari.td_loss", 160, 5), ("zlib.compress", 160, 2), ("pathlib.Path.unlink", 320)):
        assert run(tmp_path, *argv, moment=moment).status == -9
        argv = ["--resume", f"runs/{run_folder_in(tmp_path).name}"]
    result = run(tmp_path, *argv)
    assert (result.status, result.notes) == (0, [])
    run_folder = run_folder_in(tmp_path)
    for path in (*checkpoints(reference), reference / "model.pt"):
        found, expected = load(run_folder / path.name), load(path)
        for name in set(PARTS) & set(expected):
            assert_identical(found[name], expected[name], f"{path.name}: {name}")
        assert found["global_step"] == expected["global_step"]
    assert not list(run_folder.glob("*.tmp"))


def test_a_damaged_piece_is_noticed_and_the_checkpoint_before_is_used(reference, tmp_path, capfd):
    run_folder = tmp_path / copy_run(reference, tmp_path)
    before, newest = checkpoints(run_folder)
    data, piece = bytearray(newest.read_bytes()), load(newest)["replay"]["frames"][1].numpy().tobytes()
    data[data.index(piece) + len(piece) // 2] ^= 1
    newest.write_bytes(data)
    assert_identical(dqn.load_checkpoint(run_folder), load(before))
    assert f"note: {newest} is damaged" in capfd.readouterr().err


@pytest.mark.parametrize(
    "flags",
    ["--buffer-size 300 --learning-starts 100", "--num-envs 1", "--per-alpha 0.5", "--no-prioritized", "--n-step 1"]
    + ["--no-dueling"],
)
def test_a_checkpoint_of_another_replay_or_network_is_refused(call, resumable, tmp_path, flags):
    files = files_below(tmp_path)
    result = call("dqn_per_atari", "--resume", resumable[0], *flags.split())
    assert (result.status, len(result.notes)) == (1, 1)
    assert result.notes[0].startswith("error: the checkpoint does not fit: ")
    assert files_below(tmp_path) == files


def test_a_run_that_has_gone_further_than_it_should_ends_where_it_is(call, resumable):
    result = call("dqn_per_atari", "--resume", resumable[0], *"--total-timesteps 150 --learning-starts 100".split())
    assert (result.status, result.notes) == (0, [])


def test_a_resumed_run_without_its_replay_waits_until_another_is_filled(call, resumable):
    name, run_folder = resumable
    before = load(checkpoints(run_folder)[-1])["optimizer"]["state"][0]["step"]
    for steps, learned in ((480, 4), (640, 4)):  # of 10 iterations of 16 steps each 4 begin with 100 transitions
        flags = f"--no-checkpoint-replay --buffer-size 300 --learning-starts 100 --total-timesteps {steps}"
        assert call("dqn_per_atari", "--resume", name, *flags.split()).status == 0
        last = load(checkpoints(run_folder)[-1])
        after = last["optimizer"]["state"][0]["step"]
        assert "replay" not in last and last["global_step"] == steps and after - before == learned
        before = after


def test_adams_epsilon_on_the_command_line_wins_over_that_of_the_checkpoint(call, resumable):
    name, run_folder = resumable
    assert call("dqn_per_atari", "--resume", name, "--adam-eps", "1e-3", "--total-timesteps", "480").status == 0
    last = load(checkpoints(run_folder)[-1])
    assert last["args"]["adam_eps"] == last["optimizer"]["param_groups"][0]["eps"] == 1e-3


def test_a_learning_rate_on_the_command_line_wins_over_that_of_the_checkpoint(call, resumable):
    """So a run that live.json has ruined can go on."""
    name, run_folder = resumable
    (run_folder / "live.json").write_text('{"learning_rate": 1e30}')
    result = call("dqn_per_atari", "--resume", name)
    assert result.status == 1 and "not finite at step" in result.notes[-1]
    assert not (run_folder / "live.json").exists()
    for flags in (["--learning-rate", "2e-4"], []):
        assert call("dqn_per_atari", "--resume", name, *flags).status == 0
        last = load(checkpoints(run_folder)[-1])
        assert last["args"]["learning_rate"] == last["optimizer"]["param_groups"][0]["lr"] == 2e-4
