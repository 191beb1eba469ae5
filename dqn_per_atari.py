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
r"""Deep Q-network (DQN) with prioritised replay on Atari, double and dueling.

A network estimates the return of each action, Q(s, a), and the agent plays the best one, or with probability epsilon
any. What it has lived through goes into a replay memory. Minibatches are drawn from there, those transitions more often
whose value was most mistaken; each step moves Q(s, a) towards the reward plus the discounted value of the next state.

[DQN]   Mnih, Kavukcuoglu, Silver, et al. 2015, "Human-level control through deep reinforcement learning", Nature 518
[DDQN]  van Hasselt, Guez, Silver 2016, "Deep reinforcement learning with double Q-learning", AAAI, arXiv:1509.06461
[DUEL]  Wang, Schaul, Hessel, van Hasselt, Lanctot, de Freitas 2016, "Dueling network architectures for deep
        reinforcement learning", ICML, arXiv:1511.06581
[PER]   Schaul, Quan, Antonoglou, Silver 2016, "Prioritized experience replay", ICLR, arXiv:1511.05952
[RBW]   Hessel, Modayil, van Hasselt, et al. 2018, "Rainbow: combining improvements in deep reinforcement learning",
        AAAI, arXiv:1710.02298
[TIME]  Pardo, Tavakoli, Levdik, Kormushev 2018, "Time limits in reinforcement learning", ICML, arXiv:1712.00378
[ALE]   Machado, Bellemare, Talvitie, Veness, Hausknecht, Bowling 2018, "Revisiting the arcade learning environment",
        JAIR 61, arXiv:1709.06009

    symbol          variable           shape            meaning (N num_envs, B batch_size, A actions, n n_step)
    s_t             pixels             (N, 4, 84, 84)   the last four frames, uint8, one per agent step
    a_t, r_t        actions, rewards   (N,)             index of a joystick position; the reward's sign
    Q(s, a)         q_network          (B, A)           value of each action, parameters theta
    Q'(s, a)        target_network     (B, A)           the same with older parameters theta-minus
    V, A            value, advantage   (B, 1), (B, A)   the two streams of Q, [DUEL] Eq. (9)
    R^(n)           returns            (B,)             discounted sum of n rewards, [RBW] "Multi-step learning"
    \gamma^n        discounts          (B,)             of the bootstrap; 0 after a termination
    \delta_i        td_errors          (B,)             TD error, [PER] Alg. 1, line 11
    p_i             priorities         (B,)             |delta_i| + eps, [PER] Sec. 3.3
    P(i)            tree[i] / sum      (B,)             probability of being drawn, [PER] Eq. (1)
    w_i             weights            (B,)             importance-sampling weight, [PER] Sec. 3.4
    \alpha, \beta   per_alpha, per_beta                 how much priorities count, how much of their bias is corrected
    \epsilon        epsilon                             probability of a random action

Where this differs from the papers or from common practice, and why:
  * The defaults are labml's (annotated DQN), but for its replay of 2^14 transitions (--buffer-size 16384) and its 32
    million steps. [PER] divides the learning rate by four, [DUEL] clips gradients to norm 10 and scales those that
    enter the last convolution by 1/sqrt(2); labml has 1e-4 and 0.5. All schedules are fractions of the run.
  * The two streams of 256 units follow a common layer of 512, as labml's. [DUEL]'s follow the convolutions, 512 each.
  * Priorities are of the TD error as it is. [PER] clips it to [-1, 1], as the Huber loss here clips its gradient. The
    highest priority, which new transitions get, never falls.
  * Each frame is stored once (7 GB for a million, against 56 GB of stored pairs); stacks are put together on sampling.
    A transition that has not all its frames has priority zero: no draw is ever thrown away.
  * Weights are divided by the minibatch's largest, not the memory's, which would need a tree of minima.
  * A minibatch is drawn before the priorities of the one before it are known, so that drawing and computing overlap
    (but for the first of an iteration).
  * A time limit is not a failure: at a truncation the last observation's value is bootstrapped ([TIME]).
  * A lost life ends the return, not the game. On the step after it FIRE is pressed for the agent: a game like Breakout
    would otherwise wait for ever. Rewards are clipped to their sign for learning; what is logged is the game's score.
  * Ids mean what they mean elsewhere: `BreakoutNoFrameskip-v4` and `BreakoutDeterministic-v4` know no sticky actions,
    `ALE/Breakout-v5` repeats the last action with probability 0.25 ([ALE]).
  * At each checkpoint all games are cut off and begin anew with a seed made of (seed, global_step), interrupted there
    or not: emulators cannot save their state. All else is in the checkpoint, and resuming is exact to the bit.

While a run goes on, a file live.json in its folder changes its learning rate: {"learning_rate": 5e-5}. Steps are agent
steps, four frames each. Two torch threads pay on a quiet machine and lose on a busy one. Scores and speeds: README.md.

    python dqn_per_atari.py --env-id BreakoutNoFrameskip-v4           # writes runs/BreakoutNoFrameskip-v4__dqn_per_...
    python dqn_per_atari.py --resume runs/BreakoutNoFrameskip-v4__...  # goes on after an interruption, exactly
    python dqn_per_atari.py --evaluate runs/BreakoutNoFrameskip-v4__.../model.pt --eval-episodes 20
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
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from ale_py.vector_env import AtariVectorEnv
from torch.utils.tensorboard import SummaryWriter

SCRIPT = "dqn_per_atari"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # that it may use
PIECE = 4096  # frames of the replay that are compressed together in a checkpoint: 29 MB, then about one


@dataclass
class Args:
    """Deep Q-network with prioritised replay on Atari."""

    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of the parameters, the exploration, the minibatches and the environments"""
    torch_deterministic: bool = True
    """if toggled, cuDNN uses deterministic algorithms only"""
    cuda: bool = True
    """if toggled, the networks are trained on the GPU (on the CPU where there is none)"""
    strict_cuda: bool = False
    """if toggled, `--cuda` on a machine without a CUDA device is an error"""
    torch_threads: int = min(2, CORES)
    """threads of torch on the CPU; two are faster than one on a quiet machine and far slower on a busy one"""
    compile: bool = False
    """if toggled, the loss is compiled (up to a minute of compilation; needs a C++ compiler on the CPU)"""
    bf16: bool = False
    """if toggled, the networks compute in bfloat16 (their parameters stay float32): faster, other numbers"""
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
    checkpoint_interval: int = 250_000
    """agent steps between checkpoints (each cuts all games off, and their scores are not logged, see the title)"""
    checkpoint_replay: bool = True
    """if toggled, checkpoints hold the replay, compressed; without it a resumed run begins with an empty one"""
    resume: str | None = None
    """a run folder: go on from its newest checkpoint, with its arguments where none are given here"""
    evaluate: str | None = None
    """a checkpoint, a model.pt or a run folder: do not train, play `--eval-episodes` episodes with it"""
    eval_episodes: int = 10
    """whole games played at the end of training, or by `--evaluate`"""
    eval_epsilon: float = 0.01
    """probability of a random action in the evaluation (0: always the best one)"""
    log_interval: int = 100
    """iterations between points of the losses in the log, and between looks at live.json"""

    env_id: str = "BreakoutNoFrameskip-v4"
    """an Atari game: NameNoFrameskip-v4, NameDeterministic-v4, or ALE/Name-v5 with sticky actions"""
    num_envs: int = 8
    """games played side by side"""
    env_threads: int = 0
    """threads of the emulator (0: as many as there are cores)"""
    episodic_life: bool = True
    """if toggled, a lost life ends the return (the game goes on)"""

    total_timesteps: int = 10_000_000
    """agent steps of the whole run, all games together, four frames each (rounded up to whole iterations)"""
    learning_rate: float = 1e-4
    """the learning rate of Adam (live.json may change it)"""
    adam_eps: float = 1e-8
    """the epsilon of Adam ([RBW] has 1.5e-4)"""
    num_steps: int = 4
    """agent steps in each game per iteration"""
    updates: int = 8
    """gradient steps per iteration, one minibatch each"""
    batch_size: int = 32
    """transitions in a minibatch"""
    gamma: float = 0.99
    """the discount factor"""
    double: bool = True
    """if toggled, the online network chooses the next action and the target network values it ([DDQN])"""
    dueling: bool = True
    """if toggled, the network has a stream for the state's value and one for the advantages ([DUEL])"""
    prioritized: bool = True
    """if toggled, transitions are drawn by priority ([PER]), else uniformly"""
    n_step: int = 1
    """rewards summed before the bootstrap (fewer where the return ends before)"""
    buffer_size: int = 1_000_000
    """transitions in the replay, 7.1 kB each; the memory is taken as it fills"""
    replay_on_gpu: bool = False
    """if toggled, the replay's frames are on the GPU (all of its memory is taken at once)"""
    learning_starts: int = 16_384
    """transitions stored before the first update"""
    per_alpha: float = 0.6
    """alpha: how much priorities count (0: uniform)"""
    per_beta: float = 0.4
    """beta at the beginning: how much of the bias is corrected; it rises linearly to 1 at the end of the run"""
    start_epsilon: float = 1.0
    """probability of a random action at the beginning"""
    middle_epsilon: float = 0.1
    """... after `--middle-fraction` of the run"""
    end_epsilon: float = 0.01
    """... from `--end-fraction` of the run on"""
    middle_fraction: float = 0.025
    """part of the run in which epsilon falls to `--middle-epsilon`"""
    end_fraction: float = 0.5
    """part of the run in which it falls to `--end-epsilon`"""
    target_interval: int = 250
    """iterations between copies of the parameters to the target network"""
    max_grad_norm: float = 0.5
    """the norm to which gradients are clipped"""

    def check(self) -> None:
        """Refuse values that cannot work, in one line."""
        counts = "num_envs num_steps total_timesteps updates batch_size n_step buffer_size learning_starts"
        intervals = "checkpoint_interval log_interval target_interval"
        for names, condition, holds in (
            (f"{counts} {intervals} eval_episodes", "at least 1", lambda value: value >= 1),
            ("torch_threads", "between 1 and 1024", lambda value: 1 <= value <= 1024),
            ("env_threads", "zero or more", lambda value: value >= 0),
            ("seed", "between 0 and 2**32 - 1", lambda value: 0 <= value < 2**32),
            ("learning_rate adam_eps max_grad_norm", "positive and finite", lambda value: 0 < value < math.inf),
            ("gamma per_alpha per_beta eval_epsilon", "between 0 and 1", lambda value: 0 <= value <= 1),
            ("start_epsilon middle_epsilon end_epsilon", "between 0 and 1", lambda value: 0 <= value <= 1),
            ("middle_fraction end_fraction", "above 0 and at most 1", lambda value: 0 < value <= 1),
            ("exp_name", "fit for a folder's name", lambda value: value == Path(value).name != ""),
        ):
            for name in names.split():
                if not holds(getattr(self, name)):
                    fail(f"--{name.replace('_', '-')} must be {condition}, not {getattr(self, name)!r}")
        steps = self.num_envs * self.num_steps
        if self.total_timesteps < steps:
            fail(f"--total-timesteps {self.total_timesteps} is less than one iteration of {steps} steps")
        if self.middle_fraction > self.end_fraction:
            fail(f"--middle-fraction {self.middle_fraction} is more than --end-fraction {self.end_fraction}")
        least = 2 * self.num_envs * (self.n_step + 4)
        if self.buffer_size < least:
            fail(f"--buffer-size {self.buffer_size} is too small for these games and n-step: at least {least}")
        if self.learning_starts > self.buffer_size:
            fail(f"--learning-starts {self.learning_starts} is more than --buffer-size {self.buffer_size}")
        waiting = self.num_envs * self.n_step  # for their successors: at most so many cannot be drawn yet
        if self.learning_starts > self.total_timesteps - waiting:
            limits = f"--total-timesteps {self.total_timesteps}, of which up to {waiting} wait for {self.n_step} more"
            fail(f"--learning-starts {self.learning_starts} is never reached with {limits}")


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


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may still take."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, TypeError):
        available = 1024 * int(re.search(r"MemAvailable: *(\d+)", (root / "proc" / "meminfo").read_text())[1])
    with contextlib.suppress(OSError, TypeError, ValueError):  # a container has a limit of its own, or "max"
        limit, taken, use = ((root / f"sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current", "stat"))
        cache = re.search(r"inactive_file (\d+)", use)[1]  # of files; given back when memory is short
        available = min(available, int(limit) - int(taken) + int(cache))
    return available


