"""The router's queue at work, with real dispatching: turns come, end, and are refused in time."""

import asyncio
from contextlib import contextmanager

import pytest

from prefixfleet.router.book import Book
from prefixfleet.router.dispatch import Dispatcher
from prefixfleet.router.eligible import Eligible
from prefixfleet.router.errors import TooBusy
from prefixfleet.router.keys import Key
from prefixfleet.router.peer_policies import RoundRobin
from prefixfleet.router.policy import choose
from prefixfleet.router.prompt import Prompt
from prefixfleet.router.token_times import TokenTimes
from prefixfleet.router.turns import MAX_REST_S, MOST_AHEAD, Slos, Turns
from prefixfleet.router.view import View
from prefixfleet.router.waiting import MAX_CONSIDERED
from prefixfleet.router.worker import Worker
from prefixfleet.store.records import WorkerRecord

NAMESPACE = b"n" * 16
CHAINS: dict[bytes, list[bytes]] = {NAMESPACE: []}
TOKENS_PER_S = 1000.0
LONG_S = 300.0  # what waits so long in a test has failed


@contextmanager
def ending(turns):
    """Around a request's stay at its worker."""
    try:
        yield
    finally:
        turns.look()


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def worker(name, tokens_per_s=TOKENS_PER_S):
    record = WorkerRecord(
        worker=name, node=f"node-{name}", url="http://x", model="m", model_path="", namespace={},
        block_bytes=1, max_model_tokens=1, prefill_tokens_per_s=tokens_per_s,
    )  # fmt: skip
    return Worker(record, None, NAMESPACE, 16)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def book(clock):
    return Book(clock)


@pytest.fixture
def make_turns(clock, book):
    def make(slo_s=0.0, tbt_slo_s=0.0, token_times=None, policy=choose, at_once=False, **watched):
        dispatcher = Dispatcher(View(clock), book, dict, b"", clock, lambda n: 0, policy)
        eligible = Eligible(dispatcher, book, clock, token_times or TokenTimes(), **watched)
        return Turns(dispatcher, eligible, book, Slos(slo_s, tbt_slo_s), clock, at_once)

    return make


def ask(turns, request, tokens, workers, clock):
    prompt = Prompt(tokens=tokens)
    return asyncio.ensure_future(turns.wait(request, prompt, CHAINS, workers, clock.now))


def charge(book, dispatched, tokens):
    expected_s = dispatched.decision.prefill_s
    book.charge(dispatched.worker.name, tokens=tokens, sequences=1, expected_s=expected_s)


async def test_a_free_worker_takes_a_request_at_once(make_turns, clock):
    turns = make_turns()

    bound = await turns.wait("r", Prompt(tokens=100), CHAINS, [worker("a")], clock.now)

    assert bound.worker.name == "a"
    assert len(turns) == 0


async def test_a_request_waits_for_a_busy_worker_and_a_short_one_passes_a_long_one(
    make_turns, book, clock
):
    turns = make_turns()
    workers = [worker("a")]
    order = []

    async def serve(request, tokens):
        bound = await turns.wait(request, Prompt(tokens=tokens), CHAINS, workers, clock.now)
        with ending(turns), book.charged("a", tokens=tokens, sequences=1, expected_s=1.0):
            order.append(bound.plan.request)

    with ending(turns), book.charged("a", tokens=9000, sequences=1, expected_s=9.0):
        long = asyncio.ensure_future(serve("long", 8000))
        await asyncio.sleep(0)
        short = asyncio.ensure_future(serve("short", 100))
        await asyncio.sleep(0)
        assert len(turns) == 2
        clock.now += 1.0
    await asyncio.wait_for(asyncio.gather(long, short), 30)

    assert order == ["short", "long"]


