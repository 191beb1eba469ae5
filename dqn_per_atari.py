# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "gymnasium==1.3.0", "ale-py==0.12.1", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0", "moviepy==2.2.1", "huggingface-hub==2.4.0",
# ]
# ///
r"""Deep Q-network (DQN) with prioritised replay on Atari, double and dueling.

A network estimates the return of each action, Q(s, a). The agent plays the best action, or with probability epsilon a
random one, and stores what happens in a replay memory. Minibatches are drawn from there, more often those transitions
whose TD error was large. Each gradient step moves Q(s, a) towards the reward plus the discounted value of what came
next, as an older copy of the network sees it.

[DQN]   Mnih, Kavukcuoglu, Silver, et al. 2015, "Human-level control through deep reinforcement learning", Nature 518
[DDQN]  van Hasselt, Guez, Silver 2016, "Deep reinforcement learning with double Q-learning", AAAI, arXiv:1509.06461
[DUEL]  Wang et al. 2016, "Dueling network architectures for deep reinforcement learning", ICML, arXiv:1511.06581
[PER]   Schaul, Quan, Antonoglou, Silver 2016, "Prioritized experience replay", ICLR, arXiv:1511.05952
[RBW]   Hessel et al. 2018, "Rainbow: combining improvements in deep reinforcement learning", AAAI, arXiv:1710.02298
[TIME]  Pardo, Tavakoli, Levdik, Kormushev 2018, "Time limits in reinforcement learning", ICML, arXiv:1712.00378
[ALE]   Machado et al. 2018, "Revisiting the arcade learning environment", JAIR 61, arXiv:1709.06009

    symbol          variable           shape            meaning (N num_envs, n n_step, B batch_size)
    s_t             obs                (N, 4, 84, 84)   the last four frames, uint8, one per agent step
    a_t             actions            (N,)             index among the environment's actions
    r_t             rewards            (N,)             reward, its sign only
    Q(s, a)         q_network          (B, num_actions) value of each action, parameters theta
    Q'(s, a)        target_network     (B, num_actions) the same with older parameters theta-minus
    V, A            value, advantage   (B, 1), as Q     the two streams of Q, [DUEL] Eq. (9)
    R^(n)           returns            (B,)             discounted sum of n rewards, [RBW] "Multi-step learning"
    \gamma^n        discounts          (B,)             of the bootstrap's value; 0 after a termination
    s_{t+n}         next_obs           (B, 4, 84, 84)   the observation n steps later, whose value is the bootstrap
    \delta_i        td_errors          (B,)             TD error, [PER] Alg. 1, line 11
    p_i             priorities         (B,)             |delta_i| + 1e-6, [PER] Sec. 3.3
    p_i^\alpha      tree.leaves        (buffer_size,)   and their sums in the nodes of the tree, [PER] App. B.2.1
    P(i)            probabilities      (B,)             of being drawn, [PER] Eq. (1)
    w_i             weights            (B,)             importance-sampling weights, [PER] Sec. 3.4
    \alpha, \beta   per_alpha, beta                     how much priorities count, how much of their bias is corrected
    \epsilon        epsilon                             probability of a random action

Where this differs from the papers or from common practice, and why:
  * The defaults are those of labml's annotated DQN, but for its replay of 2^14 transitions (`--buffer-size 16384`) and
    its 32 million steps. Rewards, not scores, are clipped to their sign, as in [DQN], and draws stratified, as in
    [PER]; labml does neither. As in labml, a layer of 512 stands before streams of 256; [DUEL]'s streams of 512 begin
    at the convolutions. [DUEL] clips gradients to norm 10, not 0.5, and scales those that enter the last convolution by
    1/sqrt(2). [PER]'s learning rate, a quarter of [DQN]'s, is of RMSprop, whose steps do not compare with Adam's.
  * The target network is copied every 250 iterations: 2,000 gradient and 8,000 agent steps ([DQN]: 10,000 and 40,000).
  * Epsilon and beta depend on the fraction of the run that is over. Extending a run moves both back.
  * Priorities are of the TD error as it is; [PER] clips it to [-1, 1], as the Huber loss here clips its gradient. The
    highest priority ever, with which new transitions begin, never falls. Weights are divided by the minibatch's largest
    one; the largest of the whole memory, as in labml, would need a second tree.
  * A time limit is not a failure, nor is the end of an episode at a checkpoint. [TIME] bootstraps there; here the n
    transitions before it are never drawn, because the replay does not hold the observation that the episode ends with.
    (At its time limit ale-py 0.12.1 gives one whose newest frame is stale.)
  * With `--n-step` above 1 the rewards are those of an older policy, and nothing corrects for it, as in [RBW].
  * A lost life ends the return, not the episode (labml ends it too), and the stack of frames goes on. On the first step
    of each life FIRE is pressed for the agent: Breakout would wait for ever for one that never chooses it.
  * `BreakoutNoFrameskip-v4` (or `BreakoutDeterministic-v4`: the same environment here) has no sticky actions,
    `ALE/Breakout-v5` repeats the last action with probability 0.25 ([ALE]). An agent step is always four frames.
  * At each checkpoint new episodes begin and random numbers restart, with seeds made of (seed, global_step), since
    the vectorised emulator cannot save its state. So resuming is exact to the bit, if the checkpoint holds the replay.

A file live.json in the folder of a run changes its learning rate: {"learning_rate": 5e-5}. At the next point of the log
the script takes it over, writes a checkpoint with it, and deletes the file. Scores and speeds: README.md.

    python dqn_per_atari.py --env-id BreakoutNoFrameskip-v4            # writes runs/BreakoutNoFrameskip-v4__dqn_...
    python dqn_per_atari.py --resume runs/BreakoutNoFrameskip-v4__...   # continues an interrupted run, exactly
    python dqn_per_atari.py --evaluate runs/BreakoutNoFrameskip-v4__.../model.pt --eval-episodes 20
"""

