"""Compute the test vectors in vectors/ from definitions.

    python tools/make_vectors.py            # rewrites vectors/*.json
    python tools/make_vectors.py FOLDER     # writes them elsewhere

Only the standard library is used: neither the scripts nor any library they are checked against.
Sums are written as in the papers (double sums, no recursions), numbers are fractions or decimals of
60 digits, and gradients are central differences in that precision, accurate to about 30 digits.
vectors/README.md describes the files.

Inputs are multiples of 1/64, exact in float32, except for hyperparameters such as gamma = 0.99.
"""

import decimal
import itertools
import json
import random
import sys
from decimal import Decimal
from fractions import Fraction
from math import isfinite
from pathlib import Path

decimal.getcontext().prec = 60
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")

EXACT = {"rtol": 0.0, "atol": 0.0}
USUAL = {"float32": {"rtol": 1e-5, "atol": 1e-5}, "float64": {"rtol": 1e-11, "atol": 1e-11}}
INTEGERS = {"float32": EXACT, "float64": EXACT}


# -------------------------------------------------------------------------------------------------
# Numbers and nested lists
# -------------------------------------------------------------------------------------------------


def dec(x) -> Decimal:
    """A number as a decimal of 60 digits."""
    if isinstance(x, Fraction):
        return Decimal(x.numerator) / Decimal(x.denominator)
    return Decimal(x)


def decs(x):
    """Decimals of a nested list."""
    return [decs(item) for item in x] if isinstance(x, list) else dec(x)


def draw(rng: random.Random, shape: list[int], low: int = -2, high: int = 2):
    """A nested list of fractions in [low, high), multiples of 1/64."""
    if not shape:
        return Fraction(int(rng.random() * 64 * (high - low)), 64) + low
    return [draw(rng, shape[1:], low, high) for _ in range(shape[0])]


def fill(shape: list[int], value):
    """A nested list of one value."""
    return [fill(shape[1:], value) for _ in range(shape[0])] if shape else value


def entries(x, index=()):
    """All (index, number) of a nested list."""
    if isinstance(x, list):
        for i, item in enumerate(x):
            yield from entries(item, (*index, i))
    else:
        yield list(index), x


def gradient(function, x: list[Decimal]) -> list[Decimal]:
    """Central differences of a function of a flat list; the error is of the order 1e-36."""
    h = Decimal("1e-18")
    result = []
    for i in range(len(x)):
        above = function([*x[:i], x[i] + h, *x[i + 1 :]])
        below = function([*x[:i], x[i] - h, *x[i + 1 :]])
        result.append(((above - below) / (2 * h)).quantize(Decimal("1e-30")))
    return result


def flat(rows: list[list]) -> list:
    return [x for row in rows for x in row]


def rows_of(x: list, width: int) -> list[list]:
    return [x[i : i + width] for i in range(0, len(x), width)]


def mean(x: list):
    return sum(x) / len(x)


def log_softmax(logits: list[Decimal]) -> list[Decimal]:
    total = sum(x.exp() for x in logits).ln()
    return [x - total for x in logits]


def clip(x, low, high):
    return min(max(x, low), high)


# -------------------------------------------------------------------------------------------------
# Cases and files
# -------------------------------------------------------------------------------------------------


def plain(x):
    """Python's floats, integers, booleans and strings, as written to JSON."""
    if isinstance(x, list):
        return [plain(item) for item in x]
    return float(x) if isinstance(x, Fraction | Decimal) else x


def case(operation, name, inputs, outputs, wrong, tolerance=USUAL) -> dict:
    """One case. `wrong` lists (mistake, name of an output, its wrong values) or only a sentence.

    Of the wrong values the one farthest from the right value is kept, with its index.
    """
    mistakes = []
    for item in wrong:
        if isinstance(item, str):
            mistakes.append({"mistake": item})
            continue
        mistake, output, values = item
        right = dict((tuple(index), number) for index, number in entries(outputs[output]))
        index, value = max(
            entries(values), key=lambda pair: abs(dec(pair[1]) - dec(right[tuple(pair[0])]))
        )
        truth = float(right[tuple(index)])
        for allowed in tolerance.values():  # a wrong value fails at either precision
            limit = 2 * (allowed["atol"] + allowed["rtol"] * abs(truth))
            assert abs(float(value) - truth) > limit, (operation, name, mistake)
        mistakes.append({"mistake": mistake, "output": output, "at": index, "value": plain(value)})
    assert mistakes and tolerance.keys() == {"float32", "float64"}, (operation, name)
    assert all(isfinite(x) for values in outputs.values() for _, x in entries(values))
    return {
        "operation": operation,
        "name": name,
        "inputs": {key: plain(value) for key, value in inputs.items()},
        "outputs": {key: plain(value) for key, value in outputs.items()},
        "tolerance": tolerance,
        "wrong": mistakes,
    }


def text(subject: str, cases: list[dict]) -> str:
    """The JSON of a subject, one field a line."""
    lines = ["{", f'"subject": {json.dumps(subject)},', '"format": 1,', '"cases": [']
    for number, item in enumerate(cases):
        lines.append("{")
        for key, value in item.items():
            end = "" if key == "wrong" else ","
            if key in ("inputs", "outputs"):
                lines.append(f'  "{key}": {{')
                fields = [
                    f"    {json.dumps(name)}: {json.dumps(field)}" for name, field in value.items()
                ]
                lines.append(",\n".join(fields))
                lines.append(f"  }}{end}")
            elif key == "wrong":
                lines.append('  "wrong": [')
                lines.append(",\n".join(f"    {json.dumps(mistake)}" for mistake in value))
                lines.append("  ]")
            else:
                lines.append(f"  {json.dumps(key)}: {json.dumps(value)}{end}")
        lines.append("}" if number == len(cases) - 1 else "},")
    return "\n".join([*lines, "]", "}", ""])


# -------------------------------------------------------------------------------------------------
# Generalized advantage estimation and n-step returns
# -------------------------------------------------------------------------------------------------


def gae_by_definition(rewards, values, next_values, cut_bootstrap, cut_sum, gamma, decay):
    r"""A_t = \sum_l decay^l \delta_{t+l}, to the first `cut_sum` or the last row. Lists (T, N)."""
    T, N = len(rewards), len(rewards[0])
    advantages = fill([T, N], Fraction(0))
    for t, n in itertools.product(range(T), range(N)):
        for k in range(t, T):
            bootstrap = 0 if cut_bootstrap[k][n] else next_values[k][n]
            delta = rewards[k][n] + gamma * bootstrap - values[k][n]
            advantages[t][n] += decay ** (k - t) * delta
            if cut_sum[k][n]:
                break
    return advantages


