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
r"""Asynchronous advantage actor-critic (A3C) on Atari, with an LSTM: Hogwild workers on one shared model.

Several processes play a game each, with copies of one model in shared memory. After some steps a worker computes the
gradient of its own rollout (actions that returned more than the value function expected become more likely, values move
towards the returns, entropy is kept up) and applies it to the shared model at once, without any lock.

[A3C]   Mnih, Badia, Mirza, Graves, Lillicrap, Harley, Silver, Kavukcuoglu 2016, "Asynchronous methods for deep
        reinforcement learning", ICML, arXiv:1602.01783
[HOG]   Recht, Re, Wright, Niu 2011, "Hogwild: a lock-free approach to parallelizing stochastic gradient descent", NIPS,
        arXiv:1106.5730
[ADAM]  Kingma, Ba 2015, "Adam: a method for stochastic optimization", ICLR, arXiv:1412.6980
[DQN]   Mnih, Kavukcuoglu, Silver, et al. 2015, "Human-level control through deep reinforcement learning", Nature 518
[GAE]   Schulman, Moritz, Levine, Jordan, Abbeel 2016, "High-dimensional continuous control using generalized advantage
        estimation", ICLR, arXiv:1506.02438
[TIME]  Pardo, Tavakoli, Levdik, Kormushev 2018, "Time limits in reinforcement learning", ICML, arXiv:1712.00378
[ALE]   Machado, Bellemare, Talvitie, Veness, Hausknecht, Bowling 2018, "Revisiting the arcade learning environment",
        JAIR 61, arXiv:1709.06009
[PPO]   Schulman, Wolski, Dhariwal, Radford, Klimov 2017, "Proximal policy optimization algorithms", arXiv:1707.06347
[37]    Huang, Dossa, Raffin, Kanervisto, Wang 2022, "The 37 implementation details of PPO", ICLR blog track

    symbol          variable           shape            meaning (t <= t_max steps, A number of actions)
    \theta          shared.theta       (P,)             all parameters of the shared model in one vector
    \theta'         theta              (P,)             the worker's copy of it, fixed during a rollout
    d\theta         grad               (P,)             gradient of one rollout with respect to theta'
    g               square_avg         (P,)             moving average of squared gradients, [A3C] Sec. 4
    T               global_step                         steps of all workers together, `shared.steps.sum()`
    t_max           num_steps                           longest rollout; the end of an episode ends it too
    s_t             pixels             (1, 1, 55, 42)   one frame, uint8 (four with --no-lstm, 42 rows with --no-crop)
    h_t, c_t        state              (1, 256) each    of the LSTM
    a_t, r_t        actions, rewards   (t,), (t, 1)     index of a joystick position; reward clipped to [-1, 1]
    R               returns            (t,)             n-step return, [A3C] Alg. S3 (with lambda < 1 the lambda-return)
    R - V(s_t)      advantages         (t,)             with lambda < 1 [GAE] Eq. (16)
    \pi, V          logits, values     (t+1, A), (t+1,) policy before the softmax, value function
    \beta           ent_coef                            weight of the entropy H, [A3C] Sec. 4

Where this differs from the paper or from common practice, and why:
  * The gradient is a view of a vector that is zeroed before each backward pass and handed to the optimiser in one line.
    (Well-known PyTorch programs of A3C share `.grad` between two models; since `zero_grad` sets it to None, they add up
    gradients for ever or apply the very first one for ever.)
  * No lock means that averages are read while others write them. A step of Adam is therefore held to the length that
    Adam itself never exceeds; without that, two first updates at the same moment can destroy the model.
  * Acting builds no graph. The rollout is computed again as one batch for the gradient: cheaper than t small ones.
  * The crop and size of frames, network, Adam and its rate, 20 steps and the clipping of gradients are pytorch-a3c's;
    the paper has 84x84 frames, RMSprop (--optimizer rmsprop; its average starts at one, as TensorFlow's), 5 steps and
    no clipping. Each observation is normalised by its own mean and deviation; pytorch-a3c's running averages differ
    from process to process and are never saved.
  * A time limit is not a failure: at a truncation the value of the last observation is bootstrapped ([TIME]).
  * Rewards are clipped for learning only; what is logged is the whole game's score. On the first step of each life FIRE
    is pressed for the agent, which is not credited to the policy: Breakout would otherwise wait for ever.
  * Ids mean what they mean elsewhere: `PongNoFrameskip-v4` and `PongDeterministic-v4` know no sticky actions,
    `ALE/Pong-v5` repeats the last action with probability 0.25 ([ALE]). An agent step is always four frames.
  * Seed, worker and step are mixed into seeds of the games, not added: neighbouring runs would share games.
  * At each checkpoint the workers pause, all games begin anew and recurrent states are zero, in every run, interrupted
    or not. So nothing of a worker needs saving. With one worker the run is deterministic and resuming is exact to the
    bit; with more, the order of updates is the operating system's, and resuming is exact in steps and schedules only.

A worker computes on the CPU: to act on one frame takes 0.4 ms there (benchmark/tricks.py), and the thirty or so
launches of a GPU would take about as long (an estimate). `--cuda` moves the workers' copies to the GPU all the same,
for larger networks; it has not been timed. Scores and speeds: README.md.

    python a3c_atari.py --env-id PongDeterministic-v4 --num-workers 16   # writes runs/PongDeterministic-v4__a3c_...
    python a3c_atari.py --resume runs/PongDeterministic-v4__...           # goes on after an interruption
    python a3c_atari.py --evaluate runs/PongDeterministic-v4__.../model.pt --eval-episodes 20
"""

