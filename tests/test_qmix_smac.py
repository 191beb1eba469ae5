"""QMIX: its mathematics, its environments, readers' changes, and exact resume."""

import functools
import itertools
import json
import sys
import types

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import assert_resumes, assert_same, cases, check, load, logged, resume, train
from gymnasium.utils import save_video
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

import qmix_smac as q
from qmix_smac import Args, Environments, Episode, EpisodeReplay, Shape

# Intervals that do not divide each other, and a replay buffer that overflows
SMALL = dict(num_envs=3, total_timesteps=500, checkpoint_interval=200, batch_size=4, buffer_size=24)
SMALL |= dict(test_interval=170, log_interval=40, eval_episodes=5, rnn_hidden_dim=8, td_lambda=0.0)
SMALL |= dict(target_update_interval=7, epsilon_anneal_time=400, test_nepisode=4, max_grad_norm=1.5)
SMALL |= dict(updates_per_episode=1.0, optimizer="rmsprop", learning_rate=5e-4, epsilon_finish=0.1)
SHAPE = Shape(n_agents=3, n_actions=4, obs_dim=5, state_dim=6)
quick = pytest.mark.quick


class Game(gym.Env):
    """Two agents choose among three actions; the rewards are those of a matrix.

    An episode has 2 to 6 steps, and is truncated if they are even; it is won if they are 3 or 4.
    Which action is unavailable changes with the step. Observations count the steps.
    """

    payoffs = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    observation_space = q.make_space(2, 3, 4, 3)
    action_space = gym.spaces.MultiDiscrete([3, 3])

    def observe(self):
        state = np.array([self.t / 10, self.length / 10, self.number / 1000], np.float32)
        obs = np.array([[*state, agent] for agent in (0, 1)], np.float32)
        avail_actions = np.tile(np.int8(np.arange(3) != self.t % 3), (2, 1))
        return obs, state, avail_actions

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(2, 7))
        self.number, self.won = int(self.np_random.integers(1000)), self.length in (3, 4)
        return self.observe(), {}

    def step(self, actions):
        assert self.observe()[2][[0, 1], actions].all(), "an unavailable action"
        self.t += 1
        ended, even = self.t == self.length, self.length % 2 == 0
        reward = self.payoffs[actions[0], actions[1]]
        actions[:] = 0  # the caller's array
        info = {"won": np.True_} if self.won else {}
        return self.observe(), reward, ended and not even, ended and even, info

    def render(self):
        return np.full((16, 16, 3), self.length, np.uint8)  # so a video's frames are as many


