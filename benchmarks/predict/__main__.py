"""Predictions against measurements: python -m benchmarks.predict --all [--runs] [--json] [--readme]"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.predict import judge, record


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="one folder, as judge.py prints it")
    parser.add_argument("--all", action="store_true", help="the whole record: every set, every visit")
    parser.add_argument("--runs", action="store_true", help="print every run, the worst first")
    parser.add_argument("--json", action="store_true", help="every run for a program")
    parser.add_argument("--readme", action="store_true", help="rows of README.md and docs/measured.md")
    options = parser.parse_args()
    if not options.all:
        if options.folder is None:
            parser.error("give --all, or a folder")
        judge.run(options.folder, runs=options.runs, as_json=options.json)
        return
    found = record.entries()
    if options.readme:
        for label, words in record.readme_rows(found).items():
            print(f"| {label} | {words} | `python -m benchmarks.predict --all` |")
    elif options.json:
        print(json.dumps([{**asdict(e), "error": e.error} for e in found]))
    else:
        record.show(found, options.runs)


if __name__ == "__main__":
    main()