import contextlib
import ctypes
import dataclasses
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
import zipfile
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclasses.dataclass
class Args:
    """Deep Q-network with prioritised replay on Atari."""

    env_id: str = "BreakoutNoFrameskip-v4"  # NameNoFrameskip-v4, or ALE/Name-v5 with sticky actions
    total_timesteps: int = 10_000_000  # agent steps of the run, four frames each (rounded up to whole iterations)
    num_envs: int = 8  # N: environments played side by side
    num_steps: int = 4  # agent steps in each environment per iteration
    updates: int = 8  # gradient steps per iteration, each on one minibatch
    batch_size: int = 32  # transitions in a minibatch
    buffer_size: int = 1_000_000  # transitions in the replay, 7.1 kB each; the memory is taken as it fills
    learning_starts: int = 16_384  # transitions stored before the first gradient step
    gamma: float = 0.99  # discount factor
    n_step: int = 1  # n: rewards summed before the bootstrap
    double: bool = True  # whether q_network chooses the action that target_network values
    dueling: bool = True  # whether the network has a stream for the state's value and one for the advantages
    target_interval: int = 250  # iterations between copies of the parameters to the target network
    prioritized: bool = True  # whether transitions are drawn by priority, else uniformly
    per_alpha: float = 0.6  # alpha: how much priorities count
    per_beta: float = 0.4  # beta at first: how much of the bias is corrected; it rises linearly to 1 over the run
    start_epsilon: float = 1.0  # probability of a random action at first
    middle_epsilon: float = 0.1  # ... after --middle-fraction of the run
    middle_fraction: float = 0.025  # fraction of the run by whose end epsilon has fallen to --middle-epsilon
    end_epsilon: float = 0.01  # ... after --end-fraction of the run
    end_fraction: float = 0.5  # fraction of the run by whose end epsilon has fallen to --end-epsilon
    learning_rate: float = 1e-4  # step size of Adam
    adam_eps: float = 1e-8  # epsilon of Adam (Rainbow: 1.5e-4)
    max_grad_norm: float = 0.5  # norm to which gradients are clipped
    episodic_life: bool = True  # whether a lost life ends the return (the episode goes on)
    eval_epsilon: float = 0.01  # probability of a random action in the evaluation
    bf16: bool = False  # whether the networks compute in bfloat16: faster on some processors, far slower on others
    env_threads: int = 0  # threads of the emulator (0: as many as there are cores)
    log_interval: int = 100  # iterations between points of the losses in the log, and between looks at live.json
    checkpoint_replay: bool = True  # whether checkpoints hold the replay; without it a resumed run begins with none

    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of the parameters, the exploration, the minibatches and the environments
    torch_deterministic: bool = True  # whether cuDNN must be deterministic
    cuda: bool = True  # whether to compute on the GPU, if there is one
    torch_threads: int = 2  # threads of torch on the CPU; two gain on a quiet machine and lose much on a busy one
    compile: bool = False  # whether to compile the loss (takes up to a minute, needs a C++ compiler on the CPU)
    track: bool = False  # whether to track the run with Weights & Biases
    wandb_project_name: str = "deep-rl-reference"  # project of the tracked run
    wandb_entity: str | None = None  # entity (user or team) of the tracked run
    capture_video: bool = False  # whether to record the first episode after each checkpoint and of the evaluation
    save_model: bool = True  # whether to save the trained model as model.pt in the run folder
    upload_model: bool = False  # whether to upload the model to the Hugging Face hub
    hf_entity: str | None = None  # user or organisation on the Hugging Face hub (default: yours)
    checkpoint_interval: int = 250_000  # agent steps of all environments between checkpoints, where new episodes begin
    run_folder: str | None = None  # start the run in this folder, or continue the one that it holds
    resume: str | None = None  # continue the run in this folder from its newest checkpoint, with its arguments
    evaluate: str | None = None  # do not train: play episodes with this model.pt, checkpoint or run folder
    eval_episodes: int = 10  # whole episodes of the evaluation

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("seed", "env_threads", "learning_starts") else 1
            if type(value) is int and value < least:
                sys.exit(f"error: --{name.replace('_', '-')} must be at least {least}")
        if not 0 < self.learning_rate < 1e38:
            sys.exit("error: --learning-rate must be positive, and small enough for float32")
        if self.middle_fraction > self.end_fraction:
            sys.exit("error: --middle-fraction is more than --end-fraction")
        if self.buffer_size < self.num_envs * (self.n_step + 4):  # 3 rows miss a frame, n have no bootstrap yet
            sys.exit(f"error: --buffer-size must be at least {self.num_envs * (self.n_step + 4)}")
        if self.learning_starts > min(self.total_timesteps, self.buffer_size // self.num_envs * self.num_envs):
            sys.exit("error: --learning-starts is more than --buffer-size or --total-timesteps")


def make_atari(args: Args, num_envs: int, colour: bool = False) -> AtariVectorEnv:
    """Make environments with observations (N, 4, 84, 84) in uint8, or in colour (N, 1, 210, 160, 3), for a video."""
    spec = gym.spec(args.env_id.replace("Deterministic", "NoFrameskip")).kwargs
    if not isinstance(spec.get("frameskip"), int):
        sys.exit(f"error: {args.env_id} is not an Atari environment of this kind: NameNoFrameskip-v4 or ALE/Name-v5")
    return AtariVectorEnv(
        game=spec["game"],
        num_envs=num_envs,
        num_threads=args.env_threads,
        repeat_action_probability=spec["repeat_action_probability"],
        frameskip=4,
        maxpool=True,  # over the last two frames: sprites flicker ([DQN] Methods)
        grayscale=not colour,
        img_height=210 if colour else 84,
        img_width=160 if colour else 84,
        stack_num=1 if colour else 4,
        noop_max=30,  # an episode begins with fewer than 30 idle frames
        use_fire_reset=True,
        max_num_frames_per_episode=108_000,  # half an hour of play, then the episode is truncated
        reward_clipping=False,  # Trap: True, the default, loses the score
        episodic_life=False,  # Trap: True begins a new episode at each lost life
        life_loss_info=True,  # this one terminates at a lost life and lets the episode go on
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,  # no row of a reset ever looks like a step
    )


class AtariEnvs:
    """N Atari environments in which FIRE is pressed on the first step of each life; they count whole episodes.

    `first`, 0 but in A2C's later ranks, is the number of the first environment here; the seeds follow these numbers.
    `fire` (N,) says where the next step will press FIRE instead of the action, `played` (N,) what the last one played.
    `finished` lists the episodes that it ended: (environment, score, length), unclipped and in agent steps.
    """

    def __init__(self, args: Args, num_envs: int, run_folder: Path, name: str = "training", first: int = 0):
        self.args, self.num_envs, self.run_folder, self.name, self.first = args, num_envs, run_folder, name, first
        self.envs = make_atari(args, num_envs)
        buttons = list(self.envs.ale.get_action_set())
        self.num_actions = len(buttons)
        self.fire_action = buttons.index(ale_py.Action.FIRE) if ale_py.Action.FIRE in buttons else None
        self.recent_scores = deque(maxlen=100)

    def reset(self, *key: int) -> np.ndarray:
        """Begin new episodes, seeded by the run's seed and `key`. Returns the observations (N, C, H, W)."""
        seeds = np.random.SeedSequence([self.args.seed, *key]).generate_state(self.first + self.num_envs)
        self.seeds = seeds[self.first :] >> 1  # 31 bits
        obs, info = self.envs.reset(seed=self.seeds.astype(int))
        self.frames = info["episode_frame_number"]
        self.fire = np.full(self.num_envs, self.fire_action is not None)
        self.scores, self.lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, int)
        self.video = f"{self.name}-{key[0]}.mp4"
        self.recorded = [] if self.args.capture_video and self.first == 0 else None  # actions of the first episode
        return obs

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Play one step with actions (N,).

        Returns observations to act on next (N, C, H, W), those that the actions led to (others where an episode ended),
        rewards, clipped to their sign, terminations (with `episodic_life` at a lost life too), truncations (N,).
        """
        # Detail: the emulator itself presses FIRE at a reset, but for one frame, which a sticky action may swallow
        self.played = np.where(self.fire, self.fire_action, actions) if self.fire.any() else actions
        next_obs, rewards, terminations, truncations, info = self.envs.step(self.played)
        # Trap: a lost life terminates too, and `lives` is already the next episode's; only frames start over
        over = (terminations | truncations) & (info["episode_frame_number"] < self.frames)
        self.frames = info["episode_frame_number"]
        self.fire = (terminations | truncations) & (self.fire_action is not None)
        terminations = terminations & (over | self.args.episodic_life)
        successors = np.where(over[:, None, None, None], info["final_obs"], next_obs) if over.any() else next_obs
        self.scores += rewards
        self.lengths += 1
        self.finished = [(i, float(self.scores[i]), int(self.lengths[i])) for i in np.flatnonzero(over)]
        self.recent_scores.extend(score for _, score, _ in self.finished)
        self.scores[over] = self.lengths[over] = 0
        if self.recorded is not None:
            self.recorded.append(int(self.played[0]))
            if over[0]:
                self.record()
        return next_obs, successors, np.sign(rewards).astype(np.float32), terminations, truncations

    def record(self) -> None:
        """Play the first episode again in colour, from its seed and actions, into a video in the run folder."""
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        (self.run_folder / "videos").mkdir(exist_ok=True)
        envs = make_atari(self.args, 1, colour=True)
        frames, _ = envs.reset(seed=self.seeds[:1].astype(int))
        with FFMPEG_VideoWriter(str(self.run_folder / "videos" / self.video), (320, 420), fps=15) as video:
            for action in self.recorded:  # frame by frame: an episode may be long
                video.write_frame(frames[0, 0].repeat(2, axis=0).repeat(2, axis=1))
                frames, *_ = envs.step(np.array([action]))
        self.recorded = None


class QNetwork(nn.Module):
    """Q(s, a) for all actions: the convolutions of [DQN] Methods, then the streams of [DUEL] Sec. 3 or one layer."""

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
        self.to(memory_format=torch.channels_last)  # the layout that convolutions like on the CPU

    def scale(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations (B, 4, 84, 84) in uint8 as `forward` takes them: in [0, 1], in the precision of the network."""
        obs = obs.contiguous(memory_format=torch.channels_last)  # converted while still uint8
        return obs.to(torch.bfloat16 if self.bf16 else torch.float32).div_(255)

    def forward(self, scaled_obs: torch.Tensor) -> torch.Tensor:
        """Q (B, num_actions) of scaled observations (B, 4, 84, 84).

        Q(s, a) = V(s) + A(s, a) - mean_a' A(s, a'), [DUEL] Eq. (9). Without the mean V and A are not determined.
        """
        with torch.autocast(scaled_obs.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.trunk(scaled_obs)
            if not self.dueling:
                return self.head(hidden).float()
            value, advantage = self.value(hidden).float(), self.advantage(hidden).float()
            return value + advantage - advantage.mean(dim=-1, keepdim=True)


class SumTree:
    """A binary tree whose leaves are p_i^alpha and whose nodes are sums of their children, [PER] App. B.2.1.

    Node 1 is the root, the children of node k are 2k and 2k + 1, the leaves are the last half. It is float64: a draw
    from a million leaves would be rounded to a sixteenth of a leaf in float32.
    """

    def __init__(self, capacity: int) -> None:
        self.depth = (capacity - 1).bit_length()
        self.first_leaf = 1 << self.depth
        self.nodes = np.zeros(2 * self.first_leaf)
        self.leaves = self.nodes[self.first_leaf :][:capacity]  # a view

    def set(self, leaves: np.ndarray, values: np.ndarray | float) -> None:
        """Write values (K,) to leaves (K,)."""
        nodes = self.first_leaf + leaves
        self.nodes[nodes] = values  # of a leaf named twice the last value stays
        for _ in range(self.depth):
            nodes = nodes // 2
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]  # computed again: nothing drifts

    def find(self, values: np.ndarray) -> np.ndarray:
        """For each value (K,) in [0, sum of all leaves) the leaf (K,) in whose part of the cumulated sum it lies."""
        nodes = np.ones(len(values), int)
        for _ in range(self.depth):
            left, right = self.nodes[2 * nodes], self.nodes[2 * nodes + 1]
            # Trap: without the second condition a value that rounding lifts above the last sum would end on a zero leaf
            goes_right = (values >= left) & (right > 0)
            values = values - left * goes_right
            nodes = 2 * nodes + goes_right
        return nodes - self.first_leaf


