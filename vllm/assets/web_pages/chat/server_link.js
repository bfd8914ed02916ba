// What the server can do, asked for until it is ready, and again when it was lost.

class ServerLink {
  static POLL_MS = 1000;

  // onChange(server): state or model are known anew; onLocked(): a key is needed.
  constructor(onChange, onLocked) {
    this.onChange = onChange;
    this.onLocked = onLocked;
    this.server = {state: "connecting"};
    this.models = [];
    this.timer = 0;
    this.isAsking = false;
    document.addEventListener("visibilitychange", () => { if (this.server.state !== "ready") this.watch(); });
  }

  // Ask until the server is ready.
  async watch() {
    clearTimeout(this.timer);
    if (this.isAsking || document.hidden) return;
    this.isAsking = true;
    try {
      const server = await getJson("chat.json");
      if (server.state === "ready") this.models = (await getJson("v1/models")).data.map((model) => model.id);
      this.server = server;
      showServerState(server);
    } catch (error) {
      if (error.status === 401) {
        this.server = {state: "locked"};
        showLocked();
        this.onLocked();
        return;
      }
      this.server = {state: "unreachable"};
      showUnreachable();
    } finally {
      this.isAsking = false;
      this.onChange(this.server);
    }
    if (this.server.state !== "ready") this.timer = setTimeout(() => this.watch(), ServerLink.POLL_MS);
  }
}
