# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch==2.13.0", "gymnasium==1.3.0", "ale-py==0.12.1", "numpy==2.4.6", "tyro==1.0.17",
#     "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0", "moviepy==2.2.1",
#     "huggingface-hub==2.4.0",
# ]
# ///
r"""Deep Q-network (DQN) on Atari: double, dueling, with prioritized replay.

The agent acts epsilon-greedily on a network's estimate of the return, Q(s, a), and stores its
transitions in a replay buffer. Gradient steps on minibatches, drawn from it by priority, move
Q(s, a) toward the reward plus the discounted value of the next observation, which an older copy
of the network estimates.

[DQN]   Mnih et al. 2015, Nature 518                   [PER]  Schaul et al. 2016, arXiv:1511.05952
[DDQN]  van Hasselt et al. 2016, arXiv:1509.06461      [RBW]  Hessel et al. 2018, arXiv:1710.02298
[DUEL]  Wang et al. 2016, arXiv:1511.06581

    symbol     variable        shape             meaning (N num_envs, n n_step, B batch_size)
    s_t        obs             (N, 4, 84, 84)    the last frame_stack frames, uint8
    Q(s, a)    q_network       (B, num_actions)  action values
    Q'(s, a)   target_network  (B, num_actions)  the same with older parameters
    R^(n)      returns         (B,)              n-step return, [RBW] "Multi-step learning"
    \gamma^n   discounts       (B,)              discount of the bootstrap, 0 at termination
    s_{t+n}    next_obs        (B, 4, 84, 84)    observation to bootstrap from
    \delta_i   td_errors       (B,)              TD error, [PER] Alg. 1, line 11
    p_i^\alpha leaves          (buffer_size,)    p_i = |delta_i| + 1e-6, alpha = per_alpha
    w_i        weights         (B,)              importance-sampling weight, [PER] Sec. 3.4

Differences from common implementations and the papers (reasons: docs/dqn_per_atari.md):
  * The target network is synced every 2,000 updates ([DQN] table: 10,000, DQN Zoo: 2,000 to 7,500).
  * Adam and its settings are labml's.
  * Rewards are clipped, priorities are not. Importance weights are divided by the minibatch's
    largest.
  * Truncation is not termination: the n transitions before it are never drawn, since the buffer
    lacks the final observation to bootstrap from.
  * The streams of 256 units share a layer of 512. [DUEL]: two of 512, and scaled gradients.
  * A lost life is a termination without a reset; FIRE is pressed on a life's first step.
  * Checkpoints reset the environments and reseed all generators: resuming is bit-exact.

    python dqn_per_atari.py --env-id ALE/Pong-v5  # writes runs/ALE-Pong-v5__...
    python dqn_per_atari.py --resume runs/...  # resumes a run
    python dqn_per_atari.py --evaluate runs/...  # evaluates a network
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
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

# Trap: by default OpenMP's threads spin while they wait, which slows a loaded machine tenfold
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gymnasium as gym
import numpy as np
import torch
import tyro
from ale_py import Action
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """Deep Q-network with prioritized replay on Atari."""

    env_id: str = "BreakoutNoFrameskip-v4"  # NameNoFrameskip-v4, or ALE/Name-v5 with sticky actions
    total_timesteps: int = 10_000_000  # agent steps (four frames) of all environments
    num_envs: int = 8  # N: parallel environments
    train_frequency: int = 4  # agent steps of all environments per gradient step
    target_network_frequency: int = 8_000  # agent steps between copies to target_network
    batch_size: int = 32  # B: transitions per minibatch
    buffer_size: int = 1_000_000  # transitions in the replay buffer (7.1 kB each)
    learning_starts: int = 16_384  # transitions stored before the first gradient step
    gamma: float = 0.99  # discount factor
    n_step: int = 1  # n: rewards summed before the bootstrap
    double: bool = True  # double Q-learning, [DDQN]
    dueling: bool = True  # separate value and advantage streams
    prioritized: bool = True  # draw minibatches by priority
    per_alpha: float = 0.6  # alpha: priority exponent
    per_beta: float = 0.4  # beta: importance exponent, annealed to 1
    start_epsilon: float = 1.0  # initial probability of a random action
    end_epsilon: float = 0.01  # final probability of a random action
    exploration_fraction: float = 0.025  # part of the run over which epsilon is annealed
    learning_rate: float = 1e-4  # Adam's step size
    adam_eps: float = 1e-8  # Adam's epsilon; ignored on resuming
    max_grad_norm: float = 0.5  # gradient clipping norm
    frame_stack: int = 4  # frames per observation
    episodic_life: bool = True  # a lost life is a termination
    eval_epsilon: float = 0.01  # epsilon of evaluation
    bf16: bool = False  # bfloat16: faster on some CPUs, slower on others
    env_threads: int = 0  # emulator threads (0: one per core)
    log_interval: int = 400  # iterations between logged losses

    exp_name: str = Path(__file__).stem
    seed: int = 1  # seed of all generators
    torch_deterministic: bool = True  # in cuDNN
    cuda: bool = True  # use the GPU if there is one
    torch_threads: int = 2  # PyTorch's CPU threads
    track: bool = False  # log to Weights & Biases
    wandb_project_name: str = "deep-rl-reference"
    wandb_entity: str | None = None
    capture_video: bool = False  # record an episode after each checkpoint
    save_model: bool = True
    upload_model: bool = False  # to the Hugging Face Hub
    hf_entity: str | None = None  # Hub user or organization
    checkpoint_interval: int = 250_000  # steps
    run_folder: str | None = None  # start or resume in this folder
    resume: str | None = None  # run folder to resume
    evaluate: str | None = None  # model or run folder to evaluate
    eval_episodes: int = 10


def make_atari(args: Args, num_envs: int) -> VectorEnv:
    """Make parallel environments. Replace this to train on something else.

    Requires SAME_STEP autoreset (at an episode's end, `step` returns the next one's first
    observation, and `info["final_obs"]` holds the last), Discrete(n) actions from 0, and uint8
    observations (N, frame_stack, H, W): the last frames, zeros before the episode. `AtariEnvs`
    clips rewards. `reset(seed=...)` must reset all state.
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


