# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "gymnasium[box2d]==1.3.0",
#     "mujoco==4.0.0",
#     "numpy==2.4.6",
#     "tyro==1.0.17",
#     "tensorboard==2.21.0",
#     "wandb==0.31.0",
#     "moviepy==2.2.1",
#     "huggingface-hub==2.4.0",
# ]
# ///
r"""Proximal policy optimisation (PPO) for continuous control.

The policy plays `num_steps` steps in every environment; the advantage of each action is estimated by GAE; then, for
`update_epochs` passes of minibatches, the policy climbs a surrogate of its return whose probability ratio is clipped,
so that no batch can move it far. The same passes fit the value function on which the advantages rest.

[PPO]   Schulman, Wolski, Dhariwal, Radford, Klimov 2017, "Proximal policy optimization algorithms", arXiv:1707.06347
[GAE]   Schulman, Moritz, Levine, Jordan, Abbeel 2016, "High-dimensional continuous control using generalized advantage
        estimation", ICLR, arXiv:1506.02438
[TIME]  Pardo, Tavakoli, Levdik, Kormushev 2018, "Time limits in reinforcement learning", ICML, arXiv:1712.00378
[ADAM]  Kingma, Ba 2015, "Adam: a method for stochastic optimization", ICLR, arXiv:1412.6980
[37]    Huang, Dossa, Raffin, Kanervisto, Wang 2022, "The 37 implementation details of PPO", ICLR blog track

    symbol          variable           shape      meaning (T num_steps, N num_envs, B minibatch, D obs, A action)
    s_t             obs                (T, N, D)  observation, normalised
    s_{t+1}         successors         (T, N, D)  the observation that the action led to, before any reset
    a_t             actions            (T, N, A)  the Gaussian's sample, unclipped
    r_t             rewards            (T, N)     reward, scaled
    \delta_t        delta              (T, N)     TD residual, [PPO] Eq. (12)
    \hat A_t        advantages         (T, N)     advantage estimate, [GAE] Eq. (16), [PPO] Eq. (11)
    r_t(\theta)     ratio              (B,)       pi_theta(a_t|s_t) / pi_theta_old(a_t|s_t), [PPO] Sec. 3
    \epsilon        clip_coef                     how far the ratio may leave 1, [PPO] Eq. (7)
    c_1, c_2        vf_coef, ent_coef             weights of the value loss and the entropy, [PPO] Eq. (9)
    K               update_epochs                 passes over a batch, [PPO] Alg. 1
    \theta          theta              (P,)       all parameters in one vector

Where this differs from common practice, and why:
  * A time limit is not a failure: at a truncation the value of the episode's last observation is bootstrapped
    ([TIME], partial-episode bootstrapping). The best-known single-file PPO takes truncations for terminations, on
    HalfCheetah a lie at every 1000th step; `--no-bootstrap-truncation` does the same.
  * One set of running statistics serves all environments, is saved with the parameters and is frozen in evaluation.
  * The environments are a plain list, stepped and reset in this file: no row of an automatic reset can enter the batch.
  * At each checkpoint the environments are made anew and reset with a seed made of (seed, global_step), interrupted
    there or not. Simulators cannot save their state; so nothing needs it, and resuming is exact to the bit.

The CPU is the default: the networks are so small that a GPU waits most of the time (no GPU figure was measured yet).
So is one thread of torch: two gain nothing and lose much on a busy machine. Steps are agent steps. Scores: README.md.

    python ppo_continuous.py --env-id HalfCheetah-v4              # writes runs/HalfCheetah-v4__ppo_continuous__1__...
    python ppo_continuous.py --resume runs/HalfCheetah-v4__...    # goes on after an interruption, exactly
    python ppo_continuous.py --evaluate runs/HalfCheetah-v4__.../model.pt --eval-episodes 20
"""

import contextlib
import copy
import difflib
import functools
import importlib.util
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterable
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# Trap: numpy's own threads, for its products of matrices, know nothing of --torch-threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter

SCRIPT = "ppo_continuous"


