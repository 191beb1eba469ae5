"""The peers that speed.py compares with, each set to the hyperparameters of our script.

    python benchmark/peers.py sb3_ppo --steps 100000 --threads 1

Each prints a line `point STEP SECONDS` after every update: agent steps so far, and the clock.
"""

import argparse
import functools
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # the scripts
warnings.filterwarnings("ignore")


def sb3_ppo(steps: int) -> None:
    """Stable-Baselines3's PPO with VecNormalize on HalfCheetah-v4, at the defaults of ppo_continuous.py."""
    import gymnasium as gym
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    env = VecNormalize(DummyVecEnv([lambda: gym.make("HalfCheetah-v4")]), gamma=0.99)
    network = {"pi": [64, 64], "vf": [64, 64]}
    model = PPO(
        "MlpPolicy",
        env,
        learning_rate=lambda progress: 3e-4 * progress,
        n_steps=2048,
        batch_size=64,
        n_epochs=10,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        clip_range_vf=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        policy_kwargs={"net_arch": network, "activation_fn": torch.nn.Tanh},
        seed=1,
        device="cpu",
    )
    learn(model, steps, updates_between_points=1)


def sb3_a2c(steps: int) -> None:
    """Stable-Baselines3's A2C on Breakout, 16 environments of 5 steps, with its TensorFlow-like RMSprop."""
    import ale_py
    import gymnasium as gym
    from stable_baselines3 import A2C
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    env = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", n_envs=16, seed=1), n_stack=4)
    optimizer = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5, "alpha": 0.99}}
    model = A2C("CnnPolicy", env, ent_coef=0.01, vf_coef=0.5, policy_kwargs=optimizer, seed=1, device="cpu")
    learn(model, steps, updates_between_points=10)


# DQN: 8 games of 4 steps, then 8 minibatches of 32, from 2,000 transitions on; a small replay, since only speed counts
DQN_STARTS, DQN_BUFFER = 2_000, 20_000


def sb3_dqn(steps: int) -> None:
    """Stable-Baselines3's DQN on Breakout at the defaults of dqn_per_atari.py: not double, dueling or prioritised.

    The hidden layer of 512 takes the place of the two streams of 256: as many parameters as our network.
    """
    import ale_py
    import gymnasium as gym
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    model = DQN(
        "CnnPolicy",
        VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", n_envs=8, seed=1), n_stack=4),
        learning_rate=1e-4,
        buffer_size=DQN_BUFFER,
        optimize_memory_usage=True,
        replay_buffer_kwargs={"handle_timeout_termination": False},  # the other is not to be had with the line above
        learning_starts=DQN_STARTS,
        batch_size=32,
        train_freq=4,
        gradient_steps=8,
        target_update_interval=8_000,
        max_grad_norm=0.5,
        policy_kwargs={"net_arch": [512]},
        seed=1,
        device="cpu",
    )
    learn(model, steps, updates_between_points=5)


def stacked_game():
    """Breakout with gymnasium's own wrappers, for peers that bring none."""
    import ale_py
    import gymnasium as gym

    gym.register_envs(ale_py)
    env = gym.make("BreakoutNoFrameskip-v4")
    env = gym.wrappers.AtariPreprocessing(env, terminal_on_life_loss=True)
    env = gym.wrappers.TransformReward(env, lambda reward: (reward > 0) - (reward < 0))
    return gym.wrappers.FrameStackObservation(env, 4)