def importance_weights(probabilities: np.ndarray, beta: float) -> np.ndarray:
    r"""w_i (B,) of P(i) (B,): w_i = (N P(i))^{-\beta} / \max_j w_j, [PER] Alg. 1, line 10. The factor N cancels out."""
    return (probabilities / probabilities.min()) ** -beta


class Replay:
    r"""Prioritised replay of single frames, from which stacks are put together when they are drawn.

    A row is one step of one environment: the newest frame of s_t, how many steps its episode had before it, a_t, and
    R^(n) = \sum_{k<n} \gamma^k r_{t+k}, no further than a termination, [RBW] "Multi-step learning". The N rows of a
    step are neighbours, so an environment's next step is N rows on. When the memory is full, new rows overwrite the
    oldest. Only rows with a priority above zero can be drawn. One environment's rows, with n = 2, where episode f has
    ended and episode g goes on:

                    oldest                                                        newest
        frame       f3    f4    f5    f6    f7    f8    g0    g1    g2    g3    g4
        priority    0     0     0     > 0   ?     ?     > 0   > 0   > 0   0     0
                    -----(1)-----           --(2)--                       --(3)--

    (1) A frame of their stack has been overwritten. (2) Their s_{t+n} lies beyond the end of f. After a termination
    there is no bootstrap, and they can be drawn. After a time limit or a checkpoint theirs is not in the replay, and
    they never can. (3) Their s_{t+n} is still to come.

    Stacks are blank before an episode's first frame: that of g1 is (blank, blank, g0, g1).
    """

    columns = ("lengths", "actions", "returns", "alive")

    def __init__(self, args: Args) -> None:
        self.N, self.n, self.gamma = args.num_envs, args.n_step, args.gamma
        self.alpha = args.per_alpha if args.prioritized else 0.0  # p^0 = 1: all rows are alike
        self.size = size = args.buffer_size // self.N * self.N
        # The last frame stays blank. Trap: torch.zeros would take the memory at once, and not as it fills
        self.frames = np.zeros((size + 1, 84, 84), np.uint8)
        self.lengths, self.actions, self.returns = np.zeros(size, int), np.zeros(size, int), np.zeros(size)
        self.alive = np.ones(size, bool)  # whether no termination ended R^(n), so that a bootstrap follows
        # A saved replay fits only where these agree. R^(n) depends on gamma only if n > 1
        self.layout = (size, self.N, self.n, self.gamma ** (self.n - 1), self.alpha)
        self.tree = SumTree(size)
        self.max_priority = 1.0
        self.count = 0  # rows that were written, also those that have been overwritten

    def later(self, rows: np.ndarray, steps: int | np.ndarray) -> np.ndarray:
        """The rows of the same environments so many steps later, or earlier where `steps` is negative."""
        return (rows + steps * self.N) % self.size

    def add(self, frames, lengths, actions, rewards, terminations) -> None:
        """Write a step of all environments: the newest frames of s_t (N, 84, 84), and the rest (N,).

        From now on those rows can be drawn whose s_{t+n} this is, at first with the highest priority that there has
        been: [PER] Alg. 1, line 6.
        """
        new = (self.count + np.arange(self.N)) % self.size
        self.count += self.N
        self.frames[new], self.lengths[new], self.actions[new] = frames, lengths, actions
        self.returns[new], self.alive[new] = 0.0, True
        for k in range(self.n):  # this reward is part of R^(n) of the step k steps ago
            rows = self.later(new, -k)
            self.returns[rows] += self.gamma**k * self.alive[rows] * rewards
            self.alive[rows] &= ~(terminations & (lengths >= k))  # if that step was in the same episode
        self.tree.set(self.later(new, 3), 0.0)  # (1) in the picture; those before them became zero in earlier steps
        rows = self.later(new, -self.n)  # this step is their s_{t+n}, if they were in the same episode
        cut_off = self.alive[rows] & (lengths < self.n)  # likewise rows before the first ever written
        self.tree.set(rows, np.where(cut_off, 0.0, self.max_priority**self.alpha))

    def stacks(self, rows: np.ndarray) -> np.ndarray:
        """The four frames (B, 4, 84, 84) that the agent saw at rows (B,)."""
        back = np.arange(3, -1, -1)
        frames = np.where(back > self.lengths[rows, None], self.size, self.later(rows[:, None], -back))  # (B, 4)
        return self.frames[frames]

    def sample(self, batch_size: int, beta: float, rng: np.random.Generator) -> tuple[np.ndarray, tuple]:
        """Draw B transitions, one in each of B equal parts of the sum of priorities ([PER] App. B.2.1).

        Returns their rows (B,), and obs, actions, returns, discounts, next_obs, weights as in the title's table. Where
        the discount is 0, next_obs does not matter: it may be of another episode.
        """
        total = self.tree.nodes[1]
        rows = self.tree.find((np.arange(batch_size) + rng.random(batch_size)) / batch_size * total)
        obs, next_obs = self.stacks(rows), self.stacks(self.later(rows, self.n))
        weights = importance_weights(self.tree.leaves[rows] / total, beta)
        returns, discounts, weights = np.float32([self.returns[rows], self.gamma**self.n * self.alive[rows], weights])
        return rows, (obs, self.actions[rows], returns, discounts, next_obs, weights)

    def update(self, rows: np.ndarray, td_errors: np.ndarray) -> None:
        """Priorities p_i = |delta_i| + 1e-6 of rows (B,) from TD errors (B,): [PER] Alg. 1, line 12.

        Trap: a TD error that is not finite would go up to the root, and all draws be one row. `train` ends before.
        """
        priorities = np.abs(td_errors.astype(float)) + 1e-6
        self.tree.set(rows, priorities**self.alpha)
        self.max_priority = max(self.max_priority, float(priorities.max()))

    def state_dict(self) -> dict:
        """The state between episodes."""
        state = {"count": self.count, "max_priority": self.max_priority, "layout": self.layout}
        state |= {name: torch.tensor(getattr(self, name)) for name in self.columns}
        return state | {"leaves": torch.tensor(self.tree.leaves), "frames": pack(self.frames[:-1][: self.count])}

    def load_state_dict(self, state: dict) -> None:
        if tuple(state["layout"]) != self.layout:
            raise ValueError("a replay of another --buffer-size, --num-envs, --n-step, --gamma or --per-alpha")
        self.count, self.max_priority = state["count"], state["max_priority"]
        for name in self.columns:
            getattr(self, name)[:] = state[name].numpy()
        self.tree.set(np.arange(self.size), state["leaves"].numpy())
        unpack(state["frames"], self.frames[:-1][: self.count])


