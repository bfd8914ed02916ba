// One message as it is shown. Text of an answer grows in place.

class MessageView {
  // options: isPlain shows text as it is, without Markdown; isStreaming: more text will come; media:
  // the store of pictures; kinds: what the model reads of them;
  // maxModelLen: tokens that fit; versions: ids of all versions of the message; showVersion(id);
  // actions(): buttons [{label, run(button)}]; onDrawn(): it may be higher now.
  constructor(message, options) {
    this.message = message;
    this.options = options;
    this.isStreaming = options.isStreaming;
    this.node = element("article", {className: `message ${message.role}`});
    this.reasoning = this.body = null;
    this.shownContent = this.shownReasoning = 0;
    this.pacer = new Pacer(() => this.draw());
    const names = {user: "You", assistant: message.model || "Answer", tool: `Result of ${message.name || "a tool"}`};
    this.title = element("header", {}, element("h2", {dir: "auto"}, visible(names[message.role])));
    this.content = element("div", {className: "content"});
    this.footer = element("footer");
    this.node.append(this.title, this.content, this.footer);
    this.showVersions();
    this.showMedia();
    this.draw();
  }

  showMedia() {
    const {media, kinds, onDrawn} = this.options, items = this.message.media ?? [];
    if (!items.length) return;
    const unread = items.some((item) => !kinds.includes(item.kind));
    this.content.append(element("div", {className: "media-row"}, ...items.map((item) => mediaNode(item, media, onDrawn))));
    if (unread) this.content.append(element("p", {className: "note"}, "What this model does not read is not sent to it."));
  }

  // The message has changed: it is drawn soon.
  request() {
    this.pacer.request();
  }

  // Nothing more will come.
  finish() {
    this.isStreaming = false;
    this.pacer.flush();
  }

  draw() {
    const isDone = !this.isStreaming;
    this.node.ariaBusy = isDone ? null : "true";
    this.drawReasoning(isDone);
    this.drawContent(isDone);
    if (this.message.toolCalls?.length) this.drawToolCalls(isDone);
    const isWaiting = !isDone && !this.body && !this.reasoning && !this.calls;
    this.waiting ??= element("p", {className: "waiting note"}, "waiting for the first token");
    if (isWaiting) this.content.append(this.waiting);
    else this.waiting.remove();
    this.drawFooter(isDone);
    this.options.onDrawn?.();
  }

  drawReasoning(isDone) {
    const text = this.message.reasoning;
    if (!text) return;
    if (!this.reasoning) {
      const summary = element("summary"), inside = element("div", {className: "markdown"});
      this.reasoning = {summary, view: new MarkdownView(inside)};
      this.content.prepend(element("details", {className: "reasoning"}, summary, inside));
    }
    const {thoughtMs} = this.message, isThinking = !isDone && !this.message.content;
    this.reasoning.summary.textContent = isThinking ? "Thinking…"
      : thoughtMs ? `Thought for ${seconds(thoughtMs / 1000)}` : "Thoughts";
    this.reasoning.view.append(text.slice(this.shownReasoning));
    this.reasoning.view.draw(!isThinking);
    this.shownReasoning = text.length;
  }

  drawContent(isDone) {
    const text = this.message.content;
    if (!text) return;
    if (isDone && this.message.isJson) return this.drawJson(text);
    this.body ??= this.makeBody();
    this.body.append(text.slice(this.shownContent), isDone);
    this.shownContent = text.length;
  }

  // What shows the content: {append(text, isDone)}.
  makeBody() {
    if (this.message.isJson) {
      const code = codeNode("json", "");
      this.content.append(code.node);
      return {append: code.append, node: code.node};
    }
    const node = element("div", this.isPlainText ? {className: "plain", dir: "auto"} : {className: "markdown"});
    this.content.append(node);
    if (this.isPlainText) return {append: (text) => node.append(visible(text))};
    const view = new MarkdownView(node);
    return {append: (text, isDone) => {
      view.append(text);
      view.draw(isDone);
    }};
  }

  get isPlainText() {
    return this.options.isPlain || this.message.role !== "assistant";
  }