class Dueling(torch.nn.Module):
    """The network of dqn_per_atari.py as anybody would write it."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        from torch.nn import Conv2d, Flatten, Linear, ReLU, Sequential

        convolutions = [Conv2d(4, 32, 8, 4), ReLU(), Conv2d(32, 64, 4, 2), ReLU(), Conv2d(64, 64, 3), ReLU()]
        self.trunk = Sequential(*convolutions, Flatten(), Linear(3136, 512), ReLU())
        self.value = Sequential(Linear(512, 256), ReLU(), Linear(256, 1))
        self.advantage = Sequential(Linear(512, 256), ReLU(), Linear(256, num_actions))

    def forward(self, pixels):
        hidden = self.trunk(torch.as_tensor(pixels).float() / 255)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(dim=1, keepdim=True)


def pfrl_dqn(steps: int) -> None:
    """PFRL's double DQN with a dueling network and proportional prioritised replay on Breakout."""
    import numpy as np
    import pfrl

    class Network(Dueling):
        def forward(self, pixels):
            return pfrl.action_value.DiscreteActionValue(super().forward(pixels))

    envs = pfrl.envs.SerialVectorEnv([stacked_game() for _ in range(8)])
    num_actions, rng = 4, np.random.default_rng(1)
    network = Network(num_actions)
    agent = pfrl.agents.DoubleDQN(
        network,
        torch.optim.Adam(network.parameters(), lr=1e-4),
        pfrl.replay_buffers.PrioritizedReplayBuffer(DQN_BUFFER, alpha=0.6, beta0=0.4, betasteps=steps / 4),
        gamma=0.99,
        explorer=pfrl.explorers.ConstantEpsilonGreedy(0.5, lambda: int(rng.integers(num_actions))),
        replay_start_size=DQN_STARTS,
        minibatch_size=32,
        update_interval=4,
        target_update_interval=8_000,
        max_grad_norm=0.5,
    )
    games = [game.reset()[0] for game in envs.envs]  # its own vector expects the interface of gym 0.21
    for t in range(0, steps, 8):
        if t % 160 == 0:
            print("point", t, time.time(), flush=True)
        actions = agent.batch_act(games)
        results = [game.step(action) for game, action in zip(envs.envs, actions)]
        games, rewards, terminations, truncations, _ = map(list, zip(*results))
        agent.batch_observe(games, rewards, terminations, truncations)
        for i, over in enumerate(terminations):
            if over or truncations[i]:
                games[i] = envs.envs[i].reset()[0]
    print("point", steps, time.time(), flush=True)


def tianshou_dqn(steps: int) -> None:
    """Tianshou's double DQN with a dueling network and prioritised replay of single frames on Breakout."""
    from tianshou.algorithm.algorithm_base import policy_within_training_step
    from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, PrioritizedVectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.torch_utils import torch_train_mode

    class Network(Dueling):
        def forward(self, obs, state=None, info=None):
            return super().forward(obs), state

    envs = DummyVectorEnv([stacked_game for _ in range(8)])
    space = envs.get_env_attr("action_space", 0)[0]
    policy = DiscreteQLearningPolicy(model=Network(space.n), action_space=space, eps_training=0.5)
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-4), gamma=0.99, target_update_freq=2_000)
    memory = {"ignore_obs_next": True, "save_only_last_obs": True, "stack_num": 4, "alpha": 0.6, "beta": 0.4}
    buffer = PrioritizedVectorReplayBuffer(DQN_BUFFER, 8, **memory)
    collector = Collector(algorithm, envs, buffer, exploration_noise=True)
    collector.reset()
    with policy_within_training_step(policy):
        for t in range(0, steps, 32):
            if t % 160 == 0:
                print("point", t, time.time(), flush=True)
            collector.collect(n_step=32)
            if t + 32 >= DQN_STARTS:
                with torch_train_mode(algorithm):
                    for _ in range(8):
                        algorithm.update(buffer, 32)
    print("point", steps, time.time(), flush=True)


def learn(model, steps: int, updates_between_points: int) -> None:
    """Train, and print a point whenever so many updates are done."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Points(BaseCallback):
        rollouts = 0

        def _on_rollout_start(self) -> None:  # the update before this rollout is done
            if self.rollouts % updates_between_points == 0:
                print("point", self.num_timesteps, time.time(), flush=True)
            self.rollouts += 1

        def _on_step(self) -> bool:
            return True

    model.learn(steps, callback=Points())
    print("point", model.num_timesteps, time.time(), flush=True)


def shared_adam(model, learning_rate: float) -> torch.optim.Adam:
    """PyTorch's Adam with its state in shared memory."""
    model.share_memory()
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for parameter in model.parameters():
        state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter)}
        state["exp_avg_sq"] = torch.zeros_like(parameter)
        optimizer.state[parameter] = {name: tensor.detach().share_memory_() for name, tensor in state.items()}
    return optimizer


