"""A client whose certificates change often has one channel, and those of the calls under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import grpc
import pytest

from k8e import AsyncSandboxClient, SandboxClient
from k8e.client import remote
from k8e.client.remote import GrpcChannels
from tests.places import Place

CHANGES = 5
LONG = "read -r line; echo $line"


class Channels(list[Any]):
    """Every channel that was made, and which of them are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Any] = []

    def watch(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            channel = make(*arguments)
            close = channel.close

            def closed(*arguments: Any) -> Any:
                self.open.remove(channel)
                return close(*arguments)

            channel.close = closed
            self.append(channel)
            self.open.append(channel)
            return channel

        return made


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Channels:
    found = Channels()
    monkeypatch.setattr(grpc, "secure_channel", found.watch(grpc.secure_channel))
    monkeypatch.setattr(grpc.aio, "secure_channel", found.watch(grpc.aio.secure_channel))
    monkeypatch.setattr(remote, "FRESH_SECONDS", 0.0)  # so that every call looks at the files
    return found


@pytest.fixture
def change(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[Callable[[], None]]:
    """Writes the files of a login, each time in another way, and points clients to them."""
    place.json("sandbox", "status")
    address = place.wait_for_grpc()
    key = place.json("sandbox", "api-key", "create", "lines")["key"]
    ca = tmp_path / "ca.crt"
    text = (place.data / "tls" / "ca.crt").read_text()
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", address)
    monkeypatch.setenv("K8E_SANDBOX_APIKEY", key)
    monkeypatch.setenv("K8E_SANDBOX_CERT_DIR", str(tmp_path))
    ca.write_text(text)

    def change() -> None:
        ca.write_text(ca.read_text() + "\n")

    yield change
    place.json("sandbox", "api-key", "delete", "lines")


def test_old_channels_are_closed_when_their_calls_have_ended(
    channels: Channels, change: Callable[[], None]
) -> None:
    with SandboxClient() as client:
        made = client.create_session(runtime_class="container")
        with client.open(made, LONG) as running:
            first = channels[-1]
            for _ in range(CHANGES):
                change()
                client.get_session(made)
                assert channels.open == [first, channels[-1]]
            running.write("done\n")
            running.close_stdin()
            assert running.wait().stdout == "done\n"
        assert channels.open == [channels[-1]]
        client.destroy_session(made)
        assert len(channels) > CHANGES
    assert channels.open == []


async def test_old_channels_of_an_asynchronous_client_are_closed_too(
    channels: Channels, change: Callable[[], None]
) -> None:
    async with AsyncSandboxClient() as client, asyncio.timeout(60):
        made = await client.create_session(runtime_class="container")
        async with await client.open(made, LONG) as running:
            first = channels[-1]
            for _ in range(CHANGES):
                change()
                await client.get_session(made)
                assert channels.open == [first, channels[-1]]
            await running.write("done\n")
            await running.close_stdin()
            assert (await running.wait()).stdout == "done\n"
        assert channels.open == [channels[-1]]
        await client.destroy_session(made)
    assert channels.open == []


def test_a_channel_is_given_up_once_and_never_while_it_is_the_newest() -> None:
    lines = GrpcChannels()
    first = lines.take(lambda: "a", lambda: "call 1")
    second = lines.take(lambda: None, lambda: "call 2")
    assert lines.give_back(first) == []
    assert lines.is_newest(second)
    third = lines.take(lambda: "b", lambda: "call 3")
    assert not lines.is_newest(second)
    assert lines.unused() == []
    assert lines.give_back(second) == ["a"]
    assert lines.give_back(second) == []
    assert lines.give_back(third) == []
    assert lines.clear() == ["b"]
    assert lines.give_back(third) == []
