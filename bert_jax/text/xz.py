"""Files of xz: all their streams, with padding between them; damage of any of them is an error.

`lzma.open` takes a damaged stream after the first for what may follow a file, and ends there.
"""

import io
import lzma
from typing import Any

_BLOCK_BYTES = 1 << 20


def open_xz(file: Any) -> io.BufferedReader:
    """Return the decompressed content of an open file; LZMAError or EOFError if it is damaged."""
    return io.BufferedReader(_Streams(file))


class _Streams(io.RawIOBase):
    """The content of streams, one after the other."""

    def __init__(self, file: Any):
        self._file, self._stream, self._rest = file, lzma.LZMADecompressor(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._stream.eof and not self._begins_next():
                return 0
            if self._stream.needs_input and not self._rest:
                self._rest = self._file.read(_BLOCK_BYTES)
                if not self._rest:
                    raise EOFError("it ends before its end-of-stream marker")
            given, self._rest = self._rest, b""
            content = self._stream.decompress(given, len(buffer))
            if content:
                buffer[: len(content)] = content
                return len(content)

    def _begins_next(self) -> bool:
        """Begin the stream that follows after zeros; False at the end of the file."""
        self._rest = self._stream.unused_data.lstrip(b"\0")
        while not self._rest and (block := self._file.read(_BLOCK_BYTES)):
            self._rest = block.lstrip(b"\0")
        self._stream = lzma.LZMADecompressor() if self._rest else self._stream
        return bool(self._rest)
