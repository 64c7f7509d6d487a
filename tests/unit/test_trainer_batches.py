"""Case D28 and the rules of planning: strict budget, no row lost, equal counts on all ranks."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.errors import ConfigError
from trainer.batches import MOST_FOLDED_TOKENS, Layout, RowShape, computed_tokens, plan_micro_batches, split_mini_batches


def rows_of(lengths):
    return [RowShape(f"t{index}", index, 1, length - 1) for index, length in enumerate(lengths)]


def bins(lengths, cap):
    return [batch for batch in plan_micro_batches(rows_of(lengths), max_tokens=cap)[0] if batch]


@pytest.mark.parametrize(("lengths", "count"), [([6] * 5, 5), ([10, 1], 2), ([10], 1)])
def test_bins_hold_the_cap_strictly(lengths, count):
    assert len(bins(lengths, 10)) == count


def test_bins_of_mixed_lengths_are_few_and_within_the_cap():
    lengths = [7, 5, 5, 3, 3, 3, 2, 2]
    result = bins(lengths, 10)
    assert all(sum(lengths[i] for i in batch) <= len(batch) * max(lengths[i] for i in batch) <= 10 for batch in result)
    assert len(result) <= 4
    assert sorted(chain(*result)) == list(range(8))


@pytest.mark.parametrize("layout", Layout)
def test_an_oversize_row_is_refused_by_name(layout):
    with pytest.raises(ConfigError, match=r"trajectory t1 .*11 tokens.*max_tokens_per_micro_batch is 10"):
        plan_micro_batches(rows_of([3, 11]), max_tokens=10, layout=layout)


ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=40)


@given(ROWS, st.integers(1, 6), st.sampled_from(Layout), st.integers(40, 200))
@settings(max_examples=60, deadline=None)
def test_every_row_is_in_one_micro_batch_within_budget_and_ranks_run_equally_many(shapes, num_ranks, layout, cap):
    prompt_tokens = [3, 9, 1, 5, 7]
    rows = [RowShape(str(i), prompt, prompt_tokens[prompt], response) for i, (prompt, response) in enumerate(shapes)]
    plan = plan_micro_batches(rows, max_tokens=cap, num_ranks=num_ranks, layout=layout)
    assert len(plan) == num_ranks
    assert len({len(batches) for batches in plan}) == 1
    assert sorted(chain(*chain(*plan))) == list(range(len(rows)))
    assert all(computed_tokens((rows[i] for i in batch), layout) <= cap for batch in chain(*plan))
    assert plan == plan_micro_batches(rows, max_tokens=cap, num_ranks=num_ranks, layout=layout)


def test_packed_rows_pay_for_no_padding():
    """100 + 10 + 10 + 10 tokens: one micro-batch of 130, where padding makes it 400, or cuts it in two."""
    rows = rows_of([100, 10, 10, 10])
    assert plan_micro_batches(rows, max_tokens=130, layout=Layout.PACKED) == (((0, 1, 2, 3),),)
    assert [len(batch) for batch in plan_micro_batches(rows, max_tokens=130)[0]] == [1, 3]


def test_24_equal_rows_on_5_ranks_differ_by_one_row():
    plan = plan_micro_batches(rows_of([10] * 24), max_tokens=1000, num_ranks=5)
    assert sorted(len(batches[0]) for batches in plan) == [4, 5, 5, 5, 5]


def test_more_ranks_than_rows_gives_empty_micro_batches():
    plan = plan_micro_batches(rows_of([10, 10]), max_tokens=10, num_ranks=3)
    assert sorted(plan) == [((),), ((0,),), ((1,),)]


def test_a_shared_prompt_is_paid_once():
    rows = [RowShape(str(i), 0, 100, 5) for i in range(8)]
    assert computed_tokens(rows, Layout.SHARED) == computed_tokens(rows, Layout.FOLDED) == 140
    assert computed_tokens(rows, Layout.PADDED) == computed_tokens(rows, Layout.PACKED) == 840
    plan = plan_micro_batches(rows, max_tokens=140, layout=Layout.SHARED)
    assert plan == ((tuple(range(8)),),)


def test_folded_rows_pay_for_prompts_once_and_for_no_padding_until_they_are_too_many():
    """20 + 10 prompt tokens and 50 + 4 + 4 of responses are 88; padded 2 x 20 + 3 x 50. 512 fit, 513 do not."""
    rows = [RowShape("a", 0, 20, 50), RowShape("b", 0, 20, 4), RowShape("c", 1, 10, 4)]
    assert computed_tokens(rows, Layout.FOLDED) == 88
    assert computed_tokens(rows, Layout.SHARED) == 190
    assert MOST_FOLDED_TOKENS == 512
    fitting = [RowShape("a", 0, 128, 284), RowShape("b", 0, 128, 100)]
    assert computed_tokens(fitting, Layout.FOLDED) == 512
    assert computed_tokens([*fitting, RowShape("c", 0, 128, 1)], Layout.FOLDED) == 128 + 3 * 284


def test_a_group_larger_than_the_budget_is_split_and_repeats_its_prompt():
    rows = [RowShape(str(i), 0, 100, 50) for i in range(8)]
    plan = plan_micro_batches(rows, max_tokens=300, layout=Layout.SHARED)
    assert [len(batch) for batch in plan[0]] == [4, 4]


def test_long_tails_are_kept_from_padding_the_short_rows():
    rows = [RowShape(str(i), i // 8, 20, 500 if i % 8 == 0 else 20) for i in range(32)]
    (batches,) = plan_micro_batches(rows, max_tokens=16384, layout=Layout.SHARED)
    cost = sum(computed_tokens((rows[i] for i in batch), Layout.SHARED) for batch in batches)
    assert cost < 1.2 * (4 * 520 + 28 * 20 + 80)


@pytest.mark.parametrize(("groups", "parts", "sizes"), [(8, 1, [8]), (7, 3, [3, 2, 2]), (2, 4, [1, 1]), (6, 3, [2, 2, 2])])
def test_mini_batches_take_equal_shares_of_the_groups(groups, parts, sizes):
    ranges = split_mini_batches(groups, parts)
    assert [len(part) for part in ranges] == sizes
    assert list(chain(*ranges)) == list(range(groups))
