"""Reading a log as chunks of whole lines, unpacking gzip, hashing the file's bytes on the way. Memory stays bounded."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from schemas.errors import InputError
from schemas.trace import SourceFile

CHUNK_BYTES = 16 * 1024 * 1024
LONGEST_LINE = 256 * 1024 * 1024
_READ_BYTES = 1024 * 1024
_GZIP_MAGIC = b"\x1f\x8b"


class LineReader:
    """One log file. Iterate `chunks()` to the end, then ask `source()`."""

    def __init__(self, file: Path) -> None:
        """Raises InputError for a missing file or one that is none."""
        self.file = file
        self._digest = hashlib.sha256()
        self._bytes = 0
        try:
            self._stream = file.open("rb")
        except FileNotFoundError:
            raise InputError("no such file", file=file) from None
        except IsADirectoryError:
            raise InputError("is a folder, not a log", file=file, mend="name the files in it") from None
        except OSError as problem:
            raise InputError(f"can't be read ({problem.strerror})", file=file) from None

    def source(self) -> SourceFile:
        """Name, size and hash of the file as it lies on disk."""
        return SourceFile(name=self.file.name, bytes=self._bytes, sha256=self._digest.hexdigest())

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """(bytes of whole lines, number of the first). Raises InputError for a damaged or truncated gzip file."""
        rest: list[bytes] = []  # the pieces of a line that isn't complete yet
        size = 0
        line = 1
        with self._stream:
            for piece in self._unpacked():
                cut = piece.rfind(b"\n") + 1
                rest.append(piece)
                size += len(piece)
                if cut == 0 or size < CHUNK_BYTES:
                    if cut == 0 and size > LONGEST_LINE:
                        raise InputError("a line of over 256 MiB: not a log of requests", file=self.file, place=line)
                    continue
                whole = b"".join(rest)
                end = len(whole) - (len(piece) - cut)
                yield whole[:end], line
                line += whole.count(b"\n", 0, end)
                rest = [whole[end:]]
                size = len(rest[0])
        last = b"".join(rest)
        if last:
            yield last, line

    def _raw(self) -> Iterator[bytes]:
        while True:
            try:
                piece = self._stream.read(_READ_BYTES)
            except OSError as problem:
                raise InputError(f"can't be read ({problem.strerror})", file=self.file) from None
            if not piece:
                return
            self._digest.update(piece)
            self._bytes += len(piece)
            yield piece

    def _unpacked(self) -> Iterator[bytes]:
        pieces = self._raw()
        first = next(pieces, b"")
        if not first.startswith(_GZIP_MAGIC):
            if first:
                yield first
            yield from pieces
            return
        unpacker = zlib.decompressobj(wbits=31)
        packed = first
        try:
            while True:
                # At most _READ_BYTES at a time: a few kilobytes of gzip can stand for gigabytes.
                text = unpacker.decompress(packed, _READ_BYTES)
                if text:
                    yield text
                if unpacker.eof:  # another member may follow, after any padding with zeros
                    packed = unpacker.unused_data.lstrip(b"\0")
                    while not packed:
                        piece = next(pieces, None)
                        if piece is None:
                            return
                        packed = piece.lstrip(b"\0")
                    unpacker = zlib.decompressobj(wbits=31)
                else:
                    packed = unpacker.unconsumed_tail
                    if not packed and len(text) < _READ_BYTES:
                        packed = next(pieces, b"")
                        if not packed:
                            raise InputError(
                                "truncated gzip file: it ends in the middle", file=self.file, mend="copy it again"
                            )
        except zlib.error as problem:
            raise InputError(f"damaged gzip file ({problem})", file=self.file, mend="copy it again") from None


def first_line_of(file: Path) -> bytes:
    """The first line that isn't blank, without a byte order mark. Raises InputError for an empty or unreadable file."""
    reader = LineReader(file)
    for chunk, _ in reader.chunks():
        for line in io.BytesIO(chunk):
            if line.strip():
                return line.removeprefix(b"\xef\xbb\xbf").strip()
    raise InputError("empty file: no requests in it", file=file)


def numbered_lines(chunk: bytes, first_line: int) -> Iterator[tuple[int, bytes]]:
    """The chunk's lines that aren't blank, with their numbers, without line ends."""
    for number, line in enumerate(cast("IO[bytes]", io.BytesIO(chunk)), start=first_line):
        text = line.rstrip(b"\r\n")
        if text.strip():
            yield number, text
