"""The mathematics of dqn_per_atari.py: against definitions and plain re-computations, on toys, and on real games.

A `Ledger` writes down everything that happens in some games in the plainest way, whole stacks and all. What a replay of
single frames gives back is compared with it, bit by bit.
"""

import copy
import functools
import importlib
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import Run, checkpoints, copy_run, files_below, load, run_folder_in, scalars
from test_resume import assert_identical, curves, kill_in

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
        np.testing.assert_array_equal(tree[np.arange(size)], leaves)
        cumulated = np.cumsum(leaves)
        assert tree.nodes[1] == cumulated[-1]
        if tree.nodes[1]:
            draws = np.concatenate([rng.random(20) * tree.nodes[1], rng.integers(cumulated[-1], size=20)])
            np.testing.assert_array_equal(tree.find(draws), np.searchsorted(cumulated, draws, side="right"))
        if k % 100 == 0:
            tree.set(np.arange(size), 0.0)
            leaves[:] = 0
            with pytest.raises(ValueError, match="nothing can be drawn"):
                tree.sample(3, rng)


def test_sums_do_not_drift():
    rng, tree = np.random.default_rng(0), dqn.SumTree(1000)
    for _ in range(5000):
        tree.set(rng.integers(1000, size=32), 10 ** rng.uniform(-9, 3, 32))
    rebuilt = dqn.SumTree(1000)
    rebuilt.set(np.arange(1000), tree[np.arange(1000)])
    np.testing.assert_array_equal(tree.nodes, rebuilt.nodes)  # to the last bit: the sums depend on the leaves only
    assert tree.nodes[1] == pytest.approx(tree[np.arange(1000)].sum(), rel=1e-14)


