"""The policy language: what may be written, what it means, and what counts as public."""

from __future__ import annotations

import ipaddress

import hypothesis
import pytest
from hypothesis import strategies as st

from k8e import errors
from k8e.egress.policy import (
    MAX_RULES,
    Address,
    Network,
    Policy,
    Rule,
    changed,
    parse_policy,
    parse_rule,
    split_words,
)

# Rules.


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("example.org", Rule("example.org")),
        (" Example.ORG.:443 ", Rule("example.org", port=443)),
        ("example.org:1", Rule("example.org", port=1)),
        ("example.org:65535", Rule("example.org", port=65535)),
        ("*.example.org", Rule("example.org", below=True)),
        ("*.Bücher.example:80", Rule("xn--bcher-kva.example", below=True, port=80)),
        ("192.0.2.7", Rule(network=ipaddress.ip_network("192.0.2.7/32"))),
        ("192.0.2.7/24", Rule(network=ipaddress.ip_network("192.0.2.0/24"))),
        ("192.0.2.0/24:53", Rule(network=ipaddress.ip_network("192.0.2.0/24"), port=53)),
        ("2001:db8::1", Rule(network=ipaddress.ip_network("2001:db8::1/128"))),
        ("2001:DB8::/32", Rule(network=ipaddress.ip_network("2001:db8::/32"))),
        ("[2001:db8::1]", Rule(network=ipaddress.ip_network("2001:db8::1/128"))),
        ("[2001:db8::/32]:443", Rule(network=ipaddress.ip_network("2001:db8::/32"), port=443)),
        ("2001:db8::1:443", Rule(network=ipaddress.ip_network("2001:db8::1:443/128"))),
    ],
)
def test_rules_are_read(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule
    assert parse_rule(text, trusted=True).trusted


@pytest.mark.parametrize(
    "text",
    [
        # Wildcards other than the whole first label, or as wide as a top-level domain.
        "*",
        "*.",
        "*.org",
        "*.*.org",
        "**.example.org",
        "a*.example.org",
        "a.*.org",
        "example.*",
        "*example.org",
        "*.192.0.2.1",
        "*.192.0.2.0/24",
        "*.[::1]",
        # Ports.
        "example.org:",
        "example.org:0",
        "example.org:65536",
        "example.org:-1",
        "example.org:+1",
        "example.org: 1",
        "example.org:https",
        "example.org:80:90",
        "example.org:\u0661",
        "example.org:1_0",
        "192.0.2.1:",
        "[2001:db8::1]:",
        "[2001:db8::1]:0",
        "[2001:db8::1]x",
        # Addresses in other forms than the usual one, which a C library would take.
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "127.0.0.1.",
        "127.0.0.01",
        "1.2.3.4.5",
        "256.1.1.1",
        "192.0.2.0/33",
        "192.0.2.0/-1",
        "192.0.2.0/",
        "2001:db8::/129",
        "2001:db8:::1",
        "12345::1",
        ":::",
        # Not a host at all.
        "",
        "https://example.org",
        "example.org/path",
        "user@example.org",
        "a,b",
        "a b",
    ],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        parse_rule(text)


def test_a_port_of_a_million_digits_is_refused_like_any_other() -> None:
    with pytest.raises(errors.InvalidRequest):
        parse_rule("example.org:" + "9" * 1_000_000)


@pytest.mark.parametrize(
    "text",
    ["fe80::1%eth0", "[fe80::1%1]:443", "2606:4700::1%x } ; flush ruleset", "2606:4700::1%\n#/128"],
)
def test_an_address_with_a_zone_is_refused(text: str) -> None:
    # A zone may have any character in it, and means nothing in a policy.
    with pytest.raises(errors.InvalidRequest):
        parse_rule(text)


@pytest.mark.parametrize("text", ["[2001:db8::1", "[2001:db8::1]443", "[2001:db8::1]]:443"])
def test_brackets_are_closed_and_followed_by_a_port_only(text: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        parse_rule(text)


def test_a_refusal_names_the_word() -> None:
    with pytest.raises(errors.InvalidRequest, match=r"'api example\.org' is not a host name"):
        parse_rule("api example.org")
    with pytest.raises(errors.InvalidRequest, match="port"):
        parse_rule("example.org:http")
    with pytest.raises(errors.InvalidRequest, match="top-level domain"):
        parse_rule("*.org")


labels = st.from_regex(r"[a-z0-9_]([a-z0-9_-]{0,8}[a-z0-9_])?", fullmatch=True)
names = st.lists(labels, min_size=2, max_size=5).map(lambda parts: ".".join([*parts, "example"]))
ports = st.sampled_from([0, 1, 80, 443, 65535])


def network(address: Address, length: int) -> Network:
    return ipaddress.ip_network((str(address), length), strict=False)


networks = st.one_of(
    st.builds(network, st.ip_addresses(v=4), st.integers(0, 32)),
    st.builds(network, st.ip_addresses(v=6), st.integers(0, 128)),
)
rules = st.one_of(
    st.builds(Rule, name=names, below=st.booleans(), port=ports),
    st.builds(Rule, network=networks, port=ports),
)


@hypothesis.given(rules)
def test_a_rule_that_is_written_down_is_read_back_the_same(rule: Rule) -> None:
    assert parse_rule(str(rule)) == rule


@hypothesis.given(st.text())
def test_any_text_is_a_rule_or_refused(text: str) -> None:
    try:
        rule = parse_rule(text)
    except errors.InvalidRequest:
        return
    assert parse_rule(str(rule)) == rule
    assert str(rule).isascii()
    assert str(rule).isprintable()


# What a rule means.


@pytest.mark.parametrize(
    ("rule", "name", "meant"),
    [
        ("a.example", "a.example", True),
        ("a.example", "b.a.example", False),
        ("a.example", "xa.example", False),
        ("a.example", "a.example.evil.test", False),
        ("a.example", "example", False),
        ("*.a.example", "b.a.example", True),
        ("*.a.example", "c.b.a.example", True),
        ("*.a.example", "a.example", False),
        ("*.a.example", "xa.example", False),
        ("*.a.example", "b.xa.example", False),
        ("*.a.example", "b.a.example.evil.test", False),
        ("*.a.example", "example", False),
        ("192.0.2.0/24", "192.0.2.1", False),
        ("192.0.2.0/24", "", False),
    ],
)
def test_a_rule_means_its_names_and_no_other(rule: str, name: str, meant: bool) -> None:
    assert parse_rule(rule).matches_name(name) == meant


@hypothesis.given(names, labels)
def test_a_wildcard_means_what_is_below_and_nothing_else(base: str, label: str) -> None:
    rule = parse_rule(f"*.{base}")
    assert rule.matches_name(f"{label}.{base}")
    assert not rule.matches_name(base)
    assert not rule.matches_name(f"{label}{base}")
    assert not rule.matches_name(f"{label}.{base}.{label}")


# Policies.

OWN = (parse_rule("index.corp:443", trusted=True), parse_rule("github.com"))


@pytest.mark.parametrize("words", [[], ["none"], [" NONE "], ["none", "None"], ["strict"]])
def test_a_policy_that_allows_nothing_is_silent(words: list[str]) -> None:
    policy = parse_policy(words, OWN)
    assert policy.silent
    assert policy.rules_for("github.com") == []


def test_a_policy_allows_what_its_words_say() -> None:
    policy = parse_policy(["a.example:443", "*.a.example", "93.184.216.0/24"], OWN)
    assert not policy.silent
    assert [str(rule) for rule in policy.rules_for("a.example")] == ["a.example:443"]
    assert [str(rule) for rule in policy.rules_for("b.a.example")] == ["*.a.example"]
    assert policy.rules_for("github.com") == []
    assert not any(rule.trusted for rule in policy.rules)


def test_default_means_the_rules_of_the_operator_and_no_trust_for_others() -> None:
    policy = parse_policy(["Default", "a.example", "index.corp:8080"], OWN)
    assert [(str(rule), rule.trusted) for rule in policy.rules] == [
        ("index.corp:443", True),
        ("github.com", False),
        ("a.example", False),
        ("index.corp:8080", False),
    ]
    assert parse_policy(["a.example"], OWN).rules == (parse_rule("a.example"),)


@pytest.mark.parametrize(
    ("word", "rules"),
    [
        ("index.corp", [("index.corp", False), ("index.corp:443", True)]),
        ("index.corp:443", [("index.corp:443", True)]),
        ("index.corp:443,8080", [("index.corp:443", True), ("index.corp:8080", False)]),
        ("index.corp:8080", [("index.corp:8080", False)]),
        ("*.corp", None),
        ("*.index.corp", [("*.index.corp", False)]),
        ("other.corp", [("other.corp", False)]),
        ("xindex.corp", [("xindex.corp", False)]),
        ("github.com", [("github.com", False)]),
        ("db.inside.example:5432", [("db.inside.example:5432", True)]),
        ("*.a.inside.example", [("*.a.inside.example", True)]),
        ("inside.example", [("inside.example", False)]),
        ("10.0.0.5:3128", [("10.0.0.5/32:3128", True)]),
        ("10.0.0.5", [("10.0.0.5/32:3128", True)]),
        ("10.0.0.5:80", None),
        ("10.0.0.0/24", None),
        ("172.16.3.0/24:22", [("172.16.3.0/24:22", True)]),
        ("172.0.0.0/8", [("172.0.0.0/8", False)]),
    ],
    ids=str,
)
def test_a_host_of_the_operator_is_trusted_by_its_name_as_by_default_and_no_further(
    word: str, rules: list[tuple[str, bool]] | None
) -> None:
    more = ("*.inside.example", "10.0.0.5:3128", "172.16.0.0/12")
    defaults = (*OWN, *(parse_rule(text, trusted=True) for text in more))
    if rules is None:
        with pytest.raises(errors.InvalidRequest):
            parse_policy([word], defaults)
        return
    found = parse_policy([word], defaults)
    assert [(str(rule), rule.trusted) for rule in found.rules] == rules
    private = ipaddress.ip_address("10.9.9.9")
    wide = parse_policy(["default", word], defaults)
    for name in ("index.corp", "db.inside.example", "other.corp", "github.com", "inside.example"):
        allowed = wide.ports_for(name, private) == parse_policy(["default"], defaults).ports_for(
            name, private
        )
        assert allowed, "no word gives more than default does"
        assert found.ports_for(name, private) <= wide.ports_for(name, private) | {5432}


def test_several_ports_of_a_host_are_rules_of_their_own() -> None:
    found = parse_policy(["a.example:443, 80", "[2606:2800::]:1,2"])
    assert found.words() == [
        "a.example:443",
        "a.example:80",
        "[2606:2800::/128]:1",
        "[2606:2800::/128]:2",
    ]
    for word in ("a.example:443,", "a.example:,", "a.example:443,b.example", "a.example,b.example"):
        with pytest.raises(errors.InvalidRequest):
            parse_policy([word])
    with pytest.raises(errors.LimitExceeded):
        parse_policy(["a.example:" + ",".join(map(str, range(1, 5000)))])


def test_a_number_in_a_list_is_another_port_of_the_host_before_it() -> None:
    assert split_words("default,a.example:443,80 b.example") == (
        "default",
        "a.example:443",
        "a.example:80",
        "b.example",
    )
    assert split_words("80 a.example,81") == ("80", "a.example", "81")


def test_open_means_every_name_and_keeps_what_is_named_beside_it() -> None:
    policy = parse_policy(["open", "default"], OWN)
    assert (policy.open, policy.strict, policy.silent) == (True, False, False)
    assert policy.rules_for("b.example") == [Rule("b.example")]
    assert policy.rules_for("index.corp") == [OWN[0], Rule("index.corp")]


def test_strict_is_kept_with_the_rules_it_is_about() -> None:
    policy = parse_policy(["strict", "a.example"])
    assert (policy.strict, policy.open) == (True, False)
    assert policy.rules == (parse_rule("a.example"),)


@pytest.mark.parametrize(
    "words", [["none", "a.example"], ["none", "open"], ["open", "strict"], ["STRICT", "Open"]]
)
def test_words_that_contradict_each_other_are_refused(words: list[str]) -> None:
    with pytest.raises(errors.InvalidRequest):
        parse_policy(words)


@pytest.mark.parametrize("word", ["", " ", "closed", "default:443"])
def test_an_empty_word_is_refused_and_an_unknown_one_is_a_name(word: str) -> None:
    if word.strip():
        assert parse_policy([word]).rules[0].name
        return
    with pytest.raises(errors.InvalidRequest):
        parse_policy(["a.example", word])


def test_the_same_rule_twice_is_one() -> None:
    assert len(parse_policy(["a.example", "A.example.", " a.EXAMPLE"]).rules) == 1


def test_there_is_an_end_to_the_number_of_rules() -> None:
    words = [f"h{number}.example" for number in range(MAX_RULES)]
    assert len(parse_policy(words).rules) == MAX_RULES
    with pytest.raises(errors.LimitExceeded):
        parse_policy([*words, "one.example"])


@pytest.mark.parametrize(
    "word",
    [
        "10.0.0.0/8",
        "10.1.2.3:80",
        "127.0.0.1",
        "169.254.169.254",
        "100.100.100.200:80",
        "168.63.129.16",
        "::1",
        "fd00:ec2::254",
        "fe80::/10",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
    ],
)
def test_a_client_cannot_name_a_private_network(word: str) -> None:
    # The operator can: its rules are read by parse_rule and are trusted.
    assert parse_rule(word, trusted=True).trusted
    with pytest.raises(errors.InvalidRequest):
        parse_policy([word])


@pytest.mark.parametrize("word", ["0.0.0.0/0", "128.0.0.0/1", "168.63.0.0/16", "::/0", "2000::/3"])
def test_a_network_with_private_addresses_among_others_is_read_without_trust(word: str) -> None:
    # The kernel refuses what is private in it.
    (rule,) = parse_policy([word]).rules
    assert not rule.trusted


@pytest.mark.parametrize(
    "words",
    [
        ["none"],
        ["open"],
        ["a.example", "*.b.example:443"],
        ["strict", "a.example"],
        ["93.184.216.0/24:80", "[2606:4700::/32]:443", "2606:2800::1"],
    ],
)
def test_a_policy_can_say_itself_in_its_own_words(words: list[str]) -> None:
    policy = parse_policy(words)
    assert parse_policy(policy.words()) == policy


def test_default_is_spelled_out() -> None:
    assert parse_policy(["default"], OWN).words() == ["index.corp:443", "github.com"]
    assert parse_policy(["default"]).words() == ["none"]
    assert Policy().words() == ["none"]


def test_a_change_of_more_words_than_a_policy_has_is_refused_unread() -> None:
    many = ["a.test"] * (MAX_RULES + 1)
    with pytest.raises(errors.LimitExceeded, match="256"):
        changed(["default"], add=many, remove=[])
    with pytest.raises(errors.LimitExceeded, match="256"):
        changed(["default"], add=[], remove=many)


@hypothesis.given(
    st.lists(st.sampled_from(["a.test", "*.a.test", "*.b.a.test:443", "b.a.test:80"]))
)
def test_rules_are_found_by_name_as_if_each_were_compared(words: list[str]) -> None:
    policy = parse_policy(words)
    for name in ("a.test", "b.a.test", "c.b.a.test", "xa.test", "test"):
        compared = {rule for rule in policy.rules if rule.matches_name(name)}
        assert set(policy.rules_for(name)) == compared