import contextlib
import ctypes
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
import traceback
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Literal, NoReturn

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
from torch.utils.tensorboard import SummaryWriter

SCRIPT = "a3c_atari"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # that it may use


@dataclass
class Args:
    """Asynchronous advantage actor-critic on Atari."""

    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of the parameters, the actions and the environments"""
    torch_deterministic: bool = True
    """if toggled, cuDNN uses deterministic algorithms only"""
    cuda: bool = False
    """if toggled, the workers compute on the GPU (on the CPU where there is none); see the title"""
    strict_cuda: bool = False
    """if toggled, `--cuda` on a machine without a CUDA device is an error"""
    torch_threads: int = 1
    """threads of torch in each process; the workers are what keeps the cores busy"""
    compile: bool = False
    """if toggled, acting is compiled in each worker (up to a minute; needs a C++ compiler on the CPU)"""
    track: bool = False
    """if toggled, the run is tracked with Weights and Biases"""
    wandb_project_name: str = "deep-rl-reference"
    """the project of the tracked run"""
    wandb_entity: str | None = None
    """the entity (user or team) of the tracked run"""
    capture_video: bool = False
    """if toggled, videos of worker 0's first game after each checkpoint, if it ends before the next, and evaluations"""
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
    """whole games played in each evaluation, at the end of training, or by `--evaluate`"""
    greedy: bool = False
    """if toggled, the evaluation plays the likeliest action instead of sampling the policy"""
    eval_interval: int = 250_000
    """agent steps between evaluations in training; the workers go on, but rollouts end there: part of the experiment"""
    log_interval: int = 100
    """updates of worker 0 between points of the losses in the log"""

    env_id: str = "PongDeterministic-v4"
    """an Atari game: NameNoFrameskip-v4, NameDeterministic-v4, or ALE/Name-v5 with sticky actions"""
    num_workers: int = CORES
    """processes that play and learn, one game each (default: one a core; the paper has 16)"""
    crop: bool = True
    """if toggled, a frame is rows 34 to 194 of the screen, as in pytorch-a3c (MsPacman plays above them: --no-crop)"""
    episodic_life: bool = False
    """if toggled, a lost life ends the return (the game goes on)"""
    max_episode_length: int = 27_000
    """agent steps after which a game is cut off (idle steps at its beginning count too); 27000 are half an hour"""
    lstm: bool = True
    """if toggled, the network has an LSTM and sees one frame; without, it sees four"""

    total_timesteps: int = 10_000_000
    """agent steps of the whole run, all workers together, four frames each"""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Adam, or the paper's RMSprop"""
    shared_optimizer: bool = True
    """if toggled, the workers share the optimiser's averages as well as the parameters"""
    learning_rate: float = 1e-4
    """the learning rate"""
    anneal_lr: bool = False
    """if toggled, the learning rate falls linearly to zero over the run, as in the paper"""
    num_steps: int = 20
    """t_max: agent steps of a worker between updates"""
    gamma: float = 0.99
    """the discount factor"""
    gae_lambda: float = 1.0
    """lambda of generalised advantage estimation; 1 is the paper's n-step return"""
    ent_coef: float = 0.01
    """beta: weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 50.0
    """the norm to which gradients are clipped"""
    rmsprop_alpha: float = 0.99
    """how slowly the average of squared gradients moves"""
    rmsprop_eps: float = 1e-5
    """added to the average of squared gradients (with --torch-rmsprop: to its root)"""
    torch_rmsprop: bool = False
    """if toggled, RMSprop is PyTorch's instead of TensorFlow's"""

    def check(self) -> None:
        """Refuse values that cannot work, in one line."""
        counts = "num_workers num_steps total_timesteps log_interval eval_interval"
        for names, condition, holds in (
            (f"{counts} checkpoint_interval eval_episodes", "at least 1", lambda value: value >= 1),
            ("total_timesteps eval_interval checkpoint_interval", "at most 10**15", lambda value: value <= 10**15),
            ("torch_threads", "between 1 and 1024", lambda value: 1 <= value <= 1024),
            ("max_episode_length", "between 16 and 10**8", lambda value: 16 <= value <= 10**8),
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


def check_saved(args: Args, saved: dict) -> None:
    """Refuse another network or picture, and to go on with the averages of another optimiser, or of other workers."""
    for name in ("lstm", "crop"):
        if getattr(args, name) != saved[name]:
            flag = f"--{'' if getattr(args, name) else 'no-'}{name}"
            fail(f"{flag} does not fit the network of {args.resume or args.evaluate}")
    if args.evaluate:
        return
    for name in ("optimizer", "shared_optimizer", *(() if args.shared_optimizer else ("num_workers",))):
        if getattr(args, name) != saved[name]:
            fail(f"--{name.replace('_', '-')} cannot change on resuming: the optimiser's averages are of {saved[name]}")


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


def keep_freed_memory() -> None:
    """Have freed memory kept for the next tensor: glibc gives large pieces back, and then every page costs a fault."""
    with contextlib.suppress(OSError, AttributeError):
        for option, size in ((-1, 2**28), (-3, 2**25)):  # M_TRIM_THRESHOLD; M_MMAP_THRESHOLD, the largest there is
            ctypes.CDLL(None).mallopt(option, size)


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
    """Make Atari games that step together: observations (N, C, 55 or 42, 42) in uint8, (N, 1, 210, 160, 3) for a film.

    C is one frame with an LSTM, four without. Of 55 rows the network sees 42, see Agent.
    """
    shape = {"img_height": 210, "img_width": 160, "stack_num": 1} if colour else {}
    settings = {
        "num_threads": 1,
        "frameskip": 4,
        "maxpool": True,  # over the last two frames: sprites flicker ([DQN] Methods)
        "grayscale": not colour,
        "img_height": 55 if args.crop else 42,
        "img_width": 42,
        "stack_num": 1 if args.lstm else 4,
        "full_action_space": False,
        "noop_max": 30,  # a game begins with fewer than 30 idle frames
        "use_fire_reset": True,
        "max_num_frames_per_episode": 4 * args.max_episode_length,  # then the game is truncated
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
    """Policy and value function on four convolutions and an LSTM, or a linear layer in its place.

    The convolutions are pytorch-a3c's. [A3C] Suppl. Sec. 8 has two, on larger frames, and a layer of 256 units, behind
    which come the same 256 LSTM cells (Sec. 5.1).

    Args:
        num_actions: A, the number of joystick positions.
        lstm: whether there is an LSTM.
    """

    def __init__(self, num_actions: int, lstm: bool = True) -> None:
        super().__init__()
        channels = [1 if lstm else 4, 32, 32, 32, 32]
        convolutions = [layer_init(nn.Conv2d(i, o, 3, stride=2, padding=1)) for i, o in pairwise(channels)]
        self.trunk = nn.Sequential(  # (B, C, 42, 42), (B, 32, 21, 21), (B, 32, 11, 11), (B, 32, 6, 6), (B, 32, 3, 3)
            *[layer for convolution in convolutions for layer in (convolution, nn.ELU())], nn.Flatten()
        )
        self.lstm = nn.LSTM(288, 256) if lstm else None
        if lstm:
            nn.init.zeros_(self.lstm.bias_ih_l0)
            nn.init.zeros_(self.lstm.bias_hh_l0)
        else:
            self.linear = nn.Sequential(layer_init(nn.Linear(288, 256)), nn.ELU())
        self.policy_head = layer_init(nn.Linear(256, num_actions), std=0.01)  # Detail: at first nearly uniform
        self.value_head = layer_init(nn.Linear(256, 1), std=1.0)

    def initial_state(self, num_envs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """h and c (N, 256) at the beginning of an episode."""
        zeros = torch.zeros(num_envs, 256, device=self.value_head.weight.device)
        return zeros, zeros

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        """What the convolutions make (B, 288) of frames (B, C, 55 or 42, 42) in uint8."""
        top = 9 if pixels.shape[2] == 55 else 0  # rows 9 to 51 of 55 are rows 34 to 194 of the screen's 210
        pixels = pixels[:, :, top : top + 42]
        # channels_last is faster. Trap: `.to` would leave the strides of one channel as they are
        frames = torch.empty_like(pixels, dtype=torch.float32, memory_format=torch.channels_last).copy_(pixels)
        std, mean = torch.std_mean(frames, dim=(1, 2, 3), keepdim=True)
        return self.trunk(frames.sub_(mean).div_(std.clamp(min=1)))  # an empty screen has no deviation

    def step(self, pixels: torch.Tensor, state: tuple) -> tuple[torch.Tensor, tuple]:
        """One step in each of N games: logits (N, A) and the next state, of frames (N, C, H, 42) and a state."""
        hidden = self.see(pixels)
        if self.lstm is None:
            return self.policy_head(self.linear(hidden)), state
        state = torch.lstm_cell(hidden, state, *self.lstm.all_weights[0])
        return self.policy_head(state[0]), state

    def forward(self, pixels: torch.Tensor, state: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (t, A), values (t,) of t successive frames (t, C, H, 42) of one game, from the state before them."""
        hidden = self.see(pixels)
        if self.lstm is None:
            hidden = self.linear(hidden)
        else:
            hidden = self.lstm(hidden, state)[0]
        return self.policy_head(hidden), self.value_head(hidden).squeeze(-1)


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


