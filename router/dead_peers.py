"""Connections that notice a peer which is gone without a word: a host cut off, a power cut.

Nothing closes such a connection, and the silence of a long prefill looks the same. The kernel
asks the other kernel: a busy engine's one answers.
"""

import asyncio
import socket

GONE_S = 5
"""Two seconds more than a node's lease: by then no router sends it anything new."""
ASK_AFTER_S, ASK_EVERY_S = 2, 1


def watch(transport: asyncio.BaseTransport) -> None:
    """From now on a TCP connection fails when its peer's kernel has been silent for `GONE_S`: with
    data underway, or with questions where there is none."""
    link = transport.get_extra_info("socket")
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_AFTER_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, GONE_S - ASK_AFTER_S)
