"""ppo_continuous.py: its mathematics, its environments, and the changes that its users make."""

import copy
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import assert_same, load, logged, resume, train
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import nn
from torch.distributions import Independent, Laplace
from vectors_reader import cases, check

import ppo_continuous as ppo

SMALL = dict(env_id="Pendulum-v1", num_envs=2, num_steps=64, num_minibatches=2, update_epochs=2)
SMALL |= dict(total_timesteps=640, checkpoint_interval=300, eval_episodes=1)
PRECISIONS = pytest.mark.parametrize("precision", ["float32", "float64"])


# ----- Mathematics -----


@pytest.mark.quick
@PRECISIONS
def test_gae_equals_the_double_sum(precision):
    for case in cases("gae", "gae"):
        inputs = [torch.tensor(x) for x in list(case["inputs"].values())[:5]]
        inputs[:3] = [x.to(getattr(torch, precision)) for x in inputs[:3]]
        gamma, gae_lambda = case["inputs"]["gamma"].item(), case["inputs"]["gae_lambda"].item()
        advantages = ppo.compute_gae(*inputs, gamma, gae_lambda)
        check(case, "advantages", advantages, precision)
        check(case, "returns", advantages + inputs[1], precision)


class Constant:
    """An agent whose log-probabilities, entropies and values are given tensors."""

    def __init__(self, logprobs, entropy, values):
        self.logprobs, self.entropies, self.values = logprobs, entropy, values

    def policy(self, obs):
        return SimpleNamespace(
            log_prob=lambda actions: self.logprobs, entropy=lambda: self.entropies
        )

    def value(self, obs):
        return self.values


@pytest.mark.quick
@PRECISIONS
def test_loss_and_gradient(precision):
    dtype = getattr(torch, precision)
    for case in cases("ppo", "ppo_loss"):
        inputs = {name: torch.tensor(x) for name, x in case["inputs"].items()}
        args = SimpleNamespace(**{name: x.item() for name, x in inputs.items() if x.dim() == 0})
        names = ("logprobs", "entropy", "values")
        trained = [inputs[name].to(dtype).requires_grad_() for name in names]
        given = ("old_logprobs", "old_values", "advantages", "returns")
        minibatch = [None, None, *(inputs[name].to(dtype) for name in given)]
        loss, metrics = ppo.ppo_loss(Constant(*trained), minibatch, args)
        loss.backward()
        check(case, "loss", loss.detach(), precision)
        for name, x in zip(names, trained):
            check(case, f"grad_{name}", x.grad, precision)
        for name in ("policy_loss", "value_loss", "old_approx_kl", "approx_kl", "clipfrac"):
            check(case, name, metrics[name], precision)
        check(case, "entropy_mean", metrics["entropy"], precision)


@pytest.mark.quick
def test_policy_is_a_diagonal_gaussian():
    for case in cases("ppo", "gaussian_policy"):
        names = ("means", "actions", "log_std")
        means, actions, log_std = (torch.tensor(case["inputs"][name]) for name in names)
        agent = ppo.Agent(3, means.shape[1]).double()
        agent.actor = nn.Identity()
        agent.log_std.data.copy_(log_std)
        policy = agent.policy(means)
        check(case, "logprobs", policy.log_prob(actions).detach())
        check(case, "entropy", policy.entropy().detach())
        torch.testing.assert_close(policy.mode.detach(), means)


@pytest.mark.quick
def test_running_statistics_of_batches():
    for case in cases("running_stats"):
        rows = case["inputs"]["rows"]
        stats, start = ppo.RunningMeanStd((rows.shape[1],)), 0
        for k, size in enumerate(case["inputs"]["batch_sizes"]):
            stats.update(rows[start : start + size])
            start += size
            tolerance = case["tolerance"]["float64"]
            variance = stats.m2 / stats.count
            np.testing.assert_allclose(stats.mean, case["outputs"]["means"][k], **tolerance)
            np.testing.assert_allclose(variance, case["outputs"]["variances"][k], **tolerance)


