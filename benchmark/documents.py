"""What documents say is what the scripts are: numbers, links, flags, excerpts, packages, papers.

`python benchmark/tables.py --check` calls it. Documents are the README.md files and the pages in
docs. What is checked in them:

* A number with a comment: `2,497<!-- mean eval_return runs script=ppo_continuous env_id=... -->`
  is the mean, median, iqm (interquartile mean), min, max or count of a column of a table of
  results, `0.99<!-- default gamma -->` a default of the page's script (elsewhere: `<!-- default
  gamma a2c_atari -->`).
* Links within the project and their anchors. `python benchmark/tables.py` sets the lines of links
  to functions, [`name`](../X.py#L1); a line that has moved since is no fault.
* Flags: in commands (`python X.py --flag`), and of the page's script or any script in `--flag`.
* Code: a block of ```python on a script's page is an excerpt, of `name` if the line before it
  starts with "In [`name`]"; "..." stands for lines left out. (Write ```py above code that is not
  the script's.) In a table, code below a head `X.py` or "our line" is code of that script.
* Tags `losses/name` that a script logs, papers and their places, formulas that GitHub can show.
* The test vectors, and the Python on their page.
"""

import ast
import contextlib
import csv
import filecmp
import functools
import operator
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

from common import RESULTS, ROOT, SCRIPTS, arguments, source

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)
GENERATED = re.compile(r"^<!-- (\w+) -->\n.*?^<!-- end of \1 -->$", re.M | re.S)
NUMBER = re.compile(r"(-?\d[\d,.]*(?:e-?\d+)?)<!-- (.*?) -->")
STATISTICS = {"mean": statistics.mean, "median": statistics.median, "min": min, "max": max}
STATISTICS |= {"iqm": lambda x: statistics.mean(sorted(x)[len(x) // 4 : -(len(x) // 4) or None])}
STATISTICS["count"] = len
LINE = re.compile(r"\[`([\w.]+)`\]\(\.\./(\w+)\.py#L\d+\)")
FOREIGN = {"--config", "--profile"}  # flags of Snakemake


def documents() -> list[Path]:
    """The README.md files and the pages."""
    folders = ("", "benchmark", "tests", "tools", "vectors", "variants", "docs")
    return [path for folder in folders for path in sorted((ROOT / folder).glob("*.md"))]


def definition(script: str, dotted: str) -> ast.AST | None:
    """A function, class or method of a script, if there is one."""
    node = ast.parse(source(script))
    for part in dotted.split("."):
        node = next((child for child in node.body if getattr(child, "name", None) == part), None)
        if node is None:
            return None
    return node


def contains_lines(text: str, lines: str) -> bool:
    """Whether the lines follow each other in a text, whatever their common indentation."""
    wanted = textwrap.dedent(lines).strip("\n").split("\n")
    text = text.split("\n")
    for start in range(len(text) - len(wanted) + 1):
        window = "\n".join(text[start : start + len(wanted)])
        if textwrap.dedent(window).split("\n") == wanted:
            return True
    return False


def spans(text: str) -> list[str]:
    """The code spans of a text without its blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text).replace(r"\|", "|"))


# ----- Numbers -----


@functools.cache
def table(name: str) -> list[dict]:
    """The rows of a table of results, or of several (`ppo_continuous/Hopper*`).

    Of runs the newest of each seed.
    """
    rows = []
    for path in sorted(RESULTS.glob(f"{name}.csv")):
        with open(path, newline="") as file:
            rows += csv.DictReader(file)
    if name == "runs":
        key = operator.itemgetter("script", "env_id", "variant", "seed")
        ended = sorted(rows, key=operator.itemgetter("ended"))
        rows = list({key(row): row for row in ended}.values())
    return rows


def measured(page: Path, query: str) -> float:
    """The number that a comment asks for. Raises ValueError if there is none.

    A comment in HTML must not hold two hyphens, so flags of a variant stand without them. Values
    of which any will do are separated by |.
    """
    what, column, *words = shlex.split(query)
    if what == "default":
        script = words[0] if words else page.stem
        flag = f"--{column.replace('_', '-')}"
        if flag not in arguments(script):
            raise ValueError(f"{script}.py has no {flag}")
        return float(ast.literal_eval(arguments(script)[flag][0]))
    rows = table(words[0])
    for condition in words[1:]:
        key, sign, value = re.match(r"(\w+)(<=|>=|=)(.*)", condition).groups()
        if sign == "=":
            rows = [row for row in rows if row[key].replace("--", "") in value.split("|")]
        else:
            rows = [row for row in rows if (float(row[key]) <= float(value)) == (sign == "<=")]
    if not rows:
        raise ValueError("no row of the results")
    counts = [int(row["count"]) if column == "value" else 1 for row in rows]  # points in a bin
    return STATISTICS[what]([float(x[column]) for x, n in zip(rows, counts) for _ in range(n)])


def with_lines(text: str) -> str:
    """A page whose links to functions lead to their lines."""

    def replace(match: re.Match) -> str:
        name, script = match.groups()
        node = definition(script, name)
        return f"[`{name}`](../{script}.py#L{node.lineno})" if node else match.group(0)

    return LINE.sub(replace, text)


def with_numbers(page: Path, text: str) -> str:
    """A page with each of its numbers as it should be, with as many decimals as it has."""

    def replace(match: re.Match) -> str:
        number, query = match.groups()
        value = measured(page, query)
        if "e" in number and float(number) == value:
            return match.group(0)
        decimals = len(number.partition(".")[2])
        return f"{value:,.{decimals}f}<!-- {query} -->"

    return NUMBER.sub(replace, text)


def check_numbers(page: Path, text: str) -> Iterator[str]:
    for number, query in NUMBER.findall(text):
        try:
            new = with_numbers(page, f"{number}<!-- {query} -->").partition("<")[0]
            if new != number:
                yield f"{number} should be {new} ({query})"
        except (ValueError, KeyError, OSError) as error:
            yield f"{number} has no source ({query}): {error}"


# ----- Links, commands, code -----


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def check_links(page: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if not re.match(r"\w+:", target):
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists():
                yield f"the link {target} leads nowhere"
            elif anchor and path.suffix == ".md":
                if anchor not in anchors(text if path == page else path.read_text()):
                    yield f"the link {target} has no such heading"
    for name, script in LINE.findall(text):
        if definition(script, name) is None:
            yield f"{script}.py has no {name}"


@functools.cache
def flags(path: Path) -> set[str]:
    """The flags that a program of the project takes."""
    known = arguments(path.stem)
    if path.parent == ROOT and known:
        return {*known, *(f"--no-{flag[2:]}" for flag in known), "--help"}
    return {*re.findall(r'"(--[\w-]+)"', path.read_text()), "--help"}


def check_command(command: str) -> Iterator[str]:
    """Flags behind `X.py`, up to a lone `--`, a comment or the next command."""
    for name, words in re.findall(r"(?<![\w/.])([\w/]+\.py)\b([^\n;&|#]*)", command):
        path = ROOT / name
        if not path.exists():
            if "/" in name:
                yield f"there is no {name}"
            continue
        own, _, script = words.partition(" -- ")
        for flag in re.findall(r"(?<=\s)--[\w-]+", own):
            if flag not in flags(path):
                yield f"{name} has no {flag}"
        if path.name == "tune.py" and own.split():
            tuned = ROOT / f"{own.split()[0]}.py"
            for flag in re.findall(r"(?<!\S)--[\w-]+", script):
                if flag not in flags(tuned):
                    yield f"{tuned.name} has no {flag}"


def check_flags(page: Path, text: str) -> Iterator[str]:
    if page.stem in ("CHANGELOG", "LABBOOK") or page.parent.name == "variants":
        return  # flags of older scripts, and of patches
    scripts = [page.stem] if page.stem in SCRIPTS else SCRIPTS
    blocks = [code for _, kind, code in FENCE.findall(text) if kind in ("bash", "sh", "")]
    for command in [*blocks, *(span for span in spans(text) if ".py " in span)]:
        yield from check_command(command.replace("\\\n", " "))
    programs = [ROOT / f"{script}.py" for script in scripts]
    programs += [*(ROOT / "benchmark").glob("*.py"), *(ROOT / "tools").glob("*.py")]
    known = FOREIGN.union(*(flags(path) for path in programs))
    for span in spans(text):
        flag = re.match(r"--[\w-]+", span)
        if flag and flag.group() not in known:
            yield f"no script has {flag.group()}"


def check_code(page: Path, text: str) -> Iterator[str]:
    """Excerpts and tags on a script's page, and code in the columns of tables."""
    script = page.stem if page.stem in SCRIPTS else None
    for match in FENCE.finditer(text) if script else ():
        _, kind, code = match.groups()
        if kind != "python":
            continue
        line = text[: match.start()].rstrip("\n").split("\n")[-1]
        name = re.match(r"In \[`([\w.]+)`\]", line)
        node = definition(script, name.group(1)) if name else None
        where = ast.get_source_segment(source(script), node) if node else source(script)
        for part in code.split("...\n"):
            if not contains_lines(where, part):
                place = name.group(1) if name else f"{script}.py"
                yield f"{place} has no longer: {' / '.join(part.split(chr(10))).strip(' /')}"
    tags = r"(?:charts|losses|eval)/\w+"
    for tag in [span for span in spans(text) if re.fullmatch(tags, span)]:
        name, places = tag.split("/")[1], [script] if script else SCRIPTS
        if not any(re.search(rf"\b{name}\b", source(place)) for place in places):
            yield f"no script logs {tag}"
    yield from check_columns(script, text)


def check_columns(script: str | None, text: str) -> Iterator[str]:
    for head, body in re.findall(r"^(\|.*)\n\|[-:| ]+\n((?:\|.*\n)*)", FENCE.sub("", text), re.M):
        columns = []  # (column, script)
        for i, cell in enumerate(head.split("|")):
            named = re.fullmatch(r"\s*`(\w+)\.py`\s*", cell)
            if named and named.group(1) in SCRIPTS:
                columns.append((i, named.group(1)))
            elif script and cell.strip() == "our line":
                columns.append((i, script))
        for row in body.splitlines():
            cells = row.replace(r"\|", "\0").split("|")
            for i, name in columns:
                for code in spans(cells[i].replace("\0", "|")):
                    if not re.search(rf"(?<!\w){re.escape(code)}", source(name)):
                        yield f"{name}.py has no longer: {code}"
                    others = [other for _, other in columns if other != name]
                    for other in others:
                        if code in source(other):
                            yield f"{code} is in {other}.py too"


def check_formulas(page: Path, text: str) -> Iterator[str]:
    """A backslash before punctuation is an escape in GitHub's Markdown, a star or bar is markup."""
    prose = re.sub(r"`[^`\n]+`|<!--.*?-->", "", FENCE.sub("", text))
    if prose.count("$") % 2:
        yield "an odd number of $"
    for formula in re.findall(r"\$([^$]*)\$", prose):
        if re.search(r"\\[^a-zA-Z]|[*|<>#\n]|^\s|\s$", formula):
            yield f"GitHub does not show ${formula}$"


# ----- Scripts, papers, exercises -----


def locators(text: str) -> set[str]:
    """Places in papers: `[PPO] Eq. (7)`, `[PER] Alg. 1, lines 8 to 15`, in one or two lines."""
    text = re.sub(r"\s*\n[ #|]*", " ", text)
    place = (
        r"(?:Suppl\. |below )?(?:Eqs?\. \(\d+\)|Alg\. \w+|(?:Sec|App|Fig)\. [\w.]*\w|Methods|"
        r'"[^"]+"|'
        r"(?:core |continuous )?details? \d+(?:(?: and|,) \d+)?)"
        r"(?:, lines? \d+(?:(?: to| and|,) \d+)*)?"
    )
    found = re.findall(rf"\[([A-Z0-9]{{2,}})\],? ({place})", text)
    return {f"[{tag}] {where.replace('Eqs.', 'Eq.')}" for tag, where in found}


def check_papers() -> Iterator[str]:
    bibliography = (ROOT / "docs" / "references.bib").read_text()
    with open(ROOT / "tools" / "locators.csv", newline="") as file:
        known = {f"[{row['paper']}] {row['place']}" for row in csv.DictReader(file)}
    texts = {f"{script}.py": source(script) for script in SCRIPTS}
    texts |= {f"docs/{path.name}": path.read_text() for path in (ROOT / "docs").glob("*.md")}
    for name, text in texts.items():
        for place in sorted(locators(text) - known):
            yield f"{name}: {place} was not looked up (tools/locators.csv)"
    for script in SCRIPTS:
        for number in re.findall(r"arXiv:(\d{4}\.\d{5})", source(script)):
            if f"{{{number}}}" not in bibliography:
                yield f"{script}.py: arXiv:{number} is not in docs/references.bib"


def check_packages() -> Iterator[str]:
    """A script's inline metadata names what it imports, at the versions of requirements.txt."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = {line.split("#")[0].strip() for line in lines} - {""}
    without_extras = {re.sub(r"\[.*\]", "", pin) for pin in pins}
    indirect = {"moviepy", "tensorboard"}  # imported by gymnasium and by torch
    for script in SCRIPTS:
        block = re.match(r"# /// script\n((?:#(?: .*)?\n)+?)# ///\n", source(script))
        if not block:
            yield f"{script}.py has no inline metadata"
            continue
        metadata = "".join(line[2:] for line in block.group(1).splitlines(keepends=True))
        packages = set()
        for pin in tomllib.loads(metadata)["dependencies"]:
            packages.add(re.split(r"[\[=]", pin)[0].replace("-", "_"))
            if "==" in pin and re.sub(r"\[.*\]", "", pin) not in without_extras:
                yield f"{script}.py: {pin} is not in requirements.txt"
        imported = set()
        for node in ast.walk(ast.parse(source(script))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
        imported -= set(sys.stdlib_module_names) | {"smac", "IPython"}  # optional
        for name in sorted(imported - packages):
            yield f"{script}.py imports {name}, which its inline metadata lacks"
        for name in sorted(packages - imported - indirect):
            yield f"{script}.py does not import {name} of its inline metadata"


def check_studies() -> Iterator[str]:
    import yaml

    peers = re.findall(r'^    "(\w+)": ', (ROOT / "benchmark" / "peers.py").read_text(), re.M)
    for path in sorted((ROOT / "benchmark" / "studies").glob("*.yaml")):
        for part in yaml.safe_load(path.read_text())["study"]:
            script, used = part["script"], re.findall(r"--[\w-]+", part.get("flags", ""))
            known = {name.replace("--no-", "--") for name in arguments(script)}
            if source(script):
                for flag in used:
                    if flag.replace("--no-", "--") not in known:
                        yield f"{path.name}: {script} has no {flag}"
            elif script not in peers:
                yield f"{path.name}: there is no {script}"


def check_exercises() -> Iterator[str]:
    for patch in sorted((ROOT / "docs" / "exercises").glob("*.patch")):
        words = ["git", "apply", "--check", str(patch)]
        if subprocess.run(words, cwd=ROOT, capture_output=True).returncode:
            yield f"docs/exercises/{patch.name} does not apply"


def check_vectors() -> Iterator[str]:
    """The test vectors are what their generator writes, and the Python of their page runs."""
    folder, generator = ROOT / "vectors", ROOT / "tools" / "make_vectors.py"
    with tempfile.TemporaryDirectory() as fresh:  # -S hides all packages but the standard library
        subprocess.run([sys.executable, "-S", generator, fresh], check=True)
        names = {path.name for place in (folder, Path(fresh)) for path in place.glob("*.json")}
        _, different, missing = filecmp.cmpfiles(folder, fresh, names, shallow=False)
    for name in sorted([*different, *missing]):
        yield f"vectors/{name} is not what tools/make_vectors.py writes"
    with contextlib.chdir(ROOT):
        namespace = {}
        for _, language, block in FENCE.findall((folder / "README.md").read_text()):
            if language == "python":
                exec(compile(block, "vectors/README.md", "exec"), namespace)


def check_checks() -> Iterator[str]:
    """The checks find the faults of a page that has some of each kind."""
    page = ROOT / "docs" / "ppo_continuous.md"
    text = "# A page\n[a](b.md) [c](#a-page) [d](#e) `--no-such-flag` `losses/nothing` $a*b$ "
    text += "0.99<!-- default gamma --> 0.98<!-- default gamma --> 1<!-- default nothing -->\n"
    text += "```bash\npython ppo_continuous.py --gamma 1 --nothing 2\n```\n"
    text += "[`no`](../ppo_continuous.py#L1)\nIn [`ppo_loss`](../ppo_continuous.py#L1):\n\n"
    text += "```python\nratio = logratio.exp()\n```\n```python\nratio = 2\n```\n"
    text += "| line | our line |\n|---|---|\n| 3 | `atio = logratio.exp()` |\n"
    checks = (check_numbers, check_links, check_flags, check_code, check_formulas)
    counts = [len(list(check(page, text))) for check in checks]
    if counts != [2, 3, 2, 3, 1]:
        yield f"the checks of documents find {counts} of [2, 3, 2, 3, 1] faults"
    if "0.99<" not in with_numbers(page, "0.98<!-- default gamma -->"):
        yield "a number in a document is not corrected"
    if "ppo_continuous.py#L1)" in with_lines(text.replace("[`no`](../ppo_continuous.py#L1)", "")):
        yield "the line of a link to a function is not corrected"


def faults() -> Iterator[str]:
    """One line for each fault."""
    for page in documents():
        text = GENERATED.sub("", page.read_text())
        for check in (check_numbers, check_links, check_flags, check_code, check_formulas):
            for fault in check(page, text):
                yield f"{page.relative_to(ROOT)}: {fault}"
    for script in SCRIPTS:
        for fault in check_command(ast.get_docstring(ast.parse(source(script)))):
            yield f"{script}.py: {fault}"
    yield from check_papers()
    yield from check_packages()
    yield from check_studies()
    yield from check_exercises()
    yield from check_vectors()
    yield from check_checks()
