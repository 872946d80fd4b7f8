"""So many responses at most, by fair shares: held against a list that is looked through."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.router.fairly_kept import OVER_AT_ONCE, FairlyKept
from prefixfleet.store.stored_responses import ResponseName

TTL_S = 10.0


def named(tenant, response):
    return ResponseName(b"%d" % tenant, b"%d" % response)


class Listed:
    """The same, found by looking at everything; ties go as those of the other one."""

    def __init__(self, most):
        self.most, self.kept = most, {}

    def keep(self, name, worker, now, tie):
        self.kept.pop(name, None)
        self.kept[name] = (worker, now + TTL_S)
        while len(self.kept) > self.most:
            counts = Counter(other.tenant for other in self.kept)
            largest = {tenant for tenant, n in counts.items() if n == max(counts.values())}
            tenant = next(t for t in (gone.tenant for gone in tie) if t in largest)
            del self.kept[next(other for other in self.kept if other.tenant == tenant)]

    def drop(self, names, now):
        for name in names:
            assert self.kept.pop(name)[1] <= now


steps = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 30), st.sampled_from([0.0, 0.0, 0.1, 4.0])),
    max_size=80,
)


@given(steps, st.integers(1, 12))
def test_fair_shares_are_those_of_a_list(happened, most):
    fair, listed, now = FairlyKept(most, TTL_S), Listed(most), 0.0
    for number, (tenant, response, pause_s) in enumerate(happened):
        now += pause_s
        name = named(tenant, response)
        gone = fair.keep(name, str(number), now)
        over = [g for g in gone if g != name and listed.kept.get(g, ("", now + 1))[1] <= now]
        listed.drop(over, now)
        listed.keep(name, str(number), now, [g for g in gone if g not in over])

        assert fair.all() == {name: worker for name, (worker, _) in listed.kept.items()}
        assert len(fair) == len(listed.kept) <= most
        for other, (worker, until_s) in listed.kept.items():
            assert fair.worker_of(other, now) == (worker if until_s > now else "")


def test_what_is_over_goes_though_its_tenant_comes_no_more():
    fair = FairlyKept(1_000, TTL_S)
    for number in range(2 * OVER_AT_ONCE):
        fair.keep(named(1, number), "w", 0.0)

    gone = [fair.keep(named(2, number), "w", TTL_S) for number in range(4)]

    assert max(map(len, gone)) == OVER_AT_ONCE
    assert len(fair) == 4
