"""The house: one order, one text for what the scripts share, and one truth about commands and dependencies."""

import ast
import functools
import re
import sys
import tomllib
from collections import defaultdict

import pytest
from conftest import ROOT, SCRIPTS
from mutations import mutations

# Of what stands in several scripts these differ. All else of the same name is the same text
OWN = {"Args", "Agent", "train", "evaluate", "accelerate", "SCRIPT", "PACKAGES"}
RUN = """exp_name seed torch_deterministic cuda torch_threads compile track wandb_project_name wandb_entity
    capture_video save_model upload_model hf_entity checkpoint_interval run_folder resume evaluate
    eval_episodes""".split()
# Of the run's arguments these have a default or a help of the script's own
OWN_LINE = set(
    "seed torch_deterministic cuda torch_threads compile capture_video checkpoint_interval eval_episodes".split()
)
SHARED = "write_file load_checkpoint restore Run parse_args main".split()
FORBIDDEN = r"\bfilms?\b|\bfilmed\b|\bif toggled\b|\bpixels\b|\bTODO\b|\bFIXME\b|\bXXX\b|TRY NOT TO MODIFY|\bbattles?\b"
every_script = pytest.mark.parametrize("script", SCRIPTS)


@functools.cache
def text_of(script):
    return (ROOT / f"{script}.py").read_text()


def body_of(script):
    return ast.parse(text_of(script)).body


@functools.cache
def definitions(script):
    """The functions, classes and constants of a script: {name: node}, in their order."""
    nodes = {}
    for node in body_of(script):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            nodes[node.name] = node
        elif isinstance(node, ast.Assign):
            nodes[node.targets[0].id] = node
    return nodes


