# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch==2.13.0", "jax==0.10.2", "jaxmarl==0.2.0", "gymnasium==1.3.0", "numpy==2.4.6",
#     "tyro==1.0.17", "tqdm", "tensorboard==2.21.0", "wandb==0.31.0", "moviepy==2.2.1",
#     "huggingface-hub==2.4.0",
# ]
# ///
r"""QMIX on SMAX (battles like StarCraft's, in JAX), or with smac/MAP on StarCraft II.

Each agent estimates the values of its actions from its own observations. In training, a mixing
network that sees the global state combines the chosen actions' values into Q_tot, the value of the
joint action, learned by Q-learning from the team's reward. Mixing weights are never negative, so
the agents' greedy actions form the greedy joint action, and acting needs no mixer.

[QMIX]  Rashid et al. 2018, arXiv:1803.11485          [VDN]   Sunehag et al. 2018, arXiv:1706.05296
[DDQN]  van Hasselt et al. 2016, arXiv:1509.06461     [IQL]   Tan 1993, ICML
[SMAX]  Rutherford et al. 2024, arXiv:2311.10090      [PENG]  Peng, Williams 1996, Mach. Learn. 22
[TRICK] Hu et al. 2021, arXiv:2102.03479

    symbol   variable   shape            meaning (B episodes of up to T steps; see also Episode)
    Q_a      agent_qs   (T+1, B, n, A)   values of each agent's actions
    Q_tot    q_tot      (P, 1)           value of the joint action (P steps, without padding);
                                         with `--mixer none` (P, n), values of the agents
    y^tot    targets    (P, 1)           TD target, [QMIX] below Eq. (6); same shape
    \theta   networks                    agent and mixer; \theta^- is target_networks

Differences from the paper and from PyMARL, its implementation (reasons: docs/qmix_smac.md):
  * Tuned on SMAX: 32 environments, 16 episodes per minibatch, annealed Adam, TD(0.5); target
    copies are counted in updates. PyMARL: `--num-envs 1 --updates-per-episode 1 --batch-size 32
    --td-lambda 0 --target-update-interval 200 --optimizer rmsprop --learning-rate 5e-4
    --no-anneal-lr --test-interval 10000 --total-timesteps 2050000`.
  * As in PyMARL: double Q-learning, hypernetworks with a hidden layer, Eq. (6) as a mean, a
    battle's time limit as a termination. Truncations are bootstrapped (PyMARL: if reported).
  * Updates happen during unfinished episodes, so their hidden states are partly stale.
  * SMAX's rewards are scaled by 10, its state to [0, 1].
  * Checkpoints reset the environments and reseed all generators: resuming SMAX is bit-exact.

    python qmix_smac.py --env-id 3m  # writes runs/3m__...
    python qmix_smac.py --resume runs/3m__...  # resumes a run
    python qmix_smac.py --evaluate runs/3m__...  # evaluates a team
"""

