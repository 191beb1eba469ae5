# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch==2.13.0", "gymnasium[box2d]==1.3.0", "mujoco==4.0.0", "numpy==2.4.6", "tyro==1.0.17",
#     "tqdm", "tensorboard==2.21.0", "wandb==0.31.0", "moviepy==2.2.1", "huggingface-hub==2.4.0",
# ]
# ///
r"""Proximal policy optimization (PPO) for continuous control.

Each iteration collects a batch of steps, estimates advantages with GAE, and takes several epochs
of minibatch steps on a surrogate objective, which does not gain when the probability ratio leaves
[1 - epsilon, 1 + epsilon].

[PPO] Schulman et al. 2017, arXiv:1707.06347
[GAE] Schulman et al. 2016, arXiv:1506.02438
[TIME] Pardo et al. 2018, arXiv:1712.00378
[37] Huang et al. 2022, "The 37 implementation details of PPO"

  symbol       variable    shape      meaning (T num_steps, N num_envs, B minibatch)
  s_t          obs         (T, N, D)  normalized observation
  s_{t+1}      next_obs    (T, N, D)  next observation, final at an episode's end
  a_t          actions     (T, N, A)  action, before clipping
  r_t          rewards     (T, N)     scaled reward
  V(s_t)       values      (T, N)     estimated value
  \hat A_t     advantages  (T, N)     estimated advantage
  V_t^{targ}   returns     (T, N)     value target, [PPO] Eq. (9)
  r_t(\theta)  ratio       (B,)       pi(a_t|s_t) / pi_old(a_t|s_t), [PPO] Sec. 3
  \epsilon     clip_coef              clip range, [PPO] Eq. (7)
  c_1, c_2     vf_coef / 2, ent_coef  loss weights, [PPO] Eq. (9)

Differences from some implementations (reasons: docs/ppo_continuous.md):
  * Truncated episodes bootstrap from the value of their final observation [TIME].
  * All environments share normalization statistics, saved with the model, frozen in evaluation.
  * The return that scales rewards is reset at every episode end.
  * Checkpoints reset the environments and reseed all generators: resuming is bit-exact.

  python ppo_continuous.py --env-id HalfCheetah-v4  # writes runs/...
  python ppo_continuous.py --resume runs/...  # resumes a run
  python ppo_continuous.py --evaluate runs/...  # evaluates a policy
"""

import contextlib
import copy
import json
import math
import os
import random
import re
import sys
import time
import warnings
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """PPO for continuous control."""

    env_id: str = "HalfCheetah-v4"  # needs a flat Box action space
    total_timesteps: int = 1_000_000  # rounded up to whole batches
    num_envs: int = 1  # N: parallel environments
    num_steps: int = 2048  # T: steps per environment and batch
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of GAE
    update_epochs: int = 10  # K: epochs per batch
    num_minibatches: int = 32  # per epoch
    norm_adv: bool = True  # normalize advantages
    clip_coef: float = 0.2  # epsilon: clip range
    clip_vloss: bool = True  # clip the value loss as well
    vf_coef: float = 0.5  # weight of the value loss
    ent_coef: float = 0.0  # c2: weight of the entropy bonus
    target_kl: float | None = None  # stop updating above this KL
    learning_rate: float = 3e-4
    anneal_lr: bool = True  # linearly to zero
    max_grad_norm: float = 0.5  # gradient clipping norm
    log_std_init: float = 0.0  # initial log std

    exp_name: str = Path(__file__).stem
    seed: int = 1  # of all generators
    torch_deterministic: bool = True  # in cuDNN
    cuda: bool = False  # use the GPU (slower)
    torch_threads: int = 1  # PyTorch's CPU threads
    async_envs: bool = False  # a process per environment
    compile: bool = False  # faster; needs a C++ compiler
    track: bool = False  # log to Weights & Biases
    wandb_project_name: str = "deep-rl-reference"
    wandb_entity: str | None = None
    capture_video: bool = False  # an episode after each checkpoint
    save_model: bool = True
    upload_model: bool = False  # to the Hugging Face Hub
    hf_entity: str | None = None  # Hub user or organization
    checkpoint_interval: int = 100_000  # steps
    run_folder: str | None = None  # start or resume in this folder
    resume: str | None = None  # run folder to resume
    evaluate: str | None = None  # model or run folder to evaluate
    eval_episodes: int = 10


