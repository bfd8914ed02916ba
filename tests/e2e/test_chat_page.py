"""Test the chat page in a real browser, with a live server whose engine generates the text of the
test.
"""

import base64
import copy
import json
import wave
from dataclasses import replace
from io import BytesIO

import pytest
from PIL import Image
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.e2e.browser import CHROMIUM, Page
from tests.e2e.page_checks import LOWEST_CONTRAST, NAMELESS
from tests.e2e.server import wait_until
from tests.e2e.talking_server import Faulty, ReadsMedia, TalkingEngine, make_app
from tests.entrypoints.openai.observed_server import KEY, served
from tests.exhaustive import exhaustive
from vllm.config import PoolerConfig
from vllm.entrypoints.shared.context import ServerContext

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)"),
]

ANSWER = ".assistant:last-child"
PRESS_ENTER = (
    "document.querySelector('#input').dispatchEvent(new KeyboardEvent('keydown', "
    "{key: 'Enter', shiftKey: %s, bubbles: true, cancelable: true}))"
)
"""The result is whether the field handles it; % the state of the shift key."""
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}


@pytest.fixture(scope="module")
def talk():
    """Return an engine, the app that can replace its answers, and the address of its server."""
    engine = TalkingEngine()
    faulty = Faulty(make_app(engine))
    with served(faulty) as url:
        yield engine, faulty, url


@pytest.fixture
def engine(talk):
    engine, faulty, _ = talk
    engine.say("ok")
    engine.error = None
    engine.requests.clear()
    engine.images.clear()
    engine.read_media()
    faulty.answer = None
    return engine


@pytest.fixture
def chat(engine, talk, page):
    """Return the chat page, ready for input."""
    return open_chat(page, talk[2])


def open_chat(page: Page, url: str, **window) -> Page:
    page.open(url, **window)
    page.wait_for_text("#state", "ready")
    return page


def send(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.click("#send")


def wait_for_answer(page: Page, text: str) -> None:
    """Wait until the last answer is complete and shows a text."""
    page.wait_for(f"document.querySelector('{ANSWER} .actions')")
    page.wait_for_text(ANSWER, text)  # a long answer is drawn in several parts


def set_settings(page: Page, **texts: str) -> None:
    page.click("#open-settings")
    for name, text in texts.items():
        page.fill(f"[data-setting={name}]", text)
    page.click("#settings .head button")
    page.wait_for("!document.querySelector('#settings').open")


def press(page: Page, role: str, label: str) -> None:
    """Click a button below the last message of a role."""
    page.evaluate(
        f"[...[...document.querySelectorAll('.{role}')].at(-1).querySelectorAll('button')]"
        f".find((button) => button.textContent === {label!r}).click()"
    )


def import_chats(page: Page, text: str) -> None:
    """Import the content of a file of conversations."""
    page.evaluate(
        "(() => { const files = new DataTransfer();"
        f"files.items.add(new File([{json.dumps(text)}], 'chats.json'));"
        "const input = document.querySelector('#import-file'); input.files = files.files;"
        "input.dispatchEvent(new Event('change')); })()"
    )


# ---- answers -------------------------------------------------------------------------------------


def test_an_answer_streams_in_and_is_measured(chat, engine):
    engine.say("Hel", "lo ", "there", is_held=True)
    send(chat, "Hi")
    chat.wait_for_text(ANSWER, "Hel")
    assert chat.is_shown("#stop") and not chat.is_shown("#send")
    assert chat.evaluate(f"document.querySelector('{ANSWER}').ariaBusy") == "true"
    engine.release.set()
    wait_for_answer(chat, "Hello there")
    assert engine.prompts == ["<user>Hi<assistant>"]
    measures = chat.text(f"{ANSWER} .note")
    assert measures.startswith("4 tokens · ") and "tokens/s · first token" in measures
    assert "context" in measures
    chat.wait_for_text("#announcer", "The answer is complete: Hello there")


def test_an_answer_that_is_stopped_stays_and_ends_in_the_engine(chat, engine):
    engine.say("Hel", "lo", is_held=True)
    send(chat, "Hi")
    chat.wait_for_text(ANSWER, "Hel")
    chat.click("#stop")
    wait_for_answer(chat, "stopped")
    assert "Hel" in chat.text(ANSWER) and "lo" not in chat.text(f"{ANSWER} .content")
    wait_until(lambda: engine.aborted == list(engine.requests))


def test_questions_and_answers_are_edited_and_tried_again(chat, engine):
    send(chat, "one")
    wait_for_answer(chat, "ok")
    engine.say("second")
    press(chat, "assistant", "Retry")
    wait_for_answer(chat, "second")
    assert "2 of 2" in chat.text(ANSWER)
    chat.click(f"{ANSWER} [aria-label='Earlier version']")
    wait_for_answer(chat, "ok")

    press(chat, "assistant", "Edit")
    chat.fill(".edit textarea", "mended")
    press(chat, "assistant", "Save")
    wait_for_answer(chat, "mended")
    send(chat, "two")
    wait_for_answer(chat, "second")
    assert engine.prompts[-1] == "<user>one<assistant>mended<user>two<assistant>"

    press(chat, "user", "Edit")
    chat.fill(".edit textarea", "three")
    press(chat, "user", "Send")
    wait_for_answer(chat, "second")
    assert engine.prompts[-1] == "<user>one<assistant>mended<user>three<assistant>"
    assert "2 of 2" in chat.text(".user:nth-last-child(2)")


def test_settings_reach_the_engine(chat, engine):
    set_settings(
        chat, system="Be short.", temperature="0.25", top_p="0.5", top_k="7", min_p="0.1",
        max_tokens="9", seed="42", presence_penalty="0.5", frequency_penalty="-0.5",
        repetition_penalty="1.5", stop="a b\n\\n\\n", extra='{"min_tokens": 3}',
    )  # fmt: skip
    send(chat, "Hi")
    wait_for_answer(chat, "ok")
    params = engine.last_params
    assert engine.prompts == ["<system>Be short.<user>Hi<assistant>"]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.25, 0.5, 7, 0.1)
    assert (params.max_tokens, params.min_tokens, params.seed) == (9, 3, 42)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert (params.repetition_penalty, params.stop) == (1.5, ["a b", "\n\n"])


