"""QMIX: its mathematics, its environments, readers' changes, and exact resume."""

import itertools
import os
import random
import shutil
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, assert_same, load, logged, resume, run, train
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from vectors_reader import cases, check

import qmix_smac as q
from qmix_smac import Args, Environments, Episode, EpisodeReplay, Shape

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles faster
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="smax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Intervals that do not divide each other, and a replay buffer that overflows
SMALL = dict(num_envs=3, total_timesteps=700, checkpoint_interval=200, batch_size=4, buffer_size=24)
SMALL |= dict(log_interval=50, test_interval=170, test_nepisode=4, eval_episodes=4)
SMALL |= dict(rnn_hidden_dim=8, epsilon_anneal_time=400, target_update_interval=7)
SHAPE = Shape(n_agents=3, n_actions=4, obs_dim=5, state_dim=6)
PARTS = ("networks", "target_networks", "replay")


class Game(gym.Env):
    """Two agents choose among three actions; the rewards are those of a matrix.

    An episode has 2 to 6 steps, and is truncated if they are even; it is won if they are 3 or 4.
    Which action is unavailable changes with the step. Observations count the steps.
    """

    payoffs = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    observation_space = q.make_space(2, 3, 4, 3)
    action_space = gym.spaces.MultiDiscrete([3, 3])
    blocks = True

    def observe(self):
        state = np.array([self.t / 10, self.length / 10, self.number / 1000], np.float32)
        obs = np.array([[*state, agent] for agent in (0, 1)], np.float32)
        avail_actions = np.ones((2, 3), np.int8)
        avail_actions[:, self.t % 3] -= self.blocks
        return obs, state, avail_actions

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(2, 7))
        self.number = int(self.np_random.integers(1000))
        return self.observe(), {}

    def step(self, actions):
        assert self.observe()[2][[0, 1], actions].all(), "an unavailable action"
        self.t += 1
        ended, even = self.t == self.length, self.length % 2 == 0
        info = {"won": self.length in (3, 4)}
        reward = self.payoffs[actions[0], actions[1]]
        return self.observe(), reward, ended and not even, ended and even, info

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


def make_games(args, num_envs, game=Game):
    return SyncVectorEnv([game] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.fixture
def games(monkeypatch):
    """Environments of one's own: `make_envs` replaced."""
    monkeypatch.setattr(q, "make_envs", make_games)


def random_episodes(lengths, dtype=torch.float64, seed=0):
    """Episodes of random numbers, in which the last action is always available."""
    generator, episodes = torch.Generator().manual_seed(seed), []
    n, A, obs_dim, state_dim = SHAPE
    for k, T in enumerate(lengths):

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=dtype)

        avail = torch.rand(T + 1, n, A, generator=generator) < 0.6
        avail[..., -1] = True
        actions = avail[:-1].float().flatten(0, 1).multinomial(1, generator=generator)
        ends = torch.zeros(T, 1, dtype=dtype)
        ends[-1] = k % 2
        obs, state, filled = normal(T + 1, n, obs_dim), normal(T + 1, state_dim), torch.ones(T + 1)
        actions = actions.view(T, n).byte()
        episodes.append(Episode(obs, state, avail, filled.bool(), actions, normal(T, 1), ends))
    return episodes


def minibatch(episodes):
    replay = EpisodeReplay(len(episodes))
    for episode in episodes:
        replay.add(episode)
    return replay.sample(len(episodes))


def make_networks(args, dtype=torch.float64, shape=SHAPE):
    """Networks and target networks with large random parameters."""
    pair = q.Networks(args, shape).to(dtype), q.Networks(args, shape).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in itertools.chain(*(networks.parameters() for networks in pair)):
        values = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        parameter.data = 0.5 * values
    return pair


# The mixer


@pytest.mark.quick
def test_q_tot_is_monotone_in_every_agents_value():
    for seed in range(20):
        torch.manual_seed(seed)
        mixer = make_networks(Args())[0].mixer
        for parameter in mixer.parameters():
            parameter.data.normal_()
        qvals = (5 * torch.randn(50, 3, dtype=torch.float64)).requires_grad_()
        q_tot = mixer(qvals, 3 * torch.randn(50, 6, dtype=torch.float64))
        (slopes,) = torch.autograd.grad(q_tot.sum(), qvals)
        assert (slopes >= 0).all() and (slopes > 0).any(), f"seed {seed}"
        assert (q_tot < 0).any() and (q_tot > 0).any(), "biases and V may have any sign"


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_mixers_are_those_of_the_papers(precision):
    dtype = getattr(torch, precision)
    for case in cases("qmix", "qmix_mixer"):
        inputs = {name: torch.tensor(x).to(dtype) for name, x in case["inputs"].items()}
        qvals, state = inputs.pop("qs").requires_grad_(), inputs.pop("states")
        embed_dim, width = len(inputs["hyper_b1.bias"]), len(inputs["hyper_w1.0.bias"])
        shape = SHAPE._replace(n_agents=qvals.shape[1], state_dim=state.shape[1])
        mixer = q.QMixer(shape, embed_dim, width).to(dtype)
        mixer.load_state_dict(inputs)
        q_tot = mixer(qvals, state)[:, 0]
        q_tot.sum().backward()
        check(case, "q_tot", q_tot.detach(), precision)
        check(case, "grad_qs", qvals.grad, precision)
    qvals, state = torch.randn(10, 3).double(), torch.randn(10, 6).double()
    vdn, none = (q.Networks(Args(mixer=name), SHAPE).mixer for name in ("vdn", "none"))
    expected = qvals[:, :1] + qvals[:, 1:2] + qvals[:, 2:]
    torch.testing.assert_close(vdn(qvals, state), expected)
    assert torch.equal(none(qvals, state), qvals)


