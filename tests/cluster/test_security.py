"""What is refused before anything starts."""

from __future__ import annotations

import platform

import msgspec
import pytest

from forebay.base.errors import ConfigError
from forebay.base.package import __version__
from forebay.cluster.messages import Facts, Listener
from forebay.cluster.placement import Node
from forebay.cluster.security import is_one_machine, ports_text, refuse_open_cluster, refuse_unlike_nodes

PYTHON = platform.python_version()
FACTS = Facts(
    hostname="n", forebay=__version__, python=PYTHON, auth_mode="token", niceness=0, gcs_timeout_s=600, key_digest="aa"
)
NODES = [
    Node(id=f"n{i}", address=f"10.0.0.{i}", hostname=f"host{i}", num_cpus=1, memory_bytes=1) for i in (1, 2)
]  # fmt: skip


def facts(**second: object) -> dict[str, Facts]:
    return {"n1": FACTS, "n2": msgspec.structs.replace(FACTS, **second)}


def test_cluster_of_several_machines_needs_a_token_and_a_key() -> None:
    assert is_one_machine(NODES[:1], "10.0.0.1")
    assert not is_one_machine(NODES, "10.0.0.1")
    refuse_open_cluster(NODES, facts(), "key")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token on host2, so everybody"):
        refuse_open_cluster(NODES, facts(auth_mode=""), "key")
    with pytest.raises(ConfigError, match="give --cluster-key-file FILE"):
        refuse_open_cluster(NODES, facts(), "")


@pytest.mark.parametrize(
    ("difference", "line"),
    [
        ({"forebay": "0.0.1"}, f"host2 (10.0.0.2) has forebay 0.0.1, and this machine {__version__}"),
        ({"python": "3.1"}, f"host2 (10.0.0.2) has Python 3.1, and this machine {PYTHON}"),
        ({"problem": "there is no model"}, "host2 (10.0.0.2): there is no model"),
        ({"key_digest": "bb"}, "the nodes have different keys at the path of --cluster-key-file: copy one file to all"),
    ],
)
def test_node_that_differs_is_one_line_with_its_name(difference: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_unlike_nodes(NODES, facts(**difference), PYTHON)
    assert refused.value.message == line
    refuse_unlike_nodes(NODES, facts(), PYTHON)


def test_ports_that_only_this_machine_reaches_are_not_listed() -> None:
    listeners = [
        Listener(port=1, address="*", process="raylet"),
        Listener(port=2, address="10.0.0.1", process="raylet"),
        Listener(port=3, address="127.0.0.1", process="python"),
        Listener(port=4, address="::1", process="python"),
        Listener(port=5, address="*", process=""),
    ]
    assert ports_text("n", listeners) == "open ports of n: raylet 1, 2; unknown 5"
    assert ports_text("n", listeners[2:4]) == "open ports of n: none"