@dataclass
class Args:
    """Proximal policy optimisation for continuous control."""

    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of the parameters, the noise, the minibatches and the environments"""
    torch_deterministic: bool = True
    """if toggled, cuDNN uses deterministic algorithms only"""
    cuda: bool = False
    """if toggled, the networks are trained on the GPU (on the CPU where there is none)"""
    strict_cuda: bool = False
    """if toggled, `--cuda` on a machine without a CUDA device is an error"""
    torch_threads: int = 1
    """threads of torch on the CPU; more than one loses on networks of this size, and on a busy machine everything"""
    compile: bool = False
    """if toggled, a whole minibatch step is compiled into one graph (seconds of compilation, needs a C++ compiler)"""
    track: bool = False
    """if toggled, the run is tracked with Weights and Biases"""
    wandb_project_name: str = "deep-rl-reference"
    """the project of the tracked run"""
    wandb_entity: str | None = None
    """the entity (user or team) of the tracked run"""
    capture_video: bool = False
    """if toggled, videos of the first episode after each checkpoint and of the evaluation, in the run folder"""
    save_model: bool = True
    """if toggled, the trained parameters and statistics are saved as model.pt in the run folder"""
    upload_model: bool = False
    """if toggled, the saved model and its card are uploaded to the Hugging Face hub"""
    hf_entity: str = ""
    """the user or organisation on the Hugging Face hub (default: yours)"""
    checkpoint_interval: int = 100_000
    """agent steps between checkpoints (each is also a reset of the environments, see the title)"""
    resume: str | None = None
    """a run folder: go on from its newest checkpoint, with its arguments where none are given here"""
    evaluate: str | None = None
    """a checkpoint, a model.pt or a run folder: do not train, play `--eval-episodes` episodes with it"""
    eval_episodes: int = 10
    """episodes played with the mean action at the end of training, or by `--evaluate`"""

    env_id: str = "HalfCheetah-v4"
    """the id of a gymnasium environment with a Box action space"""
    num_envs: int = 1
    """environments played side by side"""
    bootstrap_truncation: bool = True
    """if toggled, an episode cut off by its time limit is bootstrapped with the value of its last observation"""

    total_timesteps: int = 1_000_000
    """agent steps of the whole run, all environments together (rounded up to whole batches)"""
    learning_rate: float = 3e-4
    """the learning rate of Adam"""
    anneal_lr: bool = True
    """if toggled, the learning rate falls linearly to zero over the run"""
    num_steps: int = 2048
    """T: agent steps in each environment between updates"""
    gamma: float = 0.99
    """the discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 32
    """minibatches per pass over a batch"""
    update_epochs: int = 10
    """K: passes over a batch"""
    norm_adv: bool = True
    """if toggled, advantages are normalised within each minibatch"""
    clip_coef: float = 0.2
    """epsilon: how far the probability ratio may leave 1 before the objective is clipped"""
    clip_vloss: bool = True
    """if toggled, the value loss is clipped too"""
    ent_coef: float = 0.0
    """c2: weight of the entropy bonus"""
    vf_coef: float = 0.5
    """c1: weight of the value loss"""
    max_grad_norm: float = 0.5
    """the norm to which gradients are clipped"""
    log_std_init: float = 0.0
    """logarithm of the standard deviation of the first actions (-1 is much better on HalfCheetah, see README.md)"""
    target_kl: float | None = None
    """passes over a batch stop once the approximate KL divergence exceeds this (default: never)"""

    def check(self) -> None:
        """Refuse values that cannot work, in one line."""
        counts = "num_envs num_steps num_minibatches update_epochs total_timesteps"
        for names, condition, holds in (
            (f"{counts} checkpoint_interval eval_episodes", "at least 1", lambda value: value >= 1),
            ("torch_threads", "between 1 and 1024", lambda value: 1 <= value <= 1024),
            ("seed", "between 0 and 2**32 - 1", lambda value: 0 <= value < 2**32),
            ("learning_rate max_grad_norm", "positive and finite", lambda value: 0 < value < math.inf),
            ("target_kl", "positive", lambda value: value is None or value > 0),
            ("ent_coef vf_coef", "zero or more and finite", lambda value: 0 <= value < math.inf),
            ("gamma gae_lambda", "between 0 and 1", lambda value: 0 <= value <= 1),
            ("clip_coef", "above 0 and below 1", lambda value: 0 < value < 1),
            ("log_std_init", "between -10 and 10", lambda value: -10 <= value <= 10),
            ("exp_name", "fit for a folder's name", lambda value: value == Path(value).name != ""),
        ):
            for name in names.split():
                if not holds(getattr(self, name)):
                    fail(f"--{name.replace('_', '-')} must be {condition}, not {getattr(self, name)!r}")
        batch_size = self.num_envs * self.num_steps
        if batch_size % self.num_minibatches:
            batch = f"{self.num_envs} environments x {self.num_steps} steps = {batch_size}"
            fail(f"--num-minibatches {self.num_minibatches} does not divide the batch ({batch})")
        if self.total_timesteps < batch_size:
            fail(f"--total-timesteps {self.total_timesteps} is less than one batch of {batch_size} steps")


def fail(message: object, status: int = 2) -> NoReturn:
    """Print one line on standard error and exit. Status 2: a wrong call; 1: a run that cannot go on."""
    behind = "\n" if status == 1 and sys.stdout.isatty() else ""  # the line of progress
    print(behind + "error: " + " ".join(str(message).split()), file=sys.stderr, flush=True)
    raise SystemExit(status)


def parse_args() -> tuple[Args, dict | None]:
    """The arguments, and the checkpoint that `--resume` or `--evaluate` names, whose arguments become the defaults."""

    def parse(defaults: Args) -> Args:
        console = io.StringIO()
        try:
            with contextlib.redirect_stderr(console):
                return tyro.cli(Args, default=defaults)
        except SystemExit as exit_:
            if not exit_.code:  # --help
                raise
        lines = [line.strip(" │╭╮╰╯─") for line in console.getvalue().splitlines()[1:]]  # tyro draws a box
        text = " ".join(line for line in lines if line.strip("-"))
        fail(re.split("For full helptext|Argument helptext", text)[0])

    args = parse(Args())
    if args.resume is None and args.evaluate is None:
        return args, None
    if args.resume is not None and args.evaluate is not None:
        fail("--resume and --evaluate exclude each other")
    name = args.evaluate if args.resume is None else args.resume
    if name == args.resume and Path(name).is_file():
        fail(f"--resume takes a run folder, and {name} is a file")
    checkpoint = load_checkpoint(name)
    saved = {key: value for key, value in checkpoint["args"].items() if key in vars(args)}
    if args.evaluate is not None:  # perhaps on another machine
        saved |= {"strict_cuda": False, "track": False, "upload_model": False, "capture_video": False}
    args = parse(Args(**saved))
    if args.env_id != saved["env_id"]:
        fail(f"{name} was trained on {saved['env_id']}, not on {args.env_id}")
    changed = [f"{key} {value} -> {getattr(args, key)}" for key, value in saved.items() if value != getattr(args, key)]
    changed = [change for change in changed if not change.startswith(("resume ", "evaluate "))]
    if args.resume and changed:
        print(f"note: other arguments than the run began with: {', '.join(changed)}", file=sys.stderr)
    return args, checkpoint


