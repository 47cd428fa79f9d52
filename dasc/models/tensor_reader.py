"""Finds tensors in a model's .safetensors files and reads these alone, through any source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.models.config import Config, flat_strings, parse_unique_json
from dasc.models.decay_tensors import DecayKey, check_entry, decode
from dasc.models.errors import CheckpointError
from dasc.models.families.family import DECAY_NAMES, Family
from dasc.models.safetensors_header import LENGTH_BYTES, TensorEntry, header_length, parse_header, spans
from dasc.models.source import Source, listing

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_INDEX_BYTES = 512 * 2**20  # Kimi-K3's index names some 700,000 tensors

Progress = Callable[[str, int, int], None]
_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass
class TensorReader:
    """The decay tensors of one source. Other tensors are checked and forgotten: there may be a million of them.

    Attributes:
        source: to read from.
        files: names of all its files.
        progress: told of every file done, and of the index also when it begins.
        index_bytes, header_bytes, tensor_bytes: read so far, of each kind.
        files_read: names of the files read from.
        shard_of: the file of each decay tensor, once :meth:`locate` has run.
        headers: the decay tensors of each file whose header was read.
    """

    source: Source
    files: list[str]
    progress: Progress | None
    index_bytes: int = 0
    header_bytes: int = 0
    tensor_bytes: int = 0
    files_read: set[str] = field(default_factory=set)
    shard_of: dict[str, str] = field(default_factory=dict)
    headers: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)

    def locate(self) -> dict[str, str]:
        """The file of each decay tensor: from the index if there is one, else from every header."""
        if INDEX_FILE in self.files:
            self._read_index()
            return self.shard_of
        shards = [name for name in self.files if name.endswith(".safetensors") and "/" not in name]
        if SINGLE_FILE in shards:
            shards = [SINGLE_FILE]
        if not shards:
            raise CheckpointError(f"{self.source.name}: expected .safetensors files, found {listing(self.files)}")
        self._read_headers(shards)
        for shard, entries in self.headers.items():
            for name in entries:
                if name in self.shard_of:
                    raise CheckpointError(
                        f"{self.source.name}: tensor {name!r}: expected in one file, "
                        f"found in {self.shard_of[name]} and {shard}"
                    )
                self.shard_of[name] = shard
        return self.shard_of

    def read(self, located: dict[DecayKey, str], family: Family, geometry: StateGeometry) -> dict[DecayKey, Tensor]:
        """Values of the located tensors, from the shards that hold them and no others."""
        keys = {name: key for key, name in located.items()}
        by_shard: dict[str, list[str]] = {}
        for name in located.values():
            by_shard.setdefault(self.shard_of[name], []).append(name)
        self._read_headers([shard for shard in sorted(by_shard) if shard not in self.headers])
        for shard, names in by_shard.items():
            self._check_shard(shard, names, keys, family, geometry)
        values: dict[DecayKey, Tensor] = {}
        shards = sorted(by_shard)
        read = self._in_parallel("tensors", lambda shard: self._read_tensors(shard, by_shard[shard]), shards)
        for shard, (contents, count) in zip(shards, read, strict=True):
            self.tensor_bytes += count
            for name, content in contents.items():
                where = f"{self.source.name}/{shard}: tensor {name!r}"
                values[keys[name]] = decode(content, self.headers[shard][name], keys[name], geometry, where)
        return values

    def _read_index(self) -> None:
        where = f"{self.source.name}/{INDEX_FILE}"
        self._report("index", 0, 1)
        data = self.source.read_all(INDEX_FILE, MAX_INDEX_BYTES)
        self.index_bytes = len(data)
        self.files_read.add(INDEX_FILE)
        weight_map = Config(parse_unique_json(data, where, _count_strings), where).string_map("weight_map")
        missing = set(weight_map.values()) - set(self.files)
        if missing:
            name = next(name for name, shard in weight_map.items() if shard in missing)
            raise CheckpointError(
                f"{where}: tensor {name!r} should lie in {weight_map[name]!r}, a file that is missing"
            )
        self.shard_of = {name: shard for name, shard in weight_map.items() if name.endswith(DECAY_NAMES)}
        self._report("index", 1, 1)

    def _check_shard(
        self, shard: str, names: list[str], keys: dict[str, DecayKey], family: Family, geometry: StateGeometry
    ) -> None:
        entries = self.headers[shard]
        where = f"{self.source.name}/{shard}"
        for name in names:
            if name not in entries:
                raise CheckpointError(
                    f"{where}: expected tensor {name!r} as {INDEX_FILE} says, found none of that name"
                )
            check_entry(entries[name], keys[name], family, geometry, f"{where}: tensor {name!r}")
        for name in entries:
            if family.match(name) is not None and self.shard_of.get(name) != shard:
                raise CheckpointError(
                    f"{where}: tensor {name!r}: expected in {self.shard_of.get(name, 'no file')} "
                    f"as {INDEX_FILE} says, found here"
                )

    def _read_headers(self, shards: list[str]) -> None:
        for shard, (entries, count) in zip(
            shards, self._in_parallel("headers", self._read_header, shards), strict=True
        ):
            self.headers[shard] = entries
            self.header_bytes += count
            self.files_read.add(shard)

    def _read_header(self, shard: str) -> tuple[dict[str, TensorEntry], int]:
        where = f"{self.source.name}/{shard}"
        start, size = self.source.read_start(shard, self.source.first_bytes)
        end = LENGTH_BYTES + header_length(start, size, where)
        count = len(start)
        if count < end:
            start += self.source.read_range(shard, count, end)
            count = end
        header = parse_header(start[LENGTH_BYTES:end], size, where)
        return {name: header[name] for name in header if name.endswith(DECAY_NAMES)}, count

    def _read_tensors(self, shard: str, names: list[str]) -> tuple[dict[str, bytes], int]:
        entries = {name: self.headers[shard][name] for name in names}
        data: dict[str, bytes] = {}
        count = 0
        for start, end in spans(list(entries.values()), self.source.gap_bytes):
            block = self.source.read_range(shard, start, end)
            count += len(block)
            for name, entry in entries.items():
                if start <= entry.start and entry.end <= end:
                    data[name] = block[entry.start - start : entry.end - start]
        return data, count

    def _in_parallel(self, step: str, read: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
        """``read`` of each item, a few at once; the first error stops the rest."""
        results: list[_Out] = []
        with ThreadPoolExecutor(self.source.parallel) as pool:
            for result in pool.map(read, items):
                results.append(result)
                self._report(step, len(results), len(items))
        return results

    def _report(self, step: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(step, done, total)


def _count_strings(index: dict[str, object]) -> int:
    """Strings of an index: its keys, and what its objects, ``metadata`` and ``weight_map``, hold."""
    return len(index) + sum(flat_strings(value) for value in index.values() if isinstance(value, dict))
