"""The router's token ids are the engine's: transformers is the oracle."""

import json

import pytest
from chats import TEMPLATES, write_model

from prefixfleet.router.messages import NotText
from prefixfleet.router.template import TemplateRefused
from prefixfleet.router.tokens import load_tokens
from prefixfleet.store.errors import ConfigError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Wetter für <Ort> & "Zeit"',
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}},
        },
    }
]
CHATS = {
    "one question": [{"role": "user", "content": "Hello, how are you?"}],
    "system first": [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Ça va? 你好 мир 🙂 e\u0301"},
    ],
    "several turns": [
        {"role": "user", "content": "  spaces around  \n"},
        {"role": "assistant", "content": "I see\n\n\nthem"},
        {"role": "user", "content": "<|im_end|> a special token as text"},
    ],
}


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def model(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(request.param), TEMPLATES[request.param])


@pytest.fixture(scope="module")
def oracle(model):
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    return transformers.AutoTokenizer.from_pretrained(str(model))


@pytest.fixture(scope="module")
def tokens(model):
    return load_tokens(model)


def as_oracle_wants(chat, oracle):
    """The oracle renders what it is given; vLLM gives parts to a template that loops over them."""
    if "message.content %}" not in oracle.chat_template:
        return chat
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat]


@pytest.mark.parametrize("name", sorted(CHATS))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_has_the_engines_tokens(tokens, oracle, name, add_generation_prompt):
    expected = oracle.apply_chat_template(
        as_oracle_wants(CHATS[name], oracle),
        add_generation_prompt=add_generation_prompt,
        return_dict=False,
    )

    text = tokens.render(CHATS[name], add_generation_prompt=add_generation_prompt)

    assert tokens.of_text(text, add_special_tokens=False) == expected


def test_tools_are_rendered_as_by_the_engine(tokens, oracle):
    chat = CHATS["one question"]
    expected = oracle.apply_chat_template(
        as_oracle_wants(chat, oracle), tools=TOOLS, add_generation_prompt=True, tokenize=False
    )

    assert tokens.render(chat, TOOLS) == expected


@pytest.mark.parametrize("ending", ["", " ", "  \n"])
def test_a_final_message_can_be_continued(tokens, oracle, ending):
    chat = [*CHATS["one question"], {"role": "assistant", "content": "I am" + ending}]
    expected = oracle.apply_chat_template(
        as_oracle_wants(chat, oracle), continue_final_message=True, tokenize=False
    )

    rendered = tokens.render(chat, continue_final_message=True, add_generation_prompt=False)

    assert rendered == expected


@pytest.mark.parametrize(
    "text", ["", "Hello", "\n\n", "Привет 世界 🙂", "<|im_end|>x<|bos|>", "a" * 5_000]
)
@pytest.mark.parametrize("special", [True, False])
def test_a_prompt_has_the_engines_tokens(tokens, oracle, text, special):
    expected = oracle(text, add_special_tokens=special)["input_ids"]

    assert tokens.of_text(text, add_special_tokens=special) == expected


def test_content_as_parts_is_the_same_chat_as_content_as_text(tokens):
    text = [{"role": "user", "content": "one\ntwo"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "one\ntwo"}]}]

    assert tokens.render(parts) == tokens.render(text)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:,"}}],
        [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}],
        [{"type": "text", "text": "a", "uuid": "x"}],
        [7],
        7,
    ],
)
def test_a_chat_of_more_than_text_is_not_rendered(tokens, content):
    with pytest.raises(NotText):
        tokens.render([{"role": "user", "content": content}])


@pytest.mark.parametrize("messages", [[], [7], [{}], [{"role": 7, "content": "a"}]])
def test_what_is_no_chat_is_left_to_the_engine(tokens, messages):
    with pytest.raises(NotText):
        tokens.render(messages)


def test_a_chat_that_the_template_refuses_is_left_to_the_engine(tmp_path):
    tokens = load_tokens(write_model(tmp_path, TEMPLATES["parts"]))

    with pytest.raises(TemplateRefused, match="alternate"):
        tokens.render([{"role": "assistant", "content": "first"}])


def test_a_template_cannot_reach_the_process(tmp_path):
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokens = load_tokens(write_model(tmp_path, source))

    with pytest.raises(TemplateRefused, match="unsafe"):
        tokens.render(CHATS["one question"])


@pytest.mark.parametrize("name", ["messages", "chat", "template", "cls"])
def test_a_variable_may_have_the_name_of_a_parameter(tokens, name):
    chat = CHATS["one question"]

    if name == "messages":  # the template's own: nobody may say what it is
        with pytest.raises(TemplateRefused):
            tokens.render(chat, **{name: 1})
    else:
        assert tokens.render(chat, **{name: 1}) == tokens.render(chat)


def test_a_variable_that_no_template_can_have_is_refused(tokens):
    with pytest.raises(TemplateRefused, match="self"):
        tokens.render(CHATS["one question"], **{"self": 1})


def test_template_files_win_over_the_tokenizers_configuration(tmp_path):
    write_model(tmp_path, "old")
    (tmp_path / "chat_template.jinja").write_text("new", encoding="utf-8")

    assert load_tokens(tmp_path).render(CHATS["one question"]) == "new"


def test_a_template_for_tools_is_used_with_tools_only(tmp_path):
    write_model(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    tokens = load_tokens(tmp_path)

    assert tokens.render(CHATS["one question"]) == "plain"
    assert tokens.render(CHATS["one question"], TOOLS) == "tools"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, text):
    write_model(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=r"tokenizer|chat template"):
        load_tokens(tmp_path)


def test_an_absent_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokens(tmp_path)
