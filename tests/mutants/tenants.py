"""Rules of C32: how tenants share an engine."""

from tests.mutants.mutant import Mutant

_TEST = "scheduler/test_tenants.py::test_c32_"

TENANTS = (
    Mutant(
        "C32 a tenant that joins has no credit",
        "scheduler/queues.py",
        "            account.service = max(account.service, service)\n",
        "",
        f"{_TEST}tenant_that_was_idle_has_no_credit",
    ),
    Mutant(
        "C32 a charge is divided by the weight",
        "scheduler/admission.py",
        "account.service += num_new / account.weight",
        "account.service += num_new",
        f"{_TEST}two_backlogged_tenants_are_served_by_their_weights",
    ),
    Mutant(
        "C32 generated tokens are charged",
        "scheduler/telling.py",
        "        account.service += end / account.weight\n",
        "",
        f"{_TEST}tenant_with_longer_outputs_starts_fewer_requests",
    ),
    Mutant(
        "C32 a request waits for prompts of its own tenant alone",
        "scheduler/admission.py",
        "leader.account is not req.account",
        "False",
        f"{_TEST}prompt_waits_for_one_under_way_of_its_own_tenant_alone",
    ),
    Mutant(
        "C32 tokens computed again are not charged",
        "scheduler/admission.py",
        "max(chunk.start, req.num_charged)",
        "chunk.start",
        f"{_TEST}tokens_computed_again_are_not_charged_again",
    ),
    Mutant(
        "C32 a tenant above its share displaces nobody",
        "scheduler/displacing.py",
        " or pages > room.share(req.tenant, num_pages)",
        "",
        f"{_TEST}request_larger_than_its_tenants_share_displaces_nobody",
    ),
    Mutant(
        "C32 a full queue takes a tenant within its share",
        "scheduler/limits.py",
        " or own + count <= self.share(tenant, limit)",
        "",
        f"{_TEST}full_queue_refuses_the_tenant_that_fills_it_and_takes_others",
    ),
)
