"""dqn_per_atari.py: its mathematics against definitions, its runs, and the changes readers make."""

import copy
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, cases, check, load, logged
from torch import nn

import dqn_per_atari as dqn

pytestmark = pytest.mark.quick
# Intervals do not divide each other: checkpoints at 0, 60, 116, 176 and 220
SMALL = dict(num_envs=4, train_frequency=8, target_network_frequency=43, torch_threads=1, seed=3)
SMALL |= dict(batch_size=8, buffer_size=130, learning_starts=50, total_timesteps=220, env_threads=1)
SMALL |= dict(checkpoint_interval=58, log_interval=4, eval_epsilon=0.5, eval_episodes=2, cuda=False)


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


class Tiny(gym.vector.VectorEnv):
    """8 steps; one pays 3 for the side that was bright a frame ago. A life is lost at step 5.

    The last environment is truncated at step 8, the others terminate.
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
        self.t = np.zeros(self.num_envs, int)
        self.stacks = np.zeros((self.num_envs, self.stack, 84, 84), np.uint8)
        self.show()
        return self.stacks.copy(), {"episode_frame_number": 4 * self.t}

    def show(self):
        sides = self.rng.integers(2, size=(self.num_envs, 1, 1, 1))
        bright = np.uint8(200) * (np.arange(84) // 42 == sides)
        frames = np.broadcast_to(bright, (self.num_envs, 1, 84, 84))
        self.stacks = np.concatenate([self.stacks[:, 1:], frames], axis=1)

    def step(self, actions):
        right = actions == (self.stacks[:, -2, 0, 42] > 0)
        rewards = 3 * (right & (self.t > 0)).astype(np.int32)
        self.t += 1
        self.show()
        over, final_obs = self.t == 8, self.stacks.copy()
        truncations = over & (np.arange(self.num_envs) == self.num_envs - 1)
        terminations = over & ~truncations | (self.t == 5)
        self.stacks[over, :-1] = self.t[over] = 0
        self.stacks[over, -1] //= 2  # not the old episode's last frame
        info = {"episode_frame_number": 4 * self.t, "final_obs": final_obs}
        return self.stacks.copy(), rewards, terminations, truncations, info


class Small(nn.Module):  # takes less time
    def __init__(self, obs_shape, num_actions, dueling):
        super().__init__()
        layers = [nn.AvgPool2d(42), nn.Flatten(), nn.Linear(4 * obs_shape[0], 32), nn.ReLU()]
        self.hidden, self.head = nn.Sequential(*layers), nn.Linear(32, num_actions)
        self.features = lambda obs: self.hidden(obs / 255)  # which deepcopy would not copy

    def forward(self, obs):
        return self.head(self.features(obs))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(dqn, "AtariVectorEnv", Tiny)
    monkeypatch.setattr(dqn, "QNetwork", Small)


def make_replay(num_envs=3, rows=40, shape=(4, 84, 84), dtype=np.uint8, **flags):
    args = dqn.Args(num_envs=num_envs, buffer_size=num_envs * rows, **flags)
    return dqn.Replay(args, gym.spaces.Box(0, 255, shape, dtype))


def test_without_priorities_draws_are_uniform_and_independent():
    torch.manual_seed(0)
    priorities, valid = dqn.Priorities(dqn.Args(prioritized=False), 77), np.arange(0, 77, 2)
    priorities.add(np.arange(77), np.arange(77) % 2 == 0)
    priorities.update(valid, np.random.default_rng(0).normal(size=39))
    drawn = np.array([priorities.draw(40, 0.5)[0] for _ in range(1500)])
    counts, expected = np.bincount(drawn.ravel(), minlength=77)[valid], drawn.size / 39
    assert counts.sum() == drawn.size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 38) < 4 * np.sqrt(2 * 38)  # its mean, and four standard deviations
    assert (drawn[:, 1:] == drawn[:, :-1]).mean() == pytest.approx(1 / 39, abs=0.004)


def test_priorities_follow_the_vectors(monkeypatch):
    for case in cases("per"):
        inputs, operation = case["inputs"], case["operation"]
        if operation == "drawable":
            continue
        leaves = np.atleast_1d(inputs["leaves"])
        priorities = dqn.Priorities(dqn.Args(), len(leaves))
        priorities.set(np.arange(len(leaves)), leaves)
        if operation == "sum_tree":
            check(case, "nodes", priorities.nodes)
        elif operation == "find":
            check(case, "rows", priorities.find(inputs["values"]))
        elif operation == "importance_weights":
            monkeypatch.setattr(priorities, "find", lambda _, rows=inputs["rows"]: rows)
            check(case, "weights", priorities.draw(1, inputs["beta"].item())[1])
        elif operation == "stratified":
            uniforms = torch.tensor(inputs["uniforms"])
            monkeypatch.setattr(torch, "rand", lambda size, dtype, x=uniforms: x[:size])
            check(case, "rows", priorities.draw(len(uniforms), 1.0)[0])
        elif operation == "priority_update":
            priorities.alpha = inputs["alpha"].item()
            priorities.max_priority = inputs["max_priority"].item()
            priorities.update(inputs["rows"], inputs["td_errors"])
            check(case, "leaves", priorities.leaves)
            priorities.update(inputs["rows"], 0 * inputs["td_errors"])  # the maximum stays
            check(case, "max_priority", priorities.max_priority)
            priorities.add(np.arange(len(priorities.leaves)), True)  # new transitions have it
            expected = case["outputs"]["max_priority"] ** inputs["alpha"]
            np.testing.assert_allclose(priorities.leaves, expected, rtol=1e-12)


def test_rows_that_may_be_drawn():
    for case in cases("per", "drawable"):
        inputs, outputs = case["inputs"], case["outputs"]
        N, n, stack = inputs["lengths"].shape[1], inputs["n"].item(), inputs["frame_stack"].item()
        args = dqn.Args(num_envs=N, n_step=n, buffer_size=inputs["size"].item())
        replay = dqn.Replay(args, gym.spaces.Box(0, 255, (stack, 2), np.uint8))
        for t, ages in enumerate(inputs["lengths"]):
            obs = np.zeros((N, stack, 2), np.uint8)
            replay.add(obs, np.zeros(N), np.zeros(N), inputs["terminations"][t], ages)
            drawn, drawable = replay.priorities.leaves == 1, outputs["drawable"][t]
            allowed = drawable | outputs["optional"][t]
            assert (drawable <= drawn).all() and (drawn <= allowed).all(), (case["name"], t)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_targets_losses_and_n_step_returns_follow_the_vectors(precision):
    dtype = getattr(torch, precision)

    def loss(online, target, returns, discounts, weights, double=True):
        actions = torch.zeros(len(returns), dtype=torch.long)
        batch = [None, actions, returns, discounts, None, weights]
        return dqn.td_loss(lambda _: online, lambda _: target, batch, dqn.Args(double=double))

    for case in cases("dqn", "q_targets"):
        online, *inputs = (torch.tensor(x).to(dtype) for x in case["inputs"].values())
        for name in ("double", "single"):
            _, td_errors, _ = loss(online, *inputs, torch.ones(()), double=name == "double")
            check(case, name, td_errors + online[:, 0], precision)
    for case in cases("dqn", "td_loss"):
        names = ("values", "targets", "weights")
        values, targets, weights = (torch.tensor(case["inputs"][x]).to(dtype) for x in names)
        values = values[:, None].requires_grad_()
        mean, td_errors, _ = loss(values, values, targets, torch.zeros_like(targets), weights)
        mean.backward()
        check(case, "loss", mean.detach(), precision)
        check(case, "td_errors", td_errors, precision)
        check(case, "grad_values", values.grad[:, 0], precision)
    for case in cases("dqn", "n_step"):
        inputs, outputs, n = case["inputs"], case["outputs"], case["inputs"]["n"].item()
        for t in np.flatnonzero(outputs["complete"]):
            rows = np.arange(t, outputs["last_rows"][t] + 1)
            if len(rows) < n and not inputs["terminations"][rows[-1]]:
                continue  # a truncation cut it short: such a row is never drawn
            rewards, terminations = np.zeros((1, n)), np.zeros((1, n), bool)
            rewards[0, : len(rows)] = inputs["rewards"][rows]
            terminations[0, : len(rows)] = inputs["terminations"][rows]
            found = dqn.n_step_returns(rewards, terminations, inputs["gamma"].item())
            expected = outputs["returns"][t], outputs["discounts"][t]
            np.testing.assert_allclose(np.ravel(found), expected, atol=1e-12, err_msg=case["name"])


class Ledger:
    """Plays noise and writes down whole stacks, to compare the replay with."""

    def __init__(self, replay):
        self.replay, self.streams = replay, [[] for _ in range(replay.num_envs)]
        self.drawn = set()

    def play(self, steps, rng):
        """Short episodes that end in every way: lost lives, terminations, truncations."""
        N, stack = self.replay.num_envs, self.replay.frame_stack
        shape, dtype = self.replay.frames.shape[1:], self.replay.frames.dtype
        obs, ages = np.zeros((N, stack, *shape), dtype), np.zeros(N, int)
        obs[:, -1] = rng.integers(256, size=(N, *shape))
        for t in range(steps):
            next_obs = np.roll(obs, -1, axis=1)
            next_obs[:, -1] = rng.integers(256, size=(N, *shape))
            dice, actions, rewards = rng.random(N), rng.integers(9, size=N), rng.integers(-1, 2, N)
            over = (dice < 0.16) | (t % 31 == 30) | (t == steps - 1)
            terminations = (dice > 0.08) & (dice < 0.28)
            self.replay.add(obs, actions, rewards, terminations, ages)
            columns = obs, actions, rewards, terminations, next_obs, over
            for i, stream in enumerate(self.streams):
                stream.append([column[i].copy() for column in columns])
            obs, ages = next_obs.copy(), ages + 1
            obs[over, :-1] = ages[over] = 0
            if t % 2 == 0 and self.replay.priorities.leaves.any():
                self.check(16)

    def check(self, batch_size):
        """Draw and compare; then change the priorities of what was drawn."""
        n, gamma, N = self.replay.n_step, self.replay.gamma, len(self.streams)
        length, last = self.replay.num_rows // N, len(self.streams[0]) - 1
        rows, batch = self.replay.sample(batch_size, 0.5)
        batch, leaves = [x.numpy() for x in batch], self.replay.priorities.leaves[rows]
        np.testing.assert_allclose(batch[5], (leaves / leaves.min()) ** -0.5, rtol=1e-5)
        for row, obs, action, returns, discount, next_obs, _ in zip(rows.tolist(), *batch):
            self.drawn.add((row, self.replay.count))
            first = last - (last - row // N) % length
            steps = self.streams[row % N][first : first + n]
            end = next((k + 1 for k, step in enumerate(steps) if step[3]), None)
            assert not any(step[5] and not step[3] for step in steps[:end])  # truncated
            expected = sum(gamma**k * float(s[2]) for k, s in enumerate(steps[:end]))
            np.testing.assert_array_equal(obs, steps[0][0])
            assert action == steps[0][1] and returns == pytest.approx(expected, abs=1e-5)
            assert discount == pytest.approx(0 if end else gamma**n, abs=1e-6)
            if not end:
                np.testing.assert_array_equal(next_obs, steps[-1][4])
        self.replay.priorities.update(rows, np.random.default_rng(0).normal(size=batch_size))


@pytest.mark.parametrize("n_step, stack", [(1, 4), (2, 1), (2, 4), (5, 2)])
def test_replay_gives_back_what_happened(n_step, stack):
    """Also with as few rows as are allowed, and for n-step returns the double sum."""
    for rows in (n_step + stack, n_step + stack + 7):
        ledger = Ledger(make_replay(3, rows, (stack, 5), np.float32, n_step=n_step, gamma=0.9))
        ledger.play(200, np.random.default_rng(n_step))
        assert len(ledger.drawn) > 150


@pytest.mark.parametrize("steps", [1, 49, 100])
def test_replay_continues_from_its_state(steps):
    """Hardly begun, nearly full, wrapped; a replay of other settings is refused."""
    settings = dict(num_envs=2, rows=52, n_step=2)
    replay, other = make_replay(**settings), make_replay(**settings)
    ledger, rng = Ledger(replay), np.random.default_rng(0)
    ledger.play(steps, rng)
    state = copy.deepcopy(replay.state_dict())
    other.load_state_dict(copy.deepcopy(state))
    np.testing.assert_array_equal(other.frames, replay.frames)
    assert_same(other.state_dict(), state)
    ledger.replay = other
    ledger.play(80, rng)
    changes = dict(rows=60), dict(num_envs=4, rows=26), dict(n_step=1), dict(per_alpha=0.5)
    for changed in (*changes, dict(env_id="ALE/Pong-v5")):
        with pytest.raises(SystemExit, match="error: "):
            make_replay(**settings | changed).load_state_dict(state)
    flags = "frame_stack batch_size train_frequency target_network_frequency checkpoint_interval"
    changes = [{flag: 0} for flag in flags.split()] + [dict(buffer_size=19, learning_starts=1)]
    for changed in (*changes, dict(n_step=0), dict(learning_starts=131), dict(total_timesteps=49)):
        with pytest.raises(SystemExit, match=r"is below \d+$"):
            dqn.train(dqn.Args(**SMALL | changed), Path(__file__), None)


def test_a_replay_beyond_memory_ends_in_one_line(monkeypatch):
    meminfo = "MemTotal: 64 kB\nMemFree: 1 kB\nMemAvailable: 6835937 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: meminfo)
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    dqn.Replay(dqn.Args(total_timesteps=990_000), space)
    with pytest.raises(SystemExit, match=r"error: --buffer-size needs 7.1 GB, 7.0 are free"):
        dqn.Replay(dqn.Args(), space)


def plain_q(network, obs):
    """Q (B, A) and the parameters in float64: [DQN] Methods; [DUEL] Eq. (9)."""
    p = {name: x.detach().double().requires_grad_() for name, x in network.named_parameters()}

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    x = obs.double() / 255
    for k, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.conv2d(x, p[f"trunk.{k}.weight"], p[f"trunk.{k}.bias"], stride).relu()
    x = linear(x.flatten(1), "trunk.7").relu()
    if "head.weight" in p:
        return linear(x, "head"), p
    v, a = (linear(linear(x, f"{s}.0").relu(), f"{s}.2") for s in ("value", "advantage"))
    return v + a - a.sum(1, keepdim=True) / a.shape[1], p


def make_networks(dueling=True):  # far enough apart to disagree
    torch.manual_seed(0)
    networks = [dqn.QNetwork((4, 84, 84), 6, dueling) for _ in range(2)]
    for network in networks:
        list(network.parameters())[-2].data.mul_(20)
    return networks


def make_batch(size):
    rng = np.random.default_rng(0)
    obs, next_obs = rng.integers(256, size=(2, size, 4, 84, 84), dtype=np.uint8)
    columns = [3 * rng.normal(size=size), 0.9 * (rng.random(size) < 0.7), rng.random(size)]
    returns, discounts, weights = np.float32(columns)
    batch = [obs, rng.integers(6, size=size), returns, discounts, next_obs, weights]
    return [torch.from_numpy(x) for x in batch]


@pytest.mark.parametrize("double, dueling", [(True, True), (False, True), (True, False)])
def test_update_is_the_papers_in_float64(double, dueling):
    """Values, loss, TD errors and gradient, from the plain formulas."""
    q_network, target_network = make_networks(dueling)
    batch = obs, actions, returns, discounts, next_obs, weights = make_batch(16)
    args, i = dqn.Args(double=double), range(16)
    loss, td_errors, metrics = dqn.td_loss(q_network, target_network, batch, args)
    loss.backward()
    q, parameters = plain_q(q_network, obs)
    (next_q, _), (next_target, _) = (plain_q(n, next_obs) for n in (q_network, target_network))
    assert (next_q.argmax(1) != next_target.argmax(1)).any()
    greedy = (next_q if double else next_target).argmax(1)
    deltas = (returns + discounts * next_target[i, greedy]).detach() - q[i, actions]
    size = deltas.abs()
    assert size.min() < 1 < size.max()
    mean = (weights * torch.where(size < 1, size**2 / 2, size - 0.5)).mean()
    mean.backward()
    found = loss, td_errors, metrics["q_values"]
    for x, exact in zip(found, (mean, deltas, q[i, actions].mean())):
        torch.testing.assert_close(x.double(), exact, rtol=1e-4, atol=1e-4)
    assert not td_errors.requires_grad and all(p.grad is None for p in target_network.parameters())
    for name, p in q_network.named_parameters():
        torch.testing.assert_close(p.grad.double(), parameters[name].grad, rtol=1e-3, atol=1e-5)


def test_bfloat16_has_the_gradient_of_float32():
    gradients, networks = [], make_networks()
    for bf16 in (False, True):
        networks[0].zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss, td_errors, _ = dqn.td_loss(*networks, make_batch(64), dqn.Args())
        assert loss.dtype == td_errors.dtype == torch.float32
        loss.backward()
        gradients.append([p.grad.flatten().clone() for p in networks[0].parameters()])
    for exact, rounded in zip(*gradients):
        assert F.cosine_similarity(exact, rounded, dim=0) > 0.95
        assert rounded.norm().item() == pytest.approx(exact.norm().item(), rel=0.1)


def test_exploration_is_uniform_over_all_actions_and_independent():
    torch.manual_seed(0)
    best = torch.arange(100_000) % 5
    for epsilon in (0.0, 0.3, 1.0):
        actions = dqn.epsilon_greedy(lambda x: F.one_hot(x, 5), best.numpy(), epsilon, "cpu")
        shares = np.bincount(actions, minlength=5) / len(actions)
        np.testing.assert_allclose(shares, 0.2, atol=0.006, err_msg=f"epsilon {epsilon}")
        assert np.mean(actions == best.numpy()) == pytest.approx(1 - epsilon * 4 / 5, abs=0.006)


def record(monkeypatch, owner, name, what):
    """A list of what(arguments, outputs) at each call of a function."""
    calls, function = [], getattr(owner, name)

    def spy(*args, **kwargs):
        outputs = function(*args, **kwargs)
        calls.append(what(args, outputs))
        return outputs

    monkeypatch.setattr(owner, name, spy)
    return calls


def test_training_is_adam_with_a_target_network(tmp_path, monkeypatch, tiny):
    """The recorded minibatches, on plain networks with PyTorch's Adam, give the same parameters."""
    rows = record(monkeypatch, dqn.Replay, "sample", lambda _, out: out[0])
    batches = record(monkeypatch, dqn, "td_loss", lambda args, out: (args[2], out[1]))
    updates = record(monkeypatch, dqn.Priorities, "update", lambda args, _: args[1:])
    flags = dict(learning_rate=3e-3, max_grad_norm=0.4, adam_eps=1e-3)
    final = train(tmp_path, **flags, target_network_frequency=61)
    assert np.shape(rows) == (len(batches), 8) == (21, 8)  # at steps 56, 64, ... 216
    assert_same([(x, errors.numpy()) for x, (_, errors) in zip(rows, batches)], updates)
    dqn.seed_everything(3, 0)
    q_network = Small((4, 84, 84), 2, True)
    (target_network := Small((4, 84, 84), 2, True)).load_state_dict(q_network.state_dict())
    adam = torch.optim.Adam(q_network.parameters(), lr=3e-3, eps=1e-3)
    monkeypatch.undo()
    norms = []
    for k, (batch, _) in enumerate(batches):
        loss, *_ = dqn.td_loss(q_network, target_network, batch, dqn.Args())
        adam.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(q_network.parameters(), 0.4).item())
        adam.step()
        if any(step % 61 < 4 for step in (8 * k + 56, 8 * k + 60)):
            target_network.load_state_dict(q_network.state_dict())
    assert min(norms) < 0.4 < max(norms), norms
    for network, name in ((q_network, "agent"), (target_network, "target_network")):
        torch.testing.assert_close(final[name], dict(network.state_dict()))


