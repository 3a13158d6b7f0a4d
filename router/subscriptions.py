"""What requests wait for on one token channel: their tokens, and word of KV that was not sent."""

from collections.abc import Callable

from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import KVNotSent, TokenFrame
from twostroke.router.token_stream import TokenStream


class Subscriptions:
    """By request. All end with the connection, since the worker forgets them with it."""

    def __init__(self) -> None:
        self._streams: dict[str, TokenStream] = {}
        self._sendings: dict[str, Callable[[], None]] = {}  # to be called where the request's KV is not sent

    @property
    def is_empty(self) -> bool:
        """Whether no request relies on the channel."""
        return not (self._streams or self._sendings)

    def subscribe(self, request_id: str, max_tokens: int, on_unread: Callable[[], None]) -> TokenStream:
        """The stream of a request's events. For the rest see TokenStream."""
        stream = TokenStream(max_tokens, lambda: self._unsubscribe(request_id), on_unread)
        self._streams[request_id] = stream
        return stream

    def watch_sending(self, request_id: str, not_sent: Callable[[], None]) -> None:
        """Call `not_sent`, once at most, when the request's KV will not come. Until `unwatch_sending`."""
        self._sendings[request_id] = not_sent

    def unwatch_sending(self, request_id: str) -> None:
        """Harmless where nothing is watched."""
        self._sendings.pop(request_id, None)

    def hear(self, message: TokenFrame | KVNotSent) -> None:
        """Hand out what the worker has sent. What is for requests that have ended here meanwhile goes nowhere."""
        match message:
            case TokenFrame():
                for event in message.events:
                    stream = self._streams.get(event.request_id)
                    if stream is not None:
                        stream.receive(event)
            case KVNotSent():
                not_sent = self._sendings.pop(message.request_id, None)
                if not_sent is not None:
                    not_sent()

    def fail(self, error: WorkerLost) -> None:
        """The connection has ended: everybody is told, and forgotten."""
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(error)
        sendings = list(self._sendings.values())
        self._sendings.clear()
        for not_sent in sendings:  # the worker aborts them
            not_sent()

    def _unsubscribe(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
