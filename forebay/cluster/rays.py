"""All that is asked of Ray. Ray is imported only where a command connects, or in an actor."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from forebay.base.errors import ConfigError, Unavailable
from forebay.base.package import __version__
from forebay.cluster.messages import Facts, Spec, Start, Survey, Update
from forebay.cluster.node import survey
from forebay.cluster.placement import Node
from forebay.cluster.replica import Replica

NAMESPACE: Final = "forebay"
CALL_TIMEOUT_S: Final = 15.0
SURVEY_TIMEOUT_S: Final = 120.0  # the first worker of a node imports for seconds
CREATE_TIMEOUT_S: Final = 60.0
GCS_TIMEOUT_S: Final = 5.0
_THREADS: Final = 4  # of an actor: its state can be asked for while it drains
_WEIGHTS: Final = "weights:"
_START: Final = "start"


def place_of_actor(name: str) -> tuple[str, Update | None]:
    """Return the address of this actor's node, and the last update of weights of the server with that name."""
    import ray

    util: Any = ray.util
    return util.get_node_ip_address(), recall_update(name)


def remember_update(name: str, update: Update | None) -> None:
    """Keep a server's last update of weights in the GCS, which ends with the cluster as the actors do."""
    from ray.experimental import internal_kv

    if update is None:
        internal_kv._internal_kv_del(_WEIGHTS + name, namespace=NAMESPACE)
    else:
        internal_kv._internal_kv_put(_WEIGHTS + name, update.encode(), namespace=NAMESPACE)


def recall_update(name: str) -> Update | None:
    """Return a server's last update of weights."""
    from ray.experimental import internal_kv

    found = internal_kv._internal_kv_get(_WEIGHTS + name, namespace=NAMESPACE)
    return None if found is None else msgspec.msgpack.decode(found, type=Update)


