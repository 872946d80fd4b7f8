"""A prefix is hot when enough nodes ask for it within the window, once a window."""

from prefixfleet.store.heat import Heat


def test_enough_nodes_within_the_window_make_it_hot_once():
    heat = Heat(window_s=10, nodes=3)
    assert not heat.asked("a", [b"x"], now=0)
    assert not heat.asked("b", [b"x"], now=1)
    assert heat.asked("c", [b"x"], now=2) == {"a", "b", "c"}
    assert not heat.asked("d", [b"x"], now=3)


def test_one_node_that_asks_often_makes_nothing_hot():
    heat = Heat(window_s=10, nodes=2)
    assert not any(heat.asked("a", [b"x"], now=second) for second in range(9))


def test_questions_before_the_window_do_not_count():
    heat = Heat(window_s=10, nodes=2)
    heat.asked("a", [b"x"], now=0)
    assert not heat.asked("b", [b"x"], now=10)
    assert heat.asked("c", [b"x"], now=11) == {"b", "c"}


def test_it_gets_hot_again_after_a_window():
    heat = Heat(window_s=10, nodes=1)
    assert heat.asked("a", [b"x"], now=0)
    assert not heat.asked("a", [b"x"], now=9)
    assert heat.asked("a", [b"x"], now=10)


def test_prefixes_do_not_mix_and_go_by_their_last_block():
    heat = Heat(window_s=10, nodes=2)
    heat.asked("a", [b"x", b"y"], now=0)
    assert not heat.asked("b", [b"x"], now=0)
    assert heat.asked("c", [b"x", b"y"], now=0) == {"a", "c"}


def test_the_number_of_prefixes_is_bounded_and_the_oldest_goes():
    heat = Heat(window_s=10, nodes=2, limit=2)
    for block in (b"x", b"y", b"z"):
        heat.asked("a", [block], now=0)
    assert len(heat) == 2
    assert not heat.asked("b", [b"x"], now=0)
    assert heat.asked("b", [b"z"], now=0) == {"a", "b"}
