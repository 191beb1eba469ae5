# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "gymnasium==1.3.0",
#     "ale-py==0.12.1",
#     "numpy==2.4.6",
#     "tyro==1.0.17",
#     "tensorboard==2.21.0",
#     "wandb==0.31.0",
#     "moviepy==2.2.1",
#     "huggingface-hub==2.4.0",
# ]
# ///
r"""Advantage actor-critic (A2C) on Atari: the synchronous, batched variant of A3C.

The policy plays `num_steps` steps in every game; an action's return is the rewards up to the rollout's end plus the
value of the state that it ended in. One step of gradient descent then makes actions that returned more than the
value function expected more likely, fits the value function to the returns, and keeps the policy's entropy up.

[A3C]   Mnih, Badia, Mirza, Graves, Lillicrap, Harley, Silver, Kavukcuoglu 2016, "Asynchronous methods for deep
        reinforcement learning", ICML, arXiv:1602.01783
[DQN]   Mnih, Kavukcuoglu, Silver, et al. 2015, "Human-level control through deep reinforcement learning", Nature 518
[GAE]   Schulman, Moritz, Levine, Jordan, Abbeel 2016, "High-dimensional continuous control using generalized advantage
        estimation", ICLR, arXiv:1506.02438
[TIME]  Pardo, Tavakoli, Levdik, Kormushev 2018, "Time limits in reinforcement learning", ICML, arXiv:1712.00378
[ALE]   Machado, Bellemare, Talvitie, Veness, Hausknecht, Bowling 2018, "Revisiting the arcade learning environment",
        JAIR 61, arXiv:1709.06009
[PPO]   Schulman, Wolski, Dhariwal, Radford, Klimov 2017, "Proximal policy optimization algorithms", arXiv:1707.06347
[37]    Huang, Dossa, Raffin, Kanervisto, Wang 2022, "The 37 implementation details of PPO", ICLR blog track

    symbol          variable           shape            meaning (T num_steps, N num_envs, A number of actions)
    s_t             pixels             (N, 4, 84, 84)   the last four frames, uint8, one per agent step
    a_t             actions            (T, N)           index of a joystick position
    r_t             rewards            (T, N)           reward, its sign only
    R_t             returns            (T, N)           n-step return, [A3C] Alg. S3
    A               advantages         (T, N)           R_t - V(s_t), [A3C] Sec. 4; with lambda < 1 [GAE] Eq. (16)
                    chosen             (T, N)           1 where the agent chose a_t, 0 where FIRE was pressed for it
    \pi(a|s)        logits             (T * N, A)       before the softmax
    V(s)            values             (T, N)           value function
    H               entropy            ()               entropy of the policy
    \beta           ent_coef                            weight of the entropy, [A3C] Sec. 4
    t_max           num_steps                           length of a rollout
    \theta          theta              (P,)             all parameters in one vector
    g               square_avg         (P,)             moving average of the squared gradient, [A3C] Sec. 4

Where this differs from common practice, and why:
  * RMSprop is TensorFlow's by default (epsilon inside the root, the average starting at one). The first steps of
    PyTorch's are thousands of times as large, and whether Pong is learned has been seen to depend on it.
  * A lost life ends the return, not the game. On the first step of each life FIRE is pressed for the agent: a game like
    Breakout would otherwise wait for ever for a policy that has forgotten to. It is not credited to the policy (such a
    step still fits the value function, and the policy's entropy there counts).
  * [A3C] itself has one worker per game without a lock, a smaller network, a learning rate that falls to zero
    (`--anneal-lr`), sums over the rollout where this has means, and no clipping of the gradient.
  * A time limit is not a failure: at a truncation the value of the last observation is bootstrapped ([TIME]).
  * Rewards are clipped to their sign for learning only; what is logged is the whole game's score.
  * Ids mean what they mean elsewhere: `BreakoutNoFrameskip-v4` and `BreakoutDeterministic-v4` know no sticky actions,
    `ALE/Breakout-v5` repeats the last action with probability 0.25 ([ALE]). An agent step is always four frames.
  * At each checkpoint all games begin anew with a seed made of (seed, global_step), whether or not the run is
    interrupted there. The emulators cannot save their state; so nothing needs it, and resuming is exact to the bit.

Steps are agent steps, four frames each. Two torch threads pay on a quiet machine (the convolutions are large enough)
and lose on a busy one. Scores and speeds: README.md.

    python a2c_atari.py --env-id BreakoutNoFrameskip-v4            # writes runs/BreakoutNoFrameskip-v4__a2c_...
    python a2c_atari.py --resume runs/BreakoutNoFrameskip-v4__...   # goes on after an interruption, exactly
    python a2c_atari.py --evaluate runs/BreakoutNoFrameskip-v4__.../model.pt --eval-episodes 20
"""