def check_services(args: Args) -> None:
    """Refuse a package, a compiler, a device or a login that is asked for and not there."""
    for flag, package in (("track", "wandb"), ("upload_model", "huggingface_hub"), ("capture_video", "moviepy")):
        if getattr(args, flag) and not importlib.util.find_spec(package):
            fail(f"--{flag.replace('_', '-')} needs a package: pip install {package}")
    on_gpu = args.cuda and torch.cuda.is_available()
    if args.cuda and args.strict_cuda and not on_gpu:
        fail("--cuda --strict-cuda: torch finds no CUDA device on this machine")
    if not args.evaluate:  # which needs nothing else
        if args.compile and not on_gpu and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
            fail("--compile needs a C++ compiler: install g++ or set CXX, or run without --compile")
        if args.track:
            import wandb

            run_id = f"{args.env_id}-{args.exp_name}".replace("/", "-")  # as of its folder, but for the time
            try:
                wandb.Settings(project=args.wandb_project_name, run_id=run_id)
                with contextlib.redirect_stderr(io.StringIO()):
                    logged_in = os.environ.get("WANDB_MODE") in ("offline", "disabled") or wandb.login(prompt=False)
            except (wandb.Error, ValueError) as error:
                fail(f"--track: {error}")
            if not logged_in:
                fail("--track needs a W&B login: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        if args.upload_model:
            import huggingface_hub

            if not args.save_model or not huggingface_hub.get_token():
                fail("--upload-model needs --save-model and a Hugging Face login: run `hf auth login` or set HF_TOKEN")
    if args.cuda and not on_gpu:
        print("note: torch finds no CUDA device; the CPU is used", file=sys.stderr)


def choose_device(args: Args) -> torch.device:
    """The device of the networks, set up as the arguments say."""
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    return torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")


def make_env(env_id: str, render: bool = False) -> gym.Env:
    """Make one environment whose observations are flat vectors (D,); `render` gives it frames for a film.

    Any gymnasium environment with a Box action space, `dm_control/...` through shimmy. Others end the program.
    """
    gym.logger.min_level = gym.logger.ERROR  # no deprecation notes on -v4 environments
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):  # MuJoCo reads this once, when it is imported
        os.environ.setdefault("MUJOCO_GL", "osmesa" if not find_library("EGL") and find_library("OSMesa") else "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # for the environments that draw with pygame
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if env_id.startswith("dm_control/"):
        if not importlib.util.find_spec("shimmy") or not importlib.util.find_spec("dm_control"):
            fail(f'{env_id} needs packages: pip install "shimmy[dm-control]" "mujoco<4"')
        import shimmy

        gym.register_envs(shimmy)
    try:
        if importlib.util.find_spec("mujoco"):
            import mujoco

            # Trap: without this MuJoCo 4 prints a remark of its compiler and leaves MUJOCO_LOG.TXT where it runs
            mujoco.set_mju_user_warning(lambda message: None)
        env = gym.make(env_id, render_mode="rgb_array" if render else None, disable_env_checker=True)
    except gym.error.UnregisteredEnv:
        nearest = difflib.get_close_matches(env_id, gym.registry, n=3, cutoff=0.5)
        hint = f"; the nearest names: {', '.join(nearest)}" if nearest else ""
        atari = env_id.startswith("ALE/") or "NoFrameskip" in env_id
        fail(f"there is no environment {env_id}" + ("; for Atari: a2c_atari.py" if atari else hint))
    except (ModuleNotFoundError, gym.error.DependencyNotInstalled) as error:
        fail(f"{env_id} needs a package: {error}")
    except Exception as error:
        hint = '; dm_control does not know MuJoCo 4 yet: pip install "mujoco<4"' if "dm_control" in env_id else ""
        fail(f"{env_id} cannot be made: {error}{hint}")
    if isinstance(env.action_space, gym.spaces.Discrete):
        fail(f"{env_id} has discrete actions and this script needs a Box; for Atari: a2c_atari.py, dqn_per_atari.py")
    if not isinstance(env.action_space, gym.spaces.Box):
        fail(f"{env_id} has the actions {env.action_space} and this script needs a Box")
    if not env.observation_space.is_np_flattenable:
        fail(f"{env_id} has observations that cannot be flattened into a vector: {env.observation_space}")
    if render:
        try:
            with warnings.catch_warnings(action="ignore"):  # of a library without a display, before it fails
                env.reset()
                env.render()
                env.close()  # a used one is not like a new one, see the trap in train
                env = gym.make(env_id, render_mode="rgb_array", disable_env_checker=True)
        except Exception as error:
            fail(
                f"--capture-video cannot render {env_id} ({error}); without a display, MuJoCo needs EGL "
                "(Debian: apt install libegl1) or OSMesa (apt install libosmesa6)"
            )
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    if len(env.action_space.shape) != 1 or env.action_space.dtype != np.float32:
        box = env.action_space
        flat = gym.spaces.Box(box.low.ravel(), box.high.ravel(), dtype=np.float32)
        # Trap: a bound of float64 may round to a float32 outside the box, hence the second clip
        env = gym.wrappers.TransformAction(
            env, lambda action: action.reshape(box.shape).astype(box.dtype).clip(box.low, box.high), flat
        )
    return env


def record(env: gym.Env, run_folder: Path, name: str) -> gym.Env:
    """Film the first episode of the environment, into the run folder."""
    folder = str(run_folder / "videos")
    return gym.wrappers.RecordVideo(env, folder, lambda episode: episode == 0, name_prefix=name, disable_logger=True)


def reset_seeds(seed: int, *key: int, num: int) -> list[int]:
    """Seeds for `num` environments, made of the run's seed and a key: the same key gives the same episodes."""
    return [int(word) >> 1 for word in np.random.SeedSequence([seed, *key]).generate_state(num)]  # 31 bits


def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights with gain `std`, zero bias ([37], core detail 2)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function: two separate tanh networks, and a log-std that does not depend on the observation.

    Args:
        obs_dim: D, the length of the flat observation.
        action_dim: A, the number of action components.
        log_std_init: the log-std of all components at first.
    """

    def __init__(self, obs_dim: int, action_dim: int, log_std_init: float = 0.0) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, action_dim), std=0.01),  # Detail: the first actions are close to zero
        )
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )
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

    def numpy_actor(self):
        """The actor as a numpy function obs (N, D) -> mean action (N, A). To be made anew after each update.

        One observation at a time, torch's overhead is several times the arithmetic (benchmark/tricks.py).
        """
        weights = [parameter.detach().cpu().numpy() for parameter in self.actor.parameters()]
        (*hidden, last) = zip(weights[::2], weights[1::2])

        def mean_action(obs: np.ndarray) -> np.ndarray:
            for weight, bias in hidden:
                obs = np.tanh(obs @ weight.T + bias)
            return obs @ last[0].T + last[1]

        return mean_action


class RunningMeanStd:
    """Mean and variance of all rows seen so far, in float64 (Chan, Golub, LeVeque 1983; one row: Welford 1962).

    Args:
        shape: the shape of a row, () for scalars.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean = np.zeros(shape)
        self.m2 = np.zeros(shape)  # sum of squared deviations from the mean

    def update(self, rows: np.ndarray) -> None:
        """Merge rows (N, *shape). Exact: the sum of squares grows by sum (x - mean before) (x - mean after)."""
        if not self.count:  # Trap: from a mean far off, rounding errors are as large as the variance
            self.mean = np.array(rows[0], float)
        self.count += len(rows)
        deviation = rows - self.mean
        self.mean = self.mean + np.add.reduce(deviation) / self.count
        self.m2 = self.m2 + np.add.reduce(deviation * (rows - self.mean))

    def update_in_turn(self, rows: np.ndarray) -> np.ndarray:
        """Merge scalars (T, N), and return the standard deviation (T,) as it was after each row of N."""
        mean = self.mean if self.count else rows[0, 0]
        counts = self.count + rows.shape[1] * np.arange(1, len(rows) + 1)
        sums, squares = (np.add.reduce(deviation, 1).cumsum() for deviation in (rows - mean, (rows - mean) ** 2))
        m2 = self.m2 + squares - sums**2 / counts  # sum (x - mean)^2 = sum (x - c)^2 - (sum (x - c))^2 / count
        self.update(rows.ravel())
        return np.sqrt(m2.clip(0) / counts + 1e-8)

    @property
    def std(self) -> np.ndarray:
        """The standard deviation, never zero."""
        return np.sqrt(self.m2 / max(self.count, 1) + 1e-8)

    def normalise(self, rows: np.ndarray) -> np.ndarray:
        """(x - mean) / std, clipped to [-10, 10], as float32 ([37], continuous actions, details 6 and 7)."""
        return ((rows - self.mean) / self.std).clip(-10, 10).astype(np.float32)

    def state_dict(self) -> dict:
        return {"count": self.count, "mean": torch.tensor(self.mean), "m2": torch.tensor(self.m2)}

    def load_state_dict(self, state: dict) -> None:
        self.count, self.mean, self.m2 = state["count"], state["mean"].numpy(), state["m2"].numpy()


def compute_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminations: np.ndarray,
    truncations: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    r"""Generalised advantage estimates (T, N), all arguments (T, N).

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


def ppo_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    values: torch.Tensor,
    old_logprobs: torch.Tensor,
    old_values: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    args: Args,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The loss to be minimised, minus [PPO] Eq. (9), and the parts that are logged. Arguments (B,) but the entropy ().

    Returns the loss () and (policy loss (), value loss (), entropy (), log-ratios (B,)), the latter detached.
    """
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    # [PPO] Eq. (7): a lower bound; a gain beyond the clip earns nothing more, a loss counts in full
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages).mean()
    value_loss = (values - returns).square()
    if args.clip_vloss:  # Detail: from OpenAI's baselines, not in the paper; it has not been found to help
        clipped_values = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.maximum(value_loss, (clipped_values - returns).square())
    value_loss = 0.5 * value_loss.mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, (policy_loss.detach(), value_loss.detach(), entropy.detach(), logratio.detach())


