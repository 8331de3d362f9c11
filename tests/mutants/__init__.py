"""Every rule with the test that holds it: the rule is taken out of a copy of the package, and that test must fail.

    python -m tests.mutants                     all of them, and the score
    python -m tests.mutants memory/ overtak     those whose file or rule has one of these words in it
    python -m tests.mutants halt --jobs 2       two copies of the package at a time
    python -m tests.mutants --write             docs/contracts.md anew
    python -m tests.mutants draw AREA --seed N  changes drawn at random, see `draw.py`
    python -m tests.mutants score --seed N      what `forebay verify` finds of them, see `score.py`

`tests/simulation/mutations.py` is the other half: bugs for which the simulator must find a seed, whoever else finds
them too.
"""

from tests.mutants.adapters import ADAPTERS
from tests.mutants.cluster import CLUSTER
from tests.mutants.compressed import COMPRESSED
from tests.mutants.core import CORE
from tests.mutants.dense import DENSE
from tests.mutants.encoders import ENCODERS
from tests.mutants.engine import ENGINE
from tests.mutants.events import EVENTS
from tests.mutants.experts import EXPERTS
from tests.mutants.flights import FLIGHTS
from tests.mutants.formats import FORMATS
from tests.mutants.gemma4 import GEMMA4
from tests.mutants.gpu import GPU
from tests.mutants.grammar import GRAMMAR
from tests.mutants.hisparse import HISPARSE
from tests.mutants.memory import MEMORY
from tests.mutants.mmproj import MMPROJ
from tests.mutants.mutant import Mutant
from tests.mutants.norms import NORMS
from tests.mutants.outer import OUTER
from tests.mutants.pictures import PICTURES
from tests.mutants.pooling import POOLING
from tests.mutants.rank_log import RANK_LOG
from tests.mutants.ranks import RANKS
from tests.mutants.retention import RETENTION
from tests.mutants.route import ROUTE
from tests.mutants.routing import ROUTING
from tests.mutants.runtime import RUNTIME
from tests.mutants.scheduler import SCHEDULER
from tests.mutants.server import SERVER
from tests.mutants.simulated import SIMULATED
from tests.mutants.spans import SPANS
from tests.mutants.sparse import SPARSE
from tests.mutants.speculation import SPECULATION
from tests.mutants.tenants import TENANTS
from tests.mutants.text_encoders import TEXT_ENCODERS
from tests.mutants.tiers import TIERS
from tests.mutants.transfer import TRANSFER
from tests.mutants.verify import VERIFY

MUTANTS: tuple[Mutant, ...] = (
    *MEMORY,
    *EVENTS,
    *MMPROJ,
    *SCHEDULER,
    *TENANTS,
    *RUNTIME,
    *FORMATS,
    *ENGINE,
    *TRANSFER,
    *SERVER,
    *RANK_LOG,
    *ROUTE,
    *RANKS,
    *RETENTION,
    *ROUTING,
    *CLUSTER,
    *SPECULATION,
    *GRAMMAR,
    *GPU,
    *POOLING,
    *FLIGHTS,
    *VERIFY,
    *COMPRESSED,
    *SPARSE,
    *HISPARSE,
    *ADAPTERS,
    *PICTURES,
    *SPANS,
    *GEMMA4,
    *SIMULATED,
    *CORE,
    *DENSE,
    *EXPERTS,
    *NORMS,
    *OUTER,
    *ENCODERS,
    *TEXT_ENCODERS,
    *TIERS,
)
