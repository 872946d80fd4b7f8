"""A chat is filled into its outline as its template renders it, or it is not filled."""

import pytest
from chats import CHATML, HEADERS, PARTS, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixfleet.router.content_flow import only_passes_contents
from prefixfleet.router.messages import ATTRIBUTION, conversation
from prefixfleet.router.outlines import MAX_MESSAGES, MAX_OUTLINES, Outlines
from prefixfleet.router.template import ChatTemplate, TemplateRefused, environment
from prefixfleet.router.tokens import Tokens

TRIMMED = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}\
{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}\
{% set ns = namespace(last='') %}\
{% for m in rest %}{% if m.role == 'user' %}\
{% if loop.first and system %}{% set text = '<<SYS>> ' + system + ' <</SYS>>' + m.content %}\
{% else %}{% set text = m.content %}{% endif %}\
[INST] {{ text | trim }} [/INST]{% else %} {{ (m['content'] ~ ' ') | trim }} {{ eos_token }}\
{% set ns.last = m.content %}{% endif %}{% endfor %}\
{% if ns.last %}{{ 'last: ' + ns.last if messages | length > 2 else '' }}{% endif %}"""

BESIDE = """\
{{ messages[0].content | trim }}{% set messages = messages[1:] %}\
{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"""
TURNED = """\
{{ messages[0].content }}{{ messages[-1].content | trim }}{{ messages[0].content | trim }}\
{{ messages[-1].content ~ messages[0].content }}{{ (messages[0].content + ' ') | trim }}"""

PASSING = {
    "chatml": CHATML,
    "headers": HEADERS,
    "trimmed": TRIMMED,
    "beside": BESIDE,
    "turned": TURNED,
}

texts = st.sampled_from(["a", " b ", "\n\n c", "<|im_end|>", "ü\u2003", "\u2003\u2002\u2003d"])
texts |= st.text(min_size=1, max_size=12)
texts |= st.text(" \n\t\u2002\u2003\u00a0ab", min_size=1, max_size=9)
chats = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}
    ),
    min_size=1,
    max_size=6,
)


SHORT_FIRST = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


def template_of(source):
    return ChatTemplate(source, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})


@pytest.mark.parametrize("name", sorted(PASSING))
@settings(max_examples=150)
@given(pairs=st.lists(st.tuples(chats, st.booleans()), min_size=1, max_size=3))
def test_what_is_filled_is_what_is_rendered(name, pairs):
    template = template_of(PASSING[name])
    outlines = Outlines(lambda chat, given: template.render(chat, **given))

    for chat, add in [*pairs, *pairs]:
        expected = template.render(chat, add_generation_prompt=add)
        filled = outlines.fill(chat, {"add_generation_prompt": add})
        assert filled is None or filled == expected
        assert (filled is None) == any(m["content"].isspace() for m in chat)


@pytest.mark.parametrize("name", sorted(PASSING))
@settings(max_examples=100)
@given(first=texts, second=texts)
def test_a_harmless_chat_teaches_an_outline_for_any_white_space(name, first, second):
    template = template_of(PASSING[name])
    outlines = Outlines(lambda chat, given: template.render(chat, **given))
    chat = [{"role": "system", "content": first}, {"role": "user", "content": second}]

    outlines.fill(SHORT_FIRST, {})

    assert len(outlines) == 1
    assert outlines.fill(chat, {}) in (None, template.render(chat))


def test_a_stripped_content_beside_one_that_is_not():
    template = template_of(BESIDE)
    outlines = Outlines(lambda chat, given: template.render(chat, **given))
    outlines.fill(SHORT_FIRST, {})
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "\n\nhello"}]

    assert outlines.fill(chat, {}) == "Be brief.\n\nhello<|eos|>"


@pytest.mark.parametrize("name", sorted(PASSING))
def test_templates_that_only_pass_contents_are_known_as_such(name):
    assert only_passes_contents(PASSING[name], environment())


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content | upper }}",
        "{{ m.content | length }}",
        "{{ m.content.split('x')[-1] }}",
        "{{ m['content'][0] }}",
        "{{ m.content | trim('x') }}",
        "{{ m.content * 2 }}",
        "{{ m.content | tojson }}",
        "{{ m | tojson }}",
        "{{ m }}",
        "{{ messages }}",
        "{{ m.get('content') }}",
        "{{ m.values() | list }}",
        "{% for k, v in m.items() %}{{ v }}{% endfor %}",
        "{% for c in m.content %}{{ c }}{% endfor %}",
        "{% if m.content == 'hello' %}x{% endif %}",
        "{% if 'x' in m.content %}x{% endif %}",
        "{% if m.content in ['x'] %}x{% endif %}",
        "{% if m.content is startingwith 'x' %}x{% endif %}",
        "{% if m.content is sameas 'x' %}x{% endif %}",
        "{% if m.content > 'x' %}x{% endif %}",
        "{% if m.content is eq('x') %}x{% endif %}",
        "{{ loop.previtem.content }}",
        "{{ loop.changed(m.content) }}",
        "{% set l = loop %}{{ l.previtem.content }}",
        "{% set x = m.content %}{{ x | upper }}",
        "{% set x = m %}{{ x.content | upper }}",
        "{% set x = messages %}{% for y in x %}{{ y.content | upper }}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.x = m.content %}{{ ns.x | upper }}",
        "{% set ns = namespace(x=m.content) %}{{ ns.x | upper }}",
        "{% set ns = namespace() %}{% set ns.x = m.content %}{% set o = ns %}{{ o.x | upper }}",
        "{% set ns = namespace(x='') %}{% set s = ns %}{% set s.x = m.content %}{{ ns.x | upper }}",
        "{% set m = namespace(content='') %}{{ m.content | upper }}",
        "{% set x = namespace() if m.role else m %}{{ x.y }}",
        "{% set f = namespace %}{% set ns = f(x='') %}{% set ns.x = m.content %}{{ ns.x }}",
        "{% set ns = [namespace(x='')] %}{{ ns[0].x }}",
        "{% set ns = namespace() %}{% for ns in messages %}{{ ns.role }}{% endfor %}",
        "{% set loop = namespace(first='') %}{% set loop.first = m.content %}{{ loop.first * 2 }}",
        "{% set loop = m.content %}{{ loop.index('a') }}",
        "{% set range = m.content %}{{ range }}",
        "{% macro f(x) %}{{ x | upper }}{% endmacro %}{{ f(m.content) }}",
        "{% set x %}{{ m.content }}{% endset %}{{ x | upper }}",
        "{% filter upper %}{{ m.content }}{% endfilter %}",
        "{% with x = m.content %}{{ x | upper }}{% endwith %}",
        "{{ messages | map(attribute='content') | join | upper }}",
        "{{ (messages | last).content | upper }}",
        "{{ messages[m.content] }}",
        "{{ [m.content] | join | upper }}",
        "{{ {'x': m.content}.x | upper }}",
        "{{ (m.content or 'x') | upper }}",
        "{{ (m.content if m.role else 'x') | upper }}",
        "{{ '%s' % m.content }}",
        "{{ strftime_now('%H:%M') }}",
        "{% set f = strftime_now %}{{ f('%H:%M') }}",
        "{{ lipsum() }}",
        "{{ [1, 2] | random }}",
        "{{ [[1, 2]] | map('random') | list }}",
        "{{ raise_exception(m.content) }}",
        "{% for n in [m] recursive %}{% endfor %}",
        "{% autoescape true %}{{ m.content }}{% endautoescape %}",
    ],
)
def test_a_template_that_looks_at_contents_or_at_the_time_is_not_trusted(body):
    source = "{% for m in messages %}" + body + "{% endfor %}"

    assert not only_passes_contents(source, environment())


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(last='') %}{% set state = ns %}"
        "{% for m in messages %}{% set state.last = m.content %}{% endfor %}"
        "{% if '/no_think' in ns.last %}x{% endif %}",
        "{% set m = namespace(content='') %}{% set m.content = 'x' %}"
        "{% for m in messages %}{% if m.content.startswith('/') %}x{% endif %}{% endfor %}",
        "{% set messages = namespace(x='') %}{{ messages.x }}",
    ],
)
def test_a_namespace_of_two_names_or_a_name_of_two_things_is_not_trusted(source):
    assert not only_passes_contents(source, environment())


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": "a", "name": "x"}],
        [{"role": "user"}],
        [{"role": "tool", "content": "a"}],
        [{"role": "developer", "content": "a"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": " \n"}],
        [{"role": "system", "content": ATTRIBUTION + " x\nrest"}],
        [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1),
        ["text"],
        [],
    ],
)
def test_any_other_chat_is_left_to_the_template(chat):
    assert Outlines(lambda chat, given: "").fill(chat, {}) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"continue_final_message": True},
        {"date": 3},
        {"documents": []},
        {"x": "\u2003\u2002\u2003"},
        {"x": "\u2002\u2003\u2002"},
        {"x": "long" * 65},
        {"long" * 65: True},
        {f"x{number}": "long" * 10 for number in range(8)},
    ],
)
def test_unusual_variables_are_left_to_the_template(variables):
    assert (
        Outlines(lambda chat, given: "").fill([{"role": "user", "content": "a"}], variables) is None
    )


def test_a_variable_called_like_a_role_is_not_taken_for_one():
    template = template_of("{{ user }}{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    outlines = Outlines(lambda chat, given: template.render(chat, **given))
    one = [{"role": "user", "content": "a"}]
    three = [*one, *one, {"role": "assistant", "content": "a"}]

    assert outlines.fill(one, {"user": "assistant"}) == "assistantusera"
    assert outlines.fill(three, {}) == "userauseraassistanta"


def test_outlines_are_bounded():
    outlines = Outlines(lambda chat, given: chat[0]["content"])
    for number in range(MAX_OUTLINES + 5):
        assert outlines.fill([{"role": "user", "content": "a"}], {"x": f"{number}"}) == "a"

    assert 0 < len(outlines) <= MAX_OUTLINES


def test_a_template_that_does_not_render_as_it_was_read_is_rendered_in_full(caplog):
    outlines = Outlines(lambda chat, given: chat[0]["content"].upper())
    chat = [{"role": "user", "content": "a"}]

    assert [outlines.fill(chat, {}), outlines.fill(chat, {})] == ["A", None]
    assert "rendered in full" in caplog.text
    assert len(outlines) == 0


def test_outlines_that_were_known_are_not_used_after_one_was_wrong():
    outlines = Outlines(lambda chat, given: chat[0]["content"] + str(len(chat[0]["content"])))
    outlines._known[1, "user"] = outlines._outline("what was learnt before")
    chat = [{"role": "user", "content": "a"}]
    assert outlines.fill(chat, {}) is not None

    assert outlines.fill(chat, {"x": True}) == "a1"

    assert outlines.fill(chat, {}) is None
    assert len(outlines) == 0


def test_a_refusal_of_the_template_stays_one():
    template = template_of("{{ raise_exception('no') }}")
    outlines = Outlines(lambda chat, given: template.render(chat, **given))

    for _ in range(2):
        with pytest.raises(TemplateRefused):
            outlines.fill([{"role": "user", "content": "a"}], {})


@pytest.mark.parametrize("source", [CHATML, HEADERS, PARTS, TRIMMED])
def test_a_models_chats_are_rendered_alike_each_time(source):
    tokens = Tokens(tokenizer(), {"default": source}, {"bos_token": "<|bos|>", "eos_token": "E"})
    template = ChatTemplate(source, {"bos_token": "<|bos|>", "eos_token": "E"})
    as_parts = source is PARTS
    for content in ("one", " two ", "three"):
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
        normal = conversation(chat, as_parts=as_parts, knows_developer=False)
        expected = template.render(normal, add_generation_prompt=True)

        assert tokens.render(chat, add_generation_prompt=True) == expected
