"""What the tricks of the scripts gain, each beside the way one writes it first, in turn on one thread.

    python benchmark/tricks.py        # about two minutes; on a quiet machine

The sizes are those of each script's default arguments. Prints a markdown table and writes results/tricks.csv.
"""

import argparse
import csv
import functools
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from run import ROOT
from speed import machine

sys.path.insert(0, str(ROOT))
import a2c_atari as a2c
import a3c_atari as a3c
import dqn_per_atari as dqn
import ppo_continuous as ppo

ROUNDS, SECONDS = 15, 0.1  # each program runs for about so many seconds in each round


def ppo_programs() -> dict:
    """A minibatch of HalfCheetah's size, and the action in an evaluation."""

    def autograd_step() -> None:
        obs, actions, *rest = minibatch
        loss, _ = ppo.ppo_loss(*agent(obs, actions), *rest, args)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()

    args, agent = ppo.Args(), ppo.Agent(17, 6)
    minibatch = (torch.randn(64, 17), torch.randn(64, 6), torch.randn(64) - 8.5, *torch.randn(3, 64))
    theta = torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()
    state = (theta, torch.zeros_like(theta), torch.zeros_like(theta), *torch.tensor([3e-4, 1.0]), minibatch)
    step = functools.partial(ppo.minibatch_step, ppo.Agent(17, 6).to("meta"), args)
    compiled = torch.compile(step, fullgraph=True, options={"cpp_wrapper": True})
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5, fused=True)
    obs = torch.randn(1, 17)
    module, function = torch.inference_mode()(agent.actor), agent.numpy_actor()
    return {
        "ppo_continuous: minibatch step, autograd and torch.optim": autograd_step,
        "ppo_continuous: minibatch step, traced (the default)": functools.partial(
            ppo.straight_line(step, *state), *state
        ),
        "ppo_continuous: minibatch step, --compile": functools.partial(compiled, *state),
        "ppo_continuous: mean action, the module": lambda: module(obs),
        "ppo_continuous: mean action, numpy (the default)": lambda: function(obs.numpy()),
    }


def a2c_programs() -> dict:
    """The convolutions of a batch of 80, there and back."""

    def trunk(layout: torch.memory_format) -> None:
        agent.trunk(pixels.contiguous(memory_format=layout).float().div_(255)).sum().backward()

    agent = a2c.Agent(4)
    pixels = torch.randint(256, (80, 4, 84, 84), dtype=torch.uint8)
    return {
        "a2c_atari: trunk of 80 frames and gradient, contiguous": lambda: trunk(torch.contiguous_format),
        "a2c_atari: trunk of 80 frames and gradient, channels_last (the default)": lambda: trunk(torch.channels_last),
    }


def a3c_programs() -> dict:
    """An action, a rollout of 20 with its gradient, and a step of Adam."""

    def contiguous() -> None:
        frames = pixels[:, :, 9:51].float()
        std, mean = torch.std_mean(frames, dim=(1, 2, 3), keepdim=True)
        agent.trunk(frames.sub_(mean).div_(std.clamp(min=1)))

    def steps(with_values: bool) -> tuple:
        state, logits, values = agent.initial_state(1), [], []
        for _ in range(20):
            rows, state = agent.step(pixels, state)
            logits.append(rows)
            if with_values:
                values.append(agent.value_head(state[0]))
        return torch.cat(logits), *values

    def graph() -> None:
        logits, *values = steps(with_values=True)
        (F.log_softmax(logits, -1).sum() + torch.cat(values).sum()).backward()

    def batch() -> None:
        with torch.no_grad():
            steps(with_values=False)
        logits, values = agent(pixels.expand(20, -1, -1, -1), agent.initial_state(1))
        (F.log_softmax(logits, -1).sum() + values.sum()).backward()

    agent = a3c.Agent(6)
    pixels = torch.randint(256, (1, 1, 55, 42), dtype=torch.uint8)
    theta, grad = a3c.flatten_parameters(agent)
    grad.normal_()
    moments, single = torch.zeros(2, len(theta)), torch.optim.Adam(agent.parameters(), lr=1e-9, foreach=False)
    no_grad = torch.no_grad()
    return {
        "a3c_atari: convolutions of one frame, contiguous": no_grad(contiguous),
        "a3c_atari: convolutions of one frame, channels_last (the default)": no_grad(lambda: agent.see(pixels)),
        "a3c_atari: one action": no_grad(lambda: agent.step(pixels, agent.initial_state(1))),
        "a3c_atari: 20 steps and gradient, a graph step by step": graph,
        "a3c_atari: 20 steps and gradient, once more as a batch (the default)": batch,
        "a3c_atari: Adam, tensor by tensor": single.step,
        "a3c_atari: Adam, one vector (the default)": lambda: a3c.shared_adam_step(theta, grad, moments, 1000, 1e-9),
    }


def dqn_programs() -> dict:
    """Frames of a minibatch, 32 times 4 and their successors; what the convolutions take of the first half; Adam."""

    def adam(flush: bool) -> None:
        torch.set_flush_denormal(flush)
        for state in optimizer.state.values():
            state["exp_avg"].fill_(1e-40)  # as of units that died a thousand updates ago
        optimizer.step()
        torch.set_flush_denormal(False)

    frames = torch.zeros(20_000, 84 * 84, dtype=torch.uint8)
    rows = torch.randint(len(frames), (32, 8))
    flat = rows.ravel()
    network = dqn.QNetwork(4)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-9, fused=True)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    obs = frames.index_select(0, flat).view(32, 8, 84, 84)[:, :4]
    return {
        "dqn_per_atari: frames of a minibatch, indexed": lambda: frames[rows],
        "dqn_per_atari: frames of a minibatch, index_select (the default)": lambda: frames.index_select(0, flat),
        "dqn_per_atari: Adam where all units are dead": lambda: adam(flush=False),
        "dqn_per_atari: Adam where all units are dead, numbers below 1e-38 flushed to zero (the default)": lambda: adam(
            flush=True
        ),
        "dqn_per_atari: 32 observations scaled, turned as floats": lambda: (
            obs.float().div_(255).contiguous(memory_format=torch.channels_last)
        ),
        "dqn_per_atari: 32 observations scaled, turned as bytes (the default)": lambda: network.scale(obs),
    }


def timed(program, calls: int) -> float:
    """Microseconds of one call."""
    started = time.perf_counter()
    for _ in range(calls):
        program()
    return 1e6 * (time.perf_counter() - started) / calls


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    programs = {}
    for each in (ppo_programs, a2c_programs, a3c_programs, dqn_programs):
        programs |= each()
    calls, times = {}, {name: [] for name in programs}
    for name, program in programs.items():
        timed(program, 10)
        calls[name] = max(1, int(1e6 * SECONDS / timed(program, 10)))
    for _ in range(ROUNDS):
        for name, program in programs.items():
            times[name].append(timed(program, calls[name]))
    print("| | median us | least us |\n|---|---|---|")
    with open(ROOT / "benchmark" / "results" / "tricks.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["program", "median_us", "least_us", "machine"])
        for name, values in times.items():
            row = [f"{statistics.median(values):.1f}", f"{min(values):.1f}"]
            print(f"| {name} | {' | '.join(row)} |")
            writer.writerow([name, *row, machine()])


if __name__ == "__main__":
    main()