warnings.filterwarnings("ignore", ".*out of date")  # -v4


def make_env(args: Args, video_folder: Path | None) -> gym.Env:
    """Make an environment with flat observations."""
    if args.capture_video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if "mujoco" in str(gym.registry.get(args.env_id)):
        import mujoco  # Trap: its warnings go to a file

        mujoco.set_mju_user_warning(lambda text: "deprecated" in text or print("note:", text))
    env = gym.make(args.env_id, **({"render_mode": "rgb_array"} if video_folder else {}))
    if video_folder:
        env = gym.wrappers.RecordVideo(env, str(video_folder), lambda episode: episode == 0)
    env = gym.wrappers.FlattenObservation(env)
    for space in (env.action_space, env.unwrapped.action_space, env.unwrapped.observation_space):
        space.seed(np.random.randint(2**31))  # some sample from them
    return env


def make_envs(args: Args, num_envs: int, video_folder: Path | None) -> VectorEnv:
    """Make parallel environments. Replace this to train on something else.

    Requires NumPy arrays, flat Box spaces and SAME_STEP autoreset: at an episode's end, `step`
    returns the next one's first observation; info["final_obs"] holds the last.
    """
    env_fns = [lambda: make_env(args, None)] * num_envs
    env_fns[0] = lambda: make_env(args, video_folder)
    vector = AsyncVectorEnv if args.async_envs else SyncVectorEnv
    return vector(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)


