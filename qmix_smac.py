# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "jax==0.10.2", "jaxmarl==0.2.0", "gymnasium==1.3.0", "numpy==2.4.6", "tyro==1.0.17",
#     "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0", "moviepy==2.2.1", "huggingface-hub==2.4.0",
# ]
# ///
r"""QMIX on StarCraft micromanagement: one value is learned for the team, and each agent acts by its own part of it.

Each agent sees only its surroundings and values its own actions. During training a mixing network, which sees the whole
battle, combines the values of the actions taken into that of the team, Q_tot, and Q_tot is learned as in Q-learning.
The mixing weights are never negative, so each agent's best action is part of the best joint action *of Q_tot*: the
maximum over all joint actions is found agent by agent, and the agents can play without the mixing network.

[QMIX]  Rashid, Samvelyan, Schroeder de Witt, et al. 2018, "QMIX: monotonic value function factorisation for deep
        multi-agent reinforcement learning", ICML, arXiv:1803.11485
[DRQN]  Hausknecht, Stone 2015, "Deep recurrent Q-learning for partially observable MDPs", arXiv:1507.06527
[DDQN]  van Hasselt, Guez, Silver 2016, "Deep reinforcement learning with double Q-learning", AAAI, arXiv:1509.06461
[VDN]   Sunehag et al. 2018, "Value-decomposition networks for cooperative multi-agent learning", arXiv:1706.05296
[IQL]   Tan 1993, "Multi-agent reinforcement learning: independent vs. cooperative agents", ICML
[SHARE] Gupta et al. 2017, "Cooperative multi-agent control using deep reinforcement learning", AAMAS workshops
[PENG]  Peng, Williams 1996, "Incremental multi-step Q-learning", Machine Learning 22
[SMAC]  Samvelyan et al. 2019, "The StarCraft multi-agent challenge", arXiv:1902.04043
[SMAX]  Rutherford et al. 2024, "JaxMARL: multi-agent RL environments and algorithms in JAX", arXiv:2311.10090
[TRICK] Hu et al. 2021, "Rethinking the implementation tricks and monotonicity constraint in cooperative multi-agent
        reinforcement learning", arXiv:2102.03479

    symbol     variable             shape            meaning (B episodes of up to T steps, P steps in all, n agents,
               N environments; sizes O observation, S state, A actions, H agent's layers, E mixing network)
    o^a        obs                  (T+1, B, n, O)   what an agent observes
    s          state                (T+1, B, S)      the whole battle, for the mixing network only
    u^a        actions              (T, B, n)        an agent's action; the team's is **u**
    r          rewards              (T, B, 1)        the team's reward
    \tau^a     hidden               (N, n, H)        what an agent has seen and done, (B n, H) in `unroll`
    Q_a        agent_qs             (T+1, B, n, A)   the value of each action to each agent
               chosen_action_qvals  (T, B, n)        that of the actions taken
    Q_tot      q_tot                (P, 1)           the value of the team's action, [QMIX] Sec. 4
    y^tot      targets              (P, 1)           what Q_tot should be, [QMIX] below Eq. (6)
    \theta^-   target_agent, ...                     older parameters, copied every `target_update_interval` episodes
    \epsilon   epsilon                               probability of a random action, for each agent and step

There are two masks. `avail_actions` says which actions an agent can take; a dead one has no choice. `mask` (T, B) says
where a step was taken: a minibatch is padded with zeros to its longest episode, which comes first. T steps have T+1
rows, the last of which is what the last action led to:

    row          0  1  2  3  4
    episode 0    x  x  x  x  x      x: `filled` (T+1, B), R rows in all. A step led to each of them but the first:
    episode 1    x  x  x  .  .      mask = filled[1:], here of 4, 2 and 1 steps. Agents compute only the rows x,
    episode 2    x  x  .  .  .      the mixer only the P steps (the target mixer all): padding costs time

Where this differs from the papers or from their program, PyMARL, and why:
  * Hyperparameters are PyMARL's for QMIX on SMAC, except: 8 environments, not one, still with one update per episode;
    epsilon annealed over 100,000 steps as in [TRICK], not 50,000; a learning rate that falls to zero; 1M steps, not 2M.
  * The hypernetworks of the weights have two layers and the targets are of double Q-learning, as PyMARL's now, not
    [QMIX]'s. The loss is the mean over steps, as PyMARL's; Eq. (6) is the sum. Logged values are the team's; PyMARL
    divides them by n.
  * A time limit is an end without bootstrapping, as in PyMARL; `--bootstrap-timeouts` bootstraps it.
  * `--td-lambda` is for [PENG]'s Q(lambda), which does not correct for the random actions in the replay.
  * `--mixer none` is [IQL]. Under it too all agents share their parameters ([SHARE]); `q_tot`, `targets` are (P, n).
  * SMAX's reward is multiplied by ten, as in JaxMARL's own QMIX. So its maximum is 20, as in SMAC, but half of it is
    for damage and half for victory, where SMAC counts hit points, kills and victory. SMAX's state is scaled, as SMAC's.
  * Three faults of the package SMAC are mended: after a crash its step() returns `0, True, {}` (the episode is
    dropped); the maximum that it divides rewards by counts enemies again if other units appear later; a reset before
    the end of the first episode launches a second program.
  * At each checkpoint, which holds the replay too, new episodes begin and random numbers restart, in any run. So
    resuming is exact to the bit, but not with StarCraft II, which keeps running with the seed of its launch.

Steps are those of the team. SMAX runs on the CPU, whatever torch's device is. `--env-id smac/3m`, the real SMAC, needs
StarCraft II (README.md). Tested with a stand-in, never with StarCraft II itself. Scores and speeds: README.md.

    python qmix_smac.py --env-id 3m                 # writes runs/3m__qmix_smac__1__...
    python qmix_smac.py --resume runs/3m__...       # continues an interrupted run, exactly
    python qmix_smac.py --evaluate runs/3m__.../model.pt --eval-episodes 128
"""

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import io
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
from collections import deque, namedtuple
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

