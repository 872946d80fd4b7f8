"""`Worker`: a UCX worker by ctypes, and the messages with tags that reach it.

Every call here belongs on the thread that owns it.
"""

import ctypes
from ctypes import byref, c_size_t, c_void_p

from prefixfleet.store.errors import ProtocolError
from prefixfleet.transfer.ucx_abi import (
    ALWAYS_A_REQUEST,
    FIELD_THREAD_MODE,
    IN_PROGRESS,
    TOO_LONG,
    Message,
    RequestParam,
    WorkerParams,
)
from prefixfleet.transfer.ucx_get import Libucp

WHOLE_TAG = 2**64 - 1


class Worker:
    """Owned by the UCX thread. Once it is destroyed nothing is written to the target of any of
    its receives any more, whatever they were about, and what came for nobody is gone."""

    def __init__(self, ucp: Libucp, context: int) -> None:
        """Raises `PeerLost` if UCX makes none."""
        self._ucp = ucp
        handle, params = c_void_p(), WorkerParams(field_mask=FIELD_THREAD_MODE)
        created = ucp.calls.ucp_worker_create(context, byref(params), byref(handle))
        ucp.check(created, "worker_create")
        assert handle.value is not None
        self.handle = handle.value
        self._request = RequestParam(op_attr_mask=ALWAYS_A_REQUEST)

    def address(self) -> bytes:
        """Where peers' endpoints connect to."""
        address, length = c_void_p(), c_size_t()
        calls = self._ucp.calls
        got = calls.ucp_worker_get_address(self.handle, byref(address), byref(length))
        self._ucp.check(got, "worker_get_address")
        try:
            return ctypes.string_at(address, length.value)
        finally:
            calls.ucp_worker_release_address(self.handle, address)

    def receive(self, target: int, length: int, tag: int) -> int:
        """Wait for the one message that has this tag. Returns a request for `received`."""
        calls, plain = self._ucp.calls, byref(self._request)
        request = calls.ucp_tag_recv_nbx(self.handle, target, length, tag, WHOLE_TAG, plain)
        return self._ucp.started(request, "receive")

    def received(self, length: int, request: int) -> bool:
        """Whether the message is here; then the request is freed.

        Raises `PeerLost` if it failed, `ProtocolError` if it is not of ``length`` bytes.
        """
        message = Message()
        status = self._ucp.calls.ucp_tag_recv_request_test(request, byref(message))
        if status == IN_PROGRESS:
            return False
        self._ucp.calls.ucp_request_free(request)
        if status == TOO_LONG:
            raise ProtocolError(f"UCX: got a message of more than the expected {length} bytes")
        self._ucp.check(status, "receive")
        if message.length != length:
            raise ProtocolError(f"UCX: got a message of {message.length} bytes, expected {length}")
        return True

    def unasked(self) -> bool:
        """Whether a message is here that nothing waits for."""
        message = Message()
        return bool(self._ucp.calls.ucp_tag_probe_nb(self.handle, 0, 0, 0, byref(message)))

    def cancel(self, request: int) -> None:
        """Nobody waits for the message any more; one that is arriving goes on."""
        self._ucp.calls.ucp_request_cancel(self.handle, request)

    def destroy(self) -> None:
        """Call it once, and nothing else afterwards."""
        self._ucp.calls.ucp_worker_destroy(self.handle)
