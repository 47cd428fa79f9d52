"""Traces are read as documented or refused by line; made-up loads have the published statistics for every seed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.cache import PromptInfo
from dasc.cache.checkpoints import AfterPrompt
from dasc.cache.simulation import read_trace, shared_prefix_load, wildchat_load
from tests.cache.traces import TRACE, needs_trace


def line(timestamp=0, input_length=1000, output_length=10, hash_ids=(7, 8)) -> str:
    entry = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}
    return json.dumps(entry)


def read(tmp_path, *lines: str, **options):
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    return read_trace(file, **options)


def test_only_whole_blocks_are_shared(tmp_path):
    load = read(tmp_path, line(), line(10), line(20, input_length=1024), line(30, 1536, 600, (7, 8, 9)))
    first, second, third, fourth = (r.prompt.tolist() for r in load.requests)
    assert first[0] == second[0] == third[0] == fourth[0]
    assert third == fourth[:2]
    assert first[1] != second[1], "the partial block of an identical prompt is a block of its own"
    assert len({first[1], second[1], third[1]}) == 3
    assert [len(r.output) for r in load.requests] == [0, 0, 1, 2]  # blocks that the answer fills beyond the prompt's
    everything = np.concatenate([x for r in load.requests for x in (r.prompt, r.output)])
    assert everything.dtype == np.int32
    assert everything.min() >= 0


def test_times_count_from_the_first_request_in_seconds(tmp_path):
    load = read(tmp_path, line(1_700_000_000_000), "", line(1_700_000_000_500.0))
    assert [r.arrival_s for r in load.requests] == [0, 0.5]
    assert load.tokens_per_id == 512
    assert load.name == "trace.jsonl"


def test_blocks_may_have_another_size(tmp_path):
    load = read(tmp_path, line(input_length=10, hash_ids=[1, 2, 3]), tokens_per_id=4)
    assert len(load.requests[0].prompt) == 3
    with pytest.raises(ValueError, match="tokens_per_id"):
        read(tmp_path, line(), tokens_per_id=0)


def test_hash_ids_of_any_size_are_told_apart(tmp_path):
    load = read(tmp_path, line(hash_ids=[2**60, 1]), line(hash_ids=[-5, 1]), line(hash_ids=[2**60, 3]))
    ids = [r.prompt[0] for r in load.requests]
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"timestamp": 1}', "input_length"),
        (line(timestamp=-1), "timestamp"),
        (line(input_length=0), "input_length"),
        (line(input_length=-3), "input_length"),
        (line(input_length="9"), "input_length"),
        (line(input_length=999.5), "input_length"),
        (line(output_length=0), "output_length"),
        (line(output_length=10**15), "output_length"),
        (line(output_length=True), "output_length"),
        (line(hash_ids=[1]), "1000 tokens take 2 blocks of 512, but there are 1 hash_ids"),
        (line(hash_ids=[1, 2, 3]), "there are 3 hash_ids"),
        (line(hash_ids=[1, "a"]), "hash_ids must be a list of whole numbers"),
        (line(hash_ids=None), "hash_ids must be a list"),
        (line(timestamp=4), "must not go back, got 4 ms after 5"),
        ("\ufffd" * 3, "not JSON"),
    ],
)
def test_a_wrong_line_is_refused_by_file_and_number(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"trace\.jsonl, line 2: .*{message}"):
        read(tmp_path, line(timestamp=5), text)


def test_a_trace_without_requests_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trace\.jsonl: holds no requests"):
        read(tmp_path, "", " ")


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_by_name(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"any\.jsonl"):
        read_trace(file)


@needs_trace
def test_the_real_trace_is_read_whole():
    load = read_trace(TRACE)
    assert len(load.requests) == 6000
    assert sum(r.prompt_tokens for r in load.requests) == 76_643_649
    assert load.requests[-1].arrival_s == 1872.0


@pytest.mark.parametrize("seed", range(3))
def test_the_shared_prefix_load_has_the_published_statistics(seed):
    load = shared_prefix_load(seed)
    assert len(load.requests) == 184
    lengths = np.array([len(r.prompt) for r in load.warmup])
    assert len(lengths) == 40
    assert lengths.mean() == pytest.approx(1242, rel=0.005)
    assert np.median(lengths) == pytest.approx(1262, rel=0.02)
    assert np.percentile(lengths, 90) == pytest.approx(1913, rel=0.01)
    assert np.percentile(lengths, 99) == pytest.approx(2075, rel=0.01)
    heads = {r.prompt[:64].tobytes(): r.prompt for r in load.warmup}
    sizes = dict.fromkeys(heads, 0)
    for request in load.requests:
        prefix = heads[request.prompt[:64].tobytes()]
        assert np.array_equal(request.prompt[: len(prefix)], prefix)
        assert len(request.prompt) > len(prefix)
        assert len(request.output) == request.output_tokens >= 1
        sizes[request.prompt[:64].tobytes()] += 1
    counts = np.array(list(sizes.values()))
    assert counts.mean() == pytest.approx(4.6)
    assert (np.percentile(counts, 90), counts.max()) == (7, 10)


@pytest.mark.parametrize("seed", range(2))
def test_the_wildchat_load_has_the_sizes_of_the_protocol(seed):
    load = wildchat_load(seed)
    assert len(load.requests) == 1024
    firsts = [r for i, r in enumerate(load.requests) if i % 4 == 0]
    assert all(1024 <= r.prompt_tokens <= 8192 for r in firsts)
    assert min(r.prompt_tokens for r in firsts) < 1100
    assert max(r.prompt_tokens for r in firsts) > 8000
    assert max(r.output_tokens for r in load.requests) == 1024
    assert max(r.prompt_tokens + r.output_tokens for r in load.requests) <= 16_384
    for before, after in zip(load.requests, load.requests[1:]):
        if before.conversation == after.conversation:
            context = np.concatenate([before.prompt, before.output])
            assert np.array_equal(after.prompt[: len(context)], context), "a turn goes on from the answer before"
            assert len(after.prompt) > len(context)


def test_long_conversations_end_at_the_cap():
    load = wildchat_load(0, conversations=8, turns=60)
    assert len(load.requests) < 8 * 60
    assert max(r.prompt_tokens + r.output_tokens for r in load.requests) <= 16_384


@pytest.mark.parametrize("make", [shared_prefix_load, wildchat_load])
def test_a_seed_fixes_a_load(make):
    def flat(load):
        return b"".join(r.prompt.tobytes() + b"|" + r.output.tobytes() for r in (*load.warmup, *load.requests))

    assert flat(make(3)) == flat(make(3)) != flat(make(4))


@pytest.mark.parametrize("sizes", [{"conversations": 0}, {"turns": 0}])
def test_empty_conversations_are_refused(sizes):
    with pytest.raises(ValueError, match="conversations and turns"):
        wildchat_load(**sizes)


def test_a_state_after_the_prompt_is_stored_once_and_needs_pages_of_one_token():
    prompt = PromptInfo(prompt_tokens=9, page_size=1, junction=None)
    assert [AfterPrompt().next_stop(position, prompt) for position in (0, 8, 9, 10)] == [9, 9, None, None]
    AfterPrompt().check(1)
    with pytest.raises(ValueError, match="pages of 1 token"):
        AfterPrompt().check(2)
