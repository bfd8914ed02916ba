// The API key: asked for when the server wants one, kept in this tab until it is closed.

const ApiKey = {
  NAME: "vllm-api-key",
  inMemory: null, // where the browser allows no storage

  get() {
    try {
      return sessionStorage.getItem(this.NAME);
    } catch {
      return this.inMemory;
    }
  },
  set(key) {
    try {
      sessionStorage.setItem(this.NAME, key);
    } catch {
      this.inMemory = key;
    }
  },
  forget() {
    try {
      sessionStorage.removeItem(this.NAME);
    } catch {
      this.inMemory = null;
    }
  },
  // Headers of a request to the server.
  headers() {
    const key = this.get();
    return key === null ? {} : {Authorization: `Bearer ${key}`};
  },
};

// The form in the page that asks for the key: #key-form with #key and #key-error.
class KeyForm {
  constructor(onKey) {
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const key = byId("key").value.trim();
      byId("key").value = "";
      if (/^[\x21-\x7e]+$/.test(key)) {
        ApiKey.set(key);
        onKey();
      } else showText("key-error", "A key is of letters, digits and signs without spaces.");
    });
  }

  // The server has answered 401: the key that was sent, if any, is wrong.
  ask() {
    showText("key-error", ApiKey.get() === null ? "" : "The server did not take this key.");
    ApiKey.forget();
    byId("key-form").hidden = false;
    byId("key").focus();
  }

  hide() {
    byId("key-form").hidden = true;
  }
}