def td_loss(q_network, target_network, obs, actions, returns, discounts, next_obs, weights, double) -> tuple:
    r"""The loss () of a minibatch that `Replay.sample` drew, its TD errors (B,) and its values Q(s_t, a_t) (B,).

    y = R^(n) + \gamma^n Q'(s_{t+n}, \argmax_a Q(s_{t+n}, a)), [DDQN] Eq. (4); without `double` the argmax is of Q'
    L = 1/B \sum_i w_i Huber(\delta_i),   \delta_i = y - Q(s_t, a_t), [PER] Alg. 1, lines 11 and 13 (a sum there)
    """
    obs, next_obs = q_network.scale(obs), q_network.scale(next_obs)  # once for both networks
    # With --bf16, q_network's parameters are turned into bfloat16 once in this context, not once in each of its passes.
    # Trap: so it must end before they change; and in older torch the pass with a gradient must come first to have one
    with torch.autocast(obs.device.type, torch.bfloat16, enabled=q_network.bf16):
        values = q_network(obs).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            next_values = target_network(next_obs)  # (B, num_actions)
            best = (q_network(next_obs) if double else next_values).argmax(dim=-1, keepdim=True)
            targets = returns + discounts * next_values.gather(1, best).squeeze(1)
    loss = (weights * nn.functional.smooth_l1_loss(values, targets, reduction="none")).mean()
    return loss, (targets - values).detach(), values.detach()


