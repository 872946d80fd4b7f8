"""What the router knows of a request's prompt: its tokens, and from them its prefix chain.

Pure but slow for long prompts (a few milliseconds for a thousand tokens): callers run it in a
thread. Whatever cannot be tokenised here (images, odd fields, templates of the client's own) is a
`Prompt` with a reason in ``blind``: it is routed by load alone, and the engine judges it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from msgspec import Struct, field

from prefixfleet.router.body import Body
from prefixfleet.router.dialects import Chat, anthropic_messages, chat_completion, responses
from prefixfleet.router.errors import BadRequest
from prefixfleet.router.messages import NotText
from prefixfleet.router.rendered import Rendered
from prefixfleet.router.template import TemplateRefused
from prefixfleet.router.tokens import Tokens
from prefixfleet.store.chain import BlockHash
from prefixfleet.store.namespace import Scope, chain_root

MAX_KEPT_SALT = 128  # characters; a client may send a salt as long as a body
MAX_OUTPUTS = 16_384  # of a request: far over what engines allow by themselves
BYTES_PER_TOKEN = 4  # of JSON; for the load of a prompt that is not tokenised
_OPAQUE_FIELDS = ("chat_template", "truncate_prompt_tokens", "prompt_embeds", "mm_processor_kwargs")


class Prompt(Struct, frozen=True, kw_only=True):
    """``rendered`` is the longest sequence of the request; empty if ``blind`` says why.

    ``tokens`` counts all sequences of the prompt (guessed if blind), ``outputs`` the sequences
    that will be generated.
    """

    rendered: Rendered = field(default_factory=Rendered)
    tokens: int
    outputs: int = 1
    salt: str = ""
    blind: str = ""

    @property
    def token_ids(self) -> Sequence[int]:
        """Of the longest sequence."""
        return self.rendered.token_ids


def read_chat(body: Body, tokens: Tokens, owner: str = "") -> Prompt:
    """The prompt of a chat completion."""
    return _read(body, lambda: _chat_ids(body, tokens, chat_completion(body), owner))


def read_responses(body: Body, tokens: Tokens, owner: str = "") -> Prompt:
    """The prompt of a request of the responses API."""
    return _read(body, lambda: _chat_ids(body, tokens, responses(body), owner))


def read_messages(body: Body, tokens: Tokens, owner: str = "") -> Prompt:
    """The prompt of a request of Anthropic's messages API."""
    return _read(body, lambda: _chat_ids(body, tokens, anthropic_messages(body), owner))


def read_nothing(body: Body, tokens: Tokens, owner: str = "") -> Prompt:
    """A request without a prefix that the router knows: embeddings, scores, tokenising."""
    return Prompt(
        tokens=len(body.raw) // BYTES_PER_TOKEN,
        salt=body.get("cache_salt", str) or "",
        blind="this route has no prefix",
    )


def read_completion(body: Body, tokens: Tokens, owner: str = "") -> Prompt:
    """The prompt of a completion: a text, token ids, or a list of either."""
    return _read(body, lambda: _completion_ids(body, tokens))


def prefix_chain(
    prompt: Prompt, namespace: bytes, block_tokens: int, key: bytes, lora: str = ""
) -> list[BlockHash]:
    """Hashes of the prompt's full blocks, for workers of one namespace, with the adapter ``lora``
    of its `Scope`; ``key`` is a `hash_key`."""
    root_of = _root if len(prompt.salt) <= MAX_KEPT_SALT else _root.__wrapped__
    root = root_of(namespace, prompt.salt, key, lora)
    try:
        return prompt.rendered.chain(root, block_tokens, key)
    except OverflowError:  # a token id that no vocabulary has: the engine will refuse it
        return []


@lru_cache(1_024)  # a tenant has one salt
def _root(namespace: bytes, salt: str, key: bytes, lora: str) -> BlockHash:
    return chain_root(namespace, Scope(lora=lora, salt=salt), key)


def _read(body: Body, sequences_of: Callable[[], list[Rendered]]) -> Prompt:
    outputs = _outputs(body)
    salt = body.get("cache_salt", str) or ""
    try:
        _refuse_opaque(body)
        sequences = sequences_of()
    except (NotText, TemplateRefused, UnicodeError) as reason:
        guess = len(body.raw) // BYTES_PER_TOKEN
        return Prompt(tokens=guess, outputs=outputs, salt=salt, blind=str(reason))
    return Prompt(
        rendered=max(sequences, key=_length),
        tokens=sum(map(_length, sequences)),
        outputs=min(outputs * len(sequences), MAX_OUTPUTS),
        salt=salt,
    )


def _outputs(body: Body) -> int:
    """Sequences that are asked for, of each prompt. Raises `BadRequest`."""
    outputs = body.get("n", int) or 1
    if outputs > MAX_OUTPUTS:
        got = outputs if outputs < 1 << 64 else "a longer number"
        raise BadRequest(f"n: got {got}, expected 1 to {MAX_OUTPUTS}", param="n")
    return max(1, outputs)


def _length(sequence: Rendered) -> int:
    return len(sequence.token_ids)


def _refuse_opaque(body: Body) -> None:
    for name in _OPAQUE_FIELDS:
        if body.is_set(name):
            raise NotText(f"{name} is set")


def _chat_ids(body: Body, tokens: Tokens, chat: Chat, owner: str) -> list[Rendered]:
    text = tokens.render(chat.messages, chat.tools, **chat.variables)
    if body.get("add_special_tokens", bool):
        return [Rendered(tokens.of_text(text))]
    return [tokens.of_chat(text, owner)]


def _completion_ids(body: Body, tokens: Tokens) -> list[Rendered]:
    special = body.get("add_special_tokens", bool)
    special = True if special is None else special
    text = body.get("prompt", str)
    if text is not None:
        return [Rendered(tokens.of_text(text, add_special_tokens=special))]
    ids = body.get("prompt", list[int])
    if ids is not None:
        return [Rendered(ids)]
    several = body.get("prompt", list[str | list[int]])
    if not several:
        raise NotText("prompt is neither a text nor token ids")
    return [
        Rendered(tokens.of_text(one, add_special_tokens=special) if isinstance(one, str) else one)
        for one in several
    ]
