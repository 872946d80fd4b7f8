"""What a fleet's Redis user may do: the commands that prefixfleet uses, on its own keys, no more.

A user with these rules cannot read other fleets' keys, change the server or empty it. The test of
this list runs everything as such a user and compares with what the server says was called.
"""

import re

from prefixfleet.store.errors import ConfigError
from prefixfleet.store.redis_functions import SCHEMA_VERSION

CALLED = (
    "FCALL", "FCALL_RO", "FUNCTION|LOAD", "INFO", "HDEL", "HGET", "HGETALL", "HMGET", "HSCAN",
    "HSET", "SSCAN", "XREAD",
)  # fmt: skip
"""By our clients."""
CALLED_INSIDE = (
    "DEL", "EXISTS", "EXPIRE", "HDEL", "HGET", "HGETALL", "HINCRBY", "HLEN", "HMGET", "HSCAN",
    "HSET", "HSETNX", "LINDEX", "LPOP", "RENAME", "RPUSH", "SADD", "SCARD", "SMEMBERS", "SREM",
    "SSCAN", "TIME", "XADD", "ZADD", "ZMSCORE", "ZPOPMIN", "ZRANGEBYSCORE", "ZREM",
)  # fmt: skip
"""By our functions on the server, which checks them against the caller's rights."""
CONNECTING = ("CLIENT|SETINFO", "CLUSTER|SLOTS", "SELECT")
"""When we connect, to a cluster too; AUTH and HELLO are open to everybody."""


def acl_rules(fleet: str) -> list[str]:
    """Rules for ``ACL SETUSER name on >password ...``.

    Raises:
        ConfigError: ``fleet`` is no fleet's name; a pattern in it would open other keys.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,39}", fleet):
        raise ConfigError(f"fleet: got {fleet!r:.60}, expected lower-case letters, digits and '-'")
    commands = sorted({*CALLED, *CALLED_INSIDE, *CONNECTING})
    allowed = [f"+{command.lower()}" for command in commands]
    return ["resetkeys", f"~pf{SCHEMA_VERSION}:{{{fleet}}}:*", "-@all", *allowed]
