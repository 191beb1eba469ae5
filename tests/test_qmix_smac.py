"""QMIX: its mathematics against loops from the papers, the battles against their units, and whole runs."""

import functools
import importlib.util
import itertools
import os
import re
import shutil
import signal
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Run, checkpoints, files_below, load, run_folder_in, scalars, wait_for
from test_resume import assert_same_run, kill_in

import qmix_smac as q
from qmix_smac import Args, Episode, EpisodeReplay, Players, Shape

SHAPE = Shape(n_agents=3, n_actions=4, obs_dim=5, state_dim=6, episode_limit=9)
SMALL = (
    "--env-id 3m --num-envs 2 --total-timesteps 1200 --checkpoint-interval 300 --batch-size 4 --buffer-size 24 "
    "--log-interval 100 --test-interval 400 --test-nepisode 3 --eval-episodes 3 --rnn-hidden-dim 16 "
    "--epsilon-anneal-time 800 --target-update-interval 7 --save-model-interval 600"
).split()
QUICK = [*SMALL, "--total-timesteps", "200", "--save-model-interval", "0", "--test-interval", "200"]


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine two threads of torch wait for each other ten times as long as they compute."""
    torch.set_num_threads(1)


def random_replay(lengths, seed=0, shape=SHAPE, buffer_size=100):
    """A replay with an episode of each length; dead agents have no action but the last one, and see zeros."""
    rng = np.random.default_rng(seed)
    replay = EpisodeReplay(buffer_size, shape)
    n, A = shape.n_agents, shape.n_actions
    for k, length in enumerate(lengths):
        alive = np.sort(rng.random((length + 1, n)) < 0.8, axis=0)[::-1]  # the dead stay dead
        avail = (rng.random((length + 1, n, A)) < 0.6) & alive[..., None]
        avail[..., -1] = True
        obs = rng.normal(size=(length + 1, n, shape.obs_dim)) * alive[..., None]
        floats = np.concatenate([obs.reshape(length + 1, -1), rng.normal(size=(length + 1, shape.state_dim))], axis=1)
        actions = (rng.random(avail.shape) * avail).argmax(axis=-1)[:-1]
        arrays = (floats.astype(np.float32), avail.reshape(length + 1, -1).astype(np.uint8), actions.astype(np.uint8))
        replay.add(Episode(*arrays, rng.normal(size=length).astype(np.float32)), bool(k % 2))
    return replay


def networks(args, shape=SHAPE, dtype=torch.float64):
    torch.manual_seed(0)
    made = [network.to(dtype) for _ in range(2) for network in q.make_networks(args, shape)]
    with torch.no_grad():
        for network in made:
            for parameter in network.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=dtype) * 0.5)
    return made


def in_float64(batch):
    return batch._replace(**{k: v.double() for k, v in batch._asdict().items() if v.dtype == torch.float32})


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
    cell = torch.nn.GRUCell(agent.rnn.input_size, agent.rnn.hidden_size, dtype=torch.float64)
    mine = [agent.rnn.weight_ih_l0, agent.rnn.weight_hh_l0, agent.rnn.bias_ih_l0, agent.rnn.bias_hh_l0]
    call = functools.partial(torch.func.functional_call, cell, dict(zip(dict(cell.named_parameters()), mine)))
    n, A = SHAPE.n_agents, SHAPE.n_actions
    obs = torch.from_numpy(episode.floats[:, : n * SHAPE.obs_dim]).double().view(-1, n, SHAPE.obs_dim)
    hidden, values = [torch.zeros(1, agent.rnn.hidden_size, dtype=torch.float64)] * n, []
    for t in range(len(obs)):
        row = []
        for a in range(n):
            last = torch.zeros(A, dtype=torch.float64)
            if t:
                last[episode.actions[t - 1, a]] = 1
            x = torch.cat([obs[t, a], last, torch.eye(n, dtype=torch.float64)[a]])
            hidden[a] = call((torch.relu(agent.fc1(x))[None], hidden[a]))
            row.append(agent.fc2(hidden[a])[0])
        values.append(torch.stack(row))
    return torch.stack(values)


def loss_by_loops(agent, mixer, target_agent, target_mixer, episodes, terminated, args):
    """[QMIX] Eq. (6) for each step of each episode: the mean of the squares."""
    n, A = SHAPE.n_agents, SHAPE.n_actions
    squares, targets = [], []
    for episode, end in zip(episodes, terminated):
        state = torch.from_numpy(episode.floats[:, n * SHAPE.obs_dim :]).double()
        avail = episode.avail_actions.reshape(-1, n, A)
        mine, theirs = stepped(agent, episode), stepped(target_agent, episode).detach()
        T, y = len(episode.rewards), None
        for t in reversed(range(T)):
            next_values = []
            for a in range(n):
                legal = [u for u in range(A) if avail[t + 1, a, u]]
                judge = mine if args.double_q else theirs
                next_values.append(theirs[t + 1, a, max(legal, key=lambda u: judge[t + 1, a, u].item())])
            value = target_mixer(torch.stack(next_values)[None], state[t + 1][None])[0].detach()
            if y is not None:  # not the last step
                value = (1 - args.td_lambda) * value + args.td_lambda * y
            bootstraps = t + 1 < T or (args.bootstrap_timeouts and not end)
            y = episode.rewards[t].item() + (args.gamma * value if bootstraps else 0 * value)
            chosen = torch.stack([mine[t, a, episode.actions[t, a]] for a in range(n)])
            squares.append((y - mixer(chosen[None], state[t][None])[0]) ** 2)
            targets.append(y)
    return torch.cat(squares).mean(), torch.cat(targets).mean()


@pytest.mark.parametrize("mixer", ["qmix", "vdn", "none"])
@pytest.mark.parametrize(
    "flags",
    [{}, {"double_q": False}, {"bootstrap_timeouts": True}, {"td_lambda": 0.6, "bootstrap_timeouts": True}],
    ids=str,
)
def test_loss_and_gradient_are_the_papers(mixer, flags):
    args = Args(mixer=mixer, rnn_hidden_dim=8, mixing_embed_dim=4, hypernet_embed=8, gamma=0.9, **flags)
    made = networks(args)
    replay = random_replay([3, 1, 7, 7, 2, 5])
    batch = in_float64(replay.batch([5, 0, 1, 3, 2], args.bootstrap_timeouts))
    loss, parts = q.qmix_loss(*made, batch, args)
    chosen = [replay.episodes[i] for i in (5, 0, 1, 3, 2)]
    expected, target = loss_by_loops(*made, chosen, [replay.terminated[i] for i in (5, 0, 1, 3, 2)], args)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert float(parts["losses/target_mean"]) == pytest.approx(float(target), rel=1e-9)
    parameters = [*made[0].parameters(), *made[1].parameters()]
    for mine, theirs in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)):
        assert torch.allclose(mine, theirs, rtol=1e-7, atol=1e-10)


def test_what_follows_an_end_changes_nothing():
    """The last row of an episode that is not bootstrapped is valued by the target networks, and counts for nothing."""
    args, replay = Args(), random_replay([4, 6])
    made = networks(args)
    before = q.qmix_loss(*made, in_float64(replay.batch([0, 1], False)), args)[0]
    for episode in replay.episodes:
        episode.floats[-1] = 1e3
        episode.avail_actions[-1] = 0
    assert q.qmix_loss(*made, in_float64(replay.batch([0, 1], False)), args)[0] == before
    assert q.qmix_loss(*made, in_float64(replay.batch([0, 1], True)), args)[0] != before
    assert replay.terminated == [False, True]


def test_an_action_that_cannot_be_taken_is_in_no_target():
    args = Args(mixer="vdn", bootstrap_timeouts=True)
    made = networks(args)
    with torch.no_grad():
        for agent in (made[0], made[2]):
            agent.fc2.bias[0] = 1e6  # by far the best, wherever it can be taken
    replay = random_replay([6, 8])
    for allowed in (False, True):
        for episode in replay.episodes:
            episode.avail_actions.reshape(-1, 3, 4)[..., 0] = allowed
        _, parts = q.qmix_loss(*made, in_float64(replay.batch([0, 1], True)), args)
        assert (float(parts["losses/target_mean"]) > 1e5) == allowed


# Replay


def test_a_batch_is_ragged_and_whole():
    lengths = [3, 1, 7, 7, 2]
    replay = random_replay(lengths)
    batch = replay.batch([0, 1, 2, 3, 4], True)
    assert batch.sizes.tolist() == [5, 5, 4, 3, 2, 2, 2, 2] and len(batch.obs) == sum(lengths) + 5
    order = sorted(range(5), key=lambda i: -lengths[i])
    row = 0
    for t, size in enumerate(batch.sizes.tolist()):
        for b in range(size):
            episode = replay.episodes[order[b]]
            floats = torch.cat([batch.obs[row].flatten(), batch.state[row]])
            assert (floats == torch.from_numpy(episode.floats[t])).all()
            assert (batch.avail_actions[row].flatten() == torch.from_numpy(episode.avail_actions[t])).all()
            if t:
                step = row - 5
                before = batch.now[step]
                floats = torch.cat([batch.obs[before].flatten(), batch.state[before]])
                assert (floats == torch.from_numpy(episode.floats[t - 1])).all()
                assert batch.actions[step].tolist() == episode.actions[t - 1].tolist()
                assert batch.rewards[step] == episode.rewards[t - 1]
                assert batch.terminated[step] == (t == lengths[order[b]] and replay.terminated[order[b]])
            row += 1


def test_the_replay_is_a_ring_that_can_be_saved():
    replay = random_replay(range(1, 9), buffer_size=5)
    assert [len(episode.rewards) for episode in replay.episodes] == [6, 7, 8, 4, 5]
    copy = EpisodeReplay(5, SHAPE)
    copy.load_state_dict(replay.state_dict())
    more = random_replay([3, 9], seed=1)
    for each in (replay, copy):
        for k in range(2):
            each.add(more.episodes[k], more.terminated[k])
    assert [len(episode.rewards) for episode in copy.episodes] == [6, 7, 8, 3, 9]
    for mine, theirs in zip(replay.episodes, copy.episodes):
        for a, b in zip(mine, theirs):
            assert a.dtype == b.dtype and a.shape == b.shape and (a == b).all()
    draws = [each.sample(5, True, np.random.default_rng(0)) for each in (replay, copy)]
    assert all((a == b).all() for a, b in zip(*draws))
    assert len({float(r) for r in draws[0].rewards}) == len(draws[0].rewards)  # no episode twice


def test_the_replay_takes_what_its_episodes_need(monkeypatch, capsys):
    smac_3m = Shape(3, 9, 30, 48, 60)
    assert 5000 * q.episode_bytes(smac_3m) <= 0.18e9
    replay = random_replay([4, 8], shape=smac_3m)
    taken = [sum(column.nbytes for column in episode) for episode in replay.episodes]
    assert taken[1] - taken[0] == 4 * q.episode_bytes(smac_3m._replace(episode_limit=0)) <= 4 * 590
    assert taken[1] <= q.episode_bytes(smac_3m._replace(episode_limit=8))
    q.check_replay_size(Args(), smac_3m)
    assert "0.18 GB" in capsys.readouterr().out
    monkeypatch.setattr(q, "available_memory", lambda: int(0.09e9))
    with pytest.raises(SystemExit):
        q.check_replay_size(Args(), smac_3m)
    assert re.fullmatch(r"error: [^\n]*0.2 GB[^\n]*--buffer-size 2\d\d\d\n", capsys.readouterr().err)


# Acting


def test_playing_and_learning_see_the_same_values():
    """Row by row while playing, with episodes that begin anew, as in one pass over the whole episode."""
    args = Args(rnn_hidden_dim=8)
    agent = networks(args, dtype=torch.float32)[0]
    replay = random_replay([5, 3])
    players, played = Players(agent, 2, torch.device("cpu")), [[], []]
    place = [(0, 0), (1, 0)]  # episode, step; the second environment goes on with the first episode
    for _ in range(6):
        rows = [replay.episodes[e] for e, _ in place]
        floats = np.stack([row.floats[t] for row, (_, t) in zip(rows, place)])
        players.act(floats, np.ones((2, 3, 4), np.uint8))
        for i, (e, t) in enumerate(place):
            played[i].append((e, t, players.agent_qs[i].clone()))
            if t < len(rows[i].actions):
                players.last_actions[i] = rows[i].actions[t]
        ended = np.array([t == len(row.actions) for row, (_, t) in zip(rows, place)])
        players.forget(ended)
        place = [(0, 0) if over else (e, t + 1) for over, (e, t) in zip(ended, place)]
    for e, t, values in itertools.chain(*played):
        batch = replay.batch([e], False)
        last = torch.cat([torch.full((1, 3), -1), batch.actions])
        whole = agent(agent.inputs(batch.obs, last), batch.sizes)[0]
        assert torch.allclose(values, whole[t], atol=1e-6), (e, t)


def test_epsilon_is_the_share_of_random_actions_and_all_are_available():
    agent = networks(Args(rnn_hidden_dim=8), dtype=torch.float32)[0]
    rng, players = np.random.default_rng(0), Players(agent, 500, torch.device("cpu"))
    avail = (rng.random((500, 3, 4)) < 0.5).astype(np.uint8)
    avail[..., 2] = 1
    floats = rng.normal(size=(500, 21)).astype(np.float32)
    greedy = players.act(floats, avail)
    for epsilon in (0.0, 0.3, 1.0):
        shares = []
        for _ in range(20):
            players.forget(np.ones(500, bool))
            actions = players.act(floats, avail, epsilon, rng)
            assert np.take_along_axis(avail, actions[..., None], axis=-1).all()
            shares.append((actions != greedy).mean())
        random_share = 1 - (1 / avail.sum(axis=-1)).mean()  # a random action may be the best one
        assert np.mean(shares) == pytest.approx(epsilon * random_share, abs=0.01)


# SMAX


@pytest.fixture(scope="module")
def battles():
    """Two battles on 3m; whatever a test does to them, the next one begins them anew."""
    return q.make_envs(Args(env_id="3m"), 2)


def attack(avail):
    """Fire where that is possible, else go east."""
    return np.where(avail[..., 5:].any(axis=-1), 5 + avail[..., 5:].argmax(axis=-1), np.where(avail[..., 1], 1, 4))


def trace(envs, seeds, steps=25):
    floats, avail = envs.reset(seeds)
    rows = [floats]
    for _ in range(steps):
        step = envs.step(attack(avail))
        avail = step.avail_actions
        rows.append(step.floats)
    return np.stack(rows)


def test_battles_depend_on_their_own_seed_alone(battles):
    first, again, swapped, other = (trace(battles, seeds) for seeds in ((5, 6), (5, 6), (6, 5), (7, 8)))
    assert (first == again).all() and (first == swapped[:, ::-1]).all()
    assert (first[0] != other[0]).any() and (first[0, 0] != first[0, 1]).any()
    assert battles.advance._cache_size() <= 2  # the step was compiled once, for arrays of numpy's and of its own


def test_observations_and_state(battles):
    floats, avail = battles.reset([1, 2])
    n, obs_dim = battles.shape.n_agents, battles.shape.obs_dim
    assert battles.shape == (3, 8, 75, 72, 101) and floats.shape == (2, 3 * 75 + 72) and avail.shape == (2, 3, 8)
    for _ in range(30):
        step = battles.step(attack(avail))
        avail = step.avail_actions
        units = battles.state.state
        state = step.floats[:, n * obs_dim :]
        assert np.abs(step.floats).max() <= 1 and state.min() >= 0
        features, alive = state[:, :60].reshape(2, 6, 10), np.array(units.unit_alive)
        assert np.allclose(features[..., 0], np.array(units.unit_health) / 45, atol=1e-6)
        assert np.allclose(features[..., 1:3], np.array(units.unit_positions) / 32 * alive[..., None], atol=1e-6)
        own = step.floats[:, : n * obs_dim].reshape(2, n, obs_dim)[..., -10:]
        assert np.allclose(own, features[:, :n], atol=1e-6)  # what an agent knows of itself, it and the state say alike
        assert (avail[~alive[:, :n]] == np.eye(8)[4]).all()  # the dead can do nothing but stop


def test_victories_are_read_from_the_units_and_returns_have_smacs_scale(battles):
    _, avail = battles.reset([3, 4])
    rng, returns, ends = np.random.default_rng(0), np.zeros(2), []
    for _ in range(400):
        noise = (rng.random(avail.shape) * avail).argmax(axis=-1)
        step = battles.step(np.where(rng.random((2, 3)) < 0.1, noise, attack(avail)))
        returns += step.rewards
        for i in range(2):
            n = battles.shape.n_agents
            last_state = step.last_floats[i, n * battles.shape.obs_dim :][:60].reshape(6, 10)
            health = last_state[:, 0]  # of the battle's own last state, before the next one begins
            allies, enemies = (health[:n] > 0).any(), (health[n:] > 0).any()
            assert step.ended[i] == step.terminated[i] == (not (allies and enemies))
            assert step.won[i] == (allies and not enemies) == (step.rewards[i] >= 10)
            if step.ended[i]:
                ends.append(step.won[i])
                assert returns[i] == pytest.approx(20, abs=1e-3) if step.won[i] else returns[i] < 10.001
                assert (step.floats[i] != step.last_floats[i]).any()
                returns[i] = 0
            else:
                assert (step.floats[i] == step.last_floats[i]).all()
        avail = step.avail_actions
    assert 0 < sum(ends) < len(ends)


def test_the_time_limit_is_no_end_of_the_battle(battles):
    import jax.numpy as jnp

    battles.reset([1, 2])
    state = battles.state.state
    battles.state = battles.state.replace(state=state.replace(step=jnp.array([99, 100], state.step.dtype)))
    stay = np.full((2, 3), 4)
    step = battles.step(stay)  # the hundredth of one, the hundred-and-first of the other
    assert step.ended.tolist() == [False, True] and not step.terminated.any() and not step.won.any()
    assert np.array(battles.state.state.step).tolist() == [100, 0]
    step = battles.step(stay)
    assert step.ended.tolist() == [True, False] and not step.terminated.any()


@pytest.mark.parametrize("name", ["2s3z", "smacv2_5_units"])
def test_random_play_of_several_kinds_of_units(name):
    """What can be done is what jaxmarl says, the dead do nothing, and the state is within its norms."""
    import jax

    envs, rng = q.make_envs(Args(env_id=name), 2), np.random.default_rng(1)
    floats, avail = envs.reset([1, 2])
    n = envs.shape.n_agents
    kinds, ends = set(), 0
    for _ in range(60):
        state = envs.state.state
        theirs = jax.vmap(envs.env.get_avail_actions)(envs.state)
        assert (avail == np.stack([theirs[agent] for agent in envs.env.agents], axis=1)).all()
        dead = ~np.array(state.unit_alive)[:, :n]
        assert avail.any(-1).all() and (avail[dead].sum(-1) == 1).all() and (avail[~dead].sum(-1) > 1).all()
        assert floats.min() >= -1 and floats.max() <= 1
        kinds |= set(np.array(state.unit_types).ravel().tolist())
        step = envs.step((rng.random(avail.shape) * avail).argmax(axis=-1))
        floats, avail, ends = step.floats, step.avail_actions, ends + step.ended.sum()
    assert len(kinds) > 1 and ends > 0


def test_all_maps_are_there_and_a_wrong_one_is_told_the_nearest(capsys):
    maps = {"3m": 3, "2s3z": 5, "25m": 25, "3s5z": 8, "8m": 8, "5m_vs_6m": 5, "10m_vs_11m": 10, "27m_vs_30m": 27}
    maps |= {"3s5z_vs_3s6z": 8, "3s_vs_5z": 3, "6h_vs_8z": 6}
    maps |= {"smacv2_5_units": 5, "smacv2_10_units": 10, "smacv2_20_units": 20}
    assert {name: q.make_envs(Args(env_id=name), 1).shape.n_agents for name in maps} == maps
    for name, nearest in (("3mm", "3m"), ("5m_vs_7m", "5m_vs_6m"), ("MMM2", "smac/")):
        with pytest.raises(SystemExit):
            q.make_envs(Args(env_id=name), 1)
        error = capsys.readouterr().err
        assert re.fullmatch(r"error: [^\n]*\n", error) and name in error and nearest in error


# Learning: the two-step game of the paper


def two_step_game():
    """All 16 ways to play it, [QMIX] Sec. 5: the first agent's first action chooses the second game, 2A or 2B."""
    shape = Shape(n_agents=2, n_actions=2, obs_dim=3, state_dim=3, episode_limit=2)
    payoffs = {0: [[7, 7], [7, 7]], 1: [[0, 1], [1, 8]]}
    replay = EpisodeReplay(16, shape)
    for u in itertools.product((0, 1), repeat=4):
        states = np.eye(3, dtype=np.float32)[[0, 1 + u[0], 0]]
        floats = np.concatenate([states, states, states], axis=1)
        floats[-1] = 0
        rewards = np.array([0, payoffs[u[0]][u[2]][u[3]]], np.float32)
        actions = np.array(u, np.uint8).reshape(2, 2)
        replay.add(Episode(floats, np.ones((3, 4), np.uint8), actions, rewards), True)
    return shape, replay, payoffs


