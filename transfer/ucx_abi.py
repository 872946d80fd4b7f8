"""What libucp looks like from outside: its structures and the functions that are called.

As in ``ucp/api/ucp.h`` of UCX 1.15 to 1.21, whose field masks keep the structures stable.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p

FIELD_ADDRESS, FIELD_LENGTH = 1, 2  # of ucp_mem_map_params
FIELD_TRANSPORTS = 8  # of ucp_ep_attr
FIELD_REMOTE_ADDRESS, FIELD_ERROR_MODE, FIELD_ERROR_HANDLER = 1, 2, 4  # of ucp_ep_params
ERRORS_OF_PEERS = 1
FIELD_FLAGS = 16  # of ucp_request_param
ALWAYS_A_REQUEST = 1 << 16  # of ucp_request_param: also where it is over at once
FIELD_THREAD_MODE = 1  # of ucp_worker_params; its value 0 is one thread
CLOSE_BY_FORCE = 1
IN_PROGRESS = 1
TOO_LONG = -9  # a message, for the buffer that waits for it
MAX_TRANSPORTS = 16


class MemMapParams(ctypes.Structure):
    """``ucp_mem_map_params_t``."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", ctypes.c_uint),
        ("prot", ctypes.c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
    ]


class RequestParam(ctypes.Structure):
    """``ucp_request_param_t``."""

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


class WorkerParams(ctypes.Structure):
    """``ucp_worker_params_t``."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_uint64 * 16),
        ("events", ctypes.c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    ]


class Message(ctypes.Structure):
    """``ucp_tag_recv_info_t``."""

    _fields_ = [("sender_tag", c_uint64), ("length", c_size_t)]


_ErrorHandler = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int)


def _ignore(_argument: int, _endpoint: int, _status: int) -> None:
    """UCX wants one with error handling; what failed is told by the requests themselves."""


unheard = _ErrorHandler(_ignore)


class _SocketAddress(ctypes.Structure):
    _fields_ = [("addr", c_void_p), ("addrlen", c_uint32)]


class EndpointParams(ctypes.Structure):
    """``ucp_ep_params_t``."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_char_p),
        ("err_mode", c_int),
        ("err_handler_cb", _ErrorHandler),
        ("err_handler_arg", c_void_p),
        ("user_data", c_void_p),
        ("flags", ctypes.c_uint),
        ("sockaddr", _SocketAddress),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", _SocketAddress),
    ]


class Transport(ctypes.Structure):
    """``ucp_transport_entry_t``."""

    _fields_ = [("transport_name", c_char_p), ("device_name", c_char_p)]


class EndpointAttributes(ctypes.Structure):
    """``ucp_ep_attr_t``."""

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


Status = ctypes.c_int8
"""``ucs_status_t`` is a packed enumeration: of a result's register only one byte is it."""

PROTOTYPES = {
    "ucp_mem_map": (Status, [c_void_p, POINTER(MemMapParams), POINTER(c_void_p)]),
    "ucp_mem_unmap": (Status, [c_void_p, c_void_p]),
    "ucp_rkey_pack": (Status, [c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_rkey_buffer_release": (None, [c_void_p]),
    "ucp_ep_rkey_unpack": (Status, [c_void_p, c_char_p, POINTER(c_void_p)]),
    "ucp_rkey_destroy": (None, [c_void_p]),
    "ucp_get_nbx": (
        c_void_p,
        [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(RequestParam)],
    ),
    "ucp_tag_send_nbx": (
        c_void_p,
        [c_void_p, c_void_p, c_size_t, c_uint64, POINTER(RequestParam)],
    ),
    "ucp_tag_recv_nbx": (
        c_void_p,
        [c_void_p, c_void_p, c_size_t, c_uint64, c_uint64, POINTER(RequestParam)],
    ),
    "ucp_tag_recv_request_test": (Status, [c_void_p, POINTER(Message)]),
    "ucp_tag_probe_nb": (c_void_p, [c_void_p, c_uint64, c_uint64, c_int, POINTER(Message)]),
    "ucp_worker_create": (Status, [c_void_p, POINTER(WorkerParams), POINTER(c_void_p)]),
    "ucp_worker_destroy": (None, [c_void_p]),
    "ucp_worker_get_address": (Status, [c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_worker_release_address": (None, [c_void_p, c_void_p]),
    "ucp_worker_get_efd": (Status, [c_void_p, POINTER(c_int)]),
    "ucp_worker_arm": (Status, [c_void_p]),
    "ucp_worker_progress": (ctypes.c_uint, [c_void_p]),
    "ucp_request_cancel": (None, [c_void_p, c_void_p]),
    "ucp_request_check_status": (Status, [c_void_p]),
    "ucp_request_free": (None, [c_void_p]),
    "ucp_ep_create": (Status, [c_void_p, POINTER(EndpointParams), POINTER(c_void_p)]),
    "ucp_ep_close_nbx": (c_void_p, [c_void_p, POINTER(RequestParam)]),
    "ucp_worker_signal": (Status, [c_void_p]),
    "ucp_ep_query": (Status, [c_void_p, POINTER(EndpointAttributes)]),
}
