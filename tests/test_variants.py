"""variants/: every patch applies and compiles. PPO's are trained, resumed, evaluated, checked."""

import copy
import shutil
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, assert_resumes, assert_same, load, logged, train
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

PATCHES = sorted(ROOT.glob("variants/*/*.patch"))
quick = pytest.mark.quick

# Short runs, with flags of the variant. Checkpoints do not fall on multiples of the batch
SMALL = dict(env_id="Pendulum-v1", num_envs=2, num_steps=64, num_minibatches=2, update_epochs=2)
SMALL |= dict(total_timesteps=640, checkpoint_interval=300, eval_episodes=2, seed=3)
PPO = {"discrete": dict(env_id="CartPole-v1"), "lstm": dict(sequence_length=16, num_observed=2)}
PPO |= {"rnd": {}, "rpo": {}, "state_std": dict(ent_coef=0.01)}


@quick
@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_applies(patch, tmp_path):
    script, options = f"{patch.parent.name}.py", dict(cwd=tmp_path, capture_output=True, text=True)
    shutil.copy(ROOT / script, tmp_path)
    patches = [patch.with_stem("own_environment"), patch] if "qmix" in script else [patch]
    process = subprocess.run(["git", "apply", *dict.fromkeys(patches)], **options)
    assert process.returncode == 0, process.stderr + "try: python tools/variants.py rebase"
    texts = [(folder / script).read_text() for folder in (ROOT, tmp_path)]
    (before, run), (after, changed_run) = (text.split("# ----- The run") for text in texts)
    assert before != after and (run == changed_run or patch.stem in ("torchrun", "pqn"))
    words = [sys.executable, "-m", "ruff", "check", "--select", "F,E501", "--line-length", "100"]
    process = subprocess.run([*words, script], **options)
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("name", PPO)
def test_ppo_trains_resumes_evaluates(patched, tmp_path, name):
    assert_resumes(patched("ppo_continuous", name), tmp_path, **SMALL | PPO[name])


def test_discrete_is_a_softmax_and_learns_cartpole(patched, tmp_path):
    module, x = patched("ppo_continuous", "discrete"), torch.randn(8, 4)
    agent, flags = module.Agent(4, 2), dict(num_envs=8, num_steps=64, num_minibatches=4)
    torch.testing.assert_close(agent.policy(x).probs, agent.actor(x).softmax(-1))
    flags |= dict(total_timesteps=40_000, learning_rate=1e-3)  # 15 s on one core
    folder = train(module, tmp_path / "run", **flags)
    assert min(logged(folder)["eval/episodic_return"].values()) >= 475


@quick
@pytest.mark.parametrize("script", ["ppo_continuous", "dqn_per_atari", "a3c_atari"])
def test_actions_begin_at_the_start_of_their_space_and_truncated_episodes_end(patched, script):
    names = dict(ppo_continuous="discrete", dqn_per_atari="vectors", a3c_atari="own_environment")
    module, executed = patched(script, names[script]), []
    envs = (vars(module).get("AtariEnvs") or module.Environments)(module.Args("MountainCar-v0"), 2)
    resets = (envs.reset(module.seed_everything(3), None) for _ in range(2))  # seeds spaces, too
    assert len({envs.envs.envs[0].unwrapped.observation_space.sample()[0] for _ in resets}) == 1
    envs.action_space = envs.envs.single_action_space = gym.spaces.Discrete(3, start=5)
    step, tripled = envs.envs.step, lambda obs, rewards, *others: (obs, 3 * rewards, *others)
    envs.envs.step = lambda actions: executed.append(actions) or tripled(*step(actions - 5))
    for _ in range(200):
        _, _, rewards, terminations, truncations, _ = envs.step(np.array([0, 1]))
    assert truncations.all() and not terminations.any()
    if script == "dqn_per_atari":  # the replay's actions begin at 0; rewards are not clipped
        assert envs.executed_actions.tolist() == [0, 1] and rewards.tolist() == [-3, -3]
    episodes, vector = [*envs.episodes.values()], envs.envs
    assert envs.reset(1, None) is not None and envs.envs is not vector
    assert executed[0].tolist() == [5, 6] and episodes == [(-600, 200)] * 2


@quick
def test_rpo_perturbs_the_mean_only_in_the_loss(patched):
    module = patched("ppo_continuous", "rpo")
    args, agent, obs = module.Args(rpo_alpha=0.3), module.Agent(3, 2), torch.randn(4000, 3)
    mean, policy, zeros = agent.actor(obs), agent.policy(obs), torch.zeros(4000)
    torch.testing.assert_close(policy.mean, mean)  # acting, evaluation
    actions = policy.sample()
    old_logprobs = policy.log_prob(actions).detach()
    minibatch = [obs, actions, old_logprobs, zeros, torch.randn(4000), zeros]
    torch.manual_seed(5)
    _, metrics = module.ppo_loss(agent, minibatch, args)
    torch.manual_seed(5)
    z = 0.3 * (2 * torch.rand(4000, 2) - 1)
    logprobs = Normal(mean + z, agent.log_std.exp()).log_prob(actions).sum(-1)
    torch.testing.assert_close(metrics["old_approx_kl"], (old_logprobs - logprobs).mean().detach())


