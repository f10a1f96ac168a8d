"""What happens when servers fail, against servers that fail on command."""

import asyncio
import logging
import re
import threading
import time

import pytest

import fake_vllm
from fake_vllm import FakeVLLM
from lze_trl.rollout.servers import pool as pool_module
from lze_trl.rollout.servers.client import Identity, RequestRefusedError, ServerError, ServerMismatchError, Snapshot
from lze_trl.rollout.servers.pool import Group, ServerPool
from pool_watch import PoolWatch


SAMPLED = {"temperature": 1.0, "max_tokens": 5}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(pool_module, "_RETRY_SECONDS", 0.05)


@pytest.fixture
def fakes():
    started = [FakeVLLM(), FakeVLLM()]
    yield started
    for fake in started:
        fake.stop()


@pytest.fixture
def fake():
    fake = FakeVLLM(vocab_size=64)
    yield fake
    fake.stop()


def make_pool(fakes, request_timeout=1.0, recovery_timeout=30.0, concurrent=4) -> ServerPool:
    return ServerPool([fake.url for fake in fakes], concurrent, request_timeout, recovery_timeout)


def make_snapshot(version="run-1", logprob=-1.0) -> Snapshot:
    return Snapshot(version, "/weights", probe=[3, 1, 4], reference=[logprob] * 2, tolerance=1e-3)


def make_groups(count, size=3, body=SAMPLED) -> list[Group]:
    return [Group([1, 2, i], size, body) for i in range(count)]


def assert_complete(results, groups, loads=1):
    """Every group has exactly its completions, in order, of the weights of the given load."""
    assert len(results) == len(groups)
    for completions, group in zip(results, groups, strict=True):
        assert [completion.token_ids for completion in completions] == [[loads, i] for i in range(group.count)]
        assert all(completion.logprobs == [-0.5, -0.25] for completion in completions)


def stop_when_busy(fake, then=lambda: None):
    """Stop a server as soon as it has as many requests in progress as it gets at a time."""

    def wait():
        while fake.running < 4:
            time.sleep(0.002)
        fake.stop()
        then()

    threading.Thread(target=wait, daemon=True).start()


def test_spreads_by_load(fakes):
    for fake in fakes:
        fake.delay = 0.05
    pool = make_pool(fakes, concurrent=4)
    pool.load(make_snapshot())
    groups = make_groups(16)
    assert_complete(pool.complete(groups), groups)
    shares = [fake.requests["/v1/completions"] - 1 for fake in fakes]  # without the probe
    assert sum(shares) == 16 and min(shares) >= 4
    assert max(fake.most_running for fake in fakes) == 4


def test_a_slow_server_gets_less(fakes):
    fakes[0].delay, fakes[1].delay = 0.3, 0.01
    pool = make_pool(fakes, concurrent=1)
    pool.load(make_snapshot())
    groups = make_groups(10)
    assert_complete(pool.complete(groups), groups)
    assert fakes[1].requests["/v1/completions"] > 2 * fakes[0].requests["/v1/completions"]


def test_groups_of_different_sizes(fakes):
    pool = make_pool(fakes)
    pool.load(make_snapshot())
    groups = [Group([1], size, SAMPLED) for size in (1, 5, 2)]
    assert_complete(pool.complete(groups), groups)
    assert pool.complete([]) == []


def test_completions_before_the_first_sync_are_refused_at_once(fakes):
    with pytest.raises(RuntimeError, match="No weights were synced yet"):
        make_pool(fakes).complete([Group([1], 1, SAMPLED)])


def test_greedy_decoding_repeats_the_prompt_instead_of_asking_for_n(fakes):
    pool = make_pool(fakes[:1])
    pool.load(make_snapshot())
    groups = [Group([1, 2], 3, SAMPLED | {"temperature": 0.0})]
    assert_complete(pool.complete(groups), groups)
    body = fakes[0].bodies[-1]
    assert body["prompt"] == [[1, 2]] * 3 and "n" not in body


STATUSES = (500, 503, 429, 408)
DAMAGES = (fake_vllm.DAMAGED, fake_vllm.SHORT, fake_vllm.ABORTED, fake_vllm.EMPTY, fake_vllm.OTHER)
CUTS = (fake_vllm.RESET, fake_vllm.SLOW)