def test_a_setting_that_cannot_be_used_says_why(chat):
    chat.click("#open-settings")
    for name, text in (("tools", "[{}]"), ("schema", "{"), ("temperature", "-9")):
        chat.fill(f"[data-setting={name}]", text)
    assert "needs a name" in chat.text("#tools-problem")
    assert "JSON schema: this is not JSON" in chat.text("#schema-problem")
    assert chat.text("#temperature-problem")
    chat.click("#settings .head button")
    assert chat.evaluate("document.querySelector('#settings').open")


def test_reasoning_is_folded_away(page):
    engine = TalkingEngine()
    engine.say("<think>", "let me *see*", "</think>", "yes")
    with served(make_app(engine, reasoning_parser="deepseek_r1")) as url:
        open_chat(page, url)
        send(page, "Hi")
        wait_for_answer(page, "yes")
        assert "Thought for" in page.text(".reasoning summary")
        assert not page.is_shown(".reasoning div")
        page.click(".reasoning summary")
        page.wait_for_text(".reasoning em", "see")
        send(page, "more")
        page.wait_for("document.querySelectorAll('.assistant .actions').length == 2")
        assert "see" not in engine.prompts[-1]


def test_a_tool_call_is_shown_and_answered(chat, engine):
    set_settings(chat, tools=json.dumps(TOOL))
    engine.say('[{"name": "get_weather", ', '"parameters": {"city": "Paris"}}]')
    send(chat, "Weather?")
    chat.wait_for_text(".calls h3", "Call of get_weather")
    chat.wait_for_text(".calls pre", '"city": "Paris"')
    chat.wait_for("document.querySelector('.results')")
    assert "Retry" in chat.text(".assistant footer")
    engine.say("It is sunny.")
    chat.fill(".results textarea", "sunny, 20 degrees")
    chat.click(".results button")
    chat.wait_for_text(".assistant:last-child .markdown", "It is sunny.")
    assert engine.prompts[-1].endswith("[get_weather]<tool>sunny, 20 degrees<assistant>")


