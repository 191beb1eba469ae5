"""What the tricks of ppo_continuous.py gain: microseconds of a minibatch step and of an action, in turn on one thread.

    python benchmark/tricks.py        # a minute; on a quiet machine

The sizes are those of HalfCheetah at the default arguments. Prints a markdown table and writes results/tricks.csv.
"""

import csv
import functools
import statistics
import sys
import time

import torch
from run import ROOT

sys.path.insert(0, str(ROOT))
import ppo_continuous as ppo

OBS_DIM, ACTION_DIM, MINIBATCH, REPEATS, CALLS = 17, 6, 64, 15, 100


def autograd_step(agent, args, optimizer, minibatch) -> None:
    """A minibatch step as one writes it first: autograd on the module, torch's fused Adam and clipping."""
    obs, actions, *rest = minibatch
    loss, _ = ppo.ppo_loss(*agent(obs, actions), *rest, args)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    args, agent = ppo.Args(), ppo.Agent(OBS_DIM, ACTION_DIM)
    rows = torch.randn(MINIBATCH, OBS_DIM), torch.randn(MINIBATCH, ACTION_DIM)
    minibatch = (*rows, torch.randn(MINIBATCH) - 8.5, *torch.randn(3, MINIBATCH))
    theta = torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()
    state = (theta, torch.zeros_like(theta), torch.zeros_like(theta), *torch.tensor([3e-4, 1.0]), minibatch)
    step = functools.partial(ppo.minibatch_step, ppo.Agent(OBS_DIM, ACTION_DIM).to("meta"), args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5, fused=True)
    obs = torch.randn(1, OBS_DIM)
    module, function = torch.inference_mode()(agent.actor), agent.numpy_actor()
    programs = {
        "minibatch step: autograd and torch.optim": lambda: autograd_step(agent, args, optimizer, minibatch),
        "minibatch step: traced (the default)": functools.partial(ppo.straight_line(step, *state), *state),
        "minibatch step: --compile": functools.partial(
            torch.compile(step, fullgraph=True, options={"cpp_wrapper": True}), *state
        ),
        "mean action: the module": lambda: module(obs),
        "mean action: numpy (the default)": lambda: function(obs.numpy()),
    }
    times = {name: [] for name in programs}
    for program in programs.values():
        for _ in range(20):
            program()
    for _ in range(REPEATS):
        for name, program in programs.items():
            started = time.perf_counter()
            for _ in range(CALLS):
                program()
            times[name].append(1e6 * (time.perf_counter() - started) / CALLS)
    print("| | median us | least us |\n|---|---|---|")
    with open(ROOT / "benchmark" / "results" / "tricks.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["program", "median_us", "least_us"])
        for name, values in times.items():
            row = [f"{statistics.median(values):.1f}", f"{min(values):.1f}"]
            print(f"| {name} | {' | '.join(row)} |")
            writer.writerow([name, *row])


if __name__ == "__main__":
    main()