@pytest.mark.quick
def test_observations_are_normalized_and_rewards_scaled(monkeypatch):
    monkeypatch.setattr(ppo.Environments, "__init__", lambda self: None)
    for case in cases("normalization"):
        inputs, envs = case["inputs"], ppo.Environments()
        envs.training, envs.args, outputs = True, SimpleNamespace(gamma=0.99), []
        if case["operation"] == "normalize_obs":
            envs.obs_stats, start = ppo.RunningMeanStd((inputs["rows"].shape[1],)), 0
            for size in inputs["batch_sizes"]:
                outputs.append(envs.normalize(inputs["rows"][start : start + size]))
                start += size
            check(case, "normalized", np.concatenate(outputs), "float32")
        else:
            envs.return_stats, envs.discounted_returns = ppo.RunningMeanStd(), np.zeros(2)
            dones = inputs["terminations"] | inputs["truncations"]
            for rewards, done in zip(inputs["rewards"], dones):
                outputs.append(envs.scale(rewards))
                envs.discounted_returns[done] = 0  # as `step` does
            check(case, "scaled", np.array(outputs), "float32")


@pytest.mark.quick
@PRECISIONS
def test_update_clips_gradients_and_steps_as_adam(monkeypatch, precision):
    dtype = getattr(torch, precision)
    for case in cases("adam"):
        inputs = {name: torch.tensor(x) for name, x in case["inputs"].items()}
        if inputs["clip_eps"] == 0 and inputs["max_grad_norm"] < 1:
            continue  # PyTorch adds 1e-6 to the norm
        agent = nn.ParameterList(inputs["theta"].to(dtype).split(inputs["sizes"].tolist()))
        optimizer = torch.optim.Adam(agent.parameters(), eps=inputs["eps"].item(), fused=True)
        args = SimpleNamespace(max_grad_norm=inputs["max_grad_norm"].item())
        thetas, norms = [], []
        for grad, learning_rate in zip(inputs["grads"].to(dtype), inputs["learning_rates"]):
            optimizer.param_groups[0]["lr"] = learning_rate.item()
            loss = torch.dot(torch.cat(list(agent)), grad)
            monkeypatch.setattr(ppo, "ppo_loss", lambda *args, loss=loss: (loss, {}))
            norms.append(ppo.update(agent, optimizer, None, args)["grad_norm"].item())
            thetas.append(torch.cat(list(agent)).detach().numpy())
        check(case, "theta", np.array(thetas), precision)
        check(case, "grad_norms", np.array(norms), precision)


def plain_step(weights, moments, t, minibatch, args, lr):
    """One minibatch of PPO in float64, by formulas alone: the loss, clipping, Adam."""
    obs, actions, old_logprobs, old_values, advantages, returns = minibatch
    weights = {name: x.clone().requires_grad_() for name, x in weights.items()}

    def network(name):
        x = obs
        for i in (0, 2, 4):
            x = x @ weights[f"{name}.{i}.weight"].T + weights[f"{name}.{i}.bias"]
            x = x.tanh() if i < 4 else x
        return x

    std = weights["log_std"].exp()
    logprobs = (-0.5 * ((actions - network("actor")) / std) ** 2 - std.log()).sum(1)
    logprobs = logprobs - 0.5 * np.log(2 * np.pi) * actions.shape[1]
    values = network("critic")[:, 0]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (logprobs - old_logprobs).exp()
    gains = torch.stack([ratio * advantages, ratio.clip(0.8, 1.2) * advantages]).amin(0)
    clipped = old_values + (values - old_values).clip(-0.2, 0.2)
    errors = torch.stack([(values - returns) ** 2, (clipped - returns) ** 2]).amax(0)
    entropy = (0.5 + 0.5 * np.log(2 * np.pi) + std.log()).sum()
    loss = -gains.mean() + args.vf_coef * 0.5 * errors.mean() - args.ent_coef * entropy
    grads = torch.autograd.grad(loss, list(weights.values()))
    norm = sum((grad**2).sum() for grad in grads) ** 0.5
    new = {}
    for (name, x), grad in zip(weights.items(), grads):
        grad = grad * min(1, args.max_grad_norm / (norm + 1e-6))
        m, v = moments[name]
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        moments[name] = (m, v)
        step = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-5)
        new[name] = (x - lr * step).detach()
    return new