def a3c_loss(
    logits: torch.Tensor,
    values: torch.Tensor,
    actions: torch.Tensor,
    chosen: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    args: Args,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    r"""The loss of a rollout of t steps. Its gradient is -d\theta, and d\theta_v times vf_coef / 2, of [A3C] Alg. S3.

    \log\pi(a|s) A + \beta H(\pi) for the policy; half of (R - V)^2, times vf_coef, for the value function.

    Args:
        logits, values: of the current parameters, (t, A) and (t,).
        actions, chosen: the actions played (t,), and 1 where the agent chose, 0 where FIRE was pressed for it (t,).
        advantages, returns: constants (t,).

    Returns the loss () and (policy loss (), value loss (), entropy ()) per step, the latter detached.
    """
    log_probs = logits.log_softmax(dim=-1)  # (t, A)
    entropy = -(log_probs.exp() * log_probs).sum()
    policy_loss = -(advantages * chosen * log_probs.gather(1, actions[:, None]).squeeze(1)).sum()
    value_loss = 0.5 * (returns - values).square().sum()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    return loss, tuple(part.detach() / len(values) for part in (policy_loss, value_loss, entropy))


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


def shared_rmsprop_step(theta, grad, square_avg, learning_rate: float, args: Args) -> None:
    r"""One step of RMSprop without momentum, in place on vectors (P,), [A3C] Sec. 4.

    g = \alpha g + (1 - \alpha) \Delta\theta^2,   \theta = \theta - \eta \Delta\theta / \sqrt{g + \epsilon}

    as in the paper; g starts at one, as in TensorFlow. PyTorch divides by \sqrt{g} + \epsilon and starts at zero:
    where gradients are small (say 1e-4, and epsilon 1e-5) its steps are 30 times as large.
    """
    average = (square_avg * args.rmsprop_alpha).addcmul_(grad, grad, value=1 - args.rmsprop_alpha)
    square_avg.copy_(average)  # what follows has our gradient in it, whatever others write meanwhile
    root = average.sqrt_().add_(args.rmsprop_eps) if args.torch_rmsprop else average.add_(args.rmsprop_eps).sqrt_()
    theta.addcdiv_(grad, root, value=-learning_rate)


def shared_adam_step(theta, grad, moments, step: int, learning_rate: float) -> None:
    r"""One step of Adam, in place on vectors (P,) and moments (2, P), [ADAM] Alg. 1; `step` counts from 1.

    No sequence of gradients makes |\hat m| / \sqrt{\hat v} larger than 7.3 (Cauchy-Schwarz), but two workers that write
    at once do: m with the other's gradient over v without it. In the first updates, where v is nearly zero, such a step
    would be thousands of times too long and destroy the model.
    """
    moments[0].mul_(0.9).add_(grad, alpha=0.1)
    moments[1].mul_(0.999).addcmul_(grad, grad, value=0.001)  # Trap: lerp_ reads v twice, and may find v - v' < 0
    root = moments[1].sqrt().mul_((1 - 0.999**step) ** -0.5).add_(1e-8)
    bias_correction = 1 - 0.9**step
    ratio = torch.div(moments[0], root, out=root).clamp_(-7.3 * bias_correction, 7.3 * bias_correction)
    theta.sub_(ratio, alpha=learning_rate / bias_correction)


@dataclass
class Shared:
    """What the processes share, in shared memory. Everyone reads and writes theta and moments without a lock ([HOG]).

    theta: the parameters (P,). moments: the optimiser's averages, (1, 2, P) for all or (W, 2, P) for each worker.
    steps, updates: int64 (W,); a worker writes to its own element only, so that the sums are exact without a lock.
    """

    theta: torch.Tensor
    moments: torch.Tensor
    steps: torch.Tensor
    updates: torch.Tensor


@torch.no_grad()
def evaluate(args: Args, model: dict, run_folder: Path, watch: Callable[[], None] = lambda: None) -> tuple[list, float]:
    """Play `args.eval_episodes` whole games side by side, and print their scores: not clipped, all lives together.

    `model` is a checkpoint or what model.pt holds. Actions are sampled, or the likeliest with `--greedy`. The games
    depend on args.seed and their number, none of training's; each is truncated after `max_episode_length` steps.
    `watch` is called after every step. Returns the scores and the mean length of the games.
    """
    device = choose_device(args)
    games = Games(make_envs(args, args.eval_episodes))
    agent = Agent(games.envs.single_action_space.n, args.lstm).to(device)
    agent.load_state_dict(model["agent"])
    rng = np.random.default_rng([args.seed, 0, 0, 1])
    seeds = reset_seeds(args.seed, 0, 0, 1, num=args.eval_episodes)
    pixels = games.reset(seeds)
    state = agent.initial_state(args.eval_episodes)
    returns, lengths = np.zeros(args.eval_episodes), np.zeros(args.eval_episodes, int)
    playing = np.ones(args.eval_episodes, bool)
    first_game = []
    while playing.any():
        logits, state = agent.step(torch.from_numpy(pixels).to(device), state)
        actions = logits.argmax(-1).cpu().numpy() if args.greedy else sample(logits, rng)
        games.press_fire(actions)
        if playing[0]:
            first_game.append(int(actions[0]))
        pixels, rewards, lost, _, over, _, _ = games.step(actions)
        if args.episodic_life:  # as in training, where a life is an episode
            state = tuple(part * torch.from_numpy(~lost).to(part)[:, None] for part in state)
        returns += rewards * playing
        lengths += playing
        playing &= ~over
        watch()
    games.envs.close()
    if args.capture_video:
        film(args, seeds[0], first_game, run_folder / "videos" / f"evaluation-step-{model['global_step']}.mp4")
    kind = "greedy actions" if args.greedy else "sampled actions"
    print("\r\x1b[K" if sys.stdout.isatty() else "", end="")  # over the line of the training that goes on
    print(
        f"evaluation: {np.mean(returns):.2f} +- {np.std(returns):.2f} over {len(returns)} games of {kind}, "
        f"{np.mean(lengths):,.0f} steps long, at step {model['global_step']:,}"
    )
    print("returns: " + " ".join(f"{value:.2f}" for value in returns), flush=True)
    return returns.tolist(), float(np.mean(lengths))


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


def actor_learner(
    rank: int, args: Args, run_folder: Path, shared: Shared, pipe: Connection, turns: Semaphore | None = None
) -> None:
    """One worker: play a game with a copy of the shared model, and improve the shared model by it, [A3C] Alg. S3.

    A worker plays rollouts as long as the steps of all are well below `stop`, and to the number of its own steps
    `quota` at the end, so that all together stop exactly there. Then it sends None and waits for a new (stop, quota,
    anew): the step at which all games begin anew, or None. It sends (step, {tag: value}) when it has something for the
    log. Where workers outnumber the cores of a CPU, each takes one of as many `turns` as there are cores, for four
    rollouts: to wait between rollouts costs less than to be interrupted again and again within one.
    """
    parent = os.getppid()
    device = choose_device(args)
    games = Games(make_envs(args, 1), args.episodic_life)
    agent = Agent(games.envs.single_action_space.n, args.lstm).to(device)
    theta, grad = flatten_parameters(agent)
    state = agent.initial_state(1)
    if args.compile:
        act = torch.compile(agent.step)
    else:  # the same operations without Python between them, which with one frame takes longer than they do
        frame = torch.zeros(games.envs.observation_space.shape, dtype=torch.uint8, device=device)
        with warnings.catch_warnings(action="ignore"):  # deprecated in favour of torch.compile, which needs a compiler
            act = torch.jit.trace_module(agent, {"step": (frame, state)}, check_trace=False).step
    steps, updates = shared.steps.numpy(), shared.updates.numpy()
    moments = shared.moments[0 if args.shared_optimizer else rank]
    stop = quota = turn = 0  # turn: how many more rollouts this worker may play in its turn

    while True:
        # At most one rollout per worker is under way when the first worker sees that fewer than W t_max steps are left
        room = stop - steps.sum() - args.num_workers * args.num_steps
        t_max = args.num_steps if room > 0 else min(args.num_steps, quota - steps[rank])
        if t_max <= 0:
            if turn:
                turns.release()
                turn = 0
            pipe.send(None)
            stop, quota, anew = pipe.recv()
            if anew is not None:
                rng = np.random.default_rng([args.seed, rank, anew, 1])  # the actions
                seeds = reset_seeds(args.seed, rank, anew, num=1)
                pixels = games.reset(seeds)
                state = agent.initial_state(1)
                first_game, first_step = [] if args.capture_video and rank == 0 else None, anew
            continue
        if os.getppid() != parent:  # it was killed, and this is not Linux: see run_worker
            raise EOFError

        if turns and not turn:
            turns.acquire()
            turn = 4
        # theta' = theta. Others may write meanwhile: a mixture of two versions is as welcome as either ([HOG], no lock)
        learning_rate = args.learning_rate * (1 - steps.sum() / args.total_timesteps if args.anneal_lr else 1)
        theta.copy_(shared.theta)

        # Play up to t_max steps, or to the end of the episode: [A3C] Alg. S3, the inner "repeat"
        frames, actions, chosen, rewards, first_state = [], [], [], [], state
        ended, scalars = False, {}
        with torch.no_grad():
            while len(rewards) < t_max and not ended:
                frames.append(torch.from_numpy(pixels).to(device))
                logits, state = act(frames[-1], state)
                action = sample(logits, rng)
                chosen.append(games.press_fire(action)[0])
                pixels, raw_reward, terminated, truncated, over, final_pixels, finished = games.step(action)
                actions.append(action[0])
                rewards.append(np.clip(raw_reward, -1, 1))
                ended = terminated[0] or truncated[0]
                for score, length in finished:
                    scalars = {"charts/episodic_return": score, "charts/episodic_length": length}
                if first_game is not None:
                    first_game.append(int(action[0]))
                    if over[0]:
                        film(args, seeds[0], first_game, run_folder / "videos" / f"train-step-{first_step}.mp4")
                        first_game = None
        frames.append(torch.from_numpy(final_pixels if over[0] else pixels).to(device))  # s_t, for the bootstrap

        # The same once more as one batch, now with a graph, from the state that the rollout began with: what came
        # before is a constant. The last row is V(s_t): 0 after a terminal state, but not after a time limit
        logits, values = agent(torch.cat(frames), first_state)  # (t+1, A), (t+1,)
        v = values.detach().cpu().numpy()[:, None]  # (t+1, 1)
        terminations, truncations = np.zeros((2, len(rewards), 1), bool)
        terminations[-1], truncations[-1] = terminated, truncated
        rewards = np.array(rewards, np.float32)
        advantages = compute_gae(rewards, v[:-1], v[1:], terminations, truncations, args.gamma, args.gae_lambda)
        batch = (np.array(actions), np.array(chosen, np.float32), advantages, advantages + v[:-1])
        b_actions, b_chosen, b_advantages, b_returns = (torch.from_numpy(x).view(-1).to(device) for x in batch)
        loss, parts = a3c_loss(logits[:-1], values[:-1], b_actions, b_chosen, b_advantages, b_returns, args)
        grad.zero_()  # Trap: without it gradients of all rollouts add up
        loss.backward()
        grad_norm = grad.norm()
        if not grad_norm.isfinite():
            raise FloatingPointError(f"the gradient is not finite at step {steps.sum():,}")
        grad.mul_((args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0))
        if ended:
            state = agent.initial_state(1)

        # The gradient with respect to theta' is applied to theta, which others may have moved since: [A3C] Alg. S3
        updates[rank] += 1
        if args.optimizer == "adam":
            step = int(updates.sum() if args.shared_optimizer else updates[rank])
            shared_adam_step(shared.theta, grad.cpu(), moments, step, learning_rate)
        else:
            shared_rmsprop_step(shared.theta, grad.cpu(), moments[1], learning_rate, args)
        steps[rank] += len(rewards)

        if rank == 0 and updates[0] % args.log_interval == 0:
            policy_loss, value_loss, entropy = (part.item() for part in parts)
            scalars |= {
                "charts/learning_rate": learning_rate,
                "losses/policy_loss": policy_loss,
                "losses/value_loss": value_loss,
                "losses/entropy": entropy,
                "losses/grad_norm": grad_norm.item(),
            }
        if scalars:
            pipe.send((int(steps.sum()), scalars))
        if turns:
            turn -= 1
            if turn == 0:
                turns.release()
                time.sleep(1e-4)  # Trap: else it takes the turn back before the one who waits for it has woken up


def run_worker(
    rank: int, args: Args, run_folder: Path, shared: Shared, pipe: Connection, turns: Semaphore | None
) -> None:
    """The process of a worker: what goes wrong in it is sent to the parent, which ends the run."""
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})  # Ctrl-C goes to all processes: it is the parent's
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: PR_SET_PDEATHSIG, a worker dies with its parent
    keep_freed_memory()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # Trap: a pool of compilers would outlive a worker
    warnings.filterwarnings("ignore", "RNN module weights")  # of cuDNN: views of a vector are copied at each call
    try:
        try:
            actor_learner(rank, args, run_folder, shared, pipe, turns)
        finally:
            if turns:
                turns.release()  # for one who waits for it; once too often does no harm any more
    except EOFError:  # the parent is gone
        os._exit(1)
    except (FloatingPointError, OSError) as error:
        with contextlib.suppress(OSError):
            pipe.send(str(error))
    except Exception as error:
        traceback.print_exc()  # first: the parent kills all as soon as it has the message
        pipe.send(f"{type(error).__name__}: {error}")


