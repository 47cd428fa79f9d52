"""What SGLang's own arguments must not ask for beside the plugin. Refused at start, never served wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Exclusion(NamedTuple):
    """An argument that the plugin does not go together with.

    Attributes:
        argument: field of SGLang's ``ServerArgs``.
        excludes: tells by its value whether it is in use.
        why: what does not work.
    """

    argument: str
    excludes: Callable[[Any], bool]
    why: str


def _above_one(value: Any) -> bool:
    return int(value) > 1


EXCLUSIONS = (
    Exclusion("disable_radix_cache", bool, "without a prefix cache there is nothing to compress"),
    Exclusion("enable_int8_mamba_checkpoint", bool, "two pools cannot hold one checkpoint; DASC_INT8 stores INT8"),
    Exclusion("enable_hierarchical_cache", bool, "host copies are of whole states"),
    Exclusion("enable_lmcache", bool, "LMCache copies whole states"),
    Exclusion("enable_unified_cache_external_linker", bool, "the linker copies whole states"),
    Exclusion("radix_cache_backend", lambda v: v is not None, "another cache would read compressed slots as states"),
    Exclusion("speculative_algorithm", lambda v: v is not None, "its states before verification are not handled"),
    Exclusion("disaggregation_mode", lambda v: v != "null", "transfers between servers are of whole states"),
    Exclusion("enable_unified_memory", bool, "there SGLang has no checkpoint pool"),
    Exclusion("enable_linear_replayssm", bool, "the state in a slot then lags behind its tokens"),
    Exclusion("enable_linear_replayssm_spec", bool, "the state in a slot then lags behind its tokens"),
    Exclusion("pp_size", _above_one, "plans are not cut by pipeline stage"),
    Exclusion("attn_dp_size", _above_one, "attention data parallelism is not handled"),
    Exclusion("attn_cp_size", _above_one, "context parallelism is not handled"),
    Exclusion("dcp_size", _above_one, "context parallelism is not handled"),
)


def check_arguments(arguments: Any) -> None:
    """Raise for arguments that the plugin does not go together with.

    Args:
        arguments: SGLang's resolved arguments, by attribute.

    Raises:
        ValueError: naming the argument, its value and why.
    """
    for argument, excludes, why in EXCLUSIONS:
        value = getattr(arguments, argument)
        if excludes(value):
            flag = "--" + argument.replace("_", "-")
            raise ValueError(f"DASC_PLAN and {flag} (here {value}) cannot be used together: {why}")
