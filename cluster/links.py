"""The links of one node: which transports it offers to peers and uses itself.

Sockets always work; UCX where a binding is installed. What is missing is said, not hidden.
"""

from dataclasses import dataclass

from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.errors import ConfigError
from prefixfleet.transfer.link import Link
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

    @property
    def rdma(self) -> bool:
        """Whether UCX has an RDMA device; False before it serves."""
        ucx = self.by_name.get("ucx")
        return isinstance(ucx, UcxLink) and ucx.rdma


def open_links(settings: NodeSettings, secret: bytes) -> Links:
    """The links that this installation has. Raises `ConfigError` if the forced one is not."""
    links: dict[str, Link] = {"tcp": TcpLink(node=settings.name, secret=secret)}
    missing: dict[str, str] = {}
    if available():
        links["ucx"] = UcxLink(node=settings.name, secret=secret)
    else:
        missing["ucx"] = "no binding of UCX is installed (pip install 'prefixfleet[ucx]')"
    forced = None if settings.link == "auto" else settings.link
    if forced is not None and forced not in links:
        raise ConfigError(
            f"link {forced!r} is set and cannot be used: {missing.get(forced, 'unknown')}; "
            "set PREFIXFLEET_NODE_LINK=auto, or install prefixfleet[ucx]"
        )
    return Links(by_name=links, forced=forced, missing=missing)