def test_two_iterations_equal_plain_formulas(tmp_path, monkeypatch):
    """The whole of two updates, from recorded transitions, in float64: CleanRL's algorithm but for
    the declared differences."""
    args = ppo.Args(**SMALL | dict(total_timesteps=256, ent_coef=0.01, gamma=0.9))
    monkeypatch.setattr(ppo, "make_envs", lambda args, n, *_: PointMass(n, limit=11))
    steps, orders = [], []
    step, randperm, act = ppo.Environments.step, torch.randperm, ppo.act

    def recorded_act(agent, obs, device):
        actions = act(agent, obs, device)
        steps.append([copy.deepcopy(agent.state_dict()), obs, actions])
        return actions

    def recorded_step(self, actions):
        result = step(self, actions)
        if self.training:
            steps[-1] += result[1:5]
        return result

    def recorded_order(*args, **kwargs):
        orders.append(randperm(*args, **kwargs))
        return orders[-1]

    monkeypatch.setattr(ppo, "act", recorded_act)
    monkeypatch.setattr(ppo.Environments, "step", recorded_step)
    monkeypatch.setattr(torch, "randperm", recorded_order)
    ppo.train(args, tmp_path / "run", None)

    weights = {name: x.double() for name, x in steps[0][0].items()}
    moments = {name: (torch.zeros_like(x), torch.zeros_like(x)) for name, x in weights.items()}
    t = 0
    for iteration in range(2):
        rollout = steps[64 * iteration : 64 * (iteration + 1)]
        obs, actions, next_obs, rewards, terminations, truncations = (
            torch.tensor(np.stack([s[i] for s in rollout])) for i in range(1, 7)
        )
        assert truncations.sum() > 2 and terminations.sum() > 0
        obs, actions, next_obs, rewards = (x.double() for x in (obs, actions, next_obs, rewards))
        agent = ppo.Agent(obs.shape[-1], actions.shape[-1]).double()
        agent.load_state_dict(weights)
        with torch.no_grad():
            logprobs = agent.policy(obs).log_prob(actions)
            values, next_values = agent.value(obs), agent.value(next_obs)
        done, last = terminations | truncations, 0
        advantages = torch.zeros_like(values)
        for k in reversed(range(64)):
            nonterminal = (~terminations[k]).double()
            delta = rewards[k] + 0.9 * next_values[k] * nonterminal - values[k]
            last = delta + 0.9 * 0.95 * (~done[k]).double() * last
            advantages[k] = last
        batch = [obs, actions, logprobs, values, advantages, advantages + values]
        batch = [x.reshape(128, *x.shape[2:]) for x in batch]
        for order in orders[2 * iteration : 2 * iteration + 2]:
            for indices in (order[:64], order[64:]):
                t += 1
                minibatch = [x[indices] for x in batch]
                lr = 3e-4 * (1 - iteration / 2)
                weights = plain_step(weights, moments, t, minibatch, args, lr)
    trained = load(tmp_path / "run" / "model.pt")["agent"]
    for name, x in weights.items():
        torch.testing.assert_close(trained[name].double(), x, rtol=0, atol=2e-7, msg=name)


# ----- Environments -----


class PointMass(VectorEnv):
    """A user's own vectorized simulator: the reward is minus the distance to the origin."""

    def __init__(self, num_envs, limit=30):
        self.num_envs, self.limit = num_envs, limit
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
        self.single_action_space = gym.spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        self.x, self.t = self.rng.normal(size=(self.num_envs, 2)), np.zeros(self.num_envs)
        return self.obs(), {}

    def obs(self):
        return np.column_stack([self.x, self.t / self.limit])

    def step(self, actions):
        self.x, self.t = self.x + 0.3 * actions, self.t + 1
        distance = np.linalg.norm(self.x, axis=1)
        terminations, truncations = distance > 2.5, self.t >= self.limit
        info, dones = {}, terminations | truncations
        if dones.any():
            info["final_obs"] = self.obs()
            self.x[dones], self.t[dones] = self.rng.normal(size=(dones.sum(), 2)), 0
        return self.obs(), -distance, terminations, truncations, info

    def close(self, **kwargs):
        pass


