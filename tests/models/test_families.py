"""What each family's config.json says, in every form it comes in."""

from __future__ import annotations

import contextlib
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.models import FAMILIES, CheckpointError
from dasc.models.config import Config, parse_json, quantization_method
from dasc.models.families import family_of_config, family_of_name

KIMI_LIST = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
GDN = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_value_head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_conv_kernel_dim": 3,
}
LING = {
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
}


def config(**values: object) -> Config:
    return Config(values, "m/config.json")


def geometry(family: str, **values: object):
    return FAMILIES[family].geometry(config(**values))


def bound(family: str, **values: object) -> float | None:
    return FAMILIES[family].lower_bound(config(**values))


def test_every_model_type_finds_its_family() -> None:
    expected = {
        "qwen3_next": "qwen3_next",
        "qwen3_5": "qwen3_5",
        "qwen3_5_text": "qwen3_5",
        "qwen3_5_moe": "qwen3_5",
        "qwen3_5_moe_text": "qwen3_5",
        "qwen4_exp": "qwen3_5",
        "intern_s2_preview": "qwen3_5",
        "interns2_mobius": "qwen3_5",
        "kimi_linear": "kimi_linear",
        "kimi_k3": "kimi_k3",
        "glm5_next": "glm5_next",
        "glm5_next_text": "glm5_next",
        "bailing_hybrid": "ling_v3",
        "bailing_moe_v3": "ling_v3",
        "bailing_moe_v3_vl": "ling_v3",
        "olmo_hybrid": "olmo_hybrid",
    }
    for model_type, family in expected.items():
        assert family_of_config(config(model_type=model_type)).name == family


def test_no_model_type_belongs_to_two_families() -> None:
    types = [model_type for family in FAMILIES.values() for model_type in family.model_types]
    assert len(types) == len(set(types))


def test_gate_inputs_are_the_calibrated_ones_or_the_cautious_lower_value() -> None:
    inputs = {name: family.default_gate_input for name, family in FAMILIES.items()}
    assert inputs.pop("kimi_k3") == 0.8
    assert set(inputs.values()) == {-0.3}
    assert {name for name, family in FAMILIES.items() if family.calibrated} == {"qwen3_next", "kimi_linear", "kimi_k3"}


@pytest.mark.parametrize("model_type", ["llama", "", "Qwen3_Next"])
def test_an_unknown_model_type_lists_the_known_ones(model_type: str) -> None:
    with pytest.raises(CheckpointError, match=rf"m/config.json: unknown model_type '{model_type}'.*kimi_linear"):
        family_of_config(config(model_type=model_type))


@pytest.mark.parametrize("values", [{}, {"model_type": None}, {"model_type": 3}])
def test_a_config_without_model_type_says_so(values: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"m/config.json: model_type must be"):
        family_of_config(config(**values))


def test_an_unknown_family_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"family must be one of qwen3_next, .*got 'gpt'"):
        family_of_name("gpt")


# Layer lists


@pytest.mark.parametrize(
    ("family", "kda", "full"),
    [("kimi_linear", [1, 2, 4], [3, 5]), ("kimi_k3", [1, 2, 4], [3, 5]), ("glm5_next", [0, 1, 3], [2, 4])],
)
def test_kimi_counts_blocks_from_one_and_glm_from_zero(family: str, kda: list[int], full: list[int]) -> None:
    linear = {**KIMI_LIST, "kda_layers": kda, "full_attn_layers": full}
    read = geometry(family, num_hidden_layers=5, linear_attn_config=linear)
    assert read.recurrent_layers == (0, 1, 3)
    del linear["full_attn_layers"]
    assert geometry(family, num_hidden_layers=5, linear_attn_config=linear).recurrent_layers == (0, 1, 3)


