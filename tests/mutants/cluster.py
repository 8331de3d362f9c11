"""Rules of servers on a Ray cluster."""

from tests.mutants.mutant import Mutant

CLUSTER = (
    Mutant(
        "C27 a server is drained before its process is ended",
        "cluster/replica.py",
        "            unconfirmed = announcer.announce(State.DRAINING, wait_s=CONFIRM_S) if announcer else []\n",
        "            unconfirmed: list[str] = []\n",
        "cluster/test_replica.py::test_replica_announces_ready_with_the_weights_and_drains_in_order",
    ),
    Mutant(
        "C27 no command ends a server that it has not drained",
        "cluster/group.py",
        '        outcomes = self.rays.call_all([spec.name for spec in specs], "drain", timeout_s=longest)\n',
        '        outcomes = self.rays.call_all([spec.name for spec in specs], "status")\n',
        "cluster/test_group.py::test_drained_servers_are_ended_after_they_have_drained",
    ),
    Mutant(
        "C27 of two servers, where one replaces the other, one is kept",
        "cluster/changes.py",
        "            group.drain(unit)\n",
        "",
        "cluster/test_group.py::test_update_starts_each_new_server_before_it_drains_and_ends_the_old_one",
    ),
    Mutant(
        "C27 a server that replaces another is ready before that is drained",
        "cluster/changes.py",
        "            _start(group, renewed, (), own.ready_timeout)\n            group.drain(unit)\n",
        "            group.drain(unit)\n            _start(group, renewed, (), own.ready_timeout)\n",
        "cluster/test_group.py::test_update_starts_each_new_server_before_it_drains_and_ends_the_old_one",
    ),
    Mutant(
        "C27 a start that fails keeps no server of it",
        "cluster/changes.py",
        "        group.end(specs)\n        raise\n",
        "        raise\n",
        "cluster/test_group.py::test_start_that_fails_ends_its_server_and_keeps_the_old_ones",
    ),
    Mutant(
        "C27 a server that drains is never announced as ready",
        "cluster/replica.py",
        "            if news != self._announced and not self._ending.is_set():\n",
        "            if news != self._announced:\n",
        "cluster/test_replica.py::test_server_that_drains_is_never_announced_as_ready",
    ),
    Mutant(
        "C27 a process that is started again is another instance",
        "cluster/replica.py",
        "                self._announcer.begin_instance()  # which no router sends requests to\n",
        "                pass\n",
        "cluster/test_replica.py::test_process_that_dies_is_another_instance_at_the_same_url",
    ),
    Mutant(
        "C27 a server that was started again has the updated weights",
        "cluster/replica.py",
        "        if self._update is not None:\n",
        "        if False:\n",
        "cluster/test_replica.py::test_actor_started_again_by_ray_has_the_weights_of_before",
    ),
    Mutant(
        "C29 no key is an argument of an actor",
        "cluster/options.py",
        "    refuse_secrets(values)\n",
        "",
        "cluster/test_options.py::test_up_key_from_the_environment_is_refused",
    ),
    Mutant(
        "C29 a cluster of several machines in which strangers can run code is refused",
        "cluster/security.py",
        "    open_nodes = [node.hostname for node in nodes if facts[node.id].auth_mode != TOKEN]\n",
        "    open_nodes: list[str] = []\n",
        "cluster/test_security.py::test_cluster_of_several_machines_needs_a_token_and_a_key",
    ),
    Mutant(
        "C33 a stream whose reader does not read is cut off behind Ray Serve, too",
        "cluster/ingress.py",
        "        if len(self._pending) + len(data) > MAX_BUFFERED_BYTES:\n            return False\n",
        "",
        "cluster/test_ingress.py::test_reader_that_is_too_slow_is_cut_off",
    ),
)