@pytest.mark.parametrize(
    ("fault", "alone"),
    [*((fault, False) for fault in STATUSES + DAMAGES + CUTS), *((fault, True) for fault in (500, "short", "reset"))],
)
def test_failed_requests_are_sent_again(fakes, fault, alone):
    pool = make_pool(fakes[:1] if alone else fakes)
    pool.load(make_snapshot())
    groups = make_groups(8)
    assert_complete(pool.complete(groups), groups)
    requests = fakes[0].requests["/v1/completions"]
    fakes[0].faults["/v1/completions"] = [fault, fault]
    assert_complete(pool.complete(groups), groups)
    if alone:
        assert fakes[0].requests["/v1/completions"] > 2 * requests
    assert fakes[0].loads == 1  # it kept its weights, and its version says so


NESTED = b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def token(value):
    return lambda choice: choice.update(token_ids=[value, 1])


def logprob(value):
    return lambda choice: choice["logprobs"].update(token_logprobs=[-0.5, value])


def long(count):
    return lambda choice: choice.update(token_ids=[1] * count, logprobs={"token_logprobs": [-0.5] * count})


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (token(64), r"token 64, which must be a whole number from 0 to 63"),
        (token(-1), "token -1, which"),
        (token(10**30), f"token {10**30}, which"),
        (token(None), "token None, which"),
        (token("7"), "token '7', which"),
        (token(7.0), r"token 7\.0, which"),
        (token({"id": 7}), r"token \{'id': 7\}, which"),
        (token(True), "token True, which"),
        (token("7" * 10_000), "token '777.{490,500}…, which"),
        (long(6), "completion length 6, which must be a whole number from 1 to 5"),
        (long(10**5), "completion length 100000, which"),
        (long(0), "completion length 0, which"),
        (lambda choice: choice.update(token_ids="12"), "'12' in place of a list of tokens"),
        (logprob(0.5), r"log-prob 0\.5, which must be from -10000 to 0"),
        (logprob(-1e5), r"log-prob -100000\.0, which"),
        (logprob(-(10**400)), "log-prob -1000.*, which"),
        (logprob(float("nan")), "log-prob nan, which"),
        (logprob(float("-inf")), "log-prob -inf, which"),
        (logprob(None), "log-prob None, which"),
        (logprob(False), "log-prob False, which"),
        (lambda choice: choice["logprobs"].update(token_logprobs=[-0.5]), "2 tokens with 1 log-probs"),
        (lambda choice: choice.update(index=0), r"completions with the indices \[0, 0, 1\] instead of \[0, 1, 2\]"),
        (lambda choice: choice.update(index=7), r"indices \[0, 1, 7\]"),
        (NESTED, "RecursionError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tokens_and_log_probs_are_not_believed(fake, caplog, fault, words):
    pool = make_pool([fake], request_timeout=30.0)
    pool.connect(make_identity(), timeout=30.0)
    pool.load(make_snapshot())
    groups = make_groups(2)
    fake.faults["/v1/completions"] = [fault]
    assert_complete(pool.complete(groups), groups)
    (report,) = reports_of(caplog, fake)
    assert re.search(rf"/v1/completions sent a damaged answer: .*{words}", report)


def test_damaged_answers_about_the_weights_are_asked_for_again(fakes):
    pool = make_pool(fakes[:1])
    fakes[0].faults["/weight_info"] = [fake_vllm.EMPTY, NESTED]
    fakes[0].faults["/reset_prefix_cache"] = [fake_vllm.EMPTY]
    assert len(pool.load(make_snapshot())) == 1
    assert fakes[0].version == "run-1"
    # Two that were damaged, one before each of two loads, the first of which was not known to be complete
    assert (fakes[0].requests["/weight_info"], fakes[0].loads) == (4, 2)


def test_a_request_that_always_fails_ends_with_the_servers_words(fakes):
    pool = make_pool(fakes)
    pool.load(make_snapshot())
    for fake in fakes:
        fake.faults["/v1/completions"] = [500] * 20
    with pytest.raises(ServerError, match=r"failed 5 times.*answered 500: fault 500 on command"):
        pool.complete(make_groups(1))


def test_a_refused_request_is_not_repeated(fakes):
    pool = make_pool(fakes)
    pool.load(make_snapshot())
    fakes[0].faults["/v1/completions"] = fakes[1].faults["/v1/completions"] = [400]
    with pytest.raises(RequestRefusedError, match="answered 400: fault 400 on command"):
        pool.complete(make_groups(1))


def test_others_take_over_from_a_server_that_dies(fakes, caplog, monkeypatch):
    for fake in fakes:
        fake.delay = 0.1
    pool = make_pool(fakes)
    pool.load(make_snapshot())
    watch = PoolWatch(pool, monkeypatch)
    stop_when_busy(fakes[0])
    groups = make_groups(24)
    assert_complete(pool.complete(groups), groups)
    watch.assert_went_on(24, dead=fakes[0].url, survivor=fakes[1].url, at_a_time=4)
    assert watch.intervals > 0  # the dead one was asked again while the other worked
    assert f"The vLLM server {fakes[0].url} failed" in caplog.text
    assert f"The vLLM server {fakes[1].url}" not in caplog.text
    fakes[0].start()


def test_a_pause_is_seen(fakes, monkeypatch):
    fakes[0].delay = 0.1
    pool = make_pool(fakes[:1])
    pool.load(make_snapshot())
    watch = PoolWatch(pool, monkeypatch)

    def return_after_a_pause():
        while watch.pauses == 0:
            time.sleep(0.002)
        fakes[0].start()

    stop_when_busy(fakes[0], then=return_after_a_pause)
    pool.complete(make_groups(12))
    assert watch.pauses > 0 and watch.failed


def test_a_server_that_returns_gets_the_weights_first(fakes, caplog):
    fake = fakes[0]
    fake.delay = 0.1
    pool = make_pool([fake])
    pool.load(make_snapshot())
    threading.Timer(0.15, fake.stop).start()
    threading.Timer(0.8, fake.start).start()
    groups = make_groups(12)
    results = pool.complete(groups)
    assert_complete(results, groups, loads=1)  # 0 would be the weights that it started with
    assert fake.loads == 1 and fake.version == "run-1"
    assert "is back, with the current weights" in caplog.text


def test_a_restart_between_batches_is_noticed(fakes):
    pool = make_pool(fakes[:1])
    pool.load(make_snapshot())
    fakes[0].stop()
    fakes[0].start()
    groups = make_groups(2)
    assert_complete(pool.complete(groups), groups, loads=1)


def test_none_left(fakes):
    pool = make_pool(fakes, recovery_timeout=0.5)
    pool.load(make_snapshot())
    for fake in fakes:
        fake.stop()
    with pytest.raises(ConnectionError, match=r"No vLLM server is left.*0\.5 s.*ConnectError"):
        pool.complete(make_groups(2))
    with pytest.raises(ConnectionError, match="No vLLM server is left"):
        pool.load(make_snapshot("run-2"))
    for fake in fakes:
        fake.start()


# ---- Dead engines: the server says so, and perhaps stops a little later ----


def lose_engine(fake, stops_after=None):
    fake.engine_dead = True
    if stops_after is not None:
        threading.Timer(stops_after, fake.stop).start()


def reports_of(caplog, fake):
    return [message for message in caplog.messages if f"The vLLM server {fake.url} failed" in message]


@pytest.mark.parametrize("stops_after", [None, 0.3])
def test_a_dead_engine_is_reported_once_and_given_up_in_time(fakes, caplog, stops_after):
    fake = fakes[0]
    pool = make_pool([fake], recovery_timeout=1.5)
    pool.load(make_snapshot())
    fake.delay = 0.2  # so that four requests are in progress
    threading.Timer(0.1, lose_engine, [fake, stops_after]).start()
    begin = time.monotonic()
    with pytest.raises(ConnectionError) as failure:
        pool.complete(make_groups(8))
    assert 1.5 < time.monotonic() - begin < 10
    (report,) = reports_of(caplog, fake)
    for text in (report, str(failure.value)):
        assert f"answered 500: {fake_vllm.DEAD_ENGINE} Its engine has died" in text
        assert "Restart it; if it runs on a CPU, with `--no-enable-chunked-prefill`" in text
        assert "1.5 s (`recovery_timeout` of `vllm_server_kwargs`)" in text
    assert "waiting up to 1.5 s" in report and "ConnectError" not in str(failure.value)
    assert fake.url in str(failure.value) and "resume_from_checkpoint" in str(failure.value)
    assert len(caplog.messages) == 1
    if stops_after is not None:
        fake.start()


def test_others_take_over_from_a_dead_engine(fakes, caplog):
    for fake in fakes:
        fake.delay = 0.05
    pool = make_pool(fakes)
    pool.load(make_snapshot())
    threading.Timer(0.02, lose_engine, [fakes[0]]).start()
    for _ in range(2):
        groups = make_groups(24)
        assert_complete(pool.complete(groups), groups)
    (report,) = reports_of(caplog, fakes[0])
    assert "Its engine has died" in report and "Its requests go to other servers" in report
    assert reports_of(caplog, fakes[1]) == []
    fakes[0].stop()
    fakes[0].start()  # as a supervisor does
    groups = make_groups(40)
    assert_complete(pool.complete(groups), groups)
    assert f"The vLLM server {fakes[0].url} is back, with the current weights" in caplog.text
    assert fakes[0].version == "run-1"


def test_a_dead_engine_explains_an_outage_that_was_reported_without_a_reason(fakes, caplog):
    pool = make_pool(fakes[:1], recovery_timeout=0.5)
    fakes[0].faults["/weight_info"] = [fake_vllm.RESET]
    lose_engine(fakes[0])
    with pytest.raises(ConnectionError, match=fake_vllm.DEAD_ENGINE[:20]):
        pool.load(make_snapshot())
    first, second = reports_of(caplog, fakes[0])
    assert "engine has died" not in first and fake_vllm.DEAD_ENGINE in second


def test_an_engine_that_dies_while_it_loads(fakes, caplog):
    """The only sign is that its health check fails, without a word."""
    pool = make_pool(fakes, recovery_timeout=0.5)
    fakes[0].faults["/collective_rpc"], fakes[0].faults["/health"] = [500], [fake_vllm.SILENT_503]
    assert [server.url for server in pool.load(make_snapshot())] == [fakes[1].url]
    (report,) = reports_of(caplog, fakes[0])
    assert "/health answered 503: (empty). Its engine has died" in report


def test_a_dead_engine_at_the_start(fake, caplog):
    lose_engine(fake)
    with pytest.raises(ConnectionError, match=r"engine has died.*Not up after 0\.5 s.*vllm_server_timeout"):
        make_pool([fake]).connect(make_identity(), timeout=0.5)
    assert [message.split(" (")[0] for message in caplog.messages] == [f"Waiting for the vLLM server {fake.url}"]


def test_a_long_wait_is_not_silent(fakes, caplog, monkeypatch):
    monkeypatch.setattr(pool_module, "_REMIND_SECONDS", 0.4)
    pool = make_pool(fakes, recovery_timeout=30.0)
    for fake in fakes:
        lose_engine(fake)

    def restart():
        fakes[0].stop()
        fakes[0].start()

    threading.Timer(1.5, restart).start()
    begin = time.monotonic()
    assert [server.url for server in pool.load(make_snapshot())] == [fakes[0].url]
    reminders = [message for message in caplog.messages if "Still waiting" in message]
    assert 1 <= len(reminders) <= (time.monotonic() - begin) / 0.4
    left = [int(re.search(r"for up to (\d+) s more", message)[1]) for message in reminders]
    assert left == sorted(left, reverse=True) and 0 < left[-1] < 30


def test_no_time_to_recover(fakes):
    pool = make_pool(fakes[:1], recovery_timeout=0.0)
    pool.load(make_snapshot())
    groups = make_groups(6)
    assert_complete(pool.complete(groups), groups)
    lose_engine(fakes[0])
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match="within 0 s"):
        pool.complete(groups)
    assert time.monotonic() - begin < 5


