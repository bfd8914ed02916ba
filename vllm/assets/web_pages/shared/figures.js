// How numbers, shares and times are written. What is not known is a dash.

const count = (n) => n === null || n === undefined ? null : n.toLocaleString("en");
const percent = (share) => share === null || share === undefined ? null : (100 * share).toFixed(1);
const rate = (n) => n === null ? null : n < 100 ? n.toFixed(1) : count(Math.round(n));

function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  return s < 100 ? `${s.toFixed(s < 10 ? 2 : 1)} s` : duration(s);
}

function duration(s) {
  const minutes = Math.floor(s / 60), hours = Math.floor(minutes / 60);
  if (s < 60) return `${Math.floor(s)} s`;
  if (hours < 1) return `${minutes} min ${Math.floor(s % 60)} s`;
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
