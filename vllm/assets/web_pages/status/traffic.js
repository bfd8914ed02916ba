// The buckets, and the sizes that forward passes had before they were padded: shown when they are asked for.

class Traffic {
  static columns = ["phase", "batch", "query_len", "blocks", "count"];

  constructor() {
    Object.assign(this, {table: null, drawn: "", buckets: [], asked: null});
    byId("show-traffic").addEventListener("click", () => {
      byId("traffic").hidden = !byId("traffic").hidden;
      byId("show-traffic").setAttribute("aria-expanded", String(!byId("traffic").hidden));
      this.draw();
    });
  }

  // table: what the server has recorded; null: nothing. state: changes when a bucket becomes warm.
  show(table, state) {
    Object.assign(this, {table, state: JSON.stringify(state)});
    byId("show-traffic").hidden = !table;
    if (!table) byId("traffic").hidden = true;
    this.draw();
  }

  draw() {
    if (byId("traffic").hidden || !this.table) return;
    this.askBuckets();
    const order = Traffic.columns.map((name) => this.table.columns.indexOf(name));
    const shapes = this.table.cells.map((cell) => order.map((column) => cell[column]));
    const key = JSON.stringify([shapes, this.buckets]);
    if (key === this.drawn) return;
    this.drawn = key;
    byId("traffic-charts").replaceChildren(...HeatMap.of(this.buckets, [], shapes));
  }

  // Asks for the buckets once for each state. Until they are there, and where they cannot be read, earlier ones are drawn.
  async askBuckets() {
    if (this.asked === this.state) return;
    this.asked = this.state;
    try {
      const response = await fetch("status_buckets.json", {headers: ApiKey.headers(), cache: "no-store"});
      if (!response.ok) return;
      ({buckets: this.buckets} = await response.json());
    } catch {
      this.asked = null;
      return;
    }
    this.draw();
  }
}
