"""QMIX: its mathematics against loops from the papers, the environments against their units, and whole runs."""

import functools
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    Run,
    assert_identical,
    checkpoints,
    curves,
    load,
    run_folder_in,
    scalars,
    wait_for,
)

import qmix_smac as q
from qmix_smac import Args, Episode, EpisodeReplay, Shape, TeamEnvs

SHAPE = Shape(n_agents=3, n_actions=4, obs_dim=5, state_dim=6)
SMALL = (
    "--env-id 3m --num-envs 2 --total-timesteps 1200 --checkpoint-interval 300 --batch-size 4 --buffer-size 24 "
    "--log-interval 100 --test-interval 400 --test-nepisode 3 --eval-episodes 3 --rnn-hidden-dim 16 "
    "--epsilon-anneal-time 800 --target-update-interval 7"
).split()
QUICK = [*SMALL, "--total-timesteps", "200", "--test-interval", "200"]


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine two threads of torch wait for each other ten times as long as they compute."""
    torch.set_num_threads(1)


def random_episodes(lengths, seed=0, shape=SHAPE, dtype=torch.float32):
    """An episode of each length; dead agents have no action but the last one, and see zeros. Every second one ends."""
    rng = np.random.default_rng(seed)
    n, A, obs_dim, state_dim = shape
    episodes = []
    for k, length in enumerate(lengths):
        alive = np.sort(rng.random((length + 1, n)) < 0.8, axis=0)[::-1]  # the dead stay dead
        avail = (rng.random((length + 1, n, A)) < 0.6) & alive[..., None]
        avail[..., -1] = True
        obs = rng.normal(size=(length + 1, n, obs_dim)) * alive[..., None]
        actions = (rng.random(avail.shape) * avail).argmax(axis=-1)[:-1].astype(np.uint8)
        rows = (obs, rng.normal(size=(length + 1, state_dim)), avail, np.ones(length + 1, bool), actions)
        ends = np.zeros((length, 1))
        ends[-1] = k % 2
        episode = Episode(*map(torch.from_numpy, (*rows, rng.normal(size=(length, 1)), ends)))
        episodes.append(Episode(*(column.to(dtype) if column.is_floating_point() else column for column in episode)))
    return episodes


def minibatch(episodes):
    """A minibatch of just these episodes, in the replay's order."""
    replay = EpisodeReplay(len(episodes))
    for episode in episodes:
        replay.add(episode)
    return replay.sample(len(episodes), np.random.default_rng(0))


def networks(args, shape=SHAPE, dtype=torch.float64):
    torch.manual_seed(0)
    made = [network.to(dtype) for _ in range(2) for network in q.make_networks(args, shape)]
    with torch.no_grad():
        for network in made:
            for parameter in network.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=dtype) * 0.5)
    return made


# Mixing


def test_q_tot_is_monotone_in_every_agents_value():
    mixer = networks(Args())[1]
    for seed in range(20):
        torch.manual_seed(seed)
        for parameter in mixer.parameters():
            parameter.data.normal_()
        agent_qs = torch.randn(50, 3, dtype=torch.float64, requires_grad=True)
        q_tot = mixer(5 * agent_qs, 3 * torch.randn(50, 6, dtype=torch.float64))
        (slopes,) = torch.autograd.grad(q_tot.sum(), agent_qs)
        assert (slopes >= 0).all() and (slopes > 0).any()
        assert (q_tot < 0).any() and (q_tot > 0).any()  # biases and V are free


def mixed(mixer, agent_qs, state):
    """Q_tot of one sample, [QMIX] Sec. 4 and Fig. 2a, by loops."""
    p = {name: value.numpy() for name, value in mixer.state_dict().items()}

    def linear(name, x):
        return p[f"{name}.weight"] @ x + p[f"{name}.bias"]

    def two_layers(name):
        return linear(f"{name}.2", np.maximum(linear(f"{name}.0", state), 0))

    w1, b1, w2, v = two_layers("hyper_w1"), linear("hyper_b1", state), two_layers("hyper_w2"), two_layers("hyper_v")
    total, embed = v[0], len(b1)
    for j in range(embed):
        x = b1[j] + sum(value * abs(w1[a * embed + j]) for a, value in enumerate(agent_qs))
        total += abs(w2[j]) * (x if x > 0 else np.exp(x) - 1)
    return total


def test_the_mixer_is_the_papers():
    mixer = networks(Args(mixing_embed_dim=7, hypernet_embed=8))[1]
    agent_qs, state = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 6, dtype=torch.float64)
    expected = [mixed(mixer, *sample) for sample in zip(agent_qs.numpy(), state.numpy())]
    assert np.allclose(mixer(agent_qs, state).detach().squeeze(1).numpy(), expected, rtol=1e-12)


# The learner, against what is written in the papers


def stepped(agent, episode):
    """Q (T+1, n, A) of an episode by a cell that is called for each agent and step, from zeros on, [QMIX] Sec. 3."""
    n, A = SHAPE.n_agents, SHAPE.n_actions
    hidden, values = [torch.zeros(1, agent.rnn.hidden_size, dtype=torch.float64)] * n, []
    for t in range(len(episode.obs)):
        row = []
        for a in range(n):
            last = torch.zeros(A, dtype=torch.float64)
            if t:
                last[episode.actions[t - 1, a].long()] = 1
            x = torch.cat([episode.obs[t, a], last, torch.eye(n, dtype=torch.float64)[a]])
            hidden[a] = agent.rnn(torch.relu(agent.fc1(x))[None], hidden[a])
            row.append(agent.fc2(hidden[a])[0])
        values.append(torch.stack(row))
    return torch.stack(values)


def loss_by_loops(agent, mixer, target_agent, target_mixer, episodes, args):
    """[QMIX] Eq. (6) for each step of each episode: the mean of the squares."""
    n, A = SHAPE.n_agents, SHAPE.n_actions
    squares, targets = [], []
    for episode in episodes:
        mine, theirs = stepped(agent, episode), stepped(target_agent, episode).detach()
        T, y = len(episode.rewards), None
        for t in reversed(range(T)):
            next_values = []
            for a in range(n):
                legal = [u for u in range(A) if episode.avail_actions[t + 1, a, u]]
                judge = mine if args.double_q else theirs
                next_values.append(theirs[t + 1, a, max(legal, key=lambda u: judge[t + 1, a, u].item())])
            value = target_mixer(torch.stack(next_values)[None], episode.state[t + 1][None])[0].detach()
            if y is not None:  # not the last step
                value = (1 - args.td_lambda) * value + args.td_lambda * y
            bootstraps = t + 1 < T or not episode.no_bootstrap[t]
            y = episode.rewards[t].item() + (args.gamma * value if bootstraps else 0 * value)
            chosen = torch.stack([mine[t, a, episode.actions[t, a].long()] for a in range(n)])
            squares.append((y - mixer(chosen[None], episode.state[t][None])[0]) ** 2)
            targets.append(y)
    return torch.cat(squares).mean(), torch.cat(targets).mean()


