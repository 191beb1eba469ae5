# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch==2.13.0", "gymnasium==1.3.0", "ale-py==0.12.1", "numpy==2.4.6", "tyro==1.0.17",
#     "tqdm", "tensorboard==2.21.0", "wandb==0.31.0", "moviepy==2.2.1", "huggingface-hub==2.4.0",
# ]
# ///
r"""Advantage actor-critic (A2C) on Atari: the synchronous, batched variant of A3C.

The policy acts for `num_steps` steps in all environments. An action's return is the discounted sum
of the following rewards, bootstrapped with the value of the last observation. One gradient step
makes actions whose return exceeded the value more likely and fits the values to the returns; an
entropy bonus encourages exploration.

[A3C]   Mnih et al. 2016, "Asynchronous methods for deep reinforcement learning", arXiv:1602.01783
[DQN]   Mnih et al. 2015, "Human-level control through deep reinforcement learning", Nature 518
[GAE]   Schulman et al. 2016, "High-dimensional continuous control using GAE", arXiv:1506.02438
[TIME]  Pardo et al. 2018, "Time limits in reinforcement learning", arXiv:1712.00378

    symbol         variable    shape           meaning (T num_steps, N num_envs)
    s_t            obs         (N, 4, 84, 84)  the last four frames, one per agent step
    a_t            actions     (N,)            sampled action
    r_t            rewards     (T, N)          clipped reward, plus gamma V if truncated
    R_t            returns     (T, N)          n-step return, [A3C] Alg. S3
    V(s_t)         values      (T, N)          value estimate
    \log\pi(a|s)   logprobs    (T, N)          log-probability of a_t, 0 if FIRE is pressed instead
    H(\pi(s))      entropies   (T, N)          entropy of the policy
    \beta          ent_coef                    weight of the entropy bonus, [A3C] Sec. 4

Differences from some implementations (reasons: docs/a2c_atari.md):
  * RMSprop is TensorFlow 1's: epsilon is in the root and the average starts at one. The first
    steps of PyTorch's (`--torch-rmsprop`) are thousands of times larger.
  * A lost life ends the return, not the episode. On the first step of each life FIRE is pressed,
    which the policy loss masks out.
  * [A3C] anneals the learning rate (`--anneal-lr`), sums where this averages, weights the squared
    value error by 1 (here 0.5), has a smaller network in Suppl. Sec. 8, and does not name the norm
    to which it clips gradients (Sec. 5.1).
  * The discounted value of a truncated episode's final observation (whose newest frame is stale
    in ale-py 0.12.1) is added to its last reward ([TIME]).
  * Checkpoints reset the environments and reseed all generators: resuming is bit-exact.

    python a2c_atari.py --env-id BreakoutNoFrameskip-v4  # writes runs/BreakoutNoFrameskip-v4__...
    python a2c_atari.py --resume runs/...                # resumes an interrupted run
    python a2c_atari.py --evaluate runs/...              # evaluates a trained policy
"""

import contextlib
import ctypes
import json
import math
import os
import random
import re
import sys
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

