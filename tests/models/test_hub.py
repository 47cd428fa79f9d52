"""Reading from the Hub, against a local server that stands in for it. No outside network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from dasc.geometry import StateGeometry
from dasc.models import CheckpointError, hub, read_checkpoint
from dasc.models.synthetic import example_gate, write_checkpoint
from tests.models.hub_server import COMMIT, FakeHub

GEOMETRY = StateGeometry(
    family="kimi_linear",
    kind="kda",
    num_blocks=8,
    recurrent_layers=(0, 1, 2, 4, 5, 6),
    num_value_heads=4,
    num_key_heads=4,
    head_v_dim=16,
    head_k_dim=16,
)
FILLER = 64 * 2**20
TOKEN = "hf_secretsecretsecret"


@pytest.fixture(autouse=True)
def _quiet_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No waits, and nothing of the developer's own Hub settings."""
    monkeypatch.setattr(hub, "_WAIT_S", 0.001)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    close_session()
    yield
    close_session()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight shards of one block each; the third and the last block have no decay tensors."""
    folder = tmp_path_factory.mktemp("sharded")
    return write_checkpoint(folder, "kimi_linear", example_gate(GEOMETRY), GEOMETRY, filler_bytes=FILLER, shards=8)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    return write_checkpoint(folder, "kimi_linear", example_gate(GEOMETRY), GEOMETRY, filler_bytes=FILLER)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_the_hub_gives_what_the_folder_gives(layout: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(layout)
    local = read_checkpoint(folder)
    with FakeHub(folder) as server:
        remote = read_checkpoint("org/model", endpoint=server.url)
    assert remote.source == f"org/model@{COMMIT}"
    assert remote.geometry == local.geometry == GEOMETRY
    assert remote.gate.fingerprint() == local.gate.fingerprint() == example_gate(GEOMETRY).fingerprint()
    assert remote.reading.files == local.reading.files
    assert remote.reading.requests == len(server.seen)
    assert remote.reading.total_bytes == sum(seen.sent for seen in server.files())


def test_only_shards_with_decay_tensors_are_asked_for_and_never_as_a_whole(sharded: Path) -> None:
    with FakeHub(sharded) as server:
        read_checkpoint("org/model", endpoint=server.url)
    asked = {seen.path.rsplit("/", 1)[1] for seen in server.files(".safetensors")}
    assert asked == {f"model-{block + 1:05d}-of-00008.safetensors" for block in GEOMETRY.recurrent_layers}
    assert all(seen.status == 206 and "range" in seen.headers for seen in server.files(".safetensors"))
    assert sum(seen.sent for seen in server.seen) < 2**20 < FILLER


def test_all_files_are_read_at_the_commit_that_the_revision_names(sharded: Path) -> None:
    with FakeHub(sharded, revisions=("main", "v1/x")) as server:
        assert read_checkpoint("org/model", revision="v1/x", endpoint=server.url).source.endswith(COMMIT)
    assert [seen.path for seen in server.seen if "/api/" in seen.path] == ["/api/models/org/model/revision/v1%2Fx"]
    assert all(f"/resolve/{COMMIT}/" in seen.path for seen in server.files())


def test_a_header_longer_than_the_first_guess_is_read_to_its_end(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.HubSource, "first_bytes", 100)
    with FakeHub(single) as server:
        checkpoint = read_checkpoint("org/model", endpoint=server.url)
    header = int.from_bytes((single / "model.safetensors").read_bytes()[:8], "little")
    assert server.files(".safetensors")[1].headers["range"] == f"bytes=100-{8 + header - 1}"
    assert checkpoint.reading.header_bytes == 8 + header


def test_neighbouring_tensors_are_read_at_once_and_distant_ones_apart(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = len(GEOMETRY.recurrent_layers)
    exact = pairs * (4 + 4 * 16) * 4
    counts = {}
    for gap in (0, 2**30):
        monkeypatch.setattr(hub.HubSource, "gap_bytes", gap)
        with FakeHub(single) as server:
            reading = read_checkpoint("org/model", endpoint=server.url).reading
        counts[gap] = (len(server.files(".safetensors")) - 1, reading.tensor_bytes)
    assert counts[0] == (pairs, exact)
    assert counts[2**30] == (1, exact + FILLER // 8 * 6)  # the fillers of blocks 1 to 6 lie between


@pytest.mark.parametrize("failures", [1, 3])
def test_a_busy_server_is_asked_again(single: Path, failures: int) -> None:
    with FakeHub(single, failures=failures) as server:
        read_checkpoint("org/model", endpoint=server.url)


def test_a_server_that_stays_busy_is_an_error_after_bounded_tries(single: Path) -> None:
    with FakeHub(single, failures=10**6) as server, pytest.raises(CheckpointError, match=r"org/model.*HTTP 503"):
        read_checkpoint("org/model", endpoint=server.url)
    assert len(server.seen) <= 10


def test_a_cut_connection_goes_on_where_it_stopped(single: Path) -> None:
    with FakeHub(single, cut_after=50, cuts=3) as server:
        checkpoint = read_checkpoint("org/model", endpoint=server.url)
    assert checkpoint.gate.fingerprint() == example_gate(GEOMETRY).fingerprint()
    config = server.files("config.json")
    assert [seen.headers.get("range") for seen in config] == [None, "bytes=50-", "bytes=100-", "bytes=150-"]


def test_a_cut_shard_is_resumed_within_its_range(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.HubSource, "gap_bytes", 0)
    with FakeHub(single, cut_after=7) as server:
        source = hub.HubSource("org/model", revision=None, token=None, endpoint=server.url)
        server.cuts = 2
        data = source.read_range("model.safetensors", 3, 40)
    assert data == (single / "model.safetensors").read_bytes()[3:40]
    assert [seen.headers["range"] for seen in server.files()] == ["bytes=3-39", "bytes=10-39", "bytes=17-39"]


def test_a_whole_file_that_cannot_be_resumed_is_read_again(single: Path) -> None:
    with FakeHub(single, ignore_ranges=True, cut_after=50, cuts=2) as server:
        source = hub.HubSource("org/model", revision=None, token=None, endpoint=server.url)
        assert source.read_all("config.json", 2**20) == (single / "config.json").read_bytes()


def test_an_answer_shorter_than_asked_for_is_continued(single: Path) -> None:
    with FakeHub(single, most=16) as server:
        source = hub.HubSource("org/model", revision=None, token=None, endpoint=server.url)
        assert source.read_range("model.safetensors", 3, 40) == (single / "model.safetensors").read_bytes()[3:40]
    assert [seen.headers["range"] for seen in server.files()] == ["bytes=3-39", "bytes=19-39", "bytes=35-39"]


def test_a_connection_that_is_always_cut_is_an_error_after_bounded_tries(single: Path) -> None:
    message = r"org/model@\w+/config.json: no complete answer .* in \d tries"
    with FakeHub(single, cut_after=1, cuts=10**6) as server, pytest.raises(CheckpointError, match=message):
        read_checkpoint("org/model", endpoint=server.url)
    assert len(server.seen) <= 10


def test_a_server_that_ignores_ranges_is_an_error_and_the_shard_is_not_downloaded(single: Path) -> None:
    with FakeHub(single, ignore_ranges=True) as server:
        with pytest.raises(CheckpointError, match=r"model.safetensors: the server ignored a range request"):
            read_checkpoint("org/model", endpoint=server.url)
        close_session()
    assert sum(seen.sent for seen in server.files(".safetensors")) < FILLER // 4


@pytest.mark.parametrize("lie", ["bytes 1-65536/99999999", "bytes 0-65535/*", "bytes", "octets 0-65535/99999999"])
def test_another_range_than_the_one_asked_for_is_an_error(single: Path, lie: str) -> None:
    message = "model.safetensors: expected bytes from 0 on"
    with FakeHub(single, content_range=lie) as server, pytest.raises(CheckpointError, match=message):
        read_checkpoint("org/model", endpoint=server.url)


def test_an_empty_shard_is_an_error(single: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((single / "config.json").read_bytes())
    (tmp_path / "model.safetensors").touch()
    with FakeHub(tmp_path) as server, pytest.raises(CheckpointError, match=r"model.safetensors: the file is shorter"):
        read_checkpoint("org/model", endpoint=server.url)


@pytest.mark.parametrize("refusal", [(401, "RepoNotFound"), (403, ""), (403, "GatedRepo"), (401, "GatedRepo")])
def test_a_closed_repository_is_one_line_with_a_hint(single: Path, refusal: tuple[int, str]) -> None:
    server = FakeHub(single, token=TOKEN, forbidden=refusal)
    with server, pytest.raises(CheckpointError, match=r"org/model: .*HF_TOKEN.*hf auth login") as error:
        read_checkpoint("org/model", token="hf_wrongwrongwrong", endpoint=server.url)
    assert "\n" not in str(error.value)
    assert "hf_wrong" not in str(error.value)


def test_what_is_not_found_is_named(single: Path, sharded: Path) -> None:
    with FakeHub(single, missing=("model.safetensors",)) as server:
        with pytest.raises(
            CheckpointError, match=r"^org/other: not found \(HTTP 404\); .* no folder 'org/other' here$"
        ):
            read_checkpoint("org/other", endpoint=server.url)
        with pytest.raises(CheckpointError, match=r"^org/model, revision 'v9': not found \(HTTP 404\)$"):
            read_checkpoint("org/model", revision="v9", endpoint=server.url)
        with pytest.raises(CheckpointError, match=r"^org/model@\w+/model.safetensors: not found \(HTTP 404\)$"):
            read_checkpoint("org/model", endpoint=server.url)
    shard = "model-00005-of-00008.safetensors"
    with FakeHub(sharded, missing=(shard,)) as server, pytest.raises(CheckpointError, match=f"{shard}: not found"):
        read_checkpoint("org/model", endpoint=server.url)


def test_the_token_goes_to_the_hub_and_to_no_other_host(
    single: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    with FakeHub(single) as cdn, FakeHub(single, token=TOKEN, cdn=f"http://localhost:{cdn.port}") as server:
        checkpoint = read_checkpoint("org/model", token=TOKEN, endpoint=server.url)
    assert len(cdn.seen) > 1
    assert all(seen.headers["authorization"] == f"Bearer {TOKEN}" for seen in server.seen)
    assert not any("authorization" in seen.headers or TOKEN in str(seen) for seen in cdn.seen)
    assert all("range" in seen.headers for seen in cdn.seen)
    assert TOKEN not in repr(checkpoint) + caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize("token", ["hf_sécret", "hf_sec\nret", "hf_secret\x7f", "hf_秘"])
def test_a_token_that_no_header_can_hold_is_named_but_not_shown(single: Path, token: str) -> None:
    message = "^token must be of printable ASCII characters, got others"
    with FakeHub(single) as server, pytest.raises(ValueError, match=message) as error:
        read_checkpoint("org/model", token=token, endpoint=server.url)
    assert server.seen == []
    chain = [error.value, error.value.__cause__, error.value.__context__]
    assert not any("hf_s" in str(part) or "hf_秘" in str(part) for part in chain)


def test_the_token_and_the_endpoint_of_the_environment_are_used(single: Path) -> None:
    code = "from dasc.models import read_checkpoint; print(read_checkpoint('org/model').gate.fingerprint())"
    with FakeHub(single, token=TOKEN) as server:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": TOKEN,
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
    assert done.stdout.strip() == example_gate(GEOMETRY).fingerprint(), done.stderr


def test_an_unreachable_hub_is_one_clear_line(single: Path) -> None:
    with FakeHub(single) as server:
        url = server.url
    with pytest.raises(CheckpointError, match=rf"^org/model: no complete answer from {url} in 4 tries"):
        read_checkpoint("org/model", endpoint=url)


def test_offline_mode_is_respected_and_named(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with FakeHub(single) as server, pytest.raises(CheckpointError, match=r"org/model: .*HF_HUB_OFFLINE is set"):
        read_checkpoint("org/model", endpoint=server.url)
    assert server.seen == []


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[]",
        b"{}",
        b'{"sha": null, "siblings": []}',
        b'{"sha": "main", "siblings": []}',
        b'{"sha": "../../../other/model/resolve/main/0123456", "siblings": []}',
        b'{"sha": "0123456789ABCDEF0123456789abcdef01234567", "siblings": []}',
        b'{"sha": "0123456789abcdef0123456789abcdef01234567", "siblings": [1]}',
    ],
)
def test_a_server_that_is_no_hub_is_an_error(single: Path, body: bytes) -> None:
    with FakeHub(single, api_body=body) as server, pytest.raises(CheckpointError, match="expected the Hub's answer"):
        read_checkpoint("org/model", endpoint=server.url)


def test_progress_counts_files_in_the_calling_thread(sharded: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    with FakeHub(sharded) as server:
        read_checkpoint("org/model", endpoint=server.url, progress=lambda *step: steps.append(step))
    assert steps[:2] == [("index", 0, 1), ("index", 1, 1)]
    assert steps[2:] == [(step, done, 6) for step in ("headers", "tensors") for done in range(1, 7)]


@pytest.mark.parametrize(
    "model", ["gpt2", "a/b/c", "org/", "/nowhere", "org/mo del", "", "http://x/y", "org/model.git"]
)
def test_what_is_neither_a_folder_nor_a_hub_id_is_an_error(model: str) -> None:
    with pytest.raises(ValueError, match=r"model must be|expected a model's folder"):
        read_checkpoint(model, endpoint="http://127.0.0.1:9")


def test_values_survive_the_hub_in_every_stored_dtype(tmp_path: Path) -> None:
    gate = example_gate(GEOMETRY)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        folder = write_checkpoint(tmp_path / str(dtype), "kimi_linear", gate, GEOMETRY, decay_dtype=dtype)
        with FakeHub(folder) as server:
            read = read_checkpoint("org/model", endpoint=server.url).gate
        assert torch.equal(read.A_log, gate.A_log.to(dtype).double())
        assert torch.equal(read.dt_bias, gate.dt_bias.to(dtype).double())
