"""Messages between a sender process and its parent: a 4-byte little-endian length and a msgpack body, over pipes."""

import asyncio
import struct
from typing import Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
_FRAME_BYTES_MAX = 256 * 1024 * 1024
_T = TypeVar("_T")


def encode_frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[_T]):
    """Reads messages of one type, or of several that are told apart by their tags."""

    def __init__(self, stream: asyncio.StreamReader, kind: type[_T]) -> None:
        self._stream = stream
        self._decode = msgspec.msgpack.Decoder(kind).decode

    async def read(self) -> _T | None:
        """The next message; None at the end of the pipe. Raises msgspec.DecodeError for what is no message."""
        try:
            (length,) = _LENGTH.unpack(await self._stream.readexactly(_LENGTH.size))
            if length > _FRAME_BYTES_MAX:
                raise msgspec.DecodeError(f"a message of {length} bytes")
            return self._decode(await self._stream.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
