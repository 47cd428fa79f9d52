"""A server as a backend, by a small local one: what is sent, what is read, and what is done when it fails."""

import socket
from collections.abc import Iterator

import pytest

from dasc.eval.quality import server_backend
from dasc.eval.quality.arms import ArmSpec
from dasc.eval.quality.backend import BackendError, Query, Reply, Residency
from dasc.eval.quality.http import Http
from dasc.eval.quality.protocol import Protocol, paper_controls
from dasc.eval.quality.runs import run_server
from dasc.eval.quality.server_backend import ServerBackend
from tests.eval.quality.fake_server import FakeServer, fake_server
from tests.eval.quality.fakes import text_item

METRICS = """
# HELP dasc_cache_compressed_slots compressed slots
dasc_cache_compressed_slots{tp_rank="0"} 40.0
dasc_cache_compressed_slots{tp_rank="1"} 40.0
dasc_cache_compressed_slots_held{tp_rank="0"} 3.0
dasc_cache_evictions_total{cause="compressed",tp_rank="0"} 5.0
dasc_cache_evictions_total{cause="tree",tp_rank="0"} 2.0
sglang:mamba_available_tokens{tp_rank="0"} 17.0
"""


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_backend, "_METRICS_PAUSE_S", 0.01)


def connect(fake: FakeServer, **options) -> ServerBackend:
    http = Http(fake.url + "/", pause_s=0.01, key=options.pop("key", ""))
    return ServerBackend(http, **options)


def ask(backend: ServerBackend, *queries: Query, concurrency: int = 4) -> list[Reply]:
    return backend.ask(queries, concurrency, lambda: None)


def test_the_servers_first_model_is_asked_unless_another_is_named(fake: FakeServer):
    for backend in (connect(fake), connect(fake, model="other")):
        ask(backend, Query("q", "some words", 9, temperature=0.5, seed=3))
    first, second = fake.bodies
    assert (first["model"], second["model"]) == ("org/the-model", "other")
    assert first["prompt"] == "some words"
    assert (first["max_tokens"], first["temperature"], first["top_p"], first["seed"]) == (9, 0.5, 1.0, 3)


def test_cached_tokens_answer_and_times_are_read_from_the_stream(fake: FakeServer):
    backend = connect(fake)
    ask(backend, Query("w", "one two three", 1, warm=True))
    [reply] = ask(backend, Query("q", "one two three four", 5))
    assert (reply.name, reply.answer, reply.prompt_tokens, reply.cached_tokens) == ("q", "yes 3", 4, 3)
    assert reply.finish == "stop"
    assert 0 < reply.ttft_s < 60


def test_chat_sends_a_message_and_reads_deltas(fake: FakeServer):
    [reply] = ask(connect(fake, api="chat"), Query("q", "one two", 5))
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": "one two"}]
    assert (reply.answer, reply.prompt_tokens) == ("yes 0", 2)


def test_token_ids_are_sent_and_read_and_a_prompt_warmed_exactly_hits_all_but_its_last(fake: FakeServer):
    backend = connect(fake)
    ask(backend, Query("w", (1, 2, 3), 1, warm=True, repeated=True))
    [reply] = ask(backend, Query("q", (1, 2, 3), 2))
    assert fake.bodies[0]["prompt"] == [1, 2]
    assert (reply.answer, reply.prompt_tokens, reply.cached_tokens) == ((7, 7), 3, 2)
    with pytest.raises(ValueError, match="need the completions API"):
        ask(connect(fake, api="chat"), Query("q", (1, 2), 1))


def test_answers_come_in_the_order_asked_by_as_many_clients_as_said(fake: FakeServer):
    seen = []
    queries = [Query(f"{i}", f"prompt {i}", 5) for i in range(30)]
    replies = connect(fake).ask(queries, 3, lambda: seen.append(1))
    assert [r.name for r in replies] == [q.name for q in queries]
    assert len(seen) == 30
    assert fake.most_at_once <= 3


@pytest.mark.parametrize("failure", [500, 503, 429, "cut"])
def test_a_passing_failure_is_tried_again(fake: FakeServer, failure: int | str):
    fake.failures = [failure] * 3
    [reply] = ask(connect(fake), Query("q", "one two", 5))
    assert (reply.answer, reply.finish) == ("yes 0", "stop")
    assert len(fake.bodies) == 4