@pytest.mark.parametrize("mixer", ["qmix", "vdn", "none"])
@pytest.mark.parametrize("flags", [{}, {"double_q": False}, {"td_lambda": 0.6}], ids=str)
def test_loss_and_gradient_are_the_papers(mixer, flags):
    args = Args(mixer=mixer, rnn_hidden_dim=8, mixing_embed_dim=4, hypernet_embed=8, gamma=0.9, **flags)
    made = networks(args)
    episodes = random_episodes([5, 3, 7, 1, 7, 2], dtype=torch.float64)
    loss, metrics = q.qmix_loss(*made, minibatch(episodes), args)
    expected, target = loss_by_loops(*made, episodes, args)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert float(metrics["target_mean"]) == pytest.approx(float(target), rel=1e-9)
    parameters = [*made[0].parameters(), *made[1].parameters()]
    for mine, theirs in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)):
        assert torch.allclose(mine, theirs, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("mixer", ["qmix", "vdn", "none"])
@pytest.mark.parametrize("td_lambda", [0.0, 0.6])
def test_padding_changes_nothing(mixer, td_lambda):
    """Whatever stands in padding, whether an action is available there or none, and however much of it there is."""
    args = Args(mixer=mixer, td_lambda=td_lambda)
    made = networks(args)
    parameters = [*made[0].parameters(), *made[1].parameters()]
    batch = minibatch(random_episodes([2, 6, 4], dtype=torch.float64))

    def loss_and_gradient(batch):
        loss, metrics = q.qmix_loss(*made, batch, args)
        return [loss, *metrics.values(), *torch.autograd.grad(loss, parameters)]

    before = loss_and_gradient(batch)
    longer = Episode(*(torch.cat([column, torch.zeros_like(column[:1])]) for column in batch))
    for _ in range(2):
        for column in longer:
            padding = ~(longer.filled if len(column) == len(longer.filled) else longer.filled[1:])
            if column is not longer.filled:
                garbage = (torch.arange(column[padding].numel()) % 3).to(column.dtype).reshape(column[padding].shape)
                column[padding] = garbage
        for mine, theirs in zip(loss_and_gradient(longer), before):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_what_follows_an_end_changes_nothing():
    """The last row of an episode that is not bootstrapped is valued by the target networks, and counts for nothing."""
    args = Args()
    made = networks(args)
    for end in (True, False):
        episodes = random_episodes([4, 6], dtype=torch.float64)
        for episode in episodes:
            episode.no_bootstrap[-1] = end
        before = q.qmix_loss(*made, minibatch(episodes), args)[0]
        for episode in episodes:
            episode.obs[-1], episode.state[-1], episode.avail_actions[-1] = 1e3, 1e3, False
        assert (q.qmix_loss(*made, minibatch(episodes), args)[0] == before) == end


def test_an_action_that_cannot_be_taken_is_in_no_target():
    args = Args(mixer="vdn")
    made = networks(args)
    with torch.no_grad():
        for agent in (made[0], made[2]):
            agent.fc2.bias[0] = 1e6  # by far the best, wherever it can be taken
    episodes = random_episodes([6, 8], dtype=torch.float64)
    for allowed in (False, True):
        for episode in episodes:
            episode.avail_actions[..., 0] = allowed
        _, metrics = q.qmix_loss(*made, minibatch(episodes), args)
        assert (float(metrics["target_mean"]) > 1e5) == allowed


# Replay


def assert_equal(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and (a == b).all()


def test_a_minibatch_is_padded_and_whole():
    episodes = random_episodes([3, 1, 7, 7, 2])
    batch = minibatch(episodes)
    lengths = batch.filled[1:].sum(dim=0).tolist()
    assert lengths == [7, 7, 3, 2, 1] and batch.obs.shape == (8, 5, *episodes[0].obs.shape[1:])
    for b, length in enumerate(lengths):
        mine = Episode(*(column[: length + (len(column) == 8), b] for column in batch))
        found = [episode for episode in episodes if torch.equal(episode.obs, mine.obs)]
        assert_equal(mine, found[0])
        assert not any(column[length + (len(column) == 8) :, b].any() for column in batch)


def test_the_replay_is_a_ring_that_can_be_saved():
    replay, episodes = EpisodeReplay(5), random_episodes(range(1, 9))
    empty = EpisodeReplay(5)
    empty.load_state_dict(EpisodeReplay(5).state_dict())
    assert (empty.added, len(empty.episodes)) == (0, 0)
    for episode in episodes:
        replay.add(episode)
    assert [len(episode.rewards) for episode in replay.episodes] == [4, 5, 6, 7, 8] and replay.added == 8
    copy = EpisodeReplay(5)
    copy.load_state_dict(replay.state_dict())
    for each in (replay, copy):
        for episode in random_episodes([3, 9], seed=1):
            each.add(episode)
    assert [len(episode.rewards) for episode in copy.episodes] == [6, 7, 8, 3, 9] and copy.added == 10
    for mine, theirs in zip(replay.episodes, copy.episodes):
        assert_equal(mine, theirs)
    draws = [each.sample(5, np.random.default_rng(0)) for each in (replay, copy)]
    assert_equal(*draws)
    assert len({float(r) for r in draws[0].rewards[0]}) == 5  # no episode twice


def test_all_episodes_are_drawn_alike():
    replay, rng = EpisodeReplay(10), np.random.default_rng(0)
    for episode in random_episodes(range(1, 11)):
        replay.add(episode)
    lengths = [int(length) for _ in range(500) for length in replay.sample(3, rng).filled[1:].sum(dim=0)]
    assert np.allclose(np.bincount(lengths, minlength=11)[1:] / 1500, 0.1, atol=0.03)


# Acting


def seen(obs, avail_actions, last_actions):
    """What `select_actions` reads of TeamEnvs."""
    arrays = {"obs": np.asarray(obs, np.float32), "avail_actions": np.asarray(avail_actions)}
    return types.SimpleNamespace(**arrays, last_actions=np.asarray(last_actions))


def test_playing_and_learning_see_the_same_values():
    """Row by row while playing, with episodes that begin anew, as in one pass over the whole minibatch."""
    agent = networks(Args(rnn_hidden_dim=8), dtype=torch.float32)[0]
    batch = minibatch(random_episodes([5, 3]))
    last_actions = torch.cat([torch.full((1, 2, 3), -1), batch.actions.long()])
    whole = agent.unroll(agent.inputs(batch.obs[batch.filled], last_actions[batch.filled]), batch.filled)
    lengths, place = [5, 3], [(0, 0), (1, 0)]  # episode, step; the second environment goes on with the first episode
    hidden = agent.first_hidden(2)
    for _ in range(9):
        obs, last = (torch.stack([column[t, e] for e, t in place]) for column in (batch.obs, last_actions))
        values, hidden = agent(agent.inputs(obs, last), hidden)
        for i, (e, t) in enumerate(place):
            assert torch.allclose(values[i], whole[t, e], atol=1e-6), (e, t)
        ended = np.array([t == lengths[e] for e, t in place])
        hidden[ended] = 0
        place = [(0, 0) if over else (e, t + 1) for over, (e, t) in zip(ended, place)]


def test_epsilon_is_each_agents_own_share_of_random_actions_and_all_are_available():
    agent = networks(Args(rnn_hidden_dim=8), dtype=torch.float32)[0]
    rng = np.random.default_rng(0)
    avail = (rng.random((4000, 3, 4)) < 0.5).astype(np.uint8)
    avail[..., 2] = 1
    envs = seen(rng.normal(size=(4000, 3, 5)), avail, np.full((4000, 3), -1))
    greedy, _ = q.select_actions(agent, envs, agent.first_hidden(4000))
    assert np.take_along_axis(avail, greedy[..., None], axis=-1).all()
    chances = 1 - 1 / avail.sum(axis=-1)  # a random action may be the best one
    for epsilon in (0.0, 0.3, 1.0):
        actions, _ = q.select_actions(agent, envs, agent.first_hidden(4000), epsilon, rng)
        assert np.take_along_axis(avail, actions[..., None], axis=-1).all()
        other = actions != greedy
        assert other.mean() == pytest.approx(epsilon * chances.mean(), abs=0.015)
        # Agents explore independently of each other: the product of their probabilities
        for a, b in itertools.combinations(range(3), 2):
            together = (other[:, a] & other[:, b]).mean()
            assert together == pytest.approx(epsilon**2 * (chances[:, a] * chances[:, b]).mean(), abs=0.02)
    free = envs.avail_actions.sum(axis=(0, 1))
    taken = np.bincount(actions.ravel(), minlength=4)  # at epsilon 1: of the available ones each is as likely
    expected = (avail / avail.sum(axis=-1, keepdims=True)).sum(axis=(0, 1))
    assert free.min() > 0 and np.allclose(taken / expected, 1, atol=0.06)


# SMAX


@pytest.fixture(scope="module")
def smax():
    """Two environments on 3m; whatever a test does to them, the next one begins them anew."""
    return q.Smax("3m", 2)


def attack(avail):
    """Fire where that is possible, else go east."""
    return np.where(avail[..., 5:].any(axis=-1), 5 + avail[..., 5:].argmax(axis=-1), np.where(avail[..., 1], 1, 4))


def trace(envs, seeds, steps=25):
    (obs, state, avail_actions), _ = envs.reset(seed=seeds)
    rows = [np.concatenate([obs.reshape(2, -1), state], axis=1)]
    for _ in range(steps):
        (obs, state, avail_actions), *_, info = envs.step(attack(avail_actions))
        rows.append(np.concatenate([obs.reshape(2, -1), state], axis=1))
        rows.append(np.stack([np.concatenate([final[0].ravel(), final[1]]) for final in info["final_obs"]]))
    return np.stack(rows)


def test_environments_depend_on_their_own_seed_alone(smax):
    trace(smax, (5, 6), steps=1)
    compiled = smax._step._cache_size()
    first, again, swapped, other = (trace(smax, seeds) for seeds in ((5, 6), (5, 6), (6, 5), (7, 8)))
    assert (first == again).all()
    assert (first[0] == swapped[0, ::-1]).all() and (first[20] == swapped[20, ::-1]).all()
    assert (first[0] != other[0]).any() and (first[0, 0] != first[0, 1]).any()
    assert smax._step._cache_size() == compiled  # once for the states of begin() and of step()


def test_where_an_episode_ends_the_next_one_begins_and_the_others_go_on(smax):
    now, _ = smax.reset(seed=[1, 2])
    ends = 0
    for _ in range(60):
        before = [np.array(smax.simulators[1].state.step), *now]
        now, _, terminations, truncations, info = smax.step(attack(now[2]))
        steps = np.array(smax.simulators[1].state.step)
        for i, (ended, final) in enumerate(zip(terminations | truncations, info["final_obs"], strict=True)):
            health = now[1][i, :60].reshape(6, 10)[:, 0]
            last = final[1][:60].reshape(6, 10)[:, 0]
            assert (before[1][i] != final[0]).any() and (before[2][i] != final[1]).any()
            if ended:
                assert steps[i] == 0 and (health == 1).all() and (last[:3] == 0).all() | (last[3:] == 0).all()
            else:
                assert steps[i] == before[0][i] + 1
                assert all((mine[i] == theirs).all() for mine, theirs in zip(now, final, strict=True))
            ends += ended
    assert ends > 1


def test_observations_and_state(smax):
    (obs, state, avail_actions), _ = smax.reset(seed=[1, 2])
    assert smax.shape == (3, 8, 75, 72)
    assert [rows.shape for rows in (obs, state, avail_actions)] == [(2, 3, 75), (2, 72), (2, 3, 8)]
    for _ in range(30):
        (obs, state, avail_actions), *_ = smax.step(attack(avail_actions))
        units = smax.simulators[1].state
        assert np.abs(obs).max() <= 1 and state.min() >= 0 and state.max() <= 1
        features, alive = state[:, :60].reshape(2, 6, 10), np.array(units.unit_alive)
        assert np.allclose(features[..., 0], np.array(units.unit_health) / 45, atol=1e-6)
        assert np.allclose(features[..., 1:3], np.array(units.unit_positions) / 32 * alive[..., None], atol=1e-6)
        assert np.allclose(features[..., 3], np.array(units.unit_weapon_cooldowns).clip(0, 0.61) / 0.61 * alive)
        own = obs[..., -10:]
        assert np.allclose(own, features[:, :3], atol=1e-6)  # what an agent knows of itself, it and the state say alike
        assert (state[:, 60:66] == [0, 0, 0, 1, 1, 1]).all()  # teams
        assert (avail_actions[~alive[:, :3]] == np.eye(8)[4]).all()  # the dead can do nothing but stop


def test_victories_are_read_from_the_units_and_returns_have_smacs_maximum(smax):
    (_, _, avail), _ = smax.reset(seed=[3, 4])
    rng, returns, ends = np.random.default_rng(0), np.zeros(2), []
    for _ in range(400):
        noise = (rng.random(avail.shape) * avail).argmax(axis=-1)
        actions = np.where(rng.random((2, 3)) < 0.1, noise, attack(avail))
        (_, _, avail), rewards, terminations, truncations, info = smax.step(actions)
        returns += rewards
        won = info["final_info"]["won"]
        health = np.stack([final[1][:60].reshape(6, 10)[:, 0] for final in info["final_obs"]])
        allies, enemies = (health[:, :3] > 0).any(axis=1), (health[:, 3:] > 0).any(axis=1)
        assert (terminations == ~(allies & enemies)).all() and not truncations.any()
        assert (won == (allies & ~enemies)).all() and (won == (rewards >= 10)).all()
        for i in np.flatnonzero(terminations):
            ends.append(won[i])
            assert returns[i] == pytest.approx(20, abs=1e-3) if won[i] else returns[i] < 10.001
            returns[i] = 0
    assert 0 < sum(ends) < len(ends)


def test_the_time_limit_is_no_end_of_the_battle(smax):
    import jax.numpy as jnp

    smax.reset(seed=[1, 2])
    keys, state = smax.simulators
    late = state.state.replace(step=jnp.array([99, 100], state.state.step.dtype))
    smax.simulators = (keys, state.replace(state=late))
    stay = np.full((2, 3), 4)
    _, _, terminations, truncations, info = smax.step(stay)  # the hundredth of one, the hundred-and-first of the other
    assert truncations.tolist() == [False, True] and not terminations.any() and not info["final_info"]["won"].any()
    assert np.array(smax.simulators[1].state.step).tolist() == [100, 0]
    _, _, terminations, truncations, _ = smax.step(stay)
    assert truncations.tolist() == [True, False] and not terminations.any()


@pytest.mark.parametrize("name", ["2s3z", "smacv2_5_units"])
def test_random_play_of_several_kinds_of_units(name):
    """What can be done is what jaxmarl says, the dead do nothing, and the state is within its norms."""
    import jax

    envs, rng = q.Smax(name, 2), np.random.default_rng(1)
    (obs, state, avail), _ = envs.reset(seed=[1, 2])
    n = envs.shape.n_agents
    kinds, ends = set(), 0
    for _ in range(60):
        units = envs.simulators[1]
        theirs = jax.vmap(envs.env.get_avail_actions)(units)
        assert (avail == np.stack([theirs[agent] for agent in envs.env.agents], axis=1)).all()
        dead = ~np.array(units.state.unit_alive)[:, :n]
        assert avail.any(-1).all() and (avail[dead].sum(-1) == 1).all() and (avail[~dead].sum(-1) > 1).all()
        for values in (obs, state):
            assert values.min() >= -1 and values.max() <= 1
        kinds |= set(np.array(units.state.unit_types).ravel().tolist())
        actions = (rng.random(avail.shape) * avail).argmax(axis=-1)
        (obs, state, avail), _, terminations, truncations, _ = envs.step(actions)
        ends += (terminations | truncations).sum()
    assert len(kinds) > 1 and ends > 0


def test_all_maps_are_there_and_a_wrong_one_is_told_them():
    maps = {"3m": 3, "2s3z": 5, "25m": 25, "3s5z": 8, "8m": 8, "5m_vs_6m": 5, "10m_vs_11m": 10, "27m_vs_30m": 27}
    maps |= {"3s5z_vs_3s6z": 8, "3s_vs_5z": 3, "6h_vs_8z": 6}
    maps |= {"smacv2_5_units": 5, "smacv2_10_units": 10, "smacv2_20_units": 20}
    assert {name: q.Smax(name, 1).shape.n_agents for name in maps} == maps
    for name in ("3mm", "MMM2"):
        with pytest.raises(SystemExit, match=f"error: [^\n]*{name}[^\n]*smac/MAP[^\n]*2s3z"):
            q.Smax(name, 1)


# TeamEnvs, on episodes that count


class Counting:
    """TeamEnvs of two agents whose observations say in which, episode and step they are; rewards are a tenth of t.

    Episode e of environment i is 3 + (e + 2 i) % 7 steps long; of three one is cut off, of five one is won. Two of four
    actions are available, another two in each step. In environment 1 every fourth episode ends in a crash.
    """

    shape = Shape(n_agents=2, n_actions=4, obs_dim=4, state_dim=3)

    def __init__(self, num_envs):
        self.num_envs, self.seeds, self.taken = num_envs, [], {}

    def now(self):
        obs, state = np.zeros((self.num_envs, 2, 4), np.float32), np.zeros((self.num_envs, 3), np.float32)
        avail = np.zeros((self.num_envs, 2, 4), bool)
        for i in range(self.num_envs):
            state[i] = [self.episode[i] / 1000, self.t[i] / 10, i / 10]
            obs[i] = [[*state[i], agent] for agent in (0, 1)]
            avail[i, :, [(self.t[i] + i) % 4, (self.t[i] + i + 1) % 4]] = True
        return obs, state, avail

    def reset(self, *, seed):
        self.seeds.append(seed)
        self.first = sum(seed) % 900
        self.episode, self.t = np.full(self.num_envs, self.first), np.zeros(self.num_envs, int)
        return self.now(), {}

    def step(self, actions):
        for i in range(self.num_envs):
            self.taken.setdefault((self.episode[i], i), []).append(actions[i].copy())
        self.t += 1
        self.ended = self.t == 3 + (self.episode + 2 * np.arange(self.num_envs)) % 7
        cut = self.ended & (self.episode % 3 == 0)
        crashed = self.ended & (self.episode % 4 == 0) & (np.arange(self.num_envs) == 1)
        final_info = {"won": self.ended & (self.episode % 5 == 0), "crashed": crashed}
        info, rewards = {"final_obs": list(zip(*self.now())), "final_info": final_info}, self.t / 10
        self.episode, self.t = self.episode + self.ended, np.where(self.ended, 0, self.t)
        return self.now(), rewards, self.ended & ~cut, cut, info

    def close(self):
        pass


@pytest.fixture
def counting(monkeypatch):
    """TeamEnvs count; the list of those that have been made."""
    made = []

    def make(map_name, num_envs):
        made.append(Counting(num_envs))
        return made[-1]

    monkeypatch.setattr(q, "Smax", make)
    return made


@pytest.mark.parametrize("bootstrap_timeouts", [False, True])
def test_episodes_hold_what_happened(counting, tmp_path, capsys, bootstrap_timeouts):
    envs = TeamEnvs(Args(bootstrap_timeouts=bootstrap_timeouts, seed=4), 3, tmp_path)
    envs.reset(1000)
    rng, episodes, taken = np.random.default_rng(0), [], [[], [], []]
    for k in range(200):
        if rng.random() < 0.02:
            envs.reset(k)  # drops open ones
            taken = [[], [], []]
        (source,) = counting
        for mine, theirs in zip((envs.obs, envs.state, envs.avail_actions), source.now(), strict=True):
            assert (mine == theirs).all()
        assert (envs.last_actions == [rows[-1] if rows else [-1, -1] for rows in taken]).all()
        actions = (rng.random((3, 2, 4)) * envs.avail_actions).argmax(axis=-1)
        for rows, action in zip(taken, actions):
            rows.append(action)
        ended = envs.step(actions)
        assert (ended == source.ended).all()
        assert {i for i, *_ in envs.finished} <= set(np.flatnonzero(ended))
        episodes += envs.finished
        for i, episode, *_ in envs.finished:
            assert (episode.actions.numpy() == taken[i]).all()
        taken = [[] if over else rows for over, rows in zip(ended, taken)]
    notes = capsys.readouterr().err.count("crashed")
    assert len(episodes) > 60 and notes > 3
    for i, episode, score, won in episodes:
        number = round(1000 * float(episode.state[0, 0]))
        assert not (i == 1 and number % 4 == 0)  # which crashed
        length = 3 + (number + 2 * i) % 7
        assert won == (number % 5 == 0)
        t = torch.arange(length + 1)
        where = torch.tensor([[int(number) / 1000, step / 10, int(i) / 10] for step in t.tolist()])
        torch.testing.assert_close(episode.state, where)
        for agent in (0, 1):
            torch.testing.assert_close(episode.obs[:, agent, :3], where)
            assert (episode.obs[:, agent, 3] == agent).all()
        assert episode.filled.tolist() == [True] * (length + 1)
        torch.testing.assert_close(episode.rewards[:, 0], t[1:] / 10)
        ends = [0.0] * (length - 1) + [float(not (bootstrap_timeouts and number % 3 == 0))]
        assert episode.no_bootstrap[:, 0].tolist() == ends
        for step in t.tolist():
            free = np.isin(np.arange(4), [(step + i) % 4, (step + i + 1) % 4])
            assert (episode.avail_actions[step].numpy() == free).all()
        assert score == pytest.approx(length * (length + 1) / 20)
    assert list(envs.recent_scores) == [score for _, _, score, _ in episodes][-100:]


def test_seeds_are_made_of_the_runs_seed_and_the_key(counting, tmp_path):
    for seed, key in ((1, (5,)), (1, (5,)), (1, (6,)), (2, (5,)), (1, (5, 1)), (1, (5, 2))):
        TeamEnvs(Args(seed=seed), 3, tmp_path).reset(*key)
    seeds = [tuple(made.seeds[0]) for made in counting]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 5
    assert all(len(set(each)) == 3 and 0 <= min(each) and max(each) < 2**31 for each in seeds)


def test_every_environment_plays_its_share(counting, tmp_path):
    """Seven episodes in three environments: the first three of the first, two of each of the others."""
    envs = TeamEnvs(Args(), 3, tmp_path)
    envs.reset(0)
    agent, _ = q.make_networks(Args(rnn_hidden_dim=8), Counting.shape)
    returns, won = q.play(agent, envs, 7)
    expected, first = [], counting[0].first
    for i, share in enumerate((3, 2, 2)):
        numbers = [number for number in range(first, first + 10) if not (i == 1 and number % 4 == 0)][:share]
        lengths = [3 + (number + 2 * i) % 7 for number in numbers]
        expected += [(length * (length + 1) / 20, float(n % 5 == 0)) for length, n in zip(lengths, numbers)]
    assert sorted(zip(np.round(returns, 4), won)) == sorted(expected)


# Learning: the two-step game of the paper


def two_step_game():
    """All 16 ways to play it, [QMIX] Sec. 5: the first agent's first action chooses the second game, 2A or 2B."""
    shape = Shape(n_agents=2, n_actions=2, obs_dim=3, state_dim=3)
    payoffs, episodes = {0: [[7, 7], [7, 7]], 1: [[0, 1], [1, 8]]}, []
    for u in itertools.product((0, 1), repeat=4):
        state = torch.eye(3)[[0, 1 + u[0], 0]]
        state[-1] = 0
        rewards = torch.tensor([[0.0], [payoffs[u[0]][u[2]][u[3]]]])
        rows = (state[:, None].expand(3, 2, 3), state, torch.ones(3, 2, 2, dtype=torch.bool), torch.ones(3).bool())
        ends = torch.tensor([[0.0], [1.0]])
        episodes.append(Episode(*rows, torch.tensor(u, dtype=torch.uint8).view(2, 2), rewards, ends))
    return shape, episodes, payoffs


@pytest.mark.parametrize("mixer, best, second", [("qmix", 8, [[0, 1], [1, 8]]), ("vdn", 7, [[-1.5, 2.5], [2.5, 6.5]])])
def test_the_two_step_game(mixer, best, second):
    shape, episodes, payoffs = two_step_game()
    args = Args(mixer=mixer, mixing_embed_dim=8, gamma=0.99)
    torch.manual_seed(1)
    agent, mix = q.make_networks(args, shape)
    target_agent, target_mix = q.make_networks(args, shape)
    optimizer = torch.optim.Adam([*agent.parameters(), *mix.parameters()], lr=5e-3)
    batch = minibatch(episodes)
    for k in range(600):
        if k % 50 == 0:
            target_agent.load_state_dict(agent.state_dict())
            target_mix.load_state_dict(mix.state_dict())
        optimizer.zero_grad()
        q.qmix_loss(agent, mix, target_agent, target_mix, batch, args)[0].backward()
        optimizer.step()
    everything = np.ones((1, 2, 2), bool)
    envs = seen(np.eye(3)[[[0, 0]]], everything, [[-1, -1]])
    first, hidden = q.select_actions(agent, envs, agent.first_hidden(1))
    then, _ = q.select_actions(agent, seen(np.eye(3)[[[1 + first[0, 0]] * 2]], everything, first), hidden)
    assert payoffs[first[0, 0]][then[0, 0]][then[0, 1]] == best
    # The values of game 2B, after u = (1, 0): [QMIX] Table 2; VDN's are the least squares of a sum
    last = torch.tensor([[[-1, -1]], [[1, 0]]])
    obs = torch.eye(3)[[0, 2]][:, None, None].expand(2, 1, 2, 3)
    filled = torch.ones(2, 1, dtype=torch.bool)
    values = agent.unroll(agent.inputs(obs[filled], last[filled]), filled)[1, 0]  # (n, A)
    for u in itertools.product((0, 1), repeat=2):
        q_tot = mix(torch.stack([values[a, u[a]] for a in (0, 1)])[None], torch.eye(3)[2:])
        assert float(q_tot.detach()) == pytest.approx(second[u[0]][u[1]], abs=0.3)


# The loop


def count_and_train(folder, monkeypatch, checkpoint=None, **options):
    """Train on what counts. Returns the arguments, the last checkpoint, and events and minibatches in order."""
    events, batches = [], []
    add, qmix_loss, step = EpisodeReplay.add, q.qmix_loss, TeamEnvs.step

    def spy_on_add(self, episode):
        events.append("add")
        add(self, episode)

    def spy_on_loss(*arguments):
        events.append("update")
        batches.append(arguments[4])
        return qmix_loss(*arguments)

    def spy_on_step(self, actions):
        if self.name == "training":
            events.append("step")
        return step(self, actions)

    monkeypatch.setattr(EpisodeReplay, "add", spy_on_add)
    monkeypatch.setattr(q, "qmix_loss", spy_on_loss)
    monkeypatch.setattr(TeamEnvs, "step", spy_on_step)
    defaults = dict(num_envs=3, total_timesteps=450, batch_size=4, buffer_size=500, checkpoint_interval=200)
    defaults |= dict(test_interval=10**9, log_interval=50, eval_episodes=2, target_update_interval=7, cuda=False)
    args = Args(**defaults | options)
    q.train(args, folder, checkpoint)
    return args, load(checkpoints(folder)[-1]), events, batches


def test_a_run_stores_what_happened_and_each_agent_acts_for_itself(tmp_path, monkeypatch, counting):
    _, checkpoint, events, _ = count_and_train(tmp_path, monkeypatch, epsilon_finish=0.5)
    replay = EpisodeReplay(500)
    replay.load_state_dict(checkpoint["replay"])
    assert len(replay.episodes) == replay.added == events.count("add") > 50
    taken = set()
    for episode in replay.episodes:
        number, i = round(1000 * float(episode.state[0, 0])), round(10 * float(episode.state[0, 2]))
        assert (episode.actions.numpy() == counting[0].taken[number, i]).all()
        taken |= set(map(tuple, episode.actions.tolist()))
    assert len(taken) == 12  # all that two can choose of two neighbours


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_training_is_the_optimiser_on_the_minibatches_with_a_target_network(
    tmp_path, monkeypatch, counting, optimizer, rate
):
    """An update for each episode (or two) once the replay holds a minibatch; targets copied every seven episodes."""
    options = dict(optimizer=optimizer, updates_per_episode=rate, anneal_lr=False, max_grad_norm=1.5, rnn_hidden_dim=8)
    args, checkpoint, events, batches = count_and_train(tmp_path, monkeypatch, **options)
    monkeypatch.undo()
    torch.manual_seed(args.seed)
    networks, targets = q.make_networks(args, Counting.shape), q.make_networks(args, Counting.shape)
    for network, target in zip(networks, targets):
        target.load_state_dict(network.state_dict())
    parameters = [*networks[0].parameters(), *networks[1].parameters()]
    if optimizer == "adam":
        steps = torch.optim.Adam(parameters, lr=5e-4, eps=1e-5)
    else:
        steps = torch.optim.RMSprop(parameters, lr=5e-4, alpha=0.99, eps=1e-5)
    start, norms, minibatches = torch.nn.utils.parameters_to_vector(parameters).detach(), [], iter(batches)
    episodes = copied = copies = 0
    due = 0.0
    for event in [*events, "add"]:  # one more, so that the last one is judged too
        if event == "update":
            due -= 1
            assert due >= 0 and episodes >= 4
            steps.zero_grad()
            q.qmix_loss(*networks, *targets, next(minibatches), args)[0].backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.5)))
            steps.step()
        else:
            assert due < 1  # nothing is put off
        if event == "add":
            if episodes - copied >= 7:
                copied, copies = episodes, copies + 1
                for network, target in zip(networks, targets):
                    target.load_state_dict(network.state_dict())
            episodes += 1
            due += rate if episodes >= 4 else 0
    assert len(batches) > 20 and copies > 5 and min(norms) < 1.5 < max(norms)
    moved = float((torch.nn.utils.parameters_to_vector(parameters).detach() - start).abs().max())
    for name, network in zip(("agent", "mixer", "target_agent", "target_mixer"), (*networks, *targets)):
        for key, expected in network.state_dict().items():
            torch.testing.assert_close(checkpoint[name][key], expected, rtol=0, atol=0.01 * moved)


