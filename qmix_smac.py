# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "jax==0.10.2",
#     "jaxmarl==0.2.0",
#     "numpy==2.4.6",
#     "tyro==1.0.17",
#     "tensorboard==2.21.0",
#     "wandb==0.31.0",
#     "moviepy==2.2.1",
#     "huggingface-hub==2.4.0",
# ]
# ///
r"""QMIX on StarCraft micromanagement: a team of agents that learns one value and plays by many.

Each agent sees only its surroundings and values its own actions. During training a mixing network, which sees the whole
battle, combines the values of the actions taken into that of the team, Q_tot, and Q_tot is learned as in Q-learning.
The mixing weights are never negative: so the action that is best for an agent is best for the team, and the agents can
play without the network, each on its own.

[QMIX]  Rashid, Samvelyan, Schroeder de Witt, Farquhar, Foerster, Whiteson 2018, "QMIX: monotonic value function
        factorisation for deep multi-agent reinforcement learning", ICML, arXiv:1803.11485
[IQL]   Tan 1993, "Multi-agent reinforcement learning: independent vs. cooperative agents", ICML
[VDN]   Sunehag, Lever, Gruslys, et al. 2018, "Value-decomposition networks for cooperative multi-agent learning",
        AAMAS, arXiv:1706.05296
[SMAC]  Samvelyan, Rashid, Schroeder de Witt, et al. 2019, "The StarCraft multi-agent challenge", arXiv:1902.04043
[SMAX]  Rutherford, Ellis, Gallici, et al. 2024, "JaxMARL: multi-agent RL environments and algorithms in JAX",
        NeurIPS, arXiv:2311.10090
[DDQN]  van Hasselt, Guez, Silver 2016, "Deep reinforcement learning with double Q-learning", AAAI, arXiv:1509.06461
[TRICK] Hu, Jiang, Harding, Wu, Liao 2021, "Rethinking the implementation tricks and monotonicity constraint in
        cooperative multi-agent reinforcement learning", arXiv:2102.03479

    symbol        variable            shape       meaning (B batch_size, n agents, A actions, R rows, P = R - B steps)
    o^a           obs                 (R, n, O)   what an agent observes
    s             state               (R, S)      the whole battle, for the mixing network only
    u^a           actions             (P, n)      its action; the team's is **u**
    r             rewards             (P, 1)      the team's reward
    \tau^a        hidden              (1, B n, H) what it has seen and done: the state of its GRU
    Q_a           agent_qs            (R, n, A)   the value of each action to each agent; the parameters are shared
                  chosen_action_qvals (P, n)      that of the actions taken
    Q_tot         q_tot               (P, 1)      the value of the team's action, [QMIX] Sec. 4
    y^tot         targets             (P, 1)      what Q_tot should be, [QMIX] Sec. 4, below Eq. (6)
    \theta^-      target_agent, ...               older parameters, copied every `target_update_interval` episodes
    \epsilon      epsilon                         probability of a random action, for each agent and step

A minibatch of episodes is ragged: the first row of each, the longest episode first, then the second row of each, and so
on, of fewer and fewer episodes. An episode of T steps has T + 1 rows: the last is what its last action led to. There is
no padding: so nothing has to be masked, and nothing is computed in vain.

Where this differs from the papers or from their program, PyMARL, and why:
  * Defaults are PyMARL's for QMIX on SMAC, and so are names (but for learning_rate, max_grad_norm, total_timesteps and
    num_envs, as in the other scripts here), with these exceptions: 8 environments instead of one, with one update for
    each episode as before; epsilon annealed over 100,000 steps as in [TRICK], not 50,000; a learning rate that falls to
    zero over the run, as in ppo_continuous.py (--no-anneal-lr is PyMARL's constant one); runs of 1M steps, not 2M.
  * The hypernetworks have two layers, as PyMARL's now; [QMIX] has one layer for the weights.
  * An environment's end by the time limit is an end, as in PyMARL. Bootstrapping there (--bootstrap-timeouts) is what
    one would do elsewhere; here it may teach the team to run away, since a step without an end costs nothing.
  * PyMARL pads all episodes of a minibatch to the longest and masks; here they are ragged. Targets are computed without
    a graph, and what enters the GRU at all steps is multiplied at once. Whole episodes are replayed, with hidden states
    from zeros on.
  * On SMAX the reward is ten times JaxMARL's: 10 for all damage, 10 for a victory, SMAC's scale. Its global state is
    normalised, as SMAC's is: positions by the map's size, cooldowns by the weapon's (as in the observations), types by
    their number. Its episodes have at most 101 steps: the limit is compared before the step is counted.
  * At each checkpoint all episodes begin anew with a seed made of (seed, global_step), whether or not the run is
    interrupted there, and open ones are dropped (with one environment there are none: a checkpoint waits for the end of
    an episode). The replay is in the checkpoint, so resuming is exact to the bit.

Steps are those of the team. SMAX runs on the CPU, beside torch, on whatever device that is. The real SMAC, `--env-id
smac/3m`, needs StarCraft II: a run without it says what to install. That path was written against the package's
interface and tested with a stand-in, never with the game. Scores and speeds: README.md.

    python qmix_smac.py --env-id 3m                       # writes runs/3m__qmix_smac__1__...
    python qmix_smac.py --resume runs/3m__qmix_smac__1... # goes on after an interruption, exactly
    python qmix_smac.py --evaluate runs/3m__qmix_smac__1.../model.pt --eval-episodes 128
"""

import contextlib
import difflib
import functools
import importlib.util
import io
import json
import math
import multiprocessing
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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.nn.utils.rnn import PackedSequence
from torch.utils.tensorboard import SummaryWriter

SCRIPT = "qmix_smac"
UNAVAILABLE = -9999999.0  # the value of an action that cannot be taken: finite, and below all others
PIECE = 256  # episodes of the replay that are compressed together in a checkpoint


