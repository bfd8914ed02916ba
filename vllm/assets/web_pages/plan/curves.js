// Predicted speed by the number of requests, with its band: a chart for each length of prompts.

class Curves {
  static HEIGHT = 190;
  static METRICS = {
    tokens_per_s: {name: "tokens/s", scale: 1},
    ttft_s: {name: "TTFT, ms", scale: 1000},
    tpot_s: {name: "TPOT, ms", scale: 1000},
  };

  static draw(parent, speeds, metric) {
    const {name, scale} = Curves.METRICS[metric];
    const figures = (speed) => {
      const {expected, band: [low, high]} = speed[metric];
      return {x: speed.requests, low: scale * low, expected: scale * expected, high: scale * high};
    };
    const all = speeds.map(figures);
    const low = Math.min(...all.map((p) => p.low)), high = Math.max(...all.map((p) => p.high));
    const most = Math.max(...all.map((p) => p.x));
    const y = {name, low, high, ticks: Drawing.decimals(low, high)};
    const lengths = new Set(speeds.map((speed) => speed.prompt_tokens));
    parent.replaceChildren(...[...lengths].map((length) => {
      const points = speeds.filter((speed) => speed.prompt_tokens === length).map(figures);
      const caption = `Prompts of ${count(length)} tokens`;
      const figure = element("figure", {}, element("figcaption", {}, caption));
      const x = {name: "requests at a time", low: .9, high: 1.1 * most, ticks: points.map((p) => p.x)};
      const last = points.at(-1);
      const about = `${caption}: ${name} from ${short(points[0].expected)} with ${points[0].x} to `
        + `${short(last.expected)} with ${last.x} requests`;
      new Drawing(figure, about, Curves.HEIGHT, x, y, (drawing) => Curves.paint(drawing, points));
      return figure;
    }));
  }

  static paint(drawing, points) {
    const path = (key, list) => list.map((p) => `${drawing.x(p.x)},${drawing.y(p[key])}`).join(" L");
    const back = [...points].reverse();
    drawing.add("path", {class: "band", d: `M${path("high", points)} L${path("low", back)} Z`});
    drawing.add("path", {class: "line", d: `M${path("expected", points)}`});
    for (const p of points) {
      const title = `${p.x} requests: ${short(p.expected)} (${short(p.low)} to ${short(p.high)})`;
      drawing.add("path", {class: "line", d: `M${drawing.x(p.x)},${drawing.y(p.low)} V${drawing.y(p.high)}`,
        "stroke-opacity": .25});
      drawing.add("circle", {class: "point", cx: drawing.x(p.x), cy: drawing.y(p.expected), r: 3.5},
        "", drawing.root, title);
    }
  }
}
