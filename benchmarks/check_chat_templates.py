"""Render conversations through real chat templates, on both paths and with transformers.

    python benchmarks/check_chat_templates.py [--wheel FILE] [--list]

The templates come from the JSON files of the wheel `xinference`, which pip downloads to a
temporary folder; nothing of them is kept. Each of them renders each conversation three times: with
`render_chat`, which serves the template of a model, in the process for templates of requests, and
with `apply_chat_template` of transformers on the same messages. Prints a JSON object, which counts
pairs of a template and a conversation:

    equal             the text of transformers
    equal_to_text     the text of transformers, if lists of content are joined to strings before
    shows_more        another text: transformers loses or mangles words of the conversation
    differs           another text, although transformers shows every word
    only_ours         transformers refuses
    only_transformers we refuse
    neither           both refuse
    paths_differ      the two paths of this package give different texts or errors

Exits with 1 if a pair is under only_transformers or paths_differ, or if this package shows fewer
words of a conversation than transformers.
"""

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vllm.entrypoints.chat_utils import ChatOptions, render_chat
from vllm.entrypoints.openai.chat.prompt import render_foreign
from vllm.errors import RequestError

WHEEL = "xinference==4.1.0"
Message = dict[str, Any]

FULL_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}
BARE_TOOL = {"type": "function", "function": {"name": "get_weather"}}
OPEN_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "D", "parameters": {"type": "object"}},
}
LOOSE_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "unit": {"enum": ["C", "F"]},
                "days": {"type": ["integer", "null"]},
                "any": {},
            },
        },
    },
}


def message(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: Any, call_id: str = "call_abc1230") -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def called(content: Any, *arguments: Any, **fields: Any) -> Message:
    calls = [call(given, f"call_abc123{index}") for index, given in enumerate(arguments)]
    return message("assistant", content, tool_calls=calls, **fields)


def result(content: Any, index: int = 0, **fields: Any) -> Message:
    return message("tool", content, tool_call_id=f"call_abc123{index}", **fields)


ASK = message("user", "wordask")
ANSWER = message("assistant", "wordanswer")
CITY = '{"city": "wordcity"}'
CONVERSATIONS: dict[str, tuple[list[Message], list[dict[str, Any]] | None]] = {
    "user": ([ASK], None),
    "system": ([message("system", "wordsystem"), ASK], None),
    "turns": ([message("system", "wordsystem"), ASK, ANSWER, message("user", "wordmore")], None),
    "parts": ([message("user", parts("wordone", "wordtwo"))], None),
    "system in parts": ([message("system", parts("wordsystem")), ASK], None),
    "assistant in parts": ([ASK, message("assistant", parts("wordanswer")), ASK], None),
    "empty parts": ([ASK, message("assistant", []), message("user", "wordmore")], None),
    "developer": ([message("developer", "worddeveloper"), ASK], None),
    "two systems": ([message("system", "wordfirst"), message("system", "wordsecond"), ASK], None),
    "system in the middle": ([ASK, ANSWER, message("system", "wordsystem"), ASK], None),
    "system at the end": ([ASK, message("system", "wordsystem")], None),
    "two users": ([ASK, message("user", "wordmore")], None),
    "assistant first": ([ANSWER, ASK], None),
    "tools": ([ASK], [FULL_TOOL]),
    "bare tool": ([ASK], [BARE_TOOL]),
    "open tool": ([ASK], [OPEN_TOOL]),
    "loose tool": ([ASK], [LOOSE_TOOL]),
    "call": ([ASK, called("", CITY), result("wordresult")], [FULL_TOOL]),
    "call without content": (
        [ASK, {k: v for k, v in called("", CITY).items() if k != "content"}, result("wordresult")],
        [FULL_TOOL],
    ),
    "null call": ([ASK, called(None, CITY), result("wordresult")], [FULL_TOOL]),
    "call and text": ([ASK, called("wordtext", CITY), result("wordresult"), ANSWER, ASK], None),
    "result in parts": ([ASK, called("", CITY), result(parts("wordresult"))], [FULL_TOOL]),
    "two calls": (
        [
            ASK,
            called(None, CITY, '{"city": "wordother"}'),
            result("wordresult"),
            result("wordb", 1),
        ],
        [FULL_TOOL],
    ),
    "damaged call": ([ASK, called(None, '{"city": "wordcity'), result("wordresult")], [FULL_TOOL]),
    "list call": ([ASK, called(None, '["wordcity"]'), result("wordresult")], [FULL_TOOL]),
    "text call": ([ASK, called(None, '"wordcity"'), result("wordresult")], [FULL_TOOL]),
    "null arguments": ([ASK, called(None, None), result("wordresult")], [FULL_TOOL]),
    "system after result": (
        [ASK, called(None, CITY), result("wordresult"), message("system", "wordsystem"), ASK],
        [FULL_TOOL],
    ),
    "user after result": (
        [ASK, called(None, CITY), result("wordresult"), message("user", "wordmore")],
        [FULL_TOOL],
    ),
    "function role": (
        [
            ASK,
            message("assistant", None, function_call={"name": "get_weather", "arguments": CITY}),
            message("function", "wordresult", name="get_weather"),
        ],
        [FULL_TOOL],
    ),
    "reasoning": (
        [ASK, called(None, CITY, reasoning="wordthought"), result("wordresult")],
        [FULL_TOOL],
    ),
    "text, reasoning, call": (
        [ASK, called("wordtext", CITY, reasoning_content="wordthought"), result("wordresult")],
        [FULL_TOOL],
    ),
}


