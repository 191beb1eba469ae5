# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch==2.13.0", "gymnasium[box2d]==1.3.0", "mujoco==4.0.0", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0", "moviepy==2.2.1", "huggingface-hub==2.4.0",
# ]
# ///
r"""Proximal policy optimisation (PPO) for continuous control.

The policy plays `num_steps` steps in every environment, and GAE estimates the advantage of each action. Then, for
`update_epochs` epochs of minibatches, the policy climbs a surrogate of its return in which the probability ratio is
clipped to [1 - epsilon, 1 + epsilon]: a gain beyond is not counted. That takes away the incentive to move the ratio
further; it bounds nothing. The same minibatches fit the value function.

[PPO]   Schulman et al. 2017, "Proximal policy optimization algorithms", arXiv:1707.06347 (lines of Alg. 1: we count)
[GAE]   Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation",
        arXiv:1506.02438
[TIME]  Pardo et al. 2018, "Time limits in reinforcement learning", ICML, arXiv:1712.00378
[ADAM]  Kingma, Ba 2015, "Adam: a method for stochastic optimization", ICLR, arXiv:1412.6980
[37]    Huang et al. 2022, "The 37 implementation details of PPO", ICLR blog track

    symbol          variable           shape      meaning (T num_steps, N num_envs, B minibatch, D obs, A action)
    s_t             obs                (T, N, D)  observation, normalised
    s_{t+1}         successors         (T, N, D)  the observation that the action led to, before any reset
    a_t             actions            (T, N, A)  the Gaussian's sample, unclipped
    r_t             rewards            (T, N)     reward, scaled
    V(s_t)          values             (T, N)     value function
    V_t^{targ}      b_returns          (T * N,)   its target, [PPO] Eq. (9): advantage plus value, the lambda-return
    \delta_t        delta              (T, N)     TD residual, [PPO] Eq. (12)
    \hat A_t        advantages         (T, N)     advantage estimate, [GAE] Eq. (16), [PPO] Eq. (11)
    r_t(\theta)     ratio              (B,)       pi_theta(a_t|s_t) / pi_theta_old(a_t|s_t), [PPO] Sec. 3
    \epsilon        clip_coef                     where the ratio's gain ends: 1 - epsilon, 1 + epsilon, [PPO] Eq. (7)
    c_1             vf_coef / 2                   weight of the squared value error, [PPO] Eq. (9): the loss halves it
    c_2             ent_coef                      weight of the entropy, [PPO] Eq. (9)
    K               update_epochs                 epochs over a batch, [PPO] Alg. 1

Where this differs from common practice, and why:
  * A time limit is not a failure: at a truncation the value of the episode's last observation is bootstrapped ([TIME]).
    CleanRL takes truncations for terminations (`--no-bootstrap-truncation`), wrong at each 1000th step of HalfCheetah.
  * One set of running statistics serves all environments, is saved with the parameters and is frozen in evaluation.
  * Reward scaling: the discounted return begins at zero after each end of an episode, as in OpenAI's baselines.
    CleanRL uses gymnasium's wrapper, which carries it through a truncation and drops the past in a terminal step. The
    statistics begin with a count of 0, gymnasium's with 1e-4.
  * Logged losses and KL divergences are means over the minibatches of the last epoch, which is also what `--target-kl`
    looks at. CleanRL logs and compares the last minibatch, and so stops elsewhere.
  * At each checkpoint new episodes begin and random numbers restart, with seeds made of (seed, global_step), since
    gymnasium's common interface cannot save a simulator's state. So resuming is exact to the bit.

Steps are agent steps. The networks are small: a GPU would wait most of the time. Scores and speeds: README.md.

    python ppo_continuous.py --env-id HalfCheetah-v4              # writes runs/HalfCheetah-v4__ppo_continuous__1__...
    python ppo_continuous.py --resume runs/HalfCheetah-v4__...    # continues an interrupted run, exactly
    python ppo_continuous.py --evaluate runs/HalfCheetah-v4__.../model.pt --eval-episodes 20
"""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium.wrappers import FlattenObservation, RecordVideo
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclasses.dataclass
class Args:
    """Proximal policy optimisation for continuous control."""

    env_id: str = "HalfCheetah-v4"  # id of a gymnasium environment with a Box action space
    total_timesteps: int = 1_000_000  # agent steps of the run, all environments together (rounded up to whole batches)
    num_envs: int = 1  # N: environments played side by side
    num_steps: int = 2048  # T: agent steps in each environment between updates
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    bootstrap_truncation: bool = True  # whether to bootstrap an episode that its time limit ended
    update_epochs: int = 10  # K: epochs over a batch
    num_minibatches: int = 32  # minibatches of an epoch
    norm_adv: bool = True  # whether to normalise advantages within each minibatch
    clip_coef: float = 0.2  # epsilon: the ratio's gain ends at 1 - epsilon and 1 + epsilon
    clip_vloss: bool = True  # whether to clip the value loss too, with the same epsilon
    vf_coef: float = 0.5  # weight of the value loss, which holds a factor 1/2: the paper's c1 is half of this
    ent_coef: float = 0.0  # c2: weight of the entropy bonus
    target_kl: float | None = None  # an update ends after the epoch whose mean approximate KL exceeds this
    learning_rate: float = 3e-4  # step size of Adam
    anneal_lr: bool = True  # whether the learning rate falls linearly to zero over the run (extended, it rises again)
    max_grad_norm: float = 0.5  # norm to which gradients are clipped
    log_std_init: float = 0.0  # log of the first actions' standard deviation (-1 is much better on HalfCheetah)

    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of the parameters, the actions, the minibatches and the environments
    torch_deterministic: bool = True  # whether cuDNN must be deterministic (no effect here: no convolutions)
    cuda: bool = False  # whether to compute on the GPU, if there is one
    torch_threads: int = 1  # threads of torch on the CPU; more than one loses on networks of this size
    compile: bool = False  # whether to compile the update (takes seconds, needs a C++ compiler on the CPU)
    track: bool = False  # whether to track the run with Weights & Biases
    wandb_project_name: str = "deep-rl-reference"  # project of the tracked run
    wandb_entity: str | None = None  # entity (user or team) of the tracked run
    capture_video: bool = False  # whether to record the first episode after each checkpoint and of the evaluation
    save_model: bool = True  # whether to save the trained model as model.pt in the run folder
    upload_model: bool = False  # whether to upload the model to the Hugging Face hub
    hf_entity: str | None = None  # user or organisation on the Hugging Face hub (default: yours)
    checkpoint_interval: int = 100_000  # agent steps of all environments between checkpoints, where new episodes begin
    run_folder: str | None = None  # start the run in this folder, or continue the one that it holds
    resume: str | None = None  # continue the run in this folder from its newest checkpoint, with its arguments
    evaluate: str | None = None  # do not train: play episodes with this model.pt, checkpoint or run folder
    eval_episodes: int = 10  # episodes of the evaluation, played with the mean action

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "seed" else 1
            if type(value) is int and value < least:
                sys.exit(f"error: --{name.replace('_', '-')} must be at least {least}")
        if not 0 < self.learning_rate < 1e38:
            sys.exit("error: --learning-rate must be positive, and small enough for float32")
        batch_size = self.num_envs * self.num_steps
        if batch_size % self.num_minibatches or (self.norm_adv and batch_size == self.num_minibatches):
            sys.exit(f"error: {batch_size} steps are not {self.num_minibatches} equal minibatches of 2 or more steps")


