"""Draw a run's loss curve and memory per rank: python tools/plot_run.py RUN_DIR"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # usable without installing the package

from megackpt.observe.report import METRICS, draw_run


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, help="folder that receives loss.svg and memory.svg")
    parser.add_argument("--metrics-file", type=Path, help=f"default: RUN_DIR/{METRICS}")
    parser.add_argument("--reference-loss", type=float, help="draw a horizontal line at this loss")
    parser.add_argument("--reference-label", default="unigram entropy", help="what the line means")
    args = parser.parse_args(argv)
    references = []
    if args.reference_loss is not None:
        references.append((args.reference_loss, f"{args.reference_label} {args.reference_loss:.3f}"))
    try:
        for path in draw_run(args.run_dir, args.metrics_file, references):
            print(path)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
