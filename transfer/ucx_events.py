"""`Events`: progress of several UCX workers on one thread, which sleeps while none has any.

The binding's own worker is all there is until one is added. A worker that has nothing to do is
armed, and costs nothing until its descriptor wakes it.
"""

import select
from ctypes import byref, c_int

from prefixfleet.transfer.ucx_binding import Binding
from prefixfleet.transfer.ucx_get import Libucp

STEPS = 64
"""An added worker makes so many at most before somebody else gets his turn."""


class Events:
    """Owned by the UCX thread, as ``binding`` is. Workers that are added are raw handles; whoever
    gives one work says so by `touch`."""

    def __init__(self, ucp: Libucp, binding: Binding) -> None:
        self._ucp = ucp
        self._binding = binding
        self._epoll = select.epoll()
        self._epoll.register(self._descriptor(binding.worker), select.EPOLLIN)
        self._added: dict[int, int] = {}  # by descriptor
        self._awake: set[int] = set()

    def add(self, worker: int) -> None:
        """Look after one more, until `remove`. Raises `PeerLost`."""
        fd = self._descriptor(worker)
        self._epoll.register(fd, select.EPOLLIN)
        self._added[fd] = worker
        self.touch(worker)

    def remove(self, worker: int) -> None:
        """Before it is destroyed."""
        fd = next(fd for fd, known in self._added.items() if known == worker)
        self._epoll.unregister(fd)
        del self._added[fd]
        self._awake.discard(worker)

    def touch(self, worker: int) -> None:
        """It was given work."""
        self._awake.add(worker)

    def wait(self, timeout_ms: int) -> None:
        """Do what can be done; when that is nothing, wait for an event, or for the time."""
        if not self._added:
            self._binding.wait(timeout_ms)
        elif not self.progress() and self._asleep():
            ready = self._epoll.poll(timeout_ms / 1000)
            self._awake |= {self._added[fd] for fd, _ in ready if fd in self._added}
            self.progress()

    def progress(self) -> bool:
        """Do what can be done now. Returns whether an added worker had anything to do."""
        self._binding.progress()
        steps = [self._step(worker) for worker in tuple(self._awake)]
        return any(steps)

    def close(self) -> None:
        """Before the binding goes."""
        self._epoll.close()

    def _step(self, worker: int) -> int:
        step = self._ucp.calls.ucp_worker_progress
        return next((i for i in range(STEPS) if not step(worker)), STEPS)

    def _asleep(self) -> bool:
        self._awake = {worker for worker in self._awake if self._ucp.calls.ucp_worker_arm(worker)}
        return not self._awake and not self._ucp.calls.ucp_worker_arm(self._binding.worker)

    def _descriptor(self, worker: int) -> int:
        fd = c_int()
        self._ucp.check(self._ucp.calls.ucp_worker_get_efd(worker, byref(fd)), "worker_get_efd")
        return fd.value