def check_memory(args: Args) -> str:
    """What to say of the memory that the replay will take, if it is much. Refuses it where there is not that much."""
    if args.replay_on_gpu and not (args.cuda and torch.cuda.is_available()):
        fail("--replay-on-gpu needs --cuda and a CUDA device")
    where = "GPU memory" if args.replay_on_gpu else "memory"
    available = torch.cuda.mem_get_info()[0] if args.replay_on_gpu else available_memory()
    needed = replay_bytes(args)
    text = f"--buffer-size {args.buffer_size} takes {needed / 1e9:.1f} GB of {where} when full"
    if needed > 0.75 * available:  # a checkpoint of a noisy game is made in memory, twice 0.9 GB for a million
        most = int(0.74 * args.buffer_size * available / needed)
        fail(f"{text}, and there are {available / 1e9:.1f} GB, a quarter for the rest: at most --buffer-size {most}")
    return f"note: {text}" if needed > 1e8 else ""


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


class QNetwork(nn.Module):
    """Q(s, a) for all A actions: the convolutions of [DQN] Methods, then the streams of [DUEL] Sec. 3 or one layer."""

    def __init__(self, num_actions: int, dueling: bool = True, bf16: bool = False) -> None:
        super().__init__()
        self.dueling, self.bf16 = dueling, bf16
        self.trunk = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4),  # (B, 32, 20, 20)
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),  # (B, 64, 9, 9)
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),  # (B, 64, 7, 7)
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
        )
        if dueling:
            self.value = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
            self.advantage = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, num_actions))
        else:
            self.head = nn.Linear(512, num_actions)
        self.to(memory_format=torch.channels_last)  # the layout that convolutions like, here and in forward

    def scale(self, pixels: torch.Tensor) -> torch.Tensor:
        """What the convolutions take: uint8 (B, 4, 84, 84) in [0, 1], channels last (turned while they are bytes)."""
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return pixels.to(torch.bfloat16 if self.bf16 else torch.float32).div_(255)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Q (B, A) of observations (B, 4, 84, 84) in uint8, or of what `scale` made of them.

        Q(s, a) = V(s) + A(s, a) - 1/|A| sum_a' A(s, a'), [DUEL] Eq. (9). Without the mean V and A are not determined.
        """
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.trunk(self.scale(pixels) if pixels.dtype == torch.uint8 else pixels)
            if not self.dueling:
                return self.head(hidden).float()
            value, advantage = self.value(hidden).float(), self.advantage(hidden).float()
        return value + advantage - advantage.mean(dim=-1, keepdim=True)


class SumTree:
    """A binary tree whose leaves are p_i^alpha and whose nodes are sums of their children, [PER] App. B.2.1.

    Node 1 is the root, the children of node k are 2k and 2k + 1, the leaves are the last half. All methods take many
    leaves at once and go from level to level. It is float64: a draw from a million leaves would be rounded to a
    sixteenth of a leaf in float32.
    """

    def __init__(self, capacity: int) -> None:
        self.depth = (capacity - 1).bit_length()
        self.first_leaf = 1 << self.depth
        self.nodes = np.zeros(2 * self.first_leaf)
        self.left, self.right = self.nodes[::2], self.nodes[1::2]  # at k the children of node k: views, no copies

    def __getitem__(self, leaves: np.ndarray | slice) -> np.ndarray:
        return self.nodes[self.first_leaf :][leaves]

    def set(self, leaves: np.ndarray, values: np.ndarray | float) -> None:
        """Write values (K,) to leaves (K,); of a leaf named twice the last one stays.

        Sums are computed anew from both children: nothing drifts. Raises FloatingPointError where a value is negative
        or not finite: a single NaN would go up to the root, and nothing could be drawn any more.
        """
        if not np.all((values >= 0) & (values < np.inf)):
            raise FloatingPointError("a priority is negative or not finite")
        nodes = self.first_leaf + leaves
        self.nodes[nodes] = values
        for _ in range(self.depth):
            nodes = nodes // 2
            self.nodes[nodes] = self.left[nodes] + self.right[nodes]

    def find(self, values: np.ndarray) -> np.ndarray:
        """For each value (K,) in [0, sum of all leaves) the leaf (K,) in whose part of the cumulated sum it lies."""
        nodes = np.ones(len(values), int)
        for _ in range(self.depth):
            left = self.left[nodes]
            # Trap: rounding may lift a value above the last sum. Without the second condition it would end on a leaf of
            # zero, whose weight is NaN
            goes_right = (values >= left) & (self.right[nodes] > 0)
            values = values - left * goes_right
            nodes = 2 * nodes + goes_right
        return nodes - self.first_leaf

    def sample(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Draw leaves (size,) in proportion to their values, one in each of `size` equal parts of the sum."""
        if not self.nodes[1] > 0:
            raise ValueError("nothing can be drawn: all leaves are zero")
        return self.find((np.arange(size) + rng.random(size)) / size * self.nodes[1])


