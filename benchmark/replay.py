"""What prioritised replay costs: adding 8 transitions, drawing 32, and writing 32 priorities, beside cpprb (C++).

    python benchmark/replay.py            # a quarter of an hour, quiet; the larger replay takes 7.5 GB

Each row is a full replay; times are medians of single calls on one thread. "The tree" stores nothing but priorities,
and so does cpprb here (one byte per transition). "The replay" is the whole of it: single frames written, and stacks of
four, their successors, n-step returns and weights gathered. An iteration of dqn_per_atari.py is four adds, and eight
draws and updates. Then Breakout is trained from replays that are full from the beginning, with the script's defaults,
to see which part of that time they take (the median of three runs): more than the single calls, since a draw after a
gradient step finds nothing in the processor's caches. Then full replays of frames from random play are written as
checkpoints are, and read: of Breakout, and of two games whose screens are full of noise.
Prints markdown tables and writes benchmark/results/replay.csv, replay_share.csv and replay_checkpoint.csv.
"""

import argparse
import contextlib
import csv
import importlib.metadata
import io
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from speed import machine  # noqa: E402

import dqn_per_atari as dqn  # noqa: E402

TABLES = ("calls", "share", "checkpoint")
GAMES = ("Breakout", "JourneyEscape", "YarsRevenge")  # the first is the default, the screens of the others are noisy
rng = np.random.default_rng(0)


def our_tree(size: int) -> tuple:
    """The sum tree alone. Returns three functions of no arguments: add, sample, update."""
    tree = dqn.SumTree(size)
    tree.set(np.arange(size), rng.random(size))
    head, rows = np.arange(8), None

    def add() -> None:
        nonlocal head
        tree.set(head, 1.0)
        head = (head + 8) % size

    def sample() -> None:
        nonlocal rows
        rows = tree.sample(32, rng)
        dqn.importance_weights(tree[rows], 0.4)

    return add, sample, lambda: tree.set(rows, rng.random(32) ** 0.6)


class FullReplay(dqn.Replay):
    """A replay that is full from the beginning: of grey frames, all in memory."""

    def __init__(self, args: dqn.Args, device: str = "cpu") -> None:
        super().__init__(args, device)
        self.frames[: self.rows].fill_(1)
        self.ages.fill(3)
        self.filled = self.released = self.rows
        self.tree.set(np.arange(self.rows), rng.random(self.rows))


def our_replay(size: int) -> tuple:
    """The replay with its frames."""
    replay, rows = FullReplay(dqn.Args(buffer_size=size)), None
    step = rng.integers(256, size=(8, 84, 84), dtype=np.uint8), *np.zeros((2, 8)), *np.zeros((2, 8), bool)

    def sample() -> None:
        nonlocal rows
        rows, _ = replay.sample(32, 0.4, rng)

    return lambda: replay.add(*step), sample, lambda: replay.update(rows, torch.rand(32))


def cpprb_tree(size: int) -> tuple:
    """cpprb's PrioritizedReplayBuffer."""
    from cpprb import PrioritizedReplayBuffer

    buffer, indexes = PrioritizedReplayBuffer(size, {"x": {"dtype": np.uint8}}, alpha=0.6), None
    for first in range(0, size, 4096):
        some = min(4096, size - first)
        buffer.add(x=np.zeros(some, np.uint8), priorities=rng.random(some))

    def sample() -> None:
        nonlocal indexes
        indexes = buffer.sample(32, beta=0.4)["indexes"]

    zeros = np.zeros(8, np.uint8)
    return lambda: buffer.add(x=zeros), sample, lambda: buffer.update_priorities(indexes, rng.random(32))