class Given(nn.Module):
    """An agent whose values are given; its mixers too."""

    def __init__(self, agent_qs, mixer):
        super().__init__()
        self.agent = lambda *inputs: (agent_qs, None)
        self.agent.initial_hidden = lambda batch_size: None
        self.mixer = mixer


@pytest.mark.quick
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_targets_and_loss_follow_the_vectors(precision):
    dtype = getattr(torch, precision)

    def episodes(mask, **tensors):
        T, B = mask.shape
        filled = torch.cat([torch.ones(1, B, dtype=torch.bool), torch.tensor(mask)])
        zeros = torch.zeros(T, B, 1, dtype=dtype)
        avail, actions = torch.ones(T + 1, B, 1, 1).bool(), torch.zeros(T, B, 1).byte()
        state = torch.zeros(T + 1, B, 1)
        batch = Episode(None, state, avail, filled, actions, zeros, zeros)
        return batch._replace(**tensors)

    for case in cases("qmix", "td_lambda_targets"):
        inputs = {name: torch.tensor(x) for name, x in case["inputs"].items()}
        rewards, next_values = (inputs[x].to(dtype)[..., None] for x in ("rewards", "next_values"))
        ends = inputs["no_bootstrap"].to(dtype)[..., None]
        batch = episodes(case["inputs"]["mask"], rewards=rewards, terminations=ends)
        coefficients = inputs["gamma"].item(), inputs["td_lambda"].item()
        targets = q.td_lambda_targets(batch, next_values, *coefficients)[..., 0]
        check(case, "targets", torch.where(inputs["mask"], targets, 0.0), precision)
    for case in cases("qmix", "masked_loss"):
        inputs = {name: torch.tensor(x) for name, x in case["inputs"].items()}
        q_tot = inputs["q_tot"].to(dtype).requires_grad_()
        agent_qs = torch.cat([q_tot, torch.zeros_like(q_tot[:1])])[..., None, None]
        rewards = inputs["targets"].to(dtype)[..., None]
        batch = episodes(case["inputs"]["mask"], rewards=rewards)
        networks = Given(agent_qs, q.VDNMixer())
        loss, _ = q.qmix_loss(networks, networks, batch, Args(gamma=0.0, td_lambda=0.0))
        loss.backward()
        check(case, "loss", loss.detach(), precision)
        check(case, "grad_q_tot", q_tot.grad, precision)
    for case in cases("qmix", "double_q_available"):
        inputs = {name: torch.tensor(x) for name, x in case["inputs"].items()}
        online, target = inputs["online_qs"].to(dtype), inputs["target_qs"].to(dtype)
        actions = torch.zeros(inputs["mask"].shape + online.shape[2:3], dtype=torch.uint8)
        batch = episodes(case["inputs"]["mask"], actions=actions)
        batch = batch._replace(avail_actions=inputs["avail_actions"])
        for name in ("double", "single"):
            networks = Given(online, lambda qvals, state: 0 * qvals)
            targets = Given(target, lambda qvals, state: qvals)
            args = Args(gamma=1.0, td_lambda=0.0, double_q=name == "double")
            loss, metrics = q.qmix_loss(networks, targets, batch, args)
            expected = torch.tensor(case["outputs"][name])[inputs["mask"]].to(dtype)
            torch.testing.assert_close(metrics["target_mean"], expected.mean())
            torch.testing.assert_close(loss, expected.square().mean())


# The update, by plain formulas


def step_by_step(agent, episode):
    """Q (T+1, n, A) by a GRU cell for each agent and step, from zeros."""
    n, A, *_ = SHAPE
    hidden, values = [torch.zeros(1, agent.hidden_dim).double()] * n, []
    for t in range(len(episode.obs)):
        row = []
        for a in range(n):
            last = torch.zeros(A).double()
            if t > 0:
                last[int(episode.actions[t - 1, a])] = 1
            x = torch.cat([episode.obs[t, a], last, torch.eye(n).double()[a]])[None]
            x = (x @ agent.encoder[0].weight.T + agent.encoder[0].bias).clamp(min=0)
            hidden[a] = agent.rnn(x, hidden[a])
            row.append(agent.head(hidden[a])[0])
        values.append(torch.stack(row))
    return torch.stack(values)


def loss_by_loops(networks, target_networks, episodes, args):
    """[QMIX] Eq. (6), step after step: the mean of the squares."""
    n, A, *_ = SHAPE
    squares = []
    for episode in episodes:
        online = step_by_step(networks.agent, episode)
        target = step_by_step(target_networks.agent, episode).detach()
        T, y = len(episode.rewards), None
        for t in reversed(range(T)):
            judge, next_values = online if args.double_q else target, []
            for a in range(n):
                legal = [u for u in range(A) if episode.avail_actions[t + 1, a, u]]
                best = max(legal, key=lambda u: judge[t + 1, a, u].item())
                next_values.append(target[t + 1, a, best])
            value = target_networks.mixer(torch.stack(next_values), episode.state[t + 1]).detach()
            if y is not None:
                value = (1 - args.td_lambda) * value + args.td_lambda * y
            y = episode.rewards[t] + args.gamma * (1 - episode.terminations[t]) * value
            chosen = torch.stack([online[t, a, int(episode.actions[t, a])] for a in range(n)])
            squares.append((y - networks.mixer(chosen, episode.state[t])) ** 2)
    return torch.cat(squares).mean()


