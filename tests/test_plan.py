"""The plan file: exact, written whole or not at all, and refused when anything in it is wrong."""

import dataclasses
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import dasc.plan
from dasc.geometry import DtypePolicy, StateGeometry
from dasc.plan import PlanError, SelectionPlan
from dasc.reference.placement import place
from tests.masks import gdn, kda, seeded_mask

FINGERPRINT = "sha256:" + "0123456789abcdef" * 4


def plan_arguments(
    geometry: StateGeometry, seed: int = 0, mode="storage", degrees=(1, 2), **changes: Any
) -> dict[str, Any]:
    w_max = changes.get("w_max", 16)
    mask = seeded_mask(geometry, seed)
    gen = torch.Generator().manual_seed(seed)
    windows = torch.randint(4, w_max + 1, mask.shape, generator=gen).masked_fill(mask, 0)
    return {
        "family": geometry.family,
        "geometry": geometry,
        "epsilon": 1e-3,
        "gate_input": -0.3,
        "w_max": w_max,
        "mask": mask,
        "windows": windows,
        "fingerprint": FINGERPRINT,
        "placements": {p: place(geometry, mask, p, mode) for p in degrees},
        **changes,
    }


def make_plan(geometry: StateGeometry | None = None, **options: Any) -> SelectionPlan:
    return SelectionPlan(**plan_arguments(geometry or gdn(), **options))


# --- round trip -------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from([gdn(v_dim=4), gdn(layers=1, key_heads=4, bundle=1, v_dim=2), kda(v_dim=4), kda(3, 2, 6, k_dim=1)]),
    st.sampled_from(["off", "storage", "hybrid"]),
    st.sampled_from([(), (1,), (2, 1)]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
    st.integers(4, 2**40),
    st.builds(
        DtypePolicy,
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.sampled_from([torch.bfloat16, torch.float16]),
        st.sampled_from([None, "int8", "int4"]),
    ),
    st.integers(0, 2**31 - 1),
)
def test_a_plan_comes_back_exactly(tmp_path_factory, geometry, mode, degrees, gate_input, epsilon, w_max, dtypes, seed):
    path = tmp_path_factory.mktemp("plan") / "a.plan"
    plan = make_plan(
        geometry,
        seed=seed,
        mode=mode,
        degrees=degrees,
        gate_input=gate_input,
        epsilon=epsilon,
        w_max=w_max,
        dtypes=dtypes,
    )
    plan.save(path)
    loaded = SelectionPlan.load(path)
    assert loaded.same_as(plan)
    assert (loaded.gate_input, loaded.epsilon, loaded.w_max) == (gate_input, epsilon, w_max)
    assert (loaded.geometry, loaded.dtypes, loaded.layout) == (geometry, dtypes, "ragged")
    assert torch.equal(loaded.mask, plan.mask)
    assert torch.equal(loaded.windows, plan.windows)
    assert loaded.placements.keys() == set(degrees)
    assert all(loaded.placements[p].same_as(plan.placements[p]) for p in degrees)
    assert loaded.format_version == SelectionPlan.format_version == 2


def test_equal_plans_give_equal_bytes_whatever_their_tensors_strides(tmp_path: Path):
    arguments = plan_arguments(kda(layers=3, heads=4), degrees=(4, 1, 2), mode="hybrid")
    strided = {name: arguments[name].T.contiguous().T for name in ("mask", "windows")}
    placements = dict(reversed(arguments["placements"].items()))
    for i, options in enumerate((arguments, {**arguments, **strided, "placements": placements})):
        SelectionPlan(**options).save(tmp_path / str(i))
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


def test_any_family_name_survives(tmp_path: Path):
    geometry = dataclasses.replace(gdn(), family='weiß "\\\n\x1f\ud800')
    make_plan(geometry).save(tmp_path / "a")
    assert SelectionPlan.load(tmp_path / "a").family == geometry.family