def read_templates(wheel: Path) -> dict[str, str]:
    """Return the chat templates of a wheel: name of the file -> template."""
    found: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".json"):
                for template in _templates_in(json.loads(archive.read(name))):
                    found[Path(name).stem] = template
    return found


def _templates_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        given = value.get("chat_template")
        if isinstance(given, str) and given.strip():
            yield given
        for inner in value.values():
            yield from _templates_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _templates_in(inner)


def for_transformers(messages: list[Message], *, is_joined: bool) -> list[Message]:
    """Return the messages as its documentation wants them: arguments of calls are objects.

    Args:
        messages: of the chat API.
        is_joined: join lists of content.
    """
    messages = copy.deepcopy(messages)
    for each in messages:
        if is_joined and isinstance(each.get("content"), list):
            each["content"] = "\n".join(part["text"] for part in each["content"])
        for one in each.get("tool_calls") or ():
            text = one["function"]["arguments"]
            try:
                one["function"]["arguments"] = json.loads(text)
            except (TypeError, ValueError):
                one["function"]["arguments"] = text
    return messages


def shown_words(text: str) -> int:
    """Return how many words of the conversation a text contains, without words inside a dump."""
    dumped = set(re.findall(r"""['"]text['"]:\s*['"](word\w+)""", text))
    return len(set(re.findall(r"word\w+", text)) - dumped)


def try_render(render: Any) -> tuple[str | None, str]:
    """Return the text, or None and the reason."""
    try:
        return render(), ""
    except RequestError as error:
        reason = re.sub(r"^.*?(cannot render this conversation|chat_template): ", "", str(error))
    except Exception as error:
        reason = str(error) or type(error).__name__
    return None, reason.splitlines()[0][:120]


class Check:
    """Counts the results over all templates and conversations."""

    def __init__(self, *, lists: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.by_conversation: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: Counter[str] = Counter()
        self.places: dict[str, list[str]] = defaultdict(list)
        self.losses: list[str] = []
        self._lists = lists
        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), bos_token="<s>", eos_token="</s>"
        )

    def add(self, name: str, template: str, title: str) -> None:
        messages, tools = CONVERSATIONS[title]
        options = ChatOptions(chat_template=template, tools=tools)
        own, why = try_render(lambda: render_chat(self._tokenizer, messages, options))
        foreign, foreign_why = try_render(
            lambda: render_foreign(self._tokenizer, messages, options, None).text
        )
        theirs = self._with_transformers(template, messages, tools, is_joined=False)
        joined = self._with_transformers(template, messages, tools, is_joined=True)
        if own is None:
            verdict = "neither" if theirs is None else "only_transformers"
            self.reasons[f"{title}: {why}"] += 1
        elif own == theirs:
            verdict = "equal"
        elif own == joined:
            verdict = "equal_to_text"
        elif theirs is None:
            verdict = "only_ours"
        else:
            ours_shown, theirs_shown = shown_words(own), shown_words(theirs)
            verdict = "shows_more" if ours_shown > theirs_shown else "differs"
            if ours_shown < theirs_shown:
                self.losses.append(f"{title}: {name}")
        self._count(verdict, name, title)
        if (own, why) != (foreign, foreign_why):
            self._count("paths_differ", name, title)

    def _count(self, verdict: str, name: str, title: str) -> None:
        self.counts[verdict] += 1
        self.by_conversation[title][verdict] += 1
        self.places[verdict].append(f"{title}: {name}")

    def _with_transformers(
        self, template: str, messages: list[Message], tools: Any, *, is_joined: bool
    ) -> str | None:
        given = for_transformers(messages, is_joined=is_joined)
        text, _ = try_render(
            lambda: self._tokenizer.apply_chat_template(
                given,
                tools=tools,
                chat_template=template,
                add_generation_prompt=True,
                tokenize=False,
            )
        )
        return text

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "counts": dict(self.counts),
            "by_conversation": {
                title: dict(found) for title, found in self.by_conversation.items()
            },
            "refused": dict(self.reasons.most_common()),
            "losses": self.losses,
        }
        if self._lists:
            report["places"] = self.places
        return report


def download(folder: str) -> Path:
    """Download the wheel from PyPI."""
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "-q", "-d", folder]
    subprocess.run(command, check=True)
    return next(Path(folder).glob("*.whl"))


def main() -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="do not download it")
    parser.add_argument("--list", action="store_true", help="name the pairs of each verdict")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        templates = read_templates(args.wheel or download(folder))
    check = Check(lists=args.list)
    for name, template in templates.items():
        for title in CONVERSATIONS:
            check.add(name, template, title)
    report = {"templates": len(templates), "conversations": len(CONVERSATIONS), **check.report()}
    print(json.dumps(report, indent=1, ensure_ascii=False))
    is_bad = check.counts["only_transformers"] or check.counts["paths_differ"] or check.losses
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
