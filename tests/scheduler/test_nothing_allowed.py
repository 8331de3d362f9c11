from __future__ import annotations

import pytest

from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.scheduler.limits import nothing_may_follow


@pytest.mark.parametrize(
    ("wishes", "output", "nothing"),
    [
        ({"min_tokens": 2, "stop_token_ids": (5,)}, [5], False),
        ({"min_tokens": 2, "stop_token_ids": (5,), "allowed_token_ids": (5,)}, [7], True),
        ({"min_tokens": 2, "stop_token_ids": (5,), "allowed_token_ids": (5, 6)}, [7], False),
        ({"min_tokens": 2, "stop_token_ids": (5,), "allowed_token_ids": (5,)}, [7, 8], False),
        ({"bad_words": ((5,), (8, 6)), "allowed_token_ids": (5, 6)}, [7], False),
        ({"bad_words": ((5,), (8, 6)), "allowed_token_ids": (5, 6)}, [7, 8], True),
        ({"bad_words": ((5,), (9, 8, 6)), "allowed_token_ids": (5, 6)}, [8], False),
    ],
)
def test_who_allows_nothing_is_told_so(wishes: dict[str, object], output: list[int], nothing: bool) -> None:
    req = Request(1, [8, 8], SamplingParams(**wishes))
    req.tokens.extend(output)
    error = nothing_may_follow(req)
    assert (error is not None) is nothing
    assert error is None or error.code == "nothing_allowed"
