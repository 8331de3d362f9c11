from __future__ import annotations

import pytest

from forebay.base import fault
from forebay.base.errors import ConfigError
from forebay.base.exposure import check_exposure, is_loopback

NETWORK = ["0.0.0.0", "::", "192.168.1.5", "example.org", ""]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key_and_may_have_faults(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_FAULTS", "engine.step=runtime")
    assert is_loopback(host)
    check_exposure(host, ())


@pytest.mark.parametrize("host", NETWORK)
def test_the_network_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        check_exposure(host, ())
    check_exposure(host, ("key",))


@pytest.mark.parametrize("host", NETWORK)
def test_the_network_never_meets_faults_of_the_environment(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_FAULTS", "engine.step=runtime")
    with pytest.raises(ConfigError, match="unset FOREBAY_FAULTS"):
        check_exposure(host, ("key",))


def test_the_network_never_meets_faults_armed_in_the_process() -> None:
    fault.arm("somewhere")
    try:
        with pytest.raises(ConfigError, match="faults are armed"):
            check_exposure("0.0.0.0", ("key",))
    finally:
        fault.disarm()
    check_exposure("0.0.0.0", ("key",))
