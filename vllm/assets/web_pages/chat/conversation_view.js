// The messages of the conversation that is shown, the form for results of tools, and the scrolling.

class ConversationView {
  static NEAR_END_PX = 80;

  // chat: has what the buttons of a message do.
  constructor(chat) {
    this.chat = chat;
    this.views = new Map(); // by message
    this.log = byId("log");
    this.isFollowing = true;
    this.top = 0; // as it was scrolled before
    this.log.addEventListener("scroll", () => this.onScroll());
    byId("to-end").addEventListener("click", () => this.toEnd());
    // A keyboard opens, or tables get their height when they come into view.
    const observer = new ResizeObserver(() => this.follow());
    observer.observe(this.log);
    observer.observe(byId("messages"));
  }

  // Shows a conversation from its beginning to its end. What was drawn before is used again.
  show(conversation) {
    const path = conversation.path, before = this.views;
    this.views = new Map();
    byId("messages").replaceChildren(...path.map((message) => this.make(conversation, message, before).node));
    const last = path.at(-1);
    if (last?.role === "assistant" && last.toolCalls?.length && !this.chat.isRunning(conversation)) {
      byId("messages").append(this.resultForm(conversation, last));
    }
    byId("greeting").hidden = !conversation.isEmpty;
    this.toEnd();
  }

  make(conversation, message, before) {
    const isPlain = this.chat.isCompletion(conversation), maxModelLen = this.chat.server.max_model_len;
    const versions = conversation.versions(message).map((other) => other.id);
    const kinds = this.chat.kinds(conversation), key = [isPlain, maxModelLen, ...kinds, ...versions].join(); // a view with another one looks otherwise
    const drawn = before.get(message);
    if (drawn?.options.key === key && !drawn.isEdited) {
      this.views.set(message, drawn);
      return drawn;
    }
    const view = new MessageView(message, {
      key, isPlain, maxModelLen, versions, kinds,
      isStreaming: this.chat.isRunning(conversation, message),
      media: this.chat.store.media,
      showVersion: (id) => this.chat.showVersion(conversation, id),
      actions: () => this.actions(conversation, message),
      onDrawn: () => this.follow(),
    });
    this.views.set(message, view);
    return view;
  }

  actions(conversation, message) {
    const {chat} = this, edit = (label, run) => () => this.views.get(message).edit(label, run);
    const copy = {label: "Copy", run: (button) => copyText(message.content, button)};
    if (message.role === "tool") {
      return [copy, {label: "Edit", run: edit("Send", (text) => chat.editResult(conversation, message, text))}];
    }
    if (message.role === "user") {
      return [copy, {label: "Edit", run: edit("Send", (text, items) => chat.editQuestion(conversation, message, text, items))},
        {label: "Retry", run: () => chat.answer(conversation, message.id)}];
    }
    const retry = {label: "Retry", run: () => chat.retry(conversation, message)};
    if (!message.content) return [retry];
    return [copy, {label: "Edit", run: edit("Save", (text) => chat.editAnswer(conversation, message, text))}, retry];
  }

  resultForm(conversation, message) {
    const inputs = message.toolCalls.map((call, i) => element("textarea", {id: `result-${i}`, rows: 2, required: true}));
    const fields = message.toolCalls.flatMap((call, i) =>
      [element("label", {htmlFor: `result-${i}`}, `Result of ${visible(call.name)}`), inputs[i]]);
    return element("form", {className: "results", onsubmit: (event) => {
      event.preventDefault();
      this.chat.sendResults(conversation, message, inputs.map((input) => input.value));
    }}, ...fields, element("button", {}, "Send results"));
  }

  // Far from the end because somebody went back, and not because the text has grown.
  onScroll() {
    const {scrollTop, scrollHeight, clientHeight} = this.log;
    const isNear = scrollHeight - scrollTop - clientHeight < ConversationView.NEAR_END_PX;
    this.isFollowing = isNear || this.isFollowing && scrollTop >= this.top;
    this.top = scrollTop;
    byId("to-end").hidden = this.isFollowing;
  }

  follow() {
    if (!this.isFollowing) return;
    this.log.scrollTop = this.log.scrollHeight;
    this.top = this.log.scrollTop;
  }

  toEnd() {
    this.isFollowing = true;
    byId("to-end").hidden = true;
    this.follow();
  }
}
