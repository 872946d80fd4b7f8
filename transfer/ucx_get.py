"""libucp by ctypes, on the binding's raw handles: the one-sided read, which `ucxx` has in C++ only,
and endpoints, which the bindings close in a loop that has no end but UCX's.

Every call here belongs on the thread that owns the worker.
"""

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p

from prefixfleet.store.errors import PeerLost
from prefixfleet.transfer.ucx_abi import (
    CLOSE_BY_FORCE,
    ERRORS_OF_PEERS,
    FIELD_ADDRESS,
    FIELD_ERROR_HANDLER,
    FIELD_ERROR_MODE,
    FIELD_FLAGS,
    FIELD_LENGTH,
    FIELD_REMOTE_ADDRESS,
    FIELD_TRANSPORTS,
    IN_PROGRESS,
    MAX_TRANSPORTS,
    PROTOTYPES,
    EndpointAttributes,
    EndpointParams,
    MemMapParams,
    RequestParam,
    Transport,
    unheard,
)

ADDRESS_VERSIONS = (0, 1)
"""Of a worker's address, in the low half of its first byte: of another UCX ends the process."""


class Libucp:
    """The functions of the libucp that the binding has loaded. Stateless; one thread at a time,
    except `signal`, which any thread may call."""

    def __init__(self) -> None:
        self.calls = ctypes.CDLL("libucp.so.0")  # already in the process: found by its name
        self._ucs = ctypes.CDLL("libucs.so.0")
        self._ucs.ucs_status_string.restype = c_char_p
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(self.calls, name)
            function.restype, function.argtypes = result, arguments
        self._plain = RequestParam()
        self._by_force = RequestParam(op_attr_mask=FIELD_FLAGS, flags=CLOSE_BY_FORCE)

    def map(self, context: int, address: int, length: int) -> int:
        """Register memory. Returns its handle, for `unmap`. Raises `PeerLost`."""
        params = MemMapParams(
            field_mask=FIELD_ADDRESS | FIELD_LENGTH, address=address, length=length
        )
        handle = c_void_p()
        self.check(self.calls.ucp_mem_map(context, byref(params), byref(handle)), "mem_map")
        assert handle.value is not None
        return handle.value

    def unmap(self, context: int, memory: int) -> None:
        """Undo `map`."""
        self.check(self.calls.ucp_mem_unmap(context, memory), "mem_unmap")

    def pack_rkey(self, context: int, memory: int) -> bytes:
        """What a peer needs to read the registered memory."""
        buffer, length = c_void_p(), c_size_t()
        self.check(
            self.calls.ucp_rkey_pack(context, memory, byref(buffer), byref(length)), "rkey_pack"
        )
        try:
            return ctypes.string_at(buffer, length.value)
        finally:
            self.calls.ucp_rkey_buffer_release(buffer)

    def connect(self, worker: int, address: bytes) -> int:
        """An endpoint to the worker that has this address, with error handling on.

        Raises `PeerLost` where UCX has no way there.
        """
        if not address or address[0] % 16 not in ADDRESS_VERSIONS:
            raise PeerLost(f"UCX: {address[:8].hex()}... is the address of no worker")
        handle = c_void_p()
        params = EndpointParams(
            field_mask=FIELD_REMOTE_ADDRESS | FIELD_ERROR_MODE | FIELD_ERROR_HANDLER,
            address=address,
            err_mode=ERRORS_OF_PEERS,
            err_handler_cb=unheard,
        )
        try:
            self.check(self.calls.ucp_ep_create(worker, byref(params), byref(handle)), "ep_create")
        except PeerLost as error:
            raise PeerLost(
                f"UCX does not reach the peer: {error}; set UCX_NET_DEVICES to the device between "
                "the two hosts"
            ) from error
        assert handle.value is not None
        return handle.value

    def close(self, endpoint: int) -> int:
        """Begin to close by force: what is under way on it ends as cancelled, by itself.

        Returns a request for `finished`, or 0 if it is closed already. Raises `PeerLost`.
        """
        return self.started(self.calls.ucp_ep_close_nbx(endpoint, byref(self._by_force)), "close")

    def unpack_rkey(self, endpoint: int, packed: bytes) -> int:
        """Handle of the peer's memory on this endpoint, for `destroy_rkey`."""
        rkey = c_void_p()
        self.check(self.calls.ucp_ep_rkey_unpack(endpoint, packed, byref(rkey)), "rkey_unpack")
        assert rkey.value is not None
        return rkey.value

    def destroy_rkey(self, rkey: int) -> None:
        """Undo `unpack_rkey`."""
        self.calls.ucp_rkey_destroy(rkey)

    def get(self, endpoint: int, target: int, length: int, remote: int, rkey: int) -> int:
        """Start reading ``length`` bytes at the peer's address ``remote`` into ``target``.

        Returns a request for `finished`, or 0 if it is done already. Raises `PeerLost`.
        """
        plain = byref(self._plain)
        return self.started(
            self.calls.ucp_get_nbx(endpoint, target, length, remote, rkey, plain), "get"
        )

    def send(self, endpoint: int, source: int, length: int, tag: int) -> int:
        """Start sending a message with this tag. Returns and raises as `get`."""
        plain = byref(self._plain)
        return self.started(
            self.calls.ucp_tag_send_nbx(endpoint, source, length, tag, plain), "send"
        )

    def finished(self, request: int) -> bool:
        """Whether the request is over; then it is freed. Raises `PeerLost` if it failed."""
        status = self.calls.ucp_request_check_status(request)
        if status == IN_PROGRESS:
            return False
        self.calls.ucp_request_free(request)
        self.check(status, "request")
        return True

    def signal(self, worker: int) -> None:
        """Wake whoever waits for the worker's events."""
        self.calls.ucp_worker_signal(worker)

    def transports(self, endpoint: int) -> str:
        """What carries the endpoint's bytes, e.g. "rc_mlx5/mlx5_0:1,tcp/eth0"."""
        entries = (Transport * MAX_TRANSPORTS)()
        attributes = EndpointAttributes(
            field_mask=FIELD_TRANSPORTS,
            entries=ctypes.addressof(entries),
            num_entries=MAX_TRANSPORTS,
            entry_size=ctypes.sizeof(Transport),
        )
        self.check(self.calls.ucp_ep_query(endpoint, byref(attributes)), "ep_query")
        names = {
            f"{entry.transport_name.decode()}/{entry.device_name.decode()}"
            for entry in entries[: attributes.num_entries]
        }
        return ",".join(sorted(names))

    def started(self, request: int | None, what: str) -> int:
        """What one of UCX's non-blocking calls returned. Raises `PeerLost`."""
        request = request or 0
        if request > 2**64 - 1 - 127:  # UCS_PTR_IS_ERR: the last addresses are error codes
            self.check(request - 2**64, what)
        return request

    def check(self, status: int, what: str) -> None:
        """Raises `PeerLost` if UCX says that ``what`` has failed."""
        if status:
            text = self._ucs.ucs_status_string(c_int(status)).decode()
            raise PeerLost(f"UCX {what}: {text}")


def address_of(view: memoryview) -> int:
    """Where a writable buffer lies; it must outlive the use of the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def memory_at(address: int, length: int) -> memoryview:
    """A view of memory that only UCX touches, as a segment or a target of `UcxLink`: on a GPU,
    ``memory_at(tensor.data_ptr(), tensor.nbytes)``. The memory must outlive the view; where it is
    not the host's, reading the view here ends the process."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")