@pytest.mark.parametrize("mixer, best, second", [("qmix", 8, [[0, 1], [1, 8]]), ("vdn", 7, [[-1.5, 2.5], [2.5, 6.5]])])
def test_the_two_step_game(mixer, best, second):
    shape, replay, payoffs = two_step_game()
    args = Args(mixer=mixer, mixing_embed_dim=8, gamma=0.99)
    torch.manual_seed(1)
    agent, mix = q.make_networks(args, shape)
    target_agent, target_mix = q.make_networks(args, shape)
    optimizer = torch.optim.Adam([*agent.parameters(), *mix.parameters()], lr=5e-3)
    batch = replay.batch(list(range(16)), False)
    for k in range(600):
        if k % 50 == 0:
            target_agent.load_state_dict(agent.state_dict())
            target_mix.load_state_dict(mix.state_dict())
        optimizer.zero_grad()
        q.qmix_loss(agent, mix, target_agent, target_mix, batch, args)[0].backward()
        optimizer.step()
    players = Players(agent, 1, torch.device("cpu"))
    everything = np.ones((1, 2, 2), np.uint8)
    first = players.act(np.array([[1, 0, 0] * 3], np.float32), everything)[0]
    then = players.act(np.tile(np.eye(3, dtype=np.float32)[1 + first[0]], 3)[None], everything)[0]
    assert payoffs[first[0]][then[0]][then[1]] == best
    # The values of game 2B, after u = (1, 0): [QMIX] Table 2; VDN's are the least squares of a sum
    last = torch.tensor([[-1, -1], [1, 0]])
    obs = torch.eye(3)[[0, 2]][:, None].expand(2, 2, 3)
    values = agent(agent.inputs(obs, last), torch.tensor([1, 1]))[0][1]  # (n, A)
    for u in itertools.product((0, 1), repeat=2):
        q_tot = mix(torch.stack([values[a, u[a]] for a in (0, 1)])[None], torch.eye(3)[2:])
        assert float(q_tot.detach()) == pytest.approx(second[u[0]][u[1]], abs=0.3)