  // A complete answer that was to be JSON: with indentation where it is.
  drawJson(text) {
    let shown = text, problem = "";
    try {
      shown = JSON.stringify(JSON.parse(text), null, 2);
    } catch (error) {
      problem = `This is not complete JSON: ${error.message}`;
    }
    const code = codeNode("json", shown);
    if (this.body) this.body.node.replaceWith(code.node);
    else this.content.append(code.node);
    this.body = {node: code.node, append: () => {}};
    if (problem && !this.jsonProblem) {
      this.jsonProblem = element("p", {className: "problem"}, problem);
      code.node.after(this.jsonProblem);
    }
  }

  drawToolCalls(isDone) {
    if (!this.calls) {
      this.calls = element("div", {className: "calls"});
      this.content.append(this.calls);
    }
    this.calls.replaceChildren(...this.message.toolCalls.map((call) => {
      const code = codeNode("arguments", isDone ? prettyJson(call.arguments) : call.arguments);
      return element("section", {}, element("h3", {}, "Call of ", element("code", {}, visible(call.name))), code.node);
    }));
  }

  showVersions() {
    const {versions, showVersion} = this.options, at = versions.indexOf(this.message.id);
    if (versions.length < 2) return;
    const step = (by, label, sign) => element("button", {
      type: "button", className: "quiet", ariaLabel: label, disabled: versions[at + by] === undefined,
      onclick: () => showVersion(versions[at + by]),
    }, sign);
    this.title.append(element("span", {className: "versions"}, step(-1, "Earlier version", "‹"),
      ` ${at + 1} of ${versions.length} `, step(1, "Later version", "›")));
  }

  drawFooter(isDone) {
    const parts = [], message = this.message;
    if (message.error) parts.push(element("p", {className: "problem", role: "alert", dir: "auto"}, visible(message.error)));
    if (message.role === "assistant") parts.push(element("p", {className: "note"}, this.measures(isDone)));
    if (isDone) {
      const buttons = this.options.actions().map(({label, run}) =>
        element("button", {type: "button", className: "quiet", onclick: (event) => run(event.currentTarget)}, label));
      parts.push(element("p", {className: "actions"}, ...buttons));
    }
    this.footer.replaceChildren(...parts);
  }

  // How the answer went: tokens, pace, and why it ended.
  measures(isDone) {
    const m = this.message, parts = [];
    if (m.outputTokens) parts.push(`${count(m.outputTokens)} tokens`);
    if (m.tokensPerSecond) parts.push(`${rate(m.tokensPerSecond)} tokens/s`);
    if (m.firstTokenMs !== undefined) parts.push(`first token ${seconds(m.firstTokenMs / 1000)}`);
    if (m.promptTokens && this.options.maxModelLen) {
      parts.push(`context ${count(m.promptTokens + (m.outputTokens ?? 0))} of ${count(this.options.maxModelLen)}`);
    }
    if (m.isStopped) parts.push("stopped");
    else if (m.finishReason === "length") parts.push("ended at the limit of tokens");
    else if (isDone && !m.finishReason && !m.error) parts.push("not complete: the page was closed before its end");
    return parts.join(" · ");
  }

  // Shows a form in place of the content: run(text, items of its media) when it is sent.
  edit(label, run) {
    const input = element("textarea", {value: this.message.content, ariaLabel: "Edited text", rows: 3});
    const list = new MediaList("Sent with the message", this.options.media);
    list.add(...this.message.media ?? []);
    const cancel = () => {
      form.replaceWith(this.content);
      this.footer.hidden = this.isEdited = false;
      this.footer.querySelector("button")?.focus();
    };
    const form = element("form", {
      className: "edit",
      onsubmit: (event) => {
        event.preventDefault();
        run(input.value, list.items);
      },
      onkeydown: (event) => {
        if (event.key !== "Escape") return;
        event.stopPropagation();
        cancel();
      },
    }, list.node, input, element("button", {}, label),
    element("button", {type: "button", className: "quiet", onclick: cancel}, "Cancel"));
    this.isEdited = true;
    this.content.replaceWith(form);
    this.footer.hidden = true;
    fitHeight(input);
    input.addEventListener("input", () => fitHeight(input));
    input.focus();
  }
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// As high as its text; the style sheet says how high at most.
function fitHeight(input) {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}