def test_no_leaf_of_zero_is_ever_drawn():
    """The largest number below the total, where the last leaves are zero: rounding leads beyond the last sum."""
    for seed in range(500):
        rng = np.random.default_rng(seed)
        tree, filled = dqn.SumTree(200), rng.integers(1, 150)
        tree.set(np.arange(filled), rng.random(filled) * (rng.random(filled) < 0.7) + 1e-9 * (np.arange(filled) == 0))
        draws = np.array([0.0, np.nextafter(tree.nodes[1], 0), tree.nodes[1], *rng.random(20) * tree.nodes[1]])
        assert (tree[tree.find(draws)] > 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_what_is_no_priority_is_refused_and_changes_nothing(value):
    tree = dqn.SumTree(5)
    tree.set(np.arange(5), np.ones(5))
    with pytest.raises(FloatingPointError, match="not finite"):
        tree.set(np.arange(3), np.array([2.0, value, 2.0]))
    assert tree.nodes[1] == 5 and (tree[np.arange(5)] == 1).all()


@pytest.mark.parametrize("stratified", [True, False])
def test_sampled_frequencies_are_the_probabilities(stratified):
    rng, tree, draws = np.random.default_rng(0), dqn.SumTree(77), 200_000
    values = rng.random(77) ** 3 * (rng.random(77) < 0.8)
    tree.set(np.arange(77), values)
    if stratified:
        drawn = np.concatenate([tree.sample(40, rng) for _ in range(draws // 40)])
    else:
        drawn = tree.find(rng.random(draws) * tree.nodes[1])
    expected = draws * values / values.sum()
    counts = np.bincount(drawn, minlength=77)
    assert (counts[expected == 0] == 0).all()
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    degrees = (expected > 0).sum() - 1
    # Mean `degrees`, variance twice that. Strata bring the counts closer to what is expected than chance does
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)
    assert stratified or chi_square > degrees - 4 * np.sqrt(2 * degrees)


def test_each_part_of_the_total_gives_one_draw():
    tree = dqn.SumTree(32)
    tree.set(np.arange(32), np.ones(32))
    np.testing.assert_array_equal(tree.sample(32, np.random.default_rng(0)), np.arange(32))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_the_papers(beta):
    leaves = np.random.default_rng(0).random(500)
    minibatch = np.random.default_rng(1).integers(500, size=32)
    w = [(500 * leaves[i] / leaves.sum()) ** -beta for i in minibatch]
    np.testing.assert_allclose(dqn.importance_weights(leaves[minibatch], beta), np.array(w) / max(w), rtol=1e-12)


# The replay against a ledger


def make_replay(num_envs=3, rows=40, device="cpu", **options):
    return dqn.Replay(dqn.Args(num_envs=num_envs, buffer_size=num_envs * rows, **options), device)


class Ledger:
    """What happened in the games beside a replay: for each row that was ever written a transition, or None."""

    def __init__(self, replay):
        self.replay, self.streams, self.drawn = replay, [[] for _ in replay.games], set()
        self.at_cut = self.at_life = self.at_truncation = 0
        self.late = None  # rows whose priorities arrive when the games have gone on

    def step(self, obs, actions, rewards, terminations, truncations, over, after, final):
        """One step: whole stacks (N, 4, 84, 84) before and after it; where a game is over, `final` is after it."""
        self.replay.add(obs[:, -1], actions, rewards, terminations, truncations)
        if over.any():
            self.replay.end(np.flatnonzero(over), final[over, -1])
        for i, stream in enumerate(self.streams):
            next_obs = final[i] if over[i] else after[i]
            ends = {"terminated": bool(terminations[i]), "truncated": bool(truncations[i]), "over": bool(over[i])}
            stream.append({"obs": obs[i].copy(), "next_obs": next_obs.copy(), "action": actions[i]} | ends)
            stream[-1]["reward"] = rewards[i]
            if over[i]:
                stream.append(None)  # a row for the last observation

    def cut(self, obs):
        self.replay.cut(obs[:, -1])
        for stream in self.streams:
            if stream[-1] is not None:
                stream[-1] |= {"truncated": True, "over": True}
                stream.append(None)

    def can_be_drawn(self):
        """{row: (stream, place)} of the transitions all of whose frames the rings still hold."""
        found, n, N = {}, self.replay.args.n_step, len(self.streams)
        length = self.replay.rows // N
        for i, stream in enumerate(self.streams):
            for place in range(max(0, len(stream) - length), len(stream)):
                all_there = place + n < len(stream) or any(s is None for s in stream[place : place + n + 1])
                lost = place < len(stream) - length + 3
                if stream[place] and all_there and not lost:
                    found[place % length * N + i] = i, place
        return found

    def check(self, size, rng, device="cpu"):
        """Draw once and compare."""
        args, found = self.replay.args, self.can_be_drawn()
        if self.late is not None:
            self.replay.update(self.late, torch.from_numpy(rng.normal(size=len(self.late))))
        drawable = np.flatnonzero(self.replay.tree[np.arange(self.replay.rows)])
        assert drawable.tolist() == sorted(found)
        if not found:
            return
        rows, (pixels, actions, returns, discounts, _) = self.replay.sample(size, 0.5, rng, device)
        self.late = rows
        assert pixels.dtype == torch.uint8 and pixels.device.type == torch.device(device).type
        for b, row in enumerate(rows.tolist()):
            i, place = found[row]
            self.drawn.add((i, place))
            expected, R = self.streams[i][place], 0.0
            for k in range(args.n_step):
                last = self.streams[i][place + k]
                R += args.gamma**k * last["reward"]
                if last["terminated"] or last["truncated"]:
                    break
            np.testing.assert_array_equal(pixels[b, :4].cpu(), expected["obs"])
            np.testing.assert_array_equal(pixels[b, 4:].cpu(), last["next_obs"])
            assert actions[b] == expected["action"]
            assert returns[b].item() == pytest.approx(R, abs=1e-6)
            assert discounts[b].item() == pytest.approx(0 if last["terminated"] else args.gamma ** (k + 1))
            self.at_life += last["terminated"] and not last["over"]
            self.at_truncation += last["truncated"] and not last["terminated"]


@pytest.mark.parametrize(
    "env_id, n_step, rows, frames",
    [("BreakoutNoFrameskip-v4", 1, 150, 400), ("ALE/Pong-v5", 1, 100, 300), ("BreakoutNoFrameskip-v4", 4, 61, 500)],
)
def test_stacks_are_the_environments(monkeypatch, env_id, n_step, rows, frames):
    """Rings that wrap several times; games that end, are truncated, lose lives, and are cut off for checkpoints."""
    make = dqn.AtariVectorEnv
    monkeypatch.setattr(dqn, "AtariVectorEnv", lambda **kw: make(**kw | {"max_num_frames_per_episode": frames}))
    ledger, rng = Ledger(make_replay(3, rows, n_step=n_step)), np.random.default_rng(0)
    games = dqn.Games(dqn.make_envs(dqn.Args(env_id=env_id, env_threads=1), 3))
    obs, cuts, ends = games.reset([1, 2, 3]), 0, 0
    for t in range(1, 400):
        actions = rng.integers(games.envs.single_action_space.n, size=3)
        games.press_fire(actions)
        after, rewards, terminations, truncations, over, final, _ = games.step(actions)
        ledger.step(obs, actions, np.sign(rewards), terminations, truncations, over, after, final)
        obs, ends = after, ends + over.sum()
        if t % 140 == 0:
            ledger.cut(obs)
            obs, cuts = games.reset([t, t + 1, t + 2]), cuts + 1
        if t % 3 == 0:
            ledger.check(32, rng)
    assert len(ledger.streams[0]) > 2.5 * rows and cuts == 2 and ends > 3
    assert len(ledger.drawn) > 1000 and ledger.at_truncation > 30
    assert (ledger.at_life > 30) == ("Breakout" in env_id)


def play_random_frames(ledger, steps, rng, device="cpu", check=2):
    """Games of a few steps with frames of noise, ended in every way: a life lost, the last one, a time limit, both."""
    N = len(ledger.streams)
    obs = np.zeros((N, 4, 84, 84), np.uint8)
    obs[:, -1] = rng.integers(256, size=(N, 84, 84))
    for t in range(steps):
        after = np.roll(obs, -1, axis=1)
        after[:, -1] = rng.integers(256, size=(N, 84, 84))
        final, dice = after.copy(), rng.random(N)
        truncations, over = dice < 0.08, dice < 0.16
        terminations = (dice > 0.04) & (dice < 0.28)
        after[over, :3] = 0
        ledger.step(obs, rng.integers(9, size=N), rng.integers(-1, 2, N), terminations, truncations, over, after, final)
        obs = after
        if t % 31 == 30:
            ledger.cut(obs)
            obs[:, :3] = 0
        if t % check == 0:
            ledger.check(16, rng, device)
    ledger.cut(obs)


DEVICES = [("cpu", "cpu"), *([("cpu", "cuda"), ("cuda", "cuda")] if CUDA else [])]  # of the frames, of minibatches


@pytest.mark.parametrize("frames, minibatches", DEVICES)
@pytest.mark.parametrize("n_step", [1, 2, 3, 7])
def test_n_step_targets_are_the_double_sum(n_step, frames, minibatches):
    ledger = Ledger(make_replay(3, 2 * (n_step + 4) + 5, frames, n_step=n_step, gamma=0.9))
    play_random_frames(ledger, 250, np.random.default_rng(n_step), minibatches)
    assert len(ledger.drawn) > 400 and min(ledger.at_life, ledger.at_truncation) > 50


def test_new_transitions_have_the_highest_priority_of_all_so_far():
    replay = make_replay(1, 60)
    step = np.zeros((1, 84, 84), np.uint8), np.zeros(1, int), np.zeros(1), np.zeros(1, bool), np.zeros(1, bool)
    for _ in range(9):
        replay.add(*step)
    np.testing.assert_array_equal(replay.tree[np.arange(9)], [*[1.0] * 8, 0.0])  # the newest has no successor yet
    replay.update(np.array([2, 4]), torch.tensor([-7.0, 0.0]))
    replay.update(np.array([2]), torch.tensor([0.5]))
    replay.add(*step)
    eps, alpha = 1e-6, replay.args.per_alpha
    expected = [1, 1, (0.5 + eps) ** alpha, 1, eps**alpha, 1, 1, 1, (7 + eps) ** alpha]
    np.testing.assert_allclose(replay.tree[np.arange(9)], expected, rtol=1e-12)
    with pytest.raises(FloatingPointError):
        replay.update(np.array([1]), torch.tensor([np.nan]))


def test_without_priorities_all_are_equal():
    replay = make_replay(1, 30, prioritized=False)
    play_random_frames(Ledger(replay), 40, np.random.default_rng(0))
    rows, (*_, weights) = replay.sample(8, 0.4, np.random.default_rng(0))
    replay.update(rows, torch.arange(8))
    assert set(replay.tree[np.arange(30)]) == {0.0, 1.0} and (weights == 1).all()


def test_weights_and_rows_of_a_sample_belong_together():
    replay, rng = make_replay(2, 50), np.random.default_rng(0)
    play_random_frames(Ledger(replay), 60, rng)
    leaves = replay.tree[np.arange(100)]
    drawable = np.flatnonzero(leaves)
    replay.update(drawable, torch.from_numpy(rng.normal(size=len(drawable))))
    leaves = replay.tree[np.arange(100)]
    rows, (*_, weights) = replay.sample(32, 0.7, rng)
    w = (len(drawable) * leaves[rows] / leaves.sum()) ** -0.7
    np.testing.assert_allclose(weights, w / w.max(), rtol=1e-5)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_of_a_full_replay_is_the_formulas_and_is_taken_as_it_fills():
    args = dqn.Args(num_envs=8, buffer_size=40_000)
    step = [np.ones((8, 84, 84), np.uint8), *np.zeros((4, 8), bool)]
    before = resident_bytes()
    replay, taken = dqn.Replay(args), []
    for k in range(5001):
        if k in (0, 2500, 5000):
            taken.append(resident_bytes() - before)
        replay.add(*step)
    assert taken == pytest.approx([0, dqn.replay_bytes(args) / 2, dqn.replay_bytes(args)], abs=15e6)
    assert dqn.replay_bytes(dqn.Args(buffer_size=1_000_000)) < 7.5e9


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_checkpoint_keeps_no_memory_of_what_it_packs(monkeypatch):
    monkeypatch.setattr(dqn, "PIECE", 400)
    replay, rng = make_replay(8, 2500), np.random.default_rng(0)
    for rows in replay.frames.split(5000):
        rows.copy_(torch.from_numpy(rng.integers(2, size=rows.shape, dtype=np.uint8)))
    replay.filled = replay.rows
    before = resident_bytes()
    state = replay.state_dict()
    packed = sum(data.nbytes for data in state["frames"])
    assert resident_bytes() - before - packed < 30e6 < packed


@pytest.mark.parametrize("game", ["Breakout", "JourneyEscape", "YarsRevenge"])
def test_a_checkpoint_of_a_million_frames_is_less_than_a_gigabyte(game):
    """The screens of the last two are full of noise."""
    replay, rng = make_replay(1, 1500, env_id=f"{game}NoFrameskip-v4", env_threads=1), np.random.default_rng(0)
    games = dqn.Games(dqn.make_envs(replay.args, 1))
    pixels = games.reset([1])
    while replay.filled < 1500:
        actions = rng.integers(games.envs.single_action_space.n, size=1)
        games.press_fire(actions)
        frames = pixels[:, -1]
        pixels, rewards, terminations, truncations, over, final_pixels, _ = games.step(actions)
        replay.add(frames, actions, np.sign(rewards), terminations, truncations)
        if over.any():
            replay.end(np.flatnonzero(over), final_pixels[over, -1])
    state = replay.state_dict()
    frames = state.pop("frames")
    total = sum(x.nbytes for x in [*frames, *state.values()] if isinstance(x, torch.Tensor))
    assert total / replay.filled * 1e6 < 1e9


# The network and the loss


def make_network(num_actions=6, **options):
    return dqn.QNetwork(num_actions, **options).to(DEVICE)


def make_batch(size=16, num_actions=6):
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(256, size=(size, 8, 84, 84), dtype=np.uint8))
    columns = np.stack([3 * rng.normal(size=size), 0.9 * (rng.random(size) < 0.7), rng.random(size)])
    actions = torch.from_numpy(rng.integers(num_actions, size=size))
    return tuple(x.to(DEVICE) for x in (pixels, actions, *torch.from_numpy(columns.astype(np.float32))))


def plain_q(network, pixels):
    """Q (B, A) in float64: [DQN] Methods; [DUEL] Eq. (9)."""
    p = {name: x.detach().double().cpu() for name, x in network.state_dict().items()}

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    x = pixels.cpu().double() / 255
    for k, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.conv2d(x, p[f"trunk.{k}.weight"], p[f"trunk.{k}.bias"], stride).relu()
    x = linear(x.flatten(1), "trunk.7").relu()
    if "head.weight" in p:
        return linear(x, "head")
    value, advantage = (linear(linear(x, f"{name}.0").relu(), f"{name}.2") for name in ("value", "advantage"))
    return value + advantage - advantage.sum(1, keepdim=True) / advantage.shape[1]


@pytest.mark.parametrize("dueling", [True, False])
def test_network_is_the_papers(dueling):
    network, pixels = make_network(dueling=dueling), make_batch()[0][:, :4]
    torch.testing.assert_close(network(pixels).double().cpu(), plain_q(network, pixels), rtol=1e-4, atol=1e-5)


def test_advantages_have_mean_zero():
    """So V is the mean of Q, whatever is added to all advantages."""
    network, pixels = make_network(), make_batch()[0][:, :4]
    value = network.value(network.trunk(pixels.float() / 255))
    torch.testing.assert_close(network(pixels).mean(1, keepdim=True), value, rtol=1e-4, atol=1e-5)
    before = network(pixels)
    network.advantage[2].bias.data += 3
    torch.testing.assert_close(network(pixels), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_loss_is_the_papers(double, dueling):
    q_network, target_network = make_network(dueling=dueling), make_network(dueling=dueling)
    for network in (q_network, target_network):  # values apart, so that the two networks disagree
        [*network.parameters()][-2].data.mul_(20)
    batch = pixels, actions, returns, discounts, weights = make_batch()
    loss, td_errors, values = dqn.td_loss(q_network, target_network, *batch, double=double)

    q, next_q = plain_q(q_network, pixels[:, :4]), plain_q(q_network, pixels[:, 4:])
    next_target = plain_q(target_network, pixels[:, 4:])
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


def test_exploration_is_random_as_often_as_epsilon_says():
    q_values, rng = torch.eye(4).repeat(25_000, 1), np.random.default_rng(0)
    for epsilon in (0.0, 0.3, 1.0):
        actions = dqn.explore(q_values, epsilon, rng)
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
            replay.add(np.full((1, 84, 84), s, np.uint8), one(right), one(right * (s == n - 1)), one(ended), one(False))
            if ended:
                break
        replay.end(one(0), np.zeros((1, 84, 84), np.uint8))
    assert (replay.tree[np.arange(replay.rows)] > 0).sum() == 2 ** (n + 1) - 2
    Q, truth = rng.normal(0, 0.1, (n, 2)), np.zeros((n, 2))
    truth[:, 1] = replay.args.gamma ** np.arange(n - 1, -1, -1)
    for updates in range(1, 100_000):
        rows, (pixels, action, reward, discount, _) = replay.sample(1, 0.0, rng)
        s, next_s = pixels[0, 3, 0, 0].item(), pixels[0, 7, 0, 0].item()
        delta = reward.item() + discount.item() * Q[next_s].max() - Q[s, action.item()]
        Q[s, action.item()] += 0.25 * delta
        replay.update(rows, torch.tensor([delta]))
        if ((Q - truth) ** 2).mean() < 1e-3:
            return updates


def test_blind_cliffwalk_takes_several_times_fewer_updates_with_priorities():
    uniform, prioritized = ([updates_of_blind_cliffwalk(7, flag, seed) for seed in range(3)] for flag in (False, True))
    assert min(uniform) > 3 * max(prioritized)  # five times in the median


class Tiny:
    """Games of 8 steps. Each frame is bright on the left or the right; a step pays 3 for the side of the frame before.

    That frame is in the stack, but in a game's first step, which pays nothing. At step 5 a life is lost; the last game
    of a vector is truncated at step 8, the others terminate.
    """

    best = 21.0

    def __init__(self, num_envs):
        self.num_envs, self.single_action_space = num_envs, SimpleNamespace(n=2)
        self.ale = SimpleNamespace(get_action_set=lambda: [])

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
        self.stacks[over, 3] //= 2  # a new game's first frame is not the old one's last
        info = {"episode_frame_number": 4 * self.t, "final_obs": final}
        return self.stacks.copy(), rewards, terminations, truncations, info

    def close(self):
        pass


@pytest.fixture
def tiny(monkeypatch):
    """Any game is a tiny one."""
    monkeypatch.setattr(dqn, "make_envs", lambda args, num_envs, colour=False: Tiny(num_envs))


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
    "replay on the GPU": dict(replay_on_gpu=True),
}


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
    if mode == "replay on the GPU" and not cuda:
        pytest.skip("no GPU")
    checkpoint = train(tmp_path, cuda=cuda, **MODES[mode])
    assert all(tensor.isfinite().all() for tensor in checkpoint["agent"].values())
    points = scalars(tmp_path)
    assert len(points["losses/td_loss"]) == 5 and len(points["charts/epsilon"]) == 10
    if mode in ("compiled", "replay on the GPU"):
        other = train(tmp_path / "other", cuda=cuda)
        for name, tensor in other["agent"].items():
            torch.testing.assert_close(checkpoint["agent"][name], tensor, rtol=0, atol=1e-4)


def test_training_is_adam_on_the_minibatches_with_a_target_network(tmp_path, monkeypatch, tiny):
    """The minibatches of a run, replayed with torch.optim on ordinary networks, give the run's parameters."""
    batches, drawn, errors, updated = [], [], [], []
    rates = dict(learning_rate=3e-4, max_grad_norm=0.7, adam_eps=1e-3)

    def td_loss(*inputs, double, td_loss=dqn.td_loss):
        batches.append(copy.deepcopy(inputs[2:]))
        errors.append((outputs := td_loss(*inputs, double=double))[1].tolist())
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
    assert len(batches) == 2 * 10  # 16 steps per iteration; 80 can be drawn after the sixth
    assert set(torch.cat([returns for _, _, returns, *_ in batches]).tolist()) == {0, 1}  # the sign of 3
    monkeypatch.undo()
    torch.manual_seed(1)
    q_network, target_network = make_network(2), make_network(2)
    target_network.load_state_dict(q_network.state_dict())
    adam, norms = torch.optim.Adam(q_network.parameters(), lr=3e-4, eps=1e-3), []
    start = copy.deepcopy(q_network.state_dict())
    for k, batch in enumerate(batches):
        loss, *_ = dqn.td_loss(q_network, target_network, *batch, double=True)
        adam.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(q_network.parameters(), 0.7).item())
        adam.step()
        if k % 2 == 1 and (6 + k // 2) % 3 == 0:
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
    explore, sample = dqn.explore, dqn.Replay.sample

    def spy_on_explore(q_values, epsilon, rng):
        used["charts/epsilon"].append(epsilon)
        return explore(q_values, epsilon, rng)

    def spy_on_sample(self, size, beta, *rest):
        used["charts/per_beta"].append(beta)
        return sample(self, size, beta, *rest)

    monkeypatch.setattr(dqn, "explore", spy_on_explore)
    monkeypatch.setattr(dqn.Replay, "sample", spy_on_sample)
    train(tmp_path, total_timesteps=640, updates=2, batch_size=2, learning_starts=600)
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


def test_a_run_stores_how_games_end_and_their_last_frames(tmp_path, tiny, monkeypatch):
    """In 160 steps each of 4 games ends five times, the last one by truncation; on its last frame nobody acts."""
    played, step = [], dqn.Games.step

    def spy(self, actions):
        played.append(result := step(self, actions))
        return result

    monkeypatch.setattr(dqn.Games, "step", spy)
    train(tmp_path, eval_episodes=1)
    checkpoint = checkpoints(tmp_path)[-1]
    replay = make_replay(4, 100)
    replay.load_state_dict(load(checkpoint)["replay"])
    rows = np.arange(replay.filled).reshape(-1, 4)  # one column per game
    ends = np.arange(8, len(rows), 9)  # 8 steps, then a row for the last observation
    assert len(ends) == 5 and (replay.tree[rows[ends].ravel()] == 0).all()
    last = [final_pixels[:, -1] for *_, over, final_pixels, _ in played if over.all()][:5]
    np.testing.assert_array_equal(replay.frames[rows[ends].ravel()].view(5, 4, 84, 84), last)
    for flags, games in ((replay.truncations, [3]), (replay.terminations, [0, 1, 2])):
        at_the_end = flags[rows[ends - 1]]
        assert at_the_end[:, games].all() and at_the_end.sum() == 5 * len(games)
    assert replay.truncations.sum() == 5


def test_only_the_last_life_ends_the_return_where_lives_do_not_count(tmp_path, tiny):
    """In 160 steps there are 20 games of two lives; 5 are cut off in their last one."""
    for episodic_life, ends in ((True, 35), (False, 15)):
        checkpoint = train(tmp_path / str(ends), episodic_life=episodic_life)
        assert checkpoint["replay"]["terminations"].sum() == ends


def test_fire_is_pressed_on_the_first_step_of_each_life_and_stored_as_it_was_played(tmp_path, monkeypatch):
    played, stored = [], []

    class Fire(Tiny):
        def __init__(self, num_envs):
            super().__init__(num_envs)
            self.ale.get_action_set = lambda: [dqn.ale_py.Action.NOOP, dqn.ale_py.Action.FIRE]

        def step(self, actions):
            played.append((self.t.copy(), actions.copy()))
            return super().step(actions)

    def store(self, frames, actions, *rest, add=dqn.Replay.add):
        stored.append(actions.copy())
        return add(self, frames, actions, *rest)

    monkeypatch.setattr(dqn, "make_envs", lambda args, num_envs, colour=False: Fire(num_envs))
    monkeypatch.setattr(dqn.Replay, "add", store)
    train(tmp_path)
    assert len(stored) == 40 and len(played) > 40  # training's and the evaluation's
    np.testing.assert_array_equal([actions for _, actions in played[:40]], stored)
    for t, actions in played:
        assert actions[np.isin(t, (0, 5))].all()
    assert any(0 in actions for _, actions in played[:40]) and any(0 in actions for _, actions in played[40:])


def test_live_json_changes_the_run_and_is_remembered(tmp_path, tiny, monkeypatch, capfd):
    bad = [
        "{",
        '{"gamma": 0.5}',
        '{"learning_rate": 5e-5, "gamma": 0.5}',
        '{"learning_rate": -1}',
        "[]",
        '{"learning_rate": true}',
    ]
    bad += [f'{{"learning_rate": {10**400}}}', "[" * 100_000]
    good = '\ufeff{"learning_rate": 5e-05}'  # as some editors begin a file
    texts = {16 * k: text for k, text in enumerate([good, good, *bad, None, good, '{"learning_rate": 0.01}'], start=2)}
    show = dqn.Progress.show

    def write(self, global_step, recent_returns):
        path = tmp_path / "live.json"
        path.unlink(missing_ok=True)
        if texts.get(global_step):
            path.write_text(texts[global_step], encoding="utf-8")
        show(self, global_step, recent_returns)

    monkeypatch.setattr(dqn.Progress, "show", write)
    checkpoint = train(tmp_path, total_timesteps=224)
    first, *ignored, last = [line for line in capfd.readouterr().err.splitlines() if line]
    assert "live.json changes the learning rate at step 32: 0.0001 -> 5e-05" in first
    assert "live.json changes the learning rate at step 224: 5e-05 -> 0.01" in last
    assert len(ignored) == len(bad)
    assert all('live.json is ignored: it must be like {"learning_rate": 5e-05' in note for note in ignored)
    changes = [[32, 1e-4, 5e-5], [224, 5e-5, 0.01]]
    assert checkpoint["live"] == {"text": texts[224], "changes": changes}
    assert checkpoint["args"]["learning_rate"] == 0.01 and checkpoint["optimizer"]["param_groups"][0]["lr"] == 5e-5
    rates = [value for _, value in scalars(tmp_path)["charts/learning_rate"]]
    assert rates == pytest.approx([1e-4] * 2 + [5e-5] * 12)


class Killed(Exception):
    pass


@pytest.mark.parametrize("death", [96, 128, 144])
def test_changes_by_live_json_after_the_last_checkpoint_are_made_again(tmp_path, tiny, monkeypatch, death):
    """Changes at steps 80 and 112, checkpoints at 64 and 128. Where the run died the file is another meanwhile."""
    show, results = dqn.Progress.show, []
    for dies in (False, True):

        def write_or_die(self, global_step, recent_returns, folder=tmp_path / str(dies), dies=dies):
            if global_step == death and dies and not (folder / "died").exists():
                (folder / "died").touch()
                raise Killed
            if rate := {80: 0.01, 112: 2e-3}.get(global_step):
                (folder / "live.json").write_text(f'{{"learning_rate": {rate}}}')
            show(self, global_step, recent_returns)

        monkeypatch.setattr(dqn.Progress, "show", write_or_die)
        folder, options = tmp_path / str(dies), dict(total_timesteps=192, checkpoint_interval=64)
        try:
            results.append(train(folder, **options))
        except Killed:
            checkpoint = load(checkpoints(folder)[-1])
            options["learning_rate"] = checkpoint["args"]["learning_rate"]  # as parse_args does
            results.append(train(folder, checkpoint, **options))
    whole, resumed = results
    assert whole["live"]["changes"] == [[80, 1e-4, 0.01], [112, 0.01, 2e-3]]
    assert_identical(resumed, whole)


def test_a_run_that_live_json_ruined_goes_on_when_the_file_is_mended(call, monkeypatch, resumable):
    name, run_folder = resumable
    monkeypatch.setattr(dqn, "PIECE", 50)
    checkpoints(run_folder)[-1].unlink()
    for rate, status in ((1e30, 1), (1e30, 1), (1e-5, 0)):
        (run_folder / "live.json").write_text(f'{{"learning_rate": {rate}}}')
        result = call("dqn_per_atari", "--resume", name)
        assert result.status == status and ("is not finite" in result.stderr) == bool(status)
    assert [change[1:] for change in load(checkpoints(run_folder)[-1])["live"]["changes"]] == [[1e-4, 1e-5]]


def test_a_learning_rate_on_resuming_wins_over_what_live_json_says(call, monkeypatch, resumable):
    """And the file wins over it when it changes again; also where the run died before its next checkpoint."""
    name, run_folder = resumable
    monkeypatch.setattr(dqn, "PIECE", 50)
    checkpoints(run_folder)[-1].unlink()
    (run_folder / "live.json").write_text('{"learning_rate": 1e30}')
    assert call("dqn_per_atari", "--resume", name).status == 1
    train_, killed = dqn.train, []
    monkeypatch.setattr(dqn, "train", lambda *_: killed.append(1))
    call("dqn_per_atari", "--resume", name, "--learning-rate", "2e-4")
    monkeypatch.setattr(dqn, "train", train_)
    result = call("dqn_per_atari", "--resume", name)
    assert killed and result.status == 0 and "changes" not in result.stderr
    last = load(checkpoints(run_folder)[-1])
    assert last["args"]["learning_rate"] == 2e-4 and last["live"]["changes"] == []
    (run_folder / "live.json").write_text('{"learning_rate": 3e-5}')
    args = dqn.Args(**last["args"])
    dqn.read_live(run_folder / "live.json", args, last["live"], last["global_step"])
    assert args.learning_rate == 3e-5


@pytest.mark.parametrize(
    "record",
    ["[1, 2]", '{"changes": 3}', '{"changes": [4]}', '{"text": "", "changes": [[0, 1e-4, 1e30]]}', "not JSON"],
)
def test_a_record_of_changes_that_is_none_or_of_another_learning_rate_changes_nothing(
    call, monkeypatch, resumable, record
):
    name, run_folder = resumable
    monkeypatch.setattr(dqn, "PIECE", 50)
    checkpoints(run_folder)[-1].unlink()
    (run_folder / "live_changes.json").write_text(record)
    result = call("dqn_per_atari", "--resume", name, "--learning-rate", "2e-4")
    assert result.status == 0 and "changes" not in result.stderr
    assert load(checkpoints(run_folder)[-1])["args"]["learning_rate"] == 2e-4


def test_the_histogram_is_of_priorities(tmp_path, tiny, monkeypatch):
    """New transitions have the highest priority there ever was, whatever alpha is."""
    logged = {}
    monkeypatch.setattr(
        dqn.SummaryWriter, "add_histogram", lambda self, tag, values, step: logged.update({tag: values})
    )
    replay = train(tmp_path, per_alpha=0.5, checkpoint_interval=32)["replay"]
    assert logged["charts/priorities"].max() == pytest.approx(replay["max_priority"])
    assert replay["max_priority"] != 1.0


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
    assert (result.status, result.stderr) == (0, "")
    return run_folder_in(cwd)


def assert_same_run(run_folder, reference):
    for path in (*checkpoints(reference), reference / "model.pt"):
        assert_identical(load(run_folder / path.name), load(path), path.name)
    assert curves(run_folder) == curves(reference)


def test_the_replay_of_the_reference_has_wrapped_and_is_in_pieces(reference):
    before, last = map(load, checkpoints(reference))
    assert last["replay"]["released"] > 3 * 140 and len(before["replay"]["frames"]) == 4
    assert (reference / "model.pt").stat().st_size < 8e6
    assert all(tensor.isfinite().all() for tensor in last["agent"].values())
    assert not torch.equal(last["agent"]["trunk.0.weight"], before["agent"]["trunk.0.weight"])


def test_killed_again_and_again_and_resumed_is_bit_identical(tmp_path, reference):
    """While it learns; then as the replay is compressed; then as an old checkpoint is removed."""
    argv = ARGV
    for moment in (("dqn_per_atari.td_loss", 160, 5), ("zlib.compress", 160, 2), ("pathlib.Path.unlink", 320)):
        assert run(tmp_path, *argv, moment=moment).status == -9
        argv = ["--resume", f"runs/{run_folder_in(tmp_path).name}"]
    assert (tmp_path / argv[1] / "checkpoint_320.pt").exists()
    result = run(tmp_path, *argv)
    assert (result.status, result.stderr) == (0, "")
    assert_same_run(run_folder_in(tmp_path), reference)


@pytest.fixture
def resumable(reference, tmp_path):
    """A copy of the reference as it was before its last checkpoint was used: what the command line calls it, and it."""
    name = copy_run(reference, tmp_path)
    (tmp_path / name / "model.pt").unlink()
    return name, tmp_path / name


def test_a_damaged_piece_is_noticed_and_the_checkpoint_before_is_used(call, reference, resumable, monkeypatch):
    name, run_folder = resumable
    monkeypatch.setattr(dqn, "PIECE", 50)
    before, newest = checkpoints(run_folder)
    data, piece = bytearray(newest.read_bytes()), load(newest)["replay"]["frames"][1].numpy().tobytes()
    data[data.index(piece) + len(piece) // 2] ^= 1
    newest.write_bytes(data)
    result = call("dqn_per_atari", "--resume", name)
    assert result.status == 0
    assert re.fullmatch(rf"note: [^\n]*{newest.name}[^\n]*; using {before.name}\n", result.stderr)
    assert_same_run(run_folder, reference)


def test_a_replay_of_another_shape_is_refused(call, resumable, tmp_path):
    files = files_below(tmp_path)
    for flags in ("--buffer-size 300", "--num-envs 3", "--per-alpha 0.5", "--no-prioritized"):
        result = call("dqn_per_atari", "--resume", resumable[0], *flags.split())
        assert (result.status, result.stdout) == (2, "")
        flag = flags.split()[0].replace("no-", "")
        assert re.search(rf"^error: {flag} [^\n]*--no-checkpoint-replay[^\n]*\n$", result.stderr, re.M)
    # 160 steps are left, and 300 transitions are wanted before anything is learned
    flags = "--no-checkpoint-replay --buffer-size 400 --learning-starts 300 --total-timesteps 640"
    result = call("dqn_per_atari", "--resume", resumable[0], *flags.split())
    assert (result.status, result.stdout) == (2, "")
    assert re.search(r"^error: --learning-starts 300 [^\n]*\n$", result.stderr, re.M)
    assert files_below(tmp_path) == files


def test_a_network_of_another_shape_is_refused(call, resumable, tmp_path):
    files = files_below(tmp_path)
    for flag in ("--resume", "--evaluate"):
        result = call("dqn_per_atari", flag, resumable[0], "--no-dueling")
        assert (result.status, result.stdout) == (2, "")
        assert re.search(r"^error: [^\n]*--no-dueling[^\n]*\n$", result.stderr, re.M)
    assert files_below(tmp_path) == files


def test_a_run_that_has_gone_further_than_it_should_ends_where_it_is(call, monkeypatch, resumable):
    monkeypatch.setattr(dqn, "PIECE", 50)
    result = call("dqn_per_atari", "--resume", resumable[0], "--total-timesteps", "150")
    assert result.status == 0 and "rounded up" not in result.stderr


def test_resuming_without_the_replay_says_that_it_is_not_exact(call, monkeypatch, reference, resumable):
    name, run_folder = resumable
    monkeypatch.setattr(dqn, "PIECE", 50)
    checkpoints(run_folder)[-1].unlink()
    result = call("dqn_per_atari", "--resume", name, "--no-checkpoint-replay", "--buffer-size", "300")
    assert result.status == 0 and "note: the replay begins empty: this is not exact" in result.stderr
    last = load(checkpoints(run_folder)[-1])
    assert last["replay"] is None and last["global_step"] == 480
    # Nothing was learned until the replay was warm again, and then something was
    updates = last["optimizer"]["state"][0]["step"] - load(checkpoints(reference)[0])["optimizer"]["state"][0]["step"]
    assert 0 < updates < 160 // 16
    assert "note: the replay begins empty" in call("dqn_per_atari", "--resume", name).stderr


@pytest.mark.parametrize("frames, minibatches", DEVICES)
@pytest.mark.parametrize("steps", [0, 12, 49, 100])
def test_a_replay_is_saved_and_goes_on_as_if_nothing_had_happened(steps, frames, minibatches, monkeypatch):
    """Empty, hardly begun, almost full and wrapped; then with more games beside the one that was saved."""
    monkeypatch.setattr(dqn, "PIECE", 30)
    replay, other = (make_replay(2, 50, frames, n_step=2) for _ in range(2))
    ledger, rng = Ledger(replay), np.random.default_rng(0)
    if steps:
        play_random_frames(ledger, steps, rng, minibatches)
        drawable = np.flatnonzero(replay.tree[np.arange(100)])
        replay.update(drawable[:5], torch.arange(-2.0, 3.0))
    state = copy.deepcopy(replay.state_dict())
    rings = [len(range(game, replay.filled, 2)) for game in range(2)]
    assert len(state["frames"]) == sum(-(-ring // 30) for ring in rings) and (steps < 100 or replay.filled == 100)
    other.load_state_dict(state)
    assert torch.equal(other.frames, replay.frames)
    np.testing.assert_array_equal(other.tree.nodes, replay.tree.nodes)
    assert_identical(other.state_dict(), state)
    ledger.replay = other
    play_random_frames(ledger, 80, rng, minibatches)


def test_a_learning_rate_that_explodes_ends_the_run(call, tmp_path):
    result = call("dqn_per_atari", *ARGV, "--learning-rate", "1e30")
    assert result.status == 1
    assert re.fullmatch(r"error: [^\n]*not finite[^\n]*checkpoint_\d+.pt[^\n]*\n", result.stderr)
    for path in checkpoints(run_folder_in(tmp_path)):  # none holds what exploded
        assert all(tensor.isfinite().all() for tensor in load(path)["agent"].values())


# Memory


def test_what_a_large_replay_takes_is_said_and_taken_only_as_it_fills(call, tmp_path, monkeypatch):
    argv = [*ARGV, "--buffer-size", "1000000", "--total-timesteps", "16", "--learning-starts", "4"]
    monkeypatch.setattr(dqn, "available_memory", lambda: 10**13)
    result = call("dqn_per_atari", *argv)
    assert result.status == 0
    assert re.fullmatch(r"note: --buffer-size 1000000 takes 7\.1 GB of memory when full\n", result.stderr)
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.setattr(dqn, "available_memory", lambda: 5 * 10**9)
    result = call("dqn_per_atari", *argv)
    assert result.status == 2
    (most,) = re.fullmatch(r"error: --buffer-size 1000000 [^\n]* at most --buffer-size (\d+)\n", result.stderr).groups()
    assert dqn.replay_bytes(dqn.Args(buffer_size=int(most))) <= 5e9
    assert not list(tmp_path.iterdir())


def test_memory_that_files_have_only_borrowed_is_available(tmp_path):
    """A limit of 10 GB of which 9 are taken, 7 of them by the cache of files."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable:   32000000 kB\n")
    assert dqn.available_memory(tmp_path) == 32_000_000 * 1024
    (group / "memory.current").write_text("9000000000\n")
    (group / "memory.stat").write_text("anon 2000000000\ninactive_file 7000000000\nactive_file 0\n")
    for limit, available in (("max", 32_000_000 * 1024), ("10000000000", 8 * 10**9)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert dqn.available_memory(tmp_path) == available