@pytest.mark.parametrize("flags", [{}, {"updates_per_episode": 0.3, "optimizer": "adam", "td_lambda": 0.6}], ids=str)
def test_a_resumed_run_is_the_one_that_went_on(tmp_path, monkeypatch, counting, flags):
    monkeypatch.setattr(q.Run, "save_checkpoint", keep_all := no_unlink(q.Run.save_checkpoint))
    _, whole, events, _ = count_and_train(tmp_path / "whole", monkeypatch, **flags)
    monkeypatch.undo()
    monkeypatch.setattr(q, "Smax", lambda map_name, num_envs: Counting(num_envs))
    monkeypatch.setattr(q.Run, "save_checkpoint", keep_all)
    saved = [load(path) for path in checkpoints(tmp_path / "whole")]
    assert [state["global_step"] for state in saved] == [0, 201, 402, 450]
    for state in saved[:3]:
        folder = tmp_path / str(state["global_step"])
        _, found, later, _ = count_and_train(folder, monkeypatch, state, **flags)
        for part in ("agent", "mixer", "target_agent", "target_mixer", flags.get("optimizer", "rmsprop"), "replay"):
            assert_identical(found[part], whole[part], part)
        assert later == events[len(events) - len(later) :]
        assert curves(folder) == {
            tag: [point for point in points if point[0] > state["global_step"]]
            for tag, points in curves(tmp_path / "whole").items()
        }