def test_schedules_and_the_replay_ratio(tmp_path, tiny, monkeypatch):
    """They depend on training progress and on agent steps, whatever the number of environments."""
    epsilons = record(monkeypatch, dqn, "epsilon_greedy", lambda args, _: args[2])
    betas = record(monkeypatch, dqn.Replay, "sample", lambda args, _: args[2])
    losses = record(monkeypatch, dqn, "td_loss", lambda _, out: out[0].item())
    flags = dict(total_timesteps=638, learning_starts=590, buffer_size=800, train_frequency=2)
    flags |= dict(exploration_fraction=0.2, log_interval=1, checkpoint_interval=10**6)
    flags |= dict(start_epsilon=0.9, end_epsilon=0.05, per_beta=0.5)
    train(tmp_path / "run", **flags)
    x, points = np.arange(0, 640, 4) / 640, logged(tmp_path / "run")
    expected = {"epsilon": np.maximum(0.9 - 0.85 * x / 0.2, 0.05), "per_beta": 0.5 + 0.5 * x}
    for tag, values in expected.items():
        found = points[f"charts/{tag}"]
        assert list(found) == list(points["charts/SPS"]) == list(range(4, 641, 4)), tag
        np.testing.assert_allclose(list(found.values()), values, rtol=1e-5, err_msg=tag)
    np.testing.assert_allclose(epsilons[:160], expected["epsilon"])
    np.testing.assert_allclose(betas[::2], expected["per_beta"][-13:])
    means = np.reshape(losses, (13, 2)).mean(axis=1)  # of the two updates of an iteration
    np.testing.assert_allclose(list(points["losses/td_loss"].values()), means, rtol=1e-5)
    assert epsilons[-1] == SMALL["eval_epsilon"]
    for num_envs in (3, 5):
        betas.clear()
        train(tmp_path / str(num_envs), num_envs=num_envs, learning_starts=0, total_timesteps=208)
        assert abs(len(betas) - 208 / 8) <= 2, num_envs