@dataclass
class Args:
    """QMIX, VDN or independent Q-learning on StarCraft micromanagement."""

    exp_name: str = Path(__file__).stem
    """the name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of the parameters, the exploration, the minibatches and the environments"""
    torch_deterministic: bool = True
    """if toggled, cuDNN uses deterministic algorithms only"""
    cuda: bool = False
    """if toggled, the networks are trained on the GPU (on the CPU where there is none)"""
    strict_cuda: bool = False
    """if toggled, `--cuda` on a machine without a CUDA device is an error"""
    torch_threads: int = 1
    """threads of torch on the CPU; two gain little on a quiet machine and lose much on a busy one"""
    compile: bool = False
    """if toggled, the mixing networks are compiled (up to a minute of compilation; needs a C++ compiler on the CPU)"""
    track: bool = False
    """if toggled, the run is tracked with Weights and Biases"""
    wandb_project_name: str = "deep-rl-reference"
    """the project of the tracked run"""
    wandb_entity: str | None = None
    """the entity (user or team) of the tracked run"""
    capture_video: bool = False
    """if toggled, a film of the first battle of each test and of the evaluation (SMAX), or `--save-replay` (SMAC)"""
    save_replay: bool = False
    """if toggled, StarCraft II writes a replay of the evaluation to the run folder (smac/... only)"""
    save_model: bool = True
    """if toggled, the trained parameters are saved as model.pt in the run folder"""
    save_model_interval: int = 500_000
    """environment steps between models that are kept as model_STEP.pt, to be loaded by `--load-step` (0: none)"""
    upload_model: bool = False
    """if toggled, the saved model and its card are uploaded to the Hugging Face hub"""
    hf_entity: str = ""
    """the user or organisation on the Hugging Face hub (default: yours)"""
    checkpoint_interval: int = 100_000
    """environment steps between checkpoints (each drops all open episodes, see the title: many times their length)"""
    checkpoint_replay: bool = True
    """if toggled, checkpoints hold the replay; without it a resumed run begins with an empty one"""
    resume: str | None = None
    """a run folder: go on from its newest checkpoint, with its arguments where none are given here"""
    load_step: int = 0
    """with `--resume RUN` or `--evaluate RUN`: take the saved step that is nearest to this one (0: the newest)"""
    evaluate: str | None = None
    """a checkpoint, a model.pt or a run folder: do not train, play `--eval-episodes` episodes with it"""
    eval_episodes: int = 32
    """greedy episodes played at the end of training, or by `--evaluate`"""
    test_interval: int = 10_000
    """environment steps between test runs, in environments of their own"""
    test_nepisode: int = 32
    """greedy episodes of a test run"""
    log_interval: int = 2_000
    """environment steps between points of the losses in the log"""

    env_id: str = "3m"
    """a SMAX map (3m, 2s3z, ...), or smac/MAP for the real StarCraft II"""
    num_envs: int = 8
    """environments played side by side (PyMARL's episode runner has one, [TRICK] has eight)"""
    bootstrap_timeouts: bool = False
    """if toggled, an episode that the time limit ends is bootstrapped with its last observation, else it is an end"""

    total_timesteps: int = 1_000_000
    """environment steps of the whole run, all environments together (rounded up to whole steps of all)"""
    mixer: str = "qmix"
    """qmix ([QMIX]), vdn (the sum, [VDN]), or none (each learns on its own: independent Q-learning, [IQL])"""
    gamma: float = 0.99
    """the discount factor"""
    double_q: bool = True
    """if toggled, the online network chooses the next actions and the target network values them ([DDQN])"""
    td_lambda: float = 0.0
    """lambda of the targets: 0 is one-step Q-learning as in the paper; 0.6 is [TRICK]'s"""
    epsilon_start: float = 1.0
    """probability of a random action at the beginning"""
    epsilon_finish: float = 0.05
    """... at the end of the annealing"""
    epsilon_anneal_time: int = 100_000
    """environment steps of the annealing: 50,000 in [QMIX], 100,000 in [TRICK]"""
    buffer_size: int = 5_000
    """episodes in the replay; the memory is taken as it fills"""
    batch_size: int = 32
    """episodes in a minibatch"""
    updates_per_episode: float = 1.0
    """updates for each episode collected, once there are `--batch-size` (1 in [QMIX], 1/8 in the program of [TRICK])"""
    target_update_interval: int = 200
    """episodes between copies of the parameters to the target networks"""
    optimizer: str = "rmsprop"
    """rmsprop ([QMIX]) or adam ([TRICK])"""
    learning_rate: float = 5e-4
    """the learning rate"""
    anneal_lr: bool = True
    """if toggled, the learning rate falls linearly to zero over the run; [QMIX] and PyMARL keep it constant"""
    optim_alpha: float = 0.99
    """how slowly RMSprop forgets squared gradients"""
    optim_eps: float = 1e-5
    """added to the root of the squared gradients' mean"""
    max_grad_norm: float = 10.0
    """the norm to which gradients are clipped"""
    rnn_hidden_dim: int = 64
    """width of an agent's layers"""
    mixing_embed_dim: int = 32
    """width of the mixing network"""
    hypernet_embed: int = 64
    """width of the hypernetworks of its weights"""

    def check(self) -> None:
        """Refuse values that cannot work, in one line."""
        counts = "num_envs total_timesteps buffer_size batch_size rnn_hidden_dim mixing_embed_dim hypernet_embed"
        intervals = "checkpoint_interval test_interval log_interval target_update_interval epsilon_anneal_time"
        for names, condition, holds in (
            (f"{counts} {intervals}", "at least 1", lambda value: value >= 1),
            ("torch_threads", "between 1 and 1024", lambda value: 1 <= value <= 1024),
            ("eval_episodes test_nepisode", "at least 1", lambda value: value >= 1),
            ("save_model_interval load_step", "zero or more", lambda value: value >= 0),
            ("seed", "between 0 and 2**32 - 1", lambda value: 0 <= value < 2**32),
            ("learning_rate max_grad_norm optim_eps", "positive and finite", lambda value: 0 < value < math.inf),
            ("updates_per_episode", "positive and finite", lambda value: 0 < value < math.inf),
            ("gamma td_lambda epsilon_start epsilon_finish", "between 0 and 1", lambda value: 0 <= value <= 1),
            ("optim_alpha", "at least 0 and below 1", lambda value: 0 <= value < 1),
            ("mixer", "qmix, vdn or none", lambda value: value in MIXERS),
            ("optimizer", "rmsprop or adam", lambda value: value in ("rmsprop", "adam")),
            ("exp_name", "fit for a folder's name", lambda value: value == Path(value).name != ""),
        ):
            for name in names.split():
                if not holds(getattr(self, name)):
                    fail(f"--{name.replace('_', '-')} must be {condition}, not {getattr(self, name)!r}")
        if self.total_timesteps < self.num_envs:
            fail(f"--total-timesteps {self.total_timesteps} is less than one step of --num-envs {self.num_envs}")
        if self.total_timesteps < self.batch_size:
            fail(f"--total-timesteps {self.total_timesteps} cannot fill a --batch-size of {self.batch_size} episodes")
        if self.batch_size > self.buffer_size:
            sizes = f"--batch-size {self.batch_size} is more than --buffer-size {self.buffer_size}"
            fail(f"{sizes}: nothing would be learned")
        if self.load_step and not (self.resume or self.evaluate):
            fail("--load-step needs --resume RUN or --evaluate RUN")
        if self.save_replay and not self.env_id.startswith("smac/"):
            fail("--save-replay is for the real game, smac/MAP; SMAX has --capture-video")


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


def check_replay_size(args: Args, shape: "Shape") -> None:
    """Say what the replay can grow to, or refuse it where there is not that much memory."""
    needed, available = args.buffer_size * episode_bytes(shape), available_memory()
    limit = f"with {args.buffer_size:,} episodes of {shape.episode_limit} steps"
    if needed > available:
        most = int(0.99 * args.buffer_size * available / needed)
        has = f"there are {available / 1e9:.1f} GB: at most --buffer-size {most}"
        fail(f"--buffer-size {args.buffer_size} may take {needed / 1e9:.1f} GB of memory ({limit}), and {has}")
    print(f"replay: at most {needed / 1e9:.2f} GB ({limit}), taken as it fills", flush=True)


class Shape(NamedTuple):
    """What is known of a map before a battle: numbers of agents and actions, sizes of observation and state."""

    n_agents: int
    n_actions: int
    obs_dim: int
    state_dim: int
    episode_limit: int


class Step(NamedTuple):
    """What a step of N environments gives. A row of `floats` is all agents' observations, then the state.

    Where an episode has ended, `floats` and `avail_actions` are the next one's first, and `last_...` its own last.
    """

    floats: np.ndarray  # (N, n O + S) float32
    avail_actions: np.ndarray  # (N, n, A) uint8
    last_floats: np.ndarray
    last_avail_actions: np.ndarray
    rewards: np.ndarray  # (N,) the team's
    ended: np.ndarray  # (N,)
    terminated: np.ndarray  # (N,) ended, and not by the time limit alone
    won: np.ndarray  # (N,)
    dropped: np.ndarray  # (N,) ended by a crash of the game: such an episode is none


def make_envs(args: Args, num_envs: int, replay_dir: str = "") -> "Smax | Smac":
    """Make battles that step together, on SMAX or on the real SMAC; a map that cannot be had ends the program."""
    if args.env_id.startswith("smac/"):
        return Smac(args.env_id.removeprefix("smac/"), num_envs, replay_dir)
    _, maps = import_smax()
    if args.env_id not in maps:
        nearest = difflib.get_close_matches(args.env_id, maps, n=3, cutoff=0.4) or list(maps)
        fail(f"there is no SMAX map {args.env_id!r}; the nearest names: {', '.join(nearest)} (or smac/MAP)")
    return Smax(args.env_id, num_envs)


