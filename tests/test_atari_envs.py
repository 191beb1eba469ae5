"""The Atari environments that three scripts share: against a plain emulator, by a2c_atari.py."""

import functools

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from ale_py import ALEInterface, roms
from conftest import logged

import a2c_atari as a2c
import a3c_atari as a3c
import dqn_per_atari as dqn


def make_args(**options):
    return a2c.Args(**dict(num_envs=2, env_threads=1, torch_threads=1, cuda=False) | options)


class Plain:
    """A game of the plain emulator: four frames per step, its own counters of lives and frames."""

    def __init__(self, args, seed, first_frame, limit):
        settings = gym.spec(args.env_id.replace("Deterministic", "NoFrameskip")).kwargs
        self.ale, self.limit = ALEInterface(), limit
        self.ale.setInt("random_seed", seed)
        self.ale.setFloat("repeat_action_probability", settings["repeat_action_probability"])
        self.ale.loadROM(roms.get_rom_path(settings["game"]))
        self.action_set = self.ale.getMinimalActionSet()
        self.begin(first_frame)

    def begin(self, first_frame):
        """FIRE for one frame, if there is such an action, then a random number of no-ops."""
        self.ale.reset_game()
        if ale_py.Action.FIRE in self.action_set:
            self.ale.act(ale_py.Action.FIRE)
        for _ in range(first_frame - self.ale.getEpisodeFrameNumber()):
            self.ale.act(ale_py.Action.NOOP)
        self.score = self.length = 0

    def step(self, action):
        """Returns the reward, whether a life was lost, whether the game is over, or truncated."""
        lives, reward, self.screens = self.ale.lives(), 0, []
        for frame in range(4):
            reward += self.ale.act(self.action_set[action])
            if self.ale.game_over():
                break
            if frame >= 2:
                self.screens.append(torch.from_numpy(self.ale.getScreenGrayscale()))
        self.score, self.length = self.score + reward, self.length + 1
        lost_life, truncated = self.ale.lives() < lives, 4 * self.length >= self.limit
        return reward, lost_life, self.ale.game_over(with_truncation=False), truncated

    def pixels(self):
        """The maximum of the last two screens; each of 84 x 84 pixels is the mean of its area."""
        height, width = self.screens[0].shape
        return shrink(height) @ torch.maximum(*self.screens).double() @ shrink(width).T


@functools.cache
def shrink(size):
    """(84, size): the share of each of `size` pixels in each of 84 that lie over them."""
    edges, pixel = torch.linspace(0, size, 85).double()[:, None], torch.arange(size)
    return (edges[1:].minimum(pixel + 1) - edges[:-1].maximum(pixel)).clamp(min=0) * 84 / size


GAMES = [("AssaultNoFrameskip-v4", 3, 250, 500, True), ("ALE/Freeway-v5", 1, 160, 300, True)]
GAMES += [("ALE/Breakout-v5", 2, 300, 10**6, False)]


@pytest.mark.parametrize("env_id, num_envs, steps, limit, episodic_life", GAMES)
def test_games_are_the_plain_emulators(limit_games, env_id, num_envs, steps, limit, episodic_life):
    """Frames, rewards, terminations, FIRE, and whole episodes, unclipped, over all lives."""
    limit_games(a2c, limit)
    args, rng = make_args(env_id=env_id, episodic_life=episodic_life), np.random.default_rng(0)
    envs = a2c.AtariEnvs(args, num_envs)
    previous = envs.reset(3, "videos")
    assert envs.obs_shape == (4, 84, 84) and not envs.video_folder  # without --capture-video
    # The frame numbers say how many no-ops there were, which the emulator's vector draws
    games = [Plain(args, 3 + n, frame, limit) for n, frame in enumerate(envs.counter)]
    assert num_envs == 1 or len({*envs.counter}) > 1
    fire = np.full(num_envs, ale_py.Action.FIRE in games[0].action_set)
    ended = lost_lives = 0
    for t in range(steps):
        actions = rng.integers(envs.num_actions, size=num_envs)
        np.testing.assert_array_equal(envs.fire, fire)
        executed = np.where(fire, envs.fire_action, actions)
        obs, next_obs, rewards, terminations, truncations, _ = envs.step(actions)
        np.testing.assert_array_equal(envs.executed_actions, executed)
        episodes = {}
        for n, game in enumerate(games):
            reward, lost_life, game_over, truncated = game.step(executed[n])
            terminated = game_over or (lost_life and episodic_life)
            done = game_over or truncated
            expected = np.sign(reward), terminated, truncated
            assert (rewards[n], terminations[n], truncations[n]) == expected, (t, n)
            assert np.array_equal(obs[n], next_obs[n]) == (not done), (t, n)
            assert np.array_equal(next_obs[n, :3], previous[n, 1:]), (t, n)
            if t % 10 == n and not done:
                np.testing.assert_allclose(obs[n, 3], game.pixels(), rtol=0, atol=1)
            fire[n] = envs.has_fire and (lost_life or done)
            lost_lives += lost_life and not game_over
            if done:
                assert (obs[n, :3] == 0).all()
                episodes[n] = (game.score, game.length)
                game.begin(envs.counter[n])
        previous = obs
        assert envs.episodes == episodes
        ended += len(episodes)
    assert ended and (lost_lives > 0) == ("Freeway" not in env_id)


