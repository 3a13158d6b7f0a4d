"""Asking workers for the prefixes they hold. All of it is guesswork without harm: a worker that holds less than was
thought sends less, or nothing, and whoever pulls computes the rest.
"""

from twostroke.protocol.messages import SendPrefix
from twostroke.protocol.requests import GenerateRequest
from twostroke.protocol.tickets import Ticket, mint_ticket
from twostroke.router.policy import Path
from twostroke.router.token_channels import TokenChannels


class PrefixPulls:
    """Sends the requests for prefixes. `secret` is the cluster's, to sign tickets."""

    def __init__(self, *, channels: TokenChannels, secret: bytes):
        self._channels = channels
        self._secret = secret

    def ask(self, path: Path, request: GenerateRequest) -> Ticket | None:
        """Have the path's source send what it holds of the attempt's tokens; the ticket for who computes the prompt.

        None where there is no source, or no channel to it now: the target would wait for it in vain.
        """
        if path.source is None or not self._channels.is_connected(path.source.peer):
            return None
        target = path.reader
        ticket = mint_ticket(
            self._secret,
            request.request_id,
            path.source.peer,
            target.peer,
            target.transfer_addresses,
            source_ranks=path.source.layout.tp_size,
        )
        self._channels.send_prefix(path.source.peer, SendPrefix(ticket, request.token_ids, request.cache_salt))
        return ticket
