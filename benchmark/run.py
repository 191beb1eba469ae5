"""Run the scripts on many environments and seeds, a process each, and collect what came out as CSV.

    python benchmark/run.py --scripts ppo_continuous --env-ids HalfCheetah-v4 Hopper-v4 --seeds 1 2 3 4 5 --jobs 2
    python benchmark/run.py --scripts ppo_continuous --env-ids HalfCheetah-v4 --seeds 1 -- --no-bootstrap-truncation
    python benchmark/run.py --collect                       # all finished runs in the runs folder

Flags behind `--` go to the scripts and make a variant. Each run has a working folder {runs folder}/{script}/{env}__
{variant}__{seed}: the script's own runs/ folder, console.txt (all it printed) and run.json (each process: when, for how
long, the commit, the versions, the machine). The same command started again skips what is finished and resumes what was
interrupted; Ctrl-C interrupts all runs. A run that fails, or whose files are damaged, is named, the others go on, and
the exit status is 1.

A finished run becomes {results folder}/{script}/{env}__{variant}__{seed}.csv with the columns tag, step, value, count,
and a row of {results folder}/runs.csv. A tag with more than 1000 points is thinned: the run is cut into 1000 bins of
equal numbers of steps, and a row is the mean value and the mean step of the `count` points in a bin.
"""

import argparse
import contextlib
import csv
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
TAGS = ("charts/episodic_return", "eval/episodic_return", "eval/battle_won_rate", "charts/SPS")
KEY = ("script", "env_id", "variant", "seed")  # what makes a run, and a row of runs.csv


@dataclass
class Run:
    """One run of a script, its working folder, and its process while it has one."""

    script: str
    env_id: str
    seed: int
    flags: list[str]
    runs_folder: Path
    process: subprocess.Popen | None = None
    history: list[dict] = field(default_factory=list)  # its processes so far, the newest last
    offset: int = 0  # where the output of this process begins in console.txt
    begun: float = 0.0  # the fraction of the run that was done when this process began
    fraction: float = 0.0  # and that is done now

    def __str__(self) -> str:
        return f"{self.script}/{run_name(self.env_id, self.variant, self.seed)}"

    @property
    def variant(self) -> str:
        return shlex.join(self.flags)

    @property
    def folder(self) -> Path:
        return self.runs_folder / str(self)

    @property
    def arguments(self) -> list[str]:
        return ["--env-id", self.env_id, "--seed", str(self.seed), *self.flags]

    @property
    def command(self) -> str:
        return shlex.join(["python", f"{self.script}.py", *self.arguments])

    def run_folder(self) -> Path | None:
        """The newest of the script's run folders that holds a checkpoint or a model."""
        found = {path.parent for path in self.folder.glob("runs/*/*.pt") if (path.parent / "args.json").exists()}
        return max(found, key=lambda path: path.name, default=None)

    def finished(self) -> bool:
        """Whether the run folder holds a model, or else an evaluation, of the run's last step."""
        if not (folder := self.run_folder()):
            return False
        total = json.loads((folder / "args.json").read_text())["total_timesteps"]
        if (folder / "model.pt").exists():
            import torch

            return torch.load(folder / "model.pt", map_location="cpu", weights_only=True)["global_step"] >= total
        return any(step >= total for step, _ in read_scalars(folder).get("eval/episodic_return", ()))

    def processes(self) -> list[dict]:
        """Its processes so far, as run.json has them. One whose end nobody saw lasted until it printed its last."""
        history = json.loads((self.folder / "run.json").read_text())["processes"]
        if history[-1]["status"] is None:
            started = datetime.datetime.fromisoformat(history[-1]["started"]).timestamp()
            history[-1]["seconds"] = round((self.folder / "console.txt").stat().st_mtime - started, 1)
        return history

    def start(self, provenance: dict) -> None:
        """Start or resume it, unless another program has finished it. Raises BlockingIOError while one is at it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "console.txt", "a") as console:
            fcntl.flock(console, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by the script as long as it can print
            if self.finished():
                return
            arguments = self.arguments
            if folder := self.run_folder():
                arguments = ["--resume", f"runs/{folder.name}"]
                step = max([int(path.stem[11:]) for path in folder.glob("checkpoint_*.pt")], default=0)
                self.begun = self.fraction = step / json.loads((folder / "args.json").read_text())["total_timesteps"]
            with contextlib.suppress(FileNotFoundError):
                self.history = self.processes()
            commit = git("rev-parse", "--short=10", "HEAD") or "unknown"
            changed = "-changed" if git("status", "--porcelain", f"{self.script}.py") else ""
            started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self.history.append({"started": started, "commit": commit + changed, **provenance})
            self.clock, self.offset = time.monotonic(), console.seek(0, os.SEEK_END)
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / f"{self.script}.py"), *arguments],
                cwd=self.folder,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches this program only, which passes it on once
            )
        self.record()

    def record(self) -> None:
        """Write run.json as of now."""
        self.history[-1] |= {"seconds": round(time.monotonic() - self.clock, 1), "status": self.process.poll()}
        run = {"script": self.script, "env_id": self.env_id, "seed": self.seed, "flags": self.flags}
        write(self.folder / "run.json", json.dumps(run | {"processes": self.history}, indent=2) + "\n")

    def last_line(self) -> str:
        """What the process printed last. Notes in passing how far it is."""
        with open(self.folder / "console.txt", "rb") as console:
            console.seek(max(self.offset, os.path.getsize(console.name) - 4096))
            text = console.read().decode(errors="replace").strip()
        if steps := re.findall(r"([\d,]+)/([\d,]+) steps", text):
            step, total = (int(number.replace(",", "")) for number in steps[-1])
            self.fraction = step / total
        return text.splitlines()[-1] if text else "starting"


def run_name(env_id: str, variant: str, seed: int | str) -> str:
    """The name of a run's folder and of its table, of characters that suit a file."""
    variant = re.sub(r"[^\w.=-]+", "_", variant.removeprefix("--").replace(" --", " ")) or "default"
    return f"{env_id.replace('/', '-')}__{variant}__{seed}"