@pytest.mark.quick
@pytest.mark.parametrize("mixer", ["qmix", "vdn", "none"])
@pytest.mark.parametrize("flags", [{}, {"double_q": False}, {"td_lambda": 0.6}], ids=str)
def test_updates_are_pymarls_formulas(mixer, flags):
    """Two updates: loss, gradient, its norm, clipping and RMSprop."""
    sizes = dict(rnn_hidden_dim=6, mixing_embed_dim=4, hypernet_embed=5)
    args = Args(mixer=mixer, gamma=0.9, max_grad_norm=0.7, **sizes, **flags)
    networks, target_networks = make_networks(args)
    episodes = random_episodes([5, 3, 7, 1, 7, 2])
    plain = make_networks(args)
    optimizer = torch.optim.RMSprop(networks.parameters(), 5e-4, alpha=0.99, eps=1e-5)
    averages = [torch.zeros_like(parameter) for parameter in plain[0].parameters()]
    for _ in range(2):
        loss = loss_by_loops(*plain, episodes, args)
        grads = torch.autograd.grad(loss, list(plain[0].parameters()))
        norm = sum((grad**2).sum() for grad in grads).sqrt()
        metrics = q.update(networks, target_networks, optimizer, minibatch(episodes), args)
        torch.testing.assert_close(metrics["td_loss"], loss.detach(), rtol=1e-10, atol=0)
        torch.testing.assert_close(metrics["grad_norm"], norm, rtol=1e-9, atol=0)
        assert norm > args.max_grad_norm
        for parameter, grad, average in zip(plain[0].parameters(), grads, averages):
            grad = grad * args.max_grad_norm / (norm + 1e-6)
            average.mul_(0.99).add_(0.01 * grad**2)
            parameter.data -= 5e-4 * grad / (average.sqrt() + 1e-5)
    for (name, mine), theirs in zip(networks.named_parameters(), plain[0].parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.quick
@pytest.mark.parametrize("mixer", ["qmix", "vdn", "none"])
@pytest.mark.parametrize("td_lambda", [0.0, 0.6])
def test_padding_changes_nothing(mixer, td_lambda):
    args = Args(mixer=mixer, td_lambda=td_lambda)
    networks, target_networks = make_networks(args)
    batch = minibatch(random_episodes([2, 6, 4]))

    def loss_and_gradient(batch):
        loss, metrics = q.qmix_loss(networks, target_networks, batch, args)
        grads = torch.autograd.grad(loss, list(networks.parameters()))
        return [loss, *metrics.values(), *grads]

    before = loss_and_gradient(batch)
    longer = Episode(*(torch.cat([x, torch.zeros_like(x[:1])]) for x in batch))
    for garbage in (0, 1):
        for x in longer:
            padding = ~(longer.filled if len(x) == len(longer.filled) else longer.filled[1:])
            if x is not longer.filled:
                x[padding] = garbage
        for i, (mine, theirs) in enumerate(zip(loss_and_gradient(longer), before)):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=f"{i}, {garbage}")


@pytest.mark.quick
@pytest.mark.parametrize(
    "mixer, best, table", [("qmix", 8, [[0, 1], [1, 8]]), ("vdn", 7, [[-1.5, 2.5], [2.5, 6.5]])]
)
def test_the_two_step_game(mixer, best, table):
    """[QMIX] Sec. 5 and Table 2: all 16 ways to play it. VDN fits a sum by least squares."""
    payoffs, episodes = {0: [[7, 7], [7, 7]], 1: [[0, 1], [1, 8]]}, []
    for u in itertools.product((0, 1), repeat=4):
        state = torch.eye(3)[[0, 1 + u[0], 0]]
        rewards = torch.tensor([[0.0], [payoffs[u[0]][u[2]][u[3]]]])
        obs, avail = state[:, None].expand(3, 2, 3), torch.ones(3, 2, 2, dtype=torch.bool)
        actions, ends = torch.tensor(u).byte().view(2, 2), torch.tensor([[0.0], [1.0]])
        episodes.append(Episode(obs, state, avail, torch.ones(3).bool(), actions, rewards, ends))
    torch.manual_seed(1)
    args = Args(mixer=mixer, mixing_embed_dim=8)
    networks, target_networks = (q.Networks(args, Shape(2, 2, 3, 3)) for _ in range(2))
    optimizer = torch.optim.Adam(networks.parameters(), lr=5e-3)
    for k in range(500):
        if k % 50 == 0:
            target_networks.load_state_dict(networks.state_dict())
        q.update(networks, target_networks, optimizer, minibatch(episodes), args)
    agent, ones = networks.agent, torch.ones(1, 1).bool()

    def values(cell, last_actions, hidden):
        obs = torch.eye(3)[[cell, cell]][None, None]
        agent_qs, hidden = agent(obs, torch.tensor([[last_actions]]), ones, hidden)
        return agent_qs[0, 0], hidden

    first, hidden = values(0, [-1, -1], agent.initial_hidden(1))
    first = first.argmax(dim=-1).tolist()
    u, v = values(1 + first[0], first, hidden)[0].argmax(dim=-1).tolist()
    assert payoffs[first[0]][u][v] == best
    values, _ = values(2, [1, 0], hidden)
    for u in itertools.product((0, 1), repeat=2):
        q_tot = networks.mixer(torch.stack([values[a, u[a]] for a in (0, 1)]), torch.eye(3)[2])
        assert float(q_tot.detach()) == pytest.approx(table[u[0]][u[1]], abs=0.3), u


# Replay and acting