import contextlib
import difflib
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
import zipfile
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
from torch.utils.tensorboard import SummaryWriter

SCRIPT = "a2c_atari"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # that it may use


@dataclass
class Args:
    """Advantage actor-critic on Atari."""

    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of the parameters, the actions and the environments"""
    torch_deterministic: bool = True
    """if toggled, cuDNN uses deterministic algorithms only"""
    cuda: bool = True
    """if toggled, the networks are trained on the GPU (on the CPU where there is none)"""
    strict_cuda: bool = False
    """if toggled, `--cuda` on a machine without a CUDA device is an error"""
    torch_threads: int = min(2, CORES)
    """threads of torch on the CPU; two are faster than one on a quiet machine and far slower on a busy one"""
    compile: bool = False
    """if toggled, the network is compiled (up to a minute of compilation; needs a C++ compiler on the CPU)"""
    bf16: bool = False
    """if toggled, the network computes in bfloat16 (its parameters stay float32): faster, other numbers"""
    track: bool = False
    """if toggled, the run is tracked with Weights and Biases"""
    wandb_project_name: str = "deep-rl-reference"
    """the project of the tracked run"""
    wandb_entity: str | None = None
    """the entity (user or team) of the tracked run"""
    capture_video: bool = False
    """if toggled, videos of the first game after each checkpoint, if it ends before the next, and of the evaluation"""
    save_model: bool = True
    """if toggled, the trained parameters are saved as model.pt in the run folder"""
    upload_model: bool = False
    """if toggled, the saved model and its card are uploaded to the Hugging Face hub"""
    hf_entity: str = ""
    """the user or organisation on the Hugging Face hub (default: yours)"""
    checkpoint_interval: int = 500_000
    """agent steps between checkpoints (each begins all games anew, see the title)"""
    resume: str | None = None
    """a run folder: go on from its newest checkpoint, with its arguments where none are given here"""
    evaluate: str | None = None
    """a checkpoint, a model.pt or a run folder: do not train, play `--eval-episodes` episodes with it"""
    eval_episodes: int = 10
    """whole games played at the end of training, or by `--evaluate`"""
    greedy: bool = False
    """if toggled, the evaluation plays the likeliest action instead of sampling the policy"""
    log_interval: int = 100
    """updates between points of the losses in the log"""

    env_id: str = "BreakoutNoFrameskip-v4"
    """an Atari game: NameNoFrameskip-v4, NameDeterministic-v4, or ALE/Name-v5 with sticky actions"""
    num_envs: int = 16
    """games played side by side"""
    env_threads: int = 0
    """threads of the emulator (0: as many as there are cores)"""
    episodic_life: bool = True
    """if toggled, a lost life ends the return (the game goes on)"""
    bootstrap_truncation: bool = True
    """if toggled, a game cut off by its time limit is bootstrapped with the value of its last observation"""
    conv3_filters: int = 64
    """filters of the third convolution (64: as [DQN]; 32: as in OpenAI's first A2C)"""

    total_timesteps: int = 10_000_000
    """agent steps of the whole run, all games together, four frames each (rounded up to whole batches)"""
    learning_rate: float = 7e-4
    """the learning rate of RMSprop"""
    anneal_lr: bool = False
    """if toggled, the learning rate falls linearly to zero over the run"""
    num_steps: int = 5
    """t_max: agent steps in each game between updates"""
    gamma: float = 0.99
    """the discount factor"""
    gae_lambda: float = 1.0
    """lambda of generalised advantage estimation; 1 is the paper's n-step return"""
    ent_coef: float = 0.01
    """beta: weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """the norm to which gradients are clipped"""
    rmsprop_alpha: float = 0.99
    """how slowly the average of squared gradients moves"""
    rmsprop_eps: float = 1e-5
    """added to the average of squared gradients (with --torch-rmsprop: to its root)"""
    torch_rmsprop: bool = False
    """if toggled, RMSprop is PyTorch's instead of TensorFlow's"""

    def check(self) -> None:
        """Refuse values that cannot work, in one line."""
        counts = "num_envs num_steps total_timesteps conv3_filters log_interval"
        for names, condition, holds in (
            (f"{counts} checkpoint_interval eval_episodes", "at least 1", lambda value: value >= 1),
            ("torch_threads", "between 1 and 1024", lambda value: 1 <= value <= 1024),
            ("env_threads", "zero or more", lambda value: value >= 0),
            ("seed", "between 0 and 2**32 - 1", lambda value: 0 <= value < 2**32),
            ("learning_rate max_grad_norm rmsprop_eps", "positive and finite", lambda value: 0 < value < math.inf),
            ("ent_coef vf_coef", "zero or more and finite", lambda value: 0 <= value < math.inf),
            ("gamma gae_lambda", "between 0 and 1", lambda value: 0 <= value <= 1),
            ("rmsprop_alpha", "at least 0 and below 1", lambda value: 0 <= value < 1),
            ("exp_name", "fit for a folder's name", lambda value: value == Path(value).name != ""),
        ):
            for name in names.split():
                if not holds(getattr(self, name)):
                    fail(f"--{name.replace('_', '-')} must be {condition}, not {getattr(self, name)!r}")
        batch_size = self.num_envs * self.num_steps
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


def atari_settings(env_id: str) -> dict:
    """What an Atari id means: the game, and the probability that the emulator repeats the last action instead.

    Ends the program with one line where there is no such game or where the id means what cannot be had here.
    """
    gym.register_envs(ale_py)
    games = {spec.name: spec.kwargs["game"] for spec in gym.registry.values() if spec.namespace == "ALE"}
    match = re.fullmatch(r"(?:ALE/(\w+)-v5|([A-Za-z0-9]+?)(?:NoFrameskip|Deterministic)-v[04])", env_id)
    name = match and (match[1] or match[2])
    if name in games:
        sticky = not env_id.endswith("-v4")
        return {"game": games[name], "repeat_action_probability": 0.25 if sticky else 0.0}
    plain = re.sub(r"^ALE/|(-ram)?(NoFrameskip|Deterministic)?(-v\d+)?$", "", env_id)
    if plain in games:
        fail(f"{env_id} is not to be had here: choose {plain}NoFrameskip-v4 or ALE/{plain}-v5 (with sticky actions)")
    lower = {game.lower(): game for game in games}
    nearest = [lower[game] for game in difflib.get_close_matches(plain.lower(), lower, n=3, cutoff=0.5)]
    ids = ", ".join(f"{game}NoFrameskip-v4" for game in nearest)
    fail(f"there is no Atari game {env_id}" + (f"; the nearest names: {ids}" if ids else ""))


def make_envs(args: Args, num_envs: int, colour: bool = False) -> AtariVectorEnv:
    """Make Atari games that step together: observations (N, 4, 84, 84) in uint8, or (N, 1, 210, 160, 3) for a film."""
    shape = {"img_height": 210, "img_width": 160, "stack_num": 1} if colour else {}
    settings = {
        "num_threads": args.env_threads,
        "frameskip": 4,
        "maxpool": True,  # over the last two frames: sprites flicker ([DQN] Methods)
        "grayscale": not colour,
        "img_height": 84,
        "img_width": 84,
        "stack_num": 4,
        "full_action_space": False,
        "noop_max": 30,  # a game begins with fewer than 30 idle frames
        "use_fire_reset": True,
        "max_num_frames_per_episode": 108_000,  # half an hour of play; then the game is truncated
        "reward_clipping": False,  # Trap: True, the default, loses the game's score
        "episodic_life": False,  # Trap: True begins the whole game anew at each lost life
        "life_loss_info": True,  # this one terminates at a lost life and lets the game go on
        "autoreset_mode": gym.vector.AutoresetMode.SAME_STEP,  # no row of a reset ever looks like a step
    }
    return AtariVectorEnv(num_envs=num_envs, **(settings | shape | atari_settings(args.env_id)))


class Games:
    """The bookkeeping of a vector of games: where one is over, where FIRE must be pressed, and the scores.

    Args:
        envs: the games.
        episodic_life: whether a lost life counts as a termination.
    """

    def __init__(self, envs: AtariVectorEnv, episodic_life: bool = True) -> None:
        self.envs, self.episodic_life = envs, episodic_life
        buttons = list(envs.ale.get_action_set())
        self.fire = buttons.index(ale_py.Action.FIRE) if ale_py.Action.FIRE in buttons else None

    def reset(self, seeds: list[int]) -> np.ndarray:
        """Begin all games anew. Returns the observations (N, frames, rows, columns)."""
        pixels, info = self.envs.reset(seed=np.array(seeds))
        self.frames = info["episode_frame_number"]
        self.new_life = np.ones(len(seeds), bool)
        self.scores, self.lengths = np.zeros(len(seeds)), np.zeros(len(seeds), int)
        return pixels

    def press_fire(self, actions: np.ndarray) -> np.ndarray:
        """Overwrite actions (N,) by FIRE on the first step of each life. Returns where the agent chose (N,).

        Of a new game too: the emulator presses FIRE at a reset, but for one frame, which a sticky action may swallow.
        All four frames of this step it swallows once in 256 lives; then the agent has to press FIRE itself.
        """
        if self.fire is None:
            return np.ones(len(actions), bool)
        actions[self.new_life] = self.fire
        return ~self.new_life

    def step(self, actions: np.ndarray) -> tuple:
        """Play one step with actions (N,).

        Returns the next observations, rewards (N,), terminations (N,), truncations (N,), where a game is over (N,), the
        last observations of games that are over (meaningful where one is), and the finished games [(score, length)].
        """
        pixels, rewards, terminations, truncations, info = self.envs.step(actions)
        # Trap: a lost life terminates too, and `lives` is already the next game's; but only a new game counts anew
        over = (terminations | truncations) & (info["episode_frame_number"] < self.frames)
        self.frames = info["episode_frame_number"]
        self.new_life = terminations | truncations
        if not self.episodic_life:
            terminations = terminations & over
        self.scores += rewards
        self.lengths += 1
        finished = [(float(self.scores[i]), int(self.lengths[i])) for i in np.flatnonzero(over)]
        self.scores[over] = self.lengths[over] = 0
        return pixels, rewards, terminations, truncations, over, info.get("final_obs"), finished


def film(args: Args, env_seed: int, actions: list[int], path: Path) -> None:
    """Play a game again from its seed and actions, in colour, and write it to `path` as a video."""
    from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

    envs = make_envs(args, 1, colour=True)
    path.parent.mkdir(exist_ok=True)
    frames, _ = envs.reset(seed=np.array([env_seed]))
    with FFMPEG_VideoWriter(str(path), (320, 420), 15) as video:  # frame by frame: a game may be long
        video.write_frame(frames[0, 0].repeat(2, axis=0).repeat(2, axis=1))
        for action in actions[:-1]:  # the last step shows the next game already
            frames, *_ = envs.step(np.array([action]))
            video.write_frame(frames[0, 0].repeat(2, axis=0).repeat(2, axis=1))
    envs.close()


def reset_seeds(seed: int, *key: int, num: int) -> list[int]:
    """Seeds for `num` environments, made of the run's seed and a key: the same key gives the same episodes."""
    return [int(word) >> 1 for word in np.random.SeedSequence([seed, *key]).generate_state(num)]  # 31 bits


def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights with gain `std`, zero bias ([37], core detail 2)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function on one convolutional trunk ([DQN] Methods, with two heads as in [A3C] Sec. 4).

    Args:
        num_actions: A, the number of joystick positions.
        conv3_filters: filters of the third convolution.
        bf16: whether to compute in bfloat16.
    """

    def __init__(self, num_actions: int, conv3_filters: int = 64, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16
        self.trunk = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),  # (B, 32, 20, 20)
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),  # (B, 64, 9, 9)
            nn.ReLU(),
            layer_init(nn.Conv2d(64, conv3_filters, 3, stride=1)),  # (B, conv3_filters, 7, 7)
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(conv3_filters * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.policy_head = layer_init(nn.Linear(512, num_actions), std=0.01)  # Detail: at first nearly uniform
        self.value_head = layer_init(nn.Linear(512, 1), std=1.0)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, A) and values (B,) of observations (B, 4, 84, 84) in uint8."""
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=self.bf16):
            # channels_last: the layout that convolutions like on the CPU; turned while they are bytes
            pixels = pixels.contiguous(memory_format=torch.channels_last)
            hidden = self.trunk(pixels.to(torch.bfloat16 if self.bf16 else torch.float32).div_(255))
            return self.policy_head(hidden).float(), self.value_head(hidden).squeeze(-1).float()


