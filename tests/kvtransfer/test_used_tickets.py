"""Single use, within bounds."""

from twostroke.kvtransfer.offers import UsedTickets


def test_a_ticket_is_good_once() -> None:
    used = UsedTickets(lambda: 0.0, 10, 100)
    assert used.use(b"a")
    assert not used.use(b"a")
    assert b"a" in used
    assert b"b" not in used


def test_it_is_good_once_on_each_lane() -> None:
    used = UsedTickets(lambda: 0.0, 10, 100)
    assert used.use(b"a", 1)
    assert not used.was_used(b"a", 0)
    assert used.use(b"a", 0)
    assert not used.use(b"a", 1)
    assert used.was_used(b"a", 0)
    assert not used.was_used(b"b", 0)


def test_old_ones_are_forgotten_by_time_and_by_number() -> None:
    now = 0.0
    used = UsedTickets(lambda: now, 10, 3)
    assert used.use(b"a")
    now = 9.0
    assert used.use(b"b")
    now = 10.0
    assert used.use(b"c")
    assert b"a" not in used
    assert used.use(b"d")
    assert used.use(b"e")
    assert b"b" not in used
    assert b"c" in used