# Trap: by default OpenMP's threads spin while they wait; on a loaded machine all of them stall
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gymnasium as gym
import numpy as np
import torch
import tyro
from ale_py import Action
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """Advantage actor-critic on Atari."""

    env_id: str = "BreakoutNoFrameskip-v4"  # NameNoFrameskip-v4, or ALE/Name-v5 (sticky actions)
    total_timesteps: int = 10_000_000  # agent steps (four frames), rounded up to whole rollouts
    num_envs: int = 16  # N: parallel environments
    num_steps: int = 5  # t_max: steps per environment and update
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 1.0  # lambda of the lambda-return; 1: n-step returns, as in the paper
    episodic_life: bool = True  # a lost life is a termination
    bootstrap_truncation: bool = True  # bootstrap at truncation
    ent_coef: float = 0.01  # beta: weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the squared value error
    learning_rate: float = 7e-4  # RMSprop's step size
    anneal_lr: bool = False  # anneal linearly to zero
    max_grad_norm: float = 0.5  # gradient clipping norm
    rmsprop_alpha: float = 0.99  # decay rate of the mean squared gradient; ignored on resuming
    rmsprop_eps: float = 1e-5  # inside the root (--torch-rmsprop: outside); ignored on resuming
    torch_rmsprop: bool = False  # use PyTorch's RMSprop; cannot change on resuming
    frame_stack: int = 4  # frames per observation
    conv3_filters: int = 64  # filters of the third convolution
    bf16: bool = False  # bfloat16: faster on some CPUs, slower on others
    greedy: bool = False  # evaluate with greedy actions
    env_threads: int = 0  # emulator threads (0: one per core)
    log_interval: int = 100  # updates between logged losses

    exp_name: str = Path(__file__).stem
    seed: int = 1  # seed of all generators
    torch_deterministic: bool = True  # in cuDNN
    cuda: bool = True  # use the GPU, if there is one
    torch_threads: int = 2  # PyTorch's CPU threads
    track: bool = False  # log to Weights & Biases
    wandb_project_name: str = "deep-rl-reference"
    wandb_entity: str | None = None
    capture_video: bool = False  # record an episode after each checkpoint
    save_model: bool = True
    upload_model: bool = False  # to the Hugging Face Hub
    hf_entity: str | None = None  # Hub user or organization
    checkpoint_interval: int = 500_000  # steps
    run_folder: str | None = None  # start or resume in this folder
    resume: str | None = None  # run folder to resume
    evaluate: str | None = None  # model or run folder to evaluate
    eval_episodes: int = 10


def make_atari(args: Args, num_envs: int) -> VectorEnv:
    """Make parallel environments. Replace this to train on something else.

    Requires SAME_STEP autoreset (at an episode's end, `step` returns the next one's first
    observation, and `info["final_obs"]` holds the last), Discrete(n) actions from 0, and
    observations (N, C, H, W) in uint8. `reset(seed=...)` must reset all state, or resuming is not
    exact. `AtariEnvs` clips rewards to their sign.
    """
    spec = gym.registry.get(args.env_id.replace("Deterministic", "NoFrameskip"))
    if not spec or not isinstance(spec.kwargs.get("frameskip"), int):
        sys.exit(f"error: {args.env_id} is neither NameNoFrameskip-v4 nor ALE/Name-v5")
    return AtariVectorEnv(
        game=spec.kwargs["game"],
        num_envs=num_envs,
        num_threads=args.env_threads,
        repeat_action_probability=spec.kwargs["repeat_action_probability"],
        frameskip=4,
        maxpool=True,  # over the last two frames, because sprites flicker ([DQN] Methods)
        stack_num=args.frame_stack,  # 84 x 84, grayscale
        noop_max=30,
        use_fire_reset=True,
        max_num_frames_per_episode=108_000,  # 30 minutes of play
        reward_clipping=False,  # Trap: True, the default, loses the score
        life_loss_info=True,  # a lost life terminates, but the game continues
        autoreset_mode=AutoresetMode.SAME_STEP,
    )