def train(args: Args, run_folder: Path, checkpoint: dict | None) -> None:
    """Train from the beginning or from a checkpoint: start the workers, watch them, log, save and evaluate.

    Raises ChildProcessError, with the cause, as soon as a worker ends.
    """
    W = args.num_workers
    global_step = checkpoint["global_step"] if checkpoint else 0
    last_step = max(args.total_timesteps, global_step)
    choose_device(args)
    torch.manual_seed(args.seed)  # the parameters
    envs = make_envs(args, 1)
    shared_model = Agent(envs.single_action_space.n, args.lstm)
    envs.close()
    theta, _ = flatten_parameters(shared_model)
    moments = torch.zeros(1 if args.shared_optimizer else W, 2, len(theta))
    if args.optimizer == "rmsprop" and not args.torch_rmsprop:
        moments.fill_(1.0)
    shared = Shared(theta, moments, *torch.zeros(2, W, dtype=torch.int64))
    recent_returns = deque(maxlen=100)
    if checkpoint:
        shared_model.load_state_dict(checkpoint["agent"])  # in place: the parameters remain views of theta
        moments.copy_(checkpoint["moments"])
        counts = checkpoint["counts"]
        if len(counts[0]) != W:
            counts = counts.sum(1, keepdim=True)
        for mine, saved in zip((shared.steps, shared.updates), counts):
            mine[: len(saved)] = saved
        recent_returns.extend(checkpoint["recent_returns"])
    for tensor in vars(shared).values():
        tensor.share_memory_()

    def model() -> dict:
        return {
            "script": SCRIPT,
            "args": vars(args) | {"resume": None, "evaluate": None},
            "global_step": global_step,
            "agent": {name: tensor.clone() for name, tensor in shared_model.state_dict().items()},
        }

    def save() -> None:
        """A checkpoint is the model and all else that the rest of the run depends on. The workers wait meanwhile."""
        writer.add_scalar("charts/checkpoint", global_step, global_step)
        writer.flush()
        rest = {
            "moments": shared.moments.clone(),
            "counts": torch.stack([shared.steps, shared.updates]),
            "recent_returns": list(recent_returns),
        }
        save_checkpoint(run_folder, model() | rest)

    def watch(timeout: float = 0) -> None:
        """Log what the workers send, and see that they live."""
        for pipe in wait_for_any(pipes, timeout):
            rank = pipes.index(pipe)
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                workers[rank].join(1)
                if workers[rank].exitcode == -signal.SIGTERM:
                    time.sleep(0.2)  # if it was sent to the whole group, ours is on its way
                message = f"it ended with status {workers[rank].exitcode}"
            if message is None:
                waiting.add(rank)
            elif isinstance(message, str):
                raise ChildProcessError(f"worker {rank} of {W} failed: {message}")
            else:
                step, scalars = message
                if "charts/learning_rate" in scalars:
                    scalars["charts/SPS"] = progress.sps(step)
                if "charts/episodic_return" in scalars:
                    recent_returns.append(scalars["charts/episodic_return"])
                for tag, scalar in scalars.items():
                    writer.add_scalar(tag, scalar, step)
        if progress.first_step < (now := int(shared.steps.sum())) < last_step:
            progress.show(now, recent_returns)

    def command(stop: int, quotas: list[int], anew: int | None = None) -> None:
        waiting.clear()
        for pipe, quota in zip(pipes, quotas):
            with contextlib.suppress(OSError):  # it is dead: see watch
                pipe.send((stop, quota, anew))

    def wait() -> None:
        while len(waiting) < len(pipes):
            watch(timeout=1)

    writer = make_writer(args, run_folder, global_step if checkpoint else None)
    if not checkpoint:
        save()
    pipes, workers, waiting = [], [], set()
    context = mp.get_context("spawn")  # Trap: a forked child hangs in its first convolution if the parent has done one
    turns = context.Semaphore(CORES) if W > CORES and not (args.cuda and torch.cuda.is_available()) else None
    progress = Progress(global_step, last_step)
    try:
        # The workers inherit the blocked signals; for the parent they are only postponed
        resource_tracker.ensure_running()  # Trap: it would be started with the first worker, and unblocks them then
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        for rank in range(W if global_step < last_step else 0):
            ours, theirs = context.Pipe()
            arguments = (rank, args, run_folder, shared, theirs, turns)
            worker = context.Process(target=run_worker, args=arguments, daemon=True)
            worker.start()
            theirs.close()
            workers.append(worker)
            pipes.append(ours)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        wait()
        progress.started = time.perf_counter()  # the workers have imported their libraries
        anew = global_step
        while global_step < last_step:
            intervals = (args.checkpoint_interval, args.eval_interval)
            stop = min(last_step, *((global_step // interval + 1) * interval for interval in intervals))
            snapshot = model()
            command(stop, [0] * W, anew)
            if global_step > 0 and global_step % args.eval_interval == 0:
                returns, length = evaluate(args, snapshot, run_folder, watch)  # while the workers go on
                writer.add_scalar("eval/episodic_return", np.mean(returns), global_step)
                writer.add_scalar("eval/episodic_length", length, global_step)
            wait()
            shares = np.diff(np.linspace(0, stop - int(shared.steps.sum()), W + 1).astype(int))
            command(stop, (shared.steps.numpy() + shares).tolist())
            wait()
            global_step = int(shared.steps.sum())
            progress.show(global_step, recent_returns)
            anew = None
            if global_step % args.checkpoint_interval == 0 or global_step == last_step:
                anew = global_step
                save()
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()
        # Trap: a semaphore that is still there when the process exits at once is complained about
        turns = arguments = None

    returns, length = evaluate(args, model(), run_folder)
    writer.add_scalar("eval/episodic_return", np.mean(returns), global_step)
    writer.add_scalar("eval/episodic_length", length, global_step)
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
        if checkpoint:
            check_saved(args, checkpoint["args"])
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
