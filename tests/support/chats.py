"""A small real tokenizer and chat templates of three families, made in a folder like a model's."""

import json
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CHATML = """\
{% for message in messages %}\
{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
Be brief.<|im_end|>
' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

HEADERS = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- '<call>' + call.function.name + ' ' }}
            {{- call.function.arguments | tojson + '</call>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

PARTS = """\
{%- if messages[0].role == 'system' %}
    {%- set rest = messages[1:] %}
    {%- set order = messages[0].content %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {{- '[' + message.role + ']' }}
    {%- for part in message.content %}
        {%- if part.type == 'text' %}{{ part.text }}{% endif %}
    {%- endfor %}
    {%- if loop.last and order is defined %}{{ order[0].text }}{% endif %}
    {{- eos_token }}
{%- endfor %}
"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "parts": PARTS}

_CORPUS = [
    "The prefix cache keeps blocks of keys and values that a node computed before.",
    "Das Straßenschild, größer als üblich, stand überall; l'été à Noël, ça va?",
    "Привет, мир! Как дела? Сегодня хорошая погода.",
    "你好世界。今天天气很好。前缀缓存。こんにちは世界。",
    "مرحبا بالعالم كيف حالك اليوم",
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\n    # done\t\tok 12345 67 890",
]


@cache
def tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE with special tokens and a post-processor that puts one in front."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_CORPUS * 3, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", made.token_to_id("<|bos|>"))]
    )
    return made


def write_model(folder: Path, template: str | None = CHATML) -> Path:
    """Tokenizer files of a model in ``folder``; without a chat template if that is None."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "chat_template": template,
        "model_max_length": 100_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