@pytest.mark.quick
def test_the_replay_is_a_ring_that_pads_and_can_be_saved():
    episodes = random_episodes(range(1, 9), torch.float32)
    replay, copy = EpisodeReplay(5), EpisodeReplay(5)
    for episode in episodes:
        replay.add(episode)
    copy.load_state_dict(replay.state_dict())
    for x in (replay, copy):
        x.add(random_episodes([3], torch.float32, seed=1)[0])
        assert [len(episode.rewards) for episode in x.episodes] == [5, 6, 7, 8, 3]
        assert x.added == 9
    assert_same([tuple(x) for x in replay.episodes], [tuple(x) for x in copy.episodes])
    batch = replay.sample(5)
    assert batch.filled[1:].sum(dim=0).tolist() == [8, 7, 6, 5, 3]
    for b, number in enumerate((3, 2, 1, 0, 4)):
        for name, x, whole in zip(Episode._fields, batch, replay.episodes[number]):
            assert torch.equal(x[: len(whole), b], whole), name
            assert not x[len(whole) :, b].any(), name
    torch.manual_seed(0)
    lengths = [int(T) for _ in range(600) for T in replay.sample(3).filled[1:].sum(dim=0)]
    shares = np.bincount(lengths, minlength=9)[[3, 5, 6, 7, 8]] / 1800
    assert np.allclose(shares, 0.2, atol=0.03), shares


@pytest.mark.quick
def test_acting_and_learning_compute_the_same_values():
    agent = make_networks(Args(rnn_hidden_dim=8), torch.float32)[0].agent
    batch = minibatch(random_episodes([5, 3], torch.float32))
    last_actions = torch.cat([torch.full((1, 2, 3), -1), batch.actions.long()])
    whole, _ = agent(batch.obs, last_actions, batch.filled, agent.initial_hidden(2))
    for b, T in enumerate((5, 3)):
        hidden = agent.initial_hidden(1)
        for t in range(T + 1):
            row = slice(t, t + 1), slice(b, b + 1)
            ones = torch.ones(1, 1, dtype=torch.bool)
            values, hidden = agent(batch.obs[row], last_actions[row], ones, hidden)
            torch.testing.assert_close(values[0, 0], whole[t, b], rtol=1e-5, atol=1e-6)
    flipped = [x.flip(1) for x in (batch.obs, last_actions, batch.filled)]
    with pytest.raises(AssertionError, match="longer episodes"):
        agent(*flipped, agent.initial_hidden(2))


class Standing:
    """What `select_actions` reads of Environments, for 6000 environments."""

    generator = np.random.default_rng(0)
    obs = generator.normal(size=(6000, 3, 5)).astype(np.float32)
    last_actions = np.full((6000, 3), -1)
    avail_actions = generator.random((6000, 3, 4)) < 0.5
    avail_actions[..., 2] = True


@pytest.mark.quick
def test_each_agent_explores_for_itself_among_available_actions():
    torch.manual_seed(0)
    agent, envs = make_networks(Args(rnn_hidden_dim=8), torch.float32)[0].agent, Standing
    hidden = agent.initial_hidden(6000)
    greedy, _ = q.select_actions(agent, envs, hidden)
    chance = 1 - 1 / envs.avail_actions.sum(axis=-1)  # a random action may be the greedy one
    for epsilon in (0.0, 0.3, 1.0):
        actions, _ = q.select_actions(agent, envs, hidden, epsilon)
        assert np.take_along_axis(envs.avail_actions, actions[..., None], -1).all()
        other = actions != greedy
        assert other.mean() == pytest.approx(epsilon * chance.mean(), abs=0.015)
        for a, b in itertools.combinations(range(3), 2):  # independent: probabilities multiply
            expected = epsilon**2 * (chance[:, a] * chance[:, b]).mean()
            assert (other[:, a] & other[:, b]).mean() == pytest.approx(expected, abs=0.02)
    shares = envs.avail_actions / envs.avail_actions.sum(axis=-1, keepdims=True)
    taken = np.bincount(actions.ravel(), minlength=4) / shares.sum(axis=(0, 1))
    assert np.allclose(taken, 1, atol=0.06), f"not uniform at epsilon 1: {taken}"


# Environments of one's own


@pytest.mark.quick
@pytest.mark.parametrize("bootstrap", [False, True])
def test_episodes_hold_what_happened(games, bootstrap):
    envs, rng = Environments(Args(bootstrap_truncation=bootstrap), 3), np.random.default_rng(0)
    envs.reset(5)
    taken, seen, episodes = [[], [], []], [[], [], []], 0
    for _ in range(200):
        random_actions = rng.random(envs.avail_actions.shape) * envs.avail_actions
        actions = random_actions.argmax(axis=-1)
        expected = [rows[-1] if rows else [-1, -1] for rows in taken]
        assert (envs.last_actions == expected).all()
        for i in range(3):
            taken[i].append(actions[i])
            seen[i].append(envs.state[i])
        dones = envs.step(actions)
        finished = iter(envs.finished)
        assert sorted(envs.episodes) == sorted(envs.wins) == np.flatnonzero(dones).tolist()
        for i in np.flatnonzero(dones):
            episode, T = next(finished), len(taken[i])
            assert (episode.actions.numpy() == taken[i]).all()
            assert (episode.state[:-1].numpy() == seen[i]).all()
            length = round(float(episode.state[0, 1]) * 10)
            assert T == length and episode.filled.tolist() == [True] * (T + 1)
            steps = torch.arange(T + 1) / 10
            torch.testing.assert_close(episode.state[:, 0], steps)
            torch.testing.assert_close(episode.obs[:, :, 0], steps[:, None].expand(T + 1, 2))
            assert (~episode.avail_actions[range(T + 1), 0, np.arange(T + 1) % 3]).all()
            rewards = [Game.payoffs[u, v] for u, v in taken[i]]
            assert episode.rewards[:, 0].tolist() == rewards
            last = 0.0 if bootstrap and length % 2 == 0 else 1.0
            assert episode.terminations[:, 0].tolist() == [0.0] * (T - 1) + [last]
            assert envs.episodes[i] == (sum(rewards), T) and envs.wins[i] == (length in (3, 4))
            taken[i], seen[i] = [], []
            episodes += 1
    assert episodes > 100


