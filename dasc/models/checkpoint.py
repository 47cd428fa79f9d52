"""From a model's files to its geometry and decay parameters, reading nothing else than these."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from dasc.geometry import StateGeometry
from dasc.models.config import Config, modelopt_method, parse_json, quantization_method
from dasc.models.decay_tensors import find_decay_tensors, gate_parameters
from dasc.models.errors import CheckpointError
from dasc.models.families import family_of_config
from dasc.models.families.family import Family
from dasc.models.gate_parameters import GateParameters
from dasc.models.source import FolderSource, Source, listing
from dasc.models.tensor_reader import Progress, TensorReader

CONFIG_FILE = "config.json"
QUANTIZATION_FILE = "hf_quant_config.json"  # ModelOpt's; config.json need not repeat it
MAX_CONFIG_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ReadReport:
    """What reading a checkpoint took.

    Attributes:
        config_bytes: of config.json, and of hf_quant_config.json where it was read.
        index_bytes: of the shard index; 0 when there is none.
        header_bytes: of the safetensors headers, with what was read beyond them before their length was known.
        tensor_bytes: of the decay tensors, with what lay between neighbours read at once.
        requests: reads of files, or HTTP requests.
        files: names of the files read from, sorted.
        seconds: wall-clock time.
    """

    config_bytes: int
    index_bytes: int
    header_bytes: int
    tensor_bytes: int
    requests: int
    files: tuple[str, ...]
    seconds: float

    @property
    def total_bytes(self) -> int:
        return self.config_bytes + self.index_bytes + self.header_bytes + self.tensor_bytes


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Geometry and decay parameters of a model.

    Attributes:
        source: the folder, or ``"org/name@commit"``.
        family: of the model.
        geometry: of the whole model (not of one rank).
        gate: the stored decay parameters, ``[L, HV]`` and ``[L, HV]`` or ``[L, HV, K]``, FP64.
        quantization: name of the weights' quantisation method in config.json, or else in hf_quant_config.json; ``None``
            when they are not quantised. Packed weights cannot be permuted, so they allow no placement that reorders
            heads.
        reading: what reading it took.
    """

    source: str
    family: Family
    geometry: StateGeometry
    gate: GateParameters
    quantization: str | None
    reading: ReadReport

    def gate_input(self, given: float | None) -> float:
        """Representative gate input ``a_s`` (eq. 2): the one given, or the family's own for ``None``."""
        return self.family.default_gate_input if given is None else given


def read_checkpoint(
    model: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Read geometry and decay parameters of a model, and no other weights.

    Args:
        model: a folder with config.json and .safetensors files: a ``Path``, the name of something that exists, or a
            string that starts with ``/``, ``.`` or ``~``. Any other string is a Hub id, ``"org/name"``.
        revision: branch, tag or commit on the Hub.
        token: access token of the Hub; huggingface_hub's own when ``None``.
        endpoint: address of the Hub; huggingface_hub's own when ``None``.
        progress: called as ``progress(step, done, total)`` in the calling thread; steps are ``"index"`` (where there is
            one; told also when it begins, with 0 of 1), ``"headers"`` and ``"tensors"``, counted in files.

    Raises:
        CheckpointError: for anything wrong with the model's files, in one line.
        ValueError: for a ``model`` that is neither a folder nor a Hub id, a ``revision`` of a folder, or a token that
            no HTTP header can hold.
    """
    started = time.perf_counter()
    source = _open_source(model, revision=revision, token=token, endpoint=endpoint)
    files = source.files()
    if CONFIG_FILE not in files:
        raise CheckpointError(f"{source.name}: expected a {CONFIG_FILE}, found {listing(files)}")
    config, config_bytes = _read_config(source, CONFIG_FILE)
    family = family_of_config(config)
    text = config.section("text_config") or config
    geometry, lower_bound = _geometry(family, text)
    config_files = {CONFIG_FILE}
    quantization = quantization_method(config)
    if quantization is None and QUANTIZATION_FILE in files:
        modelopt, more_bytes = _read_config(source, QUANTIZATION_FILE)
        quantization = modelopt_method(modelopt)
        config_bytes += more_bytes
        config_files.add(QUANTIZATION_FILE)

    reader = TensorReader(source, files, progress)
    located = find_decay_tensors(
        reader.locate(),
        family,
        geometry,
        next_token_blocks=text.integer_or("num_nextn_predict_layers", 0, minimum=0),
        where=source.name,
    )
    values = reader.read(located, family, geometry)
    return Checkpoint(
        source=source.name,
        family=family,
        geometry=geometry,
        gate=gate_parameters(values, geometry, lower_bound),
        quantization=quantization,
        reading=ReadReport(
            config_bytes=config_bytes,
            index_bytes=reader.index_bytes,
            header_bytes=reader.header_bytes,
            tensor_bytes=reader.tensor_bytes,
            requests=source.requests,
            files=tuple(sorted(config_files | reader.files_read)),
            seconds=time.perf_counter() - started,
        ),
    )


def _open_source(model: str | Path, *, revision: str | None, token: str | None, endpoint: str | None) -> Source:
    if not isinstance(model, str | Path):
        raise ValueError(f"model must be a path or a string, got {type(model).__name__}")
    if isinstance(model, Path) or model.startswith((os.sep, ".", "~")) or os.path.exists(model):
        if revision is not None:
            raise ValueError(f"revision is for models on the Hub, got {revision!r} with the folder {str(model)!r}")
        return FolderSource(Path(os.path.expanduser(model)))
    # Only a model on the Hub pays for importing its client.
    from dasc.models.hub import HubSource, is_hub_id

    if not is_hub_id(model):
        raise ValueError(f"model must be an existing folder or a Hub id 'org/name', got {model!r}")
    try:
        return HubSource(model, revision=revision, token=token, endpoint=endpoint)
    except CheckpointError as error:
        if revision is not None:
            raise
        raise CheckpointError(f"{error}; and there is no folder {model!r} here") from error


def _read_config(source: Source, file: str) -> tuple[Config, int]:
    """A small JSON file and its bytes."""
    where = f"{source.name}/{file}"
    data = source.read_all(file, MAX_CONFIG_BYTES)
    return Config(parse_json(data, where), where), len(data)


def _geometry(family: Family, text: Config) -> tuple[StateGeometry, float | None]:
    try:
        return family.geometry(text), family.lower_bound(text)
    except CheckpointError:
        raise
    except ValueError as error:  # StateGeometry's own checks, e.g. no recurrent layers
        raise CheckpointError(f"{text.where}: {error}") from error