def test_tries_are_bounded_and_the_line_says_why(fake: FakeServer):
    fake.failures = [503] * 9
    with pytest.raises(BackendError) as caught:
        ask(connect(fake), Query("q", "one", 5))
    assert str(caught.value) == f"{fake.url}/v1/completions failed after 4 tries: status 503: refused with 503"
    assert len(fake.bodies) == 4


def test_a_refusal_for_good_is_not_tried_again(fake: FakeServer):
    fake.failures = [400]
    with pytest.raises(BackendError, match="failed after 1 tries: status 400: refused with 400"):
        ask(connect(fake), Query("q", "one", 5))
    assert len(fake.bodies) == 1


def test_a_key_is_sent(fake: FakeServer):
    fake.token = "secret"
    assert ask(connect(fake, key="secret"), Query("q", "one", 5))
    with pytest.raises(BackendError, match="status 401: no such key"):
        ask(connect(fake), Query("q", "one", 5))


def test_a_server_that_is_not_there_is_one_line():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(BackendError, match=r"/v1/models failed after 2 tries: .*refused"):
        ServerBackend(Http(url, tries=2, pause_s=0.01))
    with pytest.raises(ValueError, match="url must begin with http"):
        Http("localhost:30000")


def test_a_server_without_cache_report_is_refused(fake: FakeServer):
    fake.cache_report = False
    with pytest.raises(BackendError, match="start SGLang with --enable-cache-report"):
        ask(connect(fake), Query("q", "one", 5))


def test_residency_comes_from_dascs_metrics_of_rank_0(fake: FakeServer):
    fake.metrics = METRICS
    backend = connect(fake)
    assert backend.residency() == Residency(37, 7)
    assert backend.settings() == {
        "api": "completions",
        "served_model": "org/the-model",
        "compressed_slots": 40,
        "version": "0.5.23",
        "model_path": "m",
    }


def test_sglang_alone_tells_free_slots_but_no_evictions(fake: FakeServer):
    fake.metrics = "".join(line + "\n" for line in METRICS.splitlines() if "dasc" not in line)
    assert connect(fake).residency() == Residency(17, None)


def test_a_server_that_tells_nothing_can_be_measured_but_not_controlled(fake: FakeServer):
    fake.info = None
    backend = connect(fake)
    assert backend.residency() == Residency()
    items = [text_item(name, (" and so on",)) for name in "abc"]
    for controls in (None, paper_controls(2)):
        protocol = Protocol(block_items=2, slots=None, concurrency=2, controls=controls)
        result = run_server(items, backend, ArmSpec("nr", 16), protocol)
        assert result.model == "the-model"
        task = result.arms[0].tasks["task"]
        assert (task.requests, task.loaded, task.cached_tokens, task.new_tokens) == (3, 3, 3, 9)
        assert bool(result.arms[0].failures) == (controls is not None)
    assert fake.flushes == 4


def test_a_run_that_the_server_broke_off_goes_on(fake: FakeServer, tmp_path):
    items = [text_item(name, (" and so on",)) for name in "abcdef"]
    protocol = Protocol(block_items=2, slots=None, concurrency=1, replays=2)
    backend = connect(fake)

    def measure(folder):
        return run_server(items, backend, ArmSpec("nr", 16), protocol, output=folder)

    whole = measure(tmp_path / "whole").as_dict()
    sent = len(fake.bodies)
    failing = iter([None] * 8 + [400])
    original, backend._ask = backend._ask, lambda query: _fail_or(next(failing, None), original, query)
    with pytest.raises(BackendError, match="broken"):
        measure(tmp_path / "broken")
    backend._ask = original
    before = len(fake.bodies)
    again = measure(tmp_path / "broken").as_dict()
    assert len(fake.bodies) - before == sent * 2 // 3  # of three blocks the first was finished
    for result in (whole, again):  # but for times, which no two runs share
        for task in result["arms"][0]["tasks"].values():
            task["ttft_mean_s"] = None
    assert again == whole


def _fail_or(failure, original, query):
    if failure is not None:
        raise BackendError("broken")
    return original(query)
