import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from dasc.geometry import DtypePolicy, Quantization, StateGeometry
from dasc.models import CheckpointError, read_checkpoint
from dasc.models.synthetic import example_gate, write_checkpoint
from dasc.plan import PlanError, SelectionPlan
from dasc.planner import build_plan
from dasc.sglang.config import Config
from dasc.sglang.plans import DEFAULT_W_MAX, load_plan, placement_mode, plan_summary
from dasc.sglang.served import ServedState

GEOMETRIES = {
    "qwen3_next": StateGeometry("qwen3_next", "gdn", 4, (0, 1, 2), 8, 4, 16, 32),
    "kimi_linear": StateGeometry("kimi_linear", "kda", 4, (0, 1, 2), 4, 4, 32, 32),
}
FULL = DtypePolicy(torch.float32, torch.float32)


def model(folder: Path, family: str = "kimi_linear", seed: int = 0, quantization: str | None = None) -> str:
    geometry = GEOMETRIES[family]
    write_checkpoint(folder, family, example_gate(geometry, seed), geometry, quantization=quantization)
    return str(folder)


def saved_plan(folder: Path, source: str, w_max: int = 16, **options: Any) -> str:
    path = folder / f"{w_max}.dasc"
    build_plan(read_checkpoint(source), w_max, **options).save(path)
    return str(path)


def served(geometry: StateGeometry, ranks: int = 1, **changes: Any) -> ServedState:
    """What SGLang would say of a model of this geometry."""
    local = geometry.shard(ranks)
    conv = (local.conv_channels, local.conv_width - 1)
    params = SimpleNamespace(
        shape=SimpleNamespace(
            temporal=local.state_shape[1:],
            conv=[conv[::-1] if geometry.kind == "kda" else conv],
            **({"conv_slice_axis": 1} if geometry.kind == "kda" else {}),
        ),
        dtype=SimpleNamespace(temporal=torch.float32, conv=torch.bfloat16),
        is_kda=geometry.kind == "kda",
    )
    params.shape.__dict__.update({k: v for k, v in changes.items() if k in ("temporal", "conv")})
    params.dtype.__dict__.update(changes.get("dtype", {}))
    params.is_kda = changes.get("is_kda", params.is_kda)
    return ServedState.of(params, changes.get("layers", geometry.recurrent_layers), ranks)


@pytest.mark.parametrize(("family", "quantized"), list(zip(GEOMETRIES, ("int8", "int4", None))))
def test_auto_makes_the_plan_that_the_planner_makes_with_the_servers_dtypes(
    tmp_path: Path, family: str, quantized: Quantization | None
):
    source = model(tmp_path / "model", family)
    config = Config(plan="auto", w_max=64, layout="padded", int8=quantized == "int8", int4=quantized == "int4")
    plan = load_plan(config, source, None, 2, FULL)
    dtypes = DtypePolicy(torch.float32, torch.float32, quantized)
    assert plan.same_as(build_plan(read_checkpoint(source), 64, ranks=(2,), layout="padded", dtypes=dtypes))


def test_auto_without_a_cutoff_takes_the_most_cautious_of_the_papers(tmp_path: Path):
    assert load_plan(Config(plan="auto"), model(tmp_path), None, 1, FULL).w_max == DEFAULT_W_MAX == 16


def test_a_plan_file_is_taken_as_it_is_where_nothing_else_is_set(tmp_path: Path):
    source = model(tmp_path / "model")
    path = saved_plan(tmp_path, source, 64, ranks=(1, 2), layout="padded", dtypes=DtypePolicy(quantized="int8"))
    assert load_plan(Config(plan=path), source, None, 2, FULL).same_as(SelectionPlan.load(path))
    agreeing = Config(plan=path, w_max=64, layout="padded", int8=True, placement="off")
    assert load_plan(agreeing, source, None, 2, FULL).same_as(SelectionPlan.load(path))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"w_max": 64}, "DASC_W_MAX is 64, the plan has 16"),
        ({"layout": "padded"}, "DASC_LAYOUT is padded, the plan has ragged"),
        ({"int8": True}, "DASC_INT8 is True, the plan has False"),
        ({"int4": True}, "DASC_INT4 is True, the plan has False"),
        ({"placement": "off"}, "DASC_PLACEMENT is off, the plan has storage"),
    ],
)
def test_a_setting_that_is_not_the_plans_is_refused(tmp_path: Path, setting: dict[str, Any], message: str):
    source = model(tmp_path / "model")
    path = saved_plan(tmp_path, source, ranks=(2,), mode="storage")
    with pytest.raises(PlanError, match=f"16.dasc: {message}: leave them unset"):
        load_plan(Config(plan=path, **setting), source, None, 2, FULL)


@pytest.mark.parametrize("quantized", ["int8", "int4"])
def test_codes_that_are_switched_off_are_a_setting_too(tmp_path: Path, quantized: Quantization):
    source = model(tmp_path / "model")
    path = saved_plan(tmp_path, source, dtypes=DtypePolicy(quantized=quantized))
    off = Config(plan=path, **{quantized: False})
    with pytest.raises(PlanError, match=f"DASC_{quantized.upper()} is False, the plan has True"):
        load_plan(off, source, None, 1, FULL)