def no_unlink(save_checkpoint):
    """Run.save_checkpoint that keeps all checkpoints."""

    def save(self, global_step):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "unlink", lambda path: None)
            save_checkpoint(self, global_step)

    return save


def test_memory_begins_with_each_episode_and_no_test_is_one_of_training(tmp_path, monkeypatch, counting):
    act = q.select_actions
    seen_names = []

    def spy(agent, envs, hidden, *rest):
        seen_names.append(envs.name)
        first = (envs.last_actions == -1).all(axis=1)
        assert ((hidden == 0).all(dim=-1).all(dim=-1).numpy() == first).all()
        return act(agent, envs, hidden, *rest)

    monkeypatch.setattr(q, "select_actions", spy)
    count_and_train(tmp_path, monkeypatch, test_interval=100)
    assert set(seen_names) == {"training", "test", "evaluation"}
    training, tests, evaluation = counting
    assert (len(training.seeds), len(tests.seeds), len(evaluation.seeds)) == (3, 5, 1)
    seeds = [seed for made in counting for each in made.seeds for seed in each]
    assert len(set(seeds)) == len(seeds) == 3 * 3 + 5 * 3 + 2


@pytest.mark.parametrize("anneal_lr", [True, False])
def test_the_learning_rate_falls_to_zero_or_stays(tmp_path, monkeypatch, counting, anneal_lr):
    """It is the one that the optimiser has at each update, and the one in the log."""
    rates, step = [], torch.optim.RMSprop.step

    def spy(self):
        rates.append(self.param_groups[0]["lr"])
        return step(self)

    monkeypatch.setattr(torch.optim.RMSprop, "step", spy)
    count_and_train(tmp_path, monkeypatch, anneal_lr=anneal_lr)
    logged = dict(scalars(tmp_path)["charts/learning_rate"])
    if anneal_lr:
        assert rates[0] < 5e-4 and all(a >= b for a, b in itertools.pairwise(rates)) and rates[-1] < 1e-5
        assert logged == {k: pytest.approx(5e-4 * (1 - (k - 3) / 450)) for k in logged}
    else:
        assert set(rates) == {5e-4} and [*logged.values()] == pytest.approx([5e-4] * len(logged))