async def test_a_worker_that_should_be_free_by_now_gets_the_next_request(make_turns, book, clock):
    """Nothing ended, but its time is over: the engine must not run dry, nor one hang stop all."""
    turns = make_turns()
    with book.charged("a", tokens=9000, sequences=1, expected_s=9.0):
        waiting = ask(turns, "r", 100, [worker("a")], clock)
        await asyncio.sleep(0)
        assert not waiting.done()
        clock.now += 9.0

        bound = await asyncio.wait_for(waiting, 30)

    assert bound.worker.name == "a"


def paced(names, seconds_a_sequence):
    """Workers whose tokens come as much slower as they generate more sequences."""
    times = TokenTimes()
    for name in names:
        for sequences in (1, 2, 4, 8):
            times.observe(name, sequences, sequences * seconds_a_sequence)
    return times


async def test_a_worker_whose_tokens_would_come_too_slowly_is_passed_over(make_turns, book, clock):
    turns = make_turns(tbt_slo_s=0.25, token_times=paced("ab", 0.1))
    with book.charged("a", tokens=1, sequences=4, expected_s=0.0) as charge:
        charge.first_byte(clock.now)
        book.decode_s = 60.0

        bound = await ask(turns, "r", 100, [worker("a"), worker("b")], clock)
        assert bound.worker.name == "b"
        with pytest.raises(TooBusy, match=r"every 0\.500 s"):
            await ask(turns, "r", 100, [worker("a")], clock)


async def test_decodes_that_will_have_ended_by_the_end_of_the_prefill_do_not_count(
    make_turns, book, clock
):
    """Mooncake, section 7: judged by the load of now, prefill and decode swing."""
    turns = make_turns(tbt_slo_s=0.25, token_times=paced("a", 0.1))
    with book.charged("a", tokens=1, sequences=4, expected_s=0.0) as charge:
        charge.first_byte(clock.now)
        book.decode_s = 2.0

        with pytest.raises(TooBusy):
            await ask(turns, "short", 100, [worker("a")], clock)
        bound = await ask(turns, "long", 5_000, [worker("a")], clock)

    assert bound.worker.name == "a"


async def test_a_keys_own_slos_hold_instead_of_the_routers(make_turns, book, clock):
    turns = make_turns(slo_s=0.01, tbt_slo_s=0.01, token_times=paced("a", 0.1))
    key = Key(name="k", sha256="0" * 64, tenant="t", ttft_slo_s=10.0, tbt_slo_s=10.0)

    with pytest.raises(TooBusy):
        await turns.wait("r", Prompt(tokens=100), CHAINS, [worker("a")], clock.now)
    bound = await turns.wait("r", Prompt(tokens=100), CHAINS, [worker("a")], clock.now, key)

    assert bound.worker.name == "a"


async def test_a_worker_that_is_drained_gets_nobody_who_waited_for_it(make_turns, book, clock):
    drained = set()
    turns = make_turns(is_open=lambda name: name not in drained)
    with (
        book.charged("a", tokens=1000, sequences=1, expected_s=1.0),
        book.charged("b", tokens=9000, sequences=1, expected_s=9.0),
    ):
        waiting = ask(turns, "r", 100, [worker("a"), worker("b")], clock)
        await asyncio.sleep(0)
        drained.add("a")
        clock.now += 9.0

        bound = await asyncio.wait_for(waiting, 30)

    assert bound.worker.name == "b"


async def test_a_client_that_leaves_leaves_the_queue(make_turns, book, clock):
    turns = make_turns()
    with book.charged("a", tokens=9000, sequences=1, expected_s=9.0):
        waiting = ask(turns, "r", 100, [worker("a")], clock)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

        assert len(turns) == 0


async def test_a_request_that_would_come_too_late_is_refused_at_once(make_turns, book, clock):
    turns = make_turns(slo_s=5.0)

    busy = book.charged("a", tokens=9000, sequences=1, expected_s=9.0)
    with busy, pytest.raises(TooBusy, match="limit is 5"):
        await turns.wait("r", Prompt(tokens=100), CHAINS, [worker("a")], clock.now)

    assert len(turns) == 0