def sample(logits: torch.Tensor, rng: np.random.Generator) -> np.ndarray:
    """One action (N,) per row of logits (N, A): argmax of logits plus Gumbel noise is a draw from their softmax."""
    return (logits.cpu().numpy() + rng.gumbel(size=logits.shape)).argmax(axis=1)


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


def a2c_loss(
    logits: torch.Tensor,
    values: torch.Tensor,
    actions: torch.Tensor,
    chosen: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    args: Args,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    r"""The loss whose gradient is minus [A3C] Sec. 4's: \log\pi(a|s) A + \beta H(\pi), and the value's (R - V)^2.

    Args:
        logits, values: of the current parameters, (B, A) and (B,).
        actions, chosen: the actions played (B,), and 1 where the agent chose, 0 where FIRE was pressed for it (B,).
        advantages, returns: constants (B,).

    Returns the loss () and (policy loss (), value loss (), entropy ()), the latter detached.
    """
    log_probs = logits.log_softmax(dim=-1)  # (B, A)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    policy_loss = -(advantages * chosen * log_probs.gather(1, actions[:, None]).squeeze(1)).mean()
    value_loss = (returns - values).square().mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    return loss, (policy_loss.detach(), value_loss.detach(), entropy.detach())


def flatten_parameters(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Move all parameters, and their gradients, into one vector each (P,), of which they become views.

    Clipping, zeroing and the optimiser are then a few operations on one tensor instead of a few on each of a dozen.
    """
    theta = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    grad = torch.zeros_like(theta)
    nn.utils.vector_to_parameters(theta, module.parameters())
    for parameter, view in zip(module.parameters(), grad.split([p.numel() for p in module.parameters()])):
        parameter.grad = view.view_as(parameter)
    return theta, grad


def rmsprop_step(theta, grad, square_avg, learning_rate: float, args: Args) -> None:
    r"""One step of RMSprop without momentum, in place on vectors (P,), [A3C] Sec. 4.

    g = \alpha g + (1 - \alpha) \Delta\theta^2,   \theta = \theta - \eta \Delta\theta / \sqrt{g + \epsilon}

    as in the paper; g starts at one, as in TensorFlow. PyTorch divides by \sqrt{g} + \epsilon and starts at zero:
    where gradients are small (say 1e-4, and epsilon 1e-5) its steps are 30 times as large.
    """
    square_avg.lerp_(grad.square(), 1 - args.rmsprop_alpha)
    root = square_avg.sqrt() + args.rmsprop_eps if args.torch_rmsprop else (square_avg + args.rmsprop_eps).sqrt()
    theta.addcdiv_(grad, root, value=-learning_rate)


@torch.no_grad()
def evaluate(args: Args, model: dict, run_folder: Path) -> list[float]:
    """Play `args.eval_episodes` whole games side by side, and print their scores: not clipped, all lives together.

    `model` is a checkpoint or what model.pt holds. Actions are sampled, or the likeliest with `--greedy`. The games
    depend on args.seed and their number, none of training's; the emulator ends each after 108,000 frames.
    """
    device = choose_device(args)
    games = Games(make_envs(args, args.eval_episodes))
    agent = Agent(games.envs.single_action_space.n, args.conv3_filters, args.bf16).to(device)
    agent.load_state_dict(model["agent"])
    rng = np.random.default_rng([args.seed, 0, 1])
    seeds = reset_seeds(args.seed, 0, 1, num=args.eval_episodes)
    pixels = games.reset(seeds)
    returns = np.zeros(args.eval_episodes)
    playing = np.ones(args.eval_episodes, bool)
    first_game = []
    while playing.any():
        logits, _ = agent(torch.from_numpy(pixels).to(device))
        actions = logits.argmax(-1).cpu().numpy() if args.greedy else sample(logits, rng)
        games.press_fire(actions)
        if playing[0]:
            first_game.append(int(actions[0]))
        pixels, rewards, _, _, over, _, _ = games.step(actions)
        returns += rewards * playing
        playing &= ~over
    games.envs.close()
    if args.capture_video:
        film(args, seeds[0], first_game, run_folder / "videos" / f"evaluation-step-{model['global_step']}.mp4")
    kind = "greedy actions" if args.greedy else "sampled actions"
    print(f"evaluation: {np.mean(returns):.2f} +- {np.std(returns):.2f} over {len(returns)} games of {kind}")
    print("returns: " + " ".join(f"{value:.2f}" for value in returns), flush=True)
    return returns.tolist()


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
    rng = np.random.default_rng(args.seed)  # the actions

    games = Games(make_envs(args, N), args.episodic_life)
    agent = Agent(games.envs.single_action_space.n, args.conv3_filters, args.bf16).to(device)
    theta, grad = flatten_parameters(agent)
    square_avg = torch.zeros_like(theta) if args.torch_rmsprop else torch.ones_like(theta)
    recent_returns = deque(maxlen=100)
    updates = 0
    if checkpoint:
        updates = checkpoint["updates"]
        agent.load_state_dict(checkpoint["agent"])  # in place: the parameters remain views of theta
        square_avg.copy_(checkpoint["square_avg"])
        rng.bit_generator.state = checkpoint["rng"]
        recent_returns.extend(checkpoint["recent_returns"])
    forward = torch.compile(agent, mode="reduce-overhead" if device.type == "cuda" else None) if args.compile else agent

    def model() -> dict:
        return {
            "script": SCRIPT,
            "args": vars(args) | {"resume": None, "evaluate": None},
            "global_step": global_step,
            "agent": agent.state_dict(),
        }

    def save() -> None:
        """A checkpoint is the model and all else that the rest of the run depends on."""
        writer.add_scalar("charts/checkpoint", global_step, global_step)
        writer.flush()
        rest = {
            "updates": updates,
            "square_avg": square_avg,
            "rng": rng.bit_generator.state,
            "recent_returns": list(recent_returns),
        }
        save_checkpoint(run_folder, model() | rest)

    writer = make_writer(args, run_folder, global_step if checkpoint else None)
    if not checkpoint:
        save()
    progress = Progress(global_step, last_step)

    actions = np.zeros((T, N), int)
    chosen, rewards, values, next_values = (np.zeros((T, N), np.float32) for _ in range(4))
    terminations, truncations = np.zeros((T, N), bool), np.zeros((T, N), bool)
    pixels = None

    while global_step < last_step:
        if pixels is None:  # at the start and after each checkpoint
            seeds = reset_seeds(args.seed, global_step, num=N)
            pixels = games.reset(seeds)
            first_game, first_step = [] if args.capture_video else None, global_step
        learning_rate = args.learning_rate * (1 - global_step / last_step if args.anneal_lr else 1)

        # Collect T steps in each game with the policy held fixed: [A3C] Alg. S3, the inner "repeat"
        rollout = []
        with torch.no_grad():
            for t in range(T):
                rollout.append(torch.from_numpy(pixels).to(device))  # uint8 across the bus
                logits, value = forward(rollout[t])
                values[t] = value.cpu().numpy()
                actions[t] = sample(logits, rng)
                chosen[t] = games.press_fire(actions[t])
                pixels, raw_rewards, terminations[t], truncations[t], over, final_pixels, finished = games.step(
                    actions[t]
                )
                rewards[t] = np.sign(raw_rewards)
                global_step += N
                if args.bootstrap_truncation and truncations[t].any():  # the next row is another game's
                    next_values[t] = forward(torch.from_numpy(final_pixels).to(device))[1].cpu().numpy()
                for score, length in finished:
                    recent_returns.append(score)
                    writer.add_scalar("charts/episodic_return", score, global_step)
                    writer.add_scalar("charts/episodic_length", length, global_step)
                if first_game is not None:
                    first_game.append(int(actions[t, 0]))
                    if over[0]:
                        film(args, seeds[0], first_game, run_folder / "videos" / f"train-step-{first_step}.mp4")
                        first_game = None
            last_value = forward(torch.from_numpy(pixels).to(device))[1].cpu().numpy()

        # Returns: [A3C] Alg. S3, R = V(s_t) at the end of the rollout, 0 after a terminal state, then R = r_i + gamma R
        next_values = np.where(truncations, next_values, np.concatenate([values[1:], last_value[None]]))
        ends = terminations if args.bootstrap_truncation else terminations | truncations
        advantages = compute_gae(rewards, values, next_values, ends, truncations, args.gamma, args.gae_lambda)
        returns = advantages + values
        batch = (actions, chosen, advantages, returns)
        b_actions, b_chosen, b_advantages, b_returns = (torch.from_numpy(x).view(-1).to(device) for x in batch)

        # One step of gradient descent on the whole rollout: [A3C] Alg. S3, the gradients and the update
        logits, new_values = forward(torch.cat(rollout))
        loss, parts = a2c_loss(logits, new_values, b_actions, b_chosen, b_advantages, b_returns, args)
        grad.zero_()
        loss.backward()
        grad_norm = grad.norm()
        if not grad_norm.isfinite():
            raise FloatingPointError(f"the gradient is not finite at step {global_step:,}")
        grad.mul_((args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0))
        rmsprop_step(theta, grad, square_avg, learning_rate, args)
        updates += 1

        if updates % args.log_interval == 0 or global_step == last_step:
            policy_loss, value_loss, entropy = parts
            scalars = {
                "charts/learning_rate": learning_rate,
                "charts/SPS": progress.sps(global_step),
                "losses/policy_loss": policy_loss,
                "losses/value_loss": value_loss,
                "losses/entropy": entropy,
                "losses/grad_norm": grad_norm,
                "losses/explained_variance": 1 - np.var(advantages) / max(np.var(returns), 1e-12),
            }
            for tag, scalar in scalars.items():
                writer.add_scalar(tag, scalar, global_step)
            progress.show(global_step, recent_returns)
        if global_step // args.checkpoint_interval > (global_step - batch_size) // args.checkpoint_interval:
            save()
            pixels = None

    if pixels is not None:
        save()
    games.envs.close()
    scores = evaluate(args, model(), run_folder)
    writer.add_scalar("eval/episodic_return", np.mean(scores), global_step)
    if args.save_model:
        write_atomically(run_folder / "model.pt", model())
    writer.close()
    if args.track:
        finish_tracking(run_folder)
    if args.upload_model:
        upload_model(args, run_folder, scores)


def main() -> None:
    """Evaluate a checkpoint, go on with a run, or start a new one."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, interrupt)
    sys.unraisablehook = revive
    run_folder = None
    try:
        args, checkpoint = parse_args()
        args.check()
        if checkpoint and args.conv3_filters != checkpoint["args"]["conv3_filters"]:
            filters = f"--conv3-filters {args.conv3_filters}"
            fail(f"{filters} does not fit the network of {args.resume or args.evaluate}")
        make_envs(args, 1).close()  # what is wrong with the game is said before anything is written
        check_services(args)
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