def test_load_waits_for_a_server_and_goes_on_without_the_others(fakes):
    pool = make_pool(fakes)
    for fake in fakes:
        fake.stop()
    threading.Timer(0.5, fakes[1].start).start()
    assert [server.url for server in pool.load(make_snapshot())] == [fakes[1].url]
    groups = make_groups(3)
    assert_complete(pool.complete(groups), groups)
    fakes[0].start()
    groups = make_groups(40)
    fakes[1].delay = 0.02
    assert_complete(pool.complete(groups), groups)
    assert fakes[0].version == "run-1"


def test_load_checks_log_probs(fakes):
    pool = make_pool(fakes)
    with pytest.raises(ServerMismatchError, match=r"differ from the trainer's by 2\.50e-01 .*lm_head\.weight"):
        pool.load(make_snapshot(logprob=-1.25))
    with pytest.raises(ServerMismatchError, match="differ"):
        pool.load(make_snapshot(logprob=float("nan")))
    assert all(fake.version == "default" for fake in fakes)
    assert len(pool.load(make_snapshot(logprob=-1.0005))) == 2
    assert pool.servers[0].difference.mean == pytest.approx(5e-4)


def test_weights_that_cannot_be_loaded(fakes):
    pool = make_pool(fakes)
    fakes[1].faults["/collective_rpc"] = [500]
    with pytest.raises(ServerMismatchError, match=r"could not load the weights in /weights.*on command.*sync_dir"):
        pool.load(make_snapshot())


