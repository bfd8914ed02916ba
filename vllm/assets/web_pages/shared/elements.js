// Elements of the page, found and made. Text is only ever set as text: no string becomes HTML.

const byId = (id) => document.getElementById(id);

// A new element. Properties that begin with "on" are listeners, those with a hyphen or unknown to
// the element are attributes; false, null and undefined are left out.
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && !name.includes("-")) made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// Writes a text into the element with this id, where it is another one than before.
function showText(id, value) {
  const text = value === null || value === undefined ? "–" : String(value);
  if (byId(id).textContent !== text) byId(id).textContent = text;
}
