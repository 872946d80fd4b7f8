"""Tokenising what is new gives what tokenising everything gives: for any chat, in any script."""

import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event

import pytest
import tokenizers
from chats import TEMPLATES, tokenizer, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers

from prefixfleet.router.added_tokens import pattern_of
from prefixfleet.router.known_prefixes import MAX_PIECES, KnownPrefixes
from prefixfleet.router.rendered import MAX_CHAINS, Rendered
from prefixfleet.router.tokens import Tokens, load_tokens
from prefixfleet.store.chain import extend_chain

WORDS = [
    "hello", "Straße", "Привет мир", "你好世界", "こんにちは", "مرحبا", "שלום", "नमस्ते", "🙂👩‍👩‍👧",
    "e\u0301", "\n\n", "\t", "  ", " ", "", "<|im_end|>", "<|im_start|>", "<|im_", "start|>",
    "<|bos|>",
    "\u00a0", "\u200d", "a" * 200, "[user]", "<call>", "\r\n", "ﬁ", "İ", "1234567890",
]  # fmt: skip
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=6).map("".join)


def is_encodable(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


texts = texts.filter(is_encodable)
turns = st.lists(texts, min_size=1, max_size=12)


def metaspace() -> tokenizers.Tokenizer:
    """A Llama-2 kind of tokenizer: what stands first in a text is treated otherwise."""
    made = tokenizers.Tokenizer.from_str(tokenizer().to_str())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace()
    return made


def normalising() -> tokenizers.Tokenizer:
    """A tokenizer that prepends and replaces before it splits words."""
    made = tokenizers.Tokenizer.from_str(tokenizer().to_str())
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("  ", " ")]
    )
    made.add_special_tokens([AddedToken("<|im_end|> ", lstrip=True, rstrip=True, special=True)])
    return made


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": tokenizer,
    "metaspace": metaspace,
    "normalising": normalising,
}


def known_of(kind: str) -> tuple[KnownPrefixes, tokenizers.Tokenizer]:
    made = KINDS[kind]()
    return KnownPrefixes(made.get_added_tokens_decoder()), made


def whole(made: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(made.encode(text, add_special_tokens=False).ids)


class Counted:
    """Encodes, and counts the characters it was asked to."""

    def __init__(self, made: tokenizers.Tokenizer):
        self.made = made
        self.characters = 0

    def __call__(self, text: str) -> list[int]:
        self.characters += len(text)
        return whole(self.made, text)


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def tokens(request, tmp_path_factory) -> Tokens:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return load_tokens(write_model(folder, TEMPLATES[request.param]))


@pytest.fixture(autouse=True)
def always_look_up(monkeypatch):
    """Short chats too: they are quick to make and have the same edges."""
    monkeypatch.setattr("prefixfleet.router.known_prefixes.MIN_CHARACTERS", 0)


@settings(max_examples=60)
@given(turns=turns, other=turns)
def test_every_turn_of_a_chat_has_the_tokens_of_a_fresh_start(tokens, turns, other):
    for chat in (turns, other, turns):
        messages: list[dict[str, str]] = []
        for i, text in enumerate(chat):
            messages.append({"role": ("user", "assistant")[i % 2], "content": text})
            rendered = tokens.render(messages)

            expected = tokens.of_text(rendered, add_special_tokens=False)
            assert list(tokens.of_chat(rendered).token_ids) == expected


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=100)
@given(parts=turns, cut=st.integers(0, 12), more=turns)
def test_any_two_texts_that_share_a_beginning(kind, parts, cut, more):
    known, made = known_of(kind)
    first, second = "".join(parts), "".join(parts[:cut] + more)

    for text in (first, second, first, second + first):
        assert list(known.encode(text, lambda t: whole(made, t)).token_ids) == whole(made, text)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=50)
@given(parts=turns, more=turns)
def test_chains_of_a_continued_prompt_are_those_of_a_fresh_start(kind, parts, more):
    known, made = known_of(kind)
    root, key = b"r" * 16, b"k" * 32

    for text in ("".join(parts), "".join(parts + more)):
        rendered = known.encode(text, lambda t: whole(made, t))
        for block_tokens in (3, 16):
            expected = extend_chain(root, whole(made, text), block_tokens, key)
            assert rendered.chain(root, block_tokens, key) == expected
            assert rendered.chain(root, block_tokens, key) == expected


def test_a_next_turn_encodes_only_what_is_new():
    known, made = known_of("byte level")
    encode = Counted(made)
    turn = "<|im_start|>user\n" + "many words " * 200 + "<|im_end|>\n"
    for i in range(10):
        known.encode(turn * (i + 1), encode)

    assert encode.characters <= 2 * len(turn * 10)


def test_a_fork_builds_on_what_it_shares():
    known, made = known_of("byte level")
    encode = Counted(made)
    shared = "<|im_start|>system\n" + "long rules " * 500 + "<|im_end|>\n<|im_start|>user\n"
    known.encode(shared + "one", encode)
    encode.characters = 0

    known.encode(shared + "two", encode)

    assert encode.characters < 100


@pytest.mark.parametrize(
    "added",
    [
        {},
        {7: AddedToken("<|im_start|>", single_word=True)},
        {7: AddedToken("<|im_start|>", lstrip=True)},
        {7: AddedToken("<|im_start|>", normalized=True)},
        {7: AddedToken("<|im_start|>", normalized=False), 8: AddedToken("x<|im_start|>y")},
    ],
)
def test_a_tokenizer_that_guarantees_nothing_is_not_cut(added):
    known = KnownPrefixes(added)
    encode = Counted(tokenizer())

    for _ in range(2):
        known.encode("<|im_start|>a<|im_start|>b", encode)

    assert encode.characters == 2 * len("<|im_start|>a<|im_start|>b")
    assert len(known) == 0