# The loop, on games that count


class Counting:
    """Games of two agents whose observations say in which game, episode and step they are; a reward is a tenth of t.

    Episode e of game i is 3 + (e + 2 i) % 7 steps long. Two of four actions are available, another two in each step.
    """

    shape = Shape(n_agents=2, n_actions=4, obs_dim=4, state_dim=3, episode_limit=9)

    def __init__(self, num_envs, events):
        self.num_envs, self.events, self.first, self.taken = num_envs, events, 0, {}

    def now(self):
        floats, avail = np.zeros((self.num_envs, 11), np.float32), np.zeros((self.num_envs, 2, 4), np.uint8)
        for i in range(self.num_envs):
            where = [self.episode[i] / 1000, self.t[i] / 10, i / 10]
            floats[i] = [*where, 0, *where, 1, *where]
            avail[i, :, [(self.t[i] + i) % 4, (self.t[i] + i + 1) % 4]] = 1
        return floats, avail

    def reset(self, seeds):
        self.first += 100
        self.episode, self.t = np.full(self.num_envs, self.first), np.zeros(self.num_envs, int)
        return self.now()

    def step(self, actions):
        self.events.append("step")
        for i in range(self.num_envs):
            self.taken.setdefault((self.episode[i], i), []).append(actions[i].copy())
        self.t += 1
        last, rewards = self.now(), self.t / 10
        ended = self.t == 3 + (self.episode + 2 * np.arange(self.num_envs)) % 7
        self.episode, self.t = self.episode + ended, np.where(ended, 0, self.t)
        nothing = np.zeros(self.num_envs, bool)
        return q.Step(*self.now(), *last, rewards, ended, ended, nothing, nothing)

    def close(self):
        pass


