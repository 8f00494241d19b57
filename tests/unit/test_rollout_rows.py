"""The order of cache rows: running ones stay in front, caches are never lost or mixed up."""

import random

from services.rollout.engine.rows import Rows


def _check(rows: Rows, cache: dict[int, str], expected: dict[int, str], running: set[int]) -> None:
    assert {rows.seat_at[r] for r in range(rows.running)} == running
    kept_rows = range(rows.running, rows.running + len(rows.kept))
    assert {rows.seat_at[r] for r in kept_rows} == set(rows.kept.values())
    assert all(rows.row_of[rows.seat_at[r]] == r for r in range(rows.count))
    for seat, content in expected.items():
        assert cache.get(rows.row_of[seat]) == content


def test_random_operations_keep_every_cache():
    seed = 20260
    rng = random.Random(seed)
    for _ in range(200):
        cache: dict[int, str] = {}
        rows = Rows(rng.randint(1, 7), lambda a, b, _seat, cache=cache: cache.__setitem__(b, cache.get(a)))
        running: dict[int, str] = {}
        kept: dict[str, str] = {}
        for n in range(80):
            choice = rng.random()
            if choice < 0.4 and len(running) < rows.count:
                seat = rows.take()
                kept = {k: v for k, v in kept.items() if k in rows.kept}
                running[seat] = cache[rows.row_of[seat]] = f"c{n}"
            elif choice < 0.55 and kept and len(running) < rows.count:
                key = rng.choice(list(kept))
                seat = rows.take_kept(key)
                running[seat] = kept.pop(key)
            elif choice < 0.9 and running:
                seat = rng.choice(list(running))
                key = rng.choice(["", f"k{n}", *kept])
                if key:
                    kept[key] = running[seat]
                rows.end(seat, key)
                del running[seat]
            elif kept:
                key = rng.choice(list(kept))
                rows.drop(key)
                del kept[key]
            expected = {**running, **{rows.kept[k]: v for k, v in kept.items()}}
            _check(rows, cache, expected, set(running))


def test_the_least_recently_kept_goes_first():
    rows = Rows(2, lambda *_: None)
    for key in ("a", "b"):
        rows.end(rows.take(), key)
    rows.take()
    assert list(rows.kept) == ["b"]
