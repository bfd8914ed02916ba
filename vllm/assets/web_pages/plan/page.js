// Shows the plan that is in this file.

const plan = JSON.parse(byId("plan").textContent);

const gib = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  return `${+(bytes / 1024 ** power).toPrecision(4)} ${units[power]}`;
};
const spent = (s) => s >= 120 ? `${(s / 60).toFixed(1)} min` : s >= 10 ? `${s.toFixed(0)} s` : `${s.toFixed(1)} s`;

function showSummary({memory, start}) {
  const name = plan.model.replace(/\/+$/, "").split("/").at(-1);
  document.title = `${name}: vLLM plan`;
  showText("model", name);
  showText("about", plan.about);
  showText("mode", plan.mode);
  for (const id of ["text_only", "measured", "not_in_speed"]) {
    byId(id).hidden = !plan[id];
    showText(id, plan[id]);
  }
  for (const [id, text] of Object.entries({
    "num-blocks": count(memory.num_blocks),
    "block-note": `of ${memory.block_size} tokens, ${gib(memory.block_bytes)} each`,
    "num-sequences": memory.num_sequences.toFixed(1),
    "sequence-note": `of ${count(memory.max_model_len)} tokens (--max-model-len)`,
    "longest-context": count(memory.longest_context),
  })) showText(id, text);
  for (const id of ["kv-cache", "fits", "longest"]) byId(id).hidden = !memory.block_bytes;
  byId("first-answer").hidden = !start?.num_first_buckets;
  if (!start) return;
  showText("first", spent(start.first_s));
  showText("num-first", count(start.num_first_buckets));
  showText("cold", spent(start.cold_s));
}

function showMemory({total_bytes: total, uses}) {
  const bars = new Bars(byId("memory"), total);
  let begin = 0;
  for (const [name, bytes] of uses) {
    bars.add(name, [[begin, bytes, ""]], gib(bytes), `${percent(bytes / total)} %`);
    begin += bytes;
  }
  bars.addTotal(plan.device === "cpu" ? "the machine" : "each card", gib(total));
  showText("stages", (plan.stages ?? []).map((stage, i) => `Stage ${i + 1}: layers ${stage.first_layer} to `
    + `${stage.end_layer - 1}, ${gib(stage.weight_bytes)} of weights, room for ${count(stage.num_blocks)} KV blocks`).join(". "));
  showText("reserved", plan.reserved);
}

// The order in which a server does it.
function showStart({prefill, decode, sampling_s, cold_s, cached_s, notes}) {
  const shapes = (phase) => `${count(phase.num_shapes)} shapes`;
  const graphs = (phase) => `${count(phase.num_graphs)} graphs, ${gib(phase.graph_bytes)}`;
  const bars = new Bars(byId("time-line"), cold_s);
  let cold = 0, cached = 0;
  for (const [name, compile, run, note] of [
    ["prompts", prefill.compile_s, prefill.run_s, shapes(prefill)],
    ["decodes", decode.compile_s, decode.run_s, shapes(decode)],
    ["sampling", sampling_s, 0, ""],
    ["prompt graphs", 0, prefill.capture_s, graphs(prefill)],
    ["decode graphs", 0, decode.capture_s, graphs(decode)],
  ]) {
    if (compile + run === 0) continue;
    bars.add(name, [[cold, compile, "compile"], [cold + compile, run, "run"], [cached, run, "cached"]],
      spent(compile + run), note, "two");
    cold += compile + run;
    cached += run;
  }
  bars.addTotal("all buckets", `${spent(cold_s)}, or ${spent(cached_s)}`);
  const sizes = ({num_sizes: counts, ...phase}) => {
    const total = phase.compile_s + phase.run_s + phase.capture_s;
    return Object.entries({batch: "batch sizes", query_len: "lengths", blocks: "numbers of KV blocks"})
      .filter(([key]) => counts[key] > 1)
      .map(([key, name]) => `${count(counts[key])} ${name} (${spent(total / counts[key])} each)`).join(", ") || "one";
  };
  showText("sizes", [["prompt", prefill], ["decode", decode]].filter(([, phase]) => phase.num_buckets)
    .map(([name, phase]) => `Sizes of ${name} buckets: ${sizes(phase)}.`).join(" "));
  showText("start-notes", notes.map((note) => `${note}.`).join(" "));
}