@pytest.mark.parametrize("episodic_life", [True, False])
def test_a_run_stores_what_happened(tmp_path, tiny, monkeypatch, episodic_life):
    """The last environment's are truncated; the checkpoint after 20 steps ends all of them."""
    monkeypatch.setattr(Tiny, "actions", (dqn.Action.NOOP, dqn.Action.FIRE))
    executed = record(monkeypatch, Tiny, "step", lambda args, _: args[1].copy())
    flags = dict(total_timesteps=160, buffer_size=400, checkpoint_interval=80)
    replay = train(tmp_path, episodic_life=episodic_life, **flags)["replay"]
    step = np.array([*range(8), *range(8), *range(4)] * 2)[:, None]
    last, t = np.arange(4) == 3, np.arange(40)[:, None]
    terminations = (step == 7) & ~last | (step == 4) & episodic_life
    valid = terminations | ~((step == 7) & last | (t == 19)) & (t < 39)
    replay["leaves"] = replay["nodes"][512:] > 0
    actions = executed[:40]  # then the evaluation's
    expected = {"terminations": terminations, "ages": step, "leaves": valid, "actions": actions}
    for name, values in expected.items():
        found = replay[name][:160].reshape(40, 4).numpy()
        np.testing.assert_array_equal(found, values + np.zeros((1, 4)), name)
    assert set(replay["rewards"][:160].tolist()) == {0, 1}  # the sign of 3


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("nan", [False, True])
def test_an_infinite_gradient_or_priority_ends_the_run(tmp_path, tiny, monkeypatch, nan):
    td_loss, calls = dqn.td_loss, []

    def broken(*args):
        loss, td_errors, metrics = td_loss(*args)
        calls.append(loss)
        infinite = (loss - loss.detach()).abs().sqrt() if len(calls) == 3 and not nan else 0
        td_errors[3] += math.nan if len(calls) == 3 and nan else 0
        return loss + infinite, td_errors, metrics

    monkeypatch.setattr(dqn, "td_loss", broken)
    with pytest.raises(FloatingPointError, match="not finite"):
        train(tmp_path, checkpoint_interval=80)
    assert len(calls) == 3 and [path.stem[-3:] for path in checkpoints(tmp_path)] == ["000"]