def loss_gradient(agent: Agent, theta: torch.Tensor, minibatch: tuple, args: Args):
    """Gradient of the loss at the parameters `theta` (P,), and the loss's parts. A pure function: it can be traced.

    Only the structure of `agent` is used, so it may lie on the device "meta" (and must not share memory with theta).
    """
    obs, actions, *rest = minibatch
    shapes = {name: parameter.shape for name, parameter in agent.named_parameters()}

    def loss_of(theta):
        views = theta.split([shape.numel() for shape in shapes.values()])
        parameters = {name: view.view(shape) for (name, shape), view in zip(shapes.items(), views)}
        return ppo_loss(*torch.func.functional_call(agent, parameters, (obs, actions)), *rest, args)

    return torch.func.grad(loss_of, has_aux=True)(theta)


def minibatch_step(agent: Agent, args: Args, theta, exp_avg, exp_avg_sq, step_size, bias_correction, minibatch):
    r"""One step of Adam on one minibatch, in place. Returns the loss's parts and the norm of the gradient ().

    m = \beta_1 m + (1 - \beta_1) g,   v = \beta_2 v + (1 - \beta_2) g^2                                [ADAM] Alg. 1
    \theta = \theta - step_size * m / (\sqrt{v} / bias_correction + \epsilon)

    with step_size = lr / (1 - \beta_1^t) and bias_correction = \sqrt{1 - \beta_2^t}, numbers or tensors (). Written out
    because it is then traced together with the gradient, see `straight_line`.
    """
    grad, parts = loss_gradient(agent, theta, minibatch, args)
    grad_norm = grad.norm()
    grad = grad * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    exp_avg.lerp_(grad, 1 - 0.9)
    exp_avg_sq.lerp_(grad.square(), 1 - 0.999)
    theta.sub_(step_size * exp_avg / (exp_avg_sq.sqrt() / bias_correction + 1e-5))  # Detail: eps 1e-5, not 1e-8
    return *parts, grad_norm