@torch.no_grad()
def epsilon_greedy(q_network: QNetwork, obs: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """The best actions (N,) for observations (N, 4, 84, 84), each with probability epsilon replaced by a random one."""
    q_values = q_network(q_network.scale(torch.from_numpy(obs).to(next(q_network.parameters()).device)))
    best = q_values.argmax(dim=-1).cpu().numpy()
    return np.where(rng.random(len(best)) < epsilon, rng.integers(q_values.shape[1], size=len(best)), best)


def train(args: Args, run_folder: Path, checkpoint: dict | None) -> None:
    """Train from the beginning or a checkpoint. Raises FloatingPointError where loss or gradient are not finite."""
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    speed_up_cpu()
    torch.manual_seed(args.seed)  # the parameters
    envs = AtariEnvs(args, args.num_envs, run_folder)
    q_network, target_network = (QNetwork(envs.num_actions, args.dueling, args.bf16).to(device) for _ in range(2))
    if args.bf16:
        target_network.to(torch.bfloat16)  # once, not in each pass: nothing small is ever added to its parameters
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), args.learning_rate, eps=args.adam_eps, fused=True)
    replay = Replay(args)
    note_memory(replay.frames.nbytes)
    loss_function = torch.compile(td_loss) if args.compile else td_loss

    parts = {"agent": q_network, "target_network": target_network, "optimizer": optimizer}
    parts |= {"replay": replay} if args.checkpoint_replay else {}  # all that the rest of a run depends on
    global_step = start = restore(parts, checkpoint) if checkpoint else 0
    if checkpoint and args.learning_rate != checkpoint["args"]["learning_rate"]:  # else the old one or live.json's
        optimizer.param_groups[0]["lr"] = args.learning_rate
    optimizer.param_groups[0]["eps"] = args.adam_eps  # Trap: the checkpoint brought its own
    steps = args.num_steps * args.num_envs  # agent steps per iteration
    last_step = math.ceil(args.total_timesteps / steps) * steps
    run = Run(args, run_folder, checkpoint, parts, last_step)
    epsilons = (args.start_epsilon, args.middle_epsilon, args.end_epsilon)

    while global_step < last_step:
        iteration = global_step // steps
        live_rate = live_learning_rate(run_folder) if iteration % args.log_interval == 0 else None
        if global_step == start or live_rate or global_step % args.checkpoint_interval < steps:
            optimizer.param_groups[0]["lr"] = live_rate or optimizer.param_groups[0]["lr"]
            run.save_checkpoint(global_step)
            obs = envs.reset(global_step)  # new episodes, interrupted here or not: resuming is exact
            rng = np.random.default_rng([args.seed, global_step])  # and new random numbers
            if live_rate:  # it is in the checkpoint now
                (run_folder / "live.json").unlink(missing_ok=True)
        fraction = global_step / last_step  # of the run
        epsilon = float(np.interp(fraction, (0, args.middle_fraction, args.end_fraction), epsilons))
        beta = args.per_beta + (1 - args.per_beta) * fraction

        # Play num_steps steps in each environment: [DQN] Alg. 1, from "select a random action" to "store transition"
        for _ in range(args.num_steps):
            lengths = envs.lengths.copy()
            actions = epsilon_greedy(q_network, obs, epsilon, rng)
            next_obs, _, rewards, terminations, _ = envs.step(actions)
            replay.add(obs[:, -1], lengths, envs.played, rewards, terminations)
            obs, global_step = next_obs, global_step + args.num_envs
            for _, score, length in envs.finished:
                run.log(global_step, {"charts/episodic_return": score, "charts/episodic_length": length})

        # Learn from minibatches: [PER] Alg. 1, lines 8 to 15
        learning = replay.count >= args.learning_starts and replay.tree.nodes[1] > 0  # is there a row to draw?
        for _ in range(args.updates if learning else 0):
            rows, batch = replay.sample(args.batch_size, beta, rng)
            batch = (torch.from_numpy(column).to(device) for column in batch)
            loss, td_errors, values = loss_function(q_network, target_network, *batch, args.double)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm)
            if not (loss + grad_norm).isfinite():
                raise FloatingPointError(f"the loss or its gradient is not finite at step {global_step:,}")
            optimizer.step()
            replay.update(rows, td_errors.cpu().numpy())
        iteration += 1
        if iteration % args.target_interval == 0:
            target_network.load_state_dict(q_network.state_dict())  # [PER] Alg. 1, line 16

        if iteration % args.log_interval == 0 or global_step >= last_step:
            metrics = {"charts/epsilon": epsilon, "charts/per_beta": beta}
            metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            if learning:
                metrics |= {"losses/td_loss": loss, "losses/q_values": values.mean(), "losses/grad_norm": grad_norm}
            run.log(global_step, metrics)
            run.progress(global_step, envs.recent_scores)

    run.finish(global_step, "agent")