def write(path: Path, text: str) -> None:
    """Write a file so that it holds all of it or what it held before."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def git(*arguments: str) -> str:
    """What git says about the repository, or nothing."""
    with contextlib.suppress(OSError):
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True).stdout.strip()
    return ""


def machine() -> str:
    """Cores, processor, and GPU if there is one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    gpu = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip().replace("\n", ", ")
    return f"{os.cpu_count()} cores of {cpu}" + (f", {gpu}" if gpu else "")


def versions() -> str:
    """Of Python and of those packages that are here and on which a result depends."""
    found = [f"Python {platform.python_version()}"]
    for package in ("torch", "numpy", "gymnasium", "mujoco", "ale-py", "jax", "jaxmarl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


def read_scalars(run_folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All points of a run's TensorBoard log: {tag: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    points = defaultdict(list)
    files = sorted(run_folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_size)
    for event in map(Event.FromString, RawEventFileLoader(str(files[-1])).Load() if files else ()):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                points[value.tag].append((event.step, value.simple_value))
    return points


def thin(points: list[tuple[int, float]], bins: int = 1000) -> list[tuple[int, float, int]]:
    """Rows (step, value, count): the points, or, where there are more than `bins`, means over bins of equal width."""
    if len(points) <= bins:
        return [(step, value, 1) for step, value in points]
    steps, values = np.array(points).T
    which = (steps * bins / (steps.max() + 1)).astype(int)
    counts = np.bincount(which, minlength=bins)
    steps, values = (np.bincount(which, column, bins)[counts > 0] / counts[counts > 0] for column in (steps, values))
    return list(zip(steps.round().astype(int).tolist(), values.tolist(), counts[counts > 0].tolist()))


def read_csv(path: Path) -> list[dict]:
    """The rows of a table, none where there is no table."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def collect(run: Run, results_folder: Path) -> None:
    """Write a finished run's curves and its row in runs.csv, which replaces the row that it had.

    Raises ValueError where the log does not reach the end of the run, and other errors where files are damaged.
    """
    points, history = read_scalars(run.run_folder()), run.processes()
    total = json.loads((run.run_folder() / "args.json").read_text())["total_timesteps"]
    if not any(step >= total for step, _ in points.get("eval/episodic_return", ())):
        raise ValueError("its log is damaged: the evaluation at the end is not in there")
    curves = [["tag", "step", "value", "count"]]
    for tag in TAGS:
        curves += [[tag, step, f"{value:.6g}", count] for step, value, count in thin(points.get(tag, []))]
    path = results_folder / f"{run}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, "".join(",".join(map(str, row)) + "\n" for row in curves))

    def last(tag: str, episodes: int) -> float | str:
        values = [value for _, value in points.get(tag, [])[-episodes:]]
        return f"{np.mean(values):.6g}" if values else ""

    steps = max(step for tag in TAGS for step, _ in points.get(tag, [(0, 0)]))
    tests = [won for step, won in points.get("eval/battle_won_rate", [])[:-1] if step > 0.8 * steps]
    console = (run.folder / "console.txt").read_text(errors="replace") if (run.folder / "console.txt").exists() else ""
    scores = re.findall(r"^evaluation: \S+ \+- (\S+) over (\d+)", console, re.M)
    row = {
        "script": run.script,
        "env_id": run.env_id,
        "variant": run.variant,
        "seed": str(run.seed),
        "total_steps": steps,
        "training_return": last("charts/episodic_return", episodes=100),
        "eval_return": last("eval/episodic_return", episodes=1),
        "eval_std": scores[-1][0] if scores else "",
        "eval_episodes": scores[-1][1] if scores else "",
        "eval_battle_won_rate": last("eval/battle_won_rate", episodes=1),
        "tests_battle_won_rate": f"{np.mean(tests):.6g}"
        if tests
        else "",  # over the last fifth of the run, without the evaluation
        "wall_seconds": round(sum(process["seconds"] for process in history)),
        "command": run.command,
    }
    for name in ("commit", "versions", "machine", "jobs"):  # several values where processes differ
        row[name] = "; ".join(dict.fromkeys(str(process[name]) for process in history))
    lock = os.open(results_folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # other runs may end at this moment too
    rows = {tuple(row[name] for name in KEY): row for row in [*read_csv(results_folder / "runs.csv"), row]}
    with open(results_folder / "runs.tmp", "w", newline="") as file:
        writer = csv.DictWriter(file, row, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))
    os.replace(results_folder / "runs.tmp", results_folder / "runs.csv")
    os.close(lock)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


class Display:
    """A block of lines that is rewritten in place on a terminal; elsewhere plain lines once a minute."""

    def __init__(self) -> None:
        self.terminal, self.lines, self.shown = sys.stdout.isatty(), 0, time.monotonic()

    def say(self, line: str) -> None:
        """Print a line that stays, above the block."""
        print(f"\x1b[{self.lines}F\x1b[J{line}" if self.lines else line, flush=True)
        self.lines = 0

    def show(self, block: list[str]) -> None:
        if time.monotonic() - self.shown < (1 if self.terminal else 60):
            return
        self.shown = time.monotonic()
        if self.terminal:
            block = [line[: shutil.get_terminal_size().columns - 1] for line in block]
        self.say("\n".join(block))
        self.lines = len(block) if self.terminal else 0


@contextlib.contextmanager
def noted(name: str, failed: dict[str, str]) -> Iterator[None]:
    """Note what goes wrong with one run, with damaged files for example, and go on with the others."""
    try:
        yield
    except BlockingIOError:
        failed[name] = "another process is at it"
    except Exception as error:
        failed[name] = " ".join(f"{type(error).__name__}: {error}".split())


def execute(runs: list[Run], jobs: int, results_folder: Path) -> int:
    """Run what is not finished, `jobs` at once, and collect it. Returns the exit status."""
    provenance = {"jobs": jobs, "versions": versions(), "machine": machine()}
    display, signals, sent = Display(), [], 0
    started = recorded = time.monotonic()
    todo, active, failed = [], [], {}
    for run in runs:
        with noted(str(run), failed):
            if run.finished():
                collect(run, results_folder)  # again, if it was: what was written last time may be damaged
            else:
                todo.append(run)
    waiting = list(todo)
    display.say(f"{len(runs) - len(todo) - len(failed)} of {len(runs)} runs are finished already")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if handlers[signal.SIGHUP] == signal.SIG_IGN:  # nohup
        del handlers[signal.SIGHUP]
    for number in handlers:
        signal.signal(number, lambda number, frame: signals.append(number))

    try:
        while active or (waiting and not signals):
            while waiting and len(active) < jobs and not signals:
                run = waiting.pop(0)
                with noted(str(run), failed):
                    run.start(provenance)
                    if run.process:
                        active.append(run)
                    else:
                        run.fraction = 1.0
                        collect(run, results_folder)
            if len(signals) > sent:
                display.say("stopping the runs; once more kills them (what they had saved stays whole)")
                for run in active:
                    run.process.send_signal(signal.SIGKILL if sent else signal.SIGINT)
                sent = len(signals)
            for run in [run for run in active if run.process.poll() is not None]:
                active.remove(run)
                run.record()
                line = run.last_line()
                with noted(str(run), failed):
                    if run.process.returncode == 0 and run.finished():
                        run.fraction = 1.0
                        collect(run, results_folder)
                        display.say(f"{run}: finished after {clock(run.history[-1]['seconds'])}")
                    elif signals:
                        display.say(f"{run}: interrupted")
                    else:
                        failed[str(run)] = f"status {run.process.returncode}: {line}"
                if str(run) in failed:
                    display.say(f"{run}: FAILED, {failed[str(run)]}")
            block = [line for run in active for line in (f"{run}:", f"    {run.last_line()}")]
            if time.monotonic() - recorded > 10:
                recorded = time.monotonic()
                for run in active:
                    run.record()
            left = [run for run in todo if str(run) not in failed]
            gained = sum(run.fraction - run.begun for run in left)
            seconds = (time.monotonic() - started) * (len(left) - sum(run.fraction for run in left)) / max(gained, 1e-9)
            done = sum(run.fraction == 1 for run in left)
            display.show([*block, f"{done} of {len(todo)} done, {clock(seconds) if gained else '-'} left"])
            time.sleep(0.1)
    finally:
        for run in active:  # none, unless this program itself fails
            run.process.send_signal(signal.SIGINT)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if signals:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 128 + signals[0]
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def collect_all(runs_folder: Path, results_folder: Path) -> int:
    """Collect every finished run below the runs folder, and name the others. Returns the exit status."""
    failed = {}
    for path in sorted(runs_folder.glob("*/*/run.json")):
        name = str(path.parent.relative_to(runs_folder))
        with noted(name, failed):
            fields = json.loads(path.read_text())
            del fields["processes"]
            run = Run(**fields, runs_folder=runs_folder)
            if finished := run.finished():
                collect(run, results_folder)
            print(f"{name}: {'collected' if finished else 'not finished'}", flush=True)
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    """Print, run or collect. Returns the exit status."""
    flags = argv[argv.index("--") + 1 :] if "--" in argv else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", choices=sorted(path.stem for path in ROOT.glob("*.py")))
    parser.add_argument("--env-ids", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--runs-folder", type=Path, default=ROOT / "benchmark" / "runs")
    parser.add_argument("--results-folder", type=Path, default=ROOT / "benchmark" / "results")
    parser.add_argument("--print", action="store_true", help="print the plain commands and run nothing")
    parser.add_argument("--collect", action="store_true", help="run nothing, collect all that is finished")
    args = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    if args.collect:
        if not args.runs_folder.is_dir():
            parser.error(f"there is no folder {args.runs_folder}")
        return collect_all(args.runs_folder.resolve(), args.results_folder)
    if not args.scripts or not args.env_ids or args.jobs < 1:
        parser.error("--scripts and --env-ids are needed, and --jobs of at least 1")
    if own := {"--env-id", "--seed", "--resume", "--evaluate"} & {f.split("=")[0].replace("_", "-") for f in flags}:
        parser.error(f"{', '.join(sorted(own))} cannot stand behind --: this program sets it")
    runs = [
        Run(script, env_id, seed, flags, args.runs_folder.resolve())
        for script in dict.fromkeys(args.scripts)
        for env_id in dict.fromkeys(args.env_ids)
        for seed in dict.fromkeys(args.seeds)
    ]
    if args.print:
        print("\n".join(run.command for run in runs))
        return 0
    for folder in (args.runs_folder, args.results_folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{folder} is no folder and cannot be made one: {error.strerror}")
    return execute(runs, args.jobs, args.results_folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