def our_a3c():
    """The module of a3c_atari.py."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import a3c_atari

    return a3c_atari


def plain_learner(rank: int, workers: int, steps: int, model, optimizer, counts: torch.Tensor) -> None:
    """The worker of a3c_atari.py without its tricks: a graph built step by step, per-tensor copies and optimiser."""
    a3c = our_a3c()
    torch.set_num_threads(1)
    args = a3c.Args(num_workers=workers)
    games, rng = a3c.Games(a3c.make_envs(args, 1), False), np.random.default_rng(rank)
    agent = a3c.Agent(games.envs.single_action_space.n)
    pixels, state = games.reset([rank + 1]), agent.initial_state(1)
    while counts.sum() < steps:
        agent.load_state_dict(model.state_dict())
        state, outputs, values, actions, rewards, over = tuple(s.detach() for s in state), [], [], [], [], [False]
        while len(rewards) < args.num_steps and not over[0]:
            state = torch.lstm_cell(agent.see(torch.from_numpy(pixels)), state, *agent.lstm.all_weights[0])
            outputs.append(agent.policy_head(state[0]))
            values.append(agent.value_head(state[0])[:, 0])
            actions.append(a3c.sample(outputs[-1].detach(), rng))
            pixels, reward, terminated, truncated, over, final, _ = games.step(actions[-1])
            rewards.append(np.clip(reward, -1, 1).astype(np.float32))
        with torch.no_grad():
            last = agent.see(torch.from_numpy(final if over[0] else pixels))
            last = agent.value_head(torch.lstm_cell(last, state, *agent.lstm.all_weights[0])[0])[:, 0]
        v = torch.stack([*values, last]).detach().numpy()  # (t+1, 1)
        terminations, truncations = np.zeros((2, len(rewards), 1), bool)
        terminations[-1], truncations[-1] = terminated, truncated
        advantages = a3c.compute_gae(np.array(rewards), v[:-1], v[1:], terminations, truncations, 0.99, 1.0)
        batch = (np.array(actions), np.ones_like(advantages), advantages, advantages + v[:-1])
        batch = (torch.from_numpy(x).view(-1) for x in batch)
        loss, _ = a3c.a3c_loss(torch.cat(outputs), torch.cat(values), *batch, args)
        agent.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        for shared, local in zip(model.parameters(), agent.parameters()):
            shared.grad = local.grad
        optimizer.step()
        if over[0]:
            state = agent.initial_state(1)
        counts[rank] += len(rewards)
        if rank == 0:
            print("point", int(counts.sum()), time.time(), flush=True)


def plain_a3c(steps: int, workers: int) -> None:
    """A plain version of a3c_atari.py's own update: its network and settings, PyTorch's Adam per tensor."""
    model = our_a3c().Agent(6)
    counts = torch.zeros(workers, dtype=torch.int64).share_memory_()
    optimizer = shared_adam(model, 1e-4)
    torch.multiprocessing.start_processes(
        plain_learner, (workers, steps, model, optimizer, counts), nprocs=workers, start_method="fork"
    )


def pfrl_a3c(steps: int, workers: int) -> None:
    """PFRL's A3C at the settings of a3c_atari.py: its network on the same games, PyTorch's Adam in shared memory."""
    import pfrl
    from pfrl.agents import a3c as pfrl_a3c

    a3c = our_a3c()
    args = a3c.Args(num_workers=workers)

    class Env:
        """The game as gym had it."""

        def __init__(self, rank: int) -> None:
            self.games, self.seed = a3c.Games(a3c.make_envs(args, 1), False), rank + 1

        def reset(self):
            if self.seed is not None:
                self.pixels, self.seed = self.games.reset([self.seed]), None
            return self.pixels[0]

        def step(self, action):
            self.pixels, reward, terminated, truncated, over, final, _ = self.games.step(np.array([action]))
            obs = final[0] if over[0] else self.pixels[0]
            return obs, float(np.clip(reward[0], -1, 1)), bool(terminated[0]), {"needs_reset": bool(truncated[0])}

        def close(self):
            pass

    class See(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.agent = a3c.Agent(6)
            self.agent.lstm = self.agent.policy_head = self.agent.value_head = None

        def forward(self, pixels):
            return self.agent.see(pixels)

    policy = torch.nn.Sequential(torch.nn.Linear(256, 6), pfrl.policies.SoftmaxCategoricalHead())
    heads = pfrl.nn.Branched(policy, torch.nn.Linear(256, 1))
    model = pfrl.nn.RecurrentSequential(See(), torch.nn.LSTM(288, 256), heads)
    agent = pfrl_a3c.A3C(
        model, shared_adam(model, 1e-4), t_max=20, gamma=0.99, beta=0.01, max_grad_norm=50.0, recurrent=True
    )

    def point(env, agent, step: int) -> None:
        if step % 200 == 0:
            print("point", step, time.time(), flush=True)

    pfrl.experiments.train_agent_async(
        "pfrl", workers, lambda rank, test: Env(rank), steps=steps, eval_interval=None, agent=agent,
        random_seeds=list(range(workers)), global_step_hooks=[point],
    )  # fmt: skip


class PlainQmix:
    """QMIX's learner as the seed builds it: a cell called step by step, padding, masks, targets with a graph.

    Written here for comparison, at the hyperparameters of qmix_smac.py: episodes are padded to the limit in a replay
    that is allocated at the start, with actions as indices and as one-hot vectors; a minibatch is cut to its longest
    episode. Each step builds its inputs anew, for the target network too.
    """

    def __init__(self, shape, buffer_size: int = 5000) -> None:
        import torch.nn as nn

        self.shape, self.size, self.added = shape, buffer_size, 0
        n, A, T, S = shape.n_agents, shape.n_actions, shape.episode_limit, shape.state_dim
        self.data = {
            "obs": torch.zeros(buffer_size, T + 1, n, shape.obs_dim),
            "state": torch.zeros(buffer_size, T + 1, S),
            "avail": torch.zeros(buffer_size, T + 1, n, A, dtype=torch.int32),
            "actions": torch.zeros(buffer_size, T + 1, n, 1, dtype=torch.int64),
            "onehot": torch.zeros(buffer_size, T + 1, n, A),
            "reward": torch.zeros(buffer_size, T + 1, 1),
            "terminated": torch.zeros(buffer_size, T + 1, 1, dtype=torch.uint8),
            "filled": torch.zeros(buffer_size, T + 1, 1, dtype=torch.int64),
        }

        def agent():
            parts = {"fc1": nn.Linear(shape.obs_dim + A + n, 64), "rnn": nn.GRUCell(64, 64), "fc2": nn.Linear(64, A)}
            return nn.ModuleDict(parts)

        def mixer():
            return nn.ModuleDict(
                {
                    "w1": nn.Sequential(nn.Linear(S, 64), nn.ReLU(), nn.Linear(64, 32 * n)),
                    "b1": nn.Linear(S, 32),
                    "w2": nn.Sequential(nn.Linear(S, 64), nn.ReLU(), nn.Linear(64, 32)),
                    "v": nn.Sequential(nn.Linear(S, 32), nn.ReLU(), nn.Linear(32, 1)),
                }
            )

        self.agent, self.mixer, self.target_agent, self.target_mixer = agent(), mixer(), agent(), mixer()
        self.copy_target()
        self.parameters = [*self.agent.parameters(), *self.mixer.parameters()]
        self.optimizer = torch.optim.RMSprop(self.parameters, lr=5e-4, alpha=0.99, eps=1e-5)

    def copy_target(self) -> None:
        self.target_agent.load_state_dict(self.agent.state_dict())
        self.target_mixer.load_state_dict(self.mixer.state_dict())

    def forward(self, agent, obs, last_onehot, hidden):
        """Q (B, n, A) of one step."""
        B, n = obs.shape[:2]
        ids = torch.eye(n).unsqueeze(0).expand(B, -1, -1)
        inputs = torch.cat([x.reshape(B * n, -1) for x in (obs, last_onehot, ids)], dim=1)
        hidden = agent["rnn"](torch.relu(agent["fc1"](inputs)), hidden.reshape(-1, 64))
        return agent["fc2"](hidden).view(B, n, -1), hidden

    def unroll(self, agent, batch):
        B, T = batch["obs"].shape[:2]
        hidden, outputs = torch.zeros(B, self.shape.n_agents, 64), []
        for t in range(T):
            last = torch.zeros_like(batch["onehot"][:, 0]) if t == 0 else batch["onehot"][:, t - 1]
            values, hidden = self.forward(agent, batch["obs"][:, t], last, hidden)
            outputs.append(values)
        return torch.stack(outputs, dim=1)

    def mix(self, mixer, agent_qs, state):
        B, n = len(agent_qs), self.shape.n_agents
        state, agent_qs = state.reshape(-1, self.shape.state_dim), agent_qs.reshape(-1, 1, n)
        w1, b1 = mixer["w1"](state).abs().view(-1, n, 32), mixer["b1"](state).view(-1, 1, 32)
        hidden = torch.nn.functional.elu(torch.bmm(agent_qs, w1) + b1)
        w2 = mixer["w2"](state).abs().view(-1, 32, 1)
        return (torch.bmm(hidden, w2) + mixer["v"](state).view(-1, 1, 1)).view(B, -1, 1)

    def add(self, obs, state, avail, actions, rewards, terminated: bool) -> None:
        """Store an episode: rows (T + 1, ...) of what was seen, (T, ...) of the rest."""
        i, T = self.added % self.size, len(rewards)
        for tensor in self.data.values():
            tensor[i] = 0
        self.data["obs"][i, : T + 1], self.data["state"][i, : T + 1] = obs, state
        self.data["avail"][i, : T + 1], self.data["actions"][i, :T, :, 0] = avail, actions
        self.data["onehot"][i, :T] = torch.nn.functional.one_hot(actions, self.shape.n_actions).float()
        self.data["reward"][i, :T, 0], self.data["filled"][i, : T + 1] = rewards, 1
        self.data["terminated"][i, T - 1] = terminated
        self.added += 1

    def update(self, rng) -> None:
        chosen = torch.from_numpy(rng.choice(min(self.added, self.size), 32, replace=False))
        filled = self.data["filled"][chosen]
        length = int(filled.sum(dim=1).max())
        batch = {name: tensor[chosen][:, :length] for name, tensor in self.data.items()}
        terminated = batch["terminated"][:, :-1].float()
        mask = batch["filled"][:, :-1].float()
        mask[:, 1:] = mask[:, 1:] * (1 - terminated[:, :-1])
        values = self.unroll(self.agent, batch)
        chosen_values = values[:, :-1].gather(3, batch["actions"][:, :-1]).squeeze(3)
        target_values = self.unroll(self.target_agent, batch)[:, 1:].clone()
        target_values[batch["avail"][:, 1:] == 0] = -9999999
        detached = values.clone().detach()
        detached[batch["avail"] == 0] = -9999999
        best = detached[:, 1:].max(dim=3, keepdim=True)[1]
        target_values = target_values.gather(3, best).squeeze(3)
        q_tot = self.mix(self.mixer, chosen_values, batch["state"][:, :-1])
        next_tot = self.mix(self.target_mixer, target_values, batch["state"][:, 1:])
        targets = batch["reward"][:, :-1] + 0.99 * (1 - terminated) * next_tot
        td_errors = (q_tot - targets.detach()) * mask
        loss = (td_errors**2).sum() / mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 10)
        self.optimizer.step()


def plain_qmix(steps: int, env_id: str) -> None:
    """PlainQmix with one environment (the script's adapter), one update per episode: the seed's episode runner."""
    import numpy as np

    import qmix_smac

    rng = np.random.default_rng(1)
    envs = qmix_smac.make_envs(qmix_smac.Args(env_id=env_id), 1)
    shape = envs.shape
    n, width = shape.n_agents, shape.n_agents * shape.obs_dim
    learner = PlainQmix(shape)
    floats, avail = envs.reset([1])
    step = episodes = 0
    while step < steps:
        rows, avails, actions, rewards = [floats], [avail], [], []
        hidden, last, ended = torch.zeros(1, n, 64), torch.zeros(1, n, shape.n_actions), False
        while not ended:
            obs = torch.from_numpy(floats[:, :width]).view(1, n, -1)
            values, hidden = learner.forward(learner.agent, obs, last, hidden)
            legal = torch.from_numpy(avails[-1])
            values = values.clone()
            values[legal == 0] = -float("inf")
            epsilon = 1.0 + min(1.0, step / 100_000) * (0.05 - 1.0)
            random = (torch.rand(1, n) < epsilon).long()
            anything = torch.distributions.Categorical(legal.float()).sample()
            chosen = random * anything + (1 - random) * values.max(dim=2)[1]
            last = torch.nn.functional.one_hot(chosen, shape.n_actions).float()
            played = envs.step(chosen.numpy())
            ended, step = bool(played.ended[0]), step + 1
            rows.append(played.last_floats)
            avails.append(played.last_avail_actions)
            actions.append(chosen[0])
            rewards.append(float(played.rewards[0]))
            floats, avail = played.floats, played.avail_actions
        rows, seen = torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(avails))
        obs, state = rows[:, :width].view(len(rows), n, -1), rows[:, width:]
        learner.add(obs, state, seen, torch.stack(actions), torch.tensor(rewards), True)
        episodes += 1
        if episodes >= 32:
            learner.update(rng)
        if episodes % 200 == 0:
            learner.copy_target()
        if episodes % 20 == 0:
            print("point", step, time.time(), flush=True)


def qmix_updates(steps: int, plain: bool, shape: tuple) -> None:
    """Updates alone, on random episodes of SMAC's sizes, of a quarter of the limit to the limit."""
    import numpy as np

    import qmix_smac

    shape, args, rng = qmix_smac.Shape(*shape), qmix_smac.Args(), np.random.default_rng(1)
    n, A, obs_dim, state_dim, limit = shape
    learner, replay = PlainQmix(shape, 200) if plain else None, qmix_smac.EpisodeReplay(200, shape)
    for _ in range(200):
        T = int(rng.integers(limit // 4, limit + 1))
        rows = rng.normal(size=(T + 1, n * obs_dim + state_dim)).astype(np.float32)
        avail, actions = np.ones((T + 1, n * A), np.uint8), rng.integers(A, size=(T, n)).astype(np.uint8)
        rewards = rng.random(T).astype(np.float32)
        replay.add(qmix_smac.Episode(rows, avail, actions, rewards), True)
        if plain:
            parts = (
                rows[:, : n * obs_dim].reshape(T + 1, n, obs_dim),
                rows[:, n * obs_dim :],
                avail.reshape(T + 1, n, A),
                actions,
                rewards,
            )
            obs, state, avail, actions, rewards = map(torch.from_numpy, parts)
            learner.add(obs, state, avail, actions.long(), rewards, True)
    made = [network for _ in range(2) for network in qmix_smac.make_networks(args, shape)]
    parameters = [*made[0].parameters(), *made[1].parameters()]
    optimizer = torch.optim.RMSprop(parameters, lr=5e-4, alpha=0.99, eps=1e-5)
    for k in range(steps + 1):
        if k % 10 == 0:
            print("point", k, time.time(), flush=True)
        if plain:
            learner.update(rng)
            continue
        batch = replay.sample(32, False, rng)
        optimizer.zero_grad()
        qmix_smac.qmix_loss(*made, batch, args)[0].backward()
        torch.nn.utils.clip_grad_norm_(parameters, 10)
        optimizer.step()


SMAC_SHAPES = {"3m": (3, 9, 30, 48, 60), "2s3z": (5, 11, 80, 120, 120)}  # n, A, observation, state, limit
PEERS = {
    "sb3_ppo": sb3_ppo,
    "sb3_a2c": sb3_a2c,
    "plain_a3c": plain_a3c,
    "pfrl_a3c": pfrl_a3c,
    "sb3_dqn": sb3_dqn,
    "pfrl_dqn": pfrl_dqn,
    "tianshou_dqn": tianshou_dqn,
}
for name, shape in SMAC_SHAPES.items():
    PEERS[f"plain_qmix_{name}"] = functools.partial(plain_qmix, env_id=name)
    PEERS[f"plain_qmix_updates_{name}"] = functools.partial(qmix_updates, plain=True, shape=shape)
    PEERS[f"qmix_updates_{name}"] = functools.partial(qmix_updates, plain=False, shape=shape)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, help="of an asynchronous peer")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    PEERS[args.peer](args.steps, *([args.workers] if args.workers else []))
