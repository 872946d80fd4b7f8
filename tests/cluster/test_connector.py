"""The connector in a real vLLM scheduler, against real node daemons; only the forward is ours."""

import pytest
from engine_rig import BLOCK, answer, expected_answer, prompt_of


@pytest.mark.parametrize("length", [5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1, BLOCK, BLOCK - 1, 1])
def test_another_engine_loads_what_the_first_one_computed(start, daemons, length):
    prompt = prompt_of(length)
    cold = answer(start(), "cold", prompt)

    second = start()
    warm = answer(second, "warm", prompt)

    assert cold == warm == expected_answer(prompt, 4)
    assert second.reports["warm"]["local_blocks"] == (length - 1) // BLOCK
    daemons.wait_unused()


@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_of_the_answer_are_kept_too(start, overlap):
    prompt = prompt_of(2 * BLOCK)
    first = start(overlap=overlap)
    said = answer(first, "a", prompt, 3 * BLOCK)

    second = start(overlap=overlap)
    told = answer(second, "b", prompt + said + [5])

    assert said == expected_answer(prompt, 3 * BLOCK)
    assert told == expected_answer(prompt + said + [5], 4)
    # the last token's KV is never computed: the block it ends is not full
    assert second.reports["b"]["local_blocks"] == 4


def test_a_prompt_longer_than_a_step_is_saved_chunk_by_chunk(start):
    prompt = prompt_of(9 * BLOCK + 3)
    answer(start(step_tokens=24), "a", prompt)

    second = start(step_tokens=24)
    told = answer(second, "b", prompt)

    assert told == expected_answer(prompt, 4)
    assert second.reports["b"]["local_blocks"] == 9


def test_the_engines_own_blocks_are_not_loaded_again(start):
    prompt = prompt_of(6 * BLOCK)
    rig = start()
    answer(rig, "a", prompt)
    told = answer(rig, "b", prompt + prompt_of(2 * BLOCK, seed=1))

    assert told == expected_answer(prompt + prompt_of(2 * BLOCK, seed=1), 4)
    assert rig.reports["b"]["engine_blocks"] == 6
    assert rig.reports["b"]["local_blocks"] == 0


def test_local_blocks_are_completed_from_the_pool(start):
    prompt = prompt_of(8 * BLOCK + 1)
    answer(start(), "a", prompt)
    rig = start()
    answer(rig, "short", prompt[: 3 * BLOCK + 1])

    told = answer(rig, "b", prompt)

    assert told == expected_answer(prompt, 4)
    assert (rig.reports["b"]["engine_blocks"], rig.reports["b"]["local_blocks"]) == (3, 5)


def test_equal_requests_in_one_batch_are_both_right(start):
    prompt = prompt_of(5 * BLOCK + 2)
    answer(start(), "a", prompt)
    rig = start()

    for name in ("0_x", "1_x", "2_x"):
        rig.add(name, prompt, 6)
    rig.run()

    assert {tuple(rig.answers[n]) for n in rig.answers} == {tuple(expected_answer(prompt, 6))}


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_come_back_right(start, daemons, overlap):
    prompts = {f"r{i}": prompt_of(4 * BLOCK + i, seed=i) for i in range(5)}
    rig = start(blocks=24, overlap=overlap)

    for name, prompt in prompts.items():
        rig.add(name, prompt, 4 * BLOCK)
    rig.run()

    assert rig.preemptions > 0
    for name, prompt in prompts.items():
        assert rig.answers[name] == expected_answer(prompt, 4 * BLOCK), name
    daemons.wait_unused()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_keeps_its_own_shard(start, daemons, ranks):
    prompt = prompt_of(7 * BLOCK + 1)
    answer(start(ranks=ranks), "a", prompt)

    second = start(ranks=ranks)
    told = answer(second, "b", prompt)

    assert told == expected_answer(prompt, 4)
    assert second.reports["b"]["local_blocks"] == 7
    daemons.wait_unused()
