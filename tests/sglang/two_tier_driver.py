"""SGLang's cache fixtures over two tiers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from sglang.srt.environ import envs
from sglang.srt.mem_cache import mamba_checkpoint_pool
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import fixtures
from torch import Tensor

from dasc.cache.counters import Counters
from dasc.cache.entries import StateEntry, Tier
from dasc.cache.transfers import Ticket
from dasc.sglang.pool import CompressedPool
from dasc.sglang.two_tier_component import TwoTierComponent
from dasc.sglang.two_tier_pool import RUNNING, TwoTierPool, TwoTierSettings
from tests.sglang.cache_driver import Driver, Running
from tests.sglang.cache_settings import Setting, all_settings, layout


def two_tier_settings() -> list[Setting]:
    """Every configuration with recurrent state."""
    return all_settings(["compressed-only"])


class _Late:
    """A pack that is done at the last moment: whatever touches its slots before is found out."""

    def __init__(self, pack: Callable[[int, int], Ticket], native_slot: int, compressed_slot: int) -> None:
        self._run = functools.cache(functools.partial(pack, native_slot, compressed_slot))

    def result(self) -> None:
        self._run().result()


class TwoTierDriver(Driver):
    """The driver of the other tests, its compressed pool behind our component. Packs are as late as they can be."""

    def __init__(
        self,
        setting: Setting,
        compressed_slots: int = 6,
        *,
        native_slots: int = 12,
        dense_limit: int | None = None,
        watermark: int = 0,
    ) -> None:
        self._dense_limit, self._watermark = dense_limit, watermark
        sized = dataclasses.replace(setting, cfg=dataclasses.replace(setting.cfg, mamba_cache_size=native_slots))
        super().__init__(sized, compressed_slots)
        mover = self.tiers._mover
        self._patch(mover, "pack", functools.partial(_Late, mover.pack))

    def _serve_with_our_pool(self, slots: int) -> None:
        made = CompressedPool(layout(self.setting), slots, "cpu", Counters())
        self._patch(mamba_checkpoint_pool, "maybe_init_int8_mamba_checkpoint_pool", lambda **sizes: made)
        component = functools.partial(
            TwoTierComponent, settings=TwoTierSettings(self.counters, self._dense_limit, self._watermark)
        )
        build = functools.partial(fixtures.build_fixture, component_registry_override={ComponentType.MAMBA: component})
        self._patch(fixtures, "build_fixture", build)
        self._patches.enter_context(envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.override(True))

    @property
    def tiers(self) -> TwoTierPool:
        return self.pool.mamba_ckpt_pool

    def step(self) -> None:
        """What our hook does at the start of each scheduler step."""
        self.tiers.store.step()
        self.check()

    def entry(self, tokens: Sequence[int]) -> StateEntry:
        """The checkpoint after exactly these tokens."""
        found = fixtures.match_prefix(self.cache, [*tokens, 0])
        assert found.device_prefix_len == len(tokens)
        return self._entry_at(found.best_match_node)

    def _entry_at(self, node: int) -> StateEntry:
        return self.tiers.entry(self.cache.tree_core.get_component_device_value(node, ComponentType.MAMBA))

    def tier(self, tokens: Sequence[int]) -> Tier:
        return self.entry(tokens).tier

    def check_restored(self, running: Running) -> None:
        """As from the tier that served the hit, which holds it still."""
        self._exact = self._entry_at(running.req.last_node).tier is not Tier.COMPRESSED
        super().check_restored(running)

    def restored(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.state_of(tokens) if self._exact else super().restored(tokens)

    def check(self) -> None:
        """Assert besides that tree and store say the same of every checkpoint, and in the same order."""
        super().check()
        tiers, core = self.tiers, self.cache.tree_core
        store = tiers.store
        nodes = [
            node for node in core._collect_all_nodes() if node.component_data[ComponentType.MAMBA].value is not None
        ]
        entries = [tiers.entry(node.component_data[ComponentType.MAMBA].value) for node in nodes]
        assert {id(entry) for entry in entries} == {id(entry) for entry in tiers._entries.values()}
        for node, entry in zip(nodes, entries):
            assert entry.owner is node
            assert entry.locks == (node.component_data[ComponentType.MAMBA].lock_ref > 0)
        in_native = [entry for entry in entries if entry.tier is not Tier.COMPRESSED]
        assert tiers.locked_native == sum(entry.locks for entry in in_native)
        assert store.dense_count == sum(entry.tier is Tier.DENSE for entry in entries)
        assert store.compressed_count == sum(entry.tier is Tier.COMPRESSED for entry in entries)
        for entry in entries:
            pool = store.compressed if entry.tier is Tier.COMPRESSED else store.native
            assert pool.owner_of(entry.slot) is entry
        owners = [store.native.owner_of(slot) for slot in range(1, tiers.native_slots + 1)]
        assert owners.count(RUNNING) + len(in_native) + owners.count(None) == tiers.native_slots
        self._check_order(nodes, entries)

    def _check_order(self, nodes: list, entries: list[StateEntry]) -> None:
        """One order of recency."""
        lru = self.cache.tree_core.lru_lists[ComponentType.MAMBA]
        order, node = [], lru.tail.lru_prev[lru._pt]
        while node is not lru.head:
            order.append(node)
            node = node.lru_prev[lru._pt]
        by_stamp = [node for _, node in sorted(zip([e.stamp for e in entries], nodes), key=lambda pair: pair[0])]
        assert [n.id for n in order] == [n.id for n in by_stamp]