class AtariEnvs:
    """Parallel Atari games that press FIRE on the first step of each life.

    `fire` (N,) marks games whose next action is FIRE; `executed_actions` (N,) is what was executed.
    `episodes` maps each environment whose episode just ended to its (unclipped return, length).
    """

    def __init__(self, args: Args, num_envs: int) -> None:
        self.args, self.num_envs = args, num_envs
        self.envs = make_atari(args, num_envs)
        self.obs_shape = self.envs.single_observation_space.shape
        self.num_actions = int(self.envs.single_action_space.n)
        ale = getattr(self.envs.unwrapped, "ale", None)
        action_set = ale.get_action_set() if ale else []
        self.has_fire = Action.FIRE in action_set
        self.fire_action = action_set.index(Action.FIRE) if self.has_fire else 0

    def reset(self, seed: int, video_folder: Path | None) -> np.ndarray:
        """Reset the games. Returns observations (N, C, H, W)."""
        obs, info = self.envs.reset(seed=seed)
        self.returns, self.lengths = np.zeros((2, self.num_envs))
        self.counter = info.get("episode_frame_number", 0)
        self.fire = np.full(self.num_envs, self.has_fire)
        self.video_folder = video_folder if self.args.capture_video else None
        self.video_frames = []
        return obs.copy()

    def step(self, actions: np.ndarray) -> tuple:
        """Step with actions (N,). Returns obs to act on, next_obs (final ones at an episode's
        end), rewards clipped to their sign, terminations, truncations, info.
        """
        # Detail: the emulator's own FIRE at a reset lasts one frame; sticky actions may override it
        self.executed_actions = np.where(self.fire, self.fire_action, actions)
        obs, rewards, *ends, info = self.envs.step(self.executed_actions)
        terminations, truncations = np.array(ends, bool)
        self.returns += rewards
        self.lengths += 1
        dones = terminations | truncations
        self.fire = dones & self.has_fire
        # Trap: a lost life terminates too; only a new episode resets the frame counter
        counter = info.get("episode_frame_number", 0)
        episode_over = truncations | (terminations & (counter <= self.counter))
        self.counter = counter
        if not self.args.episodic_life:
            terminations = terminations & episode_over
        if self.video_folder:
            self.video_frames.append(obs[0, -1].copy())
            if episode_over[0]:
                self.save_video()
        self.episodes = {}
        obs = obs.copy()  # Trap: with `copy=False`, vector environments reuse this array
        next_obs = obs.copy() if episode_over.any() else obs
        for i in np.flatnonzero(episode_over):
            self.episodes[i] = (self.returns[i], self.lengths[i])
            next_obs[i] = info["final_obs"][i]
            self.returns[i] = self.lengths[i] = 0
        return obs, next_obs, np.sign(rewards, dtype=np.float32), terminations, truncations, info

    def save_video(self) -> None:
        """Save the first game's first episode, as the agent sees it."""
        from gymnasium.utils.save_video import save_video

        frames = [np.stack([frame] * 3, axis=-1) for frame in self.video_frames]
        save_video(frames, str(self.video_folder), lambda _: True, fps=15)
        self.video_folder = None


