"""What a worker is asked before it gets requests: does it read and hash prompts as this router?"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp

from prefixfleet.router.parity import check_counts, check_parity, check_tokens, measure_prefill
from prefixfleet.router.static_workers import StaticWorker
from prefixfleet.router.tokens import Tokens, load_tokens
from prefixfleet.router.worker import Worker
from prefixfleet.store.namespace import hash_key
from prefixfleet.store.records import WorkerRecord


class Examination:
    """Owned by a `Router`; remembers tokenizers by their folder.

    ``static`` gives the plain engines by name, ``session`` what to ask with.
    """

    def __init__(
        self,
        secret: bytes,
        tokenizer_path: Path | None,
        static: Callable[[], Mapping[str, StaticWorker]],
        session: Callable[[], aiohttp.ClientSession],
    ) -> None:
        self._secret = secret
        self._tokenizer_path = tokenizer_path
        self._static = static
        self._session = session
        self._tokens: dict[Path, asyncio.Future[Tokens]] = {}

    async def examine(self, record: WorkerRecord) -> Worker:
        """The worker, once it agrees. Raises as `Examine` says."""
        namespace, entry = record.identity(), self._static().get(record.worker)
        worker = Worker(
            record,
            await self.tokens_of(record),
            namespace.digest(self._secret),
            namespace.block_tokens,
            static=entry is not None,
        )
        if entry is None:
            await check_parity(worker, hash_key(self._secret), self._session())
            return worker
        return await self._examine_plain(worker, entry)

    async def _examine_plain(self, worker: Worker, entry: StaticWorker) -> Worker:
        session, record = self._session(), worker.record
        if entry.engine == "trtllm":
            await check_counts(worker, session)
        else:
            await check_tokens(worker, session, chats=entry.engine == "vllm")
        speed = record.prefill_tokens_per_s or await measure_prefill(worker, session)
        return replace(worker, record=replace(record, prefill_tokens_per_s=speed))

    async def tokens_of(self, record: WorkerRecord) -> Tokens:
        """The tokenizer of its model. Raises `ConfigError`."""
        folder = self._tokenizer_path or Path(record.model_path)
        if folder not in self._tokens:
            loading = asyncio.ensure_future(asyncio.to_thread(load_tokens, folder))
            self._tokens[folder] = loading
            loading.add_done_callback(partial(self._loaded, folder))
        return await asyncio.shield(self._tokens[folder])  # others may wait for it too

    def _loaded(self, folder: Path, loading: asyncio.Future[Tokens]) -> None:
        if loading.cancelled() or loading.exception():
            del self._tokens[folder]  # it may have been corrected when the next one asks
