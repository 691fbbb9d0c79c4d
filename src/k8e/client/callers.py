"""What the parts of a client are built on: a way to have an operation done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Generator
from typing import Any, TypeVar

from k8e.client.operations import Operation
from k8e.client.requests import AsyncContent, Content

T = TypeVar("T")


class Caller:
    """A part of the synchronous client."""

    @abstractmethod
    def _call(self, operation: Operation[T], source: Content | None = None) -> T: ...

    @abstractmethod
    def _stream(
        self, operation: Operation[Any], source: Content | None = None
    ) -> Generator[Any]: ...


class AsyncCaller:
    """A part of the asynchronous client."""

    @abstractmethod
    async def _call(self, operation: Operation[T], source: AsyncContent | None = None) -> T: ...

    @abstractmethod
    def _stream(
        self, operation: Operation[Any], source: AsyncContent | None = None
    ) -> AsyncGenerator[Any]: ...
