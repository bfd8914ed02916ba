// What is sent with the next message: chosen as files, taken with a camera, pasted or dropped.

class Attachments {
  // chat: is told of changes; media: the store.
  constructor(chat, media) {
    this.chat = chat;
    this.numReading = 0;
    this.list = new MediaList("Sent with the message", media, () => chat.onInput());
    byId("attachments").prepend(this.list.node);
    for (const [button, input] of [["add-picture", "picture-files"], ["take-picture", "camera-file"], ["add-sound", "sound-files"]]) {
      byId(button).addEventListener("click", () => byId(input).click());
      byId(input).addEventListener("change", () => {
        this.read([...byId(input).files]);
        byId(input).value = "";
      });
    }
    new Recorder(byId("record"), (file) => this.readOne(file, Sound), (text) => chat.notice(text));
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
  // transcribes: the model writes down sound, which becomes text of the next message.
  offer(kinds, transcribes) {
    this.kinds = kinds;
    this.transcribes = transcribes;
    byId("add-sound").hidden = byId("record").hidden = !this.readsSound;
    byId("attachments").hidden = !this.isOffered;
    byId("add-picture").hidden = byId("take-picture").hidden = !kinds.includes("image");
  }

  get isOffered() {
    return Boolean(this.kinds?.includes("image") || this.readsSound);
  }

  get readsSound() {
    return Boolean(this.transcribes || this.kinds?.includes("audio"));
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

  // Keeps a sound that could not be written down: the list has a button for another try.
  failed(item) {
    this.list.add({...item, again: () => this.again(item)});
  }

  async again(item) {
    this.list.remove(this.list.items.find((each) => each.url === item.url));
    try {
      await this.chat.transcribe(item);
    } catch (error) {
      this.chat.notice(error.message);
    }
    this.chat.onInput();
  }

  // Adds files; whether there are any that the model reads.
  read(files) {
    if (!this.isOffered || !files.length) return false;
    const readers = files.map((file) => this.readerOf(file)), other = files[readers.indexOf(null)];
    const read = [this.kinds.includes("image") ? "pictures" : "", this.readsSound ? "sounds" : ""].filter(Boolean);
    if (other) this.chat.notice(`${other.name} cannot be sent: the model reads ${read.join(" and ")}.`);
    files.forEach((file, i) => { if (readers[i]) this.readOne(file, readers[i]); });
    return readers.some(Boolean);
  }

  // What reads a file; null: the model cannot use it.
  readerOf(file) {
    if (file.type.startsWith("image/") && this.kinds.includes("image")) return Picture;
    return /^(audio|video)\//.test(file.type) && this.readsSound ? Sound : null;
  }

  async readOne(file, reader) {
    this.numReading += 1;
    this.chat.onInput();
    try {
      const item = await reader.read(file);
      if (item.kind === "audio" && this.transcribes) await this.chat.transcribe(item);
      else this.list.add(item);
      showText("announcer", `Added: ${item.label}`);
    } catch (error) {
      this.chat.notice(error.message);
    }
    this.numReading -= 1;
    this.chat.onInput();
  }
}