def importance_weights(probabilities: np.ndarray, beta: float) -> np.ndarray:
    r"""w_i (B,) of probabilities (B,) up to a factor: w_i = (N P(i))^{-\beta} / \max_j w_j, [PER] Alg. 1, line 10.

    The maximum is the minibatch's, the weight of the least probable one; so the factor cancels out, and with it
    N, which in [PER] is the number of transitions in the memory.
    """
    return (probabilities / probabilities.min()) ** -beta


def replay_bytes(args: Args) -> int:
    """Bytes of a full replay: the frames, 8 for the rest of each row, and the tree, whose size is a power of two."""
    rows = args.buffer_size // args.num_envs * args.num_envs
    return (rows + 1) * 84 * 84 + rows * 8 + 16 * 2 ** (rows - 1).bit_length()


def move(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on the device. From pinned memory, so that nobody waits for the copy to a GPU."""
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Replay:
    """Prioritised replay of single frames, from which stacks and n-step returns are put together on sampling.

    A row holds one frame and, but for a game's last one, what the agent did there and got. Every N-th row belongs to
    the same game: what follows row i is in row i + N, round and round. The last observation of a game has a row of its
    own, then comes the next game. The rows that can be drawn are those with a priority. Never: last observations
    (nothing was done there). Not yet: rows whose n successors are still to come. No longer: those of whose stack a
    frame is overwritten. The frames are on `device`.
    """

    columns = ("ages", "actions", "rewards", "terminations", "truncations")

    def __init__(self, args: Args, device: torch.device | str = "cpu") -> None:
        self.args, self.games = args, np.arange(args.num_envs)
        self.rows = rows = args.buffer_size // args.num_envs * args.num_envs
        # One more, always zero, stands for all before a game's first. Trap: torch.zeros takes all memory at once
        self.frames = torch.from_numpy(np.zeros((rows + 1, 84, 84), np.uint8)).to(device)
        self.ages = np.zeros(rows, np.uint8)  # frames of the same game in the rows before, at most 3
        self.actions, self.rewards = np.zeros(rows, np.uint8), np.zeros(rows, np.float32)
        self.terminations, self.truncations = np.zeros(rows, bool), np.zeros(rows, bool)
        self.tree = SumTree(rows)
        self.max_priority = 1.0
        self.filled = 0  # rows that have ever been written; they are the first
        self.released = 0  # transitions that could ever be drawn
        self.head = self.games.copy()  # of each game: its next row,
        self.age = np.zeros(args.num_envs, int)  # and how many frames it has so far

    def later(self, rows: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
        """The rows that come so many steps after `rows`, or before where steps are negative, in the same rings."""
        return (rows + steps * self.args.num_envs) % self.rows

    def write(self, games: np.ndarray, frames: np.ndarray) -> np.ndarray:
        """Append frames (K, 84, 84) to the rings of games (K,). Returns their rows (K,)."""
        rows, device = self.head[games], self.frames.device
        self.frames.index_copy_(0, torch.from_numpy(rows).to(device), torch.from_numpy(frames).to(device))
        self.ages[rows] = np.minimum(self.age[games], 3)
        if self.filled < self.rows:
            self.filled = max([self.filled, *(rows + 1).tolist()])
        self.head[games] = self.later(rows, 1)
        self.age[games] += 1
        # What stands three rows on may have lost a frame of its stack; the rows before it did so at the last writes
        self.tree.set(self.later(rows, 3), 0.0)
        return rows

    def release(self, rows: np.ndarray) -> None:
        """Let rows (K,) be drawn, at first with the highest priority of all: [PER] Alg. 1, line 6."""
        self.tree.set(rows, self.max_priority**self.args.per_alpha if self.args.prioritized else 1.0)
        self.released += len(rows)

    def add(self, frames, actions, rewards, terminations, truncations) -> None:
        """One step of every game: the newest frames of s_t (N, 84, 84), and a_t, r_t and how it ended (N,)."""
        rows = self.write(self.games, frames)
        self.actions[rows], self.rewards[rows] = actions, rewards
        self.terminations[rows], self.truncations[rows] = terminations, truncations
        # The frame just written is s_{t+n} of these
        self.release(self.later(rows, -self.args.n_step)[self.age > self.args.n_step])

    def end(self, games: np.ndarray, frames: np.ndarray) -> None:
        """Games (K,) are over: their last observations' newest frames (K, 84, 84). Rows that waited can be drawn."""
        back = np.arange(1, self.args.n_step + 1)
        waiting = self.later(self.head[games, None], -back)[back <= self.age[games, None]]
        self.write(games, frames)
        self.release(waiting)
        self.age[games] = 0

    def cut(self, frames: np.ndarray) -> None:
        """Cut all open games off, as a time limit would, with their last observations' newest frames (N, 84, 84)."""
        games = np.flatnonzero(self.age)
        self.truncations[self.later(self.head[games], -1)] = True
        self.end(games, frames[games])

    def stacks(self, rows: np.ndarray) -> np.ndarray:
        """Rows (..., 4) of the four frames that the agent saw at rows (...), blank before a game's first."""
        back = np.arange(3, -1, -1)
        return np.where(back > self.ages[rows][..., None], self.rows, self.later(rows[..., None], -back))

    def sample(self, size: int, beta: float, rng: np.random.Generator, device: torch.device | str = "cpu") -> tuple:
        r"""Draw B transitions: their rows (B,), and a batch on the device.

        The batch: pixels (B, 8, 84, 84), four frames of s_t and four of the bootstrap's state; actions a_t; returns
        R^(n) = \sum_{k<m} \gamma^k r_{t+k}; discounts \gamma^m, or 0 where the last of these steps was a termination;
        weights w_i; all (B,). m is n, or the steps up to the return's end: a life's, a game's, or where it was cut off.
        """
        rows = self.tree.sample(size, rng)
        m, goes_on, returns = np.zeros(size, int), np.ones(size, bool), np.zeros(size)
        for k in range(self.args.n_step):
            row = self.later(rows, k)
            m += goes_on
            returns += self.args.gamma**k * goes_on * self.rewards[row]
            goes_on &= ~(self.terminations[row] | self.truncations[row])
        discounts = self.args.gamma**m * ~self.terminations[self.later(rows, m - 1)]
        weights = importance_weights(self.tree[rows], beta)
        frames = torch.from_numpy(self.stacks(np.array([rows, self.later(rows, m)]).T))  # (B, 2, 4)
        # Detail: much faster than self.frames[frames]
        pixels = self.frames.index_select(0, move(frames.ravel(), self.frames.device)).view(size, 8, 84, 84)
        columns = torch.from_numpy(np.array([returns, discounts, weights], np.float32))
        actions = torch.from_numpy(self.actions[rows].astype(np.int64))
        pixels, actions, columns = (move(x, device) for x in (pixels, actions, columns))  # uint8 across the bus
        return rows, (pixels, actions, *columns)

    def update(self, rows: np.ndarray, td_errors: torch.Tensor) -> None:
        """Priorities p_i = |delta_i| + eps of rows (B,): [PER] Alg. 1, line 12. Raises FloatingPointError.

        Rows that have lost a frame since they were drawn keep zero.
        """
        if self.args.prioritized:
            priorities = td_errors.abs().double().cpu().numpy() + 1e-6
            highest = float(priorities.max())  # NaN, if one of them is
            if not math.isfinite(highest):
                raise FloatingPointError("a TD error is not finite: does a smaller learning rate help?")
            self.tree.set(rows, np.where(self.tree[rows] > 0, priorities**self.args.per_alpha, 0.0))
            self.max_priority = max(self.max_priority, highest)

    def pieces(self) -> list[torch.Tensor]:
        """Views of all frames so far, (K, 84, 84) each, of one game after the other in the order of the rows."""
        rings = (self.frames[game : self.filled : len(self.games)] for game in self.games)
        return [piece for ring in rings if len(ring) for piece in ring.split(PIECE)]

    def state_dict(self) -> dict:
        """The state between games. The frames are compressed in pieces: how far depends on the game."""

        def pack(piece: torch.Tensor) -> torch.Tensor:
            lines = piece.cpu().numpy().swapaxes(0, 1).copy()  # (84, K, 84): what a line shows, it has shown before
            return torch.frombuffer(bytearray(zlib.compress(lines, level=1)), dtype=torch.uint8)

        with ThreadPoolExecutor(min(8, CORES)) as pool:  # each holds 60 MB
            frames = list(pool.map(pack, self.pieces()))
        state = {name: getattr(self, name) for name in ("filled", "released", "max_priority")}
        columns = {name: getattr(self, name)[: self.filled] for name in self.columns}
        columns |= {"leaves": self.tree[np.arange(self.filled)], "head": self.head}
        return state | {"frames": frames} | {name: torch.from_numpy(x) for name, x in columns.items()}

    def load_state_dict(self, state: dict) -> None:
        """The inverse."""
        self.filled, self.released, self.max_priority = state["filled"], state["released"], state["max_priority"]
        for name in self.columns:
            getattr(self, name)[: self.filled] = state[name].numpy()
        self.tree.set(np.arange(self.filled), state["leaves"].numpy())
        self.head[:] = state["head"].numpy()
        for piece, data in zip(self.pieces(), state["frames"]):
            lines = torch.frombuffer(bytearray(zlib.decompress(data.numpy())), dtype=torch.uint8)
            piece.copy_(lines.view(84, -1, 84).transpose(0, 1))


def td_loss(q_network, target_network, pixels, actions, returns, discounts, weights, double: bool) -> tuple:
    r"""The loss () of a minibatch from `Replay.sample`, its TD errors (B,) and its values Q(s_t, a_t) (B,).

    y = R^(n) + \gamma^n Q'(s_{t+n}, \argmax_a Q(s_{t+n}, a)), [DDQN] Eq. (4); without `double` the argmax is of Q'
    L = 1/B \sum_i w_i Huber(\delta_i),   \delta_i = y - Q(s_t, a_t), [PER] Alg. 1, lines 11 and 13 (a sum there)
    """
    obs, next_obs = pixels[:, :4], pixels[:, 4:]
    # With --bf16 the parameters are turned into bfloat16 once in this context, not once for each of the two passes
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=q_network.bf16):
        values = q_network(obs).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            next_obs = q_network.scale(next_obs)  # once for both networks
            next_values = target_network(next_obs)  # (B, A)
            best = (q_network(next_obs) if double else next_values).argmax(dim=-1, keepdim=True)
            targets = returns + discounts * next_values.gather(1, best).squeeze(1)
    loss = (weights * F.smooth_l1_loss(values, targets, reduction="none")).mean()
    return loss, (targets - values).detach(), values.detach()