import contextlib
import functools
import io
import json
import math
import os
import random
import re
import signal
import sys
import time
import zipfile
import zlib
from collections import deque, namedtuple
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.utils.rnn import pad_sequence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    """QMIX, VDN or independent Q-learning for cooperative games."""

    env_id: str = "3m"  # a map of SMAX, or smac/MAP for StarCraft II
    total_timesteps: int = 1_000_000  # steps of all environments
    num_envs: int = 32  # N: parallel environments
    mixer: Literal["qmix", "vdn", "none"] = "qmix"  # none: independent learners, [IQL]
    rnn_hidden_dim: int = 64  # H: width of the agent network
    mixing_embed_dim: int = 32  # E: width of the mixing network
    hypernet_embed: int = 64  # width of the hypernetworks
    gamma: float = 0.99  # discount factor
    double_q: bool = True  # double Q-learning, [DDQN]
    td_lambda: float = 0.5  # lambda of the targets; 0: one-step
    epsilon_finish: float = 0.05  # epsilon is annealed from 1 to this
    epsilon_anneal_time: int = 50_000  # steps to anneal epsilon over
    buffer_size: int = 5_000  # episodes in the replay buffer
    batch_size: int = 16  # B: episodes in a minibatch
    updates_per_episode: float = 0.5  # gradient steps per collected episode
    target_update_interval: int = 25  # updates between target network copies
    optimizer: Literal["adam", "rmsprop"] = "adam"  # adam [TRICK], rmsprop [QMIX]
    learning_rate: float = 1e-3  # step size
    anneal_lr: bool = True  # linearly to zero
    max_grad_norm: float = 10.0  # gradient clipping norm
    test_interval: int = 20_000  # steps between tests; a test reseeds
    test_nepisode: int = 32  # greedy episodes of a test
    log_interval: int = 2_000  # steps

    exp_name: str = Path(__file__).stem
    seed: int = 1  # seed of all generators
    torch_deterministic: bool = True  # in cuDNN
    cuda: bool = False  # use the GPU; SMAX stays on the CPU
    torch_threads: int = 1  # PyTorch's CPU threads
    track: bool = False  # log to Weights & Biases
    wandb_project_name: str = "deep-rl-reference"
    wandb_entity: str | None = None
    capture_video: bool = False  # record an episode after each checkpoint (SMAX)
    save_model: bool = True
    upload_model: bool = False  # to the Hugging Face Hub
    hf_entity: str | None = None  # Hub user or organization
    checkpoint_interval: int = 250_000  # steps; checkpoints drop unfinished episodes
    run_folder: str | None = None  # start or resume in this folder
    resume: str | None = None  # run folder to resume
    evaluate: str | None = None  # model or run folder to evaluate
    eval_episodes: int = 32


Shape = namedtuple("Shape", "n_agents n_actions obs_dim state_dim")  # n, A, O, S


def make_envs(args: Args, num_envs: int) -> VectorEnv:
    """Make the parallel environments. Replace this to train on another game.

    Called for training and for tests: two sets live at once. A gymnasium VectorEnv in SAME_STEP
    autoreset mode:

    single_observation_space: from `make_space`, a Tuple of the agents' observations (n, O), the
        global state (S,), and the available actions (n, A), at least one per agent.
    reset(seed=...): a tuple of these arrays for N environments, (N, n, O) and so on, and a dict.
        For exact resume, seed and actions must determine all that follows.
    step(actions (N, n)): the same arrays, rewards, terminations, truncations (N,), info. Where an
        episode ended, the arrays belong to the next, and info["final_obs"][i] is the tuple after
        its last step. info["final_info"]["won"] (N,) is 0 if missing, and NaN to drop an episode.
    render(): only for --capture-video; an image (height, width, 3) per environment.

    SyncVectorEnv([MyGame] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP) does this for a
    gymnasium.Env with such an observation_space and the action_space MultiDiscrete([A] * n), which
    returns new arrays and may return {"won": 0.0 or 1.0} as its last info.
    """
    if args.env_id.startswith("smac/"):
        make, mode = functools.partial(Smac, args.env_id[5:]), AutoresetMode.SAME_STEP
        return AsyncVectorEnv([make] * num_envs, context="spawn", autoreset_mode=mode)
    return Smax(args.env_id, num_envs)


def make_space(n_agents: int, n_actions: int, obs_dim: int, state_dim: int) -> Tuple:
    """The space of one environment's observations."""
    obs, state = Box(-np.inf, np.inf, (n_agents, obs_dim)), Box(-np.inf, np.inf, (state_dim,))
    return Tuple((obs, state, MultiBinary((n_agents, n_actions))))


