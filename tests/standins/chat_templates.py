# SPDX-License-Identifier: Apache-2.0
"""Chat templates that write prompts, tools and calls as those of well-known models do, and not much more."""

from __future__ import annotations

HERMES = (
    "{%- if tools %}<|im_start|>system\n"
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
    "{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{%- endfor %}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' }}{{ message.content }}"
    "{{ '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + message.role }}"
    "{%- if message.content %}{{ '\n' + message.content }}"
    "{%- elif not message.tool_calls %}{{ '\n' }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' }}{{ call.function.name }}{{ \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Qwen 2.5's."""

HERMES_THINK = HERMES.replace(
    "{%- if message.content %}{{ '\n' + message.content }}",
    "{%- if message.reasoning_content %}{{ '\n<think>\n' + message.reasoning_content + '\n</think>\n' }}"
    "{%- endif %}{%- if message.content %}{{ '\n' + message.content }}",
).replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{%- endif %}",
)
"""Qwen 3's: a model that thinks first, unless it is told not to."""

ALWAYS_THINK = (
    "{{ bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
    "{%- elif message.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{%- endif %}"
)
"""DeepSeek-R1's: the prompt begins the reasoning. It has no tools."""

LLAMA = (
    "{{ bos_token }}{%- for message in messages %}"
    "{%- if message.tool_calls %}"
    "{%- if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + call.name + '\", ' }}{{ '\"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}"
    "{{ '<|eot_id|>' }}"
    "{%- elif message.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ message.content | tojson }}{{ '<|eot_id|>' }}"
    "{%- else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{%- if tools and message.role == 'user' and loop.last %}"
    '{{ \'Respond in the format {"name": function name, "parameters": dictionary of arguments}.\n\n\' }}'
    "{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{%- endfor %}{%- endif %}"
    "{{ message.content + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
"""Llama 3.1's."""

_MISTRAL = (
    "{{ bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- if tools and loop.last %}"
    "{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{ '[INST]' + message.content + '[/INST]' }}"
    "{%- elif message.tool_calls %}CALLS"
    "{%- elif message.role == 'assistant' %}{{ message.content + eos_token }}"
    "{%- elif message.role == 'tool' %}"
    "{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)
MISTRAL_LIST = _MISTRAL.replace(
    "CALLS",
    "{{ '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{%- endif %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | tojson }}'
    "{{ ', \"id\": \"' + call.id + '\"}' }}{{ ']' if loop.last else ', ' }}{%- endfor %}{{ eos_token }}",
)
"""Mistral 7B v0.3's and Nemo's."""
MISTRAL = _MISTRAL.replace(
    "CALLS",
    "{%- for call in message.tool_calls %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}{{ call.function.arguments | tojson }}{%- endfor %}"
    "{{ eos_token }}",
)
"""Mistral Small 3.2's."""

XML = (
    "{%- if tools %}<|im_start|>system\n<tools>{{ tools | tojson }}</tools>\nReply with "
    "<tool_call>\n<function=example>\n<parameter=name>\nvalue\n</parameter>\n</function>\n</tool_call>"
    "<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for name, value in call.function.arguments | items %}{{ '<parameter=' + name + '>\n' }}"
    "{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{%- endfor %}"
    "{{ '</function>\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Qwen3-Coder's: calls that are no JSON."""
