"""Slots: no interleaving of requests gives two of them one slot, and free slots go out at once."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swa_jax.slots import Slots

REQUESTS = st.integers(0, 9)  # 0 is as good a name as any


class Interleavings(RuleBasedStateMachine):
    """Requests that come and go, against a dictionary of those that are live."""

    @initialize(count=st.integers(1, 4))
    def create(self, count):
        self.count, self.slots, self.live = count, Slots.create(count), {}
        self.past = []

    def change(self, slots):
        self.past.append((self.slots, self.slots.owners))
        self.slots = slots

    @rule(owner=REQUESTS)
    def acquire(self, owner):
        if owner in self.live or len(self.live) == self.count:
            with pytest.raises(ValueError, match="owner: expected a"):
                self.slots.acquire(owner)
            return
        slots, slot = self.slots.acquire(owner)
        assert slot == min(set(range(self.count)) - set(self.live.values()))
        self.live[owner] = slot
        self.change(slots)

    @rule(slot=st.integers(-2, 5), owner=REQUESTS)
    def release(self, slot, owner):
        if self.live.get(owner) != slot:
            with pytest.raises(ValueError, match="slot: expected"):
                self.slots.release(slot, owner)
            return
        del self.live[owner]
        self.change(self.slots.release(slot, owner))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release_a_live_one(self, data):
        owner = data.draw(st.sampled_from(sorted(self.live)))
        self.release(self.live[owner], owner)

    @invariant()
    def every_live_request_has_its_own_slot(self):
        owners = self.slots.owners
        assert {owner: owners.index(owner) for owner in owners if owner is not None} == self.live
        assert len(set(self.live.values())) == len(self.live)

    @invariant()
    def what_has_no_owner_is_free(self):
        assert set(self.slots.free) == set(range(self.count)) - set(self.live.values())

    @invariant()
    def earlier_values_stay_as_they_were(self):
        assert all(slots.owners == owners for slots, owners in self.past)


TestInterleavings = Interleavings.TestCase


def test_slots_go_out_from_the_lowest_and_come_back_at_once():
    slots = Slots.create(3)
    slots, first = slots.acquire("a")
    slots, second = slots.acquire("b")
    slots, third = slots.acquire("c")
    assert (first, second, third) == (0, 1, 2)
    assert slots.free == ()
    slots, again = slots.release(1, "b").acquire("d")
    assert again == 1
    assert slots.owners == ("a", "d", "c")


FULL = Slots(("a", "b"))
HALF = Slots(("a", None))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Slots.create(0), "count: expected an integer of 1 or more, got 0"),
        (lambda: FULL.acquire("c"), "owner: expected a free slot for 'c', got none of 2"),
        (
            lambda: HALF.acquire("a"),
            "owner: expected a request without a slot, got 'a', which has slot 0",
        ),
        (lambda: HALF.acquire(None), "owner: expected a request, got None"),
        (
            lambda: HALF.release(1, "a"),
            "slot: expected one that belongs to 'a', got 1, a free one",
        ),
        (
            lambda: FULL.release(0, "a").release(0, "a"),
            "slot: expected one that belongs to 'a', got 0, a free one",
        ),
        (
            lambda: FULL.release(0, "b"),
            "slot: expected one that belongs to 'b', got 0 of 'a'",
        ),
        (lambda: FULL.release(2, "a"), "slot: expected 0 to 1, got 2"),
        (lambda: FULL.release(-1, "b"), "slot: expected 0 to 1, got -1"),
    ],
)
def test_what_would_mix_requests_up_is_refused(call, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call()
    assert str(error.value) == message
