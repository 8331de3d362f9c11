"""Every series of /metrics: of a server whose engine has all there is to tell, and of the router."""

from __future__ import annotations

import re
from collections import defaultdict

from prometheus_client.metrics import MetricWrapperBase

from forebay.engine.frames import Occupied, Ready, Speculating, State, Transferring
from forebay.requests.updates import SpeculationReport
from forebay.route.announcement import Role
from forebay.route.members import Members
from forebay.route.metrics import RouteMetrics
from forebay.scheduler.counters import COUNTERS, zeros
from forebay.scheduler.state import PoolState
from forebay.server.admin.metrics import Metrics
from scripts.site.tables import code, codes, table

_STATE = State(
    step=1,
    num_running=1,
    num_waiting=0,
    num_waiting_tokens=0,
    oldest_wait_s=0.0,
    pools=[PoolState(name="kv", total=2, free=1, running=1)],
    counters=zeros(COUNTERS),
    last_step_age_s=0.0,
    memory=Occupied(num_bytes={"kv_cache": 1}),
    speculation=Speculating(width=1, recent=SpeculationReport(1.0, 1.0)),
    transfers=Transferring(pending=0, transferring=0, open=0, unfenced=0, rejected=0),
)
_INFO = Ready(
    max_total_tokens=32,
    max_running_requests=1,
    max_requests=2,
    context_length=32,
    page_size=16,
    vocab_size=2,
    eos_token_ids=[],
    load_seconds=0.0,
    report=[],
    pid=1,
)


def page() -> str:
    """Return the series of a server, and then those of the router."""
    server, router = Metrics("model"), RouteMetrics()
    members = Members({Role.BOTH: ["http://server"]})
    return "\n\n".join(
        (
            _table(server.render(_STATE, _INFO)[0], server),
            "## The router",
            "The `/metrics` of `forebay route` has these. Its servers have their own.",
            _table(router.render(members), router),
        )
    )


def _table(rendered: bytes, metrics: object) -> str:
    """Counters that nothing has counted are not rendered with their labels: `metrics` has them as attributes."""
    labels = {f"{kept._name}_total": set(kept._labelnames) for kept in vars(metrics).values() if _counts(kept)}
    labels = defaultdict(set, labels)
    text, rows = rendered.decode(), []
    for name, labelled in re.findall(r"^(forebay:\w+)\{(.*?)\} ", text, re.MULTILINE):
        labels[re.sub("_(bucket|count|sum)$", "", name)] |= set(re.findall(r'(\w+)="', labelled)) - {"le"}
    for name, about, kind in re.findall(r"^# HELP (\S+) (.*)\n# TYPE \S+ (\w+)$", text, re.MULTILINE):
        if not name.endswith("_created"):
            rows.append((code(name), f"{about}.", kind, codes(sorted(labels[name]))))
    return table(("name", "what it says", "kind", "labels"), sorted(rows))


def _counts(kept: object) -> bool:
    return isinstance(kept, MetricWrapperBase) and kept._type == "counter"
