"""The links of one node: which transports it offers to peers and uses itself.

Sockets always work; UCX where a binding is installed, shared memory between nodes of one host.
What is missing is said, not hidden.
"""

from dataclasses import dataclass

from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.errors import ConfigError
from prefixfleet.transfer.link import Link
from prefixfleet.transfer.shm import ShmLink
from prefixfleet.transfer.tcp import TcpLink
from prefixfleet.transfer.ucx import UcxLink
from prefixfleet.transfer.ucx_binding import available


@dataclass(frozen=True, slots=True)
class Links:
    """Links by name. ``forced`` is the only one this node may pull over, or None; ``missing``
    says what is not there and why."""

    by_name: dict[str, Link]
    forced: str | None
    missing: dict[str, str]

    def sessions(self) -> dict[str, dict[str, int]]:
        """Of each link the ended connections of callers by reason, and what they were refused."""
        return {name: dict(link.counters) for name, link in self.by_name.items()}


def open_links(settings: NodeSettings, secret: bytes) -> Links:
    """The links that this installation has. Raises `ConfigError` if the forced one is not."""
    links: dict[str, Link] = {"tcp": TcpLink(node=settings.name, secret=secret)}
    missing: dict[str, str] = {}
    try:
        links["shm"] = ShmLink(node=settings.name, secret=secret)
    except ConfigError as error:
        missing["shm"] = str(error)
    if available():
        links["ucx"] = UcxLink(node=settings.name, secret=secret)
    else:
        missing["ucx"] = "no binding of UCX is installed (pip install 'prefixfleet[ucx]')"
    forced = None if settings.link == "auto" else settings.link
    if forced is not None and forced not in links:
        raise ConfigError(
            f"link {forced!r} is set and cannot be used: {missing.get(forced, 'unknown')}; "
            "set PREFIXFLEET_NODE_LINK=auto, or bring what it needs"
        )
    return Links(by_name=links, forced=forced, missing=missing)