class RunningMeanStd:
    """Running mean and standard deviation, in float64."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.count, self.mean, self.m2 = 0, np.zeros(shape), np.zeros(shape)

    def update(self, batch: np.ndarray) -> None:
        """Add a batch (M, *shape). m2 grows by the sum of (x - old mean) (x - new mean)."""
        self.count += len(batch)
        deviation = batch - self.mean
        self.mean = self.mean + deviation.sum(0) / self.count
        self.m2 = self.m2 + (deviation * (batch - self.mean)).sum(0)

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.m2 / max(self.count, 1) + 1e-8)

    def state_dict(self) -> dict:
        return {name: torch.from_numpy(np.array(x)) for name, x in vars(self).items()}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update({name: x.numpy() for name, x in state.items()})


class Environments:
    """Parallel environments with normalized observations and scaled rewards.

    `episodes` maps an environment whose episode just ended to its return and length.
    """

    def __init__(self, args: Args, num_envs: int, training: bool = True) -> None:
        self.args, self.num_envs, self.training = args, num_envs, training
        self.envs = make_envs(args, num_envs, None)
        obs, actions = self.envs.single_observation_space, self.envs.single_action_space
        if [len(x.shape or ()) for x in (obs, actions)] != [1, 1] or actions.dtype.kind != "f":
            sys.exit(f"error: {args.env_id} lacks flat obs or flat float actions: {obs}, {actions}")
        self.obs_dim, self.action_dim = obs.shape[0], actions.shape[0]
        self.action_space = actions
        self.obs_stats, self.return_stats = RunningMeanStd((self.obs_dim,)), RunningMeanStd()

    def reset(self, seed: int, video_folder: Path) -> np.ndarray:
        """Remake and reset the environments. Returns observations (N, D)."""
        self.envs.close()  # Trap: `reset` may keep state
        folder = video_folder if self.args.capture_video else None
        self.envs = make_envs(self.args, self.num_envs, folder)
        self.discounted_returns, self.returns, self.lengths = np.zeros((3, self.num_envs))
        obs, _ = self.envs.reset(seed=seed)
        if obs.shape != (self.num_envs, self.obs_dim):
            sys.exit(f"error: observations {obs.shape}, not {self.num_envs, self.obs_dim}")
        return self.normalize(obs)

    def step(self, actions: np.ndarray) -> tuple:
        """Step with actions (N, A), clipped to the action space.

        Returns obs to act on, next_obs (at an episode's end, the last), rewards, terminations,
        truncations, info.
        """
        actions = actions.clip(self.action_space.low, self.action_space.high)
        raw_obs, raw_rewards, *ends, info = self.envs.step(actions)
        terminations, truncations = np.array(ends, bool)  # also from integers
        self.returns += raw_rewards
        self.lengths += 1
        rewards, dones = self.scale(raw_rewards), terminations | truncations
        final_obs, self.episodes = raw_obs.copy(), {}
        for i in np.flatnonzero(dones):
            self.episodes[i] = (self.returns[i], self.lengths[i])
            final_obs[i] = info["final_obs"][i]
        next_obs = self.normalize(final_obs)
        obs = next_obs.copy()
        if self.episodes:
            obs[dones] = self.normalize(raw_obs[dones])
            self.discounted_returns[dones] = self.returns[dones] = self.lengths[dones] = 0
        return obs, next_obs, rewards, terminations, truncations, info

    def normalize(self, obs: np.ndarray) -> np.ndarray:
        """Normalize and clip observations (M, D): [37], continuous details 6, 7."""
        if self.training:
            self.obs_stats.update(obs)
        obs = (obs - self.obs_stats.mean) / self.obs_stats.std
        return obs.clip(-10, 10).astype(np.float32)

    def scale(self, rewards: np.ndarray) -> np.ndarray:
        """Scale rewards (N,) by the return's std, and clip: [37], continuous details 8, 9."""
        self.discounted_returns = self.args.gamma * self.discounted_returns + rewards
        if self.training:
            self.return_stats.update(self.discounted_returns)
        # Detail: the mean is not subtracted
        return (rewards / self.return_stats.std).clip(-10, 10).astype(np.float32)


def mlp(inputs: int, outputs: int, output_gain: float) -> nn.Sequential:
    """Two hidden layers of 64 tanh units, orthogonally initialized: [37], core detail 2."""
    layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, output_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """Separate policy and value networks; the policy's std does not depend on the state."""

    def __init__(self, obs_dim: int, action_dim: int, log_std_init: float = 0.0) -> None:
        super().__init__()
        self.actor = mlp(obs_dim, action_dim, 0.01)  # Detail: small means
        self.critic = mlp(obs_dim, 1, 1.0)
        self.log_std = nn.Parameter(torch.ones(action_dim) * log_std_init)

    def policy(self, obs: Tensor) -> Independent:
        """pi(.|s) for obs (..., D): a diagonal Gaussian, with log-probabilities (...)."""
        gaussian = Normal(self.actor(obs), self.log_std.exp(), validate_args=False)
        return Independent(gaussian, 1)

    def value(self, obs: Tensor) -> Tensor:
        """V(s) (...)."""
        return self.critic(obs).squeeze(-1)


def compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda):
    r"""Generalized advantage estimates (T, N) from tensors (T, N).

    \hat A_t = \sum_l (\gamma\lambda)^l \delta_{t+l}, up to the end of the episode or the batch
    \delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)  ([GAE] Eq. (16), [PPO] Eqs. (11), (12))

    V(s_{t+1}) is `next_values`, also after a truncation [TIME], and 0 after a termination.
    """
    delta = rewards + gamma * next_values * ~terminations - values
    decay = gamma * gae_lambda * (~(terminations | truncations)).to(delta)
    advantages = delta
    for t in reversed(range(len(advantages) - 1)):
        advantages[t].addcmul_(decay[t], advantages[t + 1])
    return advantages


