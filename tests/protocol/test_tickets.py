import msgspec
import pytest

from twostroke.protocol.errors import EpochMismatch, TicketRefused
from twostroke.protocol.requests import Address, Peer, mint_ticket, verify_ticket

P, D = Peer("p", 1), Peer("d", 2)
HOME = (Address("127.0.0.1", 9),)


def test_a_minted_ticket_is_accepted_by_the_workers_it_names():
    verify_ticket(b"secret", mint_ticket(b"secret", "r", P, D, HOME), source=P, target=D)


def test_no_two_tickets_share_a_transfer_id():
    assert len({mint_ticket(b"s", "r", P, D, HOME).transfer_id for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "other"},
        {"transfer_id": bytes(16)},
        {"source": Peer("q", 1)},
        {"target": Peer("d", 3)},
        {"target_addresses": (Address("127.0.0.1", 10),)},
        {"target_addresses": (*HOME, *HOME)},
        {"source_ranks": 2},
        {"mac": b""},
    ],
)
def test_a_changed_ticket_is_refused(change: dict[str, object]):
    ticket = msgspec.structs.replace(mint_ticket(b"secret", "r", P, D, HOME), **change)
    with pytest.raises(TicketRefused, match="signature"):
        verify_ticket(b"secret", ticket, source=ticket.source, target=ticket.target)


def test_a_ticket_of_another_cluster_is_refused():
    with pytest.raises(TicketRefused):
        verify_ticket(b"ours", mint_ticket(b"theirs", "r", P, D, HOME), source=P, target=D)


def test_a_ticket_for_another_worker_is_refused():
    ticket = mint_ticket(b"s", "r", P, D, HOME)
    with pytest.raises(TicketRefused, match="the ticket's source is p, not q"):
        verify_ticket(b"s", ticket, source=Peer("q", 1), target=D)


def test_a_ticket_from_before_a_restart_is_refused():
    ticket = mint_ticket(b"s", "r", P, D, HOME)
    with pytest.raises(EpochMismatch, match="the ticket's target is d in its epoch 2"):
        verify_ticket(b"s", ticket, source=P, target=Peer("d", 3))