def count_and_train(folder, monkeypatch, **options):
    """Train on counting games. Returns the final checkpoint, the training games, events and minibatches in order."""
    events, batches, games = [], [], []
    add, qmix_loss = EpisodeReplay.add, q.qmix_loss

    def spy_on_add(self, *arguments):
        events.append("add")
        add(self, *arguments)

    def spy_on_loss(*arguments):
        events.append("update")
        batches.append(arguments[4])
        return qmix_loss(*arguments)

    def make_envs(args, num_envs, replay_dir=""):
        games.append(Counting(num_envs, events if not games else []))
        return games[-1]

    monkeypatch.setattr(EpisodeReplay, "add", spy_on_add)
    monkeypatch.setattr(q, "qmix_loss", spy_on_loss)
    monkeypatch.setattr(q, "make_envs", make_envs)
    defaults = dict(num_envs=3, total_timesteps=450, batch_size=4, buffer_size=500, checkpoint_interval=200)
    defaults |= dict(test_interval=0, log_interval=50, eval_episodes=2, target_update_interval=7, cuda=False)
    args = Args(**defaults | options)
    q.train(args, folder, None)
    monkeypatch.undo()
    return args, load(checkpoints(folder)[-1]), games[0], events, batches


def test_a_run_stores_what_happened(tmp_path, monkeypatch):
    _, checkpoint, games, events, _ = count_and_train(tmp_path, monkeypatch, epsilon_finish=0.5)
    replay = EpisodeReplay(500, Counting.shape)
    replay.load_state_dict(checkpoint["replay"])
    assert len(replay.episodes) == events.count("add") > 50
    taken = set()
    for episode in replay.episodes:
        number, i = round(1000 * float(episode.floats[0, -3])), round(10 * float(episode.floats[0, -1]))
        length = 3 + (number + 2 * i) % 7
        t = np.arange(length + 1)
        where = np.stack([np.full(length + 1, number / 1000), t / 10, np.full(length + 1, i / 10)], axis=1)
        for columns in ([0, 1, 2], [4, 5, 6], [8, 9, 10]):
            np.testing.assert_array_equal(episode.floats[:, columns], where.astype(np.float32))
        np.testing.assert_array_equal(episode.actions, games.taken[number, i])
        np.testing.assert_allclose(episode.rewards, t[1:] / 10, rtol=1e-6)
        for step in t:
            free = np.isin(np.arange(4), [(step + i) % 4, (step + i + 1) % 4])
            np.testing.assert_array_equal(episode.avail_actions[step].reshape(2, 4), np.stack([free, free]))
            assert step == length or free[episode.actions[step]].all()
        taken |= set(map(tuple, episode.actions))
    assert len(taken) == 12  # all that two can choose of two neighbours: each agent acts for itself


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_training_is_the_optimiser_on_the_minibatches_with_a_target_network(tmp_path, monkeypatch, optimizer, rate):
    """An update for each episode (or two) once the replay holds a minibatch; targets copied every seven episodes."""
    options = dict(optimizer=optimizer, updates_per_episode=rate, anneal_lr=False, max_grad_norm=1.5, rnn_hidden_dim=8)
    args, checkpoint, _, events, batches = count_and_train(tmp_path, monkeypatch, **options)
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
    for event in [*events, "step"]:
        if event == "add":
            episodes, due = episodes + 1, due + rate
        elif event == "update":
            due -= 1
            assert due >= 0 and episodes >= 4
            steps.zero_grad()
            q.qmix_loss(*networks, *targets, next(minibatches), args)[0].backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.5)))
            steps.step()
            if episodes - copied >= 7:
                copied, copies = episodes, copies + 1
                for network, target in zip(networks, targets):
                    target.load_state_dict(network.state_dict())
        elif episodes < 4:
            due = 0.0
        else:
            assert due < 1
    assert len(batches) > 20 and copies > 5 and min(norms) < 1.5 < max(norms)
    moved = float((torch.nn.utils.parameters_to_vector(parameters).detach() - start).abs().max())
    for name, network in zip(("agent", "mixer", "target_agent", "target_mixer"), (*networks, *targets)):
        for key, expected in network.state_dict().items():
            torch.testing.assert_close(checkpoint[name][key], expected, rtol=0, atol=0.01 * moved)