def elementwise(function, a, b):
    """A function of two arrays (T, N)."""
    return [[function(x, y) for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def either(a, b):
    return elementwise(lambda x, y: x or y, a, b)


def add(a, b):
    return elementwise(lambda x, y: x + y, a, b)


def gae_case(name, rewards, values, next_values, terminations, truncations, lam, mistakes) -> dict:
    gamma, lam = Fraction("0.99"), Fraction(lam)
    ends = either(terminations, truncations)
    T, N = len(rewards), len(rewards[0])

    def gae(cut_bootstrap=terminations, cut_sum=ends, next_values=next_values, decay=gamma * lam):
        return gae_by_definition(rewards, values, next_values, cut_bootstrap, cut_sum, gamma, decay)

    right = gae()
    shifted = values[1:] + [next_values[-1]]
    never = fill([T, N], False)
    truncation_first = elementwise(lambda x, y: x and not y, terminations, truncations)
    late = [fill([N], False)] + ends[:-1]
    no_edge = next_values[:-1] + [fill([N], Fraction(0))]
    sentences = {
        "truncation": "a truncation is taken for a termination (no bootstrap)",
        "next row": "V of the next row stands for V of the final observation",
        "no ends": "bootstraps after a termination",
        "chain": "the sum is not cut at a truncation",
        "both": "bootstraps where an episode is terminated and truncated at once",
        "late": "ends are one row late (stored before the step, read as after it)",
        "edge": "no bootstrap at the batch's last row",
        "lambda": "the sum decays by lambda instead of gamma lambda",
    }
    results = {
        "truncation": gae(cut_bootstrap=ends),
        "next row": gae(next_values=shifted),
        "no ends": gae(cut_bootstrap=never),
        "chain": gae(cut_sum=terminations),
        "both": gae(cut_bootstrap=truncation_first),
        "late": gae(late, late),
        "edge": gae(next_values=no_edge),
        "lambda": gae(decay=lam),
    }
    inputs = {
        "rewards": rewards,
        "values": values,
        "next_values": next_values,
        "terminations": terminations,
        "truncations": truncations,
        "gamma": gamma,
        "gae_lambda": lam,
    }
    wrong = [(sentences[key], "advantages", results[key]) for key in mistakes]
    return case("gae", name, inputs, {"advantages": right, "returns": add(right, values)}, wrong)


def n_step_return_case(
    name, rewards, values, next_values, terminations, truncations, mistakes
) -> dict:
    r"""R_t = \sum_k gamma^k r_{t+k} + gamma^K V, to the end of batch or episode: [A3C] Alg. S3."""
    gamma = Fraction("0.99")
    T, N = len(rewards), len(rewards[0])
    ends = either(terminations, truncations)

    def returns(cut_bootstrap):
        result = fill([T, N], Fraction(0))
        for t, n in itertools.product(range(T), range(N)):
            last = next((k for k in range(t, T) if ends[k][n]), T - 1)
            result[t][n] = sum(gamma ** (k - t) * rewards[k][n] for k in range(t, last + 1))
            if not cut_bootstrap[last][n]:
                result[t][n] += gamma ** (last - t + 1) * next_values[last][n]
        return result

    last_row = fill([T - 1, N], False) + [fill([N], True)]
    sentences = {
        "truncation": "a truncation is taken for a termination (no bootstrap)",
        "no ends": "bootstraps after a termination",
        "edge": "no bootstrap at the batch's last row",
    }
    results = {
        "truncation": returns(ends),
        "no ends": returns(fill([T, N], False)),
        "edge": returns(either(terminations, last_row)),
    }
    inputs = {
        "rewards": rewards,
        "values": values,
        "next_values": next_values,
        "terminations": terminations,
        "truncations": truncations,
        "gamma": gamma,
    }
    right = returns(terminations)
    minus_values = [[-x for x in row] for row in values]
    outputs = {"returns": right, "advantages": add(right, minus_values)}
    wrong = [(sentences[key], "returns", results[key]) for key in mistakes]
    return case("n_step_return", name, inputs, outputs, wrong)


def episode_values(rng, T, N, ends):
    """Random values, and next_values equal to those of the next row except at ends."""
    values = draw(rng, [T, N])
    next_values = values[1:] + [draw(rng, [N])]
    next_values = elementwise(lambda v, end: draw(rng, []) if end else v, next_values, ends)
    return values, next_values


def make_gae() -> list[dict]:
    rng = random.Random(1)
    cases = []
    layouts = [  # name, T, N, terminations, truncations, the mistakes that show
        ("no end", 5, 1, [], [], ["edge", "lambda"]),
        ("termination", 5, 1, [(2, 0)], [], ["no ends", "late"]),
        ("truncation", 5, 1, [], [(2, 0)], ["truncation", "next row", "chain"]),
        ("terminated and truncated at once", 5, 1, [(2, 0)], [(2, 0)], ["both"]),
        ("termination at the first row", 4, 1, [(0, 0)], [], ["no ends", "late"]),
        ("truncation at the first row", 4, 1, [], [(0, 0)], ["truncation", "next row", "chain"]),
        ("termination at the last row", 4, 1, [(3, 0)], [], ["no ends"]),
        ("truncation at the last row", 4, 1, [], [(3, 0)], ["truncation", "edge"]),
        ("two episodes of one step", 4, 1, [(1, 0)], [(2, 0)], ["truncation", "no ends", "chain"]),
        (
            "three environments",
            8,
            3,
            [(2, 0), (7, 1), (4, 2)],
            [(5, 0), (3, 1), (4, 2)],
            ["truncation", "next row", "no ends", "chain", "both", "late", "edge", "lambda"],
        ),
    ]
    for name, T, N, terminated, truncated, mistakes in layouts:
        terminations, truncations = fill([T, N], False), fill([T, N], False)
        for t, n in terminated:
            terminations[t][n] = True
        for t, n in truncated:
            truncations[t][n] = True
        rewards = draw(rng, [T, N])
        values, next_values = episode_values(rng, T, N, either(terminations, truncations))
        arrays = (rewards, values, next_values, terminations, truncations)
        cases.append(gae_case(name, *arrays, "0.95", mistakes))
        known = [key for key in mistakes if key in ("truncation", "no ends", "edge")]
        if known:
            cases.append(n_step_return_case(name, *arrays, known))
        if N == 3:
            one_step = [key for key in mistakes if key not in ("chain", "lambda")]
            cases.append(gae_case(name + ", lambda 0: one-step errors", *arrays, "0", one_step))
            cases.append(
                gae_case(name + ", lambda 1: n-step returns minus values", *arrays, "1", mistakes)
            )
    # By hand: rewards 1, values 0 but for the final observation's; the sentence of issue and README
    rewards, values = fill([3, 1], Fraction(1)), fill([3, 1], Fraction(0))
    next_values = [[Fraction(0)], [Fraction(0)], [Fraction(10)]]
    arrays = (rewards, values, next_values, fill([3, 1], False), [[False], [False], [True]])
    cases.append(gae_case("rewards of 1, a time limit at V = 10", *arrays, "1", ["truncation"]))
    return cases


# -------------------------------------------------------------------------------------------------
# PPO
# -------------------------------------------------------------------------------------------------


def ppo_parts(logprobs, values, entropy, batch, options) -> dict:
    """PPO's loss and metrics; decimals (B,). `options`: hyperparameters and mistakes to make."""
    B, c = len(logprobs), dec(options["clip_coef"])
    advantages = batch["advantages"]
    if options["norm_adv"]:
        average = mean(advantages)
        divisor = B if options.get("biased std") else B - 1
        std = (sum((a - average) ** 2 for a in advantages) / divisor).sqrt()
        advantages = [(a - average) / (std + Decimal("1e-8")) for a in advantages]
    logratios = [new - old for new, old in zip(logprobs, batch["old_logprobs"], strict=True)]
    ratios = [x.exp() for x in logratios]
    policy, value = Decimal(0), Decimal(0)
    for i in range(B):
        unclipped = ratios[i] * advantages[i]
        clipped = clip(ratios[i], 1 - c, 1 + c) * advantages[i]
        pick = max if options.get("optimistic") else min
        policy -= pick(unclipped, clipped)
        error = (values[i] - batch["returns"][i]) ** 2
        if options["clip_vloss"]:
            old = batch["old_values"][i]
            moved = old + clip(values[i] - old, -c, c)
            pick = min if options.get("value min") else max
            error = pick(error, (moved - batch["returns"][i]) ** 2)
        value += error
    policy_loss, value_loss = policy / B, value / B / (1 if options.get("no half") else 2)
    return {
        "loss": policy_loss
        - dec(options["ent_coef"]) * mean(entropy)
        + dec(options["vf_coef"]) * value_loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy_mean": mean(entropy),
        "old_approx_kl": -mean(logratios),
        "approx_kl": mean([ratio - 1 - x for ratio, x in zip(ratios, logratios, strict=True)]),
        "clipfrac": mean([Decimal(abs(ratio - 1) > c) for ratio in ratios]),
    }


def ppo_outputs(batch, options) -> dict:
    logprobs, values, entropy = batch["logprobs"], batch["values"], batch["entropy"]

    def loss(logprobs=logprobs, values=values, entropy=entropy):
        return ppo_parts(logprobs, values, entropy, batch, options)["loss"]

    outputs = ppo_parts(logprobs, values, entropy, batch, options)
    outputs["grad_logprobs"] = gradient(lambda x: loss(logprobs=x), logprobs)
    outputs["grad_values"] = gradient(lambda x: loss(values=x), values)
    outputs["grad_entropy"] = gradient(lambda x: loss(entropy=x), entropy)
    return outputs


def ppo_case(name, batch, options, wrong) -> dict:
    """`wrong` lists (sentence, output, options that make the mistake)."""
    exact = {key: decs(value) for key, value in batch.items()}
    outputs = ppo_outputs(exact, options)
    mistakes = []
    for item in wrong:
        if isinstance(item, str) or not isinstance(item[2], dict):
            mistakes.append(item)
        else:
            mistakes.append((item[0], item[1], ppo_outputs(exact, options | item[2])[item[1]]))
    inputs = batch | {
        key: Fraction(value) if isinstance(value, str) else value for key, value in options.items()
    }
    return case("ppo_loss", name, inputs, outputs, mistakes)


def make_ppo() -> list[dict]:
    rng = random.Random(2)
    F = Fraction
    options = {
        "clip_coef": "0.2",
        "vf_coef": "0.5",
        "ent_coef": "0",
        "norm_adv": False,
        "clip_vloss": False,
    }
    single = {
        "logprobs": [F(-1)],
        "entropy": [F(1)],
        "values": [F(0)],
        "old_logprobs": [F(-1)],
        "old_values": [F(0)],
        "advantages": [F(1)],
        "returns": [F(0)],
    }
    best = {"optimistic": True}
    cases = []
    for where, logratio in (("inside", F(1, 8)), ("above", F(1, 2)), ("below", F(-1, 2))):
        for advantage in (2, -2):
            wrong = [("the ratio is inverted", "policy_loss", -advantage * dec(-logratio).exp())]
            if where != "inside":
                wrong = [("the larger of the two terms is taken", "policy_loss", best)]
            if (where, advantage) in (("above", -2), ("below", 2)):
                mistake = "the ratio is clipped without the minimum: no gradient"
                wrong.append((mistake, "grad_logprobs", best))
            batch = single | {"logprobs": [F(-1) + logratio], "advantages": [F(advantage)]}
            name = f"A {'>' if advantage > 0 else '<'} 0, ratio {where} the clip range"
            cases.append(ppo_case(name, batch, options, wrong))

    clipped_values = options | {"clip_vloss": True}
    smaller = ("the smaller of the two errors is taken", "value_loss", {"value min": True})
    half = ("the factor 1/2 is missing", "value_loss", {"no half": True})
    unclipped = {"clip_vloss": False}
    values = [
        ("value within the clip range", F(1, 8), F(2), [half]),
        (
            "value moved too far towards the return: clipped, no gradient",
            F(1),
            F(2),
            [half, smaller, ("values are not clipped", "grad_values", unclipped)],
        ),
        (
            "value moved away from the return: not clipped",
            F(-1),
            F(2),
            [
                half,
                smaller,
                (
                    "the clipped error is taken always: no gradient",
                    "grad_values",
                    {"value min": True},
                ),
            ],
        ),
    ]
    for name, value, target, wrong in values:
        cases.append(
            ppo_case(name, single | {"values": [value], "returns": [target]}, clipped_values, wrong)
        )

    def large(B):
        old_logprobs = draw(rng, [B], -3, 0)
        logprobs = [x + y for x, y in zip(old_logprobs, draw(rng, [B], -1, 1))]
        return {
            "logprobs": logprobs,
            "entropy": draw(rng, [B], 0, 2),
            "values": draw(rng, [B]),
            "old_logprobs": old_logprobs,
            "old_values": draw(rng, [B]),
            "advantages": draw(rng, [B], -3, 4),
            "returns": draw(rng, [B]),
        }

    everything = options | {"ent_coef": "0.01", "norm_adv": True, "clip_vloss": True}
    everything |= {"clip_coef": "0.3", "vf_coef": "0.75"}
    batch = large(4)
    biased = (
        "the standard deviation is divided by B instead of B - 1",
        "policy_loss",
        {"biased std": True},
    )
    raw = ("advantages are not normalized", "policy_loss", {"norm_adv": False})
    cases.append(
        ppo_case("normalized advantages", batch, options | {"norm_adv": True}, [biased, raw])
    )
    batch = large(16)
    exact = {key: decs(value) for key, value in batch.items()}
    logratios = [
        new - old for new, old in zip(exact["logprobs"], exact["old_logprobs"], strict=True)
    ]
    quadratic = mean([x**2 / 2 for x in logratios])
    swapped = mean([(-x).exp() - 1 + x for x in logratios])
    one_sided = mean([Decimal(x.exp() - 1 > Decimal("0.3")) for x in logratios])
    wrong = [
        biased,
        half,
        smaller,
        ("the entropy is added to the loss", "grad_entropy", [Decimal("0.01") / 16] * 16),
        ("the mean of logratio squared over two is taken for approx_kl", "approx_kl", quadratic),
        ("old and new policy are exchanged in approx_kl", "approx_kl", swapped),
        ("old and new policy are exchanged in old_approx_kl", "old_approx_kl", mean(logratios)),
        ("clipfrac counts one side only", "clipfrac", one_sided),
    ]
    cases.append(ppo_case("everything, 16 samples", batch, everything, wrong))
    cases.append(gaussian_case(rng))
    return cases


def gaussian_case(rng) -> dict:
    """Log-probability and entropy of a diagonal Gaussian, summed over an action's dimensions."""
    B, A = 3, 2
    means, actions, log_std = (
        draw(rng, [B, A]),
        draw(rng, [B, A]),
        [Fraction(-1, 2), Fraction(1, 4)],
    )

    def density(i, stds):
        total = Decimal(1)
        for j in range(A):
            z = (dec(actions[i][j]) - dec(means[i][j])) / stds[j]
            total *= (-z * z / 2).exp() / (stds[j] * (2 * PI).sqrt())
        return total

    stds = [dec(x).exp() for x in log_std]
    logprobs = [density(i, stds).ln() for i in range(B)]
    entropy = sum((1 + (2 * PI).ln()) / 2 + dec(x) for x in log_std)
    variances = [density(i, [x.sqrt() for x in stds]).ln() for i in range(B)]
    wrong = [
        (
            "log-probabilities are averaged over the action's dimensions",
            "logprobs",
            [x / A for x in logprobs],
        ),
        ("log_std is taken for the logarithm of the variance", "logprobs", variances),
        ("the entropy is averaged over the action's dimensions", "entropy", fill([B], entropy / A)),
    ]
    inputs = {"means": means, "log_std": log_std, "actions": actions}
    return case(
        "gaussian_policy",
        "two dimensions",
        inputs,
        {"logprobs": logprobs, "entropy": fill([B], entropy)},
        wrong,
    )


# -------------------------------------------------------------------------------------------------
# Adam with global-norm clipping; RMSprop
# -------------------------------------------------------------------------------------------------


def adam(theta, grads, learning_rates, eps, max_grad_norm, clip_eps, sizes, mistake=None) -> dict:
    """[ADAM] Alg. 1 with averages as explicit sums, after clipping the gradients' global norm."""
    beta1, beta2 = Decimal("0.9"), Decimal("0.999")
    clipped, norms = [], []
    for grad in grads:
        groups = [grad]
        if mistake == "each tensor":
            ends = list(itertools.accumulate(sizes))
            groups = [grad[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        result = []
        for group in groups:
            norm = sum(g * g for g in group).sqrt()
            scale = min(Decimal(1), max_grad_norm / (norm + clip_eps))
            if mistake == "each element":
                result += [clip(g, -max_grad_norm, max_grad_norm) for g in group]
            else:
                result += [g * scale for g in group]
        clipped.append(result)
        norms.append(sum(g * g for g in grad).sqrt())
    history = []
    for t in range(1, len(grads) + 1):
        new = []
        for i, x in enumerate(theta):
            m = sum((1 - beta1) * beta1 ** (t - 1 - k) * clipped[k][i] for k in range(t))
            v = sum((1 - beta2) * beta2 ** (t - 1 - k) * clipped[k][i] ** 2 for k in range(t))
            if mistake != "no correction":
                m, v = m / (1 - beta1**t), v / (1 - beta2**t)
            root = (v + eps).sqrt() if mistake == "inside" else v.sqrt() + eps
            new.append(x - learning_rates[t - 1] * m / root)
        theta = new
        history.append(theta)
    return {"theta": history, "grad_norms": norms}


def make_adam() -> list[dict]:
    rng = random.Random(3)
    F = Fraction
    known = {
        "each tensor": "each tensor is clipped by its own norm",
        "each element": "each element is clipped",
        "no correction": "the bias is not corrected",
        "inside": "epsilon is inside the square root",
    }
    cases = []
    small = [
        [F(sign * k, 2**20) for k, sign in zip((3, 10, 40, 200), signs)]
        for signs in ([1, -1, 1, 1], [1, 1, -1, 1])
    ]
    table = [
        (
            "gradients of 3e-6 to 2e-4, where epsilon 1e-5 counts",
            [F(0)] * 4,
            small,
            [4],
            "1e6",
            0,
            ["inside", "no correction"],
        ),
        (
            "five steps, some clipped",
            [F(0)] * 5,
            draw(rng, [5, 5], -1, 1),
            [3, 2],
            "0.5",
            "1e-6",
            list(known),
        ),
        (
            "the norm is below the limit",
            [F(0)] * 3,
            [[F(1, 8), F(-1, 8), F(1, 16)]] * 3,
            [3],
            "0.5",
            "1e-6",
            ["inside"],
        ),
        (
            "clipped to exactly the limit (Optax, TensorFlow)",
            [F(0)] * 3,
            [[F(3), F(0), F(-4)], [F(3), F(1), F(1)]],
            [1, 2],
            "0.5",
            0,
            list(known)[:2],
        ),
    ]
    for name, theta, grads, sizes, limit, clip_eps, mistakes in table:
        # The rate is annealed, as PPO's is
        rates = [Fraction("3e-4") * (len(grads) - k) / len(grads) for k in range(len(grads))]
        arguments = [
            decs(theta),
            decs(grads),
            decs(rates),
            Decimal("1e-5"),
            Decimal(limit),
            Decimal(clip_eps),
            sizes,
        ]
        outputs = adam(*arguments)
        wrong = [(known[key], "theta", adam(*arguments, key)["theta"]) for key in mistakes]
        if name.startswith("gradients"):
            usual = [*arguments[:3], Decimal("1e-8"), *arguments[4:]]
            wrong.append(("epsilon is PyTorch's default 1e-8", "theta", adam(*usual)["theta"]))
        inputs = {
            "theta": theta,
            "grads": grads,
            "sizes": sizes,
            "learning_rates": rates,
            "beta1": F("0.9"),
            "beta2": F("0.999"),
            "eps": F("1e-5"),
            "max_grad_norm": F(limit),
            "clip_eps": F(clip_eps),
        }
        tolerance = {
            "float32": {"rtol": 1e-5, "atol": 1e-9},
            "float64": {"rtol": 1e-11, "atol": 1e-15},
        }
        cases.append(case("adam", name, inputs, outputs, wrong, tolerance))
    return cases


def rmsprop(theta, grads, learning_rate, alpha, eps, inside, initial) -> dict:
    averages, history = [], []
    for t in range(1, len(grads) + 1):
        average, new = [], []
        for i, x in enumerate(theta):
            g = alpha**t * initial + sum(
                (1 - alpha) * alpha ** (t - 1 - k) * grads[k][i] ** 2 for k in range(t)
            )
            root = (g + eps).sqrt() if inside else g.sqrt() + eps
            average.append(g)
            new.append(x - learning_rate * grads[t - 1][i] / root)
        theta = new
        averages.append(average)
        history.append(theta)
    return {"theta": history, "square_avg": averages}


def make_rmsprop() -> list[dict]:
    rng = random.Random(4)
    grads = draw(rng, [3, 4], -1, 1)
    sizes, signs = (1, 10, 100, 1000), ([1, -1, 1, 1], [1, 1, -1, 1])
    tiny = [
        [Fraction(sign * k, 2**20) for k, sign in zip(sizes, row, strict=True)] for row in signs
    ]
    known = {
        "epsilon": "epsilon is on the other side of the square root",
        "start": "the average starts at 0 in place of 1, or at 1 in place of 0",
        "kind": "PyTorch's RMSprop in place of TensorFlow's, or TensorFlow's in place of PyTorch's",
    }
    table = [
        ("TensorFlow, usual gradients", grads, True, 1, ["start", "kind"]),
        ("TensorFlow, tiny gradients", tiny, True, 1, ["start", "kind"]),
        ("TensorFlow, tiny gradients, the average at 0", tiny, True, 0, ["epsilon", "start"]),
        ("PyTorch, usual gradients", grads, False, 0, ["start", "kind"]),
        ("PyTorch, tiny gradients", tiny, False, 0, ["epsilon", "start", "kind"]),
    ]
    cases = []
    for name, columns, inside, initial, mistakes in table:
        inputs = {
            "theta": [Fraction(0)] * 4,
            "grads": columns,
            "learning_rate": Fraction("7e-4"),
            "alpha": Fraction("0.99"),
            "eps": Fraction("1e-5"),
            "eps_inside_sqrt": inside,
            "initial_square_avg": Fraction(initial),
        }
        keys = ("theta", "grads", "learning_rate", "alpha", "eps")
        arguments = [decs(inputs[key]) for key in keys]
        other = {
            "epsilon": rmsprop(*arguments, not inside, Decimal(initial)),
            "start": rmsprop(*arguments, inside, Decimal(1 - initial)),
            "kind": rmsprop(*arguments, not inside, Decimal(1 - initial)),
        }
        wrong = [(known[key], "theta", other[key]["theta"]) for key in mistakes]
        tolerance = {
            "float32": {"rtol": 1e-5, "atol": 1e-12},
            "float64": {"rtol": 1e-12, "atol": 1e-18},
        }
        outputs = rmsprop(*arguments, inside, Decimal(initial))
        cases.append(case("rmsprop", name, inputs, outputs, wrong, tolerance))
    return cases


# -------------------------------------------------------------------------------------------------
# A2C and A3C
# -------------------------------------------------------------------------------------------------


def actor_critic(logits, values, batch, ent_coef, vf_coef, kind, mistake=None) -> dict:
    """A2C: means, squared error without 1/2. A3C: sums, squared error with 1/2."""
    B = len(values)
    log_probs = [log_softmax(row) for row in logits]
    policy = -sum(
        row[a] * A
        for row, a, A in zip(log_probs, batch["actions"], batch["advantages"], strict=True)
    )
    entropy = -sum(x.exp() * x for row in log_probs for x in row)
    value = sum((R - v) ** 2 for R, v in zip(batch["returns"], values, strict=True))
    is_mean = (kind == "a2c") != (mistake == "other scale")
    is_halved = (kind == "a3c") != (mistake == "other half")
    scale = Decimal(B if is_mean else 1)
    value_scale = scale * (2 if is_halved else 1)
    if mistake == "entropy":
        ent_coef = -ent_coef
    outputs = {
        "policy_loss": policy / scale,
        "value_loss": value / value_scale,
        "entropy": entropy / scale,
    }
    loss = outputs["policy_loss"] - ent_coef * outputs["entropy"] + vf_coef * outputs["value_loss"]
    return {"loss": loss} | outputs


def actor_critic_outputs(logits, values, batch, ent_coef, vf_coef, kind, mistake=None) -> dict:
    num_actions = len(logits[0])

    def loss(flat_logits=None, new_values=values):
        rows = rows_of(flat_logits, num_actions) if flat_logits else logits
        return actor_critic(rows, new_values, batch, ent_coef, vf_coef, kind, mistake)["loss"]

    outputs = actor_critic(logits, values, batch, ent_coef, vf_coef, kind, mistake)
    outputs["grad_logits"] = rows_of(gradient(loss, flat(logits)), num_actions)
    outputs["grad_values"] = gradient(lambda x: loss(None, x), values)
    return outputs


def make_a2c_a3c() -> list[dict]:
    rng = random.Random(5)
    cases = []
    for kind, B in (("a2c", 6), ("a3c", 5)):
        inputs = {
            "logits": draw(rng, [B, 3]),
            "values": draw(rng, [B]),
            "actions": [int(rng.random() * 3) for _ in range(B)],
            "advantages": draw(rng, [B]),
            "returns": draw(rng, [B]),
            "ent_coef": Fraction("0.01"),
            "vf_coef": Fraction("0.25") if kind == "a2c" else Fraction("0.5"),
        }
        cases.append(actor_critic_case(kind, f"a batch of {B}", inputs))
        difference = [y - v for y, v in zip(inputs["returns"], inputs["values"])]
        name = f"a batch of {B}, advantages are returns minus values"
        cases.append(actor_critic_case(kind, name, inputs | {"advantages": difference}))
    cases.append(a3c_rollout_case(rng))
    return cases


def actor_critic_case(kind, name, inputs, extra=None) -> dict:
    """`extra`: a rollout's inputs, in place of advantages and returns; its targets; mistakes."""
    batch = {
        "actions": inputs["actions"],
        "advantages": decs(inputs["advantages"]),
        "returns": decs(inputs["returns"]),
    }
    arguments = [
        decs(inputs["logits"]),
        decs(inputs["values"]),
        batch,
        dec(inputs["ent_coef"]),
        dec(inputs["vf_coef"]),
    ]
    outputs = actor_critic_outputs(*arguments, kind)
    known = {
        "other scale": f"{'sums' if kind == 'a2c' else 'means'} over the batch",
        "other half": f"squared error {'with' if kind == 'a2c' else 'without'} the factor 1/2",
        "entropy": "the entropy is added to the loss",
    }
    wrong = [
        (sentence, "loss", actor_critic(*arguments, kind, key)["loss"])
        for key, sentence in known.items()
    ]
    # The advantage R - V is differentiated too: minus log pi(a|s) times minus one
    log_probs = [log_softmax(row)[a] for row, a in zip(arguments[0], batch["actions"], strict=True)]
    scale = len(log_probs) if kind == "a2c" else 1
    leaking = [g + x / scale for g, x in zip(outputs["grad_values"], log_probs, strict=True)]
    wrong.append(
        (
            "the policy loss is differentiated with respect to V (advantages not detached)",
            "grad_values",
            leaking,
        )
    )
    if extra:
        rollout, targets, more = extra
        kept = {key: value for key, value in inputs.items() if key not in ("advantages", "returns")}
        return case(f"{kind}_rollout", name, rollout | kept, targets | outputs, wrong + more)
    return case(f"{kind}_loss", name, inputs, outputs, wrong)


def a3c_rollout_case(rng) -> dict:
    """Twenty steps of one worker from rewards to gradients; a truncation and a termination."""
    T = 20
    truncations, terminations = fill([T, 1], False), fill([T, 1], False)
    truncations[6][0] = terminations[13][0] = True
    ends = either(terminations, truncations)
    rewards = [[Fraction(int(rng.random() * 3) - 1)] for _ in range(T)]
    values, next_values = episode_values(rng, T, 1, ends)
    gamma = Fraction("0.99")
    arrays = (rewards, values, next_values)
    advantages = gae_by_definition(*arrays, terminations, ends, gamma, gamma)
    no_bootstrap = gae_by_definition(*arrays, ends, ends, gamma, gamma)
    inputs = {
        "logits": draw(rng, [T, 4]),
        "values": flat(values),
        "actions": [int(rng.random() * 4) for _ in range(T)],
        "advantages": flat(advantages),
        "returns": flat(add(advantages, values)),
        "ent_coef": Fraction("0.01"),
        "vf_coef": Fraction("0.5"),
    }
    rollout = {
        "rewards": flat(rewards),
        "next_values": flat(next_values),
        "terminations": flat(terminations),
        "truncations": flat(truncations),
        "gamma": gamma,
        "gae_lambda": Fraction(1),
    }
    targets = {"advantages": flat(advantages), "returns": inputs["returns"]}
    more = [("a truncation is taken for a termination (R = 0)", "advantages", flat(no_bootstrap))]
    return actor_critic_case(
        "a3c", "twenty steps, a truncation and a termination", inputs, (rollout, targets, more)
    )


# -------------------------------------------------------------------------------------------------
# DQN: Huber loss, double Q, dueling, n-step targets
# -------------------------------------------------------------------------------------------------


def huber(x: Decimal, kappa=Decimal(1)) -> Decimal:
    return x * x / 2 if abs(x) <= kappa else kappa * (abs(x) - kappa / 2)


def make_dqn() -> list[dict]:
    rng = random.Random(6)
    F = Fraction
    cases = []

    errors = [F(x, 8) for x in (-24, -9, -7, -4, 0, 4, 7, 9, 24)]
    exact = decs(errors)
    outputs = {
        "losses": [huber(x) for x in exact],
        "grads": [clip(x, Decimal(-1), Decimal(1)) for x in exact],
    }
    wrong = [
        (
            "the squared error, not halved",
            "losses",
            [x * x if abs(x) <= 1 else abs(x) * 2 - 1 for x in exact],
        ),
        ("squared error throughout", "losses", [x * x / 2 for x in exact]),
        (
            "the error itself is clipped to [-1, 1], so large errors have no gradient",
            "grads",
            [x if abs(x) <= 1 else Decimal(0) for x in exact],
        ),
    ]
    cases.append(case("huber", "inside and outside [-1, 1]", {"errors": errors}, outputs, wrong))

    online = [[F(1), F(3), F(2)], [F(2), F(-1), F(1)], [F(0), F(0), F(1)], [F(-3), F(-1), F(-2)]]
    target = [[F(4), F(1), F(2)], [F(1), F(5), F(3)], [F(2), F(-3), F(-2)], [F(-1), F(-4), F(-2)]]
    returns, discounts = draw(rng, [4]), [F("0.99") ** 3, F("0.99") ** 3, F(0), F("0.99") ** 3]

    def targets(pick, value, discounts=discounts):
        best = [max(range(3), key=lambda a: row[a]) for row in pick]
        return [
            R + d * row[a] for R, d, row, a in zip(returns, discounts, value, best, strict=True)
        ]

    outputs = {"double": targets(online, target), "single": targets(target, target)}
    bootstrapped = targets(online, target, [F("0.99") ** 3] * 4)
    wrong = [
        (
            "the target network chooses and the online network evaluates",
            "double",
            targets(target, online),
        ),
        ("the online network does both", "double", targets(online, online)),
        ("the target network does both (that is `single`)", "double", outputs["single"]),
        ("a row whose discount is 0 bootstraps all the same", "double", bootstrapped),
    ]
    inputs = {"online_qs": online, "target_qs": target, "returns": returns, "discounts": discounts}
    cases.append(case("q_targets", "the networks disagree", inputs, outputs, wrong))

    value, advantage = draw(rng, [3]), draw(rng, [3, 4])
    qs = [[v + a - mean(row) for a in row] for v, row in zip(value, advantage, strict=True)]
    batch_mean = mean(flat(advantage))
    wrong = [
        (
            "the largest advantage is subtracted, not the mean",
            "qs",
            [[v + a - max(row) for a in row] for v, row in zip(value, advantage)],
        ),
        ("nothing is subtracted", "qs", [[v + a for a in row] for v, row in zip(value, advantage)]),
        (
            "the mean is taken over the batch as well",
            "qs",
            [[v + a - batch_mean for a in row] for v, row in zip(value, advantage)],
        ),
    ]
    cases.append(
        case(
            "dueling",
            "three states, four actions",
            {"values": value, "advantages": advantage},
            {"qs": qs},
            wrong,
        )
    )

    values, targets_, weights = draw(rng, [6]), draw(rng, [6]), draw(rng, [6], 0, 1)
    weights[2], targets_[1] = F(1), values[1] + 2
    v, y, w = decs(values), decs(targets_), decs(weights)

    def loss(v):
        return mean([a * huber(c - b) for a, b, c in zip(w, v, y, strict=True)])

    outputs = {
        "loss": loss(v),
        "td_errors": [c - b for b, c in zip(v, y, strict=True)],
        "grad_values": gradient(loss, v),
    }
    wrong = [
        ("the sum over the batch", "loss", 6 * loss(v)),
        (
            "the error is weighted inside the Huber loss",
            "loss",
            mean([huber(a * (c - b)) for a, b, c in zip(w, v, y)]),
        ),
        ("divided by the sum of the weights", "loss", 6 * loss(v) / sum(w)),
        (
            "the TD errors, which become priorities, are clipped",
            "td_errors",
            [clip(c - b, Decimal(-1), Decimal(1)) for b, c in zip(v, y)],
        ),
    ]
    inputs = {"values": values, "targets": targets_, "weights": weights}
    cases.append(case("td_loss", "weighted Huber loss", inputs, outputs, wrong))
    cases += n_step_cases(rng)
    return cases


def n_step_cases(rng) -> list[dict]:
    r"""R^(n) = \sum_{k<K} gamma^k r_{t+k}, K = n or fewer at an end; bootstrap gamma^K."""
    cases = []
    T, gamma = 10, Fraction("0.99")
    ends = {"terminations": (2, 7), "truncations": (4,)}
    both = {"terminations": (3,), "truncations": (3, 6)}
    for n, (name, layout) in itertools.product(
        (1, 3), (("ends inside", ends), ("both at once", both))
    ):
        rewards = draw(rng, [T])
        terminations = [t in layout["terminations"] for t in range(T)]
        truncations = [t in layout["truncations"] for t in range(T)]

        def table(terminations, truncations, power=None, rewards=rewards, n=n):
            result = {"returns": [], "discounts": [], "last_rows": [], "complete": []}
            for t in range(T):
                window = range(t, min(t + n, T))
                ends = [k for k in window if terminations[k] or truncations[k]]
                last = ends[0] if ends else window[-1]
                rows = range(t, last + 1)
                bootstrap = 0 if terminations[last] else gamma ** (power or len(rows))
                result["returns"].append(sum(gamma ** (k - t) * rewards[k] for k in rows))
                result["discounts"].append(Fraction(bootstrap))
                result["last_rows"].append(last)
                result["complete"].append(bool(ends) or t + n <= T)
            return result

        right = table(terminations, truncations)
        never = fill([T], False)
        no_ends = table(never, never)
        as_terminations = table([a or b for a, b in zip(terminations, truncations)], never)
        fixed_power = table(terminations, truncations, power=n)

        def complete_only(values, output, right=right):
            """The wrong values of complete rows; what the others hold is not to be used."""
            pairs = zip(values[output], right[output], right["complete"], strict=True)
            return [x if complete else y for x, y, complete in pairs]

        wrong = [
            ("the bootstrap ignores ends", "discounts", complete_only(no_ends, "discounts")),
            (
                "a truncation is taken for a termination",
                "discounts",
                complete_only(as_terminations, "discounts"),
            ),
        ]
        if n > 1:
            wrong += [
                ("the sum crosses an episode's end", "returns", complete_only(no_ends, "returns")),
                (
                    "gamma^n after fewer than n rewards",
                    "discounts",
                    complete_only(fixed_power, "discounts"),
                ),
            ]
        inputs = {
            "rewards": rewards,
            "terminations": terminations,
            "truncations": truncations,
            "n": n,
            "gamma": gamma,
        }
        cases.append(case("n_step", f"n = {n}, {name}", inputs, right, wrong))
    return cases


# -------------------------------------------------------------------------------------------------
# Prioritized replay
# -------------------------------------------------------------------------------------------------


def tree_nodes(leaves: list) -> list:
    """Nodes of a binary heap: node 0 unused, node 1 the root, then down to the padded leaves."""
    size = 1
    while size < len(leaves):
        size *= 2
    padded = leaves + [Fraction(0)] * (size - len(leaves))
    nodes = [Fraction(0)] * (2 * size)
    for node in range(1, 2 * size):
        first, width = node, 1
        while first < size:
            first, width = 2 * first, 2 * width
        nodes[node] = sum(padded[first - size : first - size + width], Fraction(0))
    return nodes


def row_drawn(leaves: list, value) -> int:
    """The row i with \\sum_{j<i} p_j <= value < \\sum_{j<=i} p_j, by enumeration."""
    for i in range(len(leaves)):
        if sum(leaves[:i]) <= value < sum(leaves[: i + 1]):
            return i
    raise ValueError(value)


def make_per() -> list[dict]:
    rng = random.Random(7)
    F = Fraction
    cases = []
    for name, leaves in (
        ("eight leaves", [F(x, 8) for x in (3, 1, 4, 1, 5, 9, 2, 6)]),
        ("capacity 5, some leaves zero", [F(0), F(3, 8), F(0), F(5, 8), F(0)]),
        ("partly filled, capacity 16", [F(1), F(1, 8), F(2), F(0), F(1, 2)] + [F(0)] * 11),
        ("one leaf", [F(3, 4)]),
    ):
        doubled = [2 * x for x in tree_nodes(leaves)]
        wrong = [
            (
                "parents add the new value without subtracting the old (all leaves written twice)",
                "nodes",
                doubled,
            )
        ]
        cases.append(
            case(
                "sum_tree",
                name,
                {"leaves": leaves},
                {"nodes": tree_nodes(leaves), "total": sum(leaves)},
                wrong,
            )
        )
        values = [F(k, 16) for k in range(int(16 * sum(leaves)))]
        rows = [row_drawn(leaves, value) for value in values]
        shifted = [
            next(i for i in range(len(leaves)) if value <= sum(leaves[: i + 1])) for value in values
        ]
        wrong = ["a value equal to the total has no row: draw from [0, total)"]
        if shifted != rows:
            wrong.append(
                (
                    "a value on a boundary goes to the row before (<= in place of <)",
                    "rows",
                    shifted,
                )
            )
        cases.append(
            case(
                "find", name, {"leaves": leaves, "values": values}, {"rows": rows}, wrong, INTEGERS
            )
        )
    # Sums of tenths are rounded: the descent may carry the largest value below the root too far
    for leaves, value in (
        ([8, 7, 1, 1, 5, 8, 9, 0], 3.9),
        ([1, 4, 1, 1, 6, 3, 2, 6, 8, 8, 9, 9, 4, 9, 6, 0], 7.7),
    ):
        last = max(i for i, x in enumerate(leaves) if x)
        inputs = {"leaves": [F(x, 10) for x in leaves], "values": [F(value)]}
        wrong = [
            (
                "rounding lifts the value onto a zero leaf: probability 0, weight infinite",
                "rows",
                [last + 1],
            )
        ]
        name = f"float64 rounding at the top of the range, {len(leaves)} leaves"
        cases.append(case("find", name, inputs, {"rows": [last]}, wrong, INTEGERS))
    cases += [stratified_case(), weights_case(), *priority_update_cases()]
    for n, size, num_envs in ((1, 12, 1), (3, 12, 1), (3, 16, 2)):
        cases.append(drawable_case(rng, n, size, num_envs))
    return cases


def stratified_case() -> dict:
    """One draw in each of B equal parts of [0, total)."""
    F = Fraction
    leaves = [F(x, 8) for x in (3, 1, 4, 0, 5, 9, 2, 8)]
    uniforms = [F(1, 4), F(1, 2), F(0), F(63, 64)]
    values = [(i + u) / 4 * sum(leaves) for i, u in enumerate(uniforms)]
    rows = [row_drawn(leaves, value) for value in values]
    plain_rows = [row_drawn(leaves, u * sum(leaves)) for u in uniforms]
    outputs = {
        "values": values,
        "rows": rows,
        "probabilities": [leaves[i] / sum(leaves) for i in rows],
    }
    wrong = [("draws are not stratified", "rows", plain_rows)]
    return case(
        "stratified", "four strata", {"leaves": leaves, "uniforms": uniforms}, outputs, wrong
    )


def weights_case() -> dict:
    r"""w_i = (N P(i))^{-\beta} / \max_j w_j over the batch."""
    F = Fraction
    leaves = [F(x, 8) for x in (3, 1, 4, 2, 5, 9, 2, 6)]
    rows, beta = [0, 5, 5, 7], F("0.4")
    raw = [(-dec(beta) * dec(len(leaves) * leaf / sum(leaves)).ln()).exp() for leaf in leaves]
    drawn = [raw[i] for i in rows]
    wrong = [
        (
            "divided by the largest weight in the whole memory",
            "weights",
            [x / max(raw) for x in drawn],
        ),
        ("not divided by the largest weight", "weights", drawn),
        ("the exponent's sign is lost", "weights", [min(drawn) / x for x in drawn]),
    ]
    inputs = {"leaves": leaves, "rows": rows, "beta": beta}
    return case(
        "importance_weights",
        "largest weight not drawn",
        inputs,
        {"weights": [x / max(drawn) for x in drawn]},
        wrong,
    )


def priority_update_cases() -> list[dict]:
    F = Fraction
    cases = []
    for name, rows, errors in (
        ("different rows", [0, 3, 5], [F(2), F(-1, 2), F(0)]),
        (
            "row 2 three times, row 5 twice: the last value stays",
            [2, 5, 2, 0, 5, 2],
            [F(3), F(1), F(-1), F(2), F(4), F(1, 4)],
        ),
    ):
        leaves = [F(1)] * 6
        alpha, eps = Decimal("0.6"), Decimal("1e-6")
        priorities = [abs(dec(x)) + eps for x in errors]
        written = [(alpha * p.ln()).exp() for p in priorities]
        last, first, parents, without_alpha = decs(leaves), decs(leaves), Decimal(6), decs(leaves)
        seen = set()
        for row, value, priority in zip(rows, written, priorities, strict=True):
            parents += value - 1
            last[row] = value
            without_alpha[row] = priority
            if row not in seen:
                first[row] = value
            seen.add(row)
        outputs = {"leaves": last, "total": sum(last), "max_priority": max(Decimal(1), *priorities)}
        wrong = [("alpha is not applied", "total", sum(without_alpha))]
        if len(set(rows)) < len(rows):
            wrong.append(("the first value of a repeated row stays", "leaves", first))
            wrong.append(
                ("every repetition's difference is added to the parents", "total", parents)
            )
        else:
            zero = [Decimal(0) if i == 5 else x for i, x in enumerate(last)]
            wrong.append(
                ("without 1e-6 a row with a TD error of 0 is never drawn again", "leaves", zero)
            )
        inputs = {
            "leaves": leaves,
            "rows": rows,
            "td_errors": errors,
            "alpha": F("0.6"),
            "eps": F("1e-6"),
            "max_priority": F(1),
        }
        cases.append(case("priority_update", name, inputs, outputs, wrong))
    return cases


def drawable_case(rng, n, size, num_envs) -> dict:
    """Which rows of a ring of single frames may be drawn after each step, by what a row needs."""
    stack, steps, width = 4, 3 * size // num_envs, size // num_envs
    lengths, terminations, truncations = [], [], []
    age, limits = [0] * num_envs, [1 + int(rng.random() * 6) for _ in range(num_envs)]
    for _ in range(steps):
        lengths.append(list(age))
        ends = [age[i] + 1 >= limits[i] for i in range(num_envs)]
        kinds = [int(rng.random() * 3) for _ in range(num_envs)]  # 0, 1: termination; 2: truncation
        terminations.append([end and kind < 2 for end, kind in zip(ends, kinds)])
        truncations.append([end and kind == 2 for end, kind in zip(ends, kinds)])
        for i in range(num_envs):
            age[i] = 0 if ends[i] else age[i] + 1
            if ends[i]:
                limits[i] = 1 + int(rng.random() * 7)

    def allowed(now, check_stack=True, check_end=True, check_future=True):
        required, optional, held = [False] * size, [False] * size, [-1] * size
        for step in range(max(0, now + 1 - width), now + 1):
            for i in range(num_envs):
                row = step % width * num_envs + i
                held[row] = step
                window = range(step, step + n)
                end = next(
                    (k for k in window if k <= now and (terminations[k][i] or truncations[k][i])),
                    None,
                )
                if not check_end:
                    end = None
                terminated = end is not None and terminations[end][i]
                arrived = step + n <= now  # s_{t+n} has been written
                usable = terminated or (end is None and (arrived or not check_future))
                # The stack of s_t needs that many earlier frames of its episode
                needs = min(stack - 1, lengths[step][i])
                oldest = max(0, now + 1 - width)
                if check_stack and step - needs < oldest:
                    usable = False
                # Free choices: wait for row t + n after a termination; give up the three rows ahead
                late = terminated and not arrived
                old = 0 < (step - now) % width < stack
                required[row] = usable and not late and not old
                optional[row] = usable and (late or old)
        return required, optional, held

    table = [allowed(now) for now in range(steps)]
    outputs = {
        "drawable": [row[0] for row in table],
        "optional": [row[1] for row in table],
        "step_of_row": [row[2] for row in table],
    }

    def first_forbidden(**options):
        """The first step and row that a mistake would draw though it must not be drawn."""
        for now in range(steps):
            required, optional, _ = allowed(now, **options)
            for row in range(size):
                if (required[row] or optional[row]) and not (
                    table[now][0][row] or table[now][1][row]
                ):
                    value = fill([steps, size], False)
                    for a, b in itertools.product(range(steps), range(size)):
                        value[a][b] = table[a][0][b]
                    value[now][row] = True
                    return value
        raise ValueError("this mistake does not show")

    wrong = [
        (
            "a row is drawn whose stack has lost a frame to newer rows",
            "drawable",
            first_forbidden(check_stack=False),
        ),
        (
            "a row is drawn whose s_{t+n} is of the next episode, though it was truncated",
            "drawable",
            first_forbidden(check_end=False),
        ),
        (
            "a row is drawn whose s_{t+n} is still to come",
            "drawable",
            first_forbidden(check_future=False),
        ),
    ]
    inputs = {
        "lengths": lengths,
        "terminations": terminations,
        "truncations": truncations,
        "size": size,
        "n": n,
        "frame_stack": stack,
    }
    return case(
        "drawable",
        f"n = {n}, {num_envs} environment(s), {size} rows",
        inputs,
        outputs,
        wrong,
        INTEGERS,
    )


# -------------------------------------------------------------------------------------------------
# Distributional: C51 and quantile regression
# -------------------------------------------------------------------------------------------------


def c51_projection(probabilities, returns, discounts, v_min, v_max, clip_range=True) -> list:
    r"""m_i = \sum_j p_j [1 - |clip(Tz_j) - z_i| / \Delta z] clipped to [0, 1]: [C51] Eq. (7)."""
    K = len(probabilities[0])
    width = (v_max - v_min) / (K - 1)
    result = []
    for p, R, discount in zip(probabilities, returns, discounts, strict=True):
        row = []
        for i in range(K):
            z = v_min + i * width
            total = Fraction(0)
            for j in range(K):
                moved = R + discount * (v_min + j * width)
                if clip_range:
                    moved = clip(moved, v_min, v_max)
                total += p[j] * max(Fraction(0), 1 - abs(moved - z) / width)
            row.append(total)
        result.append(row)
    return result


def make_distributional() -> list[dict]:
    rng = random.Random(8)
    F = Fraction
    cases = []
    K, v_min, v_max = 5, F(-2), F(2)
    uneven = [F(x, 16) for x in (1, 2, 4, 8, 1)]
    gamma = F("0.99")
    for name, returns, discounts in (
        ("between atoms", [F(1, 4), F(-3, 8)], [gamma, gamma]),
        ("exactly on atoms", [F(0), F(1)], [F(1), F(1)]),
        ("terminal: all mass at the reward", [F(1), F(3, 8)], [F(0), F(0)]),
        ("beyond both ends of the support", [F(3), F(-3)], [gamma, gamma]),
        ("n = 3", [F(5, 4), F(-1, 2)], [gamma**3, gamma**3]),
    ):
        probabilities = [uneven, uneven[::-1]]
        arguments = (probabilities, returns, discounts, v_min, v_max)
        right = c51_projection(*arguments)
        width = (v_max - v_min) / (K - 1)
        lost = []  # m_l += p (u - b), m_u += p (b - l) with u = l where b is an integer: both are 0
        for p, R, discount in zip(probabilities, returns, discounts):
            row = [F(0)] * K
            for j in range(K):
                b = (clip(R + discount * (v_min + j * width), v_min, v_max) - v_min) / width
                if b.denominator > 1:
                    low = b.numerator // b.denominator
                    row[low] += p[j] * (low + 1 - b)
                    row[low + 1] += p[j] * (b - low)
            lost.append(row)
        wrong = []
        if lost != right:
            wrong.append(
                (
                    "mass is lost where a moved atom falls exactly on an atom (l = u)",
                    "projected",
                    lost,
                )
            )
        unclipped = c51_projection(*arguments, clip_range=False)
        if unclipped != right:
            wrong.append(("atoms are not clipped to the support", "projected", unclipped))
        swapped = [row[::-1] for row in right]
        wrong.append(("the support is reversed", "projected", swapped))
        inputs = {
            "probabilities": probabilities,
            "returns": returns,
            "discounts": discounts,
            "v_min": v_min,
            "v_max": v_max,
        }
        cases.append(case("c51_projection", name, inputs, {"projected": right}, wrong))

    logits, target = draw(rng, [2, K]), [uneven, uneven[::-1]]

    def cross_entropy(rows, target=target):
        return [
            -sum(dec(m) * x for m, x in zip(ms, log_softmax(row)))
            for ms, row in zip(target, rows, strict=True)
        ]

    exact = decs(logits)
    grads = gradient(lambda x: sum(cross_entropy(rows_of(x, K))), flat(exact))
    entropy = [sum(dec(m) * dec(m).ln() for m in ms) for ms in target]
    outputs = {"losses": cross_entropy(exact), "grad_logits": rows_of(grads, K)}
    reverse = [
        sum(x.exp() * (x - dec(m).ln()) for m, x in zip(ms, log_softmax(row)))
        for ms, row in zip(target, exact, strict=True)
    ]
    wrong = [
        (
            "the KL divergence in place of the cross-entropy (same gradient)",
            "losses",
            [a + b for a, b in zip(outputs["losses"], entropy)],
        ),
        ("target and prediction exchanged", "losses", reverse),
    ]
    cases.append(
        case("c51_loss", "two samples", {"logits": logits, "target": target}, outputs, wrong)
    )
    cases.append(quantile_case(rng))
    return cases


def quantile_case(rng) -> dict:
    r"""\sum_i mean_j |\tau_i - 1{u < 0}| Huber(u) / kappa, u = y_j - \theta_i: [QR] Eq. (10)."""
    B, N, M = 2, 4, 3
    quantiles, targets = draw(rng, [B, N]), draw(rng, [B, M])
    taus = [Fraction(2 * i + 1, 2 * N) for i in range(N)]

    def losses(rows, taus=taus, sign=1, kappa=Decimal(1)):
        result = []
        for thetas, ys in zip(rows, decs(targets), strict=True):
            total = Decimal(0)
            for theta, tau in zip(thetas, taus, strict=True):
                for y in ys:
                    u = y - theta
                    total += abs(dec(tau) - (sign * u < 0)) * huber(u, kappa) / kappa / M
            result.append(total)
        return result

    exact = decs(quantiles)
    outputs = {"losses": losses(exact)}
    outputs["grad_quantiles"] = rows_of(
        gradient(lambda x: sum(losses(rows_of(x, N))), flat(exact)), N
    )
    wrong = [
        (
            "the indicator is of u > 0: high quantiles become low ones",
            "losses",
            losses(exact, sign=-1),
        ),
        (
            "tau_i = i / N in place of (i + 1/2) / N",
            "losses",
            losses(exact, [Fraction(i, N) for i in range(N)]),
        ),
        (
            "sum over the targets and mean over the quantiles",
            "losses",
            [x * M / N for x in outputs["losses"]],
        ),
        ("kappa = 1/2", "losses", losses(exact, kappa=Decimal("0.5"))),
    ]
    inputs = {"quantiles": quantiles, "targets": targets, "taus": taus, "kappa": Fraction(1)}
    return case("quantile_huber_loss", "four quantiles, three targets", inputs, outputs, wrong)


# -------------------------------------------------------------------------------------------------
# QMIX
# -------------------------------------------------------------------------------------------------


def linear(x, weight, bias):
    return [
        sum(w * v for w, v in zip(row, x, strict=True)) + b
        for row, b in zip(weight, bias, strict=True)
    ]


def relu(x):
    return [max(v, Decimal(0)) for v in x]


def elu(x):
    return [v if v > 0 else v.exp() - 1 for v in x]


def mixer(qs, state, p, embed_dim, mistake=None):
    r"""Q_tot = ELU(q |W_1(s)| + b_1(s)) |w_2(s)| + V(s) of one sample: [QMIX] Sec. 4."""

    def layer(name, x):
        return linear(x, p[name + ".weight"], p[name + ".bias"])

    w1 = layer("hyper_w1.2", relu(layer("hyper_w1.0", state)))
    b1 = layer("hyper_b1", state)
    w2 = layer("hyper_w2.2", relu(layer("hyper_w2.0", state)))
    v = layer("hyper_v.2", relu(layer("hyper_v.0", state)))[0]
    if mistake != "no abs":
        w1, w2 = [abs(x) for x in w1], [abs(x) for x in w2]
    if mistake == "abs on biases":
        b1, v = [abs(x) for x in b1], abs(v)
    n = len(qs)
    # Row i of W_1 (n, E) belongs to agent i: element i * E + e
    hidden = []
    for e in range(embed_dim):
        index = [e * n + i if mistake == "transposed" else i * embed_dim + e for i in range(n)]
        hidden.append(sum(q * w1[k] for q, k in zip(qs, index, strict=True)) + b1[e])
    hidden = relu(hidden) if mistake == "relu" else elu(hidden)
    return sum(h * w for h, w in zip(hidden, w2, strict=True)) + v


def make_qmix() -> list[dict]:
    rng = random.Random(9)
    cases = []
    B, n, S, E, H = 4, 3, 4, 2, 3
    shapes = {
        "hyper_w1.0": (H, S),
        "hyper_w1.2": (n * E, H),
        "hyper_b1": (E, S),
        "hyper_w2.0": (H, S),
        "hyper_w2.2": (E, H),
        "hyper_v.0": (E, S),
        "hyper_v.2": (1, E),
    }
    parameters = {}
    for name, (outputs, width) in shapes.items():
        parameters[name + ".weight"] = draw(rng, [outputs, width], -1, 1)
        parameters[name + ".bias"] = draw(rng, [outputs], -1, 1)
    qs, states = draw(rng, [B, n]), draw(rng, [B, S])
    exact = {key: decs(value) for key, value in parameters.items()}

    def total(rows, mistake=None):
        return [mixer(q, s, exact, E, mistake) for q, s in zip(rows, decs(states), strict=True)]

    def one(i):
        return gradient(lambda q: mixer(q, decs(states[i]), exact, E), decs(qs[i]))

    outputs = {"q_tot": total(decs(qs)), "grad_qs": [one(i) for i in range(B)]}
    known = {
        "no abs": "no absolute value of the weights: Q_tot is not monotone",
        "abs on biases": "absolute values of b_1 and V as well",
        "transposed": "the weights are read as (E, n) in place of (n, E)",
        "relu": "ReLU in place of ELU",
    }
    wrong = [(sentence, "q_tot", total(decs(qs), key)) for key, sentence in known.items()]
    inputs = {"qs": qs, "states": states} | parameters
    cases.append(case("qmix_mixer", "three agents", inputs, outputs, wrong))
    cases.append(masked_loss_case(rng))
    cases += td_lambda_cases(rng)
    cases.append(double_q_case(rng))
    return cases


def masked_loss_case(rng) -> dict:
    r"""\sum m (y - Q)^2 / \sum m. Padded entries hold what padding may hold, here large numbers."""
    T, lengths = 5, (5, 2, 3)
    B = len(lengths)
    q_tot, targets = draw(rng, [T, B]), draw(rng, [T, B])
    mask = [[t < length for length in lengths] for t in range(T)]
    for t, b in itertools.product(range(T), range(B)):
        if not mask[t][b]:
            targets[t][b] = Fraction(-1000)

    def errors(rows):
        return [
            [(y - q) ** 2 if m else Decimal(0) for q, y, m in zip(*x)]
            for x in zip(rows, decs(targets), mask)
        ]

    def loss(x):
        return sum(flat(errors(rows_of(x, B)))) / sum(lengths)

    x = flat(decs(q_tot))
    unmasked = mean([(dec(y) - dec(q)) ** 2 for q, y in zip(flat(q_tot), flat(targets))])
    each = mean([sum(errors(decs(q_tot))[t][b] for t in range(T)) / lengths[b] for b in range(B)])
    wrong = [
        ("padding is not masked", "loss", unmasked),
        ("divided by T B, padding included", "loss", loss(x) * sum(lengths) / (T * B)),
        ("divided by the number of episodes", "loss", loss(x) * sum(lengths) / B),
        ("the mean of the episodes' means", "loss", each),
    ]
    inputs = {"q_tot": q_tot, "targets": targets, "mask": mask}
    outputs = {"loss": loss(x), "grad_q_tot": rows_of(gradient(loss, x), B)}
    return case("masked_loss", "episodes of 5, 2 and 3 steps", inputs, outputs, wrong)


def td_lambda_cases(rng) -> list[dict]:
    r"""(1 - \lambda) \sum_{k<L} \lambda^{k-1} G^(k) + \lambda^{L-1} G^(L), L the steps left."""
    T, lengths, gamma = 6, (6, 2, 4, 3), Fraction("0.99")
    B = len(lengths)
    mask = [[t < length for length in lengths] for t in range(T)]
    rewards, next_values = draw(rng, [T, B]), draw(rng, [T, B])
    # Episodes 0 and 3 are truncated (they bootstrap), 1 and 2 terminate; padding must not count
    no_bootstrap = [[b in (1, 2) and t == lengths[b] - 1 for b in range(B)] for t in range(T)]
    for t, b in itertools.product(range(T), range(B)):
        if not mask[t][b]:
            rewards[t][b], next_values[t][b] = Fraction(0), Fraction(-1000)

    def targets(lam, no_bootstrap=no_bootstrap, to_batch_end=False):
        result = fill([T, B], Fraction(0))
        for t, b in itertools.product(range(T), range(B)):
            if not mask[t][b]:
                continue
            L = (T if to_batch_end else lengths[b]) - t

            def G(k, t=t, b=b):
                last = t + k - 1
                bootstrap = 0 if no_bootstrap[last][b] else next_values[last][b]
                return sum(gamma**i * rewards[t + i][b] for i in range(k)) + gamma**k * bootstrap

            weighted = sum((1 - lam) * lam ** (k - 1) * G(k) for k in range(1, L))
            result[t][b] = weighted + lam ** (L - 1) * G(L)
        return result

    everywhere = [[t == length - 1 for length in lengths] for t in range(T)]
    late = [fill([B], False)] + no_bootstrap[:-1]
    cases = []
    for lam in ("0", "0.8", "1"):
        lam_ = Fraction(lam)
        right = targets(lam_)
        wrong = [
            (
                "truncations are taken for terminations",
                "targets",
                targets(lam_, everywhere),
            ),
            ("bootstraps after a termination", "targets", targets(lam_, fill([T, B], False))),
            (
                "terminations are one step late (dones stored before the step, not shifted)",
                "targets",
                targets(lam_, late),
            ),
        ]
        if lam != "0":
            wrong.append(
                ("the sum runs on into the padding", "targets", targets(lam_, to_batch_end=True))
            )
        inputs = {
            "rewards": rewards,
            "next_values": next_values,
            "no_bootstrap": no_bootstrap,
            "mask": mask,
            "gamma": gamma,
            "td_lambda": lam_,
        }
        cases.append(
            case("td_lambda_targets", f"lambda = {lam}", inputs, {"targets": right}, wrong)
        )
    return cases


def double_q_case(rng) -> dict:
    """Best available actions at t + 1 by the online network, valued by the target network."""
    T, B, n, A = 3, 2, 2, 4
    online, target = draw(rng, [T + 1, B, n, A]), draw(rng, [T + 1, B, n, A])
    avail = fill([T + 1, B, n, A], True)
    for t, b, i in itertools.product(range(T + 1), range(B), range(n)):
        best = max(range(A), key=lambda a: online[t][b][i][a])
        avail[t][b][i][best] = (t + b + i) % 3 == 0
        other = max(range(A), key=lambda a: target[t][b][i][a])
        if other != best:
            avail[t][b][i][other] = (t + i) % 2 == 0
    mask = [[True, True], [True, True], [True, False]]
    avail[3][1] = fill([n, A], False)  # padding: nothing is available, and the step is masked

    def values(pick, value, allowed, shift=1):
        result = fill([T, B, n], Fraction(0))
        for t, b, i in itertools.product(range(T), range(B), range(n)):
            if mask[t][b]:
                options = [a for a in range(A) if allowed[t + shift][b][i][a]]
                best = max(options, key=lambda a: pick[t + shift][b][i][a])
                result[t][b][i] = value[t + shift][b][i][best]
        return result

    everything = fill([T + 1, B, n, A], True)
    zeroed = [
        [[[q if ok else Fraction(0) for q, ok in zip(*w)] for w in zip(*z)] for z in zip(*y)]
        for y in zip(online, avail)
    ]
    outputs = {"double": values(online, target, avail), "single": values(target, target, avail)}
    wrong = [
        ("unavailable actions are not excluded", "double", values(online, target, everything)),
        (
            "values of unavailable actions are set to 0 and not excluded",
            "double",
            values(zeroed, target, everything),
        ),
        ("the online network evaluates", "double", values(online, online, avail)),
        ("the target network chooses (that is `single`)", "double", outputs["single"]),
        ("values of step t in place of t + 1", "double", values(online, target, avail, shift=0)),
        "-inf as the target value of padded steps becomes NaN in the mixer, and NaN times 0 is NaN",
    ]
    inputs = {"online_qs": online, "target_qs": target, "avail_actions": avail, "mask": mask}
    return case("double_q_available", "two agents, four actions", inputs, outputs, wrong)


# -------------------------------------------------------------------------------------------------
# Running statistics and normalization
# -------------------------------------------------------------------------------------------------


def moments(rows: list[list]) -> tuple[list, list]:
    """Mean and population variance of rows (R, D), by the definition."""
    averages = [mean(list(column)) for column in zip(*rows)]
    variances = [mean([(x - m) ** 2 for x in column]) for column, m in zip(zip(*rows), averages)]
    return averages, variances


def make_running_stats() -> list[dict]:
    rng = random.Random(10)
    cases = []
    sizes = [1, 3, 1, 5]
    tables = [
        ("batches of 1, 3, 1, 5 rows", sizes, draw(rng, [10, 2])),
        ("one row at a time", [1] * 6, draw(rng, [6, 1])),
        (
            "far from zero: mean 1000, deviation 1",
            [4, 4, 4],
            [[x + 1000] for [x] in draw(rng, [12, 1])],
        ),
    ]
    for name, batch_sizes, rows in tables:
        ends = list(itertools.accumulate(batch_sizes))
        seen = [rows[:end] for end in ends]
        batches = [rows[end - size : end] for end, size in zip(ends, batch_sizes)]
        means, variances = [moments(x)[0] for x in seen], [moments(x)[1] for x in seen]
        outputs = {"counts": ends, "means": means, "variances": variances}
        unbiased = [
            [v * end / (end - 1) if end > 1 else Fraction(0) for v in row]
            for row, end in zip(variances, ends)
        ]
        wrong = [("variances are divided by count - 1", "variances", unbiased)]
        if len(set(batch_sizes)) > 1:
            equal = [
                [mean([moments(b)[0][d] for b in batches[: k + 1]]) for d in range(len(rows[0]))]
                for k in range(len(ends))
            ]
            wrong.append(("batches of different sizes have equal weight", "means", equal))
        if max(batch_sizes) > 1:
            within = [
                [
                    sum(moments(b)[1][d] * len(b) for b in batches[: k + 1]) / ends[k]
                    for d in range(len(rows[0]))
                ]
                for k in range(len(ends))
            ]
            wrong.append(
                (
                    "the batches' variances are averaged, without the spread of their means",
                    "variances",
                    within,
                )
            )
        tolerance = USUAL
        if "1000" in name:
            wrong.append("E[x^2] - E[x]^2 in float32: off by up to 0.1, possibly negative")
            tolerance = {
                "float32": {"rtol": 1e-3, "atol": 1e-3},
                "float64": {"rtol": 1e-10, "atol": 1e-10},
            }
        cases.append(
            case(
                "running_moments",
                name,
                {"rows": rows, "batch_sizes": batch_sizes},
                outputs,
                wrong,
                tolerance,
            )
        )
    return cases


def make_normalization() -> list[dict]:
    rng = random.Random(11)
    cases = []
    epsilon = Fraction("1e-8")
    # Two environments. At the third batch the second one ends: its final observation is counted
    # with that batch, and the observation after the reset as a batch of its own
    batch_sizes, D = [2, 2, 2, 1, 2], 2
    rows = draw(rng, [sum(batch_sizes), D])
    rows[-1] = [Fraction(40), Fraction(-40)]

    def normalized(count_first=True, subtract=True):
        result, seen = [], []
        limit = Decimal(10)
        ends = list(itertools.accumulate(batch_sizes))
        for end, size in zip(ends, batch_sizes, strict=True):
            batch = rows[end - size : end]
            counted = seen + batch if count_first or not seen else seen
            seen = seen + batch
            averages, variances = moments(counted)
            for row in batch:
                stds = [(dec(v) + dec(epsilon)).sqrt() for v in variances]
                centered = [dec(x - m if subtract else x) for x, m in zip(row, averages)]
                result.append([clip(x / std, -limit, limit) for x, std in zip(centered, stds)])
        return result

    wrong = [
        ("a batch is normalized before it is counted", "normalized", normalized(count_first=False)),
        ("the mean is not subtracted", "normalized", normalized(subtract=False)),
    ]
    inputs = {"rows": rows, "batch_sizes": batch_sizes, "epsilon": epsilon, "clip": Fraction(10)}
    tolerance = {"float32": {"rtol": 1e-5, "atol": 1e-5}, "float64": {"rtol": 1e-9, "atol": 1e-9}}
    cases.append(
        case(
            "normalize_obs",
            "two environments, one ends",
            inputs,
            {"normalized": normalized()},
            wrong,
            tolerance,
        )
    )

    T, N = 8, 2
    rewards = draw(rng, [T, N], 0, 3)
    rewards[6][0] = Fraction(60)
    terminations, truncations = fill([T, N], False), fill([T, N], False)
    terminations[2][1] = truncations[3][0] = truncations[5][1] = True
    gamma = Fraction("0.99")

    def scaled(cut, center=False, of_rewards=False, each=False, clip_at=10, early=False):
        counted, out, stds = [], [], []
        running = [Fraction(0)] * N
        for t in range(T):
            if early:
                running = [x * (not end) for x, end in zip(running, terminations[t])]
            running = [gamma * x + r for x, r in zip(running, rewards[t])]
            counted.append(rewards[t] if of_rewards else list(running))
            row, row_stds = [], []
            for i in range(N):
                sample = [x[i] for x in counted] if each else flat(counted)
                average, variance = moments([[x] for x in sample])
                std = (dec(variance[0]) + dec(epsilon)).sqrt()
                shift = dec(average[0]) if center else Decimal(0)
                row.append(
                    clip((dec(rewards[t][i]) - shift) / std, Decimal(-clip_at), Decimal(clip_at))
                )
                row_stds.append(std)
            out.append(row)
            stds.append(row_stds[0])
            running = [Fraction(0) if end else x for x, end in zip(running, cut[t])]
        return out, stds

    ends = either(terminations, truncations)
    never = fill([T, N], False)
    right, stds = scaled(ends)
    wrong = [
        ("the discounted return is reset at terminations only", "scaled", scaled(terminations)[0]),
        ("the discounted return is never reset", "scaled", scaled(never)[0]),
        (
            "at a termination the return is dropped before the last reward is counted (Gymnasium)",
            "scaled",
            scaled(never, early=True)[0],
        ),
        ("the mean is subtracted", "scaled", scaled(ends, center=True)[0]),
        (
            "divided by the deviation of rewards, not of discounted returns",
            "scaled",
            scaled(ends, of_rewards=True)[0],
        ),
        ("each environment has its own statistics", "scaled", scaled(ends, each=True)[0]),
        ("not clipped", "scaled", scaled(ends, clip_at=10**9)[0]),
    ]
    inputs = {
        "rewards": rewards,
        "terminations": terminations,
        "truncations": truncations,
        "gamma": gamma,
        "epsilon": epsilon,
        "clip": Fraction(10),
    }
    cases.append(
        case(
            "scale_rewards",
            "a termination and truncations",
            inputs,
            {"scaled": right, "stds": stds},
            wrong,
            tolerance,
        )
    )
    return cases


# -------------------------------------------------------------------------------------------------
# Autoreset
# -------------------------------------------------------------------------------------------------


def autoreset_trace(mode: str, lengths: list[list[int]], kinds: list[str], T: int) -> dict:
    """What a vector of counting environments returns, by the definition of the mode.

    The observation is 100 e + k after k steps of episode e (both from 0), the k-th step's reward is
    k. Episode e of environment i ends at step lengths[i][e mod len], as kinds[i] says.
    """
    N = len(lengths)
    keys = (
        "obs",
        "final_obs",
        "has_final_obs",
        "rewards",
        "terminations",
        "truncations",
        "valid",
        "next_obs",
    )
    trace = {key: [] for key in keys}
    episode, k, over = [0] * N, [0] * N, [False] * N
    for _ in range(T):
        row = {key: [] for key in keys}
        for i in range(N):
            if over[i]:  # NEXT_STEP: this call resets, and its action is ignored
                episode[i], k[i], over[i] = episode[i] + 1, 0, False
                obs = 100.0 * episode[i]
                values = (obs, 0.0, False, 0.0, False, False, False, obs)
            else:
                k[i] += 1
                reached = 100.0 * episode[i] + k[i]
                end = k[i] == lengths[i][episode[i] % len(lengths[i])]
                terminated = end and kinds[i] in ("termination", "both")
                truncated = end and kinds[i] in ("truncation", "both")
                reward, obs, final, has_final = float(k[i]), reached, 0.0, False
                if end and mode == "SAME_STEP":
                    episode[i], k[i] = episode[i] + 1, 0
                    obs, final, has_final = 100.0 * episode[i], reached, True
                elif end:
                    over[i] = True
                values = (obs, final, has_final, reward, terminated, truncated, True, reached)
            for key, value in zip(keys, values, strict=True):
                row[key].append(value)
        for key in keys:
            trace[key].append(row[key])
    return trace


def make_autoreset() -> list[dict]:
    lengths, kinds, T = [[3, 1, 2], [2, 4, 1], [4, 2, 3]], ["termination", "truncation", "both"], 12
    cases = []
    for mode in ("SAME_STEP", "NEXT_STEP"):
        trace = autoreset_trace(mode, lengths, kinds, T)
        wrong = []
        if mode == "SAME_STEP":
            wrong.append(
                (
                    "the observation after the reset is taken for what the action led to",
                    "next_obs",
                    trace["obs"],
                )
            )
            other = autoreset_trace("NEXT_STEP", lengths, kinds, T)
            wrong.append(("the mode is NEXT_STEP (Gymnasium's default)", "obs", other["obs"]))
        else:
            every = [[True] * 3 for _ in range(T)]
            wrong.append(("the row of a reset is taken for a transition", "valid", every))
            other = autoreset_trace("SAME_STEP", lengths, kinds, T)
            wrong.append(("the mode is SAME_STEP", "obs", other["obs"]))
        inputs = {
            "mode": mode,
            "episode_lengths": lengths,
            "ends_by": kinds,
            "num_steps": T,
            "first_obs": [0.0] * 3,
        }
        cases.append(
            case(
                "autoreset", f"{mode}, three counting environments", inputs, trace, wrong, INTEGERS
            )
        )
    return cases


SUBJECTS = {
    "gae": make_gae,
    "ppo": make_ppo,
    "adam": make_adam,
    "rmsprop": make_rmsprop,
    "a2c_a3c": make_a2c_a3c,
    "dqn": make_dqn,
    "per": make_per,
    "distributional": make_distributional,
    "qmix": make_qmix,
    "running_stats": make_running_stats,
    "normalization": make_normalization,
    "autoreset": make_autoreset,
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for subject, make in SUBJECTS.items():
        cases = make()
        names = {(case["operation"], case["name"]) for case in cases}
        assert len(names) == len(cases), subject
        (folder / f"{subject}.json").write_text(
            text(subject, cases), encoding="utf-8", newline="\n"
        )


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(
        Path(sys.argv[1])
        if len(sys.argv) > 1
        else Path(__file__).resolve().parent.parent / "vectors"
    )
