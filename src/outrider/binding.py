"""What the two ends of a channel share in the learner's process: nothing at first, then the bound value.

Both ends are made before anything is known of what travels; binding one of them binds the other.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from outrider.errors import ChannelClosed, ChannelError, Unbound


class Closable(Protocol):
    """A value that frees what it holds."""

    def close(self) -> None:
        """Free it. May be called twice."""
        ...


T = TypeVar("T", bound=Closable)


class Binding(Generic[T]):
    """A value that is set once, used by the ends that are open, and closed with the last of them.

    Args:
        channel: Name of the channel for messages.
        missing_call: The call that binds it, named to whoever comes too early.
        ends: Names of the ends.

    Attributes:
        failure: What the receiving end raises instead of waiting for ever; the first one is kept.
    """

    def __init__(self, channel: str, missing_call: str, ends: set[str]) -> None:
        self._channel = channel
        self._missing_call = missing_call
        self._open = ends
        self._value: T | None = None
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Note the first failure. May be called from any thread."""
        if self.failure is None:
            self.failure = error

    @property
    def bound(self) -> bool:
        """Whether the value is set."""
        return self._value is not None

    def bind(self, value: T) -> None:
        """Set the value."""
        self._value = value

    def require_unbound(self, end: str) -> None:
        """Refuse a second binding.

        Raises:
            ChannelError: It is bound already.
            ChannelClosed: This end was closed.
        """
        self._require_open(end)
        if self._value is not None:
            raise ChannelError(f"{self._channel}: expected to be bound once, got a second bind")

    def get(self, end: str) -> T:
        """The value, for one end.

        Raises:
            Unbound: Not bound yet; names the missing call.
            ChannelClosed: This end was closed.
        """
        self._require_open(end)
        if self._value is None:
            raise Unbound(f"{self._channel}: its layout is not known yet, call {self._missing_call} first")
        return self._value

    def _require_open(self, end: str) -> None:
        if end not in self._open:
            raise ChannelClosed(f"{self._channel}: its {end} was closed")

    def close(self, end: str) -> None:
        """Close one end, and the value with the last one. May be called twice."""
        self._open.discard(end)
        if not self._open and self._value is not None:
            self._value.close()
