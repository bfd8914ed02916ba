// The list of conversations; on a narrow screen it lies over the page while it is open.

class Sidebar {
  constructor(chat) {
    this.chat = chat;
    byId("open-sidebar").addEventListener("click", () => this.toggle(true));
    byId("close-sidebar").addEventListener("click", () => this.toggle(false));
    byId("new").addEventListener("click", () => this.do(() => chat.begin()));
    byId("delete-all").addEventListener("click", () => chat.deleteAll());
    byId("export").addEventListener("click", () => this.export());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.import(event.target));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.closeIfOpen();
    });
    document.addEventListener("click", (event) => {
      // What lies beside it is inert: a click there is one on the page itself.
      if (event.target === document.body || event.target === document.documentElement) this.closeIfOpen();
    });
  }

  get isOpen() {
    return document.body.classList.contains("sidebar-open");
  }

  toggle(isOpen) {
    document.body.classList.toggle("sidebar-open", isOpen);
    byId("open-sidebar").ariaExpanded = String(isOpen);
    byId("main").inert = isOpen;
    byId(isOpen ? "new" : "open-sidebar").focus();
  }

  closeIfOpen() {
    if (this.isOpen) this.toggle(false);
  }

  do(action) {
    this.closeIfOpen();
    action();
  }

  show(conversations, current) {
    byId("conversations").replaceChildren(...conversations.map((each) => {
      const title = visible(each.title);
      const open = element("button", {type: "button", dir: "auto", className: "title", onclick: () => this.do(() => this.chat.open(each))}, title);
      if (each === current) open.setAttribute("aria-current", "true");
      return element("li", {}, open, element("button", {
        type: "button", className: "quiet", ariaLabel: `Delete ${title}`, onclick: () => this.chat.delete(each),
      }, "×"));
    }));
  }

  async export() {
    const file = new Blob([JSON.stringify(await this.chat.store.toJson(), null, 1)], {type: "application/json"});
    const link = element("a", {href: URL.createObjectURL(file), download: "vllm-chats.json"});
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  async import(input) {
    const [file] = input.files;
    if (!file) return;
    try {
      const number = this.chat.store.import(await file.text());
      this.chat.notice(`Imported from ${file.name}: ${number === 1 ? "one conversation" : `${number} conversations`}.`);
    } catch (error) {
      this.chat.notice(`${file.name} cannot be imported: ${error.message}.`);
    }
    input.value = "";
    this.chat.refresh();
  }
}