async def test_a_request_whose_turn_does_not_come_in_time_is_refused(make_turns, book, clock):
    """The estimate was wrong: the worker hangs, and the clock of the test stands still."""
    turns = make_turns(slo_s=0.3)
    busy = book.charged("a", tokens=200, sequences=1, expected_s=0.15)
    with busy, pytest.raises(TooBusy):
        await turns.wait("r", Prompt(tokens=100), CHAINS, [worker("a")], clock.now)

    assert len(turns) == 0


async def test_what_a_request_has_waited_elsewhere_is_part_of_its_limit(make_turns, book, clock):
    """For a worker, say: its limit is on the whole time, not on each place where it waits."""
    turns = make_turns(slo_s=LONG_S)
    arrived_s, clock.now = clock.now, clock.now + LONG_S - 0.3
    busy = book.charged("a", tokens=200, sequences=1, expected_s=0.15)
    with busy, pytest.raises(TooBusy):
        await turns.wait("r", Prompt(tokens=100), CHAINS, [worker("a")], arrived_s)

    assert len(turns) == 0


async def test_requests_spread_over_the_workers_that_are_free(make_turns, book, clock):
    turns = make_turns()
    workers = [worker("a"), worker("b")]
    taken = []

    async def serve(request):
        bound = await turns.wait(request, Prompt(tokens=5000), CHAINS, workers, clock.now)
        taken.append(bound.worker.name)
        if len(taken) == 2:
            both.set()
        with (
            ending(turns),
            book.charged(bound.worker.name, tokens=5000, sequences=1, expected_s=5.0),
        ):
            await released.wait()

    released, both = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.ensure_future(serve(str(i))) for i in range(2)]
    await asyncio.wait_for(both.wait(), 30)
    released.set()
    await asyncio.gather(*tasks)

    assert sorted(taken) == ["a", "b"]


async def test_judging_everybody_rests_for_some_times_as_long_and_who_can_go_goes_meanwhile(
    make_turns, book, clock
):
    """With hundreds that wait nothing else would be done."""
    judged = []

    def takes_a_while(_):
        judged.append(clock.now)
        clock.now += 0.01

    turns = make_turns(decided=takes_a_while)
    workers = [worker("fast"), worker("free but slow", tokens_per_s=1.0)]
    with book.charged("fast", tokens=9000, sequences=1, expected_s=9.0):
        asked = [ask(turns, str(n), 1000 + n, workers, clock) for n in range(20)]
        await asyncio.sleep(0)
        assert len(turns) == 20
        clock.now += 1.0
        turns.look()
        before = len(judged)
        for _ in range(50):
            turns.look()
        assert len(judged) == before

        clock.now += MAX_REST_S  # less than four times what it took
        turns.look()
        assert len(judged) > before + 20
        before = len(judged)
    turns.look()
    assert len(judged) == before + 1
    assert (await asked[0]).worker.name == "fast"
    for request in asked[1:]:
        request.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_with_another_policy_a_request_goes_at_once_and_is_decided_once(
    make_turns, book, clock
):
    """Round robin names a busy worker with idle ones beside it: bound there it is that worker's,
    while a request that waits here would be judged again and again and block those behind it."""
    decisions = []
    turns = make_turns(policy=RoundRobin(), at_once=True, decided=decisions.append)
    workers = [worker("a"), worker("b")]

    taken = []
    for number in range(6):
        dispatched = await ask(turns, f"r{number}", 5_000, workers, clock)
        taken.append(dispatched.worker.name)
        charge(book, dispatched, 5_000)

    assert taken == ["a", "b"] * 3
    assert len(decisions) == 6
    assert len(turns) == 0


async def test_with_another_policy_what_would_be_late_is_refused_too(make_turns, book, clock):
    turns = make_turns(slo_s=8.0, policy=RoundRobin(), at_once=True)
    charge(book, await ask(turns, "r0", 5_000, [worker("a")], clock), 5_000)

    with pytest.raises(TooBusy, match="after 10"):
        await ask(turns, "r1", 5_000, [worker("a")], clock)


