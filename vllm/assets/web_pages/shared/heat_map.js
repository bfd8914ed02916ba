// Buckets by two of their sizes, each as the area of the sizes that it holds, with a traffic on it.
//
// Without buckets it is the traffic alone. Larger buckets are painted first, so that a point has the colour of the smallest one that holds it.
// A bucket whose fifth value is false is not warmed up yet: it is an outline.

const BUCKET = {phase: 0, batch: 1, queryLen: 2, blocks: 3, isWarm: 4};

class HeatMap {
  static HEIGHT = 260;
  static LARGEST_DOT = 11;
  static SMALLEST_DOT = 2;
  static SHADES = [10, 85]; // per cent of the accent

  // The maps with what their dots mean. times: predicted seconds of each bucket; without them a bucket costs
  // its padded tokens and blocks.
  static of(buckets, times, shapes) {
    const isTimed = times.length > 0, charts = element("div", {className: "charts"});
    const costs = isTimed ? times : buckets.map(([, batch, tokens, blocks]) => batch * tokens + blocks);
    HeatMap.draw(charts, buckets, costs, shapes, isTimed ? seconds : (cost) => `${count(cost)} tokens and blocks`);
    const keys = shapes.length ? [HeatMap.dotKey(shapes)] : [];
    if (buckets.some(HeatMap.isCold)) keys.push(HeatMap.coldKey());
    return [...keys, charts];
  }

  static isCold(bucket) {
    return bucket[BUCKET.isWarm] === false;
  }

  // buckets: [phase, batch, query length, blocks], costs: of each; shapes: buckets with a count.
  static draw(parent, buckets, costs, shapes, describeCost) {
    const known = buckets.map((bucket, i) => ({bucket, cost: costs[i]}));
    const most = Math.max(0, ...shapes.map((shape) => shape.at(-1)));
    for (const {name, x, y, holds} of HeatMap.panels(buckets, shapes)) {
      const cells = known.filter(({bucket}) => holds(bucket)), dots = shapes.filter(holds);
      const ofCells = cells.map(({cost}) => cost), range = [Math.min(...ofCells), Math.max(...ofCells)];
      const key = cells.length ? [HeatMap.key(range, describeCost)] : [];
      const caption = element("figcaption", {}, name, ...key);
      const figure = element("figure", {}, caption);
      parent.append(figure);
      HeatMap.panel(figure, name, [x, y], cells, dots, range, most, describeCost);
    }
  }

  // What is drawn by itself: decodes of each query length, prompts without and with context.
  static panels(buckets, shapes) {
    const batch = {name: "batch", index: BUCKET.batch}, tokens = {name: "tokens", index: BUCKET.queryLen};
    const blocks = {name: "KV blocks", index: BUCKET.blocks};
    const lengths = new Set((buckets.length ? buckets : shapes).filter((b) => b[0] === "decode").map((b) => b[BUCKET.queryLen]));
    const decodes = [...lengths].sort((a, b) => a - b);
    return [
      ...decodes.map((length, i) => ({
        name: `Decodes${length > 1 ? ` of ${length} tokens` : ""}`, x: blocks, y: batch,
        // A shape belongs to the least length that holds it.
        holds: (b) => b[0] === "decode" && b[2] <= length && b[2] > (decodes[i - 1] ?? 0),
      })),
      {name: "Prompts", x: tokens, y: batch, holds: (b) => b[0] === "prefill" && b[3] === 0},
      {name: "Prompts with context", x: tokens, y: {...blocks, name: "context blocks"},
        holds: (b) => b[0] === "prefill" && b[3] > 0},
    ].filter(({holds}) => buckets.some(holds) || shapes.some(holds));
  }

  static panel(parent, name, [x, y], cells, dots, range, most, describeCost) {
    const axis = ({name, index}) => {
      const ofCells = cells.map(({bucket}) => bucket[index]), ofDots = dots.map((shape) => shape[index]);
      const all = [...ofCells, ...ofDots], least = Math.min(...all), high = Math.max(...all);
      const ticks = [...new Set(ofCells.length ? ofCells : ofDots)].sort((a, b) => a - b);
      return {name, low: least <= 2 ? .5 : least / 1.5, high: high + .5, ticks};
    };
    const ordered = [...cells].sort((a, b) => HeatMap.isCold(a.bucket) - HeatMap.isCold(b.bucket) || b.cost - a.cost);
    const parts = [[cells, "buckets"], [dots, "sizes of the traffic"]]
      .filter(([list]) => list.length).map(([list, what]) => `${count(list.length)} ${what}`);
    const about = `${name}: ${parts.join(" and ")} by ${y.name} and ${x.name}`;
    new Drawing(parent, about, HeatMap.HEIGHT, axis(x), axis(y), (drawing) => {
      const left = drawing.x(drawing.axes.x.low), bottom = drawing.y(drawing.axes.y.low);
      for (const {bucket, cost} of ordered) {
        const right = drawing.x(bucket[x.index] + .5), top = drawing.y(bucket[y.index] + .5);
        const isCold = HeatMap.isCold(bucket);
        const title = `${HeatMap.describe(bucket)}: ${describeCost(cost)}${isCold ? ", not warm yet" : ""}`;
        const rect = drawing.add("rect", {class: isCold ? "cell cold" : "cell", x: left, y: top,
          width: right - left, height: bottom - top}, "", drawing.root, title);
        if (!isCold) rect.style.fill = HeatMap.shade(cost, range);
      }
      for (const shape of dots) {
        const r = Math.max(HeatMap.SMALLEST_DOT, HeatMap.LARGEST_DOT * Math.sqrt(shape.at(-1) / most));
        const title = `${HeatMap.describe(shape)}: ${count(Math.round(shape.at(-1)))} forward passes`;
        drawing.add("circle", {class: "traffic", cx: drawing.x(shape[x.index]),
          cy: drawing.y(shape[y.index]), r}, "", drawing.root, title);
      }
    });
  }

  static describe([phase, batch, queryLen, blocks]) {
    const each = queryLen > 1 ? `${count(queryLen)} tokens each, ` : "";
    return `batch ${count(batch)}, ${each}${count(blocks)} ${phase === "decode" ? "KV" : "context"} blocks`;
  }

  static shade(cost, [low, high]) {
    const [pale, full] = HeatMap.SHADES;
    const share = high > low ? Math.log(cost / low) / Math.log(high / low) : 1;
    return `color-mix(in srgb, var(--accent) ${pale + (full - pale) * share}%, var(--card))`;
  }

  // What the colours mean.
  static key(range, describeCost) {
    const shades = element("i", {className: "shades"});
    shades.style.background = `linear-gradient(to right, ${HeatMap.shade(range[0], range)},`
      + ` ${HeatMap.shade(range[1], range)})`;
    return element("span", {className: "key"}, describeCost(range[0]), shades,
      describeCost(range[1]));
  }

  static coldKey() {
    return element("p", {className: "key"}, element("i", {className: "cold"}), "outlines are buckets that are not warm yet");
  }

  // What the dots mean.
  static dotKey(shapes) {
    const most = Math.max(...shapes.map((shape) => shape.at(-1)));
    return element("p", {className: "key"}, element("i", {className: "dot"}),
      `traffic; the largest dot is ${count(Math.round(most))} forward passes`);
  }
}
