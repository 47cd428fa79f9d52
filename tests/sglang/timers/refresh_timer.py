"""SGLang plugin for benchmarks: has batches with hits refreshed in one pass and in two by turns, and times them."""

import json
import os
import time


class Timer:
    """Around a forward, its refresh included. A form is what the plugin's own setting would make it."""

    def __init__(self):
        self.batches = 0
        self.one_pass = None

    def forward(self, original, runner, forward_batch, *args, **kwargs):
        if forward_batch.mamba_cow_dst_indices is None:
            return original(runner, forward_batch, *args, **kwargs)
        from dasc.sglang import plugin, targets

        refresh = plugin.serving.hooks[targets.FORWARD].__self__
        self.one_pass = self.one_pass or refresh._one_pass
        one = self.batches % 2 == 0
        refresh._one_pass = self.one_pass if one else None
        self.batches += 1
        before = dict(plugin.serving.counters.refreshed_hits)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        result = original(runner, forward_batch, *args, **kwargs)
        seen = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}
        [form] = [f for f, hits in plugin.serving.counters.refreshed_hits.items() if hits > before.get(f, 0)]
        assert form == ("one_pass" if one else "two_pass")
        os.write(2, f"\nREFRESH TIMER {json.dumps(seen | {'form': form})}\n".encode())
        return result


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    forward = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    HookRegistry.register(forward, Timer().forward, HookType.AROUND)
