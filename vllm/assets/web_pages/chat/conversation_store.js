// Conversations in the storage of the browser, one entry each. What cannot be kept is told, and
// stays in memory until the page is closed.

class ConversationStore {
  static PREFIX = "vllm-chat/";
  static SETTINGS = "vllm-chat-settings";

  // onProblem: called with a text when the browser does not keep something.
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.all = new Map();
    this.settings = {};
    this.media = new MediaStore(onProblem);
    this.load();
  }

  load() {
    let damaged = 0;
    try {
      this.settings = JSON.parse(localStorage.getItem(ConversationStore.SETTINGS) || "{}");
      for (const name of Object.keys(localStorage)) {
        if (!name.startsWith(ConversationStore.PREFIX)) continue;
        try {
          const conversation = Conversation.fromJson(JSON.parse(localStorage.getItem(name)));
          this.all.set(conversation.id, conversation);
        } catch {
          damaged += 1;
        }
      }
    } catch (error) {
      this.onProblem(`This browser keeps no data for this page (${error.message}): conversations last until the page is closed.`);
    }
    if (damaged) this.onProblem(`${damaged} stored conversations are damaged and are not shown.`);
  }

  // Newest first.
  list() {
    return [...this.all.values()].sort((a, b) => b.changed - a.changed);
  }

  save(conversation) {
    this.all.set(conversation.id, conversation);
    this.settings = conversation.settings;
    this.write(ConversationStore.PREFIX + conversation.id, conversation.toJson());
    this.write(ConversationStore.SETTINGS, conversation.settings);
  }

  write(name, value) {
    try {
      localStorage.setItem(name, JSON.stringify(value));
    } catch (error) {
      this.onProblem(error.name === "QuotaExceededError"
        ? "The storage of this browser is full: this conversation is not kept. Export it, or delete others."
        : `This browser did not keep the conversation: ${error.message}`);
    }
  }

  delete(conversation) {
    this.all.delete(conversation.id);
    this.media.delete(conversation);
    try {
      localStorage.removeItem(ConversationStore.PREFIX + conversation.id);
    } catch {
      this.onProblem("This browser did not delete the stored conversation.");
    }
  }

  // Brings back what was deleted.
  restore(conversation) {
    this.media.restore(conversation);
    this.save(conversation);
  }

  // Another tab has changed an entry: the id of its conversation, or null when it is none.
  read(event) {
    if (!event.key?.startsWith(ConversationStore.PREFIX)) return null;
    const id = event.key.slice(ConversationStore.PREFIX.length);
    if (event.newValue === null) this.all.delete(id);
    else this.all.set(id, Conversation.fromJson(JSON.parse(event.newValue)));
    return id;
  }

  async toJson() {
    const conversations = this.list();
    return {format: "vllm-chat", version: 1, conversations: conversations.map((each) => each.toJson()),
      media: await this.media.toJson(conversations)};
  }

  // Takes over what `toJson` gave; the number of conversations. Throws an Error.
  import(text) {
    const data = JSON.parse(text);
    if (data?.format !== "vllm-chat" || !Array.isArray(data.conversations)) {
      throw new Error("it was not exported by this page");
    }
    const read = data.conversations.map((each) => Conversation.fromJson(each));
    for (const conversation of read) {
      this.all.set(conversation.id, conversation);
      this.write(ConversationStore.PREFIX + conversation.id, conversation.toJson());
    }
    this.media.import(data.media, read);
    return read.length;
  }
}