@functools.cache
def make_smax(map_name: str) -> tuple:
    """A map of SMAX, and its `reset` and `step` compiled for N environments."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # leave the GPU to torch
    sys.modules["jaxmarl.environments.mabrax"] = None  # Trap: its import replaces sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        import jax
        import jax.numpy as jnp
        from jaxmarl.environments.smax import HeuristicEnemySMAX, smax_env
    maps = smax_env.MAP_NAME_TO_SCENARIO
    if map_name not in maps:
        sys.exit(f"error: no map {map_name}; there are {', '.join(maps)}, and smac/MAP")
    env = HeuristicEnemySMAX(scenario=maps[map_name])
    n = env.num_agents

    def observe(key, state) -> tuple:
        obs = jnp.stack([*env.get_all_unit_obs(state).values()])  # (units, O), allies first
        avail_actions = jnp.stack([*env.get_avail_actions(state).values()]).astype(bool)
        # Units' own features, clipped, replace SMAX's raw state
        features = obs[:, -len(env.own_features) :].clip(0, 1).ravel()
        types = state.state.unit_types / (env.unit_type_bits - 1)
        world = jnp.concatenate([features, state.state.unit_teams, types])
        # Trap: reset and step differ in weak types, and would compile twice
        simulator = jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), (key, state))
        return simulator, (obs[:n], world, avail_actions)

    def reset(key) -> tuple:
        key, reset_key = jax.random.split(key)
        return observe(key, env.reset(reset_key)[1])

    def step(simulator, actions) -> tuple:
        key, step_key = jax.random.split(simulator[0])
        actions = dict(zip(env.agents, actions))
        _, state, rewards, dones, _ = env.step_env(step_key, simulator[1], actions)
        alive, done = state.state.unit_alive, dones["__all__"]
        won = alive[:n].any() & ~alive[n:].any()
        after = observe(key, state)
        current = jax.tree.map(lambda x, y: jnp.where(done, x, y), reset(key), after)
        return *current, after[1], 10 * rewards[env.agents[0]], done, won

    reset_all = jax.jit(jax.vmap(lambda seed: reset(jax.random.PRNGKey(seed))))
    return env, reset_all, jax.jit(jax.vmap(step))


class Smax(VectorEnv):
    """N environments on a SMAX map."""

    def __init__(self, map_name: str, num_envs: int) -> None:
        self.num_envs = num_envs
        self.env, self._reset, self._step = make_smax(map_name)
        n, A = self.env.num_agents, self.env.num_ally_actions
        self.single_observation_space = make_space(n, A, self.env.obs_size, self.env.state_size)

    def reset(self, *, seed: int, options: dict | None = None) -> tuple:
        self.simulators, observations = self._reset(seed + np.arange(self.num_envs))
        return observations, {}

    def step(self, actions: np.ndarray) -> tuple:
        import jax

        self.simulators, *results = self._step(self.simulators, actions)
        observations, final_obs, rewards, dones, won = jax.device_get(results)
        info = {"final_obs": list(zip(*final_obs)), "final_info": {"won": won}}
        # Detail: the time limit is a defeat, hence a termination
        return observations, rewards, dones, np.zeros_like(dones), info

    def render(self) -> list[np.ndarray]:
        units, image = self.simulators[1].state, np.zeros((256, 256, 3), np.uint8)
        for i in np.flatnonzero(units.unit_alive[0]):
            x, y = (units.unit_positions[0, i] * 248 / self.env.map_width).astype(int)
            is_ally = i < self.env.num_agents
            image[y : y + 8, x : x + 8] = (80, 140, 255) if is_ally else (255, 90, 80)
        return [image[::-1]]


class Episode(NamedTuple):
    """An episode of T steps; in a minibatch, each tensor has a second axis (B)."""

    obs: Tensor  # (T+1, n, O): o^a
    state: Tensor  # (T+1, S): s, for the mixer only
    avail_actions: Tensor  # (T+1, n, A) bool
    filled: Tensor  # (T+1,) bool: False in padding
    actions: Tensor  # (T, n): u^a
    rewards: Tensor  # (T, 1): r, of the team
    terminations: Tensor  # (T, 1): 1 at the last step, unless it was truncated


class Environments:
    """Parallel environments that collect episodes.

    To act on: obs (N, n, O), avail_actions (N, n, A), last_actions (N, n), -1 at first. After a
    step: `finished`, the Episodes that ended, and the dicts `episodes` (return, length) and `wins`
    (0.0, 1.0), keyed by environment.
    """

    def __init__(self, args: Args, num_envs: int) -> None:
        self.num_envs, self.envs = num_envs, make_envs(args, num_envs)
        obs, state, avail_actions = self.envs.single_observation_space
        self.shape = Shape(*avail_actions.shape, obs.shape[-1], state.shape[-1])

    def reset(self, seed: int, video_folder: Path | None = None) -> None:
        """Reset the environments; drop unfinished episodes."""
        self.observe(self.envs.reset(seed=seed)[0])
        self.last_actions = np.full(self.obs.shape[:2], -1)
        self.steps = [[] for _ in range(self.num_envs)]  # of unfinished episodes
        self.video_folder, self.frames = video_folder, []

    def observe(self, observations: tuple) -> None:
        dtypes = (np.float32, np.float32, bool)  # copies: environments may reuse arrays
        self.obs, self.state, self.avail_actions = map(np.array, observations, dtypes)

    def step(self, actions: np.ndarray) -> np.ndarray:
        """Step with actions (N, n). Returns where an episode ended (N,)."""
        if self.video_folder:
            self.frames.append(self.envs.render()[0])
        observations, rewards, terminations, truncations, info = self.envs.step(actions.copy())
        rows = zip(self.obs, self.state, self.avail_actions, actions, rewards)
        for steps, row in zip(self.steps, rows):
            steps.append(row)
        self.observe(observations)
        self.last_actions = actions.copy()
        self.episodes, self.wins, self.finished = {}, {}, []
        dones = np.logical_or(terminations, truncations)  # bool, also of integers
        won = info.get("final_info", {}).get("won", np.zeros(self.num_envs))
        for i in np.flatnonzero(dones):
            if won[i] == won[i]:  # else NaN: the game crashed
                episode = make_episode(self.steps[i], info["final_obs"][i], terminations[i])
                self.finished.append(episode)
                self.episodes[i] = (float(episode.rewards.sum()), len(episode.rewards))
                self.wins[i] = float(won[i] or 0)
            self.steps[i] = []
            self.last_actions[i] = -1
        if self.video_folder and dones[0]:
            from gymnasium.utils.save_video import save_video

            save_video(self.frames, str(self.video_folder), lambda _: True, fps=8)
            self.video_folder = None
        return dones


def make_episode(steps: list[tuple], final_obs: tuple, terminated: bool) -> Episode:
    """The Episode of steps (obs, state, avail_actions, actions, reward)."""
    last = (*final_obs, *steps[-1][3:])  # its action and reward are cut off
    columns = [torch.from_numpy(np.stack(x)) for x in zip(*steps, last)]
    obs, state, avail_actions, actions, rewards = columns
    filled, terminations = torch.ones(len(obs)).bool(), torch.zeros(len(steps), 1)
    terminations[-1] = float(terminated)
    inputs = (obs.float(), state.float(), avail_actions.bool(), filled)
    return Episode(*inputs, actions[:-1], rewards[:-1, None].float(), terminations)


class Agent(nn.Module):
    r"""Q_a(\tau^a, .): one recurrent network for all agents ([QMIX] Fig. 2c)."""

    def __init__(self, shape: Shape, hidden_dim: int) -> None:
        super().__init__()
        self.shape, self.hidden_dim = shape, hidden_dim
        inputs = shape.obs_dim + shape.n_actions + shape.n_agents
        self.encoder = nn.Sequential(nn.Linear(inputs, hidden_dim), nn.ReLU())
        self.rnn = nn.GRU(hidden_dim, hidden_dim)
        self.head = nn.Linear(hidden_dim, shape.n_actions)

    def initial_hidden(self, num_envs: int) -> Tensor:
        """Hidden states (B, n, H) at an episode's start: zeros, to which `train` resets."""
        return self.head.weight.new_zeros(num_envs, self.shape.n_agents, self.hidden_dim)

    def forward(self, obs, last_actions, hidden) -> tuple[Tensor, Tensor]:
        """Values (T, B, n, A) of T steps from `hidden` (B, n, H) on, and the hidden states after.

        last_actions (T, B, n) are -1 at an episode's start. To use an LSTM, concatenate its states.
        """
        n, A = self.shape.n_agents, self.shape.n_actions
        one_hot = last_actions[..., None] == torch.arange(A, device=obs.device)
        agents = torch.eye(n, device=obs.device).expand(*obs.shape[:-1], n)
        x = self.encoder(torch.cat([obs, one_hot, agents], dim=-1))  # (T, B, n, H)
        outputs, hidden = self.rnn(x.flatten(1, 2), hidden.flatten(0, 1)[None])
        return self.head(outputs).unflatten(1, (-1, n)), hidden[0].unflatten(0, (-1, n))