def test_a_busy_prefix_cache_is_reset_again(fakes):
    pool = make_pool(fakes[:1])
    fakes[0].faults["/reset_prefix_cache"] = ["busy"]
    assert len(pool.load(make_snapshot())) == 1
    assert fakes[0].requests["/reset_prefix_cache"] == 2


def test_the_same_weights_are_not_loaded_twice(fakes):
    pool = make_pool(fakes)
    pool.load(make_snapshot())
    pool.load(make_snapshot())
    assert [fake.loads for fake in fakes] == [1, 1]


# ---- Start ----

TEXT = "2+2"


def make_identity(**changes) -> Identity:
    values = {"text": TEXT, "token_ids": [ord(c) % 50 for c in TEXT], "last_token_id": 63, "context_length": 8}
    return Identity(**(values | changes))


def test_connect_waits(fake, caplog):
    fake.stop()
    pool = make_pool([fake])
    threading.Timer(0.4, fake.start).start()
    pool.connect(make_identity(), timeout=10.0)
    assert f"Waiting for the vLLM server {fake.url}" in caplog.text
    assert pool.servers[0].model == "fake" and pool.servers[0].dtype == "float32"


def test_connect_asks_again_after_damaged_answers(fake):
    fake.faults["/v1/models"] = [fake_vllm.EMPTY, fake_vllm.OTHER]
    fake.faults["/tokenize"] = [fake_vllm.OTHER]
    pool = make_pool([fake])
    pool.connect(make_identity(), timeout=10.0)
    assert pool.servers[0].model == "fake"