# Whole runs


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a run that nothing ended, for reading only."""
    cwd = tmp_path_factory.mktemp("reference")
    result = Run("qmix_smac", *SMALL, cwd=cwd).wait(timeout=400)
    assert result.status == 0, result
    return run_folder_in(cwd), result


def test_a_run_says_and_writes_what_it_should(reference):
    run_folder, result = reference
    lines = result.stdout.splitlines()
    assert lines[0] == f"run folder: runs/{run_folder.name}" and len(lines) == 2
    score = r"evaluation: [\d.]+ \+- [\d.]+, 3 episodes of greedy actions, [\d.]+% of the battles won"
    assert re.fullmatch(score, lines[1])
    points = scalars(run_folder)
    for tag in "td_loss grad_norm td_error_abs q_taken_mean target_mean".split():
        steps = [step for step, _ in points[f"losses/{tag}"]]
        assert steps[-1] == 1200 and np.isfinite([value for _, value in points[f"losses/{tag}"]]).all()
    epsilons = dict(points["charts/epsilon"])
    assert epsilons[400] == pytest.approx(1 - 0.95 * 398 / 800, abs=1e-6) and epsilons[1200] == pytest.approx(0.05)
    won = points["eval/battle_won_rate"]
    assert [step for step, _ in won] == [0, 400, 800, 1200]  # three tests and the evaluation
    assert [step for step, _ in points["eval/episodic_return"]] == [0, 400, 800, 1200]
    assert f"{won[-1][1]:.1%} of the battles" in lines[1]
    state = load(checkpoints(run_folder)[-1])
    lengths = [value for _, value in points["charts/episodic_length"]]
    replay = EpisodeReplay(100)
    replay.load_state_dict(state["replay"])
    assert replay.added == len(lengths) and len(replay.episodes) == min(24, len(lengths))
    assert [len(episode.rewards) for episode in replay.episodes] == lengths[-24:] and 900 < sum(lengths) <= 1200
    returns = [value for _, value in points["charts/episodic_return"]]
    assert [float(episode.rewards.sum()) for episode in replay.episodes] == pytest.approx(returns[-24:], abs=1e-5)
    assert [step for step, _ in points["charts/battle_won"]] == [step for step, _ in points["charts/episodic_return"]]


@pytest.mark.parametrize(
    "flags",
    [
        "--mixer vdn --optimizer adam",
        "--mixer none --td-lambda 0.6",
        "--bootstrap-timeouts --no-double-q --updates-per-episode 0.5 --num-envs 2",
        "--capture-video --eval-episodes 1",
        pytest.param("--compile", marks=pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")),
        pytest.param("--cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
    ],
)
def test_a_few_steps_in_every_mode(call, tmp_path, flags):
    assert call("qmix_smac", *QUICK, *flags.split()).status == 0
    run_folder = run_folder_in(tmp_path)
    assert np.isfinite([value for _, value in scalars(run_folder)["losses/td_loss"]]).all()
    if "--capture-video" in flags:
        moviepy = pytest.importorskip("moviepy")
        videos = sorted((run_folder / "videos").iterdir())
        assert [video.name for video in videos] == ["evaluation-200-episode-0.mp4", "training-0-episode-0.mp4"]
        with moviepy.VideoFileClip(str(videos[0])) as film:
            frames = [frame.astype(int) for frame in film.iter_frames()]
        assert len(frames) >= 5 and frames[0].max() > 150
        assert all(np.abs(before - after).max() > 20 for before, after in itertools.pairwise(frames))


def test_the_optimisers_settings_are_those_of_the_command_line(call, tmp_path, reference):
    shutil.copytree(reference[0], tmp_path / "run")
    flags = "--resume run --optim-alpha 0.9 --optim-eps 1e-3 --total-timesteps 1300".split()
    assert call("qmix_smac", *flags).status == 0
    group = load(checkpoints(tmp_path / "run")[-1])["rmsprop"]["param_groups"][0]
    assert (group["alpha"], group["eps"]) == (0.9, 1e-3)


def test_another_optimiser_does_not_continue_a_run(call, reference):
    run_folder = str(reference[0].resolve())
    result = call("qmix_smac", "--resume", run_folder, "--optimizer", "adam", "--total-timesteps", "2000")
    assert re.fullmatch(r"error: the checkpoint does not fit: [^\n]*adam[^\n]*\n", result.stderr)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--batch-size 25", "24 25"),
        ("--num-envs 0", "--num-envs"),
        ("--save-replay", "--save-replay SMAX"),
        ("--env-id smac/3m --capture-video", "--capture-video SMAX"),
        ("--env-id 3n", "3n 3m"),
        ("--env-id Pong/3m", "Pong/3m"),
    ],
)
def test_a_wrong_call_is_one_line_and_leaves_no_trace(call, tmp_path, flags, words):
    message = call("qmix_smac", *SMALL, *flags.split()).stderr.strip()
    assert re.fullmatch(r"error: [^\n]+", message) and all(word in message for word in words.split())
    assert not list(tmp_path.iterdir())


# The real SMAC

HAS_SMAC = bool(importlib.util.find_spec("smac") and importlib.util.find_spec("pysc2"))


@pytest.mark.skipif(HAS_SMAC, reason="smac is installed")
def test_without_smac_the_error_says_what_to_install(call, tmp_path):
    message = call("qmix_smac", *SMALL, "--env-id", "smac/3m").stderr.strip()
    assert re.fullmatch(r"error: smac/3m [^\n]*git\+https://github.com/oxwhirl/smac[^\n]*", message)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not HAS_SMAC, reason="the package smac is not installed")
def test_the_interface_of_the_real_package():
    """The package answers these without the game."""
    assert q.Smac("3m", "").shape == (3, 9, 30, 48)


@pytest.mark.skipif(not HAS_SMAC or not os.environ.get("SC2PATH"), reason="StarCraft II is not installed")
def test_an_episode_of_the_real_game(tmp_path):
    envs = TeamEnvs(Args(env_id="smac/3m"), 1, tmp_path)
    envs.reset(1)
    for _ in range(70):
        envs.step((np.random.default_rng(0).random(envs.avail_actions.shape) * envs.avail_actions).argmax(axis=-1))
    envs.close()


# A stand-in with the interface of the package, as far as it is used, and with what it gets wrong. One agent wins with 1
# as its third action. On the map toy 2 is a crash of the game as the package tells it, and 3 is the end of its process;
# on the map toys each seventeenth step is such a crash, a replay cannot be saved on toyss, and toyslow takes its time.
STAND_IN = """
import os
import subprocess
import time
import numpy as np

