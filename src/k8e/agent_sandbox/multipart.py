"""The one file of a ``multipart/form-data`` body, in constant memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive

from k8e.agent_sandbox.bodies import TooLarge, pieces

FIELD = b"file"
MAX_HEAD = 8 << 10
"""Bytes of a part's headers."""
MAX_BESIDES = 64 << 10
"""Bytes of parts that are not the file."""


class Malformed(Exception):
    """The body is no form with a file."""


class FilePart:
    """Takes a form as it comes, and gives the bytes of its file."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise Malformed("the body must be multipart/form-data")
        self.name = ""
        """What the file is called, once that is known."""
        self.complete = False
        self._data: list[bytes] = []
        self._head: list[bytearray] = []
        self._size = 0
        self._inside = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_begin": lambda: self._head.append(bytearray()),
                    "on_header_field": self._add_header,
                    "on_header_value": self._add_value,
                    "on_headers_finished": self._name,
                    "on_part_data": self._add,
                    "on_part_end": self._end,
                },
            )
        except FormParserError as error:
            raise Malformed(str(error)) from None

    def feed(self, piece: bytes) -> bytes:
        """Bytes of the file that are in this piece of the body."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise Malformed(f"the form is malformed: {error}") from None
        found = b"".join(self._data)
        self._data.clear()
        return found

    def _begin(self) -> None:
        self._head.clear()

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start, MAX_HEAD)
        self._head[-1] += data[start:end].lower()

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start, MAX_HEAD)
        if b":" not in self._head[-1]:
            self._head[-1] += b":"
        self._head[-1] += data[start:end]

    def _count(self, count: int, limit: int) -> None:
        self._size += count
        if self._size > limit:
            raise TooLarge("the form has too much beside its file")

    def _name(self) -> None:
        for line in self._head:
            field, _, value = bytes(line).partition(b":")
            if field != b"content-disposition":
                continue
            _, options = parse_options_header(value)
            self._inside = options.get(b"name") == FIELD and not self.name
            if self._inside:
                name = options.get(b"filename", b"").decode("utf-8", "surrogateescape")
                if not name:
                    raise Malformed("the file has no name")
                self.name = name

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._inside:
            self._data.append(data[start:end])
        else:
            self._count(end - start, MAX_BESIDES)

    def _end(self) -> None:
        self.complete = self.complete or self._inside
        self._inside = False


async def file_of(content_type: str, receive: Receive) -> tuple[str, AsyncGenerator[bytes]]:
    """The file's name, and its bytes as they come; Malformed if there is no whole file."""
    part = FilePart(content_type)
    body = pieces(receive)
    async for piece in body:
        first = part.feed(piece)
        if part.name:
            return part.name, _rest(part, first, body)
    raise Malformed("the form has no file")


async def _rest(part: FilePart, first: bytes, body: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    if first:
        yield first
    async for piece in body:
        if data := part.feed(piece):
            yield data
    if not part.complete:
        raise Malformed("the file ends in the middle")
