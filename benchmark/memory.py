"""Memory of every process of a run, over time: constant, once all is there that a run needs.

    python benchmark/memory.py --minutes 10 -- a3c_atari.py --num-workers 2

Starts the command in an empty folder, reads the resident memory of the process and its children from /proc (Linux)
every five seconds, and interrupts the run at the end. Prints, and writes to results/memory.csv, what each process had
after each fifth of the time.
"""

import argparse
import csv
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run import ROOT


def family(pid: int) -> list[int]:
    """A process and all that it has started, the oldest first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def resident_mb(pid: int) -> float:
    """Megabytes of a process's memory that are not shared with files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {name: value for name, value in (line.split(":", 1) for line in lines)}
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    script, *arguments = args.command
    if args.minutes < 1 or not (ROOT / script).is_file():
        parser.error("--minutes must be at least 1, and the command one of the scripts with its flags")
    readings = []
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / script), *arguments],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started = time.monotonic()
        while time.monotonic() - started < 60 * args.minutes and process.poll() is None:
            time.sleep(5)
            seconds = round(time.monotonic() - started)
            readings += [(seconds, number, resident_mb(pid)) for number, pid in enumerate(family(process.pid))]
        if process.poll() is not None:
            sys.exit(f"error: the run ended by itself, with status {process.returncode}, before its time")
        process.send_signal(signal.SIGINT)
        process.wait()
    marks = [round(12 * args.minutes * fifth) for fifth in range(1, 6)]
    with open(ROOT / "benchmark" / "results" / "memory.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["process", *(f"MB after {mark} s" for mark in marks), "command"])
        for number in sorted({number for _, number, _ in readings}):
            mine = [(seconds, mb) for seconds, process_number, mb in readings if process_number == number]
            sizes = [f"{[mb for seconds, mb in mine if seconds <= mark][-1]:.0f}" for mark in marks]
            writer.writerow([number, *sizes, " ".join(args.command)])
            print(f"process {number}: {' '.join(sizes)} MB", flush=True)


if __name__ == "__main__":
    main()
