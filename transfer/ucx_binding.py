"""Which Python binding of UCX is here, as one small face: context and worker.

`ucxx` (maintained, on PyPI) or `ucp` (ucx-py: discontinued, not installable from PyPI alone).
Only their low-level classes are used; their own asyncio modes spin or want the main thread.
Settings that the user made in ``UCX_*`` win over ours.
"""

import importlib
import os
import re
from collections.abc import Mapping
from typing import Any

from prefixfleet.store.errors import ConfigError

BINDINGS = {"ucxx": "ucxx._lib.libucxx", "ucp": "ucp._libs.ucx_api"}

OURS = {
    "TCP_TX_SEG_SIZE": "1m",  # 8 KiB by default: a fifth of the speed
    "TCP_RX_SEG_SIZE": "1m",
    "TCP_CM_REUSEADDR": "y",  # a restarted node takes its port again at once
    "KEEPALIVE_INTERVAL": "3s",  # when a source lets go of what belongs to peers that left
    "TCP_KEEPIDLE": "3s",
    "TCP_KEEPINTVL": "3s",
    "WARN_UNUSED_ENV_VARS": "n",  # the bindings set some that CPU hosts do not use
}


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Our settings of UCX, without those that the environment makes itself."""
    return {name: value for name, value in OURS.items() if f"UCX_{name}" not in environ}


def available() -> tuple[str, ...]:
    """Names of the bindings that can be imported here."""
    return tuple(name for name in BINDINGS if _load(name) is not None)


def _load(name: str) -> Any:  # noqa: ANN401 - untyped C extensions
    # without a GPU the bindings' own defaults are "unused" and UCX would say so on every start
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        importlib.import_module(name)
        return importlib.import_module(BINDINGS[name])
    except (ImportError, OSError):
        return None


class Binding:
    """One UCX context with one worker. Made, used and dropped on one thread."""

    def __init__(self, name: str | None = None) -> None:
        """``name`` is "ucxx" or "ucp", by default the first that is here.

        Raises `ConfigError` if there is none or UCX does not start.
        """
        wanted = [name] if name else list(BINDINGS)
        found = [(n, api) for n in wanted if (api := _load(n)) is not None]
        if not found:
            raise ConfigError(
                f"UCX link: no Python binding ({' or '.join(wanted)}) can be imported; "
                "install prefixfleet[ucx], or set PREFIXFLEET_NODE_LINK=tcp"
            )
        self.name, self._api = found[0]
        features = (self._api.Feature.RMA, self._api.Feature.TAG, self._api.Feature.WAKEUP)
        try:
            self._context = self._api.UCXContext(settings(os.environ), features)
            self._worker = self._api.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except self._api.UCXError as error:
            raise ConfigError(
                f"UCX link: UCX does not start: {error}; check UCX_TLS and UCX_NET_DEVICES"
            ) from error

    @property
    def context(self) -> int:
        """Raw ``ucp_context_h``."""
        return int(self._context.handle)

    @property
    def worker(self) -> int:
        """Raw ``ucp_worker_h``."""
        return int(self._worker.handle)

    def devices(self) -> frozenset[str]:
        """What UCX could use here, e.g. "tcp/eth0", "rc_mlx5/mlx5_0:1"."""
        return frozenset(re.findall(r"-- *(\S+/\S+)", str(self._context.info)))

    def address(self) -> bytes:
        """Where peers' endpoints connect to."""
        if self.name == "ucp":
            return bytes(self._worker.get_address())
        return bytes(self._worker.address.tobytes())

    def progress(self) -> None:
        """Do all that can be done now."""
        self._worker.progress()

    def wait(self, timeout_ms: int) -> None:
        """Do what can be done; when that is nothing, wait for an event, or for the time."""
        self._worker.progress_worker_event(timeout_ms)
