// Asks for status.json once a second while the page is seen, and writes what it says into the page.

const POLL_MS = 1000, TIMEOUT_MS = 5000, RATE_SECONDS = 5, MEDIA_SECONDS = 60;
const CHARTS = {
  generation: new Chart(byId("generation-chart"), "Generated"),
  prompt: new Chart(byId("prompt-chart"), "Prompt"),
};

const traffic = new Traffic();

const meanOfLast = (rates) => rates.slice(-RATE_SECONDS).reduce((a, b) => a + b, 0) / RATE_SECONDS;
function median(values) {
  const known = values.filter((value) => value !== null).sort((a, b) => a - b);
  return known.length ? known[Math.floor(known.length / 2)] : null;
}
function secondsPerToken(request) {
  if (request.first_token_s === null || request.generation_tokens < 2) return null;
  return (request.total_s - request.first_token_s) / (request.generation_tokens - 1);
}

let shownRecent = "";
function showRecent(requests) {
  const key = JSON.stringify(requests);
  if (key === shownRecent || !requests.length) return;
  shownRecent = key;
  const cell = (value, kind = "") => element("td", {className: kind}, value);
  const number = (value) => cell(count(value) ?? "–", "n");
  byId("recent").replaceChildren(...requests.map((r) => {
    const known = ["stop", "length", "abort", "error"].includes(r.reason) ? r.reason : "";
    return element("tr", {}, element("td", {title: r.id}, r.id), cell(r.reason, known),
      cell(seconds(r.queue_s), "n"), cell(seconds(r.first_token_s), "n"),
      cell(seconds(r.total_s), "n"), number(r.prompt_tokens), number(r.cached_tokens),
      number(r.generation_tokens));
  }));
}

// Where the sensors of cards can be read.
function showCards(cards) {
  byId("cards").hidden = !cards.length;
  const cell = (value, unit) => element("td", {className: "n"},
    value === null ? "–" : `${Math.round(value)}${unit}`);
  const gib = (bytes) => bytes === null ? "–" : (bytes / 2 ** 30).toFixed(1);
  byId("card-rows").replaceChildren(...cards.map((card) => element("tr", {},
    element("td", {}, `${card.index} ${card.name ?? ""}`), cell(card.module, ""),
    cell(card.utilization === null ? null : 100 * card.utilization, " %"),
    cell(card.power_watts, " W"), cell(card.temperature_celsius, " °C"),
    element("td", {className: "n"},
      `${gib(card.memory_used_bytes)} of ${gib(card.memory_total_bytes)} GiB`))));
}

function showStart(s) {
  document.querySelector(".start").classList.toggle("over", s.state !== "starting");
  const phases = (s.phases || []).filter((phase) => phase.seconds >= 0.01);
  const total = phases.reduce((sum, phase) => sum + phase.seconds, 0);
  const texts = phases.map((phase) => `${phase.name} ${seconds(phase.seconds)}`);
  showText("phases", phases.length ? `start ${seconds(total)}: ${texts.join(" · ")}` : "\u00a0");
}
function showEngine(s) {
  showText("model", s.model);
  showText("about", `${s.device}, ${s.dtype}, up to ${count(s.max_model_len)} tokens`);
  for (const [name, chart] of Object.entries(CHARTS)) {
    showText(`${name}-rate`, rate(meanOfLast(s[`${name}_rates`])));
    showText(`${name}-total`, count(s[`${name}_tokens`]));
    chart.draw(s[`${name}_rates`]);
  }
  for (const [id, value] of Object.entries({
    running: count(s.running), "max-running": count(s.max_num_seqs), waiting: count(s.waiting),
    preemptions: count(s.preemptions), kv: percent(s.kv_usage), "kv-blocks": count(s.kv_blocks),
    prefix: percent(s.prefix_hit_rate), padding: percent(s.padded_time_share),
    misses: count(s.bucket_misses), hits: count(s.bucket_hits),
    compilations: count(s.late_compilations), restarts: count(s.restarts),
    "first-token": seconds(median(s.recent.map((request) => request.first_token_s))),
    "next-token": seconds(median(s.recent.map(secondsPerToken))),
  })) showText(id, value);
  byId("running-meter").value = s.running / s.max_num_seqs;
  byId("kv-meter").value = s.kv_usage;
  byId("prefix-meter").value = s.prefix_hit_rate || 0;
  byId("padding-meter").value = s.padded_time_share || 0;
  byId("padding-note").title = ["as predicted",
    ...[[s.padded_share, "tokens"], [s.padded_blocks_share, "KV blocks of decodes"]]
      .filter(([share]) => share !== null).map(([share, of]) => `${percent(share)} % of ${of}`),
  ].join(", ");
  byId("restarts-note").hidden = !s.restarts;
  // Only devices that compile shapes have buckets: elsewhere these words would mean nothing.
  const hasBuckets = s.bucket_hits + s.bucket_misses > 0;
  for (const tile of document.querySelectorAll(".of-buckets")) tile.hidden = !hasBuckets;
  showWarmUp(s.warm_up);
  traffic.show(s.traffic, [s.warm_up?.warm_buckets, s.warm_up?.wanted_buckets, s.bucket_misses, s.restarts]);
  // A model that embeds or classifies has no tokens to wait for, and one without a decoder no cache.
  for (const tile of document.querySelectorAll(".of-generation")) tile.hidden = !s.generates;
  byId("kv-tile").hidden = !s.generates && !s.kv_blocks;
  showRecent(s.recent);
}

