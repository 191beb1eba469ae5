"""On what and with what a run was made: commit, versions, machine.

    python benchmark/provenance.py FOLDER

Writes FOLDER/provenance.json. The Snakefile calls it before a script starts in a folder. If a run
is resumed with another commit, on another machine or with other versions, all are listed,
separated by "; ".
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = "torch numpy gymnasium mujoco ale-py jax jaxmarl"
PEERS = "stable-baselines3 sbx-rl pfrl"


def machine() -> str:
    """Cores, processor, and GPU if there is one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    name = f"{cores} cores of {models[0] if models else platform.processor()}"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")
        name = ", ".join([name, *filter(None, gpus)])
    return name


def versions(packages: str = PACKAGES) -> dict[str, str]:
    """The versions of Python and of those packages that are installed."""
    found = {}
    for name in packages.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {"python": platform.python_version()} | found


def commit() -> str:
    """The repository's commit, with `-changed` behind it if a program or patch differs from it."""
    git = ["git", "-C", str(ROOT)]
    show = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "*.py", "*.patch"], capture_output=True
    )
    return (show.stdout.strip() or "unknown") + "-changed" * bool(changed.stdout)


def provenance(packages: str = PACKAGES) -> dict[str, str]:
    """Commit, versions and machine, as strings."""
    listed = ", ".join(f"{name} {version}" for name, version in sorted(versions(packages).items()))
    return {"commit": commit(), "versions": listed, "machine": machine()}


def write_provenance(folder: Path, packages: str = PACKAGES) -> None:
    """Write a run's provenance, or add to what an earlier start of the run wrote."""
    path, now = folder / "provenance.json", provenance(packages)
    if path.exists():
        before = json.loads(path.read_text())
        for name, value in now.items():
            now[name] = "; ".join(dict.fromkeys([*before[name].split("; "), value]))
    path.write_text(json.dumps(now, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    write_provenance(Path(sys.argv[1]))