if importlib.util.find_spec("smac"):  # Trap: smac needs protobuf in pure Python, chosen when TensorBoard imports it
    os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.nn.utils.rnn import pad_sequence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Shape = namedtuple("Shape", "n_agents n_actions obs_dim state_dim")  # the sizes of a map: n, A, O, S


@dataclasses.dataclass
class Args:
    """QMIX, VDN or independent Q-learning on StarCraft micromanagement."""

    env_id: str = "3m"  # a SMAX map (3m, 2s3z, 8m, ...), or smac/MAP for the real StarCraft II
    total_timesteps: int = 1_000_000  # environment steps of the run, all environments together
    num_envs: int = 8  # N: environments played side by side (PyMARL's episode runner has one, [TRICK] has eight)
    mixer: Literal["qmix", "vdn", "none"] = "qmix"  # [QMIX], the sum of [VDN], or every agent for itself, [IQL]
    rnn_hidden_dim: int = 64  # H: width of an agent's layers
    mixing_embed_dim: int = 32  # E: width of the mixing network
    hypernet_embed: int = 64  # width of the hypernetworks of its weights
    gamma: float = 0.99  # discount factor
    double_q: bool = True  # whether the online network chooses the next actions that the target network values, [DDQN]
    td_lambda: float = 0.0  # lambda of the targets: 0 is one-step Q-learning as in the paper, 0.6 is [TRICK]'s
    bootstrap_timeouts: bool = False  # whether to bootstrap an episode that its time limit ended
    epsilon_start: float = 1.0  # epsilon at the beginning: the probability of a random action
    epsilon_finish: float = 0.05  # epsilon at the end of the annealing
    epsilon_anneal_time: int = 100_000  # environment steps of the annealing: 50,000 in [QMIX], 100,000 in [TRICK]
    buffer_size: int = 5_000  # episodes in the replay, which takes the memory as it fills
    batch_size: int = 32  # B: episodes in a minibatch
    updates_per_episode: float = 1.0  # updates for each episode from the batch_size-th on (1/8 in [TRICK]'s program)
    target_update_interval: int = 200  # episodes between copies of the parameters to the target networks
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"  # [QMIX]'s or [TRICK]'s
    learning_rate: float = 5e-4  # step size of the optimiser
    anneal_lr: bool = True  # whether the learning rate falls linearly to zero over the run (extended, it rises again)
    optim_alpha: float = 0.99  # share of the old average of squared gradients in the new (RMSprop)
    optim_eps: float = 1e-5  # added to the root of the average of squared gradients
    max_grad_norm: float = 10.0  # norm to which gradients are clipped
    test_interval: int = 10_000  # environment steps between tests
    test_nepisode: int = 32  # greedy episodes of a test
    log_interval: int = 2_000  # environment steps between points of the losses in the log
    save_replay: bool = False  # whether StarCraft II writes replays of the evaluation to the run folder (smac/... only)

    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of the parameters, the exploration, the minibatches and the environments
    torch_deterministic: bool = True  # whether cuDNN must be deterministic (no effect here: no convolutions)
    cuda: bool = False  # whether to compute on the GPU, if there is one
    torch_threads: int = 1  # threads of torch on the CPU; two gain little on a quiet machine, and lose on a busy one
    compile: bool = False  # whether to compile the mixing networks (takes up to a minute, needs a C++ compiler)
    track: bool = False  # whether to track the run with Weights & Biases
    wandb_project_name: str = "deep-rl-reference"  # project of the tracked run
    wandb_entity: str | None = None  # entity (user or team) of the tracked run
    capture_video: bool = False  # whether to record the first episode after each checkpoint and of the evaluation
    save_model: bool = True  # whether to save the trained model as model.pt in the run folder
    upload_model: bool = False  # whether to upload the model to the Hugging Face hub
    hf_entity: str | None = None  # user or organisation on the Hugging Face hub (default: yours)
    checkpoint_interval: int = 100_000  # steps of all environments between checkpoints, where new episodes begin
    run_folder: str | None = None  # start the run in this folder, or continue the one that it holds
    resume: str | None = None  # continue the run in this folder from its newest checkpoint, with its arguments
    evaluate: str | None = None  # do not train: play episodes with this model.pt, checkpoint or run folder
    eval_episodes: int = 32  # greedy episodes of the evaluation

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "seed" else 1
            if type(value) is int and value < least:
                sys.exit(f"error: --{name.replace('_', '-')} must be at least {least}")
        if not 0 < self.learning_rate < 1e38:
            sys.exit("error: --learning-rate must be positive, and small enough for float32")
        if self.batch_size > self.buffer_size:
            sys.exit(f"error: a replay of {self.buffer_size} episodes never holds a minibatch of {self.batch_size}")
        if self.capture_video if self.env_id.startswith("smac/") else self.save_replay:
            sys.exit("error: --capture-video is for SMAX, --save-replay is for StarCraft II")