def test_a_padded_plan_gives_padded_layouts(tmp_path: Path):
    make_plan(layout="padded", mode="off").save(tmp_path / "a")
    plan = SelectionPlan.load(tmp_path / "a")
    assert [type(layout).__name__ for layout in plan.layouts(2)] == ["PaddedLayout"] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 2e-3},
        {"gate_input": -0.25},
        {"w_max": 17},
        {"fingerprint": "sha256:" + "0" * 64},
        {"dtypes": DtypePolicy(quantized="int8")},
        {"placements": {}},
        {"mode": "off"},
        {"seed": 1},
    ],
)
def test_plans_that_differ_anywhere_are_not_the_same(change: dict[str, Any]):
    base = plan_arguments(gdn())
    changed = plan_arguments(gdn(), **change)
    if change.keys() == {"w_max"}:
        changed["windows"] = base["windows"]
    assert SelectionPlan(**base).same_as(SelectionPlan(**base))
    assert not SelectionPlan(**base).same_as(SelectionPlan(**changed))


def test_a_plan_does_not_change_with_the_tensors_it_was_made_from():
    arguments = plan_arguments(gdn(), mode="hybrid")
    plan, same = SelectionPlan(**arguments), SelectionPlan(**arguments)
    arguments["mask"].logical_not_()
    arguments["windows"].zero_()
    arguments["placements"][2].head_order.zero_()
    arguments["placements"].clear()
    for layer_plan in (plan, same):
        assert SelectionPlan(**{f.name: getattr(layer_plan, f.name) for f in dataclasses.fields(plan)}).same_as(plan)


def test_a_loaded_plan_does_not_change_with_its_file(tmp_path: Path):
    path = tmp_path / "a"
    plan = make_plan(kda(), mode="hybrid")
    plan.save(path)
    loaded = SelectionPlan.load(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert loaded.same_as(plan)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "a"
    geometry = dataclasses.replace(gdn(layers=1, key_heads=2, bundle=2), family="\xe9")  # hex digits of either case
    make_plan(geometry, seed=5, mode="hybrid", degrees=(2,)).save(path)
    return path.read_bytes()


def refused(path: Path, data: bytes | None = None) -> str:
    """Why ``path``, with ``data`` written to it first, is refused."""
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(PlanError) as caught:
        SelectionPlan.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_every_flipped_bit_is_refused(tmp_path: Path, small_file: bytes):
    path = tmp_path / "a"
    path.write_bytes(small_file)
    with open(path, "r+b", buffering=0) as file:  # a write in place is many times faster than a new file
        for i, byte in enumerate(small_file):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), i)
                refused(path)
            os.pwrite(file.fileno(), bytes([byte]), i)
    SelectionPlan.load(path)


def test_every_truncation_and_any_addition_is_refused(tmp_path: Path, small_file: bytes):
    path = tmp_path / "a"
    path.write_bytes(small_file)
    for length in reversed(range(len(small_file))):
        os.truncate(path, length)
        refused(path)
    for more in (b"\0", b" ", small_file):
        refused(path, small_file + more)


def test_the_checksum_covers_how_the_bytes_are_read(tmp_path: Path, small_file: bytes):
    for as_written, other in ((b'"BOOL"', b'"U8"  '), (b'"shape":[1,4]', b'"shape":[4,1]'), (b'"mask"', b'"musk"')):
        assert as_written in small_file
        assert "checksum" in refused(tmp_path / "a", small_file.replace(as_written, other))


@given(st.data())
def test_overwritten_stretches_are_refused(tmp_path_factory, small_file: bytes, data: st.DataObject):
    start = data.draw(st.integers(0, len(small_file) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=min(40, len(small_file) - start)))
    changed = small_file[:start] + junk + small_file[start + len(junk) :]
    if changed != small_file:
        refused(tmp_path_factory.mktemp("junk") / "a", changed)


