"""How a token channel begins: the router's half."""

from twostroke.protocol.errors import ConnectionLost, EpochMismatch, ProtocolError
from twostroke.protocol.messages import Convicted, Hello, Refuse, Welcome
from twostroke.protocol.network import Connection, Network
from twostroke.protocol.stats import WorkerInfo
from twostroke.protocol.tickets import Peer
from twostroke.protocol.verdicts import Verdict


async def greet(network: Network, router: Peer, info: WorkerInfo) -> tuple[Connection, tuple[Verdict, ...]]:
    """Connect, be welcomed by the very incarnation that the fleet names, and hear what it knows of poison requests.

    Raises ConnectionLost (nobody there, or refused), EpochMismatch (somebody else) or ProtocolError.
    """
    connection = await network.connect(info.token_address)
    try:
        connection.send(Hello(sender=router, receiver=info.peer))
        answer = await connection.receive()
        if isinstance(answer, Refuse):
            raise ConnectionLost(f"refused: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"expected a welcome, got {type(answer).__name__}")
        if answer.receiver != info.peer:
            raise EpochMismatch(f"reached worker {answer.receiver.worker_id} of another epoch or name")
        known = await connection.receive()
        if not isinstance(known, Convicted):
            raise ProtocolError(f"expected what is known of poison requests, got {type(known).__name__}")
    except BaseException:
        await connection.close()
        raise
    return connection, known.verdicts
