"""Sizes and habits of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from dasc.cache.checkpoints import AtJunctions, CheckpointPolicy


@dataclass(frozen=True)
class CacheConfig:
    """Sizes and habits of a :class:`~dasc.cache.prefix_cache.PrefixCache`.

    Slots are usable slots, the reserved one of each pool not counted.

    Attributes:
        native_slots: running states and dense checkpoints together.
        compressed_slots: compressed checkpoints; 0 is the dense arm.
        kv_pages: pages of KV.
        page_size: tokens a page.
        spill: keep dense checkpoints; without, only compressed ones (the accuracy arm).
        watermark: native slots that ``step`` tries to keep free.
        policies: where running requests are checkpointed.
        native_slot_bytes: bytes of a native slot, for caps and reports.
        compressed_slot_bytes: bytes of a compressed slot.
        max_dense_bytes: most bytes of dense checkpoints at rest; ``None`` for no cap but the slots.
        max_compressed_bytes: most bytes of compressed checkpoints.
        refresh_window_tokens: what a compressed hit replays (``W_max`` of DASC-WR); 0 for DASC-NR. Counted here only.
        refresh_below_tokens: hits with at least so many new prompt tokens are not refreshed, since by the time of their
            answer the omission has faded (:func:`dasc.reference.settle_tokens`); ``None`` refreshes all.
        explain_records: how many missing states ``explain`` remembers.

    Raises:
        ValueError: naming the field.
    """

    native_slots: int
    compressed_slots: int
    kv_pages: int
    page_size: int = 1
    spill: bool = True
    watermark: int = 0
    policies: tuple[CheckpointPolicy, ...] = (AtJunctions(),)
    native_slot_bytes: int = 1
    compressed_slot_bytes: int = 1
    max_dense_bytes: int | None = None
    max_compressed_bytes: int | None = None
    refresh_window_tokens: int = 0
    refresh_below_tokens: int | None = None
    explain_records: int = 1024

    def __post_init__(self) -> None:
        for name in ("native_slots", "kv_pages", "page_size", "native_slot_bytes", "compressed_slot_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("compressed_slots", "watermark", "refresh_window_tokens", "explain_records"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("max_dense_bytes", "max_compressed_bytes", "refresh_below_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.watermark >= self.native_slots:
            raise ValueError(f"watermark must be below native_slots = {self.native_slots}, got {self.watermark}")
        if self.compressed_limit == 0 and self.dense_limit == 0:
            raise ValueError(
                "nothing can be cached: a compressed checkpoint takes "
                f"{self.compressed_slot_bytes} bytes, a dense one {self.native_slot_bytes} and spill=True"
            )
        for policy in self.policies:
            policy.check(self.page_size)

    def refresh_window(self, hit_tokens: int, prompt_tokens: int) -> int:
        """Tokens that a compressed hit of ``hit_tokens`` replays for a prompt of ``prompt_tokens``."""
        if self.refresh_below_tokens is not None and prompt_tokens - hit_tokens >= self.refresh_below_tokens:
            return 0
        return min(self.refresh_window_tokens, hit_tokens)

    @property
    def dense_limit(self) -> int | None:
        """Most dense checkpoints at rest, from ``spill`` and ``max_dense_bytes``."""
        if not self.spill:
            return 0
        return None if self.max_dense_bytes is None else self.max_dense_bytes // self.native_slot_bytes

    @property
    def compressed_limit(self) -> int:
        """Most compressed checkpoints, from ``compressed_slots`` and ``max_compressed_bytes``."""
        if self.max_compressed_bytes is None:
            return self.compressed_slots
        return min(self.compressed_slots, self.max_compressed_bytes // self.compressed_slot_bytes)