# Whole runs


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a run that nothing ended, for reading only."""
    cwd = tmp_path_factory.mktemp("reference")
    result = Run("qmix_smac", *SMALL, cwd=cwd).wait(timeout=400)
    assert (result.status, result.stderr) == (0, ""), result
    return run_folder_in(cwd), result


def test_a_run_says_and_writes_what_it_should(reference):
    run_folder, result = reference
    lines = result.stdout.splitlines()
    assert lines[0].startswith("replay: at most ") and lines[1] == f"run folder: runs/{run_folder.name}"
    assert re.fullmatch(r"compiled SMAX in \d+\.\d s", lines[2])
    assert re.fullmatch(r"evaluation: [\d.]+ \+- [\d.]+ over 3 episodes, [\d.]+% of the battles won", lines[-2])
    kinds = sorted(re.sub(r"\d.*", "", path.name) for path in run_folder.iterdir())
    expected = ["args.json", "checkpoint_", "checkpoint_", "events.out.tfevents.", "model.pt", "model_", "model_"]
    assert kinds == expected
    points = scalars(run_folder)
    for tag in "td_loss grad_norm td_error_abs q_taken_mean target_mean".split():
        steps = [step for step, _ in points[f"losses/{tag}"]]
        assert steps[-1] == 1200 and np.isfinite([value for _, value in points[f"losses/{tag}"]]).all()
    epsilons = dict(points["charts/epsilon"])
    assert epsilons[400] == pytest.approx(1 - 0.95 * 398 / 800, abs=1e-6) and epsilons[1200] == pytest.approx(0.05)
    won = points["eval/battle_won_rate"]
    assert [step for step, _ in won] == [400, 800, 1200, 1200]  # three tests and the evaluation
    assert f"{won[-1][1]:.1%} of the battles" in lines[-2]
    state = load(checkpoints(run_folder)[-1])
    episodes, replay = len(points["charts/episodic_return"]), state["replay"]
    assert state["episodes"] == replay["added"] == episodes and len(replay["lengths"]) == min(24, episodes)
    assert state["last_target_update"] == episodes // 7 * 7 or episodes - state["last_target_update"] < 7
    lengths = [value for _, value in points["charts/episodic_length"]]
    assert replay["lengths"].sum() == sum(lengths[-24:]) and 900 < sum(lengths) <= 1200


def test_killed_and_resumed_is_the_run_that_nothing_ended(call, tmp_path, reference):
    kill = functools.partial(kill_in, "torch.save", None, 4)
    assert Run("qmix_smac", *SMALL, cwd=tmp_path, sabotage=kill).wait(timeout=400).status == -9
    run_folder = run_folder_in(tmp_path)
    assert checkpoints(run_folder)[-1].name.startswith("checkpoint_")
    result = call("qmix_smac", "--resume", f"runs/{run_folder.name}")
    assert (result.status, result.stderr) == (0, "")
    assert_same_run(run_folder, reference[0])


def test_load_step_takes_the_nearest_and_leaves_the_run_as_it_is(call, tmp_path, reference):
    run_folder, finished = reference
    before = files_below(run_folder)
    found = re.search(r"evaluation: .*", finished.stdout)[0]
    for flags, same in (([], True), (["--load-step", "5000"], True), (["--load-step", "610"], False)):
        result = call("qmix_smac", "--evaluate", str(run_folder), *flags)
        assert result.status == 0 and (re.search(r"evaluation: .*", result.stdout)[0] == found) == same
    result = call("qmix_smac", "--resume", str(run_folder), "--load-step", "610", "--total-timesteps", "800")
    assert result.status == 0 and "the replay begins empty" in result.stderr
    mine = run_folder_in(tmp_path)
    assert checkpoints(mine)[-1].name == "checkpoint_800.pt"
    assert [step for step, _ in scalars(mine)["eval/battle_won_rate"]] == [800, 800]
    first, last = checkpoints(mine)  # it has one from the first moment on, and goes on from there as it did
    assert load(first)["args"]["total_timesteps"] == 800
    model = load(mine / "model.pt")
    last.unlink()
    assert call("qmix_smac", "--resume", str(mine)).status == 0 and str(load(mine / "model.pt")) == str(model)
    for flags in ("--mixer vdn", "--optimizer adam", "--rnn-hidden-dim 8", "--buffer-size 10"):
        result = call("qmix_smac", "--resume", str(run_folder), *flags.split())
        assert result.status == 2 and flags in result.stderr
    assert files_below(run_folder) == before


def test_load_step_passes_over_a_damaged_file(tmp_path, capsys):
    for name, step in (("checkpoint_0", 0), ("checkpoint_100", 100)):
        content = {"script": "qmix_smac", "args": {"env_id": "3m"}, "global_step": step, "agent": {}}
        torch.save(content, tmp_path / f"{name}.pt")
    for name in ("model_90", "checkpoint_90"):
        (tmp_path / f"{name}.pt").write_bytes(b"broken")
    assert q.load_nearest(tmp_path, 91)["global_step"] == 100
    notes = capsys.readouterr().err.splitlines()
    assert sum("damaged" in note and "using checkpoint_100.pt" in note for note in notes) == 2
    assert notes[-1] == "note: the saved step that is nearest to 91 is 100"
    for path in tmp_path.iterdir():
        path.write_bytes(b"broken")
    with pytest.raises(SystemExit) as exit_:
        q.load_nearest(tmp_path, 91)
    assert exit_.value.code == 2 and capsys.readouterr().err.count("damaged") == 4


def test_load_step_of_a_model_beyond_the_newest_checkpoint_begins_another_run(call, tmp_path, reference):
    folder = tmp_path / "before"
    shutil.copytree(reference[0], folder)
    for path in checkpoints(folder):
        path.unlink()
    (folder / "model_600.pt").rename(folder / "checkpoint_600.pt")
    before = files_below(folder)
    result = call("qmix_smac", "--resume", str(folder), "--load-step", "1200", "--total-timesteps", "1250")
    assert result.status == 0 and files_below(folder) == before
    assert checkpoints(run_folder_in(tmp_path))[-1].name == "checkpoint_1250.pt"


@pytest.mark.parametrize(
    "flags",
    [
        "--mixer vdn --optimizer adam",
        "--mixer none --td-lambda 0.6",
        "--bootstrap-timeouts --no-double-q --updates-per-episode 0.5 --num-envs 2",
        "--no-checkpoint-replay --no-save-model",
        "--capture-video --eval-episodes 1",
        pytest.param("--compile", marks=pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")),
        pytest.param("--cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
    ],
)
def test_a_few_steps_in_every_mode(call, tmp_path, flags):
    result = call("qmix_smac", *QUICK, *flags.split())
    assert (result.status, result.stderr) == (0, "")
    run_folder = run_folder_in(tmp_path)
    assert np.isfinite([value for _, value in scalars(run_folder)["losses/td_loss"]]).all()
    assert (run_folder / "model.pt").exists() == ("--no-save-model" not in flags)
    if "--capture-video" in flags:
        moviepy = pytest.importorskip("moviepy")
        videos = sorted((run_folder / "videos").iterdir())
        assert [video.name for video in videos] == ["evaluation-step-200.mp4", "test-step-200.mp4"]
        with moviepy.VideoFileClip(str(videos[0])) as film:
            frames = [frame.astype(int) for frame in film.iter_frames()]
        assert len(frames) >= 5 and frames[0].max() > 150
        assert all(np.abs(before - after).max() > 20 for before, after in itertools.pairwise(frames))
    if "--no-checkpoint-replay" in flags:
        result = call("qmix_smac", "--resume", f"runs/{run_folder.name}", "--total-timesteps", "300")
        assert result.status == 0 and "the replay begins empty" in result.stderr
        assert "nothing was learned" not in result.stderr  # in all


def test_a_run_that_learned_nothing_says_so(call, tmp_path):
    result = call("qmix_smac", *QUICK, "--batch-size", "24")
    assert (result.status, result.stderr) == (
        0,
        "note: nothing was learned: fewer episodes than --batch-size have ended\n",
    )


@pytest.mark.parametrize("given", [False, True])
def test_what_is_unrolled_for_a_gradient_is_what_the_gru_says(given):
    args = Args()
    agent = networks(args)[0]
    batch = in_float64(random_replay([3, 1, 7]).batch([0, 1, 2], False))
    inputs = agent.inputs(batch.obs, batch.actions.new_full(batch.obs.shape[:2], -1))
    first = torch.randn(1, 3 * SHAPE.n_agents, args.rnn_hidden_dim, dtype=torch.float64) if given else None
    values, _ = agent(inputs, batch.sizes, first)
    with torch.no_grad():
        torch.testing.assert_close(values, agent(inputs, batch.sizes, first)[0])


def test_one_environment_drops_no_episode(call, tmp_path):
    argv = [*QUICK, "--num-envs", "1", "--checkpoint-interval", "50"]
    assert call("qmix_smac", *argv).status == 0
    points = scalars(run_folder_in(tmp_path))
    saved = [step for step, _ in points["charts/checkpoint"]][:-1]  # but for the last, at the end of the run
    ends = np.cumsum([value for _, value in points["charts/episodic_length"]])
    assert len(saved) >= 4 and set(saved[1:]) <= set(ends)


WRONG = {
    "map": ("--env-id 3n", "3n 3m"),
    "mixer": ("--mixer qplex", "--mixer qmix vdn none"),
    "optimizer": ("--optimizer sgd", "--optimizer rmsprop adam"),
    "batch larger than the replay": ("--batch-size 25", "--batch-size 25 --buffer-size 24"),
    "less than a batch": ("--total-timesteps 20 --batch-size 21", "--total-timesteps --batch-size"),
    "load-step alone": ("--load-step 5", "--load-step --resume"),
    "replay of SMAX": ("--save-replay", "--save-replay --capture-video"),
    "lambda": ("--td-lambda 2", "--td-lambda 2"),
    "no episode": ("--test-nepisode 0", "--test-nepisode 0"),
    "rare updates": ("--updates-per-episode 0", "--updates-per-episode 0"),
    "replay too large": ("--buffer-size 2000000000", "--buffer-size GB"),
    "no step": ("--total-timesteps 1", "--total-timesteps --num-envs"),
    "no id": ("--env-id=", "SMAX"),
    "no such game": ("--env-id Pong/3m", "Pong/3m"),
    "resume a missing run": ("--resume nowhere", "nowhere"),
}


@pytest.mark.parametrize("flags, words", WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_one_line_and_leaves_no_trace(call, tmp_path, flags, words):
    result = call("qmix_smac", *SMALL, *flags.split())
    assert (result.status, result.stdout) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr)
    assert all(word in result.stderr for word in words.split())
    assert not list(tmp_path.iterdir())


def test_numbers_that_explode(call, tmp_path):
    result = call("qmix_smac", *SMALL, "--learning-rate", "1e30")
    assert result.status == 1
    assert re.fullmatch(r"error: [^\n]*not finite[^\n]*checkpoint_\d+.pt[^\n]*\n", result.stderr)
    states = map(load, checkpoints(run_folder_in(tmp_path)))
    assert all(parameter.isfinite().all() for state in states for parameter in state["agent"].values())


# The real SMAC

HAS_SMAC = bool(importlib.util.find_spec("smac") and importlib.util.find_spec("pysc2"))


@pytest.mark.skipif(HAS_SMAC, reason="smac is installed")
def test_without_smac_the_error_says_what_to_install(call, tmp_path):
    result = call("qmix_smac", *SMALL, "--env-id", "smac/3m")
    assert (result.status, result.stdout) == (2, "") and re.fullmatch(r"error: [^\n]+\n", result.stderr)
    for word in (
        "git+https://github.com/oxwhirl/smac",
        "another project",
        "SC2PATH",
        "SMAC_Maps",
        "protobuf<3.21",
        "requirements.txt",
    ):
        assert word in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not HAS_SMAC, reason="the package smac is not installed")
def test_the_interface_of_the_real_package():
    """The package answers these without the game."""
    envs = q.make_envs(Args(env_id="smac/3m"), 1)
    assert envs.shape == (3, 9, 30, 48, 60)


@pytest.mark.skipif(not HAS_SMAC or not os.environ.get("SC2PATH"), reason="StarCraft II is not installed")
def test_a_battle_of_the_real_game():
    envs = q.make_envs(Args(env_id="smac/3m"), 1)
    _, avail = envs.reset([1])
    for _ in range(70):
        step = envs.step((np.random.default_rng(0).random(avail.shape) * avail).argmax(axis=-1))
        avail = step.avail_actions
    envs.close()


# A stand-in with the interface of the package, as far as it is used: what is tested is how processes are led. One agent
# wins with 1 as its third action. On the map toy 2 is a crash of the game as the package tells it, and 3 is the end of
# its process; on the map toys each seventeenth step is such a crash; on the map toyss there is a process of a game.
STAND_IN = """
import os
import subprocess
import numpy as np