def test_resumed_is_bit_identical(tmp_path, tiny, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *args: None)  # keep all checkpoints
        seeds = record(patch, dqn.AtariEnvs, "reset", lambda args, _: args[1])
        whole = train(tmp_path / "run")
    steps = [int(path.stem[-12:]) for path in checkpoints(tmp_path / "run")]
    assert steps == [0, 60, 116, 176, 220]
    keys = [*[(3, step) for step in steps[:-1]], (3, 220, 1)]  # the evaluation has its own
    assert seeds == [dqn.seed_everything(*key) for key in keys]
    points = logged(tmp_path / "run")
    assert list(points["losses/td_loss"]) == [*range(64, 217, 16), 220]
    assert list(points["charts/episodic_return"]) == [32, 92, 148, 208]
    for step in (0, 64, 128):
        assert_same(resume(tmp_path / "run", step), whole)
        assert_same(*[logged(tmp_path / x) | {"charts/SPS": 0} for x in ("run", f"resumed_{step}")])
    last = resume(tmp_path / "run", total_timesteps=320, learning_rate=2e-3)
    assert last["optimizer"]["param_groups"][0]["lr"] == pytest.approx(2e-3, rel=1e-12)


def test_another_frame_stack_and_no_dueling(tmp_path, monkeypatch):
    monkeypatch.setattr(dqn, "AtariVectorEnv", Tiny)
    flags = dict(num_envs=2, total_timesteps=32, learning_starts=12, train_frequency=16)
    flags |= dict(bf16=True, capture_video=True)
    short = record(monkeypatch, dqn, "td_loss", lambda *_: torch.is_autocast_enabled("cpu"))
    agent = train(tmp_path, frame_stack=2, dueling=False, batch_size=2, **flags)["agent"]
    assert all(short) and {"0", "evaluation"} <= {x.name for x in tmp_path.glob("videos/*")}
    assert agent["trunk.0.weight"].shape == (32, 2, 8, 8) and "head.weight" in agent


def test_evaluation_counts_first_episodes_up_to_a_cap(tmp_path, tiny, monkeypatch, capsys):
    train(tmp_path)
    monkeypatch.setattr(dqn, "EVAL_STEPS", 24)
    steps = record(monkeypatch, dqn.AtariEnvs, "step", lambda args, _: dict(args[0].episodes))
    modes = record(monkeypatch, dqn, "epsilon_greedy", lambda args, _: args[0].training)
    # The second environment's episode ends at step 20, those of the first at 8 and 16
    record(monkeypatch, Tiny, "reset", lambda args, _: args[0].t.__setitem__(1, -12))
    model = dqn.load_checkpoint(tmp_path / "model.pt")
    for seed in range(4):  # in some, the first environment's two returns differ
        steps.clear()
        returns = dqn.evaluate(dqn.Args(**model["args"] | {"seed": seed}), model, tmp_path)
        assert returns == [steps[7][0][0], steps[19][1][0]]
    monkeypatch.setattr(dqn, "EVAL_STEPS", 18)
    assert dqn.evaluate(dqn.Args(**model["args"]), model, tmp_path)[1] > 0  # not ended
    assert len(steps) == 38 and "1 episodes" in capsys.readouterr().out and not any(modes)
