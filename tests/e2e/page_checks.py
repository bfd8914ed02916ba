"""Checks for every page: all text is readable, and a screen reader finds a name for each
element.
"""

LOWEST_CONTRAST = """(() => {
  const light = (c) => {
    const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (!c.startsWith('rgba')) return c;
    }
  };
  const ratios = [...document.querySelectorAll('body *')]
    .filter((e) => e.checkVisibility() && !e.disabled && !e.closest('select'))
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((e) => [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => b - a))
    .map(([a, b]) => (a + 0.05) / (b + 0.05));
  return Math.min(...ratios);
})()"""
"""The least ratio of luminances between a text and its background (WCAG 2, AA asks for 4.5)."""

NAMELESS = """[...document.querySelectorAll(
    'meter, svg, progress, input, select, textarea, button, dialog, [role=region]')]
  .filter((e) => !e.ariaLabel && !e.getAttribute('aria-labelledby') && !e.labels?.length
    && !(e.tagName === 'BUTTON' && e.textContent.trim()))
  .map((e) => e.outerHTML)"""
"""Elements that a screen reader could not name."""
