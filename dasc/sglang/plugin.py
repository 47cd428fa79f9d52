"""The entry point ``sglang.srt.plugins``: SGLang calls :func:`register` early in each of its processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dasc.sglang.serving import Serving

serving: Serving | None = None
"""The plugin of this process, when it is on."""


def register() -> None:
    """Read the configuration, check SGLang, and register the hooks. Without ``DASC_PLAN`` and ``DASC_CONFIG``: nothing.

    Raises:
        SystemExit: for a configuration that is wrong or an SGLang that has changed, with one line on standard error.
    """
    global serving
    if not os.environ.get("DASC_PLAN") and not os.environ.get("DASC_CONFIG"):
        return
    from dasc.sglang.config import read_config
    from dasc.sglang.refusing import refuse
    from dasc.sglang.targets import ONE_PASS_TARGETS, REFRESH_TARGETS, TWO_TIER_TARGETS, check_targets

    try:
        config = read_config(os.environ)
        check_targets()
        if config is not None and config.load_policy == "wr":
            check_targets(REFRESH_TARGETS)
            if config.refresh == "auto":
                check_targets(ONE_PASS_TARGETS)
        if config is not None and config.mode == "two-tier":
            check_targets(TWO_TIER_TARGETS)
    except ValueError as error:
        refuse(error)
    assert config is not None

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from dasc.sglang.serving import Serving
    from dasc.sglang.updates import WeightUpdates

    serving = Serving(config)
    WeightUpdates(serving)
    if config.load_policy == "wr":
        from dasc.sglang.refresh import Refresh

        Refresh(serving)
    if config.mode == "two-tier":
        from dasc.sglang.two_tier import TwoTier

        TwoTier(serving)
    for target, hook in serving.hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