class QMixer(nn.Module):
    r"""Q_tot = \mathrm{ELU}(Q |W_1(s)| + b_1(s)) |w_2(s)| + V(s), [QMIX] Sec. 4, Fig. 2a."""

    def __init__(self, shape: Shape, embed_dim: int, hypernet_embed: int) -> None:
        super().__init__()

        def hypernetwork(width: int, outputs: int) -> nn.Sequential:
            first, second = nn.Linear(shape.state_dim, width), nn.Linear(width, outputs)
            return nn.Sequential(first, nn.ReLU(), second)

        self.w1_shape = (shape.n_agents, embed_dim)
        self.hyper_w1 = hypernetwork(hypernet_embed, shape.n_agents * embed_dim)
        self.hyper_b1 = nn.Linear(shape.state_dim, embed_dim)
        self.hyper_w2 = hypernetwork(hypernet_embed, embed_dim)
        self.hyper_v = hypernetwork(embed_dim, 1)

    def forward(self, qvals: Tensor, state: Tensor) -> Tensor:
        """Q_tot (..., 1) for the agents' values (..., n) in states (..., S)."""
        w1 = self.hyper_w1(state).abs().unflatten(-1, self.w1_shape)  # (..., n, E)
        w2 = self.hyper_w2(state).abs()  # (..., E)
        # Trap: no abs on the biases, which may have any sign
        hidden = nn.functional.elu((qvals[..., None] * w1).sum(dim=-2) + self.hyper_b1(state))
        return (hidden * w2).sum(dim=-1, keepdim=True) + self.hyper_v(state)