class QNetwork(nn.Module):
    """Q(s, a): the network of [DQN] Methods, its last layer replaced by two streams if dueling."""

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, dueling: bool) -> None:
        super().__init__()
        self.dueling = dueling
        self.trunk = nn.Sequential(
            nn.Conv2d(obs_shape[0], 32, 8, stride=4),  # (B, 32, 20, 20)
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),  # (B, 64, 9, 9)
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),  # (B, 64, 7, 7)
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),  # for frames of 84 x 84
            nn.ReLU(),
        )
        if dueling:
            self.value = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
            layers = nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, num_actions)
            self.advantage = nn.Sequential(*layers)
        else:
            self.head = nn.Linear(512, num_actions)
        self.to(memory_format=torch.channels_last)  # the faster memory layout

    def forward(self, obs: Tensor) -> Tensor:
        """Q(s, a) = V(s) + A(s, a) - mean_a' A(s, a') (B, num_actions), [DUEL] Eq. (9)."""
        obs = obs.contiguous(memory_format=torch.channels_last)  # while it is still uint8
        hidden = self.trunk(obs.float() / 255)
        if not self.dueling:
            return self.head(hidden).float()
        value, advantage = self.value(hidden).float(), self.advantage(hidden).float()
        return value + advantage - advantage.mean(dim=1, keepdim=True)


def n_step_returns(rewards, terminations, gamma: float):
    r"""Returns and discounts (B,) from n steps' rewards and terminations (B, n).

    R^(n) = \sum_{k<n} \gamma^k r_{t+k}, [RBW] "Multi-step learning", up to a termination. The
    bootstrap's discount is \gamma^n, or 0 after a termination.
    """
    returns, discounts = np.zeros(len(rewards)), np.ones(len(rewards))
    for k in range(rewards.shape[1]):
        returns += discounts * rewards[:, k]
        discounts *= gamma * ~terminations[:, k]
    return returns, discounts