@pytest.mark.quick
def test_ids_mean_what_they_mean_in_gymnasium(monkeypatch):
    for module in (a2c, a3c, dqn):
        monkeypatch.setattr(module, "AtariVectorEnv", lambda **settings: settings)
    free = dict.fromkeys(("stack_num", "img_height", "img_width"))
    gym.register_envs(ale_py)
    specs = [x for x in gym.registry.values() if str(x.entry_point).startswith("ale_py")]
    known = [x for x in specs if x.id.startswith("ALE/") or "NoFrameskip" in x.id]
    assert len(known) > 200
    assert a3c.make_atari(a3c.Args(lstm=False), 1)["stack_num"] == 4
    for spec in known:
        for env_id in (spec.id, spec.id.replace("NoFrameskip", "Deterministic")):
            settings = a2c.make_atari(make_args(env_id=env_id, frame_stack=3), 1)
            for name in ("game", "repeat_action_probability", "max_num_frames_per_episode"):
                assert settings[name] == spec.kwargs[name], env_id
            assert settings["frameskip"] == 4 and not spec.kwargs["full_action_space"]
            assert (settings["stack_num"], settings["num_threads"]) == (3, 1)
            for module in (a3c, dqn):  # whose games are the same, but for what is seen of them
                vars(args := module.Args(env_id=env_id)).update(env_threads=1)
                other = module.make_atari(args, 1)
                assert other | free == settings | free, (module.__name__, env_id)


@pytest.mark.quick
@pytest.mark.parametrize("env_id", ["Breakout-v4", "CartPole-v1", "BreakoutNoFrameSkip-v4", ""])
def test_other_ids_are_refused_in_one_line(env_id):
    with pytest.raises(SystemExit, match=r"^error: .*[^\n]*$"):
        a2c.make_atari(make_args(env_id=env_id), 1)


def test_videos_show_the_episodes_that_were_played(tmp_path, monkeypatch, limit_games):
    from imageio_ffmpeg import read_frames

    limit_games(a2c, 160)
    games, seen, saved, save = a2c.AtariEnvs, [], [], a2c.AtariEnvs.save_video

    def recorded_step(self, actions, step=a2c.AtariEnvs.step):
        result = step(self, actions)
        seen.append(result[0][0, -1].copy())
        return result

    monkeypatch.setattr(games, "step", recorded_step)
    monkeypatch.setattr(games, "save_video", lambda x: saved.append(x.video_frames) or save(x))
    flags = dict(total_timesteps=200, checkpoint_interval=100, eval_episodes=2, conv3_filters=4)
    a2c.train(make_args(env_id="ALE/Breakout-v5", capture_video=True, **flags), tmp_path, None)
    for frames, name, start in zip(saved, ("0", "100", "evaluation"), (0, 50, 100), strict=True):
        np.testing.assert_array_equal(frames, seen[start : start + 40])
        (path,) = (tmp_path / "videos" / name).glob("*.mp4")
        properties, *images = read_frames(str(path))
        assert len(images) in (39, 40) and properties["fps"] == 15, name


def test_every_truncation_ends_an_episode(limit_games):
    """Also where the next episode's counter of frames starts above where this one's ended."""
    limit_games(a2c, 24)
    envs = a2c.AtariEnvs(make_args(env_id="ALE/Breakout-v5", capture_video=True), 4)
    envs.reset(1, "videos")
    envs.save_video = None  # not to be called: the first game does not end
    ends, step, truncated = np.array([0, 1, 1, 1]), envs.envs.step, 0  # integers
    envs.envs.step = lambda x: (*(y := step(x))[:2], *(ends * y[2:4]), y[4])
    for _ in range(60):
        *_, truncations, _ = envs.step(np.zeros(4, int))
        assert truncations.dtype == envs.fire.dtype == bool
        assert set(np.flatnonzero(truncations)) <= envs.episodes.keys()
        truncated += truncations.sum()
    assert truncated > 20


class Catch(gym.Env):
    """A user's environment: catch a falling ball; without lives, FIRE or a counter of frames."""

    action_space = gym.spaces.Discrete(3)
    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, (self.ball, self.paddle) = 0, self.np_random.integers(4, size=2)
        return self.draw(), {}

    def draw(self):
        grid = np.zeros((4, 4, 4), np.uint8)
        grid[3, 3, self.paddle], grid[3, self.time, self.ball] = 128, 255
        return grid.repeat(21, 1).repeat(21, 2)

    def step(self, action):
        self.paddle = np.clip(self.paddle + (0, 1, -1)[action], 0, 3)
        self.time += 1
        reward = (self.time == 3) * (1 if self.ball == self.paddle else -1)
        return self.draw(), reward, self.time == 3, False, {}


def test_a_users_environment_is_learned(tmp_path, monkeypatch):
    """A random player scores -0.5, a perfect one 1. Alpha is smaller, for a short run."""
    options = dict(autoreset_mode=gym.vector.AutoresetMode.SAME_STEP, copy=False)
    make_envs = functools.partial(gym.vector.SyncVectorEnv, **options)
    monkeypatch.setattr(a2c, "make_atari", lambda args, num_envs: make_envs([Catch] * num_envs))
    envs = a2c.AtariEnvs(make_args(), 2)
    first, second, third = envs.reset(1, None), *(envs.step(np.zeros(2, int))[0] for _ in range(2))
    assert (first != second).any() and (second != third).any() and (first != third).any()
    options = dict(num_envs=8, total_timesteps=4800, gamma=0.9, rmsprop_alpha=0.5)
    options |= dict(learning_rate=5e-3, conv3_filters=32, eval_episodes=50, greedy=True)
    a2c.train(make_args(**options), tmp_path, None)
    scores = list((points := logged(tmp_path))["charts/episodic_return"].values())
    assert len(scores) == 200 and np.mean(scores[:20]) < -0.2 and np.mean(scores[-20:]) > 0.6
    assert points["eval/episodic_return"][4800] > 0.5