def test_a_vectorized_simulator_of_ones_own_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "make_envs", lambda args, n, seed, videos: PointMass(n))
    flags = dict(num_envs=64, num_steps=32, num_minibatches=8, total_timesteps=61_440)
    train(ppo, tmp_path / "run", **flags, learning_rate=1e-3, eval_episodes=20)
    returns = logged(tmp_path / "run")["eval/episodic_return"]
    assert list(returns.values())[-1] > -8, returns  # a policy that stands still gets -38


class Counter(gym.Env):
    """Observations count the steps in units of 10 per environment; ends are given."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Box(-0.5, 0.5, (1,), np.float64)

    def __init__(self, render_mode=None, terminate_at=3, truncate_at=None, sleep=0.0):
        self.ends, self.sleep = (terminate_at, truncate_at), sleep
        self.episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return np.array([100.0 * self.episode]), {}

    def step(self, action):
        time.sleep(self.sleep)
        assert self.action_space.contains(action), action
        self.t += 1
        ends = [self.t == end for end in self.ends]
        return np.array([100.0 * self.episode + self.t]), float(self.t), *ends, {"t": self.t}


gym.register("Counter-v0", Counter)
gym.register("Truncated-v0", Counter, kwargs={"terminate_at": None, "truncate_at": 2})
gym.register("Endless-v0", Counter, kwargs={"terminate_at": None})


@pytest.mark.quick
@pytest.mark.parametrize("env_id, length", [("Counter-v0", 3), ("Truncated-v0", 2)])
def test_next_observations_at_an_episodes_end(monkeypatch, env_id, length):
    monkeypatch.setattr(ppo.Environments, "normalize", lambda self, obs: obs.copy())
    envs = ppo.Environments(ppo.Args(env_id=env_id), 2)
    obs = envs.reset(1, Path())
    for t in range(1, 10):
        step, episode = (t - 1) % length + 1, (t - 1) // length + 1
        obs, next_obs, _, terminations, truncations, info = envs.step(np.full((2, 1), 9.0))
        done = step == length
        assert (next_obs == 100 * episode + step).all(), (t, next_obs)
        assert (obs == (100 * (episode + 1) if done else 100 * episode + step)).all(), (t, obs)
        assert (terminations == (done and length == 3)).all(), t
        assert (truncations == (done and length == 2)).all(), t
        score = {i: (sum(range(1, length + 1)), length) for i in range(2)} if done else {}
        assert envs.episodes == score, t
    assert "t" in info or "final_info" in info  # info reaches the caller


class Counting(Counter):
    """The counting environment of vectors/autoreset.json."""

    def __init__(self, lengths, end):
        super().__init__()
        self.lengths, self.end, self.episode = lengths, end, -1

    def step(self, action):
        obs, reward, *_ = super().step(action)
        ended = self.t == self.lengths[self.episode % 3]
        ends = [ended and self.end in (kind, "both") for kind in ("termination", "truncation")]
        return obs, reward, *ends, {}


@pytest.mark.quick
def test_a_trace_of_resets(monkeypatch):
    case = next(case for case in cases("autoreset") if case["inputs"]["mode"] == "SAME_STEP")
    settings = list(zip(case["inputs"]["episode_lengths"], case["inputs"]["ends_by"]))
    monkeypatch.setattr(ppo.Environments, "normalize", lambda self, obs: obs.copy())
    make = [lambda x=x: Counting(*x) for x in settings]
    mode = AutoresetMode.SAME_STEP
    monkeypatch.setattr(
        ppo, "make_envs", lambda *_: gym.vector.SyncVectorEnv(make, autoreset_mode=mode)
    )
    envs = ppo.Environments(ppo.Args(), len(make), training=False)
    np.testing.assert_array_equal(envs.reset(1, Path())[:, 0], case["inputs"]["first_obs"])
    steps = [envs.step(np.zeros((3, 1)))[:5] for _ in range(case["inputs"]["num_steps"])]
    names = ("obs", "next_obs", "rewards", "terminations", "truncations")
    for name, column in zip(names, zip(*steps)):
        if name != "rewards":  # they are scaled
            check(case, name, np.array(column).reshape(len(steps), 3))


@pytest.mark.quick
def test_observations_of_another_shape_than_their_spaces_are_refused(monkeypatch):
    monkeypatch.setattr(Counter, "observation_space", gym.spaces.Box(-9, 9, (3,)))
    with pytest.raises(SystemExit, match="shape"):
        ppo.Environments(ppo.Args(env_id="Counter-v0"), 2).reset(1, Path())


@pytest.mark.quick
def test_statistics_are_shared_and_frozen_in_evaluation():
    args = ppo.Args(env_id="Pendulum-v1")
    envs = ppo.Environments(args, 3)
    envs.reset(1, Path())
    for _ in range(5):
        envs.step(np.zeros((3, 1)))
    assert envs.obs_stats.count == 18 and envs.return_stats.count == 15
    frozen = ppo.Environments(args, 3, training=False)
    frozen.obs_stats.load_state_dict(envs.obs_stats.state_dict())
    before = copy.deepcopy(frozen.obs_stats.state_dict())
    frozen.reset(1, Path())
    frozen.step(np.zeros((3, 1)))
    assert_same(before, frozen.obs_stats.state_dict())


def test_evaluation_uses_the_saved_statistics(tmp_path):
    path = train(ppo, tmp_path / "run", **SMALL)
    model, args = torch.load(path / "model.pt", weights_only=True), ppo.Args(**SMALL)
    first, again = (ppo.evaluate(args, model, path) for _ in range(2))
    model["obs_stats"]["mean"] += 3
    assert first == again != ppo.evaluate(args, model, path)


def test_asynchronous_environments_give_the_same_and_overlap(tmp_path):
    env_ids = {"env_id": "Pendulum-v1"}
    runs = [train(ppo, tmp_path / str(i), **SMALL | env_ids, async_envs=i == 1) for i in range(2)]
    assert_same(*[load(path / "model.pt") for path in runs])
    gym.register("Slow-v0", Counter, kwargs={"sleep": 0.03})
    seconds = []
    for async_envs in (False, True):
        envs = ppo.Environments(ppo.Args(env_id="Slow-v0", async_envs=async_envs), 8)
        envs.reset(1, Path())
        start = time.perf_counter()
        for _ in range(8):
            envs.step(np.zeros((8, 1)))
        seconds.append(time.perf_counter() - start)
        envs.envs.close()
    assert seconds[0] > 1.5 * seconds[1], seconds


# ----- What users change -----


def noisy_loss(loss, coefficient):
    """`loss` with a term whose coefficient changes from call to call."""

    def ppo_loss(agent, minibatch, args):
        value, metrics = loss(agent, minibatch, args)
        coefficient["now"] = coefficient["now"] + coefficient["step"]
        return value + coefficient["now"] * agent.log_std.sum(), metrics

    return ppo_loss


@pytest.mark.parametrize("compiled", [False, True])
def test_an_adaptive_coefficient_is_seen(tmp_path, monkeypatch, compiled):
    loss, models = ppo.ppo_loss, {}
    for step in (0.0, 1.0):
        monkeypatch.setattr(ppo, "ppo_loss", noisy_loss(loss, {"now": 0.0, "step": step}))
        path = train(ppo, tmp_path / str(step), **SMALL, compile=compiled)
        models[step] = load(path / "model.pt")["agent"]["log_std"]
    assert (models[1.0] < models[0.0] - 1e-4).all(), models


class Frozen(ppo.Agent):
    def __init__(self, *args):
        super().__init__(*args)
        self.critic.requires_grad_(False)


class Scaled(ppo.Agent):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("scale", torch.tensor(2.0))

    def policy(self, obs):
        mean = self.scale * self.actor(obs)
        return Independent(Laplace(mean, self.log_std.exp().expand_as(mean)), 1)


class Dropout(ppo.Agent):
    def __init__(self, *args):
        super().__init__(*args)
        self.actor.insert(2, nn.Dropout(0.3))


class Relu(ppo.Agent):
    def __init__(self, *args):
        super().__init__(*args)
        self.actor[1] = self.actor[3] = nn.ReLU()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("agent", [Frozen, Scaled, Dropout, Relu])
def test_another_agent_trains_and_resumes_exactly(tmp_path, monkeypatch, capsys, agent, compiled):
    monkeypatch.setattr(ppo, "Agent", agent)
    path = train(ppo, tmp_path / "run", **SMALL, compile=compiled)
    if compiled and agent is not Frozen:
        assert "note: act() is not compiled" in capsys.readouterr().out
    trained = load(path / "model.pt")
    middle = sorted(path.glob("checkpoint_*.pt"))[0]
    start = load(middle)["agent"]
    frozen = [name for name, x in start.items() if torch.equal(x, trained["agent"][name])]
    expected = (
        ["scale"] if agent is Scaled else [x for x in start if agent is Frozen and "cri" in x]
    )
    assert frozen == expected
    interrupted = tmp_path / "interrupted"
    interrupted.mkdir()
    (interrupted / middle.name).write_bytes(middle.read_bytes())
    again = resume(ppo, interrupted, tmp_path / "again")
    assert_same(trained, load(again / "model.pt"))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_print_in_the_loss_is_seen_in_every_step(tmp_path, monkeypatch, capsys, compiled):
    loss, lines = ppo.ppo_loss, []

    def ppo_loss(agent, minibatch, args):
        print("a line of the loss")
        lines.append(float(minibatch[0].sum()))  # as a breakpoint would: it needs the value
        return loss(agent, minibatch, args)

    monkeypatch.setattr(ppo, "ppo_loss", ppo_loss)
    train(ppo, tmp_path / "run", **SMALL, compile=compiled)
    output = capsys.readouterr().out
    assert output.count("a line of the loss") == 20 and len(lines) == 20


def two_rates(parameters, lr, **options):
    *networks, log_std = reversed(list(parameters))
    groups = [{"params": networks}, {"params": [log_std], "lr": 10 * lr}]
    return torch.optim.AdamW(groups, lr, weight_decay=0.1, **options)


@pytest.mark.parametrize("compiled", [False, True])
def test_another_optimizer_with_two_learning_rates(tmp_path, monkeypatch, compiled):
    monkeypatch.setattr(torch.optim, "Adam", two_rates)
    path = train(ppo, tmp_path / "run", **SMALL, compile=compiled)
    optimizer = load(sorted(path.glob("checkpoint_*.pt"))[-1])["optimizer"]
    rates = [group["lr"] for group in optimizer["param_groups"]]
    np.testing.assert_allclose(rates, [3e-4 / 5, 3e-3 / 5])  # both annealed
    again = resume(ppo, path, tmp_path / "again", total_timesteps=1280)
    model, longer = load(path / "model.pt"), load(again / "model.pt")
    assert longer["global_step"] == 1280 and model["global_step"] == 640


def test_compile_gives_the_same_policy_and_sees_another_update(tmp_path, monkeypatch, capsys):
    models = {}
    for compiled in (False, True):
        path = train(ppo, tmp_path / str(compiled), **SMALL, compile=compiled)
        models[compiled] = load(path / "model.pt")["agent"]
    assert "not compiled" not in capsys.readouterr().out
    # The same seed draws the same noise in another order of use, so only the size is comparable
    for name, x in models[False].items():
        assert (x - models[True][name]).abs().max() < 20 * 3e-4, name

    def update(agent, optimizer, minibatch, args):
        metrics = plain(agent, optimizer, minibatch, args)
        with torch.no_grad():
            agent.log_std.sub_(0.01)
        return metrics

    plain = ppo.update
    monkeypatch.setattr(ppo, "update", update)
    path = train(ppo, tmp_path / "own", **SMALL, compile=True)
    assert load(path / "model.pt")["agent"]["log_std"] < -0.15


def test_a_trained_module_outside_the_checkpoint_is_refused(tmp_path, monkeypatch):
    extra = nn.Linear(2, 2)
    adam = torch.optim.Adam
    monkeypatch.setattr(torch.optim, "Adam", lambda p, *a, **k: adam([*p, *extra.parameters()]))
    with pytest.raises(SystemExit, match="parts"):
        train(ppo, tmp_path / "run", **SMALL)


@pytest.mark.quick
@pytest.mark.parametrize(
    "flags",
    [
        dict(num_envs=128, num_steps=1024),
        dict(num_minibatches=3),
    ],
    ids=str,
)
def test_settings_that_would_go_wrong_silently_are_refused(tmp_path, flags):
    with pytest.raises(SystemExit, match="error: "):
        train(ppo, tmp_path / "run", **SMALL | flags)
    assert not (tmp_path / "run").exists()


def test_no_episode_between_checkpoints_is_said(tmp_path, capsys):
    train(ppo, tmp_path / "run", **SMALL)
    assert "note: no episode ended" in capsys.readouterr().out  # Pendulum ends after 200 steps
    train(ppo, tmp_path / "other", **SMALL | {"env_id": "Counter-v0"})
    assert "note" not in capsys.readouterr().out


def test_target_kl_stops_the_update(tmp_path, monkeypatch):
    calls, update = [], ppo.update
    monkeypatch.setattr(ppo, "update", lambda *a: calls.append(1) or update(*a))
    train(ppo, tmp_path / "run", **SMALL | dict(target_kl=-1.0, update_epochs=7))
    assert len(calls) == 5 * 2  # one epoch of two minibatches in each of five iterations


@pytest.mark.parametrize("name, epochs", [("approx_kl", 1), ("old_approx_kl", 2)])
def test_target_kl_takes_the_estimate_that_is_never_negative(tmp_path, monkeypatch, name, epochs):
    calls, update = [], ppo.update
    large = {"approx_kl": torch.tensor(0.0), "old_approx_kl": torch.tensor(0.0)}
    large[name] = torch.tensor(1.0)
    monkeypatch.setattr(ppo, "update", lambda *a: calls.append(1) or update(*a) | large)
    train(ppo, tmp_path / "run", **SMALL | dict(target_kl=0.5, total_timesteps=256))
    assert len(calls) == 2 * epochs * 2  # iterations, epochs, minibatches


def test_logged_losses_are_means_of_the_last_epoch(tmp_path, monkeypatch):
    calls, batches, update, compute_gae = [], [], ppo.update, ppo.compute_gae

    def recorded_update(*inputs):
        calls.append(update(*inputs))
        return calls[-1]

    def recorded_gae(rewards, values, *rest):
        batches.append((compute_gae(rewards, values, *rest), values))
        return batches[-1][0]

    monkeypatch.setattr(ppo, "update", recorded_update)
    monkeypatch.setattr(ppo, "compute_gae", recorded_gae)
    log = logged(train(ppo, tmp_path / "run", **SMALL | dict(total_timesteps=256)))
    for i, step in enumerate((128, 256)):
        last_epoch = calls[4 * i + 2 : 4 * i + 4]
        expected = {name: sum(float(m[name]) for m in last_epoch) / 2 for name in last_epoch[0]}
        advantages, values = (x.double() for x in batches[i])
        explained = 1 - advantages.var() / (advantages + values).var()
        expected["explained_variance"] = explained.item()
        for name, value in expected.items():
            got = log[f"losses/{name}"][step]
            assert got == pytest.approx(value, rel=1e-4, abs=1e-6), (name, step)


def test_training_that_diverges_stops_before_the_next_checkpoint(tmp_path, monkeypatch):
    loss = ppo.ppo_loss
    monkeypatch.setattr(ppo, "ppo_loss", lambda *a: (loss(*a)[0] * np.nan, loss(*a)[1]))
    with pytest.raises(FloatingPointError, match="step 128"):
        train(ppo, tmp_path / "run", **SMALL)
    assert [path.name for path in (tmp_path / "run").glob("*.pt")] == ["checkpoint_000000000000.pt"]
