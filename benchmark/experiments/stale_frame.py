"""The last observation of an episode that ale-py truncates has a stale newest frame.

    python benchmark/experiments/stale_frame.py

The same actions are played from the same seed with a limit of 400 frames (100 steps of four) and
without. At step 100 both emulators have done the same, so the four frames must be the same.

For ale-py's tracker: "AtariVectorEnv 0.12.1: the last observation of a truncated episode has a
stale newest frame. In PreprocessedEnv::step the loop over skipped frames breaks at elapsed_steps_
>= max_episode_steps_ before the screen is captured, so process_screen takes the maximum of the
previous step's screen and of this step's third frame. Both NEXT_STEP's observation and SAME_STEP's
final_obs show it. Capturing the screen before the break would fix it."
"""

import gymnasium as gym
import numpy as np
from ale_py.vector_env import AtariVectorEnv

LIMIT = 400


def frames_at_the_limit(limit: int) -> np.ndarray:
    """The stack of four frames (4, 84, 84) that step LIMIT / 4 of a random play leads to."""
    mode, rng = gym.vector.AutoresetMode.SAME_STEP, np.random.default_rng(1)
    options = dict(
        noop_max=1, use_fire_reset=False, max_num_frames_per_episode=limit, autoreset_mode=mode
    )
    envs = AtariVectorEnv(
        "breakout", 1, repeat_action_probability=0.0, episodic_life=False, **options
    )
    envs.reset(seed=np.array([1]))
    for _ in range(LIMIT // 4):
        obs, _, _, truncations, info = envs.step(rng.integers(4, size=1))
    return (info["final_obs"] if truncations[0] else obs)[0]


truncated, whole = frames_at_the_limit(LIMIT), frames_at_the_limit(108_000)
for name, one, other in zip(("oldest", "second", "third", "newest"), truncated, whole):
    print(f"{name} frame: {'the same' if np.array_equal(one, other) else 'differs'}")