def straight_line(step: Callable, *example) -> Callable:
    """The function `step` as a straight line of tensor operations, traced once; `example` are arguments (copied).

    Autograd finds out anew in every minibatch what it has to do, and for networks this small that takes longer than
    doing it. The traced step does the same operations in the same order, so its results are the same to the bit, and
    is much faster (benchmark/tricks.py). All that is Python in it (shapes, coefficients, flags) is fixed.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    example = copy.deepcopy(example)
    graph = make_fx(step)(*example)
    if example[0].is_cuda:  # there TorchScript would compile kernels of its own, with other rounding
        return graph
    with warnings.catch_warnings(action="ignore"):  # deprecated in favour of torch.compile, which needs a C++ compiler
        return torch.jit.trace(graph, example, check_trace=False)


def evaluate(args: Args, model: dict, run_folder: Path) -> list[float]:
    """Play `args.eval_episodes` whole episodes with the mean action and frozen statistics, and print the score.

    `model` is a checkpoint or what model.pt holds. Returns the undiscounted, unscaled returns. The episodes depend on
    args.seed alone and are none of training's; one that does not end is cut after 100,000 steps.
    """
    env = make_env(args.env_id, render=args.capture_video)
    if args.capture_video:
        env = record(env, run_folder, "evaluation")
    low, high = env.action_space.low, env.action_space.high
    agent, obs_stats = Agent(len(env.observation_space.low), len(low)), RunningMeanStd(env.observation_space.shape)
    agent.load_state_dict(model["agent"])
    obs_stats.load_state_dict(model["obs_stats"])
    mean_action, returns = agent.numpy_actor(), []
    for env_seed in reset_seeds(args.seed, 0, 1, num=args.eval_episodes):
        obs, _ = env.reset(seed=env_seed)
        returns.append(0.0)
        for _ in range(100_000):
            action = mean_action(obs_stats.normalise(obs)).clip(low, high)
            obs, reward, terminated, truncated, _ = env.step(action)
            returns[-1] += float(reward)
            if terminated or truncated:
                break
    env.close()
    print(
        f"evaluation: {np.mean(returns):.2f} +- {np.std(returns):.2f} over {len(returns)} episodes of the mean action"
    )
    print("returns: " + " ".join(f"{value:.2f}" for value in returns), flush=True)
    return returns


def checkpoints(run_folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in run_folder.glob("checkpoint_*.pt") if path.stem[11:].isdecimal()]
    return sorted(found, key=lambda path: int(path.stem[11:]))


def write_atomically(path: Path, content: dict | str) -> None:
    """Write a checkpoint or a text so that `path` holds all of it or is not there: another name, a sync, a rename."""
    buffer = io.BytesIO(content.encode() if isinstance(content, str) else b"")
    if isinstance(content, dict):
        torch.save(content, buffer)
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def save_checkpoint(run_folder: Path, state: dict) -> None:
    """Write checkpoint_{global_step}.pt, keep the last two. FloatingPointError where a parameter is not finite."""
    if not all(tensor.isfinite().all() for tensor in state["agent"].values()):
        raise FloatingPointError(f"the parameters are not finite at step {state['global_step']:,}")
    write_atomically(run_folder / f"checkpoint_{state['global_step']}.pt", state)
    for path in checkpoints(run_folder)[:-2]:
        path.unlink()


def read_checkpoint(path: Path) -> dict:
    """Load one file of this script, running no pickled code. Raises ValueError that says what is wrong with it."""
    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip():  # Trap: torch.load does not compare the checksums
                raise ValueError("checksum")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is damaged or no checkpoint") from error
    parts = set(checkpoint) if isinstance(checkpoint, dict) else set()
    if not parts >= {"script", "args", "global_step", "agent"} or checkpoint["script"] != SCRIPT:
        raise ValueError(f"{path} is no checkpoint of {SCRIPT}.py")
    found = env_id = checkpoint["args"]["env_id"]
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # a file of something else says nothing
        env_id = json.loads((path.parent / "args.json").read_text())["env_id"]
    if found != env_id:
        raise ValueError(f"{path} is a checkpoint of {found} in a run of {env_id}")
    return checkpoint


def first_sound(paths: Iterable[Path], otherwise: str) -> dict:
    """What the first sound file of these holds; damaged ones are named. Where there is none it says `otherwise`."""
    problems = []
    for path in paths:
        try:
            checkpoint = read_checkpoint(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            print(f"note: {problem}; using {path.name}", file=sys.stderr)
        return checkpoint
    fail("; ".join(problems) or otherwise)


def load_checkpoint(name: str) -> dict:
    """The checkpoint or model in a file, or the newest sound checkpoint of a run folder."""
    path = Path(name)
    if not name or not path.exists():
        fail(f"there is no file or folder {name!r}")
    found = reversed(checkpoints(path)) if path.is_dir() else [path]
    return first_sound(found, f"{name} holds no checkpoint of {SCRIPT}.py")


def go_on(run_folder: Path, checkpoint: dict, args: dict) -> None:
    """Make a run folder ready for a run that goes on: a run killed before its next checkpoint keeps its new arguments.

    Newer checkpoints, which were found damaged, are renamed: they would count as two that are kept.
    """
    for path in checkpoints(run_folder):
        if int(path.stem[11:]) > checkpoint["global_step"]:
            path.rename(path.with_suffix(".damaged"))
    if args != checkpoint["args"] or not checkpoints(run_folder):
        save_checkpoint(run_folder, checkpoint | {"args": args})


def how_to_resume(run_folder: Path | None) -> str:
    """What to add to the message of a run that ends before its time."""
    if run_folder is None or not checkpoints(run_folder):
        return ""
    newest, folder = checkpoints(run_folder)[-1], shlex.quote(str(run_folder))
    return f"; the last good checkpoint is {newest}; resume with: python {sys.argv[0]} --resume {folder}"


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived; the argument is the signal's number."""


