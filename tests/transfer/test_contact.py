"""Contacts with names, IPv4 and IPv6 addresses."""

import pytest

from prefixfleet.store.errors import ProtocolError
from prefixfleet.transfer.contact import format_contact, parse_contact


@pytest.mark.parametrize("host", ["10.0.0.1", "node-3.example", "::1", "fe80::1%eth0"])
def test_a_contact_comes_apart_as_it_was_made(host):
    assert parse_contact("tcp", format_contact("tcp", host, 7000)) == (host, 7000)


@pytest.mark.parametrize(
    "contact",
    [
        "",
        "tcp://",
        "tcp://host",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:port",
        "tcp://::1:7000",
        "ucx://host:7000",
        "tcp://host:7000/path",
        "tcp://user@host:7000",
        "host:7000",
    ],
)
def test_anything_else_is_refused_with_the_form_that_is_expected(contact):
    with pytest.raises(ProtocolError, match=r"expected tcp://host:port"):
        parse_contact("tcp", contact)
