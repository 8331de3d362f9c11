"""A process that prints what it has from its start, for the comparison of forked processes with new interpreters."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

OF_TERMINALS = 0b111  # SIGHUP, SIGINT and SIGQUIT, which a suite in the background ignores


def main() -> int:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    with Path("/proc/self/cmdline").open() as file:
        shown = {
            "descriptors": sorted(
                {int(name) for name in os.listdir("/proc/self/fd")} - {file.fileno(), file.fileno() + 1}
            ),
            "command": file.read().rstrip("\0").split("\0")[1:],
            "words": sys.argv[1:],
            "variables": dict(os.environ),
            "signals": [int(status[name], 16) & ~OF_TERMINALS for name in ("SigBlk", "SigIgn")],
            "leads": os.getsid(0) == os.getpid(),
        }
    print(json.dumps(shown, sort_keys=True))
    return 3


if __name__ == "__main__":
    sys.exit(main())