class Unit:
    health_max, shield_max, steps = 45, 0, 0

class StarCraft2Env:
    n_enemies, reward_death_value, reward_win = 1, 10, 200
    def __init__(self, map_name, seed=None, continuing_episode=False, replay_dir="", replay_prefix=""):
        assert os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] == "python"
        self.seed, self.continuing, self.replay_dir = seed, continuing_episode, replay_dir
        self.prefix = replay_prefix
        self.game, self.has_game = None, map_name == "toyss"
        print("the game speaks")
        self.max_reward, self.mortal = 210, map_name == "toy"
    def get_env_info(self):
        return {"n_agents": 1, "n_actions": 4, "obs_shape": 2, "state_shape": 3, "episode_limit": 5}
    def reset(self):
        if self.has_game and not self.game:
            self.game = subprocess.Popen(["sleep", "60"])
            open(os.path.join(os.environ["SC2PATH"], "pid"), "w").write(str(self.game.pid))
        self.steps, self.enemies = 0, {0: Unit()}
        self.max_reward += 2 * 45  # counted twice, as the package may
    def get_obs(self):
        return [np.array([self.steps, self.seed % 1000])]
    def get_state(self):
        return np.array([self.steps, self.max_reward, os.getpid() % 1000], np.float32)
    def get_avail_actions(self):
        return [[1, 1, 1, self.mortal]]
    def step(self, actions):
        self.steps += 1
        if actions[0] == 3:
            os._exit(7)
        Unit.steps += 1
        if actions[0] == 2 if self.mortal else Unit.steps % 17 == 0:
            return 0, True, {}
        won = actions[0] == 1 and self.steps == 3
        info = {"battle_won": won}
        if self.steps == 5 and self.continuing:
            info["episode_limit"] = True
        return 20.0 * won, won or self.steps == 5, info
    def save_replay(self):
        os.makedirs(self.replay_dir, exist_ok=True)
        if self.prefix.startswith("toyss"):
            raise OSError("no space")
        open(os.path.join(self.replay_dir, f"{self.prefix}_a_second.SC2Replay"), "w").close()
    def close(self):
        if self.game:
            self.game.kill()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "smac"
    (package / "env" / "starcraft2" / "maps").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "env" / "__init__.py").write_text(textwrap.dedent(STAND_IN))
    (package / "env" / "starcraft2" / "__init__.py").touch()
    (package / "env" / "starcraft2" / "maps" / "__init__.py").touch()
    maps = "def get_smac_map_registry():\n    return {'toy': {}, 'toys': {}, 'toyss': {}}\n"
    (package / "env" / "starcraft2" / "maps" / "smac_maps.py").write_text(maps)
    (tmp_path / "game" / "Maps" / "SMAC_Maps").mkdir(parents=True)
    monkeypatch.setattr(q.Smac, "answered", False)
    monkeypatch.setenv("SC2PATH", str(tmp_path / "game"))
    monkeypatch.delenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", raising=False)
    q.smac_shape.cache_clear()
    monkeypatch.syspath_prepend(package.parent)
    for name in [name for name in sys.modules if name.split(".")[0] == "smac"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    q.smac_shape.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "smac"]:
        del sys.modules[name]


