// What is sent with the next message: chosen as files, taken with a camera, pasted or dropped.

class Attachments {
  // chat: is told of changes; media: the store.
  constructor(chat, media) {
    this.chat = chat;
    this.numReading = 0;
    this.list = new MediaList("Sent with the message", media, () => chat.onInput());
    byId("attachments").prepend(this.list.node);
    for (const [button, input] of [["add-picture", "picture-files"], ["take-picture", "camera-file"]]) {
      byId(button).addEventListener("click", () => byId(input).click());
      byId(input).addEventListener("change", () => {
        this.read([...byId(input).files]);
        byId(input).value = "";
      });
    }
    document.addEventListener("paste", (event) => {
      // A text that was copied with its looks comes as a picture as well.
      if (event.clipboardData.types.includes("text/plain") || byId("settings").open) return;
      if (this.read([...event.clipboardData.files])) event.preventDefault();
    });
    this.listenForDrops(byId("main"));
  }

  listenForDrops(area) {
    const isFile = (event) => event.dataTransfer.types.includes("Files");
    const mark = (isOver) => area.classList.toggle("drop", isOver && this.isOffered);
    area.addEventListener("dragover", (event) => {
      if (!isFile(event)) return;
      event.preventDefault(); // the browser would open the file in place of the page
      event.dataTransfer.dropEffect = this.isOffered ? "copy" : "none";
      mark(true);
    });
    area.addEventListener("dragleave", (event) => { if (!area.contains(event.relatedTarget)) mark(false); });
    area.addEventListener("drop", (event) => {
      mark(false);
      if (!isFile(event)) return;
      event.preventDefault();
      this.read([...event.dataTransfer.files]);
    });
  }

  // Shows the controls for what the model reads in a conversation: a list of kinds, as in `server.modalities`.
  offer(kinds) {
    this.kinds = kinds;
    byId("attachments").hidden = !this.isOffered;
    byId("add-picture").hidden = byId("take-picture").hidden = !kinds.includes("image");
  }

  get isOffered() {
    return Boolean(this.kinds?.length);
  }

  get isReading() {
    return this.numReading > 0;
  }

  // What would be sent now.
  get items() {
    return this.list.items.filter((item) => this.kinds?.includes(item.kind));
  }

  // Takes the items out, for a message; others stay.
  take() {
    const taken = this.items, rest = this.list.items.filter((item) => !taken.includes(item));
    this.list.clear();
    if (rest.length) this.list.add(...rest);
    return taken;
  }

  // Adds files; whether there are any that the model reads.
  read(files) {
    if (!this.isOffered || !files.length) return false;
    const found = files.filter((file) => file.type.startsWith("image/") && this.kinds.includes("image"));
    if (found.length < files.length) {
      const other = files.find((file) => !found.includes(file));
      this.chat.notice(`${other.name} is no picture, and the model reads no other files.`);
    }
    for (const file of found) this.readOne(file);
    return found.length > 0;
  }

  async readOne(file) {
    this.numReading += 1;
    this.chat.onInput();
    try {
      const item = await Picture.read(file);
      this.list.add(item);
      showText("announcer", `Added: ${item.label}`);
    } catch (error) {
      this.chat.notice(error.message);
    }
    this.numReading -= 1;
    this.chat.onInput();
  }
}
