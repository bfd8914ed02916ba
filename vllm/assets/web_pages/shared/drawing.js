// A chart with two logarithmic axes, drawn anew in each width that its parent has.

class Drawing {
  static SVG = "http://www.w3.org/2000/svg";
  static MARGIN = {left: 56, right: 8, top: 8, bottom: 34};
  static TICK_ROOM = {x: 38, y: 18};

  // x, y: {name, low, high, ticks}, where ticks are the values that may have a number;
  // paint: draws into the drawing when its axes are known.
  constructor(parent, name, height, x, y, paint) {
    Object.assign(this, {height, axes: {x, y}, paint, width: 0});
    this.root = this.add("svg", {class: "drawing", role: "img", "aria-label": name, height}, "", parent);
    new ResizeObserver(() => this.draw(parent.clientWidth)).observe(parent);
  }

  draw(width) {
    if (width === this.width || !width) return;
    this.width = width;
    this.root.replaceChildren();
    this.root.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    const {left, right, top, bottom} = Drawing.MARGIN;
    this.x = Drawing.scale(this.axes.x, left, width - right);
    this.y = Drawing.scale(this.axes.y, this.height - bottom, top);
    this.paint(this);
    this.drawAxes(left, width - right, top, this.height - bottom);
  }

  drawAxes(left, right, top, bottom) {
    this.add("path", {class: "grid", d: `M${left},${top} V${bottom} H${right}`});
    for (const value of Drawing.thinned(this.axes.x.ticks, this.x, Drawing.TICK_ROOM.x)) {
      this.add("path", {class: "grid", d: `M${this.x(value)},${bottom} v4`});
      this.add("text", {x: this.x(value), y: bottom + 15, "text-anchor": "middle"}, short(value));
    }
    for (const value of Drawing.thinned(this.axes.y.ticks, this.y, Drawing.TICK_ROOM.y)) {
      this.add("path", {class: "grid", d: `M${left},${this.y(value)} h-4`});
      this.add("text", {x: left - 7, y: this.y(value) + 4, "text-anchor": "end"}, short(value));
    }
    this.add("text", {x: right, y: bottom + 30, "text-anchor": "end"}, this.axes.x.name);
    const middle = (top + bottom) / 2;
    this.add("text", {x: 10, y: middle, "text-anchor": "middle",
      transform: `rotate(-90 10 ${middle})`}, this.axes.y.name);
  }

  // A new element of the drawing; a title is shown where the pointer rests on it.
  add(tag, attributes, text = "", parent = this.root, title = "") {
    const made = document.createElementNS(Drawing.SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text) made.textContent = text;
    if (title) this.add("title", {}, title, made);
    parent.append(made);
    return made;
  }

  static scale({low, high}, from, to) {
    const range = Math.log(high / low) || 1;
    return (value) => from + (to - from) * Math.log(value / low) / range;
  }

  // The ticks that have room, from the last one down.
  static thinned(ticks, scale, room) {
    const kept = [];
    for (const value of [...ticks].reverse()) {
      if (!kept.length || Math.abs(scale(value) - scale(kept.at(-1))) >= room) kept.push(value);
    }
    return kept;
  }

  // 1, 2, 5, 10, ...: between two values.
  static decimals(low, high) {
    const found = [];
    for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
      found.push(...[power, 2 * power, 5 * power].filter((value) => value >= low && value <= high));
    }
    return found;
  }
}

// 0.5, 20, 300, 4,096, 131k.
const short = (n) => n >= 1e6 ? `${+(n / 1e6).toPrecision(3)}M`
  : n >= 1e4 ? `${+(n / 1e3).toPrecision(3)}k` : n >= 1e3 ? count(Math.round(n)) : `${+n.toPrecision(3)}`;