class Unit:
    health_max, shield_max, steps = 45, 0, 0

class StarCraft2Env:
    n_enemies, reward_death_value, reward_win = 1, 10, 200
    def __init__(self, map_name, seed=None, continuing_episode=False, replay_dir="", replay_prefix=""):
        assert os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] == "python"
        self._seed, self.continuing, self.replay_dir = seed, continuing_episode, replay_dir
        self.replay_prefix, self.map_name = replay_prefix, map_name
        self.games, self._episode_count = [], 0
        self.max_reward, self.mortal = 210, map_name == "toy"
    def get_env_info(self):
        return {"n_agents": 1, "n_actions": 4, "obs_shape": 2, "state_shape": 3, "episode_limit": 5}
    def launch(self):
        print("the game speaks")
        self.games.append(subprocess.Popen(["sleep", "60"]))
        with open(os.environ["SC2_PIDS"], "a") as file:
            print(self.games[-1].pid, self._seed, self.map_name, file=file)
    def reset(self):
        if self._episode_count == 0:
            self.launch()
            self.max_reward += 2 * 45  # counted twice, as the package may
        self.steps, self.enemies = 0, {0: Unit()}
    def get_obs(self):
        return [np.array([self.steps, self._seed % 1000])]
    def get_state(self):
        return np.array([self.steps, self.max_reward, len(self.games)], np.float32)
    def get_avail_actions(self):
        return [[1, 1, 1, self.mortal]]
    def step(self, actions):
        self.steps += 1
        if actions[0] == 3:
            os._exit(7)
        Unit.steps += 1
        time.sleep(0.2 if self.map_name == "toyslow" else 0)
        if actions[0] == 2 if self.mortal else Unit.steps % 17 == 0:
            self.games.pop().kill()
            self.launch()
            return 0, True, {}
        won = actions[0] == 1 and self.steps == 3
        info = {"battle_won": won}
        if self.steps == 5 and self.continuing:
            info["episode_limit"] = True
        self._episode_count += won or self.steps == 5
        return 20.0 * won, won or self.steps == 5, info
    def save_replay(self):
        os.mkdir(self.replay_dir) if not os.path.exists(self.replay_dir) else None
        if self.map_name == "toyss":
            raise OSError("no space")
        with open(os.path.join(self.replay_dir, f"{self.replay_prefix}_a_second.SC2Replay"), "x"):
            pass
    def close(self):
        for game in self.games:
            game.kill()
            game.wait()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """The package on the path of this process and of those that it starts; the file with the games' process ids."""
    package = tmp_path / "packages" / "smac"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "env.py").write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")  # as the script does where smac is installed
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("SC2_PIDS", str(tmp_path / "pids"))
    monkeypatch.syspath_prepend(package.parent)
    for name in [name for name in sys.modules if name.split(".")[0] == "smac"]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path / "pids"
    for name in [name for name in sys.modules if name.split(".")[0] == "smac"]:
        del sys.modules[name]


