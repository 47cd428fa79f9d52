"""A readable hybrid language model that runs what transformers writes for small Qwen3-Next, OLMo-Hybrid and Kimi-Linear
models.

It is made for serving: sequences of a batch come packed, states and KV lie in pools of the caller, and a compressed
checkpoint is refreshed within the request's own prefill (section 4.2).
"""

from dasc.models.hybrid.attention import AttentionConfig, GroupedAttentionConfig, LatentAttentionConfig
from dasc.models.hybrid.batch import Batch, KVPool, SequenceInput, StatePool, WindowKV
from dasc.models.hybrid.config import HybridConfig
from dasc.models.hybrid.config_form import config_json, read_config
from dasc.models.hybrid.feed_forward import ExpertsConfig
from dasc.models.hybrid.files import load_hybrid, save_hybrid
from dasc.models.hybrid.model import HybridModel
from dasc.models.hybrid.ops import DeltaRuleOps
from dasc.models.hybrid.permute import permute_weights
from dasc.models.hybrid.random_model import random_hybrid

__all__ = [
    "AttentionConfig",
    "Batch",
    "DeltaRuleOps",
    "ExpertsConfig",
    "GroupedAttentionConfig",
    "HybridConfig",
    "HybridModel",
    "KVPool",
    "LatentAttentionConfig",
    "SequenceInput",
    "StatePool",
    "WindowKV",
    "config_json",
    "load_hybrid",
    "permute_weights",
    "random_hybrid",
    "read_config",
    "save_hybrid",
]
