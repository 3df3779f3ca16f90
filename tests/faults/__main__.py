"""``python -m tests.faults --kills 20``: kill every job 20 times, at random moments; see kills.py."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.faults.kills import disturbed
from tests.faults.small_jobs import make_jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each job")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--jobs", nargs="*", help="only these")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        jobs = make_jobs(Path(made) / "inputs")
        if unknown := set(chosen.jobs or ()) - set(jobs):
            parser.error(f"no job is called {' or '.join(sorted(unknown))}; there are {', '.join(jobs)}")
        for name in chosen.jobs or jobs:
            began = time.perf_counter()
            tally = disturbed(jobs[name], Path(made) / name, chosen.kills, chosen.seed)
            kinds = ", ".join(f"{count} {kind}" for kind, count in tally.kills.items())
            print(
                f"{name} ({tally.seconds:.1f} s, {tally.operations} file operations): {kinds}; {tally.finished} "
                f"outputs finished, each like the undisturbed one's; {time.perf_counter() - began:.0f} s",
                flush=True,
            )
            for place, count in tally.places.most_common():
                print(f"    {count} x {place}")


if __name__ == "__main__":
    main()
