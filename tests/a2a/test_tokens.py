"""Who may call."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from k8e import errors
from k8e.a2a import server
from k8e.a2a.tokens import Tokens


def named(tokens: Tokens, token: str) -> str:
    found = tokens.caller(token)
    return found.name if found else ""


def test_who_gets_a_name_anew_is_somebody_else(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    before = tokens.caller(tokens.token("one"))
    tokens.revoke("one")
    after = tokens.caller(tokens.token("one"))
    assert before is not None
    assert after is not None
    assert before.name == after.name
    assert before != after
    assert tokens.callers() == {after}


def test_first_start_makes_a_token_that_only_its_owner_can_read(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "x" / "tokens")
    tokens.prepare()
    assert stat.S_IMODE(tokens.path.stat().st_mode) == 0o600
    token = tokens.token("default")
    assert len(token) > 40
    assert named(tokens, token) == "default"
    assert Tokens(tokens.path).token("default") == token


@pytest.mark.parametrize("given", ["", "x", "default", "\udcff", "é" * 50])
def test_other_words_are_nobodys_token(tmp_path: Path, given: str) -> None:
    tokens = Tokens(tmp_path / "tokens")
    tokens.prepare()
    assert tokens.caller(given) is None


def test_callers_come_and_go_without_a_restart(tmp_path: Path) -> None:
    tokens, elsewhere = Tokens(tmp_path / "tokens"), Tokens(tmp_path / "tokens")
    tokens.prepare()
    token = elsewhere.token("new")
    assert named(tokens, token) == "new"
    elsewhere.revoke("new")
    assert tokens.caller(token) is None
    assert named(tokens, tokens.token("default")) == "default"
    with pytest.raises(errors.InvalidRequest, match="no caller 'new'"):
        elsewhere.revoke("new")


def test_file_that_cannot_be_trusted_lets_nobody_in(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    token = tokens.token("default")
    tokens.path.chmod(0o644)
    tokens.path.write_text(tokens.path.read_text() + "\n")
    with pytest.raises(errors.Denied, match="others can read it"):
        tokens.caller(token)
    tokens.path.unlink()
    with pytest.raises(errors.InvalidRequest):
        tokens.caller(token)


@pytest.mark.parametrize("line", ["default short", "Default " + "x" * 40, "a/b " + "x" * 40])
def test_bad_lines_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(line)
    file.chmod(0o600)
    with pytest.raises(errors.InvalidRequest):
        Tokens(file).prepare()


@pytest.mark.parametrize("address", ["0.0.0.0:1", "example.org:1", "[::]:1", "10.0.0.1:1"])
def test_other_machines_need_tls(address: str) -> None:
    with pytest.raises(errors.Denied, match="clear text"):
        server.place(address)
    public = "https://a2a.example/"
    assert server.place(address, public, certificate="c", key="k").port == 1


def test_all_addresses_need_a_name_by_which_others_call() -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        server.place("0.0.0.0:1", certificate="c", key="k")
    assert "--public-url" in caught.value.hint


@pytest.mark.parametrize("address", ["127.0.0.1", "x:y", "127.0.0.1:70000", ""])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        server.place(address)


def test_loopback_needs_none() -> None:
    assert server.place(":8812") == server.ListenAddress("127.0.0.1", 8812)
    assert server.place("[::1]:0").host == "::1"