def ppo_loss(agent: Agent, minibatch: tuple, args: Args) -> tuple[Tensor, dict]:
    """The loss (), the negative of [PPO] Eq. (9), and a dict of metrics ()."""
    obs, actions, old_logprobs, old_values, advantages, returns = minibatch
    policy, values = agent.policy(obs), agent.value(obs)
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    # [PPO] Eq. (7): gains beyond the clip range do not count
    logratio = policy.log_prob(actions) - old_logprobs
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()

    value_error = (values - returns).square()
    if args.clip_vloss:  # Detail: no known benefit ([37], core detail 9)
        clipped_values = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        value_error = torch.max(value_error, (clipped_values - returns).square())
    value_loss = 0.5 * value_error.mean()

    entropy = policy.entropy().mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    # Two estimates of KL(old || new): joschu.net/blog/kl-approx.html
    metrics["old_approx_kl"] = -logratio.mean()
    metrics["approx_kl"] = (ratio - 1 - logratio).mean()
    metrics["clipfrac"] = ((ratio - 1).abs() > args.clip_coef).float().mean()
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def update(agent: Agent, optimizer: torch.optim.Optimizer, minibatch: tuple, args: Args) -> dict:
    """Take one gradient step on a minibatch. Returns metrics."""
    optimizer.zero_grad()
    loss, metrics = ppo_loss(agent, minibatch, args)
    loss.backward()
    metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return metrics


@torch.no_grad()
def act(agent: Agent, obs: np.ndarray, device: torch.device) -> np.ndarray:
    """Sample actions (N, A) for observations (N, D)."""
    return agent.policy(torch.from_numpy(obs).to(device)).sample().cpu().numpy()


def train(args: Args, folder: Path, checkpoint: dict | None) -> None:
    """Train from scratch or a checkpoint."""
    batch_size = args.num_envs * args.num_steps
    size = batch_size / args.num_minibatches
    if size < 2 or size % 1 or batch_size > args.checkpoint_interval:
        sys.exit(f"error: {batch_size=} does not fit --num-minibatches or --checkpoint-interval")
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    seed_everything(args.seed, 0)
    envs = Environments(args, args.num_envs)
    agent = Agent(envs.obs_dim, envs.action_dim, args.log_std_init).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    act_fn, update_fn = accelerate(args) if args.compile else (act, update)

    parts = dict(agent=agent, optimizer=optimizer, obs_stats=envs.obs_stats)
    parts["return_stats"] = envs.return_stats
    global_step = start = checkpoint["global_step"] if checkpoint else 0
    last_step = math.ceil(args.total_timesteps / batch_size) * batch_size
    run = Run(args, folder, checkpoint, parts, last_step)
    if checkpoint and not args.anneal_lr:
        for group, lr in zip(optimizer.param_groups, learning_rates):
            kept = args.learning_rate / checkpoint["args"]["learning_rate"] * group["lr"]
            group["lr"] = lr if checkpoint["args"].get("anneal_lr") else kept

    while global_step < last_step:
        if global_step == start or global_step % args.checkpoint_interval < batch_size:
            run.save_checkpoint(global_step)
            seed = seed_everything(args.seed, global_step)  # same when resuming
            current_obs = envs.reset(seed, folder / "videos" / str(global_step))
        if args.anneal_lr:
            for group, lr in zip(optimizer.param_groups, learning_rates):
                group["lr"] = lr * (1 - global_step / last_step)

        # Collect T steps in each environment: [PPO] Alg. 1, line 3
        steps = []
        for _ in range(args.num_steps):
            actions = act_fn(agent, current_obs, device)
            new_obs, next_obs, rewards, terminations, truncations, info = envs.step(actions)
            steps.append((current_obs, actions, next_obs, rewards, terminations, truncations))
            current_obs = new_obs
            global_step += args.num_envs
            run.log_episodes(global_step, envs.episodes)
        rollout = [torch.from_numpy(np.stack(x)).to(device) for x in zip(*steps)]
        obs, actions, next_obs, rewards, terminations, truncations = rollout

        # Estimate advantages: [PPO] Alg. 1, line 4
        with torch.no_grad():
            logprobs = agent.policy(obs).log_prob(actions)
            values, next_values = agent.value(obs), agent.value(next_obs)
        assert logprobs.shape == values.shape == rewards.shape
        inputs = (rewards, values, next_values, terminations, truncations)
        advantages = compute_gae(*inputs, args.gamma, args.gae_lambda)
        returns = advantages + values

        # K epochs of minibatches: [PPO] Alg. 1, line 6
        batch = [x.flatten(0, 1) for x in (obs, actions, logprobs, values, advantages, returns)]
        for _ in range(args.update_epochs):
            epoch = []
            for rows in torch.randperm(batch_size, device=device).chunk(args.num_minibatches):
                minibatch = tuple(x[rows] for x in batch)
                epoch.append(update_fn(agent, optimizer, minibatch, args))
            metrics = {name: float(sum(m[name] for m in epoch)) / len(epoch) for name in epoch[0]}
            if args.target_kl is not None and metrics["approx_kl"] > args.target_kl:
                break

        if not math.isfinite(metrics["grad_norm"]):
            raise FloatingPointError(f"gradient not finite at step {global_step}")
        metrics["explained_variance"] = 1 - (returns - values).var() / returns.var()
        run.log(global_step, "losses", metrics)
        run.log(global_step, "charts", {"learning_rate": optimizer.param_groups[0]["lr"]})
        run.progress(global_step)

    envs.envs.close()
    run.finish(global_step, "agent", "obs_stats")