class Networks(nn.Module):
    r"""\theta: all that is trained, copied to the target networks, and saved."""

    def __init__(self, args: Args, shape: Shape) -> None:
        super().__init__()
        self.agent = Agent(shape, args.rnn_hidden_dim)
        if args.mixer == "qmix":
            self.mixer = QMixer(shape, args.mixing_embed_dim, args.hypernet_embed)
        elif args.mixer == "vdn":  # [VDN] Sec. 3: Q_tot is the sum
            self.mixer = lambda qvals, state: qvals.sum(dim=-1, keepdim=True)
        elif args.mixer == "none":  # [IQL]: each agent learns from the team's reward
            self.mixer = lambda qvals, state: qvals


class EpisodeReplay:
    """The last `buffer_size` episodes, and counts of updates due and made."""

    def __init__(self, buffer_size: int) -> None:
        self.episodes, self.updates_due, self.num_updates = deque(maxlen=buffer_size), 0.0, 0

    def add(self, episodes: list[Episode]) -> None:
        self.episodes.extend(episodes)

    def sample(self, batch_size: int) -> Episode:
        """A minibatch of different episodes, padded."""
        indices = torch.ones(len(self.episodes)).multinomial(batch_size)
        episodes = [self.episodes[i] for i in indices]
        return Episode(*(pad_sequence(x) for x in zip(*episodes)))

    def state_dict(self) -> dict:
        file = io.BytesIO()
        torch.save([tuple(episode) for episode in self.episodes], file)
        content = bytearray(zlib.compress(file.getbuffer(), level=1))  # to a tenth
        episodes = torch.frombuffer(content, dtype=torch.uint8)
        counts = {"updates_due": self.updates_due, "num_updates": self.num_updates}
        return counts | {"episodes": episodes}

    def load_state_dict(self, state: dict) -> None:
        file = io.BytesIO(zlib.decompress(state["episodes"].numpy()))
        self.episodes.extend(Episode(*tensors) for tensors in torch.load(file, weights_only=True))
        self.updates_due, self.num_updates = state["updates_due"], state["num_updates"]