def explore(q_values: torch.Tensor, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """For each row of q_values (N, A) the best action, or with probability epsilon any: (N,)."""
    best = q_values.argmax(dim=-1).cpu().numpy()
    return np.where(rng.random(len(best)) < epsilon, rng.integers(q_values.shape[1], size=len(best)), best)


@torch.no_grad()
def evaluate(args: Args, model: dict, run_folder: Path) -> list[float]:
    """Play `args.eval_episodes` whole games side by side, and print their scores: not clipped, all lives together.

    `model` is a checkpoint or what model.pt holds. A random action is played with probability `args.eval_epsilon`. The
    games depend on args.seed and their number, none of training's; the emulator ends each after 108,000 frames.
    """
    device = choose_device(args)
    games = Games(make_envs(args, args.eval_episodes))
    q_network = QNetwork(games.envs.single_action_space.n, args.dueling, args.bf16).to(device)
    q_network.load_state_dict(model["agent"])
    rng = np.random.default_rng([args.seed, 0, 1])
    seeds = reset_seeds(args.seed, 0, 1, num=args.eval_episodes)
    pixels = games.reset(seeds)
    returns = np.zeros(args.eval_episodes)
    playing = np.ones(args.eval_episodes, bool)
    first_game = []
    while playing.any():
        actions = explore(q_network(torch.from_numpy(pixels).to(device)), args.eval_epsilon, rng)
        games.press_fire(actions)
        if playing[0]:
            first_game.append(int(actions[0]))
        pixels, rewards, _, _, over, _, _ = games.step(actions)
        returns += rewards * playing
        playing &= ~over
    games.envs.close()
    if args.capture_video:
        film(args, seeds[0], first_game, run_folder / "videos" / f"evaluation-step-{model['global_step']}.mp4")
    kind = f"epsilon {args.eval_epsilon:g}"
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


def check_fit(args: Args, checkpoint: dict) -> None:
    """Refuse flags that do not fit what the checkpoint holds, and say where resuming is not exact."""
    saved = checkpoint["args"]
    if args.dueling != saved["dueling"]:
        fail(f"--{'' if args.dueling else 'no-'}dueling does not fit the network of {args.resume or args.evaluate}")
    if args.resume and args.learning_rate != saved["learning_rate"]:
        with contextlib.suppress(OSError):  # what live.json says by now is older than the flag
            live = Path(args.resume, "live.json").read_text(encoding="utf-8-sig", errors="replace")
            checkpoint["live"]["text"] = live
    if args.resume and args.checkpoint_replay and checkpoint["replay"]:
        for name in ("buffer_size", "num_envs", "prioritized", "per_alpha"):
            if getattr(args, name) != saved[name]:
                change = f"--{name.replace('_', '-')} ({saved[name]} -> {getattr(args, name)})"
                fail(f"{change} does not fit the replay of {args.resume}: --no-checkpoint-replay drops it for good")
    elif args.resume:
        checkpoint["replay"] = None
        left = args.total_timesteps - checkpoint["global_step"]
        if 0 < left < args.learning_starts + args.num_envs * args.n_step:
            fail(f"--learning-starts {args.learning_starts} is never reached in {left} steps with an empty replay")
        print("note: the replay begins empty: this is not exactly the run that was interrupted", file=sys.stderr)


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


def rate_in(text: str) -> float:
    """The learning rate in the text of live.json, NaN where it is nonsense."""
    try:
        ((name, rate),) = json.loads(text).items()
        rate = float(rate) if name == "learning_rate" and type(rate) in (int, float) else math.nan
    except (ValueError, AttributeError, OverflowError, RecursionError):
        return math.nan
    return rate if 0 < rate < math.inf else math.nan


def read_live(path: Path, args: Args, live: dict, global_step: int) -> None:
    """Take over the learning rate in live.json where the file has changed, and say so; nonsense is named and ignored.

    Changes `args`, and `live`: the file's text as it was last read, and all changes [step, before, after]. They are
    also on record in live_changes.json, at once: a run that is resumed from before a change makes it at the same step
    (but for a run that it made fail by a number that is not finite, and with another --learning-rate).
    """
    record, again, text, before = path.with_name("live_changes.json"), None, "", live["text"]
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # no such file, or no such change in it
        known = json.loads(record.read_text())
        step, old_rate, rate = known["changes"][len(live["changes"])]
        again = known["text"] if old_rate == args.learning_rate else None  # else there is another --learning-rate
    if again is not None:
        if global_step < step:
            return
        live["text"] = again
    else:
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="utf-8-sig", errors="replace")
        live["text"], rate = text, rate_in(text)
        if text in ("", before) or rate == args.learning_rate:
            return
    if math.isnan(rate):
        print(f'\nnote: {path} is ignored: it must be like {{"learning_rate": {args.learning_rate}}}', file=sys.stderr)
        return
    change = f"the learning rate at step {global_step:,}: {args.learning_rate} -> {rate}"
    live["changes"].append([global_step, args.learning_rate, rate])
    args.learning_rate = rate
    if again is None:
        write_atomically(record, json.dumps(live))
    print(f"\nnote: {path} changes {change}", file=sys.stderr)