# ----- The run: evaluation, checkpoints, logs and sharing. Nothing below this line belongs to the algorithm. -----

SCRIPT = "dqn_per_atari"
PACKAGES = ("torch", "gymnasium", "ale-py", "numpy")  # whose versions go into result.json
PIECE = 4096  # frames of the replay that are compressed together


def evaluate(args: Args, model: dict, run_folder: Path) -> dict[str, list[float]]:
    """Play `args.eval_episodes` whole episodes side by side, and print their scores: unclipped, all lives together.

    `model` is a checkpoint or what model.pt holds. Returns the scores. A random action is played with probability
    `args.eval_epsilon`. The episodes depend on the seed and on the model's step; none of them is one of training's.
    """
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs = AtariEnvs(args, args.eval_episodes, run_folder, name="evaluation")
    q_network = QNetwork(envs.num_actions, args.dueling, args.bf16).to(device)
    restore({"agent": q_network}, model)
    rng, scores = np.random.default_rng([args.seed, model["global_step"], 1]), {}
    obs = envs.reset(model["global_step"], 1)
    while len(scores) < args.eval_episodes:
        obs, *_ = envs.step(epsilon_greedy(q_network, obs, args.eval_epsilon, rng))
        scores = {i: score for i, score, _ in envs.finished} | scores  # the first episode of each environment
    scores = [scores[i] for i in range(args.eval_episodes)]
    spread = f"+- {np.std(scores):.2f}, {len(scores)} episodes of epsilon {args.eval_epsilon:g}"
    print(f"evaluation: {np.mean(scores):.2f} {spread}")
    return {"episodic_return": scores}


