// The sizes that forward passes had before they were padded: shown when they are asked for.

class Traffic {
  static columns = ["phase", "batch", "query_len", "blocks", "count"];

  constructor() {
    Object.assign(this, {table: null, drawn: ""});
    byId("show-traffic").addEventListener("click", () => {
      byId("traffic").hidden = !byId("traffic").hidden;
      byId("show-traffic").setAttribute("aria-expanded", String(!byId("traffic").hidden));
      this.draw();
    });
  }

  // table: what the server has recorded; null: nothing.
  show(table) {
    this.table = table;
    byId("show-traffic").hidden = !table;
    if (!table) byId("traffic").hidden = true;
    this.draw();
  }

  draw() {
    if (byId("traffic").hidden || !this.table) return;
    const order = Traffic.columns.map((name) => this.table.columns.indexOf(name));
    const shapes = this.table.cells.map((cell) => order.map((column) => cell[column]));
    const key = JSON.stringify(shapes);
    if (key === this.drawn) return;
    this.drawn = key;
    byId("traffic-charts").replaceChildren(...HeatMap.of([], [], shapes));
  }
}