@functools.cache
def import_smax() -> tuple:
    """SMAX's environment class, and its maps by name."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the GPU is torch's
    # Trap: jaxmarl's import looks for other environments, says so, and in this one sets sys.stdout and sys.stderr anew
    sys.modules["jaxmarl.environments.mabrax"] = None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from jaxmarl.environments.smax.heuristic_enemy_smax_env import HeuristicEnemySMAX
            from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO
    except ImportError as error:
        fail(f"SMAX needs packages: pip install jaxmarl==0.2.0 jax==0.10.2 ({error})")
    return HeuristicEnemySMAX, MAP_NAME_TO_SCENARIO


@functools.cache
def compile_smax(map_name: str) -> tuple:
    """The step of many battles on a map as one compiled function, a state to begin with, the map's Shape, and the map.

    step(keys (N, 2), states, actions (N, n), restart (N,)) gives the next keys and states, and the arrays of Step:
    observations and state packed into one array, availability into another. Where an episode ends, or `restart` says
    so, the next one begins; so one function is compiled, and it both resets and steps.
    """
    import jax
    import jax.numpy as jnp

    make, maps = import_smax()
    env = make(scenario=maps[map_name])
    n, units = env.num_allies, env.num_allies + env.num_enemies

    def pack(obs: dict, state) -> tuple:
        world = obs["world_state"]
        features = world[: -2 * units].reshape(units, -1)  # health, x, y, cooldown, and the type in bits
        types = state.state.unit_types
        cooldowns = features[:, 3] / env.unit_type_weapon_cooldowns[types]
        features = features.at[:, 1:3].divide(jnp.array([env.map_width, env.map_height], jnp.float32))
        features = features.at[:, 3].set(cooldowns.clip(0, 1))
        teams, types = world[-2 * units : -units], world[-units:] / (env.unit_type_bits - 1)
        floats = jnp.concatenate([*(obs[agent] for agent in env.agents), features.ravel(), teams, types])
        avail_actions = env.get_avail_actions(state)
        return floats.astype(jnp.float32), jnp.stack([avail_actions[agent] for agent in env.agents]).astype(jnp.uint8)

    def step(key, state, actions, restart):
        key, step_key, reset_key = jax.random.split(key, 3)
        moves = {agent: actions[i] for i, agent in enumerate(env.agents)}
        obs, after, rewards, dones, _ = env.step_env(step_key, state, moves)
        alive = after.state.unit_alive  # Trap: to be read before the reset; the reward tells a victory only unscaled
        allies, enemies = alive[:n].any(), alive[n:].any()
        new_obs, new_state = env.reset(reset_key)
        ended = dones["__all__"]
        last, new = pack(obs, after), pack(new_obs, new_state)
        floats, avail_actions, state = jax.tree.map(
            # The types of the state that comes in: else the second call would compile all anew
            lambda x, y, old: jnp.where(ended | restart, x, y).astype(old.dtype),
            (*new, new_state),
            (*last, after),
            (*last, state),
        )
        reward = 10 * rewards[env.agents[0]]
        return key, state, (floats, avail_actions, *last, reward, ended, ~(allies & enemies), allies & ~enemies)

    shapes = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
    blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes[1])
    obs_dim, state_dim = shapes[0][env.agents[0]].shape[0], shapes[0]["world_state"].shape[0]
    shape = Shape(n, env.action_space(env.agents[0]).n, obs_dim, state_dim, env.max_steps + 1)
    return jax.jit(jax.vmap(step)), blank, shape, env


class Smax:
    """Battles on a SMAX map ([SMAX] Sec. 3), stepped together.

    Args:
        map_name: one of SMAX's maps.
        num_envs: N, the number of battles.
    """

    def __init__(self, map_name: str, num_envs: int) -> None:
        self.num_envs = num_envs
        self.advance, self.blank, self.shape, self.env = compile_smax(map_name)

    def reset(self, seeds: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Begin all battles anew. Returns the first `floats` and `avail_actions` as in Step."""
        import jax

        # The words of jax.random.PRNGKey for seeds of 31 bits
        self.keys = np.stack([np.zeros(self.num_envs, np.uint32), np.array(seeds, np.uint32)], axis=1)
        self.state = jax.tree.map(lambda leaf: np.repeat(leaf[None], self.num_envs, axis=0), self.blank)
        nothing = np.zeros((self.num_envs, self.shape.n_agents), np.int32)
        return self._call(nothing, True)[:2]

    def _call(self, actions: np.ndarray, restart: bool) -> list[np.ndarray]:
        restart = np.full(self.num_envs, restart)
        self.keys, self.state, arrays = self.advance(self.keys, self.state, actions.astype(np.int32), restart)
        return [np.array(array) for array in arrays]  # copies: JAX's own are read-only

    def step(self, actions: np.ndarray) -> Step:
        """Play one step of all battles with actions (N, n)."""
        return Step(*self._call(actions, False), np.zeros(self.num_envs, bool))

    def draw(self) -> np.ndarray:
        """A picture (384, 384, 3) of the first battle: allies blue, enemies red, the brighter the healthier; shots."""
        import jax

        state = jax.tree.map(lambda leaf: np.asarray(leaf[0]), self.state.state)
        scale = 384 / self.env.map_width
        picture = np.full((384, 384, 3), 24, np.uint8)
        places = (np.arange(384) + 0.5) / scale
        first_shot, n = self.env.num_movement_actions, self.env.num_allies
        for i in np.flatnonzero(state.unit_alive):
            x, y = state.unit_positions[i]
            target = int(state.prev_attack_actions[i]) - first_shot
            if target >= 0:  # enemies count theirs from the last ally on
                end = state.unit_positions[n + target if i < n else n - 1 - target]
                line = state.unit_positions[i] + np.linspace(0, 1, 200)[:, None] * (end - state.unit_positions[i])
                columns, rows = (line * scale).astype(int).clip(0, 383).T
                picture[rows, columns] = (200, 200, 120)
            kind = state.unit_types[i]
            health = state.unit_health[i] / float(self.env.unit_type_health[kind])
            disc = np.hypot(places[:, None] - y, places - x) < float(self.env.unit_type_radiuses[kind])
            picture[disc] = np.array((80, 140, 255) if i < n else (255, 90, 80)) * (0.35 + 0.65 * health)
        return picture[::-1]

    def close(self) -> None:
        """Nothing is left behind."""


INSTALL_SMAC = """the real SMAC needs: pip install git+https://github.com/oxwhirl/smac (PyPI's smac is another project);
then pip install -r requirements.txt once more, since its protobuf may be older than TensorBoard's (it was made for
protobuf<3.21, and runs with a newer one as this script starts it); StarCraft II for Linux in the folder that SC2PATH
names (default ~/StarCraftII); and SMAC's maps in its Maps/SMAC_Maps"""


def silence() -> None:
    """Nothing that this process or the game writes is seen: the game tells of every start."""
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def describe_smac(connection, map_name: str) -> None:
    """A process of its own: it sends the names of SMAC's maps and the sizes of one, or an exception as a text."""
    silence()
    try:
        from smac.env import StarCraft2Env
        from smac.env.starcraft2.maps.smac_maps import get_smac_map_registry

        maps = list(get_smac_map_registry())
        connection.send((maps, StarCraft2Env(map_name=map_name).get_env_info() if map_name in maps else {}))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