def make_env(env_id: str, render: bool = False) -> gym.Env:
    """Make one environment with flat observations (D,) and actions (A,); `render` is for recording it."""
    gym.logger.min_level = gym.logger.ERROR  # nothing about newer versions of an environment
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo reads this once, when it is imported
    import mujoco

    # Trap: without this MuJoCo 4 leaves MUJOCO_LOG.TXT behind, and its compiler remarks on HalfCheetah's model
    mujoco.set_mju_user_warning(lambda message: "deprecated" in message or print(f"note: {message}", file=sys.stderr))
    env = gym.make(env_id, render_mode="rgb_array" if render else None, disable_env_checker=True)
    if not isinstance(env.action_space, gym.spaces.Box) or len(env.action_space.shape) != 1:
        sys.exit(f"error: {env_id} has the actions {env.action_space}; this script needs a Box of one dimension")
    return FlattenObservation(env)


class RunningMeanStd:
    """Mean and variance of all rows (of `shape`, () for scalars) seen so far, in float64, by Welford's method."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean = np.zeros(shape)
        self.m2 = np.zeros(shape)  # sum of squared deviations from the mean

    def update(self, rows: np.ndarray) -> None:
        """Count rows (N, *shape). Exact: the sum of squares grows by (x - mean before) (x - mean after)."""
        for row in rows:
            self.count += 1
            deviation = row - self.mean
            self.mean = self.mean + deviation / self.count
            self.m2 = self.m2 + deviation * (row - self.mean)

    @property
    def std(self) -> np.ndarray:
        """The standard deviation, never zero."""
        return np.sqrt(self.m2 / max(self.count, 1) + 1e-8)

    def state_dict(self) -> dict:
        return {"count": self.count, "mean": torch.tensor(self.mean), "m2": torch.tensor(self.m2)}

    def load_state_dict(self, state: dict) -> None:
        self.count, self.mean, self.m2 = state["count"], state["mean"].numpy(), state["m2"].numpy()


class Environments:
    """N environments with normalised observations and scaled rewards, which count whole episodes.

    `frozen` stops the statistics, for evaluation. `finished` lists the episodes that the last step ended, (environment,
    return, length): the return neither scaled nor discounted, the length in agent steps.
    """

    def __init__(self, args: Args, num_envs: int, run_folder: Path, frozen: bool = False) -> None:
        self.args, self.num_envs, self.run_folder, self.frozen = args, num_envs, run_folder, frozen
        self.envs = [make_env(args.env_id)]
        self.low, self.high = self.envs[0].action_space.low, self.envs[0].action_space.high
        self.obs_dim, self.action_dim = len(self.envs[0].observation_space.low), len(self.low)
        self.obs_stats, self.return_stats = RunningMeanStd((self.obs_dim,)), RunningMeanStd(())
        self.recent_scores = deque(maxlen=100)

    def reset(self, *key: int) -> np.ndarray:
        """Begin new episodes, seeded by the run's seed and `key`. Returns the observations (N, D)."""
        self.close()
        # Trap: a reset is not enough. It leaves traces in some environments (Box2D's walker keeps its world)
        self.envs = [make_env(self.args.env_id, self.args.capture_video and i == 0) for i in range(self.num_envs)]
        if self.args.capture_video:
            name, videos = f"{'evaluation' if self.frozen else 'training'}-{key[0]}", str(self.run_folder / "videos")
            self.envs[0] = RecordVideo(self.envs[0], videos, lambda episode: episode == 0, name_prefix=name)
        seeds = np.random.SeedSequence([self.args.seed, *key]).generate_state(self.num_envs)
        raw_obs = np.stack([env.reset(seed=int(seed))[0] for env, seed in zip(self.envs, seeds)])
        self.discounted_returns, self.scores, self.lengths = np.zeros((3, self.num_envs))
        return self.normalise(raw_obs)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Play one step with actions (N, A), clipped to the box.

        Returns the observations to act on next (N, D), those that the actions led to (N, D; another one where an
        episode ended), the scaled rewards, the terminations and the truncations (N,).
        """
        steps = [env.step(action)[:4] for env, action in zip(self.envs, actions.clip(self.low, self.high))]
        raw_obs, raw_rewards, terminations, truncations = map(np.array, zip(*steps))
        successors, rewards = self.normalise(raw_obs), self.scale(raw_rewards)
        next_obs, self.finished = successors.copy(), []
        self.scores += raw_rewards
        for i in range(self.num_envs):
            self.lengths[i] += 1
            if terminations[i] or truncations[i]:
                self.finished.append((i, float(self.scores[i]), int(self.lengths[i])))
                self.recent_scores.append(float(self.scores[i]))
                next_obs[i] = self.normalise(self.envs[i].reset()[0][None])
                self.discounted_returns[i] = self.scores[i] = self.lengths[i] = 0
        return next_obs, successors, rewards, terminations, truncations

    def normalise(self, raw_obs: np.ndarray) -> np.ndarray:
        """Count observations (M, D); (x - mean) / std, clipped, float32 ([37], continuous details 6 and 7)."""
        if not self.frozen:
            self.obs_stats.update(raw_obs)
        return ((raw_obs - self.obs_stats.mean) / self.obs_stats.std).clip(-10, 10).astype(np.float32)

    def scale(self, raw_rewards: np.ndarray) -> np.ndarray:
        """Rewards (N,) by the std of the running discounted return, clipped ([37], continuous details 8 and 9)."""
        self.discounted_returns = self.args.gamma * self.discounted_returns + raw_rewards
        if not self.frozen:
            self.return_stats.update(self.discounted_returns)
        return (raw_rewards / self.return_stats.std).clip(-10, 10)  # Detail: the mean is not subtracted

    def close(self) -> None:
        for env in self.envs:
            env.close()


def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights with gain `std`, zero bias ([37], core detail 2)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function: two separate tanh networks, and a log-std that does not depend on the observation."""

    def __init__(self, obs_dim: int, action_dim: int, log_std_init: float = 0.0) -> None:
        super().__init__()

        def network(outputs: int, std: float) -> nn.Sequential:
            hidden = layer_init(nn.Linear(obs_dim, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()
            return nn.Sequential(*hidden, layer_init(nn.Linear(64, outputs), std))

        self.actor = network(action_dim, std=0.01)  # Detail: the first mean actions are close to zero
        self.critic = network(1, std=1.0)
        self.log_std = nn.Parameter(torch.full((action_dim,), float(log_std_init)))

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the loss needs: log pi(a|s) (B,), the entropy () (the same for every state), and V(s) (B,).

        log N(a; mu, sigma) = -((a - mu) / sigma)^2 / 2 - log sigma - log(2 pi) / 2, summed over the components of the
        action. Written out because torch.distributions costs more than the network.
        """
        z = (actions - self.actor(obs)) * torch.exp(-self.log_std)  # (B, A)
        log_normaliser = self.log_std.sum() + 0.5 * math.log(2 * math.pi) * len(self.log_std)
        logprobs = -0.5 * z.square().sum(-1) - log_normaliser  # (B,)
        entropy = log_normaliser + 0.5 * len(self.log_std)
        return logprobs, entropy, self.critic(obs).squeeze(-1)


def compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda) -> np.ndarray:
    r"""Generalised advantage estimates of arrays (T, N), or (T,) of one environment.

    \hat A_t = \sum_l (\gamma\lambda)^l \delta_{t+l}, summed to the end of the episode or of the batch, [GAE] Eq. (16)
    \delta_t = r_t + \gamma V(s_{t+1}) - V(s_t), where V is 0 after a termination, [PPO] Eq. (12)

    `next_values` is V of the observation that the action led to, not of the next row: after a truncation the next row
    belongs to another episode. A termination cuts the bootstrap and the sum, a truncation the sum only ([TIME]).
    """
    advantages = np.zeros_like(rewards)
    last_gae = np.zeros_like(rewards[0])
    delta = rewards + gamma * next_values * ~terminations - values
    discount = gamma * gae_lambda * ~(terminations | truncations)
    for t in reversed(range(len(rewards))):
        advantages[t] = last_gae = delta[t] + discount[t] * last_gae
    return advantages


def ppo_loss(logprobs, entropy, values, old_logprobs, old_values, advantages, returns, args) -> tuple:
    """The loss to be minimised (), minus [PPO] Eq. (9), and its metrics {name: ()}. Tensors (B,), the entropy ()."""
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    # [PPO] Eq. (7): a lower bound; a gain beyond the clip earns nothing more, a loss counts in full
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages).mean()
    value_loss = (values - returns).square()
    if args.clip_vloss:  # Detail: OpenAI's baselines, not the paper; not found to help ([37], core detail 9)
        clipped_values = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.maximum(value_loss, (clipped_values - returns).square())
    value_loss = 0.5 * value_loss.mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        # Two estimates of KL(old || new), http://joschu.net/blog/kl-approx.html; the second has less variance
        "old_approx_kl": -logratio.mean(),
        "approx_kl": (ratio - 1 - logratio).mean(),
        "clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, metrics


def minibatch_step(agent, args, theta, exp_avg, exp_avg_sq, adam_steps, learning_rate, minibatch) -> dict:
    r"""The gradient of the loss on one minibatch, and one step of Adam with it, in place ([ADAM] Alg. 1).

    m = \beta_1 m + (1 - \beta_1) g,   v = \beta_2 v + (1 - \beta_2) g^2
    \theta = \theta - \alpha \hat m / (\sqrt{\hat v} + \epsilon),   \hat m = m / (1 - \beta_1^t),  \hat v likewise

    `theta` holds all P parameters; theta, m `exp_avg` and v `exp_avg_sq` are vectors (P,), t `adam_steps` an int64 (),
    `learning_rate` a float64 (), and `minibatch` is (obs, actions, logprobs, values, advantages, returns). Of `agent`
    only the structure is used. So this is a function of tensors alone, which can be traced and compiled.
    """
    obs, actions, *rest = minibatch
    beta1, beta2, epsilon = 0.9, 0.999, 1e-5  # Detail: epsilon 1e-5, not 1e-8 ([37], core detail 3)

    def loss_of(theta: torch.Tensor) -> tuple:
        views = theta.split([parameter.numel() for parameter in agent.parameters()])
        parameters = {name: view.view(old.shape) for (name, old), view in zip(agent.named_parameters(), views)}
        return ppo_loss(*torch.func.functional_call(agent, parameters, (obs, actions)), *rest, args)

    grad, metrics = torch.func.grad(loss_of, has_aux=True)(theta)
    grad_norm = grad.norm()
    grad = grad * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    t = adam_steps.add_(1).double()  # Trap: torch.compile loses what is written into a float64 () on the CPU
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    step_size = learning_rate / (1 - beta1**t)
    theta.sub_(step_size * exp_avg / ((exp_avg_sq / (1 - beta2**t)).sqrt() + epsilon))
    return metrics | {"grad_norm": grad_norm}


def train(args: Args, run_folder: Path, checkpoint: dict | None) -> None:
    """Train from the beginning or from a checkpoint. Raises FloatingPointError where a gradient is not finite."""
    T, N, batch_size = args.num_steps, args.num_envs, args.num_steps * args.num_envs
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)  # the parameters
    envs = Environments(args, N, run_folder)
    agent = Agent(envs.obs_dim, envs.action_dim, args.log_std_init).to(device)
    theta = nn.utils.parameters_to_vector(agent.parameters()).detach().clone()
    nn.utils.vector_to_parameters(theta, agent.parameters())  # Trap: views of theta; .to() would part them from it
    adam = nn.Module()  # Adam's state, in a module for its state_dict
    adam.exp_avg, adam.exp_avg_sq = nn.Buffer(torch.zeros_like(theta)), nn.Buffer(torch.zeros_like(theta))
    adam.steps = nn.Buffer(torch.zeros((), dtype=torch.int64, device=device))

    # All that the rest of a run depends on
    parts = {"agent": agent, "adam": adam, "obs_stats": envs.obs_stats, "return_stats": envs.return_stats}
    global_step = start = restore(parts, checkpoint) if checkpoint else 0
    last_step = math.ceil(args.total_timesteps / batch_size) * batch_size
    run = Run(args, run_folder, checkpoint, parts, last_step)

    obs, successors = np.zeros((2, T, N, envs.obs_dim), np.float32)
    actions = np.zeros((T, N, envs.action_dim), np.float32)
    rewards = np.zeros((T, N), np.float32)
    terminations, truncations = np.zeros((2, T, N), bool)
    step = accelerate(minibatch_step, agent, args)

    while global_step < last_step:
        if global_step == start or global_step % args.checkpoint_interval < batch_size:
            run.save_checkpoint(global_step)
            next_obs = envs.reset(global_step)  # new episodes, interrupted here or not: resuming is exact
            rng = np.random.default_rng([args.seed, global_step])  # and new random numbers
        learning_rate = args.learning_rate * (1 - global_step / last_step if args.anneal_lr else 1)

        # Collect T steps in each environment: [PPO] Alg. 1, line 3. The parameters stay; the statistics move
        mean_action = numpy_actor(agent.actor)
        std = agent.log_std.detach().exp().cpu().numpy()
        noise = std * rng.standard_normal((T, N, envs.action_dim), np.float32)
        for t in range(T):
            obs[t] = next_obs
            actions[t] = mean_action(next_obs) + noise[t]  # Detail: the loss sees the unclipped action
            next_obs, successors[t], rewards[t], terminations[t], truncations[t] = envs.step(actions[t])
            global_step += N
            for _, score, length in envs.finished:
                run.log(global_step, {"charts/episodic_return": score, "charts/episodic_length": length})

        # Estimate the advantages: [PPO] Alg. 1, line 4
        b_obs, b_actions = (torch.from_numpy(rows).view(T * N, -1).to(device) for rows in (obs, actions))
        with torch.no_grad():
            b_logprobs, _, b_values = agent(b_obs, b_actions)
            next_values = agent.critic(torch.from_numpy(successors).to(device)).squeeze(-1).cpu().numpy()  # (T, N)
        values = b_values.view(T, N).cpu().numpy()
        ends = terminations if args.bootstrap_truncation else terminations | truncations
        advantages = compute_gae(rewards, values, next_values, ends, truncations, args.gamma, args.gae_lambda)
        b_advantages = torch.from_numpy(advantages).view(T * N).to(device)
        b_returns = b_advantages + b_values

        # K epochs of minibatches: [PPO] Alg. 1, line 6
        alpha = torch.tensor(learning_rate, dtype=torch.float64, device=device)
        batch = (b_obs, b_actions, b_logprobs, b_values, b_advantages, b_returns)
        for _ in range(args.update_epochs):
            order = torch.from_numpy(rng.permutation(T * N)).to(device)
            minibatches = zip(*(rows[order].chunk(args.num_minibatches) for rows in batch))
            epoch = [step(theta, adam.exp_avg, adam.exp_avg_sq, adam.steps, alpha, each) for each in minibatches]
            metrics = {name: torch.stack([each[name] for each in epoch]).mean() for name in epoch[0]}
            if args.target_kl is not None and metrics["approx_kl"] > args.target_kl:
                break

        if not metrics["grad_norm"].isfinite():
            raise FloatingPointError(f"the gradient is not finite at step {global_step:,}")
        run.log(global_step, {f"losses/{name}": metric for name, metric in metrics.items()})
        explained_variance = 1 - np.var(advantages) / max(np.var(advantages + values), 1e-12)
        run.log(global_step, {"losses/explained_variance": explained_variance, "charts/learning_rate": learning_rate})
        run.progress(global_step, envs.recent_scores)

    envs.close()
    run.finish(global_step, "agent", "obs_stats")


# ----- The run: evaluation, checkpoints, logs and sharing. Nothing below this line belongs to the algorithm. -----

SCRIPT = "ppo_continuous"
PACKAGES = ("torch", "gymnasium", "mujoco", "numpy")  # whose versions go into result.json


def evaluate(args: Args, model: dict, run_folder: Path) -> dict[str, list[float]]:
    """Play `args.eval_episodes` whole episodes with the mean action and frozen statistics, and print the score.

    `model` is a checkpoint or what model.pt holds. Returns the episodes' returns, undiscounted and
    unscaled. The episodes depend on the seed and on the model's step; none of them is one of training's.
    """
    envs = Environments(args, args.eval_episodes, run_folder, frozen=True)
    agent = Agent(envs.obs_dim, envs.action_dim)
    restore({"agent": agent, "obs_stats": envs.obs_stats}, model)
    mean_action, scores = numpy_actor(agent.actor), {}
    obs = envs.reset(model["global_step"], 1)
    while len(scores) < args.eval_episodes:
        obs, *_ = envs.step(mean_action(obs))
        scores = {i: score for i, score, _ in envs.finished} | scores  # the first episode of each environment
    envs.close()
    scores = [scores[i] for i in range(args.eval_episodes)]
    print(f"evaluation: {np.mean(scores):.2f} +- {np.std(scores):.2f}, {len(scores)} episodes of the mean action")
    return {"episodic_return": scores}


def write_file(path: Path, content: dict | str) -> None:
    """Write a checkpoint or a text so that `path` never holds a part of it, whenever the process is killed."""
    temporary = path.with_suffix(".tmp")
    # Trap: torch.save, given an open file instead of a path, turns a Ctrl-C into an error of its own
    temporary.write_text(content, "utf-8") if isinstance(content, str) else torch.save(content, temporary)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_checkpoint(path: Path) -> dict:
    """Load a checkpoint or a model, or the newest sound checkpoint of a run folder. Runs no pickled code."""
    for file in sorted(path.glob("checkpoint_*.pt"), reverse=True) if path.is_dir() else [path]:
        with contextlib.suppress(Exception):  # the libraries raise a dozen kinds
            with zipfile.ZipFile(file) as archive:
                # Trap: torch.load compares no checksums, and reads nothing where an entry is marked as a folder
                sound = not archive.testzip() and not any(entry.external_attr for entry in archive.infolist())
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            if sound and checkpoint["script"] == SCRIPT and Args(**checkpoint["args"]):
                return checkpoint
        print(f"note: {file} is damaged or no checkpoint of this {SCRIPT}.py", file=sys.stderr)
    sys.exit(f"error: no sound checkpoint in {path}")


def restore(parts: dict, checkpoint: dict) -> int:
    """Set all parts to their states in the checkpoint, in place. Returns its global step."""
    try:
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        return checkpoint["global_step"]
    except Exception as error:  # torch and we raise half a dozen kinds
        sys.exit(f"error: the checkpoint does not fit: {' '.join(str(error).split())[:200]}")


class Run:
    """What a run writes: TensorBoard and W&B, checkpoints, a line of progress, the result."""

    def __init__(self, args: Args, folder: Path, checkpoint: dict | None, parts: dict, last_step: int) -> None:
        self.args, self.folder, self.parts, before = args, folder, parts, checkpoint or {}
        self.first_step, self.started = before.get("global_step", 0), time.time() - before.get("seconds", 0)
        if args.upload_model:
            from huggingface_hub import HfApi

            self.hub = HfApi()
            self.hub.whoami()  # a missing login is an error now, not after the training
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ImportError, OSError):  # systems without such locks
            import fcntl

            try:
                fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
            except BlockingIOError:
                sys.exit(f"error: another process is at work in {folder}")
        print(f"run folder: {folder}", flush=True)
        if args.track:
            import wandb

            project, entity = args.wandb_project_name, args.wandb_entity
            run_id = re.sub(r"\W+", "-", str(folder.resolve()))[-100:]
            self.wandb = wandb
            os.environ.setdefault("WANDB_SILENT", "true")
            # A resumed run sends the points since its checkpoint again, with the same values
            wandb.init(project=project, entity=entity, id=run_id, resume="allow", sync_tensorboard=True)
            wandb.config.update(vars(args), allow_val_change=True)
        # TensorBoard hides older points beyond the checkpoint's step, which will be logged again
        self.writer = SummaryWriter(str(folder), purge_step=self.first_step + bool(checkpoint), flush_secs=10)
        write_file(folder / "args.json", json.dumps(vars(args), indent=2))
        interval = 0.1 if sys.stderr.isatty() else 10
        self.bar = tqdm(total=last_step, initial=self.first_step, unit=" steps", mininterval=interval)

    def log(self, global_step: int, scalars: dict) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, global_step)

    def progress(self, global_step: int, recent_scores: deque) -> None:
        """Show how far the run is and the mean return of the last 100 episodes; log the speed."""
        self.log(global_step, {"charts/SPS": global_step / (time.time() - self.started)})
        if recent_scores:
            self.bar.set_postfix_str(f"return {np.mean(recent_scores):.1f}", refresh=False)
        self.bar.update(global_step - self.bar.n)

    def pack(self, global_step: int, *names: str) -> dict:
        """What a checkpoint holds, or only the parts that are named. `seconds` include those before a resume."""
        seconds = time.time() - self.started
        header = {"script": SCRIPT, "args": vars(self.args), "global_step": global_step, "seconds": seconds}
        return header | {name: self.parts[name].state_dict() for name in names or self.parts}

    def save_checkpoint(self, global_step: int) -> None:
        """Write checkpoint_{global_step}.pt and keep the one before it."""
        self.writer.flush()
        write_file(self.folder / f"checkpoint_{global_step:012}.pt", self.pack(global_step))
        for path in sorted(self.folder.glob("checkpoint_*.pt"))[:-2]:
            path.unlink()

    def finish(self, global_step: int, *names: str) -> None:
        """Evaluate; write the last checkpoint, model.pt with the parts that are named, and result.json."""
        self.bar.close()
        args, model = self.args, self.pack(global_step, *names)
        scores = evaluate(args, model, self.folder)
        means = {f"eval/{name}": float(np.mean(values)) for name, values in scores.items()}
        if global_step > self.first_step:  # Trap: a run that is continued after its end has logged this already
            self.log(global_step, means)
            self.save_checkpoint(global_step)
        self.writer.close()
        if args.save_model or args.upload_model:
            write_file(self.folder / "model.pt", model)
        result = {name: model[name] for name in ("script", "args", "global_step", "seconds")} | means | scores
        result["versions"] = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
        gpu = f", {torch.cuda.get_device_name()}" if args.cuda and torch.cuda.is_available() else ""
        result["machine"] = f"{os.cpu_count()} cores, {platform.platform()}{gpu}"
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or no repository
            git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
            result["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        write_file(self.folder / "result.json", json.dumps(result, indent=2))
        if args.track:
            self.wandb.log({path.stem: self.wandb.Video(str(path)) for path in self.folder.glob("videos/*.mp4")})
            self.wandb.finish()
        if args.upload_model:
            card = f"---\ntags: [reinforcement-learning, {args.env_id}, {SCRIPT}]\n---\n# {args.env_id}: {means}\n"
            card += f"Trained by `{shlex.join(['python', *sys.argv])}`, played by `{SCRIPT}.py --evaluate model.pt`.\n"
            write_file(self.folder / "README.md", card)
            name = re.sub(r"\W+", "-", f"{args.env_id}-{args.exp_name}-{args.seed}")
            repo = self.hub.create_repo(f"{args.hf_entity}/{name}" if args.hf_entity else name, exist_ok=True)
            patterns = ["README.md", "model.pt", "args.json", "result.json", "videos/*"]
            self.hub.upload_folder(repo_id=repo.repo_id, folder_path=self.folder, allow_patterns=patterns)


def numpy_actor(actor: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """The network as a numpy function, obs (N, D) -> mean action (N, A); to be made again after each update.

    One observation at a time, torch's overhead is several times the arithmetic. A network that is no Sequential of
    Linear and Tanh is asked through torch.
    """
    if type(actor) is not nn.Sequential or {type(layer) for layer in actor} - {nn.Linear, nn.Tanh}:
        device = next(actor.parameters()).device
        return lambda obs: actor(torch.from_numpy(obs).to(device)).detach().cpu().numpy()
    # [weight, bias] of a Linear, [] of a Tanh
    layers = [[parameter.detach().cpu().numpy() for parameter in layer.parameters()] for layer in actor]

    def mean_action(obs: np.ndarray) -> np.ndarray:
        for layer in layers:
            obs = obs.dot(layer[0].T) + layer[1] if layer else np.tanh(obs)
        return obs

    return mean_action


def accelerate(minibatch_step: Callable, agent: Agent, args: Args) -> Callable:
    """minibatch_step as a straight line of tensor operations, traced at the first call, or compiled.

    For networks this small autograd's bookkeeping takes longer than the arithmetic. A trace repeats the operations in
    their order, so the results are the same to the bit; shapes, coefficients and flags are fixed in it.
    """
    step, fast = functools.partial(minibatch_step, copy.deepcopy(agent).to("meta"), args), None
    if args.compile:
        torch.compiler.reset()  # Trap: without guards, the code of an earlier training in this process would be run
        # No guards: they would look in every minibatch whether shapes and flags are still the same, which takes time
        options = {"guard_filter_fn": lambda guards: [False] * len(guards), "cpp_wrapper": not agent.log_std.is_cuda}
        return torch.compile(step, fullgraph=True, options=options)

    def call(*tensors):
        nonlocal fast
        if fast is None:
            fast = make_fx(step)(*copy.deepcopy(tensors))  # Trap: tracing runs the step, in place
            if not agent.log_std.is_cuda:  # on a GPU TorchScript would fuse operations, which rounds otherwise
                with warnings.catch_warnings(action="ignore"):  # deprecated in favour of torch.compile
                    fast = torch.jit.trace(fast, copy.deepcopy(tensors), check_trace=False, strict=False)
        return fast(*tensors)

    return call


def parse_args() -> tuple[Args, Path, dict | None]:
    """The arguments, the run folder, and the checkpoint to evaluate or to continue from, if there is one."""
    names = ("run_folder", "resume", "evaluate")
    Given = dataclasses.make_dataclass("Given", [(name, str | None, None) for name in names])
    given, _ = tyro.cli(Given, return_unknown_args=True, add_help=False)
    if (given.evaluate, given.resume, given.run_folder).count(None) < 2:
        sys.exit("error: --evaluate, --resume and --run-folder cannot be combined")
    path = Path(given.evaluate or given.resume or given.run_folder or "runs")
    if not given.evaluate and not given.resume and not (given.run_folder and any(path.glob("checkpoint_*.pt"))):
        args = tyro.cli(Args)
        name = re.sub(r"[^\w.-]+", "-", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
        return args, path if given.run_folder else path / name, None
    checkpoint = load_checkpoint(path)
    saved = Args(**checkpoint["args"])
    # What is not given is as it was, but for the module in an id like "module:Name-v0", which gym.make would import
    args = tyro.cli(Args, default=dataclasses.replace(saved, env_id=saved.env_id.split(":")[-1]))
    if args.env_id != saved.env_id or (args.seed != saved.seed and not args.evaluate):
        sys.exit(f"error: {path} is of --env-id {saved.env_id} --seed {saved.seed}, not {args.env_id} and {args.seed}")
    return args, path if path.is_dir() else path.parent, checkpoint


def main() -> None:
    """Train, continue or evaluate, as the arguments say."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: shells start background jobs with it ignored
        signal.signal(signum, signal.default_int_handler)
    args, folder, checkpoint = parse_args()
    if args.cuda and not torch.cuda.is_available():
        print("note: torch finds no CUDA device; the CPU is used", file=sys.stderr)
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    try:
        evaluate(args, checkpoint, folder) if args.evaluate else train(args, folder, checkpoint)
    except KeyboardInterrupt:
        command = shlex.join(["python", sys.argv[0], "--resume", str(folder)])
        hint = f"; continue with: {command}" if not args.evaluate and any(folder.glob("checkpoint_*.pt")) else ""
        print(f"\ninterrupted{hint}", file=sys.stderr)
        sys.exit(130)
    except (gym.error.Error, OSError, FloatingPointError) as error:
        sys.exit(f"\nerror: {error}")


if __name__ == "__main__":
    main()
