"""Whether two folders of finished runs hold the same models to the bit, and from where the second's were started.

python benchmark/compare.py runs/undisturbed runs/disturbed        # status 1 if they differ or one is missing
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
    first, second = map(Path, argv)
    finished = sorted(path.parent.relative_to(first) for path in first.glob("**/result.json"))
    differ = not finished
    for run in finished:
        folders, equal, starts = [first / run, second / run], False, ""
        if (second / run / "result.json").exists():
            models = [torch.load(folder / "model.pt", weights_only=True) for folder in folders]
            for model in models:
                del model["args"], model["seconds"]  # the run folder's name, and what a clock says
            returns = [json.loads((folder / "result.json").read_text())["episodic_return"] for folder in folders]
            equal = same(*models) and returns[0] == returns[1]
            begun = [line.split()[1:] for line in (second / run / "starts").read_text().splitlines()]
            starts = "started " + ", then ".join(f"from {''.join(checkpoint) or 'nothing'}" for checkpoint in begun)
        print(f"{run}: {'the same to the bit' if equal else 'DIFFERENT'}; {starts}")
        differ |= not equal
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