@functools.cache
def smac_shape(map_name: str) -> Shape:
    """The sizes of a SMAC map. Ends the program with one line where something is missing; starts no game."""
    spec = importlib.util.find_spec("smac")
    folders = spec.submodule_search_locations if spec else []
    if not any(Path(folder, "env", "starcraft2").exists() for folder in folders):
        found = "the smac that is installed is another package" if spec else "there is no package smac"
        fail(f"smac/{map_name}: {found}; {INSTALL_SMAC}")
    # Trap: a newer protobuf takes SMAC's messages only in pure Python, which is decided as a process first imports it
    os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
    context = multiprocessing.get_context("spawn")
    connection, other_end = context.Pipe()
    process = context.Process(target=describe_smac, args=(other_end, map_name), daemon=True)
    process.start()
    other_end.close()
    try:
        answer = connection.recv()
    except EOFError:
        answer = "its process has ended"
    process.join()
    if isinstance(answer, str):
        fail(f"smac/{map_name}: {answer}; {INSTALL_SMAC}")
    maps, sizes = answer
    if map_name not in maps:
        nearest = difflib.get_close_matches(map_name, maps, n=3, cutoff=0.4) or maps
        fail(f"there is no SMAC map {map_name!r}; the nearest names: {', '.join(nearest)}")
    game = Path(os.environ.get("SC2PATH", "~/StarCraftII")).expanduser()
    if sys.platform == "linux" and not (game / "Maps" / "SMAC_Maps").is_dir():
        fail(f"smac/{map_name}: there is no folder {game / 'Maps' / 'SMAC_Maps'}; {INSTALL_SMAC}")
    return Shape(*(sizes[name] for name in ("n_agents", "n_actions", "obs_shape", "state_shape", "episode_limit")))


def play_smac(connection, map_name: str, seed: int, replay_dir: str) -> None:
    """A process of its own with one game of StarCraft II: it answers each message of `Smac` with a tuple.

    What it sends: floats, avail_actions, last_floats, last_avail_actions, reward, ended, terminated, won, dropped. An
    exception is sent as a text. It ends, and the game with it, when the connection does, whatever the reason.
    """
    os.setsid()  # so that Ctrl-C reaches neither this process nor the game, and both can be killed as one group
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    silence()
    from smac.env import StarCraft2Env

    def launch() -> "StarCraft2Env":
        # Detail: continuing_episode only makes step() say where the time limit was reached; PyMARL has it off
        settings = {"map_name": map_name, "seed": seed, "continuing_episode": True}
        # Trap: replays are named after the second in which they are written, and games are many
        return StarCraft2Env(**settings, replay_dir=replay_dir, replay_prefix=f"{map_name}_{seed}")

    def row() -> tuple:
        floats = np.concatenate([*env.get_obs(), env.get_state()]).astype(np.float32)
        return floats, np.array(env.get_avail_actions(), np.uint8)

    def begin(first: bool = False) -> tuple:
        env.reset()
        if first:  # Trap: the package counts health again for each look at units that are not all there yet
            health = sum(unit.health_max + unit.shield_max for unit in env.enemies.values())
            env.max_reward = env.n_enemies * env.reward_death_value + env.reward_win + health
        return row()

    env = launch()
    try:
        first_row = begin(first=True)
        connection.send((*first_row, *first_row, 0.0, False, False, False, False))
        while True:
            message = connection.recv()
            if isinstance(message, str):
                env.save_replay()
                connection.send(message)
                continue
            reward, ended, info = env.step(message)
            if dropped := "battle_won" not in info:  # Trap: after a crash step() returns 0, True, {}
                env.close()
                env = launch()
                new = last = begin(first=True)
            else:
                last = row()
                new = begin() if ended else last
            terminated = ended and not info.get("episode_limit", False)
            connection.send((*new, *last, reward, ended, terminated, info.get("battle_won", False), dropped))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # nobody is listening any more
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}")
    finally:
        env.close()