function showThroughput(speeds) {
  const metrics = byId("metrics");
  for (const [metric, {name}] of Object.entries(Curves.METRICS)) {
    const radio = element("input", {type: "radio", name: "metric", value: metric,
      onchange: () => Curves.draw(byId("curves"), speeds, metric)});
    metrics.append(element("label", {}, radio, name));
  }
  metrics.querySelector("input").checked = true;
  Curves.draw(byId("curves"), speeds, "tokens_per_s");
  showText("throughput-note", `Each request has ${count(speeds[0].output_tokens)} output tokens. `
    + "The band contains 80 % of the most similar published runs.");
  const reasons = new Set(speeds.flatMap((speed) => speed.outside_of_published_data));
  byId("outside").hidden = !reasons.size;
  showText("outside", `Outside of published data (${[...reasons].join(", ")}): the band is a factor of `
    + "two wider.");
  const cell = (text) => element("td", {}, text);
  const banded = ({expected, band}, scale = 1) =>
    `${short(scale * expected)} (${short(scale * band[0])}–${short(scale * band[1])})`;
  byId("speeds").append(...speeds.map((speed) => element("tr", {},
    cell(count(speed.requests)), cell(count(speed.prompt_tokens)), cell(banded(speed.ttft_s, 1000)),
    cell(banded(speed.tpot_s, 1000)), cell(banded(speed.tokens_per_s)),
    element("td", {className: "text"},
      [...new Set([speed.prefill_bound_by, speed.decode_bound_by])].join("; ")))));
}

// title: what is special about the replay.
function showReplay(title, speed) {
  const columns = Object.keys(speed.request_s), row = (name, values, scale) => element("tr", {},
    element("th", {scope: "row", className: "text"}, name),
    ...columns.map((column) => element("td", {}, column in values ? short(scale * values[column]) : "–")));
  const comes = speed.requests_per_s === null ? "all at once" : `${short(speed.requests_per_s)} per second`;
  byId("speeds-of-replay").append(element("h3", {}, title),
    element("p", {className: "note"}, `${count(speed.num_requests)} requests, ${comes}: `
      + `${short(speed.tokens_per_s)} output tokens/s, ${count(speed.num_preemptions)} preemptions. `
      + `KV cache in use: ${percent(speed.mean_kv_usage)} % on average, ${percent(speed.max_kv_usage)} % at most.`),
    element("table", {className: "figures narrow"},
      element("thead", {}, element("tr", {}, element("th", {scope: "col", className: "text"}, "Time"),
        ...columns.map((column) => element("th", {scope: "col"}, column)))),
      element("tbody", {}, row("TTFT, ms", speed.first_token_s, 1000), row("TPOT, ms", speed.tpot_s, 1000),
        row("Request, s", speed.request_s, 1))));
}

function showBuckets(title, buckets, times, shapes, notes) {
  byId("maps").append(element("h3", {}, title), ...notes.map((note) => element("p", {className: "note"}, note)),
    ...HeatMap.of(buckets, times, shapes));
}

function showGoals({is_met: isMet, num_cards: cards, max_num_seqs: most, misses, command}) {
  const what = `${cards} card${cards > 1 ? "s" : ""} with --max-num-seqs ${most}`;
  showText("goals-text", isMet ? `They are met by ${what}.`
    : `Nothing meets them; nearest is ${what}. Missed: ${misses
      .map((miss) => `${miss.name} is ${short(miss.value)}, not ${short(miss.goal)}`).join(", ")}.`);
  showText("command", command);
}

showSummary(plan);
showMemory(plan.memory);
byId("goals").hidden = !plan.goals;
if (plan.goals) showGoals(plan.goals);
byId("throughput").hidden = !plan.throughput.length;
if (plan.throughput.length) showThroughput(plan.throughput);
byId("replay").hidden = !plan.traffic?.replay;
if (plan.traffic?.replay) {
  const {replay, at_goals: atGoals} = plan.traffic;
  showReplay("With the buckets chosen for this traffic", replay);
  if (atGoals) {
    const missed = "At no rate do 90 % of the requests meet the goals; at the lowest one tried";
    showReplay(atGoals.is_met ? "At the highest rate at which 90 % of the requests meet the goals" : missed, atGoals);
  }
}
byId("buckets").hidden = !plan.buckets.length;
if (plan.buckets.length) {
  const {traffic} = plan;
  const share = (padding) => traffic ? `: ${percent(padding)} % of the device time of this traffic is padding` : "";
  showBuckets(`${count(plan.buckets.length)} buckets of the engine${share(traffic?.present_padding)}`,
    plan.buckets, plan.bucket_s, traffic?.shapes ?? [], [plan.completed, ...traffic?.notes ?? []].filter(Boolean));
  if (traffic) {
    showBuckets(`${count(traffic.buckets.length)} buckets chosen for ${traffic.source}${share(traffic.padding)}`,
      traffic.buckets, traffic.bucket_s, traffic.shapes, traffic.certificates);
  }
}
byId("start").hidden = !plan.start;
if (plan.start) showStart(plan.start);