def test_games_end_crash_and_are_started_anew(stand_in, capfd):
    envs = q.make_envs(Args(env_id="smac/toy"), 2)
    assert envs.shape == (1, 4, 2, 3, 5)
    floats, avail = envs.reset([11, 12])
    pids = [process.pid for process, _ in envs.games]
    assert floats[:, 1].tolist() == [11, 12] and avail.shape == (2, 1, 4)
    assert floats[:, 3].tolist() == [255, 255]  # the maximum of the reward has the health once
    for k in range(3):
        step = envs.step(np.array([[1], [0]]))
        assert step.floats[1, 0] == k + 1
    assert step.ended.tolist() == step.terminated.tolist() == step.won.tolist() == [True, False]
    assert step.rewards.tolist() == [20, 0] and step.last_floats[0, 0] == 3 and step.floats[0, 0] == 0
    step = envs.step(np.array([[2], [0]]))  # a crash
    assert step.dropped.tolist() == step.ended.tolist() == [True, False] and not step.won.any()
    assert step.floats[0, 0] == 0 and step.floats[0, 3] == 255
    step = envs.step(np.array([[0], [0]]))  # the fifth step of the second game
    assert step.ended.tolist() == [False, True] and not step.terminated.any() and not step.dropped.any()
    step = envs.step(np.array([[3], [0]]))  # its process ends
    assert step.dropped.tolist() == [True, False] and step.floats[:, 0].tolist() == [0, 1]
    assert "started anew" in capfd.readouterr().err
    assert envs.games[1][0].pid == pids[1] != envs.games[0][0].pid != pids[0]
    processes = [process for process, _ in envs.games]
    envs.close()
    assert not any(process.is_alive() for process in processes)


