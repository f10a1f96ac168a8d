"""What happens when servers fail, against servers that fail on command."""

import asyncio
import re
import threading
import time
from operator import itemgetter

import pytest

from fake_vllm import DAMAGED, DEAD_ENGINE, EMPTY, OTHER, RESET, SHORT, SILENT_503, SLOW
from lze_trl.servers.client import RequestRefusedError, ServerError, ServerMismatchError, Snapshot
from lze_trl.servers.pool import PromptRequest, ServerPool


SAMPLED = {"temperature": 1.0, "max_tokens": 5}


def make_pool(fakes, request_timeout=1.0, recovery_timeout=30.0, concurrent=4) -> ServerPool:
    return ServerPool([fake.url for fake in fakes], concurrent, request_timeout, recovery_timeout)


def loaded(fakes, **settings) -> ServerPool:
    pool = make_pool(fakes, **settings)
    pool.load(make_snapshot())
    return pool


def make_snapshot(version="run-1", logprob=-1.0) -> Snapshot:
    return Snapshot(version, "/weights", probe=[3, 1, 4], reference=[logprob] * 2, tolerance=1e-3)


def make_groups(count) -> list[PromptRequest]:
    return [PromptRequest([1, 2, i], 3, SAMPLED) for i in range(count)]


def complete(pool, groups):
    return [result for _, result in sorted(pool.stream(groups), key=itemgetter(0))]


def assert_complete(pool, groups):
    """Every group gets exactly its completions, in order, of the weights of the first load."""
    for completions, group in zip(complete(pool, groups), groups, strict=True):
        assert [completion.token_ids for completion in completions] == [[1, i] for i in range(group.count)]
        assert all(completion.logprobs == [-0.5, -0.25] for completion in completions)


def reports_of(caplog, fake):
    return [message for message in caplog.messages if f"The vLLM server {fake.url} failed" in message]


def test_requests_are_shared_by_load(fakes):
    fakes[0].delay, fakes[1].delay = 0.3, 0.01
    assert_complete(loaded(fakes), make_groups(40))
    shares = [fake.requests["/v1/completions"] - 1 for fake in fakes]  # without the probe
    assert sum(shares) == 40 and shares[1] > 2 * shares[0] >= 8
    assert max(fake.most_running for fake in fakes) == 4


@pytest.mark.parametrize(
    ("fault", "servers"), [(500, 1), (429, 2), (408, 1), (DAMAGED, 2), (RESET, 1), (RESET, 2), (SLOW, 2)]
)
def test_failed_requests_are_sent_again(fakes, fault, servers):
    pool = loaded(fakes[:servers])
    fakes[0].faults["/v1/completions"] = [fault, fault]
    assert_complete(pool, make_groups(8))
    assert fakes[0].loads == 1  # it kept its weights, and its version says so


def changed(logprobs=(-0.5, -0.25), **fields):
    return lambda choice: choice.update(fields, logprobs={"token_logprobs": [*logprobs]})


