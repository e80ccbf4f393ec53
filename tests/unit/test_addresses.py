"""Addresses: one spelling each, wildcards recognised in every form, nothing that cannot be connected to."""

import contextlib
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.addresses import WILDCARD, AddressError, canonical_host, parse_http, parse_tcp


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("[::1]", "::1"),
        ("FD00::0005", "fd00::5"),
        ("fe80::1%lo", "fe80::1%lo"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("KVS-Master.Default.svc.", "kvs-master.default.svc"),
        ("node_1", "node_1"),
    ],
)
def test_ip_01_a_host_has_one_spelling(spelling: str, canonical: str) -> None:
    assert canonical_host(spelling) == canonical


@pytest.mark.parametrize("spelling", ["*", "", "0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"])
def test_ip_03_every_listening_wildcard_is_recognised(spelling: str) -> None:
    assert canonical_host(spelling) == WILDCARD


@pytest.mark.parametrize("host", ["999.1.1.1", "1.2.3", "a b", "-x", "fd00::zz", "fe80::1%", "[10.0.0.5]", "a" * 300])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(AddressError):
        canonical_host(host)


@given(st.ip_addresses(v=6))
def test_equal_ipv6_addresses_have_equal_spellings(address: ipaddress.IPv6Address) -> None:
    assert canonical_host(address.exploded) == canonical_host(f"[{address.compressed.upper()}]")


def test_ip_01_a_zmq_url_has_ipv6_in_brackets() -> None:
    assert parse_tcp("tcp://[0:0:0:0:0:0:0:1]:5557").url() == "tcp://[::1]:5557"
    assert parse_tcp("TCP://Host:5557/").url() == "tcp://host:5557"


@pytest.mark.parametrize(
    "url",
    [
        *("", "tcp://", "http://x", "tcp://127.0.0.1", "tcp://h:0", "tcp://h:65536", "tcp://h:-1", "tcp://::1:5557"),
        *("ipc:///tmp/x", "tcp://h:5557/path", "tcp://[::1]5557", "tcp://h:\n5", "tcp://h:99999999999999999"),
    ],
)
def test_a_zmq_url_that_cannot_be_connected_to_is_refused_with_a_fix(url: str) -> None:
    with pytest.raises(AddressError) as refused:
        parse_tcp(url)
    assert refused.value.fix


@given(st.text())
def test_no_text_makes_the_parsers_fail_otherwise(text: str) -> None:
    for parse in (canonical_host, parse_tcp, parse_http):
        with contextlib.suppress(AddressError):
            assert parse(text)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://[0:0:0:0:0:0:0:1]:8000", "http://[::1]:8000"),
        ("HTTPS://Engine-0:8000/v/", "https://engine-0:8000/v"),
        ("http://engine-0", "http://engine-0"),
        ("http://*:8000", "http://10.0.0.5:8000"),
        ("http://[::]:8000", "http://10.0.0.5:8000"),
    ],
)
def test_an_http_base_has_one_spelling_and_its_wildcard_becomes_the_instances_host(url: str, base: str) -> None:
    assert parse_http(url, "10.0.0.5") == base


@pytest.mark.parametrize(
    "url", ["tcp://x:1", "http://", "http://u:p@h:1", "http://h:1?x=1", "http://h:0", "http://*:8000", "http://h:99999"]
)
def test_an_http_base_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(AddressError):
        parse_http(url)
