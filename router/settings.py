"""What one router reads from the environment: the section ``PREFIXFLEET_ROUTER_``."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from prefixfleet.router.policy_choice import OURS, PolicyName
from prefixfleet.store.settings import Section


class RouterSettings(Section):
    """Every default has its reason beside it; durations are seconds, sizes bytes."""

    section: ClassVar[str] = "ROUTER_"

    host: str = "127.0.0.1"  # open to others only when asked
    port: int = Field(default=8000, ge=0, le=65_535)  # 0: any free one, printed at the start
    policy: PolicyName = OURS  # others send at once: no priorities, no fairness between tenants
    max_body_bytes: int = Field(default=32 << 20, ge=1_024)  # 1 M tokens as ids, with room
    max_in_flight: int = Field(default=4_096, ge=1)  # 4 times what one process was measured with
    ttft_slo_s: float = Field(default=0.0, ge=0)  # 0: nothing is refused for being late
    tbt_slo_s: float = Field(default=0.0, ge=0)  # between tokens; 0: decodes refuse nothing
    connect_timeout_s: float = Field(default=3.0, gt=0)  # a node's lease: longer and it is dead
    silence_timeout_s: float = Field(
        default=600.0, gt=0
    )  # the longest prefill on a CPU engine; a client that takes nothing for so long is cut off
    tokenizer_path: Path | None = None  # for a router that does not see the workers' folders
    keys_file: Path | None = None  # API keys, see `keys`; without it everybody may ask
    workers_file: Path | None = None  # engines without our connector, see `static_workers`
    admin_key_file: Path | None = None  # of the admin API, 16 bytes at least; without it off
    health_interval_s: float = Field(default=2.0, ge=0)  # three failed looks in 6 s; 0: never
    worker_wait_s: float = Field(
        default=10.0, ge=0
    )  # for a first one, and for a first list to be whole
    slow_start_s: float = Field(default=10.0, ge=0)  # a new worker gets its full share after this
    log_format: Literal["text", "json"] = "text"  # json: one object a line, for collectors
    tls_cert_file: Path | None = None  # with its key: the router serves https only
    tls_key_file: Path | None = None  # not encrypted
    tls_client_ca_file: Path | None = None  # clients must show a certificate that it signed
    worker_ca_file: Path | None = None  # trusted for https workers, besides the system's own
    worker_cert_file: Path | None = None  # shown to workers that ask for one
    worker_key_file: Path | None = None  # not encrypted
    otlp_endpoint: str = Field(
        default="",
        pattern=r"^(https?://.+)?$",
        description="traces go there; empty: off; needs the extra otel",
    )