def interrupt(signum: int, frame: object) -> NoReturn:
    """The handler of both signals: the first one ends the run, further ones change nothing."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: None)  # Trap: SIG_IGN complains of a second signal that has just arrived
    raise Interrupted(signum)


def revive(lost) -> None:
    """The hook for exceptions that Python drops, as in callbacks of the garbage collector: signals come again."""
    if not isinstance(lost.exc_value, Interrupted):
        return sys.__unraisablehook__(lost)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, interrupt)
    threading.Timer(0.01, os.kill, (os.getpid(), lost.exc_value.args[0])).start()


class Progress:
    """The state of the run in one line: rewritten in place on a terminal, else a plain line at most every 10 s."""

    def __init__(self, first_step: int, last_step: int) -> None:
        self.first_step, self.last_step = first_step, last_step
        self.started = time.perf_counter()
        self.shown = -math.inf

    def sps(self, global_step: int) -> float:
        """Environment steps per second since this process began to train."""
        return (global_step - self.first_step) / (time.perf_counter() - self.started)

    def show(self, global_step: int, recent_returns: deque) -> None:
        """Show steps, speed, the mean return of the last episodes and the time left."""
        terminal, now, last = sys.stdout.isatty(), time.perf_counter(), global_step >= self.last_step
        if not last and now - self.shown < (0.1 if terminal else 10):
            return
        self.shown = now
        sps = self.sps(global_step)
        left = int((self.last_step - global_step) / max(sps, 1e-9))
        score = f"{np.mean(recent_returns):.1f}" if recent_returns else "-"
        line = (
            f"{global_step:,}/{self.last_step:,} steps  {sps:,.0f} steps/s  "
            f"return {score} (last {len(recent_returns)})  {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        )
        print(f"\r{line}\x1b[K" if terminal else line, end="\n" if last or not terminal else "", flush=True)


def make_writer(args: Args, run_folder: Path, resumed_step: int | None) -> SummaryWriter:
    """Open the TensorBoard log, and W&B with `--track`. A resumed run's log goes on where its checkpoint was written.

    Each checkpoint is preceded by a point `charts/checkpoint`. On resuming, everything up to that point is copied into
    a new event file and the old files are removed: what was logged between the checkpoint and the interruption will be
    logged again. W&B replaces the run of the same id by what it reads in the new file, so its curve is whole too.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    old_files = sorted(run_folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_size)
    if args.track:
        import wandb

        shutil.rmtree(run_folder / "wandb", ignore_errors=True)
        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            id=run_folder.name,
            name=run_folder.name,
            config=vars(args),
            dir=run_folder,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # This is sync_tensorboard. Trap: without save=False, W&B links the run folder into a folder of the run folder,
        # follows the link, and logs every point again and again.
        wandb.tensorboard.patch(save=False, root_logdir=str(run_folder), pytorch=True)
    # On a full disk TensorBoard's thread fails with a traceback, and then the next call, whose one line is enough
    threading.excepthook = lambda failure: failure.exc_type is OSError or threading.__excepthook__(failure)
    writer = SummaryWriter(str(run_folder), flush_secs=10)
    if not old_files:
        rows = "\n".join(f"|{name}|{value}|" for name, value in vars(args).items())
        writer.add_text("hyperparameters", f"|argument|value|\n|-|-|\n{rows}")
    # The largest file: a copy that was itself interrupted is smaller than what it copies
    for event in map(Event.FromString, RawEventFileLoader(str(old_files[-1])).Load() if old_files else ()):
        if not event.HasField("file_version"):
            writer.file_writer.event_writer.add_event(event)
        if event.step == resumed_step and any(v.tag == "charts/checkpoint" for v in event.summary.value):
            break
    writer.flush()
    for path in old_files:
        path.unlink()
    return writer


def finish_tracking(run_folder: Path) -> None:
    """Send the videos to W&B and end its run. (Its own `monitor_gym` fails with gymnasium 1.)"""
    import wandb

    films = sorted((run_folder / "videos").glob("*.mp4"))
    if films:
        wandb.log({f"videos/{path.stem}": wandb.Video(str(path), format="mp4") for path in films})
    wandb.finish()


def command_line(args: Args) -> str:
    """The command that makes this run from its beginning, with what differs from the defaults."""
    words = ["python", f"{SCRIPT}.py"]
    for name, value in vars(args).items():
        flag = name.replace("_", "-")
        if name != "resume" and value != getattr(Args(), name):
            words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return shlex.join(words)


def upload_model(args: Args, run_folder: Path, returns: list[float]) -> None:
    """Upload model.pt, the arguments and a model card to the Hugging Face hub, or say why they were not."""
    from huggingface_hub import HfApi

    name = f"{args.env_id.replace('/', '-')}-{args.exp_name}-seed{args.seed}"
    card = f"""---
tags: [reinforcement-learning, {args.env_id}, {SCRIPT}]
---
# {args.env_id}, {SCRIPT}.py

Return {np.mean(returns):.2f} +- {np.std(returns):.2f}: mean and standard deviation of {len(returns)} episodes.

Trained by `{command_line(args)}`; played by `python {SCRIPT}.py --evaluate model.pt`.

```json
{json.dumps(vars(args) | {"resume": None}, indent=2)}
```
"""
    try:
        api = HfApi()
        repo_id = api.create_repo(f"{args.hf_entity}/{name}" if args.hf_entity else name, exist_ok=True).repo_id
        api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repo_id)
        for file in ("model.pt", "args.json"):
            api.upload_file(path_or_fileobj=run_folder / file, path_in_repo=file, repo_id=repo_id)
    except Exception as error:  # no network, no right: the hub's library has many kinds
        fail(f"the model is in {run_folder}, but was not uploaded: {error}", status=1)