@pytest.mark.parametrize(("family", "other_base"), [("kimi_linear", 0), ("kimi_k3", 0), ("glm5_next", 1)])
def test_lists_of_the_other_base_are_refused(family: str, other_base: int) -> None:
    kda = [other_base + block for block in (0, 1, 3)]
    full = [other_base + block for block in (2, 4)]
    for lists in ({"kda_layers": kda, "full_attn_layers": full}, {"kda_layers": full, "full_attn_layers": kda}):
        with pytest.raises(CheckpointError, match=r"linear_attn_config: (kda_layers|full_attn_layers) must be"):
            geometry(family, num_hidden_layers=5, linear_attn_config={**KIMI_LIST, **lists})


def test_block_zero_is_refused_in_a_list_that_starts_at_one() -> None:
    linear = {**KIMI_LIST, "kda_layers": [0, 1, 3]}
    with pytest.raises(CheckpointError, match=r"kda_layers must be 1-based block numbers in \[1, 5\], found \[0, 1, 3"):
        geometry("kimi_linear", num_hidden_layers=5, linear_attn_config=linear)


@pytest.mark.parametrize(
    ("kda", "full"), [([1, 2, 3], [3, 4]), ([1, 2], [4]), ([1, 2, 5], [3, 4]), ([1, True], [3, 4])]
)
def test_lists_that_overlap_leave_blocks_out_or_go_beyond_are_refused(kda: list[int], full: list[int]) -> None:
    linear = {**KIMI_LIST, "kda_layers": kda, "full_attn_layers": full}
    with pytest.raises(CheckpointError, match="linear_attn_config"):
        geometry("kimi_linear", num_hidden_layers=4, linear_attn_config=linear)


def test_lists_may_name_next_token_blocks() -> None:
    linear = {**KIMI_LIST, "kda_layers": [0, 1, 4], "full_attn_layers": [2, 3, 5]}
    read = geometry("glm5_next", num_hidden_layers=4, num_nextn_predict_layers=2, linear_attn_config=linear)
    assert read.recurrent_layers == (0, 1)


@given(
    st.lists(st.booleans(), min_size=1, max_size=12).filter(any),
    st.sampled_from(["kimi_linear", "kimi_k3", "glm5_next"]),
)
def test_lists_and_layer_types_say_the_same(recurrent: list[bool], family: str) -> None:
    first = 0 if family == "glm5_next" else 1
    blocks = range(len(recurrent))
    linear = {
        **KIMI_LIST,
        "kda_layers": [block + first for block in blocks if recurrent[block]],
        "full_attn_layers": [block + first for block in blocks if not recurrent[block]],
    }
    types = ["linear_attention" if r else "indexed_attention" for r in recurrent]
    keys = {"linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4}
    listed = geometry(family, num_hidden_layers=len(recurrent), linear_attn_config=linear)
    assert listed == geometry(family, num_hidden_layers=len(recurrent), layer_types=types, **keys)
    assert listed.recurrent_layers == tuple(block for block in blocks if recurrent[block])


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({}, (0, 1, 2, 4, 5, 6)),
        ({"full_attention_interval": 3}, (0, 1, 3, 4, 6, 7)),
        ({"layer_types": ["full_attention"] * 7 + ["linear_attention"]}, (7,)),
        ({"layer_types": ["linear_attention"] * 8, "full_attention_interval": 2}, tuple(range(8))),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_qwen_layers_come_from_types_then_from_the_interval(
    family: str, values: dict[str, object], layers: tuple[int, ...]
) -> None:
    read = geometry(family, num_hidden_layers=8, **GDN, **values)
    assert read.recurrent_layers == layers
    assert (read.num_value_heads, read.num_key_heads, read.head_v_dim, read.head_k_dim) == (8, 4, 32, 16)
    assert (read.kind, read.conv_width, read.num_blocks) == ("gdn", 3, 8)


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({"layer_group_size": 3}, (0, 1, 3, 4)),
        ({"layer_group_size": [0, 1, 1, 0, 1, 2]}, (1, 2, 4)),
        ({"layer_types": ["full_attention", *["linear_attention"] * 5], "layer_group_size": 3}, (1, 2, 3, 4, 5)),
    ],
)
def test_ling_layers_come_from_a_period_a_list_or_types(values: dict[str, object], layers: tuple[int, ...]) -> None:
    assert geometry("ling_v3", **LING, **values).recurrent_layers == layers