class Smac:
    """Battles of the real SMAC ([SMAC]), a process for each; a game that crashes is started anew.

    Args:
        map_name: one of the package's maps.
        num_envs: N, the number of games.
        replay_dir: where `save_replay` writes.
    """

    patience = 300  # seconds for an answer; loading a map takes tens
    endurance = 10  # crashes of a game without a whole episode between them
    answered = False  # whether any game ever began: if so, the package and the game are there

    def __init__(self, map_name: str, num_envs: int, replay_dir: str = "") -> None:
        self.shape = smac_shape(map_name)
        self.map_name, self.num_envs, self.replay_dir = map_name, num_envs, replay_dir
        self.games = []  # (process, connection)
        self.crashes = [0] * num_envs  # of each game since its last whole episode

    def reset(self, seeds: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Start all games anew: a seed is the game's, not the episode's. Returns `floats` and `avail_actions`."""
        self.close()
        self.seeds = seeds
        self.games = [self._start(seed) for seed in seeds]
        rows = [self._receive(i) for i in range(self.num_envs)]
        return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])

    def _start(self, seed: int) -> tuple:
        context = multiprocessing.get_context("spawn")
        connection, other_end = context.Pipe()
        arguments = (other_end, self.map_name, seed, self.replay_dir)
        process = context.Process(target=play_smac, args=arguments, daemon=True)
        process.start()
        other_end.close()  # Trap: else the end of the process is never seen
        return process, connection

    def _stop(self, i: int) -> None:
        process, connection = self.games[i]
        connection.close()
        process.join(10)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the game too, also where the process is gone already
        process.kill()  # where it has no group of its own yet
        process.join()

    def _receive(self, i: int) -> tuple:
        """The answer of a game. One that has none in time, or has ended, is started anew; its episode is dropped."""
        reason = f"no answer within {self.patience} s"
        try:
            if self.games[i][1].poll(self.patience):
                answer = self.games[i][1].recv()
                if not isinstance(answer, str):
                    *_, ended, _, _, dropped = answer
                    Smac.answered = True
                    self.crashes[i] = self.crashes[i] + 1 if dropped else 0 if ended else self.crashes[i]
                    if self.crashes[i] <= self.endurance:
                        return answer
                    answer = "the game crashes in every episode"
                reason = answer
        except (EOFError, OSError):
            reason = "its process has ended"
        self.crashes[i] += 1
        if not self.answered or self.crashes[i] > self.endurance:
            advice = "" if self.answered else f"; {INSTALL_SMAC}"
            raise OSError(f"smac/{self.map_name} cannot be played: {reason}{advice}")
        print(f"\nnote: a game is started anew: {reason}", file=sys.stderr)
        self._stop(i)
        self.games[i] = self._start(self.seeds[i] + self.crashes[i])
        floats, avail_actions, *_ = self._receive(i)
        return floats, avail_actions, floats, avail_actions, 0.0, True, True, False, True

    def step(self, actions: np.ndarray) -> Step:
        """Play one step of all battles with actions (N, n)."""
        for (_, connection), action in zip(self.games, actions.tolist()):
            with contextlib.suppress(OSError):  # a game that has ended is noticed below
                connection.send(action)
        return Step(*map(np.array, zip(*(self._receive(i) for i in range(self.num_envs)))))

    def save_replay(self) -> None:
        """Have each game write its replay, which holds all its episodes. Raises OSError where one could not."""
        for _, connection in self.games:
            connection.send("save replay")
        for _, connection in self.games:
            answer = connection.recv() if connection.poll(self.patience) else f"no answer within {self.patience} s"
            if answer != "save replay":
                raise OSError(f"a replay of smac/{self.map_name} was not saved: {answer}")

    def close(self) -> None:
        """End all games and their processes."""
        for i in range(len(self.games)):
            self._stop(i)
        self.games = []


def reset_seeds(seed: int, *key: int, num: int) -> list[int]:
    """Seeds for `num` environments, made of the run's seed and a key: the same key gives the same episodes."""
    return [int(word) >> 1 for word in np.random.SeedSequence([seed, *key]).generate_state(num)]  # 31 bits


class Agent(nn.Module):
    """Q_a(tau, .) of an agent, the same parameters for all: linear, GRU, linear ([QMIX] Fig. 2c).

    Args:
        shape: the sizes of observations and actions.
        rnn_hidden_dim: the width.
    """

    def __init__(self, shape: Shape, rnn_hidden_dim: int) -> None:
        super().__init__()
        self.n_agents, self.n_actions, self.obs_dim = shape.n_agents, shape.n_actions, shape.obs_dim
        self.fc1 = nn.Linear(shape.obs_dim + shape.n_actions + shape.n_agents, rnn_hidden_dim)
        self.rnn = nn.GRU(rnn_hidden_dim, rnn_hidden_dim)
        self.fc2 = nn.Linear(rnn_hidden_dim, shape.n_actions)

    def inputs(self, obs: torch.Tensor, last_actions: torch.Tensor) -> torch.Tensor:
        """Observation, last action and number of each agent (..., n, O + A + n); last_actions (..., n), -1 for none."""
        last = last_actions[..., None] == torch.arange(self.n_actions, device=obs.device)
        ids = torch.eye(self.n_agents, device=obs.device).expand(*obs.shape[:-1], -1)
        return torch.cat([obs, last, ids], dim=-1)

    def forward(
        self, inputs: torch.Tensor, sizes: torch.Tensor, hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Q (R, n, A) of inputs (R, n, ...), ragged: sizes (T,) rows at each time; and the last hidden (1, B n, H).

        `hidden` (1, B n, H) is the first one, zeros if None. The last one is None where the sequence was unrolled.
        """
        embedded = torch.relu(self.fc1(inputs)).flatten(0, 1)  # (R n, H)
        if hidden is None and embedded.requires_grad and not embedded.is_cuda:
            outputs = self.unroll(embedded, (sizes * self.n_agents).tolist())
        else:
            packed, hidden = self.rnn(PackedSequence(embedded, sizes * self.n_agents), hidden)
            outputs = packed.data
        return self.fc2(outputs).unflatten(0, (-1, self.n_agents)), hidden

    def unroll(self, embedded: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        r"""What `self.rnn` makes of a ragged sequence (R n, H) from zeros on, with the same parameters: (R n, H).

        r, z = \sigma(W_i x + b_i + W_h h + b_h),   c = tanh(W_i x + b_i + r (W_h h + b_h)),   h' = (1 - z) c + z h

        Trap: PyTorch's on the CPU slices the inputs at each step, and the gradient of each slice is as large as all.
        """
        rnn, H = self.rnn, self.rnn.hidden_size
        from_inputs = F.linear(embedded, rnn.weight_ih_l0, rnn.bias_ih_l0).split(sizes)  # (B n, 3 H) at each time
        hidden, outputs = embedded.new_zeros(sizes[0], H), []
        for x, size in zip(from_inputs, sizes):
            hidden = hidden[:size]  # shorter episodes have ended
            x_rz, x_c = x.split([2 * H, H], dim=1)
            h_rz, h_c = F.linear(hidden, rnn.weight_hh_l0, rnn.bias_hh_l0).split([2 * H, H], dim=1)
            r, z = torch.sigmoid(x_rz + h_rz).chunk(2, dim=1)
            c = torch.tanh(torch.addcmul(x_c, r, h_c))
            hidden = torch.lerp(c, hidden, z)
            outputs.append(hidden)
        return torch.cat(outputs)


class QMixer(nn.Module):
    r"""Q_tot = \mathrm{ELU}(Q |W_1(s)| + b_1(s)) |w_2(s)| + V(s), [QMIX] Sec. 4, Fig. 2a: monotone in each Q.

    Args:
        shape: the sizes.
        embed_dim: width of the mixing network.
        hypernet_embed: width of the hypernetworks that make W_1 and w_2.
    """

    def __init__(self, shape: Shape, embed_dim: int, hypernet_embed: int) -> None:
        super().__init__()
        n, state_dim = shape.n_agents, shape.state_dim

        def hypernetwork(width: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(state_dim, width), nn.ReLU(), nn.Linear(width, outputs))

        self.n_agents, self.embed_dim = n, embed_dim
        self.hyper_w1 = hypernetwork(hypernet_embed, n * embed_dim)
        self.hyper_b1 = nn.Linear(state_dim, embed_dim)
        self.hyper_w2 = hypernetwork(hypernet_embed, embed_dim)
        self.hyper_v = hypernetwork(embed_dim, 1)

    def forward(self, agent_qs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Q_tot (P, 1) of the agents' values (P, n) in states (P, S)."""
        w1 = self.hyper_w1(state).abs().unflatten(-1, (self.n_agents, self.embed_dim))  # (P, n, E)
        hidden = nn.functional.elu((agent_qs[..., None] * w1).sum(dim=-2) + self.hyper_b1(state))  # (P, E)
        # Trap: no abs on the biases and on V, which may have any sign
        return (hidden * self.hyper_w2(state).abs()).sum(dim=-1, keepdim=True) + self.hyper_v(state)


class VDNMixer(nn.Module):
    """Q_tot is the sum of the agents' values, whatever the state: [VDN] Sec. 3."""

    def forward(self, agent_qs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Q_tot (P, 1) of the agents' values (P, n)."""
        return agent_qs.sum(dim=-1, keepdim=True)


class NoMixer(nn.Module):
    """Independent Q-learning, [IQL]: each agent's value (P, n) is learned as if it were the team's."""

    def forward(self, agent_qs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The values as they are."""
        return agent_qs


MIXERS = {"qmix": QMixer, "vdn": VDNMixer, "none": NoMixer}


def make_networks(args: Args, shape: Shape) -> tuple[Agent, nn.Module]:
    """An agent and a mixing network as the arguments say."""
    sizes = (shape, args.mixing_embed_dim, args.hypernet_embed) if args.mixer == "qmix" else ()
    return Agent(shape, args.rnn_hidden_dim), MIXERS[args.mixer](*sizes)


class Batch(NamedTuple):
    """B episodes as the title has it: R rows, ordered by time and then by length, the longest first; P = R - B steps.

    The k-th step leads to row B + k; it begins at row now[k].
    """

    obs: torch.Tensor  # (R, n, O)
    state: torch.Tensor  # (R, S)
    avail_actions: torch.Tensor  # (R, n, A) bool
    actions: torch.Tensor  # (P, n) int64
    rewards: torch.Tensor  # (P, 1)
    terminated: torch.Tensor  # (P, 1) 1 at a last step that is not bootstrapped
    now: torch.Tensor  # (P,)
    sizes: torch.Tensor  # (T+1,) rows at each time, on the CPU


class Episode(NamedTuple):
    """An episode of T steps as the replay keeps it: exactly as long as it was, in the smallest exact types."""

    floats: np.ndarray  # (T+1, n O + S) float32
    avail_actions: np.ndarray  # (T+1, n A) uint8
    actions: np.ndarray  # (T, n) uint8
    rewards: np.ndarray  # (T,) float32


def episode_bytes(shape: Shape) -> int:
    """Bytes of the longest episode in the replay."""
    n, rows = shape.n_agents, shape.episode_limit + 1
    return rows * (4 * (n * shape.obs_dim + shape.state_dim) + n * shape.n_actions + n + 4)


class EpisodeReplay:
    """The last `buffer_size` episodes.

    Args:
        buffer_size: how many.
        shape: the sizes.
    """

    def __init__(self, buffer_size: int, shape: Shape) -> None:
        self.buffer_size, self.shape = buffer_size, shape
        self.episodes, self.terminated = [], []
        self.added = 0

    def __len__(self) -> int:
        return len(self.episodes)

    def add(self, episode: Episode, terminated: bool) -> None:
        """Append an episode, in the place of the oldest one where the replay is full."""
        if len(self) < self.buffer_size:
            self.episodes.append(episode)
            self.terminated.append(terminated)
        else:
            place = self.added % self.buffer_size
            self.episodes[place], self.terminated[place] = episode, terminated
        self.added += 1

    def sample(self, size: int, bootstrap_timeouts: bool, rng: np.random.Generator) -> Batch:
        """Draw `size` different episodes."""
        return self.batch(rng.choice(len(self), size, replace=False).tolist(), bootstrap_timeouts)

    def batch(self, chosen: list[int], bootstrap_timeouts: bool) -> Batch:
        """The batch of these episodes."""
        n, A, obs_dim, state_dim, _ = self.shape
        chosen = sorted(chosen, key=lambda i: -len(self.episodes[i].rewards))
        lengths = np.array([len(self.episodes[i].rewards) for i in chosen])
        sizes = (lengths >= np.arange(lengths[0] + 1)[:, None]).sum(axis=1)  # (T+1,)
        first = np.cumsum(sizes) - sizes  # (T+1,) the row of the longest episode at each time
        R, B = sizes.sum(), len(chosen)
        floats = np.empty((R, n * obs_dim + state_dim), np.float32)
        avail_actions = np.empty((R, n * A), np.uint8)
        actions, now = np.empty((R - B, n), np.int64), np.empty(R - B, np.int64)
        rewards, terminated = np.empty((R - B, 1), np.float32), np.zeros((R - B, 1), np.float32)
        for b, (i, length) in enumerate(zip(chosen, lengths)):
            episode, rows = self.episodes[i], first[: length + 1] + b
            steps = rows[1:] - B
            floats[rows], avail_actions[rows] = episode.floats, episode.avail_actions
            actions[steps], rewards[steps, 0], now[steps] = episode.actions, episode.rewards, rows[:-1]
            terminated[steps[-1]] = self.terminated[i] or not bootstrap_timeouts
        floats, sizes = torch.from_numpy(floats), torch.from_numpy(sizes)
        obs, state = floats[:, : n * obs_dim].unflatten(1, (n, obs_dim)), floats[:, n * obs_dim :]
        avail_actions = torch.from_numpy(avail_actions).view(-1, n, A).bool()
        return Batch(obs, state, avail_actions, *map(torch.from_numpy, (actions, rewards, terminated, now)), sizes)

    def state_dict(self) -> dict:
        """The state, `PIECE` episodes compressed together."""
        pieces = []
        for first in range(0, len(self), PIECE):
            columns = map(np.concatenate, zip(*self.episodes[first : first + PIECE]))
            pieces.append([zlib.compress(np.ascontiguousarray(column), level=1) for column in columns])
        lengths = torch.tensor([len(episode.rewards) for episode in self.episodes])
        return {"pieces": pieces, "lengths": lengths, "terminated": list(self.terminated), "added": self.added}

    def load_state_dict(self, state: dict) -> None:
        """The inverse."""
        n, A, obs_dim, state_dim, _ = self.shape
        width = n * obs_dim + state_dim
        kinds = ((1, width, np.float32), (1, n * A, np.uint8), (0, n, np.uint8), (0, 0, np.float32))
        self.episodes, self.terminated, self.added = [], list(state["terminated"]), state["added"]
        for k, piece in enumerate(state["pieces"]):
            lengths = state["lengths"][k * PIECE : (k + 1) * PIECE].numpy()
            columns = []
            for data, (more, width, dtype) in zip(piece, kinds):
                column = np.frombuffer(zlib.decompress(data), dtype)
                column = column.reshape(-1, width) if width else column
                columns.append([part.copy() for part in np.split(column, np.cumsum(lengths + more)[:-1])])
            self.episodes += [Episode(*parts) for parts in zip(*columns)]


def td_lambda_targets(
    rewards: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    sizes: torch.Tensor,
    gamma: float,
    td_lambda: float,
) -> torch.Tensor:
    r"""Targets y (P, ...) of next_values (P, ...), the values after each step; rewards and terminated are (P, 1).

    y_t = r_t + \gamma (1 - terminated_t) ((1 - \lambda) Q'_{t+1} + \lambda y_{t+1}); at an episode's last step
    there is no y_{t+1}, and lambda is 0. With lambda = 0 it is the paper's y^tot, [QMIX] below Eq. (6).
    """
    if td_lambda == 0:
        return rewards + gamma * (1 - terminated) * next_values
    targets = torch.empty_like(next_values)
    last, later = len(targets), next_values[:0]
    for size in reversed(sizes[1:].tolist()):  # the steps at a time, from the last time on
        steps = slice(last - size, last)
        mixture = next_values[steps].clone()
        mixture[: len(later)] += td_lambda * (later - mixture[: len(later)])  # the longer episodes go on
        targets[steps] = later = rewards[steps] + gamma * (1 - terminated[steps]) * mixture
        last -= size
    return targets


def qmix_loss(
    agent: Agent, mixer: nn.Module, target_agent: Agent, target_mixer: nn.Module, batch: Batch, args: Args
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    r"""The loss () of a batch, [QMIX] Eq. (6), and what is logged of it.

    L = 1/P \sum_k (y^tot_k - Q_tot(s_k, u_k))^2,   y^tot = r + \gamma Q_tot(s', u'; \theta^-)
    u' is the best available action of each agent: to its online network, valued by the target network ([DDQN]), or to
    the target network. As Q_tot is monotone, the agents' best actions are the team's: [QMIX] Eq. (4) and (5).
    """
    B = int(batch.sizes[0])
    no_actions = batch.actions.new_full((B, agent.n_agents), -1)  # before the first one
    inputs = agent.inputs(batch.obs, torch.cat([no_actions, batch.actions]))
    agent_qs, _ = agent(inputs, batch.sizes)  # (R, n, A)
    chosen_action_qvals = agent_qs[batch.now].gather(-1, batch.actions[..., None]).squeeze(-1)  # (P, n)
    q_tot = mixer(chosen_action_qvals, batch.state[batch.now])
    with torch.no_grad():
        target_qs = target_agent(inputs, batch.sizes)[0][B:]
        # Trap: without the mask an action that cannot be taken, whose value nothing corrects, may be the best one
        best = (agent_qs[B:] if args.double_q else target_qs).masked_fill(~batch.avail_actions[B:], UNAVAILABLE)
        best = best.argmax(dim=-1, keepdim=True)
        next_values = target_mixer(target_qs.gather(-1, best).squeeze(-1), batch.state[B:])
        kept = (batch.rewards, next_values, batch.terminated, batch.sizes)
        targets = td_lambda_targets(*kept, args.gamma, args.td_lambda)
    td_errors = targets - q_tot
    loss = (td_errors**2).mean()
    parts = {
        "losses/td_loss": loss,
        "losses/td_error_abs": td_errors.abs().mean(),
        "losses/q_taken_mean": q_tot.mean(),
        "losses/target_mean": targets.mean(),
    }
    return loss, {tag: value.detach() for tag, value in parts.items()}


class Players:
    """The agents of N environments while they play: their hidden states and last actions.

    Args:
        agent: the network.
        num_envs: N.
        device: where the network is.
    """

    def __init__(self, agent: Agent, num_envs: int, device: torch.device) -> None:
        self.agent, self.num_envs, self.device = agent, num_envs, device
        self.hidden = torch.zeros(1, num_envs * agent.n_agents, agent.rnn.hidden_size, device=device)
        self.last_actions = np.full((num_envs, agent.n_agents), -1)

    @torch.no_grad()
    def act(
        self, floats: np.ndarray, avail_actions: np.ndarray, epsilon: float = 0, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Actions (N, n): each agent's best available one, or with probability epsilon any available one."""
        n, obs_dim = self.agent.n_agents, self.agent.obs_dim
        obs = floats[:, : n * obs_dim].reshape(self.num_envs, n, obs_dim)
        obs, last_actions = (torch.from_numpy(array).to(self.device) for array in (obs, self.last_actions))
        inputs = self.agent.inputs(obs, last_actions)
        self.agent_qs, self.hidden = self.agent(inputs, torch.tensor([self.num_envs]), self.hidden)  # (N, n, A)
        actions = np.where(avail_actions, self.agent_qs.cpu().numpy(), UNAVAILABLE).argmax(axis=-1)
        if epsilon > 0:
            anything = (rng.random(avail_actions.shape) * avail_actions).argmax(axis=-1)
            actions = np.where(rng.random(actions.shape) < epsilon, anything, actions)
        self.last_actions = actions.copy()
        return actions

    def forget(self, ended: np.ndarray) -> None:
        """New episodes have begun in environments (N,): no last action, and a hidden state of zeros."""
        # Trap: else an episode is played from another state than it is replayed from
        self.last_actions[ended] = -1
        self.hidden.view(self.num_envs, -1)[torch.from_numpy(ended).to(self.device)] = 0


def play(
    agent: Agent, envs: Smax | Smac, seeds: list[int], num_episodes: int, film: Path | None = None
) -> tuple[list[float], list[bool]]:
    """Play greedy episodes, the i-th in environment i modulo N: their returns, and which were won."""
    device = next(agent.parameters()).device
    players = Players(agent, envs.num_envs, device)
    floats, avail_actions = envs.reset(seeds)
    left = np.bincount(np.arange(num_episodes) % envs.num_envs, minlength=envs.num_envs)
    results = [[] for _ in left]
    returns, frames = np.zeros(envs.num_envs), []
    while left.any():
        if film and not results[0]:
            frames.append(envs.draw())
        step = envs.step(players.act(floats, avail_actions))
        floats, avail_actions = step.floats, step.avail_actions
        returns += step.rewards
        for i in np.flatnonzero(step.ended):
            if left[i] and not step.dropped[i]:
                results[i].append((float(returns[i]), bool(step.won[i])))
                left[i] -= 1
            returns[i] = 0
        players.forget(step.ended)
    if film:
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        film.parent.mkdir(exist_ok=True)
        with FFMPEG_VideoWriter(str(film), (384, 384), 8) as video:
            for frame in frames:
                video.write_frame(np.ascontiguousarray(frame))
    episodes = [results[i % envs.num_envs][i // envs.num_envs] for i in range(num_episodes)]
    return [score for score, _ in episodes], [won for _, won in episodes]


def evaluate(args: Args, model: dict, run_folder: Path) -> tuple[list[float], list[bool]]:
    """Play `args.eval_episodes` greedy episodes, print returns and win rate, and give both for each.

    `model` is a checkpoint or what model.pt holds. The episodes depend on args.seed and
    the number of environments, and are none of training's.
    """
    real = args.env_id.startswith("smac/")
    replays = real and (args.save_replay or args.capture_video)
    replay_dir = str((run_folder / "replays").resolve()) if replays else ""
    envs = make_envs(args, min(args.num_envs, args.eval_episodes) if real else args.num_envs, replay_dir)
    agent, _ = make_networks(args, envs.shape)
    agent.to(choose_device(args)).load_state_dict(model["agent"])
    film = run_folder / "videos" / f"evaluation-step-{model['global_step']}.mp4"
    seeds = reset_seeds(args.seed, 0, 2, num=envs.num_envs)
    returns, won = play(agent, envs, seeds, args.eval_episodes, film if args.capture_video and not real else None)
    if replays:
        envs.save_replay()
    envs.close()
    battles = f"{np.mean(won):.1%} of the battles won"
    print(f"evaluation: {np.mean(returns):.2f} +- {np.std(returns):.2f} over {len(returns)} episodes, {battles}")
    print("returns: " + " ".join(f"{value:.2f}" for value in returns), flush=True)
    return returns, won


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


def load_nearest(run_folder: Path, step: int) -> dict:
    """The sound checkpoint or kept model of a run folder that is nearest to a step, which is said if it is another."""
    if not run_folder.is_dir():
        fail(f"--load-step takes a run folder, and {run_folder} is a file")
    found = [*run_folder.glob("model_*.pt"), *run_folder.glob("checkpoint_*.pt")]
    found = {path: int(path.stem.split("_")[1]) for path in found if path.stem.split("_")[1].isdecimal()}
    # Of the same step the checkpoint, which comes later, holds more
    nearest = sorted(reversed(found), key=lambda path: abs(found[path] - step))
    checkpoint = first_sound(nearest, f"{run_folder} holds no saved step of {SCRIPT}.py")
    if checkpoint["global_step"] != step:
        print(f"note: the saved step that is nearest to {step:,} is {checkpoint['global_step']:,}", file=sys.stderr)
    return checkpoint


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
    N = args.num_envs
    real = args.env_id.startswith("smac/")
    global_step = saved_step = checkpoint["global_step"] if checkpoint else 0
    last_step = global_step + max(0, math.ceil((args.total_timesteps - global_step) / N)) * N
    if last_step != args.total_timesteps > global_step:
        steps = f"{N} environments step together"
        print(f"note: {args.total_timesteps:,} steps are rounded up to {last_step:,} ({steps})", file=sys.stderr)
    device = choose_device(args)
    torch.manual_seed(args.seed)  # the parameters
    rng = np.random.default_rng(args.seed)  # the exploration and the minibatches

    envs = make_envs(args, N)
    test_envs = make_envs(args, min(N, args.test_nepisode) if real else N)  # the same N needs no other compilation
    shape = envs.shape
    agent, mixer = (network.to(device) for network in make_networks(args, shape))
    target_agent, target_mixer = (network.to(device) for network in make_networks(args, shape))
    target_agent.load_state_dict(agent.state_dict())
    target_mixer.load_state_dict(mixer.state_dict())
    parameters = [*agent.parameters(), *mixer.parameters()]
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, eps=args.optim_eps)
    else:
        optimizer = torch.optim.RMSprop(parameters, lr=args.learning_rate, alpha=args.optim_alpha, eps=args.optim_eps)
    replay = EpisodeReplay(args.buffer_size, shape)
    recent_returns, recent_won = deque(maxlen=100), deque(maxlen=100)
    episodes = last_target_update = crashes = 0
    updates_due = 0.0
    if checkpoint:
        episodes, last_target_update = checkpoint["episodes"], checkpoint["last_target_update"]
        crashes, updates_due = checkpoint["crashes"], checkpoint["updates_due"]
        agent.load_state_dict(checkpoint["agent"])
        mixer.load_state_dict(checkpoint["mixer"])
        target_agent.load_state_dict(checkpoint["target_agent"])
        target_mixer.load_state_dict(checkpoint["target_mixer"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer.param_groups[0].update(eps=args.optim_eps)
        if args.optimizer == "rmsprop":
            optimizer.param_groups[0].update(alpha=args.optim_alpha)
        if args.checkpoint_replay and checkpoint.get("replay"):
            replay.load_state_dict(checkpoint.pop("replay"))
        else:
            print("note: the replay begins empty: this is not exactly the run that was interrupted", file=sys.stderr)
        rng.bit_generator.state = checkpoint["rng"]
        recent_returns.extend(checkpoint["recent_returns"])
        recent_won.extend(checkpoint["recent_won"])
    if args.compile:
        for network in (mixer, target_mixer):
            network.compile(dynamic=True)  # batches differ in length

    def model() -> dict:
        return {
            "script": SCRIPT,
            "args": vars(args) | {"resume": None, "evaluate": None, "load_step": 0},
            "global_step": global_step,
            "agent": agent.state_dict(),
        }

    def state() -> dict:
        """The model and all else that the rest of the run depends on, but for the replay."""
        return model() | {
            "episodes": episodes,
            "last_target_update": last_target_update,
            "updates_due": updates_due,
            "crashes": crashes,
            "mixer": mixer.state_dict(),
            "target_agent": target_agent.state_dict(),
            "target_mixer": target_mixer.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": rng.bit_generator.state,
            "recent_returns": list(recent_returns),
            "recent_won": list(recent_won),
        }

    def check_gradient() -> None:
        if not grad_norm.isfinite():
            raise FloatingPointError(f"the gradient is not finite at step {global_step:,}")

    def save() -> None:
        """Write a checkpoint, never one of parameters that are not finite."""
        check_gradient()
        writer.add_scalar("charts/checkpoint", global_step, global_step)
        writer.flush()
        save_checkpoint(run_folder, state() | {"replay": replay.state_dict() if args.checkpoint_replay else None})

    def crossed(interval: int) -> bool:
        """Whether the last step has passed a multiple of an interval."""
        return interval > 0 and global_step // interval > (global_step - N) // interval

    writer = make_writer(args, run_folder, global_step if checkpoint else None)
    grad_norm, parts = torch.zeros(()), {}
    if not checkpoint:
        save()
    if not real:
        started = time.perf_counter()
        envs.reset(reset_seeds(args.seed, global_step, num=N))
        print(f"compiled SMAX in {time.perf_counter() - started:.1f} s", flush=True)
    progress = Progress(global_step, last_step)

    rows, everyone = shape.episode_limit + 1, np.arange(N)
    floats_so_far = np.zeros((N, rows, shape.n_agents * shape.obs_dim + shape.state_dim), np.float32)
    avail_so_far = np.zeros((N, rows, shape.n_agents * shape.n_actions), np.uint8)
    actions_so_far = np.zeros((N, rows, shape.n_agents), np.uint8)
    rewards_so_far = np.zeros((N, rows), np.float32)
    floats = None

    while global_step < last_step:
        if floats is None:  # at the start and after each checkpoint
            floats, avail_actions = envs.reset(reset_seeds(args.seed, global_step, num=N))
            players = Players(agent, N, device)
            t = np.zeros(N, int)
            grad_norm, parts = torch.zeros(()), {}

        # One step in each environment
        learning_rate = args.learning_rate * (1 - global_step / last_step if args.anneal_lr else 1)
        annealed = min(1.0, global_step / args.epsilon_anneal_time)
        epsilon = args.epsilon_start + annealed * (args.epsilon_finish - args.epsilon_start)
        actions = players.act(floats, avail_actions, epsilon, rng)
        floats_so_far[everyone, t] = floats
        avail_so_far[everyone, t] = avail_actions.reshape(N, -1)
        step = envs.step(actions)
        actions_so_far[everyone, t], rewards_so_far[everyone, t] = actions, step.rewards
        floats, avail_actions = step.floats, step.avail_actions
        global_step += N
        t += 1

        # The episodes that have ended go into the replay
        for i in np.flatnonzero(step.ended):
            length = t[i]
            if step.dropped[i]:
                crashes += 1
                writer.add_scalar("charts/crashes", crashes, global_step)
                continue
            floats_so_far[i, length] = step.last_floats[i]
            avail_so_far[i, length] = step.last_avail_actions[i].ravel()
            arrays = (floats_so_far[i, : length + 1], avail_so_far[i, : length + 1])
            arrays += (actions_so_far[i, :length], rewards_so_far[i, :length])
            replay.add(Episode(*(array.copy() for array in arrays)), bool(step.terminated[i]))
            episodes += 1
            updates_due += args.updates_per_episode
            score = float(rewards_so_far[i, :length].sum(dtype=np.float64))
            recent_returns.append(score)
            recent_won.append(bool(step.won[i]))
            writer.add_scalar("charts/episodic_return", score, global_step)
            writer.add_scalar("charts/episodic_length", length, global_step)
        players.forget(step.ended)
        t[step.ended] = 0

        # Updates, as many as episodes have ended
        if len(replay) < args.batch_size:
            updates_due = 0.0
        while updates_due >= 1:
            updates_due -= 1
            optimizer.param_groups[0]["lr"] = learning_rate
            batch = replay.sample(args.batch_size, args.bootstrap_timeouts, rng)
            if device.type == "cuda":
                moved = (tensor.pin_memory().to(device, non_blocking=True) for tensor in batch[:-1])
                batch = Batch(*moved, batch.sizes)  # the GRU wants the sizes on the CPU
            optimizer.zero_grad()
            loss, parts = qmix_loss(agent, mixer, target_agent, target_mixer, batch, args)
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()
            # Trap: the interval counts episodes, neither steps nor updates
            if episodes - last_target_update >= args.target_update_interval:
                target_agent.load_state_dict(agent.state_dict())
                target_mixer.load_state_dict(mixer.state_dict())
                last_target_update = episodes

        if crossed(args.log_interval) or global_step == last_step:
            check_gradient()
            scalars = {
                "charts/learning_rate": learning_rate,
                "charts/epsilon": epsilon,
                "charts/SPS": progress.sps(global_step),
                **parts,
            }
            if parts:
                scalars["losses/grad_norm"] = grad_norm
            if recent_won:
                scalars["charts/battle_won_rate"] = np.mean(recent_won)
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, global_step)
            progress.show(global_step, recent_returns)
        if crossed(args.test_interval):
            film = run_folder / "videos" / f"test-step-{global_step}.mp4" if args.capture_video and not real else None
            seeds = reset_seeds(args.seed, global_step, 1, num=test_envs.num_envs)
            returns, won = play(agent, test_envs, seeds, args.test_nepisode, film)
            if real:
                test_envs.close()
            writer.add_scalar("eval/episodic_return", np.mean(returns), global_step)
            writer.add_scalar("eval/battle_won_rate", np.mean(won), global_step)
        if crossed(args.save_model_interval):
            check_gradient()
            write_atomically(run_folder / f"model_{global_step}.pt", state())
        due = global_step // args.checkpoint_interval > saved_step // args.checkpoint_interval
        if due and step.ended.any():
            save()
            saved_step, floats = global_step, None

    if floats is not None:
        save()
    envs.close()
    test_envs.close()
    if not optimizer.state:
        print("note: nothing was learned: fewer episodes than --batch-size have ended", file=sys.stderr)
    returns, won = evaluate(args, model(), run_folder)
    writer.add_scalar("eval/episodic_return", np.mean(returns), global_step)
    writer.add_scalar("eval/battle_won_rate", np.mean(won), global_step)
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
        if args.load_step:
            newest = checkpoint["global_step"]
            checkpoint = load_nearest(Path(args.resume or args.evaluate), args.load_step)
        for name in ("mixer", "optimizer", "rnn_hidden_dim", "mixing_embed_dim", "hypernet_embed", "buffer_size"):
            if checkpoint and getattr(args, name) != checkpoint["args"][name]:
                flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
                fail(f"{flag} does not fit what was saved: {name} {checkpoint['args'][name]}")
        envs = make_envs(args, 1)  # what is wrong with the map is said before anything is written
        check_services(args)
        if args.evaluate:
            path = Path(args.evaluate)
            evaluate(args, checkpoint, path if path.is_dir() else path.parent)
            return
        check_replay_size(args, envs.shape)
        run_name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(time.time())}"
        # A run that does not go on from the newest checkpoint is another one: what the first one wrote stays as it is
        back = args.load_step and checkpoint["global_step"] != newest
        run_folder = Path(f"runs/{run_name}" if back or not args.resume else args.resume)
        run_folder.mkdir(parents=True, exist_ok=bool(args.resume))
        saved_args = vars(args) | {"resume": None, "evaluate": None, "load_step": 0}
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
