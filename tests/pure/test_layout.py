"""The five layouts, their names, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from splash.core.errors import ConfigError
from splash.core.layout import KV, LAYOUTS, Layout, Projections, Rows, check_layout, parse_layout


def test_layouts_are_all_the_products_of_the_two_placements_but_one() -> None:
    products = set(itertools.product(Projections, KV)) - {(Projections.REPLICATED, KV.REPLICATED)}
    assert {(layout.projections, layout.kv) for layout in LAYOUTS.values()} == products
    assert list(LAYOUTS) == ["tp", "dp", "cp", "dop", "dcp"]


def test_replicating_both_is_refused() -> None:
    with pytest.raises(ConfigError, match="dominated"):
        Layout(Projections.REPLICATED, KV.REPLICATED)


@pytest.mark.parametrize("name", LAYOUTS)
def test_names_round_trip_and_equal_layouts_are_one_key(name: str) -> None:
    layout = parse_layout(name)
    assert layout.name == str(layout) == name
    again = Layout(layout.projections, layout.kv)
    assert again == layout and {layout: 1}[again] == 1


@pytest.mark.parametrize("name", ["", "TP", "ep", None, 3, ["tp"]])
def test_an_unknown_name_is_refused_with_the_names_that_exist(name: object) -> None:
    with pytest.raises(ConfigError, match="tp, dp, cp, dop, dcp") as caught:
        parse_layout(name)  # type: ignore[arg-type]
    assert caught.value.field == "layout" and repr(name) in str(caught.value)


def test_rows_are_whole_only_where_a_rank_has_every_head() -> None:
    assert {name for name, layout in LAYOUTS.items() if layout.rows is Rows.SPLIT} == {"dp", "cp"}


@pytest.mark.parametrize("name", ["tp", "dop", "dcp"])
def test_unequal_head_groups_are_refused_with_a_way_out(name: str) -> None:
    check_layout(LAYOUTS[name], num_heads=20, ranks=4)
    with pytest.raises(ConfigError, match=r"8 ranks do not divide 20 heads; use dp, cp"):
        check_layout(LAYOUTS[name], num_heads=20, ranks=8)


@pytest.mark.parametrize("name", ["dp", "cp"])
def test_whole_heads_fit_any_number_of_ranks(name: str) -> None:
    check_layout(LAYOUTS[name], num_heads=20, ranks=7)