class Priorities:
    r"""Draws rows with probability P(i) = p_i^\alpha / \sum_k p_k^\alpha, [PER] Eq. (1).

    Node j of a binary tree is the sum of nodes 2j and 2j + 1, so node 1 is the sum of all leaves
    p_i^\alpha, [PER] App. B.2.1.
    """

    def __init__(self, args: Args, num_rows: int) -> None:
        self.alpha = args.per_alpha if args.prioritized else 0.0  # p^0 = 1: uniform
        self.max_priority, self.depth = 1.0, (num_rows - 1).bit_length()
        self.nodes = np.zeros(2 ** (self.depth + 1))  # Detail: float32 would distort the draws
        self.leaves = self.nodes[2**self.depth :][:num_rows]  # a view

    def set(self, rows, leaves) -> None:
        """Set the leaves (K,) of rows (K,). Of duplicate rows, the last counts."""
        nodes = 2**self.depth + rows
        self.nodes[nodes] = leaves
        for _ in range(self.depth):
            nodes = nodes // 2
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def find(self, values):
        """The rows (K,) where the cumulative sum of leaves first exceeds the values (K,)."""
        nodes = np.ones(len(values), int)
        for _ in range(self.depth):
            left, right = self.nodes[2 * nodes], self.nodes[2 * nodes + 1]
            # Trap: without `right > 0`, a value rounded up could end at a leaf of 0
            goes_right = (values >= left) & (right > 0)
            values = values - left * goes_right
            nodes = 2 * nodes + goes_right
        return nodes - 2**self.depth

    def add(self, rows, valid) -> None:
        """Give valid rows (K,) the maximum priority so far, [PER] Alg. 1, line 6, others 0."""
        self.set(rows, valid * self.max_priority**self.alpha)

    def draw(self, batch_size: int, beta: float):
        r"""Rows (B,) and weights w_i = (M P(i))^{-\beta} / \max_j w_j, [PER] Alg. 1, line 10."""
        uniform = torch.rand(batch_size, dtype=torch.float64).numpy()
        if self.alpha:  # one row from each of B equal parts of the sum, [PER] App. B.2.1
            uniform = (np.arange(batch_size) + uniform) / batch_size
        rows = self.find(uniform * self.nodes[1])
        leaves = self.leaves[rows]
        return rows, (leaves / leaves.min()) ** -beta  # M (rows) and the sum cancel

    def update(self, rows, td_errors) -> None:
        """Set p_i = |delta_i| + 1e-6 for rows (B,), [PER] Sec. 3.3."""
        priorities = np.abs(td_errors.astype(float)) + 1e-6
        self.set(rows, priorities**self.alpha)
        self.max_priority = max(self.max_priority, float(priorities.max()))


class Replay:
    """A ring buffer. Each row is a step of an environment, whose next step is N rows later.

    For vector observations: variants/dqn_per_atari/vectors.patch.

    Rows have priority 0, and are not drawn, if (1) a frame of their stack may be lost, (2)
    s_{t+n} was not stored, since the episode was truncated, or (3) s_{t+n} is still to come.
    """

    ARRAYS = ("actions", "rewards", "terminations", "ages", "nodes")  # besides frames

    def __init__(self, args: Args, obs_space: gym.spaces.Box) -> None:
        self.num_envs, self.n_step, self.gamma = args.num_envs, args.n_step, args.gamma
        self.frame_stack, *shape = obs_space.shape
        self.num_rows = rows = args.buffer_size // args.num_envs * args.num_envs
        frame_bytes = math.prod(shape) * obs_space.dtype.itemsize
        check_memory(min(rows, args.total_timesteps) * frame_bytes)
        self.frames = np.zeros((rows, *shape), obs_space.dtype)  # allocated as it fills
        self.actions, self.rewards = np.zeros(rows, int), np.zeros(rows, np.float32)
        self.terminations = np.zeros(rows, bool)
        self.ages = np.zeros(rows, int)  # steps since the episode's start
        self.priorities = Priorities(args, rows)
        self.nodes = self.priorities.nodes
        self.count = 0  # rows ever written
        self.settings = [args.env_id, rows, args.num_envs, args.n_step, self.priorities.alpha]

    def later(self, rows, k):
        """The rows of the same environments k steps later."""
        return (rows + k * self.num_envs) % self.num_rows

    def add(self, obs, actions, rewards, terminations, ages) -> None:
        """Store a step of all environments: s_t (N, frame_stack, ...), the others (N,)."""
        new = (self.count + np.arange(self.num_envs)) % self.num_rows
        self.count += self.num_envs
        self.frames[new], self.actions[new], self.rewards[new] = obs[:, -1], actions, rewards
        self.terminations[new], self.ages[new] = terminations, ages
        assert (self.stacks(new) == obs).all(), "not the last frames"
        self.priorities.set(self.later(new, self.frame_stack - 1), 0)  # (1)

        # The rows n steps ago now have s_{t+n} (3), a termination, or neither (2)
        rows, k = self.later(new, -self.n_step), np.arange(self.n_step)
        steps = self.later(rows[:, None], k)  # (N, n)
        same_episode = self.ages[steps] == self.ages[rows, None] + k
        terminated = (same_episode & self.terminations[steps]).any(axis=1)
        self.priorities.add(rows, terminated | (ages >= self.n_step))

    def stacks(self, rows):
        """Observations (B, frame_stack, ...) of rows (B,): frames, blank before the episode."""
        back = np.arange(self.frame_stack - 1, -1, -1)
        stacks = self.frames[self.later(rows[:, None], -back)]
        stacks[back > self.ages[rows, None]] = 0
        return stacks

    def sample(self, batch_size: int, beta: float):
        """Rows (B,), and obs, actions, returns, discounts, next_obs, weights."""
        rows, weights = self.priorities.draw(batch_size, beta)
        steps = self.later(rows[:, None], np.arange(self.n_step))  # (B, n)
        rewards, terminations = self.rewards[steps], self.terminations[steps]
        returns, discounts = n_step_returns(rewards, terminations, self.gamma)
        returns, discounts, weights = np.float32([returns, discounts, weights])
        obs, next_obs = self.stacks(rows), self.stacks(self.later(rows, self.n_step))
        batch = [obs, self.actions[rows], returns, discounts, next_obs, weights]
        return rows, [torch.from_numpy(x) for x in batch]

    def state_dict(self) -> dict:
        state = {name: torch.from_numpy(getattr(self, name)) for name in self.ARRAYS}
        state |= {"frames": compress(self.frames[: self.count]), "settings": self.settings}
        return state | {"count": self.count, "max_priority": self.priorities.max_priority}

    def load_state_dict(self, state: dict) -> None:
        if state["settings"] != self.settings:
            sys.exit("error: the replay differs in game, size, n, alpha, or number of envs")
        self.count, self.priorities.max_priority = state["count"], state["max_priority"]
        decompress(state["frames"], self.frames[: self.count])
        for name in self.ARRAYS:
            getattr(self, name)[:] = state[name]