def make_games(args, num_envs):
    games = [Game] * num_envs  # in arrays that they reuse
    return SyncVectorEnv(games, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.fixture
def games(monkeypatch):
    monkeypatch.setattr(q, "make_envs", make_games)


def make_episodes(lengths, dtype=torch.float64, seed=0):
    """Episodes of random numbers, in which the last action is always available."""
    generator, episodes = torch.Generator().manual_seed(seed), []
    n, A, obs_dim, state_dim = SHAPE
    normal = functools.partial(torch.randn, generator=generator, dtype=dtype)
    for k, T in enumerate(lengths):
        avail = torch.rand(T + 1, n, A, generator=generator) < 0.6
        avail[..., -1] = True
        actions = avail[:-1].float().flatten(0, 1).multinomial(1, generator=generator).view(T, n)
        ends = torch.zeros(T, 1, dtype=dtype)
        ends[-1] = k % 2
        obs, state, filled = normal(T + 1, n, obs_dim), normal(T + 1, state_dim), torch.ones(T + 1)
        episodes.append(Episode(obs, state, avail, filled.bool(), actions, normal(T, 1), ends))
    return episodes


def to_batch(episodes):
    replay = EpisodeReplay(len(episodes))
    replay.add(episodes)
    return replay.sample(len(episodes))


def make_networks(args, seed=1, module=q):
    """Networks and target networks with large random parameters."""
    pair = nn.ModuleList(module.Networks(args, SHAPE).double() for _ in range(2))
    torch.manual_seed(seed)
    for parameter in pair.parameters():
        parameter.data.normal_(0, 0.5)
    return pair


@quick
def test_the_mixer_follows_the_vectors():
    for case in cases("qmix", "qmix_mixer"):
        inputs = {name: torch.tensor(x) for name, x in case["inputs"].items()}
        qvals, state = inputs.pop("qs").requires_grad_(), inputs.pop("states")
        embed_dim, width = len(inputs["hyper_b1.bias"]), len(inputs["hyper_w1.0.bias"])
        shape = SHAPE._replace(n_agents=qvals.shape[1], state_dim=state.shape[1])
        mixer = q.QMixer(shape, embed_dim, width).double()
        mixer.load_state_dict(inputs)
        q_tot = mixer(qvals, state)[:, 0]
        q_tot.sum().backward()
        check(case, "q_tot", q_tot.detach())
        check(case, "grad_qs", qvals.grad)


PLAIN_MIXERS = {"vdn": lambda qs, _: sum(qs.split(1, dim=-1)), "none": lambda qs, _: qs}


def unroll(agent, episode):
    """Q (T+1, n, A) by a GRU cell step after step, from zeros."""
    n, A, *_ = SHAPE
    hidden, last, values = torch.zeros(n, agent.hidden_dim).double(), torch.zeros(n, A), []
    for t, obs in enumerate(episode.obs):
        if t > 0:
            last = torch.eye(A)[episode.actions[t - 1]]
        x = agent.encoder(torch.cat([obs, last, torch.eye(n)], dim=1))
        hidden = torch.gru_cell(x, hidden, *agent.rnn.parameters())
        values.append(agent.head(hidden))
    return torch.stack(values)


def greedy(qs, avail):
    """Each agent's best available action (n,), by a loop."""
    return [max(range(4), key=lambda u: (avail[a, u].item(), qs[a, u].item())) for a in range(3)]


def loss_by_loops(networks, target_networks, episodes, args):
    """[QMIX] Eq. (6), step after step: means of the metrics."""
    columns, agents = [], range(SHAPE.n_agents)
    for episode in episodes:
        online = unroll(networks.agent, episode)
        target, y = unroll(target_networks.agent, episode).detach(), None
        judge = online if args.double_q else target
        for t in reversed(range(len(episode.rewards))):
            best = greedy(judge[t + 1], episode.avail_actions[t + 1])
            value = target_networks.mixer(target[t + 1, agents, best], episode.state[t + 1])
            if y is not None:
                value = (1 - args.td_lambda) * value + args.td_lambda * y
            y = (episode.rewards[t] + args.gamma * (1 - episode.terminations[t]) * value).detach()
            q_tot = networks.mixer(online[t, agents, episode.actions[t]], episode.state[t])
            columns.append(torch.stack([(y - q_tot) ** 2, (y - q_tot).abs(), q_tot, y]))
    return torch.cat(columns, dim=1).mean(dim=1)


@quick
@pytest.mark.parametrize("mixer", ["qmix", "vdn", "none"])
@pytest.mark.parametrize("flags", [{}, {"double_q": False}, {"td_lambda": 0.0}], ids=str)
def test_updates_are_pymarls_formulas(mixer, flags):
    """Two updates: loss, gradient, its norm and clipping."""
    sizes = dict(rnn_hidden_dim=6, mixing_embed_dim=4, hypernet_embed=5)
    args = Args(mixer=mixer, gamma=0.9, max_grad_norm=0.7, **sizes, **flags)
    networks, target_networks = make_networks(args)
    plain, episodes = make_networks(args), make_episodes([5, 3, 7, 1, 7, 2])
    for x in plain:
        x.mixer = PLAIN_MIXERS.get(mixer, x.mixer)
    if mixer == "vdn" and flags:  # an axis more, as in PyMARL's mixer
        networks.mixer = lambda qvals, state: qvals.sum(-1).view(len(qvals), -1, 1)
    optimizer = torch.optim.SGD(networks.parameters(), 0.1)
    for _ in range(2):
        means = loss_by_loops(*plain, episodes, args)
        grads = torch.autograd.grad(means[0], list(plain[0].parameters()))
        norm = sum((grad**2).sum() for grad in grads).sqrt()
        metrics = q.update(networks, target_networks, optimizer, to_batch(episodes), args)
        for name, x in zip(("td_loss", "td_error_abs", "q_taken_mean", "target_mean"), means):
            torch.testing.assert_close(metrics[name], x.detach(), rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(metrics["grad_norm"], norm, rtol=1e-9, atol=0)
        assert norm > args.max_grad_norm
        for parameter, grad in zip(plain[0].parameters(), grads):
            parameter.data -= 0.1 * args.max_grad_norm / (norm + 1e-6) * grad
    for (name, mine), theirs in zip(networks.named_parameters(), plain[0].parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11, msg=name)


@quick
def test_the_replay_is_a_ring_that_pads_and_can_be_saved():
    replay, copy = EpisodeReplay(5), EpisodeReplay(5)
    replay.add(make_episodes(range(1, 9), torch.float32))
    replay.updates_due, replay.num_updates = 0.5, 7
    copy.load_state_dict(replay.state_dict())
    for x in (replay, copy):
        x.add(make_episodes([3], torch.float32, seed=1))
        assert [len(episode.rewards) for episode in x.episodes] == [5, 6, 7, 8, 3]
        assert (x.updates_due, x.num_updates) == (0.5, 7)
    assert_same([tuple(x) for x in replay.episodes], [tuple(x) for x in copy.episodes])
    batch = replay.sample(5)
    lengths = batch.filled[1:].sum(dim=0).tolist()
    for number, T in enumerate([5, 6, 7, 8, 3]):
        b = lengths.index(T)
        for name, x, whole in zip(Episode._fields, batch, replay.episodes[number]):
            assert torch.equal(x[: len(whole), b], whole), name
            assert not x[len(whole) :, b].any(), name
    torch.manual_seed(0)
    lengths = [int(T) for _ in range(900) for T in replay.sample(2).filled[1:].sum(dim=0)]
    shares = np.bincount(lengths, minlength=9)[[3, 5, 6, 7, 8]] / 1800
    assert np.allclose(shares, 0.2, atol=0.03), shares


@quick
def test_acting_computes_the_same_values_as_learning():
    sizes = dict(rnn_hidden_dim=8, mixing_embed_dim=4, hypernet_embed=5)
    agent, mixer = make_networks(Args(**sizes))[0].children()
    assert (agent.hidden_dim, len(mixer.hyper_b1.bias), len(mixer.hyper_w1[0].bias)) == (8, 4, 5)
    pair = make_episodes([5, 5])
    obs, actions = (torch.stack(x, dim=1) for x in zip(*((x.obs, x.actions) for x in pair)))
    last_actions = torch.cat([torch.full((1, 2, 3), -1), actions])
    expected, hidden = [unroll(agent, x) for x in pair], agent.initial_hidden(2)
    for t in range(6):
        values, hidden = agent(obs[t][None], last_actions[t][None], hidden)
        torch.testing.assert_close(values[0], torch.stack([x[t] for x in expected]))


@quick
def test_each_agent_explores_for_itself_among_available_actions():
    rng = np.random.default_rng(0)
    avail = (rng.random((6000, 3, 4)) < 0.5) | (np.arange(4) == 2)
    envs = types.SimpleNamespace(avail_actions=avail, last_actions=np.full((6000, 3), -1))
    envs.obs = rng.normal(size=(6000, 3, 5))
    agent = make_networks(Args(rnn_hidden_dim=8))[0].agent
    hidden = agent.initial_hidden(6000)
    greedy, _ = q.select_actions(agent, envs, hidden)
    chance = 1 - 1 / avail.sum(axis=-1)  # a random action may be the greedy one
    for epsilon in (0.0, 0.3, 1.0):
        actions, _ = q.select_actions(agent, envs, hidden, epsilon)
        assert np.take_along_axis(avail, actions[..., None], -1).all()
        other = actions != greedy
        assert other.mean() == pytest.approx(epsilon * chance.mean(), abs=0.015)
        for a, b in itertools.combinations(range(3), 2):  # independent: probabilities multiply
            expected = epsilon**2 * (chance[:, a] * chance[:, b]).mean()
            assert (other[:, a] & other[:, b]).mean() == pytest.approx(expected, abs=0.02)
    shares = avail / avail.sum(axis=-1, keepdims=True)
    taken = np.bincount(actions.ravel(), minlength=4) / shares.sum(axis=(0, 1))
    assert np.allclose(taken, 1, atol=0.06), f"not uniform at epsilon 1: {taken}"


@quick
def test_episodes_hold_what_happened(games):
    """Against games that are played beside them, one by one."""
    envs, rng = Environments(Args(), 3), np.random.default_rng(0)
    envs.reset(5)
    plain, num_episodes = [Game() for _ in range(3)], 0
    observed = [[game.reset(seed=5 + i)[0]] for i, game in enumerate(plain)]
    taken, rewards = [[], [], []], [[], [], []]
    for _ in range(200):
        actions = (rng.random(envs.avail_actions.shape) * envs.avail_actions).argmax(axis=-1)
        assert (envs.last_actions == [rows[-1] if rows else [-1, -1] for rows in taken]).all()
        dones, finished = envs.step(actions), iter(envs.finished)
        assert sorted(envs.episodes) == sorted(envs.wins) == np.flatnonzero(dones).tolist()
        for i, game in enumerate(plain):
            observation, reward, terminated, truncated, info = game.step(actions[i].copy())
            assert dones[i] == (terminated or truncated)
            observed[i].append(observation)
            taken[i].append(actions[i])
            rewards[i].append(reward)
            if dones[i]:
                episode, T = next(finished), len(rewards[i])
                for mine, theirs in zip(episode, zip(*observed[i])):
                    assert (mine.numpy() == np.stack(theirs)).all()
                assert episode.filled.tolist() == [True] * (T + 1)
                assert (episode.actions.numpy() == taken[i]).all()
                assert episode.rewards[:, 0].tolist() == rewards[i]
                assert episode.terminations[:, 0].tolist() == [0.0] * (T - 1) + [terminated]
                assert (envs.episodes[i], envs.wins[i]) == ((sum(rewards[i]), T), "won" in info)
                observed[i], taken[i], rewards[i] = [game.reset()[0]], [], []
                num_episodes += 1
    assert num_episodes > 100


def check_acting(agent, envs, hidden, *epsilon):
    """Memory is empty just where an episode starts; tests do not explore, nor drop out."""
    first = (envs.last_actions == -1).all(axis=1)
    assert (hidden == 0).flatten(1).all(dim=1).tolist() == first.tolist()
    assert agent.training == bool(epsilon) and not hidden.requires_grad


def spied(folder, **flags):
    """Train on games. Records episodes in all after each step, and (steps, batch) of updates."""
    seen = types.SimpleNamespace(folder=folder, added=[0], updates=[], seeds=[], sizes=[])
    seen.epsilons, seen.agents, seen.videos = [], set(), []

    def see_update(networks, target_networks, optimizer, batch, args):
        seen.updates.append((len(seen.added) - 1, batch))
        assert target_networks.agent not in seen.agents

    def see_acting(agent, envs, hidden, *epsilon):
        seen.agents.add(agent)
        seen.epsilons.extend(epsilon)
        check_acting(agent, envs, hidden, *epsilon)

    with pytest.MonkeyPatch.context() as patch:

        def spy(owner, name, see):
            function = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **kw: see(*args) or function(*args, **kw))

        patch.setattr(q, "make_envs", make_games)
        spy(EpisodeReplay, "add", lambda _, new: seen.added.append(seen.added[-1] + len(new)))
        spy(Environments, "reset", lambda _, seed, *rest: seen.seeds.append(seed))
        spy(q, "select_actions", see_acting)
        spy(EpisodeReplay, "__init__", lambda _, size: seen.sizes.append(size))
        spy(q, "update", see_update)
        spy(save_video, "save_video", lambda frames, *_: seen.videos.append(frames))
        train(q, folder, **SMALL | flags)
    return seen


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run on games; not to be changed."""
    return spied(tmp_path_factory.mktemp("finished") / "run")


@pytest.mark.parametrize("rate, optimizer, seed", [(1.0, "rmsprop", 1), (0.375, "adam", 3)])
def test_training_is_the_optimizer_on_minibatches(finished, games, tmp_path, rate, optimizer, seed):
    """The replay is full early; updates are due for episodes that end from then on."""
    due, flags = 0.0, dict(optimizer=optimizer, updates_per_episode=rate, seed=seed)
    flags["anneal_lr"] = rate == 1
    seen = finished if rate == 1 else spied(tmp_path / "run", **flags)
    args = Args(**SMALL | flags)
    q.seed_everything(args.seed, 0)
    networks, target_networks = (q.Networks(args, Shape(2, 3, 4, 3)) for _ in range(2))
    target_networks.load_state_dict(networks.state_dict())
    rmsprop = functools.partial(torch.optim.RMSprop, alpha=0.99, eps=1e-5)
    reference = {"adam": torch.optim.Adam, "rmsprop": rmsprop}[optimizer](networks.parameters())
    for number, (steps, batch) in enumerate(seen.updates, 1):
        progress = 3 * (steps - 1) / 501 if args.anneal_lr else 0
        reference.param_groups[0]["lr"] = 5e-4 * (1 - progress)
        q.update(networks, target_networks, reference, batch, args)
        if number % args.target_update_interval == 0:
            target_networks.load_state_dict(networks.state_dict())
    for steps, episodes in enumerate(seen.added):
        due += rate * (episodes - seen.added[max(steps - 1, 0)]) * (episodes >= args.batch_size)
        assert sum(x <= steps for x, _ in seen.updates) == int(due), (steps, episodes)
    assert seen.sizes == [args.buffer_size]
    assert episodes > 3 * args.buffer_size and due > 4 * args.target_update_interval
    model = load(max(seen.folder.glob("checkpoint_*.pt")))
    torch.testing.assert_close(model["networks"], networks.state_dict())
    torch.testing.assert_close(model["target_networks"], target_networks.state_dict())
    again = resume(q, seen.folder, tmp_path / "again", anneal_lr=False, learning_rate=1e-4)
    (group,) = load(max(again.glob("checkpoint_*.pt")))["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(1e-4)


def first_wins(seed, num_episodes):
    """Victories of the first episodes, of which three games have equal shares."""
    games, wins = [Game() for _ in range(3)], []
    for i, game in enumerate(games):
        game.reset(seed=seed + i)
    for k in range(num_episodes):
        wins.append(games[k % 3].won)
        games[k % 3].reset()
    return sorted(wins)


def test_the_log_says_what_happened(finished, tmp_path):
    points, tests = logged(finished.folder), [171, 342, 501]
    assert sorted(points["eval/battle_won_rate"]) == sorted(points["eval/episodic_return"]) == tests
    for step in tests:
        expected = np.mean(first_wins(q.seed_everything(1, step, 2), 4))
        assert points["eval/battle_won_rate"][step] == expected, step
    epsilon, rates = points["charts/epsilon"], points["charts/learning_rate"]
    assert all(finished.epsilons[step // 3 - 1] == pytest.approx(epsilon[step]) for step in epsilon)
    ends = [3 * i for i in range(1, 168) if finished.added[i] > finished.added[i - 1]]
    assert sorted(points["charts/episodic_return"]) == sorted(points["charts/battle_won"]) == ends
    assert points["charts/updates"][501] == len(finished.updates) and 501 in points["charts/SPS"]
    assert points["losses/td_loss"][501] > 0 and not list(finished.folder.rglob("*.mp4"))
    assert epsilon[201] == pytest.approx(1 - 0.9 * 198 / 400)
    assert epsilon[501] == pytest.approx(0.1) and rates[501] == pytest.approx(5e-4 * 3 / 501)
    assert any(0 < x < 1 for x in points["charts/battle_won"].values())
    result = json.loads((finished.folder / "result.json").read_text())
    assert sorted(result["battle_won"]) == first_wins(q.seed_everything(1, 501, 1), 5)

    other = spied(tmp_path / "other", seed=2, total_timesteps=300, capture_video=True)
    assert {path.parent.name for path in other.folder.rglob("*.mp4")} == {"0", "201", "evaluation"}
    assert all((np.array(x) == len(x)).all() for x in other.videos) and len(other.videos) == 3
    seeds = finished.seeds + other.seeds
    assert len(seeds) == 3 + 3 + 1 + 2 + 2 + 1 and len({x // 100 for x in seeds}) == len(seeds)
    assert 0 <= min(seeds) and max(seeds) < 2**31


class OwnAgent(q.Agent):
    """Another network: without memory, with dropout, frozen in part."""

    def __init__(self, shape, hidden_dim):
        super().__init__(shape, hidden_dim)
        self.encoder = nn.Linear(shape.obs_dim, hidden_dim).requires_grad_(False)
        self.rnn = nn.Dropout(0.3)

    def forward(self, obs, last_actions, hidden):
        return self.head(self.rnn(self.encoder(obs).tanh())), hidden


@pytest.mark.parametrize("changed", [False, True])
def test_training_resumes_exactly_also_with_changes(games, monkeypatch, tmp_path, changed, capsys):
    adam = torch.optim.AdamW if changed else torch.optim.Adam
    monkeypatch.setattr(torch.optim, "Adam", lambda p, lr, fused: adam(p, 2 * lr))
    if changed:
        monkeypatch.setattr(q, "Agent", OwnAgent)
    flags = dict(optimizer="adam", td_lambda=0.6, updates_per_episode=0.6, anneal_lr=changed)
    whole = assert_resumes(q, tmp_path, **SMALL | flags)
    output, result = capsys.readouterr().out, json.loads((whole / "result.json").read_text())
    won, std = np.mean(result["battle_won"]), np.std(result["episodic_return"])
    assert f" +- {std:.2f}, {won:.1%} won, 5 episodes" in output and "no update" not in output
    with pytest.raises(SystemExit, match="--optimizer"):
        resume(q, whole, tmp_path / "other", optimizer="rmsprop", total_timesteps=10**6)
    points, theirs = logged(whole), logged(tmp_path / "again")
    assert points["charts/learning_rate"][501] == pytest.approx(1e-3 * (3 / 501 if changed else 1))
    for tag in points.keys() - {"charts/SPS"}:
        later = {step: x for step, x in points[tag].items() if step in theirs[tag]}
        assert theirs[tag] == later and max(theirs[tag]) == max(points[tag]), tag
    before, after = (load(path)["networks"] for path in sorted(whole.glob("checkpoint_*.pt")))
    same = {key for key in after if torch.equal(before[key], after[key])}
    assert same == ({"agent.encoder.weight", "agent.encoder.bias"} if changed else set())


def test_what_would_go_wrong_is_refused(games, monkeypatch, tmp_path, capsys):
    for wrong in (dict(buffer_size=3), dict(test_interval=0)):
        with pytest.raises(SystemExit, match=r"above --buffer-size|below 1"):
            train(q, tmp_path, **SMALL | wrong)
    monkeypatch.setattr(Game, "payoffs", np.full((3, 3), np.inf))
    with pytest.raises(FloatingPointError):
        train(q, tmp_path / "diverging", **SMALL)
    envs = Environments(Args(), 3)
    envs.reset(3)
    agent = q.Networks(Args(), envs.shape).agent
    assert q.play(agent, envs, 3)[0] == [np.inf] * 3
    envs.reset(3)
    monkeypatch.setattr(q, "EVAL_STEPS", 1)  # an episode has two steps at least
    assert q.play(agent, envs, 3) == ([], [])
    assert "cut off" in capsys.readouterr().out


def attack(avail):
    """Fire where that is possible, otherwise go east."""
    shoot = avail[..., 5:].any(axis=-1)
    return np.where(shoot, 5 + avail[..., 5:].argmax(axis=-1), np.where(avail[..., 1], 1, 4))


def test_smax_depends_on_its_seed_and_is_compiled_once():
    smax, traces = q.Smax("3m", 2), []
    for seed in (5, 5, 6):
        observations, states = smax.reset(seed=seed)[0], []
        for _ in range(20):
            states.append(np.array(observations[1]))
            observations, *_ = smax.step(attack(np.array(observations[2])))
        traces.append(np.stack(states))
    first, again, other = traces
    assert (first == again).all() and (first[0, 0] != first[0, 1]).any()
    assert (first[:5, 1] == other[:5, 0]).all() and (first[0, 0] != other[0, 0]).any()
    assert smax._step._cache_size() == 1
    assert q.Smax("2s3z", 1).reset(seed=5)[0][1].max() <= 1  # also the types of units
    with pytest.raises(SystemExit, match=r"error: no map 3n.*2s3z.*smac/MAP"):
        q.Smax("3n", 1)


def test_battles_of_smax():
    """Rewards, ends, victories, scaling and restarts agree with the units' health."""
    envs, rng, ends = Environments(Args(), 2), np.random.default_rng(0), []
    envs.reset(3)
    for _ in range(250):
        units, avail = envs.envs.simulators[1].state, envs.avail_actions
        alive, features = np.array(units.unit_alive), envs.state[:, :60].reshape(2, 6, 10)
        assert np.abs(envs.obs).max() <= 1 and envs.state.min() >= 0 and envs.state.max() <= 1
        assert np.allclose(features[..., 0], np.array(units.unit_health) / 45, atol=1e-6)
        places = np.array(units.unit_positions) / 32 * alive[..., None]
        assert np.allclose(features[..., 1:3], places, atol=1e-6)
        assert np.allclose(envs.obs[..., -10:], features[:, :3], atol=1e-6)
        assert (avail[~alive[:, :3]] == np.eye(8)[4]).all()  # the dead can only stop
        noise = (rng.random(avail.shape) * avail).argmax(axis=-1)
        dones = envs.step(np.where(rng.random((2, 3)) < 0.1, noise, attack(avail)))
        health = envs.state[:, :60].reshape(2, 6, 10)[..., 0]
        assert (health[~dones, :3].any(axis=1) & health[~dones, 3:].any(axis=1)).all()
        assert (health[dones] == 1).all()  # of the next battle
        for i, episode in zip(np.flatnonzero(dones), envs.finished):
            final, (episodic_return, _) = episode.state[-1, :60:10], envs.episodes[i]
            assert not (final[:3].any() and final[3:].any()) and episode.terminations[-1] == 1
            won = bool(final[:3].any())
            assert envs.wins[i] == won
            assert episodic_return == pytest.approx(20, 1e-4) if won else episodic_return < 10.001
            ends.append((won, envs.state[i].tobytes()))
    wins, starts = zip(*ends)
    assert 0 < sum(wins) < len(wins) == len(set(starts))  # no two battles begin alike


def test_smax_draws_units_and_ends_battles_in_time():
    smax = q.Smax("3m", 2)
    smax.reset(seed=1)
    keys, state = smax.simulators
    late = state.state.replace(step=state.state.step + np.array([99, 100], np.int32))
    late = late.replace(unit_alive=late.unit_alive.at[0, 0].set(False))
    smax.simulators = (keys, state.replace(state=late))
    places = np.array(late.unit_positions[0] * 248 / 32, int)
    colors = [smax.render()[0][255 - y, x].tolist() for x, y in places]
    assert colors == [[0, 0, 0], *[[80, 140, 255]] * 2, *[[255, 90, 80]] * 3]
    _, _, terminations, truncations, info = smax.step(np.full((2, 3), 4))
    assert (np.array(smax.simulators[0]) != np.array(keys)).any(axis=1).all()  # new random numbers
    assert terminations.tolist() == [False, True] and not truncations.any()
    assert not info["final_info"]["won"].any()
    assert np.array(smax.simulators[1].state.step).tolist() == [100, 0]


# One agent wins with action 1 in its third step; action 2, on the map toy, is a crash of the game
MOCK = """
import os
from types import SimpleNamespace
import numpy as np
class StarCraft2Env:
    reward_death_value, reward_win, max_reward = 10, 200, 210
    _seed, _episode_count = None, 0
    def __init__(self, map_name):
        self.crashes = map_name == "toy"
    log = lambda self, word: print(word, file=open(os.environ["SC2_LOG"], "a"))
    get_env_info = lambda self: {"n_agents": 1, "n_actions": 3, "obs_shape": 2, "state_shape": 3}
    def reset(self):
        if self._episode_count == 0:
            self.log("launch")
            self.max_reward += 2 * 45  # counted twice, as SMAC may
        self.steps, self.enemies = 0, {0: SimpleNamespace(health_max=45, shield_max=0)}
    get_obs = lambda self: [np.array([self.steps, self._seed % 1000])]
    get_state = lambda self: np.array([self.steps, self.max_reward, 0], np.float32)
    get_avail_actions = lambda self: [[1, 1, self.crashes]]
    def step(self, actions):
        self.steps += 1
        if actions[0] == 2:
            return 0, True, {}
        won, late = actions[0] == 1 and self.steps == 3, self.steps == 5
        self._episode_count += won or late
        return 20.0 * won, won or late, {"battle_won": won}
    def close(self):
        if self._episode_count:
            self.log("close")
"""


@pytest.fixture
def mock(tmp_path, monkeypatch):
    """Make the mock importable, also in processes that are started. Returns its log."""
    (tmp_path / "smac").mkdir()
    (tmp_path / "smac" / "env.py").write_text(MOCK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SC2_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_games_of_starcraft_go_on_from_episode_to_episode(mock):
    envs = Environments(Args(env_id="smac/toy"), 2)
    assert envs.shape == (1, 3, 2, 3)
    envs.reset(11)
    assert envs.obs[:, 0, 1].tolist() == [11, 12]
    assert envs.state[:, 1].tolist() == [255, 255]  # health is counted once
    for k in range(3):
        dones = envs.step(np.array([[1], [0]]))
        assert envs.state[1, 0] == k + 1
    assert dones.tolist() == [True, False] and envs.wins == {0: 1.0}
    (episode,) = envs.finished
    assert episode.rewards[:, 0].tolist() == [0, 0, 20] and episode.terminations[-1] == 1
    assert episode.state[:, 0].tolist() == [0, 1, 2, 3] and envs.state[0, 0] == 0
    assert envs.step(np.array([[2], [0]])).tolist() == [True, False] and not envs.finished
    assert not envs.episodes and not envs.wins  # a crashed episode is dropped
    assert envs.step(np.array([[0], [0]])).tolist() == [False, True]
    assert envs.wins == {1: 0.0} and envs.finished[0].terminations[-1] == 1  # the time limit
    envs.envs.close(terminate=True)  # by SIGTERM
    assert sorted(mock.read_text().split()) == ["close", "close", "launch", "launch"]


def test_a_run_on_starcraft_launches_each_game_once(mock, monkeypatch, tmp_path):
    """Training and tests share the games; the evaluation launches its own."""
    act, reset, seeds = q.select_actions, Environments.reset, []
    monkeypatch.setattr(Environments, "reset", lambda *x: seeds.append(x[1]) or reset(*x))
    monkeypatch.setattr(q, "select_actions", lambda *args: check_acting(*args) or act(*args))
    flags = dict(env_id="smac/calm", num_envs=1, total_timesteps=60, test_interval=25)
    train(q, tmp_path / "run", **SMALL | flags | dict(checkpoint_interval=40, eval_episodes=1))
    assert mock.read_text().split() == ["launch", "close", "launch", "close"]
    assert len(set(seeds)) == len(seeds) > 8
    monkeypatch.setitem(sys.modules, "smac.env", None)
    with pytest.raises(SystemExit, match=r"git\+https://github.com/oxwhirl/smac"):
        train(q, tmp_path / "other", **SMALL | flags)
