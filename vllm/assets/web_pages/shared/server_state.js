// What the server does at the moment, in words.

// The phase of a start with its progress, or what another state means.
function describeState(s) {
  const words = {ready: "ready for requests", draining: "finishing what runs, taking nothing new",
    paused: "asleep or drained, taking nothing new",
    failed: "the engine has failed; see the log of the server"};
  const steps = s.state === "starting" && s.total ? ` (${s.done} of ${s.total})` : "";
  return words[s.state] || s.phase + steps;
}

// Shows state and progress in #state, #phase, #eta and #progress.
function showServerState(s) {
  const isStarting = s.state === "starting", progress = byId("progress");
  byId("state").dataset.state = s.state;
  showText("state", s.state);
  showText("phase", describeState(s));
  showText("eta", isStarting && s.eta_s !== null && s.eta_s !== undefined
    ? `about ${duration(s.eta_s)} left` : "");
  if (isStarting && s.total) {
    progress.max = s.total;
    progress.value = s.done;
  } else progress.removeAttribute("value");
}

// No answer: the connection or the server is gone.
function showUnreachable() {
  byId("state").dataset.state = "unreachable";
  showText("state", "unreachable");
  showText("phase", "no answer from the server; asking again");
  showText("eta", "");
}

// The server wants a key first.
function showLocked() {
  byId("state").dataset.state = "locked";
  showText("state", "locked");
  showText("phase", "");
  showText("eta", "");
}