BAD_ANSWERS = {
    "impossible token": changed(token_ids=[-1, 1]),
    "no token": changed(token_ids=[None, 1]),
    "too long": changed([-0.5] * 6, token_ids=[1] * 6),
    "empty": changed([], token_ids=[]),
    "positive log-prob": changed([-0.5, 0.5]),
    "log-prob not a number": changed([-0.5, float("nan")]),
    "a log-prob too few": changed([-0.5]),
    "an index twice": changed(index=0),
    "aborted": changed(finish_reason="abort"),
    "a completion too few": SHORT,
    "without a body": EMPTY,
    "another form": OTHER,
    "deeply nested": b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("fault", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_tokens_and_log_probs_are_not_believed(fakes, caplog, fault):
    fake = fakes[0]
    pool = make_pool([fake], request_timeout=30.0)
    pool.connect(30.0, trains=True)
    pool.load(make_snapshot())
    fake.faults["/v1/completions"] = [fault]
    assert_complete(pool, make_groups(2))
    (report,) = reports_of(caplog, fake)
    assert "/v1/completions sent a damaged answer: " in report and len(report) < 2000


def test_damaged_answers_about_the_weights_are_asked_for_again(fakes):
    pool = make_pool(fakes[:1])
    fakes[0].faults["/weight_info"] = [EMPTY, OTHER]
    fakes[0].faults["/reset_prefix_cache"] = [EMPTY, "busy"]
    assert len(pool.load(make_snapshot())) == 1
    assert (fakes[0].version, fakes[0].loads) == ("run-1", 3)  # twice it was not known to be complete


def test_a_request_that_always_fails_or_is_refused_ends_with_the_servers_words(fakes):
    pool = loaded(fakes)
    for status, times, error, words in (
        (400, 1, RequestRefusedError, "answered 400: .*fault 400 on command"),
        (500, 5, ServerError, "failed 5 times.*answered 500: .*fault 500 on command"),
    ):
        for fake in fakes:
            fake.faults["/v1/completions"] = [status] * 5
        with pytest.raises(error, match=words):
            complete(pool, make_groups(1))
        assert sum(len(fake.faults["/v1/completions"]) for fake in fakes) == 10 - times


def test_others_take_over_from_a_server_that_dies(fakes, caplog):
    for fake in fakes:
        fake.delay = 0.1
    pool = loaded(fakes)

    def stop_when_busy():
        while fakes[0].running < 4:
            time.sleep(0.002)
        fakes[0].stop()

    threading.Thread(target=stop_when_busy, daemon=True).start()
    assert_complete(pool, make_groups(24))
    # Without the two probes: what is asked for twice is what the server had under way
    assert 24 < sum(fake.requests["/v1/completions"] for fake in fakes) - 2 <= 24 + 4
    assert len(reports_of(caplog, fakes[0])) == 1 and not reports_of(caplog, fakes[1])
    fakes[0].start()
    assert_complete(pool, make_groups(40))
    assert f"The vLLM server {fakes[0].url} is back, with the current weights" in caplog.text
    assert fakes[0].version == "run-1"


def test_a_server_that_returns_gets_the_weights_first(fakes):
    fakes[0].delay = 0.1
    pool = loaded(fakes[:1])
    threading.Timer(0.15, fakes[0].stop).start()
    threading.Timer(0.8, fakes[0].start).start()
    assert_complete(pool, make_groups(12))  # 0 would be the weights that it started with
    assert fakes[0].loads == 1 and fakes[0].version == "run-1"


def test_a_restart_between_batches_is_noticed(fakes):
    pool = loaded(fakes[:1])
    pool.load(make_snapshot())
    assert fakes[0].loads == 1  # the same weights are not loaded twice
    fakes[0].stop()
    fakes[0].start()
    assert_complete(pool, make_groups(2))


@pytest.mark.parametrize("recovery_timeout", [0.0, 0.5])
def test_none_left(fakes, caplog, recovery_timeout):
    pool = loaded(fakes, recovery_timeout=recovery_timeout)
    assert_complete(pool, make_groups(6))
    fakes[0].stop()
    fakes[1].engine_dead = True
    begin = time.monotonic()
    message = rf"No vLLM server is left.*within {recovery_timeout:g} s"
    for ask in (lambda: complete(pool, make_groups(2)), lambda: pool.load(make_snapshot("run-2"))):
        with pytest.raises(ConnectionError, match=message) as failure:
            ask()
        assert all(words in str(failure.value) for words in ("ConnectError", DEAD_ENGINE, "resume_from_checkpoint"))
    assert time.monotonic() - begin < 5
    assert len(reports_of(caplog, fakes[1])) == 1


def test_load_waits_for_a_server_and_goes_on_without_the_others(fakes):
    pool = make_pool(fakes)
    for fake in fakes:
        fake.stop()
    threading.Timer(0.5, fakes[1].start).start()
    assert [server.url for server in pool.load(make_snapshot())] == [fakes[1].url]
    assert_complete(pool, make_groups(3))
    fakes[0].start()
    fakes[1].delay = 0.02
    assert_complete(pool, make_groups(40))
    assert fakes[0].version == "run-1"


def test_load_checks_log_probs(fakes):
    pool = make_pool(fakes)
    with pytest.raises(ServerMismatchError, match=r"differ from the trainer's by 2\.50e-01 .*lm_head\.weight"):
        pool.load(make_snapshot(logprob=-1.25))
    with pytest.raises(ServerMismatchError, match="differ"):
        pool.load(make_snapshot(logprob=float("nan")))
    assert all(fake.version == "default" for fake in fakes)
    assert len(pool.load(make_snapshot(logprob=-1.0005))) == 2
    assert pool.servers[0].difference == pytest.approx(5e-4)


def test_weights_that_cannot_be_loaded(fakes):
    fakes[0].faults["/collective_rpc"], fakes[0].faults["/health"] = [500], [SILENT_503]
    assert [server.url for server in make_pool(fakes).load(make_snapshot())] == [fakes[1].url]  # the first has died
    fakes[0].faults["/collective_rpc"] = [500]
    with pytest.raises(ServerMismatchError, match=r"could not load the weights in /weights.*on command.*sync_dir"):
        make_pool(fakes).load(make_snapshot())


def test_connect_waits_and_asks_again_after_damaged_answers(fakes, caplog):
    fake = fakes[0]
    fake.stop()
    fake.faults["/v1/models"], fake.faults["/server_info"] = [EMPTY, OTHER], [OTHER]
    pool = make_pool([fake])
    threading.Timer(0.4, fake.start).start()
    pool.connect(10.0, trains=True)
    assert caplog.text.count(f"Waiting for the vLLM server {fake.url}") == 1
    assert pool.servers[0].model == "fake" and pool.servers[0].dtype == "float32"


def test_connect_gives_up(fakes, monkeypatch):
    monkeypatch.setattr("lze_trl.servers.client._GET_TIMEOUT", 0.2)
    fakes[0].faults["/health"] = [SLOW] * 9
    with pytest.raises(ConnectionError, match=rf"{fakes[0].url}/health: no complete answer within 0\.2 s"):
        make_pool(fakes[:1], request_timeout=99.0).connect(0.3)
    fakes[1].engine_dead = True
    with pytest.raises(ConnectionError, match=rf"{fakes[1].url}/health answered 503.*Not up after 0\.3 s"):
        make_pool(fakes).connect(0.3, trains=True)


def test_connect_refuses_a_server_that_cannot_be_trained_with(fakes):
    fakes[0].faults["/server_info"] = [404]
    with pytest.raises(ServerMismatchError, match="VLLM_SERVER_DEV_MODE=1"):
        make_pool(fakes[:1]).connect(5.0, trains=True)


@pytest.mark.parametrize("urls", [[], ["http://a:1", "http://a:1/v1/"], ["127.0.0.1:8000"], ["http://a?key=b"]])
def test_urls_are_checked(urls):
    with pytest.raises(ValueError, match="vllm_server_urls"):
        ServerPool(urls, 1, 1.0, 1.0)


def test_works_where_an_event_loop_is_running_and_leaves_nothing_running(fakes):
    async def notebook():
        assert_complete(loaded(fakes), make_groups(1))

    asyncio.run(notebook())
    assert not [thread.name for thread in threading.enumerate() if re.search("portal", thread.name, re.I)]
