"""Which members there are, and which may get requests, by what the command line, announcements and checks say."""

from __future__ import annotations

import pytest

from forebay.base.errors import ConfigError, Conflict, InvalidRequest, Overloaded
from forebay.route import membership as module
from forebay.route.announcement import LEASE_S, Role, State
from forebay.route.membership import FORGET_S, MemberRecord
from tests.route.records import INSTANCES, URL, Records, announcement, membership, up

_, FIRST, SECOND, THIRD, *_ = INSTANCES


def announced(state: State = State.READY, at: float = 0.0) -> tuple[Records, MemberRecord]:
    """A member that was announced and has passed a check, if it is ready, and has one block cached."""
    found = membership()
    found.announce(announcement(1, state), at)
    [one] = up(found).all
    found.prefixes.learn([b"block"], one.url)
    return found, one


def test_membership_each_change_of_a_member_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    def logged() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    caplog.set_level("INFO", "forebay")
    found = membership()
    found.announce(announcement(1), 0.0)
    [one] = found.all
    found.announce(announcement(2), 1.0)
    assert logged() == [f"member_announced role=both at={URL} state=ready"]
    for _ in range(2):
        found.checked(one, {"served_model_name": "it"}, one.num_downs)
    assert logged() == [f"member_up role=both at={URL} model=it"]
    for _ in range(2):
        one.down("no answer")
    assert logged() == [f'member_down role=both at={URL} why="no answer"']
    found.announce(announcement(3, State.GONE), 2.0)
    assert logged() == [f'member_removed role=both at={URL} why="it is gone"']


def test_membership_lease_of_an_announced_member_ends_unless_it_is_renewed() -> None:
    found, one = announced()
    assert one.obstacle(LEASE_S - 0.1) == ""
    found.announce(announcement(2), 5.0)
    assert one.obstacle(LEASE_S + 4.9) == ""
    assert "lease" in one.obstacle(LEASE_S + 5.0)
    found.expire(LEASE_S + 5.0)
    assert found.all == [one]
    found.expire(LEASE_S + 5.0 + FORGET_S)
    assert (found.all, len(found.prefixes)) == ([], 0)


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING])
def test_membership_member_gets_requests_in_the_state_ready_alone(state: State) -> None:
    found, one = announced(state)
    assert one.obstacle(0.0) == f"it is {state}"
    found.announce(announcement(2), 1.0)
    assert one.obstacle(1.0) == ""


def test_membership_late_or_doubled_announcement_changes_nothing() -> None:
    found, one = announced()
    found.announce(announcement(5, State.DRAINING), 5.0)
    for sequence in (4, 5):
        found.announce(announcement(sequence), 9.0)
    assert one.obstacle(9.0) == "it is draining"
    assert one.lease_ends == 5.0 + LEASE_S


def test_membership_new_instance_replaces_the_old_one_whose_cache_is_gone() -> None:
    found, one = announced()
    found.announce(announcement(3, instance=SECOND), 1.0)
    assert one.obstacle(1.0) == "a new instance, not checked yet"
    assert len(found.prefixes) == 0
    up(found)
    for sequence in (1, 2):
        with pytest.raises(Conflict) as late:
            found.announce(announcement(sequence, State.DRAINING), 2.0)
        assert late.value.code == "instance_replaced"
    found.announce(announcement(4, State.GONE), 2.0)  # the old one's end is not the new one's
    assert one.obstacle(2.0) == ""


def test_membership_announcement_of_an_older_unknown_instance_replaces_none_with_a_lease() -> None:
    """Its first announcement is the late one, so that its instance is no known one."""
    found, one = announced()
    with pytest.raises(Conflict) as late:
        found.announce(announcement(0, instance=THIRD), 1.0)
    assert late.value.code == "instance_replaced"
    found.announce(announcement(0, instance=THIRD), LEASE_S)  # a machine that was started again has another clock
    assert one.announced is not None
    assert one.announced.instance == THIRD


def test_membership_living_instance_that_a_late_announcement_replaced_returns_after_a_lease() -> None:
    """The late one was sent before the machine was started again."""
    found, one = announced()
    found.announce(announcement(9, instance=SECOND), 1.0)
    with pytest.raises(Conflict):
        found.announce(announcement(2), 4.0)
    found.announce(announcement(3), LEASE_S + 1.0)
    assert one.announced is not None
    assert one.announced.instance == FIRST


def test_membership_gone_removes_a_member_at_once_and_its_instance_never_returns() -> None:
    found, _ = announced()
    found.announce(announcement(2, State.GONE), 1.0)
    assert (found.all, len(found.prefixes)) == ([], 0)
    with pytest.raises(Conflict):
        found.announce(announcement(3), 2.0)
    found.announce(announcement(0, State.GONE, url="http://b:1", instance=SECOND), 2.0)  # never heard of before
    assert found.all == []


