"""The registry of model families. A new family is one short module here and one entry below."""

from __future__ import annotations

from dasc.models.config import Config
from dasc.models.errors import CheckpointError
from dasc.models.families.family import Family
from dasc.models.families.glm5_next import GLM5_NEXT
from dasc.models.families.kimi_k3 import KIMI_K3
from dasc.models.families.kimi_linear import KIMI_LINEAR
from dasc.models.families.ling_v3 import LING_V3
from dasc.models.families.olmo_hybrid import OLMO_HYBRID
from dasc.models.families.qwen3_5 import QWEN3_5
from dasc.models.families.qwen3_next import QWEN3_NEXT

__all__ = ["FAMILIES", "Family", "family_of_config", "family_of_name"]

FAMILIES: dict[str, Family] = {
    family.name: family for family in (QWEN3_NEXT, QWEN3_5, KIMI_LINEAR, KIMI_K3, GLM5_NEXT, LING_V3, OLMO_HYBRID)
}


def family_of_name(name: str) -> Family:
    """The family registered under ``name``, e.g. ``"kimi_linear"``.

    Raises:
        ValueError: listing the known names.
    """
    if name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def family_of_config(config: Config) -> Family:
    """The family of a config.json, by its top ``model_type``.

    Raises:
        CheckpointError: listing the known model types.
    """
    if not config.has("model_type"):
        raise config.error("model_type", "the name of a model type")
    model_type = config.text("model_type")
    known = {name: family for family in FAMILIES.values() for name in family.model_types}
    if model_type not in known:
        raise CheckpointError(f"{config.where}: unknown model_type {model_type!r}; known are {', '.join(known)}")
    return known[model_type]
