"""libucp by ctypes: the one-sided read, which `ucxx` has in C++ only, on the binding's raw handles.

Structures as in ``ucp/api/ucp.h`` of UCX 1.15 to 1.21, whose field masks keep them stable. Every
call here belongs on the thread that owns the worker.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p

from prefixfleet.store.errors import PeerLost

_FIELD_ADDRESS, _FIELD_LENGTH = 1, 2  # of ucp_mem_map_params
_FIELD_TRANSPORTS = 8  # of ucp_ep_attr
_IN_PROGRESS = 1
_MAX_TRANSPORTS = 16


class _MemMapParams(ctypes.Structure):
    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", ctypes.c_uint),
        ("prot", ctypes.c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
    ]


class _RequestParam(ctypes.Structure):
    _fields_ = [
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    ]


class _Transport(ctypes.Structure):
    _fields_ = [("transport_name", c_char_p), ("device_name", c_char_p)]


class _EndpointAttributes(ctypes.Structure):
    _fields_ = [
        ("field_mask", c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_char * 128),
        ("remote_sockaddr", ctypes.c_char * 128),
        ("entries", c_void_p),
        ("num_entries", ctypes.c_uint),
        ("entry_size", c_size_t),
        ("user_data", c_void_p),
    ]


_PROTOTYPES = {
    "ucp_mem_map": (c_int, [c_void_p, POINTER(_MemMapParams), POINTER(c_void_p)]),
    "ucp_mem_unmap": (c_int, [c_void_p, c_void_p]),
    "ucp_rkey_pack": (c_int, [c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_rkey_buffer_release": (None, [c_void_p]),
    "ucp_ep_rkey_unpack": (c_int, [c_void_p, c_char_p, POINTER(c_void_p)]),
    "ucp_rkey_destroy": (None, [c_void_p]),
    "ucp_get_nbx": (
        c_void_p,
        [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(_RequestParam)],
    ),
    "ucp_request_check_status": (c_int, [c_void_p]),
    "ucp_request_free": (None, [c_void_p]),
    "ucp_worker_signal": (c_int, [c_void_p]),
    "ucp_ep_query": (c_int, [c_void_p, POINTER(_EndpointAttributes)]),
}


class Libucp:
    """The functions of the libucp that the binding has loaded. Stateless; one thread at a time,
    except `signal`, which any thread may call."""

    def __init__(self) -> None:
        self._ucp = ctypes.CDLL("libucp.so.0")  # already in the process: found by its name
        self._ucs = ctypes.CDLL("libucs.so.0")
        self._ucs.ucs_status_string.restype = c_char_p
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(self._ucp, name)
            function.restype, function.argtypes = result, arguments
        self._plain = _RequestParam()

    def map(self, context: int, address: int, length: int) -> int:
        """Register memory. Returns its handle, for `unmap`. Raises `PeerLost`."""
        params = _MemMapParams(
            field_mask=_FIELD_ADDRESS | _FIELD_LENGTH, address=address, length=length
        )
        handle = c_void_p()
        self._check(self._ucp.ucp_mem_map(context, byref(params), byref(handle)), "mem_map")
        assert handle.value is not None
        return handle.value

    def unmap(self, context: int, memory: int) -> None:
        """Undo `map`."""
        self._check(self._ucp.ucp_mem_unmap(context, memory), "mem_unmap")

    def pack_rkey(self, context: int, memory: int) -> bytes:
        """What a peer needs to read the registered memory."""
        buffer, length = c_void_p(), c_size_t()
        self._check(
            self._ucp.ucp_rkey_pack(context, memory, byref(buffer), byref(length)), "rkey_pack"
        )
        try:
            return ctypes.string_at(buffer, length.value)
        finally:
            self._ucp.ucp_rkey_buffer_release(buffer)

    def unpack_rkey(self, endpoint: int, packed: bytes) -> int:
        """Handle of the peer's memory on this endpoint, for `destroy_rkey`."""
        rkey = c_void_p()
        self._check(self._ucp.ucp_ep_rkey_unpack(endpoint, packed, byref(rkey)), "rkey_unpack")
        assert rkey.value is not None
        return rkey.value

    def destroy_rkey(self, rkey: int) -> None:
        """Undo `unpack_rkey`."""
        self._ucp.ucp_rkey_destroy(rkey)

    def get(self, endpoint: int, target: int, length: int, remote: int, rkey: int) -> int:
        """Start reading ``length`` bytes at the peer's address ``remote`` into ``target``.

        Returns a request for `finished`, or 0 if it is done already. Raises `PeerLost`.
        """
        request: int = (
            self._ucp.ucp_get_nbx(endpoint, target, length, remote, rkey, byref(self._plain)) or 0
        )
        if request > 2**64 - 1 - 127:  # UCS_PTR_IS_ERR: the last addresses are error codes
            self._check(request - 2**64, "get")
        return request

    def finished(self, request: int) -> bool:
        """Whether the request is over; then it is freed. Raises `PeerLost` if it failed."""
        status = self._ucp.ucp_request_check_status(request)
        if status == _IN_PROGRESS:
            return False
        self._ucp.ucp_request_free(request)
        self._check(status, "get")
        return True

    def signal(self, worker: int) -> None:
        """Wake whoever waits for the worker's events."""
        self._ucp.ucp_worker_signal(worker)

    def transports(self, endpoint: int) -> str:
        """What carries the endpoint's bytes, e.g. "rc_mlx5/mlx5_0:1,tcp/eth0"."""
        entries = (_Transport * _MAX_TRANSPORTS)()
        attributes = _EndpointAttributes(
            field_mask=_FIELD_TRANSPORTS,
            entries=ctypes.addressof(entries),
            num_entries=_MAX_TRANSPORTS,
            entry_size=ctypes.sizeof(_Transport),
        )
        self._check(self._ucp.ucp_ep_query(endpoint, byref(attributes)), "ep_query")
        names = {
            f"{entry.transport_name.decode()}/{entry.device_name.decode()}"
            for entry in entries[: attributes.num_entries]
        }
        return ",".join(sorted(names))

    def _check(self, status: int, what: str) -> None:
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