def td_lambda_targets(batch: Episode, next_values, gamma, td_lambda) -> Tensor:
    r"""Targets y (T, B, ...); next_values[t] is Q'_{t+1}.

    y_t = r_t + \gamma ((1 - \lambda) Q'_{t+1} + \lambda y_{t+1}), at a termination r_t;
    \lambda = 0 at an episode's last step and in [QMIX]. As in [PENG], no off-policy correction.
    """
    discounts = gamma * (1 - batch.terminations)
    targets = batch.rewards + discounts * next_values
    decay = td_lambda * discounts[:-1] * batch.filled[2:, :, None].to(discounts)
    for t in reversed(range(len(decay))):
        targets[t] += decay[t] * (targets[t + 1] - next_values[t])
    return targets


def qmix_loss(networks, target_networks, batch: Episode, args: Args) -> tuple[Tensor, dict]:
    r"""The loss, [QMIX] Eq. (6) as a mean, and a dict of metrics.

    L = 1/P \sum (y^tot - Q_tot(\tau, u, s))^2,   y^tot by `td_lambda_targets` from
    Q' = Q_tot(\tau', u', s'; \theta^-); with td_lambda 0, y^tot = r + \gamma Q'.

    u' are the agents' greedy actions, by the online network with double_q ([DDQN]). They maximize
    Q_tot because it is monotonic ([QMIX] Eqs. (4), (5)).
    """
    mask, actions = batch.filled[1:], batch.actions  # mask (T, B): no padding
    last_actions = torch.cat([torch.full_like(actions[:1], -1), actions])  # (T+1, B, n)
    inputs = (batch.obs, last_actions, networks.agent.initial_hidden(len(mask[0])))
    agent_qs, _ = networks.agent(*inputs)  # (T+1, B, n, A)
    chosen_qvals = agent_qs[:-1].gather(-1, actions[..., None]).squeeze(-1)  # (T, B, n)
    q_tot = networks.mixer(chosen_qvals[mask], batch.state[:-1][mask])  # (P, 1)
    with torch.no_grad():
        target_qs = target_networks.agent(*inputs)[0][1:]  # (T, B, n, A)
        next_qs = agent_qs[1:] if args.double_q else target_qs
        # Trap: values of unavailable actions are never corrected, so they may be the highest
        next_qs = next_qs.masked_fill(~batch.avail_actions[1:], -math.inf)
        next_actions = next_qs.argmax(dim=-1, keepdim=True)
        next_qvals = target_qs.gather(-1, next_actions).squeeze(-1)  # (T, B, n)
        next_values = target_networks.mixer(next_qvals, batch.state[1:])  # (T, B, 1)
        targets = td_lambda_targets(batch, next_values, args.gamma, args.td_lambda)[mask]
    td_errors = targets - q_tot.view_as(targets)  # (P, 1)
    loss = td_errors.square().mean()
    metrics = {"td_loss": loss, "td_error_abs": td_errors.abs().mean()}
    metrics |= {"q_taken_mean": q_tot.mean(), "target_mean": targets.mean()}
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def update(networks, target_networks, optimizer, batch: Episode, args: Args) -> dict:
    """Take one gradient step. Returns metrics."""
    loss, metrics = qmix_loss(networks, target_networks, batch, args)
    optimizer.zero_grad()
    loss.backward()
    metrics["grad_norm"] = nn.utils.clip_grad_norm_(networks.parameters(), args.max_grad_norm)
    optimizer.step()
    return metrics


@torch.no_grad()
def select_actions(agent: Agent, envs: Environments, hidden: Tensor, epsilon=0.0) -> tuple:
    """Epsilon-greedy actions (N, n), and the next hidden states (N, n, H)."""
    arrays = (envs.obs, envs.last_actions, envs.avail_actions)
    obs, last_actions, avail_actions = (torch.from_numpy(x).to(hidden.device) for x in arrays)
    agent_qs, hidden = agent(obs[None], last_actions[None], hidden)
    actions = agent_qs[0].masked_fill(~avail_actions, -math.inf).argmax(dim=-1)
    if epsilon > 0:
        random_actions = Categorical(avail_actions.float()).sample()
        explore = torch.rand(actions.shape, device=actions.device) < epsilon  # Detail: per agent
        actions = torch.where(explore, random_actions, actions)
    return actions.cpu().numpy(), hidden