def test_structured_output_is_asked_for_and_shown_with_indentation(chat, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    set_settings(chat, schema=json.dumps(schema))
    engine.say('{"a"', ": 1}")
    send(chat, "Hi")
    wait_for_answer(chat, '{\n  "a": 1\n}')
    assert engine.last_params.guided_decoding.json == schema
    engine.say('{"a"')
    press(chat, "assistant", "Retry")
    chat.wait_for_text(ANSWER, "This is not complete JSON")


# ---- hostile and unusual outputs of a model ------------------------------------------------------

HOSTILE = """<script>document.title = 'broken'</script>
<img src=x onerror="document.title='broken'"> <a href="javascript:x">raw</a>

[one](javascript:document.title='broken') [two](data:text/html,x) [three](https://user:pw@bank.example)
[bank.example](https://evil.example/a?b=c) <https://plain.example/x> ![pixel](https://track.example/p.png)

safe\u202egpj.exe [https://b\u0430nk.example](https://b\u0430nk.example)

```html
<b onclick=alert(1)>\u2066code\u2069</b>
```

| <b>x</b> | `y` |
|---|---|
| **z** | <iframe src=//evil.example> |

"""


def test_hostile_output_is_only_text(chat, engine):
    engine.say(*(HOSTILE[i : i + 9] for i in range(0, len(HOSTILE), 9)))
    send(chat, HOSTILE)
    wait_for_answer(chat, "<script>document.title")
    found = (
        "document.querySelectorAll('#messages :is(script, img, iframe, object, style, b)').length"
    )
    assert chat.evaluate(found) == 0
    assert chat.evaluate("document.title") == "vLLM chat"
    links = chat.evaluate("[...document.links].filter((a) => a.closest('.message')).map((a) => "
                          "[a.href, a.rel, a.target])")  # fmt: skip
    assert [link[0] for link in links] == [
        "https://evil.example/a?b=c",
        "https://plain.example/x",
        "https://track.example/p.png",
        "https://xn--bnk-6cd.example/",
    ]
    assert {tuple(link[1:]) for link in links} == {("noopener noreferrer", "_blank")}
    text = chat.text(ANSWER)
    assert "bank.example (https://evil.example/a?b=c)" in text  # the page shows where a link goes
    assert "(https://xn--bnk-6cd.example/)" in text
    assert "safe[U+202E]gpj.exe" in text and "[U+2066]code[U+2069]" in text
    assert "[one](javascript:document.title='broken')" in text
    assert chat.text(f"{ANSWER} td strong") == "z"


@pytest.mark.parametrize(
    "text",
    [
        ">" * 5000 + " deep",
        "\n".join(" " * (2 * i) + "- deep" for i in range(300)),
        "[" * 9000 + "deep",
        "*a **b " * 3000 + "deep",
        "x" * 60_000 + " deep",
        "# a" + " " * 30_000 + "deep",
        "|" * 9000 + "\n" + "|-" * 900 + "deep",
        "|a|b|\n|-|-|\n" + "|1|2|\n" * 5000 + "|deep|",
    ],
    ids=["quotes", "lists", "brackets", "marks", "line", "spaces", "columns", "rows"],
)
def test_a_text_that_would_cost_much_is_shown(chat, engine, text):
    engine.say(*(text[i : i + 500] for i in range(0, len(text), 500)))
    send(chat, "Hi")
    wait_for_answer(chat, "deep")
    assert chat.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_follows_an_answer_until_somebody_scrolls_back(chat, engine):
    engine.say("one two three\n\n" * 200)
    send(chat, "Hi")
    wait_for_answer(chat, "three")
    chat.evaluate("window.log = document.querySelector('#log')")

    def follows_after(change):
        chat.evaluate(f"{change}; log.dispatchEvent(new Event('scroll'))")
        return not chat.is_shown("#to-end")

    assert follows_after("messages.style.paddingBottom = '900px'"), "nobody has scrolled"
    chat.wait_for("log.scrollHeight - log.scrollTop - log.clientHeight < 80")
    assert not follows_after("log.scrollTop -= 300")
    assert not follows_after("log.scrollTop += 100"), "not at the end"
    assert follows_after("log.scrollTop = log.scrollHeight")


def test_a_long_answer_grows_at_its_end_alone(chat, engine):
    """Show 100,000 tokens. Text that is drawn is not drawn again, so the page never freezes."""
    paragraph = "one two three four five six seven eight nine ten.\n\n"
    first = "First paragraph.\n\n```\n" + "x = 1\n" * 200 + "```\n\n" + paragraph
    engine.say(first, *[paragraph * 20] * 455, "last words", is_held=True)
    send(chat, "Hi")
    chat.wait_for_text(f"{ANSWER} .markdown", "one two three")
    chat.evaluate(
        f"const body = document.querySelector('{ANSWER} .markdown');"
        "window.kept = [...body.children].slice(0, 2); window.drawnAgain = 0;"
        "new MutationObserver((changes) => {"
        "  for (const change of changes) drawnAgain += change.removedNodes.length;"
        "}).observe(body, {childList: true})"
    )
    engine.release.set()
    wait_for_answer(chat, "last words")
    assert chat.evaluate("kept.every((node) => node.isConnected)")
    number = chat.evaluate(f"document.querySelectorAll('{ANSWER} .markdown > p').length")
    assert number == 9103
    assert chat.evaluate("drawnAgain") < number / 10


def test_markdown_is_shown_as_it_is_meant(chat, engine):
    engine.say(
        "## Head\n\nA **bold *nested*** and ~~struck~~ `code` snake_case_name 2 * 3.\n",
        "- one\n  - two\n\n1. first\n2. second\n\n> quoted\n\n```py\nx = '`'\n``",
        "`\nplain https://a.example/x_y_z. \\*kept\\*",
    )
    send(chat, "Hi")
    wait_for_answer(chat, "kept")
    shown = chat.evaluate(f"document.querySelector('{ANSWER} .markdown').innerText")
    assert "snake_case_name 2 * 3." in shown and "*kept*" in shown
    for selector, text in {
        "h4": "Head", "strong": "bold nested", "strong em": "nested", "del": "struck",
        "p > code": "code", "ul > li > ul > li": "two", "ol li:last-child": "second",
        "blockquote": "quoted", "figcaption span": "py", "pre": "x = '`'",
        "a": "https://a.example/x_y_z",
    }.items():  # fmt: skip
        assert chat.text(f"{ANSWER} .markdown {selector}") == text


# ---- pictures ------------------------------------------------------------------------------------

GIVE = """(async () => {
  const canvas = new OffscreenCanvas(%d, %d), context = canvas.getContext('2d');
  context.fillStyle = 'teal';
  context.fillRect(0, 0, canvas.width / 2, canvas.height);
  const files = new DataTransfer();
  files.items.add(new File([await canvas.convertToBlob()], %s, {type: %s}));
  const how = %s, input = document.querySelector('#picture-files');
  if (how === 'choose') {
    input.files = files.files;
    input.dispatchEvent(new Event('change'));
  } else if (how === 'paste') {
    document.dispatchEvent(new ClipboardEvent('paste', {clipboardData: files, cancelable: true}));
  } else {
    document.querySelector('#log').dispatchEvent(
      new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true}));
  }
})()"""
"""Gives the page a file with a picture that is half transparent."""
GIVEN = "#attachments li"


def give(page: Page, name: str, width: int = 60, height: int = 40, how: str = "choose", **more):
    kind = more.get("kind", "image/png")
    page.evaluate(GIVE % (width, height, json.dumps(name), json.dumps(kind), json.dumps(how)))


@pytest.fixture
def seeing(engine, talk, page):
    """Return the chat page of a model that reads pictures, ready for input."""
    engine.read_media("image")
    return open_chat(page, talk[2])


def sizes(files):
    return [(image.size, image.format) for image in map(Image.open, map(BytesIO, files))]


def test_pictures_are_chosen_pasted_and_dropped_and_can_be_removed(seeing, engine):
    for how in ("choose", "paste", "drop"):
        give(seeing, f"{how}.png", how=how)
        seeing.wait_for_text("#attachments ul", f"{how}.png, 60 × 40")
        assert not seeing.evaluate("document.querySelector('#send').disabled")
    seeing.click("[aria-label='Remove paste.png, 60 × 40']")
    assert "paste" not in seeing.text(GIVEN)
    assert seeing.evaluate("document.activeElement.ariaLabel").startswith("Remove drop.png")
    send(seeing, "What are these?")
    wait_for_answer(seeing, "ok")
    assert not seeing.is_shown("#attachments ul")
    assert seeing.evaluate("[...document.querySelectorAll('.user img')].map((i) => i.alt)") == [
        "choose.png, 60 × 40",
        "drop.png, 60 × 40",
    ]
    assert engine.prompts == ["<user><image>\n<image>\nWhat are these?<assistant>"]
    assert sizes(engine.images[0]) == [((60, 40), "PNG")] * 2


def test_a_large_picture_is_scaled_down_and_the_user_is_told(seeing, engine):
    give(seeing, "wide.png", 4096, 1024)
    seeing.wait_for_text(GIVEN, "wide.png, 2048 × 512, scaled down from 4096 × 1024")
    seeing.click("#send")  # a message may have an image and no text
    wait_for_answer(seeing, "ok")
    assert sizes(engine.images[0]) == [((2048, 512), "JPEG")]
    pixels = Image.open(BytesIO(engine.images[0][0]))
    left, right = pixels.getpixel((9, 9)), pixels.getpixel((2000, 9))
    assert left[0] < 10 and min(right) > 250  # transparent pixels have become white


def test_pictures_are_kept_for_later_turns_edits_and_other_days(seeing, engine, talk):
    for name in ("one.png", "two.png"):
        give(seeing, name)
        seeing.wait_for_text("#attachments ul", name)
    send(seeing, "Look")
    wait_for_answer(seeing, "ok")
    open_chat(seeing, talk[2])
    seeing.wait_for("document.querySelector('.user img')?.naturalWidth === 60")
    send(seeing, "And now?")
    seeing.wait_for("document.querySelectorAll('.assistant .actions').length === 2")
    assert [len(files) for files in engine.images] == [2, 2]
    seeing.click(".user .actions button:nth-child(2)")  # the Edit button of the first message
    seeing.click(".edit [aria-label^='Remove one.png']")
    seeing.click(".edit > button")
    wait_for_answer(seeing, "ok")
    assert len(engine.images[-1]) == 1
    assert seeing.evaluate("document.querySelectorAll('.user img').length") == 1
    assert "2 of 2" in seeing.text(".user")


def test_deleted_pictures_leave_the_browser_unless_they_are_wanted_back(seeing, engine, talk):
    number = "new Promise((resolve) => { indexedDB.open('vllm-chat', 1).onsuccess = (event) => {" \
             "const table = event.target.result.transaction('media').objectStore('media');" \
             "table.count().onsuccess = (found) => {" \
             "  event.target.result.close(); resolve(found.target.result); }; }; })"  # fmt: skip
    give(seeing, "one.png")
    seeing.wait_for_text(GIVEN, "one.png")
    send(seeing, "Look")
    wait_for_answer(seeing, "ok")
    open_chat(seeing, talk[2])
    assert seeing.evaluate(number) == 1
    seeing.click("#delete-all")
    seeing.wait_for(f"{number}.then((n) => n === 0)")
    seeing.click("#undo")
    seeing.wait_for(f"{number}.then((n) => n === 1)")
    seeing.evaluate("URL.createObjectURL = (blob) => { window.exported = blob; return 'blob:x'; };"
                    "HTMLAnchorElement.prototype.click = () => {}")  # fmt: skip
    seeing.click("#export")
    seeing.wait_for("window.exported")
    exported = seeing.evaluate("exported.text()")
    seeing.click("#delete-all")
    seeing.wait_for(f"{number}.then((n) => n === 0)")
    open_chat(seeing, talk[2])
    import_chats(seeing, exported)
    seeing.wait_for_text("#conversations", "Look")
    seeing.click("#conversations .title")
    seeing.wait_for("document.querySelector('.user img')?.naturalWidth === 60")
    assert seeing.evaluate(number) == 1


def test_a_picture_that_the_server_refuses_is_not_lost(seeing, engine, talk):
    give(seeing, "one.png")
    seeing.wait_for_text(GIVEN, "one.png")
    talk[1].answer = flat_error(413, "1 MiB at most")
    send(seeing, "Look")
    wait_for_answer(seeing, "larger than the server takes: 1 MiB at most.")
    talk[1].answer = None
    press(seeing, "assistant", "Retry")
    wait_for_answer(seeing, "ok")
    assert sizes(engine.images[-1]) == [((60, 40), "PNG")]
    seeing.complaints[:] = [line for line in seeing.complaints if "status of" not in line]


def test_a_file_that_is_no_picture_is_refused_by_name(seeing):
    give(seeing, "notes.txt", kind="text/plain")
    seeing.wait_for_text("#notice", "notes.txt cannot be sent: the model reads pictures.")
    seeing.evaluate("OffscreenCanvas.prototype.convertToBlob = async () => new Blob(['no'])")
    give(seeing, "broken.png")
    seeing.wait_for_text("#notice", "broken.png cannot be read as a picture")
    assert not seeing.is_shown("#attachments ul")


def test_a_model_that_reads_text_alone_is_offered_no_pictures(seeing, engine, talk):
    give(seeing, "one.png")
    seeing.wait_for_text(GIVEN, "one.png")
    send(seeing, "Look")
    wait_for_answer(seeing, "ok")
    engine.read_media()
    open_chat(seeing, talk[2])
    assert not seeing.is_shown("#attachments")
    for how in ("paste", "drop"):
        give(seeing, "two.png", how=how)
    assert "does not read is not sent" in seeing.text(".user .content")
    send(seeing, "And now?")
    seeing.wait_for("document.querySelectorAll('.assistant .actions').length === 2")
    assert engine.prompts[-1] == "<user>Look<assistant>ok<user>And now?<assistant>"


# ---- sounds --------------------------------------------------------------------------------------


def record(page: Page) -> None:
    wav = (
        "(() => { const n = 8000, view = new DataView(new ArrayBuffer(44 + 2 * n));"
        "[['RIFF', 0], ['WAVEfmt ', 8], ['data', 36]].forEach(([text, at]) =>"
        "  [...text].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0))));"
        "[[4, 36 + 2 * n], [16, 16], [24, 16000], [28, 32000], [40, 2 * n]].forEach("
        "  ([at, value]) => view.setUint32(at, value, true));"
        "[[20, 1], [22, 1], [32, 2], [34, 16]].forEach(([at, v]) => view.setUint16(at, v, true));"
        "for (let i = 0; i < n; i += 1) view.setInt16(44 + 2 * i, 9000 * Math.sin(i / 9), true);"
        "return new Blob([view], {type: 'audio/wav'}); })()"
    )
    page.evaluate(
        "(() => { navigator.mediaDevices.getUserMedia ="
        "  async () => ({getTracks: () => [{stop() {}}]});"
        "window.MediaRecorder = class { start() {} stop() {"
        f"  this.ondataavailable({{data: {wav}}}); this.onstop(); }} }}; }})()"
    )
    page.click("#record")
    page.wait_for_text("#record", "Stop recording")
    page.click("#record")


def test_a_recording_is_sent_to_a_model_that_hears(engine, talk, page):
    engine.read_media("audio")
    open_chat(page, talk[2])
    assert not page.is_shown("#add-picture")
    record(page)
    page.wait_for_text(GIVEN, "recording, 500 ms")
    page.evaluate(
        "(() => { window.bodies = []; const plain = fetch; window.fetch = (path, options) => {"
        "  bodies.push(options?.body); return plain(path, options); }; })()"
    )
    talk[1].answer = flat_error(400, "heard")
    send(page, "What is said?")
    wait_for_answer(page, "heard")
    body = json.loads(page.evaluate("bodies.find((body) => body?.includes('messages'))"))
    sound, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is said?"}
    assert sound["type"] == "input_audio" and sound["input_audio"]["format"] == "wav"
    with wave.open(BytesIO(base64.b64decode(sound["input_audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (16000, 1, 8000)
    assert page.is_shown(".user audio")
    page.complaints[:] = [line for line in page.complaints if "status of" not in line]


def test_a_recording_becomes_text_where_the_model_transcribes(engine, talk, page):
    page.open(talk[2])
    page.wait_for_text("#state", "ready")
    assert not page.is_shown("#record")
    page.evaluate(
        "(() => { const plain = fetch; window.answers = [[400, {error: {message: 'too loud'}}],"
        "  [200, {text: ' hello there '}]]; window.sent = [];"
        "window.fetch = async (path, options) => {"
        "  if (path !== 'v1/audio/transcriptions') {"
        "    const found = await plain(path, options);"
        "    if (path !== 'chat.json') return found;"
        "    return Response.json({...await found.json(), transcribes: true});"
        "  }"
        "  sent.push([options.body.get('model'), options.body.get('file').size]);"
        "  const [status, body] = answers.shift();"
        "  return Response.json(body, {status}); }; })()"
    )
    page.evaluate("document.querySelector('#forget').click()")  # the page requests chat.json again
    page.wait_for("document.querySelector('#record').checkVisibility()")
    page.fill("#input", "Draft:")
    record(page)
    page.wait_for_text("#notice", "too loud")
    page.wait_for_text(GIVEN, "recording, 500 ms")
    page.click(f"{GIVEN} button")  # the Try again button
    page.wait_for("document.querySelector('#input').value === 'Draft: hello there'")
    assert page.evaluate("sent") == [["stdlib", 44 + 2 * 8000]] * 2
    assert not page.is_shown("#attachments ul")
    send(page, "hello there")
    wait_for_answer(page, "ok")


def test_a_model_that_only_transcribes_has_nothing_to_send(engine, talk, page, monkeypatch):
    open_chat(page, talk[2])
    assert page.is_shown("#send") and page.is_shown("#open-settings")
    engine.read_media("audio")
    monkeypatch.setattr(ReadsMedia, "required", "audio")
    monkeypatch.setattr(ReadsMedia, "placeholder", "")
    monkeypatch.setattr(ServerContext, "speech", object())
    open_chat(page, talk[2])
    page.wait_for_text("#greeting", "This model does not chat")
    assert page.is_shown("#record") and page.is_shown("#add-sound") and page.is_shown("#input")
    page.fill("#input", "hello")
    assert not page.is_shown("#send") and not page.is_shown("#open-settings")
    page.evaluate(PRESS_ENTER % "false")
    assert page.evaluate("document.querySelector('#input').value.trim()") == "hello"
    assert not engine.requests and not page.evaluate("document.querySelector('.user')")


# ---- faults --------------------------------------------------------------------------------------


def flat_error(status, message, **headers):
    return JSONResponse({"error": {"message": message}}, status, headers)


async def cut_stream():
    yield b'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (flat_error(400, "temperature must be lower"), "status 400: temperature must be lower."),
        (JSONResponse({"error": {"message": "no such model"}}, 404), "Not found: no such model."),
        (flat_error(413, "16 MiB at most"), "larger than the server takes: 16 MiB at most."),
        (flat_error(429, "slow down"), "Too many requests: slow down."),
        (
            flat_error(503, "queue is full", **{"Retry-After": "7"}),
            "cannot take this request now: queue is full. Try again in 7 s.",
        ),
        (Response("<h1>Bad gateway</h1>", 502, media_type="text/html"), "status 502."),
        (StreamingResponse(cut_stream(), media_type="text/event-stream"), "closed the connection"),
    ],
    ids=["400", "404", "413", "429", "503", "502", "cut"],
)
def test_an_error_is_told_beside_the_message_and_can_be_tried_again(chat, talk, answer, text):
    talk[1].answer = answer
    send(chat, "Hi")
    wait_for_answer(chat, text)
    assert chat.evaluate(f"document.querySelector('{ANSWER} .problem').role") == "alert"
    talk[1].answer = None
    press(chat, "assistant", "Retry")
    wait_for_answer(chat, "ok")
    assert "2 of 2" in chat.text(ANSWER) or not chat.evaluate(
        f"document.querySelector('{ANSWER} .problem')"
    )
    chat.complaints[:] = [line for line in chat.complaints if "status of" not in line]


def test_a_failed_answer_in_the_middle_is_tried_again_without_loss(chat, talk):
    talk[1].answer = flat_error(400, "no")
    send(chat, "first")
    wait_for_answer(chat, "status 400")
    talk[1].answer = None
    send(chat, "second")
    wait_for_answer(chat, "ok")
    chat.click(".assistant .actions button")  # the Retry button of the failed answer
    wait_for_answer(chat, "ok")
    open_chat(chat, talk[2])
    assert "2 of 2" in chat.text(ANSWER)
    chat.click("[aria-label='Earlier version']")
    chat.wait_for_text("#messages", "second")
    chat.complaints[:] = [line for line in chat.complaints if "status of" not in line]


def test_while_an_answer_comes_nothing_else_is_asked(chat, engine):
    engine.say("Hel", "lo", is_held=True)
    send(chat, "Hi")
    chat.wait_for_text(ANSWER, "Hel")
    press(chat, "user", "Edit")
    chat.fill(".edit textarea", "Other")
    press(chat, "user", "Send")
    chat.wait_for_text("#notice", "stop it first")
    assert chat.evaluate("document.querySelector('.edit textarea').value") == "Other"
    engine.release.set()
    wait_for_answer(chat, "Hello")
    assert len(engine.prompts) == 1


def test_enter_sends_and_shift_enter_begins_a_line(chat, engine):
    chat.fill("#input", "Hi")
    assert chat.evaluate(PRESS_ENTER % "true")  # the page leaves this key to the input field
    assert not chat.evaluate(PRESS_ENTER % "false")
    wait_for_answer(chat, "ok")
    assert engine.prompts == ["<user>Hi<assistant>"]


def test_an_engine_that_fails_in_mid_stream_is_told(chat, engine):
    engine.say("so ", "far")
    engine.error, engine.error_at = RuntimeError("broken"), 1
    send(chat, "Hi")
    wait_for_answer(chat, "The server ended the answer: the server failed")
    assert "so" in chat.text(f"{ANSWER} .content")


def test_a_server_that_is_gone_is_told_and_found_again(page):
    engine = TalkingEngine()
    engine.say("half ", "whole", is_held=True)
    with served(make_app(engine)) as url:
        open_chat(page, url)
        send(page, "Hi")
        page.wait_for_text(ANSWER, "half")
        engine.error, engine.error_at = ConnectionError("cut"), 1
        engine.release.set()
        wait_for_answer(page, "half")
    engine.error = None
    press(page, "assistant", "Retry")
    wait_for_answer(page, "The server cannot be reached")
    page.wait_for_text("#state", "unreachable")
    assert page.evaluate("document.querySelector('#send').disabled")
    with served(make_app(engine), port=int(url.rpartition(":")[2])):
        page.wait_for_text("#state", "ready")
        press(page, "assistant", "Retry")
        wait_for_answer(page, "half whole")
    page.complaints[:] = [line for line in page.complaints if "ERR_" not in line]


def test_the_key_is_asked_for_kept_in_the_tab_and_forgotten(page):
    with served(make_app(TalkingEngine(), api_key=(KEY,))) as url:
        page.open(url)
        page.wait_for_text("#key-form", "asks for an API key")
        page.fill("#key", "wrong")
        page.click("#key-form button")
        page.wait_for_text("#key-error", "did not take")
        page.fill("#key", KEY)
        page.click("#key-form button")
        page.wait_for_text("#state", "ready")
        assert not page.is_shown("#key-form")
        send(page, "Hi")
        wait_for_answer(page, "ok")
        open_chat(page, url)
        page.open(url + "/status")
        page.wait_for_text("#state", "ready")  # both pages use the same API key
        open_chat(page, url)
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")
        page.click("#forget")
        page.wait_for_text("#state", "locked")
    page.complaints[:] = [line for line in page.complaints if "401" not in line]


def test_the_start_is_followed_until_requests_are_served(page):
    engine = TalkingEngine()
    engine.startup.set_unready("loading weights")
    engine.startup.report("warming up", 12, 40, 33.0)
    with served(make_app(engine)) as url:
        page.open(url)
        page.wait_for_text("#phase", "warming up (12 of 40)")
        page.fill("#input", "Hi")
        assert page.evaluate("document.querySelector('#send').disabled")
        engine.startup.set_ready()
        page.wait_for_text("#state", "ready")
        assert not page.is_shown("#server")
        page.click("#send")
        wait_for_answer(page, "ok")


# ---- other models --------------------------------------------------------------------------------


def test_a_model_without_a_chat_template_goes_on_with_the_text(page):
    engine = TalkingEngine()
    engine.tokenizer = copy.deepcopy(engine.tokenizer)
    engine.tokenizer.chat_template = None
    with served(make_app(engine, chat_template=None)) as url:
        open_chat(page, url)
        assert "continues what stands here" in page.text("#greeting")
        engine.say(" upon **a")
        send(page, "Once")
        wait_for_answer(page, "upon **a")
        engine.say(" time")
        assert page.evaluate("!document.querySelector('#send').disabled")
        page.click("#send")
        page.wait_for("document.querySelectorAll('.assistant .actions').length == 2")
        assert engine.prompts[-1].endswith("Once upon **a")
        assert engine.last_params.max_tokens == 256


def test_a_model_that_cannot_chat_says_what_it_can(page):
    engine = TalkingEngine()
    pooler = PoolerConfig(task="embed", pooling_type="MEAN")
    config = engine.vllm_config
    engine.vllm_config = replace(config, model=replace(config.model, pooler=pooler))
    with served(make_app(engine)) as url:
        open_chat(page, url)
        assert "POST /v1/embeddings" in page.text("#greeting")
        assert not page.is_shown("#composer")


# ---- what the browser keeps ----------------------------------------------------------------------


def test_conversations_outlive_a_reload_and_are_deleted_with_a_way_back(chat, talk):
    send(chat, "first talk")
    wait_for_answer(chat, "ok")
    chat.click("#new")
    send(chat, "second <b>talk</b>")
    wait_for_answer(chat, "ok")
    open_chat(chat, talk[2])
    assert chat.text("#conversations .title") == "second <b>talk</b> first talk"
    assert "second <b>talk</b>" in chat.text("#messages") and "ok" in chat.text("#messages")
    chat.click("[aria-label='Delete second <b>talk</b>']")
    chat.wait_for_text("#messages", "first talk")
    chat.click("#undo")
    chat.wait_for_text("#messages", "second")
    chat.click("#delete-all")
    assert chat.text("#conversations") == ""
    assert (
        chat.evaluate("Object.keys(localStorage).filter((k) => k.startsWith('vllm-chat/'))") == []
    )


def test_an_answer_that_a_reload_cut_short_is_kept_as_it_was(chat, engine, talk):
    engine.say("half", "whole", is_held=True)
    send(chat, "Hi")
    chat.wait_for_text(ANSWER, "half")
    open_chat(chat, talk[2])
    wait_for_answer(chat, "half")
    assert "stopped" in chat.text(ANSWER)


def test_conversations_are_exported_and_imported(chat):
    send(chat, "to be kept")
    wait_for_answer(chat, "ok")
    chat.evaluate("URL.createObjectURL = (blob) => { window.exported = blob; return 'blob:x'; };"
                  "HTMLAnchorElement.prototype.click = () => {}")  # fmt: skip
    chat.click("#export")
    chat.wait_for("window.exported")
    exported = chat.evaluate("exported.text()")
    assert [m["content"] for m in json.loads(exported)["conversations"][0]["messages"]] == [
        "to be kept",
        "ok",
    ]
    chat.click("#delete-all")

    for text, problem in (
        ("{", "cannot be imported"),
        ("{}", "it was not exported by this page"),
        ('{"format": "vllm-chat", "conversations": [{"messages": [{"role": "x"}]}]}', "a role"),
    ):
        import_chats(chat, text)
        chat.wait_for_text("#notice", problem)
    import_chats(chat, exported)
    chat.wait_for_text("#conversations", "to be kept")


def test_a_storage_that_is_full_is_told(chat):
    chat.evaluate(
        "Storage.prototype.setItem = () => { throw new DOMException('x', 'QuotaExceededError'); }"
    )
    send(chat, "Hi")
    wait_for_answer(chat, "ok")
    assert "storage of this browser is full" in chat.text("#notice")


# ---- how it looks --------------------------------------------------------------------------------


# Exhaustive: the colors of a scheme do not depend on the size of the window.
@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [
        (320, 480, "dark"),
        (375, 700, "light"),
        (1200, 800, "dark"),
        exhaustive(320, 480, "light"),
        exhaustive(375, 700, "dark"),
        exhaustive(1200, 800, "light"),
    ],
)
def test_nothing_overflows_and_all_text_can_be_read(chat, engine, talk, width, height, scheme):
    engine.say("# Head\n\nText [link](https://a.example) `code`\n\n```py\n" + "x" * 200 + "\n```\n"
               "|a|b|\n|-|-|\n|" + "y" * 300 + "|2|\n\n> quote")  # fmt: skip
    engine.read_media("image")
    open_chat(chat, talk[2], width=width, height=height, scheme=scheme)
    give(chat, "a.png", 1500, 700)
    chat.wait_for_text(GIVEN, "a.png")
    send(chat, "A question " + "z" * 200)
    wait_for_answer(chat, "quote")
    for name in ("b" * 60, "c"):
        give(chat, f"{name}.png", 3000, 500)
        chat.wait_for_text("#attachments ul", f"{name}.png")
    assert chat.evaluate("document.documentElement.scrollWidth") == width
    assert chat.evaluate("document.querySelector('#log').scrollWidth") <= width
    bottom = chat.evaluate("document.querySelector('#composer').getBoundingClientRect().bottom")
    assert bottom <= height  # the text that is typed is visible
    assert chat.evaluate(LOWEST_CONTRAST) >= 4.5
    assert chat.evaluate(NAMELESS) == []
    chat.click("#open-settings")
    assert chat.evaluate("document.querySelector('#settings').scrollWidth") <= width
    assert chat.evaluate(LOWEST_CONTRAST) >= 4.5
    chat.evaluate("document.querySelector('#settings').close()")
    if width < 700:
        assert not chat.is_shown("#sidebar")
        chat.click("#open-sidebar")
        assert chat.is_shown("#sidebar") and chat.evaluate("document.querySelector('#main').inert")
        chat.click("#close-sidebar")
        assert chat.evaluate("document.activeElement.id") == "open-sidebar"