def test_membership_url_of_the_command_line_stays_a_member_without_announcements() -> None:
    found = up(membership(both=URL))
    [one] = found.all
    found.announce(announcement(1), 0.0)
    assert one.obstacle(0.0) == ""  # by its last check
    found.prefixes.learn([b"block"], one.url)
    found.expire(LEASE_S)
    assert len(found.prefixes) == 0
    assert one.obstacle(LEASE_S).startswith("its announcements have ended")
    found.expire(LEASE_S + FORGET_S)
    assert found.all == [one]
    up(found)
    assert one.obstacle(LEASE_S + FORGET_S) == ""


def test_membership_gone_server_of_the_command_line_may_come_back_after_a_failed_check() -> None:
    """Until its port is closed the old process may still answer."""
    found = up(membership(both=URL))
    [one] = found.all
    found.announce(announcement(1, State.GONE), 0.0)
    up(found)
    found.expire(LEASE_S)
    assert one.obstacle(LEASE_S) == "it is gone"
    found.failed_check(one, "nobody listens")
    assert one.obstacle(LEASE_S) == "nobody listens"
    up(found)
    assert one.obstacle(LEASE_S) == ""


def test_membership_ready_member_or_one_with_other_weights_is_to_be_checked_at_once() -> None:
    found = membership()
    assert found.announce(announcement(1, State.STARTING), 0.0) is None
    [one] = found.all
    states = [State.READY, State.READY, State.DRAINING, State.READY]
    checked = [found.announce(announcement(2 + i, state), 0.0) for i, state in enumerate(states)]
    assert checked == [one, None, None, one]
    assert found.announce(announcement(9, weight_version="v2"), 0.0) is one
    assert found.announce(announcement(8, weight_version="v3"), 0.0) is None  # late
    assert found.announce(announcement(10, State.GONE), 0.0) is None


def test_membership_other_weights_by_announcement_or_check_drop_the_cached_prefixes() -> None:
    found, one = announced()
    found.announce(announcement(2, weight_version="v2"), 0.0)
    assert len(found.prefixes) == 0
    found.prefixes.learn([b"block"], one.url)
    up(found)
    found.announce(announcement(3, weight_version="v2"), 0.0)
    assert len(found.prefixes) == 1
    up(found, versions={URL: "1"})
    assert len(found.prefixes) == 0
    assert one.version == ("v2", "1")


def test_membership_lost_member_is_counted_and_its_cache_is_forgotten() -> None:
    found, one = announced()
    num_downs = one.num_downs
    found.lost(one, "it ended")
    assert (one.num_failures, one.up, len(found.prefixes)) == (1, False, 0)
    found.checked(one, {}, num_downs)
    assert not one.up  # that check began before
    found.checked(one, {}, one.num_downs)
    assert one.up


def test_membership_announcements_are_bounded_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = announced()
    monkeypatch.setattr(module, "MOST_MEMBERS", 1)
    with pytest.raises(Overloaded):
        found.announce(announcement(1, url="http://b:1", instance=SECOND), 0.0)
    for url in ("ftp://b", "http://b:port", "http://"):
        with pytest.raises(InvalidRequest):
            found.announce(announcement(1, url=url, instance=SECOND), 0.0)
    monkeypatch.setattr(module, "MOST_INSTANCES", 2)
    for number, instance in enumerate(INSTANCES):
        found.announce(announcement(10 + number, State.GONE, url="http://b:1", instance=instance), 0.0)
    assert list(found._instances._gone) == list(found._instances._sequences) == INSTANCES[-2:]


def test_membership_remembers_4096_ended_instances_and_refuses_each_of_them() -> None:
    found = membership()
    for number in range(4097):
        found.announce(announcement(number, State.GONE, instance=f"{number:032x}"), 0.0)
    assert len(found._instances._gone) == len(found._instances._sequences) == 4096
    with pytest.raises(Conflict, match="is gone"):
        found.announce(announcement(9000, instance=f"{1:032x}"), 0.0)
    assert found.announce(announcement(9000, instance=f"{0:032x}"), 0.0) is not None  # forgotten


def test_membership_admits_1024_members() -> None:
    found = membership()
    for number in range(1025):
        said = announcement(1, url=f"http://a:{number + 1}", instance=f"{number:032x}")
        if number < 1024:
            assert found.announce(said, 0.0) is not None
    with pytest.raises(Overloaded, match="1024 members"):
        found.announce(said, 0.0)


def test_membership_without_a_lease_is_listed_for_a_minute() -> None:
    found, one = announced()
    found.expire(LEASE_S + 59.9)
    assert found.all == [one]
    found.expire(LEASE_S + 60.0)
    assert found.all == []


def test_membership_role_of_the_command_line_is_not_announced_away() -> None:
    found = membership(prefill=URL)
    with pytest.raises(Conflict) as refused:
        found.announce(announcement(1), 0.0)
    assert refused.value.code == "role_mismatch"
    with pytest.raises(ConfigError):
        found.configure(f"{URL}/", Role.BOTH)