def play(agent: Agent, envs: Environments, num_episodes: int) -> tuple[list[float], list[float]]:
    """Returns and victories (0.0, 1.0) of greedy episodes after a reset."""
    agent.eval()
    N, hidden, returns, wins = envs.num_envs, agent.initial_hidden(envs.num_envs), [], []
    # Trap: the first episodes to end would be short ones, often defeats
    quota = np.bincount(np.arange(num_episodes) % N, minlength=N)
    for _ in range(EVAL_STEPS):
        actions, hidden = select_actions(agent, envs, hidden)
        hidden[envs.step(actions)] = 0
        for i, (episodic_return, _) in envs.episodes.items():
            if quota[i] > 0:
                returns.append(episodic_return)
                wins.append(envs.wins[i])
                quota[i] -= 1
        if not quota.any():
            break
    else:
        print(f"note: episodes cut off after {EVAL_STEPS} steps")
    agent.train()
    return returns, wins


def train(args: Args, folder: Path, checkpoint: dict | None) -> None:
    """Train from scratch or a checkpoint."""
    N = args.num_envs
    counts = (N, args.batch_size, args.target_update_interval, args.checkpoint_interval)
    if min(*counts, args.test_interval, args.test_nepisode, args.log_interval) < 1:
        sys.exit("error: a number or an interval is below 1")
    if args.batch_size > args.buffer_size:
        sys.exit("error: --batch-size is above --buffer-size")
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    seed_everything(args.seed, 0)
    envs = Environments(args, N)
    # Tests on StarCraft II use `envs`, and drop its unfinished episodes
    test_envs = envs if args.env_id.startswith("smac/") else Environments(args, N)
    networks = Networks(args, envs.shape).to(device)
    target_networks = Networks(args, envs.shape).to(device)
    target_networks.load_state_dict(networks.state_dict())
    parameters = list(networks.parameters())
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, args.learning_rate, fused=True)
    else:
        optimizer = torch.optim.RMSprop(parameters, args.learning_rate, alpha=0.99, eps=1e-5)
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    replay = EpisodeReplay(args.buffer_size)

    # Everything a checkpoint must hold
    parts = {"networks": networks, "target_networks": target_networks, "replay": replay}
    parts["optimizer"] = optimizer
    global_step = start = checkpoint["global_step"] if checkpoint else 0
    last_step = math.ceil(args.total_timesteps / N) * N
    if checkpoint and checkpoint["args"]["optimizer"] != args.optimizer:
        sys.exit("error: --optimizer cannot change on resuming")
    run = Run(args, folder, checkpoint, parts, last_step)
    if checkpoint and not args.anneal_lr:
        for group, lr in zip(optimizer.param_groups, learning_rates):
            kept = args.learning_rate / checkpoint["args"]["learning_rate"] * group["lr"]
            group["lr"] = lr if checkpoint["args"].get("anneal_lr") else kept

    while global_step < last_step:
        if global_step == start or global_step % args.checkpoint_interval < N:
            run.save_checkpoint(global_step)
            seed = seed_everything(args.seed, global_step)  # same when resuming
            envs.reset(seed, folder / "videos" / str(global_step) if args.capture_video else None)
            hidden, metrics = networks.agent.initial_hidden(N), {}
        if args.anneal_lr:
            for group, lr in zip(optimizer.param_groups, learning_rates):
                group["lr"] = lr * (1 - global_step / last_step)
        annealed = min(1, global_step / max(args.epsilon_anneal_time, 1))
        epsilon = 1 + annealed * (args.epsilon_finish - 1)

        # Step each environment
        actions, hidden = select_actions(networks.agent, envs, hidden, epsilon)
        dones = envs.step(actions)
        hidden[dones] = 0
        global_step += N
        replay.add(envs.finished)
        run.log_episodes(global_step, envs.episodes)
        if envs.wins:
            run.log(global_step, "charts", {"battle_won": np.mean(list(envs.wins.values()))})

        # Update on minibatches of episodes
        if len(replay.episodes) >= args.batch_size:
            replay.updates_due += args.updates_per_episode * len(envs.finished)
        while replay.updates_due >= 1:
            replay.updates_due -= 1
            batch = replay.sample(args.batch_size)
            batch = Episode(*(tensor.to(device) for tensor in batch))
            metrics = update(networks, target_networks, optimizer, batch, args)
            if not metrics["grad_norm"].isfinite():
                raise FloatingPointError(f"infinite or NaN gradient at step {global_step}")
            replay.num_updates += 1
            if replay.num_updates % args.target_update_interval == 0:
                target_networks.load_state_dict(networks.state_dict())

        if global_step % args.test_interval < N or global_step >= last_step:
            test_envs.reset(seed_everything(args.seed, global_step, 2))
            returns, wins = play(networks.agent, test_envs, args.test_nepisode)
            means = {"episodic_return": np.mean(returns), "battle_won_rate": np.mean(wins)}
            run.log(global_step, "eval", means)
            if test_envs is envs:
                envs.reset(seed_everything(args.seed, global_step, 3))
                hidden = networks.agent.initial_hidden(N)
        if global_step % args.log_interval < N or global_step >= last_step:
            run.log(global_step, "losses", metrics)
            scalars = {"learning_rate": optimizer.param_groups[0]["lr"], "epsilon": epsilon}
            run.log(global_step, "charts", scalars | {"updates": replay.num_updates})
            run.progress(global_step)

    envs.envs.close()
    test_envs.envs.close()
    if not replay.num_updates:
        print("note: no update was made")
    run.finish(global_step, "networks")


