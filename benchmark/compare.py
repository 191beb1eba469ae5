"""Compare two folders of finished runs: are their models the same to the bit?

    python benchmark/compare.py runs/undisturbed runs/disturbed

Says from which checkpoints the second's runs were started. Exit status 1 if a model differs or is
missing.
"""

import json
import sys
from pathlib import Path

import torch


def same(a, b) -> bool:
    """Whether two nested structures hold the same tensors and values."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        sys.exit(__doc__)
    first, second = map(Path, argv)
    finished = sorted(path.parent.relative_to(first) for path in first.glob("**/result.json"))
    if not finished:
        sys.exit(f"error: no finished runs in {first}")
    differ = False
    for run in finished:
        folders, equal, starts = [first / run, second / run], False, ""
        if (second / run / "result.json").exists():
            models = [torch.load(folder / "model.pt", weights_only=True) for folder in folders]
            for model in models:
                del model["args"], model["seconds"]  # the run folder's name, and what a clock says
            results = [json.loads((folder / "result.json").read_text()) for folder in folders]
            returns = [result["episodic_return"] for result in results]
            equal = same(*models) and returns[0] == returns[1]
            if (second / run / "starts").exists():  # written by the Snakefile
                lines = (second / run / "starts").read_text().splitlines()
                begun = [line.split()[1:] or ["nothing"] for line in lines]
                starts = "started " + ", then ".join(f"from {name}" for (name,) in begun)
        print(f"{run}: {'the same to the bit' if equal else 'DIFFERENT'}; {starts}")
        differ |= not equal
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