class Rays:
    """A connection to a Ray cluster, as long as this process or until `close`."""

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "forebay cluster needs Ray, which is not installed: pip install 'forebay[ray]' on every node"
            ) from None
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        self._ray: Any = ray
        _refuse_silent_gcs(address)
        # Ray prints failures of all jobs, with stack traces, into the output of whatever command runs meanwhile.
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
        try:
            self._ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise Unavailable(f"Ray at {address} cannot be used: {_first_line(error)}") from None

    def close(self) -> None:
        """Disconnect. Actors are detached and stay."""
        self._ray.shutdown()

    @property
    def here(self) -> str:
        """The address of this machine for Ray."""
        return str(self._ray.util.get_node_ip_address())

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive, with their free resources."""
        from ray._private.state import available_resources_per_node

        resources: Any = available_resources_per_node
        free = resources()
        nodes = []
        for found in self._ray.nodes():
            if found["Alive"]:
                left = free.get(found["NodeID"], {})
                nodes.append(
                    Node(
                        id=found["NodeID"],
                        address=found["NodeManagerAddress"],
                        hostname=found["NodeManagerHostname"],
                        num_cpus=left.get("CPU", 0.0),
                        memory_bytes=left.get("memory", 0.0),
                        num_gpus=left.get("GPU", 0.0),
                        total_cpus=found["Resources"].get("CPU", 0.0),
                    )
                )
        return nodes

    def survey(self, nodes: Sequence[Node], request: Callable[[Node], Survey]) -> dict[str, Facts]:
        """Return the facts of each node, by its id. A node on which the task fails has the failure as its problem."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = self._ray.remote(survey)
        running = {
            node.id: task.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
            ).remote(request(node).encode())
            for node in nodes
        }
        return {node.id: self._facts(node, running[node.id]) for node in nodes}

    def _facts(self, node: Node, running: Any) -> Facts:
        try:
            found = self._ray.get(running, timeout=SURVEY_TIMEOUT_S)
        except Exception as error:  # Ray's, and whatever a node with other code raises
            return Facts(
                hostname=node.hostname,
                forebay=__version__,
                python=platform.python_version(),
                auth_mode="",
                niceness=0,
                gcs_timeout_s=0,
                problem=f"forebay cannot be used there: {_first_line(error)}",
            )
        return msgspec.msgpack.decode(found, type=Facts)

    def actors(self) -> list[str]:
        """Return the names of all servers and routers: the desired state."""
        return sorted(self._ray.util.list_named_actors(), key=_by_number)

    def remember_start(self, start: Start | None) -> None:
        """Keep what an `up` starts in the GCS until it has finished."""
        from ray.experimental import internal_kv

        if start is None:
            internal_kv._internal_kv_del(_START, namespace=NAMESPACE)
        else:
            internal_kv._internal_kv_put(_START, start.encode(), namespace=NAMESPACE)

    def unfinished_start(self) -> Start | None:
        """Return what an `up` starts, or started until it was cut."""
        from ray.experimental import internal_kv

        found = internal_kv._internal_kv_get(_START, namespace=NAMESPACE)
        return None if found is None else msgspec.msgpack.decode(found, type=Start)

    def create(self, spec: Spec, node_id: str) -> None:
        """Start an actor. It stays on its node or, after a failure of that, on another with room for it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {}
        if spec.group:
            options["scheduling_strategy"] = self._in_group(spec)
        elif spec.node_address:
            options["resources"] = {f"node:{spec.node_address}": 0.001}
        else:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
        needs = spec.needs
        self._ray.remote(Replica).options(
            name=spec.name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=_THREADS,
            num_cpus=needs.num_cpus,
            memory=needs.memory_bytes or None,
            num_gpus=needs.num_gpus,
            **options,
        ).remote(spec.encode(), place_of_actor)

    def reserve_pair(self, pair: Sequence[Spec]) -> None:
        """Reserve room for a prefill and a decode server on one node."""
        bundles = [_bundle(spec) for spec in pair]
        group = self._ray.util.placement_group(bundles, "STRICT_PACK", name=pair[0].group, lifetime="detached")
        if not group.wait(CREATE_TIMEOUT_S):
            self._ray.util.remove_placement_group(group)
            raise Unavailable(f"Ray has not reserved room for {pair[0].group} within {CREATE_TIMEOUT_S:.0f} s")

    def _in_group(self, spec: Spec) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index = 0 if spec.group == spec.name else 1
        return PlacementGroupSchedulingStrategy(
            self._ray.util.get_placement_group(spec.group), placement_group_bundle_index=index
        )

    def call(self, name: str, method: str, *arguments: bytes, timeout_s: float = CALL_TIMEOUT_S) -> bytes:
        """Call a method of an actor. Raises Unavailable if it does not answer: it, or its node, has failed."""
        return self.call_all([name], method, *arguments, timeout_s=timeout_s)[name].answer()

    def call_all(
        self, names: Sequence[str], method: str, *arguments: bytes, timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, Outcome]:
        """Call a method of several actors at once."""
        running: dict[str, Any] = {}
        outcomes: dict[str, Outcome] = {}
        for name in names:
            try:
                running[name] = getattr(self._ray.get_actor(name), method).remote(*arguments)
            except ValueError:
                outcomes[name] = Outcome(name, error="there is no such server")
        if running:
            self._ray.wait(list(running.values()), num_returns=len(running), timeout=timeout_s)
        for name, future in running.items():
            try:
                outcomes[name] = Outcome(name, value=self._ray.get(future, timeout=0.1))
            except self._ray.exceptions.GetTimeoutError:
                outcomes[name] = Outcome(
                    name, error=f"no answer within {timeout_s:g} s: it waits for a node, or starts"
                )
            except self._ray.exceptions.RayError as error:
                is_dead = isinstance(error, self._ray.exceptions.ActorDiedError)
                outcomes[name] = Outcome(name, error=_first_line(error), is_dead=is_dead)
        return outcomes

    def end(self, spec: Spec) -> None:
        """End an actor for good. Drain it first: its process ends at once."""
        try:
            self._ray.kill(self._ray.get_actor(spec.name), no_restart=True)
        except ValueError:
            return
        remember_update(spec.name, None)

    def release(self, group: str) -> None:
        """Free the room of a pair, whose actors have ended."""
        try:
            self._ray.util.remove_placement_group(self._ray.util.get_placement_group(group))
        except ValueError:
            return


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer of one actor, or why there is none. An actor that is dead is not started again by Ray."""

    name: str
    value: bytes = b""
    error: str = ""
    is_dead: bool = False

    def answer(self) -> bytes:
        """Return the answer. Raises Unavailable if there is none."""
        if self.error:
            raise Unavailable(f"{self.name}: {self.error}")
        return self.value


def _refuse_silent_gcs(address: str) -> None:
    """Raise Unavailable if no server listens at an address: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), GCS_TIMEOUT_S).close()
    except OSError as error:
        raise Unavailable(f"Ray's GCS does not answer at {address} ({error}): servers and routers run on") from None


def _bundle(spec: Spec) -> dict[str, float]:
    amounts = {"CPU": spec.needs.num_cpus, "memory": float(spec.needs.memory_bytes), "GPU": spec.needs.num_gpus}
    return {name: amount for name, amount in amounts.items() if amount}


def _by_number(name: str) -> tuple[str, int]:
    role, _, number = name.rpartition("-")
    return role, int(number) if number.isdecimal() else 0


def _first_line(error: BaseException) -> str:
    """Return the part of an error of Ray's that says what happened: a traceback of a node ends with it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines and "Traceback" in str(error) else lines[0] if lines else type(error).__name__)[:300]