def games(pids):
    """(process id, seed, map) of the games that have been launched."""
    rows = [line.split() for line in pids.read_text().splitlines()]
    return [(int(pid), int(seed), name) for pid, seed, name in rows]


def runs(pid):
    """Whether a process is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_games_of_smac_go_on_from_episode_to_episode(stand_in, tmp_path, capfd):
    envs = TeamEnvs(Args(env_id="smac/toy"), 2, tmp_path, "test")
    assert envs.shape == (1, 4, 2, 3)
    envs.reset(11)
    seeds = envs.obs[:, 0, 1].tolist()
    assert len(set(seeds)) == 2 and envs.state[:, 1].tolist() == [255, 255]  # the reward's maximum has the health once
    for k in range(3):
        ended = envs.step(np.array([[1], [0]]))
        assert envs.state[1, 0] == k + 1
    ((i, episode, _, won),) = envs.finished
    assert (i, won, ended.tolist()) == (0, True, [True, False])
    assert episode.rewards.flatten().tolist() == [0, 0, 20] and episode.state[:, 0].tolist() == [0, 1, 2, 3]
    assert episode.avail_actions.dtype == torch.bool and episode.avail_actions.shape == (4, 1, 4)
    assert episode.obs.dtype == episode.state.dtype == torch.float32
    assert envs.state[0, 0] == 0 and envs.last_actions.tolist() == [[-1], [0]]
    assert envs.step(np.array([[2], [0]])).tolist() == [True, False] and not envs.finished  # a crash
    assert "crashed" in capfd.readouterr().err
    assert envs.state[0].tolist() == [0, 255, 1]
    ended = envs.step(np.array([[0], [0]]))  # the fifth step of the second game
    ((i, episode, _, won),) = envs.finished
    assert (i, won, ended.tolist()) == (1, False, [False, True]) and episode.no_bootstrap[-1] == 1
    envs.reset(12)  # in the middle of an episode
    assert envs.state[:, 0].tolist() == [0, 0] and envs.obs[:, 0, 1].tolist() == seeds
    launched = games(stand_in)
    assert len(launched) == 3  # two at first, and one by the package after the crash
    assert [runs(pid) for pid, *_ in launched].count(True) == 2
    envs.close()
    assert not any(runs(pid) for pid, *_ in launched)
    assert "the game speaks" not in capfd.readouterr().out


def test_time_limits_of_smac_are_bootstrapped_where_that_is_wanted(stand_in, tmp_path):
    envs = TeamEnvs(Args(env_id="smac/toy", bootstrap_timeouts=True), 1, tmp_path, "test")
    envs.reset(1)
    for _ in range(5):
        envs.step(np.array([[0]]))
    ((_, episode, *_),) = envs.finished
    assert len(episode.rewards) == 5 and not episode.no_bootstrap.any()
    envs.close()


def test_a_reset_in_the_first_episode_launches_no_second_game(stand_in, tmp_path):
    envs = TeamEnvs(Args(env_id="smac/toy"), 1, tmp_path, "test")
    for key in range(3):
        envs.reset(key)
        envs.step(np.array([[0]]))
    assert len(games(stand_in)) == 1
    envs.close()


def test_a_run_on_games_in_processes_of_their_own(stand_in, tmp_path):
    """By `python qmix_smac.py`, which finds out for itself what the package needs."""
    flags = "--env-id smac/toys --total-timesteps 120 --test-interval 60 --checkpoint-interval 60 --save-replay".split()
    env = {name: value for name, value in os.environ.items() if not name.startswith("PROTOCOL")}
    command = [sys.executable, q.__file__, *QUICK, *flags]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and ", 3 episodes of greedy actions" in result.stdout
    assert "Traceback" not in result.stderr and "crashed" in result.stderr
    run_folder = run_folder_in(tmp_path)
    assert run_folder.name.startswith("smac-toys__") and (run_folder / "model.pt").exists()
    assert len(list((run_folder / "replays").glob("*.SC2Replay"))) == 2
    launched = games(stand_in)
    assert len({seed for _, seed, _ in launched}) == 6  # two of training, two of tests, two of the evaluation
    assert not any(runs(pid) for pid, *_ in launched)


@pytest.mark.filterwarnings("ignore:.*ERROR")  # gymnasium's, of the process that fails on purpose
def test_a_replay_that_cannot_be_saved_costs_a_note(stand_in, call, tmp_path):
    flags = "--env-id smac/toyss --num-envs 1 --total-timesteps 30 --test-nepisode 1 --save-replay".split()
    result = call("qmix_smac", *QUICK, *flags)
    assert result.status == 0 and "note: no replays (no space)" in result.stderr
    assert (run_folder_in(tmp_path) / "model.pt").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_games_end_with_the_run(stand_in, tmp_path, signum):
    env = {name: os.environ[name] for name in ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "SC2_PIDS")}
    find = functools.partial(sys.path.insert, 0, os.environ["PYTHONPATH"])
    flags = "--env-id smac/toyslow --total-timesteps 2000000".split()
    run = Run("qmix_smac", *SMALL, *flags, cwd=tmp_path, sabotage=find, env=env)
    wait_for(lambda: stand_in.exists() and len(games(stand_in)) >= 4, seconds=120)
    wait_for(lambda: list(tmp_path.glob("runs/*/checkpoint_*.pt")), seconds=60)
    time.sleep(4)  # a signal in the first reset, which comes now, ends in gymnasium's own traceback
    if signum == signal.SIGINT:  # Ctrl-C reaches all processes, in the middle of a step; the first one ends the others
        for pid in [pid for pid, *_ in games(stand_in) if runs(pid)]:
            os.kill(int(Path(f"/proc/{pid}/stat").read_text().split()[3]), signum)  # the game's parent
        time.sleep(1)
        assert run.process.is_alive()
        os.killpg(run.process.pid, signum)
    else:
        run.kill(signum)
    result = run.wait(60)
    said = result.stderr.replace("note: StarCraft II crashed; the episode is dropped\n", "")
    if signum != signal.SIGKILL:
        assert result.status == 130 and re.fullmatch(r"\n.*\ninterrupted; continue with: .*\n\n.*\n\n?", said), said
    wait_for(lambda: not any(runs(pid) for pid, *_ in games(stand_in)))
