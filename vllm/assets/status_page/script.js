"use strict";
// Asks for status.json once a second while the page is seen, and writes what it says into the page.
// Only textContent and attributes are set: nothing that a client sent is ever read as HTML.
(() => {
  const POLL_MS = 1000, TIMEOUT_MS = 5000, KEY = "vllm-status-key", RATE_SECONDS = 5;
  const SVG = "http://www.w3.org/2000/svg";
  const at = (id) => document.getElementById(id);
  const text = (id, value) => {
    const value_ = value === null || value === undefined ? "–" : String(value);
    if (at(id).textContent !== value_) at(id).textContent = value_;
  };

  const count = (n) => n === null || n === undefined ? null : n.toLocaleString("en");
  const percent = (share) => share === null || share === undefined ? null : (100 * share).toFixed(1);
  const rate = (n) => n === null ? null : n < 100 ? n.toFixed(1) : count(Math.round(n));
  function seconds(s) {
    if (s === null || s === undefined) return "–";
    if (s < 1) return `${Math.round(1000 * s)} ms`;
    return s < 100 ? `${s.toFixed(2)} s` : duration(s);
  }
  function duration(s) {
    const minutes = Math.floor(s / 60), hours = Math.floor(minutes / 60);
    if (s < 60) return `${Math.floor(s)} s`;
    if (hours < 1) return `${minutes} min ${Math.floor(s % 60)} s`;
    return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  }
  const meanOfLast = (rates) => rates.slice(-RATE_SECONDS).reduce((a, b) => a + b, 0) / RATE_SECONDS;

  function drawLine(id, rates, name) {
    const svg = at(id), highest = Math.max(...rates, 1);
    const points = rates.map((value, x) => `${x},${(39 - 38 * value / highest).toFixed(1)}`);
    const shapes = {area: `M0,40 L${points.join(" L")} L${rates.length - 1},40 Z`, line: `M${points.join(" L")}`};
    for (const [kind, path] of Object.entries(shapes)) {
      let shape = svg.querySelector("." + kind);
      if (!shape) {
        shape = document.createElementNS(SVG, "path");
        shape.setAttribute("class", kind);
        svg.append(shape);
      }
      shape.setAttribute("d", path);
    }
    svg.setAttribute("aria-label",
      `${name} tokens per second in the last ${rates.length} seconds, at most ${count(Math.max(...rates))}`);
  }

  function cell(value, kind) {
    const td = document.createElement("td");
    td.textContent = value;
    if (kind) td.className = kind;
    return td;
  }
  let shownRecent = "";
  function showRecent(requests) {
    const key = JSON.stringify(requests);
    if (key === shownRecent || !requests.length) return;
    shownRecent = key;
    at("recent").replaceChildren(...requests.map((r) => {
      const row = document.createElement("tr"), id = cell(r.id);
      id.title = r.id;
      const known = ["stop", "length", "abort", "error"].includes(r.reason) ? r.reason : "";
      row.append(id, cell(r.reason, known), cell(seconds(r.queue_s), "n"), cell(seconds(r.first_token_s), "n"),
        cell(seconds(r.total_s), "n"), cell(count(r.prompt_tokens), "n"), cell(count(r.cached_tokens), "n"),
        cell(count(r.generation_tokens), "n"));
      return row;
    }));
  }

  function showState(state) {
    at("state").dataset.state = state;
    text("state", state);
    at("figures").classList.toggle("stale", state === "unreachable");
  }
  function showStart(s) {
    const isStarting = s.state === "starting", progress = at("progress");
    document.querySelector(".start").classList.toggle("over", !isStarting);
    const steps = isStarting && s.total ? ` (${s.done} of ${s.total})` : "";
    const words = {ready: "ready for requests", draining: "finishing what runs, taking nothing new",
      failed: "the engine has failed; see the log of the server"};
    text("phase", words[s.state] || s.phase + steps);
    text("eta", isStarting && s.eta_s !== null ? `about ${duration(s.eta_s)} left` : "");
    if (isStarting && s.total) {
      progress.max = s.total;
      progress.value = s.done;
    } else progress.removeAttribute("value");
  }
  function showEngine(s) {
    text("model", s.model);
    text("about", `${s.device}, ${s.dtype}, up to ${count(s.max_model_len)} tokens`);
    for (const name of ["prompt", "generation"]) {
      text(`${name}-rate`, rate(meanOfLast(s[`${name}_rates`])));
      text(`${name}-total`, count(s[`${name}_tokens`]));
      drawLine(`${name}-line`, s[`${name}_rates`], name === "prompt" ? "Prompt" : "Generated");
    }
    const hasBuckets = s.bucket_hits + s.bucket_misses > 0;
    for (const [id, value] of Object.entries({
      running: count(s.running), "max-running": count(s.max_num_seqs), waiting: count(s.waiting),
      preemptions: count(s.preemptions), kv: percent(s.kv_usage), "kv-blocks": count(s.kv_blocks),
      prefix: percent(s.prefix_hit_rate), padding: percent(s.padded_share),
      misses: hasBuckets ? count(s.bucket_misses) : null, hits: count(s.bucket_hits),
      compilations: count(s.late_compilations),
    })) text(id, value);
    at("running-meter").value = s.running / s.max_num_seqs;
    at("kv-meter").value = s.kv_usage;
    at("prefix-meter").value = s.prefix_hit_rate || 0;
    at("padding-meter").value = s.padded_share || 0;
    showRecent(s.recent);
  }
  function show(s) {
    showState(s.state);
    showStart(s);
    text("version", s.version);
    text("uptime", duration(s.uptime_s));
    if ("model" in s) showEngine(s);
  }

  let timer = 0, isAsking = false;
  async function ask() {
    clearTimeout(timer);
    if (isAsking || document.hidden) return;
    isAsking = true;
    const key = sessionStorage.getItem(KEY);
    try {
      const response = await fetch("status.json", {
        headers: key ? {Authorization: `Bearer ${key}`} : {}, cache: "no-store",
        signal: AbortSignal.timeout(TIMEOUT_MS),
      });
      if (response.status === 401) {
        askForKey(key !== null);
        return;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      const status = await response.json();
      at("key-form").hidden = true;
      at("figures").hidden = false;
      at("forget").hidden = key === null;
      show(status);
    } catch (error) {
      showState("unreachable");
      text("phase", "no answer from the server; asking again");
    } finally {
      isAsking = false;
    }
    timer = setTimeout(ask, POLL_MS);
  }

  function askForKey(wasWrong) {
    sessionStorage.removeItem(KEY);
    showState("locked");
    document.querySelector(".start").classList.add("over");
    text("phase", "");
    text("eta", "");
    text("key-error", wasWrong ? "The server did not take this key." : "");
    at("figures").hidden = true;
    at("forget").hidden = true;
    at("key-form").hidden = false;
    at("key").focus();
  }
  at("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = at("key").value.trim();
    at("key").value = "";
    if (/^[\x21-\x7e]+$/.test(key)) {
      sessionStorage.setItem(KEY, key);
      ask();
    } else text("key-error", "A key is of letters, digits and signs without spaces.");
  });
  at("forget").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    ask();
  });
  document.addEventListener("visibilitychange", ask);
  ask();
})();
