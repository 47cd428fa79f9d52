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
    Exclusion("enable_flexkv", bool, "FlexKV's cache would read compressed slots as states"),
    Exclusion("enable_unified_cache_external_linker", bool, "the linker copies whole states"),
    Exclusion("radix_cache_backend", lambda v: v is not None, "another cache would read compressed slots as states"),
    Exclusion("enable_session_radix_cache", bool, "there is one order of recency, and sessions would have their own"),
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

REFRESH_EXCLUSIONS = (
    Exclusion("enable_lora", bool, "a replay does not know its request's adapter"),
    Exclusion("lora_paths", bool, "a replay does not know its request's adapter"),
    Exclusion("enable_pdmux", bool, "a replay is not divided by layers"),
)
"""Those of ``DASC_LOAD_POLICY=wr`` besides."""

HYBRID_EXCLUSIONS = (
    Exclusion("enable_lora", bool, "an adapter's heads are in the model's order"),
    Exclusion("lora_paths", bool, "an adapter's heads are in the model's order"),
    Exclusion("custom_weight_loader", bool, "it would load heads in the model's order"),
    Exclusion(
        "remote_instance_weight_loader_start_seed_via_transfer_engine", bool, "others would read heads in another order"
    ),
)
"""Those of placement ``hybrid`` besides."""


def check_arguments(arguments: Any, load_policy: str) -> None:
    """Raise for arguments that the plugin does not go together with.

    Args:
        arguments: SGLang's resolved arguments, by attribute.
        load_policy: ``"nr"`` or ``"wr"``.

    Raises:
        ValueError: naming the argument, its value and why.
    """
    _check("DASC_PLAN", EXCLUSIONS, arguments)
    if load_policy == "wr":
        _check("DASC_LOAD_POLICY=wr", REFRESH_EXCLUSIONS, arguments)


def check_hybrid_arguments(arguments: Any) -> None:
    """As :func:`check_arguments`, for a plan with placement ``hybrid``.

    Raises:
        ValueError: naming the argument, its value and why.
    """
    _check("placement hybrid", HYBRID_EXCLUSIONS, arguments)


def _check(setting: str, exclusions: tuple[Exclusion, ...], arguments: Any) -> None:
    for argument, excludes, why in exclusions:
        value = getattr(arguments, argument)
        if excludes(value):
            flag = "--" + argument.replace("_", "-")
            raise ValueError(f"{setting} and {flag} (here {value}) cannot be used together: {why}")
