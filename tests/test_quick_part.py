"""The lists of slow and long tests name what exists and are obeyed; the quick part covers what can be seen fast."""

import pytest

from tests.support.slow import LONG, SLOW, TESTS, is_long, is_slow

FILES = sorted(TESTS.rglob("test_*.py"))


@pytest.mark.parametrize("place", [*SLOW, *LONG])
def test_what_is_slow_exists(place: str) -> None:
    assert (TESTS / place).exists()
    assert (TESTS / place).is_dir() == place.endswith("/")


def test_the_list_is_obeyed(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        if is_slow(item.path):
            assert item.get_closest_marker("slow"), item.nodeid
        if is_long(item.path):
            assert item.get_closest_marker("long"), item.nodeid
    assert request.node.get_closest_marker("slow") is None


@pytest.mark.parametrize("folder", ["config", "data", "ops", "codecs", "models", "adapters", "exports", "web", "cli"])
def test_the_quick_part_covers(folder: str) -> None:
    files = [path for path in FILES if path.parent == TESTS / folder]
    assert len([path for path in files if not is_slow(path)]) * 2 > len(files)
