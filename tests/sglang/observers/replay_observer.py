"""SGLang plugin for tests: says for each batch with compressed hits what their replay has left in the pools."""

import json
import os


class Observer:
    """Looks at K/V before a forward, and between the replay and the load of the checkpoints."""

    def __init__(self):
        self.before = None

    def forward(self, original, runner, forward_batch, *args, **kwargs):
        if forward_batch.mamba_cow_dst_indices is not None:
            self.before = [part.clone() for part in kv_buffers(runner)]
        return original(runner, forward_batch, *args, **kwargs)

    def load(self, original, runner, forward_batch):
        slots = forward_batch.mamba_cow_dst_indices
        if slots is not None:
            scratch = runner.token_to_kv_pool_allocator.size + runner.token_to_kv_pool_allocator.page_size
            pairs = list(zip(self.before, kv_buffers(runner)))
            states = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal[:, slots]
            seen = {
                "hits": len(slots),
                "cached_kv_unchanged": all(old[:scratch].equal(new[:scratch]) for old, new in pairs),
                "scratch_kv_written": all(not old[scratch:].equal(new[scratch:]) for old, new in pairs),
                "states_written": bool(states.flatten(2).any(-1).all()),
                "requests_rows": runner.req_to_token_pool.size,
                "table_rows": len(runner.req_to_token_pool.req_to_token),
            }
            # one write: ranks share the stream
            os.write(2, f"\nREPLAY OBSERVER {json.dumps(seen)}\n".encode())
        return original(runner, forward_batch)


def kv_buffers(runner):
    pool = runner.token_to_kv_pool.full_kv_pool
    return pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    observer = Observer()
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.forward", observer.forward, HookType.AROUND)
    HookRegistry.register(f"{runner}._maybe_execute_deferred_mamba_cow_and_clear", observer.load, HookType.AROUND)