@pytest.mark.parametrize("value", [[1, 1, 1], [1.0] * 6, "3", 0, None])
def test_a_wrong_ling_group_size_is_named(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"m/config.json: layer_group_size must be"):
        geometry("ling_v3", **LING, layer_group_size=value)


def test_kda_families_ignore_the_value_dimension_of_their_full_attention() -> None:
    linear = {**KIMI_LIST, "kda_layers": [1], "full_attn_layers": [2]}
    for family in ("kimi_linear", "kimi_k3"):
        assert geometry(family, num_hidden_layers=2, v_head_dim=99, linear_attn_config=linear).head_v_dim == 16
    ling = geometry("ling_v3", **LING, layer_group_size=3, v_head_dim=99)
    assert (ling.head_k_dim, ling.head_v_dim, ling.num_key_heads) == (16, 16, 4)


def test_a_bailing_model_without_short_convolution_is_lightning_attention() -> None:
    values = {key: value for key, value in LING.items() if key != "short_conv_kernel_size"}
    with pytest.raises(CheckpointError, match=r"m/config.json: .*lightning attention"):
        geometry("ling_v3", **values, layer_group_size=3)


def test_olmo_sizes_left_out_follow_from_the_attention_heads() -> None:
    read = geometry("olmo_hybrid", num_hidden_layers=8, num_attention_heads=30, hidden_size=3840)
    assert (read.num_key_heads, read.num_value_heads, read.head_k_dim, read.head_v_dim) == (30, 30, 96, 192)
    assert (read.recurrent_layers, read.conv_width) == ((0, 1, 2, 4, 5, 6), 4)
    small = geometry("olmo_hybrid", num_hidden_layers=3, num_attention_heads=2, hidden_size=64)
    assert small.recurrent_layers == (0, 1)


@pytest.mark.parametrize(
    "types", [["linear_attention"] * 7, ["linear_attention"] * 9, ["mamba"] * 8, ["linear_attention", 3] * 4, "linear"]
)
def test_wrong_layer_types_are_named(types: object) -> None:
    with pytest.raises(CheckpointError, match=r"m/config.json: layer_types must be a list"):
        geometry("qwen3_next", num_hidden_layers=8, **GDN, layer_types=types)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_or_wrong_number_of_blocks_is_named(family: str) -> None:
    values = {**GDN, **LING, "hidden_size": 64, "linear_attn_config": {**KIMI_LIST, "kda_layers": [1]}}
    for wrong in (None, 0, -1, True, 8.0, "8", 10**12):
        with pytest.raises(CheckpointError, match=r"m/config.json: num_hidden_layers must be"):
            geometry(family, **{**values, "layer_group_size": 3, "num_hidden_layers": wrong})


@pytest.mark.parametrize("width", [65, 10**40])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_convolution_that_is_not_short_is_refused(family: str, width: int) -> None:
    linear = {**KIMI_LIST, "kda_layers": [1], "short_conv_kernel_size": width}
    values = {**GDN, **LING, "hidden_size": 64, "layer_group_size": 3, "linear_attn_config": linear}
    values |= {"linear_conv_kernel_dim": width, "short_conv_kernel_size": width}
    with pytest.raises(CheckpointError, match=r"_(size|dim) must be the width of a short convolution, at most 64"):
        geometry(family, **values)


@pytest.mark.parametrize("key", GDN)
def test_every_missing_size_is_named(key: str) -> None:
    values = {name: value for name, value in GDN.items() if name != key}
    with pytest.raises(CheckpointError, match=f"m/config.json: {key} must be an integer of at least 1, found nothing"):
        geometry("qwen3_next", num_hidden_layers=8, **values)


# Gates


def test_softplus_families_have_no_bound() -> None:
    for family in ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"):
        assert bound(family, linear_attn_config=KIMI_LIST) is None