def layer_init(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights and zero biases, as in OpenAI Baselines."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value heads on one convolutional trunk ([DQN] Methods, [A3C] Sec. 4)."""

    def __init__(self, obs_shape: tuple, num_actions: int, conv3_filters: int = 64) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            layer_init(nn.Conv2d(obs_shape[0], 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, conv3_filters, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
        )
        num_features = self.convolutions(torch.zeros(1, *obs_shape)).shape[1]
        self.linear = nn.Sequential(layer_init(nn.Linear(num_features, 512)), nn.ReLU())
        self.policy_head = layer_init(nn.Linear(512, num_actions), 0.01)  # Detail: nearly uniform
        self.value_head = layer_init(nn.Linear(512, 1), 1.0)

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        """pi(.|s) and V(s) (B,) of observations (B, C, H, W) in uint8."""
        obs = obs.contiguous(memory_format=torch.channels_last)  # the faster layout on the CPU
        hidden = self.linear(self.convolutions(obs.float() / 255))
        policy = Categorical(logits=self.policy_head(hidden).float(), validate_args=False)
        return policy, self.value_head(hidden).float().squeeze(-1)


@torch.no_grad()
def compute_returns(rewards, values, last_value, dones, gamma, gae_lambda=1.0) -> Tensor:
    r"""Returns (T, N) from tensors (T, N) and the value (N,) of the observation after the rollout.

    R = V(s_T) at first, then R = r_t + \gamma R, or r_t where `dones` ([A3C] Alg. S3). With
    gae_lambda < 1, R - V is the advantage of [GAE] Eq. (16).
    """
    next_values = torch.cat([values[1:], last_value[None]])
    returns, R = torch.zeros_like(rewards), last_value
    for t in reversed(range(len(rewards))):
        R = gae_lambda * R + (1 - gae_lambda) * next_values[t]
        R = rewards[t] + gamma * R * ~dones[t]
        returns[t] = R
    return returns


def a2c_loss(logprobs, values, entropies, returns, args: Args) -> tuple[Tensor, dict]:
    r"""The loss () and a dict of metrics (), from tensors (T, N).

    -\log\pi(a|s) (R - V) - \beta H(\pi(s)) + vf_coef (R - V)^2, averaged ([A3C] Sec. 4, Alg. S3).
    Advantages are constants.
    """
    advantages = (returns - values).detach()
    policy_loss = -(logprobs * advantages).mean()
    value_loss = (returns - values).square().mean()
    entropy = entropies.mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return loss, {name: metric.detach() for name, metric in metrics.items()}


class RMSprop(torch.optim.Optimizer):
    r"""TensorFlow 1's RMSprop without momentum ([A3C] Sec. 4). g (`square_avg`) starts at one.

    g = \alpha g + (1 - \alpha) \Delta\theta^2
    \theta = \theta - \eta \Delta\theta / \sqrt{g + \epsilon}
    """

    def __init__(self, params, lr: float, alpha: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            alpha, eps, lr = group["alpha"], group["eps"], group["lr"]
            for parameter in [p for p in group["params"] if p.grad is not None]:
                grad, state = parameter.grad, self.state[parameter]
                if not state:
                    state["square_avg"] = torch.ones_like(parameter)
                square_avg = state["square_avg"].mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
                parameter.addcdiv_(grad, (square_avg + eps).sqrt_(), value=-lr)


def update(agent: Agent, optimizer: torch.optim.Optimizer, rollout: tuple, args: Args) -> dict:
    """Take one gradient step on a rollout, the four tensors of `a2c_loss`. Returns metrics."""
    loss, metrics = a2c_loss(*rollout, args)
    optimizer.zero_grad()
    loss.backward()
    metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return metrics


def train(args: Args, folder: Path, checkpoint: dict | None) -> None:
    """Train from scratch or a checkpoint."""
    T, N, batch_size = args.num_steps, args.num_envs, args.num_steps * args.num_envs
    if min(T, N, args.log_interval) < 1:
        sys.exit("error: --num-steps, --num-envs or --log-interval below 1")
    if batch_size > args.checkpoint_interval:
        sys.exit(f"error: --checkpoint-interval is below the batch size of {batch_size}")
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    speed_up_cpu()
    seed_everything(args.seed, 0)
    envs = AtariEnvs(args, N)
    agent = Agent(envs.obs_shape, envs.num_actions, args.conv3_filters).to(device)
    if checkpoint and args.torch_rmsprop != checkpoint["args"].get("torch_rmsprop"):
        sys.exit("error: --torch-rmsprop changed")
    rmsprop = torch.optim.RMSprop if args.torch_rmsprop else RMSprop
    options = {"alpha": args.rmsprop_alpha, "eps": args.rmsprop_eps}
    optimizer = rmsprop(agent.parameters(), args.learning_rate, **options)
    learning_rates = [group["lr"] for group in optimizer.param_groups]

    parts = {"agent": agent, "optimizer": optimizer}  # everything a checkpoint must hold
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
            obs = envs.reset(seed, folder / "videos" / str(global_step))
        if args.anneal_lr:
            for group, lr in zip(optimizer.param_groups, learning_rates):
                group["lr"] = lr * (1 - global_step / last_step)

        # Collect T steps in each environment, keeping their graph: [A3C] Alg. S3, inner "repeat"
        logprobs, values, entropies = [], [], []
        rewards, dones = np.zeros((T, N), np.float32), np.zeros((T, N), bool)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            for t in range(T):
                policy, value = agent(torch.from_numpy(obs).to(device))
                actions = policy.sample()
                policy_mask = torch.from_numpy(~envs.fire).to(device)  # 0 where FIRE is pressed
                logprobs.append(policy.log_prob(actions) * policy_mask)
                values.append(value.view(N))
                entropies.append(policy.entropy())
                transition = envs.step(actions.cpu().numpy())
                obs, next_obs, rewards[t], terminations, truncations, _ = transition
                dones[t] = terminations | truncations
                truncations = truncations & ~terminations
                if args.bootstrap_truncation and truncations.any():  # [TIME]
                    with torch.no_grad():
                        final_value = agent(torch.from_numpy(next_obs).to(device))[1].view(N)
                    rewards[t] += args.gamma * final_value.float().cpu().numpy() * truncations
                global_step += N
                run.log_episodes(global_step, envs.episodes)
            with torch.no_grad():
                last_value = agent(torch.from_numpy(obs).to(device))[1].view(N)

        # Compute the returns: [A3C] Alg. S3, R = r_i + gamma R
        logprobs, values = torch.stack(logprobs), torch.stack(values)
        entropies = torch.stack(entropies)
        rewards, dones = torch.from_numpy(rewards).to(device), torch.from_numpy(dones).to(device)
        returns = compute_returns(rewards, values, last_value, dones, args.gamma, args.gae_lambda)

        # Take one gradient step
        metrics = update(agent, optimizer, (logprobs, values, entropies, returns), args)
        if not math.isfinite(metrics["grad_norm"]):
            raise FloatingPointError(f"infinite or NaN gradient at step {global_step}")

        if global_step // batch_size % args.log_interval == 0 or global_step >= last_step:
            metrics["explained_variance"] = 1 - (returns - values.detach()).var() / returns.var()
            run.log(global_step, "losses", metrics)
            run.log(global_step, "charts", {"learning_rate": optimizer.param_groups[0]["lr"]})
            run.progress(global_step)

    envs.envs.close()
    run.finish(global_step, "agent")


# ----- The run. Nothing below belongs to the algorithm. -----

SCRIPT = "a2c_atari"
EVAL_STEPS = 100_000  # where evaluation episodes are cut off


@torch.no_grad()
def evaluate(args: Args, model: dict, folder: Path) -> list[float]:
    """Unclipped returns of `args.eval_episodes` episodes."""
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs = AtariEnvs(args, args.eval_episodes)
    agent = Agent(envs.obs_shape, envs.num_actions, args.conv3_filters).to(device).eval()
    agent.load_state_dict(model["agent"])
    seed = seed_everything(args.seed, model["global_step"], 1)
    obs, ended = envs.reset(seed, folder / "videos" / "evaluation"), {}
    while len(ended) < args.eval_episodes and envs.lengths.max() < EVAL_STEPS:
        policy, _ = agent(torch.from_numpy(obs).to(device))
        actions = policy.mode if args.greedy else policy.sample()
        obs, *_ = envs.step(actions.cpu().numpy())
        ended = envs.episodes | ended  # the first episode of each
    envs.envs.close()
    if len(ended) < args.eval_episodes:
        print(f"note: episodes cut off after {EVAL_STEPS} steps")
    returns = [float(ended[i][0] if i in ended else x) for i, x in enumerate(envs.returns)]
    print(f"evaluation: {np.mean(returns):.2f} +- {np.std(returns):.2f}, {len(ended)} episodes")
    return returns


def speed_up_cpu() -> None:
    """Flush denormals (averages of dead units), and keep freed memory, which saves page faults."""
    torch.set_flush_denormal(True)
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        for option, size in ((-1, 2**28), (-3, 2**25)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(option, size)


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