# ----- The run. Nothing below belongs to the algorithm. -----

SCRIPT = "qmix_smac"
EVAL_STEPS = 100_000  # where evaluation episodes are cut off


class Smac(gym.Env):
    """StarCraft II on a map of SMAC (Samvelyan et al. 2019), in a process of AsyncVectorEnv."""

    def __init__(self, map_name: str) -> None:
        try:
            from smac.env import StarCraft2Env
        except ImportError as error:  # Trap: PyPI's smac is another project
            sys.exit(f"error: pip install git+https://github.com/oxwhirl/smac first ({error})")
        self.env = StarCraft2Env(map_name)
        self.close = self.env.close
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `close` is called
        info = self.env.get_env_info()
        n, A = info["n_agents"], info["n_actions"]
        self.observation_space = make_space(n, A, info["obs_shape"], info["state_shape"])
        self.action_space = MultiDiscrete([A] * n)

    def observe(self) -> tuple:
        return self.env.get_obs(), self.env.get_state(), self.env.get_avail_actions()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        if self.env._episode_count == 0:
            self.env._seed = seed  # the first reset launches StarCraft II
        self.env.reset()
        # Trap: SMAC may count enemies twice in this divisor of rewards
        enemies, death = self.env.enemies.values(), self.env.reward_death_value
        rewards = [unit.health_max + unit.shield_max + death for unit in enemies]
        self.env.max_reward = sum(rewards) + self.env.reward_win
        return self.observe(), {}

    def step(self, actions: np.ndarray) -> tuple:
        reward, done, info = self.env.step(actions)  # Trap: 0, True, {} after a crash
        info = {"won": float(info.get("battle_won", math.nan))}
        return self.observe(), reward, done, False, info


def evaluate(args: Args, model: dict, folder: Path) -> list[float]:
    """Returns of greedy episodes, whose victories are added to `model`."""
    envs = Environments(args, min(args.num_envs, args.eval_episodes))
    networks = Networks(args, envs.shape)
    networks.load_state_dict(model["networks"])
    videos = folder / "videos" / "evaluation" if args.capture_video else None
    envs.reset(seed_everything(args.seed, model["global_step"], 1), videos)
    returns, wins = play(networks.agent, envs, args.eval_episodes)
    envs.envs.close()
    score = f"{np.mean(returns):.2f} +- {np.std(returns):.2f}, {np.mean(wins):.1%} won"
    print(f"evaluation: {score}, {len(returns)} episodes")
    model["battle_won"] = wins
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