def td_loss(q_network, target_network, batch: list[Tensor], args: Args) -> tuple:
    r"""The loss () of a minibatch of `Replay.sample`, its TD errors (B,), and metrics ().

    y = R^(n) + \gamma^n Q'(s_{t+n}, \argmax_a Q(s_{t+n}, a)), [DDQN] Eq. (4)
    L = 1/B \sum_i w_i Huber(\delta_i), \delta_i = y - Q(s_t, a_t): [PER] Alg. 1, lines 11, 13.
    """
    obs, actions, returns, discounts, next_obs, weights = batch
    values = q_network(obs).gather(1, actions[:, None]).squeeze(1)
    with torch.no_grad():
        next_values = target_network(next_obs)  # (B, num_actions)
        greedy = (q_network(next_obs) if args.double else next_values).argmax(dim=1, keepdim=True)
        targets = returns + discounts * next_values.gather(1, greedy).squeeze(1)
    losses = nn.functional.smooth_l1_loss(values, targets, reduction="none")
    loss = (weights * losses).mean()
    metrics = {"td_loss": loss.detach(), "q_values": values.detach().mean()}
    return loss, (targets - values).detach(), metrics


@torch.no_grad()
def epsilon_greedy(q_network, obs, epsilon: float, device) -> np.ndarray:
    """Actions (N,) for obs (N, ...): random with probability epsilon, otherwise greedy."""
    q_values = q_network(torch.from_numpy(obs).to(device)).cpu()
    random_actions = torch.randint(q_values.shape[1], (len(obs),))
    explores = torch.rand(len(obs)) < epsilon
    return torch.where(explores, random_actions, q_values.argmax(dim=1)).numpy()


