"""Who gives up its place on a node, and who keeps it."""

from prefixfleet.store.places import Absent, who_ends

LONG, SHORT = Absent("long", 60.0), Absent("short", 5.0)


def test_nobody_ends_while_there_are_places():
    assert who_ends([LONG, SHORT], beyond=0) == frozenset()
    assert who_ends([LONG, SHORT], beyond=-7) == frozenset()


def test_whose_engines_left_longest_ago_goes_first():
    assert who_ends([SHORT, LONG], beyond=1) == {"long"}
    assert who_ends([SHORT, LONG], beyond=2) == {"long", "short"}
    assert who_ends([], beyond=2) == frozenset()


def test_a_wish_keeps_the_place_as_long_as_another_one_can_go():
    wished = Absent("wished", 600.0, wished=True)

    assert who_ends([wished, SHORT], beyond=1) == {"short"}
    assert who_ends([wished, SHORT], beyond=2) == {"short", "wished"}


def test_what_nobody_will_ask_for_goes_in_any_case_and_takes_the_turn_of_another():
    over = Absent("over", 11.0, over=True)

    assert who_ends([LONG, over], beyond=0) == {"over"}
    assert who_ends([LONG, over], beyond=1) == {"over"}
    assert who_ends([LONG, Absent("kept", 11.0, over=True, wished=True)], beyond=0) == frozenset()