def test_what_is_remembered_is_bounded_and_what_is_in_use_stays(monkeypatch):
    monkeypatch.setattr("prefixfleet.router.known_prefixes.MAX_KNOWN_BYTES", 200_000)
    known, made = known_of("byte level")
    encode = Counted(made)
    system = "<|im_start|>" + "rules " * 500 + "<|im_end|><|im_start|>"
    for i in range(50):
        known.encode(system + f"{i} question " * 50, encode)
        encode.characters = 0

    known.encode(system + "another", encode)

    assert 0 < known.num_bytes <= 200_000
    assert len(known._places) <= 3 * len(known._age)
    assert encode.characters < 100


def test_what_a_template_puts_behind_every_question_is_encoded_once():
    known, made = known_of("byte level")
    encode = Counted(made)
    closing = "<|im_end|><|im_start|>assistant" + " " * 20
    known.encode("<|im_start|>user one" + closing, encode)
    encode.characters = 0

    known.encode("<|im_start|>user two" + closing, encode)

    assert encode.characters == len("<|im_start|>user two")
    known.encode("<|im_start|>user three" + closing, encode, "somebody else")
    assert encode.characters == len("<|im_start|>user two<|im_start|>user three" + closing)


def test_the_very_same_prompt_is_the_very_same_object():
    known, made = known_of("byte level")
    encode = Counted(made)
    text = "<|im_start|>user one<|im_end|>"
    first = known.encode(text, encode)
    encode.characters = 0

    again = [known.encode(text, encode) for _ in range(3)]

    assert encode.characters == 0
    assert all(one is first for one in again)
    assert len(known) == len(first.token_ids)


def test_a_prompt_keeps_few_chains_however_many_salts_come():
    known, made = known_of("byte level")
    text = "<|im_start|>" + "rules " * 100 + "<|im_end|>"
    rendered = known.encode(text, lambda t: whole(made, t))
    before = known.num_bytes
    roots = [number.to_bytes(16) for number in range(1_000)]

    for root in roots:
        assert rendered.chain(root, 4, b"k") == extend_chain(root, rendered.token_ids, 4, b"k")

    assert len(rendered._chains) == MAX_CHAINS
    longer = known.encode(text + "more <|im_end|>", lambda t: whole(made, t))
    assert len(longer._chains) == MAX_CHAINS
    assert known.encode(text, lambda t: whole(made, t)) is not None
    chains = 4 * MAX_CHAINS * (len(rendered.token_ids) // 4)
    assert known.num_bytes >= before + chains
    for root in roots[-MAX_CHAINS - 3 :]:
        assert longer.chain(root, 4, b"k") == extend_chain(root, longer.token_ids, 4, b"k")
    assert len(longer._chains) == MAX_CHAINS


def test_the_chain_that_was_used_last_stays():
    rendered = Rendered(list(range(16)))
    often = rendered.chain(b"often", 4, b"k")
    for number in range(20):
        rendered.chain(number.to_bytes(16), 4, b"k")

        assert rendered.chain(b"often", 4, b"k") is often


def test_a_prompt_may_be_continued_while_another_thread_computes_chains():
    rendered = Rendered(list(range(64)))
    stop = Event()

    def compute() -> None:
        for number in count():
            rendered.chain(number.to_bytes(16), 4, b"k")
            if stop.is_set():
                return

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(1) as threads:
        computing = threads.submit(compute)
        try:
            for _ in range(2_000):
                assert len(rendered.continued(32, [7]).token_ids) == 33
        finally:
            stop.set()
            sys.setswitchinterval(interval_s)
        computing.result()


def test_a_prompt_of_too_many_pieces_is_encoded_and_not_remembered():
    known, made = known_of("byte level")
    text = "<|im_end|>" * (MAX_PIECES + 1)

    for _ in range(2):
        assert list(known.encode(text, lambda t: whole(made, t)).token_ids) == whole(made, text)

    assert (len(known), known.num_bytes, known._places) == (0, 0, {})


def test_pieces_and_characters_count_as_memory(monkeypatch):
    monkeypatch.setattr("prefixfleet.router.known_prefixes.MAX_KNOWN_BYTES", 100_000)
    known, made = known_of("byte level")
    for number in range(20):
        known.encode(f"<|im_start|>{number}" + "<|im_end|>" * 200, lambda t: whole(made, t))
        assert len(known._places) <= 350

    monkeypatch.setattr("prefixfleet.router.known_prefixes.MAX_KNOWN_BYTES", 10_000)
    known.encode("<|im_start|>" + "🙂" * 3_000, lambda t: whole(made, t))
    assert (len(known), known.num_bytes, known._places) == (0, 0, {})


names = st.text("ab<|>.\n ", min_size=1, max_size=4)


@given(st.lists(names, min_size=1, max_size=12), st.text("ab<|>.\n ", max_size=40))
def test_added_tokens_are_found_leftmost_and_longest(raw, text):
    by_length = "|".join(map(re.escape, sorted(raw, key=len, reverse=True)))

    assert pattern_of(raw).split(text) == re.split(f"({by_length})", text)


def test_thousands_of_added_tokens_that_begin_alike_are_tried_as_one():
    """Else a client that repeats their beginning holds the interpreter's lock for seconds."""
    pattern = pattern_of(f"<unused{number}>" for number in range(5_000))

    assert pattern.pattern.count("unused") == 1
    assert pattern.findall("<unused<unused4999><unused5000>") == ["<unused4999>"]


def test_a_prompt_of_no_tokens_has_no_chain():
    empty: Sequence[int] = ()

    assert Rendered(empty).chain(b"r" * 16, 16, b"k") == []
