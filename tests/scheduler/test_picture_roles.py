"""Images of requests with two halves: both engines have read the same ones, or both halves end (C22, C34)."""

from __future__ import annotations

from array import array

import pytest

from forebay.requests.pictures import Picture
from forebay.requests.request import Request, Status
from forebay.requests.transfers import Decline, Offer, Offered, Ticket, Withdraw, digest_of
from tests.pictures import picture, picture_config, with_placeholders
from tests.scheduler.roles import Half, arrive, decode, prefill

TEXT = list(range(100, 112))
ONE, OTHER, SECOND = picture(1, 3), picture(2, 3), picture(3, 7)
PICTURES = {"pictures": picture_config(mrope=True)}
DIGEST = digest_of(array("i", with_placeholders(TEXT, [ONE, SECOND])))


def meet(half: Half, *pictures: Picture, room: int = 5) -> Request:
    return half.meet(with_placeholders(TEXT, pictures), room=room, pictures=pictures)


def offered(*pictures: Picture) -> Offered:
    digests = tuple(its.digest for its in pictures)
    return Offered(Ticket("d", 5, b"n"), len(TEXT), DIGEST, 0, pictures=digests)


def nothing_is_held(half: Half) -> bool:
    half.scheduler.audit()
    return (half.scheduler.pools.available_pages, half.scheduler.handoff.tickets.num_open) == (64, 0)


def test_decode_offer_has_the_digests_of_its_requests_pictures() -> None:
    half = decode(**PICTURES)
    meet(half, ONE, SECOND, room=1)
    half.meet(TEXT, room=2)
    half.step()
    assert [(its.pictures, its.digest) for its in half.orders] == [
        ((ONE.digest, SECOND.digest), DIGEST),
        ((), digest_of(array("i", TEXT))),
    ]


def test_c22_offer_finds_its_request_whatever_ids_pictures_have_here() -> None:
    """Here the pictures have ids behind those of a picture that came before."""
    half = prefill(**PICTURES)
    meet(half, OTHER, room=4)
    req = meet(half, ONE, SECOND)
    assert digest_of(req.tokens) != DIGEST
    half.hear(offered(ONE, SECOND))
    plan = half.step()
    assert plan is not None
    assert [admission.request_id for admission in plan.admissions] == [req.id]
    assert plan.pictures.encodes


WRONG = {"changed": (OTHER, SECOND), "swapped": (SECOND, ONE), "fewer": (ONE,), "none": (), "more": (ONE, SECOND, ONE)}


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("pictures", WRONG.values(), ids=WRONG)
def test_c34_offer_with_other_pictures_ends_both_halves(pictures: tuple[Picture, ...], is_early: bool) -> None:
    half = prefill(**PICTURES)
    if is_early:
        half.hear(offered(*pictures))
    req = meet(half, ONE, SECOND)
    if not is_early:
        half.hear(offered(*pictures))
    half.updates += half.scheduler.take_updates()
    half.take_orders()
    assert req.status is Status.FINISHED
    assert half.failure_of(req) == "images_differ"
    assert [order.failure.code for order in half.orders if isinstance(order, Withdraw)] == ["images_differ"]
    assert nothing_is_held(half)


def test_images_differ_names_the_first_image_that_does() -> None:
    half = prefill(**PICTURES)
    meet(half, ONE, SECOND)
    half.hear(offered(ONE, OTHER))
    (update,) = half.updates
    assert update.failure is not None
    assert "image 2 of 2 has other pixels" in update.failure.message


def test_c28_arrived_prompt_decodes_with_the_rotary_delta_of_its_pictures_and_is_not_encoded() -> None:
    half = decode(**PICTURES)
    meet(half, picture(1, 3, sizes=((4, 4),), grid=(2, 2), runs=((3, 4),)))
    half.step()
    (offer,) = half.orders
    assert isinstance(offer, Offer)
    arrive(half, offer)
    plan = half.step()
    assert plan is not None
    (admission,) = plan.admissions
    assert admission.prebuilt
    assert admission.rope_delta == -2
    assert not plan.pictures.encodes


def test_c22_declined_request_with_pictures_ends_its_half_on_prefill_at_once() -> None:
    half = decode(**PICTURES)
    req = meet(half, ONE, SECOND)
    half.scheduler.abort(req.id)
    half.take_orders()
    (decline,) = half.orders
    assert isinstance(decline, Decline)
    other = prefill(**PICTURES)
    waits = meet(other, ONE, SECOND)
    declined = Offered(decline.ticket, decline.num_tokens, decline.digest, 0, declined=decline.failure)
    other.hear(declined)
    assert other.failure_of(waits) == "aborted"
    assert nothing_is_held(other)
