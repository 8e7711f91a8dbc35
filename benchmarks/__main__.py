"""Runs a benchmark by name: python -m benchmarks NAME [its options]; --help after a name lists these."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.exit(f"{__doc__}\n\nNAME is one of {', '.join(NAMES)}.")
    name = sys.argv.pop(1)
    sys.path.insert(0, str(Path(__file__).parent))
    runpy.run_path(str(Path(__file__).parent / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