@quick
def test_kl_penalty_rule_and_loss(patched):
    module = patched("ppo_continuous", "kl_penalty")
    for kl, beta in ((0.009, 2), (0.0101, 4), (0.0224, 4), (0.0226, 8), (0.015, 4)):
        assert module.adapt_kl_coef(torch.tensor(4.0), torch.tensor(kl), 0.015) == beta, kl
    agent, args = module.Agent(3, 2).double(), module.Args(norm_adv=False, vf_coef=0.0)
    agent.kl_coef.fill_(0.7)
    obs, actions, means = (torch.randn(50, n, dtype=torch.double) for n in (3, 2, 2))
    stds, advantages = 0.5 + torch.rand(50, 2, dtype=torch.double), torch.randn(50).double()
    old_logprobs, zeros = Normal(means, stds).log_prob(actions).sum(-1), torch.zeros(50)
    minibatch = [obs, actions, old_logprobs, means, stds, zeros, advantages, zeros]
    loss, _ = module.ppo_loss(agent, minibatch, args)
    mean, std = agent.actor(obs), agent.log_std.exp()
    ratio = (Normal(mean, std).log_prob(actions).sum(-1) - old_logprobs).exp()
    kl = (std / stds).log() + (stds**2 + (means - mean) ** 2) / (2 * std**2) - 0.5
    expected, weights = 0.7 * kl.sum(-1).mean() - (ratio * advantages).mean(), [agent.log_std]
    torch.testing.assert_close(loss, expected)
    weights += agent.actor.parameters()
    gradients = [torch.autograd.grad(x, weights, retain_graph=True) for x in (loss, expected)]
    torch.testing.assert_close(*gradients)


def test_kl_penalty_trains_resumes_evaluates_and_adapts_its_coefficient(patched, tmp_path):
    """The divergence is that of the policy that acted from the new one, over the batch."""
    module, beta, old_means = patched("ppo_continuous", "kl_penalty"), 3.0, []
    divergence = module.kl_divergence

    def recorded(old, new):
        old_means.append(old.mean)
        if old.mean.dim() == 3:  # of the batch, after its minibatches
            assert torch.isin(old_means[-2], old.mean).all() and not old.mean.equal(new.mean)
        return divergence(old, new)

    module.kl_divergence = recorded
    scalars = logged(assert_resumes(module, tmp_path, **SMALL, target_kl=1e-4, kl_coef=3.0))
    for kl, new in zip(scalars["losses/kl"].values(), scalars["losses/kl_coef"].values()):
        beta *= 2 if kl > 1.5e-4 else 0.5 if kl < 1e-4 / 1.5 else 1
        assert new == beta
    assert load(tmp_path / "whole" / "model.pt")["agent"]["kl_coef"] == beta != 1


def test_lstm_update_sees_what_acting_saw(patched, tmp_path):
    """Ratios are 1, values the rollout's: states, episode starts and sequences agree."""
    module, ratios, inner_starts = patched("ppo_continuous", "lstm"), [], 0
    ppo_loss, mlp, gae = module.ppo_loss, module.mlp, module.compute_gae

    def checked_gae(rewards, values, next_values, *ends):
        inside = ~(ends[0] | ends[1])[:-1]
        torch.testing.assert_close(next_values[:-1][inside], values[1:][inside])
        return gae(rewards, values, next_values, *ends)

    def recorded(agent, minibatch, args):
        nonlocal inner_starts
        obs, starts, states, _, _, values, *_ = minibatch
        policy, new_values = agent.unroll(obs, starts, states[:, 0])
        torch.testing.assert_close(new_values, values)
        actor = copy.deepcopy(agent)
        actor.state = states[:, 0].unbind(1)
        torch.testing.assert_close(actor.policy(obs[:, 0]).mean, policy.mean[:, 0])
        inner_starts += starts[:, 1:].sum()
        x = obs.clone().requires_grad_()
        _, last_values = agent.unroll(x, torch.zeros_like(starts), states[:, 0])
        (slopes,) = torch.autograd.grad(last_values[:, -1].sum(), x)
        assert slopes[:, 0].any()  # backpropagation through time
        loss, metrics = ppo_loss(agent, minibatch, args)
        ratios.append(metrics["approx_kl"])
        return loss, metrics

    module.ppo_loss, module.compute_gae = recorded, checked_gae
    module.mlp = lambda i, o, gain: mlp(i, o, 1.0)  # means depend on h
    flags = SMALL | PPO["lstm"] | dict(num_steps=224, sequence_length=32, learning_rate=0.0)
    train(module, tmp_path, **flags | dict(checkpoint_interval=1000, total_timesteps=896))
    assert inner_starts > 0 and max(abs(x) for x in ratios) < 1e-6
    env = module.make_env(module.Args("Pendulum-v1", num_observed=2), None)
    assert np.hypot(*env.reset()[0]) == pytest.approx(1)  # cosine and sine


