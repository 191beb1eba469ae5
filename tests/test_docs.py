"""The pages in docs/ say what the scripts do: excerpts, names, numbers, links, locators, exercises.

    python tests/test_docs.py        # write the numbers of new results into the pages

On a page of a script, Python blocks and the code in the table of the pseudocode are the script's own lines. A number
with a comment behind it, `2,497<!-- mean eval_return runs script=ppo_continuous env_id=... -->`, is computed from
benchmark/results; `0.99<!-- default gamma -->` is a default of the page's script.
"""

import ast
import csv
import importlib.util
import operator
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAMES = ["ppo_continuous", "a2c_atari", "a3c_atari", "dqn_per_atari", "qmix_smac"]
NAMES = [name for name in NAMES if (DOCS / f"{name}.md").exists()]
PAGES = sorted(DOCS.glob("*.md"))
PATCHES = sorted(path.stem for path in (DOCS / "exercises").glob("*.patch"))
TEMPLATE = [
    "The idea",
    "Quick facts",
    "Key equations, and the lines that compute them",
    "Pseudocode beside the code",
    "Data flow",
    "Details that matter",
    "What the log shows",
    "What it was checked against",
    "Results",
    "How to change it",
    "Exercises",
    "For a paper",
]
each_script = pytest.mark.parametrize("name", NAMES)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


def source(name):
    return (ROOT / f"{name}.py").read_text()


def page_of(name):
    return (DOCS / f"{name}.md").read_text()


