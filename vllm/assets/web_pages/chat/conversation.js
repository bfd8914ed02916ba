// A conversation: a tree of messages, since an edit or a retry keeps what was there before. One path
// through it is shown; `leaf` is its end.
//
// A message: {id, parent, role, content, ...}. Roles are user, assistant and tool. One of the user may
// have media [{kind, label, key}], whose content is in `MediaStore`. An answer may
// have reasoning, toolCalls [{id, name, arguments}], isJson, model, and how it went: finishReason,
// isStopped, error, promptTokens, outputTokens, firstTokenMs, tokensPerSecond, thoughtMs.

class Conversation {
  static MAX_TITLE_CHARS = 60;

  constructor({id, created, changed, settings, messages, leaf} = {}) {
    this.id = id ?? Conversation.newId();
    this.created = created ?? Date.now();
    this.changed = changed ?? this.created;
    this.settings = settings ?? {};
    this.messages = messages ?? [];
    this.leaf = leaf ?? null;
  }

  // Browsers give randomUUID to pages with TLS alone; getRandomValues to all.
  static newId() {
    return [...crypto.getRandomValues(new Uint8Array(12))].map((b) => b.toString(16).padStart(2, "0")).join("");
  }

  // What was said first, as a line.
  get title() {
    const first = this.messages[0];
    const text = (first?.content || first?.media?.[0].label || "New chat").replace(/\s+/g, " ").trim();
    const isLong = text.length > Conversation.MAX_TITLE_CHARS;
    return isLong ? `${text.slice(0, Conversation.MAX_TITLE_CHARS)}…` : text;
  }

  get isEmpty() {
    return this.messages.length === 0;
  }

  // The messages that are shown, the first one first.
  get path() {
    const byNumber = new Map(this.messages.map((message) => [message.id, message])), path = [];
    for (let at = byNumber.get(this.leaf); at; at = byNumber.get(at.parent)) path.unshift(at);
    return path;
  }

  // The keys of all pictures and recordings, of all versions.
  get mediaKeys() {
    return this.messages.flatMap((message) => (message.media ?? []).map((item) => item.key));
  }

  // Adds a message behind another one, and shows it.
  add(message, parent = this.leaf) {
    const id = this.messages.reduce((most, other) => Math.max(most, other.id), 0) + 1;
    const added = {content: "", ...message, id, parent};
    this.messages.push(added);
    this.leaf = id;
    this.changed = Date.now();
    return added;
  }

  // Messages in the same place: the other versions of this one, and itself.
  versions(message) {
    return this.messages.filter((other) => other.parent === message.parent);
  }

  // Shows the path through a message, to the newest end behind it.
  show(message) {
    let end = message.id;
    for (;;) {
      const next = this.messages.findLast((other) => other.parent === end);
      if (!next) break;
      end = next.id;
    }
    this.leaf = end;
  }

  // Removes a message, unless others stand behind it.
  removeIfLast(message) {
    if (this.messages.some((other) => other.parent === message.id)) return;
    this.messages = this.messages.filter((other) => other !== message);
    if (this.leaf === message.id) this.leaf = message.parent;
  }

  toJson() {
    const {id, created, changed, settings, messages, leaf} = this;
    return {id, created, changed, settings, messages, leaf};
  }

  // A conversation from JSON that may come from anywhere; throws an Error that says what is wrong.
  static fromJson(data) {
    const fail = (what) => { throw new Error(`a conversation ${what}`); };
    if (typeof data !== "object" || data === null) fail("is no JSON object");
    if (!Array.isArray(data.messages)) fail("has no list of messages");
    const messages = data.messages.map(Conversation.messageFromJson), seen = new Set();
    for (const message of messages) {
      if (message.parent !== null && !seen.has(message.parent)) fail("has a message without its parent");
      if (seen.has(message.id)) fail("has two messages with one id");
      seen.add(message.id);
    }
    const settings = Object.fromEntries(Object.entries(data.settings ?? {})
      .filter(([name, value]) => Settings.NAMES.includes(name) && typeof value === "string"));
    const time = (value) => Number.isFinite(value) ? value : Date.now();
    return new Conversation({
      id: typeof data.id === "string" && /^[0-9a-f]{24}$/.test(data.id) ? data.id : undefined,
      created: time(data.created), changed: time(data.changed), settings, messages,
      leaf: seen.has(data.leaf) ? data.leaf : messages.at(-1)?.id ?? null,
    });
  }

  static messageFromJson(data) {
    if (!Number.isInteger(data?.id) || !["user", "assistant", "tool"].includes(data.role)
        || typeof data.content !== "string") {
      throw new Error("a message has no id, no content, or a role that is none");
    }
    const message = {id: data.id, parent: data.parent ?? null, role: data.role, content: data.content};
    const kinds = {string: ["reasoning", "model", "finishReason", "error", "toolCallId", "name"],
      number: ["promptTokens", "outputTokens", "firstTokenMs", "tokensPerSecond", "thoughtMs"],
      boolean: ["isJson", "isStopped"]};
    for (const [kind, names] of Object.entries(kinds)) {
      for (const name of names) if (typeof data[name] === kind) message[name] = data[name];
    }
    if (Array.isArray(data.media) && data.media.length) message.media = data.media.map(Conversation.mediaFromJson);
    if (Array.isArray(data.toolCalls)) {
      message.toolCalls = data.toolCalls.map((call) => ({
        id: String(call?.id ?? ""), name: String(call?.name ?? ""), arguments: String(call?.arguments ?? ""),
      }));
    }
    return message;
  }

  static mediaFromJson(data) {
    if (!["image", "audio"].includes(data?.kind) || !MediaStore.KEY.test(data.key)) {
      throw new Error("a message has a picture or a recording without its kind or key");
    }
    return {kind: data.kind, label: String(data.label ?? data.kind), key: data.key};
  }
}