@quick
def test_state_std_is_a_change_of_variables_and_scales_actions(patched):
    module = patched("ppo_continuous", "state_std")
    agent, obs = module.Agent(3, 2, -0.5).double(), torch.randn(40, 3, dtype=torch.double)
    mean, log_std = agent.actor(obs).chunk(2, -1)
    assert log_std.std(0).min() > 0 and abs(log_std.mean() + 0.5) < 0.05
    policy = agent.policy(obs)
    u = policy.sample()
    squashed = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
    torch.testing.assert_close(policy.log_prob(u), squashed.log_prob(u.tanh()).sum(-1))
    assert policy.log_prob(torch.full((40, 2), 50.0)).isfinite().all()
    samples = agent.policy(obs[:1].expand(100_000, 3))
    squashed = TransformedDistribution(Normal(mean[0], log_std[0].exp()), TanhTransform())
    entropy = -squashed.log_prob(squashed.sample((100_000,))).sum(-1).mean()
    assert abs(samples.entropy().mean() - entropy) < 0.02
    gradient = torch.autograd.grad(samples.entropy().mean(), agent.actor[-1].bias)[0]
    assert gradient[2:].min() > 0.1  # of log_std
    envs, executed = module.Environments(module.Args(env_id="Pendulum-v1"), 3), []
    envs.reset(1, None)
    envs.action_space, step = gym.spaces.Box(-1, 3, (1,)), envs.envs.step
    envs.envs.step = lambda actions: executed.append(actions) or step(actions)
    envs.step(np.array([[-9.0], [0.5], [9.0]], np.float32))
    np.testing.assert_allclose(executed[0], [[-1], [1 + 2 * np.tanh(0.5)], [3]], atol=1e-5)


def test_rnd_rewards_and_target(patched, tmp_path):
    """Two iterations: the target is fixed, the predictor learns; rewards and returns by loops."""
    module, calls, advantages = patched("ppo_continuous", "rnd"), [], []
    gae, error, ppo_loss = module.compute_gae, module.Agent.prediction_error, module.ppo_loss

    def recorded_error(agent, next_obs):
        result = error(agent, next_obs)
        if next_obs.dim() == 3:
            calls.append([copy.deepcopy(agent), next_obs, result])
        return result

    def recorded_gae(*inputs):
        assert inputs[-1] == 0.8
        if inputs[-2] == 0.9:  # the intrinsic one
            calls[-1].append(inputs)
        advantages.append(gae(*inputs).clone())
        return advantages[-1]

    def checked_loss(agent, minibatch, args):
        obs, _, _, _, given, _, _, int_returns = minibatch
        assert torch.isin(given, 3 * advantages[-2] + 0.5 * advantages[-1]).all()
        loss, metrics = ppo_loss(agent, minibatch, args)
        expected = 0.5 * (agent.int_critic(obs)[:, 0] - int_returns).square().mean()
        x, weights = minibatch[6].clip(-5, 5), [agent.int_critic[4].bias, agent.predictor[4].bias]
        expected = 0.7 * expected + (agent.predictor(x) - agent.target(x)).square().mean()
        gradients = [torch.autograd.grad(y, weights, retain_graph=True) for y in (loss, expected)]
        torch.testing.assert_close(*gradients)
        assert torch.isin(int_returns, advantages[-1] + calls[-1][3][1]).all()
        return loss, metrics

    module.Agent.prediction_error = recorded_error
    module.compute_gae, module.ppo_loss = recorded_gae, checked_loss
    flags = SMALL | dict(int_gamma=0.9, num_steps=300, total_timesteps=1200)
    flags |= dict(ext_coef=3.0, int_coef=0.5, vf_coef=0.7, gae_lambda=0.8)
    train(module, tmp_path / "run", **flags | dict(checkpoint_interval=1200))
    discounted, seen = np.zeros(2), []
    for agent, next_obs, result, (rewards, values, next_values, *ends, _, _) in calls:
        x = next_obs.clip(-5, 5)
        errors = (agent.predictor(x) - agent.target(x)).detach().square().mean(-1)
        torch.testing.assert_close(result, errors)
        for error in errors.numpy():
            discounted = 0.9 * discounted + error
            seen.append(discounted)
        torch.testing.assert_close(rewards, errors / float(np.std(seen)), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(next_values[:-1], values[1:])
        assert not any(mask.any() for mask in ends)
    (first, next_obs, _, (_, _, next_values, *_)), (second, *_) = calls
    torch.testing.assert_close(next_values[-1], first.int_critic(next_obs[-1])[:, 0].detach())
    assert_same(dict(first.target.state_dict()), dict(second.target.state_dict()))
    assert not torch.equal(first.predictor[0].weight, second.predictor[0].weight)