def without_blocks(text):
    """A page without its fenced blocks and its comments."""
    text = re.sub(r"^( *)```.*?^ *```$", "", text, flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", "", text)


def section(text, title):
    """What a page says below one of its headings."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1]


def code_spans(text):
    return re.findall(r"`([^`\n]+)`", without_blocks(text).replace(r"\|", "|"))


def definition(name, dotted):
    """The source of a function, class or method of a script."""
    node = ast.parse(source(name))
    for part in dotted.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return ast.get_source_segment(source(name), node)


def contains_lines(text, lines):
    """Whether the lines follow each other in a text, whatever their common indentation."""
    lines = textwrap.dedent(lines).strip("\n").split("\n")
    text = text.split("\n")
    windows = (text[i : i + len(lines)] for i in range(len(text)))
    return any(textwrap.dedent("\n".join(window)).split("\n") == lines for window in windows)


# The form of a page


@each_script
def test_pages_have_one_template(name):
    text = page_of(name)
    assert re.findall(r"^## (.*)$", text, re.M) == TEMPLATE
    assert f"[`{name}.py`](../{name}.py)" in text.split("## ")[0]
    assert "```mermaid\n" in section(text, "Data flow")
    assert f"(../benchmark/figures/{name}.png)" in section(text, "Results")
    assert f"(../benchmark/tables/hyperparameters_{name}.tex)" in section(text, "For a paper")
    for part in ("Pseudocode beside the code", "What the log shows"):
        assert section(text, part).count("\n|") > 5


@each_script
def test_a_page_takes_about_ten_minutes(name):
    words = [word for word in without_blocks(page_of(name)).split() if re.search(r"\w", word)]
    assert 1000 <= len(words) <= 1800


@each_page
def test_mathematics_survives_githubs_markdown(page):
    """A backslash before punctuation is an escape there, and a star or a bar is markup."""
    prose = re.sub(r"`[^`\n]+`", "", without_blocks(page.read_text()))
    assert prose.count("$") % 2 == 0
    for formula in re.findall(r"\$([^$]*)\$", prose):
        assert not re.search(r"\\[^a-zA-Z]|[*|<>#\n]|^\s|\s$", formula), formula


@each_page
def test_links_lead_somewhere(page):
    text = re.sub(r"^( *)```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            path = (page.parent / path).resolve() if path else page
            assert path.exists(), target
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M) if anchor else []
            anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert not anchor or anchor in anchors, target


# Code on a page


@each_script
def test_blocks_are_the_scripts_lines(name):
    """Before each Python block stands the name of what it is an excerpt from."""
    text = page_of(name)
    excerpts = re.findall(r"^In `([\w.]+)`[^\n]*:\n\n```python\n(.*?)^```$", text, re.M | re.S)
    assert len(excerpts) == text.count("```python") >= 2
    for dotted, lines in excerpts:
        for part in lines.split("...\n"):
            assert contains_lines(definition(name, dotted), part), f"{dotted} has no longer:\n{part}"


@each_script
def test_code_beside_the_pseudocode_is_the_scripts(name):
    rows = [row for row in section(page_of(name), "Pseudocode beside the code").split("\n") if row.startswith("|")]
    lines = [line.strip() for line in source(name).split("\n")]
    for row in rows[2:]:
        for code in code_spans(row.replace(r"\|", "\0").split("|")[-2].replace("\0", "|")):
            assert any(line == code or line.startswith(f"{code}  # ") for line in lines), code


@each_script
def test_code_in_the_text_is_the_scripts(name):
    """Names, flags and tags that a page mentions occur in its script."""
    text, page = source(name), page_of(name).replace(section(page_of(name), "What it was checked against"), "")
    flags = {node.target.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.AnnAssign)}
    for code in code_spans(page):
        flag = re.match(r"--(no-)?([\w-]+)", code)
        if flag:
            assert flag[2].replace("-", "_") in flags, code
        elif re.fullmatch(r"(charts|losses|eval)/\w+", code):
            assert code in text or re.search(rf"\b{code.split('/')[1]}\b", text), code
        elif not (re.match(r"git |python |pip ", code) or (ROOT / code).exists() or code in citations()):
            names = re.findall(r"[A-Za-z_]\w*", code)
            assert code in text or all(re.search(rf"\b{part}\b", text) for part in names), code


def logged(name):
    """The last parts of the tags that a script logs: the keys of what is logged, called metrics, or made by a loss."""
    keys = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.FunctionDef) and (
            node.name.endswith("_loss") or node.name in ("minibatch_step", "evaluate")
        ):
            parts = [part for part in ast.walk(node) if isinstance(part, (ast.Assign, ast.Return))]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".log", ".metrics.put")):
            parts = [node]
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            parts = [node] if ast.unparse(target) == "metrics" else []
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "metrics":
                keys.add(target.slice.value)
        else:
            continue
        dictionaries = [part for each in parts for part in ast.walk(each) if isinstance(part, ast.Dict)]
        keys |= {key.value for each in dictionaries for key in each.keys if isinstance(key, ast.Constant)}
    return {key.split("/")[-1] for key in keys} - {"agent", "obs_stats"}  # evaluate also restores


@each_script
def test_every_metric_is_explained(name):
    tags = re.findall(r"`((?:charts|losses|eval)/\w+)`", section(page_of(name), "What the log shows"))
    assert {tag.split("/")[1] for tag in tags} == logged(name)
    assert "eval/episodic_return" in tags
    short = {
        "ppo_continuous": "PPO",
        "a2c_atari": "A2C",
        "a3c_atari": "A3C",
        "dqn_per_atari": "DQN",
        "qmix_smac": "QMIX",
    }
    rows = [line.split("|") for line in (DOCS / "README.md").read_text().splitlines() if "/" in line and "|" in line]
    mine = [row[1] for row in rows if row[2].strip() == "all" or short[name] in re.findall(r"\w+", row[2])]
    assert set(tags) == set(re.findall(r"`((?:charts|losses|eval)/\w+)`", " ".join(mine)))


# Numbers


def table(pattern):
    """The rows of a table of benchmark/results, or of several."""
    rows = []
    for path in sorted((ROOT / "benchmark" / "results").glob(f"{pattern}.csv")):
        with open(path, newline="") as file:
            rows += csv.DictReader(file)
    if pattern == "runs":  # of each seed the newest run, as in the tables
        key = operator.itemgetter("script", "env_id", "variant", "seed")
        rows = {key(row): row for row in sorted(rows, key=operator.itemgetter("ended"))}.values()
    return list(rows)


def measured(name, query):
    """The number that a comment asks for: `default FIELD`, or `STATISTIC COLUMN TABLE key=value key<=number ...`.

    A comment in HTML may hold no two hyphens, so the flags of a variant stand without theirs.
    """
    what, column, *rest = shlex.split(query)
    if what == "default":
        fields = [node for node in ast.walk(ast.parse(definition(name, "Args"))) if isinstance(node, ast.AnnAssign)]
        return next(ast.literal_eval(field.value) for field in fields if field.target.id == column)
    rows = table(rest[0])
    for condition in rest[1:]:
        key, sign, value = re.match(r"(\w+)(<=|>=|=)(.*)", condition).groups()
        if sign == "=":
            rows = [row for row in rows if row[key].replace("--", "") == value]
        else:
            rows = [row for row in rows if (float(row[key]) <= float(value)) == (sign == "<=")]
    values = [float(row[column]) for row in rows]
    return {"mean": statistics.mean, "median": statistics.median, "min": min, "max": max, "count": len}[what](values)


def with_numbers(name, text):
    """The page with each of its numbers as it should be, with as many decimals as it has."""

    def replace(match):
        old, query = match.groups()
        value = measured(name, query)
        if "e" in old and float(old) == value:
            return match[0]
        decimals = len(old.partition(".")[2])
        return f"{value:,.{decimals}f}<!-- {query} -->"

    return re.sub(r"(-?\d[\d,.]*(?:e-?\d+)?)<!-- (.*?) -->", replace, text)


@each_page
def test_numbers_are_those_of_results_and_defaults(page):
    text = page.read_text()
    assert text.count("<!--") == len(re.findall(r"\d<!-- (.*?) -->", text))
    assert text == with_numbers(page.stem, text), "python tests/test_docs.py writes them anew"


# Papers


def citations():
    return set(re.findall(r"^@\w+\{(\w+),", (DOCS / "references.bib").read_text(), re.M))


def test_every_paper_of_a_script_is_in_the_bibliography():
    bibliography = (DOCS / "references.bib").read_text()
    assert len(citations()) == len(re.findall(r"^@", bibliography, re.M))
    for name in NAMES:
        title = ast.get_docstring(ast.parse(source(name)))
        for number in re.findall(r"arXiv:(\d{4}\.\d{5})", title):
            assert f"{{{number}}}" in bibliography, number


def locators(text):
    """Where a text points to: `[PPO] Eq. (7)`, `[PER] Alg. 1, lines 8 to 15`. A line may be broken within one."""
    text = re.sub(r"\s*\n[ #|]*", " ", text)
    place = r'(?:Suppl\. |below )?(?:Eq\. \(\d+\)|Alg\. \w+|(?:Sec|App|Fig)\. [\w.]*\w|Methods|"[^"]+"|'
    place += r"(?:core |continuous )?details? \d+(?: and \d+)?)(?:, lines? \d+(?:(?: to| and|,) \d+)*)?"
    return {f"[{tag}] {where}" for tag, where in re.findall(rf"\[([A-Z0-9]{{2,}})\],? ({place})", text)}


def test_locators_are_known():
    """Every place in a paper that a script or a page points to was looked up: docs/locators.csv says what is there."""
    with open(DOCS / "locators.csv", newline="") as file:
        known = {f"[{row['paper']}] {row['place']}" for row in csv.DictReader(file)}
    used = set().union(*(locators(source(name)) for name in NAMES), *(locators(page.read_text()) for page in PAGES))
    assert used == known


# Differences


def test_differences_are_in_the_diff():
    """In the tables of differences.md the code in a script's column is its own, and not the other script's."""
    parts = re.split(r"^## .*$", (DOCS / "differences.md").read_text(), flags=re.M)[1:]
    compared = [re.search(r"^\| what, and why \| `(\w+)\.py` \| `(\w+)\.py` \|", part, re.M) for part in parts]
    assert sum(map(bool, compared)) >= 3
    for part, match in zip(parts, compared):
        names = match.groups() if match else ()
        rows = [row.replace(r"\|", "\0").split("|") for row in part.split("\n") if row.startswith("|")][2:]
        for row in rows if match else ():
            for i, name in enumerate(names):
                for code in code_spans(row[2 + i].replace("\0", "|")):
                    assert code in source(name), code
                    assert code not in source(names[1 - i]), f"{code} is in both"


# Exercises: a planted bug each. A symptom is a function of the script, true where the bug is


def load(path):
    """A script as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_an_exercise", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def patched(patch, folder):
    """The script of an exercise, a copy with its bug."""
    script = folder / f"{patch.rpartition('_')[0]}.py"
    script.write_text(source(script.stem))
    subprocess.run(["git", "apply", DOCS / "exercises" / f"{patch}.patch"], cwd=folder, check=True)
    return script


def random_batch():
    """T = 6 steps of N = 3 environments: rewards, values, next values, no termination, truncations."""
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.standard_normal((3, 6, 3))
    ends = np.zeros((2, 6, 3), bool)
    return rewards, values, next_values, *ends


def rewards_leak_through_a_truncation(module):
    rewards, values, next_values, terminations, truncations = random_batch()
    truncations[2] = True
    other = rewards.copy()
    other[3:] += 1
    rest = values, next_values, terminations, truncations, 0.99, 0.95
    return not np.array_equal(module.compute_gae(rewards, *rest)[:3], module.compute_gae(other, *rest)[:3])


def the_ratio_is_always_one(module):
    logprobs, old_logprobs, *rest = torch.randn(6, 8)
    values, old_values, advantages, returns = rest
    args = SimpleNamespace(norm_adv=True, clip_coef=0.2, clip_vloss=True, ent_coef=0.0, vf_coef=0.5)
    inputs = logprobs, torch.tensor(1.0), values, old_logprobs, old_values, advantages, returns, args
    metrics = module.ppo_loss(*inputs)[1]
    return metrics["clipfrac"] == metrics["approx_kl"] == metrics["old_approx_kl"] == 0


def evaluation_ignores_the_statistics(module):
    args = module.Args(env_id="Pendulum-v1", eval_episodes=1, num_minibatches=1)
    torch.manual_seed(0)
    agent, scores = module.Agent(3, 1), []
    torch.nn.init.normal_(agent.actor[-1].weight)
    for mean in (0.0, 1.0):
        stats = {"count": 2, "mean": torch.full((3,), mean, dtype=float), "m2": torch.full((3,), 2.0, dtype=float)}
        model = {"global_step": 0, "agent": agent.state_dict(), "obs_stats": stats}
        scores += module.evaluate(args, model, Path())["episodic_return"]
    return scores[0] == scores[1]


def discrete_batch(**changes):
    """Arguments of a2c_loss for 8 samples of 4 actions, and the logits, which have a gradient."""
    torch.manual_seed(0)
    logits = torch.randn(8, 4, requires_grad=True)
    batch = dict(values=torch.randn(8), actions=torch.randint(4, (8,)), chosen=torch.ones(8))
    batch |= dict(advantages=torch.randn(8), returns=torch.randn(8)) | changes
    return logits, (logits, *batch.values(), SimpleNamespace(ent_coef=0.01, vf_coef=0.5))


def the_loss_lowers_the_entropy(module):
    logits, batch = discrete_batch(advantages=torch.zeros(8))
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    loss, _ = module.a2c_loss(*batch)
    gradients = [torch.autograd.grad(what, logits, retain_graph=True)[0] for what in (loss, entropy)]
    return (gradients[0] * gradients[1]).sum() > 0  # against the loss's gradient the entropy falls


def an_advantage_moves_other_actions(module):
    advantages = torch.zeros(8)
    advantages[0] = 1.0
    logits, batch = discrete_batch(advantages=advantages)
    batch[-1].ent_coef = 0.0
    (gradient,) = torch.autograd.grad(module.a2c_loss(*batch)[0], logits)
    return bool(gradient[1:].any())


def the_return_goes_on_after_the_end(module):
    rewards, values, next_values, terminations, truncations = random_batch()
    terminations[5] = True
    advantages = module.compute_gae(rewards, values, next_values, terminations, truncations, 0.99, 1.0)
    return not np.allclose(advantages[5] + values[5], rewards[5])


def run_worker(module, rank=0, loss=None):
    """Two rollouts of an A3C worker in this process: what it acts on, (observation, state), and its gradients."""
    args = module.Args(total_timesteps=24, num_steps=20, max_episode_length=12, checkpoint_interval=10**9)
    theta, _ = module.flatten(module.Agent(module.AtariEnvs(args, 1, Path()).num_actions))
    seen, gradients = [], []

    def traced_step(agent, *_):
        return lambda obs, state: (seen.append((obs, state)), agent.step(obs, state))[1]

    module.traced_step, module.prepare_worker = traced_step, lambda args: torch.device("cpu")
    module.a3c_loss = loss or module.a3c_loss
    shared = SimpleNamespace(theta=theta, steps=torch.zeros(args.num_workers, dtype=torch.int64))
    shared.optimizers = [SimpleNamespace(step=lambda theta, gradient, rate: gradients.append(gradient.clone()))]
    shared.checkpoint_step = torch.tensor(0)
    shared.metrics = SimpleNamespace(put=lambda point: point[1] or shared.checkpoint_step.fill_(args.total_timesteps))
    torch.manual_seed(0)
    module.actor_learner(rank, args, Path(), shared)
    return seen, gradients


def gradients_add_up(module):
    factors = iter([1, 0])  # the loss of the second rollout is 0, and so should its gradient be

    def loss(*inputs, a3c_loss=module.a3c_loss):
        loss, metrics = a3c_loss(*inputs)
        return loss * next(factors), metrics

    _, (first, second) = run_worker(module, loss=loss)
    return bool(first.any() and second.any())


def an_episode_begins_with_a_memory(module):
    seen, _ = run_worker(module)
    return bool(seen[12][1][0].any())


def all_workers_play_the_same(module):
    first, second = (torch.cat([obs for obs, _ in run_worker(module, rank)[0]]) for rank in (0, 1))
    return torch.equal(first, second)


def the_target_is_the_online_network(module):
    same = []

    def td_loss(q_network, target_network, *rest, td_loss=module.td_loss):
        same.append(q_network is target_network)
        return td_loss(q_network, target_network, *rest)

    module.td_loss, module.evaluate = td_loss, lambda *_: {"episodic_return": [0.0]}
    args = dict(num_envs=2, updates=1, batch_size=2, buffer_size=64, learning_starts=8, target_interval=2)
    args = module.Args(**args, total_timesteps=40, cuda=False, torch_threads=1, env_threads=1)
    with tempfile.TemporaryDirectory() as folder:
        module.train(args, Path(folder), None)
    return any(same)


def the_largest_weight_is_not_one(module):
    probabilities = np.random.default_rng(0).random(32)
    large, small = (module.importance_weights(probabilities / size, 0.5).max() for size in (10**6, 10**3))
    return large > small > 1  # of memories of these sizes


def stacks_mix_the_newest_and_the_oldest_frames(module):
    args = module.Args(num_envs=1, buffer_size=16, learning_starts=8, prioritized=False)
    replay, rng = module.Replay(args), np.random.default_rng(0)
    for t in range(40):  # one long episode, each frame of one grey value, the number of its step
        nothing = np.zeros(1, int)
        replay.add(np.full((1, 84, 84), t), np.array([t]), nothing, nothing, np.zeros(1, bool))
    stacks = replay.sample(64, 1.0, rng)[1][0][:, :, 0, 0].astype(int)  # (64, 4)
    return bool((np.diff(stacks) != 1).any())


def q_tot_falls_where_a_value_rises(module):
    torch.manual_seed(0)
    shape = module.Shape(n_agents=3, n_actions=4, obs_dim=5, state_dim=6)
    agent_qs = torch.randn(64, 3, requires_grad=True)
    (slopes,) = torch.autograd.grad(module.QMixer(shape, 8, 8)(agent_qs, torch.randn(64, 6)).sum(), agent_qs)
    return bool((slopes < 0).any())


def team(module):
    """Networks of 2 agents with 3 actions, the last of which is never available, and a batch of 2 episodes."""
    torch.manual_seed(0)
    args = module.Args(mixer="vdn", rnn_hidden_dim=8)
    agent, mixer = module.make_networks(args, module.Shape(n_agents=2, n_actions=3, obs_dim=5, state_dim=6))
    filled = torch.ones(5, 2, dtype=torch.bool)
    filled[3:, 1] = False  # of 4 and 2 steps
    avail_actions = torch.tensor([True, True, False]).expand(5, 2, 2, 3) & filled[..., None, None]
    tensors = dict(obs=torch.randn(5, 2, 2, 5), state=torch.randn(5, 2, 6), avail_actions=avail_actions, filled=filled)
    tensors |= dict(
        actions=torch.randint(2, (4, 2, 2)), rewards=torch.randn(4, 2, 1), no_bootstrap=torch.zeros(4, 2, 1)
    )
    return agent, mixer, module.Episode(**tensors), args


def an_unavailable_action_is_a_target(module):
    agent, mixer, batch, args = team(module)
    targets = []
    for bias in (0.0, 100.0):
        agent.fc2.bias.data[2] = bias
        targets.append(module.qmix_loss(agent, mixer, agent, mixer, batch, args)[1]["target_mean"])
    return not torch.equal(*targets)


def a_value_knows_the_action_that_is_taken(module):
    agent, mixer, batch, args = team(module)
    values, unroll = [], agent.unroll
    agent.unroll = lambda *inputs: (values.append(unroll(*inputs)), values[-1])[1]
    for actions in (batch.actions, 1 - batch.actions):
        module.qmix_loss(agent, mixer, agent, mixer, batch._replace(actions=actions), args)
    return not torch.equal(values[0][0], values[2][0])  # at the first step, before any action


SYMPTOMS = {
    "ppo_continuous_1": rewards_leak_through_a_truncation,
    "ppo_continuous_2": the_ratio_is_always_one,
    "ppo_continuous_3": evaluation_ignores_the_statistics,
    "a2c_atari_1": the_loss_lowers_the_entropy,
    "a2c_atari_2": an_advantage_moves_other_actions,
    "a2c_atari_3": the_return_goes_on_after_the_end,
    "a3c_atari_1": gradients_add_up,
    "a3c_atari_2": an_episode_begins_with_a_memory,
    "a3c_atari_3": all_workers_play_the_same,
    "dqn_per_atari_1": the_target_is_the_online_network,
    "dqn_per_atari_2": the_largest_weight_is_not_one,
    "dqn_per_atari_3": stacks_mix_the_newest_and_the_oldest_frames,
    "qmix_smac_1": q_tot_falls_where_a_value_rises,
    "qmix_smac_2": an_unavailable_action_is_a_target,
    "qmix_smac_3": a_value_knows_the_action_that_is_taken,
}


@pytest.mark.parametrize("patch", PATCHES)
def test_an_exercise_shows_its_symptom(patch, tmp_path):
    name = patch.rpartition("_")[0]
    torch.set_num_threads(1)
    assert not SYMPTOMS[patch](load(ROOT / f"{name}.py"))
    assert SYMPTOMS[patch](load(patched(patch, tmp_path)))


@each_script
def test_exercises_are_small_and_explained(name):
    text = section(page_of(name), "Exercises")
    assert f"docs/exercises/{name}_1.patch" in text
    assert [f"{name}_{i}" for i in (1, 2, 3)] == [patch for patch in PATCHES if patch.startswith(f"{name}_")]
    for i in (1, 2, 3):
        lines = (DOCS / "exercises" / f"{name}_{i}.patch").read_text().split("\n")
        assert sum(line.startswith("@@") for line in lines) == 1
        assert sum(bool(re.match(r"[+-](?![+-])", line)) for line in lines) <= 4
        assert len(re.findall(rf"^\*\*{i}\.\*\* \S", text, re.M)) == 1
    assert text.count("<summary>Hint</summary>") == text.count("<summary>Explanation</summary>") == 3


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_numbers(page.stem, page.read_text()))