# ----- The run. Nothing below belongs to the algorithm. -----

SCRIPT = "ppo_continuous"
EVAL_STEPS = 100_000


@torch.no_grad()
def evaluate(args: Args, model: dict, folder: Path) -> list[float]:
    """Returns of `args.eval_episodes` episodes with the policy's mode and frozen statistics."""
    envs = Environments(args, args.eval_episodes, training=False)
    agent = Agent(envs.obs_dim, envs.action_dim).eval()
    agent.load_state_dict(model["agent"])
    envs.obs_stats.load_state_dict(model["obs_stats"])
    seed, ended = seed_everything(args.seed, model["global_step"], 1), {}
    obs = envs.reset(seed, folder / "videos" / "evaluation")
    while len(ended) < args.eval_episodes and envs.lengths.max() < EVAL_STEPS:
        obs, *_ = envs.step(agent.policy(torch.from_numpy(obs)).mode.numpy())
        ended = envs.episodes | ended  # the first episode of each
    envs.envs.close()
    if len(ended) < args.eval_episodes:
        print(f"note: episodes cut off after {EVAL_STEPS} steps")
    returns = [float(ended[i][0] if i in ended else x) for i, x in enumerate(envs.returns)]
    print(f"evaluation: {np.mean(returns):.2f} +- {np.std(returns):.2f}, {len(ended)} episodes")
    return returns


def seed_everything(*key: int) -> int:
    """Seed all generators. Returns the 31-bit seed."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def write_file(path: Path, content: dict) -> None:
    """Write atomically."""
    file = path.with_suffix(".tmp")
    torch.save(content, file)
    torch.load(file, "meta", mmap=True)  # must load
    os.replace(file, path)


def load_checkpoint(path: Path) -> dict:
    """Load a .pt file, or a run folder's newest intact checkpoint."""
    files = sorted(path.glob("checkpoint_*.pt"))[::-1] if path.is_dir() else [path]
    for file in files:
        try:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            if zipfile.ZipFile(file).testzip() or checkpoint["script"] != SCRIPT:
                raise OSError("damaged or another script's")  # Trap: torch.load does not check
            return checkpoint
        except Exception as error:
            print(f"note: {file} is not a checkpoint of {SCRIPT}.py: {error}")
    sys.exit(f"error: no intact checkpoint in {path}")