@functools.cache
def make_smax(map_name: str) -> tuple:
    """A SMAX map ([SMAX]), its Shape, and two functions of N environments on it, which JAX compiles.

    begin(seeds (N,)) gives simulators and observations. step(simulators, actions (N, n)) gives those to act on next
    (of a new episode where one ended), the observations that the actions led to, before any reset, and rewards,
    terminations, truncations, victories (N,).
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the GPU is torch's
    sys.modules["jaxmarl.environments.mabrax"] = None  # Trap: this part of jaxmarl replaces sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):  # the import prints two lines
        import jax
        import jax.numpy as jnp
        from jaxmarl.environments.smax.heuristic_enemy_smax_env import HeuristicEnemySMAX
        from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO as MAPS
    if map_name not in MAPS:
        sys.exit(f"error: no SMAX map {map_name!r} (smac/MAP is StarCraft II); there are {', '.join(MAPS)}")
    env = HeuristicEnemySMAX(scenario=MAPS[map_name])
    n = env.num_agents

    def observe(key, state) -> tuple:
        seen, avail_actions = env.get_all_unit_obs(state), env.get_avail_actions(state)
        seen = jnp.stack([seen[unit] for unit in env.all_agents])  # (units, O), allies first
        avail_actions = jnp.stack([avail_actions[agent] for agent in env.agents])
        # SMAX's own state is not scaled. What a unit sees of itself is: the last columns of its observation
        types = state.state.unit_types / (env.unit_type_bits - 1)
        world = jnp.concatenate([seen[:, -len(env.own_features) :].clip(0, 1).ravel(), state.state.unit_teams, types])
        # Trap: else the types of begin() and step() differ in JAX's "weak" mark, and step() is compiled twice: 10 s
        simulator = jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), (key, state))
        return simulator, (seen[:n], world, avail_actions.astype(bool))

    def reset(key) -> tuple:
        key, reset_key = jax.random.split(key)
        return observe(key, env.reset(reset_key)[1])

    def step(simulator, actions) -> tuple:
        key, step_key = jax.random.split(simulator[0])
        _, state, rewards, dones, _ = env.step_env(step_key, simulator[1], dict(zip(env.agents, actions)))
        # Trap: jaxmarl tells neither a time limit from an end nor, if rewards are scaled, a victory: the units do
        allies, enemies = state.state.unit_alive[:n].any(), state.state.unit_alive[n:].any()
        terminated = ~(allies & enemies)
        truncated, won = dones["__all__"] & ~terminated, allies & ~enemies
        after = observe(key, state)
        now = jax.tree.map(lambda new, old: jnp.where(terminated | truncated, new, old), reset(key), after)
        return *now, after[1], 10 * rewards[env.agents[0]], terminated, truncated, won

    shape = Shape(n, env.num_ally_actions, env.obs_size, env.state_size)
    begin = jax.jit(jax.vmap(lambda seed: reset(jax.random.PRNGKey(seed))))
    return env, shape, begin, jax.jit(jax.vmap(step))


class Smax(gym.vector.VectorEnv):
    """N environments on a SMAX map, as gymnasium's vector environments with AutoresetMode.SAME_STEP."""

    def __init__(self, map_name: str, num_envs: int) -> None:
        self.num_envs = num_envs
        self.env, self.shape, self._begin, self._step = make_smax(map_name)

    def reset(self, *, seed: list[int], options: dict | None = None) -> tuple[tuple, dict]:
        """Begin new episodes with these seeds."""
        self.simulators, observation = self._begin(np.array(seed, np.uint32))
        return tuple(map(np.array, observation)), {}

    def step(self, actions: np.ndarray) -> tuple[tuple, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Play one step with actions (N, n). What they led to, before any reset, is in info["final_obs"]."""
        self.simulators, observation, after, *rest = self._step(self.simulators, actions)
        rewards, terminations, truncations, won = map(np.array, rest)
        final_info = {"won": won, "crashed": np.zeros_like(won)}
        info = {"final_obs": list(zip(*map(np.array, after))), "final_info": final_info}
        return tuple(map(np.array, observation)), rewards, terminations, truncations, info


class Smac(gym.Env):
    """StarCraft II on a map of the package SMAC ([SMAC]): one program, which keeps running from episode to episode."""

    def __init__(self, map_name: str, replay_dir: str) -> None:
        try:
            from smac.env import StarCraft2Env
        except ImportError as error:  # PyPI's smac is another project
            sys.exit(f"error: smac/{map_name} needs pip install git+https://github.com/oxwhirl/smac ({error})")
        # Detail: continuing_episode only makes step() say where the time limit was reached; PyMARL has it off
        self.env = StarCraft2Env(map_name, continuing_episode=True, replay_dir=replay_dir)  # its reset() launches it
        self.save_replay, self.close = self.env.save_replay, self.env.close  # for AsyncVectorEnv
        info = self.env.get_env_info()
        self.shape = tuple(info[name] for name in ("n_agents", "n_actions", "obs_shape", "state_shape"))
        n, A, obs_dim, state_dim = self.shape
        self.action_space = gym.spaces.MultiDiscrete([A] * n)
        obs, state = (gym.spaces.Box(-np.inf, np.inf, shape) for shape in ((n, obs_dim), (state_dim,)))
        self.observation_space = gym.spaces.Tuple((obs, state, gym.spaces.MultiBinary((n, A))))

    def observe(self) -> tuple:
        obs, state = (np.array(rows, np.float32) for rows in (self.env.get_obs(), self.env.get_state()))
        return obs, state, np.array(self.env.get_avail_actions(), np.int8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[tuple, dict]:
        """Begin an episode. The first time, launch the program, with this seed; later seeds have no effect."""
        if self.env._episode_count == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that close() is called
            # Trap: Ctrl-C reaches every process, and a worker of gymnasium's may hang if SIGTERM follows at once
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for descriptor in (1, 2):  # this process is AsyncVectorEnv's, and StarCraft II has a lot to say
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            # Trap: replays are named after the time in whole seconds, and all processes write at once
            self.env._seed, self.env.replay_prefix = seed, f"{self.env.map_name}_{seed}"
        self.env.reset()
        # Trap: while some units have yet to appear, each look at them counts the others again in max_reward
        health = sum(unit.health_max + unit.shield_max for unit in self.env.enemies.values())
        self.env.max_reward = self.env.n_enemies * self.env.reward_death_value + self.env.reward_win + health
        # Trap: before the end of the first episode another reset would launch a second program
        self.env._episode_count = max(1, self.env._episode_count)
        return self.observe(), {}

    def step(self, actions: np.ndarray) -> tuple[tuple, float, bool, bool, dict]:
        """Play one step with actions (n,)."""
        reward, ended, info = self.env.step(actions)
        crashed = "battle_won" not in info  # Trap: after a crash the package launches another and returns 0, True, {}
        won, truncated = info.get("battle_won", False), info.get("episode_limit", False)
        return self.observe(), reward, ended and not truncated, truncated, {"won": won, "crashed": crashed}


class Episode(NamedTuple):
    """An episode of T steps. Or a minibatch of B episodes, as in the title: then every tensor has a second axis (B)."""

    obs: torch.Tensor  # (T+1, n, O)
    state: torch.Tensor  # (T+1, S)
    avail_actions: torch.Tensor  # (T+1, n, A) bool
    filled: torch.Tensor  # (T+1,) bool: all rows but padding
    actions: torch.Tensor  # (T, n) uint8
    rewards: torch.Tensor  # (T, 1)
    no_bootstrap: torch.Tensor  # (T, 1): 1 at the last step, if the target there is the reward alone, else 0


class TeamEnvs:
    """N environments on a map of SMAX or SMAC. Where an episode ends, it becomes an Episode, and the next one begins.

    What the agents act on: obs (N, n, O), avail_actions (N, n, A), and last_actions (N, n), -1 before the first one.
    `finished` lists the episodes that the last step ended: (environment, Episode, score, whether it was won).
    """

    def __init__(self, args: Args, num_envs: int, run_folder: Path, name: str = "training") -> None:
        self.args, self.num_envs, self.run_folder, self.name = args, num_envs, run_folder, name
        self.recent_scores = deque(maxlen=100)
        if not args.env_id.startswith("smac/"):
            self.envs = Smax(args.env_id, num_envs)
            self.shape = self.envs.shape
        else:
            make = functools.partial(Smac, args.env_id.removeprefix("smac/"), str(run_folder.resolve() / "replays"))
            # Trap: interrupted in a step, gymnasium's destructor ends the processes, and complains
            sys.unraisablehook, gym.logger.min_level = lambda _: None, gym.logger.ERROR
            self.envs = gym.vector.AsyncVectorEnv([make] * num_envs, context="spawn", autoreset_mode="SameStep")
            self.shape = Shape(*self.envs.call("shape")[0])
        self.close = self.envs.close

    def reset(self, *key: int) -> None:
        """Begin new episodes, seeded by the run's seed and `key`; open ones are dropped."""
        seeds = np.random.SeedSequence([self.args.seed, *key]).generate_state(self.num_envs) >> 1  # 31 bits
        (self.obs, self.state, self.avail_actions), _ = self.envs.reset(seed=seeds.tolist())
        self.last_actions = np.full((self.num_envs, self.shape.n_agents), -1)
        self.steps = [[] for _ in range(self.num_envs)]  # of the open episodes
        self.video = f"{self.name}-{key[0]}"
        self.frames = [] if self.args.capture_video and self.name != "test" else None  # of the first episode

    def step(self, actions: np.ndarray) -> np.ndarray:
        """Play one step with actions (N, n). Returns where an episode ended (N,)."""
        if self.frames is not None:
            self.frames.append(draw(self.envs))
        before = self.obs, self.state, self.avail_actions, actions
        (self.obs, self.state, self.avail_actions), rewards, terminations, truncations, info = self.envs.step(actions)
        for steps, *row in zip(self.steps, *before, rewards):
            steps.append(row)
        self.last_actions, self.finished, ended = actions.copy(), [], terminations | truncations
        for i in np.flatnonzero(ended):
            if info["final_info"]["crashed"][i]:
                print("note: StarCraft II crashed; the episode is dropped", file=sys.stderr)
            else:
                episode, won = self.episode(i, info["final_obs"][i], terminations[i]), info["final_info"]["won"][i]
                self.finished.append((i, episode, float(episode.rewards.sum()), float(won)))
            self.steps[i], self.last_actions[i] = [], -1
        self.recent_scores.extend(score for _, _, score, _ in self.finished)
        if self.frames is not None and ended[0]:
            from gymnasium.utils.save_video import save_video

            save_video(self.frames, self.run_folder / "videos", lambda _: True, name_prefix=self.video, fps=8)
            self.frames = None
        return ended

    def episode(self, i: int, final_obs: tuple, terminated: bool) -> Episode:
        """The episode that ended in environment i: its steps, and the row that the last one led to."""
        *before, actions, rewards = zip(*self.steps[i])
        obs, state, avail_actions = (torch.from_numpy(np.stack([*x, last])) for x, last in zip(before, final_obs))
        actions = torch.from_numpy(np.stack(actions).astype(np.uint8))
        rewards = torch.tensor(rewards, dtype=torch.float32)[:, None]
        no_bootstrap = torch.zeros_like(rewards)
        no_bootstrap[-1] = 0.0 if self.args.bootstrap_timeouts and not terminated else 1.0
        filled = torch.ones(len(obs), dtype=torch.bool)
        return Episode(obs, state, avail_actions.bool(), filled, actions, rewards, no_bootstrap)


class Agent(nn.Module):
    r"""Q_a(\tau^a, .), with the same parameters for all agents: linear, GRU, linear ([QMIX] Fig. 2c, [DRQN])."""

    def __init__(self, shape: Shape, hidden_dim: int) -> None:
        super().__init__()
        self.n_agents, self.n_actions, self.hidden_dim = shape.n_agents, shape.n_actions, hidden_dim
        self.fc1 = nn.Linear(shape.obs_dim + shape.n_actions + shape.n_agents, hidden_dim)
        self.rnn = nn.GRUCell(hidden_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, shape.n_actions)

    def inputs(self, obs: torch.Tensor, last_actions: torch.Tensor) -> torch.Tensor:
        """Observation, last action and number of each agent (..., n, O + A + n); last_actions (..., n), -1 for none."""
        last = last_actions[..., None] == torch.arange(self.n_actions, device=obs.device)
        ids = torch.eye(self.n_agents, device=obs.device).expand(*obs.shape[:-1], -1)
        return torch.cat([obs, last, ids], dim=-1)

    def first_hidden(self, num_envs: int) -> torch.Tensor:
        """Hidden states (N, n, H) at the beginning of an episode: zeros."""
        return self.fc1.weight.new_zeros(num_envs, self.n_agents, self.hidden_dim)

    def forward(self, inputs: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of N environments: Q (N, n, A) of inputs (N, n, ...), and the next hidden states (N, n, H)."""
        embedded = torch.relu(self.fc1(inputs))
        hidden = self.rnn(embedded.flatten(0, 1), hidden.flatten(0, 1)).view_as(embedded)
        return self.fc2(hidden), hidden

    def unroll(self, inputs: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
        """Q (T+1, B, n, A) of whole episodes, zero in padding; inputs (R, n, ...) are their rows that are `filled`."""
        embedded = torch.relu(self.fc1(inputs)).flatten(0, 1)  # (R n, H), in order of time
        hidden, outputs = self.first_hidden(filled.shape[1]).flatten(0, 1), []
        # Not nn.GRU on a PackedSequence: twice as slow on the CPU, where gradients of slices are as large as all inputs
        for x in embedded.split((filled.sum(dim=1) * self.n_agents).tolist()):  # the rows at one time
            hidden = self.rnn(x, hidden[: len(x)])  # shorter episodes, which are the last ones, have ended
            outputs.append(hidden)
        agent_qs = embedded.new_zeros(*filled.shape, self.n_agents, self.n_actions)
        agent_qs[filled] = self.fc2(torch.cat(outputs)).unflatten(0, (-1, self.n_agents))
        return agent_qs


class QMixer(nn.Module):
    r"""Q_tot = \mathrm{ELU}(Q |W_1(s)| + b_1(s)) |w_2(s)| + V(s), [QMIX] Sec. 4, Fig. 2a: monotone in each Q."""

    def __init__(self, shape: Shape, embed_dim: int, hypernet_embed: int) -> None:
        super().__init__()

        def hypernetwork(width: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(shape.state_dim, width), nn.ReLU(), nn.Linear(width, outputs))

        self.n_agents, self.embed_dim = shape.n_agents, embed_dim
        self.hyper_w1 = hypernetwork(hypernet_embed, shape.n_agents * embed_dim)
        self.hyper_b1 = nn.Linear(shape.state_dim, embed_dim)
        self.hyper_w2 = hypernetwork(hypernet_embed, embed_dim)
        self.hyper_v = hypernetwork(embed_dim, 1)

    def forward(self, qvals: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Q_tot (..., 1) of the agents' values (..., n) in states (..., S)."""
        w1 = self.hyper_w1(state).abs().unflatten(-1, (self.n_agents, self.embed_dim))  # (..., n, E)
        hidden = nn.functional.elu((qvals[..., None] * w1).sum(dim=-2) + self.hyper_b1(state))  # (..., E)
        # Trap: no abs on the biases and on V, which may have any sign
        return (hidden * self.hyper_w2(state).abs()).sum(dim=-1, keepdim=True) + self.hyper_v(state)


class VDNMixer(nn.Module):
    """Q_tot (..., 1) is the sum of the agents' values (..., n), whatever the state: [VDN] Sec. 3."""

    def forward(self, qvals: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return qvals.sum(dim=-1, keepdim=True)


class NoMixer(nn.Module):
    """Independent Q-learning, [IQL], [SHARE]: each agent's value (..., n) is learned as if it were the team's."""

    def forward(self, qvals: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return qvals


def make_networks(args: Args, shape: Shape) -> tuple[Agent, nn.Module]:
    """An agent and a mixing network as the arguments say."""
    qmix = functools.partial(QMixer, shape, args.mixing_embed_dim, args.hypernet_embed)
    return Agent(shape, args.rnn_hidden_dim), {"qmix": qmix, "vdn": VDNMixer, "none": NoMixer}[args.mixer]()


class EpisodeReplay:
    """The last `buffer_size` episodes."""

    def __init__(self, buffer_size: int) -> None:
        self.episodes = deque(maxlen=buffer_size)
        self.added = 0

    def add(self, episode: Episode) -> None:
        """Append an episode; where the replay is full, the oldest one goes."""
        self.episodes.append(episode)
        self.added += 1

    def sample(self, batch_size: int, rng: np.random.Generator) -> Episode:
        """A minibatch of different episodes, padded with zeros to the longest, which comes first."""
        chosen = [self.episodes[i] for i in rng.choice(len(self.episodes), batch_size, replace=False)]
        chosen.sort(key=lambda episode: -len(episode.rewards))
        return Episode(*(pad_sequence(columns) for columns in zip(*chosen)))

    def state_dict(self) -> dict:
        """The state. Episodes are compressed, to about a tenth."""
        torch.save([list(episode) for episode in self.episodes], file := io.BytesIO())
        compressed = zlib.compress(file.getbuffer(), level=1)
        return {"added": self.added, "episodes": torch.frombuffer(bytearray(compressed), dtype=torch.uint8)}

    def load_state_dict(self, state: dict) -> None:
        self.added, file = state["added"], io.BytesIO(zlib.decompress(state["episodes"].numpy()))
        self.episodes.extend(Episode(*episode) for episode in torch.load(file, weights_only=True))


def td_lambda_targets(rewards, next_values, no_bootstrap, mask, gamma, td_lambda) -> torch.Tensor:
    r"""Targets y (T, B, ...). next_values[t] (T, B, ...) is Q'_{t+1}, after step t; the other tensors are (T, B, 1).

    y_t = r_t + \gamma (1 - no_bootstrap_t) ((1 - \lambda) Q'_{t+1} + \lambda y_{t+1}); at an episode's last step there
    is no y_{t+1}, and lambda is 0. This is [PENG]'s Q(lambda); lambda = 0 is the one-step target, [QMIX] below Eq. (6).
    """
    discounts = gamma * (1 - no_bootstrap)
    lambdas = td_lambda * torch.cat([mask[1:], torch.zeros_like(mask[:1])]).to(rewards.dtype)  # 0: no step follows
    targets, decays = rewards + discounts * (1 - lambdas) * next_values, discounts * lambdas
    if td_lambda > 0:  # else the loop adds zeros, and costs time
        for t in reversed(range(len(rewards) - 1)):
            targets[t] += decays[t] * targets[t + 1]
    return targets


def qmix_loss(agent, mixer, target_agent, target_mixer, batch: Episode, args: Args) -> tuple[torch.Tensor, dict]:
    r"""The loss to be minimised (), [QMIX] Eq. (6) as a mean, and its metrics {name: ()}.

    L = 1/P \sum (y^tot - Q_tot(\tau, u, s))^2 over the P steps,   y^tot = r + \gamma Q_tot(\tau', u', s'; \theta^-)
    u' holds each agent's best available action by its online network ([DDQN]; with `--no-double-q` by its target
    network); the target networks value it. As Q_tot is monotone, these are the team's best: [QMIX] Eq. (4) and (5).
    """
    filled, mask, actions = batch.filled, batch.filled[1:], batch.actions.long()  # (T+1, B), (T, B), (T, B, n)
    last_actions = torch.cat([torch.full_like(actions[:1], -1), actions])  # (T+1, B, n)
    inputs = agent.inputs(batch.obs[filled], last_actions[filled])  # (R, n, O + A + n): the R rows without padding
    agent_qs = agent.unroll(inputs, filled)  # (T+1, B, n, A)
    chosen_action_qvals = agent_qs[:-1].gather(-1, actions[..., None]).squeeze(-1)  # (T, B, n)
    q_tot = mixer(chosen_action_qvals[mask], batch.state[:-1][mask])  # (P, 1): the P steps without padding
    with torch.no_grad():
        target_qs = target_agent.unroll(inputs, filled)[1:]  # (T, B, n, A)
        # Trap: without avail_actions an action that cannot be taken, whose value nothing corrects, may be the best
        values = (agent_qs[1:] if args.double_q else target_qs).masked_fill(~batch.avail_actions[1:], -math.inf)
        next_qvals = target_qs.gather(-1, values.argmax(dim=-1, keepdim=True)).squeeze(-1)  # (T, B, n)
        next_values = target_mixer(next_qvals, batch.state[1:])  # (T, B, 1)
        columns = (batch.rewards, next_values, batch.no_bootstrap, mask[..., None])
        targets = td_lambda_targets(*columns, args.gamma, args.td_lambda)[mask]  # (P, 1)
    td_errors = targets - q_tot
    loss = td_errors.square().mean()
    metrics = {"td_loss": loss, "td_error_abs": td_errors.abs().mean()}
    metrics |= {"q_taken_mean": q_tot.mean(), "target_mean": targets.mean()}
    return loss, {name: metric.detach() for name, metric in metrics.items()}


@torch.no_grad()
def select_actions(agent: Agent, envs: TeamEnvs, hidden: torch.Tensor, epsilon=0.0, rng=None) -> tuple:
    """Actions (N, n), each agent's best or, with probability epsilon, any available one; the next hidden (N, n, H)."""
    obs, last_actions = (torch.from_numpy(rows).to(hidden.device) for rows in (envs.obs, envs.last_actions))
    agent_qs, hidden = agent(agent.inputs(obs, last_actions), hidden)
    actions = np.where(envs.avail_actions, agent_qs.cpu().numpy(), -np.inf).argmax(axis=-1)
    if epsilon > 0:
        any_actions = (rng.random(envs.avail_actions.shape) * envs.avail_actions).argmax(axis=-1)
        explores = rng.random(actions.shape) < epsilon  # Detail: each agent for itself, not the team as one
        actions = np.where(explores, any_actions, actions)
    return actions, hidden


def play(agent: Agent, envs: TeamEnvs, num_episodes: int) -> tuple[list[float], list[float]]:
    """Play greedy episodes from a reset on. Returns their scores, and 1.0 for a victory, else 0.0.

    Each environment plays its share. The first `num_episodes` to end would be short ones, too many of them defeats.
    """
    hidden, results = agent.first_hidden(envs.num_envs), []
    share = np.bincount(np.arange(num_episodes) % envs.num_envs, minlength=envs.num_envs)
    while share.any():
        actions, hidden = select_actions(agent, envs, hidden)
        hidden[envs.step(actions)] = 0
        for i, _, score, won in envs.finished:
            if share[i]:
                results.append((score, won))
                share[i] -= 1
    return tuple(map(list, zip(*results)))


def train(args: Args, run_folder: Path, checkpoint: dict | None) -> None:
    """Train from the beginning or from a checkpoint. Raises FloatingPointError where a gradient is not finite."""
    N, device = args.num_envs, torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)  # the parameters
    envs = TeamEnvs(args, N, run_folder)
    test_envs = TeamEnvs(args, min(N, args.test_nepisode), run_folder, "test")
    agent, mixer = (network.to(device) for network in make_networks(args, envs.shape))
    target_agent, target_mixer = copy.deepcopy(agent), copy.deepcopy(mixer)
    parameters = [*agent.parameters(), *mixer.parameters()]
    optimizer = {"rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam}[args.optimizer](parameters)
    replay = EpisodeReplay(args.buffer_size)

    # All that the rest of a run depends on
    parts = {"agent": agent, "mixer": mixer, "target_agent": target_agent, "target_mixer": target_mixer}
    parts |= {args.optimizer: optimizer, "replay": replay}
    global_step = start = restore(parts, checkpoint) if checkpoint else 0
    optimizer.param_groups[0] |= {"alpha": args.optim_alpha, "eps": args.optim_eps}  # Trap: a checkpoint has its own
    last_step = math.ceil(args.total_timesteps / N) * N
    run = Run(args, run_folder, checkpoint, parts, last_step)
    if args.compile:
        for network in (mixer, target_mixer):
            network.compile(dynamic=True)  # minibatches differ in length

    while global_step < last_step:
        if global_step % args.test_interval < N and (global_step > run.first_step or not checkpoint):
            test_envs.reset(global_step, 2)
            returns, won = play(agent, test_envs, args.test_nepisode)
            run.log(global_step, {"eval/episodic_return": np.mean(returns), "eval/battle_won_rate": np.mean(won)})
        if global_step == start or global_step % args.checkpoint_interval < N:
            run.save_checkpoint(global_step)
            envs.reset(global_step)  # new episodes, interrupted here or not: resuming is exact
            rng = np.random.default_rng([args.seed, global_step])  # and new random numbers
            hidden, metrics = agent.first_hidden(N), {}
        learning_rate = args.learning_rate * (1 - global_step / last_step if args.anneal_lr else 1)
        epsilon = np.interp(global_step, [0, args.epsilon_anneal_time], [args.epsilon_start, args.epsilon_finish])

        # Collect one step in each environment
        actions, hidden = select_actions(agent, envs, hidden, epsilon, rng)
        ended = envs.step(actions)
        hidden[ended] = 0  # Trap: else an episode is played from other hidden states than in `unroll`
        global_step += N

        for _, episode, score, won in envs.finished:
            run.log(global_step, {"charts/episodic_return": score, "charts/episodic_length": len(episode.rewards)})
            run.log(global_step, {"charts/battle_won": won})
            replay.add(episode)

            # Updates are due for each episode from the batch_size-th on: how many until now, and how many before?
            now, before = (max(0, replay.added - args.batch_size + i) * args.updates_per_episode for i in (1, 0))
            for _ in range(int(now) - int(before)):
                batch = Episode(*(tensor.to(device) for tensor in replay.sample(args.batch_size, rng)))
                loss, metrics = qmix_loss(agent, mixer, target_agent, target_mixer, batch, args)
                optimizer.zero_grad()
                loss.backward()
                metrics["grad_norm"] = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                if not metrics["grad_norm"].isfinite():
                    raise FloatingPointError(f"the gradient is not finite at step {global_step:,}")
                optimizer.param_groups[0]["lr"] = learning_rate
                optimizer.step()

            if replay.added % args.target_update_interval == 0:  # Trap: of episodes, neither steps nor updates
                target_agent.load_state_dict(agent.state_dict())
                target_mixer.load_state_dict(mixer.state_dict())

        if global_step % args.log_interval < N or global_step >= last_step:
            run.log(global_step, {f"losses/{name}": metric for name, metric in metrics.items()})
            run.log(global_step, {"charts/learning_rate": learning_rate, "charts/epsilon": epsilon})
            run.progress(global_step, envs.recent_scores)

    envs.close()
    test_envs.close()
    run.finish(global_step, "agent")


# ----- The run: evaluation, checkpoints, logs and sharing. Nothing below this line belongs to the algorithm. -----

SCRIPT = "qmix_smac"
PACKAGES = ["torch", "gymnasium", "numpy", *filter(importlib.util.find_spec, ("jax", "jaxmarl"))]  # for result.json


def evaluate(args: Args, model: dict, run_folder: Path) -> dict[str, list[float]]:
    """Play `args.eval_episodes` greedy episodes, and print the score.

    `model` is a checkpoint or what model.pt holds. Returns the returns, and 1.0 for each battle won, else 0.0. The
    episodes depend on the seed, on the model's step and on `args.num_envs`; none of them is one of training's.
    """
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs = TeamEnvs(args, min(args.num_envs, args.eval_episodes), run_folder, "evaluation")
    agent = Agent(envs.shape, args.rnn_hidden_dim).to(device)
    restore({"agent": agent}, model)
    envs.reset(model["global_step"], 1)
    returns, won = play(agent, envs, args.eval_episodes)
    if args.save_replay:
        (run_folder / "replays").mkdir(exist_ok=True)  # Trap: processes that make it at the same moment collide
        try:
            envs.envs.call("save_replay")
        except Exception as error:  # whatever it is: the run is over, and its model is still to be written
            print(f"note: no replays ({error})", file=sys.stderr)
    envs.close()
    score = f"{np.mean(returns):.2f} +- {np.std(returns):.2f}, {len(returns)} episodes of greedy actions"
    print(f"evaluation: {score}, {np.mean(won):.1%} of the battles won")
    return {"episodic_return": returns, "battle_won_rate": won}


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


def draw(envs: Smax) -> np.ndarray:
    """A picture (384, 384, 3) of the first environment: allies blue, enemies red, the brighter the healthier."""
    env, units = envs.env, envs.simulators[1].state
    places = (np.arange(384) + 0.5) / 384 * env.map_width
    picture = np.full((384, 384, 3), 24, np.uint8)
    for i in np.flatnonzero(units.unit_alive[0]):
        (x, y), kind = units.unit_positions[0, i], units.unit_types[0, i]
        health = float(units.unit_health[0, i] / env.unit_type_health[kind])
        disc = np.hypot(places[:, None] - float(y), places - float(x)) < float(env.unit_type_radiuses[kind])
        picture[disc] = np.array((80, 140, 255) if i < env.num_allies else (255, 90, 80)) * (0.35 + 0.65 * health)
    return picture[::-1]


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
