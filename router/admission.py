"""What every request passes before it may cost anything: room in the router, a key, its limits."""

from collections.abc import Mapping

from prefixfleet.router.core import Router
from prefixfleet.router.errors import TooBusy
from prefixfleet.router.keys import Key


def admit(router: Router, headers: Mapping[str, str]) -> Key:
    """Whose request it is; to be left (`Limits.leave`) however it ends.

    Raises:
        TooBusy: the router is full, or the key has its limit.
        Unauthorized: there is no such key.
    """
    _refuse_if_full(router)
    key = router.files.keys.check(_authorization(headers))
    router.limits.admit(key)
    return key


def _authorization(headers: Mapping[str, str]) -> str | None:
    """The header in which a client names its key: OpenAI's, or Anthropic's."""
    if "X-Api-Key" in headers:
        return f"Bearer {headers['X-Api-Key']}"
    return headers.get("Authorization")


def _refuse_if_full(router: Router) -> None:
    if router.in_flight > router.settings.max_in_flight:
        raise TooBusy(
            f"{router.settings.max_in_flight} requests are in flight; "
            "PREFIXFLEET_ROUTER_MAX_IN_FLIGHT is the limit",
            retry_after_s=1.0,
        )
