"""
Where a job's user may connect to: a list of names, kept as addresses by nftables.

The rules hold for one user of the machine and no other. An address is let through for a while after a name last led to it, so that a name
whose addresses rotate works, and one that moved away does not stay open. A proxy that reads names would be finer; addresses need no daemon.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import msgspec

from sparkwright.operate.runner.policy import Policy, Settings

TABLE = "sparkwright_runner"
#: Name → its addresses; raises OSError where there are none.
Resolve = Callable[[str], Iterable[str]]


class Resolved(msgspec.Struct, frozen=True):
    """What names lead to now; *unknown* are names that lead nowhere."""

    addresses: tuple[str, ...]
    unknown: tuple[str, ...]


def index() -> str | None:
    """Return the host of the package index that this user has configured."""
    from sparkwright.forks.package_index import index_url

    return urlsplit(index_url()).hostname


def names(policy: Policy, settings: Settings) -> tuple[str, ...]:
    """Return the hosts that are let through."""
    return tuple(dict.fromkeys((*policy.egress.hosts, *([settings.index] if settings.index else []))))


def ruleset(policy: Policy) -> str:
    """
    Return the rules, which replace those that are loaded in one step.

    Everything hangs below a rule that matches the user: a packet without a socket (a reset, an ICMP) has no user, and is not touched.
    """
    ports = ", ".join(map(str, policy.egress.ports))
    four = [one for one in policy.egress.networks if ipaddress.ip_network(one, strict=False).version == 4]
    six = [one for one in policy.egress.networks if one not in four]
    lines = [
        "#!/usr/sbin/nft -f",
        f"# Written by sparkwright: where processes of {policy.user} may connect to.",
        f"table inet {TABLE}",
        f"delete table inet {TABLE}",
        f"table inet {TABLE} {{",
        "  set hosts4 { type ipv4_addr; flags timeout; }",
        "  set hosts6 { type ipv6_addr; flags timeout; }",
        _networks("networks4", "ipv4_addr", four),
        _networks("networks6", "ipv6_addr", six),
        "  chain job {",
        '    oifname "lo" accept',
        *(f"    {_family(one)} daddr {one} meta l4proto {{ tcp, udp }} th dport 53 accept" for one in policy.egress.resolvers),
        f"    tcp dport {{ {ports} }} ip daddr @hosts4 accept",
        f"    tcp dport {{ {ports} }} ip6 daddr @hosts6 accept",
        f"    tcp dport {{ {ports} }} ip daddr @networks4 accept",
        f"    tcp dport {{ {ports} }} ip6 daddr @networks6 accept",
        '    limit rate 6/minute log prefix "sparkwright-runner refused: "',
        "    counter reject with icmpx type admin-prohibited",
        "  }",
        "  chain output {",
        "    type filter hook output priority filter; policy accept;",
        f'    meta skuid "{policy.user}" jump job',
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _family(address: str) -> str:
    return "ip" if ipaddress.ip_address(address).version == 4 else "ip6"


def _networks(name: str, kind: str, networks: list[str]) -> str:
    elements = f" elements = {{ {', '.join(networks)} }}" if networks else ""
    return f"  set {name} {{ type {kind}; flags interval; auto-merge;{elements} }}"


def refreshed(policy: Policy, addresses: Iterable[str]) -> str:
    """
    Return what lets *addresses* through for ``forget`` minutes from now.

    An element that is there keeps its old time when it is added again; so each is added, removed and added, in one step.
    """
    lines = []
    for address in sorted({str(ipaddress.ip_address(one)) for one in addresses}):
        place = f"element inet {TABLE} hosts{ipaddress.ip_address(address).version}"
        lines += [f"add {place} {{ {address} }}", f"delete {place} {{ {address} }}"]
        lines += [f"add {place} {{ {address} timeout {policy.egress.forget}m }}"]
    return "\n".join(lines) + "\n"


def addresses(host: str) -> tuple[str, ...]:
    """
    Return the addresses of *host*; those of this machine and its own network are not taken from a name server's word.

    Raises:
        OSError: The name leads nowhere.
    """
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return tuple(sorted(one for one in found if ipaddress.ip_address(one).is_global))


def resolved(hosts: Iterable[str], resolve: Resolve = addresses) -> Resolved:
    """Return what *hosts* lead to; a name server that does not answer costs one wait, not one for each name."""

    def one(host: str) -> tuple[str, tuple[str, ...]]:
        try:
            return host, tuple(resolve(host))
        except OSError:
            return host, ()

    with ThreadPoolExecutor(16) as pool:
        found = dict(pool.map(one, hosts))
    known = {address for places in found.values() for address in places}
    return Resolved(tuple(sorted(known)), tuple(host for host, places in found.items() if not places))
