// The pictures of conversations in the database of the browser, since its small storage would be
// full after a few. A key is the id of the conversation, a slash, and an id. What cannot be kept is
// told, and stays in memory until the page is closed.

class MediaStore {
  static DATABASE = "vllm-chat";
  static TABLE = "media";
  static KEY = /^[0-9a-f]{24}\/[0-9a-f]{24}$/;
  static URL = /^data:(image\/(png|jpeg|webp|gif)|audio\/[a-z0-9.+-]+)(;codecs=[\w.]+)?;base64,[A-Za-z0-9+/]*={0,2}$/;

  // onProblem: called with a text when the browser does not keep something.
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.urls = new Map(); // by key: what this page has read or made
    this.database = null;
  }

  // Keeps data: URLs; the keys by which they are found.
  add(conversationId, urls) {
    const keys = urls.map(() => `${conversationId}/${Conversation.newId()}`);
    keys.forEach((key, i) => this.urls.set(key, urls[i]));
    this.write(keys);
    return keys;
  }

  // The data: URL of a key that has been loaded; undefined when the browser no longer has it.
  get(key) {
    return this.urls.get(key);
  }

  async load(keys) {
    const missing = keys.filter((key) => !this.urls.has(key));
    if (!missing.length) return;
    await this.use("readonly", (table) => {
      for (const key of missing) {
        table.get(key).onsuccess = (event) => {
          if (typeof event.target.result === "string") this.urls.set(key, event.target.result);
        };
      }
    });
  }

  write(keys) {
    if (!keys.length) return Promise.resolve();
    return this.use("readwrite", (table) => { for (const key of keys) table.put(this.urls.get(key), key); });
  }

  // Deletes what a conversation has; it stays in memory, so `restore` can bring it back.
  delete(conversation) {
    const keys = conversation.mediaKeys;
    if (!keys.length) return;
    this.load(keys).then(() => this.use("readwrite", (table) => { for (const key of keys) table.delete(key); }));
  }

  restore(conversation) {
    return this.write(conversation.mediaKeys.filter((key) => this.urls.has(key)));
  }

  // {key: URL} of conversations, for a file.
  async toJson(conversations) {
    const keys = conversations.flatMap((each) => each.mediaKeys);
    await this.load(keys);
    return Object.fromEntries(keys.filter((key) => this.urls.has(key)).map((key) => [key, this.urls.get(key)]));
  }

  // Takes over what `toJson` gave, of conversations that have been taken over.
  import(data, conversations) {
    const keys = conversations.flatMap((each) => each.mediaKeys).filter((key) => MediaStore.URL.test(data?.[key]));
    for (const key of keys) this.urls.set(key, data[key]);
    return this.write(keys);
  }

  // Runs work(table) in a transaction, until it has ended.
  async use(mode, work) {
    try {
      this.database ??= await MediaStore.open();
      const transaction = this.database.transaction(MediaStore.TABLE, mode);
      work(transaction.objectStore(MediaStore.TABLE));
      await new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onerror = transaction.onabort = () => reject(transaction.error);
      });
    } catch (error) {
      if (mode === "readwrite") {
        this.onProblem(error?.name === "QuotaExceededError"
          ? "The storage of this browser is full: pictures and recordings last until the page is closed. Export the conversation, or delete others."
          : `This browser keeps no pictures and recordings (${error?.message}): they last until the page is closed.`);
      }
    }
  }

  static open() {
    return new Promise((resolve, reject) => {
      const request = indexedDB.open(MediaStore.DATABASE, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(MediaStore.TABLE);
      request.onsuccess = () => {
        request.result.onversionchange = () => request.result.close(); // another tab deletes it
        resolve(request.result);
      };
      request.onerror = () => reject(request.error);
    });
  }
}
