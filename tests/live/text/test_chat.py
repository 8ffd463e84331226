"""Rendered conversations against transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from live.server.input_processor import ChatTemplate
from workloads.errors import BadInput

LLAMA = """{{- bos_token }}
{%- if strftime_now is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + eos_token }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant', 'tool') %}
        {{- raise_exception("Roles must be user, assistant or tool, not " + message.role) }}
    {%- endif %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- "}" }}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {% if message.role == "assistant" %}
        {%- generation %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {%- if tool_call.function.arguments is string %}
                {{- tool_call.function.arguments }}
            {%- else %}
                {{- tool_call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
NAMED = [{"name": "default", "template": LLAMA}, {"name": "tool_use", "template": QWEN}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief & <kind>. "},
    {"role": "user", "content": "Wie ist das Wetter? 今日"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nI ask.", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sun": true}'},
    {"role": "user", "content": "thanks"},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "title": "'<é>'"}}}


def folder(template: object, tokenizer_folder: Path, to: Path, jinja: bool = False) -> Path:
    """A tokenizer's directory with this template, in tokenizer_config.json or in a file of its own."""
    settings = json.loads((tokenizer_folder / "tokenizer_config.json").read_text()) | {"bos_token": "<|im_start|>"}
    del settings["chat_template"]
    if jinja:
        (to / "chat_template.jinja").write_text(str(template))
    else:
        settings["chat_template"] = template
    (to / "tokenizer_config.json").write_text(json.dumps(settings))
    (to / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    return to


def read(directory: Path) -> ChatTemplate:
    template = ChatTemplate.read(directory)
    assert template is not None
    return template


@pytest.mark.parametrize("jinja", [False, True], ids=["settings", "own-file"])
@pytest.mark.parametrize("name", ["llama", "qwen", "named"])
def test_the_same_text_as_transformers(tokenizer_folder: Path, tmp_path: Path, name: str, jinja: bool) -> None:
    transformers = pytest.importorskip("transformers")
    source = {"llama": LLAMA, "qwen": QWEN, "named": NAMED}[name]
    if jinja and name == "named":
        directory = folder(LLAMA, tokenizer_folder, tmp_path, jinja)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(QWEN)
    else:
        directory = folder(source, tokenizer_folder, tmp_path, jinja)
    peer, ours = transformers.AutoTokenizer.from_pretrained(directory), read(directory)
    for messages in (TALK, TALK[:2], TALK[1:2], TALK[:-1]):
        for tools in (None, [TOOL]):
            for extra in ({}, {"enable_thinking": False, "add_generation_prompt": False}, {"enable_thinking": False}):
                fields = {"add_generation_prompt": True, **extra}
                expected = peer.apply_chat_template(messages, tools=tools, tokenize=False, **fields)
                assert ours.render(messages, tools=tools, **fields) == expected
    assert "Zürich" in ours.render(TALK)
    if name != "llama":
        assert "'<é>'" in ours.render(TALK, tools=[TOOL])


def test_content_in_parts_is_joined(tokenizer_folder: Path, tmp_path: Path) -> None:
    template = read(folder(QWEN, tokenizer_folder, tmp_path))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render(
        [{"role": "user", "content": "a\nb"}]
    )


def test_a_tool_call_as_clients_send_it(tokenizer_folder: Path, tmp_path: Path) -> None:
    template = read(folder(LLAMA, tokenizer_folder, tmp_path))
    function = {"name": "weather", "arguments": json.dumps(CALL["function"]["arguments"])}
    talk = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]}]
    assert template.render(talk) == template.render([TALK[1], {**talk[1], "content": "", "tool_calls": [CALL]}])
    assert isinstance(function["arguments"], str)  # the caller's messages are left as they are


def test_no_template_and_no_default(tokenizer_folder: Path, tmp_path: Path) -> None:
    assert ChatTemplate.read(folder(None, tokenizer_folder, tmp_path)) is None
    template = read(folder([{"name": "rag", "template": "x"}], tokenizer_folder, tmp_path))
    with pytest.raises(BadInput, match="chat_template: expected a chat template named default, found rag"):
        template.render(TALK)


def test_messages_that_the_template_refuses(tokenizer_folder: Path, tmp_path: Path) -> None:
    expected = r"chat template accepts \(Roles must be user, assistant or tool, not critic\)$"
    with pytest.raises(BadInput, match=expected) as result:
        read(folder(LLAMA, tokenizer_folder, tmp_path)).render([TALK[1], {"role": "critic", "content": "no"}])
    assert "\n" not in str(result.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe|not safely callable"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_fails_is_an_answer_to_the_caller(
    tokenizer_folder: Path, tmp_path: Path, source: str, expected: str
) -> None:
    with pytest.raises(BadInput, match=expected):
        read(folder(source, tokenizer_folder, tmp_path)).render(TALK)


@pytest.mark.parametrize("template", [3, ["a"], [{"name": "default"}], [{"name": "default", "template": 1}]])
def test_a_template_of_another_kind(tokenizer_folder: Path, tmp_path: Path, template: object) -> None:
    with pytest.raises(BadInput, match=r"tokenizer_config\.json: chat_template: expected text, or a list"):
        ChatTemplate.read(folder(template, tokenizer_folder, tmp_path))


def test_a_template_that_is_none(tokenizer_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"chat_template: expected a Jinja template \(Expected an expression"):
        ChatTemplate.read(folder("{% for %}", tokenizer_folder, tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(BadInput, match=r"tokenizer_config\.json: got 'list', expected a JSON object"):
        ChatTemplate.read(tmp_path)
