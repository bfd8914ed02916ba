// A line of values, one per second up to now, with axes for time and size.

class Chart {
  static SVG = "http://www.w3.org/2000/svg";
  static GRID_SECONDS = 30;

  // parent: an empty element; name: of the values, for those who cannot see the line.
  constructor(parent, name) {
    this.name = name;
    this.top = element("span", {className: "top"});
    this.drawing = document.createElementNS(Chart.SVG, "svg");
    this.drawing.setAttribute("preserveAspectRatio", "none");
    this.drawing.setAttribute("role", "img");
    for (const kind of ["grid", "area", "line"]) {
      const path = document.createElementNS(Chart.SVG, "path");
      path.setAttribute("class", kind);
      this.drawing.append(path);
      this[kind] = path;
    }
    this.times = element("p", {className: "times", ariaHidden: "true"});
    parent.append(this.top, this.drawing, this.times);
  }

  draw(values) {
    const last = values.length - 1, highest = Math.max(...values), top = Chart.roundUp(highest);
    const points = values.map((value, x) => `${x},${(40 - 39 * value / top).toFixed(1)}`);
    this.drawing.setAttribute("viewBox", `0 0 ${last} 40`);
    this.area.setAttribute("d", `M0,40 L${points.join(" L")} L${last},40 Z`);
    this.line.setAttribute("d", `M${points.join(" L")}`);
    this.drawing.setAttribute("aria-label",
      `${this.name} tokens per second in the last ${values.length} seconds, at most ${count(highest)}`);
    this.top.textContent = `${count(top)} tokens/s`;
    if (this.times.childElementCount === 0) this.drawTimes(values.length);
  }

  drawTimes(total) {
    let grid = "M0,1 H" + (total - 1);
    for (let ago = total; ago >= 0; ago -= Chart.GRID_SECONDS) {
      grid += ` M${Math.min(total - ago, total - 1)},1 V40`;
      this.times.append(element("span", {}, ago === 0 ? "now" : `${ago} s ago`));
    }
    this.grid.setAttribute("d", grid);
  }

  // 1, 2, 5, 10, 20, ...: the least that is no smaller.
  static roundUp(value) {
    let power = 1;
    for (;; power *= 10) {
      for (const step of [1, 2, 5]) if (step * power >= value) return step * power;
    }
  }
}
