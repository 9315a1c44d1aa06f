"""Weighted rendezvous placement: distinct domains, shares by weight, and only what must move moves."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.copies.placement import placement
from shardkit.repository.policy import Critical, LocationRecord, Policy

DIGESTS = [f"sha256:{hashlib.sha256(b'%d' % i).hexdigest()}" for i in range(400)]


def _location(name: str, domain: str | None = None, weight: int = 100) -> LocationRecord:
    return LocationRecord(name, f"/copies/{name}", domain or name, 1, weight)


ROOT = _location("root")

others = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(0, 300)),
    max_size=7,
    unique_by=lambda one: one[0],
).map(lambda found: [_location(f"l{name}", f"d{domain}", weight) for name, domain, weight in found])


@given(others, st.integers(1, 5))
def test_copies_lie_in_distinct_domains_as_many_as_there_can_be(
    found: list[LocationRecord], copies: int
) -> None:
    locations = [ROOT, *found]
    domain = {one.name: one.domain for one in locations}
    possible = {ROOT.domain} | {one.domain for one in found if one.weight}
    for digest in DIGESTS[:40]:
        names = placement(Policy(copies=copies), locations, digest, "tar")
        assert names[0] == "root"
        assert len({domain[name] for name in names}) == len(names) == min(copies, len(possible))
        everywhere = placement(Policy(copies=copies), locations, digest, "index")
        assert set(everywhere) == {"root"} | {one.name for one in found if one.weight}


@given(others, st.integers(0, 4), st.integers(1, 300), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_new_location_only_takes(
    found: list[LocationRecord], domain: int, weight: int, copies: int, order: object
) -> None:
    policy, new = Policy(copies=copies), _location("new", f"d{domain}", weight)
    shuffled = [*found, new]
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    for digest in DIGESTS[:40]:
        before = placement(policy, [ROOT, *found], digest, "tar")
        after = placement(policy, [ROOT, *shuffled], digest, "tar")
        if "new" in after:
            assert len(set(before) - set(after)) <= 1  # it takes the place of one at most
            assert set(after) - set(before) == {"new"}
        else:
            assert after == before


@given(others, st.integers(1, 4))
def test_more_copies_keep_those_that_were(found: list[LocationRecord], copies: int) -> None:
    gold = Policy(copies=copies, critical=(Critical("gold", copies + 2),))
    for digest in DIGESTS[:40]:
        few = placement(gold, [ROOT, *found], digest, "tar", frozenset({"tin"}))
        many = placement(gold, [ROOT, *found], digest, "tar", frozenset({"tin", "gold"}))
        assert many[: len(few)] == few


@pytest.mark.parametrize("weights", [(100, 100, 100), (100, 200, 300), (1, 9), (1_000_000, 1)])
def test_shares_follow_weights(weights: tuple[int, ...]) -> None:
    locations = [ROOT, *(_location(f"l{i}", weight=weight) for i, weight in enumerate(weights))]
    digests = [f"sha256:{hashlib.sha256(b'share %d' % i).hexdigest()}" for i in range(6_000)]
    count = dict.fromkeys((one.name for one in locations), 0)
    for digest in digests:
        for name in placement(Policy(copies=2), locations, digest, "arrow"):
            count[name] += 1
    assert count["root"] == len(digests)
    for one in locations[1:]:
        share = one.weight / sum(weights)
        spread = 5 * (len(digests) * share * (1 - share)) ** 0.5  # five standard deviations of a fair draw
        assert abs(count[one.name] - len(digests) * share) <= spread + 1


def test_places_never_change_between_releases() -> None:
    locations = [ROOT, _location("a"), _location("b", weight=50), _location("c", "a")]
    found = [placement(Policy(copies=2), locations, digest, "tar")[1] for digest in DIGESTS[:60]]
    assert "".join(found) == "babbaababbbbbccbaaacaacabbcacacaaaacaaccacaaccaccaaabacbaaac"