def test_what_is_no_plan_is_refused_in_one_line_that_names_the_file(tmp_path: Path):
    path = tmp_path / "a"
    assert "not a safetensors file" in refused(path, b"")
    assert "not a safetensors file" in refused(path, b"# a text file\n" * 10)
    foreign = {"weight": torch.zeros(2, 2)}
    assert "not a dasc plan" in refused(path, safetensors.torch.save(foreign))
    for metadata in ({"format": "pt"}, {"format": "pt", "dasc_plan": "{}"}):
        assert "not a dasc plan" in refused(path, safetensors.torch.save(foreign, metadata))
    for odd in (
        b"[]",
        b"{}",
        b'{"__metadata__":3}',
        b'{"__metadata__":["dasc_plan"]}',
        b'{"__metadata__":{"dasc_plan":3}}',
    ):
        assert "not a" in refused(path, len(odd).to_bytes(8, "little") + odd)
    refused(path, b"\xff" * 8 + b"{}")
    odd = b'{"__metadata__":{"dasc_plan":"{}"},"a":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[0,2]}}'
    refused(path, len(odd).to_bytes(8, "little") + odd + b"\0\0")
    for text in ("", "[]", "3", "{}", "[" * 100_000, '{"format_version":NaN}'):
        assert "\n" not in refused(path, safetensors.torch.save(foreign, {"dasc_plan": text}))
    with pytest.raises(PlanError, match=r"missing\.plan: cannot be read"):
        SelectionPlan.load(tmp_path / "missing.plan")
    with pytest.raises(PlanError, match="cannot be read"):
        SelectionPlan.load(tmp_path)


# --- files with a good checksum and wrong contents --------------------------------------------------------------------