@pytest.mark.quick
def test_crashed_episodes_are_dropped_and_many_actions_refused(monkeypatch, capsys):
    class Crashing(Game):
        def step(self, actions):
            *result, _ = super().step(actions)
            return *result, {"won": np.nan if self.length == 5 else 0.0}

    class Many(Game):
        observation_space = q.make_space(2, 257, 4, 3)

    monkeypatch.setattr(q, "make_envs", lambda args, n: make_games(args, n, Crashing))
    envs, lengths = Environments(Args(), 3), set()
    envs.reset(1)
    for _ in range(60):
        envs.step(envs.avail_actions.argmax(axis=-1))
        lengths |= {length for _, length in envs.episodes.values()}
    assert lengths == {2, 3, 4, 6} and "crashed" in capsys.readouterr().out
    monkeypatch.setattr(q, "make_envs", lambda args, n: make_games(args, n, Many))
    with pytest.raises(SystemExit, match="256"):
        Environments(Args(), 1)


@pytest.mark.quick
def test_every_environment_plays_its_quota_and_memory_starts_empty(games, monkeypatch):
    envs = Environments(Args(), 3)
    agent = q.Networks(Args(rnn_hidden_dim=8), envs.shape).agent
    select_actions = q.select_actions

    def spy(agent, envs, hidden, *rest):
        first = (envs.last_actions == -1).all(axis=1)
        assert not agent.training and not rest
        assert ((hidden == 0).all(dim=-1).all(dim=-1).numpy() == first).all()
        return select_actions(agent, envs, hidden, *rest)

    monkeypatch.setattr(q, "select_actions", spy)
    envs.reset(3)
    returns, wins = q.play(agent, envs, 7)
    assert len(returns) == len(wins) == 7 and agent.training
    expected = []
    for i, quota in enumerate((3, 2, 2)):
        game = Game()
        game.reset(seed=3 + i)
        for _ in range(quota):
            expected.append(game.length in (3, 4))
            game.reset()
    assert sorted(wins) == sorted(expected)


@pytest.mark.quick
def test_tests_that_do_not_end_are_cut_off_and_diverged_runs_stopped(monkeypatch, tmp_path, capsys):
    class Endless(Game):
        def step(self, actions):
            self.length = 10**6
            return super().step(actions)

    class Diverging(Game):
        payoffs = np.full((3, 3), np.inf)

    monkeypatch.setattr(q, "make_envs", lambda args, n: make_games(args, n, Endless))
    monkeypatch.setattr(q, "EVAL_STEPS", 5)
    envs = Environments(Args(), 2)
    envs.reset(1)
    assert q.play(q.Networks(Args(), envs.shape).agent, envs, 3) == ([], [])
    assert "cut off" in capsys.readouterr().out
    monkeypatch.setattr(q, "make_envs", lambda args, n: make_games(args, n, Diverging))
    with pytest.raises(FloatingPointError):
        train(q, tmp_path, **SMALL)


# Training


def spied(monkeypatch, folder, **flags):
    """Train on games. Returns events in order, the minibatches, and the learning rates."""
    events, batches, rates = [], [], []
    add, update = EpisodeReplay.add, q.update

    def spy_on_add(self, episode):
        events.append("add")
        add(self, episode)

    def spy_on_update(networks, target_networks, optimizer, batch, args):
        events.append("update")
        batches.append(batch)
        rates.append(optimizer.param_groups[0]["lr"])
        return update(networks, target_networks, optimizer, batch, args)

    with monkeypatch.context() as patch:
        patch.setattr(EpisodeReplay, "add", spy_on_add)
        patch.setattr(q, "update", spy_on_update)
        train(q, folder, **SMALL | flags)
    return events, batches, rates


@pytest.mark.parametrize("rate, optimizer", [(1.0, "rmsprop"), (0.4, "adam"), (2.5, "rmsprop")])
def test_training_is_the_optimizer_on_minibatches(games, monkeypatch, tmp_path, rate, optimizer):
    """The replay is full early; updates and copies count episodes that were ever added."""
    flags = dict(optimizer=optimizer, updates_per_episode=rate, max_grad_norm=1.5)
    events, batches, rates = spied(monkeypatch, tmp_path, **flags)
    args = Args(**SMALL | flags)
    q.seed_everything(args.seed, 0)
    networks = q.Networks(args, Shape(2, 3, 4, 3))
    target_networks = q.Networks(args, Shape(2, 3, 4, 3))
    target_networks.load_state_dict(networks.state_dict())
    if optimizer == "adam":
        reference = torch.optim.Adam(networks.parameters())
    else:
        reference = torch.optim.RMSprop(networks.parameters(), alpha=0.99, eps=1e-5)
    episodes = updates = 0
    for event, following in zip(events, [*events[1:], "add"]):
        if event == "add":
            episodes += 1
        else:
            reference.param_groups[0]["lr"] = rates[updates]
            q.update(networks, target_networks, reference, batches[updates], args)
            updates += 1
            if updates % args.target_update_interval == 0:
                target_networks.load_state_dict(networks.state_dict())
        if following == "add" and event == "update":
            assert updates == int(rate * (episodes - args.batch_size + 1)), episodes
    assert episodes > 3 * args.buffer_size and updates > 4 * args.target_update_interval
    model = load(max(tmp_path.glob("checkpoint_*.pt")))
    for name, mine in (("networks", networks), ("target_networks", target_networks)):
        for key, expected in mine.state_dict().items():
            torch.testing.assert_close(model[name][key], expected, msg=key)
    assert all(a >= b for a, b in itertools.pairwise(rates)) and rates[-1] < 0.02 * 5e-4


