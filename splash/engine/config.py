"""EngineConfig: everything an engine needs to start, as plain values. Entry points build it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from splash.core.errors import ConfigError
from splash.core.hardware import Hardware
from splash.scheduler.policy import PolicyConfig

DTYPES = ("float32", "bfloat16")
DUMMY_FORMATS = ("dummy", "dummy_same_experts")
LOAD_FORMATS = ("safetensors", *DUMMY_FORMATS)
ATTENTION_BACKENDS = ("auto", "flashinfer", "triton", "torch")


@dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed.

    Attributes:
        backend: "flashinfer", "triton" or "torch", or "auto" for the fastest that works on the hardware.

    Raises:
        ConfigError: there is no such backend.
    """

    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.backend not in ATTENTION_BACKENDS:
            raise ConfigError(
                "attention.backend", f"must be one of {', '.join(ATTENTION_BACKENDS)}, not {self.backend!r}"
            )


@dataclass(frozen=True)
class EngineConfig:
    """How to start an engine.

    Attributes:
        model: directory of a Hugging Face checkpoint, or "builtin:NAME" for one that ships with SPLASH.
        load_format: "safetensors"; "dummy" for random weights in the shapes of the configuration; or
            "dummy_same_experts" for such weights with which routers send all rows to the same experts.
        model_config: the contents of a config.json that take the place of the directory's. With random weights there
            need be no directory; text is then made with the tokenizer of the model that ships with SPLASH.
        hardware: platform name ("cpu", "cuda", "rocm"), or None to take the best that is usable here.
        ranks: T, the number of ranks; None takes the platform's default (2 on the CPU).
        layout: name of the layout to serve in.
        dtype: "float32" or "bfloat16", of weights, activations and cache.
        attention: how attention is computed.
        graphs: record decode steps at the start and replay them, where the hardware can.
        async_scheduling: plan and send each step while the one before it runs, its tokens staying on the device; None
            does so where work is queued on a device, which then never waits for the host. On the CPU it gains little,
            and a request that comes is first computed up to a step later.
        page_size: token positions a page, a power of two.
        max_model_len: longest prompt plus output in tokens; None takes the checkpoint's.
        max_num_seqs: most requests that run at once.
        max_batched_tokens: most query rows a step; longer prompts are prefilled in chunks.
        mem_fraction: share of a device's memory to use, for everything.
        kv_cache_gib: memory a rank for arenas (attention weights and KV pages of all layers), in GiB; None takes what
            `mem_fraction` leaves, or 1 GiB on the CPU.
        prefix_cache: requests that begin alike share the pages of what they have in common.
        switch_staging_mib: most memory a rank for staging one layer of a switch, in MiB.
        switch_copy_mib: most that a rank copies ahead of a switch after one step, in MiB. None takes what suits the
            platform.
        policy: how the layout is chosen while serving.
        description: of the ranks' devices, with the costs that the cost policy predicts from; else None will do.
        step_timeout_s: a step that takes longer counts as hung.
        max_restarts: how often ranks that died, failed or hung are started anew within `restart_window_s`; what runs
            is computed again. Once more, and the engine gives up.
        restart_window_s: how long a restart counts.
        seed: seeds requests that bring no seed of their own.

    Raises:
        ConfigError: naming the option that is out of range.
    """

    model: str
    load_format: str = "safetensors"
    model_config: Mapping[str, Any] | None = None
    hardware: str | None = None
    ranks: int | None = None
    layout: str = "tp"
    dtype: str = "float32"
    attention: AttentionOptions = AttentionOptions()
    graphs: bool = True
    async_scheduling: bool | None = None
    page_size: int = 64
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    mem_fraction: float = 0.9
    kv_cache_gib: float | None = None
    prefix_cache: bool = True
    switch_staging_mib: float = 256.0
    switch_copy_mib: float | None = None
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    description: Hardware | None = None
    step_timeout_s: float = 120.0
    max_restarts: int = 3
    restart_window_s: float = 600.0
    seed: int = 0

    @property
    def graph_rows(self) -> int:
        """Rows that decode steps are recorded for, 0 for none; see `splash.engine.graphs`."""
        return self.max_num_seqs if self.graphs else 0

    def __post_init__(self) -> None:
        for name, ok, accepted in (
            ("ranks", self.ranks is None or self.ranks >= 1, "at least 1"),
            ("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
            ("page_size", self.page_size >= 1 and self.page_size & (self.page_size - 1) == 0, "a power of two"),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 1, "at least 1"),
            ("max_num_seqs", self.max_num_seqs >= 1, "at least 1"),
            ("max_batched_tokens", self.max_batched_tokens >= 1, "at least 1"),
            ("load_format", self.load_format in LOAD_FORMATS, f"one of {', '.join(LOAD_FORMATS)}"),
            ("mem_fraction", 0 < self.mem_fraction <= 1, "above 0 and at most 1"),
            ("kv_cache_gib", self.kv_cache_gib is None or self.kv_cache_gib > 0, "above 0"),
            ("switch_staging_mib", self.switch_staging_mib >= 0, "at least 0"),
            ("switch_copy_mib", self.switch_copy_mib is None or self.switch_copy_mib > 0, "above 0"),
            ("step_timeout_s", self.step_timeout_s > 0, "above 0"),
            ("max_restarts", self.max_restarts >= 0, "at least 0"),
            ("restart_window_s", self.restart_window_s > 0, "above 0"),
        ):
            if not ok:
                raise ConfigError(name, f"must be {accepted}, not {getattr(self, name)!r}")