@pytest.mark.parametrize("played", [True, False])
def test_a_game_that_does_not_begin_is_started_anew_where_one_has_played(stand_in, monkeypatch, capfd, played):
    """And where none ever has, it is said what to install."""

    def start(envs, seed):
        game = begin(envs, seed)
        if seed == 11:
            game[0].kill()
        return game

    if played:
        before = q.make_envs(Args(env_id="smac/toy"), 1)
        before.reset([1])
        before.close()
    begin = q.Smac._start
    monkeypatch.setattr(q.Smac, "_start", start)
    envs = q.make_envs(Args(env_id="smac/toy"), 1)
    if played:
        assert envs.reset([11])[0][0, 1] == 12
        assert "started anew" in capfd.readouterr().err
    else:
        with pytest.raises(OSError, match=r"cannot be played.*pip install"):
            envs.reset([11])
    envs.close()


def test_a_game_that_crashes_in_every_episode_is_given_up(stand_in):
    envs = q.make_envs(Args(env_id="smac/toy"), 2)
    envs.reset([11, 12])
    for _ in range(envs.endurance):
        assert envs.step(np.array([[2], [0]])).dropped.tolist() == [True, False]
    for _ in range(5):  # a whole episode: all is forgiven
        step = envs.step(np.array([[0], [0]]))
    assert step.ended[0] and not step.dropped[0]
    for _ in range(envs.endurance):
        envs.step(np.array([[2], [0]]))
    with pytest.raises(OSError, match="crashes in every episode"):
        envs.step(np.array([[2], [0]]))
    envs.close()


def test_a_run_on_games_with_processes_of_their_own(stand_in, call, tmp_path):
    flags = "--env-id smac/toys --total-timesteps 120 --test-interval 60 --checkpoint-interval 60 --save-replay".split()
    result = call("qmix_smac", *QUICK, *flags)
    assert result.status == 0 and "over 3 episodes" in result.stdout
    run_folder = next((tmp_path / "runs").iterdir())
    assert run_folder.name.startswith("smac-toys__")
    assert scalars(run_folder)["charts/crashes"][-1][1] == load(checkpoints(run_folder)[-1])["crashes"] > 0
    assert len(list((run_folder / "replays").glob("*.SC2Replay"))) == 2
    time.sleep(0.2)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children if Path(f"/proc/{pid}/cmdline").exists()]
    assert not [command for command in commands if b"spawn_main" in command]


def test_a_game_is_gone_with_its_process(stand_in):
    envs = q.make_envs(Args(env_id="smac/toyss"), 1)
    envs.reset([1])
    game = Path(os.environ["SC2PATH"], "pid").read_text()
    assert Path("/proc", game).exists()
    os.kill(envs.games[0][0].pid, signal.SIGKILL)
    envs.close()
    wait_for(lambda: not Path("/proc", game).exists() or "Z" in Path("/proc", game, "stat").read_text().split()[2])


def test_a_replay_that_cannot_be_saved_is_no_secret(stand_in, tmp_path):
    envs = q.make_envs(Args(env_id="smac/toyss"), 1, str(tmp_path / "replays"))
    envs.reset([1])
    with pytest.raises(OSError, match="no space"):
        envs.save_replay()
    envs.close()


def test_without_the_game_the_error_says_what_to_install(stand_in, call, tmp_path, monkeypatch):
    monkeypatch.setenv("SC2PATH", str(tmp_path / "elsewhere"))
    result = call("qmix_smac", *SMALL, "--env-id", "smac/toy")
    assert (result.status, result.stdout) == (2, "") and re.fullmatch(r"error: [^\n]+\n", result.stderr)
    assert "elsewhere/Maps/SMAC_Maps" in result.stderr and "git+https" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_map_that_smac_does_not_have(stand_in, call, tmp_path):
    result = call("qmix_smac", *SMALL, "--env-id", "smac/toyz")
    assert result.status == 2 and "toys" in result.stderr


def test_a_signal_ends_the_run_with_one_line(tmp_path):
    run = Run("qmix_smac", *SMALL, "--total-timesteps", "2000000", cwd=tmp_path)
    for _ in range(600):
        if list(tmp_path.glob("runs/*/checkpoint_*.pt")):
            break
        time.sleep(0.1)
    run.kill(signal.SIGINT)
    result = run.wait(timeout=400)
    assert result.status == 130
    assert re.fullmatch(r"interrupted; [^\n]*--resume [^\n]*", result.stderr.strip())
