"""ppo_continuous.py: its mathematics, its environments, and the changes that its users make."""

import copy
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import assert_resumes, assert_same, cases, check, load, logged, resume, train
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import nn
from torch.distributions import Independent, Laplace, Normal

import ppo_continuous as ppo

SMALL = dict(env_id="Pendulum-v1", num_envs=2, num_steps=64, num_minibatches=2, update_epochs=2)
SMALL |= dict(total_timesteps=640, checkpoint_interval=300, eval_episodes=1)
PRECISIONS = pytest.mark.parametrize("precision", ["float32", "float64"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run."""
    return train(ppo, tmp_path_factory.mktemp("ppo") / "run", **SMALL)


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


def constant(logprobs, entropy, values):
    """An agent whose log-probabilities, entropies and values are given tensors."""
    policy = SimpleNamespace(log_prob=lambda actions: logprobs, entropy=lambda: entropy)
    return SimpleNamespace(policy=lambda obs: policy, value=lambda obs: values)


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
        loss, metrics = ppo.ppo_loss(constant(*trained), minibatch, args)
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
def test_layers_are_orthogonal():
    for network, last_gain in (("actor", 0.01), ("critic", 1.0)):
        for i, gain in ((0, 2**0.5), (2, 2**0.5), (4, last_gain)):
            layer = getattr(ppo.Agent(3, 2), network)[i]
            singular_values = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(singular_values, torch.full_like(singular_values, gain))
            assert not layer.bias.any()


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


def test_two_iterations_equal_a_plain_loop_in_float64(tmp_path, monkeypatch):
    """From recorded transitions, with the functions that are checked above."""
    flags = dict(total_timesteps=250, ent_coef=0.01, gamma=0.9, gae_lambda=0.8, log_std_init=0.5)
    args = ppo.Args(**SMALL | flags | dict(max_grad_norm=0.3, seed=2))  # 256 steps
    monkeypatch.setattr(ppo, "make_envs", lambda args, n, *_: PointMass(n, limit=11))
    weights, steps, orders = [], [], []
    act, step, randperm = ppo.act, ppo.Environments.step, torch.randperm

    def recorded_act(agent, obs, device):
        weights.append(copy.deepcopy(agent.state_dict()))
        steps.append([obs, act(agent, obs, device)])
        return steps[-1][1]

    def recorded_step(self, actions):
        result = step(self, actions)
        if self.training:
            steps[-1] += result[1:5]
        return result

    monkeypatch.setattr(ppo, "act", recorded_act)
    monkeypatch.setattr(ppo.Environments, "step", recorded_step)
    monkeypatch.setattr(torch, "randperm", lambda n, **_: orders.append(randperm(n)) or orders[-1])
    path = train(ppo, tmp_path / "run", **vars(args))

    ppo.seed_everything(2, 0)
    agent = ppo.Agent(3, 2, 0.5)
    assert_same(dict(agent.state_dict()), dict(weights[0]))
    agent.double()
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    for i in range(2):
        rollout = [torch.tensor(np.stack(x)) for x in zip(*steps[64 * i : 64 * (i + 1)])]
        obs, actions, next_obs, rewards = (x.double() for x in rollout[:4])
        terminations, truncations = rollout[4:]
        assert truncations.sum() > 2 and terminations.sum() > 0
        with torch.no_grad():
            logprobs = agent.policy(obs).log_prob(actions)
            values, next_values = agent.value(obs), agent.value(next_obs)
        inputs = (rewards, values, next_values, terminations, truncations)
        advantages = ppo.compute_gae(*inputs, 0.9, 0.8)
        batch = [obs, actions, logprobs, values, advantages, advantages + values]
        optimizer.param_groups[0]["lr"] = 3e-4 * (1 - i / 2)
        for indices in torch.cat(orders[2 * i : 2 * (i + 1)]).view(4, 64):
            loss, _ = ppo.ppo_loss(agent, [x.flatten(0, 1)[indices] for x in batch], args)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.3)
            optimizer.step()
    for name, x in load(path / "model.pt")["agent"].items():
        torch.testing.assert_close(x.double(), agent.state_dict()[name], rtol=0, atol=2e-7)
    ends = sum((x[4] | x[5]).sum() for x in steps)  # each adds a first observation
    assert load(path / "model.pt")["obs_stats"]["count"] == 2 + 256 + ends
    assert max(logged(path)["losses/grad_norm"].values()) > 0.31  # before clipping


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
        return self.obs(), -distance, terminations.astype(int), truncations.astype(int), info


def test_a_vectorized_simulator_of_ones_own_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "make_envs", lambda args, n, videos: PointMass(n))
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=r"\(2, 1\)"):
        patch.setattr(PointMass, "obs", lambda self: np.zeros((2, 1)))  # would be broadcast
        ppo.Environments(ppo.Args(), 2).reset(1, Path())
    flags = dict(num_envs=64, num_steps=32, num_minibatches=4, update_epochs=5, eval_episodes=20)
    train(ppo, tmp_path / "run", **flags, total_timesteps=20_480, learning_rate=3e-3)
    (score,) = logged(tmp_path / "run")["eval/episodic_return"].values()
    assert score > -15  # a policy that stands still gets -38


class Counter(gym.Env):
    """The counting environment of vectors/autoreset.json. The reward is the step's number."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Box(-0.5, 0.5, (1,), np.float64)

    def __init__(self, render_mode=None, lengths=(3,), ends_by="termination", sleep=0.0):
        self.lengths, self.ends_by, self.sleep, self.episode = lengths, ends_by, sleep, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return np.array([100.0 * self.episode]), {}

    def step(self, action):
        time.sleep(self.sleep)
        assert self.action_space.contains(action), action
        self.t += 1
        ended = self.t == self.lengths[self.episode % len(self.lengths)]
        ends = [ended and self.ends_by in (kind, "both") for kind in ("termination", "truncation")]
        return np.array([100.0 * self.episode + self.t]), float(self.t), *ends, {"t": self.t}


gym.register("Counter-v0", Counter)


@pytest.mark.quick
def test_a_trace_of_resets(monkeypatch):
    case = next(case for case in cases("autoreset") if case["inputs"]["mode"] == "SAME_STEP")
    settings = list(zip(case["inputs"]["episode_lengths"], case["inputs"]["ends_by"]))
    env_fns = [lambda x=x: Counter(None, *x) for x in settings]
    options = dict(autoreset_mode=AutoresetMode.SAME_STEP)
    monkeypatch.setattr(ppo, "make_envs", lambda *_: gym.vector.SyncVectorEnv(env_fns, **options))
    monkeypatch.setattr(ppo.Environments, "normalize", lambda self, obs: obs.copy())
    envs, steps, totals = ppo.Environments(ppo.Args(gamma=0.5), 3), [], np.zeros((3, 3))
    np.testing.assert_array_equal(envs.reset(1, Path())[:, 0], case["inputs"]["first_obs"])
    for rewards in case["outputs"]["rewards"]:
        obs, next_obs, _, terminations, truncations, info = envs.step(np.full((3, 1), 9.0))
        steps.append((obs, next_obs, terminations, truncations))
        totals += rewards, np.ones(3), rewards - 0.5 * totals[2]  # the last one discounted
        dones = terminations | truncations
        assert envs.episodes == {i: tuple(totals[:2, i]) for i in np.flatnonzero(dones)}
        totals[:, dones] = 0
        np.testing.assert_allclose(envs.discounted_returns, totals[2])
    assert "t" in info or "final_info" in info  # info reaches the caller
    assert envs.returns.any() and envs.reset(1, Path()) is not None and not envs.returns.any()
    for name, column in zip(("obs", "next_obs", "terminations", "truncations"), zip(*steps)):
        check(case, name, np.array(column).reshape(len(steps), 3))


@pytest.mark.quick
def test_statistics_are_shared_and_frozen_in_evaluation():
    args = ppo.Args(env_id="Pendulum-v1")
    envs = ppo.Environments(args, 3)
    assert len(np.unique(envs.reset(1, Path()), axis=0)) == 3  # different episodes
    assert len({env.action_space.sample()[0] for env in envs.envs.envs}) == 3
    for _ in range(5):
        envs.step(np.zeros((3, 1)))
    assert envs.obs_stats.count == 18 and envs.return_stats.count == 15
    frozen = ppo.Environments(args, 3, training=False)
    frozen.obs_stats.load_state_dict(envs.obs_stats.state_dict())
    frozen.reset(1, Path())
    frozen.step(np.zeros((3, 1)))
    assert frozen.normalize(np.full((1, 3), -1e9)).tolist() == [[-10] * 3]
    assert_same(envs.obs_stats.state_dict(), frozen.obs_stats.state_dict())


def test_evaluation_uses_the_saved_statistics_and_draws_nothing(finished):
    model, args = torch.load(finished / "model.pt", weights_only=True), ppo.Args(**SMALL, seed=3)
    first, again = (ppo.evaluate(args, model, finished) for _ in range(2))
    state = torch.get_rng_state()
    ppo.seed_everything(3, model["global_step"], 1)
    assert_same(state, torch.get_rng_state())
    model["obs_stats"]["mean"] += 3
    assert first == again != ppo.evaluate(args, model, finished)


@pytest.mark.quick
def test_evaluation_counts_the_first_episodes(monkeypatch, tmp_path, capsys):
    env_fns = [lambda x=x: Counter(lengths=x) for x in ((3, 4), (99,))]
    monkeypatch.setattr(ppo, "EVAL_STEPS", 8)
    options = dict(autoreset_mode=AutoresetMode.SAME_STEP)
    monkeypatch.setattr(ppo, "make_envs", lambda *_: gym.vector.SyncVectorEnv(env_fns, **options))
    model = dict(agent=ppo.Agent(1, 1).state_dict(), global_step=0)
    vars(stats := ppo.RunningMeanStd((1,)))["count"] = 1e-4  # a user's
    model["obs_stats"] = stats.state_dict()
    assert model["obs_stats"]["count"].item() == 1e-4
    assert ppo.evaluate(ppo.Args(eval_episodes=2), model, tmp_path) == [6, 36]
    assert "evaluation: 21.00 +- 15.00, 1 episodes" in capsys.readouterr().out


def test_asynchronous_environments_give_the_same_and_overlap(finished, tmp_path):
    path = train(ppo, tmp_path / "run", **SMALL, async_envs=True)
    assert_same(load(finished / "model.pt"), load(path / "model.pt"))
    gym.register("Slow-v0", Counter, kwargs={"sleep": 0.1})
    seconds, samples = [], []
    for async_envs in (False, True, True):
        ppo.seed_everything(5)
        envs = ppo.Environments(ppo.Args(env_id="Slow-v0", async_envs=async_envs), 4)
        envs.reset(1, Path())
        samples.append([space.sample()[0] for space in envs.envs.get_attr("action_space")])
        start = time.perf_counter()
        for _ in range(4):
            envs.step(np.zeros((4, 1)))
        seconds.append(time.perf_counter() - start)
        envs.envs.close()
    assert seconds[0] > 1.5 * seconds[1], seconds
    assert samples[1] == samples[2]  # Python's generator would differ in each process


class Changed(ppo.Agent):
    """A Laplace policy, a buffer, a frozen critic, an unused parameter, ReLU and dropout."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("scale", torch.tensor(2.0))
        self.critic.requires_grad_(False)
        self.actor[1], self.unused = nn.ReLU(), nn.Parameter(torch.zeros(()))
        self.actor.insert(2, nn.Dropout(0.3))

    def policy(self, obs):
        assert self.training == (len(obs) > 1)  # but for the evaluation's one environment
        mean = self.scale * self.actor(obs)
        return Independent(Laplace(mean, self.log_std.exp().expand_as(mean)), 1)


def two_rates(parameters, lr, **options):
    *networks, log_std = reversed(list(parameters))
    groups = [{"params": networks}, {"params": [log_std], "lr": 10 * lr}]
    return torch.optim.AdamW(groups, lr, weight_decay=0.1, **options)


def test_a_scheduled_learning_rate_is_kept_and_resumes(tmp_path, monkeypatch):
    class Decaying(torch.optim.Adam):
        def step(self, *args):
            super().step(*args)
            self.param_groups[0]["lr"] *= 0.5

    monkeypatch.setattr(torch.optim, "Adam", Decaying)
    whole = assert_resumes(ppo, tmp_path, **SMALL, anneal_lr=False, learning_rate=1e-4)
    later = resume(ppo, whole, tmp_path / "later", total_timesteps=768, learning_rate=6e-4)
    optimizer = load(max(later.glob("checkpoint_*")))["optimizer"]
    assert optimizer["param_groups"][0]["lr"] == pytest.approx(6e-4 * 0.5**24, rel=1e-9)


def test_changes_train_and_resume_exactly_and_compiled(tmp_path, monkeypatch, capsys):
    """Another agent, optimizer and loss, whose coefficient adapts to each batch."""
    loss, gae, update, coefficient, models = ppo.ppo_loss, ppo.compute_gae, ppo.update, {}, []

    def adapt(rewards, *inputs):
        coefficient["now"] = float(rewards.mean())
        return gae(rewards, *inputs)

    def ppo_loss(agent, minibatch, args):
        value, metrics = loss(agent, minibatch, args)
        return value + coefficient["now"] * agent.log_std.sum(), metrics

    monkeypatch.setattr(ppo, "compute_gae", adapt)
    monkeypatch.setattr(ppo, "ppo_loss", ppo_loss)
    monkeypatch.setattr(ppo, "update", lambda a, o, *x: (update(a, o, *x), o.zero_grad())[0])
    monkeypatch.setattr(ppo, "Agent", Changed)
    monkeypatch.setattr(torch.optim, "Adam", two_rates)
    for compiled in (False, True):
        path = train(ppo, tmp_path / f"{compiled}", **SMALL, compile=compiled)
        output = capsys.readouterr().out
        assert output.count("is not accelerated") == output.count("act() is") == compiled
        models.append(load(path / "model.pt")["agent"])
        first, last = sorted(path.glob("checkpoint_*.pt"))
        rates = [group["lr"] for group in load(last)["optimizer"]["param_groups"]]
        np.testing.assert_allclose(rates, [3e-4 / 5, 3e-3 / 5])  # both annealed
        before = load(first)["agent"]
        frozen = [name for name, x in before.items() if torch.equal(x, models[-1][name])]
        assert frozen == [x for x in before if "critic" in x or x in ("scale", "unused")]
        last.unlink()
        again = resume(ppo, path, tmp_path / f"{compiled}_again")
        assert_same(models[-1], load(again / "model.pt")["agent"])
    torch.testing.assert_close(*models, rtol=0, atol=3e-5)


def test_a_print_in_the_loss_is_seen_in_every_step_and_resumes(tmp_path, monkeypatch, capsys):
    loss, compile, models = ppo.ppo_loss, torch.compile, []

    def ppo_loss(agent, minibatch, args):
        print("sum of observations:", float(minibatch[0].sum()))
        return loss(agent, minibatch, args)

    monkeypatch.setattr(ppo, "ppo_loss", ppo_loss)  # and no C++ compiler, which is slow
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend="aot_eager"))
    for compiled in (False, True):
        folder, flags = tmp_path / f"{compiled}", SMALL | dict(num_envs=16, num_steps=8)
        flags |= dict(total_timesteps=512, checkpoint_interval=256, compile=compiled)
        models.append(load(assert_resumes(ppo, folder, **flags) / "model.pt")["agent"])
        assert len({x for x in capsys.readouterr().out.splitlines() if "sum of" in x}) == 16
    torch.testing.assert_close(*models, rtol=0, atol=3e-5)


POLICIES = {  # mean and deviation; the numpy actor must not stand for the last two
    "the script's": lambda agent, obs: (agent.actor(obs), agent.log_std.exp()),
    "another mean": lambda agent, obs: (2 * agent.actor(obs), agent.log_std.exp()),
    "a deviation by state": lambda agent, obs: (agent.actor(obs), obs[..., :1].abs() + 0.1),
}


@pytest.mark.quick
@pytest.mark.parametrize("policy", POLICIES)
def test_the_numpy_actor_samples_the_same_actions(capsys, monkeypatch, policy):
    make = POLICIES[policy]
    monkeypatch.setattr(ppo.Agent, "policy", lambda *x: Independent(Normal(*make(*x)), 1))
    agent, obs = ppo.Agent(3, 2, -1.0), np.random.default_rng(1).normal(size=(12, 8, 3))
    actions, actors = [], []
    agent.actor.register_forward_hook(lambda actor, *_: actors.append(actor))
    for act in (ppo.accelerate(ppo.Args(num_steps=4))[0], ppo.act):
        torch.manual_seed(1)
        agent.actor[-1].bias.data.fill_(0.3)
        for x in obs.astype(np.float32):
            actions.append(act(agent, x, torch.device("cpu")))
            agent.actor[-1].bias.data.add_(0.01)  # a trained policy is seen
    np.testing.assert_allclose(actions[:12], actions[12:], atol=1e-6)
    assert ("not accelerated" in capsys.readouterr().out) == (policy != "the script's")
    assert actors.count(agent.actor) == 24 - 12 * (policy == "the script's")  # it checks a copy


def test_a_trained_module_outside_the_checkpoint_is_refused(tmp_path, monkeypatch):
    extra, adam = nn.Linear(2, 2), torch.optim.Adam
    monkeypatch.setattr(torch.optim, "Adam", lambda p, *a, **k: adam([*p, *extra.parameters()]))
    with pytest.raises(SystemExit, match="parts"):
        train(ppo, tmp_path / "run", **SMALL)


@pytest.mark.quick
@pytest.mark.parametrize("num_steps, num_minibatches", [(99_999, 2), (64, 3), (64, 128), (0, 2)])
def test_batches_that_do_not_fit_are_refused(tmp_path, num_steps, num_minibatches):
    flags = SMALL | dict(num_steps=num_steps, num_minibatches=num_minibatches)
    with pytest.raises(SystemExit, match="error: "):
        train(ppo, tmp_path / "run", **flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name, epochs", [("approx_kl", 1), ("old_approx_kl", 2)])
def test_target_kl_takes_the_estimate_that_is_never_negative(tmp_path, monkeypatch, name, epochs):
    calls, update = [], ppo.update
    large = {"approx_kl": 0.0, "old_approx_kl": 0.0} | {name: 1.0}
    monkeypatch.setattr(ppo, "update", lambda *a: calls.append(1) or update(*a) | large)
    train(ppo, tmp_path / "run", **SMALL | dict(target_kl=0.9, total_timesteps=256))
    assert len(calls) == 2 * epochs * 2  # iterations, epochs, minibatches


def test_logged_losses_and_episodes_are_means(tmp_path, monkeypatch):
    calls, both, update, gae = [], [], ppo.update, ppo.compute_gae
    monkeypatch.setattr(ppo, "compute_gae", lambda *a: both.append((gae(*a), a[1])) or both[-1][0])
    monkeypatch.setattr(ppo, "update", lambda *a: calls.append(update(*a)) or calls[-1])
    log = logged(train(ppo, tmp_path / "run", **SMALL | dict(total_timesteps=256)))
    for i, step in enumerate((128, 256)):
        last_epoch = calls[4 * i + 2 : 4 * i + 4]
        expected = {name: sum(float(m[name]) for m in last_epoch) / 2 for name in last_epoch[0]}
        advantages, values = (x.double() for x in both[i])
        expected["explained_variance"] = 1 - advantages.var() / (advantages + values).var()
        for name, value in expected.items():
            assert log[f"losses/{name}"][step] == pytest.approx(float(value), 1e-4, 1e-6), name
    run = SimpleNamespace(recent_returns=[9.0] * 99, log=lambda *a: calls.append(a))
    ppo.Run.log_episodes(run, 7, {0: (1.0, 3), 1: (5.0, 4)})
    assert calls[-1] == (7, "charts", {"episodic_return": 3.0, "episodic_length": 3.5})
    assert run.recent_returns == [9.0] * 98 + [1.0, 5.0]


def test_what_diverges_is_reported(tmp_path, monkeypatch, capsys):
    env = ppo.make_env(ppo.Args(), None)
    env.reset(seed=1)
    env.unwrapped.step(np.full(6, np.nan))
    assert "note: Nan, Inf or huge value in CTRL" in capsys.readouterr().out
    loss = ppo.ppo_loss
    monkeypatch.setattr(ppo, "ppo_loss", lambda *a: (loss(*a)[0] * np.nan, loss(*a)[1]))
    with pytest.raises(FloatingPointError, match="step 128"):
        train(ppo, tmp_path / "run", **SMALL)
    assert len(list((tmp_path / "run").glob("*.pt"))) == 1
    monkeypatch.setattr(ppo.Agent, "value", lambda self, obs: self.critic(obs))  # (T, N, 1)
    with pytest.raises(AssertionError):
        train(ppo, tmp_path / "axis", **SMALL)