def test_the_log_says_what_happened(games, monkeypatch, tmp_path):
    train(q, tmp_path, **SMALL, updates_per_episode=0.5)
    points = logged(tmp_path)
    tests = [171, 342, 510, 681, 702]
    assert sorted(points["eval/battle_won_rate"]) == sorted(points["eval/episodic_return"]) == tests
    assert set(points["eval/battle_won_rate"].values()) <= {0, 0.25, 0.5, 0.75, 1}
    for step in tests:
        games = Environments(Args(), 3)
        games.reset(q.seed_everything(1, step, 2))
        played = []
        while len(played) < 20:
            games.step(games.avail_actions.argmax(axis=-1))
            played += [(i, won) for i, won in games.wins.items()]
        wins = [[won for j, won in played if j == i][:n] for i, n in enumerate((2, 1, 1))]
        assert points["eval/battle_won_rate"][step] == np.mean([*wins[0], *wins[1], *wins[2]]), step
    epsilon = points["charts/epsilon"]
    assert epsilon[201] == pytest.approx(1 - 0.95 * 198 / 400) and epsilon[702] == pytest.approx(
        0.05
    )
    rates = points["charts/learning_rate"]
    assert rates[702] == pytest.approx(5e-4 * 3 / 702)
    assert {"losses/td_loss", "losses/grad_norm", "charts/battle_won"} <= points.keys()