def contents(**options: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    fields, tensors = dasc.plan._contents(make_plan(**options))
    return json.loads(json.dumps(fields)), tensors


def crafted(path: Path, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """Write contents with a checksum that fits, and return why they are refused."""
    dasc.plan._write(path, fields, tensors)
    return refused(path)


def test_untouched_contents_load(tmp_path: Path):
    fields, tensors = contents(geometry=kda(), mode="hybrid")
    dasc.plan._write(tmp_path / "a", fields, tensors)
    assert SelectionPlan.load(tmp_path / "a").same_as(make_plan(kda(), mode="hybrid"))


def test_a_newer_format_asks_for_an_upgrade(tmp_path: Path):
    fields, tensors = contents()
    fields["format_version"] = 3
    fields["new"] = "field"
    assert "format version 3 is newer than 2" in crafted(tmp_path / "a", fields, tensors)
    assert "upgrade dasc" in crafted(tmp_path / "a", fields, tensors)
    for version in (1, 0, -1, "2", None, 2.5, True):
        crafted(tmp_path / "a", {**fields, "format_version": version}, tensors)


def paths_of(value: Any, at: tuple = ()) -> list[tuple]:
    """The place of every value inside JSON contents."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, child in items for path in paths_of(child, (*at, key)))]


def test_no_field_may_be_missing_added_or_of_another_type(tmp_path: Path):
    original, tensors = contents(geometry=kda(layers=2, heads=2))
    wrong_values = [None, "x", 1.5, -1, True, [], {}, [[]], 10**400]
    for *at, key in paths_of(original)[1:]:
        for value in ["remove", *wrong_values]:
            fields = json.loads(json.dumps(original))
            parent = fields
            for step in at:
                parent = parent[step]
            if type(value) is type(parent[key]) and value in (None, 1.5, True, 10**400):
                continue  # not wrong in itself
            if value == "remove":
                del parent[key]
            else:
                parent[key] = value
            assert "\n" not in crafted(tmp_path / "a", fields, tensors), (at, key, value)
    for path in paths_of(original):
        fields = json.loads(json.dumps(original))
        value = fields
        for step in path:
            value = value[step]
        if isinstance(value, dict):
            value["extra"] = 1
            crafted(tmp_path / "a", fields, tensors)


def test_a_dtype_has_one_name(tmp_path: Path):
    fields, tensors = contents()
    fields["dtypes"]["temporal"] = "float"
    assert "does not have" in crafted(tmp_path / "a", fields, tensors)


def test_a_family_is_a_name(tmp_path: Path):
    fields, tensors = contents()
    fields["family"] = fields["geometry"]["family"] = 5
    assert "family must be a string" in crafted(tmp_path / "a", fields, tensors)


def test_placements_are_listed_once_in_order(tmp_path: Path):
    fields, tensors = contents(degrees=(1, 2))
    for placements in (fields["placements"][::-1], fields["placements"] + fields["placements"][1:]):
        assert "does not have" in crafted(tmp_path / "a", {**fields, "placements": placements}, tensors)


def test_tensors_must_be_the_plans_own(tmp_path: Path):
    fields, tensors = contents(geometry=kda(), mode="hybrid")
    path = tmp_path / "a"
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        assert "missing" in crafted(path, fields, rest)
        assert "must be" in crafted(path, fields, {**tensors, name: tensors[name].float()})
        assert "must be" in crafted(path, fields, {**tensors, name: tensors[name].bfloat16()})
        assert "must be" in crafted(path, fields, {**tensors, name: tensors[name][None]})
    assert "does not have" in crafted(path, fields, {**tensors, "tp4.moves": torch.empty(0, 4)})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mask", "windows must be 0|local units"),
        ("tp2.head_order", "every head once"),
        ("tp2.moves", "moves must take"),
    ],
)
def test_consistent_checksums_do_not_excuse_inconsistent_tensors(tmp_path: Path, name: str, message: str):
    fields, tensors = contents(geometry=kda(), mode="storage")
    changed = tensors[name].clone()
    assert changed.numel()
    changed.view(-1)[0] = not changed.view(-1)[0] if name == "mask" else changed.view(-1)[0] + 1
    assert re.search(message, crafted(tmp_path / "a", fields, {**tensors, name: changed}))


# --- validation of a plan made directly -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "other"}, "family must be 'small_gdn'"),
        ({"epsilon": 0.0}, "epsilon must be between 0 and 1"),
        ({"epsilon": 1}, "epsilon must be between 0 and 1"),
        ({"epsilon": float("nan")}, "epsilon must be a finite number"),
        ({"epsilon": "0.1"}, "epsilon must be a finite number"),
        ({"gate_input": float("inf")}, "gate_input must be a finite number"),
        ({"gate_input": True}, "gate_input must be a finite number"),
        ({"gate_input": 10**400}, "gate_input must be a finite number"),
        ({"w_max": 16.0}, "w_max must be an integer of at least 4"),
        ({"w_max": True}, "w_max must be an integer of at least 4"),
        ({"w_max": 3}, "w_max must be an integer of at least 4 tokens, got 3"),
        ({"w_max": 0}, "w_max must be an integer of at least 4"),
        ({"w_max": 4}, "windows of local units must be 4 to w_max = 4"),
        ({"fingerprint": "sha256:12"}, "fingerprint"),
        ({"fingerprint": FINGERPRINT.upper()}, "fingerprint"),
        ({"fingerprint": FINGERPRINT + "\n"}, "fingerprint"),
        ({"fingerprint": None}, "fingerprint"),
        ({"layout": "flat"}, "layout must be 'ragged' or 'padded', got 'flat'"),
        ({"layout": "padded"}, r"placements\[1\] balances storage"),
        ({"dtypes": DtypePolicy(quantized="int4")}, "head_v_dim must be even for INT4, got 3"),
        ({"mask": torch.ones(2, 4)}, r"mask must be torch.bool \(2, 4\)"),
        ({"mask": torch.ones(2, 5, dtype=torch.bool)}, r"mask must be torch.bool \(2, 4\)"),
        ({"mask": [[True]]}, "mask must be torch.bool"),
        ({"windows": torch.zeros(2, 4)}, r"windows must be torch.int64 \(2, 4\)"),
        ({"windows": torch.full((2, 4), 8)}, "windows must be 0 for global units"),
        ({"windows": torch.zeros(2, 4, dtype=torch.int64)}, "windows of local units must be 4 to w_max = 16"),
        ({"mask": torch.empty(2, 4, dtype=torch.bool, device="meta")}, "mask must be on the CPU"),
    ],
)
def test_wrong_fields_are_refused(change: dict[str, Any], message: str):
    arguments = plan_arguments(gdn())
    with pytest.raises(ValueError, match=message):
        SelectionPlan(**{**arguments, **change})


def test_numbers_are_kept_as_floats():
    assert isinstance(make_plan(gate_input=-1).gate_input, float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 1}, "ranks must be 2, got 1"),
        ({"mode": "none"}, "mode must be one of"),
        ({"mode": "off"}, "stored_units must be"),
        ({"head_order": torch.zeros(2, 4, dtype=torch.int64)}, "every head once"),
        ({"local_units": (0, 0)}, "local_units must be"),
        ({"stored_units": (0, 0)}, "stored_units must be"),
        ({"slot_units": 99}, "slot_units must be"),
        ({"moves": torch.zeros(1, 4)}, "moves must be torch.int64"),
        ({"moves": torch.zeros(2, 4, dtype=torch.int64)}, "moves must be torch.int64"),
        ({"moves": torch.zeros(1, 4, dtype=torch.int64)}, "moves must take each excess unit"),
    ],
)
def test_placements_that_the_mask_does_not_give_are_refused(change: dict[str, Any], message: str):
    geometry = kda(layers=2, heads=4, k_dim=1)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    windows = torch.full((2, 4), 4).masked_fill(mask, 0)
    placement = dataclasses.replace(place(geometry, mask, 2, "storage"), **change)
    if message.endswith("excess unit"):
        assert place(geometry, mask, 2, "storage").moved_units == 1
    arguments = plan_arguments(geometry, mask=mask, windows=windows, placements={2: placement})
    with pytest.raises(ValueError, match=rf"^placements\[2\]: .*{message}"):
        SelectionPlan(**arguments)


def test_placements_on_ranks_that_cannot_share_the_heads_are_refused():
    """Fault 28."""
    placement = dataclasses.replace(place(gdn(), seeded_mask(gdn(), 0), 2), ranks=4)
    with pytest.raises(ValueError, match="cannot be shared equally by 4 ranks"):
        make_plan(placements={4: placement})


def test_a_plan_belongs_to_its_weights_and_geometry():
    plan = make_plan()
    plan.check_weights(FINGERPRINT)
    other = "sha256:" + "0" * 64
    with pytest.raises(PlanError, match=f"weights {FINGERPRINT}, the model has {other}"):
        plan.check_weights(other)
    plan.check_geometry(gdn())
    with pytest.raises(PlanError, match=r"num_value_heads 4 against 8.*num_key_heads 2 against 4"):
        plan.check_geometry(gdn(key_heads=4))
    for name, value in (("family", "x"), ("conv_width", 3), ("head_v_dim", 7), ("recurrent_layers", (0, 1))):
        with pytest.raises(PlanError, match=f"model: {name} "):
            plan.check_geometry(dataclasses.replace(gdn(), **{name: value}))


def test_layouts_follow_the_placements_and_the_dtypes():
    plan = make_plan(kda(), mode="hybrid", degrees=(2,), dtypes=DtypePolicy(quantized="int8"))
    layouts = plan.layouts(2)
    assert tuple(layout.retained_units for layout in layouts) == plan.placements[2].local_units
    assert {layout.slot_units for layout in layouts} == {plan.placements[2].slot_units}
    assert all(layout.dtypes.quantized == "int8" for layout in layouts)
    assert plan.layouts()[0].slot_units == int(plan.mask.sum())  # one rank needs no placement
    for ranks in (4, 0):
        with pytest.raises(ValueError, match=f"no placement for {ranks} ranks; it has: 2"):
            plan.layouts(ranks)


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failed_save_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch, call, error, existing):
    path = tmp_path / "a.plan"
    old = make_plan(seed=1)
    if existing:
        old.save(path)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(type(error)):
            make_plan(seed=2).save(path)
    assert list(tmp_path.iterdir()) == ([path] if existing else [])
    if existing:
        assert SelectionPlan.load(path).same_as(old)


def test_saving_into_a_missing_folder_or_over_a_folder_fails_without_litter(tmp_path: Path):
    with pytest.raises(OSError, match="no"):
        make_plan().save(tmp_path / "no" / "a")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        make_plan().save(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path: Path):
    make_plan().save(tmp_path / "a")
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_of_saves_at_once_to_one_path_a_whole_one_is_left(tmp_path: Path):
    path = tmp_path / "a"
    plans = [make_plan(kda(layers=3, heads=4), seed=seed) for seed in range(4)]
    plans[0].save(path)
    stop = threading.Event()
    seen = []

    def read() -> None:
        while not stop.is_set():
            seen.append(SelectionPlan.load(path))

    def write(plan: SelectionPlan) -> None:
        for _ in range(20):
            plan.save(path)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(plan,)) for plan in plans]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert seen
    assert all(any(plan.same_as(other) for other in plans) for plan in (*seen, SelectionPlan.load(path)))
    assert list(tmp_path.iterdir()) == [path]