def source(script, node):
    """The text of a definition with its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return "\n".join(text_of(script).splitlines()[first - 1 : node.end_lineno])


def fields(script):
    """{name of an argument: (its line without the comment, the comment)}."""
    args, lines = definitions(script)["Args"], text_of(script).splitlines()
    nodes = [node for node in args.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: tuple(lines[node.lineno - 1].strip().partition("  # ")[::2]) for node in nodes}


def metadata(script):
    block = re.match(r"# /// script\n((?:#(?: .*)?\n)+?)# ///\n", text_of(script))
    assert block, "the file begins with its inline metadata (PEP 723)"
    return tomllib.loads("".join(line[2:] for line in block[1].splitlines(keepends=True)))


def requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return {line.split("#")[0].strip(): line for line in lines if line.split("#")[0].strip()}


def without_extras(pin):
    return re.sub(r"\[.*\]", "", pin)


def is_module(node):
    return isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "nn.Module" for base in node.bases)


# The layout


@every_script
def test_stations_stand_in_the_order_of_the_house(script):
    body, nodes, text = body_of(script), definitions(script), text_of(script)
    assert isinstance(body[0], ast.Expr) and f'\nr"""{ast.get_docstring(ast.parse(text), clean=False)}"""' in text
    imports = [i for i, node in enumerate(body) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert imports[0] == 1 and body[imports[-1]].lineno < nodes["Args"].lineno
    assert ast.unparse(body[-1]).startswith("if __name__ == '__main__':")
    (divider,) = [i for i, line in enumerate(text.splitlines()) if re.match(r"# -----", line)]
    assert text.splitlines()[divider].startswith("# ----- The run: ")
    above = [name for name, node in nodes.items() if node.lineno <= divider]
    below = [name for name in nodes if name not in above]
    assert above[-1] == "train" and below[:2] == ["SCRIPT", "PACKAGES"] and "evaluate" in below
    assert [name for name in below if name in SHARED] == SHARED and not set(above) & set(SHARED)
    network = next(name for name in above if is_module(nodes[name]))
    environments = next(name for name in above if name.startswith("make_"))
    assert above.index("Args") < above.index(environments) < above.index(network)


@every_script
def test_nothing_interrupts_the_algorithm(script):
    """Between the networks and the end of train no file is written or read, and nothing is shown or sent."""
    nodes = definitions(script)
    first = next(node for node in nodes.values() if is_module(node))
    algorithm = [node for node in nodes.values() if first.lineno <= node.lineno <= nodes["train"].lineno]
    libraries = "os json re shlex signal subprocess zipfile contextlib warnings platform tqdm tyro wandb".split()
    for node in algorithm:
        used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        assert not used & {"open", "print", *libraries}, f"{node.name} uses {used & set(libraries)}"
        assert not any(isinstance(each, (ast.Import, ast.ImportFrom)) for each in ast.walk(node)), node.name
    assert "self" not in {node.id for node in ast.walk(nodes["train"]) if isinstance(node, ast.Name)}


@every_script
def test_every_argument_is_one_line_with_its_help(script):
    args = definitions(script)["Args"]
    assert [type(node) for node in args.body[-1:]] == [ast.FunctionDef] and args.body[-1].name == "__post_init__"
    assert len(fields(script)) == len(args.body) - 2, "fields, a docstring and __post_init__"
    for name, (line, help_) in fields(script).items():
        assert re.fullmatch(rf"{name}: .+ = .+", line) and len(help_) > 10, f"--{name} has no help"
    names = list(fields(script))
    assert names[-len(RUN) :] == RUN, "the algorithm's fields first, then the run's"
    assert {"env_id", "total_timesteps", "learning_rate", "gamma"} <= set(names[: -len(RUN)])


def test_the_runs_arguments_are_the_same_text():
    for name in set(RUN) - OWN_LINE:
        lines = {script: fields(script)[name] for script in SCRIPTS}
        assert len(set(lines.values())) == 1, f"--{name} differs: {lines}"
    for name in ("gamma", "max_grad_norm", "bootstrap_truncation"):
        assert len({fields(script)[name][1] for script in SCRIPTS if name in fields(script)}) == 1, name


def test_what_two_scripts_share_is_the_same_text():
    texts = defaultdict(dict)
    for script in SCRIPTS:
        for name, node in definitions(script).items():
            texts[name][script] = source(script, node)
    assert set(SHARED) | {"layer_init"} <= set(texts)
    texts["make_atari"].pop("a3c_atari", None)  # other sizes
    for name in set(texts) - OWN:
        assert len(set(texts[name].values())) == 1, f"{name} differs between {sorted(texts[name])}"


# The words


@every_script
def test_title_names_symbols_papers_and_three_commands(script):
    text = text_of(script)
    title = ast.get_docstring(ast.parse(text), clean=False)
    assert len(re.findall(rf"^    python {script}\.py --(?:env-id|resume|evaluate) ", title, re.M)) == 3
    assert "arXiv:" in title
    header, *rows = re.search(r"^    symbol +variable +shape.*?\n\n", title, re.S | re.M)[0].strip("\n").splitlines()
    for row in rows:
        for name in re.findall(r"\b[a-z]\w+\b", row[header.index("variable") : header.index("shape")]):
            assert re.search(rf"\b{name}\b", text.replace(title, "")), f"{name} is not in the code"
    listed = set(re.findall(r"^\[([A-Z0-9]+)\]", title, re.M))
    assert set(re.findall(r"\[([A-Z][A-Z0-9]+|37)\]", text)) == listed, "every paper that is cited is listed"
    named = re.findall(r"(\S+)(?: below)?\sEq\. \(", text.replace(title, ""))
    assert all(re.search(r"\[\w+\]$", paper) for paper in named), "an equation names its paper"


@every_script
def test_every_public_function_has_a_docstring(script):
    for name, node in definitions(script).items():
        if not isinstance(node, ast.Assign):
            assert ast.get_docstring(node) or len(node.body) == 1, f"{name} has no docstring"


@every_script
def test_the_words_are_plain_and_no_line_is_a_banner(script):
    words = FORBIDDEN if "qmix" not in script else FORBIDDEN.removesuffix(r"|\bbattles?\b")
    assert re.findall(words, text_of(script)) == []
    assert len(re.findall(r"#\s*[-=#*]{4,}|[-=#*]{5,}\s*$", text_of(script), re.M)) <= 2  # both ends of the divider
    assert max(map(len, text_of(script).splitlines())) <= 120


@every_script
def test_tags(script):
    tags = set(re.findall(r'"f?((?:charts|losses|eval|[a-z]+)/[a-zA-Z_]+)"', text_of(script)))
    tags = {tag for tag in tags if not tag.startswith(("runs/", "videos/", "smax/", "smac/"))}
    assert {tag.split("/")[0] for tag in tags} <= {"charts", "losses", "eval"}
    assert {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/learning_rate"} <= tags
    assert 'f"eval/{name}"' in text_of(script) and '"episodic_return"' in text_of(script)


# The files around the scripts


def test_there_are_scripts_and_nothing_else_at_the_top():
    names = {"a2c_atari", "a3c_atari", "ppo_continuous", "dqn_per_atari", "qmix_smac"}
    assert set(SCRIPTS) <= {path.stem for path in ROOT.glob("*.py")} <= names


def imported(script):
    roots = set()
    for node in ast.walk(ast.parse(text_of(script))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(node.module.split(".")[0])
    return roots


@every_script
def test_inline_metadata_agrees_with_the_requirements_and_the_imports(script):
    dependencies = metadata(script)["dependencies"]
    assert metadata(script)["requires-python"].startswith(">=3.11")
    assert {without_extras(pin) for pin in dependencies} <= {without_extras(pin) for pin in requirements()}
    packages = {re.split(r"[\[=]", pin)[0].replace("-", "_") for pin in dependencies}
    optional = {"smac", "IPython"}
    third_party = imported(script) - set(sys.stdlib_module_names) - optional
    assert not third_party & {path.stem for path in ROOT.iterdir()}, "scripts import nothing of the project"
    indirect = {"moviepy", "tensorboard"}  # gymnasium writes videos with the one, torch its logs with the other
    assert packages - indirect <= third_party <= packages


def test_every_pin_is_exact_and_explained_where_it_is_old():
    used = {pin for path in ROOT.glob("*.py") for pin in metadata(path.stem)["dependencies"]}
    for pin, line in requirements().items():
        assert re.fullmatch(r"[\w\[\]-]+==[\d.]+", pin)
        assert pin in used or pin.startswith(("pytest", "ruff==")), f"nothing needs {pin}"
        assert "#" not in line or "not the newest" in line


def test_ci_runs_what_readme_says():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in ("pip install -r requirements.txt", "python -m pytest"):
        assert command in readme and command in ci.replace(" --quiet", "")


def test_every_planted_bug_has_its_place():
    assert len(mutations()) >= 80
    for row in mutations():
        assert text_of(row["script"]).count(row["old"]) == 1 and row["old"] != row["new"], row
