"""SGLang plugin for tests: says for each batch with compressed hits what their refresh has left in the pools."""

from tests.sglang.observing import say


class Observer:
    """Looks at K/V before and after a forward, and between the replay and the load of the checkpoints."""

    def __init__(self):
        self.before = None
        self.tokens = 0

    def forward(self, original, runner, forward_batch, *args, **kwargs):
        slots = forward_batch.mamba_cow_dst_indices
        if slots is None:
            return original(runner, forward_batch, *args, **kwargs)
        self.before = [part.clone() for part in kv_buffers(runner)]
        asked = what_was_asked(forward_batch)
        result = original(runner, forward_batch, *args, **kwargs)
        pairs = list(zip(self.before, kv_buffers(runner)))
        first_scratch = scratch_slot(runner)
        written = {*forward_batch.out_cache_loc.tolist(), 0}  # padding goes to slot 0
        others = [slot for slot in range(first_scratch) if slot not in written]
        say(
            "FORWARD",
            {
                "hits": len(slots),
                "requests": forward_batch.batch_size,
                "new_tokens": len(forward_batch.input_ids),
                "tokens": self.tokens,
                "other_kv_unchanged": all(old[others].equal(new[others]) for old, new in pairs),
                "scratch_kv_written": any(not old[first_scratch:].equal(new[first_scratch:]) for old, new in pairs),
                "batch_unchanged": what_was_asked(forward_batch) == asked,
                "loaded": forward_batch.mamba_cow_dst_indices is None,
            },
        )
        return result

    def load(self, original, runner, forward_batch):
        slots = forward_batch.mamba_cow_dst_indices
        if slots is not None:
            self.tokens = len(forward_batch.input_ids)
            scratch = scratch_slot(runner)
            pairs = list(zip(self.before, kv_buffers(runner)))
            states = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal[:, slots]
            say(
                "REPLAY",
                {
                    "hits": len(slots),
                    "cached_kv_unchanged": all(old[:scratch].equal(new[:scratch]) for old, new in pairs),
                    "scratch_kv_written": all(not old[scratch:].equal(new[scratch:]) for old, new in pairs),
                    "states_written": bool(states.flatten(2).any(-1).all()),
                    "requests_rows": runner.req_to_token_pool.size,
                    "table_rows": len(runner.req_to_token_pool.req_to_token),
                },
            )
        return original(runner, forward_batch)


def scratch_slot(runner):
    allocator = runner.token_to_kv_pool_allocator
    return allocator.size + allocator.page_size


def what_was_asked(batch):
    tensors = ("input_ids", "positions", "seq_lens", "out_cache_loc", "extend_seq_lens", "extend_prefix_lens")
    lists = ("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu", "extend_num_tokens")
    values = {name: getattr(batch, name).tolist() for name in (*tensors, "extend_start_loc")}
    return values | {name: getattr(batch, name) for name in lists}


def kv_buffers(runner):
    pool = runner.token_to_kv_pool.full_kv_pool
    return pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    observer = Observer()
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.forward", observer.forward, HookType.AROUND)
    HookRegistry.register(f"{runner}._maybe_execute_deferred_mamba_cow_and_clear", observer.load, HookType.AROUND)