def test_kimi_k3_has_the_bound_of_its_config_and_must_have_one() -> None:
    assert bound("kimi_k3", linear_attn_config={"gate_lower_bound": -5}) == -5.0
    for wrong in ({}, {"gate_lower_bound": None}, {"gate_lower_bound": 0}, {"gate_lower_bound": -(10**400)}):
        with pytest.raises(CheckpointError, match="linear_attn_config: gate_lower_bound must be"):
            bound("kimi_k3", linear_attn_config=wrong)


def test_a_kimi_linear_config_with_a_bound_is_not_taken_for_softplus() -> None:
    with pytest.raises(CheckpointError, match="gate_lower_bound must be absent in kimi_linear"):
        bound("kimi_linear", linear_attn_config={"gate_lower_bound": -5.0})


def test_the_bound_of_ling_counts_only_with_its_safe_gate() -> None:
    assert bound("ling_v3", kda_safe_gate=True, kda_lower_bound=-4.0) == -4.0
    assert bound("ling_v3", kda_safe_gate=False, kda_lower_bound=-4.0) is None
    for wrong in ({}, {"kda_safe_gate": True}, {"kda_safe_gate": 1}, {"kda_safe_gate": True, "kda_lower_bound": 2}):
        with pytest.raises(CheckpointError, match=r"m/config.json: kda_"):
            bound("ling_v3", **wrong)


# Tensor names


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model.model.", "language_model."])
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_decay_tensors_are_found_under_every_prefix(prefix: str, name: str) -> None:
    modules = {family.name: family.module for family in FAMILIES.values()}
    assert modules["ling_v3"] == "attention"
    for family in FAMILIES.values():
        assert family.match(f"{prefix}layers.12.{family.module}.{name}") == (12, name)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.self_attn.A_log",
        "model.mtp.layers.0.self_attn.A_log",
        "model.layers.0.linear_attn.A_log",
        "model.layers.0.self_attn.A_log.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "xmodel.layers.0.self_attn.A_log",
        "model.layers.x.self_attn.A_log",
        "model.layers.00.self_attn.A_log",
        "model.layers.01.self_attn.A_log",
        "model.layers.\u0661.self_attn.A_log",
        "model.layers.1000000.self_attn.A_log",
        "visual.layers.0.self_attn.A_log",
    ],
)
def test_other_tensors_are_not_taken_for_decay_tensors(name: str) -> None:
    assert FAMILIES["kimi_linear"].match(name) is None


# JSON and quantisation


@pytest.mark.parametrize("data", [b"", b"{", b"\xff{}", b"[]", b"3", b"[" * 10**5])
def test_what_is_not_one_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^m/config.json: "):
        parse_json(data, "m/config.json")


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("data", [b"{}", b"{"])
def test_parsing_leaves_the_garbage_collector_as_it_was(enabled: bool, data: bytes) -> None:
    if not enabled:
        gc.disable()
    try:
        with contextlib.suppress(CheckpointError):
            parse_json(data, "x")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_key_given_twice_is_refused_where_keys_must_be_unique() -> None:
    for data in (b'{"a": 1, "a": 2}', b'{"c": {"a": 1, "a": 1}}'):
        parse_json(data, "x")
        with pytest.raises(CheckpointError, match=r"^x: the key 'a' is given twice"):
            parse_json(data, "x", unique_keys=True)


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ({"quantization_config": {}}, None),
        ({"quantization_config": {"bits": 4}}, "unnamed"),
        ({"quantization_config": {"quant_method": None, "bits": 4}}, "unnamed"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {}, "compression_config": {"format": "pack-quantized"}}, "unnamed"),
        ({"quantization_config": {}, "text_config": {"compression_config": {"quant_method": "fp8"}}}, "fp8"),
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}, "compressed-tensors"),
        ({"text_config": {}}, None),
    ],
)
def test_the_quantisation_method_is_read_from_every_place(values: dict[str, object], method: str | None) -> None:
    assert quantization_method(config(**values)) == method