class Run:
    """Logs a run, saves its `parts` by state_dict, and loads `checkpoint`."""

    def __init__(self, args, folder: Path, checkpoint: dict | None, parts: dict, last_step: int):
        self.args, self.folder, self.parts = args, folder, parts
        self.recent_returns, self.saves_since_episode = [], 0
        start = checkpoint or dict(global_step=0, seconds=0)
        self.started = time.time() - start["seconds"]
        modules = nn.ModuleList(x for x in parts.values() if isinstance(x, nn.Module))
        groups = [g for x in parts.values() for g in getattr(x, "param_groups", [])]
        if {p for g in groups for p in g["params"]} - set(modules.parameters()):
            sys.exit("error: `parts` lacks a module that an optimizer trains")
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ImportError):  # not on Windows
            import fcntl

            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            if checkpoint:
                for name in parts:
                    parts[name].load_state_dict(checkpoint[name])
        except Exception as error:
            sys.exit(f"error: the checkpoint does not fit: {error}")
        print(f"run folder: {folder}", flush=True)
        if args.track:
            import wandb

            setup = dict(project=args.wandb_project_name, entity=args.wandb_entity, resume="allow")
            setup |= dict(config=asdict(args), allow_val_change=True, sync_tensorboard=True)
            try:
                wandb.init(id=re.sub(r"\W+", "-", str(folder.resolve()))[-100:], **setup)
            except wandb.Error:  # deleted
                wandb.init(**setup)
        step = start["global_step"]
        self.writer = SummaryWriter(folder, purge_step=step + bool(checkpoint), flush_secs=10)
        self.bar = tqdm(total=last_step, initial=step, unit=" steps")

    def log(self, global_step: int, group: str, scalars: dict) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(f"{group}/{name}", value, global_step)

    def log_episodes(self, global_step: int, episodes: dict) -> None:
        if episodes:
            self.saves_since_episode = 0
            returns, lengths = np.transpose(list(episodes.values()))
            self.recent_returns = [*self.recent_returns, *returns][-100:]
            means = dict(episodic_return=returns.mean(), episodic_length=lengths.mean())
            self.log(global_step, "charts", means)

    def progress(self, global_step: int) -> None:
        self.log(global_step, "charts", {"SPS": global_step / (time.time() - self.started)})
        if self.recent_returns:
            self.bar.set_postfix_str(f"return {np.mean(self.recent_returns):.1f}", refresh=False)
        self.bar.update(global_step - self.bar.n)

    def pack(self, global_step: int, names) -> dict:
        header = dict(script=SCRIPT, args=asdict(self.args), global_step=global_step)
        header["seconds"] = time.time() - self.started
        return header | {name: self.parts[name].state_dict() for name in names}

    def save_checkpoint(self, global_step: int) -> None:
        """Write a checkpoint; keep it and the one before."""
        if self.saves_since_episode == 1 and global_step < self.bar.total:
            print("note: no episode ended between checkpoints: raise --checkpoint-interval")
        self.saves_since_episode += 1
        self.writer.flush()
        file = self.folder / f"checkpoint_{global_step:012}.pt"
        write_file(file, self.pack(global_step, self.parts))
        files = sorted(self.folder.glob("checkpoint_*.pt"))
        i = files.index(file)
        for path in files[: max(i - 1, 0)] + files[i + 1 :]:
            path.unlink()

    def finish(self, global_step: int, *names: str) -> None:
        """Save run and model (the named parts), evaluate, write result.json."""
        self.bar.close()
        args, model = self.args, self.pack(global_step, names)
        self.save_checkpoint(global_step)
        if args.save_model or args.upload_model:
            write_file(self.folder / "model.pt", model)
        returns = evaluate(args, model, self.folder)
        self.log(global_step, "eval", {"episodic_return": np.mean(returns)})
        self.writer.close()
        for name in names:
            del model[name]
        model |= {"episodic_return": returns, "torch": torch.__version__}
        (self.folder / "result.json").write_text(json.dumps(model, indent=2))
        if args.upload_model:
            from huggingface_hub import HfApi

            name = re.sub(r"\W+", "-", f"{args.env_id}-{args.exp_name}-{args.seed}")
            name = f"{args.hf_entity or ''}/{name}".strip("/")
            repo = HfApi().create_repo(name, exist_ok=True).repo_id
            HfApi().upload_folder(repo_id=repo, folder_path=self.folder, ignore_patterns="check*")


