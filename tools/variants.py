"""Check the patches of variants/, rebase them after a script has changed, or count their lines.

python tools/variants.py check     # which patches do not apply
python tools/variants.py rebase    # re-create those from the last commit to which they apply
python tools/variants.py sizes     # changed lines of each, for the table in variants/README.md
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(*words, cwd: Path = ROOT, text: str | None = None) -> subprocess.CompletedProcess:
    # Trap: inside of another repository, `git apply` silently skips files that are not in it
    environ = os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(cwd).parent)}
    command = ["git", *map(str, words)]
    return subprocess.run(command, cwd=cwd, input=text, capture_output=True, text=True, env=environ)


def script_of(patch: Path) -> str:
    return f"{patch.parent.name}.py"


def patched(patch: Path, source: str) -> str | None:
    """The script with the patch applied, or None where it does not apply."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / script_of(patch)
        path.write_text(source)
        failed = git("apply", patch, cwd=path.parent).returncode
        return None if failed else path.read_text()


def diff(script: str, old: str, new: str) -> str:
    """A patch from `old` to `new` with two lines of context."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("a", old), ("b", new)):
            (Path(folder) / name).mkdir()
            (Path(folder) / name / script).write_text(text)
        words = ("diff", "--no-index", "--no-color", "-U2", f"a/{script}", f"b/{script}")
        text = git(*words, cwd=Path(folder)).stdout
    return f"--- a/{script}\n+++ b/{script}\n" + text[text.index("@@") :]


def rebase(patch: Path) -> str:
    """Merge the patch's changes with the script's since the last commit to which it applied."""
    script = script_of(patch)
    current = (ROOT / script).read_text()
    for commit in git("log", "--format=%h", "--", script).stdout.split():
        base = git("show", f"{commit}:{script}").stdout
        variant = patched(patch, base)
        if variant is not None:
            break
    else:
        return "applies to no commit"
    folder = Path(tempfile.mkdtemp())
    for name, text in (("current", current), ("base", base), (script, variant)):
        (folder / name).write_text(text)
    merge = git("merge-file", "-L", "variant", folder / script, folder / "base", folder / "current")
    if merge.returncode:
        return f"conflicts since {commit}: solve them in {folder / script} (README.md says how)"
    patch.write_text(diff(script, current, (folder / script).read_text()))
    shutil.rmtree(folder)
    return f"rebased from {commit}"


def main() -> None:
    action = sys.argv[1] if len(sys.argv) == 2 else ""
    if action not in ("check", "rebase", "sizes"):
        sys.exit(__doc__)
    failures = 0
    for patch in sorted(ROOT.glob("variants/*/*.patch")):
        name = patch.relative_to(ROOT / "variants")
        if action == "sizes":
            lines = patch.read_text().splitlines()
            added, removed = (sum(line.startswith(sign) for line in lines) - 1 for sign in "+-")
            print(f"{name}: +{added} -{removed}")
        elif patched(patch, (ROOT / script_of(patch)).read_text()) is None:
            message = rebase(patch) if action == "rebase" else "does not apply"
            failures += not message.startswith("rebased")
            print(f"{name}: {message}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