def train(args: Args, folder: Path, checkpoint: dict | None) -> None:
    """Train from scratch or a checkpoint."""
    N = args.num_envs
    sizes = (N, args.n_step, args.frame_stack, args.batch_size, args.train_frequency)
    if min(*sizes, args.target_network_frequency, args.log_interval, args.checkpoint_interval) < 1:
        sys.exit("error: a size or interval is below 1")
    needed = max(args.learning_starts, N * (args.frame_stack + args.n_step))
    if needed > min(args.buffer_size, args.total_timesteps):
        sys.exit(f"error: --buffer-size or --total-timesteps is below {needed}")
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    speed_up_cpu()
    seed_everything(args.seed, 0)
    envs = AtariEnvs(args, N)
    q_network = QNetwork(envs.obs_shape, envs.num_actions, args.dueling).to(device)
    target_network = QNetwork(envs.obs_shape, envs.num_actions, args.dueling).to(device)
    target_network.load_state_dict(q_network.state_dict())
    lr, eps = args.learning_rate, args.adam_eps
    optimizer = torch.optim.Adam(q_network.parameters(), lr, eps=eps, fused=True)
    replay = Replay(args, envs.envs.single_observation_space)

    parts = {"replay": replay, "agent": q_network}
    parts |= {"target_network": target_network, "optimizer": optimizer}
    global_step = start = checkpoint["global_step"] if checkpoint else 0
    last_step = math.ceil(args.total_timesteps / N) * N
    run = Run(args, folder, checkpoint, parts, last_step)
    if checkpoint:
        for group in optimizer.param_groups:
            group["lr"] *= args.learning_rate / checkpoint["args"]["learning_rate"]
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)

    while global_step < last_step:
        if global_step == start or global_step % args.checkpoint_interval < N:
            run.save_checkpoint(global_step)
            seed = seed_everything(args.seed, global_step)  # same when resuming
            obs = envs.reset(seed, folder / "videos" / str(global_step))
            metrics = {}
        fraction = global_step / last_step
        annealed = min(1, fraction / max(args.exploration_fraction, 1e-9))
        epsilon = args.start_epsilon + (args.end_epsilon - args.start_epsilon) * annealed
        beta = args.per_beta + (1 - args.per_beta) * fraction

        # Act and store transitions: [DQN] Alg. 1
        ages = envs.lengths.copy()
        with autocast:
            actions = epsilon_greedy(q_network, obs, epsilon, device)
        new_obs, _, rewards, terminations, *_ = envs.step(actions)
        replay.add(obs, envs.executed_actions, rewards, terminations, ages)
        obs = new_obs
        global_step += N
        run.log_episodes(global_step, envs.episodes)

        # Learn from minibatches: [PER] Alg. 1, lines 7 to 15
        due = global_step // args.train_frequency - (global_step - N) // args.train_frequency
        if replay.count < args.learning_starts or replay.nodes[1] == 0:
            due = 0
        updates = []
        for _ in range(due):
            rows, batch = replay.sample(args.batch_size, beta)
            batch = [x.to(device) for x in batch]
            with autocast:
                loss, td_errors, metrics = td_loss(q_network, target_network, batch, args)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm)
            optimizer.step()
            replay.priorities.update(rows, td_errors.cpu().numpy())
            updates.append(metrics | {"grad_norm": norm})
        if global_step % args.target_network_frequency < N:
            target_network.load_state_dict(q_network.state_dict())  # [PER] Alg. 1, line 16

        for name in updates[0] if updates else ():
            metrics[name] = float(sum(m[name] for m in updates)) / len(updates)
        if not math.isfinite(sum(metrics.values()) + replay.nodes[1]):
            raise FloatingPointError(f"a metric or priority is not finite at step {global_step}")
        if global_step // N % args.log_interval == 0 or global_step == last_step:
            run.log(global_step, "losses", metrics)
            run.log(global_step, "charts", {"epsilon": epsilon, "per_beta": beta})
            run.progress(global_step)

    envs.envs.close()
    run.finish(global_step, "agent")


# ----- The run. Nothing below belongs to the algorithm. -----

SCRIPT = "dqn_per_atari"
EVAL_STEPS = 100_000  # where evaluation episodes are cut off


def evaluate(args: Args, model: dict, folder: Path) -> list[float]:
    """Unclipped returns of `args.eval_episodes` episodes, over all lives."""
    envs = AtariEnvs(args, args.eval_episodes)
    q_network = QNetwork(envs.obs_shape, envs.num_actions, args.dueling).eval()
    q_network.load_state_dict(model["agent"])
    seed = seed_everything(args.seed, model["global_step"], 1)
    obs, ended = envs.reset(seed, folder / "videos" / "evaluation"), {}
    while len(ended) < args.eval_episodes and envs.lengths.max() < EVAL_STEPS:
        obs, *_ = envs.step(epsilon_greedy(q_network, obs, args.eval_epsilon, "cpu"))
        ended = envs.episodes | ended  # the first episode of each
    envs.envs.close()
    if len(ended) < args.eval_episodes:
        print(f"note: episodes cut off after {EVAL_STEPS} steps")
    returns = [float(ended[i][0] if i in ended else x) for i, x in enumerate(envs.returns)]
    print(f"evaluation: {np.mean(returns):.2f} +- {np.std(returns):.2f}, {len(ended)} episodes")
    return returns


def check_memory(needed: int) -> None:
    """Exit if the full replay buffer would not fit."""
    with contextlib.suppress(OSError):  # not Linux
        free = 1024 * int(Path("/proc/meminfo").read_text().split()[7])  # MemAvailable
        if needed > free:
            sys.exit(f"error: --buffer-size needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free")


def compress(frames: np.ndarray) -> list[Tensor]:
    """Compress frames (K, H, ...) by pixel row, which hardly changes over time."""
    with ThreadPoolExecutor(8) as pool:
        packed = pool.map(lambda line: zlib.compress(line.copy(), 1), frames.swapaxes(0, 1))
        return [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in packed]


def decompress(packed: list[Tensor], frames: np.ndarray) -> None:
    for line, data in zip(frames.swapaxes(0, 1), packed):
        line[:] = np.frombuffer(zlib.decompress(data.numpy()), line.dtype).reshape(line.shape)


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
