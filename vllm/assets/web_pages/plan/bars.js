// Rows of a table with bars: each begins where the one before it ends.

class Bars {
  // total: what the whole width is.
  constructor(body, total) {
    Object.assign(this, {body, total});
  }

  // parts: [start, size, kind] of each bar.
  add(name, parts, value, note = "", kind = "") {
    const track = element("span", {className: `track ${kind}`});
    for (const [start, size, className] of parts) {
      if (size <= 0) continue;
      const part = element("span", {className: `part ${className}`});
      part.style.left = `${100 * start / this.total}%`;
      part.style.width = `${100 * size / this.total}%`;
      track.append(part);
    }
    this.body.append(element("tr", {}, element("th", {scope: "row"}, name),
      element("td", {ariaHidden: "true"}, track), element("td", {}, value, note && " ", note && element("small", {}, note))));
  }

  addTotal(name, value) {
    this.body.append(element("tr", {className: "total"}, element("th", {scope: "row"}, name),
      element("td"), element("td", {}, value)));
  }
}
