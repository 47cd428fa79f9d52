"""Headers of .safetensors files: what the format allows is read, what it does not is refused by name."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dasc.models import CheckpointError
from dasc.models.safetensors_header import (
    _DTYPE_BITS,
    LENGTH_BYTES,
    Header,
    TensorEntry,
    _all_valid,
    _check_tensor,
    header_length,
    parse_header,
    spans,
)

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def parse(tensors: dict[str, object], data_bytes: int = 8) -> Header:
    header = json.dumps(tensors).encode()
    return parse_header(header, LENGTH_BYTES + len(header) + data_bytes, "m/x.safetensors")


def parse_with_f32(header: bytes) -> Header:
    """A header in which ``F`` stands for a tensor of 8 bytes."""
    header = re.sub(rb"F(?=[,}])", json.dumps(F32).encode(), header)
    return parse_header(header, LENGTH_BYTES + len(header) + 8, "x")


def read_file(path: Path) -> Header:
    data = path.read_bytes()
    end = LENGTH_BYTES + header_length(data[:LENGTH_BYTES], len(data), "x")
    return parse_header(data[LENGTH_BYTES:end], len(data), "x")


def test_entries_are_the_bytes_that_safetensors_wrote(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn)
    tensors = {f"t{i}": torch.arange(6).view(2, 3).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors["empty"] = torch.zeros(0, 4)
    tensors["scalar"] = torch.tensor(3.0)
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    data = (tmp_path / "x.safetensors").read_bytes()
    entries = read_file(tmp_path / "x.safetensors")
    assert set(entries) == set(tensors)
    for name, entry in entries.items():
        assert entry.shape == tuple(tensors[name].shape)
        assert data[entry.start : entry.end] == tensors[name].flatten().view(torch.uint8).numpy().tobytes()


def test_sub_byte_dtypes_are_measured_in_bits() -> None:
    assert parse({"a": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]}})["a"].dtype == "F4"
    with pytest.raises(CheckpointError, match=r"expected 1.5 bytes for F4 \[3\]"):
        parse({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, 2)


def test_a_dtype_of_the_future_is_no_obstacle_for_the_other_tensors() -> None:
    new = {"dtype": "F2_X", "shape": [64], "data_offsets": [8, 24]}
    assert parse({"a": F32, "b": new}, 24)["a"].dtype == "F32"


@pytest.mark.parametrize(
    ("tensors", "data_bytes", "message"),
    [
        ({"a": {**F32, "data_offsets": [0, 4]}}, 4, r"expected 8 bytes for F32 \[2\]"),
        ({"a": {**F32, "data_offsets": [8, 0]}}, 8, "expected 8 bytes"),
        ({"a": {**F32, "data_offsets": [-8, 0]}}, 8, "two data_offsets"),
        ({"a": {**F32, "data_offsets": [0]}}, 8, "two data_offsets"),
        ({"a": {**F32, "data_offsets": [0.0, 8]}}, 8, "two data_offsets"),
        ({"a": {**F32, "shape": [-2]}}, 8, "a shape"),
        ({"a": {**F32, "shape": [True, 2]}}, 8, "a shape"),
        ({"a": {**F32, "shape": "2"}}, 8, "a shape"),
        ({"a": {**F32, "dtype": 32}}, 8, "a dtype"),
        ({"a": [0, 8]}, 8, "a dtype"),
        ({"a": {"dtype": "F2_X", "shape": [2], "data_offsets": [8, 0]}}, 8, "backwards"),
        ({"a": F32}, 7, "beyond the file's .* truncated"),
        ({"a": F32}, 9, "the tensors end at byte .*, the file at"),
        ({"a": F32, "b": F32}, 8, "expected at byte"),
        ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, 12, "expected at byte"),
        ({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, 20, "expected at byte"),
        ({"a": {**F32, "shape": [2**62, 2**62, 4], "data_offsets": [0, 8]}}, 8, "expected .* bytes"),
        ({"a": {**F32, "shape": [2**62] * 64, "data_offsets": [0, 8]}}, 8, "expected .* bytes"),
    ],
)
def test_headers_that_lie_are_refused(tensors: dict[str, object], data_bytes: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^m/x.safetensors: .*{message}"):
        parse(tensors, data_bytes)


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (b'{"a": F, "a": F}', "a"),
        (b'{"a": 3, "a": F}', "a"),
        (b'{"a": {}, "a": F}', "a"),
        (b'{"a": null, "b": F, "a": F, "__metadata__": {"data_offsets": "pt"}}', "a"),
        (b'{"a": F, "\\u0061": F}', "a"),
        (b'{"\\u0061": 3, "a": F}', "a"),
        (b'{"__metadata__": {"x": "y", "x": "z"}, "a": F}', "x"),
        (b'{"__metadata__": {"dtype": "y", "dtype": "z"}, "a": F}', "dtype"),
        (b'{"__metadata__": {}, "__metadata__": {"x": "y"}, "a": F}', "__metadata__"),
        (b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "dtype"),
        (b'{"a": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0, 8]}}', "shape"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "data_offsets": [0, 8]}}', "data_offsets"),
    ],
)
def test_a_key_given_twice_is_refused(header: bytes, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}' is given twice"):
        parse_with_f32(header)


@pytest.mark.parametrize(
    "header",
    [
        b'{"__metadata__": {"format": "pt", "dtype": "F32", "n": {"deep": ["b"]}}, "a": F}',
        b'{"__metadata__": "text", "a": F}',
        b'{"quote \\" colon": F}',
        b'{"data_offsets": F, "__metadata__": {"data_offsets": "data_offsets"}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": "text"}}',
    ],
)
def test_strings_anywhere_are_not_taken_for_keys_given_twice(header: bytes) -> None:
    (entry,) = parse_with_f32(header).values()
    assert (entry.dtype, entry.shape, entry.end - entry.start) == ("F32", (2,), 8)


odd = st.sampled_from([None, True, 0, 1, -1, 1.0, 2**63, "F32", [], [0], {}])


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["F32", "F4", "U8", "F2_X"]) | odd,
                "shape": st.lists(st.integers(0, 3) | odd, max_size=3) | odd,
                "data_offsets": st.lists(st.integers(0, 9) | odd, max_size=3) | odd,
            },
        )
        | st.builds(lambda n: {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}, st.integers(0, 2**63))
        | odd,
        max_size=3,
    )
)
def test_what_is_accepted_at_once_passes_every_single_check(values: list[object]) -> None:
    tensors = {str(i): value for i, value in enumerate(values)}
    if _all_valid(tensors):
        for value in values:
            _check_tensor(value, "x")


@pytest.mark.parametrize(
    ("declared", "file_bytes", "message"),
    [
        (0, 0, "found only 0 bytes"),
        (0, 7, "found only 7 bytes"),
        (2, 9, "reaches beyond the file's 9 bytes"),
        (100_000_001, 2**40, "at most 100000000 bytes"),
        (2**64 - 1, 2**40, "at most 100000000 bytes"),
    ],
)
def test_a_length_beyond_the_file_or_the_limit_is_refused(declared: int, file_bytes: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^x: .*{message}"):
        header_length(declared.to_bytes(8, "little")[:file_bytes], file_bytes, "x")


@given(st.integers(0, 2**31 - 1), st.sampled_from(["none", "offset", "shape", "dtype", "cut", "grow", "byte"]))
def test_a_damaged_file_is_accepted_only_if_safetensors_accepts_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, damage: str
) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    save_file({f"t{i}": torch.zeros(rng.randrange(4), rng.randrange(1, 4)) for i in range(3)}, path)
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    tensor = header[rng.choice(["t0", "t1", "t2"])]
    if damage == "offset":
        tensor["data_offsets"][rng.randrange(2)] += rng.choice([-8, -4, 4, 8])
    elif damage == "shape":
        tensor["shape"][rng.randrange(2)] += rng.choice([-1, 1])
    elif damage == "dtype":
        tensor["dtype"] = rng.choice(["F64", "BF16", "U8", "F4", "F32"])
    text = json.dumps(header).encode()
    data = bytearray(len(text).to_bytes(8, "little") + text + body)
    if damage == "cut":
        del data[-rng.randrange(1, len(data)) :]
    elif damage == "grow":
        data += bytes(rng.randrange(1, 20))
    elif damage == "byte":
        data[rng.randrange(8 + len(text))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    try:
        found = read_file(path)
    except CheckpointError:
        found = None
    try:
        with safe_open(path, "pt") as stream:
            expected = {name: tuple(stream.get_slice(name).get_shape()) for name in stream.keys()}  # noqa: SIM118
    except SafetensorError:
        # Only a dtype that may come one day is no reason for us to refuse the file.
        assert found is None or any(entry.dtype not in _DTYPE_BITS for entry in found.values())
    else:
        assert found is not None
        assert {name: entry.shape for name, entry in found.items()} == expected


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=8), st.integers(0, 60))
def test_spans_cover_every_entry_once_and_join_only_near_ones(pieces: list[tuple[int, int]], gap: int) -> None:
    entries, position = [], 0
    for skip, size in pieces:
        entries.append(TensorEntry("U8", (size,), position + skip, position + skip + size))
        position += skip + size
    found = list(spans(random.Random(0).sample(entries, len(entries)), gap))
    for entry in entries:
        assert sum(start <= entry.start and entry.end <= end for start, end in found) == 1
    assert all(later[0] - earlier[1] > gap for earlier, later in itertools.pairwise(found))
    wanted = sum(entry.end - entry.start for entry in entries)
    assert sum(end - start for start, end in found) - wanted <= gap * (len(entries) - len(found))