def test_no_two_resets_have_the_same_seed(games, monkeypatch, tmp_path):
    """In training, tests and evaluations of two runs."""
    seeds, reset = [], Environments.reset

    def spy(self, seed, *rest):
        seeds.append(seed)
        reset(self, seed, *rest)

    monkeypatch.setattr(Environments, "reset", spy)
    for seed in (1, 2):
        train(q, tmp_path / str(seed), **SMALL | dict(seed=seed, total_timesteps=420))
    assert len(seeds) == 2 * (3 + 3 + 1) and len(set(seeds)) == len(seeds), seeds
    assert len({x // 100 for x in seeds}) == len(seeds) and 0 <= min(seeds) and max(seeds) < 2**31


def interrupt(monkeypatch, folder, step, **flags):
    """Train until an interrupt at this step of the environments."""
    steps, count = Environments.step, itertools.count(1)

    def interrupted(self, actions):
        if next(count) == step:
            raise KeyboardInterrupt
        return steps(self, actions)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Environments, "step", interrupted)
        train(q, folder, **SMALL | flags)


class Dropout(q.Agent):
    def __init__(self, *args):
        super().__init__(*args)
        self.encoder.append(nn.Dropout(0.3))


class FeedForward(q.Agent):
    """Another agent network, without memory."""

    def forward(self, obs, last_actions, filled, hidden):
        values = self.head(torch.tanh(obs @ self.embedding))
        return values * filled[..., None, None], hidden

    def __init__(self, shape, hidden_dim):
        super().__init__(shape, hidden_dim)
        del self.encoder, self.rnn
        self.embedding = nn.Parameter(torch.randn(shape.obs_dim, hidden_dim))


class StateWeights(q.QMixer):
    """A new mixer: a sum with weights of the state."""

    def __init__(self, shape, embed_dim, hypernet_embed):
        nn.Module.__init__(self)
        self.weights = nn.Linear(shape.state_dim, shape.n_agents)

    def forward(self, qvals, state):
        return (self.weights(state).exp() * qvals).sum(dim=-1, keepdim=True)


CHANGES = {
    "nothing": {},
    "dropout": {"Agent": Dropout},
    "another agent": {"Agent": FeedForward},
    "a new mixer": {"QMixer": StateWeights},
    "AdamW": {"torch.optim.Adam": torch.optim.AdamW},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_script_trains_and_resumes_exactly(games, monkeypatch, tmp_path, change):
    for name, value in CHANGES[change].items():
        monkeypatch.setattr(f"qmix_smac.{name}", value)
    flags = dict(optimizer="adam", td_lambda=0.6, updates_per_episode=0.6)
    whole = train(q, tmp_path / "whole", **SMALL | flags)
    step = random.Random(change + str(time.time())).randint(100, 250)
    print(f"interrupted at step {step} of all environments")
    interrupt(monkeypatch, tmp_path / "cut", step, **flags)
    resumed = resume(q, tmp_path / "cut", tmp_path / "resumed")
    name = "checkpoint_000000000702.pt"
    assert_same(load(whole / name), load(resumed / name), change)
    points, theirs = logged(whole), logged(resumed)
    for tag in points.keys() - {"charts/SPS"}:
        later = {step: x for step, x in points[tag].items() if step in theirs[tag]}
        assert theirs[tag] == later and max(theirs[tag]) == max(points[tag]), tag
    first, last = (load(path) for path in (sorted(whole.glob("checkpoint_*.pt"))))
    assert any((first["networks"][k] != last["networks"][k]).any() for k in last["networks"])
    if change == "AdamW":
        assert last["AdamW"]["param_groups"][0]["weight_decay"] == 0.01


def test_frozen_layers_stay_and_what_no_checkpoint_holds_is_refused(games, monkeypatch, tmp_path):
    class Frozen(q.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.encoder.requires_grad_(False)

    monkeypatch.setattr(q, "Agent", Frozen)
    train(q, tmp_path / "frozen", **SMALL)
    first, last = (load(path) for path in sorted((tmp_path / "frozen").glob("checkpoint_*.pt")))
    assert_same(
        first["networks"]["agent.encoder.0.weight"], last["networks"]["agent.encoder.0.weight"]
    )
    assert (first["networks"]["agent.head.bias"] != last["networks"]["agent.head.bias"]).any()
    extra = nn.Parameter(torch.zeros(1))
    adam = torch.optim.Adam
    monkeypatch.setattr(torch.optim, "Adam", lambda parameters, lr: adam([*parameters, extra], lr))
    with pytest.raises(SystemExit, match="parts"):
        train(q, tmp_path / "extra", **SMALL, optimizer="adam")
    with pytest.raises(SystemExit, match="does not fit"):
        resume(q, tmp_path / "frozen", tmp_path / "other", optimizer="adam", total_timesteps=900)


WRONG = [dict(batch_size=25), dict(num_envs=0), dict(updates_per_episode=0.0), dict(seed=-1)]
WRONG += [dict(checkpoint_interval=2), dict(test_interval=1)]
WRONG += [dict(env_id="smac/3m", capture_video=True)]


@pytest.mark.quick
@pytest.mark.parametrize("flags", WRONG, ids=str)
def test_wrong_calls_are_refused_before_anything_is_written(games, tmp_path, flags):
    with pytest.raises(SystemExit, match=r"error: [^\n]+$"):
        train(q, tmp_path / "run", **SMALL | flags)
    assert not (tmp_path / "run").exists()


# SMAX


def attack(avail):
    """Fire where that is possible, otherwise go east."""
    shoot = avail[..., 5:].any(axis=-1)
    return np.where(shoot, 5 + avail[..., 5:].argmax(axis=-1), np.where(avail[..., 1], 1, 4))


@pytest.fixture(scope="module")
def smax():
    return q.Smax("3m", 2)


def trace(envs, seed, steps):
    observations, rows = envs.reset(seed=seed)[0], []
    for _ in range(steps):
        obs, state, avail = (np.array(x) for x in observations)
        rows.append(np.concatenate([obs.reshape(2, -1), state], axis=1))
        observations, *_ = envs.step(attack(avail))
    return np.stack(rows)


def test_smax_depends_on_its_seed_and_is_compiled_once(smax):
    first, again, other = (trace(smax, seed, 20) for seed in (5, 5, 6))
    assert (first == again).all() and (first[0, 0] != first[0, 1]).any()
    assert (first[:5, 1] == other[:5, 0]).all() and (first[0, 0] != other[0, 0]).any()
    assert smax._step._cache_size() == 1
    with pytest.raises(SystemExit, match=r"error: no SMAX map 3n .*smac/MAP.*2s3z"):
        q.Smax("3n", 1)


def test_battles_of_smax(smax):
    """Rewards, ends, victories, scaling and restarts agree with the units' health."""
    observations, _ = smax.reset(seed=3)
    rng, returns, ends = np.random.default_rng(0), np.zeros(2), []
    for _ in range(250):
        obs, state, avail = (np.array(x) for x in observations)
        units = smax.simulators[1].state
        alive = np.array(units.unit_alive)
        features = state[:, :60].reshape(2, 6, 10)
        assert np.abs(obs).max() <= 1 and state.min() >= 0 and state.max() <= 1
        assert np.allclose(features[..., 0], np.array(units.unit_health) / 45, atol=1e-6)
        places = np.array(units.unit_positions) / 32 * alive[..., None]
        assert np.allclose(features[..., 1:3], places, atol=1e-6)
        assert np.allclose(obs[..., -10:], features[:, :3], atol=1e-6)
        assert (avail[~alive[:, :3]] == np.eye(8)[4]).all()  # the dead can only stop
        noise = (rng.random(avail.shape) * avail).argmax(axis=-1)
        actions = np.where(rng.random((2, 3)) < 0.1, noise, attack(avail))
        observations, rewards, terminations, truncations, info = smax.step(actions)
        returns += rewards
        won = info["final_info"]["won"]
        health = np.stack([final[1][:60].reshape(6, 10)[:, 0] for final in info["final_obs"]])
        allies, enemies = (health[:, :3] > 0).any(axis=1), (health[:, 3:] > 0).any(axis=1)
        assert (terminations == ~(allies & enemies)).all() and not truncations.any()
        assert (won == (allies & ~enemies)).all()
        for i in np.flatnonzero(terminations):
            ends.append(won[i])
            restarted = np.array(observations[1])[i, :60].reshape(6, 10)[:, 0]
            assert (restarted == 1).all() and (health[i] < 1).any()
            assert returns[i] == pytest.approx(20, abs=1e-3) if won[i] else returns[i] < 10.001
            returns[i] = 0
        for i in np.flatnonzero(~terminations):
            assert (np.array(observations[1])[i] == info["final_obs"][i][1]).all()
    assert 0 < sum(ends) < len(ends)


def test_smax_tells_truncation_from_termination(smax):
    import jax.numpy as jnp

    smax.reset(seed=1)
    keys, state = smax.simulators
    late = state.state.replace(step=jnp.array([99, 100], state.state.step.dtype))
    smax.simulators = (keys, state.replace(state=late))
    stay = np.full((2, 3), 4)
    _, _, terminations, truncations, info = smax.step(stay)
    assert truncations.tolist() == [False, True] and not terminations.any()
    assert not info["final_info"]["won"].any()
    assert np.array(smax.simulators[1].state.step).tolist() == [100, 0]


def test_a_run_on_smax(smax, monkeypatch, tmp_path):
    """In-process, with a video of the first battle."""
    flags = dict(num_envs=2, total_timesteps=120, test_interval=100, checkpoint_interval=80)
    train(q, tmp_path, **SMALL | flags | dict(capture_video=True, eval_episodes=2))
    assert np.isfinite(list(logged(tmp_path)["losses/td_loss"].values())).all()
    videos = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.mp4"))
    assert len(videos) >= 2 and "videos/evaluation" in videos[-1], videos
    image = smax.render()[0] if smax.reset(seed=1) else None
    colors = {tuple(color) for color in image.reshape(-1, 3).tolist()}
    assert colors == {(0, 0, 0), (80, 140, 255), (255, 90, 80)}


# StarCraft II, by a mock of the package SMAC with what it gets wrong. One agent wins with action 1
# in its third step; action 2, on the map toy, is a crash of the game.

MOCK = """
import os, subprocess
import numpy as np

class Unit:
    health_max, shield_max = 45, 0

class StarCraft2Env:
    n_enemies, reward_death_value, reward_win = 1, 10, 200
    def __init__(self, map_name, continuing_episode=False):
        assert os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] == "python"
        assert continuing_episode
        self.crashes = map_name == "toy"
        self._seed, self._episode_count, self.games, self.max_reward = None, 0, [], 210
    def get_env_info(self):
        return {"n_agents": 1, "n_actions": 3, "obs_shape": 2, "state_shape": 3}
    def launch(self):
        print("the game speaks")
        self.games.append(subprocess.Popen(["sleep", "60"]))
        with open(os.environ["SC2_PIDS"], "a") as file:
            print(self.games[-1].pid, file=file)
    def reset(self):
        if self._episode_count == 0:
            self.launch()
            self.max_reward += 2 * 45  # counted twice, as SMAC may
        self.steps, self.enemies = 0, {0: Unit()}
    def get_obs(self):
        return [np.array([self.steps, self._seed % 1000])]
    def get_state(self):
        return np.array([self.steps, self.max_reward, len(self.games)], np.float32)
    def get_avail_actions(self):
        return [[1, 1, self.crashes]]
    def step(self, actions):
        self.steps += 1
        if actions[0] == 2:
            self.games.pop().kill()
            self.launch()
            return 0, True, {}
        won = actions[0] == 1 and self.steps == 3
        info = {"battle_won": won}
        if self.steps == 5:
            info["episode_limit"] = True
        self._episode_count += won or self.steps == 5
        return 20.0 * won, won or self.steps == 5, info
    def close(self):
        for game in self.games:
            game.kill()
            game.wait()
"""


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.fixture
def mock(tmp_path, monkeypatch):
    """The mock on the path of the processes that are started; the file with the games' ids."""
    package = tmp_path / "packages" / "smac"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "env.py").write_text(textwrap.dedent(MOCK))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), str(ROOT)]))
    monkeypatch.setenv("SC2_PIDS", str(tmp_path / "pids"))
    monkeypatch.syspath_prepend(package.parent)
    for name in [name for name in sys.modules if name.split(".")[0] == "smac"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "pids"


def test_games_of_starcraft_go_on_from_episode_to_episode(mock, monkeypatch, capfd):
    monkeypatch.setenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    envs = Environments(Args(env_id="smac/toy", bootstrap_truncation=True), 2)
    assert envs.shape == (1, 3, 2, 3)
    envs.reset(11)
    assert envs.obs[:, 0, 1].tolist() == [11, 12]
    envs.reset(13)  # in the first episode: no second game is launched
    assert envs.state[:, 1].tolist() == [255, 255]  # health is counted once
    for k in range(3):
        dones = envs.step(np.array([[1], [0]]))
        assert envs.state[1, 0] == k + 1
    assert dones.tolist() == [True, False] and envs.wins == {0: 1.0}
    (episode,) = envs.finished
    assert episode.rewards[:, 0].tolist() == [0, 0, 20] and episode.terminations[-1] == 1
    assert episode.state[:, 0].tolist() == [0, 1, 2, 3] and envs.state[0, 0] == 0
    assert envs.step(np.array([[2], [0]])).tolist() == [True, False] and not envs.finished
    assert "crashed" in capfd.readouterr().out
    assert envs.step(np.array([[0], [0]])).tolist() == [False, True]
    assert envs.wins == {1: 0.0} and envs.finished[0].terminations[-1] == 0  # the time limit
    pids = mock.read_text().split()
    assert len(pids) == 3 and sum(running(pid) for pid in pids) == 2  # one launch after the crash
    envs.envs.close()
    assert not any(running(pid) for pid in pids)
    assert "the game speaks" not in capfd.readouterr().out


def test_a_run_on_starcraft_launches_each_game_once(mock, tmp_path):
    """Training and tests share the games; the evaluation launches its own."""
    flags = "--env-id smac/calm --num-envs 1 --total-timesteps 60 --test-interval 25".split()
    flags += "--checkpoint-interval 40 --batch-size 2 --test-nepisode 2 --eval-episodes 1".split()
    flags += ["--log-interval", 20]
    result = run("qmix_smac", *flags, cwd=tmp_path)
    assert "evaluation:" in result.stdout and "Traceback" not in result.stderr
    pids = mock.read_text().split()
    assert len(pids) == 2 and not any(running(pid) for pid in pids)
    shutil.rmtree(tmp_path / "packages")
    result = run("qmix_smac", *flags, cwd=tmp_path, check=False)
    assert "git+https://github.com/oxwhirl/smac" in result.stderr