// Where a server began before all buckets were warmed up.
function showWarmUp(w) {
  byId("warm-up").hidden = !w;
  if (!w) return;
  showText("warm-buckets", count(w.warm_buckets));
  showText("wanted-buckets", count(w.wanted_buckets));
  byId("warm-meter").value = w.warm_buckets / w.wanted_buckets;
  const left = w.seconds_left === null ? "" : `about ${seconds(w.seconds_left)} left, `;
  showText("warm-note", `${w.is_warming ? left : ""}longest delay of a step ${seconds(w.longest_delay_s)}`);
}

// Where the model reads images, sound or videos.
const encoderTimes = []; // [time in s, seconds of encoding], of the last minute
function showMedia(m) {
  for (const tile of document.querySelectorAll(".of-media")) tile.hidden = !m;
  if (!m) return;
  const now = performance.now() / 1000, number = Object.values(m.items).reduce((a, b) => a + b, 0);
  const kinds = Object.entries(m.items).map(([kind, n]) => `${count(n)} ${kind}`);
  const each = (total, n) => n ? seconds(total / n) : "–", share = (part, whole) => whole ? part / whole : null;
  if (encoderTimes.length && m.encode_s < encoderTimes.at(-1)[1]) encoderTimes.length = 0; // another engine
  encoderTimes.push([now, m.encode_s]);
  while (now - encoderTimes[0][0] > MEDIA_SECONDS) encoderTimes.shift();
  const [since, before] = encoderTimes[0];
  const shares = {"read-hits": share(m.read_cache_hits, m.read_cache_queries),
    "encoded-hits": share(m.encoder_cache_hits, m.encoder_cache_queries),
    "encoder-share": share(Math.min((m.encode_s - before) / m.replicas, now - since), now - since)};
  for (const [id, value] of Object.entries(shares)) {
    showText(id, percent(value));
    byId(`${id.replace("-share", "")}-meter`).value = value || 0;
  }
  for (const [id, value] of Object.entries({
    "media-items": count(number), "media-kinds": kinds.join(", ") || "none yet",
    "fetch-time": each(m.fetch_s, m.fetches), "read-time": each(m.read_s, number),
    "read-queries": count(m.read_cache_queries), "encoded-queries": count(m.encoder_cache_queries),
    encoded: count(m.encoded), "encode-time": each(m.encode_s, m.encoded),
  })) showText(id, value);
}
function show(s) {
  showServerState(s);
  showStart(s);
  showText("version", s.version);
  if (s.uptime_s !== undefined) showText("uptime", duration(s.uptime_s));
  byId("chat-link").hidden = !s.has_chat_page;
  byId("figures").classList.toggle("stale", !("model" in s)); // there are none before the first start
  if ("model" in s) showEngine(s);
  showMedia(s.media);
  showCards(s.cards);
}

let timer = 0, isAsking = false;
async function ask() {
  clearTimeout(timer);
  if (isAsking || document.hidden) return;
  isAsking = true;
  try {
    const response = await fetch("status.json", {
      headers: ApiKey.headers(), cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    if (response.status === 401) {
      askForKey();
      return;
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    const status = await response.json();
    keyForm.hide();
    byId("figures").hidden = false;
    byId("forget").hidden = ApiKey.get() === null;
    show(status);
  } catch {
    showUnreachable();
    byId("figures").classList.add("stale");
  } finally {
    isAsking = false;
  }
  timer = setTimeout(ask, POLL_MS);
}

function askForKey() {
  showLocked();
  document.querySelector(".start").classList.add("over");
  byId("figures").hidden = true;
  byId("forget").hidden = true;
  keyForm.ask();
}

const keyForm = new KeyForm(ask);
byId("forget").addEventListener("click", () => {
  ApiKey.forget();
  ask();
});
document.addEventListener("visibilitychange", ask);
ask();
