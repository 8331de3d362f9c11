"""Random traffic of several tenants, each seed checked for its shares and its bound (C32).

python -m tests.simulation.tenants --seed 1234             replay one seed
python -m tests.simulation.tenants --seeds 0:10000 --jobs 2
"""

from __future__ import annotations

import sys
from functools import partial

from tests.simulation.command_line import command_line
from tests.simulation.event_log import Outcome
from tests.simulation.simulator import run_seed

run_tenants = partial(run_seed, tenants=True)


def main() -> int:
    return command_line("tests.simulation.tenants", __doc__ or "", run_tenants, Outcome(seeds=0))


if __name__ == "__main__":
    sys.exit(main())