def test_connect_names_the_version_that_tells_what_is_needed(fake):
    fake.faults["/server_info"] = [fake_vllm.OTHER]
    with pytest.raises(ServerMismatchError, match=r"does not tell .*'data': \[\].*version 0\.32"):
        make_pool([fake]).connect(make_identity(), timeout=5.0)


def test_connect_gives_up(fakes):
    fakes[1].stop()
    fakes[0].vocab_size = 64
    with pytest.raises(ConnectionError, match=rf"{fakes[1].url}: .*Not up after 0\.3 s.*vllm_server_timeout"):
        make_pool(fakes).connect(make_identity(), timeout=0.3)
    fakes[1].start()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 33}, r"context of 32 tokens.*33.*--max-model-len"),
        ({"token_ids": [1, 2, 3]}, r"another tokenizer: '2\+2' is \[0, 43, 0\] there and \[1, 2, 3\]"),
        ({"last_token_id": 64}, "does not know token 64"),
        ({"last_token_id": 62}, "knows token 63, and the trainer's last token is 62"),
    ],
)
def test_connect_refuses_another_model(fake, changes, message):
    with pytest.raises(ServerMismatchError, match=message):
        make_pool([fake]).connect(make_identity(**changes), timeout=5.0)


def test_connect_without_development_endpoints(fake):
    fake.faults["/server_info"] = [404]
    with pytest.raises(ServerMismatchError, match="VLLM_SERVER_DEV_MODE=1"):
        make_pool([fake]).connect(make_identity(), timeout=5.0)


@pytest.mark.parametrize("urls", [[], ["http://127.0.0.1:1", "http://127.0.0.1:1/"], ["127.0.0.1:8000"]])
def test_urls_are_checked(urls):
    with pytest.raises(ValueError, match="vllm_server_urls"):
        ServerPool(urls, 1, 1.0, 1.0)


def test_works_where_an_event_loop_is_running(fakes):
    async def notebook():
        pool = make_pool(fakes)
        pool.load(make_snapshot())
        return pool.complete(make_groups(1))

    assert len(asyncio.run(notebook())) == 1


def test_nothing_is_left_running(fakes):
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    pool = make_pool(fakes)
    before = threading.active_count()
    pool.load(make_snapshot())
    pool.complete(make_groups(3))
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "portal" in name.lower()]
    assert threading.active_count() <= before + 2 * len(fakes) * 4  # the fakes' own