def share(size: int, runs: int = 3) -> dict:
    """The run with the median share of several."""
    return sorted((share_of_a_run(size) for _ in range(runs)), key=lambda row: row["sum_percent"])[runs // 2]


def share_of_a_run(size: int, steps: int = 10_016, warmup: int = 4_000) -> dict:
    """Percent of the time of training that adds, draws and updates take, from the end of the warm-up on."""
    seconds = dict.fromkeys(("add", "sample", "update"), 0.0)
    moments = []  # of the last add: the seconds so far

    def timed(name: str, part: str):
        plain = getattr(FullReplay, name)

        def method(*args):
            started = time.perf_counter()
            result = plain(*args)
            seconds[part] += time.perf_counter() - started
            if name == "add":
                moments.append({"training": time.perf_counter()} | seconds)
            return result

        return method

    parts = {"add": "add", "end": "add", "sample": "sample", "update": "update"}
    replay = type("TimedReplay", (FullReplay,), {name: timed(name, part) for name, part in parts.items()})
    args = dqn.Args(cuda=False, eval_episodes=1, learning_starts=2000, buffer_size=size, total_timesteps=steps)
    args.checkpoint_interval = 10 * steps
    plain, dqn.Replay = dqn.Replay, replay
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            dqn.train(args, Path(folder), None)
    finally:
        dqn.Replay = plain
    first, last = moments[warmup // args.num_envs], moments[-1]
    parts = {name: 100 * (last[name] - first[name]) / (last["training"] - first["training"]) for name in seconds}
    return {
        "transitions": size,
        "steps_per_second": round((steps - warmup) / (last["training"] - first["training"]), 1),
        **{f"{name}_percent": round(part, 2) for name, part in parts.items()},
        "sum_percent": round(sum(parts.values()), 2),
        "threads": args.torch_threads,
        "machine": machine(),
    }


def checkpoint(size: int, env_id: str, frames_played: int = 40_000) -> dict:
    """Megabytes and seconds of writing a full replay and reading it. The frames played are repeated to fill it."""
    args = dqn.Args(buffer_size=size, env_id=env_id)
    replay, games = dqn.Replay(args), dqn.Games(dqn.make_envs(args, args.num_envs))
    num_actions = games.envs.single_action_space.n
    pixels = games.reset(dqn.reset_seeds(1, num=args.num_envs))
    while replay.filled < min(frames_played, size):
        actions = rng.integers(num_actions, size=args.num_envs)
        games.press_fire(actions)
        frames = pixels[:, -1]
        pixels, rewards, terminations, truncations, over, final_pixels, _ = games.step(actions)
        replay.add(frames, actions, np.sign(rewards), terminations, truncations)
        if over.any():
            replay.end(np.flatnonzero(over), final_pixels[over, -1])
    played = replay.filled
    for first in range(played, size, played):
        replay.frames[first : min(first + played, size)] = replay.frames[: min(played, size - first)]
    replay.filled = size
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint_1.pt")
        started = time.perf_counter()
        dqn.write_atomically(path, {"replay": replay.state_dict()})
        seconds_to_write = time.perf_counter() - started
        checksum = zlib.crc32(replay.frames.numpy())
        del replay  # two would take 15 GB
        started = time.perf_counter()
        again = dqn.Replay(args)
        again.load_state_dict(torch.load(path, weights_only=True)["replay"])
        seconds_to_read = time.perf_counter() - started
        assert zlib.crc32(again.frames.numpy()) == checksum
        megabytes = path.stat().st_size / 1e6
    games.envs.close()
    return {
        "env_id": env_id,
        "transitions": size,
        "megabytes": round(megabytes),
        "seconds_to_write": round(seconds_to_write, 1),
        "seconds_to_read": round(seconds_to_read, 1),
        "machine": machine(),
    }


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write rows of the same columns."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def milliseconds(functions: tuple, repeats: int) -> list[float]:
    """Median milliseconds of each of the functions, called in turn."""
    seconds = [[] for _ in functions]
    for _ in range(repeats):
        for function, mine in zip(functions, seconds):
            started = time.perf_counter()
            function()
            mine.append(time.perf_counter() - started)
    return [1e3 * statistics.median(mine) for mine in seconds]


def single_calls(sizes: list[int], repeats: int, output: Path) -> None:
    """The table of single calls."""
    torch.set_num_threads(1)
    rows = []
    for size in sizes:
        programs = {"the tree": our_tree, "cpprb": cpprb_tree, "the replay": our_replay}
        for name, make in programs.items():
            add, sample, update = milliseconds(make(size), repeats)
            whole = 4 * add + 8 * (sample + update)
            times = {"add_8": add, "sample_32": sample, "update_32": update, "iteration": whole}
            rows.append({"name": name, "transitions": size} | {key: round(value, 4) for key, value in times.items()})
    versions = f"{machine()}, numpy {np.__version__}, cpprb {importlib.metadata.version('cpprb')}"
    print(f"Milliseconds ({versions})\n")
    print("| | transitions | add 8 | draw 32 | update 32 | one iteration |\n|---|---|---|---|---|---|")
    for row in rows:
        name, size, *times = row.values()
        print(f"| {name} | {size:,} | " + " | ".join(f"{value:.3f}" for value in times) + " |")
    write_csv(output, [row | {"machine": versions} for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[2**14, 2**20])
    parser.add_argument("--repeats", type=int, default=2000, help="single calls of each kind")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmark" / "results" / "replay.csv")
    args = parser.parse_args()
    if "calls" in args.tables:
        single_calls(args.sizes, args.repeats, args.output)
    for name, table in (
        ("share", lambda: [share(size) for size in args.sizes]),
        ("checkpoint", lambda: [checkpoint(args.sizes[-1], f"{game}NoFrameskip-v4") for game in GAMES]),
    ):
        if name in args.tables:
            rows = table()
            for row in rows:
                print("\n" + ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in row.items()), flush=True)
            write_csv(args.output.with_name(f"replay_{name}.csv"), rows)


if __name__ == "__main__":
    main()