async def test_many_that_wait_for_one_model_hold_up_nobody_of_another(make_turns, book, clock):
    turns = make_turns()
    busy, idle = [worker("a")], [worker("b")]
    with book.charged("a", tokens=9000, sequences=1, expected_s=9.0):
        crowd = [ask(turns, str(n), 1000, busy, clock) for n in range(2 * MAX_CONSIDERED)]
        await asyncio.sleep(0)
        assert len(turns) == len(crowd)

        other = ask(turns, "other", 5000, idle, clock)
        await asyncio.sleep(0)

        assert len(turns) == len(crowd)
        assert (await other).worker.name == "b"
    for request in crowd:
        request.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)


async def test_a_worker_that_was_drained_before_the_request_was_judged_does_not_get_it(
    make_turns, clock
):
    """One that is sent again, to those that are left, was given their names a while ago."""
    turns = make_turns(is_open=lambda name: name != "fast")

    workers = [worker("fast"), worker("slow", tokens_per_s=10.0)]
    bound = await turns.wait("r", Prompt(tokens=1000), CHAINS, workers, clock.now)

    assert bound.worker.name == "slow"


async def test_a_fault_while_somebody_waits_leaves_nobody_behind(make_turns, book, clock):
    def policy(*what):
        if turns._queue:
            raise ZeroDivisionError
        return choose(*what)

    turns = make_turns(policy=policy)
    workers = [worker("a"), worker("b", tokens_per_s=1.0)]
    with (
        book.charged("a", tokens=9000, sequences=1, expected_s=9.0),
        pytest.raises(ZeroDivisionError),
    ):
        await turns.wait("r", Prompt(tokens=10), CHAINS, workers, clock.now)

    assert len(turns) == 0


async def test_a_worker_that_hangs_draws_no_more_than_a_few(make_turns, book, clock):
    """By the estimates it is free: all that it has should be done."""
    turns = make_turns()
    workers = [worker("hangs"), worker("works", tokens_per_s=999.0)]
    with book.charged("works", tokens=10, sequences=1, expected_s=50.0):
        asked = []
        for _ in range(2 * MOST_AHEAD):
            clock.now += 1.0
            asked.append(ask(turns, "r", 10, workers, clock))
            await asyncio.sleep(0)
            if asked[-1].done():
                charge(book, asked[-1].result(), 10)
        assert len(turns) == MOST_AHEAD

    clock.now += MAX_REST_S
    turns.look()
    await asyncio.sleep(0)
    bound = [task.result().worker.name for task in asked if task.done()]
    assert bound.count("hangs") == MOST_AHEAD
    assert bound.count("works") == 1
    for request in asked:
        request.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


PREFILL_S = 0.1


def streams_let_go(turns, book, clock):
    """In ten seconds, of an engine that prefills first come, first served, as fast as expected."""
    until_s, free_s = clock.now + 10.0, clock.now
    sent, count = [], 0
    while clock.now < until_s:
        while turns._is_free("a"):
            free_s = max(free_s, clock.now) + PREFILL_S
            charge = book.charge("a", tokens=100, sequences=1, expected_s=PREFILL_S)
            sent.append((free_s, charge))
            count += 1
        clock.now += 0.01
        while sent and sent[0][0] <= clock.now:
            _, done = sent.pop(0)
            done.first_byte(clock.now)
            book.release(done)
    for _, left in sent:
        book.release(left)
    return count


@pytest.mark.parametrize("whole_answers", [20, 50])
def test_whole_answers_whose_prefill_is_over_hold_up_no_streams(
    make_turns, book, clock, whole_answers
):
    turns = make_turns()
    alone = streams_let_go(turns, book, clock)
    for _ in range(whole_answers):
        book.charge("a", tokens=100, sequences=1, expected_s=PREFILL_S, streamed=False)
        clock.now += PREFILL_S

    assert streams_let_go(turns, book, clock) >= 0.9 * alone > 0
