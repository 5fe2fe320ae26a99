"""Addresses of a verifier's replicas, as the clients take them."""

from __future__ import annotations

import pytest

from outrider.security.addresses import addresses_of
from outrider_client.channel import verifier_addresses


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a:1", ("a:1",)),
        (" a:1, b:2,,a:1 ", ("a:1", "b:2")),
        (["a:1", "b:2"], ("a:1", "b:2")),
        ("ipv4:1.2.3.4:1,5.6.7.8:2", ("ipv4:1.2.3.4:1", "5.6.7.8:2")),
        ("dns:///verifier:1", ("dns:///verifier:1",)),
    ],
)
def test_addresses_are_told_apart_by_commas_and_each_counts_once(given: str | list[str], found: tuple[str]) -> None:
    assert addresses_of(given) == found


@pytest.mark.parametrize("nothing", ["", " , ", []])
def test_an_address_of_nobody_is_refused(nothing: str | list[str]) -> None:
    with pytest.raises(ValueError, match="address must name at least one server"):
        verifier_addresses(nothing)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("127.0.0.1", "127.0.0.1:50051"),
        ("verifier", "verifier:50051"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("verifier:7", "verifier:7"),
        ("unix:/run/outrider.sock", "unix:/run/outrider.sock"),
        ("dns:///verifier:7", "dns:///verifier:7"),
        ("dns:verifier", "dns:verifier"),
    ],
)
def test_an_address_without_a_port_gets_that_of_a_verifier(given: str, found: str) -> None:
    assert verifier_addresses(f" {given},") == (found,)


@pytest.mark.parametrize("address", ["127.0.0.1:no", "verifier:", "verifier:70000", "verifier:-1"])
def test_a_port_is_a_number(address: str) -> None:
    with pytest.raises(ValueError, match=f"address takes HOST:PORT, with a port up to 65535, got '{address}'"):
        verifier_addresses(address)


@pytest.mark.parametrize("scheme", ["http", "https", "grpc"])
def test_a_url_is_no_address(scheme: str) -> None:
    with pytest.raises(ValueError, match=f"address takes HOST:PORT, without {scheme}://, got '{scheme}://x:1'"):
        verifier_addresses(f"{scheme}://x:1")
