"""The house: one order, one text for what the scripts share, and one truth about commands and dependencies."""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ["a2c_atari", "a3c_atari", "ppo_continuous", "dqn_per_atari", "qmix_smac"]
SCRIPTS = [ROOT / f"{name}.py" for name in NAMES if (ROOT / f"{name}.py").exists()]
OWN = {"Args", "Agent", "train", "make_env", "make_envs", "evaluate", "main"}  # what differs from script to script
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def module_of(script):
    return ast.parse(script.read_text())


def definitions(script):
    return {node.name: node for node in module_of(script).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def metadata(script):
    block = re.match(r"# /// script\n((?:#(?: .*)?\n)+?)# ///\n", script.read_text())
    assert block, "the file begins with its inline metadata (PEP 723)"
    return tomllib.loads("".join(line[2:] for line in block[1].splitlines(keepends=True)))


def requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return {line.split("#")[0].strip(): line for line in lines if line.split("#")[0].strip()}


def test_there_are_scripts_and_nothing_else_at_the_top():
    assert SCRIPTS
    assert {path.stem for path in ROOT.glob("*.py")} <= set(NAMES)


@every_script
def test_stations_stand_in_the_order_of_the_house(script):
    body = module_of(script).body
    assert isinstance(body[0], ast.Expr) and re.search(r'^r"""', script.read_text(), re.M), "a raw title docstring"
    first_import = next(i for i, node in enumerate(body) if isinstance(node, (ast.Import, ast.ImportFrom)))
    assert first_import == 1
    names = list(definitions(script))
    networks = [
        name
        for name in names
        if any("Module" in ast.unparse(b) for b in getattr(definitions(script)[name], "bases", []))
    ]
    environments = next(name for name in names if name.startswith("make_env"))
    stations = ["Args", environments, networks[0], "evaluate", "save_checkpoint", "train", "main"]
    assert [name for name in names if name in stations] == stations
    assert ast.unparse(body[-1]).startswith("if __name__ == '__main__':")
    assert "self" not in {node.id for node in ast.walk(definitions(script)["train"]) if isinstance(node, ast.Name)}


@every_script
def test_title_names_symbols_papers_and_three_commands(script):
    title = ast.get_docstring(module_of(script))
    assert len(re.findall(rf"^    python {script.name}", title, re.M)) == 3
    assert "arXiv:" in title and re.search(r"symbol +variable +shape", title)
    locators = set(re.findall(r"\[([A-Z]+|37)\]", script.read_text()))
    assert locators <= set(re.findall(r"^\[([A-Z]+|37)\]", title, re.M)), "every paper that is cited is listed"


@every_script
def test_every_argument_is_documented(script):
    fields = definitions(script)["Args"].body
    for field, text in pairwise(fields):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr) and len(text.value.value) > 10, f"{field.target.id} has no help"


@every_script
def test_every_public_function_has_a_docstring(script):
    for name, node in definitions(script).items():
        assert ast.get_docstring(node) or len(node.body) == 1, f"{name} has no docstring"


@every_script
def test_the_known_flags_are_there(script):
    fields = {node.target.id for node in definitions(script)["Args"].body if isinstance(node, ast.AnnAssign)}
    known = """env_id seed total_timesteps learning_rate gamma cuda torch_deterministic track wandb_project_name
        wandb_entity capture_video save_model upload_model hf_entity checkpoint_interval resume evaluate eval_episodes
        compile torch_threads exp_name strict_cuda"""
    assert not set(known.split()) - fields


def test_arguments_of_the_same_name_have_the_same_help_where_they_mean_the_same():
    helps = defaultdict(dict)
    for script in SCRIPTS:
        fields = definitions(script)["Args"].body
        for field, text in pairwise(fields):
            if isinstance(field, ast.AnnAssign):
                helps[field.target.id][script.stem] = text.value.value
    for name in "exp_name torch_deterministic track wandb_entity hf_entity resume gamma max_grad_norm".split():
        assert len(set(helps[name].values())) <= 1, f"--{name} is explained differently: {helps[name]}"


def test_what_two_scripts_share_is_the_same_text():
    texts = defaultdict(dict)
    for script in SCRIPTS:
        for name, node in definitions(script).items():
            texts[name][script.stem] = ast.get_source_segment(script.read_text(), node)
    for name in set(texts) - OWN:
        assert len(set(texts[name].values())) == 1, f"{name} differs between {sorted(texts[name])}"


@every_script
def test_scripts_import_nothing_of_the_project(script):
    own = set(NAMES) | {"tests", "benchmark", "docs"}
    assert not imported(script) & own


def imported(script):
    roots = set()
    for node in ast.walk(module_of(script)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(node.module.split(".")[0])
    return roots


@every_script
def test_inline_metadata_agrees_with_the_requirements_and_the_imports(script):
    dependencies = metadata(script)["dependencies"]
    assert metadata(script)["requires-python"] == ">=3.11"
    pins = {re.sub(r"\[.*\]", "", pin) for pin in requirements()}
    assert not {re.sub(r"\[.*\]", "", line) for line in dependencies} - pins, "the same pins as requirements.txt"
    packages = {re.split(r"[\[=]", line)[0].replace("-", "_") for line in dependencies}
    optional = {"shimmy", "smac", "IPython"}  # said in one line when missing
    third_party = imported(script) - set(sys.stdlib_module_names) - optional
    assert third_party <= packages, "every import is a dependency"
    indirect = {"moviepy"}  # gymnasium writes videos with it
    assert packages - indirect <= third_party, "every dependency is imported"


def test_every_pin_is_exact_and_used_and_explained_where_it_is_old():
    used = {line for script in SCRIPTS for line in metadata(script)["dependencies"]}
    for pin, line in requirements().items():
        assert re.fullmatch(r"[\w\[\]-]+==[\d.]+", pin)
        assert pin in used or pin.startswith(("pytest==", "pytest-xdist==", "ruff==")), f"nothing needs {pin}"
        assert "#" not in line or "not the newest" in line


@every_script
def test_run_folder_and_tags(script):
    text = script.read_text()
    assert """f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__""" in text
    tags = set(re.findall(r'"((?:charts|losses|eval|[a-z]+)/[a-z_A-Z]+)"', text))
    tags = {tag for tag in tags if not tag.startswith(("runs/", "dm_control/"))}
    assert {tag.split("/")[0] for tag in tags} <= {"charts", "losses", "eval"}
    assert {"charts/episodic_return", "charts/SPS", "charts/checkpoint", "eval/episodic_return"} <= tags


@every_script
def test_comments_plead_and_promise_nothing(script):
    assert not re.search(r"TODO|FIXME|XXX|TRY NOT TO MODIFY|# ?[-=#*]{4,}", script.read_text())


def test_ci_runs_what_readme_says():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in ("pip install -r requirements.txt", "python -m pytest"):
        assert command in readme and command in ci.replace(" --quiet", "")


def test_readme_counts_the_lines_of_the_scripts():
    readme = (ROOT / "README.md").read_text()
    for name in NAMES:
        row = next(line for line in readme.splitlines() if line.startswith("|") and f"`{name}.py`" in line)
        if (ROOT / f"{name}.py").exists():
            assert f"| {len((ROOT / f'{name}.py').read_text().splitlines())} |" in row
        else:
            assert "not there yet" in row