def train(args: Args, run_folder: Path, checkpoint: dict | None) -> None:
    """Train from the beginning or from a checkpoint. Raises FloatingPointError where a gradient is not finite."""
    T, N = args.num_steps, args.num_envs
    steps = T * N
    global_step = checkpoint["global_step"] if checkpoint else 0
    last_step = global_step + max(0, math.ceil((args.total_timesteps - global_step) / steps)) * steps
    if last_step != args.total_timesteps > global_step:
        iterations = f"{last_step // steps:,} iterations of {steps:,}"
        print(f"note: {args.total_timesteps:,} steps are rounded up to {last_step:,} ({iterations})", file=sys.stderr)
    device = choose_device(args)
    keep_freed_memory()
    # Trap: Adam's averages of units that died fade below 1e-38, where a CPU needs many times as long for each number
    torch.set_flush_denormal(True)
    torch.manual_seed(args.seed)  # the parameters
    rng = np.random.default_rng(args.seed)  # the exploration and the minibatches

    games = Games(make_envs(args, N), args.episodic_life)
    num_actions = games.envs.single_action_space.n
    q_network, target_network = (QNetwork(num_actions, args.dueling, args.bf16).to(device) for _ in range(2))
    if args.bf16:
        target_network.to(torch.bfloat16)  # once, not at each pass: nothing small is ever added to its parameters
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), fused=True)
    replay = Replay(args, device if args.replay_on_gpu else "cpu")
    recent_returns = deque(maxlen=100)
    live = {"text": "", "changes": []}
    iteration = 0
    if checkpoint:
        iteration, live = checkpoint["iteration"], checkpoint["live"]
        q_network.load_state_dict(checkpoint["agent"])
        target_network.load_state_dict(checkpoint["target_network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        if checkpoint["replay"]:
            replay.load_state_dict(checkpoint.pop("replay"))
        rng.bit_generator.state = checkpoint["rng"]
        recent_returns.extend(checkpoint["recent_returns"])
    loss_function = td_loss
    if args.compile:
        loss_function = torch.compile(td_loss, mode="reduce-overhead" if device.type == "cuda" else None)

    def model() -> dict:
        return {
            "script": SCRIPT,
            "args": vars(args) | {"resume": None, "evaluate": None},
            "global_step": global_step,
            "agent": q_network.state_dict(),
        }

    def save() -> None:
        """A checkpoint is the model and all else that the rest of the run depends on."""
        writer.add_scalar("charts/checkpoint", global_step, global_step)
        writer.flush()
        rest = {
            "iteration": iteration,
            "target_network": target_network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "replay": replay.state_dict() if args.checkpoint_replay else None,
            "live": live,
            "rng": rng.bit_generator.state,
            "recent_returns": list(recent_returns),
        }
        save_checkpoint(run_folder, model() | rest)

    writer = make_writer(args, run_folder, global_step if checkpoint else None)
    if not checkpoint:
        save()
    progress = Progress(global_step, last_step)
    epsilons = (args.start_epsilon, args.middle_epsilon, args.end_epsilon)
    pixels = None

    while global_step < last_step:
        if pixels is None:  # at the start and after each checkpoint
            seeds = reset_seeds(args.seed, global_step, num=N)
            pixels = games.reset(seeds)
            first_game, first_step = [] if args.capture_video else None, global_step
        part = global_step / last_step  # of the run
        epsilon = float(np.interp(part, (0, args.middle_fraction, args.end_fraction), epsilons))
        per_beta = args.per_beta + (1 - args.per_beta) * part
        optimizer.param_groups[0] |= {"lr": args.learning_rate, "eps": args.adam_eps}

        # Play T steps in each game: [DQN] Alg. 1, lines "select a_t" to "store transition"
        for _ in range(T):
            with torch.no_grad():
                actions = explore(q_network(torch.from_numpy(pixels).to(device)), epsilon, rng)
            games.press_fire(actions)
            frames = pixels[:, -1]
            pixels, raw_rewards, terminations, truncations, over, final_pixels, finished = games.step(actions)
            replay.add(frames, actions, np.sign(raw_rewards), terminations, truncations)
            if over.any():  # the next row is another game's
                replay.end(np.flatnonzero(over), final_pixels[over, -1])
            global_step += N
            for score, length in finished:
                recent_returns.append(score)
                writer.add_scalar("charts/episodic_return", score, global_step)
                writer.add_scalar("charts/episodic_length", length, global_step)
            if first_game is not None:
                first_game.append(int(actions[0]))
                if over[0]:
                    film(args, seeds[0], first_game, run_folder / "videos" / f"train-step-{first_step}.mp4")
                    first_game = None

        # Learn: [PER] Alg. 1, lines 8 to 15
        warm = replay.released >= args.learning_starts
        if warm:
            grad_norms = []
            drawn = replay.sample(args.batch_size, per_beta, rng, device)
            for update in range(args.updates):
                rows, batch = drawn
                optimizer.zero_grad()
                loss, td_errors, values = loss_function(q_network, target_network, *batch, double=args.double)
                loss.backward()
                grad_norms.append(nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm))
                optimizer.step()
                if update + 1 < args.updates:  # a GPU is still busy with this minibatch as the next one is drawn
                    drawn = replay.sample(args.batch_size, per_beta, rng, device)
                replay.update(rows, td_errors)
            if not torch.stack(grad_norms).isfinite().all():
                raise FloatingPointError(f"the gradient is not finite at step {global_step:,}")
        iteration += 1
        if iteration % args.target_interval == 0:
            target_network.load_state_dict(q_network.state_dict())  # [PER] Alg. 1, line 16

        if iteration % args.log_interval == 0 or global_step == last_step:
            scalars = {
                "charts/learning_rate": args.learning_rate,
                "charts/epsilon": epsilon,
                "charts/per_beta": per_beta,
                "charts/SPS": progress.sps(global_step),
            }
            if warm:
                scalars |= {
                    "losses/td_loss": loss.detach(),
                    "losses/q_values": values.mean(),
                    "losses/grad_norm": grad_norms[-1],
                }
                if args.prioritized and args.per_alpha > 0:
                    leaves = replay.tree[: replay.filled]
                    some = leaves[leaves > 0][:: (1 + replay.filled // 10_000) | 1]  # odd: as a rule rows of all games
                    writer.add_histogram("charts/priorities", some ** (1 / args.per_alpha), global_step)
            for tag, scalar in scalars.items():
                writer.add_scalar(tag, scalar, global_step)
            progress.show(global_step, recent_returns)
            read_live(run_folder / "live.json", args, live, global_step)
        if global_step // args.checkpoint_interval > (global_step - steps) // args.checkpoint_interval:
            replay.cut(pixels[:, -1])
            save()
            pixels = None

    if pixels is not None:
        replay.cut(pixels[:, -1])
        save()
    games.envs.close()
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
        make_envs(args, 1).close()  # what is wrong with the game is said before anything is written
        if checkpoint:
            check_fit(args, checkpoint)
        note = "" if args.evaluate else check_memory(args)
        check_services(args)
        if args.evaluate:
            path = Path(args.evaluate)
            evaluate(args, checkpoint, path if path.is_dir() else path.parent)
            return
        if note:
            print(note, file=sys.stderr)
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
        if isinstance(error, FloatingPointError) and run_folder:  # a change that ruined the run is not made again
            (run_folder / "live_changes.json").unlink(missing_ok=True)
        fail(f"{str(error) or 'no memory is left'}{how_to_resume(run_folder)}", status=1)


if __name__ == "__main__":
    main()