def live_learning_rate(run_folder: Path) -> float | None:
    """The learning rate that the run folder's live.json asks for. A file that asks for nonsense is deleted."""
    path = run_folder / "live.json"
    if path.exists():
        with contextlib.suppress(Exception):  # nonsense has many kinds
            rate = float(json.loads(path.read_text(encoding="utf-8-sig"))["learning_rate"])
            if 0 < rate < 1e38:
                return rate
        print(f'note: {path} is ignored: it must be like {{"learning_rate": 5e-05}}', file=sys.stderr)
        path.unlink(missing_ok=True)


def pack(frames: np.ndarray) -> list[torch.Tensor]:
    """Compress frames (K, 84, 84), PIECE of them at a time: a million, 7 GB, become less than one."""
    pieces = (frames[k : k + PIECE] for k in range(0, len(frames), PIECE))
    with ThreadPoolExecutor(8) as pool:  # a line of the screen in all frames, then the next: this packs better
        packed = pool.map(lambda piece: zlib.compress(piece.swapaxes(0, 1).copy(), level=1), pieces)
        return [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in packed]


def unpack(packed: list[torch.Tensor], frames: np.ndarray) -> None:
    """Write the frames that `pack` has compressed into an array of their size."""
    for k, data in enumerate(packed):
        piece = np.frombuffer(zlib.decompress(data.numpy()), np.uint8).reshape(84, -1, 84).swapaxes(0, 1)
        frames[k * PIECE :][: len(piece)] = piece


def speed_up_cpu() -> None:
    """Two settings without which training on the CPU is slower."""
    # The optimiser's averages of units that died fade below 1e-38, where a CPU may take far longer. They become zero
    torch.set_flush_denormal(True)
    # glibc gives large pieces of memory back and takes them again for the next update; then every page costs a fault
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        for option, size in ((-1, 2**28), (-3, 2**25)):  # M_TRIM_THRESHOLD; M_MMAP_THRESHOLD, the largest there is
            ctypes.CDLL(None).mallopt(option, size)


def note_memory(size: int) -> None:
    """Say so if the replay will take more memory than is free."""
    with contextlib.suppress(OSError, TypeError):
        free = 1024 * int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1])
        if size > free:
            print(f"note: a full replay takes {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free", file=sys.stderr)


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