def accelerate(args: Args):
    """`act` in numpy and `update` compiled, or a note why not."""
    with contextlib.suppress(AttributeError):  # compiles backward() too
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._dynamo.config.trace_autograd_ops = True
    torch._logging.set_logs(dynamo=40)
    compiled = torch.compile(update, options={"fallback_random": True, "size_asserts": False})
    weights, noise = [], []

    def fast_update(agent, optimizer, *inputs):
        noise.clear()
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(np.float64(group["lr"]))  # Trap: new floats recompile
            group["fused"] = False  # compilable
        metrics = compiled(agent, optimizer, *inputs)
        assert metrics["grad_norm"] > 0, "graph break"
        return metrics

    def mean(obs):
        w1, b1, w2, b2, w3, b3 = weights
        return np.tanh(np.tanh(obs @ w1.T + b1) @ w2.T + b2) @ w3.T + b3

    def fast_act(agent, obs, device):
        if not noise:  # a new policy
            weights[:] = [x.numpy(force=True) for x in agent.actor.parameters()]
            probe = 10 * torch.arange(float(args.num_steps * obs.size)).sin().view(-1, *obs.shape)
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
                policy = copy.deepcopy(agent).policy(probe.to(device))
            assert (policy.stddev == policy.stddev[0, 0]).all(), "another std"
            assert np.allclose(policy.mean.cpu(), mean(probe.numpy()), 1e-3, 1e-4), "another mean"
            noise.extend((policy.sample() - policy.mean).cpu().numpy())
        return mean(obs) + noise.pop(0)

    def fallback(fast, plain):
        def call(*inputs):
            nonlocal fast
            try:
                return fast(*inputs)
            except Exception as error:
                if fast is plain:
                    raise
                print(f"note: {plain.__name__}() is not accelerated: {error!r:.100}")
            fast = plain
            return plain(*inputs)

        return call

    return fallback(fast_act, act), fallback(fast_update, update)


def main() -> None:
    args, checkpoint = tyro.cli(Args), None
    folder = Path(args.evaluate or args.resume or args.run_folder or "runs")
    if args.evaluate or args.resume or (args.run_folder and any(folder.glob("checkpoint_*.pt"))):
        checkpoint = load_checkpoint(folder)
        saved = checkpoint["args"]
        for name in saved.keys() - vars(args).keys():
            print(f"note: the saved flag {name}={saved.pop(name)} is ignored")
        args = tyro.cli(Args, default=Args(**saved))
        folder = folder if folder.is_dir() else folder.parent
    elif not args.run_folder:
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time()}"
        folder /= re.sub(r"[^\w.-]+", "-", name)
    if args.cuda and not torch.cuda.is_available():
        print("note: no CUDA, using the CPU")
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.eval_episodes < 1:
        sys.exit("error: --eval-episodes below 1")
    try:
        if args.evaluate:
            evaluate(args, checkpoint, folder)
        else:
            train(args, folder, checkpoint)
    except KeyboardInterrupt:
        sys.exit(f"\nresume with: python '{sys.argv[0]}' --resume '{folder}'")
    except BlockingIOError:
        sys.exit(f"error: {folder} is in use")
    except (gym.error.Error, ImportError, FloatingPointError) as error:
        sys.exit(f"\nerror: {error}")


if __name__ == "__main__":
    main()