def test_a_plan_for_other_weights_is_refused(tmp_path: Path):
    path = saved_plan(tmp_path, model(tmp_path / "one", seed=0))
    with pytest.raises(PlanError, match=r"the plan was made for the weights sha256:.*, the model has sha256:"):
        load_plan(Config(plan=path), model(tmp_path / "other", seed=1), None, 1, FULL)


def test_a_plan_for_another_model_is_refused(tmp_path: Path):
    path = saved_plan(tmp_path, model(tmp_path / "one", "qwen3_next"))
    with pytest.raises(PlanError, match="the plan was made for another model: family 'qwen3_next'"):
        load_plan(Config(plan=path), model(tmp_path / "other"), None, 1, FULL)


def test_a_plan_without_a_placement_for_as_many_ranks_is_refused(tmp_path: Path):
    source = model(tmp_path / "model")
    path = saved_plan(tmp_path, source, ranks=(1, 2))
    with pytest.raises(ValueError, match="no placement for 4 ranks; it has: 1, 2"):
        load_plan(Config(plan=path), source, None, 4, FULL)


def test_packed_weights_are_refused_a_placement_that_reorders_heads(tmp_path: Path):
    source = model(tmp_path, quantization="mxfp4")
    with pytest.raises(ValueError, match="packed"):
        load_plan(Config(plan="auto", placement="hybrid"), source, None, 2, FULL)
    assert placement_mode(load_plan(Config(plan="auto", placement="storage"), source, None, 2, FULL), 2) == "storage"


def test_heads_that_the_ranks_cannot_share_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"4 key heads .* cannot be shared equally by 3 ranks"):  # fault 28
        load_plan(Config(plan="auto"), model(tmp_path), None, 3, FULL)


def test_a_model_of_the_hub_is_read_from_its_local_copy_where_there_is_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copy = tmp_path / "models--some--model"
    model(copy / "snapshots" / ("a" * 40))
    (copy / "refs").mkdir()
    (copy / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load_plan(Config(plan="auto"), "some/model", None, 1, FULL).family == "kimi_linear"
    with pytest.raises(
        CheckpointError, match="some/other is not in the local cache of the Hub, and HF_HUB_OFFLINE is set"
    ):
        load_plan(Config(plan="auto"), "some/other", None, 1, FULL)


def test_a_missing_plan_and_a_missing_model_are_refused_by_name(tmp_path: Path):
    with pytest.raises(PlanError, match=r"nowhere.dasc: cannot be read"):
        load_plan(Config(plan=str(tmp_path / "nowhere.dasc")), model(tmp_path / "model"), None, 1, FULL)
    with pytest.raises(CheckpointError, match=r"expected a config\.json"):
        load_plan(Config(plan="auto"), str(tmp_path), None, 1, FULL)


@pytest.mark.parametrize("family", list(GEOMETRIES))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_fits_the_server_of_its_model(tmp_path: Path, family: str, ranks: int):
    state = served(GEOMETRIES[family], ranks)
    state.check(load_plan(Config(plan="auto"), model(tmp_path, family), None, ranks, state.dtypes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_kda": True}, "the kind of recurrence is gdn in the plan, kda in the server"),
        ({"layers": (0, 1)}, r"recurrent layers is \(0, 1, 2\) in the plan, \(0, 1\) in the server"),
        ({"temporal": (8, 32, 16)}, r"the state of a layer is \(8, 16, 32\) in the plan, \(8, 32, 16\) in the server"),
        ({"conv": [(384, 4)]}, "convolution rows is"),
        ({"conv": [(128, 3), (256, 3)]}, "convolution rows is"),
        ({"dtype": {"temporal": torch.bfloat16}}, "the temporal dtype is torch.float32 in the plan, torch.bfloat16"),
        ({"dtype": {"conv": torch.float32}}, "the convolution dtype is torch.bfloat16 in the plan, torch.float32"),
    ],
)
def test_a_server_with_another_state_is_refused_and_told_what_differs(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    """Fault 24 and fault 25: dtypes, and an exchange of d_k and d_v."""
    plan = load_plan(Config(plan="auto"), model(tmp_path, "qwen3_next"), None, 1, DtypePolicy())
    served(GEOMETRIES["qwen3_next"]).check(plan)
    with pytest.raises(PlanError, match=f"does not fit the served model on 1 ranks: {message}"):
        served(GEOMETRIES["qwen3_next"], **changes).check(plan)


def test_ranks_that_read_different_plans_have_different_summaries(tmp_path: Path):
    source = model(tmp_path / "model")
    options = [
        Config(plan="auto"),
        Config(plan="auto", w_max=64),
        Config(plan="auto", layout="padded"),
        Config(plan="auto", int8=True),
        Config(plan="auto", int4=True),
        Config(plan="auto", placement="storage"),
        Config(plan="auto", placement="hybrid"),
    ]
    summaries = [plan_summary(load_plan(config, source, None, 2, FULL), 2) for config in options]
    assert all(a != b for i, a in enumerate(summaries) for b in summaries[:i])
    first = load_plan(options[0], source, None, 2, FULL)
    mask, windows = first.mask.flip(1), first.windows.flip(1)
    assert plan_summary(dataclasses.replace(first, mask=mask, windows=windows, placements={}), 1) != plan_summary(
        first, 1
    )
    other = load_plan(options[0], model(tmp_path / "other", seed=1), None, 2, FULL)
    assert plan_summary(other, 2) != summaries[0] == plan_summary(load_plan(options[0], source, None, 2, FULL), 2)
