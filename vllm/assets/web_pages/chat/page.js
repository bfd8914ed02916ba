// The page: which conversation is shown, what is sent, and what is told.

class Chat {
  static SAVE_MS = 3000;

  constructor() {
    this.answers = new Map(); // conversation id -> the answer that comes
    this.server = {state: "connecting"};
    this.store = new ConversationStore((text) => this.notice(text));
    this.keyForm = new KeyForm(() => this.link.watch());
    this.link = new ServerLink((server) => this.onServer(server), () => this.keyForm.ask());
    this.dialog = new SettingsDialog(() => this.onSettings());
    this.view = new ConversationView(this);
    this.sidebar = new Sidebar(this);
    this.attachments = new Attachments(this, this.store.media);
    this.listen();
    this.open(this.store.list()[0] ?? this.fresh());
    this.link.watch();
  }

  // Whether this is a device with keys; elsewhere a focus would open a keyboard on the screen.
  static hasKeys() {
    return !matchMedia("(pointer: coarse)").matches;
  }

  listen() {
    const input = byId("input");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    input.addEventListener("input", () => this.onInput());
    input.addEventListener("keydown", (event) => {
      // Enter sends where there are keys; where fingers type, it begins a line.
      const isSend = event.key === "Enter" && !event.shiftKey && !event.isComposing;
      if (isSend && Chat.hasKeys()) {
        event.preventDefault();
        this.send();
      }
    });
    byId("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !byId("settings").open) this.stop();
    });
    byId("model").addEventListener("change", () => {
      this.current.settings.model = byId("model").value;
      this.onSettings();
    });
    byId("hide-notice").addEventListener("click", () => { byId("notice").hidden = true; });
    byId("forget").addEventListener("click", () => {
      ApiKey.forget();
      this.link.watch();
    });
    addEventListener("storage", (event) => this.onStorage(event));
    addEventListener("pagehide", () => this.stopAll());
    // Some phones lay their keyboard over the page: what is left of the screen is the page's height.
    visualViewport?.addEventListener("resize", () => {
      if (visualViewport.scale !== 1) return; // it is the user who has zoomed in
      document.documentElement.style.setProperty("--height", `${visualViewport.height}px`);
    });
  }

  // ---- the server ----------------------------------------------------------------------------

  onServer(server) {
    this.server = server;
    const isReady = server.state === "ready";
    byId("server").hidden = isReady || server.state === "locked";
    if (isReady) {
      this.keyForm.hide();
      this.showModels();
      this.dialog.describe(server);
      // The messages say how they are continued, which is known now.
      this.view.show(this.current);
    }
    if (server.version) showText("version", server.version);
    byId("status-link").hidden = !server.has_status_page;
    byId("docs-link").hidden = !server.has_docs;
    byId("forget").hidden = ApiKey.get() === null;
    this.showGreeting();
    this.onInput();
  }

  showModels() {
    const models = this.link.models, {settings} = this.current;
    byId("model").replaceChildren(...models.map((name) => element("option", {value: name}, visible(name))));
    byId("model").disabled = models.length === 0;
    if (!models.includes(settings.model)) settings.model = models[0];
    byId("model").value = settings.model ?? "";
  }

  showGreeting() {
    const {server} = this, isRefused = server.state === "ready" && server.refusal;
    const isCompletion = server.state === "ready" && this.isCompletion(this.current);
    const writesDown = this.onlyTranscribes;
    showText("greeting-title", isRefused ? "No chat with this model" : writesDown ? "Sound to text" : isCompletion ? "Begin a text" : `Chat with ${visible(this.current.settings.model ?? "the model")}`);
    showText("greeting-text", isRefused ? server.refusal
      : writesDown ? "Record or add a sound. Its text appears below, to be edited and copied. This model does not chat."
      : isCompletion ? "The model continues what stands here. Send nothing to let it go on."
      : "Under Settings: system prompt, sampling, tools and the form of the answer.");
    byId("input").placeholder = writesDown ? "Text of the sound" : isCompletion ? "Text to be continued" : "Message";
    byId("composer").hidden = Boolean(isRefused);
    byId("open-settings").hidden = Boolean(isRefused) || writesDown;
  }

  // The model writes down sounds, and messages of a chat can have nothing that it reads.
  get onlyTranscribes() {
    return this.server.state === "ready" && this.server.transcribes && !this.server.modalities.length;
  }

  get canAnswer() {
    return this.server.state === "ready" && !this.server.refusal;
  }

  isCompletion(conversation) {
    return this.server.state === "ready" && modeOf(conversation.settings, this.server) === "completion";
  }

  // What the model of a conversation reads in addition to text.
  kinds(conversation) {
    return this.server.state === "ready" ? kindsOf(conversation.settings, this.server) : [];
  }

  // ---- conversations ---------------------------------------------------------------------------

  fresh() {
    return new Conversation({settings: {...this.store.settings}});
  }

  begin() {
    this.open(this.fresh());
    byId("input").focus();
  }

  open(conversation) {
    this.current = conversation;
    this.dialog.settings = conversation.settings;
    if (this.link.models.length) this.showModels();
    this.refresh();
    this.view.show(conversation);
    this.showGreeting();
    this.onInput();
  }

  refresh() {
    this.sidebar.show(this.store.list(), this.current);
  }

  save(conversation) {
    this.store.save(conversation);
    this.refresh();
  }

  // The page is left: its answers end here.
  stopAll() {
    for (const answer of this.answers.values()) {
      answer.message.isStopped = true;
      this.store.save(answer.conversation);
      answer.stop();
    }
  }

  delete(conversation) {
    this.remove([conversation], `Deleted: ${conversation.title}`);
  }

  deleteAll() {
    const all = this.store.list();
    if (all.length) this.remove(all, `Deleted ${all.length} conversations.`);
  }

  remove(conversations, text) {
    for (const each of conversations) {
      this.answers.get(each.id)?.stop();
      this.store.delete(each);
    }
    if (conversations.includes(this.current)) this.open(this.store.list()[0] ?? this.fresh());
    this.refresh();
    this.notice(text, () => {
      for (const each of conversations) this.store.restore(each);
      this.open(conversations[0]);
    });
  }

  onStorage(event) {
    const id = this.store.read(event);
    if (id === null) return;
    const isCurrent = id === this.current.id && !this.isRunning(this.current);
    if (isCurrent) this.open(this.store.all.get(id) ?? this.fresh());
    this.refresh();
  }

  onSettings() {
    if (this.store.all.has(this.current.id)) this.store.save(this.current);
    else this.store.settings = {...this.current.settings};
    this.view.show(this.current);
    this.showGreeting();
    this.onInput();
  }

  // ---- messages --------------------------------------------------------------------------------

  isRunning(conversation, message) {
    const answer = this.answers.get(conversation.id);
    return message ? answer?.message === message : Boolean(answer);
  }

  onInput() {
    const isRunning = this.isRunning(this.current), input = byId("input");
    const isCompletion = this.isCompletion(this.current);
    if (this.canAnswer) this.attachments.offer(this.kinds(this.current), this.server.transcribes && !this.kinds(this.current).includes("audio")); // what is attached stays through a restart
    const hasContent = input.value.trim() || this.attachments.items.length || (isCompletion && !this.current.isEmpty);
    byId("send").disabled = !this.canAnswer || this.onlyTranscribes || !hasContent || this.attachments.isReading;
    byId("send").hidden = isRunning || this.onlyTranscribes;
    byId("stop").hidden = !isRunning;
    fitHeight(input);
    // The button that had the focus may be gone.
    const active = document.activeElement;
    if (Chat.hasKeys() && (active === document.body || !active.checkVisibility())) input.focus();
  }

  send() {
    if (byId("send").disabled || this.isRunning(this.current)) return;
    const text = byId("input").value, conversation = this.current;
    const items = this.attachments.take();
    if (text || items.length) conversation.add({role: "user", content: text, media: this.keep(conversation, items)});
    byId("input").value = "";
    this.answer(conversation, conversation.leaf);
  }

  // Keeps what is sent with a message; the media of the message, undefined if there are none.
  keep(conversation, items) {
    const keys = this.store.media.add(conversation.id, items.map((item) => item.url));
    return items.length ? items.map(({kind, label}, i) => ({kind, label, key: keys[i]})) : undefined;
  }

  // Writes down a sound behind what is typed. It stays in the list if that fails.
  async transcribe(item) {
    try {
      const text = await transcribe(item.url, this.current.settings.model), input = byId("input");
      input.value = [input.value.trimEnd(), text].filter(Boolean).join(" ");
    } catch (error) {
      this.attachments.failed(item);
      throw error;
    }
  }

  // Whether a conversation can go on now; if not, the user is told why.
  mayAsk(conversation) {
    if (this.canAnswer && !this.isRunning(conversation)) return true;
    this.notice(this.canAnswer ? "An answer is still coming: stop it first." : "The server is not ready.");
    return false;
  }

  editQuestion(conversation, message, text, items) {
    if (!this.mayAsk(conversation)) return;
    const added = conversation.add({role: "user", content: text, media: items.length ? items : undefined}, message.parent);
    this.answer(conversation, added.id);
  }

  // The answer as the user would have it; what is said next builds on it.
  editAnswer(conversation, message, text) {
    if (!this.mayAsk(conversation)) return;
    const {model, isJson, toolCalls} = message;
    conversation.add({role: "assistant", content: text, model, isJson, toolCalls, finishReason: "edited"}, message.parent);
    this.save(conversation);
    this.view.show(conversation);
  }

  sendResults(conversation, message, results) {
    if (!this.mayAsk(conversation)) return;
    let parent = message.id;
    message.toolCalls.forEach((call, i) => {
      parent = conversation.add({role: "tool", toolCallId: call.id, name: call.name, content: results[i]}, parent).id;
    });
    this.answer(conversation, parent);
  }

  // Results of one answer stand behind each other: those behind the edited one are sent again too.
  editResult(conversation, message, text) {
    if (!this.mayAsk(conversation)) return;
    const path = conversation.path, at = path.indexOf(message);
    let parent = conversation.add({...message, content: text}, message.parent);
    for (let i = at + 1; path[i]?.role === "tool"; i += 1) parent = conversation.add(path[i], parent.id);
    this.answer(conversation, parent.id);
  }

  retry(conversation, message) {
    const hasNothing = !message.content && !message.reasoning && !message.toolCalls?.length;
    if (!this.mayAsk(conversation)) return;
    if (hasNothing) conversation.removeIfLast(message);
    this.answer(conversation, message.parent);
  }

  showVersion(conversation, id) {
    conversation.show(conversation.messages.find((message) => message.id === id));
    this.save(conversation);
    this.view.show(conversation);
  }

  stop() {
    this.answers.get(this.current.id)?.stop();
  }

  // Asks for an answer behind a message, and shows it while it comes.
  async answer(conversation, parent) {
    if (!this.mayAsk(conversation)) return;
    conversation.leaf = parent;
    const message = conversation.add({role: "assistant", model: conversation.settings.model}, parent);
    const answer = new Answer(message, () => this.onGrowth(conversation, message));
    this.answers.set(conversation.id, Object.assign(answer, {conversation}));
    try {
      const path = conversation.path.slice(0, -1);
      await this.store.media.load(path.flatMap((each) => (each.media ?? []).map((item) => item.key)));
      const request = makeRequest(path, conversation.settings, this.server, this.store.media);
      message.isJson = request.isJson;
      this.save(conversation);
      if (conversation === this.current) this.view.show(conversation);
      this.onInput();
      showText("announcer", "The answer is coming.");
      await answer.run(request);
    } catch (error) {
      message.error = error.message; // a setting that cannot be used
    }
    this.answers.delete(conversation.id);
    this.onEnd(conversation, message, answer.failure);
  }

  onGrowth(conversation, message) {
    this.view.views.get(message)?.request();
    const isDue = performance.now() - (this.saved ?? 0) > Chat.SAVE_MS;
    if (isDue && this.store.all.has(conversation.id)) {
      this.saved = performance.now();
      this.store.save(conversation);
    }
  }

  onEnd(conversation, message, failure) {
    if (this.store.all.has(conversation.id)) this.save(conversation); // it may have been deleted
    const view = this.view.views.get(message);
    view?.finish();
    // A call of a tool has a form for its result; and what failed at once has no view yet.
    if (conversation === this.current && (message.toolCalls?.length || !view)) this.view.show(conversation);
    showText("announcer", message.error ? "" : `The answer is complete: ${message.content.slice(0, 300)}`);
    if (failure?.status === 401) this.keyForm.ask();
    else if (failure?.status === 0 || failure?.status >= 500) this.link.watch();
    this.onInput();
  }

  // ---- notices -----------------------------------------------------------------------------------

  notice(text, undo = null) {
    showText("notice-text", text);
    byId("notice").hidden = false;
    byId("undo").hidden = undo === null;
    byId("undo").onclick = () => {
      byId("notice").hidden = true;
      undo();
    };
  }
}

new Chat();