def train(args: Args, run_folder: Path, checkpoint: dict | None) -> None:
    """Train from the beginning or from a checkpoint. Raises FloatingPointError where a gradient is not finite."""
    T, N = args.num_steps, args.num_envs
    batch_size = T * N
    global_step = checkpoint["global_step"] if checkpoint else 0
    last_step = global_step + max(0, math.ceil((args.total_timesteps - global_step) / batch_size)) * batch_size
    if last_step != args.total_timesteps > global_step:
        batches = f"{last_step // batch_size:,} batches of {batch_size:,}"
        print(f"note: {args.total_timesteps:,} steps are rounded up to {last_step:,} ({batches})", file=sys.stderr)
    device = choose_device(args)
    torch.manual_seed(args.seed)  # the parameters
    rng = np.random.default_rng(args.seed)  # the noise and the minibatches

    envs = [make_env(args.env_id)]  # for its spaces
    low, high = envs[0].action_space.low, envs[0].action_space.high
    obs_dim, action_dim = len(envs[0].observation_space.low), len(low)

    agent = Agent(obs_dim, action_dim, args.log_std_init).to(device)
    theta = nn.utils.parameters_to_vector(agent.parameters()).detach().clone()
    nn.utils.vector_to_parameters(theta, agent.parameters())  # from here on they are views of theta
    exp_avg, exp_avg_sq = torch.zeros_like(theta), torch.zeros_like(theta)
    obs_stats, return_stats = RunningMeanStd((obs_dim,)), RunningMeanStd(())
    recent_returns = deque(maxlen=100)
    adam_steps = 0
    if checkpoint:
        adam_steps = checkpoint["adam_steps"]
        agent.load_state_dict(checkpoint["agent"])  # in place: the parameters remain views of theta
        exp_avg.copy_(checkpoint["exp_avg"])
        exp_avg_sq.copy_(checkpoint["exp_avg_sq"])
        obs_stats.load_state_dict(checkpoint["obs_stats"])
        return_stats.load_state_dict(checkpoint["return_stats"])
        rng.bit_generator.state = checkpoint["rng"]
        recent_returns.extend(checkpoint["recent_returns"])

    def model() -> dict:
        return {
            "script": SCRIPT,
            "args": vars(args) | {"resume": None, "evaluate": None},
            "global_step": global_step,
            "agent": agent.state_dict(),
            "obs_stats": obs_stats.state_dict(),
        }

    def save() -> None:
        """A checkpoint is the model and all else that the rest of the run depends on."""
        writer.add_scalar("charts/checkpoint", global_step, global_step)
        writer.flush()
        rest = {
            "adam_steps": adam_steps,
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
            "return_stats": return_stats.state_dict(),
            "rng": rng.bit_generator.state,
            "recent_returns": list(recent_returns),
        }
        save_checkpoint(run_folder, model() | rest)

    writer = make_writer(args, run_folder, global_step if checkpoint else None)
    if not checkpoint:
        save()
    progress = Progress(global_step, last_step)

    update = functools.partial(minibatch_step, Agent(obs_dim, action_dim).to("meta"), args)
    if args.compile:
        for tensor in (theta, exp_avg, exp_avg_sq):  # for CUDA graphs: these stay where they are
            torch._dynamo.mark_static_address(tensor)
        options = {"triton.cudagraphs": True} if device.type == "cuda" else {"cpp_wrapper": True}
        update = torch.compile(update, fullgraph=True, options=options)
    else:
        shapes = [(obs_dim,), (action_dim,), (), (), (), ()]
        minibatch = tuple(torch.zeros(batch_size // args.num_minibatches, *shape, device=device) for shape in shapes)
        update = straight_line(update, theta, exp_avg, exp_avg_sq, *torch.ones(2, device=device), minibatch)

    obs = np.zeros((T, N, obs_dim), np.float32)
    successors = np.zeros((T, N, obs_dim), np.float32)
    actions = np.zeros((T, N, action_dim), np.float32)
    raw_rewards, discounted_returns = np.zeros((T, N)), np.zeros((T, N))
    terminations = np.zeros((T, N), bool)
    truncations = np.zeros((T, N), bool)
    raw_obs = np.zeros((N, obs_dim))
    next_obs = None

    while global_step < last_step:
        if next_obs is None:  # at the start and after each checkpoint
            for env in envs:
                env.close()
            # Trap: a reset is not enough. It leaves traces in some environments (Box2D's walker keeps its world)
            envs = [make_env(args.env_id, render=args.capture_video and i == 0) for i in range(N)]
            if args.capture_video:
                envs[0] = record(envs[0], run_folder, f"train-from-{global_step}")
            for i, env_seed in enumerate(reset_seeds(args.seed, global_step, num=N)):
                raw_obs[i], _ = envs[i].reset(seed=env_seed)
            obs_stats.update(raw_obs)
            next_obs = obs_stats.normalise(raw_obs)  # (N, D)
            discounted_return, episodic_returns, episodic_lengths = np.zeros(N), np.zeros(N), np.zeros(N, int)
        learning_rate = args.learning_rate * (1 - global_step / last_step if args.anneal_lr else 1)

        # Collect T steps in each environment with the policy held fixed: [PPO] Alg. 1, line 3
        mean_action = agent.numpy_actor()
        noise = rng.standard_normal((T, N, action_dim), np.float32) * agent.log_std.detach().exp().cpu().numpy()
        for t in range(T):
            obs[t] = next_obs
            actions[t] = mean_action(next_obs) + noise[t]
            env_actions = actions[t].clip(low, high)  # Detail: the loss sees the Gaussian's own, unclipped action
            ended = []
            for i, env in enumerate(envs):
                raw_obs[i], raw_rewards[t, i], terminated, truncated, _ = env.step(env_actions[i])
                terminations[t, i], truncations[t, i] = terminated, truncated
                if terminated or truncated:
                    ended.append(i)
            global_step += N
            obs_stats.update(raw_obs)
            successors[t] = next_obs = obs_stats.normalise(raw_obs)
            discounted_return = args.gamma * discounted_return + raw_rewards[t]
            discounted_returns[t] = discounted_return
            episodic_returns += raw_rewards[t]
            episodic_lengths += 1
            for i in ended:
                recent_returns.append(float(episodic_returns[i]))
                writer.add_scalar("charts/episodic_return", episodic_returns[i], global_step)
                writer.add_scalar("charts/episodic_length", episodic_lengths[i], global_step)
                raw_obs[i], _ = envs[i].reset()
                obs_stats.update(raw_obs[i : i + 1])
                next_obs[i] = obs_stats.normalise(raw_obs[i])
                discounted_return[i] = episodic_returns[i] = episodic_lengths[i] = 0
        # Detail: the mean is not subtracted, only the scale is changed ([37], continuous actions, details 8 and 9)
        scale = return_stats.update_in_turn(discounted_returns)[:, None]  # (T, 1)
        rewards = (raw_rewards / scale).clip(-10, 10).astype(np.float32)

        # Estimate the advantages: [PPO] Alg. 1, line 4
        b_obs = torch.from_numpy(obs).view(batch_size, obs_dim).to(device)
        b_actions = torch.from_numpy(actions).view(batch_size, action_dim).to(device)
        with torch.no_grad():
            b_logprobs, _, b_values = agent(b_obs, b_actions)
            next_values = agent.critic(torch.from_numpy(successors).to(device)).squeeze(-1).cpu().numpy()
        values = b_values.view(T, N).cpu().numpy()
        ends = terminations if args.bootstrap_truncation else terminations | truncations
        advantages = compute_gae(rewards, values, next_values, ends, truncations, args.gamma, args.gae_lambda)
        b_advantages = torch.from_numpy(advantages).view(batch_size).to(device)
        b_returns = b_advantages + b_values

        # K passes of minibatches: [PPO] Alg. 1, line 6
        details = []
        for _ in range(args.update_epochs):
            order = torch.from_numpy(rng.permutation(batch_size)).to(device)
            mb_obs, mb_actions, mb_logprobs, mb_values, mb_advantages, mb_returns = (
                rows[order].view(args.num_minibatches, -1, *rows.shape[1:])
                for rows in (b_obs, b_actions, b_logprobs, b_values, b_advantages, b_returns)
            )
            if args.norm_adv and mb_advantages.shape[1] > 1:  # one sample has no standard deviation
                mb_advantages = mb_advantages - mb_advantages.mean(1, keepdim=True)
                mb_advantages = mb_advantages / (mb_advantages.std(1, keepdim=True) + 1e-8)
            for minibatch in zip(mb_obs, mb_actions, mb_logprobs, mb_values, mb_advantages, mb_returns):
                adam_steps += 1
                # Trap: a number would be compiled in
                step_size = torch.tensor(learning_rate / (1 - 0.9**adam_steps), device=device)
                bias_correction = torch.tensor(math.sqrt(1 - 0.999**adam_steps), device=device)
                parts = update(theta, exp_avg, exp_avg_sq, step_size, bias_correction, minibatch)
                # Trap: a CUDA graph overwrites its outputs
                details.append([part.clone() for part in parts] if device.type == "cuda" else parts)
            logratios = torch.stack([logratio for *_, logratio, _ in details[-args.num_minibatches :]])
            # [37]: two estimates of KL(old || new), http://joschu.net/blog/kl-approx.html; the second has less variance
            old_approx_kl, approx_kl = -logratios.mean(), (logratios.exp() - 1 - logratios).mean()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        policy_loss, value_loss, entropy, logratios, grad_norm = map(torch.stack, zip(*details))
        if not grad_norm.isfinite().all():
            raise FloatingPointError(f"the gradient is not finite at step {global_step:,}")
        scalars = {
            "charts/learning_rate": learning_rate,
            "charts/SPS": progress.sps(global_step),
            "losses/policy_loss": policy_loss.mean(),
            "losses/value_loss": value_loss.mean(),
            "losses/entropy": entropy.mean(),
            "losses/old_approx_kl": old_approx_kl,
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": ((logratios.exp() - 1).abs() > args.clip_coef).float().mean(),
            "losses/explained_variance": 1 - np.var(advantages) / max(np.var(advantages + values), 1e-12),
            "losses/grad_norm": grad_norm.mean(),
        }
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, global_step)
        progress.show(global_step, recent_returns)
        if global_step // args.checkpoint_interval > (global_step - batch_size) // args.checkpoint_interval:
            save()
            next_obs = None

    if next_obs is not None:
        save()
    for env in envs:
        env.close()
    returns = evaluate(args, model(), run_folder)
    writer.add_scalar("eval/episodic_return", np.mean(returns), global_step)
    if args.save_model:
        write_atomically(run_folder / "model.pt", model())
    writer.close()
    if args.track:
        finish_tracking(run_folder)
    if args.upload_model:
        upload_model(args, run_folder, returns)


def main() -> None:
    """Evaluate a checkpoint, go on with a run, or start a new one."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, interrupt)
    sys.unraisablehook = revive
    run_folder = None
    try:
        args, checkpoint = parse_args()
        args.check()
        # What is wrong with the environment is said before anything is written
        make_env(args.env_id, render=args.capture_video).close()
        check_services(args)
        begun = checkpoint["args"].get("log_std_init", 0.0) if args.resume else args.log_std_init
        if begun != args.log_std_init:
            fail(f"--log-std-init {args.log_std_init} has no effect on {args.resume}, which has begun with {begun}")
        if args.evaluate:
            path = Path(args.evaluate)
            evaluate(args, checkpoint, path if path.is_dir() else path.parent)
            return
        run_name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(time.time())}"
        run_folder = Path(args.resume or f"runs/{run_name}")
        run_folder.mkdir(parents=True, exist_ok=bool(args.resume))
        saved_args = vars(args) | {"resume": None, "evaluate": None}
        write_atomically(run_folder / "args.json", json.dumps(saved_args, indent=2))
        print(f"run folder: {run_folder}", flush=True)
        if checkpoint:
            go_on(run_folder, checkpoint, saved_args)
        train(args, run_folder, checkpoint)
    except Interrupted as interrupted:
        status = 128 + interrupted.args[0]
        print(
            ("\n" if sys.stdout.isatty() else "") + f"interrupted{how_to_resume(run_folder)}",
            file=sys.stderr,
            flush=True,
        )
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish(exit_code=status)
        os._exit(status)  # at once, whatever compilers and other threads are at
    except (FloatingPointError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):  # torch's only sign of a full memory
            raise
        fail(f"{str(error) or 'no memory is left'}{how_to_resume(run_folder)}", status=1)


if __name__ == "__main__":
    main()
